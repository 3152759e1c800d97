// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build k8s

package k8s_test

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// asNode is the environment variable with the file of the node that this process becomes.
const asNode = "OXIDE_CSI_TEST_K8S_NODE"

// guestInNode is the folder with the devices of a node's simulated instance. The manifests mount it unchanged.
const guestInNode = "/var/lib/oxide-csi/guest"

// node is a machine with a kubelet, in its own mount and PID namespaces. The data on its disk survives a stop.
type node struct {
	// Name is the name of the Node and of its instance.
	Name string
	// Address is where its kubelet listens, on the loopback device.
	Address string
	// Instance is the instance's ID on its rack, which its kubelet makes the provider ID. If it is empty, the Node gets no
	// provider ID. Guest is the folder with the instance's devices.
	Instance, Guest string
	// Rack is the value of the Node's rack label, Taint a taint with which the Node registers. Empty means none.
	Rack, Taint string
	// KubeletDir is the folder of its kubelet. Empty means kubelet's default.
	KubeletDir string
	// ShutdownGrace means that its kubelet has graceful node shutdown on.
	ShutdownGrace bool
	// Made has the files that all tests share, Dir those of the cluster, Programs the programs of Kubernetes.
	Made, Dir, Programs string

	// sim is the rack.
	sim  *simtest.Sim
	init *exec.Cmd
	// booted means that the rack created the namespaces, and mounted what belongs to them.
	booted bool
	// ended is closed when the machine is down. stopped means that the test has stopped it.
	ended   chan struct{}
	stopped bool
}

// newNode describes a node of an instance of a rack. It does not start the node.
func (c *cluster) newNode(sim *simtest.Sim, name, address string) *node {
	instance := sim.Instance(name)
	return &node{
		Name:     name,
		Address:  address,
		Instance: instance.ID,
		Guest:    instance.Guest,
		Made:     c.made,
		Dir:      c.dir,
		Programs: c.programs,
		sim:      sim,
	}
}

// readNode reads the node that this process becomes. If the rack has booted it as a guest, the guest's environment
// completes the node.
func readNode(file string) (n node, err error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return node{}, err
	}
	if err := json.Unmarshal(text, &n); err != nil {
		return node{}, err
	}
	if guest := os.Getenv("OXIDE_SIM_GUEST"); guest != "" {
		n.booted, n.Guest, n.Instance = true, guest, os.Getenv("OXIDE_SIM_INSTANCE_ID")
	}
	return n, nil
}

// save writes the node to a file for its next start.
func (n *node) save(t *testing.T) (file string) {
	t.Helper()
	text, err := json.Marshal(n)
	must(t, err)
	must(t, n.write("node.json", string(text)))
	return n.path("node.json")
}

// start boots the node, and returns before it is ready. Its instance must run.
func (n *node) start(t *testing.T) {
	t.Helper()
	file := n.save(t)
	log, err := os.Create(n.path("console.log"))
	must(t, err)
	n.init = exec.Command(os.Args[0])
	n.init.Env = append(os.Environ(), asNode+"="+file)
	n.init.Stdout, n.init.Stderr = log, log
	n.init.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWPID}
	must(t, n.init.Start())
	must(t, log.Close())
	init, ended := n.init, make(chan struct{})
	go func() { _ = init.Wait(); close(ended) }() // its console says how it ended
	n.ended, n.stopped = ended, false
}

// stop kills all processes of the node at once, unless it is stopped already. Its filesystems are unmounted with its
// namespaces. For a power cut, cut the power of its instance first.
func (n *node) stop(t *testing.T) {
	t.Helper()
	if n.stopped {
		return
	}
	n.stopped = true
	select {
	case <-n.ended:
		t.Errorf("node %s ended too early", n.Name)
	default:
		must(t, n.init.Process.Kill())
		<-n.ended
	}
}

// path returns a path on the node's disk.
func (n *node) path(name ...string) string {
	return filepath.Join(append([]string{n.Dir, "nodes", n.Name}, name...)...)
}

// logs returns the ends of the node's logs.
func (n *node) logs() string {
	var text strings.Builder
	for _, name := range []string{n.path("console.log"), n.path("dbus-daemon.log"), n.path("containerd.log"), n.path("kubelet.log"), filepath.Join(n.Guest, "console")} {
		said, err := os.ReadFile(name)
		fmt.Fprintf(&text, "%s: %v\n%s\n", name, err, said[max(0, len(said)-3000):])
	}
	return text.String()
}

// The rest runs in the node, as the first process of its namespaces.

const containerdSocket = "/run/containerd/containerd.sock"

// boot starts the node's programs, and returns when one of them has ended. None of them should end.
func (n *node) boot() error {
	if err := n.furnish(); err != nil {
		return err
	}
	if err := errors.Join(n.configureContainerd(), n.configureKubelet()); err != nil {
		return err
	}
	systemd := &manager{pods: n.cgroups()}
	if n.booted {
		if err := n.startBus(systemd); err != nil {
			return err
		}
	}
	containerd, err := n.run("/usr/bin/containerd", "--config="+n.path("containerd.toml"))
	if err != nil {
		return err
	}
	if err := n.images(); err != nil {
		return err
	}
	for starts := 1; ; {
		kubelet, err := n.run(
			filepath.Join(n.Programs, "kubelet"),
			"--config="+n.path("kubelet.yaml"),
			"--kubeconfig="+n.path("kubeconfig"),
			"--root-dir="+n.kubeletDir(),
			"--cert-dir="+n.path(
				"pki",
			),
			"--hostname-override="+n.Name,
			"--node-ip="+n.Address,
			"--node-labels="+n.labels(),
			"--v=2",
		)
		if err != nil {
			return err
		}
		systemd.kubelet.Store(int64(kubelet))
		ended, status, err := firstOf(containerd, kubelet)
		switch {
		case err != nil:
			return err
		case ended == kubelet && systemd.stopping.Load():
			_, _, err := firstOf(containerd)
			return err
		case ended == kubelet && starts < maxKubeletStarts:
			starts++
			time.Sleep(time.Second)
		default:
			return fmt.Errorf(
				"process %d has ended: status %d; containerd is %d, kubelet is %d",
				ended,
				status,
				containerd,
				kubelet,
			)
		}
	}
}

// maxKubeletStarts is how often kubelet is started. It exits if containerd is not ready yet, which happens on a node
// that boots again.
const maxKubeletStarts = 5

// firstOf waits until one of these processes has ended. It also reaps orphans.
func firstOf(pids ...int) (ended int, status syscall.WaitStatus, err error) {
	for {
		pid, err := syscall.Wait4(-1, &status, 0, nil)
		if err != nil && !errors.Is(err, syscall.EINTR) {
			return 0, 0, err
		}
		if slices.Contains(pids, pid) {
			return pid, status, nil
		}
	}
}

func (n *node) labels() string {
	if n.Rack == "" {
		return ""
	}
	return "oxide.computer/rack=" + n.Rack
}

// requiredFolders are folders that manifests and kubelet expect. If one is missing on the machine it is created, and
// not removed later: removing it could remove the mounts of another run.
func (n *node) requiredFolders() []string {
	return []string{n.kubeletDir(), "/var/lib/oxide-csi", "/var/log"}
}

func (n *node) kubeletDir() string { return cmp.Or(n.KubeletDir, "/var/lib/kubelet") }

// furnish turns the namespaces into a machine: its mounts stay private, and kubelet's folders at fixed paths are on
// the node's disk.
func (n *node) furnish() error {
	var errs []error
	if !n.booted {
		errs = append(errs,
			mount("", "/", "", syscall.MS_REC|syscall.MS_PRIVATE),
			mount("", "/", "", syscall.MS_REC|syscall.MS_SHARED), // kubelet needs its folder shared with its pods
			mount("proc", "/proc", "proc", 0))
	}
	errs = append(errs, mount("tmpfs", "/run", "tmpfs", 0))
	for _, place := range n.requiredFolders() {
		errs = append(errs, os.MkdirAll(n.path(place), 0o755), mount(n.path(place), place, "", syscall.MS_BIND))
	}
	errs = append(errs, mount(n.Guest, guestInNode, "", syscall.MS_BIND))
	errs = append(errs, removeGroups(n.cgroups())) // from before the restart; kubelet would take them for running pods
	errs = append(errs, eachHierarchy(n.cgroups(), func(group, parent string) error {
		if err := os.Mkdir(group, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
			return err
		}
		return inherit(group, parent)
	}))
	return errors.Join(errs...)
}

// cgroups returns the name of the control groups of kubelet's pods.
func (n *node) cgroups() string { return filepath.Join(cgroups(n.Made), n.Name) }

func (n *node) configureContainerd() error {
	return errors.Join(
		// Nodes share a bridge, and so its address range.
		n.write(
			"cni/pods.conflist",
			fmt.Sprintf(
				`{"cniVersion":"1.0.0","name":"pods","plugins":[{"type":"bridge","bridge":"pods0","isGateway":true,"ipMasq":false,
"ipam":{"type":"host-local","dataDir":%q,"ranges":[[{"subnet":"10.244.0.0/24"}]],"routes":[{"dst":"10.96.0.0/24"}]}}]}`,
				filepath.Join(n.Dir, "addresses"),
			),
		),
		n.write("containerd.toml", fmt.Sprintf(`version = 2
root = %q
state = "/run/containerd"
[grpc]
  address = %q
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = %q
  restrict_oom_score_adj = true # not every machine lets its root change it
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = %q
`, n.path("containerd"), containerdSocket, pauseImage, n.path("cni"))),
	)
}

func (n *node) configureKubelet() error {
	also := ""
	if n.Instance != "" {
		also += fmt.Sprintf("providerID: oxide://%s\n", n.Instance)
	}
	if n.Taint != "" {
		also += fmt.Sprintf("registerWithTaints: [{key: %q, effect: NoExecute}]\n", n.Taint)
	}
	if n.ShutdownGrace {
		also += "shutdownGracePeriod: 10s\nshutdownGracePeriodCriticalPods: 5s\n"
	}
	// These settings are for machines with cgroup version 1, for noticing detached volumes and changed Secrets within
	// seconds, and for keeping images, because they cannot be pulled again. The cluster has no DNS.
	return errors.Join(
		n.write("resolv.conf", ""),
		n.write("kubelet.yaml", fmt.Sprintf(`apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
address: %[1]s
healthzBindAddress: %[1]s
containerRuntimeEndpoint: unix://%[2]s
cgroupDriver: cgroupfs
cgroupRoot: /%[3]s
failCgroupV1: false
failSwapOn: false
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
resolvConf: %[4]s
clusterDNS: [10.96.0.10]
makeIPTablesUtilChains: false
volumePluginDir: %[6]s/volumeplugins
nodeStatusUpdateFrequency: 2s
syncFrequency: 10s
imageGCHighThresholdPercent: 100
evictionHard: {memory.available: 100Mi, nodefs.available: 1%%, imagefs.available: 1%%, nodefs.inodesFree: 1%%}
%[5]s`, n.Address, containerdSocket, n.cgroups(), n.path("resolv.conf"), also, n.kubeletDir())),
		n.write("kubeconfig", kubeconfig(n.Dir, "system:node:"+n.Name)),
	)
}

// images imports all images into containerd, once.
func (n *node) images() error {
	ctr := func(args ...string) error {
		_, err := command("ctr", append([]string{"--address=" + containerdSocket, "--namespace=k8s.io"}, args...)...)
		return err
	}
	for deadline := time.Now().Add(waitLimit); ctr("version") != nil; time.Sleep(100 * time.Millisecond) {
		if time.Now().After(deadline) {
			return errors.New("containerd does not answer")
		}
	}
	done := n.path("images.done")
	if _, err := os.Stat(done); err == nil {
		return nil
	}
	images, err := filepath.Glob(filepath.Join(n.Made, "images/*.tar"))
	if err != nil {
		return err
	}
	for _, image := range images {
		args := []string{"images", "import"}
		if name, released := strings.CutSuffix(filepath.Base(image), ".oci.tar"); released {
			args = append(args, "--digests", "--base-name=docker.io/oxidecomputer/"+name)
		}
		if err := ctr(append(args, image)...); err != nil {
			return err
		}
	}
	return os.WriteFile(done, nil, 0o600)
}

func (n *node) write(name, text string) error {
	if err := os.MkdirAll(filepath.Dir(n.path(name)), 0o755); err != nil {
		return err
	}
	return os.WriteFile(n.path(name), []byte(text), 0o600)
}

// run starts a program.
func (n *node) run(program string, args ...string) (pid int, err error) {
	log, err := os.OpenFile(n.path(filepath.Base(program)+".log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return 0, err
	}
	cmd := exec.Command(program, args...)
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + n.path()}
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		return 0, err
	}
	return cmd.Process.Pid, log.Close()
}

func mount(source, target, kind string, flags uintptr) error {
	if err := os.MkdirAll(target, 0o755); err != nil {
		return err
	}
	if err := syscall.Mount(source, target, kind, flags, ""); err != nil {
		return fmt.Errorf("mount %s: %w", target, err)
	}
	return nil
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build systemd

package systemd_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/oxidecomputer/oxide-csi-plugin/test/await"
	"github.com/oxidecomputer/oxide-csi-plugin/test/pages"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

const deploy = "../../deploy/systemd"

// waitLimit is how long a test waits for a command or an event. CI runs virtual machines beside these tests.
const waitLimit = 3 * time.Minute

// Upper bounds of the exposure levels of systemd-analyze security, in tenths. docs/how-to/harden.md names them.
var exposure = map[string]int{"oxide-csi-controller": 12, "oxide-csi-node": 51, "oxide-volume@data": 28}

func TestSystemd(t *testing.T) {
	m := newMachine(t)
	m.install()
	for _, part := range []struct {
		name string
		run  func()
	}{
		{"analyze", m.analyze},
		{"confined", m.confined},
		{"registered", m.registered},
		{"volumes", m.volumes},
		{"killed", m.killed},
		{"a volume as a unit", m.unit},
		{"a service that needs a volume, with the rack away", m.dependent},
		{"an encrypted volume", m.encrypted},
		{"wrong setting", m.wrongSetting},
		{"stop", m.stop},
	} {
		t.Log(part.name)
		part.run()
	}
}

// machine is a set of namespaces with systemd as first process. It can be booted again with the files that it has.
type machine struct {
	t   *testing.T
	dir string
	// programs are the built programs below dir.
	programs simtest.Programs
	// sim is the machine's rack, and instance its name there. A host without a rack has neither.
	sim      *simtest.Sim
	instance string
	// init is the process ID of systemd.
	init int
	// script is the process that started systemd, ended is closed when both have ended, and output says why.
	script *exec.Cmd
	ended  chan struct{}
	output *bytes.Buffer
	csi.ControllerClient
	csi.NodeClient
}

// newMachine boots an instance node-a of a rack with hot-plug.
func newMachine(t *testing.T) *machine {
	m := newHost(t)
	m.startRack("node-a", "--hotplug")
	m.boot()
	m.clone()
	return m
}

// newHost returns a machine that is no instance of a rack. It is not booted.
func newHost(t *testing.T) *machine {
	if os.Geteuid() != 0 {
		t.Skip("needs root: a systemd that starts services")
	}
	m := &machine{t: t}
	var err error
	m.dir, err = os.MkdirTemp("", "systemd")
	must(t, err)
	t.Cleanup(func() { must(t, os.RemoveAll(m.dir)) })
	changes := filepath.Join(m.dir, "changes")
	must(t, os.Mkdir(changes, 0o755))
	must(t, unix.Mount("tmpfs", changes, "tmpfs", 0, "mode=755"))
	t.Cleanup(func() { must(t, unix.Unmount(changes, 0)) })
	m.programs, err = simtest.Build(m.dir, false) // without the race detector, as released
	must(t, err)
	return m
}

// startRack starts a rack, and makes the machine this instance of it.
func (m *machine) startRack(instance string, also ...string) {
	m.instance = instance
	args := append([]string{"--guest-root=" + filepath.Join(m.dir, "guests"), "--instances=" + instance}, also...)
	var err error
	m.sim, err = simtest.StartSim(m.programs.Sim, nil, args...)
	must(m.t, err)
	m.t.Cleanup(func() { must(m.t, m.sim.Stop()) }) // fails if anything is left
}

// clone copies the part of the repository that pages use, with the built program, to /root/clone.
func (m *machine) clone() {
	const units = "/root/clone/deploy/systemd"
	must(m.t, os.MkdirAll(m.in(units), 0o755))
	must(m.t, os.CopyFS(m.in(units), os.DirFS(deploy)))
	m.run("install", "-D", m.programs.Plugin, "/root/clone/bin/oxide-csi")
}

// shell runs a script in /root/clone, as a reader of a page does.
func (m *machine) shell(script string, environ ...string) string {
	m.t.Helper()
	return m.run(slices.Concat([]string{"env", "--chdir=/root/clone"}, environ,
		[]string{"bash", "-eu", "-o", "pipefail", "-c", script})...)
}

// boot starts systemd, and waits until it has started its own services.
func (m *machine) boot() {
	script, err := filepath.Abs("boot.sh")
	must(m.t, err)
	if m.script == nil { // The rack's instance ends after the machine.
		m.t.Cleanup(func() {
			journal := ""
			if m.t.Failed() {
				journal, _ = m.try("journalctl", "--no-pager", "--lines=60")
			}
			m.kill() // before the output is read: until then systemd may write to it
			if m.t.Failed() {
				m.t.Logf("%s\n%s", m.output, journal)
			}
			m.removeCgroups()
		})
	}
	m.output, m.ended = new(bytes.Buffer), make(chan struct{})
	m.script = exec.Command(script, m.dir)
	m.script.Dir = "/"
	m.script.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	m.script.Stdout, m.script.Stderr = m.output, m.output
	must(m.t, m.script.Start())
	go func(cmd *exec.Cmd, ended chan struct{}) { _ = cmd.Wait(); close(ended) }(
		m.script,
		m.ended,
	) // the output says how it ended
	m.eventually("systemd runs", func() bool {
		if m.down() {
			m.t.Fatalf("systemd has ended: %s", m.output)
		}
		pid := m.script.Process.Pid
		children, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", pid, pid))
		m.init, _ = strconv.Atoi(strings.TrimSpace(string(children)))
		state, _ := m.try("systemctl", "is-active", "basic.target")
		return m.init != 0 && strings.TrimSpace(state) == "active"
	})
}

// down reports whether systemd has ended, and every process of the machine with it.
func (m *machine) down() bool {
	select {
	case <-m.ended:
		return true
	default:
		return false
	}
}

// bootID is the kernel's ID of this boot, as the machine sees it.
func (m *machine) bootID() string {
	text, err := os.ReadFile(m.in("/proc/sys/kernel/random/boot_id"))
	must(m.t, err)
	return strings.TrimSpace(string(text))
}

// kill ends all processes of the machine at once.
func (m *machine) kill() {
	_ = m.script.Process.Kill() // this ends everything in its namespaces
	<-m.ended
}

// removeCgroups removes the control groups that systemd leaves below /sys/fs/cgroup.
func (m *machine) removeCgroups() {
	roots, err := filepath.Glob("/sys/fs/cgroup/*/" + filepath.Base(m.dir))
	must(m.t, err)
	for _, root := range append(roots, "/sys/fs/cgroup/"+filepath.Base(m.dir)) {
		var folders []string
		_ = filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
			if err == nil && entry.IsDir() {
				folders = append(folders, path)
			}
			return nil // already gone
		})
		for _, folder := range slices.Backward(folders) {
			m.eventually("no process is in "+folder, func() bool {
				err := os.Remove(folder)
				return err == nil || errors.Is(err, os.ErrNotExist)
			})
		}
	}
}

// in returns the path in this process's namespace of a file on the machine.
func (m *machine) in(path string) string { return fmt.Sprintf("/proc/%d/root%s", m.init, path) }

// try runs a command on the machine.
func (m *machine) try(args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), waitLimit)
	defer cancel()
	cmd := exec.CommandContext(
		ctx,
		"nsenter",
		append([]string{"--target", strconv.Itoa(m.init), "--mount", "--pid", "--uts", "--ipc", "--cgroup"}, args...)...)
	cmd.Env = []string{"PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C"}
	output, err := cmd.CombinedOutput()
	return string(output), err
}

func (m *machine) run(args ...string) string {
	m.t.Helper()
	output, err := m.try(args...)
	if err != nil {
		m.t.Fatalf("%s: %v: %s", strings.Join(args, " "), err, output)
	}
	return output
}

// property returns a property of a service.
func (m *machine) property(service, name string) string {
	m.t.Helper()
	return strings.TrimSpace(m.run("systemctl", "show", "--property="+name, "--value", service))
}

func (m *machine) write(path, text string, mode os.FileMode) {
	must(m.t, os.MkdirAll(filepath.Dir(m.in(path)), 0o755))
	must(m.t, os.WriteFile(m.in(path), []byte(text), mode))
}

// install follows docs/how-to/bare-host.md. A drop-in names the simulated guest and the type of its devices.
func (m *machine) install() {
	for range 2 { // the second time as an upgrade
		m.shell("deploy/systemd/install.sh bin/oxide-csi controller node")
	}
	m.write(
		"/etc/oxide-csi/controller.env",
		fmt.Sprintf("OXIDE_HOST=%s\nOXIDE_PROJECT=%s\nOXIDE_TOKEN_FILE=/etc/oxide-csi/token\nOXIDE_CSI_CLUSTER_ID=test\n",
			m.sim.Host, m.sim.Project),
		0o640,
	)
	m.write("/etc/oxide-csi/token", m.sim.Token+"\n", 0o640)
	m.run("chgrp", "oxide-csi", "/etc/oxide-csi/token")
	m.write("/etc/oxide-csi/node.env", "OXIDE_CSI_KUBELET_REGISTRATION_DIR=/var/lib/kubelet/plugins_registry\n", 0o640)
	must(m.t, os.MkdirAll(m.in("/var/lib/kubelet/plugins_registry"), 0o755)) // on a real node the kubelet creates it
	m.seeGuest()
	m.run("systemctl", "enable", "--now", "oxide-csi-controller", "oxide-csi-node")
	m.ControllerClient = csi.NewControllerClient(m.dial("controller"))
	m.NodeClient = csi.NewNodeClient(m.dial("node"))
}

// seeGuest shows the node plugin the devices of the simulated instance, with a drop-in that also names their type.
func (m *machine) seeGuest() {
	guest := m.sim.Instance(m.instance).Guest
	m.write("/etc/systemd/system/oxide-csi-node.service.d/guest.conf", "[Service]\nDeviceAllow=block-loop rw\n"+
		"Environment=OXIDE_CSI_DEV_ROOT="+guest+"/dev OXIDE_CSI_SYS_ROOT="+guest+"/sys\n", 0o644)
	m.run("systemctl", "daemon-reload")
}

// dial connects to a plugin's socket, and waits until the plugin is ready.
func (m *machine) dial(service string) *grpc.ClientConn {
	conn, err := grpc.NewClient(
		"unix://"+m.in("/run/oxide-csi/"+service+"/csi.sock"),
		grpc.WithTransportCredentials(insecure.NewCredentials()),
	)
	must(m.t, err)
	m.t.Cleanup(func() { must(m.t, conn.Close()) })
	m.ready(service, conn)
	return conn
}

func (m *machine) ready(service string, conn *grpc.ClientConn) {
	m.eventually(service+" is ready", func() bool {
		resp, err := csi.NewIdentityClient(conn).Probe(m.t.Context(), &csi.ProbeRequest{})
		return err == nil && resp.GetReady().GetValue()
	})
}

// registered checks that a kubelet would find the plugin.
func (m *machine) registered() {
	m.eventually("there is a socket for the kubelet", func() bool {
		sockets, err := filepath.Glob(m.in("/var/lib/kubelet/plugins_registry/*.sock"))
		return err == nil && len(sockets) == 1
	})
}

// analyze checks the units with systemd-analyze security.
func (m *machine) analyze() {
	for service, bound := range exposure {
		if warnings := m.run("systemd-analyze", "verify", "--man=no", service+".service"); warnings != "" {
			m.t.Errorf("%s: %s", service, warnings)
		}
		m.run("systemd-analyze", "security", "--threshold="+strconv.Itoa(bound), service+".service")
	}
}

// confined checks the restrictions of the processes as the kernel reports them.
func (m *machine) confined() {
	uid := strings.TrimSpace(m.run("id", "-u", "oxide-csi"))
	for service, want := range map[string][]string{
		"oxide-csi-controller": {"Uid:\t" + uid + "\t" + uid, "CapEff:\t0000000000000000", "CapBnd:\t0000000000000000", "NoNewPrivs:\t1", "Seccomp:\t2"},
		"oxide-csi-node":       {"Uid:\t0\t0", "CapEff:\t000000000028001f", "CapBnd:\t000000000028001f", "NoNewPrivs:\t1", "Seccomp:\t2"},
	} {
		status, err := os.ReadFile(m.in("/proc/" + m.property(service, "MainPID") + "/status"))
		must(m.t, err)
		for _, line := range want {
			if !strings.Contains(string(status), "\n"+line) {
				m.t.Errorf("%s: no %q in\n%s", service, line, status)
			}
		}
	}
	for path, want := range map[string]string{
		"/run/oxide-csi/controller":          "oxide-csi:oxide-csi 750",
		"/run/oxide-csi/controller/csi.sock": "oxide-csi:oxide-csi 660",
		"/run/oxide-csi/node":                "root:root 750",
		"/run/oxide-csi/node/csi.sock":       "root:root 660",
		"/etc/oxide-csi":                     "root:oxide-csi 750",
		"/var/lib/oxide-csi":                 "root:root 700",
	} {
		if got := strings.TrimSpace(m.run("stat", "--format=%U:%G %a", path)); got != want {
			m.t.Errorf("%s is %s, want %s", path, got, want)
		}
	}
}

// volume is a volume during its life.
type volume struct {
	*csi.Volume
	capability      *csi.VolumeCapability
	node            string
	publish         map[string]string
	staging, target string
}

// volumes runs a volume's life, to check that the units leave enough system calls, capabilities and devices.
func (m *machine) volumes() {
	for _, filesystem := range []string{"ext4", "xfs", "btrfs"} {
		v := m.mount(filesystem)
		m.write(v.target+"/file", filesystem, 0o600)
		m.unmount(v)
	}
}

func (m *machine) mount(filesystem string) *volume {
	m.t.Helper()
	ctx := m.t.Context()
	v := &volume{staging: "/srv/staging", target: "/srv/data", capability: &csi.VolumeCapability{
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
		AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{FsType: filesystem}},
	}}
	created, err := m.CreateVolume(ctx, &csi.CreateVolumeRequest{
		Name:               filesystem,
		CapacityRange:      &csi.CapacityRange{RequiredBytes: 1 << 30},
		VolumeCapabilities: []*csi.VolumeCapability{v.capability},
		Parameters:         map[string]string{"rootMode": "0750", "rootUid": "65534"},
	})
	must(m.t, err)
	v.Volume = created.Volume
	info, err := m.NodeGetInfo(ctx, &csi.NodeGetInfoRequest{})
	must(m.t, err)
	v.node = info.NodeId
	published, err := m.ControllerPublishVolume(ctx, &csi.ControllerPublishVolumeRequest{
		VolumeId: v.VolumeId, NodeId: v.node, VolumeCapability: v.capability, VolumeContext: v.VolumeContext,
	})
	must(m.t, err)
	v.publish = published.PublishContext
	must(m.t, os.MkdirAll(m.in(v.staging), 0o755))
	_, err = m.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{
		VolumeId:          v.VolumeId,
		PublishContext:    v.publish,
		StagingTargetPath: v.staging,
		VolumeCapability:  v.capability,
		VolumeContext:     v.VolumeContext,
	})
	must(m.t, err)
	_, err = m.NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{
		VolumeId:          v.VolumeId,
		PublishContext:    v.publish,
		StagingTargetPath: v.staging,
		TargetPath:        v.target,
		VolumeCapability:  v.capability,
		VolumeContext:     v.VolumeContext,
	})
	must(m.t, err)
	m.mounted(v, true)
	return v
}

func (m *machine) unmount(v *volume) {
	m.t.Helper()
	ctx := m.t.Context()
	_, err := m.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: v.VolumeId, TargetPath: v.target})
	must(m.t, err)
	_, err = m.NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{VolumeId: v.VolumeId, StagingTargetPath: v.staging})
	must(m.t, err)
	m.mounted(v, false)
	_, err = m.ControllerUnpublishVolume(ctx, &csi.ControllerUnpublishVolumeRequest{VolumeId: v.VolumeId, NodeId: v.node})
	must(m.t, err)
	_, err = m.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: v.VolumeId})
	must(m.t, err)
}

// mounted checks the machine's mount table. A plugin in a mount namespace of its own would not change it.
func (m *machine) mounted(v *volume, want bool) {
	m.t.Helper()
	mounts, err := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", m.init))
	must(m.t, err)
	for _, path := range []string{v.staging, v.target} {
		if strings.Contains(string(mounts), " "+path+" ") != want {
			m.t.Errorf("%s: mounted is %t, want %t", path, !want, want)
		}
	}
}

// mountedAs checks the type and an option of a mount in the machine's mount table.
func (m *machine) mountedAs(path, filesystem, option string) {
	m.t.Helper()
	mounts, err := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", m.init))
	must(m.t, err)
	for line := range strings.Lines(string(mounts)) {
		fields := strings.Fields(line)
		if fields[4] != path {
			continue
		}
		if !strings.Contains(line, " - "+filesystem+" ") || !slices.Contains(strings.Split(fields[5], ","), option) {
			m.t.Errorf("%s is not mounted as %s with %s: %s", path, filesystem, option, line)
		}
		return
	}
	m.t.Errorf("%s is not mounted", path)
}

// killed checks that a plugin is started again after it was killed, and after Go's runtime ended it. A plugin that has
// lost its socket makes it again, and mounts survive.
func (m *machine) killed() {
	v := m.mount("ext4")
	for _, service := range []string{"controller", "node"} {
		for _, signal := range []string{"KILL", "QUIT"} {
			m.startedAgain(service, func() { m.run("systemctl", "kill", "--signal="+signal, "oxide-csi-"+service) })
		}
		before, path := m.property("oxide-csi-"+service, "MainPID"), m.in("/run/oxide-csi/"+service+"/csi.sock")
		must(m.t, os.Remove(path))
		m.eventually(service+" has its socket again", func() bool { _, err := os.Lstat(path); return err == nil })
		m.dial(service)
		if now := m.property("oxide-csi-"+service, "MainPID"); now != before {
			m.t.Errorf("%s was started again for its socket", service)
		}
	}
	m.mounted(v, true)
	m.unmount(v)
}

// startedAgain calls do, and waits until another process of the plugin answers on its socket.
func (m *machine) startedAgain(service string, do func()) {
	m.t.Helper()
	before := m.property("oxide-csi-"+service, "MainPID")
	do()
	m.eventually(service+" is back", func() bool {
		now := m.property("oxide-csi-"+service, "MainPID")
		return now != "0" && now != before
	})
	m.dial(service)
}

// unit checks that a volume's unit mounts it with the flags of its file, keeps it mounted while the plugins restart,
// and unmounts it when stopped.
func (m *machine) unit() {
	id := strings.TrimSpace(m.run("oxide-csi", "volume", "create", "data", "--size=1GiB"))
	m.write("/etc/oxide-csi/volumes/data.env",
		"TARGET=/srv/by-hand\nMOUNT_FLAGS=--fs-type=xfs --option=noatime\n", 0o640)
	m.run("systemctl", "enable", "--now", "oxide-volume@data")
	v := &volume{staging: "/srv/by-hand", target: "/srv/by-hand"}
	m.mounted(v, true)
	m.mountedAs(v.target, "xfs", "noatime")
	m.write(v.target+"/file", "by hand", 0o600)
	m.run("systemctl", "restart", "oxide-csi-controller", "oxide-csi-node")
	m.mounted(v, true)
	m.dial("controller")
	m.dial("node")
	m.run("systemctl", "restart", "oxide-volume@data")
	if text, err := os.ReadFile(m.in(v.target + "/file")); err != nil || string(text) != "by hand" {
		m.t.Errorf("after a restart of the unit the file holds %q: %v", text, err)
	}
	m.mountedAs(v.target, "xfs", "noatime")
	m.write("/etc/oxide-csi/volumes/data.env",
		"TARGET=/srv/by-hand\nMOUNT_FLAGS=--fs-type=xfs --option=noatime --read-only\n", 0o640)
	m.run("systemctl", "restart", "oxide-volume@data")
	m.mountedAs(v.target, "xfs", "ro")
	m.withoutController(v)
	m.run("systemctl", "disable", "--now", "oxide-volume@data")
	m.mounted(v, false)
	m.run("env", "OXIDE_CSI_SYS_ROOT="+m.sim.Instance("node-a").Guest+"/sys", "oxide-csi", "volume", "detach", id)
	m.run("oxide-csi", "volume", "delete", id)
}

// withoutController disables the controller, as on a host whose controller runs elsewhere now. The volume's unit mounts
// the volume again, and does not start the controller.
func (m *machine) withoutController(v *volume) {
	m.write("/etc/oxide-csi/volumes/data.env",
		"TARGET=/srv/by-hand\nOXIDE_CSI_SYS_ROOT="+m.sim.Instance("node-a").Guest+"/sys\n", 0o640)
	m.run("systemctl", "disable", "--now", "oxide-csi-controller")
	m.run("systemctl", "restart", "oxide-volume@data")
	m.mounted(v, true)
	if state := m.property("oxide-csi-controller", "ActiveState"); state != "inactive" {
		m.t.Errorf("the controller, which was disabled, is %s", state)
	}
	m.run("systemctl", "enable", "--now", "oxide-csi-controller")
	m.dial("controller")
}

// dependent starts a service that needs a volume, as at boot: nothing of the plugin runs yet, and for a while the rack
// does not answer. The service must wait, and then start.
func (m *machine) dependent() {
	id := strings.TrimSpace(m.run("oxide-csi", "volume", "create", "db", "--size=1GiB"))
	m.write("/etc/oxide-csi/volumes/db.env", "TARGET=/srv/db\n", 0o640)
	m.write("/etc/systemd/system/db.service", `[Unit]
After=oxide-volume@db.service
BindsTo=oxide-volume@db.service

[Service]
ExecStart=/bin/sh -c 'echo started >/srv/db/state && exec sleep 1000000'
`, 0o644)
	m.run("systemctl", "daemon-reload")
	m.run("systemctl", "stop", "oxide-csi-node", "oxide-csi-controller")
	for _, operation := range []string{"project_view", "disk_list", "disk_view"} {
		_, err := m.sim.Inject(
			m.t.Context(),
			simtest.Fault{Operation: operation, Kind: "status", Status: 503, Count: new(int)},
		)
		must(m.t, err)
	}
	m.run("systemctl", "start", "--no-block", "oxide-csi-controller", "db")
	m.eventually("the volume's unit says what it waits for", func() bool {
		return strings.Contains(m.property("oxide-volume@db", "StatusText"), "the rack is unavailable")
	})
	if state := m.property("oxide-volume@db", "ActiveState"); state != "activating" {
		m.t.Errorf("the volume's unit is %s", state)
	}
	must(m.t, m.sim.ClearFaults(m.t.Context()))
	m.eventually("the service runs", func() bool {
		state := m.property("db", "ActiveState")
		if state == "failed" {
			m.t.Fatal("the service has failed")
		}
		return state == "active"
	})
	m.mounted(&volume{staging: "/srv/db", target: "/srv/db"}, true)
	m.run("systemctl", "stop", "oxide-volume@db")
	m.eventually(
		"the service is stopped with its volume",
		func() bool { return m.property("db", "ActiveState") == "inactive" },
	)
	m.run("env", "OXIDE_CSI_SYS_ROOT="+m.sim.Instance("node-a").Guest+"/sys", "oxide-csi", "volume", "detach", id)
	m.run("oxide-csi", "volume", "delete", id)
}

// encrypted mounts an encrypted volume with the documented drop-in, as far as a kernel without device-mapper goes:
// cryptsetup makes the header within the limits of the unit, and cannot open it.
func (m *machine) encrypted() {
	dropIn := pages.Of(m.t, "../../docs/how-to/encrypt-volumes.md")
	m.write("/etc/systemd/system/oxide-csi-node.service.d/encrypted.conf", dropIn[0], 0o644)
	m.run("systemctl", "daemon-reload")
	m.run("systemctl", "restart", "oxide-csi-node")
	m.dial("node")
	const passphrase = "/etc/oxide-csi/secret.passphrase"
	m.write(passphrase, "from a generator\n", 0o600)
	id := strings.TrimSpace(
		m.run("oxide-csi", "volume", "create", "secret", "--size=1GiB", "--parameter=encryption=luks2"))
	said, err := m.try("oxide-csi", "volume", "mount", id, "/srv/secret", "--attach", "--passphrase-file="+passphrase)
	if err == nil || !strings.Contains(said, "load the kernel modules dm_mod and dm_crypt") {
		m.t.Errorf("mount of an encrypted volume: %v: %s", err, said)
	}
	devices, err := filepath.Glob(m.sim.Instance(m.instance).Guest + "/dev/nvme*n1")
	must(m.t, err)
	if !slices.ContainsFunc(devices, func(device string) bool {
		return exec.Command("cryptsetup", "open", "--test-passphrase", "--disable-locks",
			"--key-file="+m.in(passphrase), "--keyfile-size=16", device).Run() == nil
	}) {
		m.t.Errorf("none of %v opens with the passphrase", devices)
	}
	m.run("env", "OXIDE_CSI_SYS_ROOT="+m.sim.Instance("node-a").Guest+"/sys", "oxide-csi", "volume", "detach", id)
	m.run("oxide-csi", "volume", "delete", id)
	must(m.t, os.Remove(m.in("/etc/systemd/system/oxide-csi-node.service.d/encrypted.conf")))
	m.run("systemctl", "daemon-reload")
	m.run("systemctl", "restart", "oxide-csi-node")
	m.dial("node")
}

// wrongSetting checks that a start with a wrong setting fails at once, and is not repeated again and again.
func (m *machine) wrongSetting() {
	for _, wrong := range []struct{ service, file, setting, code, says string }{
		{"oxide-csi-node", "node.env", "OXIDE_CSI_MAX_DISKS=eight", "78", `config: --max-disks: "eight" is not a whole number`},
		{"oxide-csi-controller", "controller.env", "OXIDE_CSI_MAX_DISKS=eight", "78", `config: --max-disks: "eight" is not a whole number`},
		{"oxide-volume@wrong", "volumes/wrong.env", "TARGET=/srv/wrong\nMOUNT_FLAGS=--fs-typ=xfs", "2", "--fs-typ: unknown flag"},
	} {
		file := "/etc/oxide-csi/" + wrong.file
		before, err := os.ReadFile(m.in(file))
		isNew := errors.Is(err, fs.ErrNotExist)
		if !isNew {
			must(m.t, err)
		}
		m.write(file, string(before)+wrong.setting+"\n", 0o640)
		if said, err := m.try("systemctl", "restart", wrong.service); err == nil {
			m.t.Errorf("systemctl restart %s succeeds with a wrong setting: %s", wrong.service, said)
		}
		m.eventually(
			wrong.service+" has failed",
			func() bool { return m.property(wrong.service, "ActiveState") == "failed" },
		)
		if code := m.property(wrong.service, "ExecMainStatus"); code != wrong.code {
			m.t.Errorf("the exit code of %s is %s", wrong.service, code)
		}
		if starts := m.property(wrong.service, "NRestarts"); starts != "0" {
			m.t.Errorf("%s was started again %s times", wrong.service, starts)
		}
		// journald may write the last lines of a process only after systemd has seen its end.
		m.eventually("the journal has the reason", func() bool {
			return strings.Contains(m.run("journalctl", "--no-pager", "--unit="+wrong.service), wrong.says)
		})
		if isNew {
			must(m.t, os.Remove(m.in(file)))
			m.run("systemctl", "reset-failed", wrong.service)
			continue
		}
		m.write(file, string(before), 0o640)
		m.run("systemctl", "start", wrong.service)
		m.dial(strings.TrimPrefix(wrong.service, "oxide-csi-"))
	}
}

// stop checks that both plugins stop cleanly.
func (m *machine) stop() {
	for service := range exposure {
		m.run("systemctl", "disable", "--now", service)
		if state, result := m.property(
			service,
			"ActiveState",
		), m.property(
			service,
			"Result",
		); state != "inactive" ||
			result != "success" {
			m.t.Errorf("%s is %s: %s", service, state, result)
		}
	}
	left, err := m.sim.Leftovers(m.t.Context())
	must(m.t, err)
	if left.Disks+left.Snapshots+left.Mounts > 0 || left.Loops > 1 || len(left.GuestErrors) > 0 {
		m.t.Errorf("left on the rack: %+v", left)
	}
}

func (m *machine) eventually(what string, ask func() bool) {
	m.t.Helper()
	await.Within(m.t, waitLimit, what, ask)
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

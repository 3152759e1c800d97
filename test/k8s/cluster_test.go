//go:build k8s

package k8s_test

import (
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/core/simrack/lab"
)

// nodeName is the name of the Node, and of the instance that it is.
const nodeName = "node-a"

// maxDisks is how many disks an instance of the rack takes, as the overlay says.
const maxDisks = 10

// cluster is a Kubernetes of one node.
type cluster struct {
	dir, programs string
	sim           *lab.Sim
	instance      lab.Instance
}

// newCluster starts the rack and a cluster without the plugin.
func newCluster(t *testing.T) *cluster {
	built, err := programs()
	must(t, err)
	c := &cluster{dir: os.Getenv(inside), programs: built}
	c.startRack(t)
	c.startControlPlane(t)
	c.startNode(t)
	return c
}

func (c *cluster) startRack(t *testing.T) {
	var err error
	c.sim, err = lab.StartSimWith(filepath.Join(c.dir, "oxide-sim"), lab.SimOptions{Args: []string{
		"--listen=" + rackAddress + ":12220", "--hotplug=async", fmt.Sprintf("--max-disks=%d", maxDisks),
		"--instances=" + nodeName, "--guest-root=/run/guests", "--state=" + filepath.Join(c.dir, "rack"), "--latency=5ms",
	}})
	must(t, err)
	t.Cleanup(func() { must(t, c.sim.Stop()) })
	c.instance = c.sim.Instance(nodeName)
}

// users are who may ask the API server, by name, with their groups. Their tokens are their names.
var users = map[string]string{
	"admin":                          "system:masters",
	"system:kube-controller-manager": "",
	"system:kube-scheduler":          "",
	"system:node:" + nodeName:        "system:nodes",
}

func (c *cluster) startControlPlane(t *testing.T) {
	var tokens strings.Builder
	for user, group := range users {
		fmt.Fprintf(&tokens, "%s,%s,%s,%q\n", user, user, user, group)
	}
	c.write(t, "tokens.csv", tokens.String())
	c.write(t, "accounts.key", signingKey(t))

	const etcd = "http://127.0.0.1:2379"
	c.start(t, "etcd", "--data-dir="+c.path("etcd"), "--unsafe-no-fsync", "--log-level=warn", "--listen-client-urls="+etcd, "--advertise-client-urls="+etcd)
	c.start(t, "kube-apiserver", "--etcd-servers="+etcd, "--secure-port=443", "--advertise-address="+apiAddress, "--endpoint-reconciler-type=none",
		"--service-cluster-ip-range=10.96.0.0/24", "--cert-dir="+c.path("pki"), "--token-auth-file="+c.path("tokens.csv"),
		"--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction", "--allow-privileged",
		"--kubelet-preferred-address-types=InternalIP", "--service-account-issuer=https://kubernetes.default.svc",
		"--service-account-key-file="+c.path("accounts.key"), "--service-account-signing-key-file="+c.path("accounts.key"))
	// The certificate that the API server makes for itself comes with the authority that has signed it.
	for user := range users {
		c.write(t, user+".kubeconfig", fmt.Sprintf(`apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "https://%s", certificate-authority: %s}}]
users: [{name: u, user: {token: "%s"}}]
contexts: [{name: c, context: {cluster: c, user: u}}]
current-context: c
`, apiAddress, c.path("pki/apiserver.crt"), user))
	}
	eventually(t, "the API server is ready", func() bool { _, err := c.try("get", "--raw", "/readyz"); return err == nil })
	for name, flags := range map[string][]string{
		"kube-controller-manager": {"--use-service-account-credentials", "--service-account-private-key-file=" + c.path("accounts.key"), "--root-ca-file=" + c.path("pki/apiserver.crt")},
		"kube-scheduler":          nil,
	} {
		config := c.path("system:" + name + ".kubeconfig")
		c.start(t, name, append(flags, "--kubeconfig="+config, "--authentication-kubeconfig="+config, "--authorization-kubeconfig="+config, "--leader-elect=false")...)
	}
	eventually(t, "the controller manager makes service accounts", func() bool { _, err := c.try("get", "serviceaccount", "default"); return err == nil })
	c.kubectl(t, "create", "-f", c.path("definitions"))
	// It belongs to the cluster, not to a plugin.
	c.start(t, "snapshot-controller", "--kubeconfig="+c.path("admin.kubeconfig"))
}

func (c *cluster) startNode(t *testing.T) {
	const socket = "/run/containerd/containerd.sock"
	c.write(t, "cni/pods.conflist", `{"cniVersion":"1.0.0","name":"pods","plugins":[{"type":"bridge","bridge":"pods0","isGateway":true,"ipMasq":false,
"ipam":{"type":"host-local","dataDir":"/run/cni","ranges":[[{"subnet":"10.244.0.0/24"}]],"routes":[{"dst":"10.96.0.0/24"}]}}]}`)
	c.write(t, "containerd.toml", fmt.Sprintf(`version = 2
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
`, c.path("containerd"), socket, pauseImage, c.path("cni")))
	c.start(t, "/usr/bin/containerd", "--config="+c.path("containerd.toml"))
	ctr := func(args ...string) error {
		_, err := command("ctr", append([]string{"--address=" + socket, "--namespace=k8s.io"}, args...)...)
		return err
	}
	eventually(t, "containerd answers", func() bool { return ctr("version") == nil })
	images, err := filepath.Glob(c.path("images/*.tar"))
	must(t, err)
	for _, image := range images {
		must(t, ctr("images", "import", image))
	}

	c.write(t, "resolv.conf", "")
	// What is not as usual is for machines with control groups of the first version, to find out within seconds instead of tens
	// of them what a node has let go of, and to keep images, since they cannot be pulled again. There is no DNS.
	c.write(t, "kubelet.yaml", fmt.Sprintf(`apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
containerRuntimeEndpoint: unix://%s
providerID: oxide://%s
cgroupDriver: cgroupfs
cgroupRoot: /%s
failCgroupV1: false
failSwapOn: false
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
resolvConf: %s
clusterDNS: [10.96.0.10]
makeIPTablesUtilChains: false
volumePluginDir: /var/lib/kubelet/volumeplugins
nodeStatusUpdateFrequency: 2s
imageGCHighThresholdPercent: 100
evictionHard: {memory.available: 100Mi, nodefs.available: 1%%, imagefs.available: 1%%, nodefs.inodesFree: 1%%}
`, socket, c.instance.ID, cgroups(c.dir), c.path("resolv.conf")))
	c.start(t, "kubelet", "--config="+c.path("kubelet.yaml"), "--kubeconfig="+c.path("system:node:"+nodeName+".kubeconfig"), "--cert-dir="+c.path("pki/kubelet"),
		"--hostname-override="+nodeName, "--node-ip="+nodeAddress, "--v=2")
	eventually(t, "the node is registered", func() bool { _, err := c.try("get", "node", nodeName); return err == nil })
	c.kubectl(t, "wait", "--for=condition=Ready", "node/"+nodeName, "--timeout=120s")
}

func (c *cluster) path(name string) string { return filepath.Join(c.dir, name) }

func (c *cluster) write(t *testing.T, name, text string) {
	t.Helper()
	must(t, os.MkdirAll(filepath.Dir(c.path(name)), 0o755))
	must(t, os.WriteFile(c.path(name), []byte(text), 0o600))
}

// start starts a program, one of those that were built unless it is given as a path, and kills it with the test.
func (c *cluster) start(t *testing.T, program string, args ...string) {
	t.Helper()
	name := filepath.Base(program)
	if !filepath.IsAbs(program) {
		program = filepath.Join(c.programs, program)
	}
	log, err := os.Create(c.path(name + ".log"))
	must(t, err)
	cmd := exec.Command(program, args...)
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + c.dir}
	cmd.Stdout, cmd.Stderr = log, log
	must(t, cmd.Start())
	done := make(chan struct{})
	go func() { _ = cmd.Wait(); close(done) }() // how it ends is in its log
	t.Cleanup(func() {
		select {
		case <-done:
			t.Errorf("%s has ended before its time", name)
		default:
			must(t, cmd.Process.Kill()) // in order, it takes its time; what it holds ends with the namespaces
			<-done
		}
		must(t, log.Close())
		if t.Failed() {
			text, err := os.ReadFile(log.Name())
			must(t, err)
			t.Logf("the end of what %s said:\n%s", name, text[max(0, len(text)-3000):])
		}
	})
}

// signingKey is what tokens of service accounts are signed with.
func signingKey(t *testing.T) string {
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	must(t, err)
	return string(pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(key)}))
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// patience is how long anything may take that a cluster does by itself. A detach waits for the node's next status, and what
// fails is tried again after waits that grow.
const patience = 3 * time.Minute

func eventually(t *testing.T, what string, ask func() bool) {
	t.Helper()
	deadline := time.Now().Add(patience)
	for !ask() {
		if time.Now().After(deadline) {
			t.Fatalf("still not so after %s: %s", patience, what)
		}
		<-time.After(200 * time.Millisecond)
	}
}

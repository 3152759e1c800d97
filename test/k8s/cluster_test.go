// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

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

	"github.com/oxidecomputer/oxide-csi-plugin/test/await"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// maxDisks is the attach limit in the overlay's configuration.
const maxDisks = 10

// cluster is a Kubernetes whose nodes are instances of a rack.
type cluster struct {
	// t is the test that owns the cluster. All processes end with t, also those that a subtest has started.
	t *testing.T
	// made has the files that all tests share, dir those of this cluster, programs the programs of Kubernetes.
	made, dir, programs string
	// id is the cluster ID with which the plugin was installed.
	id   string
	sim  *simtest.Sim
	a, b *node
	// west and c are a second rack and its node, which are added later.
	west *simtest.Sim
	c    *node
}

// newCluster starts the rack and a cluster of two nodes, without the plugin. No node uses the spare instances yet.
func newCluster(t *testing.T, spare ...string) *cluster {
	c := newControlPlane(t)
	instances := strings.Join(append([]string{"node-a", "node-b"}, spare...), ",")
	c.sim = c.startRack(t, "rack", rackAddress, instances, "--hotplug=async")
	c.a, c.b = c.newNode(c.sim, "node-a", nodeA), c.newNode(c.sim, "node-b", nodeB)
	c.join(t, c.a, c.b)
	return c
}

// newControlPlane starts a cluster without nodes.
func newControlPlane(t *testing.T) *cluster {
	built, err := programs()
	must(t, err)
	made := os.Getenv(inside)
	c := &cluster{t: t, made: made, dir: filepath.Join(made, t.Name()), programs: built}
	must(t, os.Mkdir(c.dir, 0o755))
	c.startControlPlane(t)
	return c
}

// startRack starts a rack with running instances.
func (c *cluster) startRack(t *testing.T, name, address, instances string, also ...string) *simtest.Sim {
	t.Helper()
	sim, err := simtest.StartSimWith(filepath.Join(c.made, "oxide-sim"), simtest.SimOptions{Args: append([]string{
		"--listen=" + address + ":12220", "--expose",
		fmt.Sprintf("--max-disks=%d", maxDisks),
		"--latency=5ms",
		"--instances=" + instances,
		"--guest-root=" + filepath.Join(c.made, "guests", name),
		"--state=" + c.path("racks/"+name),
	}, also...)})
	must(t, err)
	c.t.Cleanup(func() { must(c.t, sim.Stop()) })
	return sim
}

// join starts nodes, and waits until they are ready.
func (c *cluster) join(t *testing.T, nodes ...*node) {
	t.Helper()
	for _, n := range nodes {
		n.start(t)
		c.t.Cleanup(func() {
			n.stop(c.t)
			if c.t.Failed() {
				c.t.Log(n.logs())
			}
		})
	}
	c.ready(t, nodes...)
}

// ready waits until the nodes are ready.
func (c *cluster) ready(t *testing.T, nodes ...*node) {
	t.Helper()
	for _, n := range nodes {
		await.Within(t, waitLimit, "node "+n.Name+" is registered", func() bool {
			select {
			case <-n.ended:
				t.Fatalf("node %s ended too early", n.Name)
			default:
			}
			_, err := c.try("get", "node", n.Name)
			return err == nil
		})
		c.kubectl(t, "wait", "--for=condition=Ready", "node/"+n.Name, "--timeout="+waitLimit.String())
	}
}

// users are the users of the API server, with their groups. A user's token is the user's name.
var users = map[string]string{
	"admin":                          "system:masters",
	"system:kube-controller-manager": "",
	"system:kube-scheduler":          "",
	"system:node:node-a":             "system:nodes",
	"system:node:node-b":             "system:nodes",
	"system:node:node-c":             "system:nodes",
}

func (c *cluster) startControlPlane(t *testing.T) {
	var tokens strings.Builder
	for user, group := range users {
		fmt.Fprintf(&tokens, "%s,%s,%s,%q\n", user, user, user, group)
	}
	c.write(t, "tokens.csv", tokens.String())
	c.write(t, "accounts.key", signingKey(t))

	const etcd = "http://127.0.0.1:2379"
	c.start(
		t,
		"etcd",
		"--data-dir="+c.path("etcd"),
		"--unsafe-no-fsync",
		"--log-level=warn",
		"--listen-client-urls="+etcd,
		"--advertise-client-urls="+etcd,
	)
	c.start(
		t,
		"kube-apiserver",
		"--etcd-servers="+etcd,
		"--secure-port=443",
		"--advertise-address="+apiAddress,
		"--endpoint-reconciler-type=none",
		"--service-cluster-ip-range=10.96.0.0/24",
		"--cert-dir="+c.path("pki"),
		"--token-auth-file="+c.path("tokens.csv"),
		"--authorization-mode=Node,RBAC",
		"--enable-admission-plugins=NodeRestriction",
		"--allow-privileged",
		"--kubelet-preferred-address-types=InternalIP",
		"--service-account-issuer=https://kubernetes.default.svc",
		"--service-account-key-file="+c.path("accounts.key"),
		"--service-account-signing-key-file="+c.path("accounts.key"),
	)
	// The API server's self-signed certificate file contains the authority too.
	for user := range users {
		c.write(t, user+".kubeconfig", kubeconfig(c.dir, user))
	}
	await.Within(
		t,
		waitLimit,
		"the API server is ready",
		func() bool { _, err := c.try("get", "--raw", "/readyz"); return err == nil },
	)
	for name, flags := range map[string][]string{
		"kube-controller-manager": {"--use-service-account-credentials", "--node-monitor-grace-period=20s", "--service-account-private-key-file=" + c.path("accounts.key"), "--root-ca-file=" + c.path("pki/apiserver.crt")},
		"kube-scheduler":          nil,
	} {
		config := c.path("system:" + name + ".kubeconfig")
		c.start(
			t,
			name,
			append(
				flags,
				"--kubeconfig="+config,
				"--authentication-kubeconfig="+config,
				"--authorization-kubeconfig="+config,
				"--leader-elect=false",
			)...)
	}
	await.Within(
		t,
		waitLimit,
		"the controller manager makes service accounts",
		func() bool { _, err := c.try("get", "serviceaccount", "default"); return err == nil },
	)
	c.kubectl(t, "create", "-f", filepath.Join(c.made, "definitions"))
	// The snapshot controller belongs to the cluster, not to a plugin.
	c.start(t, "snapshot-controller", "--kubeconfig="+c.path("admin.kubeconfig"))
}

// kubeconfig returns a kubeconfig file of one of the users.
func kubeconfig(dir, user string) string {
	return fmt.Sprintf(`apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "https://%s", certificate-authority: %s}}]
users: [{name: u, user: {token: "%s"}}]
contexts: [{name: c, context: {cluster: c, user: u}}]
current-context: c
`, apiAddress, filepath.Join(dir, "pki/apiserver.crt"), user)
}

func (c *cluster) path(name string) string { return filepath.Join(c.dir, name) }

func (c *cluster) write(t *testing.T, name, text string) {
	t.Helper()
	must(t, os.MkdirAll(filepath.Dir(c.path(name)), 0o755))
	must(t, os.WriteFile(c.path(name), []byte(text), 0o600))
}

// start starts a program and kills it at the end of the test. A name without a path is one of the built programs.
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
	go func() { _ = cmd.Wait(); close(done) }() // its log says how it ended
	t.Cleanup(func() {
		select {
		case <-done:
			t.Errorf("%s ended too early", name)
		default:
			must(t, cmd.Process.Kill()) // a clean stop takes time, and the namespaces end anyway
			<-done
		}
		must(t, log.Close())
		if t.Failed() {
			text, err := os.ReadFile(log.Name())
			must(t, err)
			t.Logf("the end of the log of %s:\n%s", name, text[max(0, len(text)-3000):])
		}
	})
}

// signingKey returns a key that signs the tokens of service accounts.
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

// waitLimit is how long a cluster may take for anything. A detach waits for the node's next status update, and failed
// operations are repeated with growing waits.
const waitLimit = 3 * time.Minute

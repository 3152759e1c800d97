// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build identity

package identity_test

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata/kubernetes"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata/metadatatest"
	"github.com/oxidecomputer/oxide-csi-plugin/test/await"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

const (
	nodeName = "worker-3.example"
	// rights is the file with all rights of the plugin.
	rights    = "../../deploy/k8s/base/node-identity.yaml"
	namespace = "oxide-csi"
	account   = "oxide-csi-node"
)

// auditPolicy logs the requests for Nodes, at their arrival and at their end.
const auditPolicy = `apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [ResponseStarted, Panic]
rules: [{level: Metadata, resources: [{group: "", resources: [nodes]}]}]
`

type object = map[string]any

// cluster is an API server with etcd, RBAC and the Node authorizer.
type cluster struct {
	t      *testing.T
	server *process
	gate   *gate
	url    string
	admin  *http.Client
	ca     authority
	// account is the folder that a pod sees as /var/run/secrets/kubernetes.io/serviceaccount.
	account string
	token   string
	// audit is the file of the API server's audit log, see auditPolicy.
	audit string
}

func TestKubernetes(t *testing.T) {
	c := newCluster(t)
	t.Run("conformance", c.conformance)
	t.Run("rights", c.rights)
	t.Run("nodes", c.nodes)
	t.Run("kubelet's own credentials", c.kubelet)
	t.Run("watch", c.watch)
	t.Run("plugin waits for the cloud controller manager", c.pluginWaits)
	t.Run("init container", c.initContainer)
}

func newCluster(t *testing.T) *cluster {
	etcd, apiserver := program(t, "etcd", "kubernetes"), program(t, "kube-apiserver", "kubernetes")
	c := &cluster{t: t, ca: newAuthority(t), account: t.TempDir()}
	dir := t.TempDir()

	client, peer := fmt.Sprintf("http://127.0.0.1:%d", freePort(t)), fmt.Sprintf("http://127.0.0.1:%d", freePort(t))
	start(t, etcd, "--name=default", "--data-dir="+filepath.Join(dir, "etcd"), "--unsafe-no-fsync", "--log-level=warn",
		"--listen-client-urls="+client, "--advertise-client-urls="+client,
		"--listen-peer-urls="+peer, "--initial-advertise-peer-urls="+peer, "--initial-cluster=default="+peer)

	pair := c.ca.issue(t, pkix.Name{CommonName: "kube-apiserver"})
	admin := c.ca.issue(t, pkix.Name{CommonName: "admin", Organization: []string{"system:masters"}})
	signing, public := rsaKey(t)
	file := func(name string, text []byte) string {
		path := filepath.Join(dir, name)
		must(t, os.WriteFile(path, text, 0o600))
		return path
	}
	c.audit = file("audit.log", nil)
	port := freePort(t)
	c.url = fmt.Sprintf("https://127.0.0.1:%d", port)
	c.server = start(
		t,
		apiserver,
		"--etcd-servers="+client,
		"--bind-address=127.0.0.1",
		fmt.Sprintf("--secure-port=%d", port),
		"--advertise-address=127.0.0.1",
		"--endpoint-reconciler-type=none",
		"--service-cluster-ip-range=10.96.0.0/24",
		"--tls-cert-file="+file(
			"tls.crt",
			pair.certificate,
		),
		"--tls-private-key-file="+file("tls.key", pair.key),
		"--client-ca-file="+file("ca.crt", c.ca.pem),
		"--authorization-mode=Node,RBAC",
		"--enable-admission-plugins=NodeRestriction",
		"--service-account-issuer=https://kubernetes.default.svc",
		"--service-account-key-file="+file("sa.pub", public),
		"--service-account-signing-key-file="+file("sa.key", signing),
		"--audit-policy-file="+file("audit.yaml", []byte(auditPolicy)),
		"--audit-log-path="+c.audit,
	)
	c.admin = c.ca.client(t, admin)
	c.server.eventually("the API server is ready", func() bool { return c.try("GET", "/readyz", nil) == http.StatusOK })

	c.applyRights()
	c.gate = newGate(t, fmt.Sprintf("127.0.0.1:%d", port))
	must(t, os.WriteFile(filepath.Join(c.account, "ca.crt"), c.ca.pem, 0o600))
	var answer struct{ Status struct{ Token string } }
	c.do(
		"POST",
		"/api/v1/namespaces/"+namespace+"/serviceaccounts/"+account+"/token",
		object{"spec": object{"expirationSeconds": 3600}},
		&answer,
	)
	c.token = answer.Status.Token
	must(t, os.WriteFile(filepath.Join(c.account, "token"), []byte(c.token), 0o600))
	pod := c.ca.client(t, keyPair{})
	c.server.eventually(
		"the API server applies the rights",
		func() bool { return c.as(pod, c.token, "GET", "/api/v1/nodes/"+nodeName) == http.StatusNotFound },
	)
	return c
}

// applyRights creates the objects of the manifest that users of the plugin apply.
func (c *cluster) applyRights() {
	text, err := os.ReadFile(rights)
	must(c.t, err)
	for decoder := yaml.NewDecoder(bytes.NewReader(text)); ; {
		var o object
		if err := decoder.Decode(&o); errors.Is(err, io.EOF) {
			return
		} else if err != nil {
			c.t.Fatal(err)
		}
		path := map[string]string{
			"Namespace": "/api/v1/namespaces", "ServiceAccount": "/api/v1/namespaces/" + namespace + "/serviceaccounts",
			"ClusterRole": "/apis/rbac.authorization.k8s.io/v1/clusterroles", "ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
		}[o["kind"].(string)]
		c.do("POST", path, o, nil)
	}
}

const bindings = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings"

// bind grants or revokes the rights of the plugin's service account, and waits until the API server applies that.
func (c *cluster) bind(granted bool) {
	want := http.StatusForbidden
	if granted {
		want = http.StatusOK
		c.do("POST", bindings, object{
			"metadata": object{"name": account},
			"roleRef":  object{"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": account},
			"subjects": []object{{"kind": "ServiceAccount", "name": account, "namespace": namespace}},
		}, nil)
	} else {
		c.do("DELETE", bindings+"/"+account, nil, nil)
	}
	pod := c.ca.client(c.t, keyPair{})
	await.Within(c.t, waitLimit, "the API server applies the binding", func() bool {
		return c.as(pod, c.token, "GET", "/api/v1/nodes/"+nodeName) == want
	})
}

// as sends a request with a token.
func (c *cluster) as(client *http.Client, token, method, path string) (status int) {
	request, err := http.NewRequest(method, c.url+path, nil)
	if err != nil {
		c.t.Error(err)
		return 0
	}
	if token != "" {
		request.Header.Set("Authorization", "Bearer "+token)
	}
	response, err := client.Do(request)
	if err != nil {
		return 0
	}
	_ = response.Body.Close() // the body is not used
	return response.StatusCode
}

// try sends a request as the administrator.
func (c *cluster) try(method, path string, body any) (status int) {
	status, _ = c.send(method, path, body)
	return status
}

func (c *cluster) send(method, path string, body any) (status int, answer []byte) {
	text, err := json.Marshal(body)
	if err != nil {
		c.t.Error(err)
	}
	request, err := http.NewRequest(method, c.url+path, bytes.NewReader(text))
	if err != nil {
		c.t.Error(err)
		return 0, nil
	}
	request.Header.Set("Content-Type", "application/json")
	if method == http.MethodPatch {
		request.Header.Set("Content-Type", "application/merge-patch+json")
	}
	response, err := c.admin.Do(request)
	if err != nil {
		return 0, nil
	}
	answer, err = io.ReadAll(response.Body)
	_ = response.Body.Close() // the body was read
	if err != nil {
		return 0, nil
	}
	return response.StatusCode, answer
}

// do is try for requests that must succeed.
func (c *cluster) do(method, path string, body, answer any) {
	status, text := c.send(method, path, body)
	if status/100 != 2 {
		c.t.Errorf("%s %s: HTTP %d: %s", method, path, status, text)
	} else if answer != nil {
		if err := json.Unmarshal(text, answer); err != nil {
			c.t.Error(err)
		}
	}
}

// makeNode deletes the Node and creates it again.
func (c *cluster) makeNode(changes object) {
	if status := c.try(
		"DELETE",
		"/api/v1/nodes/"+nodeName,
		nil,
	); status != http.StatusOK &&
		status != http.StatusNotFound {
		c.t.Errorf("delete the Node: HTTP %d", status)
	}
	node := object{"apiVersion": "v1", "kind": "Node", "metadata": object{"name": nodeName}}
	status := changes["status"]
	for key, value := range changes {
		if key == "metadata" {
			for key, value := range value.(object) {
				node["metadata"].(object)[key] = value
			}
		} else if key != "status" {
			node[key] = value
		}
	}
	c.do("POST", "/api/v1/nodes", node, nil)
	if status != nil {
		c.do("PATCH", "/api/v1/nodes/"+nodeName+"/status", object{"status": status}, nil)
	}
}

func (c *cluster) options() kubernetes.Options {
	host, port, err := net.SplitHostPort(c.gate.address)
	must(c.t, err)
	return kubernetes.Options{
		NodeName: nodeName, Host: host, Port: port, ServiceAccount: c.account,
		RackLabel: kubernetes.DefaultRackLabel,
	}
}

// conformance puts the identity into annotations, which take any text and change in one step.
func (c *cluster) conformance(t *testing.T) {
	metadatatest.Run(t, func(t *testing.T) metadatatest.Harness {
		c.makeNode(nil)
		var fault metadatatest.Fault
		return metadatatest.Harness{
			New: func() metadata.Provider { return kubernetes.New(c.options()) },
			Set: func(w metadatatest.Content) {
				annotations := object{kubernetes.InstanceLabel: nil, kubernetes.DefaultRackLabel: nil}
				if w.ID != nil {
					annotations[kubernetes.InstanceLabel] = *w.ID
				}
				if w.Rack != nil {
					annotations[kubernetes.DefaultRackLabel] = *w.Rack
				}
				c.do("PATCH", "/api/v1/nodes/"+nodeName, object{"metadata": object{"annotations": annotations}}, nil)
			},
			Break: func(f metadatatest.Fault) {
				fault = f
				switch f {
				case metadatatest.Down:
					c.gate.shut()
				case metadatatest.Slow:
					c.gate.hold()
				case metadatatest.Denied:
					c.bind(false)
				}
			},
			Repair: func() {
				switch fault {
				case metadatatest.Down:
					c.gate.open()
				case metadatatest.Slow:
					c.gate.release()
				case metadatatest.Denied:
					c.bind(true)
				}
			},
			Secrets: []string{c.token},
		}
	})
}

// rights checks that the manifest grants what all tests here need, and nothing else.
func (c *cluster) rights(t *testing.T) {
	c.makeNode(nil)
	pod := c.ca.client(t, keyPair{})
	for request, want := range map[string]int{
		"GET /api/v1/nodes/" + nodeName:                          http.StatusOK,
		"GET /api/v1/nodes":                                      http.StatusOK,
		"GET /api/v1/nodes?watch=1&timeoutSeconds=1":             http.StatusOK,
		"DELETE /api/v1/nodes/" + nodeName:                       http.StatusForbidden,
		"PATCH /api/v1/nodes/" + nodeName:                        http.StatusForbidden,
		"GET /api/v1/pods":                                       http.StatusForbidden,
		"GET /api/v1/secrets":                                    http.StatusForbidden,
		"GET /apis/storage.k8s.io/v1/volumeattachments":          http.StatusForbidden,
		"GET /api/v1/namespaces/" + namespace + "/secrets/token": http.StatusForbidden,
	} {
		method, path, _ := strings.Cut(request, " ")
		if got := c.as(pod, c.token, method, path); got != want {
			t.Errorf("%s: HTTP %d, want %d", request, got, want)
		}
	}
}

// nodes checks the forms that a Node has in a real cluster.
func (c *cluster) nodes(t *testing.T) {
	taint := []object{{"key": "node.cloudprovider.kubernetes.io/uninitialized", "value": "true", "effect": "NoSchedule"}}
	firmware := object{"nodeInfo": object{
		"machineID":               "",
		"systemUUID":              strings.ToUpper(idA),
		"bootID":                  "",
		"kernelVersion":           "",
		"osImage":                 "",
		"containerRuntimeVersion": "",
		"kubeletVersion":          "v1.37.2",
		"kubeProxyVersion":        "",
		"operatingSystem":         "linux",
		"architecture":            "amd64",
	}}
	for name, tt := range map[string]struct {
		node object
		want metadata.Instance
		kind error
		says string
	}{
		"initialised":       {object{"spec": object{"providerID": "oxide://" + idA}}, metadata.Instance{ID: idA}, nil, ""},
		"labelled":          {object{"metadata": object{"labels": object{kubernetes.InstanceLabel: idA, kubernetes.DefaultRackLabel: "east"}}}, metadata.Instance{ID: idA, Rack: "east"}, nil, ""},
		"by its firmware":   {object{"status": firmware}, metadata.Instance{ID: idA}, nil, ""},
		"not initialised":   {object{"spec": object{"taints": taint}, "status": firmware}, metadata.Instance{}, metadata.ErrNotReady, "wait for the cloud controller manager"},
		"not yet reported":  {object{}, metadata.Instance{}, metadata.ErrNotReady, "has no provider ID"},
		"another cloud's":   {object{"spec": object{"providerID": "aws:///us-west-2a/i-0123"}}, metadata.Instance{}, metadata.ErrInvalid, "does not begin with oxide://"},
		"provider ID first": {object{"spec": object{"providerID": "oxide://" + idA}, "metadata": object{"labels": object{kubernetes.InstanceLabel: idB}}}, metadata.Instance{ID: idA}, nil, ""},
	} {
		t.Run(name, func(t *testing.T) {
			c.makeNode(tt.node)
			got, err := kubernetes.New(c.options()).Instance(t.Context())
			if got != tt.want || !errors.Is(err, tt.kind) || err != nil && !strings.Contains(err.Error(), tt.says) {
				t.Errorf("got %+v, %v; want %+v, %v with %q in it", got, err, tt.want, tt.kind, tt.says)
			}
		})
	}
	t.Run("no such Node", func(t *testing.T) {
		options := c.options()
		options.NodeName = "worker-4"
		if got, err := kubernetes.New(options).
			Instance(t.Context()); !errors.Is(err, metadata.ErrNotReady) ||
			!strings.Contains(err.Error(), "HTTP 404; check that --node-name") {
			t.Errorf("got %+v, %v", got, err)
		}
	})
	t.Run("an unknown token", func(t *testing.T) {
		options := c.options()
		options.ServiceAccount = t.TempDir()
		must(t, os.WriteFile(filepath.Join(options.ServiceAccount, "ca.crt"), c.ca.pem, 0o600))
		must(t, os.WriteFile(filepath.Join(options.ServiceAccount, "token"), []byte("header.payload.signature"), 0o600))
		if got, err := kubernetes.New(options).
			Instance(t.Context()); !errors.Is(err, metadata.ErrInvalid) ||
			!strings.Contains(err.Error(), "HTTP 401") {
			t.Errorf("got %+v, %v", got, err)
		}
	})
}

// kubeconfig writes a kubeconfig file with a client certificate.
func (c *cluster) kubeconfig(t *testing.T, subject pkix.Name) string {
	dir, pair := t.TempDir(), c.ca.issue(t, subject)
	for name, text := range map[string][]byte{"ca.crt": c.ca.pem, "client.pem": append(pair.certificate, pair.key...)} {
		must(t, os.WriteFile(filepath.Join(dir, name), text, 0o600))
	}
	file := filepath.Join(dir, "kubelet.conf")
	must(t, os.WriteFile(file, []byte(`apiVersion: v1
kind: Config
current-context: default
contexts: [{name: default, context: {cluster: default, user: default}}]
clusters: [{name: default, cluster: {server: "https://`+c.gate.address+`", certificate-authority: ca.crt}}]
users: [{name: default, user: {client-certificate: client.pem, client-key: client.pem}}]
`), 0o600))
	return file
}

// kubelet checks that the kubelet's credentials suffice on a host, and only for its own Node (Node authorizer).
func (c *cluster) kubelet(t *testing.T) {
	c.makeNode(object{"spec": object{"providerID": "oxide://" + idA}})
	for name, want := range map[string]error{nodeName: nil, "worker-4": metadata.ErrInvalid} {
		options := kubernetes.Options{
			NodeName: nodeName, RackLabel: kubernetes.DefaultRackLabel,
			Kubeconfig: c.kubeconfig(t, pkix.Name{CommonName: "system:node:" + name, Organization: []string{"system:nodes"}}),
		}
		got, err := kubernetes.New(options).Instance(t.Context())
		if !errors.Is(err, want) || want == nil && got.ID != idA ||
			want != nil && !strings.Contains(err.Error(), "HTTP 403") {
			t.Errorf("as the kubelet of %s: %+v, %v; want %v", name, got, err, want)
		}
	}
}

// watch checks that changes of the Node are seen at once, with the rights of the manifest and with a kubelet's, also
// after the connection was cut.
func (c *cluster) watch(t *testing.T) {
	kubelet := kubernetes.Options{
		NodeName: nodeName, RackLabel: kubernetes.DefaultRackLabel,
		Kubeconfig: c.kubeconfig(t, pkix.Name{CommonName: "system:node:" + nodeName, Organization: []string{"system:nodes"}}),
	}
	for name, options := range map[string]kubernetes.Options{"service account": c.options(), "kubelet": kubelet} {
		t.Run(name, func(t *testing.T) {
			c.makeNode(nil)
			p := kubernetes.New(options)
			changes := p.Follow(t.Context())
			await := func(when, want string) {
				t.Helper()
				for late := time.After(time.Minute); ; {
					select {
					case <-changes:
					case <-late:
						t.Fatalf("%s: no signal after which the instance is %q", when, want)
					}
					if got, _ := p.Instance(t.Context()); got.ID == want {
						return
					}
				}
			}
			initialise := func(id string) {
				c.do(
					"PATCH",
					"/api/v1/nodes/"+nodeName,
					object{"metadata": object{"annotations": object{kubernetes.InstanceLabel: id}}},
					nil,
				)
			}
			await("at first", "")
			initialise(idA)
			await("changed", idA)
			c.gate.shut()
			initialise(idB)
			c.gate.open()
			await("changed while cut off", idB)
			c.makeNode(nil)
			await("created again", "")
		})
	}
}

// pluginWaits checks that a plugin that starts before its Node is initialised reports that, and becomes ready by
// itself.
func (c *cluster) pluginWaits(t *testing.T) {
	c.makeNode(
		object{
			"spec": object{
				"taints": []object{
					{"key": "node.cloudprovider.kubernetes.io/uninitialized", "value": "true", "effect": "NoSchedule"},
				},
			},
		},
	)
	dir, err := os.MkdirTemp("", "id")
	must(t, err)
	t.Cleanup(func() { must(t, os.RemoveAll(dir)) })
	http := fmt.Sprintf("127.0.0.1:%d", freePort(t))
	must(t, os.Mkdir(filepath.Join(dir, "block"), 0o755)) // a guest without disks
	type started struct {
		plugin *simtest.Plugin
		err    error
	}
	ready := make(chan started, 1)
	kubeconfig := c.kubeconfig(t, pkix.Name{CommonName: "system:node:" + nodeName, Organization: []string{"system:nodes"}})
	go func() {
		p, err := simtest.StartPlugin(plugin, simtest.PluginOptions{Mode: "node", Dir: dir, Args: []string{
			"--instance-id=",
			"--metadata=kubernetes",
			"--node-name=" + nodeName,
			"--kubeconfig=" + kubeconfig,
			"--http-endpoint=" + http,
			"--sys-root=" + dir,
		}})
		ready <- started{p, err}
	}()
	await.Within(t, waitLimit, "/readyz names what the plugin waits for", func() bool {
		return strings.Contains(
			page("http://"+http+"/readyz"),
			`wait for the cloud controller manager to initialise Node "`+nodeName+`"`,
		)
	})
	c.do(
		"PATCH",
		"/api/v1/nodes/"+nodeName,
		object{"spec": object{"providerID": "oxide://" + idA, "taints": []any{}}},
		nil,
	)
	s := <-ready
	must(t, s.err)
	defer func() { must(t, s.plugin.Stop()) }()
	info, err := s.plugin.NodeGetInfo(t.Context(), nil)
	if err != nil || info.GetNodeId() != idA {
		t.Errorf("NodeGetInfo: %v, %v", info, err)
	}
}

// page returns the body of a page, or the error.
func page(url string) string {
	response, err := http.Get(url)
	if err != nil {
		return err.Error()
	}
	body, err := io.ReadAll(response.Body)
	_ = response.Body.Close() // the body was read
	if err != nil {
		return err.Error()
	}
	return string(body)
}

// initContainer runs the command of a pod's init container, with the credentials where Kubernetes puts them.
func (c *cluster) initContainer(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: a mount namespace with a pod's folder of credentials")
	}
	c.makeNode(
		object{
			"spec":     object{"providerID": "oxide://" + idA},
			"metadata": object{"labels": object{"topology.kubernetes.io/zone": "east"}},
		},
	)
	output := filepath.Join(t.TempDir(), "metadata.env")
	host, port, err := net.SplitHostPort(c.gate.address)
	must(t, err)
	pod := []string{"unshare", "--mount", "sh", "-ec", `mount -t tmpfs none /run
mkdir -p /run/secrets/kubernetes.io
cp -r "$ACCOUNT" /run/secrets/kubernetes.io/serviceaccount
exec "$@"`, "sh"}
	environ := []string{
		"ACCOUNT=" + c.account,
		"KUBERNETES_SERVICE_HOST=" + host,
		"KUBERNETES_SERVICE_PORT=" + port,
		"OXIDE_CSI_NODE_NAME=" + nodeName,
	}
	code, stdout, stderr := run(
		t,
		environ,
		pod,
		"metadata",
		"--provider=kubernetes",
		"--rack-label=topology.kubernetes.io/zone",
		"--output="+output,
	)
	text, err := os.ReadFile(output)
	if code != 0 || stdout != "" || err != nil || string(text) != "OXIDE_INSTANCE_ID="+idA+"\nOXIDE_RACK=east\n" {
		t.Errorf("exit code %d, wrote %q, %v: %s", code, text, err, stderr)
	}
	if strings.Contains(stderr, c.token) {
		t.Error("the output contains the token")
	}
}

// authority is a CA.
type authority struct {
	certificate *x509.Certificate
	key         *ecdsa.PrivateKey
	pem         []byte
}

// keyPair is a certificate and its key, in PEM.
type keyPair struct{ certificate, key []byte }

func newAuthority(t *testing.T) authority {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "ca"}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour), KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	must(t, err)
	certificate, err := x509.ParseCertificate(der)
	must(t, err)
	return authority{certificate, key, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})}
}

// issue signs a certificate for a server on this machine, or for a client.
func (a authority) issue(t *testing.T, subject pkix.Name) keyPair {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(t, err)
	serial, err := rand.Int(rand.Reader, big.NewInt(1<<62))
	must(t, err)
	template := &x509.Certificate{
		SerialNumber: serial,
		Subject:      subject,
		IPAddresses:  []net.IP{net.IPv4(127, 0, 0, 1)},
		NotBefore:    time.Now().Add(-time.Hour),
		NotAfter:     time.Now().Add(24 * time.Hour),
		KeyUsage:     x509.KeyUsageDigitalSignature,
		ExtKeyUsage:  []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.certificate, key.Public(), a.key)
	must(t, err)
	pkcs8, err := x509.MarshalPKCS8PrivateKey(key)
	must(t, err)
	return keyPair{
		pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}),
		pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: pkcs8}),
	}
}

// client returns a client that trusts the authority and presents this certificate, if it is not empty.
func (a authority) client(t *testing.T, pair keyPair) *http.Client {
	pool := x509.NewCertPool()
	pool.AddCert(a.certificate)
	config := &tls.Config{RootCAs: pool}
	if pair.key != nil {
		certificate, err := tls.X509KeyPair(pair.certificate, pair.key)
		must(t, err)
		config.Certificates = []tls.Certificate{certificate}
	}
	transport := &http.Transport{TLSClientConfig: config}
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport, Timeout: 30 * time.Second}
}

// rsaKey returns the key pair that signs tokens of service accounts.
func rsaKey(t *testing.T) (private, public []byte) {
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	must(t, err)
	pub, err := x509.MarshalPKIXPublicKey(key.Public())
	must(t, err)
	return pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(key)}),
		pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: pub})
}

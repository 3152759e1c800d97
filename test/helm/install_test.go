// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build helm

package helm_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/oxidecomputer/oxide-csi-plugin/test/await"
	"github.com/oxidecomputer/oxide-csi-plugin/test/pages"
)

// server is an API server with etcd, and a release of the chart in it.
type server struct {
	t               *testing.T
	url, kubeconfig string
	client          *http.Client
}

// TestInstall installs the chart into a real API server. This checks that the objects are valid, and that lookups
// work.
func TestInstall(t *testing.T) {
	s := newServer(t)
	t.Run("cluster ID", s.clusterID)
	t.Run("what the documentation shows", s.documentation)
	t.Run("examples", s.examples)
	t.Run("adopted volumes", s.adopted)
	for _, set := range sets {
		t.Run(set, func(t *testing.T) {
			s.strict(t, "--values="+values(set))
			s.helm(t, "install", "--values="+values(set))
			s.get(t, "/apis/apps/v1/namespaces/"+namespace+"/daemonsets/oxide-csi-node")
			s.helm(t, "upgrade", "--values="+values(set))
			s.gatewaysFirst(t)
			s.uninstall(t)
		})
	}
}

// clusterID checks that an upgrade never loses disks: a changed cluster ID is refused, wherever it comes from.
func (s *server) clusterID(t *testing.T) {
	uid := at[string](t, s.get(t, "/api/v1/namespaces/kube-system"), "metadata", "uid")
	s.helm(t, "install", "--create-namespace")
	if got := s.deployed(t)["value"]; got != uid {
		t.Errorf("the cluster ID is %v, want the UID %s of kube-system", got, uid)
	}
	s.refuses(t, uid, "--set=clusterID=other")
	s.helm(t, "upgrade", "--set=clusterID="+uid)
	s.secret(t, "prod-1")
	s.refuses(t, uid, "--reset-values")
	s.uninstall(t)

	s.helm(t, "install")
	if got := s.deployed(
		t,
	); got["value"] != nil ||
		at[string](t, got, "valueFrom", "secretKeyRef", "key") != "cluster-id" {
		t.Errorf("the cluster ID is %v, want that of the Secret", got)
	}
	s.refuses(t, "prod-1", "--set=clusterID=other")
	s.refuses(t, "prod-1", "--set=secretName=another")
	secret := "/api/v1/namespaces/" + namespace + "/secrets/oxide-secret"
	s.must(t, "DELETE", secret, nil, http.StatusOK)
	s.secret(t, "")
	const lost = "the Secret oxide-secret, which holds no cluster-id any more"
	if out, err := s.command("upgrade").CombinedOutput(); err == nil || !strings.Contains(string(out), lost) {
		t.Errorf("upgrade without the cluster ID of the Secret: %v: %s", err, out)
	}
	s.must(t, "DELETE", secret, nil, http.StatusOK)
	s.secret(t, "prod-1")
	s.helm(t, "upgrade", "--set=clusterID=prod-1")
	s.helm(t, "upgrade", "--values="+values("racks"))
	// With several racks it is that of the Secret, too.
	s.helm(t, "upgrade", "--values="+values("racks"), "--set=clusterID=")
	if got := s.deployed(t); got["value"] != nil {
		t.Errorf("with several racks the cluster ID is %v, want that of the Secret", got)
	}
	s.uninstall(t)
}

// documentation applies the objects that pages show, and renders the chart with the values that they show.
func (s *server) documentation(t *testing.T) {
	s.post(t, "/api/v1/namespaces", object{"metadata": object{"name": "databases"}})
	paths := map[string]string{
		"PersistentVolume":      "/api/v1/persistentvolumes",
		"PersistentVolumeClaim": "/api/v1/namespaces/default/persistentvolumeclaims",
		"Secret":                "/api/v1/namespaces/databases/secrets",
		"StorageClass":          "/apis/storage.k8s.io/v1/storageclasses",
		"VolumeSnapshot":        "/apis/snapshot.storage.k8s.io/v1/namespaces/default/volumesnapshots",
	}
	for _, page := range []string{
		"how-to/encrypt-volumes", "how-to/existing-disk", "how-to/kubernetes", "how-to/planned-restarts",
		"how-to/several-racks", "how-to/snapshots-and-clones",
	} {
		for _, text := range strings.Split(strings.Join(pages.Of(t, "../../docs/"+page+".md"), "---\n"), "---\n") {
			var o object
			must(t, yaml.Unmarshal([]byte(text), &o))
			switch {
			case o["kind"] == "Kustomization":
				var components []string
				for _, component := range at[[]any](t, o, "components") {
					components = append(components, strings.TrimPrefix(component.(string), "deploy/k8s/"))
				}
				run(t, program(t, "kustomize", "helm"), "build", overlay(t, ".", components))
			case o["kind"] != nil:
				s.post(t, paths[at[string](t, o, "kind")]+"?dryRun=All&fieldValidation=Strict", o)
			default:
				file := filepath.Join(t.TempDir(), "values.yaml")
				must(t, os.WriteFile(file, []byte(text), 0o600))
				render(t, "--values="+file)
			}
		}
	}
}

// examples applies the objects of deploy/k8s/examples.
func (s *server) examples(t *testing.T) {
	files, err := filepath.Glob(filepath.Join(manifests, "examples", "*.yaml"))
	must(t, err)
	paths := map[string]string{
		"PersistentVolume":      "/api/v1/persistentvolumes",
		"PersistentVolumeClaim": "/api/v1/namespaces/default/persistentvolumeclaims",
		"Pod":                   "/api/v1/namespaces/default/pods",
		"Secret":                "/api/v1/namespaces/default/secrets",
		"StorageClass":          "/apis/storage.k8s.io/v1/storageclasses",
		"VolumeSnapshot":        "/apis/snapshot.storage.k8s.io/v1/namespaces/default/volumesnapshots",
		"Service":               "/api/v1/namespaces/default/services",
		"StatefulSet":           "/apis/apps/v1/namespaces/default/statefulsets",
	}
	// A pod needs it. In a cluster the controller manager makes it.
	s.post(t, "/api/v1/namespaces/default/serviceaccounts", object{"metadata": object{"name": "default"}})
	shown := 0
	for _, file := range files {
		text, err := os.ReadFile(file)
		must(t, err)
		for key, o := range parse(t, text) {
			path := paths[at[string](t, o, "kind")]
			if path == "" {
				t.Fatalf("%s: no API path is known for its kind", key)
			}
			s.post(t, path+"?dryRun=All&fieldValidation=Strict", o)
			shown++
		}
	}
	if shown < 15 {
		t.Errorf("the examples have only %d objects", shown)
	}
}

// adopted applies the PersistentVolumes that oxide-csi volume adopt prints.
func (s *server) adopted(t *testing.T) {
	transcript, err := os.ReadFile("../../cmd/oxide-csi/testdata/adopt.txt")
	must(t, err)
	objects := regexp.MustCompile("(?s)\n---\n(.*?)\n\n").FindAllSubmatch(transcript, -1)
	if len(objects) == 0 {
		t.Fatal("the transcript has no PersistentVolume")
	}
	for _, text := range objects {
		var o object
		must(t, yaml.Unmarshal(text[1], &o))
		s.post(t, "/api/v1/persistentvolumes?dryRun=All&fieldValidation=Strict", o)
	}
}

// deployed returns the controller's environment variable with the cluster ID.
func (s *server) deployed(t *testing.T) object {
	t.Helper()
	deployment := s.get(t, "/apis/apps/v1/namespaces/"+namespace+"/deployments/oxide-csi-controller")
	for _, v := range at[[]any](t, at[[]any](t, deployment, "spec", "template", "spec", "containers")[0], "env") {
		if v.(object)["name"] == "OXIDE_CSI_CLUSTER_ID" {
			return v.(object)
		}
	}
	t.Fatal("the controller has no cluster ID")
	return nil
}

// refuses checks that an upgrade is refused, and that the message names the ID to keep.
func (s *server) refuses(t *testing.T, keep string, args ...string) {
	t.Helper()
	out, err := s.command("upgrade", args...).CombinedOutput()
	if err == nil || !strings.Contains(string(out), "set clusterID to "+keep) {
		t.Errorf("upgrade with %q: %v: %s", args, err, out)
	}
}

// secret creates the Secret that users create.
func (s *server) secret(t *testing.T, clusterID string) {
	t.Helper()
	s.post(t, "/api/v1/namespaces/"+namespace+"/secrets", object{
		"metadata": object{"name": "oxide-secret"},
		"stringData": object{
			"host":       "https://rack.example.com",
			"project":    "p",
			"token":      "oxide-token-of-a-test",
			"cluster-id": clusterID,
		},
	})
}

// helm installs or upgrades the release.
func (s *server) helm(t *testing.T, command string, args ...string) {
	t.Helper()
	if out, err := s.command(command, args...).CombinedOutput(); err != nil {
		t.Fatalf("%s %q: %v: %s", command, args, err, out)
	}
}

// paths are the API paths of the chart's kinds.
var paths = map[string]string{
	"ConfigMap":                        "/api/v1/namespaces/" + namespace + "/configmaps",
	"Service":                          "/api/v1/namespaces/" + namespace + "/services",
	"ServiceAccount":                   "/api/v1/namespaces/" + namespace + "/serviceaccounts",
	"Deployment":                       "/apis/apps/v1/namespaces/" + namespace + "/deployments",
	"DaemonSet":                        "/apis/apps/v1/namespaces/" + namespace + "/daemonsets",
	"PodDisruptionBudget":              "/apis/policy/v1/namespaces/" + namespace + "/poddisruptionbudgets",
	"Role":                             "/apis/rbac.authorization.k8s.io/v1/namespaces/" + namespace + "/roles",
	"RoleBinding":                      "/apis/rbac.authorization.k8s.io/v1/namespaces/" + namespace + "/rolebindings",
	"ClusterRole":                      "/apis/rbac.authorization.k8s.io/v1/clusterroles",
	"ClusterRoleBinding":               "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
	"CSIDriver":                        "/apis/storage.k8s.io/v1/csidrivers",
	"StorageClass":                     "/apis/storage.k8s.io/v1/storageclasses",
	"VolumeSnapshotClass":              "/apis/snapshot.storage.k8s.io/v1/volumesnapshotclasses",
	"NetworkPolicy":                    "/apis/networking.k8s.io/v1/namespaces/" + namespace + "/networkpolicies",
	"BucketClass":                      "/apis/objectstorage.k8s.io/v1alpha1/bucketclasses",
	"BucketAccessClass":                "/apis/objectstorage.k8s.io/v1alpha1/bucketaccessclasses",
	"StatefulSet":                      "/apis/apps/v1/namespaces/" + namespace + "/statefulsets",
	"PodMonitor":                       "/apis/monitoring.coreos.com/v1/namespaces/" + namespace + "/podmonitors",
	"ServiceMonitor":                   "/apis/monitoring.coreos.com/v1/namespaces/" + namespace + "/servicemonitors",
	"ValidatingAdmissionPolicy":        "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies",
	"ValidatingAdmissionPolicyBinding": "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings",
}

// strict applies the rendered objects with strict field validation, because helm accepts unknown fields. The objects
// are new, so no release exists.
func (s *server) strict(t *testing.T, args ...string) {
	t.Helper()
	for key, o := range parse(t, render(t, args...)) {
		path := paths[at[string](t, o, "kind")]
		if path == "" {
			t.Fatalf("%s: no API path is known for its kind", key)
		}
		s.post(t, path+"?dryRun=All&fieldValidation=Strict", o)
	}
}

// gatewaysFirst checks that neither the namespace, nor the plugin, nor the release can be deleted while there are
// gateways. Then it deletes what keeps them, as docs/how-to/uninstall.md says.
func (s *server) gatewaysFirst(t *testing.T) {
	t.Helper()
	const message = "gateways of buckets need the plugin"
	if len(at[[]any](t, s.get(t, paths["StatefulSet"]), "items")) == 0 {
		return
	}
	options := object{"kind": "DeleteOptions", "apiVersion": "v1"}
	for _, path := range []string{
		"/api/v1/namespaces/" + namespace,
		paths["DaemonSet"] + "/oxide-csi-node",
		paths["Deployment"] + "/oxide-csi-controller",
	} {
		await.Eventually(t, path+" cannot be deleted", func() bool { // a new policy takes a moment
			code, text, err := s.ask("DELETE", path+"?dryRun=All", options)
			return err == nil && code == http.StatusForbidden && strings.Contains(string(text), message)
		})
	}
	uninstall := exec.Command(program(t, "helm", "helm"), "uninstall", "oxide-csi", "--namespace="+namespace,
		"--kubeconfig="+s.kubeconfig)
	if out, err := uninstall.CombinedOutput(); err == nil || !strings.Contains(string(out), message) {
		t.Errorf("helm uninstall: %v: %s", err, out)
	}
	for _, path := range []string{paths["DaemonSet"], paths["Deployment"], paths["StatefulSet"], paths["ClusterRole"]} {
		if len(at[[]any](t, s.get(t, path), "items")) == 0 {
			t.Errorf("%s: a refused uninstallation has deleted it", path)
		}
	}
	s.must(t, "DELETE", paths["ValidatingAdmissionPolicyBinding"]+"/oxide-csi-uninstall", options, http.StatusOK)
	await.Eventually(t, "the plugin can be deleted", func() bool {
		code, _, err := s.ask("DELETE", paths["DaemonSet"]+"/oxide-csi-node?dryRun=All", options)
		return err == nil && code == http.StatusOK
	})
}

// uninstall checks that nothing is left.
func (s *server) uninstall(t *testing.T) {
	t.Helper()
	run(t, program(t, "helm", "helm"), "uninstall", "oxide-csi", "--namespace="+namespace, "--kubeconfig="+s.kubeconfig)
	for _, path := range paths {
		left := s.get(t, path+"?labelSelector=app.kubernetes.io/name=oxide-csi-driver")
		for _, item := range at[[]any](t, left, "items") {
			t.Errorf("%s is left at %s", at[string](t, item, "metadata", "name"), path)
		}
	}
}

func (s *server) command(command string, args ...string) *exec.Cmd {
	args = append(
		[]string{command, "oxide-csi", chart, "--namespace=" + namespace, "--kubeconfig=" + s.kubeconfig},
		args...)
	return exec.Command(program(s.t, "helm", "helm"), args...)
}

// token is the token of an administrator.
const token = "administrator"

func newServer(t *testing.T) *server {
	etcd, apiserver := program(t, "etcd", "kubernetes"), program(t, "kube-apiserver", "kubernetes")
	dir := t.TempDir()
	file := func(name, text string) string {
		path := filepath.Join(dir, name)
		must(t, os.WriteFile(path, []byte(text), 0o600))
		return path
	}
	client, peer := "http://"+freeAddress(t), "http://"+freeAddress(t)
	start(
		t,
		dir,
		etcd,
		"--name=default",
		"--data-dir="+filepath.Join(dir, "etcd"),
		"--unsafe-no-fsync",
		"--log-level=warn",
		"--listen-client-urls="+client,
		"--advertise-client-urls="+client,
		"--listen-peer-urls="+peer,
		"--initial-advertise-peer-urls="+peer,
		"--initial-cluster=default="+peer,
	)

	address := freeAddress(t)
	_, port, err := net.SplitHostPort(address)
	must(t, err)
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	must(t, err)
	signing := file(
		"sa.key",
		string(pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(key)})),
	)
	start(
		t,
		dir,
		apiserver,
		"--etcd-servers="+client,
		"--bind-address=127.0.0.1",
		"--secure-port="+port,
		"--advertise-address=127.0.0.1",
		"--endpoint-reconciler-type=none",
		"--service-cluster-ip-range=10.96.0.0/24",
		"--cert-dir="+filepath.Join(dir, "certificates"),
		"--allow-privileged",
		"--token-auth-file="+file("tokens.csv", token+",administrator,1,system:masters\n"),
		"--authorization-mode=RBAC",
		"--service-account-issuer=https://kubernetes.default.svc",
		"--service-account-key-file="+signing,
		"--service-account-signing-key-file="+signing,
	)

	s := &server{t: t, url: "https://" + address}
	s.kubeconfig = file("kubeconfig", fmt.Sprintf(`{apiVersion: v1, kind: Config, current-context: c,
clusters: [{name: c, cluster: {server: %q, insecure-skip-tls-verify: true}}],
users: [{name: u, user: {token: %s}}], contexts: [{name: c, context: {cluster: c, user: u}}]}`, s.url, token))
	s.client = &http.Client{
		Timeout:   10 * time.Second,
		Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}},
	}
	t.Cleanup(s.client.CloseIdleConnections)
	s.eventually("the API server is ready", "/readyz")
	s.eventually("the system's namespaces exist", "/api/v1/namespaces/kube-system")
	s.definitions(t)
	return s
}

// definitions creates the custom resource definitions of snapshots, COSI and the Prometheus operator.
func (s *server) definitions(t *testing.T) {
	from := moduleFolder(t, "../programs/sidecars", "github.com/kubernetes-csi/external-snapshotter/client/v8")
	files, err := filepath.Glob(filepath.Join(from, "config/crd/snapshot.storage.k8s.io_*.yaml"))
	must(t, err)
	for _, file := range slices.Concat(files, bucketDefinitions(t), monitors(t)) {
		text, err := os.ReadFile(file)
		must(t, err)
		var definition object
		must(t, yaml.Unmarshal(text, &definition))
		if annotations, ok := lookup(definition, []string{"metadata", "annotations"}).(object); ok {
			// The definitions of COSI get it by its kustomization. Without it the API server refuses the group.
			annotations["api-approved.kubernetes.io"] = "unapproved, for a test"
		}
		s.post(t, "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", definition)
	}
	s.eventually("VolumeSnapshotClass is defined", "/apis/snapshot.storage.k8s.io/v1/volumesnapshotclasses")
	s.eventually("VolumeSnapshot is defined", "/apis/snapshot.storage.k8s.io/v1/volumesnapshots")
	s.eventually("BucketClass is defined", "/apis/objectstorage.k8s.io/v1alpha1/bucketclasses")
	s.eventually("BucketAccessClass is defined", "/apis/objectstorage.k8s.io/v1alpha1/bucketaccessclasses")
	s.eventually("PodMonitor is defined", "/apis/monitoring.coreos.com/v1/podmonitors")
	s.eventually("ServiceMonitor is defined", "/apis/monitoring.coreos.com/v1/servicemonitors")
}

// bucketDefinitions returns the files with COSI's definitions. The objects are the same in v0.2.2, which cannot be
// downloaded with a checksum.
func bucketDefinitions(t *testing.T) []string {
	t.Helper()
	from := moduleFolder(t, t.TempDir(), "sigs.k8s.io/container-object-storage-interface-api@v0.1.0")
	files, err := filepath.Glob(filepath.Join(from, "crds", "*.yaml"))
	must(t, err)
	if len(files) != 5 {
		t.Fatalf("COSI has the definitions %q", files)
	}
	return files
}

// operator is a release of the Prometheus operator. Only its definitions of monitors are used.
const operator = "github.com/prometheus-operator/prometheus-operator@v0.85.0"

// monitors returns the files with the definitions of PodMonitor and ServiceMonitor.
func monitors(t *testing.T) (files []string) {
	t.Helper()
	from := moduleFolder(t, t.TempDir(), operator) // outside of a module
	for _, kind := range []string{"podmonitors", "servicemonitors"} {
		files = append(files, filepath.Join(from, "example/prometheus-operator-crd/monitoring.coreos.com_"+kind+".yaml"))
	}
	return files
}

// moduleFolder downloads a module, in the version that the go.mod in dir requires if none is given, and returns its
// folder.
func moduleFolder(t *testing.T, dir, module string) string {
	t.Helper()
	download := exec.Command("go", "mod", "download", "-json", module)
	download.Dir = dir
	text, err := download.Output()
	must(t, err)
	var downloaded struct{ Dir string }
	must(t, json.Unmarshal(text, &downloaded))
	return downloaded.Dir
}

// eventually waits until path exists.
func (s *server) eventually(what, path string) {
	s.t.Helper()
	for deadline := time.Now().Add(90 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		code, _, err := s.ask("GET", path, nil)
		if err == nil && code == http.StatusOK {
			return
		}
		if time.Now().After(deadline) {
			s.t.Fatalf("not in time: %s: HTTP %d, %v", what, code, err)
		}
	}
}

func (s *server) get(t *testing.T, path string) object {
	t.Helper()
	return s.must(t, "GET", path, nil, http.StatusOK)
}

func (s *server) post(t *testing.T, path string, o object) {
	s.must(t, "POST", path, o, http.StatusCreated)
}

func (s *server) must(t *testing.T, method, path string, o object, want int) object {
	t.Helper()
	code, text, err := s.ask(method, path, o)
	must(t, err)
	if code != want {
		t.Fatalf("%s %s: HTTP %d: %s", method, path, code, text)
	}
	var answer object
	must(t, json.Unmarshal(text, &answer))
	return answer
}

func (s *server) ask(method, path string, o object) (int, []byte, error) {
	body, err := json.Marshal(o)
	if err != nil {
		return 0, nil, err
	}
	request, err := http.NewRequestWithContext(context.Background(), method, s.url+path, bytes.NewReader(body))
	if err != nil {
		return 0, nil, err
	}
	request.Header.Set("Authorization", "Bearer "+token)
	request.Header.Set("Content-Type", "application/json")
	response, err := s.client.Do(request)
	if err != nil {
		return 0, nil, err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	return response.StatusCode, text, err
}

// start starts a server, and ends it with the test.
func start(t *testing.T, dir, path string, args ...string) {
	t.Helper()
	log, err := os.Create(filepath.Join(dir, filepath.Base(path)+".log"))
	must(t, err)
	cmd := exec.Command(path, args...)
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + dir}
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	must(t, cmd.Start())
	t.Cleanup(func() {
		must(t, cmd.Process.Kill())
		_ = cmd.Wait() // the server was killed
		must(t, log.Close())
		if t.Failed() {
			text, _ := os.ReadFile(log.Name())
			t.Logf("the end of the log of %s:\n%s", filepath.Base(path), text[max(0, len(text)-2000):])
		}
	})
}

func freeAddress(t *testing.T) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	defer listener.Close()
	return listener.Addr().String()
}

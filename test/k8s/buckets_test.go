// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build k8s && buckets

package k8s_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/credentials"
	"github.com/aws/aws-sdk-go-v2/service/s3"

	"github.com/oxidecomputer/oxide-csi-plugin/test/await"
	"github.com/oxidecomputer/oxide-csi-plugin/test/pages"
)

func init() { alsoPrepare = prepareBuckets }

const (
	bucketsOverlay = "overlay-buckets"
	clientImage    = "example.com/client:test"
	curlImage      = "docker.io/curlimages/curl:8.12.1" // as on the page; a stand-in with Debian's curl
	// bucketDefinitions is the newest release with COSI's definitions that the module proxy has with a checksum. They are
	// the same in v0.2.2, but for the default of deletionPolicy: classes set it.
	bucketDefinitions = "sigs.k8s.io/container-object-storage-interface-api@v0.1.0"
	gatewayHost       = "oxide-buckets-main." + namespace + ".svc"
	gatewayPod        = "oxide-buckets-main-0"
)

// prepareBuckets makes the images that the manifests of buckets name, and that of a workload. The image of COSI's
// sidecar has the stand-in of test/buckets. It also renders COSI's definitions.
func prepareBuckets(dir, built string) error {
	for _, pkg := range []string{"cmd/oxide-cosi", "test/buckets/standin", "test/buckets/client"} {
		build := exec.Command("go", "build", "-o", dir+"/", "../../"+pkg)
		build.Env = append(os.Environ(), "CGO_ENABLED=0")
		if _, err := output(build); err != nil {
			return err
		}
	}
	rendered, err := command(filepath.Join(built, "kubectl"), "kustomize", bucketsOverlay)
	if err != nil {
		return err
	}
	shell := filepath.Join(dir, "sh")
	if _, err := command("cp", "/bin/busybox", shell); err != nil {
		return err
	}
	ingredients := map[string][]string{
		"oxide-cosi":            {"-program=" + filepath.Join(dir, "oxide-cosi")},
		"objectstorage-sidecar": {"-program=" + filepath.Join(dir, "standin")},
		"versitygw":             {"-program=" + filepath.Join(built, "versitygw"), "mkdir"},
		"client":                {"-program=" + filepath.Join(dir, "client")},
		"curl":                  {"-program=" + shell, "curl", "sed"},
	}
	images := []string{clientImage, curlImage}
	for _, match := range regexp.MustCompile(`image: (\S+)`).FindAllStringSubmatch(rendered, -1) {
		if !released(match[1]) {
			images = append(images, match[1])
		}
	}
	for _, image := range images {
		name, _, _ := strings.Cut(path.Base(image), ":")
		if ingredients[name] == nil {
			return fmt.Errorf("nothing is known for image %s", image)
		}
		tar := filepath.Join(dir, "images", path.Base(image)+".tar")
		if _, err := command(
			filepath.Join(dir, "image"),
			append([]string{"-o=" + tar, "-tag=" + image}, ingredients[name]...)...); err != nil {
			return err
		}
	}
	download := exec.Command("go", "mod", "download", "-json", bucketDefinitions)
	download.Dir = dir // outside of a module
	text, err := output(download)
	if err != nil {
		return err
	}
	var module struct{ Dir string }
	if err := json.Unmarshal([]byte(text), &module); err != nil {
		return err
	}
	definitions, err := command(filepath.Join(built, "kubectl"), "kustomize", module.Dir)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "cosi.yaml"), []byte(definitions), 0o600)
}

// TestBuckets takes a bucket through its life: a claim, an access, workloads that write and read, a gateway that moves
// to another node with its volume, a bucket of before, a store that grows, a revocation, and the end. It follows
// docs/tutorials/first-bucket.md, with an overlay for what the cluster lacks.
func TestBuckets(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: namespaces, mounts, loop devices")
	}
	blocks := pages.Of(t, "../../docs/tutorials/first-bucket.md")
	if len(blocks) != 5 {
		t.Fatalf("the page has %d blocks", len(blocks))
	}
	c := newCluster(t)
	c.install(t, "overlay")
	c.clone(t)
	c.kubectl(t, "apply", "-f", filepath.Join(c.made, "cosi.yaml"))
	c.kubectl(t, "wait", "--for=condition=Established", "crd/bucketaccesses.objectstorage.k8s.io", "--timeout=60s")
	c.asReader(t, blocks[0])
	authority, rootKey := c.gatewaySecrets(t)
	c.forward(t)
	overlay, err := filepath.Abs(bucketsOverlay)
	must(t, err)
	c.asReader(t, pages.Fill(t, blocks[1], "deploy/k8s/buckets", overlay))
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(c.try("-n", namespace, "describe", "pods", "-l", "app in (oxide-cosi,oxide-buckets-main)"))
			t.Log(
				c.try(
					"-n",
					namespace,
					"logs",
					"--prefix",
					"--tail=40",
					"--all-containers",
					"-l",
					"app in (oxide-cosi,oxide-buckets-main)",
				),
			)
		}
	})
	for _, workload := range []string{"statefulset/oxide-buckets-main", "deployment/oxide-cosi"} {
		c.kubectl(t, "-n", namespace, "rollout", "status", workload, "--timeout="+waitLimit.String())
	}

	if shown := c.asReader(t, blocks[2]); !strings.Contains(shown, gatewayHost) {
		t.Errorf("the keys name no endpoint: %s", shown)
	}
	// The cluster has no DNS, and the stand-in for curl's image has its shell in the root folder.
	const spec = "spec:\n  restartPolicy: Never\n"
	aliases := fmt.Sprintf("  hostAliases: [{ip: %s, hostnames: [%s]}]\n", gatewayAddress, gatewayHost)
	shown := c.asReader(t, pages.Fill(t, blocks[3], spec, spec+aliases, "command: [sh,", "command: [/sh,"))
	if !strings.HasSuffix(shown, "\nhello, bucket") {
		t.Errorf("the first object is not shown: %q", shown)
	}
	c.apply(t, workload(authority))
	c.running(t, "client")
	use := func(args ...string) (string, error) {
		return c.try(append([]string{"exec", "client", "--", "/client"}, args...)...)
	}
	must := func(args ...string) string {
		t.Helper()
		out, err := use(args...)
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	must("put", "folder/object", "all the data")
	if got := must("get", "folder/object"); got != "all the data" {
		t.Errorf("the object is %q", got)
	}

	before := c.get(t, ".spec.nodeName", "-n", namespace, "pod", gatewayPod)
	c.kubectl(t, "cordon", before)
	c.gone(t, "-n", namespace, "pod", gatewayPod)
	c.kubectl(t, "-n", namespace, "rollout", "status", "statefulset/oxide-buckets-main", "--timeout="+waitLimit.String())
	if after := c.get(t, ".spec.nodeName", "-n", namespace, "pod", gatewayPod); after == before || after == "" {
		t.Errorf("the gateway is on %q, and was on %q", after, before)
	}
	c.kubectl(t, "uncordon", before)
	if got := must("get", "folder/object"); got != "all the data" {
		t.Errorf("after the move the object is %q", got)
	}

	c.existingBucket(t, authority, rootKey)

	c.growStore(t)
	if got := must("get", "folder/object"); got != "all the data" {
		t.Errorf("in the larger store the object is %q", got)
	}

	must("delete", "folder/object")
	remove := slices.Collect(strings.Lines(blocks[4]))
	c.asReader(t, remove[0]+remove[1])
	if out, err := use("get", "folder/object"); err == nil || !strings.Contains(err.Error(), "InvalidAccessKeyId") {
		t.Errorf("revoked keys: %s, %v, want a refusal", out, err)
	}
	if secret := c.get(t, ".metadata.name", "secret", "backups-keys"); secret != "" {
		t.Error("the Secret with the keys is left")
	}
	c.asReader(t, remove[2])
	await.Within(t, waitLimit, "the Bucket is gone", func() bool {
		return c.get(t, ".items[*].metadata.name", "buckets.objectstorage.k8s.io") == ""
	})
	c.gone(t, "pod", "client")
	c.uninstallBuckets(t, overlay)
	c.uninstallRelease(t, blocks)
}

// uninstallBuckets tries to delete the namespace under a gateway that runs, which is refused. Without the policy it
// succeeds, and the test gets out of that as docs/how-to/uninstall.md says. Then it uninstalls in the right order.
func (c *cluster) uninstallBuckets(t *testing.T, overlay string) {
	run := pages.Of(t, "../../docs/how-to/uninstall.md")
	stop, rescue := run[0], run[1]
	c.refusesUninstall(t, "kubectl delete namespace", func() error {
		_, err := c.try("delete", "namespace", namespace, "--timeout="+waitLimit.String())
		return err
	})
	c.kubectl(t, "delete", "validatingadmissionpolicybinding", "oxide-csi-uninstall")
	began := time.Now()
	await.Within(t, waitLimit, "the namespace is deleted", func() bool { // the API server still has the binding
		_, err := c.try("delete", "--wait=false", "namespace", namespace)
		return err == nil
	})
	await.Within(t, waitLimit, "the node plugins are gone", func() bool {
		return c.get(t, ".items[*].metadata.name", "-n", namespace, "pods", "-l", "app=oxide-csi-node") == ""
	})
	t.Logf("measured: when the node plugins are gone, the namespace is %q, with the pod %q",
		c.get(t, ".status.phase", "namespace", namespace), c.get(t, ".metadata.name", "-n", namespace, "pod", gatewayPod))
	c.asReader(t, rescue)
	c.install(t, "overlay")
	c.storeDetached(t)
	t.Logf("measured: from the deletion of the namespace to the detached volume: %.0f s", time.Since(began).Seconds())

	secrets := pages.Of(t, "../../docs/tutorials/first-bucket.md")[0]
	c.asReader(t, secrets)
	c.kubectl(t, "apply", "-k", overlay)
	c.stopped(t, stop)
	c.timed(t, "kubectl delete -k", func() {
		for _, installed := range []string{overlay, "overlay"} {
			c.eventually(t, func() error {
				_, err := c.try("delete", "-k", installed, "--ignore-not-found", "--timeout="+waitLimit.String())
				return err
			})
		}
	})
	c.noStores(t)
}

// uninstallRelease does with the chart what uninstallBuckets does with the manifests, with a bucket in use.
func (c *cluster) uninstallRelease(t *testing.T, tutorial []string) {
	run := pages.Of(t, "../../docs/how-to/uninstall.md")
	stop, rescue := run[0], run[1]
	uninstall := func() error { return c.tryHelm("uninstall", "oxide-csi", "--timeout="+waitLimit.String()) }
	c.release(t, tutorial[0])
	c.asReader(t, tutorial[2])
	c.refusesUninstall(t, "helm uninstall", uninstall)
	c.kubectl(t, "get", "daemonset/oxide-csi-node", "deployment/oxide-csi-controller", "-n", namespace)

	c.kubectl(t, "delete", "validatingadmissionpolicybinding", "oxide-csi-uninstall")
	began := time.Now()
	c.timed(t, "helm uninstall with a gateway that runs", func() {
		await.Within(t, waitLimit, "the release is gone", func() bool { return uninstall() == nil })
	})
	c.kubectl(t, "delete", "--wait=false", "namespace", namespace)
	await.Within(t, waitLimit, "the node plugins are gone", func() bool {
		return c.get(t, ".items[*].metadata.name", "-n", namespace, "pods", "-l", "app=oxide-csi-node") == ""
	})
	t.Logf("measured: when the node plugins are gone, the namespace is %q, with the pod %q",
		c.get(t, ".status.phase", "namespace", namespace), c.get(t, ".metadata.name", "-n", namespace, "pod", gatewayPod))
	c.asReader(t, rescue)
	c.release(t, tutorial[0])
	t.Logf("measured: from helm uninstall to a new release: %.0f s", time.Since(began).Seconds())

	for line := range strings.Lines(tutorial[4]) {
		if strings.Contains(line, "bucket") && !strings.Contains(line, "configmap") {
			c.timed(t, strings.TrimSpace(line), func() { c.asReader(t, line) })
		}
	}
	c.stopped(t, stop)
	c.timed(t, "helm uninstall after the gateway", func() { c.eventually(t, uninstall) })
	c.noObjects(t)
	c.timed(t, "kubectl delete namespace", func() {
		c.kubectl(t, "delete", "namespace", namespace, "--timeout="+waitLimit.String())
	})
	c.noStores(t)
	for _, kind := range []string{"buckets", "bucketclaims", "bucketaccesses", "bucketclasses", "bucketaccessclasses"} {
		if left := c.get(t, ".items[*].metadata.name", "-A", kind+".objectstorage.k8s.io"); left != "" {
			t.Errorf("left of %s: %s", kind, left)
		}
	}
}

// release installs the chart with a store, and with what [bucketsOverlay] adds for the test's cluster.
func (c *cluster) release(t *testing.T, secrets string) {
	t.Helper()
	c.createSecret(t, c.sim.Token)
	c.asReader(t, secrets)
	c.apply(t, fmt.Sprintf(`apiVersion: v1
kind: Service
metadata: {name: oxide-buckets-main, namespace: %s}
spec: {clusterIP: %s, selector: {app: oxide-buckets-main}, ports: [{name: s3, port: 7070, targetPort: s3}]}
`, namespace, gatewayAddress))
	c.helm(t, "install", "oxide-csi", "../../deploy/helm/oxide-csi", "--take-ownership", "--values=upgrade.yaml",
		"--set=buckets.enabled=true", "--set=buckets.stores[0].name=main", "--set=buckets.stores[0].size=1Gi")
	c.kubectl(t, "-n", namespace, "patch", "deployment", "oxide-cosi", "-p", fmt.Sprintf(
		`{"spec":{"template":{"spec":{"hostAliases":[{"ip":%q,"hostnames":[%q]}]}}}}`, gatewayAddress, gatewayHost))
	c.kubectl(t, "-n", namespace, "patch", "statefulset", "oxide-buckets-main", "-p",
		`{"spec":{"template":{"spec":{"containers":[{"name":"versitygw","env":[{"name":"PATH","value":"/:/usr/bin"}]}]}}}}`)
	c.kubectl(t, "-n", namespace, "delete", "pod", "-l", "app=oxide-buckets-main") // a set does not replace one that fails
	c.rolledOut(t)
	for _, workload := range []string{"statefulset/oxide-buckets-main", "deployment/oxide-cosi"} {
		c.kubectl(t, "-n", namespace, "rollout", "status", workload, "--timeout="+waitLimit.String())
	}
}

// refusesUninstall checks that an uninstallation is refused at once, and that the store still runs.
func (c *cluster) refusesUninstall(t *testing.T, name string, uninstall func() error) {
	t.Helper()
	var err error
	c.timed(t, "a refused "+name, func() { err = uninstall() })
	if err == nil || !strings.Contains(err.Error(), "stop them first") {
		t.Fatalf("%s: %v", name, err)
	}
	if ready := c.get(t, ".status.readyReplicas", "-n", namespace, "statefulset", "oxide-buckets-main"); ready != "1" {
		t.Errorf("after a refused %s %q gateways are ready", name, ready)
	}
}

// stopped stops the store that runs, as docs/how-to/uninstall.md says.
func (c *cluster) stopped(t *testing.T, stop string) {
	t.Helper()
	c.kubectl(t, "-n", namespace, "rollout", "status", "statefulset/oxide-buckets-main", "--timeout="+waitLimit.String())
	c.timed(t, "stop of the gateway", func() { c.asReader(t, stop) })
	c.storeDetached(t)
}

// eventually repeats an uninstallation until the API server has noticed that the policy's binding is gone. On a busy
// machine that can be later than docs/how-to/uninstall.md waits.
func (c *cluster) eventually(t *testing.T, uninstall func() error) {
	t.Helper()
	await.Within(t, waitLimit, "the uninstallation is not refused any more", func() bool {
		err := uninstall()
		if err != nil && !strings.Contains(err.Error(), "stop them first") {
			t.Fatal(err)
		}
		return err == nil
	})
}

// timed logs how long something takes.
func (c *cluster) timed(t *testing.T, name string, do func()) {
	t.Helper()
	began := time.Now()
	do()
	t.Logf("measured: %s: %.1f s", name, time.Since(began).Seconds())
}

// storeDetached waits until no node has the volume of a store.
func (c *cluster) storeDetached(t *testing.T) {
	t.Helper()
	for _, n := range []*node{c.a, c.b} {
		await.Within(t, waitLimit, "the volume is detached", func() bool { return len(c.attached(t, n)) == 0 })
	}
	await.Within(t, waitLimit, "Kubernetes knows it", func() bool {
		return c.get(t, ".items[*].metadata.name", "volumeattachments") == ""
	})
}

// noStores checks that an uninstallation leaves only the disks, whose reclaim policy is Retain.
func (c *cluster) noStores(t *testing.T) {
	t.Helper()
	for _, left := range []string{
		c.get(t, ".metadata.name", "namespace", namespace), c.get(t, ".items[*].metadata.name", "volumeattachments"),
	} {
		if left != "" {
			t.Errorf("left in the cluster: %s", left)
		}
	}
	if left := c.left(t); left.Disks == 0 || left.Loops+left.Mounts > 0 || len(left.GuestErrors) > 0 {
		t.Errorf("left on the rack and in the guests: %+v, want only disks", left)
	}
}

// growStore makes the volume of the store larger, as docs/explanation/buckets.md says.
func (c *cluster) growStore(t *testing.T) {
	const set, claim = "statefulset/oxide-buckets-main", "data-" + gatewayPod
	c.kubectl(t, "-n", namespace, "scale", set, "--replicas=0")
	c.kubectl(t, "-n", namespace, "wait", "--for=delete", "pod/"+gatewayPod, "--timeout="+waitLimit.String())
	c.kubectl(t, "-n", namespace, "patch", "pvc", claim, "-p", `{"spec":{"resources":{"requests":{"storage":"3Gi"}}}}`)
	await.Within(t, waitLimit, "the claim of the store has grown", func() bool {
		return c.get(t, ".status.capacity.storage", "-n", namespace, "pvc", claim) == "3Gi"
	})
	c.kubectl(t, "-n", namespace, "scale", set, "--replicas=1")
	c.kubectl(t, "-n", namespace, "rollout", "status", set, "--timeout="+waitLimit.String())
	on := c.get(t, ".spec.nodeName", "-n", namespace, "pod", gatewayPod)
	capacity := regexp.MustCompile(`kubelet_volume_stats_capacity_bytes\{.*persistentvolumeclaim="` + claim + `"\} (\S+)`)
	await.Within(t, waitLimit, "the filesystem of the store has grown", func() bool { // kubelet asks once in a minute
		match := capacity.FindStringSubmatch(c.kubectl(t, "get", "--raw", "/api/v1/nodes/"+on+"/proxy/metrics"))
		if match == nil {
			return false
		}
		bytes, err := strconv.ParseFloat(match[1], 64)
		must(t, err)
		return bytes > 5<<29
	})
}

// existingBucket gives keys for a bucket that the driver did not make, with deploy/k8s/buckets/existing.yaml. When the
// claim is gone, the bucket still has its object.
func (c *cluster) existingBucket(t *testing.T, authority, rootKey string) {
	bucket, key := aws.String("archive"), aws.String("old")
	root := gatewayClient(t, authority, "root", rootKey)
	_, err := root.CreateBucket(t.Context(), &s3.CreateBucketInput{Bucket: bucket})
	must(t, err)
	put := &s3.PutObjectInput{Bucket: bucket, Key: key, Body: strings.NewReader("older than the driver")}
	_, err = root.PutObject(t.Context(), put)
	must(t, err)

	c.kubectl(t, "apply", "-f", manifests+"/buckets/existing.yaml")
	c.kubectl(
		t,
		"wait",
		"--for=jsonpath={.status.accessGranted}=true",
		"bucketaccess/archive",
		"--timeout="+waitLimit.String(),
	)
	text, err := base64.StdEncoding.DecodeString(c.get(t, ".data.BucketInfo", "secret", "archive-keys"))
	must(t, err)
	var info struct {
		Spec struct {
			BucketName string
			SecretS3   struct{ AccessKeyID, AccessSecretKey string }
		}
	}
	must(t, json.Unmarshal(text, &info))
	if info.Spec.BucketName != *bucket {
		t.Errorf("the Secret names the bucket %q, want %q", info.Spec.BucketName, *bucket)
	}
	granted := gatewayClient(t, authority, info.Spec.SecretS3.AccessKeyID, info.Spec.SecretS3.AccessSecretKey)
	read := func(client *s3.Client) error {
		object, err := client.GetObject(t.Context(), &s3.GetObjectInput{Bucket: bucket, Key: key})
		if err != nil {
			return err
		}
		defer object.Body.Close()
		if got, err := io.ReadAll(object.Body); err != nil || string(got) != "older than the driver" {
			t.Errorf("the object is %q: %v", got, err)
		}
		return nil
	}
	must(t, read(granted))
	if _, err := granted.PutObject(t.Context(), put); err == nil {
		t.Error("keys to read have written")
	}
	c.gone(t, "bucketaccess", "archive")
	if err := read(granted); err == nil {
		t.Error("revoked keys still read")
	}
	c.gone(t, "bucketclaim", "archive")
	must(t, read(root))
	_, err = root.DeleteObject(t.Context(), &s3.DeleteObjectInput{Bucket: bucket, Key: key})
	must(t, err)
	_, err = root.DeleteBucket(t.Context(), &s3.DeleteBucketInput{Bucket: bucket})
	must(t, err)
}

// gatewayClient returns a client of the gateway with these keys. This machine has no DNS of the cluster.
func gatewayClient(t *testing.T, authority, access, secret string) *s3.Client {
	t.Helper()
	authorities := x509.NewCertPool()
	authorities.AppendCertsFromPEM([]byte(authority))
	return s3.New(s3.Options{
		BaseEndpoint: aws.String("https://" + gatewayHost + ":7070"), Region: "us-east-1", UsePathStyle: true,
		Credentials: credentials.NewStaticCredentialsProvider(access, secret, ""),
		HTTPClient: &http.Client{Transport: &http.Transport{
			TLSClientConfig: &tls.Config{RootCAs: authorities},
			DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
				return new(net.Dialer).DialContext(ctx, network, gatewayAddress+":7070")
			},
		}},
	})
}

// gatewaySecrets returns the gateway's certificate, and the secret key of the user root.
func (c *cluster) gatewaySecrets(t *testing.T) (certificate, rootKey string) {
	t.Helper()
	read := func(secret, key string) string {
		text, err := base64.StdEncoding.DecodeString(c.get(t, ".data."+key, "-n", namespace, "secret", secret))
		must(t, err)
		return string(text)
	}
	return read("oxide-buckets-main-tls", `ca\.crt`), read("oxide-buckets-main-keys", "secret-key")
}

// forward does what kube-proxy does for the gateway's Service: it connects its address with the pod.
func (c *cluster) forward(t *testing.T) {
	listener, err := net.Listen("tcp", gatewayAddress+":7070")
	must(t, err)
	t.Cleanup(func() { must(t, listener.Close()) })
	go func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return // the test has ended
			}
			go c.connect(client)
		}
	}()
}

func (c *cluster) connect(client net.Conn) {
	defer client.Close()
	address, err := c.try("-n", namespace, "get", "pod", gatewayPod, "-o", "jsonpath={.status.podIP}")
	if err != nil {
		return
	}
	pod, err := net.DialTimeout("tcp", address+":7070", 5*time.Second)
	if err != nil {
		return
	}
	defer pod.Close()
	var group sync.WaitGroup
	for _, pair := range [][2]net.Conn{{client, pod}, {pod, client}} {
		group.Go(func() {
			_, _ = io.Copy(pair[0], pair[1]) // an error is an end, which the other side sees
			_ = pair[0].(*net.TCPConn).CloseWrite()
		})
	}
	group.Wait()
}

// workload is a pod that uses the bucket of the example, with the authority that it trusts.
func workload(authority string) string {
	return fmt.Sprintf(`apiVersion: v1
kind: ConfigMap
metadata: {name: authority}
data:
  ca.crt: |
    %s
---
apiVersion: v1
kind: Pod
metadata: {name: client}
spec:
  terminationGracePeriodSeconds: 1
  automountServiceAccountToken: false
  securityContext: {runAsUser: 1000}
  hostAliases: [{ip: %s, hostnames: [%s]}]
  containers:
    - name: client
      image: %s
      args: [wait]
      volumeMounts:
        - {name: bucket, mountPath: /bucket}
        - {name: authority, mountPath: /authority}
  volumes:
    - {name: bucket, secret: {secretName: backups-keys}}
    - {name: authority, configMap: {name: authority}}
`, strings.ReplaceAll(strings.TrimSpace(authority), "\n", "\n    "), gatewayAddress, gatewayHost, clientImage)
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build k8s && buckets && release

package k8s_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/test/await"
	"github.com/oxidecomputer/oxide-csi-plugin/test/pages"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// TestRelease installs the rendered manifests of a release, with the images of its OCI layouts. Then the images of its
// archives for Docker replace them. These have tags instead of digests. One pod writes to a volume before, and another
// one reads it after that.
func TestRelease(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: namespaces, mounts, loop devices")
	}
	imports := pages.Of(t, "../../docs/how-to/verify-a-release.md")
	if len(imports) != 2 {
		t.Fatalf("the page has %d blocks", len(imports))
	}
	rendered := func(kind string) string {
		return filepath.Join(simtest.ReleaseFiles(), "oxide-csi-"+simtest.ReleaseVersion()+"-"+kind+".yaml")
	}
	c := newCluster(t)
	c.createSecret(t, c.sim.Token)
	c.kubectl(t, "apply", "-f", filepath.Join(c.made, "cosi.yaml"))
	c.kubectl(t, "wait", "--for=condition=Established", "crd/bucketaccessclasses.objectstorage.k8s.io", "--timeout=60s")
	for _, kind := range []string{"kubernetes", "kubernetes-buckets"} {
		c.kubectl(t, "apply", "--dry-run=server", "-f", rendered(kind))
	}

	c.reimport(t, imports[0])
	c.kubectl(t, "apply", "-f", rendered("kubernetes-snapshots"))
	c.logIfFailed(t)
	c.kubectl(t, "-n", namespace, "set", "env", "daemonset/oxide-csi-node", "--containers=oxide-plugin",
		"OXIDE_CSI_DEV_ROOT="+guestInNode+"/dev", "OXIDE_CSI_SYS_ROOT="+guestInNode+"/sys")
	c.rolledOut(t)
	c.pluginImages(t, "@sha256:")
	c.apply(t, claim{name: "data"}.String()+pod{name: "writes", claim: "data", on: c.a}.String())
	c.running(t, "writes")
	c.sh(t, "writes", "echo here >/data/file; sync")
	c.gone(t, "pod", "writes")

	c.reimport(t, imports[1])
	text, err := os.ReadFile(rendered("kubernetes-snapshots"))
	must(t, err)
	tag := "v" + simtest.ReleaseVersion()
	c.write(t, "tagged/rendered.yaml", string(text))
	c.write(t, "tagged/kustomization.yaml", fmt.Sprintf(`apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
resources: [rendered.yaml]
images:
  - {name: oxidecomputer/oxide-csi-plugin, newTag: %[1]s}
  - {name: oxidecomputer/oxide-csi-controller, newTag: %[1]s}
`, tag))
	c.kubectl(t, "apply", "-k", c.path("tagged"))
	c.rolledOut(t)
	c.pluginImages(t, ":"+tag)
	c.apply(t, pod{name: "reads", claim: "data", on: c.b}.String())
	c.running(t, "reads")
	if got := c.sh(t, "reads", "/busybox cat /data/file"); got != "here" {
		t.Errorf("the file has %q", got)
	}
	c.gone(t, "pod/reads", "pvc/data")
	c.nothingLeft(t)

	c.kubectl(t, "run", "cosi", "--image=oxidecomputer/oxide-cosi:"+tag, "--restart=Never", "--", "--version")
	c.kubectl(t, "wait", "--for=jsonpath={.status.phase}=Succeeded", "pod/cosi", "--timeout="+waitLimit.String())
	if shown := c.kubectl(t, "logs", "cosi"); !strings.HasSuffix(shown, " "+tag) {
		t.Errorf("the COSI driver prints %q", shown)
	}
}

// reimport removes our images from the nodes, and imports them with the commands of a page.
func (c *cluster) reimport(t *testing.T, commands string) {
	t.Helper()
	script := "cd " + simtest.ReleaseFiles() + `
ctr --namespace=k8s.io images ls --quiet | grep oxidecomputer/ | xargs ctr --namespace=k8s.io images rm
` + pages.Fill(t, commands, "VERSION", simtest.ReleaseVersion())
	for _, n := range []*node{c.a, c.b} {
		_, err := command("nsenter", fmt.Sprintf("--target=%d", n.init.Process.Pid), "--mount",
			"bash", "-eu", "-o", "pipefail", "-c", script)
		must(t, err)
	}
}

// pluginImages waits until the images of all containers of the plugin have a text in their names. Containers of before
// may still be ending.
func (c *cluster) pluginImages(t *testing.T, text string) {
	t.Helper()
	await.Within(t, waitLimit, "the plugin runs images with "+text, func() bool {
		images := strings.Fields(c.get(t, `.items[*].spec.containers[?(@.name=="oxide-plugin")].image`,
			"-n", namespace, "pods", "--field-selector=status.phase=Running"))
		other := func(image string) bool { return !strings.Contains(image, text) }
		return len(images) >= 3 && !slices.ContainsFunc(images, other)
	})
}

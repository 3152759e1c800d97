// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build k8s

package k8s_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/test/await"
	"github.com/oxidecomputer/oxide-csi-plugin/test/pages"
)

// try runs kubectl as the administrator.
func (c *cluster) try(args ...string) (string, error) { return c.feed("", args...) }

// feed runs kubectl with stdin.
func (c *cluster) feed(stdin string, args ...string) (string, error) {
	cmd := exec.Command(
		filepath.Join(c.programs, "kubectl"),
		append([]string{"--kubeconfig=" + c.path("admin.kubeconfig")}, args...)...)
	cmd.Stdin = strings.NewReader(stdin)
	return output(cmd)
}

func (c *cluster) kubectl(t *testing.T, args ...string) string {
	t.Helper()
	out, err := c.try(args...)
	must(t, err)
	return strings.TrimSpace(out)
}

// documented runs the first line of a page's blocks that begins with these words, and returns what it prints. What it
// writes to its standard error fails the test.
func (c *cluster) documented(t *testing.T, page, begins string) string {
	t.Helper()
	for line := range strings.Lines(strings.Join(pages.Of(t, "../../docs/"+page), "")) {
		if !strings.HasPrefix(line, begins) {
			continue
		}
		cmd := exec.Command("sh", "-c", line)
		cmd.Env = append(os.Environ(), "KUBECONFIG="+c.path("admin.kubeconfig"), "PATH="+c.programs+":"+os.Getenv("PATH"))
		var failed strings.Builder
		cmd.Stderr = &failed
		shown, _ := cmd.Output() // grep fails when it finds nothing
		if failed.Len() > 0 {
			t.Fatalf("%s: %s", line, &failed)
		}
		return strings.TrimSpace(string(shown))
	}
	t.Fatalf("docs/%s has no line that begins with %q", page, begins)
	return ""
}

// apply creates or changes objects.
func (c *cluster) apply(t *testing.T, objects string) {
	t.Helper()
	_, err := c.feed(objects, "apply", "-f", "-")
	must(t, err)
}

// get returns a field of an object, or of all objects if no name is given. It is empty if there is none.
func (c *cluster) get(t *testing.T, path string, args ...string) string {
	t.Helper()
	return c.kubectl(t, append([]string{"get", "--ignore-not-found", "-o", "jsonpath={" + path + "}"}, args...)...)
}

// running waits until the pods run and are ready.
func (c *cluster) running(t *testing.T, pods ...string) {
	t.Helper()
	for _, pod := range pods {
		if _, err := c.try("wait", "--for=condition=Ready", "pod/"+pod, "--timeout="+waitLimit.String()); err != nil {
			t.Fatalf("%v\n%s", err, c.kubectl(t, "describe", "pod", pod))
		}
	}
}

// event waits until an event of an object of any namespace has the text.
func (c *cluster) event(t *testing.T, object, text string) {
	t.Helper()
	await.Within(t, waitLimit, "an event of "+object+" says: "+text, func() bool {
		return strings.Contains(
			c.get(t, ".items[*].message", "events", "-A", "--field-selector=involvedObject.name="+object),
			text,
		)
	})
}

// gone deletes objects, and waits until they no longer exist.
func (c *cluster) gone(t *testing.T, args ...string) {
	t.Helper()
	c.kubectl(t, append([]string{"delete", "--timeout=" + waitLimit.String()}, args...)...)
}

// sh runs a script in a pod.
func (c *cluster) sh(t *testing.T, pod, script string) string {
	t.Helper()
	return c.kubectl(t, "exec", pod, "--", "/busybox", "sh", "-ec", script)
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main_test

import (
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/test/await"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// fakeCluster is an API server with one Node. test/k8s has a real API server.
type fakeCluster struct {
	kubeconfig string

	mu       sync.Mutex
	node     map[string]any
	attached []any
	patches  []string
}

func newFakeCluster(t *testing.T, node map[string]any, attached ...any) *fakeCluster {
	c := &fakeCluster{kubeconfig: filepath.Join(t.TempDir(), "kubeconfig"), node: node, attached: attached}
	s := httptest.NewServer(c)
	t.Cleanup(s.Close)
	must(t, os.WriteFile(c.kubeconfig, []byte((&simtest.Node{}).Kubeconfig(s.URL)), 0o600))
	return c
}

func (c *fakeCluster) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	c.mu.Lock()
	defer c.mu.Unlock()
	meta := map[string]any{"name": "worker"}
	var answer any
	switch r.Method + " " + r.URL.Path {
	case "PATCH /api/v1/nodes/worker":
		patch, _ := io.ReadAll(r.Body)
		c.patches = append(c.patches, string(patch))
		c.node["taints"] = nil
		fallthrough
	case "GET /api/v1/nodes/worker":
		answer = map[string]any{"kind": "Node", "metadata": meta, "spec": c.node}
	case "GET /api/v1/nodes":
		answer = list(w, r, map[string]any{"kind": "Node", "metadata": meta, "spec": c.node})
	case "GET /apis/storage.k8s.io/v1/csinodes":
		answer = list(w, r, map[string]any{"kind": "CSINode", "metadata": meta, "spec": map[string]any{"drivers": []any{
			map[string]any{"name": "csi.oxide.computer", "nodeID": instanceID, "allocatable": map[string]any{"count": 7}},
		}}})
	case "GET /apis/storage.k8s.io/v1/volumeattachments":
		answer = map[string]any{"kind": "VolumeAttachmentList", "items": c.attached}
	default:
		w.WriteHeader(http.StatusTeapot)
	}
	if answer != nil {
		_ = json.NewEncoder(w).Encode(answer) // an error means that the client has gone
	}
}

// list returns the list of one object. For a watch it returns nil, and the watch ends at once.
func list(w http.ResponseWriter, r *http.Request, item any) any {
	if r.URL.Query().Get("fieldSelector") != "metadata.name=worker" {
		w.WriteHeader(http.StatusForbidden)
	}
	if r.URL.Query().Has("watch") {
		return nil
	}
	return map[string]any{"kind": "List", "metadata": map[string]any{"resourceVersion": "1"}, "items": []any{item}}
}

func TestNodeRemovesTheStartupTaint(t *testing.T) {
	t.Parallel()
	dir := shortDir(t)
	c := newFakeCluster(t, map[string]any{
		"taints": []any{map[string]any{"key": "csi.oxide.computer/agent-not-ready", "effect": "NoExecute"}},
	})
	must(t, os.Mkdir(filepath.Join(dir, "block"), 0o755))
	startPlugin(
		t,
		simtest.PluginOptions{Mode: "node", Dir: dir, Instance: simtest.Instance{ID: instanceID}, Args: []string{
			"--sys-root=" + dir,
			"--node-name=worker",
			"--kubeconfig=" + c.kubeconfig,
			"--startup-taint=csi.oxide.computer/agent-not-ready",
		}},
	)
	await.Eventually(t, "the taint is removed", func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return len(c.patches) == 1
	})
}

func TestAwaitDetach(t *testing.T) {
	t.Parallel()
	attached := []any{map[string]any{"spec": map[string]any{
		"attacher": "csi.oxide.computer",
		"nodeName": "worker",
		"source":   map[string]any{"persistentVolumeName": "pvc-1"},
	}}}
	for _, tc := range []struct {
		name     string
		cordoned bool
		attached []any
		args     []string
		code     int
		stderr   string
	}{
		{"the node is not given up", false, attached, nil, 0, "nothing to wait for"},
		{"no volume is attached", true, nil, nil, 0, "no volume is attached"},
		{"the timeout ends during a request", true, attached, []string{"--timeout=1ms"}, 1, ""},
		{"a volume is still attached", true, attached, []string{"--timeout=1s"}, 1, "oxide-csi: volumes are still attached after the timeout: pvc-1: "},
		{"no node name", true, attached, []string{"--node-name="}, 2, "config: --node-name: is required"},
		{"a timeout of 0", true, attached, []string{"--timeout=0s"}, 2, "config: --timeout: 0s is not positive"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			c := newFakeCluster(t, map[string]any{"unschedulable": tc.cordoned}, tc.attached...)
			got := runPlugin(
				t,
				nil,
				append([]string{"await-detach", "--node-name=worker", "--kubeconfig=" + c.kubeconfig}, tc.args...)...)
			if got.code != tc.code || !strings.Contains(got.stderr, tc.stderr) || got.stdout != "" {
				t.Errorf("%+v, want exit code %d and %q", got, tc.code, tc.stderr)
			}
		})
	}
}

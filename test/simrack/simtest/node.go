// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package simtest

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
)

// Node simulates the Kubernetes API server for one Node, and the controller that requests planned restarts of the Node.
type Node struct {
	// Name is the name of the Node.
	Name string
	// ProviderID is the Node's spec.providerID; it may be empty.
	ProviderID string

	mu          sync.Mutex
	annotations map[string]string
	// version counts the changes. A patch with another resourceVersion is rejected.
	version int
	// changed is closed at the next change.
	changed chan struct{}
}

// Annotations of a Node that request a restart and answer the request (package metadata/kubernetes).
const (
	restartAnnotation = "csi.oxide.computer/restart"
	replyAnnotation   = restartAnnotation + "-reply"
)

// Kubeconfig is the content of a kubeconfig file for this API server at a URL.
func (n *Node) Kubeconfig(url string) string {
	return fmt.Sprintf(
		`{apiVersion: v1, kind: Config, current-context: c, clusters: [{name: c, cluster: {server: %q}}], users: [{name: u, user: {token: t}}], contexts: [{name: c, context: {cluster: c, user: u}}]}`,
		url,
	)
}

// RequestRestart requests a planned restart, and overwrites an earlier request.
func (n *Node) RequestRestart(id string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.annotate(map[string]*string{restartAnnotation: &id})
}

// RestartReply is the node's answer to the request for a planned restart.
func (n *Node) RestartReply(id string) orchestrator.RestartReply {
	n.mu.Lock()
	defer n.mu.Unlock()
	return orchestrator.ParseRestartReply(n.annotations[replyAnnotation], id)
}

// annotate writes annotations. Nil removes an annotation.
func (n *Node) annotate(values map[string]*string) {
	if n.annotations == nil {
		n.annotations = map[string]string{}
	}
	for key, value := range values {
		if value == nil {
			delete(n.annotations, key)
		} else {
			n.annotations[key] = *value
		}
	}
	n.version++
	if n.changed != nil {
		close(n.changed)
	}
	n.changed = make(chan struct{})
}

// ServeHTTP answers GET and PATCH of the Node, and lists and watches with its name as field selector.
func (n *Node) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	n.mu.Lock()
	defer n.mu.Unlock()
	query, answer := r.URL.Query(), any(nil)
	switch {
	case r.URL.Path == "/api/v1/nodes/"+n.Name:
		if r.Method == http.MethodPatch {
			if status := n.patch(r); status != http.StatusOK {
				w.WriteHeader(status)
				return
			}
		}
		answer = n.object()
	case r.URL.Path != "/api/v1/nodes" || query.Get("fieldSelector") != "metadata.name="+n.Name:
		w.WriteHeader(http.StatusNotFound)
		return
	case query.Get("watch") == "true":
		n.watch(w, r, query.Get("resourceVersion"))
		return
	default:
		answer = map[string]any{
			"kind":     "NodeList",
			"metadata": map[string]any{"resourceVersion": strconv.Itoa(n.version)},
			"items":    []any{n.object()},
		}
	}
	_ = json.NewEncoder(w).Encode(answer) // an error means that the client has gone
}

// object is the Node as JSON.
func (n *Node) object() map[string]any {
	return map[string]any{
		"kind": "Node", "spec": map[string]any{"providerID": n.ProviderID},
		"metadata": map[string]any{"name": n.Name, "annotations": n.annotations, "resourceVersion": strconv.Itoa(n.version)},
	}
}

// text is object as text, which later changes do not affect.
func (n *Node) text() json.RawMessage {
	n.mu.Lock()
	defer n.mu.Unlock()
	text, err := json.Marshal(n.object())
	if err != nil {
		panic(err) // strings only
	}
	return text
}

// watch sends the Node after each change, until the client goes. The caller holds mu.
func (n *Node) watch(w http.ResponseWriter, r *http.Request, seen string) {
	if n.changed == nil {
		n.changed = make(chan struct{})
	}
	for r.Context().Err() == nil {
		if now := strconv.Itoa(n.version); now != seen {
			seen = now
			_ = json.NewEncoder(w).
				Encode(map[string]any{"type": "MODIFIED", "object": n.object()})
			// an error means that the client has gone
		}
		_ = http.NewResponseController(w).Flush() // the next write fails too
		changed := n.changed
		n.mu.Unlock()
		select {
		case <-changed:
		case <-r.Context().Done():
		}
		n.mu.Lock()
	}
}

// patch applies a merge patch (RFC 7386).
func (n *Node) patch(r *http.Request) (status int) {
	var patch struct {
		Metadata struct {
			ResourceVersion string
			Annotations     map[string]*string
		}
	}
	if err := json.NewDecoder(r.Body).Decode(&patch); err != nil {
		return http.StatusBadRequest
	}
	if version := patch.Metadata.ResourceVersion; version != "" && version != strconv.Itoa(n.version) {
		return http.StatusConflict
	}
	n.annotate(patch.Metadata.Annotations)
	return http.StatusOK
}

// Nodes simulates the Kubernetes API server for several Nodes, also for a controller in attach mode restart. It forgets
// the events that the controller publishes.
type Nodes []*Node

// ServeHTTP leaves the requests for one Node to that Node.
func (l Nodes) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	name, _ := strings.CutPrefix(r.URL.Path, "/api/v1/nodes/")
	if selected, ok := strings.CutPrefix(r.URL.Query().Get("fieldSelector"), "metadata.name="); ok {
		name = selected
	}
	if i := slices.IndexFunc(l, func(n *Node) bool { return n.Name == name }); i >= 0 {
		l[i].ServeHTTP(w, r)
		return
	}
	items := []any{}
	switch {
	case r.Method == http.MethodPost && strings.HasSuffix(r.URL.Path, "/events"):
		w.WriteHeader(http.StatusCreated)
		return
	case r.URL.Path == "/apis/storage.k8s.io/v1/csinodes": // no kubelet has registered anything
	case r.URL.Path == "/api/v1/nodes":
		for _, n := range l {
			items = append(items, n.text())
		}
	default:
		w.WriteHeader(http.StatusNotFound)
		return
	}
	_ = json.NewEncoder(w).Encode(map[string]any{"items": items}) // an error means that the client has gone
}

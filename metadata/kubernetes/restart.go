// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package kubernetes

import (
	"context"
	"crypto/sha256"
	"fmt"
	"net/http"
	"net/url"
	"path"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
)

// The word of a planned restart stands in annotations of the Node.
const (
	// restartAnnotation is the ID of the restart that the controller asks for. The node plugin reads it.
	restartAnnotation = driver + "/restart"
	// replyAnnotation is what the node plugin says to it. The controller reads it.
	replyAnnotation = driver + "/restart-reply"
	// cordonAnnotation is the ID of the restart for which the controller has cordoned the Node, for itself to read.
	cordonAnnotation = driver + "/restart-cordon"

	// driver is the plugin's name, under which the kubelet writes the instance's ID into the node's CSINode.
	driver = "csi.oxide.computer"
)

// Restarts is the controller's half of planned restarts: a [metadata.RestartRequester] and a [metadata.Drainer]. It
// needs these rights, the last two only to drain:
//
//	rules:
//	- {apiGroups: [storage.k8s.io], resources: [csinodes], verbs: [get, list]}
//	- {apiGroups: [""], resources: [nodes], verbs: [get, list, patch]}
//	- {apiGroups: [""], resources: [events], verbs: [create]}
//	- {apiGroups: [""], resources: [pods], verbs: [list]}
//	- {apiGroups: [""], resources: [pods/eviction], verbs: [create]}
type Restarts struct {
	*client

	mu sync.Mutex
	// nodeNames are the Nodes on which instances were last seen.
	nodeNames map[string]string
}

// NewRestarts makes the controller's half. It asks nothing yet, and needs no NodeName.
func NewRestarts(options Options) *Restarts {
	return &Restarts{client: newClient(options), nodeNames: map[string]string{}}
}

// Request implements [metadata.RestartRequester].
func (r *Restarts) Request(ctx context.Context, instanceID, restartID string) error {
	name, err := r.nodeName(ctx, instanceID)
	if err != nil {
		return err
	}
	_, err = r.do(
		ctx,
		patchNode(
			"ask for a restart of Node "+name,
			name,
			mergePatch,
			annotations{restartAnnotation: restartID}.patch(""),
		),
		nil,
	)
	return err
}

// Reply implements [metadata.RestartRequester].
func (r *Restarts) Reply(ctx context.Context, instanceID, restartID string) (metadata.RestartReply, error) {
	name, err := r.nodeName(ctx, instanceID)
	if err != nil {
		return metadata.RestartReply{}, err
	}
	asked, said, err := r.readRestart(ctx, name)
	if err != nil || asked != restartID {
		return metadata.RestartReply{}, err
	}
	return said, nil
}

// Withdraw implements [metadata.RestartRequester].
func (r *Restarts) Withdraw(ctx context.Context, instanceID, restartID string) (said metadata.RestartReply, err error) {
	name, err := r.nodeName(ctx, instanceID)
	if err != nil {
		return metadata.RestartReply{}, err
	}
	err = r.patchUnchanged(ctx, "withdraw the restart of Node "+name, name, func(n node) map[string]any {
		var asked string
		if asked, said = n.restart(); asked != restartID {
			said = metadata.RestartReply{}
			return nil
		}
		if said.State == metadata.RestartAccepted {
			return nil
		}
		return annotations{restartAnnotation: nil, replyAnnotation: nil}.patch(n.Metadata.ResourceVersion)
	})
	if err != nil {
		return metadata.RestartReply{}, err
	}
	return said, nil
}

// Forget implements [metadata.RestartRequester].
func (r *Restarts) Forget(ctx context.Context, instanceID, restartID string) error {
	return r.patchMarked(
		ctx,
		"forget the restart of Node ",
		instanceID,
		restartAnnotation,
		restartID,
		func(n node) map[string]any {
			return annotations{restartAnnotation: nil, replyAnnotation: nil}.patch(n.Metadata.ResourceVersion)
		},
	)
}

// patchMarked patches the Node of an instance while an annotation names this restart. While the plugin there is not
// registered, the Node is known by that annotation. Where no Node has it, there is nothing to patchMarked: it was deleted with
// its Node.
func (r *Restarts) patchMarked(
	ctx context.Context,
	what, instanceID, annotation, restartID string,
	patch func(node) map[string]any,
) error {
	marked := func(n node) bool { return n.Metadata.Annotations[annotation] == restartID }
	name, err := r.lookUpNodeName(ctx, instanceID)
	if err == nil && name == "" {
		name, err = firstMatch(ctx, r.client, nodes, marked)
	}
	if err != nil || name == "" {
		return err
	}
	return r.patchUnchanged(ctx, what+name, name, func(n node) map[string]any {
		if !marked(n) {
			return nil
		}
		return patch(n)
	})
}

// repeatReport is for how long an event is not repeated.
const repeatReport = 5 * time.Minute

// Report implements [metadata.RestartRequester]: an event of the Node, which one sees with kubectl describe node.
func (r *Restarts) Report(ctx context.Context, instanceID string, report metadata.RestartReport) error {
	name, err := r.nodeName(ctx, instanceID)
	if err != nil {
		return err
	}
	var n node
	if _, err := r.do(ctx, getNode("get Node "+name, name), &n); err != nil {
		return err
	}
	now := time.Now().UTC()
	kind := "Normal"
	if report.Problem {
		kind = "Warning"
	}
	sum := sha256.Sum256(
		fmt.Appendf(
			nil,
			"%s\x00%s\x00%s\x00%d",
			name,
			report.Reason,
			report.Message,
			now.Truncate(repeatReport).Unix(),
		),
	)
	stamp := now.Format(time.RFC3339)
	// Events of what is in no namespace are in this one.
	const events = "/api/v1/namespaces/default/events"
	_, err = r.do(ctx, post("report about Node "+name, events, "events", map[string]any{
		"apiVersion": "v1", "kind": "Event",
		"metadata":       map[string]any{"namespace": "default", "name": fmt.Sprintf("%s.%x", driver, sum[:12])},
		"involvedObject": map[string]any{"apiVersion": "v1", "kind": "Node", "name": name, "uid": n.Metadata.UID},
		"type":           kind, "reason": report.Reason, "message": report.Message,
		"source": map[string]any{"component": driver}, "reportingComponent": driver,
		"firstTimestamp": stamp, "lastTimestamp": stamp, "count": 1,
	}), nil, http.StatusConflict)
	return err
}

// nodeName is the name of the Node that is an instance.
func (r *Restarts) nodeName(ctx context.Context, instanceID string) (string, error) {
	name, err := r.lookUpNodeName(ctx, instanceID)
	if err == nil && name == "" {
		return "", &metadata.Error{
			Kind: metadata.ErrNotReady,
			What: fmt.Sprintf(
				"no Node is instance %s: no CSINode has it as node ID of %s, no Node in its provider ID",
				instanceID,
				driver,
			),
			Next: "check that the node plugin runs there and is registered with the kubelet",
		}
	}
	return name, err
}

// lookUpNodeName is the name of the Node that is an instance, or empty. The kubelet says so in a CSINode, as long as the node
// plugin is registered with it, and so does the Node's provider ID, where there is a cloud controller manager.
func (r *Restarts) lookUpNodeName(ctx context.Context, instanceID string) (string, error) {
	if name, err := r.cachedNodeName(ctx, instanceID); err != nil || name != "" {
		return name, err
	}
	name, err := firstMatch(ctx, r.client, csiNodes, func(n csiNode) bool { return n.hasNodeID(instanceID) })
	if err == nil && name == "" {
		name, err = firstMatch(ctx, r.client, nodes, func(n node) bool { return n.hasProviderID(instanceID) })
	}
	if err != nil || name == "" {
		return "", err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.nodeNames[instanceID] = name
	return name, nil
}

// cachedNodeName is the Node on which an instance was last seen, if it is still that instance's; else it is empty.
func (r *Restarts) cachedNodeName(ctx context.Context, instanceID string) (string, error) {
	r.mu.Lock()
	name := r.nodeNames[instanceID]
	r.mu.Unlock()
	if name == "" {
		return "", nil
	}
	var n csiNode
	status, err := r.do(ctx, request{
		method:   http.MethodGet,
		path:     csiNodes + "/" + name,
		what:     "get CSINode " + name,
		verb:     "get",
		resource: "csinodes",
	}, &n, http.StatusNotFound)
	if err != nil || status != http.StatusOK || !n.hasNodeID(instanceID) {
		return "", err
	}
	return name, nil
}

// firstMatch is the name of the first object of a list that is meant, or empty.
func firstMatch[T named](ctx context.Context, c *client, list string, meant func(T) bool) (string, error) {
	query := url.Values{"limit": {"250"}}
	for {
		var page struct {
			object
			Items []T
		}
		if _, err := c.do(ctx, request{
			method:   http.MethodGet,
			path:     list,
			query:    query,
			what:     "look for an instance in " + list,
			verb:     "list",
			resource: path.Base(list),
		}, &page); err != nil {
			return "", err
		}
		if i := slices.IndexFunc(page.Items, meant); i >= 0 {
			return page.Items[i].name(), nil
		}
		if page.Metadata.Continue == "" {
			return "", nil
		}
		query.Set("continue", page.Metadata.Continue)
	}
}

// csiNode is what is read of a CSINode.
type csiNode struct {
	object
	Spec struct {
		Drivers []struct {
			Name, NodeID string
			Allocatable  struct{ Count *int }
		}
	}
}

// hasNodeID reports whether a CSINode is an instance's.
func (n csiNode) hasNodeID(instanceID string) bool {
	for _, d := range n.Spec.Drivers {
		if d.Name == driver && d.NodeID == instanceID {
			return true
		}
	}
	return false
}

// hasProviderID reports whether a Node's provider ID is an instance.
func (n node) hasProviderID(instanceID string) bool {
	text, ours := strings.CutPrefix(n.Spec.ProviderID, providerPrefix)
	id, err := metadata.ParseInstanceID(text)
	return ours && err == nil && id == instanceID
}

// Listener is the node's half of planned restarts: a [metadata.RestartListener]. It needs the right to get, list, watch
// and patch its own Node, which a kubelet's credentials have.
type Listener struct {
	*client
	node *watch[node]
}

// NewListener makes the node's half. It asks nothing yet.
func NewListener(options Options) *Listener {
	c := newClient(options)
	watch := c.watchNode()
	watch.metadataOnly = true
	return &Listener{client: c, node: watch}
}

// Changes implements [metadata.RestartListener], by a watch of the Node's metadata. What kubelets and others write
// there is not passed on.
func (l *Listener) Changes(ctx context.Context) <-chan struct{} {
	changes, seen := make(chan struct{}, 1), l.node.follow(ctx)
	go func() {
		last := ""
		for {
			select {
			case <-seen:
			case <-ctx.Done():
				return
			}
			s, _ := l.node.get(ctx)
			marks := s.object.Metadata.Annotations
			if now := fmt.Sprintf("%q %q %v", marks[restartAnnotation], marks[replyAnnotation], s.err); now != last {
				last = now
				metadata.Signal(changes)
			}
		}
	}()
	return changes
}

// Requested implements [metadata.RestartListener]. While the watch of [Listener.Changes] fails, so does this.
func (l *Listener) Requested(ctx context.Context) (string, metadata.RestartReply, error) {
	if s, followed := l.node.get(ctx); followed && s.err != nil {
		return "", metadata.RestartReply{}, s.err
	}
	return l.readRestart(ctx, l.options.NodeName)
}

// Reply implements [metadata.RestartListener].
func (l *Listener) Reply(ctx context.Context, restartID string, answer metadata.RestartReply) error {
	name, stands := l.options.NodeName, false
	err := l.patchUnchanged(ctx, "answer to the restart of Node "+name, name, func(n node) map[string]any {
		asked, said := n.restart()
		if stands = asked == restartID; !stands || said == answer {
			return nil
		}
		return annotations{replyAnnotation: answer.Text(restartID)}.patch(n.Metadata.ResourceVersion)
	})
	if err == nil && !stands {
		return &metadata.Error{
			Kind: metadata.ErrNotReady,
			What: fmt.Sprintf("no reply was written: restart %s of Node %s is not requested any more", restartID, name),
			Next: "no action is needed",
		}
	}
	return err
}

// readRestart reads of a Node which readRestart is asked for, and what was said to it. It is asked of the API server's store,
// not of its cache: what was withdrawn must not be read any more.
func (c *client) readRestart(ctx context.Context, name string) (asked string, said metadata.RestartReply, err error) {
	r := getNode("get Node "+name, name)
	r.accept = metadataOnly
	var n node
	if _, err := c.do(ctx, r, &n); err != nil {
		return "", metadata.RestartReply{}, err
	}
	asked, said = n.restart()
	return asked, said, nil
}

func (n node) restart() (asked string, said metadata.RestartReply) {
	if asked = n.Metadata.Annotations[restartAnnotation]; asked == "" {
		return "", metadata.RestartReply{}
	}
	return asked, metadata.ParseRestartReply(n.Metadata.Annotations[replyAnnotation], asked)
}

// patchUnchanged patches a Node as what was read of it demands, if nobody has changed it meanwhile, and else reads it again. No
// patch is no patchUnchanged.
func (c *client) patchUnchanged(ctx context.Context, what, name string, patch func(node) map[string]any) error {
	for {
		var n node
		if _, err := c.do(ctx, getNode(what, name), &n); err != nil {
			return err
		}
		p := patch(n)
		if p == nil {
			return nil
		}
		status, err := c.do(ctx, patchNode(what, name, mergePatch, p), nil, http.StatusConflict)
		if err != nil || status != http.StatusConflict {
			return err
		}
	}
}

// annotations are to be written; nil removes one.
type annotations map[string]any

// patch is a merge patch of an object's annotations, if it still has this resource version, or any where that is empty.
func (a annotations) patch(resourceVersion string) map[string]any {
	meta := map[string]any{"annotations": a}
	if resourceVersion != "" {
		meta["resourceVersion"] = resourceVersion
	}
	return map[string]any{"metadata": meta}
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package kubernetes

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"path"
	"strings"
	"sync"

	"k8s.io/apimachinery/pkg/types"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata/kubernetes"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
)

// Controller and node plugin exchange the messages of a planned restart in annotations of the Node.
const (
	// restartAnnotation is the ID of the requested restart. The controller writes it, the node plugin reads it.
	restartAnnotation = driver + "/restart"
	// replyAnnotation is the reply to the request. The node plugin writes it, the controller reads it.
	replyAnnotation = driver + "/restart-reply"
	// cordonAnnotation is the ID of the restart for which the Node is cordoned. The controller writes and reads it.
	cordonAnnotation = driver + "/restart-cordon"

	// driver is the plugin's name. The kubelet writes the instance's ID into the CSINode under this name.
	driver = "csi.oxide.computer"
)

// Restarts is the controller's half of planned restarts: a [orchestrator.RestartRequester], a
// [orchestrator.ClaimReporter] and a [orchestrator.Drainer]. It needs these rights. The last two are only for draining.
//
//	rules:
//	- {apiGroups: [storage.k8s.io], resources: [csinodes], verbs: [get, list]}
//	- {apiGroups: [""], resources: [nodes], verbs: [get, list, patch]}
//	- {apiGroups: [""], resources: [events], verbs: [create, patch]}
//	- {apiGroups: [""], resources: [pods], verbs: [list]}
//	- {apiGroups: [""], resources: [pods/eviction], verbs: [create]}
type Restarts struct {
	client

	mu sync.Mutex
	// nodeNames are the names of the Nodes on which instances were last seen, by instance ID.
	nodeNames map[string]string
}

// NewRestarts makes the controller's half. It does no I/O, and needs no NodeName.
func NewRestarts(options kubernetes.Options) *Restarts {
	return &Restarts{client: newClient(options), nodeNames: map[string]string{}}
}

// Request implements [orchestrator.RestartRequester].
func (r *Restarts) Request(ctx context.Context, instanceID, restartID string) error {
	name, err := r.onlyNodeName(ctx, instanceID)
	if err != nil {
		return err
	}
	patch := annotations{restartAnnotation: restartID}.patch("")
	_, err = r.Do(ctx, patchNode("request a restart of Node "+name, name, types.MergePatchType, patch), nil)
	return err
}

// Reply implements [orchestrator.RestartRequester].
func (r *Restarts) Reply(ctx context.Context, instanceID, restartID string) (orchestrator.RestartReply, error) {
	name, err := r.nodeName(ctx, instanceID)
	if err != nil {
		return orchestrator.RestartReply{}, err
	}
	requested, reply, err := r.readRestart(ctx, name)
	if err == nil && requested != restartID {
		// Another Node may have got the instance's ID since. Only the Node with the request answers.
		if name, err = r.markedNode(ctx, restartAnnotation, restartID); err == nil && name != "" {
			requested, reply, err = r.readRestart(ctx, name)
		}
	}
	if err != nil || requested != restartID {
		return orchestrator.RestartReply{}, err
	}
	return reply, nil
}

// Withdraw implements [orchestrator.RestartRequester]. If the instance's Node has no such request, it looks for the
// Node that has it: another Node may have got the instance's ID since.
func (r *Restarts) Withdraw(ctx context.Context, instanceID, restartID string) (orchestrator.RestartReply, error) {
	name, err := r.nodeName(ctx, instanceID)
	if err == nil {
		if reply, requested, err := r.withdrawFrom(ctx, name, restartID); requested || err != nil {
			return reply, err
		}
	} else if !errors.Is(err, metadata.ErrConflict) {
		return orchestrator.RestartReply{}, err
	}
	marked, err := r.markedNode(ctx, restartAnnotation, restartID)
	if err != nil || marked == "" {
		return orchestrator.RestartReply{}, err
	}
	reply, _, err := r.withdrawFrom(ctx, marked, restartID)
	return reply, err
}

// withdrawFrom withdraws a restart from a Node, unless the Node has accepted it. requested says that the Node had the
// request.
func (r *Restarts) withdrawFrom(
	ctx context.Context,
	name, restartID string,
) (reply orchestrator.RestartReply, requested bool, err error) {
	err = r.patchUnchanged(ctx, "withdraw the restart of Node "+name, name, func(n node) map[string]any {
		var id string
		id, reply = n.restart()
		if requested = id == restartID; !requested || reply.State == orchestrator.RestartAccepted {
			return nil
		}
		return annotations{restartAnnotation: nil, replyAnnotation: nil}.patch(n.ResourceVersion)
	})
	if err != nil || !requested {
		reply = orchestrator.RestartReply{}
	}
	return reply, requested, err
}

// Forget implements [orchestrator.RestartRequester].
func (r *Restarts) Forget(ctx context.Context, instanceID, restartID string) error {
	patch := func(n node) map[string]any {
		return annotations{restartAnnotation: nil, replyAnnotation: nil}.patch(n.ResourceVersion)
	}
	return r.patchMarked(ctx, "forget the restart of Node ", instanceID, restartAnnotation, restartID, patch)
}

// patchMarked patches the Node of an instance if the annotation holds the ID of this restart. Otherwise it finds the
// Node by that annotation: the node plugin there may not be registered, and another Node may have got the instance's ID
// since. If no Node has it, the Node was deleted, and nothing is left to do.
func (r *Restarts) patchMarked(
	ctx context.Context,
	what, instanceID, annotation, restartID string,
	patch func(node) map[string]any,
) error {
	patchIfMarked := func(name string) (marked bool, err error) {
		err = r.patchUnchanged(ctx, what+name, name, func(n node) map[string]any {
			if marked = n.Annotations[annotation] == restartID; !marked {
				return nil
			}
			return patch(n)
		})
		return marked, err
	}
	name, err := r.lookUpNodeName(ctx, instanceID)
	if err != nil && !errors.Is(err, metadata.ErrConflict) {
		return err
	}
	if err == nil && name != "" {
		if marked, err := patchIfMarked(name); marked || err != nil {
			return err
		}
	}
	if name, err = r.markedNode(ctx, annotation, restartID); err != nil || name == "" {
		return err
	}
	_, err = patchIfMarked(name)
	return err
}

// markedNode is the name of the Node whose annotation holds the ID of this restart, or empty. A restart marks one Node.
func (r *Restarts) markedNode(ctx context.Context, annotation, restartID string) (string, error) {
	names, err := matches(
		ctx,
		r.client,
		kubernetes.Nodes,
		func(n node) bool { return n.Annotations[annotation] == restartID },
	)
	if err != nil || len(names) == 0 {
		return "", err
	}
	return names[0], nil
}

// Report implements [orchestrator.RestartRequester]. It publishes an event of the Node, which kubectl describe node
// shows.
func (r *Restarts) Report(ctx context.Context, instanceID string, report orchestrator.Report) error {
	name, err := r.nodeName(ctx, instanceID)
	if err != nil {
		return err
	}
	var n node
	if _, err := r.Do(ctx, kubernetes.GetNode("get Node "+name, name), &n); err != nil {
		return err
	}
	return r.publish(ctx, eventObject{APIVersion: "v1", Kind: "Node", Name: name, UID: string(n.UID)}, report)
}

// ReportClaim implements [orchestrator.ClaimReporter]. It publishes an event of the PersistentVolumeClaim, which
// kubectl describe pvc and kubectl get events show. The controller knows no pods.
func (r *Restarts) ReportClaim(ctx context.Context, volume, claim string, report orchestrator.Report) error {
	namespace, name, found := strings.Cut(claim, "/")
	if !found {
		return fmt.Errorf("claim %q is not namespace/name", claim)
	}
	object := eventObject{APIVersion: "v1", Kind: "PersistentVolumeClaim", Namespace: namespace, Name: name}
	// The provisioner names a volume after its claim's UID.
	if uid, found := strings.CutPrefix(volume, "pvc-"); found {
		object.UID = uid
	}
	return r.publish(ctx, object, report)
}

// nodeName is the name of an instance's Node.
func (r *Restarts) nodeName(ctx context.Context, instanceID string) (string, error) {
	name, err := r.lookUpNodeName(ctx, instanceID)
	if err == nil && name == "" {
		return "", &metadata.Error{
			Kind: metadata.ErrNotReady,
			What: fmt.Sprintf("no Node is instance %s: no CSINode has this node ID, and no Node this provider ID", instanceID),
			Next: "check that the node plugin runs there and is registered with the kubelet",
		}
	}
	return name, err
}

// onlyNodeName is like nodeName, for calls that the wrong Node must not get. It searches again, because another Node
// may have got the same instance ID since. It also checks the provider ID, which a cloud controller manager writes.
func (r *Restarts) onlyNodeName(ctx context.Context, instanceID string) (string, error) {
	r.mu.Lock()
	delete(r.nodeNames, instanceID)
	r.mu.Unlock()
	name, err := r.nodeName(ctx, instanceID)
	if err != nil {
		return "", err
	}
	var n node
	if _, err := r.Do(ctx, kubernetes.GetNode("get Node "+name, name), &n); err != nil {
		return "", err
	}
	if id, ours := n.instanceID(); ours && id != instanceID {
		return "", &metadata.Error{
			Kind: metadata.ErrInvalid, Cause: metadata.ErrConflict,
			What: fmt.Sprintf("Node %s is instance %s by its CSINode, and instance %s by its provider ID", name, instanceID, id),
			Next: "find out which is right, and correct the other",
		}
	}
	return name, nil
}

// lookUpNodeName is the name of an instance's Node, or empty. The kubelet writes the instance's ID into the CSINode
// while the node plugin is registered. A cloud controller manager writes it into the Node's provider ID.
//
// If two Nodes have the ID, it is not known which of them is the instance, and the error is a [metadata.ErrConflict].
func (r *Restarts) lookUpNodeName(ctx context.Context, instanceID string) (string, error) {
	if name, err := r.cachedNodeName(ctx, instanceID); err != nil || name != "" {
		return name, err
	}
	names, err := matches(ctx, r.client, csiNodes, func(n csiNode) bool { return n.hasNodeID(instanceID) })
	if err == nil && len(names) == 0 {
		names, err = matches(ctx, r.client, kubernetes.Nodes, func(n node) bool { return n.hasProviderID(instanceID) })
	}
	switch {
	case err != nil || len(names) == 0:
		return "", err
	case len(names) > 1:
		return "", &metadata.Error{
			Kind: metadata.ErrInvalid, Cause: metadata.ErrConflict,
			What: fmt.Sprintf("the Nodes %s have the node ID %s", orchestrator.Some(names), instanceID),
			Next: "delete the Node that is gone, or correct the instance ID of the wrong one",
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.nodeNames[instanceID] = names[0]
	return names[0], nil
}

// cachedNodeName is the name of the Node on which an instance was last seen. It is empty if the Node is no longer that
// instance.
func (r *Restarts) cachedNodeName(ctx context.Context, instanceID string) (string, error) {
	r.mu.Lock()
	name := r.nodeNames[instanceID]
	r.mu.Unlock()
	if name == "" {
		return "", nil
	}
	var n csiNode
	status, err := r.Do(ctx, getCSINode(name), &n, http.StatusNotFound)
	if err != nil || status != http.StatusOK || !n.hasNodeID(instanceID) {
		return "", err
	}
	return name, nil
}

// matches are the names of the objects in a collection that match.
func matches[T interface{ GetName() string }](
	ctx context.Context,
	c client,
	collection string,
	match func(T) bool,
) (names []string, err error) {
	query := url.Values{"limit": {pageSize}}
	for {
		var page kubernetes.List[T]
		if _, err := c.Do(ctx, kubernetes.Request{
			Method:   http.MethodGet,
			Path:     collection,
			Query:    query,
			What:     "look for an instance in " + collection,
			Verb:     "list",
			Resource: path.Base(collection),
		}, &page); err != nil {
			return nil, err
		}
		for _, item := range page.Items {
			if match(item) {
				names = append(names, item.GetName())
			}
		}
		if page.Continue == "" {
			return names, nil
		}
		query.Set("continue", page.Continue)
	}
}

// csiNode has the fields of a CSINode that are read.
type csiNode struct {
	object
	Spec struct {
		Drivers []struct {
			Name, NodeID string
			Allocatable  struct{ Count *int }
		}
	}
}

// hasNodeID reports whether the plugin has registered this instance in the CSINode.
func (n csiNode) hasNodeID(instanceID string) bool {
	for _, d := range n.Spec.Drivers {
		if d.Name == driver && d.NodeID == instanceID {
			return true
		}
	}
	return false
}

// instanceID is the instance that the Node's provider ID names. It is false if the provider ID names none.
func (n node) instanceID() (string, bool) {
	text, ours := strings.CutPrefix(n.Spec.ProviderID, kubernetes.ProviderPrefix)
	id, err := metadata.ParseInstanceID(text)
	return id, ours && err == nil
}

// hasProviderID reports whether the Node's provider ID names this instance.
func (n node) hasProviderID(instanceID string) bool {
	id, ours := n.instanceID()
	return ours && id == instanceID
}

// Listener is the node's half of planned restarts: a [orchestrator.RestartListener]. It needs the verbs "get", "list",
// "watch" and "patch" on its own Node. Where the policy deploy/k8s/restart/policy.yaml is applied, it also needs the
// token of the node plugin's pod on that Node: a kubelet's credentials may then not reply.
type Listener struct {
	client
	node *kubernetes.Watch[node]
}

// NewListener makes the node's half. It does no I/O.
func NewListener(options kubernetes.Options) *Listener {
	c := newClient(options)
	watch := c.watchNode()
	watch.MetadataOnly = true
	return &Listener{client: c, node: watch}
}

// Changes implements [orchestrator.RestartListener] by a watch of the Node's metadata. It ignores changes other than
// those of the two annotations.
func (l *Listener) Changes(ctx context.Context) <-chan struct{} {
	changes, updates := make(chan struct{}, 1), l.node.Follow(ctx)
	go func() {
		last := ""
		for {
			select {
			case <-updates:
			case <-ctx.Done():
				return
			}
			s, _ := l.node.Get(ctx)
			values := s.Object.Annotations
			if now := fmt.Sprintf("%q %q %v", values[restartAnnotation], values[replyAnnotation], s.Err); now != last {
				last = now
				metadata.Signal(changes)
			}
		}
	}()
	return changes
}

// Requested implements [orchestrator.RestartListener]. While the watch of [Listener.Changes] fails, it returns the
// error of the watch, so that it sends nothing to an API server that is down.
func (l *Listener) Requested(ctx context.Context) (string, orchestrator.RestartReply, error) {
	if s, followed := l.node.Get(ctx); followed && s.Err != nil {
		return "", orchestrator.RestartReply{}, s.Err
	}
	return l.readRestart(ctx, l.Options.NodeName)
}

// Reply implements [orchestrator.RestartListener].
func (l *Listener) Reply(ctx context.Context, restartID string, reply orchestrator.RestartReply) error {
	name, requested := l.Options.NodeName, false
	err := l.patchUnchanged(ctx, "reply to the restart of Node "+name, name, func(n node) map[string]any {
		current, written := n.restart()
		if requested = current == restartID; !requested || written == reply {
			return nil
		}
		return annotations{replyAnnotation: reply.Text(restartID)}.patch(n.ResourceVersion)
	})
	if err == nil && !requested {
		return &metadata.Error{
			Kind: metadata.ErrNotReady,
			What: fmt.Sprintf("no reply was written: restart %s of Node %s is not requested any more", restartID, name),
			Next: "no action is needed",
		}
	}
	return err
}

// readRestart reads from a Node the ID of the requested restart, and the reply to it. It reads from the API server's
// store, not from its cache: the cache may still hold a request that was withdrawn.
func (c client) readRestart(ctx context.Context, name string) (id string, reply orchestrator.RestartReply, err error) {
	r := kubernetes.GetNode("get Node "+name, name)
	r.Accept = kubernetes.MetadataOnly
	var n node
	if _, err := c.Do(ctx, r, &n); err != nil {
		return "", orchestrator.RestartReply{}, err
	}
	id, reply = n.restart()
	return id, reply, nil
}

// restart returns the ID of the requested restart, and the reply to it.
func (n node) restart() (id string, reply orchestrator.RestartReply) {
	if id = n.Annotations[restartAnnotation]; id == "" {
		return "", orchestrator.RestartReply{}
	}
	return id, orchestrator.ParseRestartReply(n.Annotations[replyAnnotation], id)
}

// patchUnchanged reads a Node and sends the patch that the function makes from it. A nil patch is not sent. If the Node
// was changed between the two, it begins again.
func (c client) patchUnchanged(ctx context.Context, what, name string, patch func(node) map[string]any) error {
	for {
		var n node
		if _, err := c.Do(ctx, kubernetes.GetNode(what, name), &n); err != nil {
			return err
		}
		p := patch(n)
		if p == nil {
			return nil
		}
		status, err := c.Do(ctx, patchNode(what, name, types.MergePatchType, p), nil, http.StatusConflict)
		if err != nil || status != http.StatusConflict {
			return err
		}
	}
}

// annotations are annotations to write. A nil value removes the annotation.
type annotations map[string]any

// patch is a merge patch of an object's annotations. The API server rejects the patch if the object has another
// resource version, unless the given one is empty.
func (a annotations) patch(resourceVersion string) map[string]any {
	meta := map[string]any{"annotations": a}
	if resourceVersion != "" {
		meta["resourceVersion"] = resourceVersion
	}
	return map[string]any{"metadata": meta}
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package kubernetes

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
)

// Node is the Node on which the plugin runs, for what the plugin does at the
// beginning and at the end of that Node's life: a [metadata.StartupTaint] and a
// [metadata.Departure].
type Node struct {
	*client
	node    *watch[node]
	csiNode *watch[csiNode]
}

// NewNode makes a Node. It reads nothing.
func NewNode(options Options) *Node {
	c := newClient(options)
	return &Node{
		client: c, node: c.watchNode(),
		csiNode: &watch[csiNode]{client: c, collection: csiNodes, resource: "csinodes", kind: "CSINode"},
	}
}

// Follow implements [metadata.StartupTaint]. It takes the verbs "list" and "watch"
// on "nodes" and "csinodes", for the one of that name.
func (n *Node) Follow(ctx context.Context) <-chan struct{} {
	return metadata.Merge(ctx, n.node.follow(ctx), n.csiNode.follow(ctx))
}

// RemoveTaint implements [metadata.StartupTaint]. The kubelet writes the
// registration into the CSINode. It takes the verb "patch" on "nodes" and, while
// the Node is not followed, "get" on "nodes" and "csinodes".
func (n *Node) RemoveTaint(ctx context.Context, key string, registration metadata.Registration) (had bool, err error) {
	read, err := n.read(ctx, n.node)
	if err != nil {
		return false, err
	}
	kept := []taint{}
	for _, taint := range read.Spec.Taints {
		if taint.key != key {
			kept = append(kept, taint)
		}
	}
	if len(kept) == len(read.Spec.Taints) {
		return false, nil
	}
	if err := n.registered(ctx, registration); err != nil {
		return true, err
	}
	return true, n.replaceTaints(ctx, read.Spec.Taints, kept)
}

// registered is an error until the CSINode has the registration and a limit.
func (n *Node) registered(ctx context.Context, registration metadata.Registration) error {
	name := n.options.NodeName
	s, followed := n.csiNode.get(ctx)
	if !followed {
		r := request{
			method:   http.MethodGet,
			path:     csiNodes + "/" + name,
			what:     fmt.Sprintf("get CSINode %q", name),
			verb:     "get",
			resource: "csinodes",
		}
		_, s.err = n.do(ctx, r, &s.object, http.StatusNotFound)
	}
	if s.err != nil {
		return s.err
	}
	for _, d := range s.object.Spec.Drivers {
		if d.Name == registration.Driver && d.NodeID == registration.NodeID && d.Allocatable.Count != nil {
			return nil
		}
	}
	return &metadata.Error{
		Kind: metadata.ErrNotReady,
		What: fmt.Sprintf("wait for the kubelet to write %s, as node %s, and its limit of volumes into CSINode %q",
			registration.Driver, registration.NodeID, name),
		Next: "check that the plugin is registered with the kubelet: docs/how-to/registration.md",
	}
}

// replaceTaints writes taints if they still are as they were read: others add
// and remove theirs at the same time.
func (n *Node) replaceTaints(ctx context.Context, were, are []taint) error {
	type operation struct {
		Op    string  `json:"op"`
		Path  string  `json:"path"`
		Value []taint `json:"value"`
	}
	name := n.options.NodeName
	patch := []operation{{"test", "/spec/taints", were}, {"replace", "/spec/taints", are}}
	var patched node
	_, err := n.do(ctx, patchNode(fmt.Sprintf("remove a taint from Node %q", name), name, jsonPatch, patch), &patched)
	if err == nil {
		n.node.put(patched)
	}
	return err
}

// leavingTaints are by which a Node is given up before its machine is: of the
// cluster autoscaler (cluster-autoscaler/utils/taints) and of Karpenter
// (karpenter.sh/docs/concepts/disruption), the latter by two names.
var leavingTaints = []string{"ToBeDeletedByClusterAutoscaler", "karpenter.sh/disrupted", "karpenter.sh/disruption"}

// shuttingDown is what a kubelet says in its condition Ready while it ends its
// pods since the machine shuts down: kubernetes v1.36.3, pkg/kubelet/nodeshutdown.
const shuttingDown = "node is shutting down"

// Leaving implements [metadata.Departure]. A Node is given up when it is
// cordoned, as by kubectl drain; it was deleted; an autoscaler takes it away; its
// machine shuts down. It takes the verb "get" on "nodes".
func (n *Node) Leaving(ctx context.Context) (why string, err error) {
	s := n.getNode(ctx)
	switch {
	case s.err != nil:
		return "", s.err
	case !s.exists, s.object.Metadata.DeletionTimestamp != "":
		return "it was deleted", nil
	case s.object.Spec.Unschedulable:
		return "it is cordoned", nil
	}
	for _, taint := range s.object.Spec.Taints {
		if slices.Contains(leavingTaints, taint.key) {
			return "it has the taint " + taint.key, nil
		}
	}
	for _, condition := range s.object.Status.Conditions {
		if condition.Type == "Ready" && strings.Contains(condition.Message, shuttingDown) {
			return "its machine shuts down", nil
		}
	}
	return "", nil
}

// page is how many objects of a list are asked for at a time.
const page = "500"

// Attachments implements [metadata.Departure]: the names of the PersistentVolumes
// whose VolumeAttachments name the Node. It takes the verb "list" on
// "volumeattachments".
func (n *Node) Attachments(ctx context.Context, driver string) (volumes []string, err error) {
	for query := (url.Values{"limit": {page}}); ; {
		var list struct {
			object
			Items []struct {
				Spec struct {
					Attacher, NodeName string
					Source             struct{ PersistentVolumeName string }
				}
			}
		}
		r := request{
			method:   http.MethodGet,
			path:     volumeAttachments,
			query:    query,
			what:     "list VolumeAttachments",
			verb:     "list",
			resource: "volumeattachments",
		}
		if _, err := n.do(ctx, r, &list); err != nil {
			return nil, err
		}
		if list.Kind != "VolumeAttachmentList" {
			return nil, n.unexpectedAnswer(r)
		}
		for _, item := range list.Items {
			if item.Spec.Attacher == driver && item.Spec.NodeName == n.options.NodeName {
				volumes = append(volumes, item.Spec.Source.PersistentVolumeName)
			}
		}
		if list.Metadata.Continue == "" {
			return volumes, nil
		}
		query.Set("continue", list.Metadata.Continue)
	}
}

var _ interface {
	metadata.StartupTaint
	metadata.Departure
} = (*Node)(nil)

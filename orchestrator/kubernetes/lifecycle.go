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

	"k8s.io/apimachinery/pkg/types"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata/kubernetes"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
)

// Node is the Node on which the plugin runs. It is a [orchestrator.StartupTaint] and a [orchestrator.Departure].
type Node struct {
	client
	node    *kubernetes.Watch[node]
	csiNode *kubernetes.Watch[csiNode]
}

// NewNode makes a Node. It does no I/O.
func NewNode(options kubernetes.Options) *Node {
	c := newClient(options)
	return &Node{
		client: c, node: c.watchNode(),
		csiNode: &kubernetes.Watch[csiNode]{Client: c.Client, Collection: csiNodes, Resource: "csinodes", Kind: "CSINode"},
	}
}

// Follow implements [orchestrator.StartupTaint]. It needs the verbs "list" and "watch" on the "nodes" and "csinodes" of
// that name.
func (n *Node) Follow(ctx context.Context) <-chan struct{} {
	return metadata.Merge(ctx, n.node.Follow(ctx), n.csiNode.Follow(ctx))
}

// RemoveTaint implements [orchestrator.StartupTaint]. The kubelet writes the registration into the CSINode. It needs
// the verb "patch" on "nodes". Without a [Node.Follow] it also needs "get" on "nodes" and "csinodes".
func (n *Node) RemoveTaint(
	ctx context.Context,
	key string,
	registration orchestrator.Registration,
) (had bool, err error) {
	s := n.node.Read(ctx)
	switch {
	case s.Err != nil:
		return false, s.Err
	case !s.Exists:
		return false, kubernetes.NoNode(n.Options.NodeName)
	}
	taints := s.Object.Spec.Taints
	kept := slices.DeleteFunc(slices.Clone(taints), func(t taint) bool { return t.key == key })
	if len(kept) == len(taints) {
		return false, nil
	}
	if err := n.registered(ctx, registration); err != nil {
		return true, err
	}
	return true, n.replaceTaints(ctx, taints, kept)
}

// registered returns an error until the CSINode has the registration and the limit of volumes.
func (n *Node) registered(ctx context.Context, registration orchestrator.Registration) error {
	s := n.csiNode.Read(ctx)
	if s.Err != nil {
		return s.Err
	}
	for _, d := range s.Object.Spec.Drivers {
		if d.Name == registration.Driver && d.NodeID == registration.NodeID && d.Allocatable.Count != nil {
			return nil
		}
	}
	return &metadata.Error{
		Kind: metadata.ErrNotReady,
		What: fmt.Sprintf("wait for the kubelet to write driver %s, node ID %s and a volume limit into CSINode %q",
			registration.Driver, registration.NodeID, n.Options.NodeName),
		Next: "check that the plugin is registered with the kubelet: docs/how-to/registration.md",
	}
}

// replaceTaints writes the taints if they are still as they were read. Other programs add and remove taints at the same
// time.
func (n *Node) replaceTaints(ctx context.Context, old, new []taint) error {
	type operation struct {
		Op    string  `json:"op"`
		Path  string  `json:"path"`
		Value []taint `json:"value"`
	}
	name := n.Options.NodeName
	patch := []operation{{"test", "/spec/taints", old}, {"replace", "/spec/taints", new}}
	var patched node
	r := patchNode(fmt.Sprintf("remove a taint from Node %q", name), name, types.JSONPatchType, patch)
	_, err := n.Do(ctx, r, &patched)
	if err == nil {
		n.node.Put(patched)
	}
	return err
}

// leavingTaints are the taints that an autoscaler sets before it removes a Node: the cluster autoscaler's
// (cluster-autoscaler/utils/taints), and Karpenter's current and former one (karpenter.sh/docs/concepts/disruption).
var leavingTaints = []string{"ToBeDeletedByClusterAutoscaler", "karpenter.sh/disrupted", "karpenter.sh/disruption"}

// shuttingDown is in the message of the condition Ready while the kubelet ends its pods because the machine shuts down:
// kubernetes v1.36.3, pkg/kubelet/nodeshutdown.
const shuttingDown = "node is shutting down"

// Leaving implements [orchestrator.Departure]. A Node is given up when it is cordoned (kubectl drain does so), when it
// was deleted, when an autoscaler removes it, and when its machine shuts down. It needs the verb "get" on "nodes".
func (n *Node) Leaving(ctx context.Context) (why string, err error) {
	s := n.node.Read(ctx)
	switch {
	case s.Err != nil:
		return "", s.Err
	case !s.Exists, s.Object.DeletionTimestamp != nil:
		return "it was deleted", nil
	case s.Object.Spec.Unschedulable:
		return "it is cordoned", nil
	}
	for _, taint := range s.Object.Spec.Taints {
		if slices.Contains(leavingTaints, taint.key) {
			return "it has the taint " + taint.key, nil
		}
	}
	for _, condition := range s.Object.Status.Conditions {
		if condition.Type == "Ready" && strings.Contains(condition.Message, shuttingDown) {
			return "its machine shuts down", nil
		}
	}
	return "", nil
}

// pageSize is the number of objects in one page of a list.
const pageSize = "500"

// volumeAttachment has the fields of a VolumeAttachment that are read.
type volumeAttachment struct {
	Spec struct {
		Attacher, NodeName string
		Source             struct{ PersistentVolumeName string }
	}
}

// Attachments implements [orchestrator.Departure]: the names of the PersistentVolumes whose VolumeAttachments name the
// Node. It needs the verb "list" on "volumeattachments".
func (n *Node) Attachments(ctx context.Context, driver string) (volumes []string, err error) {
	for query := (url.Values{"limit": {pageSize}}); ; {
		var page kubernetes.List[volumeAttachment]
		r := kubernetes.Request{
			Method:   http.MethodGet,
			Path:     volumeAttachments,
			Query:    query,
			What:     "list VolumeAttachments",
			Verb:     "list",
			Resource: "volumeattachments",
		}
		if _, err := n.Do(ctx, r, &page); err != nil {
			return nil, err
		}
		if page.Kind != "VolumeAttachmentList" {
			return nil, n.UnexpectedAnswer(r)
		}
		for _, item := range page.Items {
			if item.Spec.Attacher == driver && item.Spec.NodeName == n.Options.NodeName {
				volumes = append(volumes, item.Spec.Source.PersistentVolumeName)
			}
		}
		if page.Continue == "" {
			return volumes, nil
		}
		query.Set("continue", page.Continue)
	}
}

var _ interface {
	orchestrator.StartupTaint
	orchestrator.Departure
} = (*Node)(nil)

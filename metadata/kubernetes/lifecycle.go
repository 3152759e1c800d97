// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package kubernetes

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
)

// Node is the Node on which the plugin runs, for what the plugin does at the
// beginning and at the end of that Node's life. Its errors are those of
// [metadata.Provider]. It is asked every few seconds for a while, and keeps its
// connection from one call to the next.
type Node struct{ client }

// NewNode makes a Node. It reads nothing.
func NewNode(options Options) *Node { return &Node{newClient(options).keep()} }

// Registration is what kubelet writes into a CSINode of a plugin.
type Registration struct {
	// Driver is the plugin's name, and NodeID what it calls the node.
	Driver, NodeID string
}

// RemoveTaint takes a taint off the Node once its CSINode has the registration
// with a limit of volumes, by which the scheduler goes; before that it is an
// error of kind [metadata.ErrNotReady]. It reports whether the Node had the
// taint. Safe to repeat.
//
// It takes the verbs "get" and "patch" on "nodes" and "get" on "csinodes".
func (n *Node) RemoveTaint(ctx context.Context, key string, registration Registration) (had bool, err error) {
	var tainted taintedNode
	r := n.getNode()
	status, err := n.ask(ctx, r, &tainted)
	if err != nil {
		return false, err
	}
	if status != http.StatusOK {
		return false, noNode(r, status)
	}
	kept := []json.RawMessage{}
	for _, taint := range tainted.Spec.Taints {
		var t struct{ Key string }
		if err := json.Unmarshal(taint, &t); err != nil {
			return false, &metadata.Error{
				Kind: metadata.ErrInvalid,
				What: fmt.Sprintf("a taint of Node %q cannot be read", n.options.NodeName),
				Next: "see what has written it",
			}
		}
		if t.Key != key {
			kept = append(kept, taint)
		}
	}
	if len(kept) == len(tainted.Spec.Taints) {
		return false, nil
	}
	if err := n.registered(ctx, registration); err != nil {
		return true, err
	}
	return true, n.replaceTaints(ctx, tainted.Spec.Taints, kept)
}

// taintedNode keeps all that a taint says, to write it back.
type taintedNode struct {
	object
	Spec struct{ Taints []json.RawMessage }
}

// registered is an error until the CSINode has the registration and a limit.
func (n *Node) registered(ctx context.Context, registration Registration) error {
	var csiNode struct {
		object
		Spec struct {
			Drivers []struct {
				Name, NodeID string
				Allocatable  struct{ Count *int }
			}
		}
	}
	if _, err := n.ask(ctx, request{
		method: http.MethodGet,
		path:   "/apis/storage.k8s.io/v1/csinodes/" + url.PathEscape(n.options.NodeName),
		what: fmt.Sprintf(
			"get CSINode %q",
			n.options.NodeName,
		),
		kind:     "CSINode",
		name:     n.options.NodeName,
		verb:     "get",
		resource: "csinodes",
	}, &csiNode); err != nil {
		return err
	}
	for _, driver := range csiNode.Spec.Drivers {
		if driver.Name == registration.Driver && driver.NodeID == registration.NodeID && driver.Allocatable.Count != nil {
			return nil
		}
	}
	return &metadata.Error{
		Kind: metadata.ErrNotReady,
		What: fmt.Sprintf(
			"wait for the kubelet to write %s, as node %s, and its limit of volumes into CSINode %q",
			registration.Driver,
			registration.NodeID,
			n.options.NodeName,
		),
		Next: "check that the plugin is registered with the kubelet: docs/how-to/registration.md",
	}
}

// replaceTaints writes taints where they still are as they were read: others add
// and remove theirs at the same time.
func (n *Node) replaceTaints(ctx context.Context, were, are []json.RawMessage) error {
	type operation struct {
		Op    string            `json:"op"`
		Path  string            `json:"path"`
		Value []json.RawMessage `json:"value"`
	}
	patch, err := json.Marshal([]operation{{"test", "/spec/taints", were}, {"replace", "/spec/taints", are}})
	if err != nil {
		return err
	}
	r := n.getNode()
	r.method, r.body, r.what, r.verb = http.MethodPatch, patch, fmt.Sprintf(
		"remove a taint from Node %q",
		n.options.NodeName,
	), "patch"
	status, err := n.ask(ctx, r, &taintedNode{})
	if err == nil && status != http.StatusOK {
		err = &metadata.Error{
			Kind: metadata.ErrNotReady,
			What: fmt.Sprintf("%s: HTTP %d, it has changed meanwhile", r.what, status),
			Next: "try again",
		}
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

// Leaving says why the Node is about to lose its pods, or is empty: it is
// cordoned, as by kubectl drain; it was deleted; an autoscaler takes it away; its
// machine shuts down.
//
// It takes the verb "get" on "nodes".
func (n *Node) Leaving(ctx context.Context) (why string, err error) {
	var state struct {
		object
		Spec struct {
			Unschedulable bool
			Taints        []struct{ Key string }
		}
		Status struct {
			Conditions []struct{ Type, Message string }
		}
	}
	status, err := n.ask(ctx, n.getNode(), &state)
	switch {
	case err != nil:
		return "", err
	case status != http.StatusOK, state.Metadata.DeletionTimestamp != "":
		return "it was deleted", nil
	case state.Spec.Unschedulable:
		return "it is cordoned", nil
	}
	for _, taint := range state.Spec.Taints {
		if slices.Contains(leavingTaints, taint.Key) {
			return "it has the taint " + taint.Key, nil
		}
	}
	for _, condition := range state.Status.Conditions {
		if condition.Type == "Ready" && strings.Contains(condition.Message, shuttingDown) {
			return "its machine shuts down", nil
		}
	}
	return "", nil
}

// page is how many objects of a list are asked for at a time.
const page = 500

// Attachments are the names of the PersistentVolumes of a driver that are
// attached to the Node, or are about to be, or not detached yet.
//
// It takes the verb "list" on "volumeattachments".
func (n *Node) Attachments(ctx context.Context, driver string) (volumes []string, err error) {
	for next := ""; ; {
		var list struct {
			object
			Items []struct {
				Spec struct {
					Attacher, NodeName string
					Source             struct{ PersistentVolumeName string }
				}
			}
		}
		query := url.Values{"limit": {fmt.Sprint(page)}, "continue": {next}}
		r := request{
			method: http.MethodGet, path: "/apis/storage.k8s.io/v1/volumeattachments?" + query.Encode(),
			what: "list VolumeAttachments", kind: "VolumeAttachmentList", verb: "list", resource: "volumeattachments",
		}
		status, err := n.ask(ctx, r, &list)
		if err != nil {
			return nil, err
		}
		if status != http.StatusOK {
			return nil, &metadata.Error{
				Kind: metadata.ErrInvalid,
				What: fmt.Sprintf("%s: HTTP %d", r.what, status),
				Next: "check that this is the address of a Kubernetes API server",
			}
		}
		for _, item := range list.Items {
			if item.Spec.Attacher == driver && item.Spec.NodeName == n.options.NodeName {
				volumes = append(volumes, item.Spec.Source.PersistentVolumeName)
			}
		}
		if next = list.Metadata.Continue; next == "" {
			return volumes, nil
		}
	}
}

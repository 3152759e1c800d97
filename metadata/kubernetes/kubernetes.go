// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package kubernetes is what the plugin asks of Kubernetes. [Provider] is the
// metadata provider: it reads one object, the Node on which the plugin runs,
// which has the instance's ID from the Oxide cloud controller manager or from an
// operator. [Node] is for the beginning and the end of that Node's life.
// [Listener] and [Restarts] are the two halves of planned restarts.
//
// # Rights
//
// A [Provider] takes these on its own Node. A list and a watch are for the name of
// that Node only (field selector metadata.name), so a Role with resourceNames
// suffices.
//
//	rules: [{apiGroups: [""], resources: [nodes], verbs: [get, list, watch]}]
//
// # The ID
//
// The first of these that the Node has:
//
//   - spec.providerID, "oxide://<instance ID>", set by the Oxide cloud controller
//     manager;
//   - the label or annotation oxide.computer/instance-id, set by an operator;
//   - status.nodeInfo.systemUUID, which the kubelet reads from the machine's
//     firmware (docs/reference/rack.md §9).
//
// # The rack
//
// The label or annotation oxide.computer/rack, or another label of the operator's
// choice, such as topology.kubernetes.io/zone.
//
// As long as the Node has the taint with which a cluster waits for its cloud
// controller manager, what it lacks counts as not there yet.
//
// # Load
//
// A node does not poll. While it waits for something on its Node, it keeps one
// watch of that Node, which the API server serves from memory. See [Provider.Follow],
// [Node.Follow] and [Listener.Changes].
//
// # Weight
//
// Of client-go the configuration, the authentication and the transport are linked
// (rest, tools/clientcmd), and no typed clientset, which would double the program:
// each object is decoded into the few fields that are read.
package kubernetes

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
)

const (
	// DefaultInstanceLabel is written by operators: the instance's ID.
	DefaultInstanceLabel = "oxide.computer/instance-id"
	// DefaultRackLabel is written by operators: the rack's name.
	DefaultRackLabel = "oxide.computer/rack"

	// providerPrefix begins the provider ID that the Oxide cloud controller manager
	// writes: oxidecomputer/oxide-cloud-controller-manager, internal/provider.
	providerPrefix = "oxide://"
	// uninitializedTaint is the taint that a kubelet with --cloud-provider=external sets
	// and a cloud controller manager takes away: k8s.io/cloud-provider/api.
	uninitializedTaint = "node.cloudprovider.kubernetes.io/uninitialized"
)

// Options says which Node this is and how to ask for it.
type Options struct {
	// NodeName is the name of the Node. Required.
	NodeName string
	// Kubeconfig is the path of a kubeconfig file. Empty is the pod's own service
	// account.
	Kubeconfig string
	// Host and Port are where Kubernetes tells every pod that the API server is.
	// Without a Kubeconfig they are required.
	Host, Port string
	// ServiceAccount is the folder with the service account's token and the API
	// server's CA. Empty is where Kubernetes puts it.
	ServiceAccount string
	// InstanceLabel and RackLabel are names of labels or annotations.
	InstanceLabel, RackLabel string
}

// Provider is a [metadata.Provider] and a [metadata.Follower].
type Provider struct {
	*client
	node *watch[node]
}

// New makes a provider. It reads nothing.
func New(options Options) *Provider {
	c := newClient(options)
	return &Provider{client: c, node: c.watchNode()}
}

// watchNode makes a watch of the Node.
func (c *client) watchNode() *watch[node] {
	return &watch[node]{client: c, collection: nodes, resource: "nodes", kind: "Node"}
}

// Follow implements [metadata.Follower].
func (p *Provider) Follow(ctx context.Context) <-chan struct{} { return p.node.follow(ctx) }

// Instance implements [metadata.Provider].
func (p *Provider) Instance(ctx context.Context) (metadata.Instance, error) {
	n, err := p.read(ctx, p.node)
	if err != nil {
		return metadata.Instance{}, err
	}
	instance, err := p.instanceOf(n)
	if err == nil && instance.ID == "" {
		return metadata.Instance{}, p.noID(n)
	}
	return instance, err
}

// Known implements [metadata.PartialProvider].
func (p *Provider) Known(ctx context.Context) (metadata.Instance, error) {
	n, err := p.read(ctx, p.node)
	if err != nil {
		return metadata.Instance{}, err
	}
	return p.instanceOf(n)
}

// node is what is read of a Node.
type node struct {
	object
	Spec struct {
		ProviderID    string
		Unschedulable bool
		Taints        []taint
	}
	Status struct {
		NodeInfo   struct{ SystemUUID string }
		Conditions []struct{ Type, Message string }
	}
}

// taint is a taint of a Node, with all that it says, to write it back.
type taint struct {
	key  string
	text json.RawMessage
}

// UnmarshalJSON implements [json.Unmarshaler].
func (t *taint) UnmarshalJSON(text []byte) error {
	var read struct{ Key string }
	if err := json.Unmarshal(text, &read); err != nil {
		return err
	}
	*t = taint{key: read.Key, text: append(json.RawMessage(nil), text...)}
	return nil
}

// MarshalJSON implements [json.Marshaler].
func (t taint) MarshalJSON() ([]byte, error) { return t.text, nil }

// awaitsCloudController reports whether the cluster still waits for its cloud controller manager.
func (n node) awaitsCloudController() bool {
	for _, taint := range n.Spec.Taints {
		if taint.key == uninitializedTaint {
			return true
		}
	}
	return false
}

// instanceOf makes an answer of what a Node says.
func (p *Provider) instanceOf(n node) (metadata.Instance, error) {
	id, err := p.instanceID(n)
	if err != nil {
		return metadata.Instance{}, err
	}
	rack, err := p.labelOrAnnotation(n, p.options.RackLabel)
	if err != nil {
		return metadata.Instance{}, err
	}
	if rack == "" && n.awaitsCloudController() {
		return metadata.Instance{}, p.notInitialized()
	}
	if rack != "" {
		if err := metadata.CheckRack(rack); err != nil {
			return metadata.Instance{}, p.invalid(
				p.options.RackLabel,
				err,
				"set it to the name that the controller uses for this rack, or name another label by --rack-label",
			)
		}
	}
	return metadata.Instance{ID: id, Rack: rack}, nil
}

// instanceID is the first of the three IDs that the Node has, or empty.
func (p *Provider) instanceID(n node) (string, error) {
	label := p.options.InstanceLabel
	text, from := n.Spec.ProviderID, "spec.providerID"
	next := "check the Oxide cloud controller manager, which writes it"
	if text != "" {
		rest, ours := strings.CutPrefix(text, providerPrefix)
		if !ours {
			return "", p.invalid(
				from,
				fmt.Errorf("%.40q does not begin with %s", text, providerPrefix),
				"this Node is no Oxide instance, or another cloud controller manager has claimed it: "+
					"keep the plugin off it, or set --instance-id",
			)
		}
		text = rest
	} else {
		var err error
		if text, err = p.labelOrAnnotation(n, label); err != nil {
			return "", err
		}
		from, next = label, "set it to the UUID of this instance"
		_, labelled := n.Metadata.Labels[label]
		_, annotated := n.Metadata.Annotations[label]
		if !labelled && !annotated {
			if n.Status.NodeInfo.SystemUUID == "" || n.awaitsCloudController() {
				return "", nil
			}
			text, from = n.Status.NodeInfo.SystemUUID, "status.nodeInfo.systemUUID"
			next = "set the label " + label + " to the UUID of this instance"
		}
	}
	id, err := metadata.ParseInstanceID(text)
	if err != nil {
		return "", p.invalid(from, err, next)
	}
	return id, nil
}

// labelOrAnnotation is the value of a label or annotation, or empty.
func (p *Provider) labelOrAnnotation(n node, name string) (string, error) {
	label, annotation := n.Metadata.Labels[name], n.Metadata.Annotations[name]
	switch {
	case label != "" && annotation != "" && label != annotation:
		return "", p.invalid(name, fmt.Errorf("the label and the annotation of that name differ"), "keep the true one")
	case label != "":
		return label, nil
	}
	return annotation, nil
}

// invalid refuses something that the Node says.
func (p *Provider) invalid(what string, cause error, next string) error {
	return &metadata.Error{
		Kind:  metadata.ErrInvalid,
		What:  fmt.Sprintf("%s of Node %q", what, p.options.NodeName),
		Cause: cause,
		Next:  next,
	}
}

// noID says why a Node names no instance.
func (p *Provider) noID(n node) error {
	if n.awaitsCloudController() {
		return p.notInitialized()
	}
	return &metadata.Error{
		Kind: metadata.ErrNotReady,
		What: fmt.Sprintf(
			"Node %q has no provider ID, no label %s and no system UUID",
			p.options.NodeName,
			p.options.InstanceLabel,
		),
		Next: "check that the Oxide cloud controller manager runs and that the kubelet has " +
			"--cloud-provider=external, or set that label to the UUID of this instance",
	}
}

func (p *Provider) notInitialized() error {
	return &metadata.Error{
		Kind: metadata.ErrNotReady,
		What: fmt.Sprintf(
			"wait for the cloud controller manager to initialise Node %q, which has the taint %s",
			p.options.NodeName,
			uninitializedTaint,
		),
		Next: "check that the Oxide cloud controller manager runs and what it logs about this Node",
	}
}

// read reads the Node: from memory while it is followed, else from the API server.
func (c *client) read(ctx context.Context, followed *watch[node]) (node, error) {
	s, ok := followed.get(ctx)
	if !ok {
		s = c.getNode(ctx)
	}
	if s.err == nil && !s.exists {
		s.err = noNode(c.options.NodeName)
	}
	return s.object, s.err
}

// getNode reads the Node from the API server.
func (c *client) getNode(ctx context.Context) (s state[node]) {
	name := c.options.NodeName
	r := getNode(fmt.Sprintf("get Node %q", name), name)
	status, err := c.do(ctx, r, &s.object, http.StatusNotFound)
	s.exists, s.err = status == http.StatusOK, err
	if err == nil && s.exists && (s.object.Kind != "Node" || s.object.name() != name) {
		s.err = c.unexpectedAnswer(r)
	}
	return s
}

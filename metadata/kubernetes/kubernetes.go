// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package kubernetes is the plugin's client of Kubernetes.
//
// [Provider] is the metadata provider. It reads the Node on which the plugin runs. [Client] and [Watch] are what
// package orchestrator/kubernetes calls the API server with.
//
// # Rights
//
// A [Provider] needs these rights for its own Node. It lists and watches only that Node (field selector metadata.name),
// so a Role with resourceNames suffices.
//
//	rules: [{apiGroups: [""], resources: [nodes], verbs: [get, list, watch]}]
//
// # The instance ID
//
// The ID is the first of these that the Node has:
//
//   - spec.providerID, "oxide://<instance ID>", which the Oxide cloud controller manager writes;
//   - the label or annotation oxide.computer/instance-id, which an operator writes;
//   - status.nodeInfo.systemUUID, which the kubelet reads from the machine's firmware (docs/reference/rack.md §9).
//
// # The rack
//
// The rack is the label or annotation oxide.computer/rack, or another label that the operator chooses, such as
// topology.kubernetes.io/zone.
//
// A cluster with a cloud controller manager taints a new Node until that manager has initialised it. While the Node has
// that taint, a missing ID or rack is [metadata.ErrNotReady].
//
// # Load
//
// A node does not poll. While the plugin waits for something on its Node, it keeps one watch of that Node open, which
// the API server serves from memory, see [Watch].
//
// # Weight
//
// Only rest and tools/clientcmd of client-go are linked: configuration, authentication and transport. The typed
// clientset would double the size of the program. Instead, each object is decoded into the few fields that are read.
package kubernetes

import (
	"context"
	"fmt"
	"net"
	"slices"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
)

const (
	// InstanceLabel is the label or annotation in which operators write the instance's ID.
	InstanceLabel = "oxide.computer/instance-id"
	// DefaultRackLabel is the label or annotation in which operators write the rack's name.
	DefaultRackLabel = "oxide.computer/rack"

	// ProviderPrefix begins the provider ID that the Oxide cloud controller manager writes:
	// oxidecomputer/oxide-cloud-controller-manager, internal/provider.
	ProviderPrefix = "oxide://"
	// uninitializedTaint is the taint that a kubelet with --cloud-provider=external sets, and that a cloud controller
	// manager removes: k8s.io/cloud-provider/api.
	uninitializedTaint = "node.cloudprovider.kubernetes.io/uninitialized"
)

// Options says which Node this is and how to reach the API server.
type Options struct {
	// NodeName is the name of the Node. Required, except for what a controller calls.
	NodeName string
	// Kubeconfig is the path of a kubeconfig file. Empty means the pod's own service account.
	Kubeconfig string
	// Host and Port are the API server's address, which Kubernetes gives to every pod. Required without a Kubeconfig.
	Host, Port string
	// ServiceAccount is the folder with the service account's token and the API server's CA. Empty means the folder
	// where Kubernetes puts them.
	ServiceAccount string
	// RackLabel is the name of the label or annotation with the rack. Empty means [DefaultRackLabel].
	RackLabel string
	// Dial replaces the network in tests.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)
}

// Provider is a [metadata.Provider] and a [metadata.Follower].
type Provider struct {
	*Client
	node *Watch[node]
}

// New makes a provider. It does no I/O.
func New(options Options) *Provider {
	c := NewClient(options)
	return &Provider{Client: c, node: &Watch[node]{Client: c, Collection: Nodes, Resource: "nodes", Kind: "Node"}}
}

// Follow implements [metadata.Follower].
func (p *Provider) Follow(ctx context.Context) <-chan struct{} { return p.node.Follow(ctx) }

// Instance implements [metadata.Provider].
func (p *Provider) Instance(ctx context.Context) (metadata.Instance, error) {
	n, err := p.read(ctx)
	if err != nil {
		return metadata.Instance{}, err
	}
	instance, err := p.instanceOf(n)
	if err == nil && instance.ID == "" {
		return metadata.Instance{}, p.noID(n)
	}
	return instance, err
}

// PartialInstance implements [metadata.PartialProvider].
func (p *Provider) PartialInstance(ctx context.Context) (metadata.Instance, error) {
	n, err := p.read(ctx)
	if err != nil {
		return metadata.Instance{}, err
	}
	return p.instanceOf(n)
}

// node has the fields of a Node that are read.
type node struct {
	Object
	Spec struct {
		ProviderID string
		Taints     []struct{ Key string }
	}
	Status struct{ NodeInfo struct{ SystemUUID string } }
}

// awaitsCloudController reports whether a cloud controller manager has not initialised the Node yet.
func (n node) awaitsCloudController() bool {
	return slices.ContainsFunc(n.Spec.Taints, func(t struct{ Key string }) bool { return t.Key == uninitializedTaint })
}

// instanceOf returns the ID and the rack that a Node names. Either can be empty.
func (p *Provider) instanceOf(n node) (metadata.Instance, error) {
	id, err := p.instanceID(n)
	if err != nil {
		return metadata.Instance{}, err
	}
	rack, err := p.labelOrAnnotation(n, p.Options.RackLabel)
	if err != nil {
		return metadata.Instance{}, err
	}
	if rack == "" && n.awaitsCloudController() {
		return metadata.Instance{}, p.notInitialized()
	}
	if rack != "" {
		if err := metadata.CheckRack(rack); err != nil {
			return metadata.Instance{}, p.invalid(p.Options.RackLabel, err,
				"set it to the name that the controller uses for this rack, or name another label by --rack-label")
		}
	}
	return metadata.Instance{ID: id, Rack: rack}, nil
}

// instanceID is the first of the three IDs that the Node has, or empty.
func (p *Provider) instanceID(n node) (string, error) {
	text, from := n.Spec.ProviderID, "spec.providerID"
	next := "check the Oxide cloud controller manager, which writes it"
	if text != "" {
		rest, ours := strings.CutPrefix(text, ProviderPrefix)
		if !ours {
			return "", p.invalid(
				from,
				fmt.Errorf("%.40q does not begin with %s", text, ProviderPrefix),
				"this Node is not an Oxide instance, or has another cloud controller manager: "+
					"do not run the plugin there, or set --instance-id",
			)
		}
		text = rest
	} else {
		var err error
		if text, err = p.labelOrAnnotation(n, InstanceLabel); err != nil {
			return "", err
		}
		from, next = InstanceLabel, "set it to the UUID of this instance"
		_, labelled := n.Labels[InstanceLabel]
		_, annotated := n.Annotations[InstanceLabel]
		if !labelled && !annotated {
			if n.Status.NodeInfo.SystemUUID == "" || n.awaitsCloudController() {
				return "", nil
			}
			text, from = n.Status.NodeInfo.SystemUUID, "status.nodeInfo.systemUUID"
			next = "set the label " + InstanceLabel + " to the UUID of this instance"
		}
	}
	id, err := metadata.ParseInstanceID(text)
	if err != nil {
		return "", p.invalid(from, err, next)
	}
	return id, nil
}

// labelOrAnnotation is the value of the label or annotation of that name, or empty.
func (p *Provider) labelOrAnnotation(n node, name string) (string, error) {
	label, annotation := n.Labels[name], n.Annotations[name]
	switch {
	case label != "" && annotation != "" && label != annotation:
		return "", p.invalid(name, fmt.Errorf("the label and the annotation of that name differ"), "remove the wrong one")
	case label != "":
		return label, nil
	}
	return annotation, nil
}

// invalid is the error for a value of the Node that cannot be used.
func (p *Provider) invalid(what string, cause error, next string) error {
	return metadata.Invalid(fmt.Sprintf("%s of Node %q", what, p.Options.NodeName), cause, next)
}

// noID is the error for a Node that names no instance.
func (p *Provider) noID(n node) error {
	if n.awaitsCloudController() {
		return p.notInitialized()
	}
	return metadata.NotReady(
		fmt.Sprintf("Node %q has no provider ID, no label %s and no system UUID", p.Options.NodeName, InstanceLabel),
		nil,
		"check that the Oxide cloud controller manager runs and that the kubelet has "+
			"--cloud-provider=external, or set that label to the UUID of this instance",
	)
}

func (p *Provider) notInitialized() error {
	return metadata.NotReady(
		fmt.Sprintf("wait for the cloud controller manager to initialise Node %q and remove its taint %s", p.Options.NodeName,
			uninitializedTaint),
		nil,
		"check that the Oxide cloud controller manager runs, and its log",
	)
}

// read reads the Node, from memory if it is followed.
func (p *Provider) read(ctx context.Context) (node, error) {
	s := p.node.Read(ctx)
	if s.Err == nil && !s.Exists {
		s.Err = NoNode(p.Options.NodeName)
	}
	return s.Object, s.Err
}

var _ metadata.PartialProvider = (*Provider)(nil)

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package kubernetes is the metadata provider that asks Kubernetes: it reads one
// object, the Node on which the plugin runs, which has the instance's ID from the
// Oxide cloud controller manager or from an operator. What the plugin may do
// besides with that Node, where an operator wants it, is [Node].
//
// A [Provider] needs the right to "get" that one Node, and no other:
//
//	rules: [{apiGroups: [""], resources: [nodes], verbs: [get]}]
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
// # Weight
//
// Of client-go only the part that makes TLS and credentials out of a
// configuration is linked. What it calls rest would be a fifth of the plugin's
// memory, for one request.
package kubernetes

import (
	"context"
	"fmt"
	"net/http"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
)

const (
	// DefaultInstanceLabel and DefaultRackLabel are written by operators.
	DefaultInstanceLabel = "oxide.computer/instance-id"
	DefaultRackLabel     = "oxide.computer/rack"

	// providerPrefix begins the provider ID that the Oxide cloud controller manager
	// writes: oxidecomputer/oxide-cloud-controller-manager, internal/provider.
	providerPrefix = "oxide://"
	// uninitialized is the taint that a kubelet with --cloud-provider=external sets
	// and a cloud controller manager takes away: k8s.io/cloud-provider/api.
	uninitialized = "node.cloudprovider.kubernetes.io/uninitialized"
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

// Provider is a [metadata.Provider]. It keeps nothing from one call to the next,
// so that new tokens and certificates are used at once.
type Provider struct{ client }

// New makes a provider. It reads nothing.
func New(options Options) *Provider { return &Provider{newClient(options)} }

// Instance implements [metadata.Provider].
func (p *Provider) Instance(ctx context.Context) (metadata.Instance, error) {
	n, err := p.get(ctx)
	if err != nil {
		return metadata.Instance{}, err
	}
	instance, err := p.known(n)
	if err == nil && instance.ID == "" {
		return metadata.Instance{}, p.noID(n)
	}
	return instance, err
}

// Known implements [metadata.Partial].
func (p *Provider) Known(ctx context.Context) (metadata.Instance, error) {
	n, err := p.get(ctx)
	if err != nil {
		return metadata.Instance{}, err
	}
	return p.known(n)
}

// node is what is read of a Node.
type node struct {
	object
	Spec struct {
		ProviderID    string
		Unschedulable bool
		Taints        []struct{ Key string }
	}
	Status struct {
		NodeInfo struct{ SystemUUID string }
	}
}

// waiting reports whether the cluster still waits for its cloud controller manager.
func (n node) waiting() bool {
	for _, taint := range n.Spec.Taints {
		if taint.Key == uninitialized {
			return true
		}
	}
	return false
}

// known makes an answer of what a Node says.
func (p *Provider) known(n node) (metadata.Instance, error) {
	id, err := p.instanceID(n)
	if err != nil {
		return metadata.Instance{}, err
	}
	rack, err := p.mark(n, p.options.RackLabel)
	if err != nil {
		return metadata.Instance{}, err
	}
	if rack == "" && n.waiting() {
		return metadata.Instance{}, p.uninitialized()
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
	text, from, next := n.Spec.ProviderID, "spec.providerID", "check the Oxide cloud controller manager, which writes it"
	if text != "" {
		rest, ours := strings.CutPrefix(text, providerPrefix)
		if !ours {
			return "", p.invalid(
				from,
				fmt.Errorf("%.40q does not begin with %s", text, providerPrefix),
				"this Node is no Oxide instance, or another cloud controller manager has claimed it: keep the plugin off it, or set --instance-id",
			)
		}
		text = rest
	} else {
		var err error
		if text, err = p.mark(n, label); err != nil {
			return "", err
		}
		from, next = label, "set it to the UUID of this instance"
		_, labelled := n.Metadata.Labels[label]
		_, annotated := n.Metadata.Annotations[label]
		if !labelled && !annotated {
			if n.Status.NodeInfo.SystemUUID == "" || n.waiting() {
				return "", nil
			}
			text, from, next = n.Status.NodeInfo.SystemUUID, "status.nodeInfo.systemUUID", "set the label "+label+" to the UUID of this instance"
		}
	}
	id, err := metadata.ParseInstanceID(text)
	if err != nil {
		return "", p.invalid(from, err, next)
	}
	return id, nil
}

// mark is the value of a label or annotation, or empty.
func (p *Provider) mark(n node, name string) (string, error) {
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
	if n.waiting() {
		return p.uninitialized()
	}
	return &metadata.Error{
		Kind: metadata.ErrNotReady,
		What: fmt.Sprintf(
			"Node %q has no provider ID, no label %s and no system UUID",
			p.options.NodeName,
			p.options.InstanceLabel,
		),
		Next: "check that the Oxide cloud controller manager runs and that the kubelet has --cloud-provider=external, or set that label to the UUID of this instance",
	}
}

func (p *Provider) uninitialized() error {
	return &metadata.Error{
		Kind: metadata.ErrNotReady,
		What: fmt.Sprintf(
			"wait for the cloud controller manager to initialise Node %q, which has the taint %s",
			p.options.NodeName,
			uninitialized,
		),
		Next: "check that the Oxide cloud controller manager runs and what it logs about this Node",
	}
}

// get reads the Node.
func (p *Provider) get(ctx context.Context) (n node, err error) {
	r := p.getNode()
	status, err := p.ask(ctx, r, &n)
	if err == nil && status != http.StatusOK {
		err = noNode(r, status)
	}
	return n, err
}

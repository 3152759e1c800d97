// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package kubernetes is the adapter of Kubernetes. It calls the API server as the metadata provider does.
//
//   - [Listener] and [Restarts] are the node's and the controller's half of planned restarts.
//   - [Node] removes the startup taint of this Node, and sees when the Node is given up.
//   - [Self] publishes events of the plugin's own pod.
//   - [Operator] reads what the cluster knows of the plugin's volumes, for the commands.
package kubernetes

import (
	"github.com/oxidecomputer/oxide-csi-plugin/metadata/kubernetes"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
)

// New makes the adapter. It does no I/O. Kubernetes never leaves an unpublish out.
func New(options kubernetes.Options) orchestrator.Adapter {
	node, operator, restarts := NewNode(options), NewOperator(options), NewRestarts(options)
	adapter := orchestrator.Adapter{
		Name:          orchestrator.Kubernetes,
		Restarts:      restarts,
		Drainer:       restarts,
		ClaimReporter: restarts,
		Self:          NewSelf(options),
		Listener:      func(string) orchestrator.RestartListener { return NewListener(options) },
		StartupTaint:  node,
		Departure:     node,
		Tracer:        operator,
		Inventory:     operator,
	}
	if options.HasCredentials() {
		adapter.Examiner, adapter.Classes, adapter.Logs = operator, operator, operator
	}
	return adapter
}

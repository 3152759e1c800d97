// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package nomad is the adapter of Nomad. It calls the agent as the metadata provider does.
//
//   - [Listener] and [Restarts] are the node's and the controller's half of planned restarts.
//   - [Operator] reads what Nomad knows of the plugin's volumes, for the commands and for volumes that have moved.
package nomad

import (
	"github.com/oxidecomputer/oxide-csi-plugin/metadata/nomad"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
)

// New makes the adapter. It does no I/O. needs are the policies whose rules [Operator.Examine] looks for. A plugin
// cannot write events of its own allocation in Nomad, and Nomad has no startup taints.
func New(o nomad.Options, needs []string) orchestrator.Adapter {
	operator, restarts := NewOperator(o), NewRestarts(o)
	operator.Needs = needs
	return orchestrator.Adapter{
		Name:      orchestrator.Nomad,
		Restarts:  restarts,
		Drainer:   restarts,
		Claims:    operator,
		Listener:  func(instanceID string) orchestrator.RestartListener { return NewListener(o, instanceID) },
		Tracer:    operator,
		Inventory: operator,
		Examiner:  operator,
		Logs:      operator,
	}
}

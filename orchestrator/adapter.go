// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package orchestrator

import "context"

// Adapter is what the plugin uses of one orchestrator. A field is nil if the orchestrator cannot do this, or if the
// plugin does not need it there. The zero value stands for a host without an orchestrator.
// docs/development/adding-an-orchestrator.md says how to add one.
type Adapter struct {
	// Name is [Kubernetes], [Nomad] or [None].
	Name string

	// The controller uses these.

	// Restarts requests planned restarts, and Drainer moves work off a node before one.
	Restarts RestartRequester
	Drainer  Drainer
	// ClaimReporter publishes what a volume waits for.
	ClaimReporter ClaimReporter
	// Self publishes events about the controller's own process.
	Self SelfReporter
	// Claims tells which nodes may use a volume.
	Claims Claims

	// The node plugin uses these.

	// Listener makes the node's half of planned restarts, for the instance of this node.
	Listener func(instanceID string) RestartListener
	// StartupTaint and Departure are about the node of this process.
	StartupTaint StartupTaint
	Departure    Departure

	// The commands of an operator use these. Examiner and Logs are also nil if this process has no credentials.

	Tracer    Tracer
	Inventory Inventorist
	Examiner  Examiner
	Classes   ClassLister
	Logs      LogReader
}

// Claims is an orchestrator that can leave an unpublish out, and that can send one for a volume that is in use: Nomad
// does both (docs/explanation/nomad.md).
type Claims interface {
	// Moved reports whether both nodes are the orchestrator's, and whether it lets only toNode use the volume. It returns
	// false or an error if that is not certain. Both are node IDs.
	Moved(ctx context.Context, volumeID, fromNode, toNode string) (bool, error)
	// Claimed returns those of the volumes that a workload on the node may use, with a text about the claim on each. It
	// MUST return an error if it may miss a claim.
	Claimed(ctx context.Context, nodeID string, volumeIDs []string) (map[string]string, error)
	// Registered returns the names under which the orchestrator has a volume, as far as it shows them. One that creates a
	// volume registers it after the call.
	Registered(ctx context.Context, volumeID string) ([]string, error)
}

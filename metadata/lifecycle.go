// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package metadata

import "context"

// Registration is how an orchestrator knows a node's plugin.
type Registration struct {
	// Driver is the plugin's name, and NodeID what it calls the node.
	Driver, NodeID string
}

// StartupTaint is a node that takes no work before the plugin is registered there, by a taint that the plugin removes.
// Errors are those of [Provider].
type StartupTaint interface {
	// RemoveTaint takes the taint off the node once the orchestrator has the registration, with a limit of volumes, by
	// which the scheduler goes; before that it is an error of kind [ErrNotReady]. It reports whether the node had the
	// taint. Safe to repeat.
	RemoveTaint(ctx context.Context, key string, registration Registration) (had bool, err error)
	// Follow is as that of [Follower], for what RemoveTaint reads.
	Follow(ctx context.Context) <-chan struct{}
}

// Departure is a node that may be given up. Errors are those of [Provider].
type Departure interface {
	// Leaving says why the node is about to lose its work, or is empty.
	Leaving(ctx context.Context) (why string, err error)
	// Attachments are the names of the volumes of a driver that are attached to the node, or are about to be, or not
	// detached yet.
	Attachments(ctx context.Context, driver string) (volumes []string, err error)
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package orchestrator

import (
	"context"
)

// Registration identifies a node plugin that is registered with an orchestrator.
type Registration struct {
	// Driver is the plugin's name. NodeID is the CSI node ID.
	Driver, NodeID string
}

// StartupTaint removes the taint that keeps work off a node until the plugin is registered there. Errors are those of
// [metadata.Provider].
type StartupTaint interface {
	// RemoveTaint removes the taint from the node once the orchestrator has the registration and a limit of volumes,
	// which the scheduler needs. Before that it returns an error of kind [metadata.ErrNotReady]. It reports whether the
	// node had the taint. It is idempotent.
	RemoveTaint(ctx context.Context, key string, registration Registration) (had bool, err error)
	// Follow is like [metadata.Follower], for everything that RemoveTaint reads.
	Follow(ctx context.Context) <-chan struct{}
}

// Departure tells whether the node is being given up, and which volumes are still attached. Errors are those of
// [metadata.Provider].
type Departure interface {
	// Leaving says why the node is being given up, or returns "" if it is not.
	Leaving(ctx context.Context) (why string, err error)
	// Attachments returns the names of the driver's volumes that are attached to the node, are about to be attached, or
	// are not detached yet.
	Attachments(ctx context.Context, driver string) (volumes []string, err error)
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package orchestrator

import (
	"context"
)

// Inventory is everything that an orchestrator knows of the plugin's volumes and snapshots.
type Inventory struct {
	// Volumes are the volumes that exist for the orchestrator.
	Volumes []KnownObject
	// Snapshots are the snapshots that exist for the orchestrator. It is not meant if SnapshotsUnknown is true.
	Snapshots []KnownObject
	// SnapshotsUnknown says that the orchestrator keeps no list of snapshots, as Nomad does not.
	SnapshotsUnknown bool
}

// KnownObject is a volume or a snapshot of an orchestrator.
type KnownObject struct {
	// ID is the CSI ID. It is empty for an object that the orchestrator is still creating.
	ID string
	// CSIName is the name in the CSI call that creates the object. It is set only if ID is empty: the disk or snapshot may
	// exist already.
	CSIName string
	// Object names the orchestrator's object for people, for instance `PersistentVolume pvc-1`.
	Object string
	// Claim is namespace/name of the claim, if there is one.
	Claim string
}

// Inventorist lists what an orchestrator knows. Deleting disks depends on the answer, so it MUST be complete: if a part
// cannot be read, or if the credentials may hide a part, Inventory returns a [metadata.Error] and no list.
type Inventorist interface {
	Inventory(ctx context.Context) (Inventory, error)
}

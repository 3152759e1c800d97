// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package rack

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
)

// SnapshotState is the state of a snapshot (docs/reference/rack.md §6).
type SnapshotState string

// The states that this plugin distinguishes.
const (
	SnapshotCreating = SnapshotState(oxide.SnapshotStateCreating)
	SnapshotReady    = SnapshotState(oxide.SnapshotStateReady)
)

// Snapshot is a snapshot as the rack describes it.
type Snapshot struct {
	ID          string
	Name        string
	Description string
	ProjectID   string
	// VolumeID is the ID of the volume whose disk the snapshot was made from, and DiskID that of the disk, which may be
	// deleted.
	VolumeID  string
	DiskID    DiskID
	SizeBytes int64
	State     SnapshotState
	Created   time.Time
}

// CheckKnown returns [ErrUnknown] for a snapshot that can only be shown.
func (s Snapshot) CheckKnown() error {
	if slices.Contains(oxide.SnapshotStateCollection, oxide.SnapshotState(s.State)) {
		return nil
	}
	return fmt.Errorf("snapshot %q (%s) has the state %.40q: %w", s.Name, s.ID, s.State, ErrUnknown)
}

// Temporary reports whether this plugin made the snapshot in order to clone a disk, for any cluster.
func (s Snapshot) Temporary() bool {
	_, ours := ParseDescription(s.Description)
	return ours && diskname.IsTemporary(s.Name)
}

// Expansion reports whether an expansion made the snapshot, for any cluster. Until the new disk exists, it is the only
// place with the volume's data.
func (s Snapshot) Expansion() bool {
	_, ours := ParseDescription(s.Description)
	return ours && diskname.IsExpansion(s.Name)
}

// Internal reports whether no orchestrator knows the snapshot.
func (s Snapshot) Internal() bool { return s.Temporary() || s.Expansion() }

// volumeOf is the volume of a snapshot that was made from a disk.
func volumeOf(diskID, description string) string {
	if described, ours := ParseDescription(description); ours && described.Volume != "" {
		return described.Volume
	}
	return diskID
}

func snapshotFrom(s *oxide.Snapshot) Snapshot {
	return Snapshot{
		ID:          s.Id,
		Name:        string(s.Name),
		Description: s.Description,
		ProjectID:   s.ProjectId,
		VolumeID:    volumeOf(s.DiskId, s.Description),
		DiskID:      DiskID(s.DiskId),
		SizeBytes:   int64(s.Size),
		State:       SnapshotState(s.State),
		Created:     timeOrZero(s.TimeCreated),
	}
}

// CreateSnapshot makes a snapshot of a disk, by the disk's own ID on the rack. The rack answers when the snapshot is
// ready (docs/reference/rack.md §6).
func (c *Client) CreateSnapshot(ctx context.Context, name, description string, diskID DiskID) (Snapshot, error) {
	created, err := c.sdk.SnapshotCreate(ctx, oxide.SnapshotCreateParams{
		Project: c.projectRef(),
		Body:    &oxide.SnapshotCreate{Name: oxide.Name(name), Description: description, Disk: oxide.NameOrId(diskID)},
	})
	if err != nil {
		return Snapshot{}, c.translate(ctx, err, "create snapshot %q of disk %s in project %q", name, diskID, c.project)
	}
	snapshot, err := c.checkSnapshot(
		snapshotFrom(created), identity{name: name, projectID: c.knownProjectID()}, "create snapshot %q", name)
	if err == nil && snapshot.DiskID != diskID {
		err = fmt.Errorf("rack %q: create snapshot %q: %w: its disk is %.40q", c.name, name, errAnswer, snapshot.DiskID)
	}
	return snapshot, err
}

// Snapshot returns a snapshot by its ID.
func (c *Client) Snapshot(ctx context.Context, id string) (Snapshot, error) {
	snapshot, err := c.sdk.SnapshotView(ctx, oxide.SnapshotViewParams{Snapshot: oxide.NameOrId(id)})
	if err != nil {
		return Snapshot{}, c.translate(ctx, err, "look up snapshot %s", id)
	}
	return c.checkSnapshot(snapshotFrom(snapshot), identity{id: id}, "look up snapshot %s", id)
}

// SnapshotByName returns a snapshot of the project by its name. [ErrNotFound] is as for [Client.DiskByName].
func (c *Client) SnapshotByName(ctx context.Context, name string) (Snapshot, error) {
	snapshot, err := c.sdk.SnapshotView(
		ctx,
		oxide.SnapshotViewParams{Snapshot: oxide.NameOrId(name), Project: c.projectRef()},
	)
	if err != nil {
		err = c.translate(ctx, err, "look up snapshot %q in project %q", name, c.project)
		return Snapshot{}, c.confirmNotFound(ctx, err)
	}
	asked := identity{name: name, projectID: c.knownProjectID()}
	return c.checkSnapshot(snapshotFrom(snapshot), asked, "look up snapshot %q", name)
}

// DeleteSnapshot deletes a snapshot by its ID. A second call returns [ErrNotFound].
func (c *Client) DeleteSnapshot(ctx context.Context, id string) error {
	err := c.sdk.SnapshotDelete(ctx, oxide.SnapshotDeleteParams{Snapshot: oxide.NameOrId(id)})
	return c.translate(ctx, err, "delete snapshot %s", id)
}

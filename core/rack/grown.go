// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package rack

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/core/fault"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
)

// A rack cannot change the size of a disk. Package expand replaces the disk by a larger one, and the volume keeps its
// ID: the UUID of its first disk. This file translates between the two. Outside of it, a disk has the ID of its volume.

// ReplacementPrefix is the prefix of the names of the records that replace a disk. The ID of the replaced disk follows.
// It is permanent: a newer version must find the records of an older one.
const ReplacementPrefix = "csi-grown-"

// Replacement is the record of a disk that is replaced by a larger one. That of a volume's first disk stays as long as
// the volume, because it leads from the volume's ID to the name of its disk. Its JSON names are permanent.
type Replacement struct {
	Version int    `json:"v"`
	Cluster string `json:"cluster"`
	// Volume is the ID of the volume. Disk is the replaced disk. They are equal for the volume's first disk.
	Volume string `json:"vol"`
	Disk   DiskID `json:"disk"`
	// DiskName is the name of the replaced disk and of all disks that follow it.
	DiskName string `json:"name"`
	// Attempt identifies the expansion. It is a UUID, and part of the name of the expansion's snapshot.
	Attempt string `json:"try"`
	// SizeBytes is the size of the new disk.
	SizeBytes int64 `json:"bytes"`
	// Committed is the decision: the disk is replaced, or the expansion is taken back.
	Committed bool `json:"commit"`

	RecordID string `json:"-"`
}

// ParseReplacement returns false for a record that is no replacement.
func ParseReplacement(record Record) (Replacement, bool) {
	r := Replacement{RecordID: record.ID}
	disk, named := strings.CutPrefix(record.Name, ReplacementPrefix)
	if !named || json.Unmarshal([]byte(record.Text), &r) != nil || r.Version < 1 || string(r.Disk) != disk {
		return Replacement{}, false
	}
	return r, true
}

// ErrReplaced means that the disk of a volume was deleted, and that its larger successor does not exist yet.
var ErrReplaced = fault.VolumeBeingReplaced.New("the disk of the volume is being replaced by a larger one")

// HalfDeleted reports whether the rack failed to delete the disk. It then keeps the disk as faulted, under another name
// (docs/reference/rack.md §3), and takes another request to delete it.
func (d Disk) HalfDeleted() bool { return d.State == Faulted && d.Name == "deleted-"+string(d.ID) }

// maxGrown bounds the memory for the disks of volumes that grew. A volume without an entry is looked up by its
// record.
const maxGrown = 20_000

// asVolume gives a disk the ID of its volume, and the size and the source that the volume's first disk had.
func (c *Client) asVolume(d Disk) Disk {
	d.CreatedBytes, d.VolumeCreated = d.SizeBytes, d.Created
	if !strings.Contains(d.Description, `"vol":`) { // saves the parsing of most descriptions in long lists
		return d
	}
	described, ours := ParseDescription(d.Description)
	volume, ok := diskname.ParseID(described.Volume)
	if !ours || !ok || DiskID(volume) == d.ID || !d.HalfDeleted() && d.Name != described.diskName() {
		return d // a description alone makes no disk that of a volume: a user may have copied it
	}
	d.VolumeID, d.CreatedBytes = volume, described.CreatedBytes
	d.SnapshotID, d.ImageID = described.SourceSnapshot, described.SourceImage
	if described.CreatedAt > 0 {
		d.VolumeCreated = time.Unix(described.CreatedAt, 0).UTC()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.disks) >= maxGrown {
		clear(c.disks)
	}
	c.disks[volume] = d.ID
	return d
}

// diskName returns the name of the disk of the volume that is described, or "" for a description that this plugin did
// not write.
func (d Description) diskName() string {
	sum, err := base64.StdEncoding.DecodeString(d.Hash)
	if err != nil || len(sum) != sha256.Size {
		return ""
	}
	return diskname.ForVolumeHash(sum)
}

// diskOf returns the disk that a volume had when it was seen last. Without that it is the volume's first disk.
func (c *Client) diskOf(volumeID string) DiskID {
	c.mu.Lock()
	defer c.mu.Unlock()
	if disk, grown := c.disks[volumeID]; grown {
		return disk
	}
	return DiskID(volumeID)
}

func (c *Client) forgetDisk(volumeID string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.disks, volumeID)
}

// Disk returns the disk of a volume by the volume's ID. [ErrReplaced] means that the volume has no disk until its
// expansion is finished. A disk that does not exist costs one more request, for the record of its replacement:
// with [ErrNotFound] the token has just seen the project.
func (c *Client) Disk(ctx context.Context, id string) (Disk, error) {
	old, notFound := c.DiskByID(ctx, c.diskOf(id))
	switch {
	case notFound == nil && old.VolumeID != id:
		// The ID of a disk that replaced another one is no volume ID.
		return Disk{}, fmt.Errorf("rack %q: disk %s belongs to volume %s: %w", c.name, id, old.VolumeID, ErrNotFound)
	case notFound == nil && !old.HalfDeleted(), notFound != nil && !errors.Is(notFound, ErrNotFound):
		return old, notFound
	}
	c.forgetDisk(id)
	record, err := c.RecordNamed(ctx, ReplacementPrefix+id)
	switch {
	case errors.Is(err, ErrNotFound):
		return old, notFound
	case errors.Is(err, ErrProject):
		return Disk{}, fmt.Errorf("%w: %v", ErrUnavailable, c.notBelieved(err)) // the disk may exist
	case err != nil:
		return Disk{}, err
	}
	replacement, ok := ParseReplacement(record)
	if !ok || !replacement.Committed {
		return old, notFound
	}
	disk, err := c.DiskByName(ctx, replacement.DiskName)
	switch {
	case err == nil && disk.VolumeID == id:
		return disk, nil
	case err == nil, errors.Is(err, ErrNotFound):
		return Disk{}, fmt.Errorf("rack %q: volume %s: %w", c.name, id, ErrReplaced)
	}
	return Disk{}, err
}

// DiskByID returns a disk by its own ID on the rack.
func (c *Client) DiskByID(ctx context.Context, diskID DiskID) (Disk, error) {
	disk, err := c.sdk.DiskView(ctx, oxide.DiskViewParams{Disk: oxide.NameOrId(diskID)})
	if err != nil {
		return Disk{}, c.translate(ctx, err, "look up disk %s", diskID)
	}
	return c.lookedUp(diskFrom(disk), identity{id: string(diskID)}, "look up disk %s", diskID)
}

// DeleteDisk deletes a disk by its own ID on the rack. A second call returns [ErrNotFound].
func (c *Client) DeleteDisk(ctx context.Context, diskID DiskID) error {
	err := c.sdk.DiskDelete(ctx, oxide.DiskDeleteParams{Disk: oxide.NameOrId(diskID)})
	return c.translate(ctx, err, "delete disk %s", diskID)
}

// Grown reports whether the volume's first disk was replaced: the disk is another one, or does not exist yet.
func (d Disk) Grown() bool { return d.ID != DiskID(d.VolumeID) }

// GrownVolume is the Volume of the description of a snapshot of this disk. It is empty unless the volume has grown.
func GrownVolume(disk Disk) string {
	if !disk.Grown() {
		return ""
	}
	return disk.VolumeID
}

// SuccessorDescription describes the snapshot and the new disk of an expansion. The new disk says all that the old one
// said, because a description is the only place for it.
func SuccessorDescription(old Disk) Description {
	d, _ := ParseDescription(old.Description)
	d.Volume, d.CreatedBytes = old.VolumeID, old.CreatedBytes
	d.SourceSnapshot, d.SourceImage = old.SnapshotID, old.ImageID
	d.CreatedAt = max(0, old.VolumeCreated.Unix())
	short := func() bool {
		bare := d
		bare.Name, bare.PVC = "", ""
		return len(bare.marshal()) <= descriptionBytes
	}
	// The source of a clone is the first of its lineage, and the filesystem was made on the last, or near it.
	for !short() && len(d.Lineage) > 2 {
		middle := len(d.Lineage) / 2
		d.Lineage = append(append([]string{}, d.Lineage[:middle]...), d.Lineage[middle+1:]...)
	}
	return d
}

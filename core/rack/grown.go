// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package rack

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/core/fault"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
	"github.com/oxidecomputer/oxide-csi-plugin/core/record"
)

// A rack cannot change the size of a disk. Package expand replaces the disk by a larger one, and the volume keeps its
// ID: the UUID of its first disk. This file translates between the two. Outside of it, a disk has the ID of its volume.

// ErrReplaced means that the disk of a volume was deleted, and that its larger successor does not exist yet.
var ErrReplaced = fault.VolumeBeingReplaced.New("the disk of the volume is being replaced by a larger one")

// HalfDeleted reports whether the rack failed to delete the disk. It then keeps the disk as faulted, under another name
// (docs/reference/rack.md §3), and takes another request to delete it.
func (d Disk) HalfDeleted() bool { return d.State == Faulted && d.Name == "deleted-"+string(d.ID) }

// maxGrown bounds the memory for the disks of volumes that grew. A volume without an entry is looked up by its
// record.
const maxGrown = 20_000

// asVolume gives a disk the ID of its volume, and the size and the source that the volume's first disk had.
func asVolume(d Disk) Disk {
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
	return d
}

// rememberDisk notes the disk of a volume that grew. A description alone does not show that it is: any user of the
// project may write one. The caller has made the disk, or the volume's first disk is gone.
func (c *Client) rememberDisk(d Disk) {
	if !d.Grown() {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.disks) >= maxGrown {
		clear(c.disks)
	}
	c.disks[d.VolumeID] = d.ID
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
	replacement, found, err := record.Replacements.Get(ctx, c, "", id)
	switch {
	case errors.Is(err, record.ErrNoRecord):
		return old, notFound
	case errors.Is(err, ErrProject):
		return Disk{}, fmt.Errorf("%w: %v", ErrUnavailable, c.notBelieved(err)) // the disk may exist
	case err != nil:
		return Disk{}, err
	case !found || !replacement.Committed:
		return old, notFound
	}
	disk, err := c.DiskByName(ctx, replacement.DiskName)
	switch {
	case err == nil && disk.VolumeID == id:
		c.rememberDisk(disk)
		return disk, nil
	case err == nil, errors.Is(err, ErrNotFound):
		return Disk{}, fmt.Errorf("rack %q: volume %s: %w", c.name, id, ErrReplaced)
	}
	return Disk{}, err
}

// GrownDisk looks in the list of all disks for that of a volume without a first disk ([ErrNotFound] of [Client.Disk]):
// the record that leads to it may have been deleted by hand.
func (c *Client) GrownDisk(ctx context.Context, id string) (disk Disk, found bool, err error) {
	for listed, err := range c.Disks(ctx, Cursor{}, 0) {
		if err != nil {
			return Disk{}, false, err
		}
		if disk := listed.Value; disk.VolumeID == id && disk.Grown() && !disk.HalfDeleted() {
			c.rememberDisk(disk)
			return disk, true, nil
		}
	}
	return Disk{}, false, nil
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

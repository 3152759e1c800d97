// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/uuid"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
	"github.com/oxidecomputer/oxide-csi-plugin/core/mount"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
	"github.com/oxidecomputer/oxide-csi-plugin/core/statefile"
	"github.com/oxidecomputer/oxide-csi-plugin/core/volumerecord"
)

// NodeUnstageVolume unmounts the volume from the staging path. It succeeds only when no program in this guest can write
// to the disk any more, because the disk may be detached next. Each call proves that anew, also if another program has
// unmounted the volume. It succeeds if the disk has left the guest. While the volume is published or staged elsewhere,
// it returns FAILED_PRECONDITION and changes nothing. As far as it can know, it does not touch another volume at the
// staging path. CSI spec, NodeUnstageVolume.
func (n *Service) NodeUnstageVolume(
	ctx context.Context,
	req *csi.NodeUnstageVolumeRequest,
) (*csi.NodeUnstageVolumeResponse, error) {
	if err := validateNodeUnstageVolume(req); err != nil {
		return nil, err
	}
	id, err := parseVolumeID(req.GetVolumeId())
	if err != nil {
		return &csi.NodeUnstageVolumeResponse{}, nil // this plugin has never staged a volume with such an ID
	}
	ctx, release, err := n.lockVolumeToLeave(ctx, id)
	if err != nil {
		return nil, err
	}
	defer release()
	staging, err := resolveToLeave(req.GetStagingTargetPath())
	if err != nil {
		return nil, err
	}
	at := cmp.Or(staging, mount.ResolveExisting(req.GetStagingTargetPath()))
	if err := n.checkUncovered(id, at, blockStagingPath(at, id)); err != nil {
		return nil, err
	}
	if err := n.unstage(ctx, id, staging); err != nil {
		return nil, err
	}
	n.failures.record(id, nil)
	n.mended.Delete(id)
	return &csi.NodeUnstageVolumeResponse{}, nil
}

// lockVolumeToLeave is lockVolume for RPCs that only take mounts away. A state folder that is full or read-only must
// not keep a volume on this node, so they go on without the lock file if there is none.
func (n *Service) lockVolumeToLeave(ctx context.Context, volume uuid.UUID) (context.Context, func(), error) {
	locked, release, err := n.lockVolume(ctx, volume)
	if errors.Is(err, statefile.ErrFolder) {
		n.log.Warn("going on without the volume's lock, to let the disk go", "volume_id", volume.String(), "error", err)
		return ctx, func() {}, nil
	}
	return locked, release, err
}

// resolveToLeave resolves a path of a request. It returns "" if nothing can be there, because a parent folder is
// missing or is no folder, or a name is longer than the kernel allows.
func resolveToLeave(path string) (string, error) {
	resolved, err := mount.Resolve(path)
	for _, absent := range []error{fs.ErrNotExist, unix.ENOTDIR, unix.ENAMETOOLONG, unix.ELOOP} {
		if errors.Is(err, absent) {
			return "", nil
		}
	}
	return resolved, err
}

// leaving is one volume that is being unstaged.
type leaving struct {
	id uuid.UUID
	// paths are the places at the request's staging path where the volume can be mounted.
	paths   []string
	table   mount.Table
	records []volumerecord.Record
}

func (n *Service) unstage(ctx context.Context, id uuid.UUID, staging string) error {
	l := leaving{id: id, records: n.records.List()}
	if staging != "" {
		// The path itself comes first, because nothing below a dead filesystem can be read.
		l.paths = []string{staging, blockStagingPath(staging, id)}
	}
	var err error
	if l.table, err = mount.ReadTable(); err != nil {
		return err
	}
	held, dev, err := n.heldDisk(ctx, l)
	if err != nil {
		return err
	}
	var copies []mount.Copy
	if held != nil {
		copies, err = n.letGo(ctx, l, *held, dev)
	} else {
		err = n.unmountAll(ctx, l, n.unmountRemoved) // mounts whose disk has left the guest
	}
	if err == nil {
		err = n.closeOrphans(ctx, id)
	}
	if err != nil {
		return err
	}
	if len(l.paths) > 0 {
		if err := mount.Remove(l.paths[1]); err != nil && !errors.Is(err, unix.EROFS) && !errors.Is(err, unix.ENAMETOOLONG) {
			return err
		}
	}
	if len(copies) > 0 {
		n.keepLingering(*held, copies)
		return nil
	}
	n.forget(id, held, dev)
	return nil
}

// forget ends the volume's life on this node, after its disk was proved free. held is nil if the disk has left the
// guest.
func (n *Service) forget(id uuid.UUID, held *volumerecord.Record, dev device.Device) {
	if held != nil && held.Kind == volumerecord.Block && !held.ReadOnly {
		// A read-only publication may have left it read-only, and a stage without a publish context believes the disk.
		if err := setReadOnly(dev, false); err != nil && !device.HasLeft(err) {
			n.log.Warn("cannot make the disk writable again", "volume_id", id.String(), "error", err)
		}
	}
	if err := n.records.Remove(id); err != nil {
		// The record does no harm: the next stage replaces it, and the next unstage proves again that the disk is free.
		n.log.Warn("cannot remove the volume's record", "volume_id", id.String(), "error", err)
	}
}

// heldDisk returns the disk of this guest that the node may hold for the volume, and its record. It returns nil if
// there is none. Evidence, in this order: the volume's record; without one, or if its disk is gone, what is mounted at
// the staging path; the open mapping of an encrypted disk. If the record cannot be read, every disk may be the
// volume's.
func (n *Service) heldDisk(ctx context.Context, l leaving) (*volumerecord.Record, device.Device, error) {
	record, unreadable := n.records.Read(l.id)
	if record != nil {
		dev, present, err := n.recordedDisk(*record)
		if err != nil || present {
			return record, dev, err
		}
	}
	for _, path := range l.paths {
		stack := l.table.AllAt(path)
		own, err := n.ownedMounts(l.records, stack, l.id)
		if err != nil {
			return nil, device.Device{}, err
		}
		for i, entry := range stack {
			if !own[i] || n.diskRemoved(entry) {
				continue
			}
			if number, ok := entry.Device(); ok {
				return n.recordFound(l.id, entry, number)
			}
		}
	}
	mapping, found, err := n.devices.Mapping(l.id)
	if err != nil {
		return nil, device.Device{}, err
	}
	if found && mapping.Below != (device.Number{}) {
		// The plugin was killed after it had opened the encrypted disk.
		return n.recordFound(l.id, mount.Entry{}, mapping.Below)
	}
	if unreadable != nil {
		return nil, device.Device{}, n.checkNoDiskInUse(ctx, l, unreadable)
	}
	return nil, device.Device{}, nil
}

// recordFound records a mount that has no record, such as one from a version of this plugin that wrote none.
func (n *Service) recordFound(
	id uuid.UUID,
	entry mount.Entry,
	number device.Number,
) (*volumerecord.Record, device.Device, error) {
	dev, err := n.devices.ByNumber(number)
	if err != nil {
		return nil, device.Device{}, err
	}
	sequence, err := dev.Sequence()
	if err != nil {
		return nil, device.Device{}, err
	}
	record := volumerecord.Record{
		Volume: id, Serial: dev.Serial, Sequence: sequence, Number: number, Kind: volumerecord.Filesystem,
		StagingPath: entry.Path, ReadOnly: entry.ReadOnly, Step: volumerecord.Staged,
	}
	if entry.Block() {
		record.Kind = volumerecord.Block
	}
	if err := n.records.Write(record); err != nil {
		n.log.Warn("cannot record a volume that is being unstaged", "volume_id", id.String(), "error", err)
	}
	return &record, dev, nil
}

// checkNoDiskInUse is the proof for a volume whose record cannot be read: none of the disks that may be the volume's is
// in use.
func (n *Service) checkNoDiskInUse(ctx context.Context, l leaving, unreadable error) error {
	disks, err := n.devices.Disks()
	if err != nil {
		return err
	}
	ctx, cancel := n.withUnstageWait(ctx)
	defer cancel()
	for _, disk := range disks {
		ofAnother := slices.ContainsFunc(l.records, func(r volumerecord.Record) bool {
			recorded, present, err := n.recordedDisk(r)
			return err == nil && present && recorded.Number == disk.Number
		})
		// A disk with partitions is a volume only if it is one by its name: most nodes boot from such a disk.
		if ofAnother || len(disk.Partitions) > 0 && !diskname.IsVolumeSerial(disk.Serial) {
			continue
		}
		dev, err := n.devices.ByNumber(disk.Number)
		if errors.Is(err, device.ErrNotFound) {
			continue
		}
		if err == nil {
			err = mount.WaitIdle(ctx, dev)
		}
		if err != nil {
			return rpc.FailedPrecondition(
				"volume %s: %w: it may be on disk %s, which is in use: end that use, or remove the record", l.id, unreadable,
				disk.Name)
		}
	}
	return nil
}

// letGo unmounts the disk, and proves that no program can write to it any more. While a program uses the mount, nothing
// is unmounted, so that the volume stays as it was. After the unmount, copies of the mount in other namespaces hold the
// disk: the kernel says so, and only then letGo looks for them. If only read-only copies remain, letGo returns them. A
// copy with a writer keeps the volume here, and a stage mounts it again.
func (n *Service) letGo(
	ctx context.Context,
	l leaving,
	held volumerecord.Record,
	dev device.Device,
) ([]mount.Copy, error) {
	if err := n.checkNotInUseHere(l, dev); err != nil {
		return nil, err
	}
	if len(l.table.OfDevice(dev.Number)) == 0 {
		if err := n.checkNotFrozen(ctx, held, dev); err != nil {
			return nil, err
		}
	}
	ctx, cancel := n.withUnstageWait(ctx)
	defer cancel()
	err := n.unmountAll(ctx, l, func(ctx context.Context, _ mount.Table, entry mount.Entry, number device.Number) error {
		return mount.Unmount(ctx, entry.Path, number)
	})
	if err != nil {
		return nil, err
	}
	if err := n.closeOrphans(ctx, l.id); err != nil { // one that is unfinished can hold the disk
		return nil, err
	}
	block := held.Kind == volumerecord.Block
	responds := !block && !held.ReadOnly // it has just written what the unmount has flushed
	copies, err := n.letGoOfMapping(ctx, l.id, dev, block, responds)
	if err == nil && len(copies) > 0 {
		err = mount.WaitClosed(ctx, dev, block)
	}
	if err != nil || len(copies) > 0 {
		return copies, err
	}
	copies, err = mount.WaitFree(ctx, dev, held.Sequence, block, responds)
	if device.HasLeft(err) {
		if _, present, look := n.recordedDisk(held); look == nil && !present {
			return nil, nil
		}
	}
	return copies, err
}

// withUnstageWait bounds the waits of package mount, which keep a second for their answer.
func (n *Service) withUnstageWait(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, n.unstageWait+time.Second)
}

// checkNotInUseHere returns an error if waiting cannot help: the volume is published or staged elsewhere, another mount
// covers it, devices such as LVM volumes are built on its disk, or its filesystem is frozen.
func (n *Service) checkNotInUseHere(l leaving, dev device.Device) error {
	var staged []mount.Entry
	for _, path := range l.paths {
		stack := l.table.AllAt(path)
		own, err := n.ownedMounts(l.records, stack, l.id)
		if err == nil && slices.Contains(own, true) && !own[0] {
			err = covered(path, l.id, stack[0])
		}
		if err != nil {
			return err
		}
		staged = append(staged, stack...)
	}
	for _, entry := range l.table.OfDevice(dev.Number) {
		if slices.ContainsFunc(staged, func(s mount.Entry) bool { return l.table.SameMount(s, entry) }) {
			continue
		}
		if len(staged) > 0 {
			return rpc.FailedPrecondition("volume %s is still mounted at %s: unmount it there first", l.id, entry.Path)
		}
		return rpc.FailedPrecondition(
			"volume %s is still mounted at %s, not at the staging path of this request: unmount it there", l.id, entry.Path)
	}
	if holders := n.holders(l.id, dev); len(holders) > 0 {
		return fmt.Errorf("volume %s: %w: %s is a part of %s: deactivate that first", l.id, mount.ErrBusy, dev, holders[0])
	}
	for _, entry := range staged {
		if entry.Number == dev.Number && entry.Frozen() {
			return frozenAt(l.id, entry.Path)
		}
	}
	return nil
}

// keepLingering keeps the record of a volume that was unstaged while read-only copies of its mount remain.
func (n *Service) keepLingering(held volumerecord.Record, copies []mount.Copy) {
	n.log.Warn("unstaged; other mount namespaces still have it mounted read-only, so nothing can write", "volume_id",
		held.Volume.String(), "copies", len(copies), "first", copies[0].String())
	if err := n.records.SetStep(held, volumerecord.Lingering); err != nil {
		n.log.Warn("cannot record the copies", "volume_id", held.Volume.String(), "error", err)
	}
}

func (n *Service) unmountAll(ctx context.Context, l leaving, unmountOne unmountFunc) error {
	for _, path := range l.paths {
		if err := n.unmountVolume(ctx, path, l.id, unmountOne); err != nil {
			return err
		}
	}
	return nil
}

// unmountRemoved unmounts a staged volume whose disk has left the guest, unless it is still published.
func (n *Service) unmountRemoved(
	ctx context.Context,
	table mount.Table,
	entry mount.Entry,
	number device.Number,
) error {
	if others := otherMounts(table, entry); len(others) > 0 {
		return rpc.FailedPrecondition("the volume staged at %s is still mounted at %s: unmount it there first", entry.Path,
			others[0].Path)
	}
	return mount.Unmount(ctx, entry.Path, number)
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/uuid"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
	"github.com/oxidecomputer/oxide-csi-plugin/core/mount"
)

// What is reported of a volume's health, and why so:
//
//   - INACCESSIBLE, when a workload on this node gets errors, or no answer: the disk has left the guest, its NVMe controller
//     does not work, the filesystem has shut itself down. So is a volume that could not be staged here of late because its
//     disk was not there, could not be read, or could not be told from another.
//   - DEGRADED, when it can be read but no longer be written: the filesystem has become read-only by itself. Errors that
//     ext4 has noted and that are no damage (its disk did not answer in time, say) count too: the volume works, but not as
//     it should.
//   - DATA_LOSS, when the filesystem itself says that something in it is damaged: ext4 notes that in its superblock, where it
//     stays until e2fsck was run, btrfs counts blocks with a wrong checksum, and each answers EUCLEAN or EBADMSG for what it
//     cannot make sense of. Damage to files is not known of by ext4 and xfs, which keep no checksums of them.
//
// Reasons are for programs and permanent; messages are for people.
const (
	reasonDiskGone              = "DiskGone"
	reasonDiskNotFound          = "DiskNotFound"
	reasonDiskNotReadable       = "DiskNotReadable"
	reasonDiskNotUnique         = "DiskNotUnique"
	reasonDiskMismatch          = "DiskMismatch"
	reasonNotResponding         = "NotResponding"
	reasonControllerNotLive     = "ControllerNotLive"
	reasonFunctionNotUp         = "FunctionNotUp"
	reasonFilesystemShutdown    = "FilesystemShutdown"
	reasonFilesystemReadOnly    = "FilesystemReadOnly"
	reasonFilesystemErrors      = "FilesystemErrors"
	reasonFilesystemCorrupted   = "FilesystemCorrupted"
	reasonFilesystemNotMounting = "FilesystemNotMounting"
)

// NodeGetVolumeHealth tells what this node knows against a volume: of its mounts if it has any here, else why it could not
// be staged of late. An empty list says that nothing is known, of a volume that this node has never heard of too. It waits
// no longer than a few seconds for a disk that does not answer. CSI spec, NodeGetVolumeHealth.
func (n *Service) NodeGetVolumeHealth(
	ctx context.Context,
	req *csi.NodeGetVolumeHealthRequest,
) (*csi.NodeGetVolumeHealthResponse, error) {
	if err := validateNodeGetVolumeHealth(req); err != nil {
		return nil, err
	}
	id, err := parseVolumeID(req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	table, err := mount.ReadTable()
	if err != nil {
		return nil, err
	}
	var conditions []*csi.VolumeHealth_VolumeHealthEntry
	mounts := n.mountsOf(ctx, table, id, req.GetVolumePublishPath(), req.GetStagingTargetPath())
	probed := map[device.Number]bool{}
	for _, entry := range mounts {
		if !n.diskRemoved(entry) { // all else follows from that
			conditions = append(conditions, entryConditions(entry)...)
		}
		number, ok := entry.Device()
		if !ok || probed[number] {
			continue
		}
		probed[number] = true
		found, err := n.diskConditions(ctx, entry, number)
		if err != nil {
			return nil, err
		}
		conditions = append(conditions, found...)
	}
	if condition := n.failures.recent(id); condition != nil && len(mounts) == 0 {
		conditions = append(conditions, condition)
	}
	return &csi.NodeGetVolumeHealthResponse{VolumeHealth: &csi.VolumeHealth{
		VolumeId: req.GetVolumeId(), HealthStatuses: sortUnique(conditions),
	}}, nil
}

// mountsOf finds what is mounted of a volume by its ID alone, so far as possible, and else at the paths given.
func (n *Service) mountsOf(ctx context.Context, table mount.Table, id uuid.UUID, paths ...string) []mount.Entry {
	if mounts := n.knownMounts(table, id); len(mounts) > 0 {
		return mounts
	}
	var mounts []mount.Entry
	for _, path := range paths {
		if entry, err := volumeAt(table, id, path); err == nil && n.ownershipOf(ctx, table, entry, id) != anotherVolume {
			mounts = append(mounts, entry)
		}
	}
	if len(mounts) > 0 {
		return mounts
	}
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	for _, entry := range filesystems(table) {
		if _, ok := n.staged.volumeOf("", entry.Number); !ok && n.hasVolumeFilesystem(ctx, entry, id) {
			mounts = append(mounts, entry)
		}
	}
	return mounts
}

// entryConditions are what the mount table itself tells.
func entryConditions(entry mount.Entry) (found []*csi.VolumeHealth_VolumeHealthEntry) {
	if entry.ShutDown {
		found = append(
			found,
			inaccessible(
				reasonFilesystemShutdown,
				"the filesystem of %s has shut itself down after an error: unstage the volume and see the kernel's log",
				entry.Source,
			),
		)
	}
	if entry.TurnedReadOnly {
		found = append(found, condition(
			csi.VolumeHealthErrorType_DEGRADED,
			reasonFilesystemReadOnly,
			"the filesystem of %s has become read-only after an error: unstage the volume, see the kernel's log, and check the filesystem before it is used again",
			entry.Source,
		))
	}
	return found
}

// diskConditions tells what is wrong with the disk and the filesystem that a mount shows.
func (n *Service) diskConditions(
	ctx context.Context,
	entry mount.Entry,
	number device.Number,
) ([]*csi.VolumeHealth_VolumeHealthEntry, error) {
	dev, err := n.devices.ByNumber(number)
	if errors.Is(err, device.ErrNotFound) || entry.NodeRemoved() {
		return []*csi.VolumeHealth_VolumeHealthEntry{
			inaccessible(
				reasonDiskGone,
				"the disk (device %s) has left this guest while it was mounted: end what uses the volume, so that it is unpublished and unstaged, and see on the rack where the disk is attached",
				number,
			),
		}, nil
	}
	if err != nil {
		return nil, err
	}
	var found []*csi.VolumeHealth_VolumeHealthEntry
	if state := n.devices.ControllerState(dev.Name); state != "" && state != device.ControllerLive {
		found = append(
			found,
			inaccessible(
				reasonControllerNotLive,
				"the NVMe controller of the disk %s is %q, not %q: see the kernel's log",
				dev,
				state,
				device.ControllerLive,
			),
		)
	}
	root := entry.Path
	if entry.Block() {
		root = ""
	}
	answer := n.probes.run(ctx, dev, root)
	found = append(found, answer.conditions(dev)...)
	damage, err := n.filesystemConditions(dev, entry.FSType, answer.filesystem)
	return append(found, damage...), err
}

// filesystemConditions tells what a filesystem has noted of errors in itself. xfs notes nothing: it shuts itself down instead.
func (n *Service) filesystemConditions(
	dev device.Device,
	fsType, filesystemUUID string,
) ([]*csi.VolumeHealth_VolumeHealthEntry, error) {
	switch fsType {
	case "ext3", "ext4":
		noted, err := n.devices.Ext4Errors(dev.Name)
		if err != nil || noted.Count == 0 {
			return nil, err
		}
		status, reason := csi.VolumeHealthErrorType_DEGRADED, reasonFilesystemErrors
		if noted.Corruption {
			status, reason = csi.VolumeHealthErrorType_DATA_LOSS, reasonFilesystemCorrupted
		}
		return []*csi.VolumeHealth_VolumeHealthEntry{
			condition(
				status,
				reason,
				"the filesystem on %s has noted %d errors, the first at %s and the last at %s: unstage the volume, run e2fsck on the disk, and restore what it cannot mend",
				dev,
				noted.Count,
				noted.First.Format(time.RFC3339),
				noted.Last.Format(time.RFC3339),
			),
		}, nil
	case "btrfs":
		count, err := n.devices.BtrfsCorruption(filesystemUUID)
		if err != nil || count == 0 {
			return nil, err
		}
		return []*csi.VolumeHealth_VolumeHealthEntry{
			condition(
				csi.VolumeHealthErrorType_DATA_LOSS,
				reasonFilesystemCorrupted,
				"the filesystem on %s has read %d blocks that were damaged: run btrfs scrub, restore the files that it names, and reset the count with btrfs device stats -z",
				dev,
				count,
			),
		}, nil
	}
	return nil, nil
}

func condition(
	status csi.VolumeHealthErrorType,
	reason, format string,
	args ...any,
) *csi.VolumeHealth_VolumeHealthEntry {
	return &csi.VolumeHealth_VolumeHealthEntry{Status: status, Reason: reason, Message: fmt.Sprintf(format, args...)}
}

func inaccessible(reason, format string, args ...any) *csi.VolumeHealth_VolumeHealthEntry {
	return condition(csi.VolumeHealthErrorType_INACCESSIBLE, reason, format, args...)
}

// sortUnique keeps one condition of each status and reason, as the specification demands, the worst status first.
func sortUnique(conditions []*csi.VolumeHealth_VolumeHealthEntry) []*csi.VolumeHealth_VolumeHealthEntry {
	compare := func(a, b *csi.VolumeHealth_VolumeHealthEntry) int {
		return cmp.Or(cmp.Compare(b.GetStatus(), a.GetStatus()), strings.Compare(a.GetReason(), b.GetReason()))
	}
	slices.SortStableFunc(conditions, compare)
	return slices.CompactFunc(
		conditions,
		func(a, b *csi.VolumeHealth_VolumeHealthEntry) bool { return compare(a, b) == 0 },
	)
}

// NodeGetStorageHealth tells which of the guest's NVMe disks do not work, boot disk included: such a disk may be a volume's
// that is about to be staged. CSI spec, NodeGetStorageHealth.
func (n *Service) NodeGetStorageHealth(
	ctx context.Context,
	req *csi.NodeGetStorageHealthRequest,
) (*csi.NodeGetStorageHealthResponse, error) {
	if err := validateNodeGetStorageHealth(req); err != nil {
		return nil, err
	}
	resp := &csi.NodeGetStorageHealthResponse{}
	degraded := func(reason, format string, args ...any) {
		resp.BackendHealth = append(resp.BackendHealth, &csi.NodeGetStorageHealthResponse_StorageBackendHealth{
			Status: csi.StorageHealthErrorType_STORAGE_DEGRADED, Reason: reason, Message: fmt.Sprintf(format, args...),
		})
	}
	disks, err := n.devices.Disks()
	if err != nil {
		return nil, err
	}
	var dead []string
	for _, disk := range disks {
		if state := n.devices.ControllerState(disk.Name); state != "" && state != device.ControllerLive {
			dead = append(dead, fmt.Sprintf("%s (serial %q) %s", disk.Name, disk.Serial, state))
		}
	}
	if len(dead) > 0 {
		degraded(
			reasonControllerNotLive,
			"NVMe controllers that do not work: %s: see the kernel's log",
			strings.Join(dead, ", "),
		)
	}
	unsettled, err := n.devices.FunctionsNotReady(ctx)
	if err != nil {
		return nil, err
	}
	if len(unsettled) > 0 {
		degraded(
			reasonFunctionNotUp,
			"NVMe functions that did not come up: %s: look for \"Duplicate cntlid\" in the kernel's log, and see that no two disks of the instance share the first 20 bytes of their names",
			strings.Join(unsettled, ", "),
		)
	}
	return resp, nil
}

const (
	// recent is how long a volume that could not be staged is remembered: orchestrators try every few minutes.
	failureMemory = 10 * time.Minute
	// maxFailures bounds how many such volumes are remembered, which is more than a guest has slots for.
	maxFailures = 64
)

// conditions are what the answers mean. Errors that say nothing of the volume, such as that it has just been unmounted, mean
// nothing.
func (p probe) conditions(dev device.Device) (found []*csi.VolumeHealth_VolumeHealthEntry) {
	if p.timedOut {
		found = append(
			found,
			inaccessible(
				reasonNotResponding,
				"the disk %s, or the filesystem on it, has not answered within %s: see the kernel's log",
				dev,
				probeTimeout,
			),
		)
	}
	if errors.Is(p.diskErr, unix.EIO) {
		found = append(found, inaccessible(reasonDiskNotReadable, "the disk %s cannot be read: %s", dev, p.diskErr))
	}
	switch {
	case errors.Is(p.rootErr, unix.EIO):
		found = append(
			found,
			inaccessible(
				reasonFilesystemShutdown,
				"the filesystem on %s answers with errors, as one does that has shut itself down: unstage the volume and see the kernel's log: %s",
				dev,
				p.rootErr,
			),
		)
	case errors.Is(p.rootErr, unix.EUCLEAN), errors.Is(p.rootErr, unix.EBADMSG):
		found = append(
			found,
			condition(
				csi.VolumeHealthErrorType_DATA_LOSS,
				reasonFilesystemCorrupted,
				"the root folder of the filesystem on %s is damaged: unstage the volume and check the filesystem: %s",
				dev,
				p.rootErr,
			),
		)
	}
	return found
}

// failures remembers which volumes could not be staged or published here of late for reasons of health. It is lost when
// the process ends.
type failures struct {
	mu sync.Mutex
	// list has the oldest first.
	list []failure
}

type failure struct {
	volume    uuid.UUID
	at        time.Time
	condition *csi.VolumeHealth_VolumeHealthEntry
}

// record remembers how an attempt to stage or publish a volume has ended. Success forgets what was; an error that is none of
// health changes nothing.
func (f *failures) record(id uuid.UUID, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	reason := failureReason(err)
	f.list = slices.DeleteFunc(f.list, func(old failure) bool {
		return time.Since(old.at) > failureMemory || old.volume == id && (err == nil || reason != "")
	})
	if reason == "" {
		return
	}
	if len(f.list) == maxFailures {
		f.list = slices.Delete(f.list, 0, 1)
	}
	f.list = append(
		f.list,
		failure{id, time.Now(), inaccessible(reason, "the volume could not be made available on this node: %s", err)},
	)
}

// recent returns nil where nothing is remembered.
func (f *failures) recent(id uuid.UUID) *csi.VolumeHealth_VolumeHealthEntry {
	f.mu.Lock()
	defer f.mu.Unlock()
	i := slices.IndexFunc(f.list, func(old failure) bool { return old.volume == id && time.Since(old.at) <= failureMemory })
	if i < 0 {
		return nil
	}
	return f.list[i].condition
}

// failureReason is empty for errors that say nothing of a volume's health, such as a wrong request.
func failureReason(err error) string {
	for _, row := range []struct {
		err    error
		reason string
	}{
		{device.ErrNotFound, reasonDiskNotFound},
		{device.ErrAmbiguous, reasonDiskNotUnique},
		{device.ErrMismatch, reasonDiskMismatch},
		{device.ErrUnreadable, reasonDiskNotReadable},
		{mount.ErrMount, reasonFilesystemNotMounting},
	} {
		if errors.Is(err, row.err) {
			return row.reason
		}
	}
	return ""
}

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

// The health of a volume:
//
//   - INACCESSIBLE: a workload on this node gets errors or no answer. The disk has left the guest, its NVMe controller
//     does not work, or the filesystem has shut itself down. A volume is also INACCESSIBLE if it could recently not be
//     staged because its disk was missing, unreadable, or not distinguishable from another disk.
//   - DEGRADED: the volume can be read but not written, because the filesystem has become read-only after an error.
//     Errors that ext4 has recorded and that are no damage, such as a timeout of the disk, count too. So does a
//     filesystem that could not be grown to the size of its disk, although it can be written, and a LUKS header that
//     was mended: what damaged it may have damaged more.
//   - DATA_LOSS: the filesystem reports damage. ext4 records damage in its superblock until the next e2fsck. btrfs
//     counts blocks with a wrong checksum. All filesystems return EUCLEAN or EBADMSG for invalid structures. ext4 and
//     xfs do not detect damage to the content of files, because they keep no checksums of it.
//
// Reasons are permanent and for programs. Messages are for people.
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
	reasonFilesystemSmall       = "FilesystemSmall"
	reasonHeaderMended          = "HeaderMended"
)

// NodeGetVolumeHealth returns what is wrong with the volume's mounts on this node or, if it has none, why it could
// recently not be staged. An empty list means that no problem is known. A volume that is unknown to this node has an
// empty list. It waits a few seconds at most for a disk that does not answer. CSI spec, NodeGetVolumeHealth.
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
	mounts := n.mountsOf(table, id, req.GetVolumePublishPath(), req.GetStagingTargetPath())
	probed := map[device.Number]bool{}
	for _, entry := range mounts {
		if !n.diskRemoved(entry) { // otherwise, all other problems follow from the missing disk
			entry.TurnedReadOnly = entry.TurnedReadOnly && !n.stoppedByUnstage(id)
			conditions = append(conditions, entryConditions(entry)...)
		}
		number, ok := entry.Device()
		if !ok || probed[number] {
			continue
		}
		probed[number] = true
		found, err := n.diskConditions(ctx, id, entry, number)
		if err != nil {
			return nil, err
		}
		conditions = append(conditions, found...)
	}
	if record, err := n.records.Read(id); err == nil && record != nil && record.Small && len(mounts) > 0 {
		conditions = append(conditions, condition(
			csi.VolumeHealthErrorType_DEGRADED,
			reasonFilesystemSmall,
			"the filesystem could not be grown to the size of its disk and has its old size: the log of this node's plugin has the reason",
		))
	}
	conditions = append(conditions, n.mendedOf(id)...)
	if condition := n.failures.recent(id); condition != nil && len(mounts) == 0 {
		conditions = append(conditions, condition)
	}
	return &csi.NodeGetVolumeHealthResponse{VolumeHealth: &csi.VolumeHealth{
		VolumeId: req.GetVolumeId(), HealthStatuses: sortUnique(conditions),
	}}, nil
}

// mendedOf returns the condition of a volume whose header was mended since it was last unstaged.
func (n *Service) mendedOf(id uuid.UUID) (conditions []*csi.VolumeHealth_VolumeHealthEntry) {
	if mended, ok := n.mended.Load(id); ok {
		conditions = append(conditions, mended.(*csi.VolumeHealth_VolumeHealthEntry))
	}
	return conditions
}

// mountsOf returns the mounts of a volume: those of the disk in its record or, if there are none, those at the given
// paths.
func (n *Service) mountsOf(table mount.Table, id uuid.UUID, paths ...string) []mount.Entry {
	if mounts := n.recordedMounts(table, id); len(mounts) > 0 {
		return mounts
	}
	records := n.records.List()
	var mounts []mount.Entry
	for _, path := range paths {
		entry, err := volumeAt(table, id, path)
		if err != nil {
			continue
		}
		if of, _ := n.ownershipOf(records, entry, id); of != anotherVolume {
			mounts = append(mounts, entry)
		}
	}
	return mounts
}

// recordedMounts returns the mounts of the disk in a volume's record. They include mounts of the disk from before it
// left the guest and came back.
func (n *Service) recordedMounts(table mount.Table, id uuid.UUID) (mounts []mount.Entry) {
	record, err := n.records.Read(id)
	if err != nil || record == nil {
		return nil
	}
	now, err := n.devices.ByNumber(record.Number)
	for _, entry := range table.OfDevice(record.Number) {
		if err != nil || now.Serial == record.Serial || entry.NodeRemoved() { // otherwise another disk has the number now
			mounts = append(mounts, entry)
		}
	}
	if dev, err := n.devices.BySerial(record.Serial, record.Number); err == nil && dev.Number != record.Number {
		mounts = append(mounts, table.OfDevice(dev.Number)...)
	}
	return slices.DeleteFunc(mounts, func(entry mount.Entry) bool { return !isVolume(entry) })
}

// entryConditions returns the problems that the mount table shows.
func entryConditions(entry mount.Entry) (found []*csi.VolumeHealth_VolumeHealthEntry) {
	if entry.ShutDown {
		found = append(found, inaccessible(reasonFilesystemShutdown,
			"the filesystem on %s has shut itself down after an error: unstage the volume and read the kernel's log",
			entry.Source))
	}
	if entry.TurnedReadOnly {
		found = append(found, condition(
			csi.VolumeHealthErrorType_DEGRADED,
			reasonFilesystemReadOnly,
			"the filesystem on %s has become read-only after an error: unstage the volume, read the kernel's log, and check the filesystem",
			entry.Source,
		))
	}
	return found
}

// diskConditions returns the problems of the disk and of the filesystem of a mount.
func (n *Service) diskConditions(
	ctx context.Context,
	id uuid.UUID,
	entry mount.Entry,
	number device.Number,
) ([]*csi.VolumeHealth_VolumeHealthEntry, error) {
	dev, err := n.devices.ByNumber(number)
	if errors.Is(err, device.ErrNotFound) || entry.NodeRemoved() {
		return []*csi.VolumeHealth_VolumeHealthEntry{
			inaccessible(
				reasonDiskGone,
				"the disk (device %s) left this guest while it was mounted: end the workload, so that the volume is unstaged, and check on the rack where the disk is attached",
				number,
			),
		}, nil
	}
	if err != nil {
		return nil, err
	}
	var found []*csi.VolumeHealth_VolumeHealthEntry
	if state := n.devices.ControllerState(dev.Name); state != "" && state != device.ControllerLive {
		found = append(found, inaccessible(reasonControllerNotLive,
			"the NVMe controller of disk %s is %q, not %q: read the kernel's log", dev, state, device.ControllerLive))
	}
	root := entry.Path
	if entry.Block() {
		root = ""
	}
	content, err := n.contentOf(id, dev)
	if err != nil {
		return nil, err
	}
	answer := n.probes.run(ctx, &n.disks, content, root)
	found = append(found, answer.conditions(content)...)
	damage, err := n.filesystemConditions(content, entry.FSType, answer.filesystem)
	return append(found, damage...), err
}

// filesystemConditions returns the errors that a filesystem has recorded. xfs records none: it shuts itself down.
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
				"the filesystem on %s has recorded %d errors, the first at %s and the last at %s: unstage the volume, run e2fsck, and restore what it cannot repair",
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
				"the filesystem on %s has read %d damaged blocks: run btrfs scrub, restore the files that it names, and reset the count with btrfs device stats -z",
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

// sortUnique keeps one condition of each status and reason, as the specification requires, with the worst status first.
func sortUnique(conditions []*csi.VolumeHealth_VolumeHealthEntry) []*csi.VolumeHealth_VolumeHealthEntry {
	compare := func(a, b *csi.VolumeHealth_VolumeHealthEntry) int {
		return cmp.Or(cmp.Compare(b.GetStatus(), a.GetStatus()), strings.Compare(a.GetReason(), b.GetReason()))
	}
	slices.SortStableFunc(conditions, compare)
	return slices.CompactFunc(conditions,
		func(a, b *csi.VolumeHealth_VolumeHealthEntry) bool { return compare(a, b) == 0 })
}

// NodeGetStorageHealth reports the guest's NVMe disks that do not work, including the boot disk. Such a disk may belong
// to a volume that will be staged. CSI spec, NodeGetStorageHealth.
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
		degraded(reasonControllerNotLive, "NVMe controllers that do not work: %s: read the kernel's log",
			strings.Join(dead, ", "))
	}
	if hanging := n.disks.Hanging(); len(hanging) > 0 {
		var names []string
		for _, dev := range hanging {
			names = append(names, fmt.Sprintf("%s (serial %q)", dev.Name, dev.Serial))
		}
		degraded(reasonNotResponding, "disks that do not respond: %s: read the kernel's log", strings.Join(names, ", "))
	}
	unsettled, err := n.devices.FunctionsNotReady(ctx)
	if err != nil {
		return nil, err
	}
	if len(unsettled) > 0 {
		degraded(
			reasonFunctionNotUp,
			"NVMe functions that are not ready: %s: look for \"Duplicate cntlid\" in the kernel's log, and detach one of two disks whose names share the first 20 bytes",
			strings.Join(unsettled, ", "),
		)
	}
	return resp, nil
}

const (
	// failureMemory is how long a volume that could not be staged is remembered. Orchestrators retry every few minutes.
	failureMemory = 10 * time.Minute
	// maxFailures is the largest number of such volumes that are remembered, more than a guest has slots.
	maxFailures = 64
)

// conditions returns the problems that the probe shows. It ignores errors that say nothing about the volume, for
// example because the volume was just unmounted.
func (p probe) conditions(dev device.Device) (found []*csi.VolumeHealth_VolumeHealthEntry) {
	if p.timedOut {
		found = append(found, inaccessible(reasonNotResponding,
			"disk %s, or its filesystem, has not responded within %s: read the kernel's log", dev, probeTimeout))
	}
	if errors.Is(p.diskErr, unix.EIO) {
		found = append(found, inaccessible(reasonDiskNotReadable, "disk %s cannot be read: %s", dev, p.diskErr))
	}
	switch {
	case errors.Is(p.rootErr, unix.EIO):
		found = append(
			found,
			inaccessible(
				reasonFilesystemShutdown,
				"the filesystem on %s returns errors and may have shut itself down: %s: unstage the volume and read the kernel's log",
				dev,
				p.rootErr,
			),
		)
	case errors.Is(p.rootErr, unix.EUCLEAN), errors.Is(p.rootErr, unix.EBADMSG):
		found = append(found, condition(csi.VolumeHealthErrorType_DATA_LOSS, reasonFilesystemCorrupted,
			"the root directory of the filesystem on %s is damaged: %s: unstage the volume and check the filesystem", dev,
			p.rootErr))
	}
	return found
}

// failures remembers the volumes that could recently not be staged or published for reasons of health. It ends with the
// process.
type failures struct {
	mu sync.Mutex
	// list begins with the oldest failure.
	list []failure
}

type failure struct {
	volume    uuid.UUID
	at        time.Time
	condition *csi.VolumeHealth_VolumeHealthEntry
}

// record remembers the result of an attempt to stage or publish a volume. A nil error removes earlier failures of the
// volume. An error that says nothing about health changes nothing.
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
	f.list = append(f.list,
		failure{id, time.Now(), inaccessible(reason, "the volume could not be staged or published on this node: %s", err)})
}

// recent returns the remembered failure of a volume, or nil.
func (f *failures) recent(id uuid.UUID) *csi.VolumeHealth_VolumeHealthEntry {
	f.mu.Lock()
	defer f.mu.Unlock()
	i := slices.IndexFunc(f.list,
		func(old failure) bool { return old.volume == id && time.Since(old.at) <= failureMemory })
	if i < 0 {
		return nil
	}
	return f.list[i].condition
}

// failureReason returns the reason of an error, or "" if the error says nothing about a volume's health, as for an
// invalid request.
func failureReason(err error) string {
	for _, row := range []struct {
		err    error
		reason string
	}{
		{device.ErrNotFound, reasonDiskNotFound},
		{device.ErrAmbiguous, reasonDiskNotUnique},
		{device.ErrMismatch, reasonDiskMismatch},
		{device.ErrNoAnswer, reasonNotResponding},
		{device.ErrUnreadable, reasonDiskNotReadable},
		{mount.ErrMount, reasonFilesystemNotMounting},
	} {
		if errors.Is(err, row.err) {
			return row.reason
		}
	}
	return ""
}

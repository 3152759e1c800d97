package core

import (
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/google/uuid"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
	"github.com/oxidecomputer/oxide-csi-plugin/core/mount"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
)

// nodeVolume is what a request to the Node service says of its volume.
type nodeVolume struct {
	id       uuid.UUID
	diskName string
	// sizeBytes is 0 when no context tells.
	sizeBytes int64
	// attached says that the publish context came along: what the rack said when it attached the disk. Without it, a disk
	// is never formatted.
	attached bool
	origin   string
	readOnly bool
	// lineage are the disks whose filesystem this disk may carry, besides its own; any says that it may carry whichever.
	lineage []uuid.UUID
	any     bool
	// mkfsOptions and root concern a filesystem that is made here.
	mkfsOptions string
	root        rootFolder
}

// rootFolder says who owns the root folder of a new filesystem; nil leaves it as mkfs made it.
type rootFolder struct {
	uid, gid *int
	mode     *uint32
}

// want is what to look for among the guest's disks.
func (v nodeVolume) want() device.Want {
	return device.Want{Serial: diskname.Serial(v.diskName), SizeBytes: v.sizeBytes}
}

// mayCarry reports whether a filesystem with this UUID belongs on the volume's disk.
func (v nodeVolume) mayCarry(fsUUID string) bool {
	if v.any {
		return true
	}
	return slices.ContainsFunc(append(v.lineage, v.id), func(disk uuid.UUID) bool {
		return strings.EqualFold(mount.FilesystemUUID(disk).String(), fsUUID)
	})
}

// parseVolumeID understands a volume ID. One that is no UUID is none that this plugin ever gave out.
func parseVolumeID(volumeID string) (uuid.UUID, error) {
	id, ok := diskname.ParseID(volumeID)
	if !ok {
		return uuid.UUID{}, notFound("volume %q does not exist: volume IDs are UUIDs of disks", volumeID)
	}
	return uuid.MustParse(id), nil
}

// parseNodeVolume understands volume ID and contexts. The publish context comes from the rack and is believed first;
// orchestrators can lose it (Nomad), and then the volume context has to do for finding the disk.
func parseNodeVolume(volumeID string, publishContext, volumeContext map[string]string) (nodeVolume, error) {
	id, err := parseVolumeID(volumeID)
	if err != nil {
		return nodeVolume{}, err
	}
	v := nodeVolume{
		id:          id,
		diskName:    firstOf(publishContext[KeyDiskName], volumeContext[KeyDiskName]),
		origin:      publishContext[KeyOrigin],
		mkfsOptions: volumeContext[KeyMkfsOptions],
	}
	if v.diskName == "" {
		return nodeVolume{}, failedPrecondition("volume %s: neither the publish context nor the volume context has the key %s: "+
			"set it in the volume's context to the name of the disk on the rack", id, KeyDiskName)
	}
	if diskID := publishContext[KeyDiskID]; diskID != "" {
		if !strings.EqualFold(diskID, id.String()) {
			return nodeVolume{}, invalidArgument("publish_context: %s is %q, not the volume's ID %s", KeyDiskID, diskID, id)
		}
		v.attached = true
	}
	if size := firstOf(publishContext[KeySizeBytes], volumeContext[KeySizeBytes]); size != "" {
		if v.sizeBytes, err = strconv.ParseInt(size, 10, 64); err != nil || v.sizeBytes <= 0 {
			return nodeVolume{}, invalidArgument("context key %s: %q is not a size in bytes", KeySizeBytes, size)
		}
	}
	if readOnly := publishContext[KeyReadOnly]; readOnly != "" {
		if v.readOnly, err = strconv.ParseBool(readOnly); err != nil {
			return nodeVolume{}, invalidArgument("publish_context: %s: %q is not one of true, false", KeyReadOnly, readOnly)
		}
	}
	if v.lineage, err = parseLineage(publishContext[KeyFSLineage]); err != nil {
		return nodeVolume{}, err
	}
	if verify := volumeContext[KeyVerifyFilesystem]; verify != "" && verify != "true" && verify != "false" {
		return nodeVolume{}, invalidArgument("volume_context: %s: %q is not one of true, false", KeyVerifyFilesystem, verify)
	}
	v.any = volumeContext[KeyVerifyFilesystem] == "false"
	if v.root, err = parseRootFolder(volumeContext); err != nil {
		return nodeVolume{}, err
	}
	return v, nil
}

func parseLineage(text string) (lineage []uuid.UUID, err error) {
	if text == "" {
		return nil, nil
	}
	for disk := range strings.SplitSeq(text, ",") {
		id, err := uuid.Parse(disk)
		if err != nil {
			return nil, invalidArgument("publish_context: %s: %q is not a list of UUIDs", KeyFSLineage, text)
		}
		lineage = append(lineage, id)
	}
	return lineage, nil
}

// parseRootFolder understands these keys, in the parameters of a new volume and in the context that they go into. An owner of
// 2^32-1 is the kernel's "no such ID", which would leave the owner as it is.
func parseRootFolder(volumeContext map[string]string) (root rootFolder, err error) {
	if root.uid, err = parseOwner(volumeContext, KeyRootUID); err != nil {
		return rootFolder{}, err
	}
	if root.gid, err = parseOwner(volumeContext, KeyRootGID); err != nil {
		return rootFolder{}, err
	}
	if text, ok := volumeContext[KeyRootMode]; ok {
		parsed, err := strconv.ParseUint(text, 8, 32)
		if err != nil || parsed > 0o7777 {
			return rootFolder{}, invalidArgument("%s: %q is not an octal mode such as 0770", KeyRootMode, text)
		}
		mode := uint32(parsed)
		root.mode = &mode
	}
	return root, nil
}

func parseOwner(volumeContext map[string]string, key string) (*int, error) {
	text, ok := volumeContext[key]
	if !ok {
		return nil, nil
	}
	parsed, err := strconv.ParseUint(text, 10, 32)
	if err != nil || parsed == 1<<32-1 {
		return nil, invalidArgument("%s: %q is not a number from 0 to 4294967294", key, text)
	}
	owner := int(parsed)
	return &owner, nil
}

func firstOf(values ...string) string {
	for _, value := range values {
		if value != "" {
			return value
		}
	}
	return ""
}

func (r rootFolder) empty() bool { return r.uid == nil && r.gid == nil && r.mode == nil }

// How mkfs leaves the root folder of every filesystem we make.
const (
	newRootOwner = 0
	newRootMode  = 0o755
)

// apply sets owner and mode of the root folder of a filesystem that has not been used yet: it is empty, and each of the
// three is as mkfs left it or already as wanted. So it happens once in a filesystem's life, even if the plugin is
// killed between making it and this, and what a workload has changed later stays.
func (r rootFolder) apply(path string) error {
	var stat unix.Stat_t
	if err := unix.Stat(path, &stat); err != nil {
		return &os.PathError{Op: "stat", Path: path, Err: err}
	}
	uid, gid, mode := newRootOwner, newRootOwner, uint32(newRootMode)
	if r.uid != nil {
		uid = *r.uid
	}
	if r.gid != nil {
		gid = *r.gid
	}
	if r.mode != nil {
		mode = *r.mode
	}
	untouched := func(now, made, wanted uint32) bool { return now == made || now == wanted }
	if !untouched(stat.Uid, newRootOwner, uint32(uid)) || !untouched(stat.Gid, newRootOwner, uint32(gid)) ||
		!untouched(stat.Mode&0o7777, newRootMode, mode) {
		return nil
	}
	entries, err := os.ReadDir(path)
	if err != nil {
		return err
	}
	for _, entry := range entries {
		if entry.Name() != "lost+found" {
			return nil
		}
	}
	if err := os.Lchown(path, uid, gid); err != nil {
		return err
	}
	if err := unix.Chmod(path, mode); err != nil {
		return &os.PathError{Op: "chmod", Path: path, Err: err}
	}
	return nil
}

// mountOptions are how a volume's filesystem is mounted at the staging path.
func (v nodeVolume) mountOptions(flags []string) mount.Options {
	return mount.Options{ReadOnlyDisk: v.readOnly, Flags: flags}
}

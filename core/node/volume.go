// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package node

import (
	"cmp"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/google/uuid"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/core/mount"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// nodeVolume is what a request to the Node service says about its volume.
type nodeVolume struct {
	id       uuid.UUID
	diskName string
	// sizeBytes is 0 if no context contains the size.
	sizeBytes int64
	// firstBytes is the size of the volume's first disk, or 0 if no context contains it.
	firstBytes int64
	// attached says that the request has a publish context, which contains what the rack said when it attached the
	// disk. A disk without a publish context is never formatted.
	attached bool
	origin   string
	readOnly bool
	// rawBlock says that the volume was created for use as raw block.
	rawBlock bool
	// fsLineage are other disks whose filesystem this disk may have. anyFilesystem says that it may have every
	// filesystem.
	fsLineage     []uuid.UUID
	anyFilesystem bool
	// ownFilesystem says that only a filesystem is mounted that this plugin made for this disk. It is neither made nor
	// grown; see [rpc.MetadataOwnFilesystem].
	ownFilesystem bool
	// encrypted says that one of the contexts says that the disk is encrypted. mayEncrypt says that the publish context
	// does: then a blank disk is encrypted.
	encrypted, mayEncrypt bool
	// mkfsOptions and root apply to a filesystem that this plugin makes.
	mkfsOptions string
	root        rpc.RootFolder
}

// acceptsFilesystem reports whether the volume's disk may have a filesystem with this UUID.
func (v nodeVolume) acceptsFilesystem(fsUUID string) bool {
	if v.anyFilesystem {
		return true
	}
	return slices.ContainsFunc(append(v.fsLineage, v.id), func(disk uuid.UUID) bool {
		return strings.EqualFold(mount.FilesystemUUID(disk).String(), fsUUID)
	})
}

// parseVolumeID parses a volume ID. This plugin has never returned a volume ID that is not a UUID, so such an ID is
// NOT_FOUND.
func parseVolumeID(volumeID string) (uuid.UUID, error) {
	id, ok := diskname.ParseID(volumeID)
	if !ok {
		return uuid.UUID{}, rpc.NotFound("volume %q does not exist: volume IDs are UUIDs of disks", volumeID)
	}
	return uuid.MustParse(id), nil
}

// publishKeys are the keys that a publish context may have. This version does not use all of them.
var publishKeys = []string{
	rpc.KeyDiskName, rpc.KeyDiskID, rpc.KeySizeBytes, rpc.KeyFirstBytes, rpc.KeyBlockSize, rpc.KeyOrigin, rpc.KeyReadOnly,
	rpc.KeyFSLineage, rpc.KeyRawBlock, rpc.KeyEncryption,
}

// checkPublishKeys rejects a publish context with a key that this version does not know. Orchestrators add no keys of
// their own, so a newer controller wrote it. What the key says may forbid what this version would do: a version that
// does not know [rpc.KeyEncryption] formats the disk in clear.
func checkPublishKeys(id uuid.UUID, publishContext map[string]string) error {
	for _, key := range slices.Sorted(maps.Keys(publishContext)) {
		if !slices.Contains(publishKeys, key) {
			return rpc.FailedPrecondition(
				"volume %s: publish_context has the key %.70q, which only a newer controller writes: upgrade this node's plugin",
				id, key)
		}
	}
	return nil
}

// parseNodeVolume parses the volume ID and the contexts of a request. The publish context comes from the rack and has
// priority. Orchestrators can lose it (Nomad). Then the volume context is enough to find the disk.
func parseNodeVolume(volumeID string, publishContext, volumeContext map[string]string) (nodeVolume, error) {
	id, err := parseVolumeID(volumeID)
	if err != nil {
		return nodeVolume{}, err
	}
	if err := checkPublishKeys(id, publishContext); err != nil {
		return nodeVolume{}, err
	}
	v := nodeVolume{
		id:          id,
		diskName:    cmp.Or(publishContext[rpc.KeyDiskName], volumeContext[rpc.KeyDiskName]),
		origin:      publishContext[rpc.KeyOrigin],
		mkfsOptions: volumeContext[rpc.KeyMkfsOptions],
	}
	if v.diskName == "" {
		return nodeVolume{}, rpc.FailedPrecondition(
			"volume %s: neither the publish context nor the volume context has the key %s: "+
				"set it in the volume's context to the disk's name on the rack",
			id,
			rpc.KeyDiskName,
		)
	}
	if !diskname.Valid(v.diskName) {
		return nodeVolume{}, rpc.InvalidArgument(
			"context key %s: %.70q is not the name of a disk: set it to the disk's name on the rack", rpc.KeyDiskName,
			v.diskName)
	}
	if diskID := publishContext[rpc.KeyDiskID]; diskID != "" {
		if !strings.EqualFold(diskID, id.String()) {
			return nodeVolume{}, rpc.InvalidArgument("publish_context: %s is %q, not the volume's ID %s", rpc.KeyDiskID, diskID,
				id)
		}
		v.attached = true
	}
	if v.sizeBytes, v.firstBytes, err = parseSizes(publishContext, volumeContext); err != nil {
		return nodeVolume{}, err
	}
	if err := v.parseSwitches(publishContext, volumeContext); err != nil {
		return nodeVolume{}, err
	}
	if err := v.parseEncryption(publishContext, volumeContext); err != nil {
		return nodeVolume{}, err
	}
	if v.fsLineage, err = parseLineage(publishContext[rpc.KeyFSLineage]); err != nil {
		return nodeVolume{}, err
	}
	if v.root, err = rpc.ParseRootFolder(volumeContext); err != nil {
		return nodeVolume{}, err
	}
	return v, nil
}

func (v *nodeVolume) parseSwitches(publishContext, volumeContext map[string]string) error {
	readOnly, verify := publishContext[rpc.KeyReadOnly], volumeContext[rpc.KeyVerifyFilesystem]
	rawBlock := cmp.Or(publishContext[rpc.KeyRawBlock], volumeContext[rpc.KeyRawBlock])
	v.readOnly, v.rawBlock, v.anyFilesystem = readOnly == "true", rawBlock == "true", verify == "false"
	return rpc.FirstError(checkBool(rpc.KeyReadOnly, readOnly), checkBool(rpc.KeyRawBlock, rawBlock),
		checkBool(rpc.KeyVerifyFilesystem, verify))
}

func (v *nodeVolume) parseEncryption(publishContext, volumeContext map[string]string) error {
	for _, given := range []string{publishContext[rpc.KeyEncryption], volumeContext[rpc.KeyEncryption]} {
		if given != "" && given != rpc.EncryptionLUKS2 {
			return rpc.InvalidArgument("context key %s: %.70q is not %s", rpc.KeyEncryption, given, rpc.EncryptionLUKS2)
		}
		v.encrypted = v.encrypted || given != ""
	}
	v.mayEncrypt = publishContext[rpc.KeyEncryption] != ""
	return nil
}

// parseSizes returns the least size of the volume's disk, and the size of its first disk. The volume context has that
// if the publish context does not. Each is 0 if it is unknown.
func parseSizes(publishContext, volumeContext map[string]string) (least, first int64, err error) {
	created := volumeContext[rpc.KeySizeBytes]
	least, err = parseSize(rpc.KeySizeBytes, cmp.Or(publishContext[rpc.KeySizeBytes], created))
	if err != nil {
		return 0, 0, err
	}
	if grown := publishContext[rpc.KeyFirstBytes]; grown != "" {
		first, err = parseSize(rpc.KeyFirstBytes, grown)
	} else {
		first, err = parseSize(rpc.KeySizeBytes, created)
	}
	return least, first, err
}

// parseSize parses the value of a key that is a size in bytes or missing, which is 0.
func parseSize(key, value string) (int64, error) {
	if value == "" {
		return 0, nil
	}
	size, err := strconv.ParseInt(value, 10, 64)
	if err != nil || size <= 0 {
		return 0, rpc.InvalidArgument("context key %s: %q is not a size in bytes", key, value)
	}
	return size, nil
}

// checkBool checks the value of a key that is true, false or missing.
func checkBool(key, value string) error {
	if value != "" && value != "true" && value != "false" {
		return rpc.InvalidArgument("context key %s: %.70q is not one of true, false", key, value)
	}
	return nil
}

func parseLineage(text string) (lineage []uuid.UUID, err error) {
	if text == "" {
		return nil, nil
	}
	for disk := range strings.SplitSeq(text, ",") {
		id, err := uuid.Parse(disk)
		if err != nil {
			return nil, rpc.InvalidArgument("publish_context: %s: %q is not a list of UUIDs", rpc.KeyFSLineage, text)
		}
		lineage = append(lineage, id)
	}
	return lineage, nil
}

// Owner and mode of the root folder of a new filesystem, as mkfs sets them.
const (
	newRootOwner = 0
	newRootMode  = 0o755
)

// setRootFolder sets user, group and mode of the root folder of an unused filesystem. A filesystem is unused if it is
// empty, and if user, group and mode are each as mkfs set them or as requested. So setRootFolder takes effect once,
// also if the plugin was killed after mkfs. It does not change what a workload has changed.
func setRootFolder(r rpc.RootFolder, path string) error {
	var stat unix.Stat_t
	if err := unix.Stat(path, &stat); err != nil {
		return &os.PathError{Op: "stat", Path: path, Err: err}
	}
	uid, gid, mode := newRootOwner, newRootOwner, uint32(newRootMode)
	if r.UID != nil {
		uid = *r.UID
	}
	if r.GID != nil {
		gid = *r.GID
	}
	if r.Mode != nil {
		mode = *r.Mode
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

// mountOptions returns the options for the mount at the staging path.
func (v nodeVolume) mountOptions(flags []string) mount.Options {
	return mount.Options{ReadOnlyDisk: v.readOnly, Flags: flags, KeepSize: v.ownFilesystem}
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package mount

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
	"github.com/oxidecomputer/oxide-csi-plugin/core/filesystem"
	"github.com/oxidecomputer/oxide-csi-plugin/core/hostexec"
	"github.com/oxidecomputer/oxide-csi-plugin/core/statefile"
)

// mkfsTimeout is how long mkfs may take. mkfs is not cancelled with the caller: half a filesystem is useless, and the
// next call finds the whole one.
const mkfsTimeout = 15 * time.Minute

// FilesystemUUID returns the UUID of a filesystem that this plugin makes for a volume: the version 5 UUID of the name
// "filesystem" in the namespace of the volume's ID. It is permanent, because later stages identify the
// volume's own filesystem by it.
func FilesystemUUID(volumeID uuid.UUID) uuid.UUID {
	return uuid.NewSHA1(volumeID, []byte("filesystem"))
}

// Formatter makes filesystems. It keeps a record of each format while mkfs runs, so that an interrupted format can be
// repeated. Without the record, what mkfs left on the disk looks like a user's data, and the disk can never be
// formatted. The record is valid until the disk leaves the guest. After a power cut, and on other nodes, the marker on
// the disk replaces it (see [device.HasFormatMarker]), unless mkfs has overwritten all copies of the marker.
type Formatter struct {
	// StateDir is the folder of the records. It outlives the plugin's process and a reboot of the guest.
	StateDir string
}

// NewFilesystem describes the filesystem that [Formatter.Format] makes.
type NewFilesystem struct {
	// VolumeID is the ID of the volume whose disk it is.
	VolumeID uuid.UUID
	// Type is one of [filesystem.Types]. MkfsOptions come from [filesystem.ParseMkfsOptions] for this type.
	Type        string
	MkfsOptions []string
}

// recordFormat is the version of the format of records. A later version of the plugin that writes something which this
// one would misread writes a higher version.
const recordFormat = 1

// record is the content of the file <StateDir>/format/<volume ID>. It says that a format of this disk started on this
// node. Its JSON names are permanent.
type record struct {
	// Version is [recordFormat].
	Version int `json:"v"`
	// Serial is for people who read the file.
	Serial string `json:"serial"`
	FSType string `json:"fsType"`
	FSUUID string `json:"fsUUID"`
	// BootID is the kernel's boot ID, and Sequence its sequence number of the disk. If both are the same now, the disk
	// has not left this guest.
	BootID   string `json:"bootID"`
	Sequence uint64 `json:"diskSequence"`
}

// Format makes a filesystem on a disk that was proved blank, and verifies it. No other code calls mkfs. Format returns
// how long mkfs ran. The errors are [ErrFormat], [ErrKernel], [filesystem.ErrOption], [statefile.ErrFolder],
// [hostexec.ErrMissing] and those of [device.Blank.Format].
// After each of them the caller may repeat the call with a new proof. If ctx ends, mkfs still runs to its end, for at
// most 15 min.
func (f Formatter) Format(
	ctx context.Context,
	blank *device.Blank,
	want NewFilesystem,
) (took time.Duration, err error) {
	fsUUID := FilesystemUUID(want.VolumeID)
	name, args, err := mkfs(want, fsUUID.String())
	if err != nil {
		return 0, err
	}
	if lacks := filesystem.KernelLacksOption(want.Type, want.MkfsOptions, kernelRelease()); lacks != "" {
		return 0, fmt.Errorf("%w: mkfs options for %s: %s", ErrKernel, want.Type, lacks)
	}
	if err := checkMkfsKnows(ctx, name, want); err != nil {
		return 0, err
	}
	features, err := knownFeatures(ctx, want)
	if err != nil {
		return 0, err
	}
	args = append(features, args...)
	dev := blank.Device()
	blockSize, err := blank.BlockSize()
	if err != nil {
		return 0, err
	}
	disk := filesystem.Disk{BlockSize: int64(blockSize), Size: dev.SizeBytes}
	if err := filesystem.CheckFit(want.Type, want.MkfsOptions, disk); err != nil {
		return 0, err
	}
	return f.FormatWith(ctx, blank, Making{
		VolumeID: want.VolumeID,
		Type:     want.Type,
		UUID:     fsUUID,
		Make: func(ctx context.Context, path string) error {
			result, err := hostexec.Run(ctx, name, append(args, path)...)
			if err != nil {
				return fmt.Errorf("%w on %s: %w", ErrFormat, dev, err)
			}
			if result.ExitCode != 0 {
				return fmt.Errorf("%w on %s: %s: exit code %d: %s", ErrFormat, dev, name, result.ExitCode, result.Message())
			}
			return nil
		},
		Verify: func(context.Context) error { return verifyFormat(dev, want.Type, fsUUID.String()) },
	})
}

// Making is a way to format a disk: a filesystem, or the header of an encrypted disk.
type Making struct {
	// VolumeID is the ID of the volume whose disk it is.
	VolumeID uuid.UUID
	// Type is blkid's name of what is made, and UUID its UUID.
	Type string
	UUID uuid.UUID
	// Make makes it on the device at path. Verify checks that it reached stable storage.
	Make   func(ctx context.Context, path string) error
	Verify func(ctx context.Context) error
}

// FormatWith does what [Formatter.Format] does around mkfs: it records the format, marks the disk, makes, verifies, and
// removes record and marker. If ctx ends, Make still runs to its end, for at most 15 min.
func (f Formatter) FormatWith(ctx context.Context, blank *device.Blank, m Making) (took time.Duration, err error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), mkfsTimeout)
	defer cancel()
	dev := blank.Device()
	if err := f.writeRecord(m, dev, blank.Sequence()); err != nil {
		return 0, err
	}
	started := false
	err = blank.Format(func(path string) error {
		started = true
		start := time.Now()
		defer func() { took = time.Since(start) }()
		return m.Make(ctx, path)
	})
	if err != nil && !started {
		return 0, errors.Join(err, f.removeRecord(m.VolumeID))
	}
	if err != nil {
		return took, err
	}
	if err := m.Verify(ctx); err != nil {
		return took, err
	}
	return took, f.RemoveMarkerAndRecord(m.VolumeID, dev)
}

// mkfs returns the program and its arguments without the device. The plugin's options come first, so that a user's
// option overrides the same option of the plugin. No option on the allow-list of [filesystem.ParseMkfsOptions] changes
// the UUID. The plugin never passes -f or -F, which switch off mkfs' own checks.
func mkfs(want NewFilesystem, fsUUID string) (name string, args []string, err error) {
	switch want.Type {
	case "ext3", "ext4":
		// -m 0: a volume needs no blocks reserved for root, and the user pays for them. nodiscard: a blank disk has
		// nothing to discard, and discarding a large disk takes long. The kernel initialises tables after the mount
		// (mkfs' default), because mkfs would need minutes for a large disk. -I 256: with -T small, mke2fs of Debian 11
		// makes inodes of 128 bytes, which have no room for dates after 2038.
		return "mkfs." + want.Type, append([]string{"-q", "-m", "0", "-I", "256", "-U", fsUUID},
			mergeExtended(want.MkfsOptions, "nodiscard")...), nil
	case "xfs":
		return "mkfs.xfs", append([]string{"-q", "-K", "-m", "uuid=" + fsUUID}, want.MkfsOptions...), nil
	case "btrfs":
		return "mkfs.btrfs", append([]string{"-q", "-K", "-U", fsUUID}, want.MkfsOptions...), nil
	}
	return "", nil, fmt.Errorf("%w: %q: use one of %s", filesystem.ErrUnsupported, want.Type,
		strings.Join(filesystem.Types(), ", "))
}

// checkMkfsKnows returns [ErrFormat] if a user's option is newer than this node's mkfs.
func checkMkfsKnows(ctx context.Context, name string, want NewFilesystem) error {
	if len(want.MkfsOptions) == 0 {
		return nil
	}
	version, err := hostexec.Run(ctx, name, "-V")
	if err != nil {
		return fmt.Errorf("%w: %w", ErrFormat, err)
	}
	lacks := filesystem.MkfsLacksOption(want.Type, want.MkfsOptions, version.Stdout+version.Stderr)
	if lacks != "" {
		return fmt.Errorf("%w: nothing was written: mkfs options for %s: %s", ErrFormat, want.Type, lacks)
	}
	return nil
}

// knownFeatures returns the options that give a filesystem no other features than Debian 12's defaults, whatever the
// defaults of these tools are. Linux 5.10 mounts it then, also after a crash. A user's options can add features. An
// option that the tool does not know is left out: a tool without it does not have the feature either.
func knownFeatures(ctx context.Context, want NewFilesystem) (options []string, err error) {
	const ext3 = "none,has_journal,ext_attr,resize_inode,dir_index,filetype,sparse_super,large_file"
	switch want.Type {
	case "ext3":
		return []string{"-O", ext3}, nil
	case "ext4":
		return []string{"-O", ext3 + ",extent,64bit,flex_bg,huge_file,dir_nlink,extra_isize,metadata_csum"}, nil
	case "xfs":
		usage, err := hostexec.Run(ctx, "mkfs.xfs") // without a device it only prints its options
		if err != nil {
			return nil, fmt.Errorf("%w: %w", ErrFormat, err)
		}
		given := strings.Join(want.MkfsOptions, " ")
		for _, option := range []string{"-m rmapbt=0", "-i nrext64=0", "-i exchange=0", "-n parent=0"} {
			word := strings.TrimSuffix(option[len("-m "):], "0")
			if strings.Contains(usage.Stderr+usage.Stdout, word) && !strings.Contains(given, word) {
				options = append(options, strings.Fields(option)...)
			}
		}
	case "btrfs":
		list, err := hostexec.Run(ctx, "mkfs.btrfs", "-O", "list-all")
		if err != nil {
			return nil, fmt.Errorf("%w: %w", ErrFormat, err)
		}
		if strings.Contains(list.Stderr+list.Stdout, "\nblock-group-tree ") {
			options = []string{"-O", "^block-group-tree"}
		}
		given := slices.Contains(want.MkfsOptions, "-m") // mkfs would take two -m for both
		mixed := slices.Contains(want.MkfsOptions, "-M") || strings.Contains(strings.Join(want.MkfsOptions, " "), "mixed-bg")
		if !given && !mixed {
			options = append(options, "-m", "dup") // before 5.15, mkfs keeps one copy of the metadata on a disk like NVMe
		}
	}
	return options, nil
}

// mergeExtended adds the plugin's extended options of ext to the user's. mkfs uses only the last of several -E.
func mergeExtended(options []string, own string) []string {
	merged := []string{}
	for i := 0; i < len(options); i++ {
		if options[i] == "-E" && i+1 < len(options) {
			own += "," + options[i+1] // the last value of an option counts
			i++
			continue
		}
		merged = append(merged, options[i])
	}
	return append(merged, "-E", own)
}

// verifyFormat checks that the requested filesystem is on the disk.
func verifyFormat(dev device.Device, fsType, fsUUID string) error {
	file, err := dev.Open(unix.O_RDONLY)
	if err != nil {
		return err
	}
	if err := errors.Join(file.Sync(), file.Close()); err != nil {
		return fmt.Errorf("%w on %s: flush: %w", ErrFormat, dev, err)
	}
	found, err := dev.FilesystemUUID()
	if err != nil {
		return fmt.Errorf("%w on %s: %w", ErrFormat, dev, err)
	}
	if found != fsUUID {
		return fmt.Errorf("%w on %s: mkfs reported success, but the disk has a filesystem with UUID %q, not %s with UUID %s",
			ErrFormat, dev, found, fsType, fsUUID)
	}
	return nil
}

// InterruptedFormat describes a format of this disk that started on any node and did not finish. made is the UUID that
// the format was writing. The result is nil if no format started, or if content shows that it is over: the filesystem
// was mounted, something was written into the encrypted disk, or the disk holds something else.
func (f Formatter) InterruptedFormat(
	volumeID, made uuid.UUID,
	dev device.Device,
	content device.Content,
) (*device.InterruptedFormat, error) {
	interrupted := device.InterruptedFormat{UUID: made.String()}
	if !content.Empty() {
		if content.UUID != interrupted.UUID {
			return nil, nil
		}
		if never, err := device.NeverMounted(dev, content); err != nil || !never {
			return nil, err
		}
	}
	marked, err := device.HasFormatMarker(dev, volumeID)
	if err != nil {
		return nil, err
	}
	r, err := f.readRecord(volumeID)
	if err == nil && r != nil && r.FSUUID != "" && r.FSUUID != interrupted.UUID {
		r = nil // of another format: that of a filesystem inside an encrypted disk, or of its header
	}
	if err != nil || r == nil && !marked {
		return nil, err
	}
	if interrupted.Untouched = marked; marked {
		return &interrupted, nil
	}
	boot, err := device.BootID()
	if err != nil {
		return nil, err
	}
	sequence, err := dev.Sequence()
	if err != nil {
		return nil, err
	}
	interrupted.Untouched = r.isOf(boot, sequence)
	return &interrupted, nil
}

// isOf reports whether the disk has not left this guest since the record: the boot ID and the disk's sequence number
// are the same. Linux before 5.15 does not count disks. The number is 0 then, and proves nothing.
func (r record) isOf(bootID string, sequence uint64) bool {
	return r.BootID == bootID && r.Sequence == sequence && sequence != 0
}

// RemoveMarkerAndRecord removes the marker and the record of a format, when the format is finished or a workload gets
// the disk. If they do not exist, that is no error.
func (f Formatter) RemoveMarkerAndRecord(volumeID uuid.UUID, dev device.Device) error {
	if err := device.RemoveFormatMarker(dev, volumeID); err != nil {
		return err
	}
	return f.removeRecord(volumeID)
}

// readRecord returns the record of a format of the disk, or nil.
func (f Formatter) readRecord(volumeID uuid.UUID) (*record, error) {
	content, err := os.ReadFile(f.recordPath(volumeID))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", statefile.ErrFolder, err)
	}
	if len(bytes.TrimSpace(content)) == 0 {
		return nil, nil // a full disk or a power cut left an empty file; without a record, less may be formatted
	}
	var r record
	if err := json.Unmarshal(content, &r); err != nil {
		return nil, fmt.Errorf("%w: %s: %w: remove the file if the disk holds no data", statefile.ErrFolder,
			f.recordPath(volumeID), err)
	}
	if r.Version > recordFormat {
		return nil, fmt.Errorf("%w: %s has format %d, not %d: upgrade this node's plugin", statefile.ErrFolder,
			f.recordPath(volumeID), r.Version, recordFormat)
	}
	return &r, nil
}

// removeRecord removes the record of a format and does not touch the disk. A missing record is no error.
func (f Formatter) removeRecord(volumeID uuid.UUID) error {
	if err := os.Remove(f.recordPath(volumeID)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w: %w", statefile.ErrFolder, err)
	}
	return nil
}

func (f Formatter) recordPath(volumeID uuid.UUID) string {
	return filepath.Join(f.StateDir, "format", volumeID.String())
}

// writeRecord writes the record to stable storage. A power cut may lose it, because the marker on the disk remains.
func (f Formatter) writeRecord(m Making, dev device.Device, sequence uint64) error {
	boot, err := device.BootID()
	if err != nil {
		return err
	}
	content, err := json.Marshal(
		record{
			Version:  recordFormat,
			Serial:   dev.Serial,
			FSType:   m.Type,
			FSUUID:   m.UUID.String(),
			BootID:   boot,
			Sequence: sequence,
		},
	)
	if err != nil {
		return err
	}
	if err := statefile.Write(f.recordPath(m.VolumeID), append(content, '\n')); err != nil {
		return fmt.Errorf("%w: %w", statefile.ErrFolder, err)
	}
	return nil
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package mount

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/google/uuid"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
	"github.com/oxidecomputer/oxide-csi-plugin/core/filesystem"
	"github.com/oxidecomputer/oxide-csi-plugin/core/hostexec"
)

// mkfsTimeout is how long mkfs may take. It runs on when its caller has gone: a filesystem half made helps nobody, and the
// next call finds it finished.
const mkfsTimeout = 15 * time.Minute

// FilesystemUUID is the UUID that the filesystem of a disk gets when this plugin makes it: the version 5 UUID of the name
// "filesystem" in the namespace of the disk's own UUID. It is permanent: later stages know the disk's own filesystem by it.
func FilesystemUUID(diskID uuid.UUID) uuid.UUID {
	return uuid.NewSHA1(diskID, []byte("filesystem"))
}

// Formatter makes filesystems. It keeps a record of each while mkfs is at work, so that one that was interrupted can be made
// again: what it left on the disk would otherwise count as somebody's data for ever. The record tells as long as the
// disk does not leave the guest. After a power cut, and on other nodes, the marker on the disk does, see
// [device.HasFormatMarker], unless mkfs has written over all of its copies.
type Formatter struct {
	// StateDir is the folder of the records. It outlives the plugin's process and the guest's power.
	StateDir string
}

// NewFilesystem is what [Formatter.Format] makes.
type NewFilesystem struct {
	// DiskID is the disk's UUID on the rack.
	DiskID uuid.UUID
	// Type is one of [filesystem.Types]; MkfsOptions come from [filesystem.ParseMkfsOptions] for this type.
	Type        string
	MkfsOptions []string
}

// record is the content of the file <StateDir>/format/<disk UUID>: a format of this disk was begun on this node.
type record struct {
	// Serial is for people who look at the file.
	Serial string `json:"serial"`
	FSType string `json:"fsType"`
	FSUUID string `json:"fsUUID"`
	// BootID and Sequence tell whether the disk has left this guest since: the kernel's boot ID, and its sequence number
	// of the disk.
	BootID   string `json:"bootID"`
	Sequence uint64 `json:"diskSequence"`
}

// Format makes the filesystem on a disk that was proved blank and verifies that it is there. mkfs is called by no other
// code. The errors are [ErrFormat], [ErrState], [hostexec.ErrMissing] and those of [device.Blank.Format]; after each of them
// the call may be repeated with a new proof. When ctx ends meanwhile, mkfs still runs to its end, at most for 15 min. It
// returns how long mkfs itself ran.
func (f Formatter) Format(
	ctx context.Context,
	blank *device.Blank,
	want NewFilesystem,
) (took time.Duration, err error) {
	fsUUID := FilesystemUUID(want.DiskID).String()
	name, args, err := mkfs(want, fsUUID)
	if err != nil {
		return 0, err
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), mkfsTimeout)
	defer cancel()
	dev := blank.Device()
	if err := f.writeRecord(want, dev, fsUUID, blank.Sequence()); err != nil {
		return 0, err
	}
	begun := false
	err = blank.Format(func(path string) error {
		begun = true
		start := time.Now()
		result, err := hostexec.Run(ctx, name, append(args, path)...)
		took = time.Since(start)
		if err != nil {
			return fmt.Errorf("%w on %s: %w", ErrFormat, dev, err)
		}
		if result.ExitCode != 0 {
			return fmt.Errorf("%w on %s: %s: exit code %d: %s", ErrFormat, dev, name, result.ExitCode, result.Message())
		}
		return nil
	})
	if err != nil && !begun {
		return 0, errors.Join(err, f.RemoveRecord(want.DiskID))
	}
	if err != nil {
		return took, err
	}
	if err := verifyFormat(dev, want.Type, fsUUID); err != nil {
		return took, err
	}
	return took, f.RemoveMarkerAndRecord(want.DiskID, dev)
}

// mkfs returns the program and its arguments, the device excepted. Ours come first so that the user's win where both name
// the same thing; among those that the allow-list of [filesystem.ParseMkfsOptions] lets through, none touches the UUID. No option
// forces anything (-f, -F): that would silence the checks that mkfs makes itself.
func mkfs(want NewFilesystem, fsUUID string) (name string, args []string, err error) {
	switch want.Type {
	case "ext3", "ext4":
		// -m 0: blocks kept for root are of use where the system lives, on a volume they are space paid for in vain.
		// nodiscard: the disk is blank, there is nothing to discard, and on a large disk it takes long. Tables are
		// initialised by the kernel after the mount (mkfs' default), or else a large disk would take minutes.
		return "mkfs." + want.Type, append(
			[]string{"-q", "-m", "0", "-U", fsUUID},
			mergeExtended(want.MkfsOptions, "nodiscard")...), nil
	case "xfs":
		return "mkfs.xfs", append([]string{"-q", "-K", "-m", "uuid=" + fsUUID}, want.MkfsOptions...), nil
	case "btrfs":
		return "mkfs.btrfs", append([]string{"-q", "-K", "-U", fsUUID}, want.MkfsOptions...), nil
	}
	return "", nil, fmt.Errorf(
		"%w: %q: use one of %s",
		filesystem.ErrUnsupported,
		want.Type,
		strings.Join(filesystem.Types(), ", "),
	)
}

// mergeExtended adds ours to the extended options of ext: of several -E only the last counts.
func mergeExtended(options []string, ours string) []string {
	merged := []string{}
	for i := 0; i < len(options); i++ {
		if options[i] == "-E" && i+1 < len(options) {
			ours += "," + options[i+1] // what comes last wins
			i++
			continue
		}
		merged = append(merged, options[i])
	}
	return append(merged, "-E", ours)
}

// verifyFormat makes sure that the new filesystem is on the disk, and is the one that was asked for.
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
		return fmt.Errorf(
			"%w on %s: mkfs reported success, but the disk has a filesystem of UUID %q instead of %s of UUID %s",
			ErrFormat,
			dev,
			found,
			fsType,
			fsUUID,
		)
	}
	return nil
}

// InterruptedFormat returns what is known of a format of this disk that was begun, here or on another node, and did not end; nil
// when there was none, or when it is over because the disk holds, by content, anything but what that format was making
// and nobody has mounted.
func (f Formatter) InterruptedFormat(
	diskID uuid.UUID,
	dev device.Device,
	content device.Content,
) (*device.InterruptedFormat, error) {
	interrupted := device.InterruptedFormat{UUID: FilesystemUUID(diskID).String()}
	if !content.Empty() {
		if content.UUID != interrupted.UUID {
			return nil, nil
		}
		if never, err := device.NeverMounted(dev, content); err != nil || !never {
			return nil, err
		}
	}
	marked, err := device.HasFormatMarker(dev, diskID)
	if err != nil {
		return nil, err
	}
	r, err := f.readRecord(diskID)
	if err != nil || r == nil && !marked {
		return nil, err
	}
	if interrupted.Untouched = marked; marked {
		return &interrupted, nil
	}
	boot, err := bootID()
	if err != nil {
		return nil, err
	}
	sequence, err := sequenceOf(dev)
	if err != nil {
		return nil, err
	}
	interrupted.Untouched = r.BootID == boot && r.Sequence == sequence && sequence != 0
	return &interrupted, nil
}

// RemoveMarkerAndRecord removes the marker and the record of a format: it is finished, or the disk's bytes are a workload's from now on. That
// there are none is no error.
func (f Formatter) RemoveMarkerAndRecord(diskID uuid.UUID, dev device.Device) error {
	if err := device.RemoveFormatMarker(dev, diskID); err != nil {
		return err
	}
	return f.RemoveRecord(diskID)
}

// readRecord returns the record of a format of the disk, nil when there is none.
func (f Formatter) readRecord(diskID uuid.UUID) (*record, error) {
	content, err := os.ReadFile(f.recordPath(diskID))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrState, err)
	}
	var r record
	if err := json.Unmarshal(content, &r); err != nil {
		return nil, fmt.Errorf(
			"%w: %s: %w: remove the file if the disk is known to hold nothing",
			ErrState,
			f.recordPath(diskID),
			err,
		)
	}
	return &r, nil
}

// RemoveRecord removes the record of a format and leaves the disk alone. No record is no error.
func (f Formatter) RemoveRecord(diskID uuid.UUID) error {
	if err := os.Remove(f.recordPath(diskID)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w: %w", ErrState, err)
	}
	return nil
}

func (f Formatter) recordPath(diskID uuid.UUID) string {
	return filepath.Join(f.StateDir, "format", diskID.String())
}

// writeRecord brings the record to stable storage before it has its name: a power cut may lose it, since what outlives the kernel is the
// marker's to tell, but must not leave an empty one, which could not be read.
func (f Formatter) writeRecord(want NewFilesystem, dev device.Device, fsUUID string, sequence uint64) error {
	boot, err := bootID()
	if err != nil {
		return err
	}
	content, err := json.Marshal(
		record{Serial: dev.Serial, FSType: want.Type, FSUUID: fsUUID, BootID: boot, Sequence: sequence},
	)
	if err != nil {
		return err
	}
	path := f.recordPath(want.DiskID)
	err = errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), writeSynced(path+".new", append(content, '\n')))
	if err == nil {
		err = os.Rename(path+".new", path)
	}
	if err != nil {
		return fmt.Errorf("%w: %w", ErrState, err)
	}
	return nil
}

func writeSynced(path string, content []byte) error {
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = file.Write(content)
	if err == nil {
		err = file.Sync()
	}
	return errors.Join(err, file.Close())
}

func bootID() (string, error) {
	content, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("read the kernel's boot ID: %w", err)
	}
	return strings.TrimSpace(string(content)), nil
}

func sequenceOf(dev device.Device) (uint64, error) {
	file, err := dev.Open(unix.O_RDONLY)
	if err != nil {
		return 0, err
	}
	sequence, err := device.Sequence(file)
	return sequence, errors.Join(err, file.Close())
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package mount makes filesystems on disks that package device proved blank, mounts them, binds them to where workloads
// use them, and takes all that down again.
//
// It believes the kernel's mount table and nothing else ([ReadTable]): no mount is unmounted to be there, or gone, because a
// call returned; every function looks before and after, so that each is safe to repeat after it failed, after the plugin
// was killed in its middle, and after a reboot.
//
// Filesystems are mounted by mount(8) with arguments from k8s.io/mount-utils; binding and unmounting are system calls,
// because a read-only bind has to appear in one step and because the reason of a failed unmount decides what to do.
// mount-utils' own formatter is not used: it takes a disk that cannot be read for a blank one.
//
// Mount flags may hold secrets (CSI spec, VolumeCapability.MountVolume): none appears in an error or a log line.
package mount

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
	mountutils "k8s.io/mount-utils"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
	"github.com/oxidecomputer/oxide-csi-plugin/core/hostexec"
)

// The errors of this package, wrapped with the paths and devices they are about.
var (
	// ErrOption means that mount flags hold an option that is not allowed.
	ErrOption = errors.New("option is not allowed")
	// ErrFormat says that mkfs failed, or that what it made is not what was asked of it.
	ErrFormat = errors.New("making the filesystem failed")
	// ErrMount says that the kernel or mount(8) refused a mount.
	ErrMount = errors.New("mounting failed")
	// ErrDamaged says that a filesystem is not in order, and that nobody but an operator can decide what to do about it.
	ErrDamaged = errors.New("filesystem is damaged")
	// ErrGrow says that a filesystem could not be made to fill its disk.
	ErrGrow = errors.New("growing the filesystem failed")
	// ErrBusy says that a mount or a device was still held when the time for waiting had run out.
	ErrBusy = errors.New("still in use")
	// ErrForeign says that a path holds something that this plugin did not put there and therefore leaves alone.
	ErrForeign = errors.New("path holds something that is not ours")
	// ErrState means that the folder for records of formatting under way cannot be used.
	ErrState = errors.New("state folder cannot be used")
)

// Options say how a filesystem is mounted.
type Options struct {
	// ReadOnlyDisk says that the disk takes no writes: the journal is not replayed then.
	ReadOnlyDisk bool
	// Flags are the orchestrator's mount_flags.
	Flags []string
}

// ReadOnly reports whether a mount with these options is read-only.
func (o Options) ReadOnly() bool {
	readOnly := o.ReadOnlyDisk
	for _, option := range splitFlags(o.Flags) {
		switch option {
		case "ro":
			readOnly = true
		case "rw":
			readOnly = o.ReadOnlyDisk
		}
	}
	return readOnly
}

// SELinuxContext is the value of the option context=, empty when there is none.
func (o Options) SELinuxContext() string {
	return seLinuxContextOf(splitFlags(o.Flags))
}

// mountOptions is the whole list of options for mount(8).
func (o Options) mountOptions(fsType string) []string {
	options := splitFlags(o.Flags)
	if fsType == "xfs" {
		// Two disks of one guest may carry the same filesystem: a volume and one made from its snapshot.
		options = append(options, "nouuid")
	}
	if o.ReadOnlyDisk {
		options = append(options, "ro")
		switch fsType {
		case "ext3", "ext4":
			options = append(options, "noload")
		case "xfs":
			options = append(options, "norecovery")
		case "btrfs":
			options = append(options, "rescue=nologreplay")
		}
	}
	return options
}

// forbiddenFlags are options of mount(8) and of filesystems that turn a mount of this disk into something else, or name
// another device or file. A name stands for itself, with and without a value; a prefix ends in a dash or a dot.
var forbiddenFlags = []string{
	"bind",
	"rbind",
	"move",
	"remount",
	"make-",
	"shared",
	"rshared",
	"private",
	"rprivate",
	"slave",
	"rslave",
	"unbindable",
	"runbindable",
	"loop",
	"offset",
	"sizelimit",
	"encryption",
	"X-mount.",
	"x-mount.",
	"helper",
	"uhelper",
	"verity.",
	"subvol",
	"subvolid",
	"device",
	"logdev",
	"rtdev",
	"journal_dev",
	"journal_path",
	"sb",
	"nofail",
	"noload",
	"norecovery",
	"nologreplay",
	"usebackuproot",
	"rescue",
	"degraded",
	"user",
	"users",
	"owner",
	"group",
}

// CheckFlags returns [ErrOption] when the orchestrator's mount flags hold an option that this plugin does not pass on.
func CheckFlags(flags []string) error {
	for _, option := range splitFlags(flags) {
		key, _, _ := strings.Cut(option, "=")
		if strings.ContainsAny(key, "\"\\ \t\n\x00") {
			return fmt.Errorf("mount flags: %w: one has a quote, a blank or a backslash in its name", ErrOption)
		}
		for _, forbidden := range forbiddenFlags {
			prefix := strings.HasSuffix(forbidden, "-") || strings.HasSuffix(forbidden, ".")
			if key == forbidden || prefix && strings.HasPrefix(key, forbidden) {
				return fmt.Errorf("mount flags: %w: %s", ErrOption, forbidden)
			}
		}
	}
	return nil
}

func splitFlags(flags []string) []string {
	var options []string
	for _, flag := range flags {
		for option := range strings.SplitSeq(flag, ",") {
			if option = strings.TrimSpace(option); option != "" {
				options = append(options, option)
			}
		}
	}
	return options
}

// Filesystem mounts the filesystem on the device at the folder target, which exists and has no mount yet, and verifies
// that it is there. The kernel replays a journal by itself; only where it refuses a filesystem as damaged is ext checked,
// once, unless it is to be mounted read-only. The errors are [ErrMount], [ErrDamaged], [ErrOption] and [hostexec.ErrMissing].
// What mount(8) says goes into the error only when no flags were given that it might repeat.
func Filesystem(ctx context.Context, dev device.Device, target, fsType string, options Options) error {
	if err := CheckFlags(options.Flags); err != nil {
		return err
	}
	err := mountFilesystem(ctx, dev, target, fsType, options)
	if !errors.Is(err, ErrDamaged) || options.ReadOnly() {
		return err
	}
	if err := checkAndRepair(ctx, dev, fsType, err); err != nil {
		return err
	}
	return mountFilesystem(ctx, dev, target, fsType, options)
}

func mountFilesystem(ctx context.Context, dev device.Device, target, fsType string, options Options) error {
	// As sensitive options they stand in no text that mount-utils makes.
	write := []string{"-w"} // a write-protected device is an error, not a read-only mount instead
	if options.ReadOnly() {
		write = nil
	}
	args, _ := mountutils.MakeMountArgsSensitiveWithMountFlags(dev.Path, target, fsType, nil, options.mountOptions(fsType), write)
	result, err := hostexec.Run(ctx, "mount", args...)
	if err != nil {
		return fmt.Errorf("%w: %s at %s as %s: %w", ErrMount, dev, target, fsType, err)
	}
	table, err := ReadTable()
	if err != nil {
		return err
	}
	if entry, ok := table.At(target); ok && entry.Number == dev.Number {
		return nil
	}
	refused, said := ErrMount, result.Message()
	if reportsDamage(result) {
		refused = ErrDamaged
	}
	if len(options.Flags) > 0 {
		said = "what mount said may repeat mount flags and is not shown: see the kernel's log (dmesg)"
	}
	return fmt.Errorf("%w: %s at %s as %s: exit code %d: %s", refused, dev, target, fsType, result.ExitCode, said)
}

// Bind makes what is at source, a folder or a device node, appear at target too, which exists and is of the same kind. A
// read-only bind never shows writable, not for a moment: a plugin killed between two steps would leave a writable one
// behind. Kernels before Linux 5.12 cannot do that and get the two steps.
func Bind(source, target string, readOnly bool) error {
	err := bindInOneStep(source, target, readOnly)
	if errors.Is(err, unix.ENOSYS) {
		err = bindInTwoSteps(source, target, readOnly)
	}
	if err != nil {
		return fmt.Errorf("%w: bind %s to %s: %w", ErrMount, source, target, err)
	}
	return nil
}

func bindInOneStep(source, target string, readOnly bool) (err error) {
	tree, err := unix.OpenTree(unix.AT_FDCWD, source, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_SYMLINK_NOFOLLOW)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, unix.Close(tree)) }()
	if readOnly {
		attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY}
		if err := unix.MountSetattr(tree, "", unix.AT_EMPTY_PATH, &attr); err != nil {
			return err
		}
	}
	return unix.MoveMount(tree, "", unix.AT_FDCWD, target, unix.MOVE_MOUNT_F_EMPTY_PATH)
}

func bindInTwoSteps(source, target string, readOnly bool) error {
	if err := unix.Mount(source, target, "", unix.MS_BIND, ""); err != nil {
		return err
	}
	if !readOnly {
		return nil
	}
	var stat unix.Statfs_t
	if err := unix.Statfs(target, &stat); err != nil {
		return errors.Join(err, unix.Unmount(target, unix.UMOUNT_NOFOLLOW))
	}
	// A remount sets all flags anew: those of the source have to be named again. ST_ and MS_ have the same values here.
	const kept = unix.MS_NODEV | unix.MS_NOEXEC | unix.MS_NOSUID | unix.MS_NOATIME | unix.MS_NODIRATIME
	flags := uintptr(stat.Flags) & kept
	if err := unix.Mount("", target, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY|flags, ""); err != nil {
		return errors.Join(err, unix.Unmount(target, unix.UMOUNT_NOFOLLOW))
	}
	return nil
}

// Resolve returns the path as the mount table shows it: without symbolic links in the folders that lead to it. The last
// element itself must not be one. It is [fs.ErrNotExist] where a folder on the way is missing; that the last element is
// missing, or cannot be looked at because its filesystem is dead, is no error.
func Resolve(path string) (string, error) {
	path = filepath.Clean(path)
	folder, err := filepath.EvalSymlinks(filepath.Dir(path))
	if err != nil {
		return "", err
	}
	resolved := filepath.Join(folder, filepath.Base(path))
	if info, err := os.Lstat(resolved); err == nil && info.Mode()&fs.ModeSymlink != 0 {
		return "", fmt.Errorf("%w: %s is a symbolic link", ErrForeign, path)
	}
	return resolved, nil
}

// MakeFolder makes sure that there is an empty folder at path to mount on; its parent exists. [ErrForeign] when there is
// something else.
func MakeFolder(path string) error {
	if err := os.Mkdir(path, 0o750); err == nil || !errors.Is(err, fs.ErrExist) {
		return err
	}
	entries, err := os.ReadDir(path)
	if errors.Is(err, unix.ENOTDIR) {
		return fmt.Errorf("%w: %s is no folder", ErrForeign, path)
	}
	if err != nil {
		return err
	}
	if len(entries) > 0 {
		return fmt.Errorf("%w: folder %s is not empty: a mount would hide what is in it", ErrForeign, path)
	}
	return nil
}

// MakeFile makes sure that there is an empty file at path to bind a device node to; its parent exists. [ErrForeign] when
// there is something else.
func MakeFile(path string) error {
	file, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err == nil {
		return file.Close()
	}
	if !errors.Is(err, fs.ErrExist) {
		return err
	}
	info, err := os.Lstat(path)
	if err != nil {
		return err
	}
	if !info.Mode().IsRegular() || info.Size() > 0 {
		return fmt.Errorf("%w: %s is no empty file", ErrForeign, path)
	}
	return nil
}

// Remove removes the folder or file that a mount was on, and nothing that holds anything: a folder must be empty, a file
// too, else it is [ErrForeign]. That nothing is there is no error.
func Remove(path string) error {
	info, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) {
		return nil
	}
	if err != nil {
		return err
	}
	if !info.IsDir() && (!info.Mode().IsRegular() || info.Size() > 0) {
		return fmt.Errorf(
			"%w: %s is neither an empty file nor a folder: remove it by hand if nobody needs it",
			ErrForeign,
			path,
		)
	}
	err = os.Remove(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case errors.Is(err, unix.ENOTEMPTY):
		return fmt.Errorf("%w: folder %s is not empty: remove what is in it by hand if nobody needs it", ErrForeign, path)
	}
	return err
}

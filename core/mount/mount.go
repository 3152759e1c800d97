// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

// Package mount makes filesystems on disks that package device proved blank, mounts them, binds them to the paths of
// workloads, and unmounts them.
//
// It trusts only the kernel's mount table ([ReadTable]), not the result of a call. Every function reads the table
// before and after its change. So each function is safe to repeat: after an error, after the plugin was killed, and
// after a reboot.
//
// mount(8) mounts filesystems, with arguments from k8s.io/mount-utils. Binds and unmounts are system calls: a read-only
// bind must appear in one step, and the reason of a failed unmount decides the next step. The package does not use the
// formatter of mount-utils, which treats an unreadable disk as blank.
//
// Before a writable mount of ext, [Repairs] checks the filesystem if it is not clean. A check outlives its caller.
//
// Mount flags may contain secrets (CSI spec, VolumeCapability.MountVolume). No error and no log line contains
// the value of one.
package mount

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"golang.org/x/sys/unix"
	mountutils "k8s.io/mount-utils"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
	"github.com/oxidecomputer/oxide-csi-plugin/core/filesystem"
	"github.com/oxidecomputer/oxide-csi-plugin/core/hostexec"
)

// Options say how a filesystem is mounted.
type Options struct {
	// ReadOnlyDisk says that the disk rejects writes. Then the journal is not replayed.
	ReadOnlyDisk bool
	// Flags are the orchestrator's mount_flags.
	Flags []string
	// KeepSize says that the filesystem is not grown to the size of its disk.
	KeepSize bool
	// neverPanic says that the superblock says errors=panic, which would end the whole node.
	neverPanic bool
}

// ReadOnly reports whether a mount with these options is read-only.
func (o Options) ReadOnly() bool {
	readOnly := o.ReadOnlyDisk
	for _, option := range filesystem.SplitMountFlags(o.Flags) {
		switch option {
		case "ro":
			readOnly = true
		case "rw":
			readOnly = o.ReadOnlyDisk
		}
	}
	return readOnly
}

// SELinuxContext returns the value of the option context=, or "".
func (o Options) SELinuxContext() string {
	return seLinuxContextOf(filesystem.SplitMountFlags(o.Flags))
}

// mountOptions returns all options for mount(8).
func (o Options) mountOptions(fsType string) []string {
	options := filesystem.SplitMountFlags(o.Flags)
	if o.neverPanic {
		options = append(options, "errors=remount-ro")
	}
	if fsType == "xfs" {
		// Two disks of a guest may have the same filesystem UUID: a volume and its copy from a snapshot.
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

// Filesystem mounts the device's filesystem at the folder target, which exists and has no mount, and verifies the
// mount. The kernel replays journals. It checks nothing: [Repairs.Mount] checks before it calls Filesystem. The errors
// are [ErrMount], [ErrKernel], [ErrDamaged] if the kernel found damage, [filesystem.ErrOption] and
// [hostexec.ErrMissing]. An error has the message of mount(8), without the values of mount flags.
func Filesystem(ctx context.Context, dev device.Device, target, fsType string, options Options) error {
	if err := filesystem.CheckMountFlags(fsType, options.Flags); err != nil {
		return err
	}
	// Sensitive options are in no text that mount-utils makes.
	write := []string{"-w"} // without it, mount(8) mounts a write-protected device read-only
	if options.ReadOnly() {
		write = nil
	}
	args, _ := mountutils.MakeMountArgsSensitiveWithMountFlags(dev.Path, target, fsType, nil, options.mountOptions(fsType),
		write)
	result, err := hostexec.Run(ctx, "mount", args...)
	if err != nil {
		return fmt.Errorf("%w: %s at %s as %s: %w", ErrMount, dev, target, fsType, err)
	}
	table, err := ReadTable()
	if err != nil {
		return err
	}
	if entry, ok := table.At(target); ok && entry.Number == device.DiskBelow(dev.Number) {
		return nil
	}
	refused, message := ErrMount, result.Message()
	if reportsDamage(result) {
		refused = ErrDamaged
	}
	message = withoutFlagValues(message, options.Flags)
	if super, err := device.Superblock(dev, fsType); err == nil && refused == ErrMount {
		if lacks := filesystem.KernelLacks(fsType, super, kernelRelease()); lacks != "" {
			refused, message = ErrKernel, lacks+": "+message
		}
	}
	return fmt.Errorf("%w: %s at %s as %s: exit code %d: %s", refused, dev, target, fsType, result.ExitCode, message)
}

// kernelRelease returns the version of the running kernel, or "".
func kernelRelease() string {
	var name unix.Utsname
	if err := unix.Uname(&name); err != nil {
		return ""
	}
	return unix.ByteSliceToString(name.Release[:])
}

// withoutFlagValues replaces the values of mount flags in a message: they may be secret. The keys are words of the
// allow-list.
func withoutFlagValues(message string, flags []string) string {
	for _, option := range filesystem.SplitMountFlags(flags) {
		key, value, found := strings.Cut(option, "=")
		if !found {
			continue
		}
		message = strings.ReplaceAll(message, option, key+"=…")
		// Only whole words: a short value, such as 4, is part of others, such as ext4.
		word := regexp.MustCompile(`\b` + regexp.QuoteMeta(strings.Trim(value, `"`)) + `\b`)
		message = word.ReplaceAllString(message, "…")
	}
	return message
}

// Bind bind-mounts source, a folder or a device node, to target, which exists and is of the same kind. A read-only bind
// is never writable, even for a moment: a plugin that is killed between two steps would leave a writable bind. Kernels
// before Linux 5.12 need the two steps.
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

// keptFlags are the flags of a mount that a remount repeats, because it replaces all flags. ST_ and MS_ constants have
// the same values here.
const keptFlags = unix.MS_NODEV | unix.MS_NOEXEC | unix.MS_NOSUID | unix.MS_NOATIME | unix.MS_NODIRATIME

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
	flags := uintptr(stat.Flags) & keptFlags
	if err := unix.Mount("", target, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY|flags, ""); err != nil {
		return errors.Join(err, unix.Unmount(target, unix.UMOUNT_NOFOLLOW))
	}
	return nil
}

// Resolve returns the path in the form of the mount table: without symbolic links in its parent folders. The last
// element must not be a symbolic link ([ErrForeign]). Resolve returns [fs.ErrNotExist] if a parent folder does not
// exist. The last element may be missing, or unreadable because its filesystem is dead.
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

// ResolveExisting is like [Resolve], but also resolves a path whose parent folders are missing, as far as they exist.
func ResolveExisting(path string) string {
	folder, rest := filepath.Split(filepath.Clean(path))
	for {
		resolved, err := filepath.EvalSymlinks(folder)
		if err == nil || folder == "/" {
			return filepath.Join(resolved, rest)
		}
		folder = filepath.Clean(folder)
		rest = filepath.Join(filepath.Base(folder), rest)
		folder = filepath.Dir(folder)
	}
}

// A folder or file that this package makes has the sticky bit, with which it appears. On a folder that only its owner
// can write to, and on a file, the bit has no effect, so no one else sets it. [Remove] removes only what has it.
const (
	folderMode = fs.ModeSticky | 0o750
	fileMode   = fs.ModeSticky | 0o600
)

// madeHere reports whether this package made the folder or file.
func madeHere(info fs.FileInfo) bool {
	const othersWrite = 0o022
	return info.Mode()&fs.ModeSticky != 0 && info.Mode()&othersWrite == 0
}

// MakeNewFolder makes a folder that [Remove] removes. Its error is [fs.ErrExist] if something is at path.
func MakeNewFolder(path string) error { return os.Mkdir(path, folderMode) }

// MakeFolder makes sure that path is an empty folder, on which a filesystem can be mounted. The parent exists. It
// returns [ErrForeign] if something else is at path.
func MakeFolder(path string) error {
	if err := MakeNewFolder(path); err == nil || !errors.Is(err, fs.ErrExist) {
		return err
	}
	entries, err := os.ReadDir(path)
	if errors.Is(err, unix.ENOTDIR) {
		return fmt.Errorf("%w: %s is not a directory", ErrForeign, path)
	}
	if err != nil {
		return err
	}
	if len(entries) > 0 {
		return fmt.Errorf(
			"%w: directory %s is not empty, and a mount would hide its content: use another path, or move its content away",
			ErrForeign,
			path,
		)
	}
	return nil
}

// MakeFile makes sure that path is an empty file, to which a device node can be bound. The parent exists. It returns
// [ErrForeign] if something else is at path.
func MakeFile(path string) error {
	file, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, fileMode)
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
		return fmt.Errorf("%w: %s is not an empty file", ErrForeign, path)
	}
	return nil
}

// Remove removes the folder or file on which a mount was, if [MakeFolder], [MakeNewFolder] or [MakeFile] made it. One
// that was there before stays. Remove returns [ErrForeign] if the folder or file is not empty, and nil if nothing is at
// path.
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
			"%w: %s is neither an empty file nor a directory: remove it manually if it is not needed",
			ErrForeign,
			path,
		)
	}
	if info.IsDir() {
		entries, err := os.ReadDir(path)
		if err != nil {
			return err
		}
		if len(entries) > 0 {
			return fmt.Errorf("%w: directory %s is not empty: move its content away", ErrForeign, path)
		}
	}
	if !madeHere(info) {
		return nil
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

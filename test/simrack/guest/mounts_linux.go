// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package guest

import (
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

const (
	// shutdownRequest is FS_IOC_SHUTDOWN, _IOR('X', 125, __u32).
	shutdownRequest = 0x8004587d
	// shutdownNoLogFlush leaves the journal on the disk as it is, as when the disk vanishes.
	shutdownNoLogFlush = 2
)

// mount is a mount, and the folder from which its mount point can be reached: "/" for the mount namespace of this
// process.
type mount struct {
	*mountinfo.Info
	via string
}

func (m mount) path() string { return filepath.Join(m.via, m.Mountpoint) }

func (m mount) own() bool { return m.via == "/" }

func (m mount) device() uint64 { return unix.Mkdev(uint32(m.Major), uint32(m.Minor)) }

// ownMounts lists the mounts of this process's mount namespace. Parents come before children unless a mount was moved.
func ownMounts() ([]mount, error) { return mountsIn("/proc/self", "/") }

func mountsIn(process, via string) ([]mount, error) {
	f, err := os.Open(filepath.Join(process, "mountinfo"))
	if err != nil {
		return nil, err
	}
	defer f.Close() // opened for reading
	return readMounts(f, via)
}

func readMounts(f io.Reader, via string) ([]mount, error) {
	infos, err := mountinfo.GetMountsFromReader(f, nil)
	if err != nil {
		return nil, err
	}
	mounts := make([]mount, len(infos))
	for i, info := range infos {
		mounts[i] = mount{info, via}
	}
	return mounts, nil
}

// allMounts lists the mounts of the mount namespaces of all visible processes. A container may have a copy of a mount
// that the host has already unmounted.
func allMounts() ([]mount, error) {
	mounts, err := ownMounts()
	if err != nil {
		return nil, err
	}
	self, err := os.Readlink("/proc/self/ns/mnt")
	if err != nil {
		return nil, err
	}
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	seen := map[string]bool{self: true}
	for _, entry := range entries {
		if _, err := strconv.Atoi(entry.Name()); err != nil {
			continue
		}
		process := filepath.Join("/proc", entry.Name())
		namespace, err := os.Readlink(filepath.Join(process, "ns/mnt"))
		if err != nil || seen[namespace] {
			continue // gone, or not accessible
		}
		others, err := mountsIn(process, filepath.Join(process, "root"))
		if err != nil {
			continue // Gone meanwhile; another process of the namespace may follow.
		}
		seen[namespace] = true
		mounts = append(mounts, others...)
	}
	return mounts, nil
}

// openRoot opens the directory at the mount point, for ioctls on the filesystem. Another mount may cover the mount
// point. The directory then belongs to another filesystem, which must not be touched.
func (m mount) openRoot() (*os.File, error) {
	fd, err := unix.Open(m.path(), unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: m.path(), Err: err}
	}
	defer unix.Close(fd) // only a path descriptor
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, &fs.PathError{Op: "stat", Path: m.path(), Err: err}
	}
	if kind := st.Mode & unix.S_IFMT; st.Dev != m.device() || kind != unix.S_IFDIR && kind != unix.S_IFREG {
		return nil, fmt.Errorf("another filesystem than the one on %d:%d is visible at %s", m.Major, m.Minor, m.path())
	}
	return os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", fd), os.O_RDONLY|unix.O_NONBLOCK, 0)
}

// shutDown ends all input and output of the filesystem without flushing its journal.
func (m mount) shutDown() error {
	root, err := m.openRoot()
	if err != nil {
		return err
	}
	defer root.Close() // opened for reading
	if err := unix.IoctlSetPointerInt(int(root.Fd()), shutdownRequest, shutdownNoLogFlush); err != nil {
		return &fs.PathError{Op: "shut down the filesystem at", Path: m.path(), Err: err}
	}
	return nil
}

// sync writes all cached data of the filesystem to its disk.
func (m mount) sync() error {
	root, err := m.openRoot()
	if err != nil {
		return err
	}
	defer root.Close() // opened for reading
	if err := unix.Syncfs(int(root.Fd())); err != nil {
		return &fs.PathError{Op: "sync the filesystem at", Path: m.path(), Err: err}
	}
	return nil
}

// unmount unmounts with the flags of umount2. The mount must be the topmost at its mount point: umount2 takes a path,
// and would unmount the topmost.
func (m mount) unmount(flags int) error {
	top, err := mountID(m.Mountpoint)
	if err == nil && top != m.ID {
		return fmt.Errorf("unmount %s: another mount lies over it", m.Mountpoint)
	}
	if err == nil {
		err = unix.Unmount(m.Mountpoint, flags|unix.UMOUNT_NOFOLLOW)
	}
	if err != nil {
		return &fs.PathError{Op: "unmount", Path: m.Mountpoint, Err: err}
	}
	return nil
}

// mountID returns the ID of the mount that is visible at the path. It reads the kernel's tables, because a filesystem
// that was shut down does not answer stat.
func mountID(path string) (int, error) {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	defer unix.Close(fd) // only a path descriptor
	text, err := os.ReadFile(fmt.Sprintf("/proc/self/fdinfo/%d", fd))
	if err != nil {
		return 0, err
	}
	_, after, _ := strings.Cut(string(text), "mnt_id:")
	number, _, _ := strings.Cut(after, "\n")
	return strconv.Atoi(strings.TrimSpace(number))
}

// withChildren returns the mounts that match and all mounts below them, children first. They can be unmounted in this
// order.
func withChildren(mounts []mount, match func(mount) bool) []mount {
	picked := map[int]bool{}
	var order []mount
	for _, m := range mounts {
		if match(m) || picked[m.Parent] {
			picked[m.ID] = true
			order = append(order, m)
		}
	}
	slices.Reverse(order)
	return order
}

// nodeMounts returns a matcher for bind mounts of files below the folder dev, which are device nodes shown elsewhere.
// It also matches deleted files. Mountinfo gives paths from the root of the filesystem, so nodeMounts translates dev by
// the mount that contains it.
func nodeMounts(mounts []mount, dev string) (func(mount) bool, error) {
	id, err := mountID(dev)
	if err != nil {
		return nil, fmt.Errorf("find the mount that holds %s: %w", dev, err)
	}
	for _, holder := range mounts {
		if holder.ID != id || !holder.own() {
			continue
		}
		inside, err := filepath.Rel(holder.Mountpoint, dev)
		if err != nil {
			return nil, err
		}
		prefix := filepath.Join(holder.Root, inside) + "/"
		return func(m mount) bool {
			return m.device() == holder.device() && strings.HasPrefix(m.Root, prefix)
		}, nil
	}
	return nil, fmt.Errorf("no mount with ID %d, which holds %s, is in mountinfo", id, dev)
}

// rejectMounts fails if a filesystem is mounted at or below dir. A removal of dir would delete the content of that
// filesystem.
func rejectMounts(dir string) error {
	mounts, err := ownMounts()
	if err != nil {
		return err
	}
	for _, m := range mounts {
		if below(m.Mountpoint, dir) {
			return fmt.Errorf("remove %s: %s is mounted at %s: unmount it", dir, m.Source, m.Mountpoint)
		}
	}
	return nil
}

// below reports whether path is dir or is in it. Both must be clean.
func below(path, dir string) bool {
	return path == dir || strings.HasPrefix(path, strings.TrimSuffix(dir, "/")+"/")
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package guest

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// A disk's backing store is named by the disk's ID and storeSuffix, a snapshot by its ID and snapshotSuffix.
// freshSuffix marks an incomplete copy.
const (
	storeSuffix    = ".disk"
	snapshotSuffix = ".snapshot"
	freshSuffix    = ".fresh"
)

// immutableFlag is FS_IMMUTABLE_FL of linux/fs.h.
const immutableFlag = 0x10

// fileID identifies a file independently of its names, as the kernel does for loop devices.
type fileID struct{ dev, inode uint64 }

// store is the sparse file with the contents of a disk.
type store struct{ path string }

func (g *Guests) store(diskID string) store {
	return store{filepath.Join(g.stateDir, diskID+storeSuffix)}
}

// stat returns the store's identity and size in bytes.
func (s store) stat() (fileID, int64, error) {
	var st unix.Stat_t
	if err := unix.Stat(s.path, &st); err != nil {
		return fileID{}, 0, &fs.PathError{Op: "stat", Path: s.path, Err: err}
	}
	return fileID{st.Dev, st.Ino}, st.Size, nil
}

func (s store) create(sizeBytes int64) (err error) {
	f, err := os.OpenFile(s.path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	if err := errors.Join(f.Truncate(sizeBytes), f.Close()); err != nil {
		return errors.Join(err, os.Remove(s.path))
	}
	return nil
}

// renew moves the disk to a new file with the same contents. Holders of the old file keep it, without a name.
func (s store) renew() error { return s.copyTo(s.path, 0) }

// copyTo copies the contents to a file of at least sizeBytes. The file gets its name only when it is complete.
func (s store) copyTo(path string, sizeBytes int64) (err error) {
	src, err := os.Open(s.path)
	if err != nil {
		return err
	}
	defer src.Close() // nothing was written through it

	freshPath := path + freshSuffix
	fresh, err := os.OpenFile(freshPath, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	err = copySparse(fresh, src)
	if err == nil && sizeBytes > 0 {
		err = fresh.Truncate(sizeBytes)
	}
	if err = errors.Join(err, fresh.Close()); err == nil {
		err = os.Rename(freshPath, path)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("copy %s: %w", s.path, err), remove(freshPath))
	}
	return nil
}

// copySparse copies the contents of src to dst, an empty file, with its holes. Filesystems that can share blocks
// between files share them.
func copySparse(dst, src *os.File) error {
	info, err := src.Stat()
	if err != nil {
		return err
	}
	if err := dst.Truncate(info.Size()); err != nil {
		return err
	}
	for end := int64(0); ; {
		start, err := unix.Seek(int(src.Fd()), end, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return nil // no data after this offset
		}
		if err != nil {
			return err
		}
		if end, err = unix.Seek(int(src.Fd()), start, unix.SEEK_HOLE); err != nil {
			return err
		}
		if _, err := src.Seek(start, io.SeekStart); err != nil {
			return err
		}
		if _, err := dst.Seek(start, io.SeekStart); err != nil {
			return err
		}
		if _, err := io.CopyN(dst, src, end-start); err != nil {
			return err
		}
	}
}

// setImmutable sets or clears the attribute of chattr +i, on ext4 only: other filesystems continue to accept writes
// through open descriptors. In a container root may lack the right to set it; setImmutable then does nothing.
func (s store) setImmutable(on bool) error {
	f, err := os.Open(s.path)
	if err != nil {
		return err
	}
	defer f.Close() // nothing was written through it

	var stat unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &stat); err != nil {
		return &fs.PathError{Op: "statfs", Path: s.path, Err: err}
	}
	if stat.Type != unix.EXT4_SUPER_MAGIC {
		return nil
	}
	flags, err := unix.IoctlGetUint32(int(f.Fd()), unix.FS_IOC_GETFLAGS)
	if err != nil {
		return &fs.PathError{Op: "read attributes of", Path: s.path, Err: err}
	}
	wanted := flags &^ immutableFlag
	if on {
		wanted |= immutableFlag
	}
	if wanted == flags {
		return nil
	}
	err = unix.IoctlSetPointerInt(int(f.Fd()), unix.FS_IOC_SETFLAGS, int(wanted))
	if err != nil && !errors.Is(err, unix.EPERM) {
		return &fs.PathError{Op: "set attributes of", Path: s.path, Err: err}
	}
	return nil
}

// makeBootable puts a partition table on a blank boot disk: one Linux partition from sector 2048 on, as on the disk of
// an installed system. So blkid does not take the disk for blank, and a plugin that uses the boot disk as a volume is
// detected.
func (s store) makeBootable(sizeBytes int64) error {
	f, err := os.OpenFile(s.path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	var sector [512]byte
	if _, err := f.ReadAt(sector[:], 0); err != nil {
		return errors.Join(err, f.Close())
	}
	if sector == [512]byte{} {
		sector = bootSector(sizeBytes)
		if _, err := f.WriteAt(sector[:], 0); err != nil {
			return errors.Join(err, f.Close())
		}
	}
	return f.Close()
}

// bootSector is a master boot record with one active Linux partition.
func bootSector(sizeBytes int64) (sector [512]byte) {
	const first, table = 2048, 446
	copy(sector[440:], "\xde\x01\xde\x01") // the disk signature
	entry := sector[table : table+16]
	entry[0] = 0x80                 // active
	copy(entry[1:], "\xfe\xff\xff") // cylinder, head, sector: out of range, so the sector numbers below count
	entry[4] = 0x83                 // Linux
	copy(entry[5:], "\xfe\xff\xff")
	binary.LittleEndian.PutUint32(entry[8:], first)
	binary.LittleEndian.PutUint32(entry[12:], uint32(min(sizeBytes/512-first, 1<<32-1)))
	copy(sector[510:], "\x55\xaa")
	return sector
}

// stores lists the backing stores and the snapshots, by disk or snapshot ID.
func (g *Guests) stores() ([]string, error) {
	entries, err := os.ReadDir(g.stateDir)
	if err != nil {
		return nil, err
	}
	var ids []string
	for _, entry := range entries {
		for _, suffix := range []string{storeSuffix, snapshotSuffix} {
			if id, ok := strings.CutSuffix(entry.Name(), suffix); ok {
				ids = append(ids, id)
			}
		}
	}
	return ids, nil
}

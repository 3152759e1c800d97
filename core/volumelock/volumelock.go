// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

// Package volumelock lets only one process at a time work on a volume's disk. Programs that it starts share the lock.
//
// A program can outlive the plugin. If the plugin is killed while mount(8) runs, the mount appears in the mount table
// later. So each program inherits the lock, and the lock ends with the last process that holds it.
package volumelock

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"time"

	"github.com/google/uuid"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/core/hostexec"
	"github.com/oxidecomputer/oxide-csi-plugin/core/statefile"
)

// pollInterval is the time between two attempts to take a lock.
const pollInterval = 10 * time.Millisecond

// Acquire locks a volume for this process and for the programs that [hostexec.Run] starts with the returned context. If
// another process holds the lock, it waits for at most wait and then returns [ErrHeld].
//
// The lock covers one byte of the file <stateDir>/locks. It belongs to the open file (fcntl, F_OFD_SETLK), not to the
// process, so an inherited descriptor keeps it. If the file exists in a folder that is read-only now, the lock is a
// shared one: it waits for earlier holders, and keeps out no later reader.
func Acquire(ctx context.Context, stateDir string, volume uuid.UUID, wait time.Duration) (
	locked context.Context, release func(), err error,
) {
	file, kind, err := open(filepath.Join(stateDir, "locks"))
	if err != nil {
		return nil, nil, fmt.Errorf("%w: %w", statefile.ErrFolder, err)
	}
	// The file stays empty, so an error of Close loses no data.
	release = func() { _ = file.Close() }
	if err := lock(ctx, file, kind, volume, wait); err != nil {
		release()
		return nil, nil, err
	}
	ctx = context.WithValue(ctx, heldKey{}, held{file, kind})
	return hostexec.WithInherited(ctx, file), release, nil
}

// held is the lock file that a context of [Acquire] has open.
type held struct {
	file *os.File
	kind int16
}

type heldKey struct{}

// nodeByte is the byte of the lock file that all volumes of the node share.
const nodeByte = math.MaxInt64 - 1

// AcquireNode lets only one volume of the node at a time run a program that needs much memory. ctx comes from
// [Acquire]. The program inherits this lock too. If another volume holds it, AcquireNode waits for at most wait and
// then returns [ErrNodeHeld].
func AcquireNode(ctx context.Context, wait time.Duration) (release func(), err error) {
	h, ok := ctx.Value(heldKey{}).(held)
	if !ok {
		return nil, errors.New("the volume is not locked") // a defect of the caller
	}
	if h.kind != unix.F_WRLCK {
		return nil, fmt.Errorf("%w: %s is read-only", statefile.ErrFolder, h.file.Name())
	}
	err = lockByte(ctx, h.file, h.kind, nodeByte, wait)
	if errors.Is(err, ErrHeld) {
		err = ErrNodeHeld
	}
	if err != nil {
		return nil, err
	}
	return func() {
		unlock := unix.Flock_t{Type: unix.F_UNLCK, Start: nodeByte, Len: 1}
		_ = unix.FcntlFlock(h.file.Fd(), unix.F_OFD_SETLK, &unlock) // the lock ends with the volume's at the latest
	}, nil
}

// open opens the lock file, and makes it if it is missing. It returns the kind of lock that the file allows.
func open(path string) (file *os.File, kind int16, err error) {
	file, err = os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if errors.Is(err, os.ErrNotExist) {
		if err = os.MkdirAll(filepath.Dir(path), 0o700); err == nil {
			file, err = os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
		}
	}
	if err == nil {
		return file, unix.F_WRLCK, nil
	}
	if readOnly, readErr := os.OpenFile(path, os.O_RDONLY, 0); readErr == nil {
		return readOnly, unix.F_RDLCK, nil
	}
	return nil, 0, err
}

func lock(ctx context.Context, file *os.File, kind int16, volume uuid.UUID, wait time.Duration) error {
	// Two volumes whose IDs have the same 63 bits wait for each other, which does no harm.
	offset := int64(binary.BigEndian.Uint64(volume[:8])^binary.BigEndian.Uint64(volume[8:])) & math.MaxInt64
	return lockByte(ctx, file, kind, min(offset, nodeByte-1), wait)
}

func lockByte(ctx context.Context, file *os.File, kind int16, offset int64, wait time.Duration) error {
	end := time.Now().Add(wait)
	wanted := unix.Flock_t{Type: kind, Start: offset, Len: 1}
	for {
		err := unix.FcntlFlock(file.Fd(), unix.F_OFD_SETLK, &wanted)
		switch {
		case err == nil:
			return nil
		case errors.Is(err, unix.EINTR):
			continue
		case !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EACCES):
			return fmt.Errorf("%w: lock %s: %w", statefile.ErrFolder, file.Name(), err)
		case ctx.Err() != nil:
			return ctx.Err()
		case time.Now().After(end):
			return ErrHeld
		}
		time.Sleep(pollInterval)
	}
}

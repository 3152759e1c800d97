// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package volumelock lets one process at a time work on a volume's disk, programs that it started included.
//
// A program can outlive the plugin: a plugin that is killed while mount runs leaves a mount that no mount table shows yet.
// So each program inherits the lock, and the lock ends with the last process that holds it.
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
)

var (
	// ErrHeld means that a program started for the same volume by an earlier process is still running.
	ErrHeld = errors.New("a program that was started earlier is still at work")
	// ErrState means that the state folder cannot be used.
	ErrState = errors.New("state folder cannot be used")
)

// pollInterval is the time between two tries to take a lock that is held elsewhere.
const pollInterval = 10 * time.Millisecond

// Acquire locks a volume for this process and for the programs that [hostexec.Run] runs with the returned context. It
// waits up to wait for another holder, and then returns [ErrHeld].
//
// The lock covers one byte of the file <stateDir>/locks. It belongs to the open file (fcntl, F_OFD_SETLK), not to a
// process, so that an inherited descriptor keeps it.
func Acquire(ctx context.Context, stateDir string, volume uuid.UUID, wait time.Duration) (
	locked context.Context, release func(), err error,
) {
	path := filepath.Join(stateDir, "locks")
	file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if errors.Is(err, os.ErrNotExist) {
		if err = os.MkdirAll(stateDir, 0o700); err == nil {
			file, err = os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
		}
	}
	if err != nil {
		return nil, nil, fmt.Errorf("%w: %w", ErrState, err)
	}
	// Nothing is ever written to the file: closing it releases the lock and cannot lose data.
	release = func() { _ = file.Close() }
	if err := lock(ctx, file, volume, wait); err != nil {
		release()
		return nil, nil, err
	}
	return hostexec.WithInherited(ctx, file), release, nil
}

func lock(ctx context.Context, file *os.File, volume uuid.UUID, wait time.Duration) error {
	end := time.Now().Add(wait)
	// Two volumes whose IDs share these 63 bits wait for each other, which does no harm.
	place := int64(binary.BigEndian.Uint64(volume[:8])^binary.BigEndian.Uint64(volume[8:])) & math.MaxInt64
	wanted := unix.Flock_t{Type: unix.F_WRLCK, Start: min(place, math.MaxInt64-1), Len: 1}
	for {
		err := unix.FcntlFlock(file.Fd(), unix.F_OFD_SETLK, &wanted)
		switch {
		case err == nil:
			return nil
		case errors.Is(err, unix.EINTR):
			continue
		case !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EACCES):
			return fmt.Errorf("%w: lock %s: %w", ErrState, file.Name(), err)
		case ctx.Err() != nil:
			return ctx.Err()
		case time.Now().After(end):
			return ErrHeld
		}
		time.Sleep(pollInterval)
	}
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package mount

import (
	"context"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
)

// replayJournal has the kernel replay the journal of an unmounted ext filesystem, if there is something to replay.
//
// e2fsck would replay the journal too. But if its replay fails, e2fsck drops the journal, repairs what is left, and
// ends as if nothing were lost. The synced files that only the journal had are gone. This happens to every filesystem
// with the feature fast_commit: e2fsprogs up to 1.47.4 cannot read the fast commits of Linux 5.10 to 7.2. The kernel
// refuses to mount a filesystem whose journal it cannot replay, and keeps the journal.
//
// The errors are [ErrDamaged] if the kernel found damage in the journal, [ErrMount] and [ErrBusy].
func replayJournal(ctx context.Context, dev device.Device) error {
	state, err := device.ReadExtState(dev)
	if err != nil || !state.Replay {
		return err
	}
	if whole, err := device.ExtChecksumValid(dev); err != nil || !whole {
		return err // what the superblock says is unreliable, and e2fsck -p refuses it
	}
	err = mountDetached(dev, "rw")
	if errors.Is(err, unix.EINVAL) {
		// If this kernel lacks a feature of the filesystem, it mounts it only read-only. Then it replays the journal too,
		// but not all fast commits.
		err = mountDetached(dev, "ro")
	}
	switch {
	case errors.Is(err, unix.ENOSYS) && !state.FastCommit: // before Linux 5.2
		return nil
	case errors.Is(err, unix.EUCLEAN), errors.Is(err, unix.EBADMSG):
		return fmt.Errorf(
			"%w: the kernel does not replay the journal of %s: %w: restore a snapshot; e2fsck -f may drop the journal, and with it synced files",
			ErrDamaged,
			dev,
			err,
		)
	case err != nil:
		return fmt.Errorf("%w: replay of the journal of %s: %w: read the kernel's log", ErrMount, dev, err)
	}
	if err := WaitIdle(ctx, dev); err != nil {
		return err
	}
	if state, err = device.ReadExtState(dev); err == nil && state.Replay {
		err = fmt.Errorf("%w: the journal of %s is still not replayed: read the kernel's log", ErrMount, dev)
	}
	return err
}

// mountDetached mounts an ext filesystem for a moment at no path, so that nothing else can use it, and no mount is left
// if this process ends. mode is rw or ro.
func mountDetached(dev device.Device, mode string) (err error) {
	fd, err := unix.Fsopen("ext4", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return os.NewSyscallError("fsopen", err)
	}
	defer func() { err = errors.Join(err, unix.Close(fd)) }()
	for key, value := range map[string]string{
		"source": dev.Path,
		"errors": "remount-ro", // the superblock may say panic
	} {
		if err := unix.FsconfigSetString(fd, key, value); err != nil {
			return os.NewSyscallError("fsconfig "+key, err)
		}
	}
	for _, flag := range []string{mode, "noinit_itable"} { // a damaged filesystem must not initialise its tables
		if err := unix.FsconfigSetFlag(fd, flag); err != nil {
			return os.NewSyscallError("fsconfig "+flag, err)
		}
	}
	return os.NewSyscallError("mount", unix.FsconfigCreate(fd))
}

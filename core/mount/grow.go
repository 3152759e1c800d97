// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package mount

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/google/uuid"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
	"github.com/oxidecomputer/oxide-csi-plugin/core/hostexec"
)

// minGrowthBytes is the smallest unused part of a disk for which the filesystem is grown. Disk sizes are whole GiB
// (docs/reference/rack.md §2). A filesystem leaves less than one of its groups unused, which has at most 128 MiB (ext).
const minGrowthBytes = 128 << 20

// Grow grows the filesystem that is mounted at target to the size of its disk. The kernel grows it while it is mounted.
// If the kernel refuses that for an ext filesystem, Grow unmounts it, grows it with resize2fs, and mounts it again with
// options. It does not unmount a filesystem that is mounted elsewhere too: then the next stage grows it.
// [Repairs.Mount] has already grown an ext filesystem that the kernel certainly does not grow while it is mounted.
//
// The superblock of a mounted xfs on the disk may be old. Then a filesystem that has just grown is grown again, without
// effect. A filesystem of any type that is larger than its disk is [ErrDamaged]. After [ErrGrow] the filesystem is
// mounted with its old size. The other errors are [ErrBusy], [ErrChecking] and those of [Repairs.Mount]. After these
// the filesystem may be unmounted.
func (r *Repairs) Grow(
	ctx context.Context,
	dev device.Device,
	volumeID uuid.UUID,
	target, fsType string,
	options Options,
) error {
	if needed, err := needsGrowth(dev, fsType); err != nil || !needed || options.KeepSize {
		return err
	}
	if err := r.takeNotGrown(volumeID); err != nil {
		return err
	}
	before, err := Stats(target)
	if err != nil {
		return err
	}
	err = r.do(ctx, dev, volumeID, func(ctx context.Context) error { return r.growMounted(ctx, dev, target, fsType) })
	switch {
	case isExt(fsType) && errors.Is(err, errRefused):
		return r.growBetweenMounts(ctx, dev, volumeID, target, fsType, options, err)
	case err != nil:
		return err
	}
	after, err := Stats(target)
	if err == nil && after.TotalBytes > before.TotalBytes {
		r.logGrown(dev, volumeID)
	}
	return err
}

// takeNotGrown returns why the filesystem could not grow before it was mounted, once.
func (r *Repairs) takeNotGrown(volumeID uuid.UUID) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	err := r.notGrown[volumeID]
	delete(r.notGrown, volumeID)
	return err
}

// errRefused means that a mounted filesystem cannot grow.
var errRefused = errors.New("the mounted filesystem cannot grow")

// whyNotMounted returns the reason why an ext filesystem cannot grow while it is mounted, as far as it is known before
// the kernel is asked, or nil. Such a filesystem grows before it is mounted: a mount that another namespace copied
// meanwhile would hold the disk.
func (r *Repairs) whyNotMounted(state device.ExtState) error {
	switch {
	case !r.growsMounted:
		return fmt.Errorf("%w: the plugin lacks CAP_SYS_RESOURCE", errRefused)
	case !state.Journal:
		return fmt.Errorf("%w: it has no journal, so a power cut would damage it", errRefused)
	}
	return nil
}

// mayGrowMounted reports whether this process has the capability that the kernel demands.
func mayGrowMounted() bool {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	err := unix.Capget(&header, &data[0])
	return err == nil && data[0].Effective&(1<<unix.CAP_SYS_RESOURCE) != 0
}

func (r *Repairs) growMounted(ctx context.Context, dev device.Device, target, fsType string) error {
	switch fsType {
	case "xfs":
		return r.grow(ctx, dev, "xfs_growfs", "-d", target)
	case "btrfs":
		return r.grow(ctx, dev, "btrfs", "filesystem", "resize", "max", target)
	}
	state, err := device.ReadExtState(dev)
	if err == nil {
		err = r.whyNotMounted(state)
	}
	if err != nil {
		return err
	}
	if err = r.grow(ctx, dev, "resize2fs", dev.Path); errors.Is(err, ErrGrow) {
		err = fmt.Errorf("%w: %w", errRefused, err)
	}
	return err
}

// growBetweenMounts unmounts an ext filesystem, grows it and mounts it again.
func (r *Repairs) growBetweenMounts(
	ctx context.Context,
	dev device.Device,
	volumeID uuid.UUID,
	target, fsType string,
	options Options,
	why error,
) error {
	table, err := ReadTable()
	if err != nil {
		return err
	}
	if mounts := table.OfDevice(dev.Number); len(mounts) > 1 {
		return fmt.Errorf("%w on %s: %w, and is mounted at %s too: it grows when it is staged again",
			ErrGrow, dev, why, mounts[1].Path)
	}
	if err := checkGrowthIsSafe(dev, why); err != nil {
		return err
	}
	if err := Unmount(ctx, target, dev.Number); err != nil {
		return err
	}
	if err := WaitIdle(ctx, dev); err != nil {
		return err
	}
	grown := r.growUnmounted(ctx, dev, volumeID, why)
	if grown != nil && !errors.Is(grown, ErrGrow) {
		return grown
	}
	options.KeepSize = true // not another try
	if err := r.Mount(ctx, dev, volumeID, target, fsType, options); err != nil {
		return err
	}
	return grown
}

// checkGrowthIsSafe returns [ErrGrow] if resize2fs refuses to grow the unmounted filesystem, or would move its blocks,
// because the descriptors of the new groups need more room than the filesystem reserves. If resize2fs is killed
// meanwhile, data is where something else is now, and no check brings it back: on a full disk, e2fsck -f -y then lost
// up to 119 of 401 files.
func checkGrowthIsSafe(dev device.Device, why error) error {
	state, err := device.ReadExtState(dev)
	if err != nil {
		return err
	}
	if state.Bigalloc {
		return fmt.Errorf("%w on %s: %w, and resize2fs does not grow bigalloc unmounted: copy the data to a larger volume",
			ErrGrow, dev, why)
	}
	if state.UnmarkedGrowth {
		return fmt.Errorf("%w on %s: %w, and resize2fs leaves a block of sparse_super2 without flex_bg marked as free: "+
			"copy the data to a larger volume", ErrGrow, dev, why)
	}
	moves, err := device.ExtGrowthMovesBlocks(dev)
	if err != nil || !moves {
		return err
	}
	return fmt.Errorf(
		"%w on %s: %w, and resize2fs could lose data: take a snapshot, then run e2fsck -f and resize2fs manually", ErrGrow,
		dev, why)
}

// growUnmounted grows an ext filesystem while it is unmounted. resize2fs requires a check first. It is not safe against
// interruption, so a marker is on the disk meanwhile, see [device.Growing]. After [ErrGrow] the filesystem is in order
// and has its old size.
func (r *Repairs) growUnmounted(ctx context.Context, dev device.Device, volumeID uuid.UUID, why error) error {
	return r.do(ctx, dev, volumeID, func(ctx context.Context) error {
		r.log.Info("growing the filesystem unmounted", "volume_id", volumeID.String(), "device", dev.String(), "because", why)
		if err := r.preen(ctx, dev, volumeID, "-f"); err != nil {
			return err
		}
		if err := device.WriteWorkMarker(dev, volumeID, device.Growing); err != nil {
			return fmt.Errorf("%w on %s: %w: grow the filesystem manually with resize2fs", ErrGrow, dev, err)
		}
		grown := r.grow(ctx, dev, "resize2fs", dev.Path)
		switch {
		case errors.Is(grown, ErrGrow):
			return cmp.Or(r.finishGrowth(ctx, dev), grown)
		case grown != nil:
			return grown
		}
		if err := device.RemoveWorkMarker(dev); err != nil {
			return err
		}
		r.logGrown(dev, volumeID)
		return nil
	})
}

func (r *Repairs) logGrown(dev device.Device, volumeID uuid.UUID) {
	r.log.Info("grew the filesystem to its disk", "volume_id", volumeID.String(), "device", dev.String())
}

// FinishInterrupted repairs an ext filesystem whose growth or check was interrupted. Call it before anything else reads
// the filesystem: until then even the superblock is unreliable, and some versions of blkid do not recognise it. It
// returns [ErrDamaged] if the disk rejects writes. The other errors are those of [Repairs.Mount].
func (r *Repairs) FinishInterrupted(ctx context.Context, dev device.Device, volumeID uuid.UUID, options Options) error {
	interrupted, err := device.InterruptedWork(dev)
	if err != nil || interrupted == device.NoWork {
		return err
	}
	if _, err := device.ReadExtState(dev); err != nil {
		return nil // no ext is behind the marker any more
	}
	if options.ReadOnlyDisk {
		whole, err := device.ExtChecksumValid(dev)
		if err != nil || whole && interrupted == device.Checking {
			return err // it can be read like one that was not unmounted
		}
		return fmt.Errorf(
			"%w: %s: %s its filesystem was interrupted, and the disk is read-only: publish the volume writable once", ErrDamaged,
			dev, interrupted)
	}
	return r.do(ctx, dev, volumeID, func(ctx context.Context) error {
		r.log.Info("repairing a filesystem after an interruption", "volume_id", volumeID.String(), "device", dev.String(),
			"interrupted", interrupted)
		if interrupted == device.Checking {
			if err := device.RepairExtChecksum(dev); err != nil {
				return err
			}
			return r.preen(ctx, dev, volumeID, "-f")
		}
		return r.finishGrowth(ctx, dev)
	})
}

// finishGrowth puts a filesystem in order whose growth did not end well. e2fsck may answer all questions with yes:
// before the growth, the filesystem was clean.
func (r *Repairs) finishGrowth(ctx context.Context, dev device.Device) error {
	if err := replayJournal(ctx, dev); err != nil {
		return err
	}
	if err := r.e2fsck(ctx, dev, "-f", "-y"); err != nil {
		return err
	}
	return device.RemoveWorkMarker(dev)
}

// needsGrowth reports whether a filesystem is so much smaller than its disk that it must grow, for example because the
// volume was made from the snapshot of a smaller one. It reads the superblock, which costs one read. mount-utils would
// start two programs at each stage.
func needsGrowth(dev device.Device, fsType string) (bool, error) {
	sizeBytes, err := device.FilesystemBytes(dev, fsType)
	if err != nil || sizeBytes == 0 {
		return false, err
	}
	if sizeBytes > dev.SizeBytes {
		return false, fmt.Errorf(
			"%w: %s has %d bytes, but its %s needs %d: the disk is an incomplete copy: create the volume again with at least this size",
			ErrDamaged,
			dev,
			dev.SizeBytes,
			fsType,
			sizeBytes,
		)
	}
	return dev.SizeBytes-sizeBytes >= minGrowthBytes, nil
}

func (r *Repairs) grow(ctx context.Context, dev device.Device, program string, args ...string) error {
	result, err := r.run(ctx, program, args...)
	if err != nil {
		return fmt.Errorf("growing the filesystem on %s: %w", dev, err)
	}
	if result.ExitCode != 0 {
		return fmt.Errorf("%w on %s: %s: exit code %d: %s", ErrGrow, dev, program, result.ExitCode, result.Message())
	}
	return nil
}

func isExt(fsType string) bool { return strings.HasPrefix(fsType, "ext") }

// reportsDamage reports whether mount(8) says that the kernel found damage in the filesystem: EUCLEAN or EBADMSG.
// Versions of mount(8) word these errors differently.
func reportsDamage(result hostexec.Result) bool {
	return slices.ContainsFunc(
		[]string{"Structure needs cleaning", "Bad message", "probably corrupted filesystem"},
		func(message string) bool {
			return strings.Contains(result.Stderr, message)
		},
	)
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package mount

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
	"github.com/oxidecomputer/oxide-csi-plugin/core/hostexec"
)

// minGrowthBytes is the smallest unused part of a disk for which the filesystem is grown. Disk sizes are whole GiB
// (docs/reference/rack.md §2). A filesystem leaves less than one of its groups unused, which has at most 128 MiB (ext).
const minGrowthBytes = 128 << 20

// repairTimeout bounds a check or a growth. They are not cancelled with the caller: interrupting e2fsck or resize2fs is
// unsafe.
const repairTimeout = 4 * time.Hour

// checkSlot lets one check run at a time, because a check needs memory in proportion to the size of its disk.
var checkSlot = make(chan struct{}, 1)

// GrowUnmounted grows an ext filesystem to the size of the disk with this UUID, and reports whether it grew. resize2fs
// requires a check first. Growing a mounted ext needs a capability that containers rarely have. Growing an unmounted
// ext is not safe against interruption, so a marker is on the disk meanwhile, see [device.WriteGrowthMarker]. Other
// filesystems grow in [GrowMounted]. A filesystem of any type that is larger than its disk is [ErrDamaged].
func GrowUnmounted(ctx context.Context, dev device.Device, fsType string, diskID uuid.UUID) (grown bool, err error) {
	if !isExt(fsType) {
		_, err := needsGrowth(dev, fsType)
		return false, err
	}
	// This comes first, because even the superblock is unreliable after an interrupted growth.
	interrupted, err := device.HasGrowthMarker(dev, diskID)
	if err == nil && interrupted {
		err = runE2fsck(ctx, dev, "-f", "-y")
	}
	if err != nil {
		return false, err
	}
	needed, err := needsGrowth(dev, fsType)
	if err != nil || !needed && !interrupted {
		return false, err
	}
	if needed {
		if err := growExt(ctx, dev, diskID, interrupted); err != nil {
			return false, err
		}
	}
	return true, device.RemoveGrowthMarker(dev, diskID)
}

// growExt checks the filesystem, writes the marker and grows the filesystem. The caller removes the marker.
func growExt(ctx context.Context, dev device.Device, diskID uuid.UUID, checked bool) error {
	if !checked {
		if err := runE2fsck(ctx, dev, "-f", "-p"); err != nil {
			return err
		}
	}
	if err := device.WriteGrowthMarker(dev, diskID); err != nil {
		return fmt.Errorf("%w on %s: %w", ErrGrow, dev, err)
	}
	return runGrow(ctx, dev, "resize2fs", dev.Path)
}

// GrowMounted grows the xfs or btrfs that is mounted at path to the size of its disk, and reports whether it grew. The
// superblock of a mounted xfs on the disk may be old. Then a filesystem that has just grown is grown again, without
// effect.
func GrowMounted(ctx context.Context, dev device.Device, path, fsType string) (grown bool, err error) {
	if needed, err := needsGrowth(dev, fsType); err != nil || !needed {
		return false, err
	}
	before, err := Stats(path)
	if err != nil {
		return false, err
	}
	switch fsType {
	case "xfs":
		err = runGrow(ctx, dev, "xfs_growfs", "-d", path)
	case "btrfs":
		err = runGrow(ctx, dev, "btrfs", "filesystem", "resize", "max", path)
	}
	if err != nil {
		return false, err
	}
	after, err := Stats(path)
	return after.TotalBytes > before.TotalBytes, err
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

func runGrow(ctx context.Context, dev device.Device, program string, args ...string) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), repairTimeout)
	defer cancel()
	result, err := hostexec.Run(ctx, program, args...)
	if err != nil {
		return fmt.Errorf("%w on %s: %w", ErrGrow, dev, err)
	}
	if result.ExitCode != 0 {
		return fmt.Errorf("%w on %s: %s: exit code %d: %s", ErrGrow, dev, program, result.ExitCode, result.Message())
	}
	return nil
}

// Exit codes of e2fsck: up to e2fsckFixed, the filesystem is clean now. With the bit e2fsckErrorsLeft, it is not.
const (
	e2fsckFixed      = 3
	e2fsckErrorsLeft = 4
)

// runE2fsck repairs an unmounted ext filesystem with e2fsck: with -p as far as that loses no data, with -y in any case.
// It returns [ErrDamaged] if errors remain. It waits while another check runs.
func runE2fsck(ctx context.Context, dev device.Device, flags ...string) error {
	select {
	case checkSlot <- struct{}{}:
		defer func() { <-checkSlot }()
	case <-ctx.Done():
		return fmt.Errorf("check of %s: the check of another disk is still running: %w", dev, ctx.Err())
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), repairTimeout)
	defer cancel()
	result, err := hostexec.Run(ctx, "e2fsck", append(flags, dev.Path)...)
	if err != nil {
		return fmt.Errorf("check of %s: %w", dev, err)
	}
	switch code := result.ExitCode; {
	case 0 <= code && code <= e2fsckFixed:
		return nil
	case code > 0 && code&e2fsckErrorsLeft != 0:
		return fmt.Errorf(
			"%w: e2fsck on %s: exit code %d: %s: restore a snapshot, or run e2fsck by hand on the node",
			ErrDamaged,
			dev,
			code,
			result.Message(),
		)
	}
	// e2fsck was killed or found the disk in use: the state of the filesystem is unknown.
	return fmt.Errorf("%w: e2fsck on %s: exit code %d: %s", ErrMount, dev, result.ExitCode, result.Message())
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

// checkAndRepair checks a filesystem that the kernel has refused to mount. Only ext has a check that repairs nothing
// but certain errors. The checks of other filesystems may lose data, so an operator decides about them.
func checkAndRepair(ctx context.Context, dev device.Device, fsType string, cause error) error {
	byHand := map[string]string{"xfs": "xfs_repair", "btrfs": "btrfs check"}
	if !isExt(fsType) {
		return fmt.Errorf("%w: restore a snapshot, or check the disk with %s on the node", cause, byHand[fsType])
	}
	if err := runE2fsck(ctx, dev, "-p"); err != nil {
		return fmt.Errorf("%w; %w", cause, err)
	}
	return nil
}

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

// minGrowthBytes is how much of a disk lies idle before its filesystem is grown. Disks come in whole GiB (docs/reference/rack.md §2), and
// what a filesystem leaves because it does not fill another of its groups is less than the 128 MiB of a group of ext.
const minGrowthBytes = 128 << 20

// repairTimeout bounds checking and growing, which run on when their caller has gone: to stop either in its middle helps nobody.
const repairTimeout = 4 * time.Hour

// checkSlot lets one check run at a time: each takes memory by the size of its disk.
var checkSlot = make(chan struct{}, 1)

// GrowUnmounted makes an ext filesystem fill the disk with this UUID, and reports whether it had to. resize2fs wants it
// checked first. Growing ext while it is mounted would need a capability that containers rarely have; unmounted it is not
// safe from being interrupted, so that a marker stands on the disk meanwhile, see [device.WriteGrowthMarker]. Others grow in
// [GrowMounted]. A filesystem of any kind that is larger than its disk is [ErrDamaged].
func GrowUnmounted(ctx context.Context, dev device.Device, fsType string, diskID uuid.UUID) (grown bool, err error) {
	if !isExt(fsType) {
		_, err := needsGrowth(dev, fsType)
		return false, err
	}
	// First of all: of a filesystem whose growth was interrupted not even the superblock is to be believed.
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

// growExt grows the filesystem between the marker's coming and going.
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

// GrowMounted makes an xfs or btrfs that is mounted at path fill its disk, and reports whether it became larger. Of a
// mounted xfs the superblock on the disk lags behind, so that one just grown may be asked to grow again, to no effect.
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

// needsGrowth reports whether a filesystem is so much smaller than its disk that it has to be grown, as after a volume was
// made from a smaller one's snapshot. The superblock says so, which costs one read; mount-utils' way would
// start two programs at each stage.
func needsGrowth(dev device.Device, fsType string) (bool, error) {
	sizeBytes, err := device.FilesystemBytes(dev, fsType)
	if err != nil || sizeBytes == 0 {
		return false, err
	}
	if sizeBytes > dev.SizeBytes {
		return false, fmt.Errorf(
			"%w: %s has %d bytes, and its %s takes %d: the disk is an incomplete copy of another one",
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

// Exit codes of e2fsck: up to mended all is well now; with left among its bits, something is not.
const (
	e2fsckFixed      = 3
	e2fsckErrorsLeft = 4
)

// runE2fsck has e2fsck put an ext filesystem that is not mounted in order: with -p so far as that loses nothing, with -y in any
// case. What is not in order afterwards is [ErrDamaged]. It waits while another check runs.
func runE2fsck(ctx context.Context, dev device.Device, flags ...string) error {
	select {
	case checkSlot <- struct{}{}:
		defer func() { <-checkSlot }()
	case <-ctx.Done():
		return fmt.Errorf("check of %s: another disk's check is still under way: %w", dev, ctx.Err())
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
			"%w: e2fsck on %s: exit code %d: %s: nothing is mounted; restore a snapshot, or run e2fsck by hand on the node",
			ErrDamaged,
			dev,
			code,
			result.Message(),
		)
	}
	// It was killed, or found the disk in use: nothing is known of what is on it.
	return fmt.Errorf("%w: e2fsck on %s: exit code %d: %s", ErrMount, dev, result.ExitCode, result.Message())
}

func isExt(fsType string) bool { return strings.HasPrefix(fsType, "ext") }

// reportsDamage reports whether mount(8) says that the kernel found the filesystem itself in disorder: EUCLEAN or EBADMSG, of which
// its versions make different sentences.
func reportsDamage(result hostexec.Result) bool {
	return slices.ContainsFunc(
		[]string{"Structure needs cleaning", "Bad message", "probably corrupted filesystem"},
		func(said string) bool {
			return strings.Contains(result.Stderr, said)
		},
	)
}

// checkAndRepair has a filesystem checked that the kernel has refused to mount. Only ext has a check that mends nothing but what is
// certain; those of others may throw data away, and wait for an operator.
func checkAndRepair(ctx context.Context, dev device.Device, fsType string, cause error) error {
	byHand := map[string]string{"xfs": "xfs_repair", "btrfs": "btrfs check"}
	if !isExt(fsType) {
		return fmt.Errorf("%w: restore a snapshot, or look at the disk with %s on the node", cause, byHand[fsType])
	}
	if err := runE2fsck(ctx, dev, "-p"); err != nil {
		return fmt.Errorf("%w; %w", cause, err)
	}
	return nil
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller

import (
	"fmt"
	"math"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

const (
	// gib is the unit of disk sizes: a rack makes only disks of whole GiB (docs/reference/rack.md §2).
	gib int64 = 1 << 30
	// defaultSizeBytes is the size of a volume without a requested size.
	defaultSizeBytes = 10 * gib
)

// chooseSize returns the size of a new disk in bytes: required_bytes rounded up to whole GiB, but not less than the
// source (0 for none) and not more than limit_bytes. It does not check the rack's maximum, which differs between
// releases and disk types: the rack rejects larger disks.
func chooseSize(capacity *csi.CapacityRange, sourceBytes int64) (int64, error) {
	requiredBytes, limitBytes := capacity.GetRequiredBytes(), capacity.GetLimitBytes()
	if sourceBytes > 0 && limitBytes != 0 && limitBytes < sourceBytes {
		return 0, rpc.OutOfRange(
			"capacity_range: the request allows %dGiB at most, and the volume_content_source has %dGiB: a copy is never smaller",
			limitBytes/gib,
			sourceBytes/gib,
		)
	}
	if sourceBytes >= requiredBytes && sourceBytes > 0 {
		return sourceBytes, nil
	}
	if requiredBytes == 0 {
		if limitBytes == 0 {
			return defaultSizeBytes, nil
		}
		size := min(defaultSizeBytes, limitBytes/gib*gib)
		if size == 0 {
			return 0, rpc.OutOfRange("capacity_range: limit_bytes %d is less than 1 GiB, the smallest disk", limitBytes)
		}
		return size, nil
	}
	if requiredBytes > math.MaxInt64-gib {
		return 0, rpc.OutOfRange("capacity_range: required_bytes %d is larger than any disk", requiredBytes)
	}
	size := (requiredBytes + gib - 1) / gib * gib
	if limitBytes != 0 && size > limitBytes {
		return 0, rpc.OutOfRange(
			"capacity_range: a disk has whole GiB: %d bytes, which is required_bytes %d rounded up, is more than limit_bytes %d",
			size,
			requiredBytes,
			limitBytes,
		)
	}
	return size, nil
}

// sizeInRange reports whether a size is in the requested range.
func sizeInRange(sizeBytes int64, capacity *csi.CapacityRange) bool {
	limitBytes := capacity.GetLimitBytes()
	return sizeBytes >= capacity.GetRequiredBytes() && (limitBytes == 0 || sizeBytes <= limitBytes)
}

// rangeText is a requested size for an error, in GiB.
func rangeText(capacity *csi.CapacityRange) string {
	least, most := (capacity.GetRequiredBytes()+gib-1)/gib, capacity.GetLimitBytes()/gib
	switch {
	case most == 0:
		return fmt.Sprintf("%dGiB or more", least)
	case least == 0:
		return fmt.Sprintf("%dGiB or less", most)
	case least == most:
		return fmt.Sprintf("%dGiB", least)
	}
	return fmt.Sprintf("%dGiB to %dGiB", least, most)
}

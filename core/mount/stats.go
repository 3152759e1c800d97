// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package mount

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// Usage is how full a filesystem is.
type Usage struct {
	// AvailableBytes is what programs of users other than root can still write.
	TotalBytes, UsedBytes, AvailableBytes int64
	// TotalInodes, UsedInodes and AvailableInodes count files and folders. All are 0 if there is no limit, as for
	// btrfs.
	TotalInodes, UsedInodes, AvailableInodes int64
}

// Stats returns how full the filesystem mounted at path is. The kernel answers from memory, also after the disk has
// left the guest.
func Stats(path string) (Usage, error) {
	var stat unix.Statfs_t
	if err := unix.Statfs(path, &stat); err != nil {
		return Usage{}, fmt.Errorf("statfs %s: %w", path, err)
	}
	// The unit is the fragment if the filesystem has fragments, otherwise the block, as in df.
	unit := stat.Frsize
	if unit == 0 {
		unit = stat.Bsize
	}
	return Usage{
		TotalBytes:      int64(stat.Blocks) * unit,
		UsedBytes:       max(int64(stat.Blocks-stat.Bfree), 0) * unit,
		AvailableBytes:  int64(stat.Bavail) * unit,
		TotalInodes:     int64(stat.Files),
		UsedInodes:      max(int64(stat.Files-stat.Ffree), 0),
		AvailableInodes: int64(stat.Ffree),
	}, nil
}

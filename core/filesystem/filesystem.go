// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package filesystem has the rules for supported filesystems: their types, and the options of mkfs and mount that a
// user may give. Controller and node both apply them. The package does not touch disks.
package filesystem

import (
	"slices"

	"github.com/oxidecomputer/oxide-csi-plugin/core/fault"
)

var (
	// ErrOption means that mkfs options or mount flags contain one that is not allowed.
	ErrOption = fault.OptionNotAllowed.New("option is not allowed")
	// ErrUnsupported means that a filesystem type is not one of [Types].
	ErrUnsupported = fault.FilesystemUnsupported.New("filesystem is not supported")
)

// Types lists the supported filesystem types, the default first.
func Types() []string { return []string{"ext4", "ext3", "xfs", "btrfs"} }

// Supported reports whether this plugin makes and mounts filesystems of a type. An empty type means the default.
func Supported(fsType string) bool {
	return fsType == "" || slices.Contains(Types(), fsType)
}

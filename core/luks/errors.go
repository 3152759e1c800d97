// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package luks

import (
	"github.com/oxidecomputer/oxide-csi-plugin/core/fault"
)

// The errors of this package.
var (
	// ErrPassphrase means that no key slot of the header has the passphrase. Nothing was changed.
	ErrPassphrase = fault.WrongPassphrase.New("wrong passphrase")
	// ErrHeader means that cryptsetup cannot read the header.
	ErrHeader = fault.HeaderDamaged.New("LUKS2 header cannot be read")
	// ErrNoDeviceMapper means that the kernel has no device-mapper, or no dm-crypt.
	ErrNoDeviceMapper = fault.EncryptionUnavailable.New("the kernel cannot open encrypted disks")
	// ErrBusy means that something uses the mapping.
	ErrBusy = fault.MappingInUse.New("mapping is in use")
	// ErrMemory means that the derivation of a key needs more memory than there is.
	ErrMemory = fault.EncryptionUnavailable.New("not enough memory to derive the key")
	// ErrCryptsetup is every other failure of cryptsetup.
	ErrCryptsetup = fault.CryptsetupFailed.New("cryptsetup failed")
)

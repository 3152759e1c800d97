// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package device

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
)

// ExtState is what the superblock of an ext3 or ext4 says about the filesystem's condition.
type ExtState struct {
	// Unclean is the reason why the filesystem must be checked before a writable mount. It is empty if the filesystem has a
	// journal and was unmounted without errors.
	Unclean string
	// Journal says that the filesystem has a journal.
	Journal bool
	// PanicsOnError says that an error in the filesystem makes the kernel panic, unless a mount option says otherwise.
	PanicsOnError bool
}

// ReadExtState reads the superblock of an ext3 or ext4 from the disk. It returns [ErrUnreadable] if there is none.
func ReadExtState(dev Device) (state ExtState, err error) {
	err = dev.withFile(func(file *os.File) error {
		super, err := extSuper(file)
		if err != nil {
			return err
		}
		state, err = parseExtState(super)
		return err
	})
	if err != nil {
		return ExtState{}, fmt.Errorf("%w: superblock of %s: %w", ErrUnreadable, dev, err)
	}
	return state, nil
}

// parseExtState reads s_magic, s_state, s_errors, s_feature_compat and s_feature_incompat of struct ext4_super_block.
func parseExtState(super []byte) (state ExtState, err error) {
	const (
		magic         = 0xef53
		valid         = 0x1 // EXT4_VALID_FS
		errorFlag     = 0x2 // EXT4_ERROR_FS
		orphans       = 0x4 // EXT4_ORPHAN_FS
		onErrorPanic  = 3   // EXT4_ERRORS_PANIC
		hasJournal    = 0x4 // EXT4_FEATURE_COMPAT_HAS_JOURNAL
		needsRecovery = 0x4 // EXT4_FEATURE_INCOMPAT_RECOVER
	)
	if binary.LittleEndian.Uint16(super[0x38:]) != magic {
		return ExtState{}, errors.New("not a superblock of ext")
	}
	flags := binary.LittleEndian.Uint16(super[0x3a:])
	state.PanicsOnError = binary.LittleEndian.Uint16(super[0x3c:]) == onErrorPanic
	state.Journal = binary.LittleEndian.Uint32(super[0x5c:])&hasJournal != 0
	switch {
	case flags&errorFlag != 0:
		state.Unclean = "it has errors"
	case flags&valid == 0 || flags&orphans != 0:
		state.Unclean = "it was not unmounted"
	case binary.LittleEndian.Uint32(super[0x60:])&needsRecovery != 0:
		state.Unclean = "it has a journal to replay"
	case !state.Journal:
		state.Unclean = "it has no journal"
	}
	return state, nil
}

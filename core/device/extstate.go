// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package device

import (
	"encoding/binary"
	"errors"
	"hash/crc32"
	"os"

	"golang.org/x/sys/unix"
)

// ExtState is what the superblock of an ext3 or ext4 says about the filesystem's condition.
type ExtState struct {
	// Unclean is the reason why the filesystem must be checked before a writable mount. It is empty if the filesystem has
	// a journal and was unmounted without errors.
	Unclean string
	// Journal says that the filesystem has a journal. Replay says that the journal has something to replay, and FastCommit
	// that it may have fast commits.
	Journal, Replay, FastCommit bool
	// Bigalloc says that the filesystem has the feature bigalloc, which resize2fs does not grow while it is unmounted.
	Bigalloc bool
	// UnmarkedGrowth says that it has sparse_super2 without flex_bg: while it is unmounted, resize2fs 1.47 grows it, and
	// leaves a block of its own marked as free, which a file may get.
	UnmarkedGrowth bool
	// PanicsOnError says that an error in the filesystem makes the kernel panic, unless a mount option says otherwise.
	PanicsOnError bool
}

// ReadExtState reads the superblock of an ext3 or ext4 from the disk. It returns [ErrUnreadable] if there is none.
func ReadExtState(dev Device) (state ExtState, err error) {
	err = dev.withSuper("ext4", func(_ *os.File, _ format, super []byte) error {
		state, err = parseExtState(super)
		return err
	})
	return state, err
}

// parseExtState reads s_magic, s_state, s_errors and the three fields of features of struct ext4_super_block.
func parseExtState(super []byte) (state ExtState, err error) {
	const (
		magic         = 0xef53
		valid         = 0x1   // EXT4_VALID_FS
		errorFlag     = 0x2   // EXT4_ERROR_FS
		orphans       = 0x4   // EXT4_ORPHAN_FS
		onErrorPanic  = 3     // EXT4_ERRORS_PANIC
		hasJournal    = 0x4   // EXT4_FEATURE_COMPAT_HAS_JOURNAL
		fastCommit    = 0x400 // EXT4_FEATURE_COMPAT_FAST_COMMIT
		needsRecovery = 0x4   // EXT4_FEATURE_INCOMPAT_RECOVER
		sparseSuper2  = 0x200 // EXT4_FEATURE_COMPAT_SPARSE_SUPER2
		flexBG        = 0x200 // EXT4_FEATURE_INCOMPAT_FLEX_BG
		bigalloc      = 0x200 // EXT4_FEATURE_RO_COMPAT_BIGALLOC
	)
	if binary.LittleEndian.Uint16(super[0x38:]) != magic {
		return ExtState{}, errors.New("not a superblock of ext")
	}
	flags := binary.LittleEndian.Uint16(super[0x3a:])
	state.PanicsOnError = binary.LittleEndian.Uint16(super[0x3c:]) == onErrorPanic
	compatible := binary.LittleEndian.Uint32(super[0x5c:])
	state.Journal = compatible&hasJournal != 0
	state.FastCommit = compatible&fastCommit != 0
	state.Replay = state.Journal && binary.LittleEndian.Uint32(super[0x60:])&needsRecovery != 0
	readOnlyCompatible := binary.LittleEndian.Uint32(super[0x64:])
	state.Bigalloc = readOnlyCompatible&bigalloc != 0
	state.UnmarkedGrowth = compatible&sparseSuper2 != 0 && binary.LittleEndian.Uint32(super[0x60:])&flexBG == 0
	switch {
	case flags&errorFlag != 0:
		state.Unclean = "it has errors"
	case flags&valid == 0 || flags&orphans != 0:
		state.Unclean = "it was not unmounted"
	case state.Replay:
		state.Unclean = "it has a journal to replay"
	case !state.Journal:
		state.Unclean = "it has no journal"
	}
	return state, nil
}

// ExtChecksumValid reports whether the superblock of an ext3 or ext4 has the right checksum, or has none by its
// features.
func ExtChecksumValid(dev Device) (valid bool, err error) {
	err = dev.withSuper("ext4", func(_ *os.File, _ format, super []byte) error {
		stored, right := extChecksum(super)
		valid = stored == right
		return nil
	})
	return valid && err == nil, err
}

// RepairExtChecksum writes the right checksum into a superblock of ext3 or ext4. The superblock must have been whole
// before an e2fsck that was killed. e2fsck writes each changed piece by itself and the checksum last, so each piece is
// old or new. A full check makes the pieces agree, but e2fsck -p refuses a superblock with a wrong checksum.
func RepairExtChecksum(dev Device) error {
	file, err := dev.Open(unix.O_RDWR | unix.O_EXCL)
	if err != nil {
		return err
	}
	super, err := ext.read(file)
	if err == nil {
		if stored, right := extChecksum(super); stored != right {
			_, err = file.WriteAt(binary.LittleEndian.AppendUint32(nil, right), 1024+extChecksumOffset)
			err = errors.Join(err, file.Sync())
		}
	}
	return errors.Join(err, closeExclusive(file))
}

// extChecksumOffset is the place of s_checksum in struct ext4_super_block.
const extChecksumOffset = 0x3fc

// extChecksum returns s_checksum and its right value: the CRC-32C of what is before it, without the usual inversion at
// the end. Without the feature RO_COMPAT_METADATA_CSUM, s_checksum means nothing, and both are equal.
func extChecksum(super []byte) (stored, right uint32) {
	const metadataChecksums = 0x400 // in s_feature_ro_compat
	stored = binary.LittleEndian.Uint32(super[extChecksumOffset:])
	if binary.LittleEndian.Uint32(super[0x64:])&metadataChecksums == 0 {
		return stored, stored
	}
	return stored, ^crc32.Checksum(super[:extChecksumOffset], crc32.MakeTable(crc32.Castagnoli))
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// content is the data on a volume. The zero value means zeros.
type content struct {
	// seed is that of a pattern.
	seed uint64
	// end is the size of the disk when the pattern was written, in bytes. Behind it there are zeros.
	end int64
}

// offsets are the offsets of a pattern's blocks, in bytes. Between them there are zeros. The last block was at the end
// of the disk when the pattern was written. The others fit on the smallest volume.
func (c content) offsets() []int64 {
	return []int64{0, 1 << 20, 513 << 20, gib - blockBytes, max(gib, c.end) - blockBytes}
}

// untouched is an offset where no pattern has a block.
const untouched = int64(100 << 20)

const blockBytes = 4096

// block returns the block at one of the offsets. Two places are one where the disk has the smallest size.
func (c content) block(place int) []byte {
	block := make([]byte, blockBytes)
	if c.seed == 0 {
		return block
	}
	if c.end == gib {
		place = min(place, len(c.offsets())-2)
	}
	pattern := rand.NewChaCha8(
		[32]byte{
			byte(place),
			byte(c.seed),
			byte(c.seed >> 8),
			byte(c.seed >> 16),
			byte(c.seed >> 24),
			byte(c.seed >> 32),
			byte(c.seed >> 40),
			byte(c.seed >> 48),
			byte(c.seed >> 56),
		},
	)
	if _, err := pattern.Read(block); err != nil {
		panic(err) // Read never fails
	}
	return block
}

// write writes a pattern to the disk with this name in an instance's guest. It returns after the data is on the disk.
func (w *world) write(node simtest.Instance, diskName string, seed uint64) (c content, err error) {
	err = w.withDevice(node, diskName, os.O_RDWR, func(device *os.File) error {
		end, err := device.Seek(0, io.SeekEnd)
		if err != nil {
			return err
		}
		c = content{seed, end}
		for place, offset := range c.offsets() {
			if _, err := device.WriteAt(c.block(place), offset); err != nil {
				return err
			}
		}
		return device.Sync()
	})
	return c, err
}

// compare compares the disk with this name in an instance's guest with the wanted content.
func (w *world) compare(node simtest.Instance, diskName string, want content) error {
	return w.withDevice(node, diskName, os.O_RDONLY, func(device *os.File) error {
		check := func(offset int64, want []byte) error {
			got := make([]byte, blockBytes)
			if _, err := device.ReadAt(got, offset); err != nil {
				return err
			}
			if !bytes.Equal(got, want) {
				return fmt.Errorf("%w at %d: %x… instead of %x…", errData, offset, got[:8], want[:8])
			}
			return nil
		}
		for place, offset := range want.offsets() {
			if err := check(offset, want.block(place)); err != nil {
				return err
			}
		}
		end, err := device.Seek(0, io.SeekEnd)
		if err != nil {
			return err
		}
		if end > max(gib, want.end) { // the volume has grown since
			if err := check(end-blockBytes, make([]byte, blockBytes)); err != nil {
				return err
			}
		}
		return check(untouched, make([]byte, blockBytes))
	})
}

// errData means that a disk has unexpected data.
var errData = errors.New("unexpected data")

// errGuestOff means that the guest is off.
var errGuestOff = errors.New("the guest is off")

// withDevice opens the disk with this name in a guest. The rack is not killed while the disk is open.
func (w *world) withDevice(node simtest.Instance, diskName string, flags int, use func(*os.File) error) (err error) {
	w.disks.RLock()
	defer w.disks.RUnlock()
	if w.guestsOff[node.ID] {
		return errGuestOff
	}
	names, err := devices(node, diskName)
	if err != nil {
		return err
	}
	if len(names) != 1 {
		return fmt.Errorf("the guest of %s has %d disks of the serial %q", node.Name, len(names), diskName)
	}
	device, err := os.OpenFile(filepath.Join(node.Guest, "dev", names[0]), flags|os.O_SYNC, 0)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, device.Close()) }()
	return use(device)
}

// devices returns the names of a guest's block devices with this serial.
func devices(node simtest.Instance, diskName string) (names []string, err error) {
	serials, err := filepath.Glob(filepath.Join(node.Guest, "sys/block/*/device/serial"))
	if err != nil {
		return nil, err
	}
	for _, path := range serials {
		serial, err := os.ReadFile(path)
		if errors.Is(err, os.ErrNotExist) {
			continue // another disk, which is being unplugged now
		}
		if err != nil {
			return nil, err
		}
		if strings.TrimSpace(string(serial)) == diskName {
			names = append(names, filepath.Base(filepath.Dir(filepath.Dir(path))))
		}
	}
	return names, nil
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package main

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// content is what is on a volume: 0 are zeros, anything else is the seed of a pattern.
type content uint64

// places are the offsets that a pattern is written to, in bytes; between them there are zeros. The smallest volume has them
// all.
var places = []int64{0, 1 << 20, 513 << 20, gib - blockBytes}

// untouched is an offset that nothing is written to.
const untouched = int64(100 << 20)

const blockBytes = 4096

// block is what a pattern has at one of its places.
func (c content) block(place int) []byte {
	block := make([]byte, blockBytes)
	if c == 0 {
		return block
	}
	pattern := rand.NewChaCha8(
		[32]byte{
			byte(place),
			byte(c),
			byte(c >> 8),
			byte(c >> 16),
			byte(c >> 24),
			byte(c >> 32),
			byte(c >> 40),
			byte(c >> 48),
			byte(c >> 56),
		},
	)
	if _, err := pattern.Read(block); err != nil {
		panic(err) // it never fails
	}
	return block
}

// write puts content on the disk that has this name in the guest of an instance. When it returns nil, all of it is on the
// disk.
func (w *world) write(node simtest.Instance, diskName string, c content) error {
	return w.withDevice(node, diskName, os.O_RDWR, func(device *os.File) error {
		for place, offset := range places {
			if _, err := device.WriteAt(c.block(place), offset); err != nil {
				return err
			}
		}
		return device.Sync()
	})
}

// compare reads the disk that has this name in the guest of an instance.
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
		for place, offset := range places {
			if err := check(offset, want.block(place)); err != nil {
				return err
			}
		}
		return check(untouched, make([]byte, blockBytes))
	})
}

// errData says that a disk does not hold what it should.
var errData = errors.New("other data")

// errOut says that the guest is off.
var errOut = errors.New("the guest is off")

// withDevice opens the one disk of this name in a guest. No rack is killed while it is open.
func (w *world) withDevice(node simtest.Instance, diskName string, flags int, use func(*os.File) error) (err error) {
	w.disks.RLock()
	defer w.disks.RUnlock()
	if w.out[node.ID] {
		return errOut
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

// devices are the names of a guest's block devices with this serial.
func devices(node simtest.Instance, diskName string) (names []string, err error) {
	serials, err := filepath.Glob(filepath.Join(node.Guest, "sys/block/*/device/serial"))
	if err != nil {
		return nil, err
	}
	for _, path := range serials {
		serial, err := os.ReadFile(path)
		if errors.Is(err, os.ErrNotExist) {
			continue // another disk, which is being unplugged
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

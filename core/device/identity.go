// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package device

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// BootID returns the kernel's ID of this boot of the guest.
var BootID = sync.OnceValues(func() (string, error) {
	content, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("read the kernel's boot ID: %w", err)
	}
	return strings.TrimSpace(string(content)), nil
})

// Sequence returns the kernel's sequence number of the disk. Unlike a device number, it is never used again while the
// guest runs. It is 0 before Linux 5.15.
func (d Device) Sequence() (sequence uint64, err error) {
	err = d.withFile(func(file *os.File) error {
		sequence, err = sequenceOf(file)
		return err
	})
	return sequence, err
}

// HasLeft reports whether an error of a method of [Device] says that the disk has left the guest, or that another disk
// has its name now.
func HasLeft(err error) bool {
	return errors.Is(err, ErrMismatch) || errors.Is(err, os.ErrNotExist) ||
		errors.Is(err, unix.ENXIO) || errors.Is(err, unix.ENODEV)
}

// CheckUnusedSince is [Device.CheckUnused] for the disk with this sequence number. It returns [ErrMismatch] if another
// disk has the device number now. A sequence number of 0 is not compared: the kernel has none before Linux 5.15.
func (d Device) CheckUnusedSince(sequence uint64) error {
	d.sequence = cmp.Or(sequence, d.sequence)
	return d.CheckUnused()
}

// BySerial returns the disk that has this serial now. If several have it, it returns the one with the device number.
// It returns [ErrNotFound] if no disk has the serial.
func (r Roots) BySerial(serial string, number Number) (Device, error) {
	disks, err := r.disksWith("device/serial", serial)
	if err != nil {
		return Device{}, err
	}
	same := slices.DeleteFunc(disks, func(d Disk) bool { return d.Serial != serial || !r.onPCI(d) })
	if len(same) == 0 {
		return Device{}, fmt.Errorf("%w: serial %q", ErrNotFound, serial)
	}
	i := max(0, slices.IndexFunc(same, func(d Disk) bool { return d.Number == number }))
	return Device{Disk: same[i], Path: r.dev(same[i].Name)}, nil
}

// Holders returns the kernel's names of the devices that are built on the disk, such as dm-0 for LVM, and md0.
func (r Roots) Holders(disk Disk) []string {
	entries, err := os.ReadDir(r.sys("block", disk.Name, "holders"))
	if err != nil {
		return nil // the folder only improves an error's text
	}
	names := make([]string, 0, len(entries))
	for _, entry := range entries {
		name := entry.Name()
		// The device mapper has a name that people know, such as that of an LVM volume.
		if text, err := r.attribute(name, "dm/name"); err == nil && text != "" {
			name += " (" + text + ")"
		}
		names = append(names, name)
	}
	return names
}

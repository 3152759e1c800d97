// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package device finds the block device of a disk inside the guest, and proves that a disk is blank before anybody may
// format it. It knows sysfs, device nodes and bytes; mounting is package mount's.
//
// # Which device is it
//
// A rack shows each disk as an NVMe controller of its own whose serial is the first 20 bytes of the disk's name
// (docs/reference/rack.md §9). That serial is the only link between the rack's view and the guest's: kernel names (nvme1n1) and
// device numbers move when disks come and go, so neither is ever stored. [Roots.WaitForDisk] looks the serial up each time, in
// /sys/block and not in /sys/class/nvme, where a controller stands before it knows its serial.
//
// Find fails closed. Exactly one disk must have the serial, of exactly the expected size, with a device node of exactly
// the kernel's device number, and it must not be a disk that the guest itself lives on. What cannot be told is which PCI
// slot is the boot disk's: a disk made later may take slot 0 once the boot disk was changed, so the slot proves nothing.
//
// # May it be formatted
//
// [ProveBlank] reads the disk and returns a [Blank], which no other code can make. Formatting takes a Blank.
//
// The package is for Linux.
package device

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// The errors of this package, wrapped with the disk and what was found.
var (
	// ErrNotFound says that no disk has the serial, or not yet.
	ErrNotFound = errors.New("disk not found in this guest")
	// ErrAmbiguous says that more than one disk has the serial, or that one may have it which the kernel does not show.
	ErrAmbiguous = errors.New("disk cannot be told from another one")
	// ErrMismatch says that the device is not what the rack or sysfs says it is: another size, another device number.
	ErrMismatch = errors.New("device does not match the disk")
	// ErrInUse says that something holds the device: the guest's own system, a mount, another program.
	ErrInUse = errors.New("device is in use")
	// ErrNotBlank says that a disk was not proved blank, whether because of what it holds or because it cannot be read.
	ErrNotBlank = errors.New("refusing to format")
	// ErrUnreadable says that the device's content cannot be determined.
	ErrUnreadable = errors.New("cannot read the device")
)

// Number is a device number as the kernel counts: major and minor.
type Number struct {
	Major, Minor uint32
}

func (n Number) String() string { return fmt.Sprintf("%d:%d", n.Major, n.Minor) }

// Roots are where the guest's device nodes and sysfs are. The zero value means /dev and /sys.
type Roots struct {
	Dev, Sys string
}

func (r Roots) dev(name string) string {
	if r.Dev == "" {
		r.Dev = "/dev"
	}
	return filepath.Join(r.Dev, name)
}

func (r Roots) sys(elem ...string) string {
	if r.Sys == "" {
		r.Sys = "/sys"
	}
	return filepath.Join(append([]string{r.Sys}, elem...)...)
}

// Disk is an NVMe disk as sysfs shows it.
type Disk struct {
	// Name is the kernel's, such as "nvme1n1". It changes from boot to boot.
	Name string
	// Serial has no padding.
	Serial string
	Number Number
	// SizeBytes is 0 while the disk is still coming up.
	SizeBytes int64
	// Partitions are the device numbers of the partitions the kernel found, by name.
	Partitions map[string]Number
}

// namespaceName matches whole NVMe disks: no partition (nvme0n1p1), no path below a multipath disk (nvme0c0n1).
var namespaceName = regexp.MustCompile(`^nvme[0-9]+n[0-9]+$`)

// IsDiskName reports whether name is what the kernel calls a whole NVMe disk.
func IsDiskName(name string) bool { return namespaceName.MatchString(name) }

// Disks lists the NVMe disks of the guest, boot disk included, sorted by kernel name. Disks that come or go meanwhile may
// be missing.
func (r Roots) Disks() ([]Disk, error) {
	entries, err := os.ReadDir(r.sys("block"))
	if err != nil {
		return nil, fmt.Errorf("list block devices: %w", err)
	}
	var disks []Disk
	for _, entry := range entries {
		if !namespaceName.MatchString(entry.Name()) {
			continue
		}
		disk, err := r.disk(entry.Name())
		if errors.Is(err, fs.ErrNotExist) {
			continue // it went away while we looked, or is not whole yet
		}
		if err != nil {
			return nil, err
		}
		if disk.Name != "" {
			disks = append(disks, disk)
		}
	}
	return disks, nil
}

// ByNumber returns the disk that has this device number now; [ErrNotFound] when none has it, as after a disk was taken
// out while it was mounted.
func (r Roots) ByNumber(n Number) (Device, error) {
	disks, err := r.Disks()
	if err != nil {
		return Device{}, err
	}
	i := slices.IndexFunc(disks, func(d Disk) bool { return d.Number == n })
	if i < 0 {
		return Device{}, fmt.Errorf("%w: device number %s", ErrNotFound, n)
	}
	return Device{Disk: disks[i], Path: r.dev(disks[i].Name)}, nil
}

// disk reads one entry of /sys/block; a hidden one comes back without a name.
func (r Roots) disk(name string) (Disk, error) {
	if hidden, err := r.attribute(name, "hidden"); err == nil && hidden == "1" {
		return Disk{}, nil
	}
	serial, err := r.attribute(name, "device/serial")
	if err != nil {
		return Disk{}, err
	}
	number, err := r.number(name)
	if err != nil {
		return Disk{}, err
	}
	size, err := r.attribute(name, "size")
	if err != nil {
		return Disk{}, err
	}
	sectors, err := strconv.ParseInt(size, 10, 64)
	if err != nil || sectors < 0 || sectors > 1<<53 {
		return Disk{}, fmt.Errorf("%w: sysfs gives %s a size of %q", ErrMismatch, name, size)
	}
	partitions, err := r.partitions(name)
	if err != nil {
		return Disk{}, err
	}
	const sectorBytes = 512 // of this file, whatever the disk's block size
	return Disk{Name: name, Serial: serial, Number: number, SizeBytes: sectors * sectorBytes, Partitions: partitions}, nil
}

func (r Roots) partitions(name string) (map[string]Number, error) {
	entries, err := os.ReadDir(r.sys("block", name))
	if err != nil {
		return nil, err
	}
	partitions := map[string]Number{}
	for _, entry := range entries {
		if !strings.HasPrefix(entry.Name(), name+"p") {
			continue
		}
		number, err := r.number(name + "/" + entry.Name())
		if err != nil {
			return nil, err
		}
		partitions[entry.Name()] = number
	}
	return partitions, nil
}

// attribute reads a sysfs file. Serials may be padded with spaces, as the NVMe standard asks, or with zero bytes, as a
// rack does (docs/reference/rack.md §9).
func (r Roots) attribute(name, file string) (string, error) {
	content, err := os.ReadFile(r.sys("block", name, file))
	return strings.Trim(string(content), "\x00 \n"), err
}

func (r Roots) number(name string) (Number, error) {
	text, err := r.attribute(name, "dev")
	if err != nil {
		return Number{}, err
	}
	major, minor, _ := strings.Cut(text, ":")
	major64, err := strconv.ParseUint(major, 10, 32)
	if err != nil {
		return Number{}, fmt.Errorf("%w: sysfs gives %s the device number %q", ErrMismatch, name, text)
	}
	minor64, err := strconv.ParseUint(minor, 10, 32)
	if err != nil {
		return Number{}, fmt.Errorf("%w: sysfs gives %s the device number %q", ErrMismatch, name, text)
	}
	return Number{uint32(major64), uint32(minor64)}, nil
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

// Package device finds the block device of a disk inside the guest, and proves that a disk is blank before the plugin
// formats it. It knows sysfs, device nodes and bytes. Package mount mounts.
//
// # Which device is it
//
// A rack shows each disk as a separate NVMe controller. The controller's serial is the first 20 bytes of the disk's
// name (docs/reference/rack.md §9). The serial is the only link between the rack's view and the guest's. Kernel names
// (nvme1n1) and device numbers change when disks come and go, so neither is stored. [Roots.WaitForDisk] looks the
// serial up each time. It reads /sys/block, not /sys/class/nvme, which shows a controller before its serial is known.
//
// WaitForDisk fails closed. Exactly one disk must have the serial. The disk must have the expected size and a device
// node with the kernel's device number. The guest's own system must not be on the disk. The PCI slot proves nothing:
// after a change of the boot disk, a disk that was made later may have slot 0.
//
// # May it be formatted
//
// [ProveBlank] reads the disk and returns a [Blank], which no other code can make. Formatting takes a Blank.
package device

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Number is a device number of the kernel.
type Number struct {
	Major, Minor uint32
}

func (n Number) String() string { return fmt.Sprintf("%d:%d", n.Major, n.Minor) }

// Roots are the folders of the guest's device nodes and sysfs. The zero value means /dev and /sys.
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
	// Name is the kernel's name, such as "nvme1n1". It changes from boot to boot.
	Name string
	// Serial is the NVMe serial without padding.
	Serial string
	Number Number
	// SizeBytes is 0 while the disk is not ready yet.
	SizeBytes int64
	// Partitions are the device numbers of the disk's partitions, by the kernel's name.
	Partitions map[string]Number
}

// Numbers returns the device numbers of the disk and of its partitions. A volume that is used as raw block can have
// partitions, and the kernel lets a program write to them while the disk is free.
func (d Disk) Numbers() []Number { return append(slices.Collect(maps.Values(d.Partitions)), d.Number) }

// namespaceName matches whole NVMe disks, not partitions (nvme0n1p1) and not the paths of a multipath disk (nvme0c0n1).
var namespaceName = regexp.MustCompile(`^nvme[0-9]+n[0-9]+$`)

// IsDiskName reports whether name is a kernel name of a whole NVMe disk.
func IsDiskName(name string) bool { return namespaceName.MatchString(name) }

// Disks lists the NVMe disks on the guest's PCI bus, including the boot disk, sorted by kernel name. Each of them has a
// slot of the instance. Disks that are attached or detached during the call may be missing.
func (r Roots) Disks() ([]Disk, error) {
	disks, err := r.allDisks()
	return slices.DeleteFunc(disks, func(d Disk) bool { return !r.onPCI(d) }), err
}

// onPCI reports whether a disk is on the guest's PCI bus. Others are reached over a network (nvme-tcp). Under
// multipath, which Linux may use for each disk, the paths decide. A disk whose transport sysfs does not show counts as
// on the bus.
func (r Roots) onPCI(d Disk) bool {
	transport, err := r.attribute(d.Name, "device/transport")
	if err == nil {
		return transport == transportPCI
	}
	paths, err := filepath.Glob(r.sys("block", d.Name, "device", "nvme*", "transport"))
	if err != nil || len(paths) == 0 {
		return true
	}
	return slices.ContainsFunc(paths, func(path string) bool {
		content, err := readAttribute(path)
		return err == nil && strings.TrimSpace(string(content)) == transportPCI
	})
}

// transportPCI is the kernel's name of the PCI bus as a way to an NVMe disk.
const transportPCI = "pcie"

// allDisks lists the NVMe disks of the guest, also those that are reached over a network.
func (r Roots) allDisks() ([]Disk, error) { return r.disksWith("", "") }

// disksWith is allDisks of the disks that have this value in a file of sysfs. It reads nothing else of the others.
func (r Roots) disksWith(file, value string) ([]Disk, error) {
	entries, err := os.ReadDir(r.sys("block"))
	if err != nil {
		return nil, fmt.Errorf("list block devices: %w", err)
	}
	var disks []Disk
	for _, entry := range entries {
		if !namespaceName.MatchString(entry.Name()) {
			continue
		}
		found := value
		if file != "" {
			found, err = r.attribute(entry.Name(), file)
		}
		var disk Disk
		if err == nil && found == value {
			disk, err = r.disk(entry.Name())
		}
		if isGone(err) {
			continue // the disk left the guest during this call, or sysfs does not show all of it yet
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

// isGone reports whether sysfs answered that a device has gone, or just goes: then the kernel answers EINVAL for the
// attributes of a mapping, and ENODEV for those of a disk.
func isGone(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENODEV)
}

// ByNumber returns the disk that has this device number now. It returns [ErrNotFound] if no disk has it, for example
// because the disk was detached while it was mounted.
func (r Roots) ByNumber(n Number) (Device, error) {
	disks, err := r.disksWith("dev", n.String()) // a mounted disk that is not on the PCI bus has not left
	if err != nil {
		return Device{}, err
	}
	i := slices.IndexFunc(disks, func(d Disk) bool { return d.Number == n })
	if i < 0 {
		return Device{}, fmt.Errorf("%w: device number %s", ErrNotFound, n)
	}
	return Device{Disk: disks[i], Path: r.dev(disks[i].Name)}, nil
}

// disk reads one entry of /sys/block. A hidden disk is returned without a name.
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
	const sectorBytes = 512 // the file's unit, for every block size of a disk
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

// attribute reads a file of sysfs. Serials are padded with spaces (the NVMe standard) or with zero bytes (a rack,
// docs/reference/rack.md §9).
func (r Roots) attribute(name, file string) (string, error) {
	content, err := readAttribute(r.sys("block", name, file))
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

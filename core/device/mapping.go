// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package device

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/google/uuid"
)

// TypeLUKS is blkid's name of an encrypted disk, see [Content.Type].
const TypeLUKS = "crypto_LUKS"

// LabelUnformatted is the label of a LUKS2 header behind which nothing was ever written, except by an interrupted mkfs.
// It is permanent. What a fresh mapping shows is noise, so only this label can prove that it is blank.
const LabelUnformatted = "unformatted"

// LUKSHeader returns UUID and label of the LUKS2 header of the device. If both copies are damaged, it is what the first
// one says. The UUID is empty if there is none. It is for a first look: package luks has cryptsetup read the headers.
func (d Device) LUKSHeader() (headerUUID, label string, err error) {
	copies, err := ReadLUKSCopies(d)
	head := copies.copies[copies.good()]
	if head == nil {
		head = copies.looks
	}
	if err != nil || head == nil {
		return "", "", err
	}
	text := func(field []byte) string {
		before, _, _ := bytes.Cut(field, []byte{0})
		return string(before)
	}
	return text(head[luksUUIDAt : luksUUIDAt+40]), text(head[luksLabelAt : luksLabelAt+48]), nil
}

// mappingPrefix is the beginning of the names of this plugin's mappings. It is permanent: a mapping can be older than
// the plugin's process.
const mappingPrefix = "oxide-csi-"

// MappingName returns the name of the device-mapper device through which a volume's encrypted disk is used. A disk that
// comes back has another attachment, see [Roots.Attachment], while something may still have the mapping of its former
// one open.
func MappingName(volume uuid.UUID, attachment string) string {
	return MappingPrefix(volume) + attachment
}

// Attachment returns a number that a disk has from its attachment until it leaves the guest, and no other disk has: the
// kernel's sequence number. Linux before 5.15 has none. There it is the inode of the disk's folder in sysfs, which the
// kernel counts upwards.
func (r Roots) Attachment(kernelName string) (string, error) {
	sequence, err := r.attribute(kernelName, "diskseq")
	if err == nil {
		return sequence, nil
	}
	info, err := os.Stat(r.sys("block", kernelName))
	if err != nil {
		return "", err
	}
	return strconv.FormatUint(info.Sys().(*syscall.Stat_t).Ino, 10), nil
}

// MappingPrefix returns the beginning of the names of a volume's mappings.
func MappingPrefix(volume uuid.UUID) string { return mappingPrefix + volume.String() + "-" }

// Mapping is a mapping of a volume's encrypted disk.
type Mapping struct {
	// Device is the device with the clear data. It has the serial of its disk, if the disk is in the guest.
	Device
	// Below is the number of its disk, or zero if the disk has left the guest.
	Below Number
	// DMName is device-mapper's name of the mapping. DMUUID is its identifier, which contains the UUID of the LUKS header.
	DMName, DMUUID string
}

// Unfinished reports whether the mapping cannot be used yet: the program that was opening the disk was killed.
func (m Mapping) Unfinished() bool { return m.SizeBytes == 0 }

// Mapping returns the open mapping of a volume on a disk of this guest, or false if there is none.
func (r Roots) Mapping(volume uuid.UUID) (Mapping, bool, error) {
	all, err := r.MappingsOf(volume)
	i := slices.IndexFunc(all, func(m Mapping) bool { return m.Below != (Number{}) && !m.Unfinished() })
	if err != nil || i < 0 {
		return Mapping{}, false, err
	}
	m := all[i]
	below, err := r.ByNumber(m.Below)
	if errors.Is(err, ErrNotFound) {
		return Mapping{}, false, nil // it has just left
	}
	m.Serial = below.Serial
	return m, err == nil, err
}

// MappingsOf returns all mappings of a volume: also one that is unfinished,
// and those of disks that have left the guest.
func (r Roots) MappingsOf(volume uuid.UUID) ([]Mapping, error) {
	all, err := r.mappings()
	return slices.DeleteFunc(all, func(m Mapping) bool { return !strings.HasPrefix(m.DMName, MappingPrefix(volume)) }), err
}

// mappings returns all mappings of this plugin, as sysfs shows them.
func (r Roots) mappings() (all []Mapping, err error) {
	folders, err := filepath.Glob(r.sys("block", "dm-*"))
	if err != nil {
		return nil, err
	}
	for _, folder := range folders {
		m, err := r.mapping(filepath.Base(folder))
		if isGone(err) {
			continue // closed during this call
		}
		if err != nil {
			return nil, err
		}
		if strings.HasPrefix(m.DMName, mappingPrefix) {
			all = append(all, m)
		}
	}
	return all, nil
}

func (r Roots) mapping(kernelName string) (m Mapping, err error) {
	if m.DMName, err = r.attribute(kernelName, "dm/name"); err != nil || !strings.HasPrefix(m.DMName, mappingPrefix) {
		return m, err
	}
	if m.DMUUID, err = r.attribute(kernelName, "dm/uuid"); err != nil {
		return m, err
	}
	if m.Number, err = r.number(kernelName); err != nil {
		return m, err
	}
	size, err := r.attribute(kernelName, "size")
	if err != nil {
		return m, err
	}
	sectors, err := strconv.ParseInt(size, 10, 64)
	if err != nil {
		return m, fmt.Errorf("%w: sysfs gives %s a size of %q", ErrMismatch, kernelName, size)
	}
	m.Name, m.Path, m.SizeBytes = kernelName, r.dev(kernelName), sectors*512
	// The entry of a disk that has left the guest may lead nowhere, or to another disk that has its name now.
	slaves, _ := filepath.Glob(r.sys("block", kernelName, "slaves", "*"))
	if len(slaves) == 1 {
		below := kernelName + "/slaves/" + filepath.Base(slaves[0])
		number, err := r.number(below)
		attachment, gone := r.Attachment(below)
		if err == nil && gone == nil && strings.HasSuffix(m.DMName, "-"+attachment) {
			m.Below = number
		}
	}
	return m, nil
}

// DiskBelow returns the number of the disk below one of this plugin's mappings.
// It returns every other number unchanged.
func DiskBelow(n Number) Number {
	if n.Major == 0 {
		return n // a filesystem without a device
	}
	r := Roots{}
	link, err := os.Readlink(r.sys("dev", "block", n.String()))
	if err != nil || !isMappingDevice(filepath.Base(link)) {
		return n
	}
	m, err := r.mapping(filepath.Base(link))
	if err != nil || !strings.HasPrefix(m.DMName, mappingPrefix) || m.Below == (Number{}) {
		return n
	}
	return m.Below
}

func isMappingDevice(kernelName string) bool { return strings.HasPrefix(kernelName, "dm-") }

// IsMappingName reports whether a kernel name or a name in /dev/mapper is that of one of this plugin's mappings.
func IsMappingName(name string) bool {
	if isMappingDevice(name) {
		name, _ = Roots{}.attribute(name, "dm/name") // a mapping that is gone has no name
	}
	return strings.HasPrefix(name, mappingPrefix)
}

// WithMappings adds to the numbers of disks those of this plugin's mappings that are open on them.
func WithMappings(numbers []Number) []Number {
	all, err := Roots{}.mappings()
	if err != nil {
		return numbers
	}
	added := slices.Clone(numbers)
	for _, m := range all {
		if slices.Contains(numbers, m.Below) && !slices.Contains(added, m.Number) {
			added = append(added, m.Number)
		}
	}
	return added
}

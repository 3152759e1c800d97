// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package mount

import (
	"fmt"
	"path"
	"slices"
	"strings"

	"github.com/moby/sys/mountinfo"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
	"github.com/oxidecomputer/oxide-csi-plugin/core/filesystem"
)

// Entry is one mount of this mount namespace.
type Entry struct {
	// Path is the mount point.
	Path string
	// Root is the part of the filesystem that is mounted: "/", a folder, or a single file.
	Root string
	// FSType is the kernel's name of the filesystem's type. Source is the device from which it was mounted.
	FSType, Source string
	// Number is the device number of the filesystem's disk: for an encrypted volume that of the disk below its mapping.
	// For a bound device node, it is that of the filesystem which contains the node; see [Entry.Device].
	Number device.Number
	// ReadOnly says that the mount or the whole filesystem is read-only.
	ReadOnly bool
	// SELinuxContext is the value of the filesystem's option context=, or "".
	SELinuxContext string
	// FilesystemReadOnly says that the whole filesystem is read-only, at each of its mounts.
	FilesystemReadOnly bool
	// TurnedReadOnly says that the filesystem was mounted writable and has become read-only, as after an error.
	TurnedReadOnly bool
	// ShutDown says that the filesystem has shut itself down. Only some filesystems show it (ext4 since Linux 6.15).
	ShutDown bool

	id, parent int
	// peerGroup is the kernel's number of the mount's peer group, among which new mounts propagate, or "".
	peerGroup string
	// options are the options of the mount and of its filesystem, in the kernel's form.
	options []string
}

// Table is the mount table at one moment, in the kernel's order.
type Table []Entry

// ReadTable reads the mount table.
func ReadTable() (Table, error) {
	mounts, err := mountinfo.GetMounts(nil)
	if err != nil {
		return nil, fmt.Errorf("read the mount table: %w", err)
	}
	table := make(Table, 0, len(mounts))
	for _, m := range mounts {
		table = append(table, entryOf(m))
	}
	return table, nil
}

func entryOf(m *mountinfo.Info) Entry {
	number := device.Number{Major: uint32(m.Major), Minor: uint32(m.Minor)}
	if m.FSType == "btrfs" {
		number = btrfsNumber(m.Source, number)
	}
	number = device.DiskBelow(number)
	options, superOptions := strings.Split(m.Options, ","), strings.Split(m.VFSOptions, ",")
	readOnly, emergency := slices.Contains(superOptions, "ro"), slices.Contains(superOptions, "emergency_ro")
	return Entry{
		Path:               m.Mountpoint,
		Root:               m.Root,
		FSType:             m.FSType,
		Source:             m.Source,
		Number:             number,
		ReadOnly:           slices.Contains(options, "ro") || readOnly || emergency,
		SELinuxContext:     seLinuxContextOf(superOptions),
		FilesystemReadOnly: readOnly || emergency,
		TurnedReadOnly:     !slices.Contains(options, "ro") && readOnly || emergency,
		ShutDown:           slices.Contains(superOptions, "shutdown"),
		id:                 m.ID,
		parent:             m.Parent,
		peerGroup:          peerGroupOf(m.Optional),
		options:            slices.Concat(options, superOptions),
	}
}

// btrfsNumber returns the device number of a btrfs' disk. The mount table shows a number that belongs to no device,
// because a btrfs may be on several disks. The disk keeps its name while the btrfs is mounted, even after the disk has
// left the guest. Then no node has this name, and btrfsNumber returns the number of the mount table.
func btrfsNumber(source string, own device.Number) device.Number {
	if number, ok := device.NodeNumber(source); ok {
		return number
	}
	return own
}

// At returns the mount at path, or the uppermost of several. The path comes from [Resolve].
func (t Table) At(path string) (Entry, bool) {
	mounts := t.AllAt(path)
	if len(mounts) == 0 {
		return Entry{}, false
	}
	return mounts[0], true
}

// AllAt returns all mounts at path, the uppermost first.
func (t Table) AllAt(path string) []Entry {
	below := slices.DeleteFunc(slices.Clone(t), func(entry Entry) bool { return entry.Path != path })
	var mounts []Entry
	for len(below) > 0 {
		top := slices.IndexFunc(below, func(entry Entry) bool {
			return !slices.ContainsFunc(
				below,
				func(above Entry) bool { return above.parent == entry.id && above.id != entry.id },
			)
		})
		if top < 0 {
			return mounts // the table changed while it was read
		}
		mounts = append(mounts, below[top])
		below = slices.Delete(below, top, top+1)
	}
	return mounts
}

// SameMount reports whether the two entries are the same mount, shown at two paths. That happens if a parent folder is
// bound to another path with shared propagation, for example /var/lib/kubelet from a larger disk. Unmounting one of
// them unmounts the other.
func (t Table) SameMount(a, b Entry) bool {
	if a.id == b.id {
		return true
	}
	inA, onA, okA := t.location(a)
	inB, onB, okB := t.location(b)
	return okA && okB && inA == inB && onA == onB && a.Number == b.Number && a.Root == b.Root
}

// location returns the peer group of an entry's parent mount, and the entry's folder in the parent's filesystem.
func (t Table) location(entry Entry) (group, folder string, ok bool) {
	i := slices.IndexFunc(t, func(other Entry) bool { return other.id == entry.parent })
	if i < 0 || t[i].peerGroup == "" {
		return "", "", false
	}
	return t[i].peerGroup, path.Join(t[i].Root, strings.TrimPrefix(entry.Path, t[i].Path)), true
}

// OfDevice returns every mount that uses the device: mounts of its filesystem, or of a part of it, and bound device
// nodes.
func (t Table) OfDevice(n device.Number) []Entry {
	var uses []Entry
	n = device.DiskBelow(n)
	for _, entry := range t {
		if number, ok := entry.Device(); ok && number == n {
			uses = append(uses, entry)
		}
	}
	return uses
}

// deleted is the end of a mount's root if the file or folder was removed from its filesystem.
const deleted = "//deleted"

// Block reports whether the mount is a bound device node of an NVMe disk, or of an encrypted volume's mapping.
func (e Entry) Block() bool {
	name := path.Base(strings.TrimSuffix(e.Root, deleted))
	return device.IsDiskName(name) || e.FSType == "devtmpfs" && device.IsMappingName(name)
}

// Device returns the number of the disk to which the mount gives access: the filesystem's disk, or the disk of a bound
// device node. For an encrypted volume it is the disk below its mapping. It returns false if the bound node cannot be
// read, or is not a device node.
func (e Entry) Device() (device.Number, bool) {
	if !e.Block() {
		return e.Number, true
	}
	number, ok := device.NodeNumber(e.Path)
	return device.DiskBelow(number), ok
}

// NodeRemoved reports whether a bound device node was removed from /dev, because its disk has left the guest.
func (e Entry) NodeRemoved() bool { return strings.HasSuffix(e.Root, deleted) }

// CountMissing counts the mount flags that the mount does not show. It was mounted with other flags, or the kernel does
// not show these.
func (e Entry) CountMissing(flags []string) int {
	missing := 0
	for _, option := range filesystem.SplitMountFlags(flags) {
		if option != "defaults" && !slices.Contains(e.options, option) {
			missing++
		}
	}
	return missing
}

func (e Entry) String() string {
	return fmt.Sprintf("%s of %s (device %s)", e.FSType, e.Source, e.Number)
}

// seLinuxContextOf returns the value of context= in mount options, or "". The kernel quotes a value that contains a
// comma.
func seLinuxContextOf(options []string) string {
	for i, option := range options {
		value, ok := strings.CutPrefix(option, "context=")
		if !ok {
			continue
		}
		for strings.HasPrefix(value, `"`) && !strings.HasSuffix(value, `"`) && i+1 < len(options) {
			i++
			value += "," + options[i]
		}
		return strings.Trim(value, `"`)
	}
	return ""
}

// peerGroupOf returns the peer group in the optional fields of a mount, or "".
func peerGroupOf(optional string) string {
	for field := range strings.FieldsSeq(optional) {
		if group, ok := strings.CutPrefix(field, "shared:"); ok {
			return group
		}
	}
	return ""
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package mount

import (
	"fmt"
	"path"
	"regexp"
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
	mounts, err := device.Mounts()
	if err != nil {
		return nil, err
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

// At returns the mount at path, or the uppermost of several. The path comes from [Resolve]. Only mounts to which the
// path leads count. [Table.Covered] returns the others.
func (t Table) At(path string) (Entry, bool) {
	mounts := t.AllAt(path)
	if len(mounts) == 0 {
		return Entry{}, false
	}
	return mounts[0], true
}

// AllAt returns all mounts at path, the uppermost first, as [Table.At] counts them.
func (t Table) AllAt(path string) []Entry {
	var mounts []Entry
	for _, entry := range t.walk(path) {
		if entry.Path == path {
			mounts = append(mounts, entry)
		}
	}
	slices.Reverse(mounts)
	return mounts
}

// Covered returns the mounts at path to which the path does not lead, because another mount covers one of the folders
// above them. It also returns that mount. Another view of a mount to which the path leads does not count: the kernel
// unmounts both together.
func (t Table) Covered(path string) (mounts []Entry, by Entry) {
	walked := t.walk(path)
	for _, entry := range t {
		reached := slices.ContainsFunc(walked, func(w Entry) bool { return w.Path == path && t.SameMount(w, entry) })
		if entry.Path == path && !reached {
			mounts = append(mounts, entry)
		}
	}
	if len(walked) > 0 {
		by = walked[len(walked)-1]
	}
	return mounts, by
}

// walk returns the mounts that the kernel enters on its way to path, the last one last.
func (t Table) walk(path string) []Entry {
	var walked []Entry
	enter := func(folder string) {
		for {
			next := slices.IndexFunc(t, func(entry Entry) bool {
				if len(walked) > 0 {
					return entry.Path == folder && entry.parent == walked[len(walked)-1].id && entry.id != entry.parent
				}
				// The parent of the root is in no table.
				return entry.Path == folder && !slices.ContainsFunc(t, func(e Entry) bool {
					return e.id == entry.parent && e.id != entry.id
				})
			})
			if next < 0 {
				return
			}
			walked = append(walked, t[next])
			if folder == "/" {
				return // each lookup begins here, below what is mounted over the root later
			}
		}
	}
	enter("/")
	for i := 1; i <= len(path); i++ {
		if i == len(path) && i > 1 || i < len(path) && path[i] == '/' {
			enter(path[:i])
		}
	}
	return walked
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

// CheckNothingInside returns [ErrBusy] with the path if something is mounted in a folder of a mount, for example by a
// container with bidirectional propagation. The kernel does not unmount entry while it is there.
func (t Table) CheckNothingInside(entry Entry) error {
	for _, inside := range t {
		if inside.parent == entry.id && inside.id != entry.id {
			return fmt.Errorf("%w: %s is mounted inside it, at %s: unmount that first", ErrBusy, inside, inside.Path)
		}
	}
	return nil
}

// deleted is the end of a mount's root if the file or folder was removed from its filesystem.
const deleted = "//deleted"

// removedMapping is the root of a mount of a mapping that was closed: nothing but the name is left to know it by.
var removedMapping = regexp.MustCompile(`^/dm-[0-9]+` + deleted + `$`)

// Block reports whether the mount is a bound device node of an NVMe disk, or of an encrypted volume's mapping.
func (e Entry) Block() bool {
	name := path.Base(strings.TrimSuffix(e.Root, deleted))
	return device.IsDiskName(name) ||
		e.FSType == "devtmpfs" && (device.IsMappingName(name) || removedMapping.MatchString(e.Root))
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

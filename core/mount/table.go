// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package mount

import (
	"fmt"
	"path"
	"slices"
	"strings"

	"github.com/moby/sys/mountinfo"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
)

// Entry is one mount of this mount namespace.
type Entry struct {
	// Path is where it is mounted.
	Path string
	// Root is the part of the filesystem that shows there: "/", a folder, or a single file.
	Root string
	// FSType is the kernel's name of the filesystem, Source what it was mounted from.
	FSType, Source string
	// Number is the device number of the filesystem. A bound device node has the number of the filesystem that the node
	// lies on; see [Entry.Device].
	Number device.Number
	// ReadOnly says that the mount or the whole filesystem is read-only.
	ReadOnly bool
	// SELinuxContext is the filesystem's option context=, empty when it has none.
	SELinuxContext string
	// TurnedReadOnly says that the filesystem has become read-only by itself, as it does after an error: nobody asked for it
	// when it was mounted.
	TurnedReadOnly bool
	// ShutDown says that the filesystem has ended all input and output. Only some filesystems tell (ext4 from Linux 6.15 on).
	ShutDown bool

	id, parent int
	// peerGroup is the kernel's number of the group of mounts among which new mounts propagate, empty where they do not.
	peerGroup string
	// options are those of the mount and of its filesystem, as the kernel shows them.
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
		number := device.Number{Major: uint32(m.Major), Minor: uint32(m.Minor)}
		if m.FSType == "btrfs" {
			number = btrfsNumber(m.Source, number)
		}
		options, superOptions := strings.Split(m.Options, ","), strings.Split(m.VFSOptions, ",")
		readOnly, emergency := slices.Contains(superOptions, "ro"), slices.Contains(superOptions, "emergency_ro")
		table = append(table, Entry{
			Path: m.Mountpoint, Root: m.Root, FSType: m.FSType, Source: m.Source,
			Number:         number,
			ReadOnly:       slices.Contains(options, "ro") || readOnly || emergency,
			SELinuxContext: seLinuxContextOf(superOptions),
			TurnedReadOnly: !slices.Contains(options, "ro") && readOnly || emergency,
			ShutDown:       slices.Contains(superOptions, "shutdown"),
			id:             m.ID, parent: m.Parent, peerGroup: peerGroupOf(m.Optional), options: slices.Concat(options, superOptions),
		})
	}
	return table, nil
}

// btrfsNumber is the number of the disk that a btrfs is on. The kernel shows a number of the filesystem's own, which belongs
// to no device, since it may be on several. Its disk keeps its name as long as it is mounted, even after it has left the
// guest; then no node has that name, and the filesystem's own number says as much.
func btrfsNumber(source string, own device.Number) device.Number {
	if number, ok := device.NodeNumber(source); ok {
		return number
	}
	return own
}

// At returns the mount at path, the uppermost where several are stacked. The path is a resolved one, see [Resolve].
func (t Table) At(path string) (Entry, bool) {
	mounts := t.AllAt(path)
	if len(mounts) == 0 {
		return Entry{}, false
	}
	return mounts[0], true
}

// AllAt returns the mounts at path, the uppermost first. Each lies over the next.
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
			return mounts // the table was read while it changed
		}
		mounts = append(mounts, below[top])
		below = slices.Delete(below, top, top+1)
	}
	return mounts
}

// SameMount reports whether the two entries are one mount that shows twice. It does when a folder that leads to it shows
// twice and passes on what is mounted in it, as where /var/lib/kubelet is a bind mount from a larger disk. Who unmounts
// one unmounts the other.
func (t Table) SameMount(a, b Entry) bool {
	if a.id == b.id {
		return true
	}
	inA, onA, okA := t.location(a)
	inB, onB, okB := t.location(b)
	return okA && okB && inA == inB && onA == onB && a.Number == b.Number && a.Root == b.Root
}

// location is where an entry is mounted: the group of mounts that its parent belongs to, and the folder in their filesystem.
func (t Table) location(entry Entry) (group, folder string, ok bool) {
	i := slices.IndexFunc(t, func(other Entry) bool { return other.id == entry.parent })
	if i < 0 || t[i].peerGroup == "" {
		return "", "", false
	}
	return t[i].peerGroup, path.Join(t[i].Root, strings.TrimPrefix(entry.Path, t[i].Path)), true
}

// OfDevice returns every mount that keeps the device in use: mounts of the filesystem on it, or of a part of it, and bound
// nodes of the device itself.
func (t Table) OfDevice(n device.Number) []Entry {
	var uses []Entry
	for _, entry := range t {
		if number, ok := entry.Device(); ok && number == n {
			uses = append(uses, entry)
		}
	}
	return uses
}

// deleted ends the root of a mount whose file or folder was removed from its filesystem.
const deleted = "//deleted"

// Block reports whether the mount is a bound device node of an NVMe disk.
func (e Entry) Block() bool {
	return device.IsDiskName(path.Base(strings.TrimSuffix(e.Root, deleted)))
}

// Device returns the number of the device that the mount gives access to: the one that its filesystem is on or, of a
// bound device node, the node's own. False when a bound node cannot be looked at, or is none after all.
func (e Entry) Device() (device.Number, bool) {
	if !e.Block() {
		return e.Number, true
	}
	return device.NodeNumber(e.Path)
}

// NodeRemoved reports whether a bound device node is no longer in /dev: its disk has left the guest since.
func (e Entry) NodeRemoved() bool { return strings.HasSuffix(e.Root, deleted) }

// CountMissing counts the mount flags that the mount does not show. It may have been mounted with other ones, or the kernel may
// not show them.
func (e Entry) CountMissing(flags []string) int {
	lacks := 0
	for _, option := range splitFlags(flags) {
		if option != "defaults" && !slices.Contains(e.options, option) {
			lacks++
		}
	}
	return lacks
}

func (e Entry) String() string {
	return fmt.Sprintf("%s of %s (device %s)", e.FSType, e.Source, e.Number)
}

// seLinuxContextOf finds context= among mount options. The kernel puts its value in quotes where it holds a comma.
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

// peerGroupOf finds the group of peers among the optional fields of a mount.
func peerGroupOf(optional string) string {
	for field := range strings.FieldsSeq(optional) {
		if group, ok := strings.CutPrefix(field, "shared:"); ok {
			return group
		}
	}
	return ""
}

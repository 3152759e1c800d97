// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package mount

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
	"github.com/oxidecomputer/oxide-csi-plugin/core/filesystem"
	"github.com/oxidecomputer/oxide-csi-plugin/core/statefile"
	"github.com/oxidecomputer/oxide-csi-plugin/test/pages"
)

func TestTableAt(t *testing.T) {
	// /a carries two mounts, and /a/b one whose parent is the lower of them.
	table := Table{
		{Path: "/", id: 9, parent: 1, FSType: "btrfs"}, // no path leads to a mount over the root
		{Path: "/", id: 1, parent: 1},
		{Path: "/a", id: 20, parent: 1, FSType: "ext4"},
		{Path: "/a/b", id: 25, parent: 20, FSType: "xfs"},
		{Path: "/a", id: 3, parent: 20, FSType: "tmpfs"},
	}
	if entry, ok := table.At("/a"); !ok || entry.FSType != "tmpfs" {
		t.Errorf("at /a is %v, %t; want the upper mount", entry, ok)
	}
	if entry, ok := table.At("/a/b"); ok {
		t.Errorf("at /a/b is %v, to which the path does not lead", entry)
	}
	covered, by := table.Covered("/a/b")
	if len(covered) != 1 || covered[0].FSType != "xfs" || by.FSType != "tmpfs" {
		t.Errorf("covered at /a/b are %v, by %v", covered, by)
	}
	if covered, _ := table.Covered("/a"); covered != nil {
		t.Errorf("covered at /a are %v, which the path leads through", covered)
	}
	if entry, ok := table.At("/a/"); ok {
		t.Errorf("at a path that is not resolved is %v", entry)
	}
}

func TestEntryBlock(t *testing.T) {
	for root, want := range map[string]bool{
		"/nvme1n1": true, "/nvme1n1//deleted": true, "/tmp/guest/dev/nvme12n1": true,
		"/": false, "/nvme1": false, "/nvme1n1p1": false, "/data/nvme1n1/sub": false,
	} {
		if got := (Entry{Root: root}).Block(); got != want {
			t.Errorf("root %s: block %t, want %t", root, got, want)
		}
	}
	for fsType, want := range map[string]bool{"devtmpfs": true, "ext4": false} {
		if got := (Entry{Root: "/dm-999999//deleted", FSType: fsType}).Block(); got != want {
			t.Errorf("the node of a mapping that was closed, of a %s: block %t, want %t", fsType, got, want)
		}
	}
}

// A message of mount(8) is passed on without the values of mount flags, and stays readable.
func TestWithoutFlagValues(t *testing.T) {
	for _, tc := range []struct {
		message string
		flags   []string
		want    string
	}{
		{"wrong fs type, bad option on /dev/nvme4n1 (ext4)", []string{"noatime,commit=4"}, "wrong fs type, bad option on /dev/nvme4n1 (ext4)"},
		{"bad option commit=4; value 4 of ext4", []string{"commit=4"}, "bad option commit=…; value … of ext4"},
		{`context="a:b:c1,c2" is invalid: a:b:c1,c2`, []string{`context="a:b:c1,c2"`, "ro"}, "context=… is invalid: …"},
	} {
		if got := withoutFlagValues(tc.message, tc.flags); got != tc.want {
			t.Errorf("%q: %q, want %q", tc.flags, got, tc.want)
		}
	}
}

func TestSELinuxContextOf(t *testing.T) {
	for _, tc := range []struct {
		options []string
		want    string
	}{
		{nil, ""},
		{[]string{"rw", "seclabel"}, ""},
		{[]string{"rw", "context=system_u:object_r:svirt_sandbox_file_t:s0:c1"}, "system_u:object_r:svirt_sandbox_file_t:s0:c1"},
		{[]string{"rw", `context="system_u:object_r:x:s0:c1`, `c2"`, "discard"}, "system_u:object_r:x:s0:c1,c2"},
	} {
		if got := seLinuxContextOf(tc.options); got != tc.want {
			t.Errorf("%q: %q, want %q", tc.options, got, tc.want)
		}
	}
}

func TestMkfsArguments(t *testing.T) {
	const uuid = "12345678-1234-5234-8234-123456789abc"
	for _, tc := range []struct {
		name string
		want NewFilesystem
		args []string
	}{
		{"ext4", NewFilesystem{Type: "ext4"}, []string{"-q", "-m", "0", "-I", "256", "-U", uuid, "-E", "nodiscard"}},
		{"ext4 with options", NewFilesystem{Type: "ext4", MkfsOptions: []string{"-E", "stride=4", "-i", "65536", "-E", "resize=1g"}},
			[]string{"-q", "-m", "0", "-I", "256", "-U", uuid, "-i", "65536", "-E", "nodiscard,stride=4,resize=1g"}},
		{"xfs", NewFilesystem{Type: "xfs"}, []string{"-q", "-K", "-m", "uuid=" + uuid}},
		{"btrfs", NewFilesystem{Type: "btrfs"}, []string{"-q", "-K", "-U", uuid}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			name, args, err := mkfs(tc.want, uuid)
			if err != nil || name != "mkfs."+tc.want.Type {
				t.Fatalf("%s, %v", name, err)
			}
			if diff := cmp.Diff(tc.args, args); diff != "" {
				t.Errorf("arguments (-want +got):\n%s", diff)
			}
		})
	}
	if name, _, err := mkfs(NewFilesystem{Type: "ntfs"}, uuid); !errors.Is(err, filesystem.ErrUnsupported) {
		t.Errorf("ntfs: %s, %v; want filesystem.ErrUnsupported", name, err)
	}
}

// Both ways of binding give the same mount; the kernel of these tests would only ever take the first.
func TestBindBothWays(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: mounts")
	}
	for name, bind := range map[string]func(source, target string, readOnly bool) error{
		"one step": bindInOneStep, "two steps": bindInTwoSteps,
	} {
		for _, readOnly := range []bool{false, true} {
			t.Run(name, func(t *testing.T) {
				source, target := t.TempDir(), t.TempDir()
				if err := bind(source, target, readOnly); err != nil {
					t.Fatal(err)
				}
				table, err := ReadTable()
				if err != nil {
					t.Fatal(err)
				}
				entry, ok := table.At(target)
				if !ok || entry.ReadOnly != readOnly {
					t.Errorf("the mount is %v, %t; want read-only %t", entry, ok, readOnly)
				}
				writing := os.WriteFile(filepath.Join(target, "file"), nil, 0o600)
				if (writing == nil) == readOnly {
					t.Errorf("writing gives %v, want an error: %t", writing, readOnly)
				}
				if err := Unmount(t.Context(), target, entry.Number); err != nil {
					t.Error(err)
				}
			})
		}
	}
}

func TestHoldersNamesNobody(t *testing.T) {
	if said := describeHolders(device.Number{Major: 4095, Minor: 1}); said == "" {
		t.Error("an error without a hint")
	}
}

// Since 0.1.0. The record of a format outlives the plugin's process, and may be read by another version.
func TestFormatRecordIsPermanent(t *testing.T) {
	f := Formatter{StateDir: t.TempDir()}
	disk := uuid.MustParse("0f9c5a0e-8c1f-4c6b-9f58-5d2f0b6f2a11")
	making := Making{VolumeID: disk, Type: "ext4", UUID: uuid.MustParse("5a2d7c34-1b7e-4f0a-8d7f-8b1c2d3e4f50")}
	if err := f.writeRecord(making, device.Device{Disk: device.Disk{Serial: "csi-aaaaaaaaaaaaaaaa"}}, 7); err != nil {
		t.Fatal(err)
	}
	boot, err := device.BootID()
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(f.StateDir, "format", disk.String())
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	golden := `{"v":1,"serial":"csi-aaaaaaaaaaaaaaaa","fsType":"ext4","fsUUID":"5a2d7c34-1b7e-4f0a-8d7f-8b1c2d3e4f50","bootID":"` +
		boot + `","diskSequence":7}` + "\n"
	if diff := cmp.Diff(golden, string(content)); diff != "" {
		t.Errorf("record (-want +got):\n%s", diff)
	}
	pages.Shows(t, "../../docs/reference/formats.md", strings.ReplaceAll(golden, boot, "BOOT-ID"))
	newer := strings.Replace(golden, `"v":1`, `"v":2`, 1)
	if err := os.WriteFile(path, []byte(newer), 0o600); err != nil {
		t.Fatal(err)
	}
	if r, err := f.readRecord(
		disk,
	); !errors.Is(err, statefile.ErrFolder) ||
		!strings.Contains(err.Error(), "format 2, not 1") {
		t.Errorf("of format 2: %v, %v", r, err)
	}
}

func TestFormatRecordOfThisAttachment(t *testing.T) {
	for _, tc := range []struct {
		boot     string
		sequence uint64
		want     bool
	}{
		{"boot", 7, true},
		{"boot", 8, false},
		{"another", 7, false},
		{"boot", 0, false},
	} {
		recorded := record{BootID: "boot", Sequence: 7}
		if tc.sequence == 0 { // the kernel did not count disks when the format started, either
			recorded.Sequence = 0
		}
		if got := recorded.isOf(tc.boot, tc.sequence); got != tc.want {
			t.Errorf("%+v, of %s and %d: %t, want %t", recorded, tc.boot, tc.sequence, got, tc.want)
		}
	}
}

// Since 0.1.0. Later stages recognise the volume's own filesystem by its UUID.
func TestFilesystemUUIDIsPermanent(t *testing.T) {
	const golden = "3a665843-27d8-5bbd-8831-948d3d093faa"
	if got := FilesystemUUID(uuid.MustParse("6f1b2c3d-4e5f-4a6b-8c7d-9e0f1a2b3c4d")).String(); got != golden {
		t.Errorf("filesystem UUID %s, want %s", got, golden)
	}
	pages.Shows(t, "../../docs/reference/formats.md", golden)
}

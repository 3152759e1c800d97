// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package mount

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
	"github.com/oxidecomputer/oxide-csi-plugin/core/filesystem"
)

func TestTableAt(t *testing.T) {
	// /a carries two mounts, and /a/b one whose parent is the lower of them.
	table := Table{
		{Path: "/", id: 1, parent: 1},
		{Path: "/a", id: 20, parent: 1, FSType: "ext4"},
		{Path: "/a/b", id: 25, parent: 20, FSType: "xfs"},
		{Path: "/a", id: 3, parent: 20, FSType: "tmpfs"},
	}
	if entry, ok := table.At("/a"); !ok || entry.FSType != "tmpfs" {
		t.Errorf("at /a is %v, %t; want the upper mount", entry, ok)
	}
	if entry, ok := table.At("/a/b"); !ok || entry.FSType != "xfs" {
		t.Errorf("at /a/b is %v, %t", entry, ok)
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
		{"ext4", NewFilesystem{Type: "ext4"}, []string{"-q", "-m", "0", "-U", uuid, "-E", "nodiscard"}},
		{"ext4 with options", NewFilesystem{Type: "ext4", MkfsOptions: []string{"-E", "stride=4", "-i", "65536", "-E", "resize=1g"}},
			[]string{"-q", "-m", "0", "-U", uuid, "-i", "65536", "-E", "nodiscard,stride=4,resize=1g"}},
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

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package rack

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
	"github.com/oxidecomputer/oxide-csi-plugin/test/pages"
)

// These vectors are permanent: a plugin with other names would not find the existing volumes.
func TestNamesArePermanent(t *testing.T) {
	for _, test := range []struct {
		cluster, volume, claim, name, description string
	}{
		{
			cluster: "prod", volume: "pvc-2f1b6a3e-0d1c-4b7e-9c55-0f6d2a7f9e10", claim: "db/data-postgres-0",
			name:        "csi-vavmkwdnq2g7hyu5",
			description: `{"v":1,"cluster":"prod","h":"qCrFWG2GjfPinTzT72BPcghLIRO5hw8plT2vcMLhA0Q=","name":"pvc-2f1b6a3e-0d1c-4b7e-9c55-0f6d2a7f9e10","pvc":"db/data-postgres-0"}`,
		},
		{
			cluster: "prod", volume: "postgres",
			name:        "csi-qwtvoyyqn2mu2sd5",
			description: `{"v":1,"cluster":"prod","h":"hadXYxBumU1IfW7T1FB5VxzyqehYoa/nBPnd+23WuO0=","name":"postgres"}`,
		},
	} {
		if got := diskname.ForVolume(test.cluster, test.volume); got != test.name {
			t.Errorf("disk name of %q in %q is %q, want %q", test.volume, test.cluster, got, test.name)
		}
		if got := NewDescription(test.cluster, test.volume, test.claim).Encode(); got != test.description {
			t.Errorf("description of %q in %q is\n%s, want\n%s", test.volume, test.cluster, got, test.description)
		}
		if test.claim == "" {
			pages.Shows(t, "../../docs/reference/formats.md", test.name)
		} else {
			pages.Shows(t, "../../docs/reference/formats.md", test.description)
		}
	}
}

// These vectors are permanent too: the plugin finds snapshots by these names, and disks made from them carry these
// lineages.
func TestNamesOfSnapshotsArePermanent(t *testing.T) {
	const source, origin = "6f1b2c3d-4e5f-4a6b-8c7d-9e0f1a2b3c4d", "0b5c8a52-3a1f-4f52-9d1c-2a6f9f1d7e33"
	lineage := Lineage(source, []string{origin})
	clone := NewDescription("prod", "copy", "")
	clone.Lineage, clone.Clone = lineage, true
	for _, test := range []struct {
		what, name, wantName, description, wantDescription string
	}{
		{
			"a snapshot", diskname.ForSnapshot("prod", "snapshot-1"), "csi-snap-p7xps33tg5twonbep6xwhq4ltevasxyc",
			NewSnapshotDescription("prod", "snapshot-1", lineage).Encode(), `{"v":1,"cluster":"prod","h":"f+75b3M3Z2c0JH+vY8OLmSoJXwLiIRzDneILvrjSDjU=","fs":["6f1b2c3d-4e5f-4a6b-8c7d-9e0f1a2b3c4d","0b5c8a52-3a1f-4f52-9d1c-2a6f9f1d7e33"],"name":"snapshot-1"}`,
		},
		{
			"a temporary snapshot", diskname.ForClone("prod", "copy"), "csi-tmp-g37iaqz4pydvl5fa4r3uyiltcgkihtgi",
			NewTemporaryDescription("prod", "copy", lineage).Encode(), `{"v":1,"cluster":"prod","h":"Nv6AQzx+B1X0oOR3TCFzEZSDzMiFMBc9SndVvm4whIs=","fs":["6f1b2c3d-4e5f-4a6b-8c7d-9e0f1a2b3c4d","0b5c8a52-3a1f-4f52-9d1c-2a6f9f1d7e33"],"name":"copy"}`,
		},
		{
			"a clone", diskname.ForVolume("prod", "copy"), "csi-ogh54f6pyfhdd3yq",
			clone.Encode(), `{"v":1,"cluster":"prod","h":"cY/eF8/BTjHvEJ/2NecguOMC5PZ72aSXyNfPDDSxQnY=","fs":["6f1b2c3d-4e5f-4a6b-8c7d-9e0f1a2b3c4d","0b5c8a52-3a1f-4f52-9d1c-2a6f9f1d7e33"],"clone":true,"name":"copy"}`,
		},
	} {
		if test.name != test.wantName {
			t.Errorf("%s: name %q, want %q", test.what, test.name, test.wantName)
		}
		if test.description != test.wantDescription {
			t.Errorf("%s: description\n%s, want\n%s", test.what, test.description, test.wantDescription)
		}
		if test.what == "a clone" {
			pages.Shows(t, "../../docs/reference/formats.md", test.wantDescription)
		} else {
			pages.Shows(t, "../../docs/reference/formats.md", test.wantName)
		}
	}
}

func TestLineage(t *testing.T) {
	id := func(n int) string { return fmt.Sprintf("00000000-0000-4000-8000-%012d", n) }
	var long []string
	for generation := 1; generation <= 30; generation++ {
		long = Lineage(id(generation), long)
	}
	for _, test := range []struct {
		name      string
		disk      string
		ancestors []string
		want      []string
	}{
		{"of a blank disk", id(1), nil, []string{id(1)}},
		{"of a copy of a copy", id(3), []string{id(2), id(1)}, []string{id(3), id(2), id(1)}},
		{"of the maximum length", id(8), []string{id(7), id(6), id(5), id(4), id(3), id(2), id(1)}, []string{id(8), id(7), id(6), id(5), id(4), id(3), id(2), id(1)}},
		{"one too long, so the fifth nearest is dropped", id(9), []string{id(8), id(7), id(6), id(5), id(4), id(3), id(2), id(1)}, []string{id(9), id(8), id(7), id(6), id(4), id(3), id(2), id(1)}},
		{"after thirty copies", id(31), long, []string{id(31), id(30), id(29), id(28), id(4), id(3), id(2), id(1)}},
		{"with entries that are not IDs", id(2), []string{"junk", strings.ToUpper(id(1)), ""}, []string{id(2), id(1)}},
	} {
		t.Run(test.name, func(t *testing.T) {
			before := slices.Clone(test.ancestors)
			if diff := cmp.Diff(test.want, Lineage(test.disk, test.ancestors)); diff != "" {
				t.Errorf("lineage (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(before, test.ancestors); diff != "" {
				t.Errorf("the ancestors were changed (-want +got):\n%s", diff)
			}
		})
	}
}

func TestDescriptionFits(t *testing.T) {
	for _, test := range []struct {
		name, cluster, volume, claim string
	}{
		{"longest legal values", strings.Repeat("c", 63), strings.Repeat("v", 128), strings.Repeat("n", 63) + "/" + strings.Repeat("p", 253)},
		{"characters of several bytes", strings.Repeat("c", 63), strings.Repeat("ü", 64), strings.Repeat("日本", 60)},
		{"characters that are escaped", strings.Repeat("c", 63), strings.Repeat("\x01", 128), strings.Repeat("\"", 253)},
	} {
		t.Run(test.name, func(t *testing.T) {
			want := NewDescription(test.cluster, test.volume, test.claim)
			text := want.Encode()
			if len(text) > descriptionBytes || !utf8.ValidString(text) {
				t.Fatalf("%d bytes, valid %t", len(text), utf8.ValidString(text))
			}
			got, ours := ParseDescription(text)
			if !ours || !got.SameObject(want) || got.Version != 1 {
				t.Errorf("%q is not recognised", text)
			}
			if !strings.HasPrefix(test.volume, got.Name) || !strings.HasPrefix(test.claim, got.PVC) {
				t.Errorf("name %q or claim %q are not cut from the ones given", got.Name, got.PVC)
			}
		})
	}
}

// The longest lineage fits beside the longest cluster ID, also for a clone. Only the fields for people are cut.
func TestLineageFits(t *testing.T) {
	var lineage []string
	for range 2 * lineageLength {
		lineage = Lineage(uuid.NewString(), lineage)
	}
	want := NewDescription(strings.Repeat("c", 63), strings.Repeat("v", 128), strings.Repeat("p", 253))
	want.Lineage, want.Clone, want.RawBlock = lineage, true, true
	text := want.Encode()
	if len(text) > descriptionBytes {
		t.Fatalf("%d bytes: %s", len(text), text)
	}
	got, ours := ParseDescription(text)
	if !ours || !got.SameObject(want) || !got.Clone || !got.RawBlock {
		t.Errorf("%s is not recognised", text)
	}
	if diff := cmp.Diff(lineage, got.Lineage); diff != "" || len(lineage) != lineageLength {
		t.Errorf("lineage (-want +got):\n%s", diff)
	}
}

// The description of an encrypted disk fits into the rack's limit in every case.
func TestEncryptedDescriptionFits(t *testing.T) {
	const rackLimit = 512
	var lineage []string
	for range 2 * lineageLength {
		lineage = Lineage(uuid.NewString(), lineage)
	}
	want := NewDescription(strings.Repeat("c", 63), strings.Repeat("v", 128), strings.Repeat("p", 253))
	want.Lineage, want.Clone, want.Fixed, want.LUKS = lineage, true, true, 2
	text := want.Encode()
	got, ours := ParseDescription(text)
	if len(text) > rackLimit || !ours || got.LUKS != 2 || !got.Fixed || len(got.Lineage) != lineageLength {
		t.Errorf("%d bytes, ours %t: %s", len(text), ours, text)
	}
	short := NewDescription("prod", "v", "")
	short.LUKS = 2
	if text := short.Encode(); !strings.Contains(text, `,"luks":2,"name":"v"}`) {
		t.Errorf("the permanent field is missing: %s", text)
	}
	fixed := NewDescription("prod", "v", "")
	fixed.Fixed = true
	if text := fixed.Encode(); !strings.Contains(text, `,"fixed":true,"name":"v"}`) {
		t.Errorf("the permanent field is missing: %s", text)
	}
}

// The description of a larger disk says all that the old one said, beside the volume ID and the source, and fits. The
// longest lineage loses ancestors from its middle: the first is the source of a clone, and the filesystem was made on
// the last ones.
func TestSuccessorDescriptionFits(t *testing.T) {
	const rackLimit = 512
	var lineage []string
	for range 2 * lineageLength {
		lineage = Lineage(uuid.NewString(), lineage)
	}
	old := NewDescription(strings.Repeat("c", 63), strings.Repeat("v", 128), strings.Repeat("p", 253))
	old.Lineage, old.Clone, old.RawBlock, old.LUKS = lineage, true, true, 2
	disk := Disk{
		VolumeID: uuid.NewString(), ID: DiskID(uuid.NewString()), Description: old.Encode(),
		SizeBytes: 1023 << 30, CreatedBytes: 1022 << 30, SnapshotID: uuid.NewString(),
		VolumeCreated: time.Unix(1767225600, 0),
	}
	text := SuccessorDescription(disk).Encode()
	got, ours := ParseDescription(text)
	if len(text) > rackLimit || !ours || !got.SameObject(old) {
		t.Fatalf("%d bytes, ours %t: %s", len(text), ours, text)
	}
	if got.Volume != disk.VolumeID || got.CreatedBytes != disk.CreatedBytes || got.SourceSnapshot != disk.SnapshotID ||
		got.CreatedAt != 1767225600 || !got.Clone || !got.RawBlock || got.LUKS != 2 {
		t.Errorf("the description has lost a field: %+v", got)
	}
	if n := len(got.Lineage); n < 2 || n > len(lineage) || got.Lineage[0] != lineage[0] ||
		got.Lineage[n-1] != lineage[len(lineage)-1] {
		t.Errorf("the lineage %v was shortened to %v", lineage, got.Lineage)
	}
	// The second growth changes nothing but the sizes.
	disk.Description = text
	if diff := cmp.Diff(got.Lineage, SuccessorDescription(disk).Lineage); diff != "" {
		t.Errorf("a second growth shortens the lineage (-want +got):\n%s", diff)
	}
}

func TestForeignDescriptions(t *testing.T) {
	for _, text := range []string{"", "my disk", "{}", `{"v":1}`, `{"v":0,"cluster":"a","h":"b"}`, `[1]`, `{"v":1,"cluster":"a"`, `{"v":"1","cluster":"a","h":"b"}`} {
		if d, ours := ParseDescription(text); ours {
			t.Errorf("%q counts as ours: %+v", text, d)
		}
	}
}

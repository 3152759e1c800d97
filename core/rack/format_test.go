// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package rack

import (
	"errors"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/core/record"
	"github.com/oxidecomputer/oxide-csi-plugin/test/pages"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack"
)

// Since 0.1.0. Every field of a description of a disk that replaced another one.
func TestDescriptionOfAGrownDiskIsPermanent(t *testing.T) {
	const golden = `{"v":1,"cluster":"prod","h":"hadXYxBumU1IfW7T1FB5VxzyqehYoa/nBPnd+23WuO0=","raw":true,"luks":2,` +
		`"vol":"0f9c5a0e-8c1f-4c6b-9f58-5d2f0b6f2a11","size":1073741824,"src":"5a2d7c34-1b7e-4f0a-8d7f-8b1c2d3e4f50",` +
		`"img":"6f1b2c3d-4e5f-4a6b-8c7d-9e0f1a2b3c4d","made":1767225600,"name":"postgres"}`
	d := NewDescription("prod", "postgres", "")
	d.RawBlock, d.LUKS, d.Volume, d.CreatedBytes = true, 2, "0f9c5a0e-8c1f-4c6b-9f58-5d2f0b6f2a11", 1<<30
	d.SourceSnapshot, d.SourceImage = "5a2d7c34-1b7e-4f0a-8d7f-8b1c2d3e4f50", "6f1b2c3d-4e5f-4a6b-8c7d-9e0f1a2b3c4d"
	d.CreatedAt = 1767225600
	if got := d.Encode(); got != golden {
		t.Errorf("got\n%s, want\n%s", got, golden)
	}
	pages.Shows(t, "../../docs/reference/formats.md", golden)
}

// After a rollback there may be disks and snapshots of a newer format. Reading them as the known format would take one
// for something else.
func TestNewerFormatIsRefused(t *testing.T) {
	const newer = `{"v":2,"cluster":"prod","h":"hadXYxBumU1IfW7T1FB5VxzyqehYoa/nBPnd+23WuO0=","name":"postgres"}`
	r := newRig(t, simrack.Options{})
	_, err := r.CreateDisk(
		t.Context(),
		DiskSpec{Name: "csi-newer", Description: newer, SizeBytes: gib, BlockSize: 4096},
	)
	if !errors.Is(err, record.ErrFormat) {
		t.Fatalf("create: got %v", err)
	}
	var id string
	for disk, err := range r.Disks(t.Context(), Cursor{}, 0) {
		must(t, err)
		if disk.Value.Name == "csi-newer" {
			id = disk.ID
		}
	}
	if _, ours := ParseDescription(newer); ours {
		t.Error("a description of format 2 is read as format 1")
	}
	refused := func(what, name string, err error) {
		t.Helper()
		if !errors.Is(err, record.ErrFormat) || !strings.Contains(err.Error(), name) ||
			!strings.Contains(err.Error(), "format 2, not 1") {
			t.Errorf("%s: got %v", what, err)
		}
	}
	_, err = r.Disk(t.Context(), id)
	refused("disk by ID", "csi-newer", err)
	_, err = r.DiskByName(t.Context(), "csi-newer")
	refused("disk by name", "csi-newer", err)
	// The rest of the project can be used.
	other := r.create(t, "other")
	if _, err := r.Disk(t.Context(), other.VolumeID); err != nil {
		t.Error(err)
	}
	for _, err := range r.Disks(t.Context(), Cursor{}, 0) {
		if err != nil {
			t.Errorf("list: %v", err)
		}
	}

	snapshot, err := r.CreateSnapshot(t.Context(), "csi-snap-known", "d", other.ID)
	must(t, err)
	if _, err := r.Snapshot(t.Context(), snapshot.ID); err != nil {
		t.Error(err)
	}
	_, err = r.CreateSnapshot(t.Context(), "csi-snap-newer", newer, other.ID)
	refused("snapshot", "csi-snap-newer", err)

	// Whoever reads a record decides what a newer format means (core/record). A list is never refused.
	_, err = r.CreateRecord(t.Context(), "theirs", newer)
	must(t, err)
	_, err = r.CreateRecord(t.Context(), "csi-nodes-spread", newer)
	must(t, err)
	if records, err := r.Records(t.Context()); err != nil || len(records) != 1 || records[0].Name != "csi-nodes-spread" {
		t.Errorf("%v, %v", records, err)
	}
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package simrack_test

import (
	"context"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack"
)

// A rack that is newer than the SDK: the SDK rejects a whole page of disks for the state of one of them. The states of
// snapshots and instances are plain strings to it.
func TestShownFields(t *testing.T) {
	w := newWorld(t, simrack.Options{})
	id, other := w.disk("d"), w.disk("other")
	snapshot, instance := w.snapshot("s", other), w.instance("node-a")
	list := func() ([]oxide.Disk, error) {
		page, err := w.sdk().DiskList(context.Background(), oxide.DiskListParams{Project: "proj"})
		if err != nil {
			return nil, err
		}
		return page.Items, nil
	}
	w.operate("PATCH", "/shown/"+id, `{"state":{"state":"hibernating"}}`, 204, nil)
	w.operate("PATCH", "/shown/"+snapshot, `{"state":"thawing"}`, 204, nil)
	w.operate("PATCH", "/shown/"+instance, `{"run_state":"hibernating"}`, 204, nil)
	if got := w.must("GET", "/disks/"+id, "").raw; !strings.Contains(got, `"hibernating"`) {
		t.Errorf("the disk is shown as %s", got)
	}
	if _, err := list(); err == nil || !strings.Contains(err.Error(), `unknown variant "hibernating"`) {
		t.Errorf("the SDK lists the disks with error %v: is its decoding no longer strict?", err)
	}
	s, err := w.sdk().SnapshotView(context.Background(), oxide.SnapshotViewParams{Snapshot: oxide.NameOrId(snapshot)})
	if err != nil || s.State != "thawing" {
		t.Errorf("snapshot %+v, %v", s, err)
	}
	i, err := w.sdk().InstanceView(context.Background(), oxide.InstanceViewParams{Instance: oxide.NameOrId(instance)})
	if err != nil || i.RunState != "hibernating" {
		t.Errorf("instance %+v, %v", i, err)
	}
	w.operate("PATCH", "/shown/"+id, `{}`, 204, nil)
	if disks, err := list(); err != nil || len(disks) != 2 {
		t.Errorf("then the SDK lists %d disks, %v", len(disks), err)
	}
}

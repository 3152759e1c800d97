// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package restart

import (
	"strings"
	"testing"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/core/record"
)

// Limits of a rack for names and descriptions in bytes, docs/reference/rack.md §2 and §8.
const (
	nameLimit = 63
	textLimit = 512
)

// The longest possible records fit.
func TestRecordsFit(t *testing.T) {
	cluster := strings.Repeat("c", 63)
	var volumes []string
	for range 22 {
		volumes = append(volumes, uuid.NewString())
	}
	planned := record.Restart{
		Cluster:   cluster,
		ID:        newID(),
		Instance:  uuid.NewString(),
		Holder:    newID(),
		Heartbeat: 999_999,
		MayStop:   true,
		Volumes:   record.ShortIDs(volumes),
	}
	handedOver := planned
	handedOver.HandOver("")
	for _, text := range []string{restartText(planned), restartText(handedOver)} {
		if len(text) > textLimit {
			t.Errorf("%d bytes: %s", len(text), text)
		}
	}
	if name := restartName(cluster, 15, 999_999); len(name) > nameLimit {
		t.Errorf("%d bytes: %s", len(name), name)
	}
}

// A restart in a newer format counts, and keeps its slot and its instance. One that a newer version has taken over is
// not this version's any more.
func TestNewerRestartKeepsItsSlot(t *testing.T) {
	text := func(id, instance string) string {
		return restartText(record.Restart{Cluster: "prod", ID: id, Instance: instance, Holder: "h"})
	}
	e := New(&takenOver{records: []record.Record{
		{ID: "old", Name: restartName("prod", 0, 1), Text: text("a", "i")},
		{ID: "new", Name: restartName("prod", 0, 2), Text: strings.Replace(text("a", "i"), `"v":1`, `"v":2`, 1)},
		{ID: "looks", Name: restartName("prod", 1, 1), Text: "text"},
		{ID: "theirs", Name: restartName("test", 0, 1), Text: `{"v":2}`},
	}}, Options{Cluster: "prod"})
	b, err := e.readRecords(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if len(b.restarts)+len(b.superseded) > 0 || b.check("i") == nil || b.check("j") != nil {
		t.Errorf("%+v", b)
	}
	if _, free := b.freeSlot("prod", 1); free {
		t.Error("a slot is free")
	}
	if slot, free := b.freeSlot("prod", 2); slot != 2 || !free {
		t.Errorf("slot %d, free: %t", slot, free)
	}
}

func restartName(cluster string, slot, epoch int) string {
	return record.Restarts.Name(record.Restart{Cluster: cluster, Slot: slot, Epoch: epoch})
}

func restartText(r record.Restart) string { return record.Restarts.Text(r) }

// detachName is the name of the record of a deferred detach of a cluster.
func detachName(cluster, volume string) string { return record.Deferrals.Named(cluster, volume) }

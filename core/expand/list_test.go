// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package expand

import (
	"context"
	"iter"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
	"github.com/oxidecomputer/oxide-csi-plugin/core/record"
)

// replacingRack is a rack on which a disk is replaced while the disks are listed. It lists pages of one size.
type replacingRack struct {
	Rack
	page, requests   int
	deleted, created int // the numbers of the requests before which the old disk is deleted, and the new one created
	newDisk          string
}

const (
	grownVolume, replacedDisk = "vol", "5"
	tryID                     = "attempt"
)

func (r *replacingRack) disks() []rack.Disk {
	disks := []rack.Disk{{VolumeID: "2"}, {VolumeID: "4"}, {VolumeID: "6"}, {VolumeID: "8"}}
	for i := range disks {
		disks[i].ID = rack.DiskID(disks[i].VolumeID)
	}
	if r.requests < r.deleted {
		disks = append(disks, rack.Disk{VolumeID: grownVolume, ID: replacedDisk, Name: "name"})
	}
	if r.requests >= r.created {
		disks = append(disks, rack.Disk{VolumeID: grownVolume, ID: rack.DiskID(r.newDisk), Name: "name"})
	}
	slices.SortFunc(disks, func(a, b rack.Disk) int { return int(a.ID[0]) - int(b.ID[0]) })
	return disks
}

func (r *replacingRack) Disks(
	_ context.Context, from rack.Cursor, _ int,
) iter.Seq2[rack.ListItem[rack.Disk], error] {
	return func(yield func(rack.ListItem[rack.Disk], error) bool) {
		for last := from.LastID; ; {
			r.requests++
			page := slices.DeleteFunc(r.disks(), func(d rack.Disk) bool { return string(d.ID) <= last })
			page = page[:min(len(page), r.page)]
			for _, disk := range page {
				if !yield(rack.ListItem[rack.Disk]{Value: disk, ID: string(disk.ID)}, nil) {
					return
				}
			}
			if len(page) == 0 {
				return
			}
			last = string(page[len(page)-1].ID)
		}
	}
}

func (r *replacingRack) Records(context.Context) ([]record.Record, error) {
	i := record.Intent{Cluster: "c", Volume: grownVolume, Disk: replacedDisk, Attempt: tryID}
	d := record.Replacement{
		Cluster: "c", Volume: grownVolume, Disk: replacedDisk, DiskName: "name", Attempt: tryID, Committed: true,
	}
	first := d // its first expansion is over
	first.Disk, first.Attempt = grownVolume, "before"
	return []record.Record{
		{Name: record.Replacements.Name(first), Text: record.Replacements.Text(first)},
		{Name: record.Intents.Name(i), Text: record.Intents.Text(i)},
		{Name: record.Replacements.Name(d), Text: record.Replacements.Text(d)},
	}, nil
}

func (r *replacingRack) DiskByName(_ context.Context, name string) (rack.Disk, error) {
	r.requests++
	for _, disk := range r.disks() {
		if disk.Name == name {
			return disk, nil
		}
	}
	return rack.Disk{}, rack.ErrNotFound
}

func (r *replacingRack) SnapshotByName(_ context.Context, name string) (rack.Snapshot, error) {
	r.requests++
	if name != diskname.ForExpansion(tryID) || r.requests > r.created {
		return rack.Snapshot{}, rack.ErrNotFound // the expansion deletes it after it has made the disk
	}
	return rack.Snapshot{Name: name, SizeBytes: 1}, nil
}

func (r *replacingRack) ConfirmProject(context.Context) error { return nil }

// A volume is in a list once, whenever its disk is replaced while the list is read, whether the new disk comes before
// or after the old one in the list, and for every size of the rack's pages.
func TestDisksAreListedOnce(t *testing.T) {
	for _, newDisk := range []string{"1", "3", "7", "9"} {
		for page := 1; page <= 6; page++ {
			for deleted := range 12 {
				for created := deleted; created < 12; created++ {
					r := &replacingRack{page: page, deleted: deleted, created: created, newDisk: newDisk}
					listed := map[string]int{}
					for item, err := range New(r, "c", slog.New(slog.DiscardHandler)).Disks(t.Context(), rack.Cursor{}, 0) {
						if err != nil {
							t.Fatal(err)
						}
						listed[item.Value.VolumeID]++
					}
					if listed[grownVolume] != 1 || len(listed) != 5 {
						t.Errorf(
							"new disk %s, pages of %d, deleted before request %d, created before %d: listed %v",
							newDisk, page, deleted, created, listed,
						)
					}
				}
			}
		}
	}
}

// groups is a rack that only lists groups.
type groups struct {
	Rack
	names []string
}

func (g groups) Records(context.Context) ([]record.Record, error) {
	var records []record.Record
	for _, name := range g.names {
		records = append(records, record.Record{Name: name, Text: "text"})
	}
	return records, nil
}

// What is ignored on the rack is said in the log, once.
func TestIgnoredGroupIsSaidOnce(t *testing.T) {
	var log strings.Builder
	r := groups{
		names: []string{"csi-nodes-spread", "csi-expand-x", record.Deferrals.Named("c", "x"), record.Holds.Named("d", "x")},
	}
	e := New(r, "c", slog.New(slog.NewTextHandler(&log, nil)))
	for range 2 {
		_, err := e.Settle(t.Context(), nil, time.Minute, func([]record.Record) map[string]string { return nil })
		if err != nil {
			t.Fatal(err)
		}
	}
	if said := log.String(); strings.Count(said, "\n") != 2 || !strings.Contains(said, "csi-expand-x") ||
		!strings.Contains(said, "csi-defer-") {
		t.Errorf("logged:\n%s", said)
	}
}

// An attempt is old when it has been at one step for a while. The next attempt, or the next step, is not.
func TestAgeBelongsToAStep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := New(nil, "c", slog.New(slog.DiscardHandler))
		for _, now := range []step{{"1", false}, {"1", true}, {"1", false}, {"2", false}} {
			if e.isOld("v", now, SettleAge) {
				t.Errorf("%v is old when it is seen first", now)
			}
			if time.Sleep(SettleAge); !e.isOld("v", now, SettleAge) {
				t.Errorf("%v is not old after %s", now, SettleAge)
			}
		}
	})
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package restart

import (
	"context"
	"fmt"
	"iter"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
)

// slowRack is a rack with many instances and detached disks. Each request takes 50 ms.
type slowRack struct {
	Rack
	instances []rack.Instance
	disks     []rack.Disk
	requests  int
	created   []string
}

func (r *slowRack) request() {
	r.requests++
	time.Sleep(50 * time.Millisecond)
}

func (r *slowRack) Records(context.Context) ([]rack.Record, error) {
	r.request()
	return nil, nil
}

func (r *slowRack) Disk(_ context.Context, id string) (rack.Disk, error) {
	r.request()
	for _, disk := range r.disks {
		if disk.ID == id {
			return disk, nil
		}
	}
	return rack.Disk{}, rack.ErrNotFound
}

func (r *slowRack) Disks(context.Context, rack.Cursor, int) iter.Seq2[rack.ListItem[rack.Disk], error] {
	return func(yield func(rack.ListItem[rack.Disk], error) bool) {
		for i, disk := range r.disks {
			if i%500 == 0 { // the rack client's page
				r.request()
			}
			if !yield(rack.ListItem[rack.Disk]{Value: disk, ID: disk.ID}, nil) {
				return
			}
		}
	}
}

func (r *slowRack) Instance(_ context.Context, id string) (rack.Instance, error) {
	r.request()
	for _, instance := range r.instances {
		if instance.ID == id {
			return instance, nil
		}
	}
	return rack.Instance{}, rack.ErrNotFound
}

func (r *slowRack) Instances(context.Context) ([]rack.Instance, error) {
	for range 1 + len(r.instances)/500 {
		r.request()
	}
	return r.instances, nil
}

func (r *slowRack) CreateRecord(_ context.Context, name, text string) (rack.Record, error) {
	r.request()
	r.created = append(r.created, name)
	return rack.Record{ID: name, Name: name, Text: text}, nil
}

// With 5,000 waiting volumes on 700 instances the first tick plans a restart. A tick ends after a quarter of the lease,
// which is less time than 5,000 look-ups take.
func TestFirstTickPlansWithManyWaitingVolumes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &slowRack{}
		e := New(
			r,
			Options{
				Cluster:  "prod",
				Policy:   Allow,
				Shutdown: Hard,
				MaxDown:  1,
				MaxDisks: 12,
				Log:      slog.New(slog.DiscardHandler),
			},
		)
		for i := range 700 {
			r.instances = append(r.instances, rack.Instance{ID: fmt.Sprintf("instance-%d", i), RunState: rack.Running})
		}
		for i := range 5000 {
			disk := rack.Disk{ID: uuid.NewString(), State: rack.Detached}
			r.disks = append(r.disks, disk)
			e.addRequest(disk.ID, r.instances[i%len(r.instances)].ID)
		}
		start := time.Now()
		e.runOnce(t.Context())
		if len(r.created) != 1 || !strings.HasPrefix(r.created[0], restartPrefix) {
			t.Errorf("records created in the first tick: %q, want one restart", r.created)
		}
		t.Logf("%d requests in %s", r.requests, time.Since(start))
		if time.Since(start) > e.opts.Lease/renewalsPerLease {
			t.Errorf("the first tick took %s", time.Since(start))
		}
		if got := len(e.statuses); got != 700 {
			t.Errorf("%d instances have a status, want 700", got)
		}
	})
}

// deferringRack is a slowRack with records of deferred detaches.
type deferringRack struct {
	slowRack
	records []rack.Record
	deleted []string
}

func (r *deferringRack) Records(context.Context) ([]rack.Record, error) {
	for range 1 + len(r.records)/500 {
		r.request()
	}
	return r.records, nil
}

func (r *deferringRack) ConfirmProject(context.Context) error {
	r.request()
	return nil
}

func (r *deferringRack) DeleteRecord(_ context.Context, id string) error {
	r.request()
	r.deleted = append(r.deleted, id)
	return nil
}

// With 5,000 unpublished volumes that are still attached, the first tick finds the record of a deleted disk. Otherwise
// no tick would ever end the search, and the next one would begin it again.
func TestSweepOfManyRecordsEndsInOneTick(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &deferringRack{}
		e := New(r, Options{Cluster: "prod", Policy: Allow, Shutdown: Hard, MaxDown: 1, Log: slog.New(slog.DiscardHandler)})
		for i := range 5000 {
			disk := rack.Disk{ID: uuid.NewString(), State: rack.Attached, InstanceID: "instance"}
			r.records = append(r.records, rack.Record{
				ID:   disk.ID,
				Name: detachName(disk.ID),
				Text: encode(deferredDetach{Version: 1, Cluster: "prod", Disk: disk.ID, Instance: disk.InstanceID}),
			})
			if i > 0 {
				r.disks = append(r.disks, disk)
			}
		}
		start := time.Now()
		e.runOnce(t.Context())
		if took := time.Since(start); took > e.opts.Lease/renewalsPerLease {
			t.Errorf("the first tick took %s with %d requests", took, r.requests)
		}
		if len(r.deleted) != 1 || r.deleted[0] != r.records[0].ID {
			t.Errorf("deleted the records %q, want that of disk %s", r.deleted, r.records[0].ID)
		}
	})
}

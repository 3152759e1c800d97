// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package restart

import (
	"context"
	"fmt"
	"iter"
	"log/slog"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/record"
)

// slowRack is a rack with many instances and detached disks.
type slowRack struct {
	Rack
	latency   time.Duration
	instances []rack.Instance
	disks     []rack.Disk
	requests  atomic.Int64
	created   []string
}

func (r *slowRack) request(ctx context.Context) error {
	r.requests.Add(1)
	select {
	case <-time.After(r.latency):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (r *slowRack) Records(ctx context.Context) ([]record.Record, error) {
	return nil, r.request(ctx)
}

func (r *slowRack) Disk(ctx context.Context, id string) (rack.Disk, error) {
	if err := r.request(ctx); err != nil {
		return rack.Disk{}, err
	}
	for _, disk := range r.disks {
		if disk.VolumeID == id && !disk.HalfDeleted() {
			return disk, nil
		}
	}
	return rack.Disk{}, rack.ErrNotFound
}

func (r *slowRack) Disks(ctx context.Context, _ rack.Cursor, _ int) iter.Seq2[rack.ListItem[rack.Disk], error] {
	return func(yield func(rack.ListItem[rack.Disk], error) bool) {
		for i, disk := range r.disks {
			if i%500 == 0 { // the rack client's page
				if err := r.request(ctx); err != nil {
					yield(rack.ListItem[rack.Disk]{}, err)
					return
				}
			}
			if !yield(rack.ListItem[rack.Disk]{Value: disk, ID: string(disk.ID)}, nil) {
				return
			}
		}
	}
}

func (r *slowRack) Instance(ctx context.Context, id string) (rack.Instance, error) {
	if err := r.request(ctx); err != nil {
		return rack.Instance{}, err
	}
	for _, instance := range r.instances {
		if instance.ID == id {
			return instance, nil
		}
	}
	return rack.Instance{}, rack.ErrNotFound
}

func (r *slowRack) Instances(ctx context.Context) ([]rack.Instance, error) {
	for range 1 + len(r.instances)/500 {
		if err := r.request(ctx); err != nil {
			return nil, err
		}
	}
	return r.instances, nil
}

func (r *slowRack) CreateRecord(ctx context.Context, name, text string) (record.Record, error) {
	if err := r.request(ctx); err != nil {
		return record.Record{}, err
	}
	r.created = append(r.created, name)
	return record.Record{ID: name, Name: name, Text: text}, nil
}

// The first tick plans a restart, also with 5,000 waiting volumes, which is too many to look up one by one, and with
// 80,000 disks, which is too many to list. A tick ends after a quarter of the lease.
func TestFirstTickPlansWithManyWaitingVolumes(t *testing.T) {
	for name, test := range map[string]struct {
		latency                   time.Duration
		instances, disks, waiting int
	}{
		"5,000 waiting volumes": {50 * time.Millisecond, 700, 5000, 5000},
		"80,000 disks":          {110 * time.Millisecond, 10_000, 80_000, 500},
	} {
		t.Run(name, func(t *testing.T) { firstTickPlans(t, test.latency, test.instances, test.disks, test.waiting) })
	}
}

func firstTickPlans(t *testing.T, latency time.Duration, instances, disks, waiting int) {
	synctest.Test(t, func(t *testing.T) {
		r := &slowRack{latency: latency}
		e := New(
			r,
			Options{
				Cluster:  "prod",
				Shutdown: Hard,
				MaxDown:  1,
				MaxDisks: 12,
				Log:      slog.New(slog.DiscardHandler),
			},
		)
		for i := range instances {
			r.instances = append(r.instances, rack.Instance{ID: fmt.Sprintf("instance-%d", i), RunState: rack.Running})
		}
		for i := range disks {
			// Each volume has grown: one that has not is found by either ID.
			disk := rack.Disk{VolumeID: uuid.NewString(), ID: rack.DiskID(uuid.NewString()), State: rack.Detached}
			r.disks = append(r.disks, disk)
			if i < waiting {
				e.addRequest(disk, r.instances[i%len(r.instances)].ID)
			}
		}
		start := time.Now()
		e.runOnce(t.Context())
		if len(r.created) != 1 || !strings.HasPrefix(r.created[0], "csi-restart-") {
			t.Errorf("records created in the first tick: %q, want one restart", r.created)
		}
		t.Logf("%d requests in %s", r.requests.Load(), time.Since(start))
		if time.Since(start) > e.opts.Lease/renewalsPerLease {
			t.Errorf("the first tick took %s", time.Since(start))
		}
		if got, want := len(e.statuses), min(instances, waiting); got != want {
			t.Errorf("%d instances have a status, want %d", got, want)
		}
	})
}

// The rack may have failed to delete the first disk of a volume that has grown. It then lists that disk, which has the
// ID of the volume, besides the disk that the volume has now.
func TestListedHalfDeletedDiskIsNotThatOfItsVolume(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &slowRack{}
		e := New(r, Options{Log: slog.New(slog.DiscardHandler)})
		var volumes []string
		for range maxLookups + 1 {
			volume := uuid.NewString()
			first := rack.Disk{VolumeID: volume, ID: rack.DiskID(volume), Name: "deleted-" + volume, State: rack.Faulted}
			now := rack.Disk{VolumeID: volume, ID: rack.DiskID(uuid.NewString()), State: rack.Detached}
			r.disks = append(r.disks, now, first)
			volumes = append(volumes, volume)
		}
		lookUp, err := e.diskLookup(t.Context(), volumes)
		if err != nil {
			t.Fatal(err)
		}
		for _, volume := range volumes {
			if disk, err := lookUp(volume); err != nil || disk.State != rack.Detached {
				t.Errorf("volume %s has the disk %+v, %v", volume, disk, err)
			}
		}
		if got := r.requests.Load(); got != 1 {
			t.Errorf("%d requests, want one list", got)
		}
	})
}

// deferringRack is a slowRack with records of deferred detaches.
type deferringRack struct {
	slowRack
	records []record.Record
	deleted []string
}

func (r *deferringRack) Records(ctx context.Context) ([]record.Record, error) {
	for range 1 + len(r.records)/500 {
		if err := r.request(ctx); err != nil {
			return nil, err
		}
	}
	return r.records, nil
}

func (r *deferringRack) ConfirmProject(ctx context.Context) error { return r.request(ctx) }

func (r *deferringRack) DeleteRecord(ctx context.Context, id string) error {
	r.deleted = append(r.deleted, id)
	return r.request(ctx)
}

// With 5,000 unpublished volumes that are still attached, the first tick finds the record of a deleted disk. Otherwise
// no tick would ever end the search, and the next one would begin it again.
func TestSweepOfManyRecordsEndsInOneTick(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &deferringRack{slowRack: slowRack{latency: 50 * time.Millisecond}}
		e := New(r, Options{Cluster: "prod", Shutdown: Hard, MaxDown: 1, Log: slog.New(slog.DiscardHandler)})
		for i := range 5000 {
			disk := rack.Disk{
				VolumeID: uuid.NewString(), ID: rack.DiskID(uuid.NewString()), State: rack.Attached, InstanceID: "instance",
			}
			r.records = append(r.records, record.Record{
				ID:   disk.VolumeID,
				Name: detachName("prod", disk.VolumeID),
				Text: record.Deferrals.Text(
					record.Deferral{Cluster: "prod", VolumeID: disk.VolumeID, Instance: disk.InstanceID},
				),
			})
			if i > 0 {
				r.disks = append(r.disks, disk)
			}
		}
		start := time.Now()
		e.runOnce(t.Context())
		if took := time.Since(start); took > e.opts.Lease/renewalsPerLease {
			t.Errorf("the first tick took %s with %d requests", took, r.requests.Load())
		}
		if len(r.deleted) != 1 || r.deleted[0] != r.records[0].ID {
			t.Errorf("deleted the records %q, want that of disk %s", r.deleted, r.records[0].ID)
		}
	})
}

// The sweep of a project with a long list looks the disks up one by one. It passes over a volume without a disk, and
// deletes no record because of a look-up that failed.
func TestSweepWithFailingLookUp(t *testing.T) {
	const failing, deleted = 3, 7
	for _, failure := range []error{rack.ErrReplaced, rack.ErrInternal} {
		t.Run(failure.Error(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := &failingSweep{failure: failure}
				e := New(r, Options{Cluster: "prod", Log: slog.New(slog.DiscardHandler)})
				e.longList = true
				for i := range maxLookups + 1 {
					disk := rack.Disk{
						VolumeID:   volumeID(i),
						ID:         rack.DiskID(volumeID(i)),
						State:      rack.Attached,
						InstanceID: "instance",
					}
					r.records = append(r.records, record.Record{
						ID:   disk.VolumeID,
						Name: detachName("prod", disk.VolumeID),
						Text: record.Deferrals.Text(record.Deferral{
							Cluster: "prod", VolumeID: disk.VolumeID, Instance: disk.InstanceID,
						}),
					})
					if i != deleted {
						r.disks = append(r.disks, disk)
					}
				}
				r.failing = volumeID(failing)
				records, err := e.readRecords(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				err = e.sweep(t.Context(), records)
				want := []string{volumeID(deleted)}
				if failure == rack.ErrInternal { // the next tick sweeps again
					want = nil
				}
				if (err == nil) != (failure == rack.ErrReplaced) || !slices.Equal(r.deleted, want) {
					t.Errorf("%v; deleted the records %q, want %q", err, r.deleted, want)
				}
			})
		})
	}
}

// failingSweep is a deferringRack that cannot look up one disk.
type failingSweep struct {
	deferringRack
	failing string
	failure error
}

func (r *failingSweep) Disk(ctx context.Context, id string) (rack.Disk, error) {
	if id == r.failing {
		return rack.Disk{}, r.failure
	}
	return r.deferringRack.Disk(ctx, id)
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package restart

import (
	"context"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/record"
)

// beforeRecord is a rack that calls do just before the first record is made.
type beforeRecord struct {
	Rack
	do func()
}

func (r *beforeRecord) CreateRecord(ctx context.Context, name, text string) (record.Record, error) {
	if do := r.do; do != nil {
		r.do = nil
		do()
	}
	return r.Rack.CreateRecord(ctx, name, text)
}

// manyInstances is a rack with a disk to attach for each instance. A stopped instance stays stopped.
type manyInstances struct {
	*downRack
	stopped map[string]bool
}

func (r manyInstances) Disk(_ context.Context, volume string) (rack.Disk, error) {
	return r.view(volume), nil
}

func (r manyInstances) Instance(_ context.Context, id string) (rack.Instance, error) {
	if r.stopped[id] {
		return rack.Instance{ID: id, RunState: rack.Stopped}, nil
	}
	return rack.Instance{ID: id, RunState: rack.Running}, nil
}

func (r manyInstances) StopInstance(_ context.Context, id string) error {
	r.stopped[id] = true
	return nil
}

// newPowerCutter returns an engine that stops one instance at a time, as a process of its own.
func newPowerCutter(r Rack) *Engine {
	return New(r, Options{
		Cluster: "prod", MaxDisks: 8, Shutdown: Hard, MaxDown: 1, HaltTimeout: time.Hour,
		Log: slog.New(slog.DiscardHandler),
	})
}

func mustTick(t *testing.T, e *Engine) {
	t.Helper()
	if err := e.tick(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// A stuck restart has a slot and does not count. It ends between the looks of two processes, so these plan their
// restarts in different slots. Together they stop one instance, as many as one process may.
func TestTwoProcessesTogetherKeepTheLimit(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := manyInstances{newDownRack(), map[string]bool{}}
		stuck, err := record.Restarts.Create(t.Context(), r, record.Restart{
			Cluster: "prod", ID: "stuck", Instance: "a", Holder: "other", Epoch: 1, Stuck: true,
		})
		if err != nil {
			t.Fatal(err)
		}
		first := newPowerCutter(r)
		first.addRequest(r.view("for b"), "b")
		second := newPowerCutter(&beforeRecord{r, func() {
			if err := r.DeleteRecord(t.Context(), stuck.Stored.ID); err != nil {
				t.Fatal(err)
			}
			mustTick(t, first)
		}})
		second.addRequest(r.view("for c"), "c")
		mustTick(t, second)
		if len(r.records) != 2 {
			t.Fatalf("want two planned restarts: %+v", r.records)
		}
		for range 5 {
			mustTick(t, first)
			mustTick(t, second)
		}
		if len(r.stopped) != 1 {
			t.Errorf("stopped instances: %v, want one", r.stopped)
		}
	})
}

// A process stops its instance while another one takes the restart over, with the record from before the stop. Then
// both end. A third process starts the instance, because the second one has recorded that it may be down.
func TestTakeoverRecordsTheStop(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newDownRack()
		first := newPowerCutter(r)
		first.addRequest(r.view("wanted"), "i")
		mustTick(t, first)
		second := newPowerCutter(&beforeRecord{r, func() { mustTick(t, first) }})
		for len(r.records) < 2 {
			time.Sleep(time.Second)
			mustTick(t, second)
		}
		mayStop := func(r record.Record) bool { return strings.Contains(r.Text, `"mayStop":true`) }
		if r.state != rack.Stopped || slices.IndexFunc(r.records, mayStop) != 0 || mayStop(r.records[1]) {
			t.Fatalf("the instance is %s, the records are %+v", r.state, r.records)
		}
		for len(r.records) == 2 {
			time.Sleep(time.Second)
			mustTick(t, second)
		}
		third := newPowerCutter(r)
		for began := time.Now(); time.Since(began) < 10*time.Minute; time.Sleep(time.Second) {
			mustTick(t, third)
		}
		if r.state != rack.Running || len(r.records) != 0 {
			t.Errorf("the instance is %s, the records are %+v", r.state, r.records)
		}
	})
}

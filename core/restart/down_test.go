// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package restart

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/record"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
)

// downRack is a rack with one instance, one disk on it and one disk to attach. While the instance is down, one kind of
// call fails.
type downRack struct {
	// failing is the call that fails, and how it fails. The start itself never does.
	failing string
	fail    func(ctx context.Context) error
	// vanishes says that the record of the restart is deleted, or overwritten with this text, when the instance is down.
	vanishes bool
	text     string
	// latency is added to each call.
	latency time.Duration

	mu      sync.Mutex
	state   string
	since   time.Time
	stopped time.Time
	// down is how long the instance was down, and starts how often it was started.
	down    time.Duration
	starts  int
	stops   []time.Time
	onNode  map[string]bool
	records []record.Record
	made    int
}

func newDownRack() *downRack {
	return &downRack{state: rack.Running, since: time.Now(), onNode: map[string]bool{"kept": true, "wanted": false}}
}

// seen returns how often the instance was started, and whether it was ever stopped.
func (r *downRack) seen() (starts int, stopped bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.starts, !r.stopped.IsZero()
}

// halt stops the instance.
func (r *downRack) halt() {
	r.state, r.since, r.stopped = rack.Stopped, time.Now(), time.Now()
	r.stops = append(r.stops, r.stopped)
	for i := range r.records {
		if r.vanishes && r.text != "" {
			r.records[i].Text = r.text
		}
	}
	if r.vanishes && r.text == "" {
		r.records = nil
	}
}

// call begins each call.
func (r *downRack) call(ctx context.Context, name string) error {
	r.mu.Lock()
	fails := r.failing == name && r.state == rack.Stopped
	r.mu.Unlock()
	time.Sleep(r.latency)
	if fails {
		return r.fail(ctx)
	}
	return ctx.Err()
}

func (r *downRack) view(volume string) rack.Disk {
	d := rack.Disk{VolumeID: volume, ID: rack.DiskID(volume), Name: volume, State: rack.Detached}
	if r.onNode[volume] {
		d.State, d.InstanceID = rack.Attached, "i"
	}
	return d
}

func (r *downRack) Disk(ctx context.Context, id string) (rack.Disk, error) {
	if err := r.call(ctx, "disk"); err != nil {
		return rack.Disk{}, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.view(id), nil
}

func (r *downRack) Disks(context.Context, rack.Cursor, int) iter.Seq2[rack.ListItem[rack.Disk], error] {
	panic("few disks are looked up one by one")
}

func (r *downRack) Instance(ctx context.Context, id string) (rack.Instance, error) {
	if err := r.call(ctx, "instance"); err != nil {
		return rack.Instance{}, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return rack.Instance{ID: id, RunState: r.state, RunStateSince: r.since}, nil
}

func (r *downRack) Instances(context.Context) ([]rack.Instance, error) {
	panic("few instances are looked up one by one")
}

func (r *downRack) InstanceDisks(ctx context.Context, _ string) ([]rack.Disk, error) {
	if err := r.call(ctx, "disks of the instance"); err != nil {
		return nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	var disks []rack.Disk
	for _, volume := range sortedKeys(r.onNode) {
		if r.onNode[volume] {
			disks = append(disks, r.view(volume))
		}
	}
	return disks, nil
}

func (r *downRack) change(ctx context.Context, name string, diskID rack.DiskID, attached bool) (rack.Disk, error) {
	if err := r.call(ctx, name); err != nil {
		return rack.Disk{}, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.state != rack.Stopped {
		return rack.Disk{}, rack.ErrNotStopped
	}
	r.onNode[string(diskID)] = attached
	return r.view(string(diskID)), nil
}

func (r *downRack) Attach(ctx context.Context, diskID rack.DiskID, _ string) (rack.Disk, error) {
	return r.change(ctx, "attach", diskID, true)
}

func (r *downRack) Detach(ctx context.Context, diskID rack.DiskID, _ string) (rack.Disk, error) {
	return r.change(ctx, "detach", diskID, false)
}

func (r *downRack) WaitForDisk(_ context.Context, disk rack.Disk, _ time.Duration) (rack.Disk, error) {
	return disk, nil
}

func (r *downRack) StopInstance(context.Context, string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.state == rack.Running {
		r.halt()
	}
	return nil
}

func (r *downRack) StartInstance(ctx context.Context, id string) (rack.Instance, error) {
	if err := r.call(ctx, "start"); err != nil {
		return rack.Instance{}, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.state == rack.Stopped {
		r.state, r.since, r.down = rack.Running, time.Now(), time.Since(r.stopped)
		r.starts++
	}
	return rack.Instance{ID: id, RunState: r.state, RunStateSince: r.since}, nil
}

func (r *downRack) ConfirmProject(ctx context.Context) error { return r.call(ctx, "project") }

func (r *downRack) Records(ctx context.Context) ([]record.Record, error) {
	if err := r.call(ctx, "records"); err != nil {
		return nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.records), nil
}

func (r *downRack) RecordNamed(ctx context.Context, name string) (record.Record, bool, error) {
	if err := r.call(ctx, "record"); err != nil {
		return record.Record{}, false, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	i := slices.IndexFunc(r.records, func(r record.Record) bool { return r.Name == name })
	if i < 0 {
		return record.Record{}, false, nil
	}
	return r.records[i], true, nil
}

func (r *downRack) CreateRecord(ctx context.Context, name, text string) (record.Record, error) {
	if err := r.call(ctx, "create record"); err != nil {
		return record.Record{}, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if slices.ContainsFunc(r.records, func(r record.Record) bool { return r.Name == name }) {
		return record.Record{}, rack.ErrAlreadyExists
	}
	r.made++
	made := record.Record{ID: fmt.Sprint(r.made), Name: name, Text: text}
	r.records = append(r.records, made)
	return made, nil
}

func (r *downRack) UpdateRecord(ctx context.Context, id, text string) (found bool, err error) {
	if err := r.call(ctx, "update record"); err != nil {
		return false, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for i := range r.records {
		if r.records[i].ID == id {
			r.records[i].Text, found = text, true
		}
	}
	return found, nil
}

func (r *downRack) DeleteRecord(ctx context.Context, id string) error {
	if err := r.call(ctx, "delete record"); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.records = slices.DeleteFunc(r.records, func(r record.Record) bool { return r.ID == id })
	return nil
}

// obedient is an orchestrator whose guests halt as soon as they are asked to.
type obedient struct {
	lostNode
	r *downRack
}

func (o obedient) Request(context.Context, string, string) error {
	o.r.mu.Lock()
	defer o.r.mu.Unlock()
	o.r.halt()
	return nil
}

func (o obedient) Reply(ctx context.Context, _, _ string) (orchestrator.RestartReply, error) {
	if err := o.r.call(ctx, "orchestrator"); err != nil {
		return orchestrator.RestartReply{}, err
	}
	o.r.mu.Lock()
	defer o.r.mu.Unlock()
	if o.r.state == rack.Running {
		return orchestrator.RestartReply{State: orchestrator.RestartBack}, nil
	}
	return orchestrator.RestartReply{State: orchestrator.RestartAccepted}, nil
}

func (o obedient) Withdraw(ctx context.Context, _, _ string) (orchestrator.RestartReply, error) {
	return orchestrator.RestartReply{}, o.r.call(ctx, "orchestrator")
}

func (o obedient) Forget(context.Context, string, string) error { return nil }

// silence is a call that is never answered.
func silence(ctx context.Context) error {
	<-ctx.Done()
	return ctx.Err()
}

// downCalls are all calls that an engine makes while an instance is down, and those of [Options.Yield].
var downCalls = []string{
	"disk", "instance", "disks of the instance", "attach", "detach", "project", "records", "record", "create record",
	"update record", "delete record", "yield", "orchestrator",
}

// downErrors are the ways in which such a call can fail. A list without an end lasts as long as its caller allows.
var downErrors = map[string]func(context.Context) error{
	"format":    func(context.Context) error { return record.ErrFormat },
	"no record": func(context.Context) error { return record.ErrNoRecord },
	"401":       func(context.Context) error { return rack.ErrUnauthenticated },
	"403":       func(context.Context) error { return rack.ErrForbidden },
	"404":       func(context.Context) error { return rack.ErrNotFound },
	"500":       func(context.Context) error { return rack.ErrInternal },
	"503":       func(context.Context) error { return rack.ErrUnavailable },
	"conflict":  func(context.Context) error { return rack.ErrConflict },
	"busy":      func(context.Context) error { return rack.ErrBusy },
	"silence":   silence,
	"a list that never ends": func(ctx context.Context) error {
		for ctx.Err() == nil {
			time.Sleep(time.Second)
		}
		return ctx.Err()
	},
}

// restartDown restarts the instance of a rack for a disk, and checks that it was down for at most two minutes, once.
func restartDown(t *testing.T, shutdown Shutdown, r *downRack) {
	t.Helper()
	e := newDownEngine(r, shutdown)
	e.addRequest(r.view("wanted"), "i")
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	go e.Run(ctx)
	<-ctx.Done()
	<-e.Retired()
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.state != rack.Running || r.starts != 1 || r.down > 2*time.Minute {
		t.Errorf("the instance is %s after %d starts, and was down for %s", r.state, r.starts, r.down)
	}
	t.Logf("down for %s", r.down)
}

func newDownEngine(r *downRack, shutdown Shutdown) *Engine {
	return New(r, Options{
		Cluster: "prod", MaxDisks: 8, Shutdown: shutdown, Requester: obedient{r: r}, MaxDown: 1,
		HaltTimeout: 10 * time.Minute, CoolDown: time.Hour, Log: slog.New(slog.DiscardHandler),
		NextStart: func(now time.Time) time.Time { // one restart
			if _, stopped := r.seen(); !stopped {
				return now
			}
			return now.Add(time.Hour)
		},
		Yield: func(ctx context.Context, _ rack.Disk, _ []record.Record) error { return r.call(ctx, "yield") },
	})
}

// An instance that the plugin has stopped is started within two minutes, whatever else fails, as long as the rack
// accepts the start.
func TestStoppedInstanceIsStarted(t *testing.T) {
	for _, shutdown := range []Shutdown{Hard, Guest} {
		for _, failing := range downCalls {
			for how, fail := range downErrors {
				t.Run(fmt.Sprintf("%s/%s/%s", shutdown, failing, how), func(t *testing.T) {
					synctest.Test(t, func(t *testing.T) {
						r := newDownRack()
						r.since = r.since.Add(-2 * time.Hour)
						r.failing, r.fail = failing, fail
						restartDown(t, shutdown, r)
					})
				})
			}
		}
		for name, text := range map[string]string{"deleted": "", "overwritten": "mine", "of version 0": `{"v":0}`} {
			t.Run(fmt.Sprintf("%s/record/%s", shutdown, name), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					r := newDownRack()
					r.since = r.since.Add(-2 * time.Hour)
					r.vanishes, r.text = true, text
					restartDown(t, shutdown, r)
				})
			})
		}
	}
}

// The process that has stopped the instance has died. Another one, which finds its record, starts the instance within
// two minutes of the time at which it may take the restart over.
func TestStoppedInstanceIsStartedByAnother(t *testing.T) {
	for _, shutdown := range []Shutdown{Hard, Guest} {
		for _, failing := range downCalls {
			if failing == "records" {
				continue // without the record nobody knows of the restart
			}
			for how, fail := range downErrors {
				t.Run(fmt.Sprintf("%s/%s/%s", shutdown, failing, how), func(t *testing.T) {
					synctest.Test(t, func(t *testing.T) {
						r := newDownRack()
						left := record.Restart{Cluster: "prod", ID: "1", Instance: "i", Holder: "dead", MayStop: true, Epoch: 1}
						if _, err := record.Restarts.Create(t.Context(), r, left); err != nil {
							t.Fatal(err)
						}
						r.failing, r.fail = failing, fail
						r.halt()
						e := newDownEngine(r, shutdown)
						ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
						defer cancel()
						go e.Run(ctx)
						<-ctx.Done()
						<-e.Retired()
						if limit := e.opts.Lease + e.takeoverWait() + 2*time.Minute; r.state != rack.Running || r.starts != 1 ||
							r.down > limit {
							t.Errorf("the instance is %s after %d starts, and was down for %s", r.state, r.starts, r.down)
						}
					})
				})
			}
		}
	}
}

// The rack accepts no start for ten minutes, and another call fails, too. The instance runs within two minutes of the
// time at which the rack accepts a start.
func TestStoppedInstanceIsStartedLate(t *testing.T) {
	for _, failing := range downCalls {
		for _, how := range []string{"403", "silence"} {
			t.Run(failing+"/"+how, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					r, full := newDownRack(), &atomic.Bool{}
					full.Store(true)
					r.since = r.since.Add(-2 * time.Hour)
					r.failing, r.fail = failing, downErrors[how]
					e := newDownEngine(r, Hard)
					e.rack = fullRack{r, full}
					e.addRequest(r.view("wanted"), "i")
					ctx, cancel := context.WithTimeout(t.Context(), 20*time.Minute)
					defer cancel()
					go e.Run(ctx)
					time.Sleep(10 * time.Minute)
					if starts, stopped := r.seen(); starts != 0 || !stopped {
						t.Fatalf("%d starts, stopped: %t", starts, stopped)
					}
					full.Store(false)
					time.Sleep(2 * time.Minute)
					if starts, _ := r.seen(); starts != 1 {
						t.Errorf("%d starts", starts)
					}
					cancel()
					<-e.Retired()
				})
			})
		}
	}
}

// fullRack has no room for the instance.
type fullRack struct {
	*downRack
	full *atomic.Bool
}

func (r fullRack) StartInstance(ctx context.Context, id string) (rack.Instance, error) {
	if r.full.Load() {
		return rack.Instance{}, rack.ErrCapacity
	}
	return r.downRack.StartInstance(ctx, id)
}

// A process that cannot read the records does not start an instance that was started meanwhile and that its owner has
// stopped since.
func TestUnreadRecordsStartNoOthersStop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newDownRack()
		r.since = r.since.Add(-2 * time.Hour)
		r.failing, r.fail = "records", func(context.Context) error { return errors.New("broken") }
		e := newDownEngine(r, Hard)
		e.addRequest(r.view("wanted"), "i")
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Minute)
		defer cancel()
		go e.Run(ctx)
		time.Sleep(time.Minute)
		r.mu.Lock()
		r.state, r.since = rack.Stopped, r.since.Add(30*time.Second) // another process started it, and its owner stopped it
		r.mu.Unlock()
		time.Sleep(10 * time.Minute)
		if starts, stopped := r.seen(); starts != 0 || !stopped {
			t.Errorf("%d starts, stopped: %t", starts, stopped)
		}
		cancel()
		<-e.Retired()
	})
}

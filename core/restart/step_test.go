// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package restart

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/record"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
)

// lostNode is an orchestrator that does not know the node any more.
type lostNode struct{ orchestrator.RestartRequester }

var errLost = errors.New("no node has this instance")

func (lostNode) Reply(context.Context, string, string) (orchestrator.RestartReply, error) {
	return orchestrator.RestartReply{}, errLost
}
func (lostNode) Forget(context.Context, string, string) error              { return errLost }
func (lostNode) Report(context.Context, string, orchestrator.Report) error { return errLost }

// erasing is a rack that only deletes records.
type erasing struct {
	Rack
	erased []string
}

func (r *erasing) DeleteRecord(_ context.Context, id string) error {
	r.erased = append(r.erased, id)
	return nil
}

// A node that was deleted while its instance was down does not block the restarts of other instances.
func TestDeletedNodeDoesNotBlockOtherRestarts(t *testing.T) {
	for _, test := range []struct {
		since  time.Duration
		erased int
	}{{backTimeout / 2, 0}, {2 * backTimeout, 1}} {
		r := &erasing{}
		e := New(r, Options{Shutdown: Guest, Requester: lostNode{}, Log: slog.New(slog.DiscardHandler)})
		w := &heldRestart{
			record: record.Restart{ID: "1", Instance: "i", Stored: record.Record{ID: "r"}},
			stage:  stageBack,
			since:  time.Now().Add(-test.since),
		}
		e.held["1"] = w
		err := e.awaitBack(t.Context(), w)
		if over := err == nil; over != (test.erased == 1) || len(r.erased) != test.erased {
			t.Errorf("%s after the start: %v, %d records erased, want %d", test.since, err, len(r.erased), test.erased)
		}
	}
}

// cannotWithdraw is an orchestrator in which no request can be withdrawn any more.
type cannotWithdraw struct{ lostNode }

func (cannotWithdraw) Reply(context.Context, string, string) (orchestrator.RestartReply, error) {
	return orchestrator.RestartReply{}, nil
}

func (cannotWithdraw) Withdraw(context.Context, string, string) (orchestrator.RestartReply, error) {
	return orchestrator.RestartReply{}, errLost
}

// A started instance whose request cannot be withdrawn does not keep the slot for ever.
func TestFailingWithdrawalFreesTheSlot(t *testing.T) {
	for _, test := range []struct {
		since time.Duration
		stuck bool
	}{{backTimeout / 2, false}, {2 * backTimeout, true}} {
		kept := record.Restart{ID: "1", Instance: "i", Stored: record.Record{ID: "r"}}
		r := &takenOver{records: []record.Record{{ID: "r", Name: restartName("prod", 0, 1), Text: restartText(kept)}}}
		e := New(
			r,
			Options{Cluster: "prod", Shutdown: Guest, Requester: cannotWithdraw{}, Log: slog.New(slog.DiscardHandler)},
		)
		h := &heldRestart{record: kept, stage: stageBack, since: time.Now().Add(-test.since)}
		e.held["1"] = h
		if err := e.awaitBack(t.Context(), h); !errors.Is(err, errLost) || h.record.Stuck != test.stuck {
			t.Errorf("%s after the start: %v, stuck: %t, want %t", test.since, err, h.record.Stuck, test.stuck)
		}
	}
}

// drained is an orchestrator that only undrains nodes.
type drained struct {
	cannotWithdraw
	undrains int
}

func (*drained) Drain(context.Context, string, string) ([]string, error) { return nil, errLost }

func (d *drained) Undrain(context.Context, string, string) error {
	d.undrains++
	return nil
}

// A restart that is given up because its request cannot be withdrawn lets its node take work again.
func TestGivenUpRestartUndrainsItsNode(t *testing.T) {
	for _, test := range []struct {
		age  time.Duration
		over int
	}{{requestOutdated / 2, 0}, {requestOutdated + time.Minute, 1}} {
		r, d := &erasing{}, &drained{}
		e := New(r, Options{Shutdown: Drain, Requester: d, Drainer: d, Log: slog.New(slog.DiscardHandler)})
		planned := time.Now().Add(-test.age)
		h := &heldRestart{
			record: record.Restart{
				ID:       orchestrator.NewRestartID(planned),
				Instance: "i",
				Stored:   record.Record{ID: "r"},
				Stuck:    true,
			},
			stage: stageCancelling,
			since: planned,
		}
		e.held[h.record.ID] = h
		if err := e.unreachable(t.Context(), h, timerBack, backTimeout, errLost); !errors.Is(err, errLost) {
			t.Errorf("%s after the plan: %v", test.age, err)
		}
		if len(r.erased) != test.over || d.undrains != test.over {
			t.Errorf(
				"%s after the plan: %d records erased, %d undrains, want %d",
				test.age,
				len(r.erased),
				d.undrains,
				test.over,
			)
		}
	}
}

// An owner who stops an instance before anything was asked of its guest will start it, also if the restart was given up
// meanwhile. A process that has taken the restart over does not know whether something was asked.
func TestOwnersStopDuringAGivenUpRestart(t *testing.T) {
	for _, test := range []struct {
		recovering bool
		undrains   int
		stage      stage
	}{{false, 1, stageCancelling}, {true, 0, stageStopping}} {
		kept := record.Restart{ID: "1", Instance: "i", Stored: record.Record{ID: "r"}, MayStop: true}
		r, d := &takenOver{}, &drained{}
		r.records = []record.Record{{ID: "r", Name: restartName("prod", 0, 1), Text: restartText(kept)}}
		e := New(r, Options{Cluster: "prod", Shutdown: Drain, Requester: d, Drainer: d, Log: slog.New(slog.DiscardHandler)})
		h := &heldRestart{record: kept, stage: stageCancelling, recovering: test.recovering}
		h.since = time.Now().Add(-2 * backTimeout) // this orchestrator has no node whose request could be cleared
		e.held["1"] = h
		if err := e.withdraw(t.Context(), h); err != nil {
			t.Error(err)
		}
		if over := len(r.records) == 0; over != (test.undrains == 1) || d.undrains != test.undrains || h.stage != test.stage {
			t.Errorf("%+v: %d records, %d undrains, stage %s", test, len(r.records), d.undrains, h.stage)
		}
	}
}

// justStarted is a rack with an instance that its owner has just started.
type justStarted struct {
	takenOver
	since time.Time
	stops int
}

func (r *justStarted) Instance(context.Context, string) (rack.Instance, error) {
	return rack.Instance{ID: "i", RunState: rack.Running, RunStateSince: r.since}, nil
}

func (r *justStarted) Disk(context.Context, string) (rack.Disk, error) {
	return rack.Disk{VolumeID: "v", State: rack.Detached}, nil
}

func (r *justStarted) StopInstance(context.Context, string) error {
	r.stops++
	return nil
}

// An instance that was stopped when its restart was planned, and runs when it begins, is not stopped.
func TestOwnersStartBeforeAPlannedRestart(t *testing.T) {
	for _, wasStopped := range []bool{false, true} {
		kept := record.Restart{Cluster: "prod", ID: "1", Instance: "i", Stored: record.Record{ID: "r"}}
		r := &justStarted{since: time.Now()}
		r.records = []record.Record{{ID: "r", Name: restartName("prod", 0, 1), Text: restartText(kept)}}
		e := New(r, Options{
			Cluster: "prod", MaxDown: 1, MaxDisks: 8, Shutdown: Hard, Log: slog.New(slog.DiscardHandler),
		})
		e.requests["v"] = &attachRequest{volume: "v", instance: "i"}
		h := &heldRestart{record: kept, stage: stagePlanned, since: time.Now(), wasStopped: wasStopped}
		e.held["1"] = h
		records, err := e.readRecords(t.Context())
		if err == nil {
			err = e.startShutdown(t.Context(), h, records)
		}
		if err != nil {
			t.Error(err)
		}
		if stops := r.stops > 0; stops == wasStopped {
			t.Errorf("planned as stopped: %t; the instance was stopped: %t", wasStopped, stops)
		}
	}
}

// takenRack is a rack on which another controller attaches the disk to another instance just before this one does.
type takenRack struct {
	Rack
	holder string
}

func (r *takenRack) Disk(context.Context, string) (rack.Disk, error) {
	if r.holder != "" {
		return rack.Disk{VolumeID: "d", State: rack.Attached, InstanceID: r.holder}, nil
	}
	return rack.Disk{VolumeID: "d", State: rack.Detached}, nil
}

func (r *takenRack) InstanceDisks(context.Context, string) ([]rack.Disk, error) { return nil, nil }

func (r *takenRack) CreateRecord(_ context.Context, name, text string) (record.Record, error) {
	return record.Record{ID: "r", Name: name, Text: text}, nil
}

func (r *takenRack) Attach(context.Context, rack.DiskID, string) (rack.Disk, error) {
	r.holder = "other"
	return rack.Disk{}, rack.ErrRefused
}

// A request for a disk that another instance got first waits for the next restart. It has not failed for good.
func TestDiskThatAnotherInstanceGotFirst(t *testing.T) {
	e := New(&takenRack{}, Options{MaxDisks: 8, Log: slog.New(slog.DiscardHandler)})
	e.addRequest(rack.Disk{VolumeID: "d"}, "i")
	if _, err := e.attachRequested(t.Context(), "d", "i"); err != nil {
		t.Errorf("got %v", err)
	}
	if open := e.openRequests(); len(open) != 1 {
		t.Errorf("requests %+v, want one", open)
	}
}

// changing is a rack that never ends the change of an instance's run state. During an outage it answers nothing, or
// only lists its records.
type changing struct {
	takenOver
	state               string
	outage, onlyRecords bool
}

func (r *changing) Instance(context.Context, string) (rack.Instance, error) {
	if r.outage {
		return rack.Instance{}, rack.ErrUnavailable
	}
	return rack.Instance{ID: "i", RunState: r.state}, nil
}

func (r *changing) Records(ctx context.Context) ([]record.Record, error) {
	if r.outage && !r.onlyRecords {
		return nil, rack.ErrUnavailable
	}
	return r.takenOver.Records(ctx)
}

// An instance whose run state changes for ever does not keep the slot for ever.
func TestEndlessChangeOfARunStateFreesTheSlot(t *testing.T) {
	for _, in := range []stage{stageStopping, stageRecovering, stageStarting} {
		for _, state := range []string{"stopping", "migrating", "starting", "rebooting", "repairing"} {
			synctest.Test(t, func(t *testing.T) {
				r := &changing{state: state}
				kept := record.Restart{ID: "1", Instance: "i", Stored: record.Record{ID: "r"}}
				r.records = []record.Record{{ID: "r", Name: restartName("prod", 0, 1), Text: restartText(kept)}}
				e := New(r, Options{
					Cluster: "prod", Shutdown: Guest, HaltTimeout: 10 * time.Minute, Requester: cannotWithdraw{},
					Log: slog.New(slog.DiscardHandler),
				})
				h := &heldRestart{record: kept, stage: in, since: time.Now()}
				e.held["1"] = h
				for _, stuck := range []bool{false, false, true} {
					err := e.runStage(t.Context(), h, recordSet{})
					if err != nil || h.record.Stuck != stuck || stuck && h.problem == "" {
						t.Errorf("%s, %s: %v, stuck %t, want %t; reported %q", in, state, err, h.record.Stuck, stuck, h.problem)
					}
					time.Sleep(e.opts.HaltTimeout / 2)
				}
			})
		}
	}
}

// The rack may have received the request for a change of the run state only at the end of its outage.
func TestOutageIsNoEndlessChangeOfARunState(t *testing.T) {
	for _, onlyRecords := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			r := &changing{state: "starting", onlyRecords: onlyRecords}
			kept := record.Restart{Cluster: "prod", ID: "1", Instance: "i", MayStop: true}
			name := restartName("prod", 0, 1)
			e := New(r, Options{
				Cluster: "prod", Shutdown: Hard, HaltTimeout: 10 * time.Minute, Lease: time.Hour, MaxDown: 1,
				Log: slog.New(slog.DiscardHandler),
			})
			kept.Holder = e.holder
			r.records = []record.Record{{ID: "r", Name: name, Text: restartText(kept)}}
			h := &heldRestart{record: kept, stage: stageStarting, since: time.Now(), renewed: time.Now()}
			e.held["1"] = h
			for _, test := range []struct{ outage, stuck bool }{
				{false, false}, {true, false}, {false, false}, {false, true},
			} {
				r.outage = test.outage
				e.runOnce(t.Context())
				if h.record.Stuck != test.stuck {
					t.Errorf("outage %t: stuck %t, want %t", test.outage, h.record.Stuck, test.stuck)
				}
				time.Sleep(e.opts.HaltTimeout)
			}
		})
	}
}

// panicking is a rack whose first call panics.
type panicking struct {
	Rack
	calls int
}

func (r *panicking) Records(context.Context) ([]record.Record, error) {
	r.calls++
	if r.calls == 1 {
		panic("a bug")
	}
	return nil, nil
}

// A panic ends one tick and not the engine, which may have an instance down.
func TestPanicDoesNotEndTheEngine(t *testing.T) {
	r := &panicking{}
	e := New(r, Options{Log: slog.New(slog.DiscardHandler)})
	for range 2 {
		if again := e.runOnce(t.Context()); again <= 0 {
			t.Errorf("next tick after %s", again)
		}
	}
	if r.calls != 2 {
		t.Errorf("%d calls to the rack, want 2", r.calls)
	}
}

// ticking is a rack with fixed records.
type ticking struct {
	Rack
	records []record.Record
}

func (r ticking) Records(context.Context) ([]record.Record, error) { return r.records, nil }

// If a process dies while an instance is down, the instance is back within the lease and a minute. Therefore another
// process's restart is polled as often as an own one.
func TestOrphanedInstanceIsBackWithinAMinuteOfTheLease(t *testing.T) {
	kept := record.Restart{Cluster: "prod", ID: "1", Instance: "i", Holder: "another", MayStop: true}
	for _, test := range []struct {
		records []record.Record
		again   time.Duration
	}{
		{nil, defaultIdle},
		{[]record.Record{{ID: "r", Name: restartName("prod", 0, 1), Text: restartText(kept)}}, defaultPoll},
	} {
		e := New(ticking{records: test.records}, Options{Cluster: "prod", Log: slog.New(slog.DiscardHandler)})
		if got := e.runOnce(t.Context()); got != test.again {
			t.Errorf("with %d records the next tick is after %s, want %s", len(test.records), got, test.again)
		}
	}
	waits := time.Duration(takeoverWaitShare * float64(defaultLease))
	if worst, most := defaultIdle+waits+2*defaultPoll, time.Minute; worst > most {
		t.Errorf("the instance is brought back up to %s after the lease, want %s", worst, most)
	}
}

// While an instance is down, the engine does not wait between two stages.
func TestNextStageFollowsAtOnce(t *testing.T) {
	e := New(ticking{}, Options{Log: slog.New(slog.DiscardHandler)})
	e.enterStage(&heldRestart{}, stageApplying)
	select {
	case <-e.wake:
	default:
		t.Error("the next tick waits for the poll interval")
	}
}

// takenOver is a rack with a stopped instance and the restart record of a process that has died.
type takenOver struct {
	Rack
	records []record.Record
	// created is when the record of the takeover was created, started when the instance was started.
	created, started time.Time
}

func (r *takenOver) Records(context.Context) ([]record.Record, error) { return r.records, nil }

func (r *takenOver) CreateRecord(_ context.Context, name, text string) (record.Record, error) {
	r.created = time.Now()
	r.records = append(r.records, record.Record{ID: name, Name: name, Text: text})
	return r.records[len(r.records)-1], nil
}

func (r *takenOver) UpdateRecord(_ context.Context, id, text string) (found bool, err error) {
	for i := range r.records {
		if r.records[i].ID == id {
			r.records[i].Text = text
		}
	}
	return true, nil
}

func (r *takenOver) DeleteRecord(_ context.Context, id string) error {
	r.records = slices.DeleteFunc(r.records, func(r record.Record) bool { return r.ID == id })
	return nil
}

func (r *takenOver) Instance(context.Context, string) (rack.Instance, error) {
	return rack.Instance{ID: "i", RunState: rack.Stopped}, nil
}

func (r *takenOver) InstanceDisks(context.Context, string) ([]rack.Disk, error) { return nil, nil }

func (r *takenOver) StartInstance(_ context.Context, id string) (rack.Instance, error) {
	if r.started.IsZero() {
		r.started = time.Now()
	}
	return rack.Instance{ID: id, RunState: "starting"}, nil
}

// The detaching record of a process that has ended is removed, also by a controller without a grace period: publishing
// the volume waits for the end of the record.
func TestAbandonedDetachingRecordExpires(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &takenOver{records: []record.Record{
			{ID: "r", Name: record.Holds.Named("prod", "d"), Text: `{"v":1,"cluster":"prod","disk":"d","by":"ended"}`},
		}}
		e := New(r, Options{Cluster: "prod", Log: slog.New(slog.DiscardHandler)})
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
		defer cancel()
		e.Run(ctx)
		if len(r.records) > 0 {
			t.Errorf("records %v", r.records)
		}
	})
}

// A takeover waits for 45 s before it trusts the record and starts the instance: for so long the rack may still carry
// out calls of the previous holder.
func TestTakeoverWaitsForLateCalls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		kept := record.Restart{Cluster: "prod", ID: "1", Instance: "i", Holder: "another", MayStop: true}
		r := &takenOver{records: []record.Record{{ID: "r", Name: restartName("prod", 0, 1), Text: restartText(kept)}}}
		e := New(r, Options{Cluster: "prod", Shutdown: Hard, MaxDown: 1, Log: slog.New(slog.DiscardHandler)})
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
		defer cancel()
		go e.Run(ctx)
		<-ctx.Done()
		if r.created.IsZero() || r.started.IsZero() {
			t.Fatalf("taken over at %s, started at %s", r.created, r.started)
		}
		if waited := r.started.Sub(r.created); waited < 45*time.Second || waited > time.Minute {
			t.Errorf("the instance was started %s after the takeover, want 45 s to 1 min", waited)
		}
		<-e.Retired()
	})
}

// lateDeferral is a rack with a stopped instance, two of whose volumes were unpublished while it was restarted. One of
// them came back.
type lateDeferral struct {
	takenOver
	disks    []rack.Disk
	detached []string
}

func (r *lateDeferral) InstanceDisks(context.Context, string) ([]rack.Disk, error) {
	return r.disks, nil
}

func (r *lateDeferral) Disk(_ context.Context, id string) (rack.Disk, error) {
	i := slices.IndexFunc(r.disks, func(d rack.Disk) bool { return d.VolumeID == id })
	return r.disks[i], nil
}

func (r *lateDeferral) Detach(_ context.Context, diskID rack.DiskID, _ string) (rack.Disk, error) {
	r.detached = append(r.detached, string(diskID))
	return rack.Disk{}, nil
}

// A volume that was unpublished during a restart stays attached, unless its slot is needed: it may come back. A volume
// that came back already needs the slot that it has, and no second one.
func TestVolumeThatCameBackNeedsNoSecondSlot(t *testing.T) {
	for maxDisks, want := range map[int]int{2: 0, 1: 1} {
		r := &lateDeferral{}
		for _, id := range []string{"back", "gone"} {
			r.disks = append(r.disks, rack.Disk{VolumeID: id, ID: rack.DiskID(id), State: rack.Attached, InstanceID: "i"})
		}
		deferred := record.Deferral{Version: 1, Cluster: "prod", VolumeID: "gone", Instance: "i"}
		r.records = []record.Record{{ID: "r", Name: detachName("prod", "gone"), Text: record.Deferrals.Text(deferred)}}
		e := New(r, Options{Cluster: "prod", MaxDisks: maxDisks, Log: slog.New(slog.DiscardHandler)})
		e.addRequest(r.disks[0], "i")
		done, err := e.apply(t.Context(), &heldRestart{record: record.Restart{ID: "1", Instance: "i"}})
		if err != nil || !done || len(r.detached) != want {
			t.Errorf("with %d slots: %t, %v, detached %q, want %d disks", maxDisks, done, err, r.detached, want)
		}
	}
}

// diskList is a rack that counts the lists of an instance's disks.
type diskList struct {
	takenOver
	lists int
}

func (r *diskList) InstanceDisks(context.Context, string) ([]rack.Disk, error) {
	r.lists++
	return []rack.Disk{{VolumeID: "d", State: rack.Attached, InstanceID: "i"}}, nil
}

// Before an instance starts, its disks are compared with records that were read after they were attached. Each tick
// makes one call for it: a slow rack has no time for two.
func TestRecordsAreReadAfterTheDisks(t *testing.T) {
	r := &diskList{}
	kept := record.Restart{ID: "1", Instance: "i", Stored: record.Record{ID: "r"}}
	r.records = []record.Record{{ID: "r", Name: restartName("prod", 0, 1), Text: restartText(kept)}}
	var compared []record.Record
	e := New(r, Options{
		Cluster: "prod", Shutdown: Hard, Log: slog.New(slog.DiscardHandler),
		Yield: func(_ context.Context, disk rack.Disk, records []record.Record) error {
			compared = append(compared, records...)
			return nil
		},
	})
	h := &heldRestart{record: kept, stage: stageChecking, since: time.Now(), renewed: time.Now()}
	e.held["1"] = h
	for _, read := range []string{"before the list", "after the list"} {
		if err := e.runStage(t.Context(), h, recordSet{all: []record.Record{{Name: read}}}); err != nil {
			t.Fatal(err)
		}
	}
	if r.lists != 1 || len(compared) != 1 || compared[0].Name != "after the list" {
		t.Errorf("%d lists; the disks were compared with %v", r.lists, compared)
	}
	if h.stage != stageStarting {
		t.Errorf("stage %q, want %q", h.stage, stageStarting)
	}
}

// An instance that is not started because of a record that only a person can mend tells why at once.
func TestUnreadableRecordIsReported(t *testing.T) {
	kept := record.Restart{ID: "1", Instance: "i", Stored: record.Record{ID: "r"}}
	r := &diskList{}
	r.records = []record.Record{{ID: "r", Name: restartName("prod", 0, 1), Text: restartText(kept)}}
	e := New(r, Options{
		Cluster: "prod", Shutdown: Hard, Log: slog.New(slog.DiscardHandler),
		Yield: func(context.Context, rack.Disk, []record.Record) error { return record.ErrNoRecord },
	})
	h := &heldRestart{record: kept, stage: stageChecking, since: time.Now(), renewed: time.Now()}
	e.held["1"] = h
	_ = e.runStage(t.Context(), h, recordSet{}) // only lists the disks: the next call uses them
	if err := e.runStage(t.Context(), h, recordSet{}); !errors.Is(err, record.ErrNoRecord) || h.problem == "" {
		t.Errorf("%v; reported %q", err, h.problem)
	}
	if h.stage != stageChecking {
		t.Errorf("stage %q", h.stage)
	}
	// An instance that its owner stopped, and starts, waits for nothing.
	h.ownersStop, h.problem, h.reported, h.attached = true, "", "", []rack.Disk{{VolumeID: "d"}}
	if err := e.runStage(t.Context(), h, recordSet{}); !errors.Is(err, record.ErrNoRecord) || h.problem != "" {
		t.Errorf("the owner's stop: %v; reported %q", err, h.problem)
	}
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package detach_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/core/detach"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/record"
	"github.com/oxidecomputer/oxide-csi-plugin/test/pages"
)

// unanswering is a rack that does not answer a detach.
type unanswering struct{ actor }

func (unanswering) Detach(context.Context, rack.DiskID, string) (rack.Disk, error) {
	return rack.Disk{}, rack.ErrUnavailable
}

// idle is a rack that accepts a detach and does not carry it out.
type idle struct{ actor }

func (r idle) Detach(context.Context, rack.DiskID, string) (rack.Disk, error) { return r.disk(), nil }

func names(w *world) (names []string) {
	for _, r := range w.records {
		names = append(names, r.Name)
	}
	return names
}

// lossy is a rack whose answer to the next change of a record is lost.
type lossy struct {
	actor
	lose *bool
}

func (l lossy) UpdateRecord(ctx context.Context, id, text string) (found bool, err error) {
	if found, err := l.actor.UpdateRecord(ctx, id, text); err != nil || !*l.lose {
		return found, err
	}
	*l.lose = false
	return false, rack.ErrUnavailable
}

// late is a rack that deletes records only when it is told to, long after the request.
type late struct {
	actor
	requested *[]string
}

func (l late) DeleteRecord(_ context.Context, id string) error {
	*l.requested = append(*l.requested, id)
	return rack.ErrUnavailable
}

// A deletion of a record that was not answered, and that the rack carries out later, does not hit a detach that was
// deferred since.
func TestLateDeletionOfARecord(t *testing.T) {
	for _, grace := range []time.Duration{0, grace} {
		t.Run(fmt.Sprint("grace ", grace), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w, requested := &world{holder: instance, turn: func(string) {}}, []string{}
				a := actor{w, ""}
				r := &changing{Rack: a}
				d := detach.New(r, detach.Options{Cluster: cluster, Grace: grace, Log: slog.New(slog.DiscardHandler)})
				must(t, d.Defer(t.Context(), volume, instance))
				if grace == 0 { // a publish deletes the record
					r.Rack = late{a, &requested}
					if err := d.TakeBack(t.Context(), volume); !errors.Is(err, rack.ErrUnavailable) {
						t.Fatalf("got %v", err)
					}
				} else { // it is deleted when it is no longer remembered
					must(t, d.TakeBack(t.Context(), volume))
					r.Rack = late{a, &requested}
					ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
					defer cancel()
					d.Run(ctx)
				}
				r.Rack = a
				if len(requested) == 0 {
					t.Fatal("no deletion was requested")
				}
				must(t, d.Defer(t.Context(), volume, instance))
				for _, id := range requested {
					must(t, a.DeleteRecord(t.Context(), id))
				}
				set, err := d.List(t.Context())
				must(t, err)
				if _, ok := set.Of(volume, instance); !ok {
					t.Errorf("the detach is not deferred any more: %v", w.records)
				}
			})
		})
	}
}

// changing is a rack that a test replaces.
type changing struct{ detach.Rack }

// A publish whose answer was lost, and its repetition, start the time anew in which an unpublish may be an old one.
func TestLostAnswerOfATakeBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, lose := &world{holder: instance, turn: func(string) {}}, false
		d := detach.New(lossy{actor{w, ""}, &lose}, detach.Options{Cluster: cluster, Grace: grace})
		must(t, d.Defer(t.Context(), volume, instance))
		must(t, d.TakeBack(t.Context(), volume))
		must(t, d.Defer(t.Context(), volume, instance))
		time.Sleep(time.Hour)
		lose = true
		if err := d.TakeBack(t.Context(), volume); !errors.Is(err, rack.ErrUnavailable) {
			t.Fatalf("got %v", err)
		}
		must(t, d.TakeBack(t.Context(), volume))
		for range 2 { // the orchestrator repeats an unpublish of an earlier workload
			must(t, d.Defer(t.Context(), volume, instance))
			set, err := d.List(t.Context())
			must(t, err)
			if deferred, ok := set.Of(volume, instance); !ok || !deferred.Untimed {
				t.Errorf("the disk of a published volume would be detached after the grace period: %+v, %t", deferred, ok)
			}
		}
	})
}

// A process that has not looked for a long time does not take a new wish to detach for one that it saw before.
func TestSecondDetachStartsItsOwnTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &world{holder: instance, turn: func(string) {}}
		opts := detach.Options{Cluster: cluster, Grace: grace}
		one, other := detach.New(actor{w, ""}, opts), detach.New(actor{w, ""}, opts)
		wantWholeGrace := func() {
			t.Helper()
			set, err := other.List(t.Context())
			must(t, err)
			deferred, ok := set.Of(volume, instance)
			if left := other.Left(deferred); !ok || deferred.Untimed || left != grace {
				t.Errorf("%+v, %t: %s are left, want %s", deferred, ok, left, grace)
			}
		}
		must(t, one.Defer(t.Context(), volume, instance))
		wantWholeGrace()
		must(t, one.TakeBack(t.Context(), volume))
		time.Sleep(time.Hour)
		must(t, one.DeferVouched(t.Context(), volume, instance)) // a person: the detach has a time
		wantWholeGrace()
	})
}

// panicking is a rack whose first list of records panics.
type panicking struct {
	actor
	lists *int
}

func (p panicking) Records(ctx context.Context) ([]record.Record, error) {
	if *p.lists++; *p.lists == 1 {
		panic("broken")
	}
	return p.actor.Records(ctx)
}

// A panic ends one look at the records. A disk whose time comes later is detached.
func TestPanicDoesNotEndTheDetaches(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &world{holder: instance, turn: func(string) {}}
		d := detach.New(panicking{actor{w, ""}, new(int)}, detach.Options{
			Cluster: cluster, Grace: grace, Log: slog.New(slog.DiscardHandler),
		})
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			defer func() { _ = recover() }() // as the caller of Run does
			d.Run(t.Context())
		}()
		synctest.Wait() // after the panic
		must(t, d.Defer(t.Context(), volume, instance))
		time.Sleep(grace + time.Minute)
		synctest.Wait()
		if w.holder != "" {
			t.Error("the disk stays attached")
		}
		select {
		case <-ended:
			t.Error("nothing is detached any more")
		default:
		}
	})
}

// While the rack may still detach a disk, the detaching record stays, so that the volume is not published.
func TestUnansweredDetachKeepsItsRecord(t *testing.T) {
	for want, r := range map[error]func(actor) detach.Rack{
		rack.ErrUnavailable: func(a actor) detach.Rack { return unanswering{a} },
		rack.ErrBusy:        func(a actor) detach.Rack { return idle{a} },
	} {
		w := &world{holder: instance, turn: func(string) {}}
		d := detach.New(r(actor{w, ""}), detach.Options{Cluster: cluster, Grace: grace, Log: slog.New(slog.DiscardHandler)})
		must(t, d.Defer(t.Context(), volume, instance))
		if err := d.Detach(t.Context(), volume, instance); !errors.Is(err, want) {
			t.Errorf("got %v, want %v", err, want)
		}
		if err := d.TakeBack(t.Context(), volume); !errors.Is(err, detach.ErrDetaching) {
			t.Errorf("publish: %v", err)
		}
		if err := d.Detach(t.Context(), volume, instance); !errors.Is(err, detach.ErrDetaching) {
			t.Errorf("another detach: %v", err)
		}
	}
}

// replaced is a rack that accepts a detach, on which the volume has no disk any more when the detach is done: another
// process goes on with its expansion.
type replaced struct{ actor }

func (replaced) WaitForDisk(context.Context, rack.Disk, time.Duration) (rack.Disk, error) {
	return rack.Disk{}, rack.ErrReplaced
}

// A volume without a disk is attached nowhere. So its detach is done, and the volume can be published again at once.
func TestDetachOfADiskThatIsReplaced(t *testing.T) {
	w := &world{holder: instance, turn: func(string) {}}
	d := detach.New(replaced{actor{w, ""}},
		detach.Options{Cluster: cluster, Grace: grace, Log: slog.New(slog.DiscardHandler)})
	must(t, d.Defer(t.Context(), volume, instance))
	must(t, d.Detach(t.Context(), volume, instance))
	must(t, d.TakeBack(t.Context(), volume))
	if set, err := d.List(t.Context()); err != nil || set.Detaching(volume) {
		t.Errorf("%v; records %v", err, names(w))
	}
}

// forgetful is a rack that makes the next record of a detaching process and does not answer, or that refuses to delete
// it once.
type forgetful struct {
	actor
	forget, keep *bool
}

func (f forgetful) DeleteRecord(ctx context.Context, id string) error {
	if *f.keep {
		*f.keep = false
		return rack.ErrUnavailable
	}
	return f.actor.DeleteRecord(ctx, id)
}

func (f forgetful) CreateRecord(ctx context.Context, name, text string) (record.Record, error) {
	made, err := f.actor.CreateRecord(ctx, name, text)
	if err == nil && *f.forget && strings.HasPrefix(name, "csi-hold-") {
		*f.forget = false
		return record.Record{}, rack.ErrUnavailable
	}
	return made, err
}

// A detaching record whose creation was not answered, or that could not be deleted, delays no publish for long: its
// process does nothing under it.
func TestUnansweredDetachingRecord(t *testing.T) {
	for name, fault := range map[string]struct{ forget, keep bool }{"creation": {forget: true}, "deletion": {keep: true}} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := &world{holder: instance, turn: func(string) {}}
				d := detach.New(forgetful{actor{w, ""}, &fault.forget, &fault.keep},
					detach.Options{Cluster: cluster, Grace: grace, Log: slog.New(slog.DiscardHandler)})
				must(t, d.Defer(t.Context(), volume, instance))
				ctx, cancel := context.WithTimeout(t.Context(), grace+15*time.Second)
				defer cancel()
				d.Run(ctx)
				if fault.forget || fault.keep || w.holder != "" || slices.ContainsFunc(names(w), isDetaching) {
					t.Errorf("the disk is on %q, with the records %v", w.holder, names(w))
				}
			})
		})
	}
}

func isDetaching(name string) bool { return strings.HasPrefix(name, "csi-hold-") }

// Without a grace period nothing is remembered of a volume that was published again.
func TestWithoutGraceNothingIsRemembered(t *testing.T) {
	w := &world{holder: instance, turn: func(string) {}}
	d := detach.New(actor{w, ""}, detach.Options{Cluster: cluster})
	must(t, d.Defer(t.Context(), volume, instance))
	must(t, d.TakeBack(t.Context(), volume))
	if left := names(w); len(left) > 0 {
		t.Errorf("records %v", left)
	}
}

// A record from before, when there was a grace period, makes no request a repetition: nothing would start its clock.
func TestRecordIsLeftFromATimeWithGrace(t *testing.T) {
	for _, untimed := range []bool{false, true} {
		w := &world{holder: instance, turn: func(string) {}}
		before := newDetacher(actor{w, ""})
		must(t, before.Defer(t.Context(), volume, instance))
		must(t, before.TakeBack(t.Context(), volume))
		if untimed {
			must(t, before.Defer(t.Context(), volume, instance))
		}
		now := detach.New(actor{w, ""}, detach.Options{Cluster: cluster})
		must(t, now.Defer(t.Context(), volume, instance))
		set, err := now.List(t.Context())
		must(t, err)
		if deferred, ok := set.Of(volume, instance); !ok || deferred.Untimed {
			t.Errorf("an untimed record was left: %t; the records are now %v", untimed, w.records)
		}
	}
}

// A record of an earlier attachment to another instance does not stand in the way.
func TestDeferReplacesARecordOfAnotherInstance(t *testing.T) {
	w := &world{holder: instance, turn: func(string) {}}
	d := newDetacher(actor{w, ""})
	must(t, d.Defer(t.Context(), volume, "another"))
	must(t, d.Defer(t.Context(), volume, instance))
	set, err := d.List(t.Context())
	must(t, err)
	if _, ok := set.Of(volume, instance); !ok {
		t.Errorf("the detach from the new instance is not deferred: %v", w.records)
	}
}

// While another instance is being restarted, its record stays: the process that restarts it may be about to attach the
// disk, and the disk must then be known as unpublished.
func TestRecordOfARestartStays(t *testing.T) {
	w := &world{holder: instance, turn: func(string) {}}
	restarting := map[string]bool{"another": true}
	d := detach.New(actor{w, ""}, detach.Options{
		Cluster:    cluster,
		Restarting: func([]record.Record) func(string) bool { return func(id string) bool { return restarting[id] } },
	})
	must(t, d.DeferUnlessPublished(t.Context(), volume, "another"))
	before := w.records[0]
	if err := d.DeferUnlessPublished(t.Context(), volume, instance); !errors.Is(err, detach.ErrRestarting) {
		t.Errorf("got %v", err)
	}
	if len(w.records) != 1 || w.records[0] != before {
		t.Errorf("records %v, want %v", w.records, before)
	}
	restarting["another"] = false
	must(t, d.DeferUnlessPublished(t.Context(), volume, instance))
	if set, err := d.List(t.Context()); err != nil || set.Instances()[volume] != instance {
		t.Errorf("instances %v, %v", set.Instances(), err)
	}
}

// An unpublish that comes long after the volume was published again gives no time to the detach, if there is an
// orchestrator to ask: it may be a second old one.
func TestUntimedIsAskedFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, claimed := &world{holder: instance, turn: func(string) {}}, true
		d := newAsking(actor{w, ""}, &claimed)
		must(t, d.Defer(t.Context(), volume, instance))
		must(t, d.TakeBack(t.Context(), volume))
		for range 2 {
			must(t, d.Defer(t.Context(), volume, instance))
			time.Sleep(11 * time.Minute)
		}
		set, err := d.List(t.Context())
		must(t, err)
		if deferred, ok := set.Of(volume, instance); !ok || !deferred.Untimed {
			t.Errorf("the deferred detach is %+v, %t", deferred, ok)
		}
		if _, err := d.StartClock(t.Context(), set.From(instance)[0]); !errors.Is(err, detach.ErrClaimed) {
			t.Errorf("got %v", err)
		}
	})
}

// A record that belongs to another cluster is neither used nor deleted.
func TestRecordOfAnotherCluster(t *testing.T) {
	w := &world{holder: instance, turn: func(string) {}}
	other := detach.New(actor{w, ""}, detach.Options{Cluster: "other", Grace: grace})
	must(t, other.Defer(t.Context(), volume, instance))
	d := newDetacher(actor{w, ""})
	set, err := d.List(t.Context())
	must(t, err)
	if got := set.Instances(); len(got) > 0 {
		t.Errorf("instances %v, records %v", got, w.records)
	}
	must(t, d.Defer(t.Context(), volume, instance))
	must(t, d.Forget(t.Context(), volume))
	if got := names(w); !slices.Equal(got, []string{record.Deferrals.Named("other", volume)}) {
		t.Errorf("records %v", got)
	}
}

// Records are read by later versions of the plugin, and by other versions that run at the same time. The longest fit.
func TestRecordsArePermanent(t *testing.T) {
	w := &world{holder: instance, turn: func(string) {}}
	d := newDetacher(actor{w, ""})
	want := func(name, text string) {
		t.Helper()
		last := w.records[len(w.records)-1]
		if last.Name != name || last.Text != text {
			t.Errorf("%s %s, want %s %s", last.Name, last.Text, name, text)
		}
	}
	deferral := record.Deferrals.Named(cluster, volume)
	const begin = `{"v":1,"cluster":"prod","disk":"` + volume + `","instance":"` + instance + `"`
	must(t, d.Defer(t.Context(), volume, instance))
	want(deferral, begin+`}`)
	must(t, d.TakeBack(t.Context(), volume))
	want(deferral, begin+`,"over":true,"n":1}`)
	must(t, d.Defer(t.Context(), volume, instance))
	want(deferral, begin+`,"untimed":true,"n":2}`)
	pages.Shows(t, "../../docs/reference/formats.md",
		begin+"}", begin+`,"over":true,"n":1}`, begin+`,"untimed":true,"n":2}`)

	const other = "c1f6ad2e-50b7-4b0e-9a65-0a4f7b7b6d21"
	must(t, d.Defer(t.Context(), volume, other))
	const back = `{"v":1,"cluster":"prod","disk":"` + volume + `","instance":`
	want(deferral, back+`"`+other+`","earlier":["`+instance+`"]}`)
	must(t, d.TakeBack(t.Context(), volume))
	must(t, d.Defer(t.Context(), volume, instance))
	want(deferral, back+`"`+instance+`","untimed":true,"earlier":["`+other+`"],"n":2}`)

	long := strings.Repeat("c", 63)
	d = detach.New(unanswering{actor{w, ""}}, detach.Options{Cluster: long, Grace: grace})
	longVolume := uuid.NewString()
	for range 9 {
		must(t, d.Defer(t.Context(), longVolume, uuid.NewString()))
	}
	for range 2 {
		must(t, d.Defer(t.Context(), longVolume, instance))
		must(t, d.TakeBack(t.Context(), longVolume))
	}
	must(t, d.Defer(t.Context(), longVolume, instance))
	_ = d.Detach(t.Context(), longVolume, instance) // leaves its record
	for _, r := range w.records {
		if len(r.Name) > 63 || len(r.Text) > 512 {
			t.Errorf("too long: %s %s", r.Name, r.Text)
		}
	}
	if got := names(w); len(got) != 3 || got[2] != record.Holds.Named(long, longVolume) {
		t.Errorf("records %v", got)
	}
}

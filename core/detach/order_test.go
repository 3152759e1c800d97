// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package detach_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/core/detach"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/record"
)

const (
	volume   = "0f9c5a0e-8c1f-4c6b-9f58-5d2f0b6f2a11"
	instance = "5a2d7c34-1b7e-4f0a-8d7f-8b1c2d3e4f50"
	cluster  = "prod"
	grace    = time.Minute
)

// world is a rack with one disk and a running instance with hot-plug. Its calls are atomic.
type world struct {
	holder  string
	records []record.Record
	made    int
	// turn is called before each call, by the actor that makes it.
	turn func(actor string)
}

// actor is the rack as one process sees it.
type actor struct {
	*world
	name string
}

func (a actor) Disk(context.Context, string) (rack.Disk, error) {
	a.turn(a.name)
	return a.disk(), nil
}

func (w *world) disk() rack.Disk {
	d := rack.Disk{VolumeID: volume, State: rack.Detached, InstanceID: w.holder}
	if w.holder != "" {
		d.State = rack.Attached
	}
	return d
}

func (a actor) WaitForDisk(_ context.Context, d rack.Disk, _ time.Duration) (rack.Disk, error) {
	return d, nil
}

func (a actor) Instance(context.Context, string) (rack.Instance, error) {
	a.turn(a.name)
	return rack.Instance{ID: instance, RunState: rack.Running}, nil
}

func (a actor) Detach(context.Context, rack.DiskID, string) (rack.Disk, error) {
	a.turn(a.name)
	a.holder = ""
	return a.disk(), nil
}

func (a actor) ConfirmProject(context.Context) error { return nil }

func (a actor) Records(context.Context) ([]record.Record, error) {
	a.turn(a.name)
	return slices.Clone(a.records), nil
}

func (a actor) CreateRecord(_ context.Context, name, text string) (record.Record, error) {
	a.turn(a.name)
	if slices.ContainsFunc(a.records, func(r record.Record) bool { return r.Name == name }) {
		return record.Record{}, rack.ErrAlreadyExists
	}
	a.made++
	made := record.Record{ID: fmt.Sprint(a.made), Name: name, Text: text}
	a.world.records = append(a.records, made)
	return made, nil
}

func (a actor) RecordNamed(_ context.Context, name string) (record.Record, bool, error) {
	a.turn(a.name)
	i := slices.IndexFunc(a.records, func(r record.Record) bool { return r.Name == name })
	if i < 0 {
		return record.Record{}, false, nil
	}
	return a.records[i], true, nil
}

func (a actor) UpdateRecord(_ context.Context, id, text string) (found bool, err error) {
	a.turn(a.name)
	i := slices.IndexFunc(a.records, func(r record.Record) bool { return r.ID == id })
	if i < 0 {
		return false, nil
	}
	a.records[i].Text = text
	return true, nil
}

func (a actor) DeleteRecord(_ context.Context, id string) error {
	a.turn(a.name)
	i := slices.IndexFunc(a.records, func(r record.Record) bool { return r.ID == id })
	if i < 0 {
		return nil
	}
	a.world.records = slices.Delete(slices.Clone(a.records), i, i+1)
	return nil
}

func newDetacher(a actor) *detach.Detacher {
	return detach.New(a, detach.Options{Cluster: cluster, Grace: grace, Log: slog.New(slog.DiscardHandler)})
}

// publish publishes the volume on the instance that has its disk, as ControllerPublishVolume does. It returns false if
// it gave way.
func publish(t *testing.T, a actor, d *detach.Detacher) (published bool) {
	t.Helper()
	err := d.TakeBack(t.Context(), volume)
	if errors.Is(err, detach.ErrDetaching) {
		return false
	}
	must(t, err)
	now, err := a.Disk(t.Context(), volume)
	must(t, err)
	return now.InstanceID == instance
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// schedule runs functions one call at a time, in the order that choose decides.
type schedule struct {
	waiting map[string]chan struct{}
	// stopped receives the name of an actor that waits for its turn or has ended.
	stopped chan string
}

// run runs the actors and returns the order of their calls. choose picks one of the actors that wait.
func run(w *world, actors map[string]func(), choose func(waiting []string) string) (order []string) {
	s := schedule{waiting: map[string]chan struct{}{}, stopped: make(chan string)}
	ended := map[string]bool{}
	next := make(chan string)
	gates := map[string]chan struct{}{}
	for name := range actors {
		gates[name] = make(chan struct{})
	}
	w.turn = func(actor string) {
		next <- actor
		<-gates[actor]
	}
	done := make(chan string)
	for name, do := range actors {
		go func() {
			do()
			done <- name
		}()
	}
	for len(ended) < len(actors) {
		for len(s.waiting)+len(ended) < len(actors) {
			select {
			case name := <-next:
				s.waiting[name] = gates[name]
			case name := <-done:
				ended[name] = true
			}
		}
		if len(s.waiting) == 0 {
			break
		}
		name := choose(slices.Sorted(maps.Keys(s.waiting)))
		delete(s.waiting, name)
		order = append(order, name)
		gates[name] <- struct{}{}
	}
	return order
}

// everyOrder calls one for every order in which the calls of the actors can follow each other.
func everyOrder(one func(choose func(waiting []string) string)) (orders int) {
	// Each prefix is a list of choices; a run extends it by first choices and tells how many there were.
	prefixes := [][]int{{}}
	for len(prefixes) > 0 {
		prefix := prefixes[len(prefixes)-1]
		prefixes = prefixes[:len(prefixes)-1]
		step := 0
		var choices, widths []int
		one(func(waiting []string) string {
			choice := 0
			if step < len(prefix) {
				choice = prefix[step]
			}
			choices, widths = append(choices, choice), append(widths, len(waiting))
			step++
			return waiting[choice]
		})
		orders++
		for i := len(prefix); i < len(choices); i++ {
			for other := choices[i] + 1; other < widths[i]; other++ {
				prefixes = append(prefixes, append(slices.Clone(choices[:i]), other))
			}
		}
	}
	return orders
}

// In whatever order the calls of a publish and of one or two detaching processes follow each other, a disk whose volume
// was published is never detached, and afterwards the publish succeeds.
func TestPublishedDiskIsNeverDetached(t *testing.T) {
	for _, detaching := range []int{1, 2} {
		publishedIsNeverDetached(t, grace, detaching)
	}
	publishedIsNeverDetached(t, 0, 1) // a controller without a grace period beside one with it, as in a rolling update
}

func publishedIsNeverDetached(t *testing.T, publisher time.Duration, detaching int) {
	t.Helper()
	t.Run(fmt.Sprintf("grace period of the publisher %s, %d detaching", publisher, detaching), func(t *testing.T) {
		orders := everyOrder(func(choose func([]string) string) {
			w := &world{holder: instance, turn: func(string) {}}
			must(t, newDetacher(actor{w, ""}).Defer(t.Context(), volume, instance))
			published := false
			actors := map[string]func(){"publish": func() {
				a := actor{w, "publish"}
				d := detach.New(a, detach.Options{Cluster: cluster, Grace: publisher, Log: slog.New(slog.DiscardHandler)})
				published = publish(t, a, d) || publisher == 0 && publish(t, a, d) // the second one sees what the first has left
			}}
			for i := range detaching {
				name := fmt.Sprint("detach", i)
				// An error is no fault: the detacher gives way to the publish, or to the other one.
				actors[name] = func() { _ = newDetacher(actor{w, name}).Detach(t.Context(), volume, instance) }
			}
			order := run(w, actors, choose)
			if published && w.holder != instance {
				t.Fatalf("the volume is published and its disk was detached: %s", strings.Join(order, " "))
			}
			w.turn = func(string) {}
			if !published && w.holder == instance && !publish(t, actor{w, ""}, newDetacher(actor{w, ""})) {
				t.Fatalf("no process works, and the volume cannot be published: %s", strings.Join(order, " "))
			}
			for _, r := range w.records {
				if strings.HasPrefix(r.Name, "csi-hold-") {
					t.Fatalf("a detaching record is left: %s", strings.Join(order, " "))
				}
			}
		})
		if orders < 30 {
			t.Errorf("only %d orders", orders)
		}
		t.Logf("%d orders", orders)
	})
}

// lookOnce makes a detacher carry out what is due. Its time ends at no moment at which another pause ends.
func lookOnce(t *testing.T, d *detach.Detacher) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 1500*time.Millisecond)
	defer cancel()
	d.Run(ctx)
}

// In whatever order the calls of an unpublish and of a process that deletes the volume's record which is over follow
// each other, an unpublish that has succeeded leaves a deferred detach.
func TestRecordThatIsUsedAgainIsNeverDeleted(t *testing.T) {
	orders := everyOrder(func(choose func([]string) string) {
		synctest.Test(t, func(t *testing.T) {
			w := &world{holder: instance, turn: func(string) {}}
			old := newDetacher(actor{w, "expire"})
			must(t, old.Defer(t.Context(), volume, instance))
			must(t, old.TakeBack(t.Context(), volume))
			lookOnce(t, old)
			time.Sleep(time.Hour)
			var unpublished error
			order := run(w, map[string]func(){
				"expire": func() { lookOnce(t, old) },
				"unpublish": func() {
					unpublished = newDetacher(actor{w, "unpublish"}).Defer(t.Context(), volume, instance)
				},
			}, choose)
			w.turn = func(string) {}
			set, err := newDetacher(actor{w, ""}).List(t.Context())
			must(t, err)
			if _, ok := set.Of(volume, instance); unpublished == nil && !ok {
				t.Fatalf("the unpublish succeeded, and the detach is not deferred: %s", strings.Join(order, " "))
			}
			if set.Detaching(volume) {
				t.Fatalf("a detaching record is left: %s", strings.Join(order, " "))
			}
		})
	})
	if orders < 30 {
		t.Errorf("only %d orders", orders)
	}
	t.Logf("%d orders", orders)
}

// In whatever order the calls follow each other, an unpublish that has succeeded leaves a deferred detach, although
// another process is just ending the one of the instance that had the disk before.
func TestUnpublishMeetsTheEndOfADetach(t *testing.T) {
	const next = "6b2d7c34-1b7e-4f0a-8d7f-8b1c2d3e4f51"
	orders := everyOrder(func(choose func([]string) string) {
		synctest.Test(t, func(t *testing.T) {
			w := &world{holder: instance, turn: func(string) {}}
			must(t, newDetacher(actor{w, ""}).Defer(t.Context(), volume, instance))
			unpublished := false
			order := run(w, map[string]func(){
				"detach": func() { must(t, newDetacher(actor{w, "detach"}).Detach(t.Context(), volume, instance)) },
				"orchestrator": func() {
					a := actor{w, "orchestrator"}
					d := newDetacher(a)
					if a.turn(a.name); a.holder != "" {
						return
					}
					a.world.holder = next
					// Whether the publish succeeds or fails here, the orchestrator may unpublish the volume next.
					_ = d.TakeBack(t.Context(), volume)
					err := d.Defer(t.Context(), volume, next)
					if unpublished = err == nil; !unpublished && !errors.Is(err, rack.ErrUnavailable) {
						t.Error(err) // it may have waited for long enough
					}
				},
			}, choose)
			w.turn = func(string) {}
			set, err := newDetacher(actor{w, ""}).List(t.Context())
			must(t, err)
			if _, ok := set.Of(volume, next); unpublished && !ok {
				t.Fatalf("the unpublish succeeded, and the detach is not deferred: %s", strings.Join(order, " "))
			}
		})
	})
	if orders < 30 {
		t.Errorf("only %d orders", orders)
	}
	t.Logf("%d orders", orders)
}

// A process finds that a detach is due. Meanwhile the volume comes back to its instance, and Nomad repeats the old
// unpublish. In whatever order their calls follow each other, the disk of a published volume is not detached.
func TestDueDetachThatWasTakenBack(t *testing.T) {
	orders := everyOrder(func(choose func([]string) string) {
		synctest.Test(t, func(t *testing.T) {
			w := &world{holder: instance, turn: func(string) {}}
			due := newDetacher(actor{w, "due"})
			must(t, newDetacher(actor{w, ""}).Defer(t.Context(), volume, instance))
			lookOnce(t, due)
			time.Sleep(grace)
			published := false
			order := run(w, map[string]func(){
				"due": func() { lookOnce(t, due) },
				"nomad": func() {
					a := actor{w, "nomad"}
					d := newDetacher(a)
					if published = publish(t, a, d); published {
						_ = d.Defer(t.Context(), volume, instance) // also a late unpublish that fails may have its effect
					}
				},
			}, choose)
			if published && w.holder != instance {
				t.Fatalf("the disk of a published volume was detached: %s", strings.Join(order, " "))
			}
		})
	})
	if orders < 30 {
		t.Errorf("only %d orders", orders)
	}
	t.Logf("%d orders", orders)
}

// newAsking returns a detacher that asks for claims. Whether the volume is claimed is in the world.
func newAsking(a actor, claimed *bool) *detach.Detacher {
	return detach.New(a, detach.Options{
		Cluster: cluster, Grace: grace, Log: slog.New(slog.DiscardHandler),
		Claimed: func(context.Context, string, []string) (map[string]string, error) {
			a.turn(a.name)
			if *claimed {
				return map[string]string{volume: "a job"}, nil
			}
			return nil, nil
		},
	})
}

// A process finds that a detach is due, and asks for the claims. Meanwhile a job starts or ends, as Nomad does it: it
// claims the volume before the publish, and releases it after the unpublish. In whatever order their calls follow each
// other, the disk of a job that runs is never detached, and that of a job that has ended is detached in the end.
func TestClaimsMeetADueDetach(t *testing.T) {
	for _, starts := range []bool{true, false} {
		t.Run(fmt.Sprintf("the job starts %t", starts), func(t *testing.T) {
			orders := everyOrder(func(choose func([]string) string) {
				synctest.Test(t, func(t *testing.T) {
					w, claimed := &world{holder: instance, turn: func(string) {}}, !starts
					due, controller := newAsking(actor{w, "due"}, &claimed), newAsking(actor{w, "nomad"}, &claimed)
					must(t, controller.Defer(t.Context(), volume, instance)) // for another job, with the same disk
					lookOnce(t, due)
					time.Sleep(grace)
					runs := !starts
					order := run(w, map[string]func(){
						"due": func() { lookOnce(t, due) },
						"nomad": func() {
							a := actor{w, "nomad"}
							a.turn(a.name)
							if starts {
								claimed = true
								runs = publish(t, a, controller)
							} else if controller.Defer(t.Context(), volume, instance) == nil {
								a.turn(a.name)
								claimed, runs = false, false
							}
						},
					}, choose)
					w.turn = func(string) {}
					ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
					defer cancel()
					due.Run(ctx)
					if want := map[bool]string{true: instance, false: ""}[runs]; w.holder != want && (runs || !claimed) {
						t.Fatalf("the job runs %t, and its disk is on %q: %s", runs, w.holder, strings.Join(order, " "))
					}
				})
			})
			if orders < 30 {
				t.Errorf("only %d orders", orders)
			}
			t.Logf("%d orders", orders)
		})
	}
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package restart

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// watched is an orchestrator whose guests halt as soon as they are asked to. It keeps the reports.
type watched struct {
	obedient
	reports *simtest.Output
}

func (w watched) Report(_ context.Context, _ string, report orchestrator.Report) error {
	_, err := fmt.Fprintln(w.reports, report.Event.Reason, report.Message)
	return err
}

func (watched) Drain(context.Context, string, string) ([]string, error) { return nil, nil }

func (watched) Undrain(context.Context, string, string) error { return nil }

const testCoolDown = 2 * time.Minute

// newSharedEngine returns an engine for an instance that others start and stop, too.
func newSharedEngine(r Rack, on *downRack, shutdown Shutdown) (e *Engine, log, reports *simtest.Output) {
	log, reports = &simtest.Output{}, &simtest.Output{}
	o := watched{obedient{r: on}, reports}
	e = New(r, Options{
		Cluster: "prod", MaxDisks: 8, Shutdown: shutdown, Requester: o, Drainer: o, MaxDown: 1,
		HaltTimeout: 10 * time.Minute, CoolDown: testCoolDown, Log: slog.New(slog.NewTextHandler(log, nil)),
	})
	return e, log, reports
}

// startByOthers starts the instance if it is stopped, as another user of the rack does.
func (r *downRack) startByOthers() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.state == rack.Stopped {
		r.state, r.since = rack.Running, time.Now()
	}
}

// stopByOthers stops the instance, as another user of the rack does.
func (r *downRack) stopByOthers() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.state, r.since = rack.Stopped, time.Now()
}

// Somebody starts the instance whenever it is stopped, such as Oxide's provider for Cluster API. It is stopped at most
// once in a cool-down, the reason is told at every moment, and the disk is attached once the starter leaves.
func TestSomebodyStartsTheInstance(t *testing.T) {
	t.Parallel()
	for _, shutdown := range []Shutdown{Hard, Guest, Drain} {
		for _, every := range []time.Duration{time.Millisecond, 700 * time.Millisecond, 10 * time.Second} {
			t.Run(fmt.Sprint(shutdown, every), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					r := newDownRack()
					r.since, r.latency = r.since.Add(-2*testCoolDown), 317*time.Millisecond
					e, log, reports := newSharedEngine(r, r, shutdown)
					ctx, cancel := context.WithCancel(t.Context())
					go e.Run(ctx)
					published := false
					publish := func() { // the orchestrator repeats it
						_, err := e.Publish(t.Context(), "wanted", "i")
						if published = published || err == nil; !published && !errors.Is(err, ErrPlanned) {
							t.Fatal(err)
						}
					}
					starting, leave := context.WithCancel(t.Context())
					go func() {
						for starting.Err() == nil {
							time.Sleep(every)
							r.startByOthers()
						}
					}()
					for began := time.Now(); time.Since(began) < 10*time.Minute; time.Sleep(time.Second) {
						publish()
						checkTrueReason(t, e)
					}
					leave()
					// A guest is down at once, and a publish may just meet that moment.
					met := published
					if every < r.latency && shutdown == Hard && len(r.stops) < 3 && !met {
						t.Errorf("%d stops: the starter did not come first", len(r.stops))
					}
					for range 2 * testCoolDown / time.Second {
						time.Sleep(time.Second)
						publish()
					}
					cancel()
					<-e.Retired()
					for i := 1; i < len(r.stops); i++ {
						if gap := r.stops[i].Sub(r.stops[i-1]); gap < testCoolDown {
							t.Errorf("stopped again after %s", gap)
						}
					}
					if !published || !r.onNode["wanted"] || r.state != rack.Running {
						t.Errorf("published: %t, attached: %t, the instance is %s", published, r.onNode["wanted"], r.state)
					}
					const told = "others started it"
					if every < r.latency && !met &&
						(!strings.Contains(log.String(), told) || !strings.Contains(reports.String(), told)) {
						t.Errorf("the log, or the reports, do not say that %s:\n%s\n%s", told, log, reports)
					}
				})
			})
		}
	}
}

// checkTrueReason checks that no status blames the rack or its operator, who have done nothing.
func checkTrueReason(t *testing.T, e *Engine) {
	t.Helper()
	all, err := e.Report(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range all {
		if strings.Contains(r.Message, "operator") || strings.Contains(r.Message, "did not stop") {
			t.Errorf("untrue: %+v", r)
		}
	}
}

// An instance that somebody stops after the plugin has started it is not started again.
func TestSomebodyStopsTheStartedInstance(t *testing.T) {
	t.Parallel()
	for _, shutdown := range []Shutdown{Hard, Guest, Drain} {
		t.Run(string(shutdown), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newDownRack()
				r.since = r.since.Add(-2 * testCoolDown)
				e, log, _ := newSharedEngine(stoppedAgain{r}, r, shutdown)
				e.addRequest(r.view("wanted"), "i")
				ctx, cancel := context.WithCancel(t.Context())
				go e.Run(ctx)
				time.Sleep(10 * time.Minute)
				cancel()
				<-e.Retired()
				if r.starts != 1 || r.state != rack.Stopped || !r.onNode["wanted"] {
					t.Errorf("%d starts, the instance is %s, disk attached: %t", r.starts, r.state, r.onNode["wanted"])
				}
				if !strings.Contains(log.String(), "others stopped it") {
					t.Errorf("the log does not say it:\n%s", log)
				}
			})
		})
	}
}

// stoppedAgain is a rack whose owner stops the instance as soon as it was started.
type stoppedAgain struct{ *downRack }

func (r stoppedAgain) StartInstance(ctx context.Context, id string) (rack.Instance, error) {
	started, err := r.downRack.StartInstance(ctx, id)
	r.stopByOthers()
	return started, err
}

// A process that cannot look at an instance starts it once. Its owner may stop it after that.
func TestUnseenInstanceIsStartedOnce(t *testing.T) {
	t.Parallel()
	for _, shutdown := range []Shutdown{Hard, Guest} {
		t.Run(string(shutdown), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newDownRack()
				r.since = r.since.Add(-2 * testCoolDown)
				blind := blindRack{r, &atomic.Bool{}}
				e, _, _ := newSharedEngine(blind, r, shutdown)
				e.addRequest(r.view("wanted"), "i")
				ctx, cancel := context.WithCancel(t.Context())
				go e.Run(ctx)
				for range 60 {
					time.Sleep(time.Second)
					if starts, _ := r.seen(); starts == 1 {
						break
					}
				}
				r.stopByOthers()
				time.Sleep(10 * time.Minute)
				blind.sees.Store(true)
				time.Sleep(10 * time.Minute)
				cancel()
				<-e.Retired()
				if r.starts != 1 || r.state != rack.Stopped {
					t.Errorf("%d starts, the instance is %s", r.starts, r.state)
				}
			})
		})
	}
}

// blindRack does not show the instance from its stop on.
type blindRack struct {
	*downRack
	sees *atomic.Bool
}

func (r blindRack) Instance(ctx context.Context, id string) (rack.Instance, error) {
	if _, stopped := r.seen(); stopped && !r.sees.Load() {
		return rack.Instance{}, rack.ErrUnavailable
	}
	return r.downRack.Instance(ctx, id)
}

// An instance that has failed has no guest to lose. It is stopped and started for a disk without a cool-down.
func TestFailedInstanceNeedsNoCoolDown(t *testing.T) {
	t.Parallel()
	for _, shutdown := range []Shutdown{Hard, Guest, Drain} {
		t.Run(string(shutdown), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newDownRack()
				r.state = rack.Failed
				e, _, reports := newSharedEngine(failedRack{r}, r, shutdown)
				e.addRequest(r.view("wanted"), "i")
				ctx, cancel := context.WithCancel(t.Context())
				go e.Run(ctx)
				time.Sleep(testCoolDown / 2)
				cancel()
				<-e.Retired()
				if r.state != rack.Running || !r.onNode["wanted"] || r.starts != 1 {
					t.Errorf("the instance is %s after %d starts, disk attached: %t:\n%s",
						r.state, r.starts, r.onNode["wanted"], reports)
				}
			})
		})
	}
}

// failedRack has an instance whose stop only changes its state.
type failedRack struct{ *downRack }

func (r failedRack) StopInstance(ctx context.Context, id string) error {
	r.mu.Lock()
	failed := r.state == rack.Failed
	if failed {
		r.halt()
	}
	r.mu.Unlock()
	if failed {
		return nil
	}
	return r.downRack.StopInstance(ctx, id)
}

// An instance that somebody starts again between the plan and the stop has its cool-down.
func TestSomebodyRestartsBeforeTheStop(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newDownRack()
		r.since = r.since.Add(-2 * testCoolDown)
		e, _, _ := newSharedEngine(r, r, Hard)
		e.addRequest(r.view("wanted"), "i")
		if err := e.tick(t.Context()); err != nil {
			t.Fatal(err)
		}
		if !slices.ContainsFunc(sortedKeys(e.held), func(id string) bool { return e.held[id].stage == stagePlanned }) {
			t.Fatal("no restart is planned")
		}
		r.stopByOthers()
		r.startByOthers()
		for range 3 {
			if err := e.tick(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		if _, stopped := r.seen(); stopped {
			t.Error("it was stopped in the cool-down of somebody else's start")
		}
	})
}

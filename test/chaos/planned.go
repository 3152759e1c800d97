// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// mostDisks is how many disks an instance takes.
const maxDisks = 12

// plannedWorld is a rack that changes disks only of stopped instances, and two controllers that restart them: one is asked,
// and both plan.
type plannedWorld struct {
	*world
	// control reaches the rack's control endpoint, where nothing goes wrong, in all its lives.
	control     *simtest.Sim
	instances   []simtest.Instance
	controllers [2]*simtest.Plugin
	conns       [2]*grpc.ClientConn
	// turn is which controller is asked, and changes when another replica leads. breaks counts these changes, and kills.
	leader, breaks atomic.Int64

	mu sync.Mutex
	// foreign are the instances that somebody else keeps stopped, and since when.
	stoppedByOthers map[string]time.Time
	// asked is when a record of a restart of an instance was last seen that says that it may go down.
	mayStop map[string]time.Time
}

// runPlanned is run for planned restarts.
func runPlanned(ctx context.Context, o options) (err error) {
	begun := time.Now()
	base, err := newWorld(o)
	if err != nil {
		return err
	}
	p := &plannedWorld{world: base, stoppedByOthers: map[string]time.Time{}, mayStop: map[string]time.Time{}}
	b := newBooks()
	defer func() { err = errors.Join(err, p.end(o.keep || err != nil)) }()
	if err := p.begin(ctx, b); err != nil {
		return err
	}
	end := time.Now().Add(o.duration)
	ctx, cancel := context.WithDeadline(ctx, end.Add(plannedSettleTime))
	defer cancel()
	actors := p.newActors()
	var acting, watching sync.WaitGroup
	for _, a := range actors {
		acting.Go(func() { a.act(ctx, end) })
	}
	acting.Go(func() { p.stopInstances(ctx, end) })
	watch, stopWatching := context.WithCancel(ctx)
	watching.Go(func() { p.watch(watch, actors) })
	defer func() {
		stopWatching()
		watching.Wait()
	}()
	if err := p.causeTrouble(ctx, end); err != nil {
		cancel()
		acting.Wait()
		return err
	}
	acting.Wait()
	if ctx.Err() == nil {
		p.settle(ctx, actors)
	}
	stopWatching()
	watching.Wait()
	if ctx.Err() == nil {
		p.deleteAll(ctx, actors)
	}
	if err := ctx.Err(); err != nil {
		b.violation("interrupted, or not all has come to rest %s after the last fault: %v", plannedSettleTime, err)
	}
	if err := errors.Join(p.auditLog(plannerLog, b), p.auditLog(rackLog, b)); err != nil {
		return err
	}
	return b.report(
		p.world,
		time.Since(begun),
		"audit: every published volume stayed attached, never more than two instances were down for restarts, all came back",
	)
}

// plannedSettleTime is how long all may take to come to rest once nothing goes wrong any more: leases end, and then there are
// restarts to be done.
const plannedSettleTime = 4 * time.Minute

const plannerLog = "planners.log"

func (p *plannedWorld) begin(ctx context.Context, b *books) (err error) {
	p.books = b
	if p.api, err = freeAddress(p.random); err != nil {
		return err
	}
	if p.world.control, err = freeAddress(p.random); err != nil {
		return err
	}
	if err := p.startRack(ctx); err != nil {
		return err
	}
	p.control = &simtest.Sim{Control: p.sim.Control}
	for _, name := range nodes {
		p.instances = append(p.instances, p.sim.Instance(name))
	}
	if p.rack, err = oxide.NewClient(oxide.WithHost("http://"+p.api), oxide.WithToken(p.sim.Token)); err != nil {
		return err
	}
	for i := range p.controllers {
		if err := os.Mkdir(p.path(fmt.Sprintf("csi%d", i)), 0o755); err != nil {
			return err
		}
		if err := p.startController(i); err != nil {
			return err
		}
		p.conns[i], err = grpc.NewClient(
			"unix://"+p.controllers[i].Socket,
			grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithConnectParams(
				grpc.ConnectParams{
					Backoff: backoff.Config{BaseDelay: 5 * time.Millisecond, Multiplier: 1.5, MaxDelay: 200 * time.Millisecond},
				},
			),
		)
		if err != nil {
			return err
		}
	}
	return p.injectFaults(ctx)
}

func (p *plannedWorld) startController(i int) error {
	log, err := p.log(plannerLog)
	if err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	p.controllers[i], err = simtest.StartPlugin(self, simtest.PluginOptions{
		Mode:   "controller",
		Dir:    filepath.Join(p.dir, fmt.Sprintf("csi%d", i)),
		Sim:    p.sim,
		Stderr: log,
		Apart:  true,
		Env:    []string{planner + "=1"},
	})
	return err
}

// leading is the controller that is asked at present.
func (p *plannedWorld) leadingController() csi.ControllerClient {
	return csi.NewControllerClient(p.conns[p.leader.Load()])
}

// plannedTrouble kills controllers and rack at random, and lets the other controller be asked, until the end.
func (p *plannedWorld) causeTrouble(ctx context.Context, end time.Time) error {
	for {
		wait := time.Until(end)
		if p.kills > 0 {
			wait = min(wait, time.Duration(p.random.ExpFloat64()*float64(p.kills)))
		}
		if err := pause(ctx, wait); err != nil {
			return nil // interrupted, which runPlanned reports
		}
		if !time.Now().Before(end) {
			return p.endTrouble(ctx)
		}
		var err error
		switch p.random.IntN(5) {
		case 0:
			err = p.killRack(ctx)
		case 1:
			p.killed["change of the leader"]++
			p.leader.Store(1 - p.leader.Load())
			p.breaks.Add(1)
		default:
			err = p.killController(ctx, p.random.IntN(len(p.controllers)))
		}
		if err != nil {
			return err
		}
	}
}

// inOrder is how long a controller that is told to end may take before it is killed.
const terminationGrace = 3 * time.Second

// killController ends a controller, half of the times in order if it does so in time, and starts another one.
func (p *plannedWorld) killController(ctx context.Context, i int) error {
	p.breaks.Add(1)
	if p.random.IntN(2) == 0 {
		p.killed["controller, told to end"]++
		if err := p.controllers[i].Signal(syscall.SIGTERM); err != nil {
			return err
		}
		select {
		case <-p.controllers[i].Done():
		case <-time.After(terminationGrace):
		}
	} else {
		p.killed["controller"]++
	}
	if err := p.controllers[i].Kill(); err != nil {
		return err
	}
	p.breaks.Add(1)
	if err := p.away(ctx); err != nil {
		return err
	}
	return p.startController(i)
}

// calmPlanned ends all trouble. The controller that nobody asks is started anew: what it still wishes for on behalf of
// clients that now ask the other one lives on for ten minutes, and makes restarts until then.
func (p *plannedWorld) endTrouble(ctx context.Context) error {
	if err := p.calm(ctx); err != nil {
		return err
	}
	return p.killController(ctx, int(1-p.leader.Load()))
}

// stranger stops instances now and then that nobody is restarting, and starts them again, and starts some that are being
// restarted.
func (p *plannedWorld) stopInstances(ctx context.Context, end time.Time) {
	random := rand.New(rand.NewPCG(p.seed, 1<<32))
	for time.Now().Before(end) {
		if pause(ctx, time.Duration(random.IntN(6000))*time.Millisecond) != nil {
			return
		}
		instance := p.instances[random.IntN(len(p.instances))]
		switch state := p.runState(ctx, instance.ID); {
		case state == "stopped" && random.IntN(2) == 0:
			p.books.count("instance started by somebody else during its restart")
			p.setRunState(ctx, instance, "running")
		case state == "running":
			p.keepStopped(ctx, instance, time.Duration(random.IntN(4000))*time.Millisecond)
		}
	}
}

// keepStopped keeps an instance stopped for a while unless a restart of it is under way, and looks that nobody starts it. A
// restart that somebody had begun before he saw the instance stopped makes no difference between the two.
func (p *plannedWorld) keepStopped(ctx context.Context, instance simtest.Instance, wait time.Duration) {
	records, err := p.readRecords(ctx)
	if err != nil ||
		slices.ContainsFunc(records.restarts, func(r restartRecord) bool { return r.Instance == instance.ID }) {
		return
	}
	p.books.count("instance stopped by somebody else")
	begun := time.Now()
	p.mu.Lock()
	p.stoppedByOthers[instance.ID] = begun
	p.mu.Unlock()
	p.setRunState(ctx, instance, "stopped")
	if pause(ctx, wait) == nil {
		if state := p.runState(
			ctx,
			instance.ID,
		); state != "stopped" && state != "" &&
			!p.mayStopSince(ctx, instance.ID, begun) {
			p.books.violation("instance %s was stopped by somebody else at %s, and is %s", instance.ID, stamp(begun), state)
		}
	}
	p.setRunState(ctx, instance, "running")
	p.mu.Lock()
	delete(p.stoppedByOthers, instance.ID)
	p.mu.Unlock()
}

// askedSince reports whether a record of a restart of an instance was seen since then that says that it may go down.
func (p *plannedWorld) mayStopSince(ctx context.Context, instance string, since time.Time) bool {
	_, _ = p.readRecords(ctx) // what was seen before counts as well
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.mayStop[instance].After(since)
}

// put brings an instance to a run state, also while the rack is dead for a moment.
func (p *plannedWorld) setRunState(ctx context.Context, instance simtest.Instance, state string) {
	for ctx.Err() == nil {
		if p.control.SetRunState(ctx, instance.ID, state) == nil {
			return
		}
		_ = pause(ctx, 20*time.Millisecond) // the loop looks at the context
	}
}

// runState is empty when the rack is dead.
func (p *plannedWorld) runState(ctx context.Context, id string) string {
	list, err := p.control.ListInstances(ctx)
	if err != nil {
		return ""
	}
	for _, instance := range list {
		if instance.ID == id {
			return instance.RunState
		}
	}
	return ""
}

func (p *plannedWorld) end(keep bool) error {
	var errs []error
	for i := range p.controllers {
		if p.conns[i] != nil {
			errs = append(errs, p.conns[i].Close())
		}
		if p.controllers[i] != nil {
			errs = append(errs, p.controllers[i].Stop())
		}
	}
	return errors.Join(append(errs, p.world.end(keep))...)
}

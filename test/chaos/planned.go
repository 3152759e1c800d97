// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
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

	"github.com/oxidecomputer/oxide-csi-plugin/core/expand"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// maxDisks is how many disks an instance can have.
const maxDisks = 12

// plannedWorld is a rack and controllers of one kind. In the campaign of planned restarts the rack has no hot-plug, and
// there are two controllers in attach mode restart. The orchestrator calls the leading one, and both restart instances.
type plannedWorld struct {
	*world
	// kind is what the controllers are: a value of [planner].
	kind string
	// control is a client of the rack's control endpoint. It has no faults, and works again after a restart of the
	// rack.
	control     *simtest.Sim
	project     oxide.NameOrId
	machines    []*machine
	controllers []*simtest.Plugin
	conns       []*grpc.ClientConn
	// leader is the index of the controller that the orchestrator calls. breaks counts kills of controllers and changes
	// of the leader.
	leader, breaks atomic.Int64

	mu sync.Mutex
	// owned is the last time in which its owner kept an instance stopped, by instance.
	owned map[string]span
	// ownersStops are the times of the stops that the owners ordered, by instance.
	ownersStops map[string][]span
	// dying are the instances that their owner deletes, or has deleted.
	dying map[string]bool
	// mayStop is the last time at which a restart record allowed the stop of an instance, by instance.
	mayStop map[string]time.Time
}

func newPlannedWorld(base *world, kind string, controllers int) *plannedWorld {
	return &plannedWorld{
		world:       base,
		kind:        kind,
		controllers: make([]*simtest.Plugin, controllers),
		conns:       make([]*grpc.ClientConn, controllers),
		owned:       map[string]span{},
		ownersStops: map[string][]span{},
		dying:       map[string]bool{},
		mayStop:     map[string]time.Time{},
	}
}

// runPlanned runs the campaign of planned restarts.
func runPlanned(ctx context.Context, o options) (err error) {
	begun := time.Now()
	base, err := newWorld(o)
	if err != nil {
		return err
	}
	p := newPlannedWorld(base, forRestarts, 2)
	b := newResults()
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
	for number := range ownersAtOnce {
		acting.Go(func() { p.ownInstances(ctx, end, number) })
	}
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
		b.violation("interrupted, or not settled %s after the last fault: %v", plannedSettleTime, err)
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

// plannedSettleTime is the longest time from the last fault to the end of all restarts and of what is left of
// expansions. Leases end in that time, and other restarts follow. Then the volumes are deleted, and a controller
// deletes what another one has left of an expansion after the settle age.
const plannedSettleTime = 4*time.Minute + expand.SettleAge

const plannerLog = "planners.log"

func (p *plannedWorld) begin(ctx context.Context, b *results) (err error) {
	p.results = b
	if p.api, err = freeAddress(p.random); err != nil {
		return err
	}
	if p.world.control, err = freeAddress(p.random); err != nil {
		return err
	}
	if err := p.startRack(ctx); err != nil {
		return err
	}
	p.control, p.project = &simtest.Sim{Control: p.sim.Control}, oxide.NameOrId(p.sim.Project)
	for _, name := range nodes {
		p.machines = append(p.machines, &machine{name: name, id: p.sim.Instance(name).ID})
	}
	if p.rack, err = p.sim.Client(); err != nil {
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
					Backoff: backoff.Config{
						BaseDelay:  5 * time.Millisecond,
						Multiplier: 1.5,
						MaxDelay:   200 * time.Millisecond,
					},
					MinConnectTimeout: 20 * time.Second, // else five milliseconds
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
		Mode:            "controller",
		Dir:             filepath.Join(p.dir, fmt.Sprintf("csi%d", i)),
		Sim:             p.sim,
		Stderr:          log,
		OwnProcessGroup: true,
		Env:             []string{planner + "=" + p.kind, claimsDir + "=" + p.path(claimsName)},
	})
	return err
}

// leadingController returns the controller that the orchestrator calls at present.
func (p *plannedWorld) leadingController() csi.ControllerClient {
	return csi.NewControllerClient(p.conns[p.leader.Load()])
}

// causeTrouble kills controllers and the rack at random, and changes the leader, until the end.
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

// terminationGrace is the time from the termination signal to a controller until the controller is killed.
const terminationGrace = 3 * time.Second

// killController terminates a controller in half of the cases, and kills it otherwise. Then it starts the controller
// again.
func (p *plannedWorld) killController(ctx context.Context, i int) error {
	p.breaks.Add(1)
	if p.random.IntN(2) == 0 {
		p.killed["controller, terminated"]++
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
	if err := p.downtime(ctx); err != nil {
		return err
	}
	return p.startController(i)
}

// endTrouble ends all faults and restarts the controller that is not the leader. Without that, this controller's attach
// requests would cause restarts for ten more minutes, although their clients now call the leader.
func (p *plannedWorld) endTrouble(ctx context.Context) error {
	if err := p.stopFaults(ctx); err != nil {
		return err
	}
	return p.killController(ctx, int(1-p.leader.Load()))
}

// keepStopped stops an instance for a while and checks that no controller starts it. It does nothing during a restart
// of the instance. A controller whose restart began before the stop may start the instance.
func (p *plannedWorld) keepStopped(ctx context.Context, id string, wait time.Duration) {
	records, err := p.readRecords(ctx)
	if err != nil || slices.ContainsFunc(records.restarts, func(r restartRecord) bool { return r.Instance == id }) {
		return
	}
	p.results.count("instance stopped by its owner")
	begun := time.Now()
	p.own(id)
	p.setRunState(ctx, id, "stopped")
	if pause(ctx, wait) == nil {
		if state := p.runState(ctx, id); state != "stopped" && state != "" && !p.mayStopSince(ctx, id, begun) {
			p.results.violation("instance %s was stopped by its owner at %s, and now is %s", id, stamp(begun), state)
		}
	}
	p.setRunState(ctx, id, "running")
	p.disown(id)
}

// mayStopSince reports whether a restart record that allows the stop of the instance was seen after since.
func (p *plannedWorld) mayStopSince(ctx context.Context, instance string, since time.Time) bool {
	_, _ = p.readRecords(ctx) // after an error, earlier reads count
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.mayStop[instance].After(since)
}

// setRunState sets the run state of an instance. It retries while the rack is dead.
func (p *plannedWorld) setRunState(ctx context.Context, id, state string) {
	for ctx.Err() == nil {
		if p.control.SetRunState(ctx, id, state) == nil {
			return
		}
		_ = pause(ctx, 20*time.Millisecond) // the loop condition checks the context
	}
}

// runState returns the run state of an instance, or "" if the rack is dead.
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

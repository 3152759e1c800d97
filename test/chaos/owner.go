// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package main

import (
	"context"
	"errors"
	"math/rand/v2"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// ownersAtOnce is how many owners act at the same time, each on another instance.
const ownersAtOnce = 2

// machine is a place for an instance. When its owner deletes the instance, a new one takes the place.
type machine struct {
	name string
	// acting is locked while an owner acts on the instance.
	acting sync.Mutex
	// id is the present instance. plannedWorld.mu protects it.
	id string
}

// span is a time in which the rack may have carried out an order. A zero end means that the order is under way.
type span struct{ begin, end time.Time }

func (p *plannedWorld) instanceOf(m *machine) string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return m.id
}

// isDying reports whether the owner deletes this instance, or has deleted it. An empty ID is none.
func (p *plannedWorld) isDying(id string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.dying[id]
}

// ownInstances does what an owner of instances may do at any moment, whatever the controllers are doing: it stops and
// starts instances, starts one whenever it is stopped, deletes one and makes another one in its place.
func (p *plannedWorld) ownInstances(ctx context.Context, end time.Time, number int) {
	random := rand.New(rand.NewPCG(p.seed, 1<<32+uint64(number)))
	for time.Now().Before(end) {
		if pause(ctx, time.Duration(random.IntN(4000))*time.Millisecond) != nil {
			return
		}
		if m := p.machines[random.IntN(len(p.machines))]; m.acting.TryLock() {
			p.ownInstance(ctx, m, random, end)
			m.acting.Unlock()
		}
	}
}

// ownInstance does one thing to an instance. In the end the instance runs, unless a controller has stopped it. Without
// the option owners it leaves the instance alone during its restart, or starts it.
func (p *plannedWorld) ownInstance(ctx context.Context, m *machine, random *rand.Rand, end time.Time) {
	id, wait := p.instanceOf(m), time.Duration(random.IntN(4000))*time.Millisecond
	state := p.runState(ctx, id)
	action := random.IntN(10)
	switch {
	case p.owners:
	case state == "running":
		action = 0
	default:
		action = 9
	}
	switch {
	case state == "": // the rack is dead
	case action < 3 && state == "running":
		p.keepStopped(ctx, id, wait)
	case action < 5:
		p.results.count("instance stopped by its owner at any moment, " + state)
		p.own(id)
		p.stopByOwner(ctx, id)
		_ = pause(ctx, wait) // the next call checks the context
		p.startByOwner(ctx, id)
		p.disown(id)
	case action < 8:
		p.results.count("owner that starts the instance whenever it is stopped")
		p.setStarter(ctx, id, time.Duration(1+random.IntN(500))*time.Millisecond)
		_ = pause(ctx, 2*wait) // the next call checks the context
		p.setStarter(ctx, id, 0)
	case action == 8 && time.Until(end) > time.Second: // the last publish of an actor knows which instances stay
		p.results.count("instance deleted by its owner, " + state)
		p.replace(ctx, m)
	case state == "stopped":
		p.results.count("instance started by its owner during its restart")
		p.startByOwner(ctx, id)
	}
}

// own says that the owner keeps an instance stopped, and disown that the instance runs again. A stop that was not
// answered may still follow.
func (p *plannedWorld) own(id string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.owned[id] = span{begin: time.Now()}
}

func (p *plannedWorld) disown(id string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	end := time.Now()
	for _, stop := range p.ownersStops[id] {
		end = later(end, stop.end)
	}
	p.owned[id] = span{begin: p.owned[id].begin, end: end}
}

// ownedSince reports whether the owner kept an instance stopped at any time since then.
func (p *plannedWorld) ownedSince(id string, then time.Time) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	kept, known := p.owned[id]
	return known && (kept.end.IsZero() || kept.end.After(then))
}

// stopByOwner orders the stop of an instance until the rack has accepted that, or has no such instance.
func (p *plannedWorld) stopByOwner(ctx context.Context, id string) {
	p.mu.Lock()
	i := len(p.ownersStops[id])
	p.ownersStops[id] = append(p.ownersStops[id], span{begin: time.Now()})
	p.mu.Unlock()
	late := time.Duration(0)
	for ctx.Err() == nil {
		_, err := p.rack.InstanceStop(ctx, oxide.InstanceStopParams{Instance: oxide.NameOrId(id)})
		if err == nil || statusOf(err) == http.StatusNotFound {
			break
		}
		late = lateness
		_ = pause(ctx, 20*time.Millisecond) // the loop condition checks the context
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ownersStops[id][i].end = time.Now().Add(late)
}

// startByOwner orders the start of an instance until it runs.
func (p *plannedWorld) startByOwner(ctx context.Context, id string) {
	for ctx.Err() == nil && p.runState(ctx, id) != "running" {
		// The loop condition looks at the instance and the context.
		_, _ = p.rack.InstanceStart(ctx, oxide.InstanceStartParams{Instance: oxide.NameOrId(id)})
		_ = pause(ctx, 50*time.Millisecond)
	}
}

// setStarter makes somebody start the instance whenever it is stopped, or ends that. It retries while the rack is dead.
func (p *plannedWorld) setStarter(ctx context.Context, id string, every time.Duration) {
	for ctx.Err() == nil && p.control.Starter(ctx, id, every) != nil {
		_ = pause(ctx, 20*time.Millisecond) // the loop condition checks the context
	}
}

// replace deletes an instance, whatever its state, and makes a new one in its place, as Cluster API does. It stops the
// instance where the rack refuses the deletion.
func (p *plannedWorld) replace(ctx context.Context, m *machine) {
	id := p.instanceOf(m)
	p.mu.Lock()
	p.dying[id] = true
	p.mu.Unlock()
	p.own(id)
	for ctx.Err() == nil {
		next, err := p.deleteAndMake(ctx, m.name, id)
		if err == nil {
			p.mu.Lock()
			m.id = next
			p.mu.Unlock()
			break
		}
		p.stopByOwner(ctx, id)
		_ = pause(ctx, 100*time.Millisecond) // the loop condition checks the context
	}
}

// deleteAndMake deletes an instance and makes one of the same name, or fails if the rack does not delete it. The rack
// is not killed in between: when it starts again, it makes all instances that it has not.
func (p *plannedWorld) deleteAndMake(ctx context.Context, name, id string) (next string, err error) {
	p.disks.RLock()
	defer p.disks.RUnlock()
	err = p.untilAnswered(ctx, func() error {
		return p.rack.InstanceDelete(ctx, oxide.InstanceDeleteParams{Instance: oxide.NameOrId(id)})
	})
	if err != nil {
		return "", err
	}
	err = p.untilAnswered(ctx, func() error {
		return p.rack.DiskDelete(ctx, oxide.DiskDeleteParams{Disk: oxide.NameOrId(name + "-boot"), Project: p.project})
	})
	if err != nil {
		return "", err
	}
	made, err := p.control.AddInstance(ctx, name, "", "running")
	if err != nil {
		p.results.violation("no instance %s can be made: %v", name, err)
	}
	return made.ID, err
}

// untilAnswered repeats a deletion until the rack has carried it out, or refuses it because of the object's state.
func (p *plannedWorld) untilAnswered(ctx context.Context, del func() error) error {
	for {
		switch err := del(); {
		case err == nil, statusOf(err) == http.StatusNotFound:
			return nil
		case statusOf(err) == http.StatusBadRequest:
			return err
		}
		if err := pause(ctx, 20*time.Millisecond); err != nil {
			return err
		}
	}
}

// statusOf returns the HTTP status of a refusal, or 0.
func statusOf(err error) int {
	var refusal *oxide.HTTPError
	if errors.As(err, &refusal) {
		return refusal.HTTPResponse.StatusCode
	}
	return 0
}

// ordered is the last stop of an instance that a controller ordered.
type ordered map[string]time.Time

// checkStops checks that the controllers order at most one stop in a cool-down. The rack may carry out an order late,
// so the times are those of the run states. A stop that is too short to be seen is not checked.
func (p *plannedWorld) checkStops(list []simtest.SimInstance, last ordered) {
	for _, instance := range list {
		at := instance.RunStateUpdated
		if instance.RunState != "stopping" || at.Equal(last[instance.ID]) || p.stoppedByOwnerAt(instance.ID, at) {
			continue
		}
		p.results.count("stop by a controller")
		if before := last[instance.ID]; at.Sub(before) < plannedCoolDown {
			p.results.violation("instance %s was stopped by a controller at %s and at %s:\n%s",
				instance.ID, stamp(before), stamp(at), p.logOf(instance.ID))
		}
		last[instance.ID] = at
	}
}

// stoppedByOwnerAt reports whether the owner may have stopped an instance at this time.
func (p *plannedWorld) stoppedByOwnerAt(id string, at time.Time) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.ContainsFunc(p.ownersStops[id], func(s span) bool {
		return !at.Before(s.begin) && (s.end.IsZero() || !at.After(s.end))
	})
}

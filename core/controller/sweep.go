// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/core/expand"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// defaultTemporaryAge is the age at which a clone's temporary snapshot counts as left behind, if none is configured. No
// call that uses the snapshot lasts that long.
const defaultTemporaryAge = time.Hour

// sweeper deletes temporary snapshots, and finishes or takes back expansions, that a crash of this process or of
// another replica left behind. It sweeps:
//
//   - at the start, and once more after age, for snapshots that the rack was still making at the start;
//   - when a snapshot that was too young, or that a call could not delete, reaches age;
//   - when a volume is created and the last sweep is older than age.
//
// Otherwise it sends no requests.
type sweeper struct {
	controller *Service
	// age is the age from which a temporary snapshot is deleted.
	age time.Duration

	mu sync.Mutex
	// ctx ends the sweeping; nil before [Service.StartSweeping].
	ctx   context.Context
	timer *time.Timer
	// next is when the next sweep begins, if timer is set.
	next time.Time
	// last is when the last sweep began.
	last time.Time
}

func newSweeper(c *Service, age time.Duration) *sweeper {
	return &sweeper{controller: c, age: cmp.Or(age, defaultTemporaryAge)}
}

// retryDelay is how long to wait after a failed sweep.
func (s *sweeper) retryDelay() time.Duration { return s.age / 12 }

// StartSweeping deletes temporary snapshots that were left behind, now and when needed, until ctx ends. It does not
// block.
func (c *Service) StartSweeping(ctx context.Context) {
	c.sweeper.mu.Lock()
	c.sweeper.ctx = ctx
	c.sweeper.mu.Unlock()
	c.sweeper.schedule(0)
}

// schedule starts a sweep after wait, unless an earlier one is scheduled.
func (s *sweeper) schedule(wait time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	next := time.Now().Add(wait)
	if s.ctx == nil || s.ctx.Err() != nil || (s.timer != nil && s.next.Before(next)) {
		return
	}
	if s.timer != nil {
		s.timer.Stop()
	}
	s.next = next
	s.timer = time.AfterFunc(wait, s.run)
}

// scheduleIfStale starts a sweep if the last one is older than age.
func (s *sweeper) scheduleIfStale() {
	s.mu.Lock()
	stale := !s.last.IsZero() && time.Since(s.last) > s.age
	s.mu.Unlock()
	if stale {
		s.schedule(0)
	}
}

func (s *sweeper) run() {
	s.mu.Lock()
	first := s.last.IsZero()
	s.timer, s.last = nil, time.Now()
	ctx := s.ctx
	s.mu.Unlock()
	if first {
		s.schedule(s.age)
	}
	defer func() {
		if reason := recover(); reason != nil {
			rpc.LogPanic(s.controller.log, slog.String("task", "sweep"), reason)
		}
	}()
	for _, client := range s.controller.racks.all {
		s.sweep(ctx, s.controller.forRack(client))
	}
}

// sweep deletes the old temporary snapshots of one rack, and finishes or takes back the expansions that were left
// behind. It schedules another sweep for snapshots that are too young.
func (s *sweeper) sweep(ctx context.Context, rc rackController) {
	var expansions []rack.Snapshot
	for listed, err := range rc.rack.Snapshots(ctx, rack.Cursor{}, 0) {
		if err != nil {
			s.retryLater(ctx, rc, err)
			return
		}
		snapshot := listed.Value
		if snapshot.Expansion() {
			expansions = append(expansions, snapshot)
		}
		if !snapshot.Temporary() || snapshot.CheckKnown() != nil || rc.checkTemporarySnapshot(snapshot) != nil {
			continue
		}
		if remaining := s.age - time.Since(snapshot.Created); remaining > 0 {
			s.schedule(remaining)
			continue
		}
		if err := rc.rack.DeleteSnapshot(ctx, snapshot.ID); err != nil && !errors.Is(err, rack.ErrNotFound) {
			s.retryLater(ctx, rc, err)
			continue
		}
		rc.log.Info("deleted a leftover temporary snapshot", "name", snapshot.Name, "rack", rc.rack.Name())
	}
	again, err := rc.expander.Settle(ctx, expansions, expand.SettleAge, Adoptions)
	if err != nil {
		s.retryLater(ctx, rc, err)
	} else if again {
		s.schedule(expand.SettleAge)
	}
}

func (s *sweeper) retryLater(ctx context.Context, rc rackController, err error) {
	if ctx.Err() != nil {
		return
	}
	rc.log.Warn("the sweep was not finished, will retry",
		"rack", rc.rack.Name(), "retry_in", s.retryDelay().String(), "error", err.Error())
	s.schedule(s.retryDelay())
}

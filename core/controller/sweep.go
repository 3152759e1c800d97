// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller

import (
	"cmp"
	"context"
	"errors"
	"sync"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// temporaryAge is how old the temporary snapshot of a clone has to be before it counts as left behind, where nothing else is
// configured: no call that could still be using it lasts that long.
const temporaryAge = time.Hour

// sweeper deletes the temporary snapshots that a crash has left behind, this process' own or another replica's. It looks at
// the start, and once more when what the rack was then still making is old enough; when a snapshot that it saw, or that a
// call could not delete, is; and when volumes are made long after the last look. Otherwise it asks nobody anything.
type sweeper struct {
	controller *Service
	// age is how old a temporary snapshot has to be.
	age time.Duration

	mu sync.Mutex
	// ctx ends the sweeping; nil before [Controller.StartSweeping].
	ctx   context.Context
	timer *time.Timer
	// due is when the next sweep begins, if timer is set.
	due  time.Time
	last time.Time
}

func newSweeper(c *Service, age time.Duration) *sweeper {
	return &sweeper{controller: c, age: cmp.Or(age, temporaryAge)}
}

// retry is how long to wait after a sweep that a rack did not answer.
func (s *sweeper) retry() time.Duration { return s.age / 12 }

// StartSweeping deletes temporary snapshots that were left behind, now and whenever there is reason to, until ctx ends.
func (c *Service) StartSweeping(ctx context.Context) {
	c.sweeper.mu.Lock()
	c.sweeper.ctx = ctx
	c.sweeper.mu.Unlock()
	c.sweeper.in(0)
}

// in asks for a sweep after that time, if none is to come sooner.
func (s *sweeper) in(wait time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	due := time.Now().Add(wait)
	if s.ctx == nil || s.ctx.Err() != nil || (s.timer != nil && s.due.Before(due)) {
		return
	}
	if s.timer != nil {
		s.timer.Stop()
	}
	s.due = due
	s.timer = time.AfterFunc(wait, s.run)
}

// wake asks for a sweep if the last one is long ago.
func (s *sweeper) wake() {
	s.mu.Lock()
	stale := !s.last.IsZero() && time.Since(s.last) > s.age
	s.mu.Unlock()
	if stale {
		s.in(0)
	}
}

func (s *sweeper) run() {
	s.mu.Lock()
	first := s.last.IsZero()
	s.timer, s.last = nil, time.Now()
	ctx := s.ctx
	s.mu.Unlock()
	if first {
		s.in(s.age)
	}
	defer func() {
		if reason := recover(); reason != nil {
			s.controller.log.Error("panic", "in", "the sweeper", "stack", rpc.Stack())
		}
	}()
	for _, client := range s.controller.racks.all {
		s.sweep(ctx, s.controller.on(client))
	}
}

// sweep deletes what was left behind on one rack, and asks for another sweep where that has to wait.
func (s *sweeper) sweep(ctx context.Context, on onRack) {
	for listed, err := range on.rack.Snapshots(ctx, rack.Cursor{}, 0) {
		if err != nil {
			s.later(ctx, on, err)
			return
		}
		snapshot := listed.Value
		if !snapshot.Temporary() || on.checkTemporary(snapshot) != nil {
			continue
		}
		if left := s.age - time.Since(snapshot.Created); left > 0 {
			s.in(left)
			continue
		}
		if err := on.rack.DeleteSnapshot(ctx, snapshot.ID); err != nil && !errors.Is(err, rack.ErrNotFound) {
			s.later(ctx, on, err)
			continue
		}
		on.log.Info("deleted a temporary snapshot that was left behind", "name", snapshot.Name, "rack", on.rack.Name())
	}
}

func (s *sweeper) later(ctx context.Context, on onRack, err error) {
	if ctx.Err() != nil {
		return
	}
	on.log.Warn(
		"temporary snapshots could not be looked after, which is tried again",
		"rack",
		on.rack.Name(),
		"in",
		s.retry().String(),
		"error",
		err.Error(),
	)
	s.in(s.retry())
}

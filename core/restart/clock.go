// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package restart

import (
	"context"
	"time"
)

// timer names what an engine waits for, so that a model of time can tell them apart.
type timer string

const (
	timerWindow   timer = "window"
	timerRequest     timer = "wish"
	timerLease    timer = "lease"
	timerRenewal     timer = "beat"
	timerTakeover   timer = "taking"
	timerRefusal     timer = "rest"
	timerCoolDown timer = "cool-down"
	timerReply   timer = "answer"
	timerHalt     timer = "halt"
	timerGuestStop    timer = "going"
	timerApply    timer = "apply"
	timerBack     timer = "back"
	timerHandover timer = "handover"
	timerLateCalls     timer = "owed"
	timerSweep    timer = "sweep"
)

// clock is the only time that an engine knows.
type clock interface {
	Now() time.Time
	// Passed reports whether so much time has passed since then. What and key say which wait it is.
	Passed(what timer, key string, since time.Time, d time.Duration) bool
	// Wait waits for done to be closed.
	Wait(ctx context.Context, done <-chan struct{}) error
}

type wallClock struct{}

func (wallClock) Now() time.Time { return time.Now() }

func (wallClock) Passed(_ timer, _ string, since time.Time, d time.Duration) bool {
	return time.Since(since) >= d
}

func (wallClock) Wait(ctx context.Context, done <-chan struct{}) error {
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

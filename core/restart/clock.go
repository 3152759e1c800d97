// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package restart

import (
	"context"
	"time"
)

// timer names what an engine waits for, so that a model of time can distinguish its waits.
type timer string

const (
	timerWindow    timer = "window"
	timerRequest   timer = "request"
	timerLease     timer = "lease"
	timerRenewal   timer = "renewal"
	timerTakeover  timer = "takeover"
	timerRefusal   timer = "refusal"
	timerCoolDown  timer = "cool-down"
	timerReply     timer = "reply"
	timerHalt      timer = "halt"
	timerGuestStop timer = "guest stop"
	timerRunState  timer = "run state"
	timerApply     timer = "apply"
	timerBack      timer = "back"
	timerHandover  timer = "handover"
	timerLateCalls timer = "late calls"
	timerSweep     timer = "sweep"
	timerStuck     timer = "stuck"
	timerOutdated  timer = "outdated"
	timerDown      timer = "down"
	timerUnseen    timer = "unseen"
	timerVanished  timer = "vanished"
)

// clock is the engine's only source of time.
type clock interface {
	Now() time.Time
	// Passed reports whether d has passed since then. what and key identify the wait.
	Passed(what timer, key string, since time.Time, d time.Duration) bool
	// Wait waits until done is closed or ctx ends.
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

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package restart

import (
	"context"
	"encoding/json"
	"slices"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/core/record"
)

// modelClock ends waits where the rules on time allow it, see [modelClock.Passed].
type modelClock struct {
	m *model
	p *modelProcess
}

func (modelClock) Now() time.Time { return time.Time{} }

func (c modelClock) Passed(what timer, key string, _ time.Time, _ time.Duration) bool {
	switch what {
	case timerCoolDown:
		return !c.m.instance(key).cooling
	case timerWindow, timerRefusal, timerStuck:
		return true
	case timerLateCalls:
		return true // this rack carries out calls at once, except the late calls of dead processes
	case timerSweep:
		return c.m.scenario.sweeps
	case timerOutdated:
		return false // guests accept requests of any age
	case timerRunState:
		return false // this rack ends every change of a run state
	case timerDown, timerUnseen:
		return false // this rack answers each call in the end, see TestStoppedInstanceIsStarted
	case timerVanished:
		return true // nobody deletes records by hand
	case timerRenewal, timerRequest, timerApply, timerHandover:
		// These waits end operations that would otherwise continue for ever. Ending one early is a fault.
		return c.endsEarly(what)
	case timerBack:
		return c.m.guestOf(key) == guestLost || c.m.keptDown(key) || c.endsEarly(what)
	case timerLease:
		return c.callsArrived() && c.m.leaseMayExpire(key, func() bool { return c.endsEarly(what) })
	case timerTakeover:
		return c.callsArrived() && c.m.callsBefore(key) && c.m.leaseMayExpire(key, func() bool { return true })
	case timerReply:
		return c.m.guestOf(key) == guestSilent || c.m.guestOf(key) == guestLost || c.m.keptDown(key) || c.endsEarly(what)
	case timerHalt:
		return c.m.haltIsOverdue(key) || c.endsEarly(what)
	case timerGuestStop:
		return !c.m.mayHalt(key)
	}
	c.m.fail("unknown timer %q", what)
	return false
}

// callsArrived reports whether all calls of the process' earlier lives have arrived. That takes less time than a lease
// or the wait of a takeover.
func (c modelClock) callsArrived() bool {
	return !slices.ContainsFunc(c.m.lateCalls, func(l lateCall) bool { return l.process == c.p.name })
}

// callsBefore reports whether all calls have arrived that were sent before a takeover: its wait is as long as a call
// can be late.
func (m *model) callsBefore(takenFrom string) bool {
	return !slices.ContainsFunc(m.lateCalls, func(l lateCall) bool { return !slices.Contains(l.during, takenFrom) })
}

// endsEarly lets a wait end early, which counts as a fault.
func (c modelClock) endsEarly(what timer) bool {
	if c.m.faults == 0 || !c.m.scenario.hasFault("early "+string(what)) {
		return false
	}
	value, _ := c.m.call(modelCall{name: "early " + string(what), choice: true})
	early, _ := value.(bool)
	return early
}

func (c modelClock) Wait(_ context.Context, done <-chan struct{}) error {
	ready := func() bool {
		select {
		case <-done:
			return true
		default:
			return false
		}
	}
	_, err := c.m.call(modelCall{name: "wait", ready: ready, do: func(*model) (any, error) { return nil, nil }})
	return err
}

// restarted returns the instance of a restart that a process holds, or nil.
func (m *model) restarted(restartID string) *modelInstance {
	for _, p := range m.processes {
		if w := p.engine.held[restartID]; w != nil {
			return m.instance(w.record.Instance)
		}
	}
	return nil
}

func (m *model) guestOf(restartID string) guest {
	if i := m.restarted(restartID); i != nil {
		return i.guest
	}
	return guestUp
}

// keptDown reports whether the owner has stopped the instance of a restart for good.
func (m *model) keptDown(restartID string) bool {
	i := m.restarted(restartID)
	return i != nil && i.ownerKeeps
}

// haltIsOverdue reports whether an instance that should stop does not: its guest hangs, its node is lost, or some work
// does not leave it.
func (m *model) haltIsOverdue(restartID string) bool {
	i := m.restarted(restartID)
	return i != nil && (i.guest == guestHangs || i.guest == guestLost || i.drain == drainStays)
}

// mayHalt reports whether the guest of a restart may still halt. A guest that accepts a request does so, and halts,
// within the time that a controller in mode hot waits for it.
func (m *model) mayHalt(restartID string) bool {
	i := m.restarted(restartID)
	return i != nil && (i.guest == guestHalts || i.guest == guestUp && i.request == restartID && i.reply.State == "")
}

// leaseMayExpire reports whether the lease of a record may be over. It may if the holder has died and its late calls
// have arrived. The lease of a live holder that is not carrying out a decision may end too, if slow allows that fault.
func (m *model) leaseMayExpire(recordID string, slow func() bool) bool {
	var r record.Restart
	for _, kept := range m.records {
		if kept.ID == recordID {
			_ = json.Unmarshal([]byte(kept.Text), &r) // another record's text leaves r empty
		}
	}
	if slices.ContainsFunc(m.lateCalls, func(l lateCall) bool { return l.holder == r.Holder }) {
		return false
	}
	for _, p := range m.processes {
		if p.engine.holder != r.Holder {
			continue
		}
		for _, a := range m.activities {
			if a.process == p && a.tick && a.hasListed {
				return false
			}
		}
		return slow()
	}
	return true
}

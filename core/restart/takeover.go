// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package restart

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/record"
)

// handOverAll marks all restarts that this process holds as handed over. It leaves a restart to the lease where only
// time makes a takeover safe: the rack still owes an answer to this process, or may still owe one to the previous
// holder.
func (e *Engine) handOverAll(ctx context.Context) {
	if len(e.held) == 0 ||
		!e.clock.Passed(timerLateCalls, "", e.lastFailure, e.takeoverWait()) {
		return
	}
	ctx, cancel := context.WithTimeout(rack.Urgent(ctx), e.opts.Lease/renewalsPerLease)
	defer cancel()
	records, err := e.readRecords(ctx)
	if err != nil {
		e.opts.Log.Warn("could not hand restarts over; another controller continues them after the lease",
			"error", err.Error())
		return
	}
	for _, r := range records.restarts {
		h := e.held[r.ID]
		if h == nil || r.Holder != e.holder || h.takenFrom != "" {
			continue
		}
		h.record = r
		h.record.HandOver("")
		if held, err := e.renewRecord(ctx, h); err != nil || !held {
			e.opts.Log.Warn("could not hand a restart over", "node_id", r.Instance, "restart_id", r.ID, "error", err)
			continue
		}
		e.opts.Log.Info("handed a restart over", "node_id", r.Instance, "restart_id", r.ID, "stage", string(h.stage))
	}
}

// takeoverWait is how long a takeover waits for the previous holder's tick to end.
func (e *Engine) takeoverWait() time.Duration {
	return time.Duration(takeoverWaitShare * float64(e.opts.Lease))
}

// adopt handles a record with this process as holder that it does not know: the answer to its creation was lost.
func (e *Engine) adopt(ctx context.Context, r record.Restart, records recordSet) error {
	for _, from := range records.superseded {
		if from.ID == r.ID {
			e.addHeld(r, from)
			return nil
		}
	}
	return e.rack.DeleteRecord(ctx, r.Stored.ID) // nothing was requested yet, or the restart is over
}

// leaseExpired reports whether a record did not change for the length of the lease.
func (e *Engine) leaseExpired(r record.Restart) bool {
	s := e.lastSeen[r.Stored.ID]
	if s.Text != r.Stored.Text {
		e.lastSeen[r.Stored.ID] = record.Seen{Text: r.Stored.Text, Since: e.clock.Now()}
		return false
	}
	return e.clock.Passed(timerLease, r.Stored.ID, s.Since, e.opts.Lease)
}

// takeOver creates the next epoch of a restart whose lease expired or that was handed over.
func (e *Engine) takeOver(ctx context.Context, from record.Restart) error {
	now, mine := e.clock.Now(), from
	mine.Epoch++
	mine.Holder, mine.Heartbeat, mine.Handover = e.holder, 0, false
	creating, cancel := halfOf(ctx)
	defer cancel()
	mine, ok, err := e.createRestart(creating, mine)
	if err != nil {
		return errors.Join(err, e.startAbandoned(ctx, from))
	}
	if !ok {
		return nil
	}
	e.addHeld(mine, from)
	e.held[mine.ID].renewed = now
	return nil
}

// startAbandoned starts an instance that may be down for a restart whose holder has been silent for so long that this
// process would have trusted the record, if it could take the restart over.
func (e *Engine) startAbandoned(ctx context.Context, from record.Restart) error {
	seen := e.lastSeen[from.Stored.ID].Since
	if !from.MayStop || seen.IsZero() ||
		!e.clock.Passed(timerUnseen, from.ID, seen, e.opts.Lease+e.takeoverWait()+unseenTimeout) {
		return nil
	}
	instance, err := e.instance(ctx, from.Instance)
	if err != nil || instance.RunState != rack.Stopped && instance.RunState != rack.Failed {
		return err
	}
	e.opts.Log.Warn("started the instance of a restart that cannot be taken over",
		"node_id", from.Instance, "restart_id", from.ID)
	_, err = e.rack.StartInstance(ctx, from.Instance)
	return err
}

// addHeld starts to work on a restart that another process held.
func (e *Engine) addHeld(mine, from record.Restart) {
	e.opts.Log.Warn("took over a restart", "node_id", from.Instance, "restart_id", from.ID, "holder", from.Holder,
		"may_stop", from.MayStop)
	now := e.clock.Now()
	e.held[mine.ID] = &heldRestart{record: mine, stage: stagePlanned, since: now, renewed: now, takenFrom: from.Stored.ID}
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, volume := range record.LongIDs(mine.Volumes) {
		if e.requests[volume] == nil {
			e.requests[volume] = &attachRequest{
				volume:      volume,
				instance:    mine.Instance,
				requestedAt: now,
				repeatedAt:  now,
				fromRestart: mine.ID,
			}
		}
	}
}

// dropLost forgets the restarts that another process has taken over.
func (e *Engine) dropLost(records recordSet, restored map[string]bool) {
	for id, h := range e.held {
		ours := restored[id] || slices.ContainsFunc(
			records.restarts,
			func(r record.Restart) bool { return r.ID == id && r.Holder == e.holder },
		)
		if !ours {
			e.opts.Log.Warn("lost a restart to another process", "node_id", h.record.Instance, "restart_id", id)
			delete(e.held, id)
		}
	}
}

// restoreVanished creates the record of a restart again that somebody deleted or overwrote by hand while the instance
// may be down. It returns these restarts. No process has taken them over: it would have waited for the whole lease
// since the record was last written. After half of it, nothing is restored.
func (e *Engine) restoreVanished(ctx context.Context, records recordSet) map[string]bool {
	restored := map[string]bool{}
	for _, id := range sortedKeys(e.held) {
		h := e.held[id]
		known := func(r record.Restart) bool { return r.ID == id }
		if !h.mayBeDown() || h.record.Handover || slices.ContainsFunc(records.restarts, known) ||
			slices.ContainsFunc(records.newer, func(n record.Newer[record.Restart]) bool { return n.Fields.ID == id }) ||
			e.clock.Passed(timerVanished, id, h.renewed, e.opts.Lease/2) {
			continue
		}
		restored[id] = true
		again, now := h.record, e.clock.Now()
		again.Epoch++
		made, created, err := e.createRestart(ctx, again)
		e.opts.Log.Error("the record of a restart has vanished while its instance may be down",
			"node_id", h.record.Instance, "restart_id", id, "record", h.record.Stored.Name, "created_again", created)
		if err == nil && created {
			h.record, h.renewed = made, now
		}
	}
	return restored
}

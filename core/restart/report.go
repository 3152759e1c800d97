// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package restart

import (
	"context"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
)

// Observation is what there is to be measured.
type Observation struct {
	// Wanted are the disks that wait for a restart.
	Wanted int
	// Waiting are the instances whose restart is wanted and has not begun, for each reason that there is.
	Waiting map[Reason]int
	// Restarts are those under way in this process.
	Restarts int
	// Ended is "restarted" or "refused" if a restart has just come to that, else empty.
	Ended string
	// Down is how long the instance was stopped, with Ended "restarted".
	Down time.Duration
}

// What a restart comes to.
const (
	Restarted = "restarted"
	Refused   = "refused"
)

// observe tells how things stand, and how a restart ended.
func (e *Engine) observe(ended string, down time.Duration) {
	if e.opts.Observe == nil {
		return
	}
	e.mu.Lock()
	wanted := len(e.wishes)
	e.mu.Unlock()
	e.opts.Observe(Observation{Wanted: wanted, Waiting: e.count(), Restarts: len(e.works), Ended: ended, Down: down})
}

// tell reports to those who watch the node. That it may fail is not worth more than a line.
func (e *Engine) tell(ctx context.Context, w *work, reason, message string) {
	e.send(ctx, w, metadata.RestartReport{Reason: reason, Message: message})
}

// problem reports what somebody should look at, once, and lets the RPCs that wait for the restart say it.
func (e *Engine) problem(ctx context.Context, w *work, reason, message string) {
	w.trouble = message
	if w.told == reason {
		return
	}
	w.told = reason
	e.opts.Log.Error(
		"a restart needs a look",
		"instance_id",
		w.record.Instance,
		"restart_id",
		w.record.ID,
		"reason",
		reason,
		"problem",
		message,
	)
	e.send(ctx, w, metadata.RestartReport{Problem: true, Reason: reason, Message: message})
}

func (e *Engine) send(ctx context.Context, w *work, report metadata.RestartReport) {
	if e.opts.Requester == nil {
		return
	}
	if err := e.opts.Requester.Report(ctx, w.record.Instance, report); err != nil {
		e.opts.Log.Warn(
			"a report about a node could not be delivered",
			"instance_id",
			w.record.Instance,
			"error",
			err.Error(),
		)
	}
}

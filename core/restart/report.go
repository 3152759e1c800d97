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
	DisksWaiting int
	// Waiting are the instances whose restart is wanted and has not begun, for each reason that there is.
	InstancesWaiting map[Reason]int
	// Restarts are those under way in this process.
	InFlight int
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
	wanted := len(e.requests)
	e.mu.Unlock()
	e.opts.Observe(Observation{DisksWaiting: wanted, InstancesWaiting: e.countWaiting(), InFlight: len(e.held), Ended: ended, Down: down})
}

// tell reports to those who watch the node. That it may fail is not worth more than a line.
func (e *Engine) reportProgress(ctx context.Context, w *heldRestart, reason, message string) {
	e.sendReport(ctx, w, metadata.RestartReport{Reason: reason, Message: message})
}

// problem reports what somebody should look at, once, and lets the RPCs that wait for the restart say it.
func (e *Engine) reportProblem(ctx context.Context, w *heldRestart, reason, message string) {
	w.problem = message
	if w.reported == reason {
		return
	}
	w.reported = reason
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
	e.sendReport(ctx, w, metadata.RestartReport{Problem: true, Reason: reason, Message: message})
}

func (e *Engine) sendReport(ctx context.Context, w *heldRestart, report metadata.RestartReport) {
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

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package restart

import (
	"context"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
)

// Observation holds measurements for metrics.
type Observation struct {
	// DisksWaiting counts the disks that wait for a restart.
	DisksWaiting int
	// InstancesWaiting counts the instances that need a restart which has not started, for each reason.
	InstancesWaiting map[rpc.RestartReason]int
	// InFlight counts the restarts that this process holds.
	InFlight int
	// Ended is Restarted or Refused if a restart has just ended, else "".
	Ended string
	// Down is how long the instance was stopped. It is set if Ended is Restarted.
	Down time.Duration
}

// Outcomes of a restart.
const (
	Restarted = "restarted"
	Refused   = "refused"
)

// observe sends the current measurements and the outcome of a restart.
func (e *Engine) observe(ended string, down time.Duration) {
	if e.opts.Observe == nil {
		return
	}
	e.mu.Lock()
	waiting := len(e.requests)
	e.mu.Unlock()
	e.opts.Observe(
		Observation{
			DisksWaiting:     waiting,
			InstancesWaiting: e.countWaiting(),
			InFlight:         len(e.held),
			Ended:            ended,
			Down:             down,
		},
	)
}

// reportProblem reports a problem to the node's operators once, and shows it in the errors of waiting RPCs.
func (e *Engine) reportProblem(ctx context.Context, h *heldRestart, event orchestrator.Event, message string) {
	h.problem = message
	if h.reported == event.Reason {
		return
	}
	h.reported = event.Reason
	e.opts.Log.Error("restart problem", "node_id", h.record.Instance, "restart_id", h.record.ID, "reason", event.Reason,
		"problem", message)
	e.sendReport(ctx, h, orchestrator.Report{Event: event, Message: message})
}

func (e *Engine) sendReport(ctx context.Context, h *heldRestart, report orchestrator.Report) {
	if e.opts.Requester == nil {
		return
	}
	if err := e.orchestrator.report(ctx, h, report); err != nil {
		e.opts.Log.Warn("could not deliver a report about a node", "node_id", h.record.Instance, "error", err.Error())
	}
}

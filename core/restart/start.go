// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package restart

import (
	"context"
	"errors"
	"fmt"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
)

// startInstance starts the instance of a restart. If the instance still runs, that changes nothing.
func (e *Engine) startInstance(ctx context.Context, h *heldRestart) error {
	instance, err := e.rack.StartInstance(ctx, h.record.Instance)
	stillRuns := instance.RunState == rack.Running && (h.run.IsZero() || instance.RunStateSince.Equal(h.run))
	// A process that took the restart over does not know which orders of the previous one are still to come.
	h.up = h.up || err == nil && !stillRuns && !h.recovering
	return err
}

func (e *Engine) startUnseen(ctx context.Context, h *heldRestart) error {
	err := e.startInstance(ctx, h)
	if err == nil {
		e.opts.Log.Warn("started an instance that could not be looked at, or whose record could not be read",
			"node_id", h.record.Instance, "restart_id", h.record.ID)
		h.started = e.clock.Now()
		if h.stage != stageStarting {
			e.enterStage(h, stageStarting)
		}
	}
	return err
}

// bringBack starts the instance of a restart whose record cannot be read now, when it is overdue. Meanwhile another
// process may have taken the restart over, and ended it, and the owner may have stopped the instance since: it counts
// only as long as it has been stopped since this process first saw that.
func (e *Engine) bringBack(ctx context.Context, h *heldRestart) error {
	if !h.mayBeDown() {
		return nil
	}
	instance, err := e.look(ctx, h)
	if err != nil || instance.RunState != rack.Stopped && instance.RunState != rack.Failed {
		return err
	}
	if h.stopped.IsZero() {
		h.stopped, h.stoppedAt = e.clock.Now(), instance.RunStateSince
	}
	if !e.overdue(h) || !instance.RunStateSince.Equal(h.stoppedAt) {
		return nil
	}
	return e.startUnseen(ctx, h)
}

// endRestart deletes the record of a restart, whatever its outcome.
func (e *Engine) endRestart(ctx context.Context, h *heldRestart) error {
	if err := e.rack.DeleteRecord(ctx, h.record.Stored.ID); err != nil {
		return err
	}
	delete(e.held, h.record.ID)
	e.notifyWaiters() // attached disks can be published now
	return nil
}

// start starts the instance. It is repeated until the instance runs.
func (e *Engine) start(ctx context.Context, h *heldRestart) error {
	instance, err := e.look(ctx, h)
	if err != nil {
		return err
	}
	switch instance.RunState {
	case rack.Running:
		e.observe(Restarted, e.clock.Now().Sub(h.stopped))
		e.enterStage(h, stageBack)
		return nil
	case rack.Stopped:
		if h.up {
			return e.giveUp(ctx, h, fmt.Sprintf(
				"others stopped it at %s", formatTime(instance.RunStateSince)))
		}
	case rack.Failed:
	default:
		return e.awaitRunState(ctx, h, instance)
	}
	if err := e.startInstance(ctx, h); err != nil && !errors.Is(err, rack.ErrConflict) {
		e.reportProblem(
			ctx,
			h,
			orchestrator.EventRestartNotStarted,
			"the rack does not start the stopped instance, retrying: "+err.Error(),
		)
		return err
	}
	return nil
}

// awaitBack waits until the node plugin of the started instance reports back.
func (e *Engine) awaitBack(ctx context.Context, h *heldRestart) error {
	if e.opts.Shutdown == Hard {
		return e.finish(ctx, h)
	}
	reply, err := e.orchestrator.reply(ctx, h)
	switch {
	case err == nil && reply.State == orchestrator.RestartBack:
		return e.finish(ctx, h)
	case err == nil && reply.State == orchestrator.RestartUnanswered:
		return e.finishUnanswered(ctx, h)
	case err == nil && reply.State == orchestrator.RestartAccepted && !h.up:
		// Others started the instance, perhaps before its guest accepted: then the guest halts only now.
		instance, err := e.look(ctx, h)
		if err != nil {
			return err
		}
		if instance.RunState != rack.Running {
			e.enterStage(h, stageStopping)
			return nil
		}
	}
	if e.stageLasted(timerBack, h, backTimeout) {
		e.reportProblem(
			ctx,
			h,
			orchestrator.EventRestartNotBack,
			fmt.Sprintf("the instance runs, but its node plugin did not report back within %s: check the node", backTimeout),
		)
		return e.finish(ctx, h)
	}
	return err
}

// finishUnanswered ends a restart of an instance that runs, and whose guest has not replied. The guest may accept the
// request up to the moment of its withdrawal.
func (e *Engine) finishUnanswered(ctx context.Context, h *heldRestart) error {
	reply, err := e.orchestrator.withdraw(ctx, h)
	switch {
	case err != nil:
		return e.unreachable(ctx, h, timerBack, backTimeout, err)
	case reply.State == orchestrator.RestartAccepted:
		e.enterStage(h, stageStopping)
		return nil
	}
	return e.finish(ctx, h)
}

// recoverRestart brings back an instance whose restart another process had started.
func (e *Engine) recoverRestart(ctx context.Context, h *heldRestart) error {
	instance, err := e.look(ctx, h)
	if err != nil {
		return err
	}
	switch {
	case instance.RunState == rack.Stopped, instance.RunState == rack.Failed:
		e.enterStage(h, stageStopping)
		return nil
	case instance.RunState != rack.Running:
		return e.awaitRunState(ctx, h, instance)
	case e.opts.Shutdown == Hard:
		// The previous holder may have asked the guest to shut down, which takes time.
		if !e.stageLasted(timerGuestStop, h, e.opts.HaltTimeout) {
			return nil
		}
		return e.finish(ctx, h)
	}
	return e.finishUnanswered(ctx, h)
}

// finish clears the request to the node plugin, allows new work on the node again, and ends the restart. It ends the
// restart even if the orchestrator does not know the node any more: the instance is not down, and the next restart
// ignores requests and replies with another ID.
//
// A node is undrained also in [Guest]: the restart may have begun in [Drain]. In [Hard] the orchestrator is not called,
// because the controller may have no rights there.
func (e *Engine) finish(ctx context.Context, h *heldRestart) error {
	if e.opts.Shutdown == Hard {
		return e.endRestart(ctx, h)
	}
	if err := e.orchestrator.forget(ctx, h); err != nil {
		if !e.stageLasted(timerBack, h, backTimeout) {
			return err
		}
		e.warn(h, "could not clear the shutdown request of a finished restart", err)
	}
	if err := e.orchestrator.undrain(ctx, h); err != nil {
		if !e.stageLasted(timerBack, h, backTimeout) {
			return err
		}
		e.reportProblem(
			ctx,
			h,
			orchestrator.EventRestartNotUndrained,
			"the node takes no workloads yet, allow them manually: "+err.Error(),
		)
	}
	return e.endRestart(ctx, h)
}

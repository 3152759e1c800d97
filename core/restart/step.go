// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package restart

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/record"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
)

// stage is the progress of a restart.
type stage string

const (
	// stagePlanned means that the record exists, and nothing was requested yet.
	stagePlanned stage = "planned"
	// stageRequesting means that the record allows the instance to be stopped from now on.
	stageRequesting stage = "requesting"
	// stageReply means that the node plugin was asked to shut its guest down.
	stageReply stage = "awaiting its plugin's reply"
	// stageCancelling means that the request to the node plugin is being withdrawn.
	stageCancelling stage = "withdrawing the request"
	// stageStopping means that the instance is stopping.
	stageStopping stage = "stopping"
	// stageApplying means that the instance is stopped, and its disks are being changed.
	stageApplying stage = "changing disks"
	// stageChecking means that the instance is stopped, and its disks are looked at before it starts.
	stageChecking stage = "checking disks"
	// stageStarting means that the instance is being started.
	stageStarting stage = "starting"
	// stageBack means that the instance runs, and its node plugin has not reported back yet.
	stageBack stage = "awaiting the node plugin"
	// stageRecovering means that the previous holder had requested the stop, and its outcome is not known yet.
	stageRecovering stage = "recovering"
)

// heldRestart is a restart that this process holds.
type heldRestart struct {
	record record.Restart
	stage  stage
	// since is when the stage started, renewed when the record was last written.
	since, renewed time.Time
	// changing is since when the rack is changing the run state of the instance, as far as it has answered since.
	changing time.Time
	// stopped is when the instance was first seen stopped, and stoppedAt the same by the rack's clock.
	stopped, stoppedAt time.Time
	// run is since when the instance has been running, by the rack's clock, in the run that this restart ends. It is zero
	// if another process decided that. Another user started a later run.
	run time.Time
	// up says that the rack has accepted a start of the stopped instance. Another user ordered a later stop.
	up bool
	// unseen is since when the rack does not say what the instance does. started is when it was last started unseen.
	unseen, started time.Time
	// takenFrom is the ID of the superseded record, until finishTakeover has seen that record after the takeover.
	takenFrom string
	// recovering says that the previous holder may have requested the stop. This process does not stop the instance.
	recovering bool
	// requestSent says that the request to stop may have reached the guest or the rack.
	requestSent bool
	// wasStopped says that the instance was stopped when this process planned the restart.
	wasStopped bool
	// deferredAtStart are the disks whose detach was deferred when the restart started. A disk that was unpublished
	// later may have been unpublished because of the restart.
	deferredAtStart map[string]bool
	// ownersStop says that the owner of the instance stopped it before anything was requested, and will start it.
	ownersStop bool
	// attached are the disks that the stopped instance had in an earlier tick, in stageChecking. Nil means that they are
	// not known.
	attached []rack.Disk
	// cancelReason says why the restart is being cancelled, in stageCancelling.
	cancelReason string
	// tried is when a stuck restart was last advanced.
	tried time.Time
	// reported is the reason of the last reported problem, which is not repeated. problem is its text, until the next
	// stage.
	reported, problem string
}

// enterStage starts the next stage of a restart. The next tick follows at once, because the instance may be down.
func (e *Engine) enterStage(h *heldRestart, s stage) {
	e.wakeUp()
	h.stage, h.since, h.changing, h.problem = s, e.clock.Now(), time.Time{}, ""
	e.opts.Log.Info("restart", "node_id", h.record.Instance, "restart_id", h.record.ID, "stage", string(s))
}

// stageLasted reports whether the stage has lasted for d.
func (e *Engine) stageLasted(what timer, h *heldRestart, d time.Duration) bool {
	return e.clock.Passed(what, h.record.ID, h.since, d)
}

// step takes a restart one step further. The records were just read and name this process as the holder.
func (e *Engine) step(ctx context.Context, h *heldRestart, records recordSet) error {
	err := e.runStage(ctx, h, records)
	if err != nil {
		h.changing = time.Time{}
	}
	if errors.Is(err, errDeleted) {
		if h.mayBeDown() { // it would stay down, so the deletion needs a second witness
			if started := e.startUnseen(ctx, h); !errors.Is(started, rack.ErrNotFound) {
				return errors.Join(err, started)
			}
		}
		e.opts.Log.Info("the instance of a restart was deleted", "node_id", h.record.Instance, "restart_id", h.record.ID)
		return e.endRestart(ctx, h)
	}
	return err
}

// runStage renews the record if that is due, and does the work of the current stage.
func (e *Engine) runStage(ctx context.Context, h *heldRestart, records recordSet) error {
	if e.clock.Passed(timerRenewal, h.record.ID, h.renewed, e.opts.Lease/renewalsPerLease) {
		renewing, cancel := halfOf(ctx)
		held, err := e.renewRecord(renewing, h)
		cancel()
		if err != nil && (h.mayBeDown() || h.takenFrom != "") {
			e.warn(h, "could not renew the record of a restart", err) // it may be taken over, but goes on until then
		} else if err != nil || !held {
			return err
		}
	}
	if ready, err := e.finishTakeover(ctx, h, records); !ready || err != nil {
		return err
	}
	if h.record.Stuck && !e.clock.Passed(timerStuck, h.record.ID, h.tried, stuckInterval) {
		return nil
	}
	h.tried = e.clock.Now()
	if (h.stage == stageApplying || h.stage == stageChecking) && e.overdue(h) {
		e.reportProblem(ctx, h, orchestrator.EventRestartWaitsForDisk, fmt.Sprintf(
			"started after %s although not all of its disks could be changed or checked: their publishes are refused",
			downTimeout,
		))
		e.enterStage(h, stageStarting)
	}
	switch h.stage {
	case stagePlanned:
		return e.startShutdown(ctx, h, records)
	case stageRequesting:
		return e.requestShutdown(ctx, h)
	case stageReply:
		return e.awaitReply(ctx, h)
	case stageCancelling:
		return e.withdraw(ctx, h)
	case stageStopping:
		return e.awaitStop(ctx, h)
	case stageApplying:
		done, err := e.apply(ctx, h)
		if done {
			e.enterStage(h, stageChecking)
		}
		return err
	case stageChecking:
		return e.checkDisks(ctx, h, records)
	case stageStarting:
		return e.start(ctx, h)
	case stageBack:
		return e.awaitBack(ctx, h)
	case stageRecovering:
		return e.recoverRestart(ctx, h)
	}
	return fmt.Errorf("restart %s: unknown stage %q", h.record.ID, h.stage)
}

// finishTakeover deletes the superseded records of this slot, and reports whether the restart can continue. The
// previous holder may have listed the records just before the takeover. So finishTakeover waits until that holder's
// tick is over, and only then trusts its record.
func (e *Engine) finishTakeover(ctx context.Context, h *heldRestart, records recordSet) (ready bool, err error) {
	if h.takenFrom != "" {
		i := slices.IndexFunc(records.superseded, func(r record.Restart) bool { return r.Stored.ID == h.takenFrom })
		switch {
		case i < 0:
			return false, e.endRestart(ctx, h) // the restart had ended already
		case !records.superseded[i].Handover && !e.clock.Passed(timerTakeover, h.takenFrom, h.since, e.takeoverWait()):
			return false, nil
		case records.superseded[i].MayStop && !h.record.MayStop:
			h.record.MayStop = true
			renewing, cancel := halfOf(ctx)
			defer cancel()
			switch held, err := e.renewRecord(renewing, h); {
			case err != nil: // the superseded record stays, because it alone says that the instance may be down
				e.warn(h, "could not record that an instance may be down", err)
				e.recoverOnce(h)
				return true, nil
			case !held:
				return false, nil
			}
		}
		if h.takenFrom = ""; h.record.MayStop {
			e.recoverOnce(h)
		}
	}
	for _, r := range records.superseded {
		if r.Slot == h.record.Slot {
			deleting, cancel := halfOf(ctx)
			err := e.rack.DeleteRecord(deleting, r.Stored.ID)
			cancel()
			if err != nil {
				if !h.mayBeDown() {
					return false, err
				}
				e.warn(h, "could not delete the record of the process before", err)
			}
		}
	}
	return true, nil
}

// recoverOnce begins to bring back an instance that another process may have stopped.
func (e *Engine) recoverOnce(h *heldRestart) {
	if !h.recovering {
		h.recovering = true
		e.enterStage(h, stageRecovering)
	}
}

// renewRecord writes the record. It returns false if this process has lost the record.
func (e *Engine) renewRecord(ctx context.Context, h *heldRestart) (bool, error) {
	now := e.clock.Now()
	h.record.Heartbeat++
	written, held, err := record.Restarts.Replace(ctx, e.rack, h.record)
	if err != nil {
		return false, err
	}
	h.record = written
	if held {
		h.renewed = now
	}
	return held, nil // the next list shows whether another process has taken it over
}

// mayBeDown reports whether the instance may be down for this restart.
func (h *heldRestart) mayBeDown() bool {
	return (h.requestSent || h.recovering) && !h.ownersStop && !h.up && h.stage != stageBack
}

// overdue reports whether the instance has been down for so long that it is started whatever else fails.
func (e *Engine) overdue(h *heldRestart) bool {
	return !h.stopped.IsZero() && e.clock.Passed(timerDown, h.record.ID, h.stopped, downTimeout)
}

// look reads the instance of a restart. An instance that may be down and has not been seen for unseenTimeout is
// started: for one that runs, that changes nothing.
func (e *Engine) look(ctx context.Context, h *heldRestart) (rack.Instance, error) {
	looking, cancel := halfOf(ctx)
	defer cancel()
	instance, err := e.instance(looking, h.record.Instance)
	switch {
	case err == nil:
		h.unseen = time.Time{}
		return instance, nil
	case h.unseen.IsZero():
		h.unseen = e.clock.Now()
	}
	if h.mayBeDown() && !errors.Is(err, errDeleted) &&
		e.clock.Passed(timerUnseen, h.record.ID, h.unseen, unseenTimeout) &&
		e.clock.Passed(timerUnseen, h.record.ID, h.started, unseenTimeout) {
		err = errors.Join(err, e.startUnseen(ctx, h))
	}
	return instance, err
}

// withdrawRequest withdraws an unanswered request when the instance is stopped. Otherwise its node plugin could answer
// the request after the next start. A failure is only logged, so that it does not keep the instance down, and
// finishUnanswered withdraws the request after the start.
func (e *Engine) withdrawRequest(ctx context.Context, h *heldRestart) {
	if e.opts.Shutdown == Hard {
		return
	}
	if _, err := e.orchestrator.withdraw(ctx, h); err != nil {
		e.warn(h, "could not withdraw the shutdown request", err)
	}
}

// warn logs what could not be done for a restart that goes on all the same.
func (e *Engine) warn(h *heldRestart, what string, err error) {
	e.opts.Log.Warn(what, "node_id", h.record.Instance, "restart_id", h.record.ID, "error", err.Error())
}

// confirmNotFound returns the error of [Rack.ConfirmProject] instead of a [rack.ErrNotFound] that cannot be believed.
func (e *Engine) confirmNotFound(ctx context.Context, err error) error {
	if errors.Is(err, rack.ErrNotFound) {
		return cmp.Or(e.rack.ConfirmProject(ctx), err)
	}
	return err
}

// errDeleted says that the instance was deleted.
var errDeleted = errors.New("the instance was deleted")

// instance reads an instance. It returns errDeleted only if the project can still be seen.
func (e *Engine) instance(ctx context.Context, id string) (rack.Instance, error) {
	instance, err := e.rack.Instance(ctx, id)
	if err = e.confirmNotFound(ctx, err); errors.Is(err, rack.ErrNotFound) {
		return rack.Instance{}, fmt.Errorf("%w: %w", errDeleted, err)
	}
	return instance, err
}

// instanceDisks lists the disks of an instance. It returns errDeleted like instance.
func (e *Engine) instanceDisks(ctx context.Context, id string) ([]rack.Disk, error) {
	disks, err := e.rack.InstanceDisks(ctx, id)
	if errors.Is(err, rack.ErrNotFound) {
		_, deleted := e.instance(ctx, id)
		err = cmp.Or(deleted, err)
	}
	return disks, err
}

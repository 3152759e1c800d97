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

	"github.com/oxidecomputer/oxide-csi-plugin/core/detach"
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
	return (h.requestSent || h.recovering) && !h.ownersStop && h.stage != stageBack
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

func (e *Engine) startUnseen(ctx context.Context, h *heldRestart) error {
	err := e.rack.StartInstance(ctx, h.record.Instance)
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

// startShutdown checks that no other process restarts the instance, that it runs, and that the restart is still needed.
func (e *Engine) startShutdown(ctx context.Context, h *heldRestart, records recordSet) error {
	id := h.record.Instance
	_, taken := records.restartOf(id, h.record.ID)
	taken = taken || records.check(id) != nil
	// Stuck restarts do not count, so two processes may have taken different slots for the last free one. Each has
	// created its record before it counts the others', so at least one of them sees too many.
	if taken || records.count(h.record.ID, e.opts.MaxDown) >= e.opts.MaxDown {
		return e.endRestart(ctx, h)
	}
	if h.record.Handover {
		return e.awaitHandover(ctx, h)
	}
	found, failed := e.candidates(ctx, records, e.openRequests())
	i := slices.IndexFunc(found, func(c candidate) bool { return c.instance == id })
	switch {
	case i >= 0 || records.stillFrees(h.record):
	case failed != nil:
		return failed
	default:
		return e.endRestart(ctx, h)
	}
	instance, err := e.instance(ctx, id)
	switch {
	case err != nil:
		return err
	case instance.RunState == rack.Stopped:
		h.ownersStop = true
		e.enterStage(h, stageApplying)
		return nil
	case instance.RunState != rack.Running, h.wasStopped:
		return e.endRestart(ctx, h) // if it runs now, it has its cool-down like any other
	}
	if reason, _ := e.blockReason(candidate{instance: id}); reason != "" {
		return e.endRestart(ctx, h) // the process that planned it was allowed to restart it, this one is not
	}
	if own, _ := e.ownInstance(id); own {
		if i >= 0 {
			h.record.HandOver(found[i].frees)
		}
		h.record.Handover, h.since = true, e.clock.Now()
		_, err := e.renewRecord(ctx, h)
		return err
	}
	staying := e.opts.Detacher.Staying(ctx, records.deferred.From(id))
	if why, err := e.inVain(ctx, h, found, staying, records); why != "" || err != nil {
		if err != nil {
			return err
		}
		e.recordRefusal(ctx, h, why)
		return e.endRestart(ctx, h)
	}
	h.record.MayStop = true
	held, err := e.renewRecord(ctx, h)
	if err != nil || !held {
		return err
	}
	h.deferredAtStart = map[string]bool{}
	for disk := range records.deferred.Instances() {
		h.deferredAtStart[disk] = staying[disk] == nil
	}
	e.enterStage(h, stageRequesting)
	return e.requestShutdown(ctx, h) // without delay, so that an owner's stop is unlikely to fall in between
}

// inVain says why a restart would not give a volume to the instance that waits for it, or "": a workload may use a disk
// that would have to leave. staying are those disks.
func (e *Engine) inVain(
	ctx context.Context, h *heldRestart, found []candidate, staying map[string]error, records recordSet,
) (string, error) {
	if len(staying) == 0 {
		return "", nil
	}
	id := h.record.Instance
	for _, volume := range sortedKeys(staying) {
		frees := slices.ContainsFunc(found, func(c candidate) bool { return c.instance == id && c.frees == volume })
		if frees || h.record.FreedVolume() == volume {
			return staysText(volume, staying[volume]), nil
		}
	}
	disks, err := e.rack.InstanceDisks(ctx, id)
	if err != nil {
		return "", err
	}
	after := map[string]bool{}
	for _, disk := range disks {
		if staying[disk.VolumeID] != nil || !records.frees(disk.VolumeID, id) {
			after[disk.VolumeID] = true
		}
	}
	for _, request := range e.requestsFor(id) {
		after[request.volume] = true
	}
	if volume := sortedKeys(staying)[0]; len(after) > e.opts.MaxDisks {
		return "it has no room: " + staysText(volume, staying[volume]), nil
	}
	return "", nil
}

// staysText says why a disk stays. It leaves out whose claim it is, which the log has.
func staysText(volume string, stays error) string {
	if errors.Is(stays, detach.ErrClaimed) {
		return "a workload on it has claimed volume " + volume
	}
	return "the orchestrator does not say whether a workload on it has claimed volume " + volume
}

// awaitHandover waits until another process takes over the restart of this process's own instance.
func (e *Engine) awaitHandover(ctx context.Context, h *heldRestart) error {
	if !e.stageLasted(timerHandover, h, handoverTimeout) {
		return nil
	}
	e.recordRefusal(
		ctx,
		h,
		"this controller runs on it and no other controller took over: run a second one on another node",
	)
	return e.endRestart(ctx, h)
}

// requestShutdown requests the stop of the instance in the configured way. It is repeated until the request was
// delivered.
func (e *Engine) requestShutdown(ctx context.Context, h *heldRestart) error {
	id := h.record.Instance
	instance, err := e.instance(ctx, id)
	switch {
	case err != nil:
		return err
	case instance.RunState != rack.Running && !h.requestSent:
		return e.finish(ctx, h) // its owner stopped it first and will start it; its node may be drained
	case instance.RunState != rack.Running:
		e.enterStage(h, stageStopping)
		return nil
	}
	if e.opts.Shutdown == Hard {
		h.requestSent = true
		e.enterStage(h, stageStopping)
		return e.rack.StopInstance(ctx, id)
	}
	if e.opts.Shutdown == Drain {
		if drained, err := e.drain(ctx, h); err != nil || !drained {
			return err
		}
	}
	h.requestSent = true
	if err := e.orchestrator.request(ctx, h); err != nil {
		if e.stageLasted(timerHalt, h, e.opts.HaltTimeout) {
			return e.cancelRestart(ctx, h, "its node plugin cannot be reached: "+err.Error())
		}
		return err
	}
	e.sendReport(ctx, h, orchestrator.Report{
		Event: orchestrator.EventRestartPlanned, Message: "restarting the instance to change its disks",
	})
	e.enterStage(h, stageReply)
	return nil
}

// drain moves the workloads off the node. It returns true when none are left.
func (e *Engine) drain(ctx context.Context, h *heldRestart) (bool, error) {
	left, err := e.orchestrator.drain(ctx, h)
	if err != nil {
		left = []string{err.Error()}
	} else if len(left) == 0 {
		return true, nil
	}
	if e.stageLasted(timerHalt, h, e.opts.HaltTimeout) {
		return false, e.cancelRestart(
			ctx,
			h,
			fmt.Sprintf("it was not drained within %s: %s", e.opts.HaltTimeout, orchestrator.Some(left)),
		)
	}
	return false, err
}

// awaitReply waits for the node plugin's reply.
func (e *Engine) awaitReply(ctx context.Context, h *heldRestart) error {
	reply, err := e.orchestrator.reply(ctx, h)
	if err != nil && e.stageLasted(timerReply, h, replyTimeout) {
		return errors.Join(err, e.cancelRestart(ctx, h, "its node plugin's reply cannot be read: "+err.Error()))
	}
	if err != nil {
		return err
	}
	switch reply.State {
	case orchestrator.RestartAccepted, orchestrator.RestartBack:
		e.enterStage(h, stageStopping)
		return nil
	case orchestrator.RestartRefused:
		return e.cancelRestart(ctx, h, "its node plugin refuses: "+reply.Reason)
	}
	if e.stageLasted(timerReply, h, replyTimeout) {
		return e.cancelRestart(
			ctx,
			h,
			fmt.Sprintf("its node plugin did not reply within %s: check that it runs with --attach-mode=restart", replyTimeout),
		)
	}
	return nil
}

// cancelRestart gives a restart up before the instance is stopped, unless the guest is already shutting down.
func (e *Engine) cancelRestart(ctx context.Context, h *heldRestart, why string) error {
	h.cancelReason = why
	e.enterStage(h, stageCancelling)
	return e.withdraw(ctx, h)
}

// withdraw withdraws the request of a cancelled restart.
func (e *Engine) withdraw(ctx context.Context, h *heldRestart) error {
	instance, err := e.look(ctx, h)
	switch {
	case err != nil:
		return err
	case instance.RunState != rack.Running && !h.requestSent && !h.recovering:
		return e.finish(ctx, h) // this restart has not stopped it, and does not start it
	case instance.RunState != rack.Running:
		e.enterStage(h, stageStopping)
		return nil
	}
	reply, err := e.orchestrator.withdraw(ctx, h)
	switch {
	case err != nil:
		return e.unreachable(ctx, h, timerBack, backTimeout, err)
	case reply.State == orchestrator.RestartAccepted:
		e.enterStage(h, stageStopping)
		return nil
	}
	e.recordRefusal(ctx, h, h.cancelReason)
	return e.finish(ctx, h)
}

// unreachable handles an error of the orchestrator for an instance that still runs. After the timeout the restart is
// stuck. When its node plugin accepts the request no more, because it is too old (core/shutdown), the restart ends.
func (e *Engine) unreachable(
	ctx context.Context,
	h *heldRestart,
	what timer,
	timeout time.Duration,
	cause error,
) error {
	if h.record.Stuck {
		planned, known := orchestrator.RestartPlannedAt(h.record.ID)
		if known && e.clock.Passed(timerOutdated, h.record.ID, planned, requestOutdated) {
			e.recordRefusal(ctx, h, "its node plugin cannot be reached: "+cause.Error())
			return errors.Join(cause, e.finish(ctx, h))
		}
		return cause
	}
	if !e.stageLasted(what, h, timeout) {
		return cause
	}
	return errors.Join(cause, e.setStuck(
		ctx, h, fmt.Sprintf("its node plugin has not been reached for %s, check the node: %s", timeout, cause),
	))
}

// setStuck frees the slot of a restart whose instance still runs. The record stays: if the guest halts later, the
// instance is started again.
func (e *Engine) setStuck(ctx context.Context, h *heldRestart, why string) error {
	if h.record.Stuck {
		return nil
	}
	e.reportProblem(ctx, h, orchestrator.EventRestartStuck, why)
	h.record.Stuck = true
	_, err := e.renewRecord(ctx, h)
	return err
}

// recordRefusal leaves the instance alone for the cool-down, and reports the reason.
func (e *Engine) recordRefusal(ctx context.Context, h *heldRestart, why string) {
	e.refusals[h.record.Instance] = refusal{since: e.clock.Now(), reason: why}
	e.recordFailure(h.record.Instance, why)
	e.reportProblem(ctx, h, orchestrator.EventRestartRefused, why)
	e.observe(Refused, 0)
}

// awaitStop waits until the instance is stopped.
func (e *Engine) awaitStop(ctx context.Context, h *heldRestart) error {
	id := h.record.Instance
	instance, err := e.look(ctx, h)
	if err != nil {
		return err
	}
	switch instance.RunState {
	case rack.Stopped:
		// Its owner may have stopped it before the guest replied.
		e.withdrawRequest(ctx, h)
		h.stopped, h.stoppedAt = e.clock.Now(), instance.RunStateSince
		e.recordFailure(id, "")
		e.enterStage(h, stageApplying)
		return nil
	case rack.Failed:
		// Its sled was lost, and the guest with it. A stop makes it Stopped: then it takes disks and can be started
		// elsewhere.
		return e.rack.StopInstance(ctx, id)
	case rack.Running:
	default:
		return e.awaitRunState(ctx, h, instance)
	}
	if e.opts.Shutdown == Hard {
		if h.recovering {
			return e.finish(ctx, h)
		}
		if e.stageLasted(timerHalt, h, e.opts.HaltTimeout) {
			e.recordRefusal(ctx, h, fmt.Sprintf("the rack did not stop it within %s", e.opts.HaltTimeout))
			return e.finish(ctx, h)
		}
		return e.rack.StopInstance(ctx, id)
	}
	reply, err := e.orchestrator.reply(ctx, h)
	if err != nil {
		return e.unreachable(ctx, h, timerHalt, e.opts.HaltTimeout, err)
	}
	switch {
	case reply.State == orchestrator.RestartBack && h.recovering:
		return e.finish(ctx, h)
	case reply.State == orchestrator.RestartBack:
		e.recordRefusal(ctx, h, "its guest rebooted instead of powering off: check --restart-poweroff on its node plugin")
		return e.finish(ctx, h)
	case reply.State != orchestrator.RestartAccepted:
		return e.cancelRestart(ctx, h, "its node plugin withdrew its acceptance")
	case e.stageLasted(timerHalt, h, e.opts.HaltTimeout):
		e.reportProblem(
			ctx,
			h,
			orchestrator.EventRestartHangs,
			fmt.Sprintf(
				"the guest accepted but has not halted within %s: check its console, and stop the instance if it hangs",
				e.opts.HaltTimeout,
			),
		)
		return e.setStuck(ctx, h, h.problem)
	}
	return nil
}

// awaitRunState waits while the rack changes the run state of an instance. A rack that does not end that in time keeps
// the instance as it is, but not the slot. The time of an outage does not count: the rack may have received the request
// only at its end.
func (e *Engine) awaitRunState(ctx context.Context, h *heldRestart, instance rack.Instance) error {
	if h.changing.IsZero() {
		h.changing = e.clock.Now()
	}
	if !e.clock.Passed(timerRunState, h.record.ID, h.changing, e.opts.HaltTimeout) {
		return nil
	}
	return e.setStuck(ctx, h, fmt.Sprintf(
		"the rack has not ended its run state %q within %s: ask the rack's operator", instance.RunState, e.opts.HaltTimeout))
}

// apply changes the disks of a stopped instance. It detaches the disks whose detach was deferred before the restart, or
// all deferred ones if their slots are needed. A disk that a workload may use stays. Then it attaches the requested
// disks. Calls that the rack does not answer are repeated for applyTimeout. If a disk cannot be changed, apply
// continues with the others.
func (e *Engine) apply(ctx context.Context, h *heldRestart) (done bool, err error) {
	id := h.record.Instance
	disks, err := e.instanceDisks(ctx, id)
	switch {
	case errors.Is(err, errDeleted):
		return false, err
	case err != nil:
		return e.stageLasted(timerApply, h, applyTimeout), err
	}
	var failed error
	full := e.slotsNeeded(disks, id) > e.opts.MaxDisks
	wanted := func(disk rack.Disk) bool {
		return e.requestedElsewhere(disk.VolumeID, id) || h.record.FreedVolume() == disk.VolumeID
	}
	leaving := slices.DeleteFunc(slices.Clone(disks), func(disk rack.Disk) bool {
		return !full && !h.deferredAtStart[disk.VolumeID] && !wanted(disk)
	})
	unclaimed, err := e.unclaimed(ctx, leaving, id)
	if err != nil {
		return e.stageLasted(timerApply, h, applyTimeout), err
	}
	for _, disk := range leaving {
		err := e.finishDetach(ctx, disk, id, wanted(disk), unclaimed)
		switch {
		case errors.Is(err, rack.ErrNotStopped):
			return true, nil // it was started in the meantime: the requests wait for the next restart
		case errors.Is(err, rack.ErrConflict), errors.Is(err, rack.ErrRefused), errors.Is(err, rack.ErrUnknown):
			e.opts.Log.Warn(
				"could not detach an unpublished volume",
				"volume_id",
				disk.VolumeID,
				"node_id",
				id,
				"error",
				err.Error(),
			)
		case err != nil:
			failed = errors.Join(failed, err)
		}
	}
	for _, request := range e.requestsFor(id) {
		tried, err := e.attachRequested(ctx, request.volume, id)
		err = e.confirmNotFound(ctx, err)
		switch {
		case err == nil:
		case errors.Is(err, rack.ErrNotStopped):
			return true, nil // it was started in the meantime
		case errors.Is(err, rack.ErrFull):
			// The next publish refuses it, or requests it again if there is room by then.
			e.opts.Log.Warn("no room for a volume", "volume_id", request.volume, "node_id", id, "error", err.Error())
			e.CancelAttachRequest(request.volume, "")
		case errors.Is(err, rack.ErrRefused), errors.Is(err, rack.ErrNotFound), errors.Is(err, rack.ErrReplaced),
			errors.Is(err, rack.ErrUnknown), errors.Is(err, record.ErrFormat):
			e.opts.Log.Warn("could not attach a volume", "volume_id", request.volume, "node_id", id, "error", err.Error())
			e.recordAttachFailure(request.volume, tried, "not attached while it was stopped: "+err.Error())
		default:
			failed = errors.Join(failed, err)
		}
	}
	return failed == nil || e.stageLasted(timerApply, h, applyTimeout), failed
}

// slotsNeeded returns how many slots the attached disks of an instance and its attach requests need. A requested volume
// can be attached already: it was published again during the restart, or apply is repeated.
func (e *Engine) slotsNeeded(disks []rack.Disk, instance string) int {
	volumes := map[string]bool{}
	for _, disk := range disks {
		volumes[disk.VolumeID] = true
	}
	for _, request := range e.requestsFor(instance) {
		volumes[request.volume] = true
	}
	return len(volumes)
}

// unclaimed asks with one question which of the instance's disks no workload may use. It returns a function that
// reports whether a deferred detach may be carried out. If its record has changed since, the answer is no.
func (e *Engine) unclaimed(
	ctx context.Context, disks []rack.Disk, instance string,
) (func(record.Deferral) bool, error) {
	if !e.opts.Detacher.Asks() || len(disks) == 0 {
		return func(record.Deferral) bool { return true }, nil
	}
	records, err := e.readRecords(ctx)
	if err != nil {
		return nil, err
	}
	var asked []record.Deferral
	for _, disk := range disks {
		if deferred, ok := records.deferred.Of(disk.VolumeID, instance); ok {
			asked = append(asked, deferred)
		}
	}
	staying := e.opts.Detacher.Staying(ctx, asked)
	return func(now record.Deferral) bool {
		return staying[now.VolumeID] == nil && slices.ContainsFunc(asked, now.Unchanged)
	}, nil
}

// finishDetach carries out a deferred detach, unless the disk was requested again, or a workload may use it. An untimed
// one is carried out only if another instance wants the disk.
func (e *Engine) finishDetach(
	ctx context.Context, disk rack.Disk, instance string, wanted bool, unclaimed func(record.Deferral) bool,
) error {
	release, err := e.lockVolume(ctx, disk.VolumeID)
	if err != nil {
		return err
	}
	defer release()
	if e.requested(disk.VolumeID, instance) {
		return nil
	}
	records, err := e.readRecords(ctx)
	if err != nil {
		return err
	}
	deferred, ok := records.deferred.Of(disk.VolumeID, instance)
	if !ok || !records.frees(disk.VolumeID, instance) && !wanted || !unclaimed(deferred) {
		return nil
	}
	if err := disk.CheckKnown(); err != nil {
		return err
	}
	detached, err := e.rack.Detach(ctx, disk.ID, instance)
	switch {
	case err != nil:
		return err
	case detached.InstanceID == instance:
		return fmt.Errorf("disk %q (%s) is still attached: %w", disk.Name, disk.ID, rack.ErrBusy)
	}
	return e.opts.Detacher.End(ctx, deferred)
}

// attachRequested attaches the disk of a volume if it is still requested. It also defers the disk's detach until the
// orchestrator publishes the volume again, because the orchestrator may have unpublished it through another process.
// tried is the disk that the volume has, or "" if that is not known.
func (e *Engine) attachRequested(ctx context.Context, volume, instance string) (tried rack.DiskID, err error) {
	if e.opts.LockInstance != nil {
		// Before the volume's lock, as in an RPC.
		unlock, err := e.opts.LockInstance(ctx, instance)
		if err != nil {
			return "", err
		}
		defer unlock()
	}
	release, err := e.lockVolume(ctx, volume)
	if err != nil {
		return "", err
	}
	defer release()
	if !e.requested(volume, instance) {
		return "", nil
	}
	disk, err := e.rack.Disk(ctx, volume)
	if err != nil {
		return "", err
	}
	tried = disk.ID
	if disk.State.Transient() {
		return tried, fmt.Errorf("disk %q (%s) is %s: %w", disk.Name, disk.ID, disk.State, rack.ErrBusy)
	}
	if disk.InstanceID == "" {
		if err := e.checkAttachable(ctx, disk, instance); err != nil {
			return tried, err
		}
		err := e.opts.Detacher.DeferUnlessPublished(ctx, volume, instance)
		if errors.Is(err, detach.ErrRestarting) {
			e.setBlocked(volume, "another controller attaches the disk to another instance, which is being restarted")
			return tried, nil // the request waits for the next restart
		}
		if err != nil {
			return tried, err
		}
		if disk, err = e.attachToStopped(ctx, disk, instance); err != nil {
			return tried, err
		}
	}
	if disk.InstanceID != instance {
		return tried, nil // another restart frees the disk: the request waits for the next restart
	}
	e.setBlocked(volume, attachedNotPublished)
	e.notifyWaiters()
	return tried, nil
}

// checkDisks calls [Options.Yield] for all disks of a stopped instance. The publish that attached one of them may have
// ended before it looked at the records, and after the start of the instance the disk could not be detached any more.
// What a guest writes to a disk that is being replaced is lost, so this is repeated until the instance is overdue. Then
// it starts all the same: the publish of such a volume is refused, and no workload uses it. One tick lists the disks,
// and the next one, which has read the records after that, uses them. So a tick needs one call here, and an instance is
// started although the rack is so slow that a tick has no time for two.
func (e *Engine) checkDisks(ctx context.Context, h *heldRestart, records recordSet) error {
	id := h.record.Instance
	if e.opts.Yield != nil && h.attached == nil {
		disks, err := e.instanceDisks(ctx, id)
		if err != nil {
			return err
		}
		h.attached = append([]rack.Disk{}, disks...)
		e.wakeUp()
		return nil
	}
	attached := h.attached
	h.attached = nil
	if err := e.yield(ctx, id, attached, records.all); err != nil {
		if !h.ownersStop && (errors.Is(err, record.ErrNoRecord) || e.stageLasted(timerApply, h, applyTimeout)) {
			e.reportProblem(ctx, h, orchestrator.EventRestartWaitsForDisk, "not started: "+err.Error())
		}
		return err
	}
	if h.ownersStop {
		return e.endRestart(ctx, h)
	}
	e.enterStage(h, stageStarting)
	return nil
}

// yield calls [Options.Yield] for the disks of a stopped instance.
func (e *Engine) yield(
	ctx context.Context,
	instance string,
	disks []rack.Disk,
	records []record.Record,
) (failed error) {
	for _, disk := range disks {
		switch err := e.opts.Yield(ctx, disk, records); {
		case err == nil:
		case errors.Is(err, rack.ErrNotStopped):
			return nil // it was started in the meantime: a deferred detach waits for the next restart
		case errors.Is(err, record.ErrFormat): // the publish of this volume is refused, too
			e.opts.Log.Warn(
				"cannot tell whether a disk is being replaced",
				"volume_id", disk.VolumeID, "node_id", instance, "error", err.Error())
		case errors.Is(err, rack.ErrRefused):
			e.opts.Log.Warn(
				"detached a disk that is being replaced", "volume_id", disk.VolumeID, "node_id", instance, "error", err.Error())
			e.recordAttachFailure(disk.VolumeID, disk.ID, "the disk was being replaced by a larger one")
		default:
			failed = errors.Join(failed, err)
		}
	}
	return failed
}

// attachToStopped attaches a disk to an instance that has a free slot by --max-disks. If the disk was attached to
// another instance in the meantime, it returns the disk as it is now. If the rack allows fewer disks, it returns
// [rack.ErrRefused]: no restart makes room then.
func (e *Engine) attachToStopped(ctx context.Context, disk rack.Disk, instance string) (rack.Disk, error) {
	attached, err := e.rack.Attach(ctx, disk.ID, instance)
	switch {
	case errors.Is(err, rack.ErrFull):
		return attached, e.explainFull(ctx, instance, err)
	case errors.Is(err, rack.ErrRefused) && !errors.Is(err, rack.ErrNotStopped):
		if now, lookUp := e.rack.Disk(ctx, disk.VolumeID); lookUp == nil && now.InstanceID != "" {
			return now, nil
		}
	}
	return attached, err
}

// explainFull returns the error for an instance that the rack calls full although it has a free slot by --max-disks.
func (e *Engine) explainFull(ctx context.Context, instance string, full error) error {
	disks, err := e.rack.InstanceDisks(ctx, instance)
	if err != nil || len(disks) >= e.opts.MaxDisks { // another controller has taken the slot
		return full
	}
	e.opts.Log.Warn("the rack has a smaller limit of disks", "node_id", instance, "disks", len(disks),
		"error", full.Error())
	return fmt.Errorf("the rack %w: it allows fewer than --max-disks=%d: set it to the rack's limit",
		rack.ErrRefused, e.opts.MaxDisks)
}

// requestedElsewhere reports whether the volume is requested on another instance.
func (e *Engine) requestedElsewhere(volume, instance string) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	request := e.requests[volume]
	return request != nil && request.instance != instance
}

// requested reports whether the volume is requested on this instance.
func (e *Engine) requested(volume, instance string) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	request := e.requests[volume]
	return request != nil && request.instance == instance
}

// checkAttachable rejects a disk if the instance has no free slot, or if the disk's NVMe serial collides with an
// attached disk's (docs/reference/rack.md §9).
func (e *Engine) checkAttachable(ctx context.Context, disk rack.Disk, instance string) error {
	disks, err := e.rack.InstanceDisks(ctx, instance)
	if err != nil {
		return err
	}
	if len(disks) >= e.opts.MaxDisks {
		return fmt.Errorf("instance %s has %d disks already: %w", instance, len(disks), rack.ErrFull)
	}
	return disk.CheckSerial(disks)
}

// start starts the instance. It is repeated until the instance runs.
func (e *Engine) start(ctx context.Context, h *heldRestart) error {
	id := h.record.Instance
	instance, err := e.look(ctx, h)
	if err != nil {
		return err
	}
	switch instance.RunState {
	case rack.Running:
		e.observe(Restarted, e.clock.Now().Sub(h.stopped))
		e.enterStage(h, stageBack)
		return nil
	case rack.Stopped, rack.Failed:
	default:
		return e.awaitRunState(ctx, h, instance)
	}
	if err := e.rack.StartInstance(ctx, id); err != nil && !errors.Is(err, rack.ErrConflict) {
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
	case e.stageLasted(timerBack, h, backTimeout):
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
			"the node takes no workloads yet, allow them by hand: "+err.Error(),
		)
	}
	return e.endRestart(ctx, h)
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

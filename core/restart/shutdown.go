// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package restart

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/core/detach"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
)

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
	case instance.RunState != rack.Running && instance.RunState != rack.Failed, h.wasStopped,
		e.coolsDown(instance):
		return e.endRestart(ctx, h) // it was started since, and has its cool-down like any other
	}
	h.run = instance.RunStateSince
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
	return e.orderShutdown(ctx, h, records, staying)
}

// orderShutdown records that the instance may be stopped from now on, and requests it. staying are the disks that stay
// attached, of those that are to be detached.
func (e *Engine) orderShutdown(
	ctx context.Context, h *heldRestart, records recordSet, staying map[string]error,
) error {
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
	case instance.RunState == rack.Failed:
		h.requestSent = true // a stop is no power cut: it has no guest any more
		e.enterStage(h, stageStopping)
		return nil
	case instance.RunState != rack.Running && !h.requestSent:
		return e.finish(ctx, h) // its owner stopped it first and will start it; its node may be drained
	case instance.RunState != rack.Running:
		e.enterStage(h, stageStopping)
		return nil
	case h.startedByOthers(instance) && e.opts.Shutdown != Hard:
		return e.cancelRestart(ctx, h, startedText(instance))
	case h.startedByOthers(instance):
		return e.giveUp(ctx, h, startedText(instance))
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
	return e.giveUp(ctx, h, h.cancelReason)
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
		ctx, h, fmt.Sprintf("its node plugin has not been reached for %s: %s: check the node", timeout, cause),
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

// startedByOthers reports whether another user started the instance: it is not in the run that this restart ends. Both
// times are the rack's.
func (h *heldRestart) startedByOthers(instance rack.Instance) bool {
	return !h.run.IsZero() && !instance.RunStateSince.Equal(h.run)
}

func startedText(instance rack.Instance) string {
	return fmt.Sprintf("others started it at %s", formatTime(instance.RunStateSince))
}

// giveUp ends a restart of an instance that runs, and leaves the instance alone for the cool-down.
func (e *Engine) giveUp(ctx context.Context, h *heldRestart, why string) error {
	e.recordRefusal(ctx, h, why)
	return e.finish(ctx, h)
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
	others := h.startedByOthers(instance)
	if e.opts.Shutdown == Hard {
		switch {
		case h.recovering:
			return e.finish(ctx, h)
		case others:
			return e.giveUp(ctx, h, startedText(instance))
		case e.stageLasted(timerHalt, h, e.opts.HaltTimeout):
			return e.giveUp(ctx, h, fmt.Sprintf("the rack did not stop it within %s", e.opts.HaltTimeout))
		}
		return e.rack.StopInstance(ctx, id) // the same run: no second power cut
	}
	reply, err := e.orchestrator.reply(ctx, h)
	if err != nil {
		return e.unreachable(ctx, h, timerHalt, e.opts.HaltTimeout, err)
	}
	back := reply.State == orchestrator.RestartBack
	switch {
	case back && h.recovering:
		return e.finish(ctx, h)
	case others && (back || e.stageLasted(timerBack, h, backTimeout)):
		return e.giveUp(ctx, h, startedText(instance)+", or its guest rebooted")
	case back:
		return e.giveUp(ctx, h, "its guest rebooted: check its node plugin's --restart-poweroff")
	case reply.State != orchestrator.RestartAccepted && others:
		return e.cancelRestart(ctx, h, startedText(instance))
	case reply.State != orchestrator.RestartAccepted:
		return e.cancelRestart(ctx, h, "its node plugin withdrew its acceptance")
	case e.stageLasted(timerHalt, h, e.opts.HaltTimeout):
		e.reportProblem(ctx, h, orchestrator.EventRestartHangs, fmt.Sprintf(
			"the guest accepted but has not halted within %s: check its console, and stop the instance if it hangs",
			e.opts.HaltTimeout))
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

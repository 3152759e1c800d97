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

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
)

// stage is how far a restart is.
type stage string

const (
	// stagePlanned: the record stands, and nothing has been asked.
	stagePlanned stage = "planned"
	// stageAsking: the record says that the instance may go down from here on.
	stageRequesting stage = "asking"
	// stageAnswer: the node plugin has been asked.
	stageReply stage = "awaiting the node plugin's answer"
	// stageStopping: the instance goes down.
	stageStopping stage = "stopping"
	// stageApplying: the instance is stopped, and its disks are changed.
	stageApplying stage = "changing disks"
	// stageStarting: the instance is to run again.
	stageStarting stage = "starting"
	// stageBack: the instance runs, and its node plugin is waited for.
	stageBack stage = "awaiting the node plugin"
	// stageRecovering: somebody else had asked, and what became of it is to be found out.
	stageRecovering stage = "recovering"
)

// work is a restart that this process holds.
type heldRestart struct {
	record restartRecord
	stage  stage
	// since is when the stage began, beat when the record was last written.
	since, renewed time.Time
	// stopped is when the instance was seen stopped.
	stopped time.Time
	// takenFrom is the record that was outbid, and must have been there at that moment; empty where that was seen to be so.
	takenFrom string
	// recovering says that somebody else had asked: this process stops nothing.
	recovering bool
	// sent says that the guest or the rack may have got the word.
	requestSent bool
	// goes are the disks that were lazy when the restart began. What has become so since may have done so because of it.
	deferredAtStart map[string]bool
	// told is the last problem that was reported, which is not repeated; trouble is its text, until the next stage.
	reported, problem string
}

func (e *Engine) enterStage(w *heldRestart, s stage) {
	w.stage, w.since, w.problem = s, e.clock.Now(), ""
	e.opts.Log.Info("restart", "instance_id", w.record.Instance, "restart_id", w.record.ID, "stage", string(s))
}

func (e *Engine) stageLasted(what timer, w *heldRestart, d time.Duration) bool {
	return e.clock.Passed(what, w.record.ID, w.since, d)
}

// step takes a restart one step further. The records were listed just now and say that it is ours.
func (e *Engine) step(ctx context.Context, w *heldRestart, records recordSet) error {
	err := e.runStage(ctx, w, records)
	if errors.Is(err, errGone) {
		e.opts.Log.Info("the instance of a restart was deleted", "instance_id", w.record.Instance, "restart_id", w.record.ID)
		return e.endRestart(ctx, w)
	}
	return err
}

func (e *Engine) runStage(ctx context.Context, w *heldRestart, records recordSet) error {
	if e.clock.Passed(timerRenewal, w.record.ID, w.renewed, e.opts.Lease/renewalsPerLease) {
		if held, err := e.renewRecord(ctx, w); err != nil || !held {
			return err
		}
	}
	if ready, err := e.finishTakeover(ctx, w, records); !ready || err != nil {
		return err
	}
	switch w.stage {
	case stagePlanned:
		return e.startShutdown(ctx, w, records)
	case stageRequesting:
		return e.requestShutdown(ctx, w)
	case stageReply:
		return e.awaitAnswer(ctx, w)
	case stageStopping:
		return e.awaitStop(ctx, w)
	case stageApplying:
		done, err := e.apply(ctx, w)
		if done {
			e.enterStage(w, stageStarting)
		}
		return err
	case stageStarting:
		return e.start(ctx, w)
	case stageBack:
		return e.awaitBack(ctx, w)
	case stageRecovering:
		return e.recoverRestart(ctx, w)
	}
	return fmt.Errorf("restart %s: no such stage: %q", w.record.ID, w.stage)
}

// settle clears away the records of this slot that are outbid, and reports whether there is something to go on with. A holder
// that was outbid may have listed the records just before: what it does until its tick is over has to be waited for, and then to
// be believed.
func (e *Engine) finishTakeover(ctx context.Context, w *heldRestart, records recordSet) (ready bool, err error) {
	if w.takenFrom != "" {
		i := slices.IndexFunc(records.outbid, func(r restartRecord) bool { return r.recordID == w.takenFrom })
		switch {
		case i < 0:
			return false, e.endRestart(ctx, w) // the restart had ended already
		case !records.outbid[i].Handover && !e.clock.Passed(timerTakeover, w.takenFrom, w.since, time.Duration(takeoverWaitShare*float64(e.opts.Lease))):
			return false, nil
		case records.outbid[i].MayStop && !w.record.MayStop:
			w.record.MayStop = true
			if held, err := e.renewRecord(ctx, w); err != nil || !held {
				return false, err
			}
		}
		w.takenFrom, w.recovering = "", w.record.MayStop
		if w.recovering {
			e.enterStage(w, stageRecovering)
		}
	}
	for _, r := range records.outbid {
		if r.slot == w.record.slot {
			if err := e.deleteRecord(ctx, r.recordID); err != nil {
				return false, err
			}
		}
	}
	return true, nil
}

// update writes the record. False means that it is not ours any more.
func (e *Engine) renewRecord(ctx context.Context, w *heldRestart) (bool, error) {
	now := e.clock.Now()
	w.record.Heartbeat++
	held, err := e.updateRestart(ctx, w.record)
	if err != nil {
		return false, err
	}
	if !held {
		delete(e.held, w.record.ID)
		return false, nil
	}
	w.renewed = now
	return true, nil
}

// drop ends a restart, whatever came of it.
func (e *Engine) endRestart(ctx context.Context, w *heldRestart) error {
	if err := e.deleteRecord(ctx, w.record.recordID); err != nil {
		return err
	}
	delete(e.held, w.record.ID)
	e.notifyWaiters() // what was attached can be published now
	return nil
}

// begin makes sure that nobody else restarts the instance, that it runs, and that it is still worth it.
func (e *Engine) startShutdown(ctx context.Context, w *heldRestart, records recordSet) error {
	id := w.record.Instance
	if _, taken := records.restartOf(id, w.record.ID); taken {
		return e.endRestart(ctx, w)
	}
	if w.record.Handover {
		return e.awaitHandover(ctx, w)
	}
	useful, err := e.candidates(ctx, records, e.openRequests())
	if err != nil {
		return err
	}
	i := slices.IndexFunc(useful, func(c candidate) bool { return c.instance == id })
	if i < 0 && !records.stillFrees(w.record) {
		return e.endRestart(ctx, w)
	}
	instance, err := e.instance(ctx, id)
	switch {
	case err != nil:
		return err
	case instance.RunState == rack.Stopped:
		// By somebody else, who will start it.
		done, err := e.apply(ctx, w)
		if done {
			return errors.Join(err, e.endRestart(ctx, w))
		}
		return err
	case instance.RunState != rack.Running:
		return e.endRestart(ctx, w)
	}
	if reason, _ := e.blockReason(candidate{instance: id}); reason != "" {
		return e.endRestart(ctx, w) // another process had planned it, which was allowed to
	}
	if own, _ := e.ownInstance(id); own {
		if i >= 0 {
			w.record.handOver(useful[i].freesDisk)
		}
		w.record.Handover, w.since = true, e.clock.Now()
		_, err := e.renewRecord(ctx, w)
		return err
	}
	w.record.MayStop = true
	held, err := e.renewRecord(ctx, w)
	if err != nil || !held {
		return err
	}
	w.deferredAtStart = map[string]bool{}
	for disk := range records.deferred {
		w.deferredAtStart[disk] = true
	}
	e.enterStage(w, stageRequesting)
	return e.requestShutdown(ctx, w) // at once: the shorter the time, the surer it is who stopped the instance
}

// handOver waits for another process to take over what this one cannot survive.
func (e *Engine) awaitHandover(ctx context.Context, w *heldRestart) error {
	if !e.stageLasted(timerHandover, w, handoverTimeout) {
		return nil
	}
	e.recordRefusal(ctx, w, "this controller runs on it, and no other controller took over: run a second one on another node")
	return e.endRestart(ctx, w)
}

// ask has the guest shut down, in the way that is configured. It is repeated until it was done for certain.
func (e *Engine) requestShutdown(ctx context.Context, w *heldRestart) error {
	id := w.record.Instance
	instance, err := e.instance(ctx, id)
	switch {
	case err != nil:
		return err
	case instance.RunState != rack.Running && !w.requestSent:
		return e.endRestart(ctx, w) // somebody else was faster, and will start it
	case instance.RunState != rack.Running:
		e.enterStage(w, stageStopping)
		return nil
	}
	if e.opts.Shutdown == Hard {
		w.requestSent = true
		e.enterStage(w, stageStopping)
		return e.rack.StopInstance(ctx, id)
	}
	if e.opts.Shutdown == Drain {
		if gone, err := e.drain(ctx, w); err != nil || !gone {
			return err
		}
	}
	w.requestSent = true
	if err := e.opts.Requester.Request(ctx, id, w.record.ID); err != nil {
		if e.stageLasted(timerHalt, w, e.opts.HaltTimeout) {
			return e.cancelRestart(ctx, w, "its node plugin could not be asked: "+err.Error())
		}
		return err
	}
	e.reportProgress(ctx, w, "RestartPlanned", "the instance is restarted to change its disks")
	e.enterStage(w, stageReply)
	return nil
}

// drain takes the work off the node. True means that all has gone.
func (e *Engine) drain(ctx context.Context, w *heldRestart) (bool, error) {
	left, err := e.opts.Requester.(metadata.Drainer).Drain(ctx, w.record.Instance, w.record.ID)
	if err != nil {
		left = []string{err.Error()}
	} else if len(left) == 0 {
		return true, nil
	}
	if e.stageLasted(timerHalt, w, e.opts.HaltTimeout) {
		return false, e.cancelRestart(ctx, w, fmt.Sprintf("it could not be drained in %s: %s", e.opts.HaltTimeout, firstNames(left)))
	}
	return false, err
}

// few names some of what there may be much of.
func firstNames(names []string) string {
	const most = 3
	if len(names) > most {
		return fmt.Sprintf("%v and %d more", names[:most], len(names)-most)
	}
	return fmt.Sprint(names)
}

// awaitAnswer waits for what the node plugin says.
func (e *Engine) awaitAnswer(ctx context.Context, w *heldRestart) error {
	answer, err := e.opts.Requester.Reply(ctx, w.record.Instance, w.record.ID)
	if err != nil && e.stageLasted(timerReply, w, answerTimeout) {
		return errors.Join(err, e.cancelRestart(ctx, w, "what its node plugin says could not be read: "+err.Error()))
	}
	if err != nil {
		return err
	}
	switch answer.State {
	case metadata.RestartAccepted, metadata.RestartBack:
		e.enterStage(w, stageStopping)
		return nil
	case metadata.RestartRefused:
		return e.cancelRestart(ctx, w, "its node plugin refuses: "+answer.Reason)
	}
	if e.stageLasted(timerReply, w, answerTimeout) {
		return e.cancelRestart(
			ctx,
			w,
			fmt.Sprintf("its node plugin has said nothing for %s: see that it runs with --attach-mode=restart", answerTimeout),
		)
	}
	return nil
}

// cancel gives a restart up with nothing stopped, unless it turns out that the guest is going down already.
func (e *Engine) cancelRestart(ctx context.Context, w *heldRestart, why string) error {
	answer, err := e.opts.Requester.Withdraw(ctx, w.record.Instance, w.record.ID)
	if err != nil {
		return err
	}
	if answer.State == metadata.RestartAccepted {
		e.enterStage(w, stageStopping)
		return nil
	}
	e.recordRefusal(ctx, w, why)
	return e.finish(ctx, w)
}

// refuse leaves the instance alone for a while, and says why.
func (e *Engine) recordRefusal(ctx context.Context, w *heldRestart, why string) {
	e.refusals[w.record.Instance] = refusal{since: e.clock.Now(), reason: why}
	e.recordFailure(w.record.Instance, why)
	e.reportProblem(ctx, w, "RestartRefused", why)
	e.observe(Refused, 0)
}

// awaitStop waits until the instance is seen stopped.
func (e *Engine) awaitStop(ctx context.Context, w *heldRestart) error {
	id := w.record.Instance
	instance, err := e.instance(ctx, id)
	if err != nil {
		return err
	}
	switch instance.RunState {
	case rack.Stopped:
		w.stopped = e.clock.Now()
		e.recordFailure(id, "")
		e.enterStage(w, stageApplying)
		return nil
	case rack.Failed:
		// Its sled is gone, and the guest with it. Stopped, it takes disks and can be started elsewhere.
		return e.rack.StopInstance(ctx, id)
	case rack.Running:
	default:
		return nil
	}
	if e.opts.Shutdown == Hard {
		if w.recovering {
			return e.finish(ctx, w)
		}
		if e.stageLasted(timerHalt, w, e.opts.HaltTimeout) {
			e.recordRefusal(ctx, w, "the rack does not stop it")
			return e.finish(ctx, w)
		}
		return e.rack.StopInstance(ctx, id)
	}
	answer, err := e.opts.Requester.Reply(ctx, id, w.record.ID)
	if err != nil {
		return err
	}
	switch {
	case answer.State == metadata.RestartBack && w.recovering:
		return e.finish(ctx, w)
	case answer.State == metadata.RestartBack:
		e.recordRefusal(ctx, w, "its guest has rebooted and not powered off")
		return e.finish(ctx, w)
	case answer.State != metadata.RestartAccepted:
		return e.cancelRestart(ctx, w, "its node plugin has taken its word back")
	case e.stageLasted(timerHalt, w, e.opts.HaltTimeout):
		e.reportProblem(
			ctx,
			w,
			"RestartHangs",
			fmt.Sprintf(
				"the guest accepted and has not halted in %s: look at its console, and stop it if it hangs; it is started again, and until then no other instance takes its place",
				e.opts.HaltTimeout,
			),
		)
	}
	return nil
}

// apply changes the disks of a stopped instance: what was lazy before goes, and all that is where room is needed; what is wished
// for comes. What the rack does not answer to
// is tried again for a while. A disk that cannot be changed stays as it is: neither the others nor the instance wait for it.
func (e *Engine) apply(ctx context.Context, w *heldRestart) (done bool, err error) {
	id := w.record.Instance
	disks, err := e.rack.InstanceDisks(ctx, id)
	switch {
	case errors.Is(err, rack.ErrNotFound):
		if _, gone := e.instance(ctx, id); gone != nil {
			return false, gone
		}
		return false, err
	case err != nil:
		return e.stageLasted(timerApply, w, applyTimeout), err
	}
	var failed error
	full := len(disks)+len(e.requestsFor(id)) > e.opts.MaxDisks
	for _, disk := range disks {
		if !full && !w.deferredAtStart[disk.ID] && !e.requestedElsewhere(disk.ID, id) {
			continue
		}
		err := e.finishDetach(ctx, disk, id)
		switch {
		case errors.Is(err, rack.ErrNotStopped):
			return true, nil // somebody has started it: the wishes wait for the next time
		case errors.Is(err, rack.ErrConflict), errors.Is(err, rack.ErrRefused):
			e.opts.Log.Warn(
				"an unpublished volume could not be detached",
				"disk_id",
				disk.ID,
				"instance_id",
				id,
				"error",
				err.Error(),
			)
		case err != nil:
			failed = errors.Join(failed, err)
		}
	}
	for _, wanted := range e.requestsFor(id) {
		err := e.attachRequested(ctx, wanted.disk, id)
		switch {
		case err == nil:
		case errors.Is(err, rack.ErrNotStopped):
			return true, nil // somebody has started it
		case errors.Is(err, rack.ErrRefused), errors.Is(err, rack.ErrNotFound):
			e.opts.Log.Warn("a volume could not be attached", "disk_id", wanted.disk, "instance_id", id, "error", err.Error())
			e.recordAttachFailure(wanted.disk, "although it was stopped, the disk could not be attached: "+err.Error())
		default:
			failed = errors.Join(failed, err)
		}
	}
	return failed == nil || e.stageLasted(timerApply, w, applyTimeout), failed
}

// detachLazy detaches a disk if it is lazy, and nobody has wished it back.
func (e *Engine) finishDetach(ctx context.Context, disk rack.Disk, instance string) error {
	release, err := e.lockDisk(ctx, disk.ID)
	if err != nil {
		return err
	}
	defer release()
	if e.requested(disk.ID, instance) {
		return nil
	}
	records, err := e.readRecords(ctx)
	if err != nil || !records.detachDeferred(disk.ID, instance) {
		return err
	}
	if _, err := e.rack.Detach(ctx, disk.ID, instance); err != nil {
		return err
	}
	return e.deleteRecord(ctx, records.deferred[disk.ID].recordID)
}

// attachWished attaches a disk if it is still wished for. It is lazy until the orchestrator asks for it once more: whoever
// wished for it may have told another process in the meantime that the wish is over.
func (e *Engine) attachRequested(ctx context.Context, diskID, instance string) error {
	release, err := e.lockDisk(ctx, diskID)
	if err != nil {
		return err
	}
	defer release()
	if !e.requested(diskID, instance) {
		return nil
	}
	disk, err := e.rack.Disk(ctx, diskID)
	if err != nil {
		return err
	}
	if disk.State.Passing() {
		return fmt.Errorf("disk %q (%s) is %s: %w", disk.Name, disk.ID, disk.State, rack.ErrBusy)
	}
	if disk.InstanceID == "" {
		if err := e.checkAttachable(ctx, disk, instance); err != nil {
			return err
		}
		if err := e.deferDetach(ctx, diskID, instance); err != nil {
			return err
		}
		disk, err = e.rack.Attach(ctx, diskID, instance)
		if err != nil {
			return err
		}
	}
	if disk.InstanceID != instance {
		return nil // another restart frees it: the wish waits for the next time
	}
	e.setBlocked(diskID, attachedAskAgain)
	e.notifyWaiters()
	return nil
}

func (e *Engine) requestedElsewhere(disk, instance string) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	w := e.requests[disk]
	return w != nil && w.instance != instance
}

func (e *Engine) requested(disk, instance string) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	w := e.requests[disk]
	return w != nil && w.instance == instance
}

// checkFits refuses a disk for which there is no room after all, or of which the guest would not know which one it is
// (docs/reference/rack.md §9).
func (e *Engine) checkAttachable(ctx context.Context, wanted rack.Disk, instance string) error {
	disks, err := e.rack.InstanceDisks(ctx, instance)
	if err != nil {
		return err
	}
	if len(disks) >= e.opts.MaxDisks {
		return fmt.Errorf("instance %s has %d disks already: %w", instance, len(disks), rack.ErrFull)
	}
	for _, other := range disks {
		if other.ID != wanted.ID && diskname.Serial(other.Name) == diskname.Serial(wanted.Name) {
			return fmt.Errorf(
				"disk %q (%s) of instance %s has the same first %d bytes in its name: %w",
				other.Name,
				other.ID,
				instance,
				diskname.SerialBytes,
				rack.ErrRefused,
			)
		}
	}
	return nil
}

// start starts the instance, and goes on until it does.
func (e *Engine) start(ctx context.Context, w *heldRestart) error {
	id := w.record.Instance
	instance, err := e.instance(ctx, id)
	if err != nil {
		return err
	}
	switch instance.RunState {
	case rack.Running:
		e.observe(Restarted, e.clock.Now().Sub(w.stopped))
		e.enterStage(w, stageBack)
		return nil
	case rack.Stopped, rack.Failed:
	default:
		return nil
	}
	if err := e.rack.StartInstance(ctx, id); err != nil && !errors.Is(err, rack.ErrConflict) {
		e.reportProblem(
			ctx,
			w,
			"RestartNotStarted",
			"the instance is stopped, and the rack does not start it, which is tried again: "+err.Error(),
		)
		return err
	}
	return nil
}

// awaitBack waits for the node plugin of an instance that runs again.
func (e *Engine) awaitBack(ctx context.Context, w *heldRestart) error {
	if e.opts.Shutdown == Hard {
		return e.finish(ctx, w)
	}
	answer, err := e.opts.Requester.Reply(ctx, w.record.Instance, w.record.ID)
	switch {
	case err == nil && (answer.State == metadata.RestartBack || answer.State == metadata.RestartUnanswered):
		return e.finish(ctx, w)
	case e.stageLasted(timerBack, w, backTimeout):
		e.reportProblem(
			ctx,
			w,
			"RestartNotBack",
			fmt.Sprintf("the instance runs, and its node plugin has not said a word in %s: look at the node", backTimeout),
		)
		return e.finish(ctx, w)
	}
	return err
}

// recover brings back an instance whose restart somebody else had begun.
func (e *Engine) recoverRestart(ctx context.Context, w *heldRestart) error {
	instance, err := e.instance(ctx, w.record.Instance)
	if err != nil {
		return err
	}
	switch {
	case instance.RunState == rack.Stopped, instance.RunState == rack.Failed:
		e.withdrawRequest(ctx, w)
		e.enterStage(w, stageStopping)
		return nil
	case instance.RunState != rack.Running:
		return nil
	case e.opts.Shutdown == Hard:
		// Whoever began it may have asked the guest, which takes its time to go down.
		if !e.stageLasted(timerGuestStop, w, e.opts.HaltTimeout) {
			return nil
		}
		return e.finish(ctx, w)
	}
	answer, err := e.opts.Requester.Withdraw(ctx, w.record.Instance, w.record.ID)
	if err != nil {
		return err
	}
	if answer.State == metadata.RestartAccepted {
		e.enterStage(w, stageStopping)
		return nil
	}
	return e.finish(ctx, w)
}

// silence takes back a question that nobody has answered before somebody else stopped the instance: its node plugin would heed it
// as soon as it is up again. That it may fail is no reason to leave the instance down.
func (e *Engine) withdrawRequest(ctx context.Context, w *heldRestart) {
	if e.opts.Shutdown == Hard {
		return
	}
	if _, err := e.opts.Requester.Withdraw(ctx, w.record.Instance, w.record.ID); err != nil {
		e.opts.Log.Warn(
			"the question of a restart could not be taken back",
			"instance_id",
			w.record.Instance,
			"restart_id",
			w.record.ID,
			"error",
			err.Error(),
		)
	}
}

// finish clears away what was said, and ends the restart: also where the orchestrator knows the node no more, for the instance is
// not down, and what was said to this restart does nothing to the next one.
func (e *Engine) finish(ctx context.Context, w *heldRestart) error {
	if e.opts.Shutdown != Hard {
		if err := e.opts.Requester.Forget(ctx, w.record.Instance, w.record.ID); err != nil {
			if !e.stageLasted(timerBack, w, backTimeout) {
				return err
			}
			e.opts.Log.Warn(
				"the word of a restart that is over could not be taken back",
				"instance_id",
				w.record.Instance,
				"restart_id",
				w.record.ID,
				"error",
				err.Error(),
			)
		}
	}
	if drainer, ok := e.opts.Requester.(metadata.Drainer); ok && e.opts.Shutdown == Drain {
		if err := drainer.Undrain(ctx, w.record.Instance, w.record.ID); err != nil {
			return err
		}
	}
	return e.endRestart(ctx, w)
}

// errGone says that the instance was deleted.
var errGone = errors.New("the instance is gone")

// instance looks at an instance. One that was deleted, as far as that can be believed, needs no restart.
func (e *Engine) instance(ctx context.Context, id string) (rack.Instance, error) {
	instance, err := e.rack.Instance(ctx, id)
	if errors.Is(err, rack.ErrNotFound) {
		if unconfirmed := e.rack.ConfirmProject(ctx); unconfirmed != nil {
			return rack.Instance{}, unconfirmed
		}
		return rack.Instance{}, fmt.Errorf("%w: %w", errGone, err)
	}
	return instance, err
}

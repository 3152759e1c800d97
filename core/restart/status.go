// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package restart

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/core/record"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// waitingReasons are the reasons why a restart has not started.
var waitingReasons = []rpc.RestartReason{
	rpc.ReasonWindow,
	rpc.ReasonCoolDown,
	rpc.ReasonHours,
	rpc.ReasonOthers,
	rpc.ReasonRefused,
	rpc.ReasonSelf,
	rpc.ReasonState,
}

// restartStatus is the status of an instance that needs a restart or is being restarted.
type restartStatus struct {
	reason rpc.RestartReason
	// text explains the reason to people.
	text string
	// restart is the ID of the restart, if it is under way.
	restart string
	// since is when the reason last changed.
	since time.Time
	// volumes are the volumes whose disks to attach, for the log.
	volumes string
	// lastFailure says why the previous attempt at this restart was given up.
	lastFailure string
}

func (status restartStatus) message() string {
	if status.lastFailure != "" && status.reason != rpc.ReasonRefused {
		return status.text + "; last failure: " + status.lastFailure
	}
	return status.text
}

// restartOf returns the restart of the instance that has this status, without the disks.
func (status restartStatus) restartOf(instance string) *rpc.Restart {
	return &rpc.Restart{
		InstanceID: instance,
		Reason:     status.reason,
		Message:    status.message(),
		Since:      status.since,
		ID:         status.restart,
	}
}

// restartStatuses are the statuses by instance.
type restartStatuses map[string]restartStatus

// addWaiting sets the status of an instance, unless it is being restarted.
func (statuses restartStatuses) addWaiting(instance string, reason rpc.RestartReason, text string) {
	if statuses[instance].reason != rpc.ReasonUnderWay {
		statuses[instance] = restartStatus{reason: reason, text: text}
	}
}

// heldElsewhere is the status text of a restart that another process holds.
const heldElsewhere = "another controller restarts the instance"

// restartsUnderWay returns the statuses of the recorded restarts, after the steps of this tick.
func (e *Engine) restartsUnderWay(records recordSet) restartStatuses {
	all := restartStatuses{}
	for _, r := range records.restarts {
		status := restartStatus{reason: rpc.ReasonUnderWay, restart: r.ID, text: heldElsewhere}
		h := e.held[r.ID]
		refused, wasRefused := e.refusals[r.Instance]
		switch {
		case h != nil && h.problem != "":
			status.text = h.problem
		case h != nil && h.takenFrom != "":
			status.text = "this controller has taken the restart over, and continues when the calls of the one before have ended"
		case h != nil && r.Handover:
			status.text = "this controller runs on it, so another one must take over"
		case h != nil:
			status.text = string(h.stage)
		case r.Holder == e.holder && wasRefused: // refused in this tick
			status = restartStatus{reason: rpc.ReasonRefused, text: e.describeRefusal(refused)}
		case r.Holder == e.holder:
			status.text = "done"
		}
		all[r.Instance] = status
	}
	return all
}

// addWaitingForSlot sets the statuses of instances that wait because the maximum number of instances is down.
func (e *Engine) addWaitingForSlot(statuses restartStatuses, due []attachRequest) {
	full := fmt.Sprintf("%d instances are restarting, the limit of --restart-max-down", e.opts.MaxDown)
	for _, request := range due {
		refused, wasRefused := e.refusals[request.instance]
		switch {
		case request.problem != "" && request.heldBy == "": // a restart does not help
		case wasRefused:
			statuses.addWaiting(request.instance, rpc.ReasonRefused, e.describeRefusal(refused))
		default:
			statuses.addWaiting(request.instance, rpc.ReasonOthers, full)
		}
	}
}

// attachedNotPublished is the problem of a disk that a restart attached and whose publish was not repeated yet.
const attachedNotPublished = "the disk is attached now: repeat the request"

// freedNotAttached is the problem of a disk that a restart of another instance has freed, until the publish is
// repeated.
const freedNotAttached = "the disk is free now: repeat the request"

// justFreed reports whether no attach of the disk was tried since a restart of another instance freed it.
func (request attachRequest) justFreed() bool {
	return request.heldBy != "" || request.problem == freedNotAttached
}

// otherInstanceFirst is the status text of an instance that waits for a disk of another instance.
const otherInstanceFirst = "another instance, which still has the disk, restarts first"

// addWaitingForDisks sets the statuses of instances that wait for a disk of another instance.
func (e *Engine) addWaitingForDisks(statuses restartStatuses) {
	for _, request := range e.openRequests() {
		if request.heldBy != "" {
			statuses.addWaiting(request.instance, rpc.ReasonOthers, otherInstanceFirst)
		}
	}
}

// setStatuses stores the statuses and logs the changes. If complete is false, the statuses of other instances stay.
func (e *Engine) setStatuses(statuses restartStatuses, complete bool) {
	now := e.clock.Now()
	volumes := map[string][]string{}
	for _, request := range e.allRequests() {
		volumes[request.instance] = append(volumes[request.instance], request.volume)
	}
	for _, instance := range sortedKeys(statuses) {
		status := statuses[instance]
		old := e.status(instance)
		status.since, status.volumes, status.lastFailure = now, strings.Join(volumes[instance], ","), old.lastFailure
		if old.reason == status.reason {
			status.since = old.since
		}
		if status.reason != rpc.ReasonUnderWay &&
			(old.reason != status.reason || status.volumes != "" && old.volumes != status.volumes) {
			e.opts.Log.Info("restart needed", "node_id", instance, "volume_ids", status.volumes,
				"reason", string(status.reason), "message", status.message())
		}
		statuses[instance] = status
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if !complete {
		for instance, status := range e.statuses {
			if _, isNew := statuses[instance]; !isNew {
				statuses[instance] = status
			}
		}
	}
	e.statuses = statuses
}

func (e *Engine) status(instance string) restartStatus {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.statuses[instance]
}

// recordFailure remembers why a restart was given up. After a later success the callers clear it with an empty text.
func (e *Engine) recordFailure(instance, why string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if status, shown := e.statuses[instance]; shown || why != "" {
		status.lastFailure = why
		e.statuses[instance] = status
	}
}

// setBlocked sets or clears the problem of one attach request. It does nothing after a failed attach.
func (e *Engine) setBlocked(volume, problem string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if request := e.requests[volume]; request != nil && !request.attachFailed {
		request.problem, request.heldBy = problem, ""
	}
}

// setHeldBy notes that another instance still has the unpublished disk and must be restarted first.
func (e *Engine) setHeldBy(volume, holder string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	request := e.requests[volume]
	if request == nil {
		return
	}
	request.heldBy = holder
	if !request.attachFailed {
		request.problem = fmt.Sprintf("instance %s still has the disk and must be restarted first", holder)
	}
}

// describeRefusal says why a restart was refused, and when it is tried again.
func (e *Engine) describeRefusal(r refusal) string {
	return fmt.Sprintf("%s; next try after %s", r.reason, formatTime(r.since.Add(e.opts.CoolDown)))
}

// formatTime formats a time for messages.
func formatTime(t time.Time) string { return t.UTC().Format(time.RFC3339) }

// collecting is the status text of a restart whose window has not passed.
func (e *Engine) collecting() string {
	return fmt.Sprintf("further requests are collected for %s", e.opts.Window)
}

// describeWait returns an [ErrPlanned] that says what an attach request waits for.
func (e *Engine) describeWait(request attachRequest) error {
	status := e.status(request.instance)
	switch {
	case request.heldBy != "":
		holder := e.status(request.heldBy)
		why := cmp.Or(holder.message(), e.collecting())
		return fmt.Errorf("instance %s has it and restarts first: %s: %w", request.heldBy, why, planned(holder))
	case request.problem != "":
		return fmt.Errorf("instance %s: %s: %w", request.instance, request.problem, ErrPlanned)
	case status.reason == rpc.ReasonUnderWay:
		return fmt.Errorf("instance %s restarts: %s: %w", request.instance, status.message(), planned(status))
	case status.reason == rpc.ReasonWindow, status.reason == "":
		return fmt.Errorf("instance %s will be restarted for it, at the earliest %s after the first request: %w",
			request.instance, e.opts.Window, ErrPlanned)
	}
	return fmt.Errorf(
		"instance %s needs a restart for it, but %s: %w",
		request.instance,
		status.message(),
		planned(status),
	)
}

// planned returns the [ErrPlanned] of a restart with this status. The attempt after a refusal mentions it, and is most
// likely refused too.
func planned(status restartStatus) error {
	if status.reason == rpc.ReasonRefused || status.lastFailure != "" {
		return errRefused
	}
	return ErrPlanned
}

// Report lists the restarts, sorted by instance. It reads the records once, and adds the requests of this process. What
// only another controller was asked for is missing.
func (e *Engine) Report(ctx context.Context) ([]rpc.Restart, error) {
	records, err := e.readRecords(ctx)
	if err != nil {
		return nil, err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	all := map[string]*rpc.Restart{}
	at := func(instance string) *rpc.Restart {
		if all[instance] == nil {
			all[instance] = e.statuses[instance].restartOf(instance)
		}
		return all[instance]
	}
	for instance, status := range e.statuses {
		if status.reason != rpc.ReasonUnderWay {
			at(instance)
		}
	}
	for _, r := range records.restarts {
		one := at(r.Instance)
		if one.ID != r.ID {
			*one = rpc.Restart{InstanceID: r.Instance, Reason: rpc.ReasonUnderWay, Message: heldElsewhere, ID: r.ID}
			if r.Holder == e.holder {
				one.Message = string(stagePlanned) // created since the last tick
			}
		}
		for _, volume := range record.LongIDs(r.Volumes) {
			if r.Holder != e.holder && !e.requests[volume].isFor(r.Instance) {
				one.Attach = append(one.Attach, rpc.PendingAttach{VolumeID: volume})
			}
		}
	}
	for _, volume := range sortedKeys(e.requests) {
		request := e.requests[volume]
		at(request.instance).Attach = append(
			at(request.instance).Attach,
			rpc.PendingAttach{
				VolumeID: volume, Since: request.requestedAt, LastRequested: request.repeatedAt, Problem: request.problem,
			},
		)
	}
	deferred := records.deferred.Instances()
	for _, volume := range sortedKeys(deferred) {
		if instance := deferred[volume]; !e.requests[volume].isFor(instance) {
			at(instance).Detach = append(at(instance).Detach, volume)
		}
	}
	restarts := []rpc.Restart{}
	for _, instance := range sortedKeys(all) {
		restarts = append(restarts, *all[instance])
	}
	return restarts, nil
}

func (request *attachRequest) isFor(instance string) bool {
	return request != nil && request.instance == instance
}

// countWaiting counts the waiting instances for each reason.
func (e *Engine) countWaiting() map[rpc.RestartReason]int {
	counts := map[rpc.RestartReason]int{}
	for _, reason := range waitingReasons {
		counts[reason] = 0
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, status := range e.statuses {
		if slices.Contains(waitingReasons, status.reason) {
			counts[status.reason]++
		}
	}
	return counts
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package restart

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/core/record"
)

// Reason is the reason why the restart of an instance has not started, or ReasonUnderWay. It is a label in metrics.
type Reason string

const (
	// ReasonWindow means that more attach requests for the instance are being collected.
	ReasonWindow Reason = "window"
	// ReasonCoolDown means that the instance started too recently.
	ReasonCoolDown Reason = "cool-down"
	// ReasonHours means that restarts may start only at other times.
	ReasonHours Reason = "hours"
	// ReasonPolicy means that --attach-mode does not allow restarts: the need for one is only reported.
	ReasonPolicy Reason = "policy"
	// ReasonOthers means that --restart-max-down is reached, or that another instance must release a disk first.
	ReasonOthers Reason = "other-restart"
	// ReasonRefused means that a restart was recently refused or given up.
	ReasonRefused Reason = "refused"
	// ReasonSelf means that this controller does not know yet which instance it runs on.
	ReasonSelf Reason = "self"
	// ReasonState means that the instance is neither running nor stopped, or was deleted.
	ReasonState Reason = "state"
	// ReasonUnderWay means that the restart is under way.
	ReasonUnderWay Reason = "under-way"
)

// waitingReasons are the reasons why a restart has not started.
var waitingReasons = []Reason{
	ReasonWindow,
	ReasonCoolDown,
	ReasonHours,
	ReasonPolicy,
	ReasonOthers,
	ReasonRefused,
	ReasonSelf,
	ReasonState,
}

// restartStatus is the status of an instance that needs a restart or is being restarted.
type restartStatus struct {
	reason Reason
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
	if status.lastFailure != "" && status.reason != ReasonRefused {
		return status.text + "; last failure: " + status.lastFailure
	}
	return status.text
}

// restartOf returns the restart of the instance that has this status, without the disks.
func (status restartStatus) restartOf(instance string) *Restart {
	return &Restart{
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
func (statuses restartStatuses) addWaiting(instance string, reason Reason, text string) {
	if statuses[instance].reason != ReasonUnderWay {
		statuses[instance] = restartStatus{reason: reason, text: text}
	}
}

// heldElsewhere is the status text of a restart that another process holds.
const heldElsewhere = "another controller restarts the instance"

// restartsUnderWay returns the statuses of the recorded restarts, after the steps of this tick.
func (e *Engine) restartsUnderWay(records recordSet) restartStatuses {
	all := restartStatuses{}
	for _, r := range records.restarts {
		status := restartStatus{reason: ReasonUnderWay, restart: r.ID, text: heldElsewhere}
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
			status = restartStatus{reason: ReasonRefused, text: e.describeRefusal(refused)}
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
		switch blocked := e.policyBlock(); {
		case request.problem != "" && request.heldBy == "": // a restart does not help
		case blocked != "":
			statuses.addWaiting(request.instance, ReasonPolicy, blocked)
		case wasRefused:
			statuses.addWaiting(request.instance, ReasonRefused, e.describeRefusal(refused))
		default:
			statuses.addWaiting(request.instance, ReasonOthers, full)
		}
	}
}

// attachedNotPublished is the problem of a disk that a restart attached and whose publish was not repeated yet.
const attachedNotPublished = "the disk is attached now: repeat the request"

// otherInstanceFirst is the status text of an instance that waits for a disk of another instance.
const otherInstanceFirst = "another instance, which still has the disk, restarts first"

// addWaitingForDisks sets the statuses of instances that wait for a disk of another instance.
func (e *Engine) addWaitingForDisks(statuses restartStatuses) {
	blocked := e.policyBlock()
	for _, request := range e.openRequests() {
		switch {
		case request.heldBy == "":
		case blocked != "":
			statuses.addWaiting(request.instance, ReasonPolicy, blocked)
		default:
			statuses.addWaiting(request.instance, ReasonOthers, otherInstanceFirst)
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
		if status.reason != ReasonUnderWay &&
			(old.reason != status.reason || status.volumes != "" && old.volumes != status.volumes) {
			e.opts.Log.Info(
				"restart needed",
				"node_id",
				instance,
				"volume_ids",
				status.volumes,
				"reason",
				string(status.reason),
				"message",
				status.message(),
			)
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
	return fmt.Sprintf("%s; next attempt after %s", r.reason, formatTime(r.since.Add(e.opts.CoolDown)))
}

// formatTime formats a time for messages.
func formatTime(t time.Time) string { return t.UTC().Format(time.RFC3339) }

// describeWait returns an [ErrPlanned] that says what an attach request waits for.
func (e *Engine) describeWait(request attachRequest) error {
	status, blocked := e.status(request.instance), e.policyBlock()
	switch {
	case request.heldBy != "":
		if blocked != "" {
			return fmt.Errorf("instance %s has it and restarts first: %s: %w", request.heldBy, blocked, errNeeded)
		}
		holder := e.status(request.heldBy)
		return fmt.Errorf("instance %s has it and restarts first: %s: %w", request.heldBy, holder.message(), planned(holder))
	case request.problem != "":
		return fmt.Errorf("instance %s: %s: %w", request.instance, request.problem, ErrPlanned)
	case status.reason == ReasonUnderWay:
		return fmt.Errorf("instance %s restarts: %s: %w", request.instance, status.message(), planned(status))
	case blocked != "":
		return fmt.Errorf("instance %s needs a restart for it, but %s: %w", request.instance, blocked, errNeeded)
	case status.reason == ReasonWindow, status.reason == "":
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
	if status.reason == ReasonRefused || status.lastFailure != "" {
		return errRefused
	}
	return ErrPlanned
}

// Restart describes a restart that is needed, planned or under way. It also describes an instance that needs no restart
// but still has unpublished disks. Its JSON is what the controller sends to the commands of oxide-csi.
type Restart struct {
	InstanceID string `json:"nodeID"`
	// Reason is empty if the instance needs no restart.
	Reason Reason `json:"reason,omitempty"`
	// Message explains it to people: why the restart has not started, or its progress.
	Message string `json:"message,omitempty"`
	// Since is when Reason last changed, as far as this process knows.
	Since time.Time `json:"since,omitzero"`
	// ID is set if the restart is under way.
	ID string `json:"restartID,omitempty"`
	// Attach are the volumes whose disks are to be attached. Detach are the IDs of the unpublished volumes whose disks are
	// to be detached.
	Attach []PendingAttach `json:"attach,omitempty"`
	Detach []string        `json:"detach,omitempty"`
}

// Concerns reports whether the restart attaches or detaches the disk of the volume.
func (r Restart) Concerns(volumeID string) bool {
	return slices.Contains(r.Detach, volumeID) ||
		slices.ContainsFunc(r.Attach, func(w PendingAttach) bool { return w.VolumeID == volumeID })
}

// PendingAttach is a volume whose disk a restart will attach.
type PendingAttach struct {
	VolumeID string `json:"volumeID"`
	// Since is the time of the first request, LastRequested of the last. Both are zero if another controller got the
	// request.
	Since         time.Time `json:"since,omitzero"`
	LastRequested time.Time `json:"repeated,omitzero"`
	// Problem says what blocks this volume alone.
	Problem string `json:"problem,omitempty"`
}

// Report lists the restarts, sorted by instance. It reads the records once, and adds the requests of this process. What
// only another controller was asked for is missing.
func (e *Engine) Report(ctx context.Context) ([]Restart, error) {
	records, err := e.readRecords(ctx)
	if err != nil {
		return nil, err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	all := map[string]*Restart{}
	at := func(instance string) *Restart {
		if all[instance] == nil {
			all[instance] = e.statuses[instance].restartOf(instance)
		}
		return all[instance]
	}
	for instance, status := range e.statuses {
		if status.reason != ReasonUnderWay {
			at(instance)
		}
	}
	for _, r := range records.restarts {
		one := at(r.Instance)
		if one.ID != r.ID {
			*one = Restart{InstanceID: r.Instance, Reason: ReasonUnderWay, Message: heldElsewhere, ID: r.ID}
			if r.Holder == e.holder {
				one.Message = string(stagePlanned) // created since the last tick
			}
		}
		for _, volume := range record.LongIDs(r.Volumes) {
			if r.Holder != e.holder && !e.requests[volume].isFor(r.Instance) {
				one.Attach = append(one.Attach, PendingAttach{VolumeID: volume})
			}
		}
	}
	for _, volume := range sortedKeys(e.requests) {
		request := e.requests[volume]
		at(request.instance).Attach = append(
			at(request.instance).Attach,
			PendingAttach{
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
	restarts := []Restart{}
	for _, instance := range sortedKeys(all) {
		restarts = append(restarts, *all[instance])
	}
	return restarts, nil
}

func (request *attachRequest) isFor(instance string) bool {
	return request != nil && request.instance == instance
}

// countWaiting counts the waiting instances for each reason.
func (e *Engine) countWaiting() map[Reason]int {
	counts := map[Reason]int{}
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

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
)

// Reason says in a word how it stands with the restart of an instance. Metrics have it for a label.
type Reason string

const (
	// ReasonWindow: what is wanted of the instance is still being collected.
	ReasonWindow Reason = "window"
	// ReasonCoolDown: it has been running for too short a time.
	ReasonCoolDown Reason = "cool-down"
	// ReasonHours: restarts may begin at other times only.
	ReasonHours Reason = "hours"
	// ReasonPolicy: nothing is restarted, and this is only told.
	ReasonPolicy Reason = "policy"
	// ReasonOthers: other instances are restarted first.
	ReasonOthers Reason = "other-restart"
	// ReasonRefused: a restart was given up a short while ago.
	ReasonRefused Reason = "refused"
	// ReasonSelf: this controller does not know yet where it runs itself.
	ReasonSelf Reason = "self"
	// ReasonState: the instance is neither running nor stopped, or gone.
	ReasonState Reason = "state"
	// ReasonUnderWay: it is being restarted.
	ReasonUnderWay Reason = "under-way"
)

// waiting are the reasons of restarts that have not begun.
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

// outlook is how it stands with the restart of an instance.
type restartStatus struct {
	reason Reason
	// text says the same to people.
	text string
	// restart is its ID, if it is under way.
	restart string
	// since is when the reason came to be the one that it is.
	since time.Time
	// disks are those that are to be attached there, for the log.
	disks string
	// before is why a restart was given up that was to do the same.
	lastFailure string
}

func (o restartStatus) message() string {
	if o.lastFailure != "" && o.reason != ReasonRefused {
		return o.text + "; it was given up before: " + o.lastFailure
	}
	return o.text
}

// outlooks are how it stands, by instance.
type restartStatuses map[string]restartStatus

// add notes how it stands with an instance that is not being restarted.
func (known restartStatuses) addWaiting(instance string, reason Reason, text string) {
	if known[instance].reason != ReasonUnderWay {
		known[instance] = restartStatus{reason: reason, text: text}
	}
}

// elsewhere is how far a restart is that another process holds.
const heldElsewhere = "another controller works on it"

// underWay are the restarts that these records tell of, as they are after this tick's step.
func (e *Engine) restartsUnderWay(records recordSet) restartStatuses {
	all := restartStatuses{}
	for _, r := range records.restarts {
		o := restartStatus{reason: ReasonUnderWay, restart: r.ID, text: heldElsewhere}
		w := e.held[r.ID]
		refused, resting := e.refusals[r.Instance]
		switch {
		case w != nil && w.problem != "":
			o.text = w.problem
		case w != nil && w.takenFrom != "":
			o.text = "taken over, and goes on as soon as the controller that had it can do nothing more"
		case w != nil && r.Handover:
			o.text = "this controller runs on it, and waits for another one to take over"
		case w != nil:
			o.text = string(w.stage)
		case r.Holder == e.holder && resting: // given up in this tick
			o = restartStatus{reason: ReasonRefused, text: e.describeRefusal(refused)}
		case r.Holder == e.holder:
			o.text = "done"
		}
		all[r.Instance] = o
	}
	return all
}

// afterOthers adds what cannot begin because as many instances are down as may be.
func (e *Engine) addWaitingForSlot(known restartStatuses, due []attachRequest) {
	full := fmt.Sprintf("as many instances are being restarted as --restart-max-down allows, which is %d", e.opts.MaxDown)
	for _, w := range due {
		refused, resting := e.refusals[w.instance]
		switch forbidden := e.policyBlock(); {
		case w.problem != "" && w.heldBy == "": // no restart helps
		case forbidden != "":
			known.addWaiting(w.instance, ReasonPolicy, forbidden)
		case resting:
			known.addWaiting(w.instance, ReasonRefused, e.describeRefusal(refused))
		default:
			known.addWaiting(w.instance, ReasonOthers, full)
		}
	}
}

// attachedAlready is said of a disk that nobody has asked for since it was attached.
const attachedAskAgain = "the disk is attached by now: ask for it once more"

// holderFirst is said of an instance that waits for what another one still has.
const otherInstanceFirst = "an instance that still has a disk for it is restarted first"

// afterHolders adds what waits for other instances to give up disks.
func (e *Engine) addWaitingForDisks(known restartStatuses) {
	forbidden := e.policyBlock()
	for _, w := range e.openRequests() {
		switch {
		case w.heldBy == "":
		case forbidden != "":
			known.addWaiting(w.instance, ReasonPolicy, forbidden)
		default:
			known.addWaiting(w.instance, ReasonOthers, otherInstanceFirst)
		}
	}
}

// show makes this how things stand, and logs what has changed. What is not complete leaves all else as it was.
func (e *Engine) setStatuses(known restartStatuses, complete bool) {
	now := e.clock.Now()
	for _, instance := range sortedKeys(known) {
		o := known[instance]
		var disks []string
		for _, w := range e.requestsFor(instance) {
			disks = append(disks, w.disk)
		}
		old := e.status(instance)
		o.since, o.disks, o.lastFailure = now, strings.Join(disks, ","), old.lastFailure
		if old.reason == o.reason {
			o.since = old.since
		}
		if o.reason != ReasonUnderWay && (old.reason != o.reason || o.disks != "" && old.disks != o.disks) {
			e.opts.Log.Info(
				"a restart is wanted",
				"instance_id",
				instance,
				"disks",
				o.disks,
				"reason",
				string(o.reason),
				"not_yet",
				o.message(),
			)
		}
		known[instance] = o
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if !complete {
		for instance, o := range e.statuses {
			if _, told := known[instance]; !told {
				known[instance] = o
			}
		}
	}
	e.statuses = known
}

func (e *Engine) status(instance string) restartStatus {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.statuses[instance]
}

// gaveUp keeps in mind why a restart was given up, until one goes further.
func (e *Engine) recordFailure(instance, why string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if o, shown := e.statuses[instance]; shown || why != "" {
		o.lastFailure = why
		e.statuses[instance] = o
	}
}

// hinder notes what stands in the way of one wish for which an instance may be restarted, whatever becomes of that.
func (e *Engine) setBlocked(disk, problem string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if w := e.requests[disk]; w != nil && !w.attachFailed {
		w.problem, w.heldBy = problem, ""
	}
}

// waitFor notes that an instance has to give a disk up first, which it has for nobody.
func (e *Engine) setHeldBy(disk, holder string) {
	e.setBlocked(disk, fmt.Sprintf("instance %s still has the disk, and is to be restarted first", holder))
	e.mu.Lock()
	defer e.mu.Unlock()
	if w := e.requests[disk]; w != nil {
		w.heldBy = holder
	}
}

// again says why a restart was given up, and when it is tried again.
func (e *Engine) describeRefusal(r refusal) string {
	return fmt.Sprintf("%s; it is tried again after %s", r.reason, formatTime(r.since.Add(e.opts.CoolDown)))
}

// moment is a time for people to read.
func formatTime(t time.Time) string { return t.UTC().Format(time.RFC3339) }

// waitsFor says what a wish waits for.
func (e *Engine) describeWait(w attachRequest) string {
	o, forbidden := e.status(w.instance), e.policyBlock()
	switch {
	case w.heldBy != "":
		return fmt.Sprintf(
			"instance %s is to be restarted for it, and before that instance %s, which still has the disk: %s",
			w.instance,
			w.heldBy,
			cmp.Or(forbidden, e.status(w.heldBy).message()),
		)
	case w.problem != "":
		return fmt.Sprintf("it is to be attached to instance %s: %s", w.instance, w.problem)
	case o.reason == ReasonUnderWay:
		return fmt.Sprintf("instance %s is being restarted for it: %s", w.instance, o.message())
	case forbidden != "":
		return fmt.Sprintf("instance %s is to be restarted for it, but %s", w.instance, forbidden)
	case o.reason == ReasonWindow, o.reason == "":
		return fmt.Sprintf(
			"instance %s is restarted for it, %s after the first such wish at the earliest",
			w.instance,
			e.opts.Window,
		)
	}
	return fmt.Sprintf("instance %s is to be restarted for it, but %s", w.instance, o.message())
}

// Restart is a restart that is wanted, planned or under way; or none, of an instance that still has disks which go with its
// next one. Its JSON is what the controller tells the commands of oxide-csi.
type Restart struct {
	InstanceID string `json:"nodeID"`
	// Reason is empty where nothing is wanted of the instance.
	Reason Reason `json:"reason,omitempty"`
	// Message says the same to people: why it has not begun, or how far it is.
	Message string `json:"message,omitempty"`
	// Since is when Reason came to be so, as far as this process knows.
	Since time.Time `json:"since,omitzero"`
	// ID is set where it is under way.
	ID string `json:"restartID,omitempty"`
	// Attach are the disks that are wanted there, Detach those that are there for nobody any more.
	Attach []PendingAttach `json:"attach,omitempty"`
	Detach []string `json:"detach,omitempty"`
}

// Concerns reports whether it changes where a disk is.
func (r Restart) Concerns(diskID string) bool {
	return slices.Contains(r.Detach, diskID) ||
		slices.ContainsFunc(r.Attach, func(w PendingAttach) bool { return w.DiskID == diskID })
}

// Wanted is a disk that is to be attached.
type PendingAttach struct {
	DiskID string `json:"volumeID"`
	// Since is when it was first wanted, Repeated when last. Both are zero where another controller was asked for it.
	Since    time.Time `json:"since,omitzero"`
	LastRequested time.Time `json:"repeated,omitzero"`
	// Problem is what stands in the way of this disk alone.
	Problem string `json:"problem,omitempty"`
}

// Report is what the records say, which are listed once, and what this process was asked for; others may have been asked for
// more. It is sorted by instance.
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
			o := e.statuses[instance]
			all[instance] = &Restart{InstanceID: instance, Reason: o.reason, Message: o.message(), Since: o.since, ID: o.restart}
		}
		return all[instance]
	}
	for instance, o := range e.statuses {
		if o.reason != ReasonUnderWay {
			at(instance)
		}
	}
	for _, r := range records.restarts {
		one := at(r.Instance)
		if one.ID != r.ID {
			*one = Restart{InstanceID: r.Instance, Reason: ReasonUnderWay, Message: heldElsewhere, ID: r.ID}
			if r.Holder == e.holder {
				one.Message = string(stagePlanned) // a moment ago
			}
		}
		for _, disk := range decodeDisks(r.Disks) {
			if r.Holder != e.holder && !e.requests[disk].isFor(r.Instance) {
				one.Attach = append(one.Attach, PendingAttach{DiskID: disk})
			}
		}
	}
	for _, disk := range sortedKeys(e.requests) {
		w := e.requests[disk]
		at(w.instance).Attach = append(
			at(w.instance).Attach,
			PendingAttach{DiskID: disk, Since: w.requestedAt, LastRequested: w.repeatedAt, Problem: w.problem},
		)
	}
	for _, disk := range sortedKeys(records.deferred) {
		if l := records.deferred[disk]; !e.requests[disk].isFor(l.Instance) {
			at(l.Instance).Detach = append(at(l.Instance).Detach, disk)
		}
	}
	restarts := []Restart{}
	for _, instance := range sortedKeys(all) {
		restarts = append(restarts, *all[instance])
	}
	return restarts, nil
}

func (w *attachRequest) isFor(instance string) bool { return w != nil && w.instance == instance }

// count says of how many instances the restart waits, for each reason that there is.
func (e *Engine) countWaiting() map[Reason]int {
	counts := map[Reason]int{}
	for _, reason := range waitingReasons {
		counts[reason] = 0
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, o := range e.statuses {
		if slices.Contains(waitingReasons, o.reason) {
			counts[o.reason]++
		}
	}
	return counts
}

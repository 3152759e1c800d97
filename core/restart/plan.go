// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package restart

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
)

// candidate is an instance whose restart would change something.
type candidate struct {
	instance string
	// attaches is true where a disk that is wished for can be attached.
	attachesDisk bool
	// frees is a disk that it gives up and another instance waits for, empty where there is none.
	freesDisk string
	// waits is true where a disk that is wished for here is still on another instance.
	waitsForDisk bool
	// stopped is true where the instance is stopped already, by somebody else: nothing has to be asked of it.
	stopped bool
}

// plan begins the next restart, if there is one to begin. What all others wait for becomes known.
func (e *Engine) plan(ctx context.Context, records recordSet, known restartStatuses) error {
	due, collecting := e.dueRequests()
	for _, instance := range collecting {
		known.addWaiting(instance, ReasonWindow, fmt.Sprintf("what else is wanted of it is collected for %s", e.opts.Window))
	}
	slot := 0
	for records.slotTaken(slot) {
		slot++
	}
	if slot >= e.opts.MaxDown {
		e.addWaitingForSlot(known, due)
		return nil
	}
	useful, err := e.candidates(ctx, records, due)
	if err != nil {
		return err
	}
	e.addWaitingForDisks(known)
	candidates, err := e.eligible(ctx, useful, known)
	if err != nil {
		return err
	}
	// What frees a disk comes first: what waits for it then needs one restart and not two.
	slices.SortStableFunc(candidates, func(x, y candidate) int { return order(x) - order(y) })
	var chosen *candidate
	for _, c := range candidates {
		if _, taken := records.restartOf(c.instance, ""); taken {
			continue
		}
		hindered, text := e.blockReason(c)
		switch {
		case hindered != "":
			known.addWaiting(c.instance, hindered, text)
		// One that frees a disk goes before what waits for it, but not where each waits for the other.
		case c.waitsForDisk && c.freesDisk == "" && slices.ContainsFunc(candidates, func(other candidate) bool { return other.freesDisk != "" && other.instance != c.instance }):
			known.addWaiting(c.instance, ReasonOthers, otherInstanceFirst)
		case chosen != nil:
			known.addWaiting(c.instance, ReasonOthers, fmt.Sprintf("instance %s is restarted first", chosen.instance))
		default:
			chosen = &c
		}
	}
	if chosen == nil {
		return nil
	}
	id, err := e.createRecord(ctx, *chosen, slot)
	if id != "" {
		known[chosen.instance] = restartStatus{reason: ReasonUnderWay, text: string(stagePlanned), restart: id}
	}
	return err
}

func order(c candidate) int {
	switch {
	case c.stopped:
		return 0
	case c.freesDisk != "":
		return 1
	}
	return 2
}

// may says why an instance may not be restarted just now; the reason is empty if it may.
func (e *Engine) blockReason(c candidate) (Reason, string) {
	why, now := e.policyBlock(), e.clock.Now()
	_, known := e.ownInstance(c.instance)
	switch {
	case c.stopped:
	case why != "":
		return ReasonPolicy, why
	case !known:
		return ReasonSelf, "this controller does not know yet on which instance it runs itself"
	case e.opts.NextStart != nil && e.opts.NextStart(now).After(now):
		return ReasonHours, fmt.Sprintf("not before %s, the next of the times in --restart-hours", formatTime(e.opts.NextStart(now)))
	}
	return "", ""
}

// forbidden says why no instance at all is restarted, empty where they are.
func (e *Engine) policyBlock() string {
	const instead = "stop it until the disk is attached, or allow restarts"
	switch e.opts.Policy {
	case Never:
		return "--restart-policy=never forbids that: " + instead
	case Plan:
		return "--restart-policy=plan only says so: " + instead
	}
	return ""
}

// begins makes the record of a restart, and returns its ID, empty where somebody else was faster. Nothing is asked before the
// records were read once more.
func (e *Engine) createRecord(ctx context.Context, c candidate, slot int) (id string, err error) {
	var disks []string
	for _, wanted := range e.requestsFor(c.instance) {
		disks = append(disks, wanted.disk)
	}
	own, _ := e.ownInstance(c.instance)
	w := &heldRestart{
		record: restartRecord{
			Version:  1,
			Cluster:  e.opts.Cluster,
			ID:       e.newID(),
			Instance: c.instance,
			Holder:   e.holder,
			Disks:    encodeDisks(disks),
			slot:     slot,
			epoch:    1,
		},
		stage: stagePlanned, since: e.clock.Now(), renewed: e.clock.Now(),
	}
	if own && !c.stopped {
		w.record.handOver(c.freesDisk)
	}
	record, ok, err := e.createRestart(ctx, w.record)
	if err != nil || !ok {
		return "", err
	}
	w.record = record
	e.held[record.ID] = w
	e.opts.Log.Info(
		"planned a restart",
		"instance_id",
		c.instance,
		"restart_id",
		record.ID,
		"disks",
		strings.Join(disks, ","),
		"slot",
		slot,
	)
	return record.ID, nil
}

// useful are the instances whose restart would fulfil one of these wishes, or a part of it.
func (e *Engine) candidates(ctx context.Context, records recordSet, wishes []attachRequest) ([]candidate, error) {
	var found []candidate
	at := func(instance string) *candidate {
		i := slices.IndexFunc(found, func(c candidate) bool { return c.instance == instance })
		if i < 0 {
			i = len(found)
			found = append(found, candidate{instance: instance})
		}
		return &found[i]
	}
	for _, w := range wishes {
		disk, err := e.rack.Disk(ctx, w.disk)
		switch {
		case errors.Is(err, rack.ErrNotFound):
			e.setBlocked(w.disk, "the disk is gone")
		case err != nil:
			return nil, err
		case disk.InstanceID == w.instance:
			e.setBlocked(w.disk, attachedAskAgain)
		case disk.InstanceID == "" && disk.State != rack.Detached:
			e.setBlocked(w.disk, "the disk is "+string(disk.State))
		case disk.InstanceID == "":
			at(w.instance).attachesDisk = true
			e.setBlocked(w.disk, "")
		case records.detachDeferred(w.disk, disk.InstanceID):
			at(w.instance).waitsForDisk = true
			at(disk.InstanceID).freesDisk = w.disk
			e.setHeldBy(w.disk, disk.InstanceID)
		default:
			e.setBlocked(w.disk, fmt.Sprintf("the disk is attached to instance %s", disk.InstanceID))
		}
	}
	return slices.DeleteFunc(found, func(c candidate) bool { return !c.attachesDisk && c.freesDisk == "" }), nil
}

// due are the wishes that have been collected for long enough: with the first of an instance, all of them. The instances of all
// others are still collecting.
func (e *Engine) dueRequests() (due []attachRequest, collecting []string) {
	all := e.openRequests()
	ripe := map[string]bool{}
	for _, w := range all {
		if !ripe[w.instance] {
			ripe[w.instance] = e.clock.Passed(timerWindow, w.instance, w.requestedAt, e.opts.Window)
		}
	}
	for _, instance := range sortedKeys(ripe) {
		if !ripe[instance] {
			collecting = append(collecting, instance)
		}
	}
	return slices.DeleteFunc(all, func(w attachRequest) bool { return !ripe[w.instance] }), collecting
}

// allWishes are copies of all wishes for which an instance may be restarted, the oldest first.
func (e *Engine) openRequests() []attachRequest {
	e.mu.Lock()
	defer e.mu.Unlock()
	var all []attachRequest
	for _, disk := range sortedKeys(e.requests) {
		if w := e.requests[disk]; !w.attachFailed {
			all = append(all, *w)
		}
	}
	slices.SortStableFunc(all, func(x, y attachRequest) int { return x.requestedAt.Compare(y.requestedAt) })
	return all
}

// able are the candidates that are running and have been for long enough, or are stopped. What hinders the others becomes known.
func (e *Engine) eligible(ctx context.Context, candidates []candidate, known restartStatuses) ([]candidate, error) {
	var able []candidate
	for _, c := range candidates {
		instance, err := e.instance(ctx, c.instance)
		switch {
		case errors.Is(err, errGone):
			known.addWaiting(c.instance, ReasonState, "the instance is gone")
			continue
		case err != nil:
			return nil, err
		}
		c.stopped = instance.RunState == rack.Stopped
		rest, resting := e.refusals[c.instance]
		switch {
		case c.stopped, e.policyBlock() != "":
		case resting:
			known.addWaiting(c.instance, ReasonRefused, e.describeRefusal(rest))
			continue
		case instance.RunState != rack.Running:
			known.addWaiting(c.instance, ReasonState, "it is "+instance.RunState)
			continue
		case !e.clock.Passed(timerCoolDown, c.instance, instance.RunStateSince, e.opts.CoolDown):
			known.addWaiting(
				c.instance,
				ReasonCoolDown,
				fmt.Sprintf(
					"it started less than %s ago, and is left alone until %s",
					e.opts.CoolDown,
					formatTime(instance.RunStateSince.Add(e.opts.CoolDown)),
				),
			)
			continue
		}
		able = append(able, c)
	}
	return able, nil
}

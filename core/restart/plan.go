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
	attaches bool
	// frees is a disk that it gives up and another instance waits for, empty where there is none.
	frees string
	// waits is true where a disk that is wished for here is still on another instance.
	waits bool
	// stopped is true where the instance is stopped already, by somebody else: nothing has to be asked of it.
	stopped bool
}

// plan begins the next restart, if there is one to begin. What all others wait for becomes known.
func (e *Engine) plan(ctx context.Context, records book, known outlooks) error {
	due, collecting := e.due()
	for _, instance := range collecting {
		known.add(instance, ReasonWindow, fmt.Sprintf("what else is wanted of it is collected for %s", e.opts.Window))
	}
	slot := 0
	for records.slotTaken(slot) {
		slot++
	}
	if slot >= e.opts.MaxDown {
		e.afterOthers(known, due)
		return nil
	}
	useful, err := e.useful(ctx, records, due)
	if err != nil {
		return err
	}
	e.afterHolders(known)
	candidates, err := e.able(ctx, useful, known)
	if err != nil {
		return err
	}
	// What frees a disk comes first: what waits for it then needs one restart and not two.
	slices.SortStableFunc(candidates, func(x, y candidate) int { return rank(x) - rank(y) })
	var chosen *candidate
	for _, c := range candidates {
		if _, taken := records.restartOf(c.instance, ""); taken {
			continue
		}
		hindered, text := e.may(c)
		switch {
		case hindered != "":
			known.add(c.instance, hindered, text)
		// One that frees a disk goes before what waits for it, but not where each waits for the other.
		case c.waits && c.frees == "" && slices.ContainsFunc(candidates, func(other candidate) bool { return other.frees != "" && other.instance != c.instance }):
			known.add(c.instance, ReasonOthers, holderFirst)
		case chosen != nil:
			known.add(c.instance, ReasonOthers, fmt.Sprintf("instance %s is restarted first", chosen.instance))
		default:
			chosen = &c
		}
	}
	if chosen == nil {
		return nil
	}
	id, err := e.begins(ctx, *chosen, slot)
	if id != "" {
		known[chosen.instance] = outlook{reason: ReasonUnderWay, text: string(stagePlanned), restart: id}
	}
	return err
}

func rank(c candidate) int {
	switch {
	case c.stopped:
		return 0
	case c.frees != "":
		return 1
	}
	return 2
}

// may says why an instance may not be restarted just now; the reason is empty if it may.
func (e *Engine) may(c candidate) (Reason, string) {
	why, now := e.forbidden(), e.clock.Now()
	_, known := e.self(c.instance)
	switch {
	case c.stopped:
	case why != "":
		return ReasonPolicy, why
	case !known:
		return ReasonSelf, "this controller does not know yet on which instance it runs itself"
	case e.opts.Next != nil && e.opts.Next(now).After(now):
		return ReasonHours, fmt.Sprintf("not before %s, the next of the times in --restart-hours", moment(e.opts.Next(now)))
	}
	return "", ""
}

// forbidden says why no instance at all is restarted, empty where they are.
func (e *Engine) forbidden() string {
	if e.opts.Policy == Plan {
		return "--attach-mode=plan only says so: stop it until the disk is attached, or set --attach-mode=restart"
	}
	return ""
}

// begins makes the record of a restart, and returns its ID, empty where somebody else was faster. Nothing is asked before the
// records were read once more.
func (e *Engine) begins(ctx context.Context, c candidate, slot int) (id string, err error) {
	var disks []string
	for _, wanted := range e.wishesFor(c.instance) {
		disks = append(disks, wanted.disk)
	}
	own, _ := e.self(c.instance)
	w := &work{
		record: restartRecord{
			Version:  1,
			Cluster:  e.opts.Cluster,
			ID:       e.newID(),
			Instance: c.instance,
			Holder:   e.holder,
			Disks:    shorten(disks),
			slot:     slot,
			epoch:    1,
		},
		stage: stagePlanned, since: e.clock.Now(), beat: e.clock.Now(),
	}
	if own && !c.stopped {
		w.record.handOver(c.frees)
	}
	record, ok, err := e.create(ctx, w.record)
	if err != nil || !ok {
		return "", err
	}
	w.record = record
	e.works[record.ID] = w
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
func (e *Engine) useful(ctx context.Context, records book, wishes []wish) ([]candidate, error) {
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
			e.hinder(w.disk, "the disk is gone")
		case err != nil:
			return nil, err
		case disk.InstanceID == w.instance:
			e.hinder(w.disk, attachedAlready)
		case disk.InstanceID == "" && disk.State != rack.Detached:
			e.hinder(w.disk, "the disk is "+string(disk.State))
		case disk.InstanceID == "":
			at(w.instance).attaches = true
			e.hinder(w.disk, "")
		case records.lazyOn(w.disk, disk.InstanceID):
			at(w.instance).waits = true
			at(disk.InstanceID).frees = w.disk
			e.waitFor(w.disk, disk.InstanceID)
		default:
			e.hinder(w.disk, fmt.Sprintf("the disk is attached to instance %s", disk.InstanceID))
		}
	}
	return slices.DeleteFunc(found, func(c candidate) bool { return !c.attaches && c.frees == "" }), nil
}

// due are the wishes that have been collected for long enough: with the first of an instance, all of them. The instances of all
// others are still collecting.
func (e *Engine) due() (due []wish, collecting []string) {
	all := e.allWishes()
	ripe := map[string]bool{}
	for _, w := range all {
		if !ripe[w.instance] {
			ripe[w.instance] = e.clock.Passed(timerWindow, w.instance, w.first, e.opts.Window)
		}
	}
	for _, instance := range sortedKeys(ripe) {
		if !ripe[instance] {
			collecting = append(collecting, instance)
		}
	}
	return slices.DeleteFunc(all, func(w wish) bool { return !ripe[w.instance] }), collecting
}

// allWishes are copies of all wishes for which an instance may be restarted, the oldest first.
func (e *Engine) allWishes() []wish {
	e.mu.Lock()
	defer e.mu.Unlock()
	var all []wish
	for _, disk := range sortedKeys(e.wishes) {
		if w := e.wishes[disk]; !w.refused {
			all = append(all, *w)
		}
	}
	slices.SortStableFunc(all, func(x, y wish) int { return x.first.Compare(y.first) })
	return all
}

// able are the candidates that are running and have been for long enough, or are stopped. What hinders the others becomes known.
func (e *Engine) able(ctx context.Context, candidates []candidate, known outlooks) ([]candidate, error) {
	var able []candidate
	for _, c := range candidates {
		instance, err := e.instance(ctx, c.instance)
		switch {
		case errors.Is(err, errGone):
			known.add(c.instance, ReasonState, "the instance is gone")
			continue
		case err != nil:
			return nil, err
		}
		c.stopped = instance.RunState == rack.Stopped
		rest, resting := e.rest[c.instance]
		switch {
		case c.stopped, e.forbidden() != "":
		case resting:
			known.add(c.instance, ReasonRefused, e.again(rest))
			continue
		case instance.RunState != rack.Running:
			known.add(c.instance, ReasonState, "it is "+instance.RunState)
			continue
		case !e.clock.Passed(timerCoolDown, c.instance, instance.RunStateSince, e.opts.CoolDown):
			known.add(
				c.instance,
				ReasonCoolDown,
				fmt.Sprintf(
					"it started less than %s ago, and is left alone until %s",
					e.opts.CoolDown,
					moment(instance.RunStateSince.Add(e.opts.CoolDown)),
				),
			)
			continue
		}
		able = append(able, c)
	}
	return able, nil
}

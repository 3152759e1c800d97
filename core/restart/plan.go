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

// plan begins the next restart, if there is one to begin.
func (e *Engine) plan(ctx context.Context, records book) error {
	slot := 0
	for records.slotTaken(slot) {
		slot++
	}
	if slot >= e.opts.MaxDown {
		return nil
	}
	useful, err := e.useful(ctx, records, e.due())
	if err != nil {
		return err
	}
	candidates, err := e.able(ctx, useful)
	if err != nil {
		return err
	}
	// What frees a disk comes first: what waits for it then needs one restart and not two.
	slices.SortStableFunc(candidates, func(x, y candidate) int { return rank(x) - rank(y) })
	for _, c := range candidates {
		if _, taken := records.restartOf(c.instance, ""); taken {
			continue
		}
		// One that frees a disk goes before what waits for it, but not where each waits for the other.
		if c.waits && c.frees == "" && slices.ContainsFunc(candidates, func(other candidate) bool { return other.frees != "" && other.instance != c.instance }) {
			continue
		}
		if e.may(c) {
			return e.begins(ctx, c, slot)
		}
	}
	return nil
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

// may says whether an instance may be restarted just now, and tells those who wait if it may not.
func (e *Engine) may(c candidate) bool {
	if c.stopped {
		return true
	}
	why := e.forbidden()
	_, known := e.self(c.instance)
	switch {
	case why != "":
	case !known:
		why = "this controller does not know yet on which instance it runs itself"
	case e.opts.Open != nil && !e.opts.Open(e.clock.Now()):
		why = "not before the next of the times in --restart-hours"
	default:
		return true
	}
	e.hinderAll(c.instance, why)
	return false
}

// forbidden says why no instance at all is restarted, empty where they are.
func (e *Engine) forbidden() string {
	const instead = "stop it until the disk is attached, or allow restarts"
	switch e.opts.Policy {
	case Never:
		return "--restart-policy=never forbids that: " + instead
	case Plan:
		return "--restart-policy=plan only says so: " + instead
	}
	return ""
}

// hinderAll notes what stands in the way of all wishes for an instance.
func (e *Engine) hinderAll(instance, problem string) {
	for _, w := range e.wishesFor(instance) {
		e.hinder(w.disk, problem)
	}
}

// begins makes the record of a restart. Nothing is asked before the records were read once more.
func (e *Engine) begins(ctx context.Context, c candidate, slot int) error {
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
		return err
	}
	w.record = record
	e.works[record.ID] = w
	e.hinderAll(c.instance, "") // nothing any more
	e.opts.Log.Info("planned a restart", "instance_id", c.instance, "restart_id", record.ID, "disks", strings.Join(disks, ","), "slot", slot)
	return nil
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
			// It is for the orchestrator to ask for it once more.
		case disk.InstanceID == "" && disk.State != rack.Detached:
			e.hinder(w.disk, "the disk is "+string(disk.State))
		case disk.InstanceID == "":
			at(w.instance).attaches = true
		case records.lazyOn(w.disk, disk.InstanceID):
			at(w.instance).waits = true
			at(disk.InstanceID).frees = w.disk
			first := "is restarted first"
			if why := e.forbidden(); why != "" {
				first = "would be first, and " + why
			}
			e.hinder(w.disk, fmt.Sprintf("instance %s, which still has the disk, %s", disk.InstanceID, first))
		default:
			e.hinder(w.disk, fmt.Sprintf("the disk is attached to instance %s", disk.InstanceID))
		}
	}
	return slices.DeleteFunc(found, func(c candidate) bool { return !c.attaches && c.frees == "" }), nil
}

// due are the wishes that have been collected for long enough: with the first of an instance, all of them.
func (e *Engine) due() []wish {
	all := e.allWishes()
	ripe := map[string]bool{}
	for _, w := range all {
		if !ripe[w.instance] {
			ripe[w.instance] = e.clock.Passed(timerWindow, w.instance, w.first, e.opts.Window)
		}
	}
	return slices.DeleteFunc(all, func(w wish) bool { return !ripe[w.instance] })
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

// able are the candidates that are running and have been for long enough, or are stopped.
func (e *Engine) able(ctx context.Context, candidates []candidate) ([]candidate, error) {
	var able []candidate
	for _, c := range candidates {
		instance, err := e.instance(ctx, c.instance)
		switch {
		case errors.Is(err, errGone):
			e.hinderAll(c.instance, "the instance is gone")
			continue
		case err != nil:
			return nil, err
		}
		c.stopped = instance.RunState == rack.Stopped
		rest, resting := e.rest[c.instance]
		switch {
		case c.stopped:
		case resting:
			e.hinderAll(c.instance, rest.reason)
			continue
		case instance.RunState != rack.Running:
			e.hinderAll(c.instance, "it is "+instance.RunState)
			continue
		case !e.clock.Passed(timerCoolDown, c.instance, instance.RunStateSince, e.opts.CoolDown):
			e.hinderAll(c.instance, fmt.Sprintf("it started less than %s ago", e.opts.CoolDown))
			continue
		}
		able = append(able, c)
	}
	return able, nil
}

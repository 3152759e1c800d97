// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package restart

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/record"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// candidate is an instance for which a restart would attach or detach a disk.
type candidate struct {
	instance string
	// attachesDisk is true if a requested disk can be attached.
	attachesDisk bool
	// plugsDisk is true if the rack may attach a requested disk without a restart.
	plugsDisk bool
	// frees is the volume whose unpublished disk is on the instance while another instance waits for it, or "".
	frees string
	// waitsForDisk is true if a requested disk is still on another instance.
	waitsForDisk bool
	// stopped is true if the instance is stopped already, by its owner. Nothing has to be requested from it.
	stopped bool
}

// plan creates the record of the next restart, if one can start, and sets the statuses of the instances that wait.
func (e *Engine) plan(ctx context.Context, records recordSet, statuses restartStatuses) error {
	due, collecting := e.dueRequests()
	for _, instance := range collecting {
		statuses.addWaiting(instance, rpc.ReasonWindow, e.collecting())
	}
	slot, free := records.freeSlot(e.opts.Cluster, e.opts.MaxDown)
	if !free {
		e.addWaitingForSlot(statuses, due)
		return nil
	}
	// A disk or an instance that cannot be looked up does not stop the planning for the others.
	found, unknownDisks := e.candidates(ctx, records, due)
	e.addWaitingForDisks(statuses)
	found = slices.DeleteFunc(found, func(c candidate) bool { return !c.attachesDisk && c.frees == "" })
	candidates, unknownInstances := e.eligible(ctx, found, statuses)
	failed := errors.Join(unknownDisks, unknownInstances)
	// An instance that frees a disk comes first: the instance that waits for the disk then needs only one restart.
	slices.SortStableFunc(candidates, func(x, y candidate) int { return order(x) - order(y) })
	var chosen *candidate
	for _, c := range candidates {
		if _, taken := records.restartOf(c.instance, ""); taken {
			continue
		}
		if err := records.check(c.instance); err != nil {
			statuses.addWaiting(c.instance, rpc.ReasonState, err.Error())
			continue
		}
		reason, text := e.blockReason(c)
		switch {
		case reason != "":
			statuses.addWaiting(c.instance, reason, text)
		// An instance that waits for a disk comes after the one that frees it, unless each waits for the other.
		case c.waitsForDisk && c.frees == "" && slices.ContainsFunc(candidates, func(other candidate) bool { return other.frees != "" && other.instance != c.instance }):
			statuses.addWaiting(c.instance, rpc.ReasonOthers, otherInstanceFirst)
		case chosen != nil:
			statuses.addWaiting(c.instance, rpc.ReasonOthers, fmt.Sprintf("instance %s is restarted first", chosen.instance))
		default:
			chosen = &c
		}
	}
	if chosen == nil {
		return failed
	}
	id, err := e.createRecord(ctx, *chosen, slot)
	if id != "" {
		statuses[chosen.instance] = restartStatus{reason: rpc.ReasonUnderWay, text: string(stagePlanned), restart: id}
	}
	return errors.Join(failed, err)
}

// order sorts candidates: stopped instances first, then those that free a disk.
func order(c candidate) int {
	switch {
	case c.stopped:
		return 0
	case c.frees != "":
		return 1
	}
	return 2
}

// blockReason says why an instance must not be restarted now. The reason is empty if it may be.
func (e *Engine) blockReason(c candidate) (rpc.RestartReason, string) {
	now := e.clock.Now()
	_, known := e.ownInstance(c.instance)
	switch {
	case c.stopped:
	case !known:
		return rpc.ReasonSelf, "this controller does not know yet which instance it runs on"
	case e.opts.NextStart != nil && e.opts.NextStart(now).After(now):
		return rpc.ReasonHours, fmt.Sprintf(
			"not before %s, the next time in --restart-hours",
			formatTime(e.opts.NextStart(now)),
		)
	}
	return "", ""
}

// createRecord creates the record of a restart and returns its ID, or "" if another process has taken the slot. The
// restart starts after the next reading of the records.
func (e *Engine) createRecord(ctx context.Context, c candidate, slot int) (id string, err error) {
	var volumes []string
	for _, request := range e.requestsFor(c.instance) {
		volumes = append(volumes, request.volume)
	}
	own, _ := e.ownInstance(c.instance)
	h := &heldRestart{
		record: record.Restart{
			Cluster:  e.opts.Cluster,
			ID:       e.newID(),
			Instance: c.instance,
			Holder:   e.holder,
			Volumes:  record.ShortIDs(volumes),
			Slot:     slot,
			Epoch:    1,
		},
		stage: stagePlanned, since: e.clock.Now(), renewed: e.clock.Now(), wasStopped: c.stopped,
	}
	if own && !c.stopped {
		h.record.HandOver(c.frees)
	}
	record, ok, err := e.createRestart(ctx, h.record)
	if err != nil || !ok {
		return "", err
	}
	h.record = record
	e.held[record.ID] = h
	e.opts.Log.Info("restart planned", "node_id", c.instance, "restart_id", record.ID,
		"volume_ids", strings.Join(volumes, ","), "slot", slot)
	return record.ID, nil
}

// candidates returns the instances that would fulfil one of these requests, or a part of it, if they were restarted.
// The error is about disks that could not be looked up; the instances are those of the others.
func (e *Engine) candidates(
	ctx context.Context, records recordSet, requests []attachRequest,
) (found []candidate, failed error) {
	at := func(instance string) *candidate {
		i := slices.IndexFunc(found, func(c candidate) bool { return c.instance == instance })
		if i < 0 {
			i = len(found)
			found = append(found, candidate{instance: instance})
		}
		return &found[i]
	}
	volumes := make([]string, 0, len(requests))
	for _, request := range requests {
		volumes = append(volumes, request.volume)
	}
	lookUp, err := e.diskLookup(ctx, volumes)
	if err != nil {
		return nil, err
	}
	for _, request := range requests {
		disk, err := lookUp(request.volume)
		switch {
		case errors.Is(err, rack.ErrNotFound):
			e.setBlocked(request.volume, "the disk was deleted")
		case errors.Is(err, rack.ErrReplaced):
			e.setBlocked(request.volume, "the volume is being expanded")
		case err == nil && disk.Unknown != "":
			e.setBlocked(request.volume, disk.CheckKnown().Error())
		case errors.Is(err, rack.ErrUnknown):
			e.setBlocked(request.volume, err.Error())
		case err != nil:
			failed = errors.Join(failed, err)
		case disk.InstanceID == request.instance:
			unplugged, err := e.stillUnplugged(ctx, request.volume, request.instance, records)
			at(request.instance).attachesDisk = at(request.instance).attachesDisk || unplugged
			if failed = errors.Join(failed, err); !unplugged {
				e.setBlocked(request.volume, attachedNotPublished)
			}
		case disk.InstanceID == "" && disk.State != rack.Detached:
			e.setBlocked(request.volume, "the disk is "+string(disk.State))
		case disk.InstanceID == "" && request.justFreed() && !e.refusesPlug.Load():
			at(request.instance).plugsDisk = true
			e.setBlocked(request.volume, freedNotAttached)
		case disk.InstanceID == "":
			at(request.instance).attachesDisk = true
			e.setBlocked(request.volume, "")
		case records.detachDeferred(request.volume, disk.InstanceID):
			at(request.instance).waitsForDisk = true
			at(disk.InstanceID).frees = request.volume
			e.setHeldBy(request.volume, disk.InstanceID)
		default:
			e.setBlocked(request.volume, fmt.Sprintf("the disk is attached to instance %s", disk.InstanceID))
		}
	}
	return slices.DeleteFunc(
		found,
		func(c candidate) bool { return !c.attachesDisk && !c.plugsDisk && c.frees == "" },
	), failed
}

// dueRequests returns the requests whose collection window is over: the window of an instance starts with its first
// request. collecting are the instances whose window is still open.
func (e *Engine) dueRequests() (due []attachRequest, collecting []string) {
	all := e.openRequests()
	ready := map[string]bool{}
	for _, request := range all {
		if !ready[request.instance] {
			ready[request.instance] = e.clock.Passed(timerWindow, request.instance, request.requestedAt, e.opts.Window)
		}
	}
	for _, instance := range sortedKeys(ready) {
		if !ready[instance] {
			collecting = append(collecting, instance)
		}
	}
	return slices.DeleteFunc(all, func(request attachRequest) bool { return !ready[request.instance] }), collecting
}

// openRequests returns copies of all requests that a restart may fulfil, the oldest first.
func (e *Engine) openRequests() []attachRequest {
	return slices.DeleteFunc(e.allRequests(), func(request attachRequest) bool { return request.attachFailed })
}

// eligible returns the candidates that are stopped, or have been running for the cool-down without a refused restart.
// It sets the statuses of the others. The error is about instances that could not be looked up.
func (e *Engine) eligible(
	ctx context.Context,
	candidates []candidate,
	statuses restartStatuses,
) (eligible []candidate, failed error) {
	lookUp, err := e.instanceLookup(ctx, len(candidates))
	if err != nil {
		return nil, err
	}
	for _, c := range candidates {
		instance, err := lookUp(c.instance)
		switch {
		case errors.Is(err, errDeleted):
			statuses.addWaiting(c.instance, rpc.ReasonState, "the instance was deleted")
			continue
		case err != nil:
			failed = errors.Join(failed, err)
			continue
		}
		c.stopped = instance.RunState == rack.Stopped
		refused, wasRefused := e.refusals[c.instance]
		switch {
		case c.stopped:
		case instance.RunState == rack.Failed: // it has no guest that a stop could interrupt
		case wasRefused:
			statuses.addWaiting(c.instance, rpc.ReasonRefused, e.describeRefusal(refused))
			continue
		case instance.RunState != rack.Running:
			statuses.addWaiting(c.instance, rpc.ReasonState, "it is "+instance.RunState)
			continue
		case e.coolsDown(instance):
			statuses.addWaiting(
				c.instance,
				rpc.ReasonCoolDown,
				fmt.Sprintf(
					"it started less than %s ago: wait until %s",
					e.opts.CoolDown,
					formatTime(instance.RunStateSince.Add(e.opts.CoolDown)),
				),
			)
			continue
		}
		eligible = append(eligible, c)
	}
	return eligible, failed
}

// coolsDown reports whether an instance runs for less than the cool-down.
func (e *Engine) coolsDown(instance rack.Instance) bool {
	return instance.RunState == rack.Running &&
		!e.clock.Passed(timerCoolDown, instance.ID, instance.RunStateSince, e.opts.CoolDown)
}

const (
	// maxLookups is how many disks, or instances, a tick looks up one by one. For more it lists all of the project once:
	// thousands of look-ups would take longer than a tick lasts.
	maxLookups = 10
	// listTime is how long a list of all disks may take. A project with 70,000 disks takes 160 requests one after the
	// other, which is longer than a tick lasts. Such an engine looks up to maxConcurrentLookups disks up instead,
	// concurrentLookups of them at the same time: half of what one controller may ask of a rack.
	listTime             = 5 * time.Second
	maxConcurrentLookups = 1000
	concurrentLookups    = 32
)

// diskLookup returns a function that returns the disk of one of these volumes. A volume that does not exist is
// [rack.ErrNotFound].
func (e *Engine) diskLookup(
	ctx context.Context,
	volumes []string,
) (lookUp func(volume string) (rack.Disk, error), err error) {
	if len(volumes) <= maxLookups {
		return func(volume string) (rack.Disk, error) { return e.rack.Disk(ctx, volume) }, nil
	}
	found := map[string]rack.Disk{}
	for _, volume := range volumes {
		found[volume] = rack.Disk{}
	}
	if err := e.readDisks(ctx, found); err != nil {
		return nil, err
	}
	return func(volume string) (rack.Disk, error) {
		if disk := found[volume]; disk.VolumeID != "" {
			return disk, nil
		}
		// Only the look-up of this disk tells why it was not found: it may be deleted, or just being replaced.
		return e.rack.Disk(ctx, volume)
	}, nil
}

// readDisks fills in the disks, by the IDs of their volumes. A disk that it does not find stays empty.
func (e *Engine) readDisks(ctx context.Context, disks map[string]rack.Disk) error {
	if len(disks) > maxConcurrentLookups {
		return e.listDisks(ctx, disks)
	}
	if !e.longList {
		limited, cancel := context.WithTimeout(ctx, listTime)
		defer cancel()
		err := e.listDisks(limited, disks)
		e.longList = limited.Err() != nil && ctx.Err() == nil
		if !e.longList {
			return err
		}
	}
	return e.lookUpDisks(ctx, disks)
}

// listDisks is readDisks by a list of all disks. A volume that has grown can have two disks there: the rack may have
// failed to delete the one before.
func (e *Engine) listDisks(ctx context.Context, disks map[string]rack.Disk) error {
	for item, err := range e.rack.Disks(ctx, rack.Cursor{}, 0) {
		if err != nil {
			return err
		}
		disk := item.Value
		if _, wanted := disks[disk.VolumeID]; wanted && !disk.HalfDeleted() {
			disks[disk.VolumeID] = disk
		}
	}
	return nil
}

// lookUpDisks is readDisks by one request for each disk. It fails if the time is over. A single disk that cannot be
// looked up stays empty, and [Engine.diskLookup] tells its error to the caller that needs this disk.
func (e *Engine) lookUpDisks(ctx context.Context, disks map[string]rack.Disk) error {
	var mu sync.Mutex
	lookUps, ctx := errgroup.WithContext(ctx)
	lookUps.SetLimit(concurrentLookups)
	for _, volume := range sortedKeys(disks) {
		lookUps.Go(func() (err error) {
			defer func() {
				if reason := recover(); reason != nil { // a panic outside of the tick would end the process
					rpc.LogPanic(e.opts.Log, slog.String("task", "planned restarts"), reason)
					err = fmt.Errorf("look up the disk of volume %s: panic", volume)
				}
			}()
			disk, err := e.rack.Disk(ctx, volume)
			if err != nil && ctx.Err() == nil {
				return nil
			}
			mu.Lock()
			defer mu.Unlock()
			disks[volume] = disk
			return err
		})
	}
	return lookUps.Wait()
}

// instanceLookup returns a function that returns an instance, or errDeleted.
func (e *Engine) instanceLookup(
	ctx context.Context,
	count int,
) (lookUp func(id string) (rack.Instance, error), err error) {
	if count <= maxLookups {
		return func(id string) (rack.Instance, error) { return e.instance(ctx, id) }, nil
	}
	instances, err := e.rack.Instances(ctx)
	if err != nil {
		return nil, err
	}
	byID := make(map[string]rack.Instance, len(instances))
	for _, instance := range instances {
		byID[instance.ID] = instance
	}
	return func(id string) (rack.Instance, error) {
		if instance, ok := byID[id]; ok {
			return instance, nil
		}
		return e.instance(ctx, id) // an instance in another project, or none
	}, nil
}

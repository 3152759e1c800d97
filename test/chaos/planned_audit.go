// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package main

import (
	"context"
	"encoding/json"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// restartRecord is the part of a controller's restart record that the audit reads.
type restartRecord struct {
	Instance string `json:"instance"`
	MayStop  bool   `json:"mayStop"`
}

// deferredDetach is the part of a controller's record of a deferred detach that the audit reads.
type deferredDetach struct {
	Disk     string `json:"disk"`
	Instance string `json:"instance"`
}

type records struct {
	restarts []restartRecord
	deferred []deferredDetach
}

// readRecords lists the records. It updates mayStop.
func (p *plannedWorld) readRecords(ctx context.Context) (records, error) {
	var found records
	groups, err := p.rack.AntiAffinityGroupListAllPages(
		ctx,
		oxide.AntiAffinityGroupListParams{Project: oxide.NameOrId(p.sim.Project)},
	)
	if err != nil {
		return found, err
	}
	now := time.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, group := range groups {
		switch {
		case strings.HasPrefix(string(group.Name), "csi-restart-"):
			var r restartRecord
			if err := json.Unmarshal([]byte(group.Description), &r); err != nil {
				return found, err
			}
			if r.MayStop {
				p.mayStop[r.Instance] = now
			}
			found.restarts = append(found.restarts, r)
		case strings.HasPrefix(string(group.Name), "csi-detach-"):
			var d deferredDetach
			if err := json.Unmarshal([]byte(group.Description), &d); err != nil {
				return found, err
			}
			found.deferred = append(found.deferred, d)
		}
	}
	return found, nil
}

// longestDown is the longest time that an instance may be down for a restart, with any faults.
const longestDown = plannedLease + time.Minute

// watch checks the rack until the context ends. It checks how many instances are down and for how long, and to which
// instances the published volumes are attached.
func (p *plannedWorld) watch(ctx context.Context, actors []*actor) {
	downSince := map[string]time.Time{}
	reported := map[string]bool{}
	for pause(ctx, 20*time.Millisecond) == nil {
		owned := p.stoppedByOthersNow()
		before := publications(actors)
		list, err := p.control.ListInstances(ctx)
		if err != nil {
			continue // the rack is dead
		}
		_, _ = p.readRecords(ctx) // updates mayStop; after an error, the next check does
		after, ownedAfter := publications(actors), p.stoppedByOthersNow()
		p.results.count("check of the whole rack")
		p.checkDown(list, owned, ownedAfter, downSince)
		on := map[string]string{}
		for _, instance := range list {
			for _, disk := range instance.Disks {
				on[disk.ID] = instance.ID
			}
		}
		for disk, publication := range before {
			if after[disk] == publication && on[disk] != publication.node && !reported[disk] {
				reported[disk] = true
				p.results.violation(
					"volume %s is published on instance %s, and its disk is attached to %q: %s",
					disk,
					publication.node,
					on[disk],
					publication.actor.historyText(),
				)
			}
		}
	}
}

// checkDown checks the instances that are down and were not stopped by their owner.
func (p *plannedWorld) checkDown(
	list []simtest.SimInstance,
	before, after map[string]time.Time,
	since map[string]time.Time,
) {
	down := 0
	for _, instance := range list {
		_, owned := before[instance.ID]
		if _, now := after[instance.ID]; owned || now || instance.RunState == "running" {
			delete(since, instance.ID)
			continue
		}
		down++
		if since[instance.ID].IsZero() {
			since[instance.ID] = time.Now()
			p.results.count("instance taken down for a restart")
		}
		if took := time.Since(since[instance.ID]); took > longestDown {
			p.results.violation("instance %s has been %s since %s", instance.ID, instance.RunState, stamp(since[instance.ID]))
			since[instance.ID] = time.Now()
		}
	}
	if down > maxDown {
		p.results.violation("%d instances are down for restarts: %+v", down, list)
	}
}

func (p *plannedWorld) stoppedByOthersNow() map[string]time.Time {
	p.mu.Lock()
	defer p.mu.Unlock()
	return maps.Clone(p.stoppedByOthers)
}

// settle waits until no restart is under way, and then audits the records and the volumes.
func (p *plannedWorld) settle(ctx context.Context, actors []*actor) {
	for {
		found, err := p.readRecords(ctx)
		list, listErr := p.control.ListInstances(ctx)
		running := !slices.ContainsFunc(list, func(i simtest.SimInstance) bool { return i.RunState != "running" })
		if err == nil && listErr == nil && running && len(found.restarts) == 0 {
			p.auditRecords(ctx, found, list)
			break
		}
		if pause(ctx, 100*time.Millisecond) != nil {
			p.results.violation(
				"a restart does not end, or an instance does not run: %+v %+v %v %v",
				found.restarts,
				list,
				err,
				listErr,
			)
			return
		}
	}
	for _, a := range actors {
		a.checkShown(ctx)
	}
}

// auditRecords checks that the disk of each deferred detach is attached to the record's instance. The record of a
// deleted disk may be left: the controller may be killed, or the rack may fail, after the disk was deleted.
func (p *plannedWorld) auditRecords(ctx context.Context, found records, list []simtest.SimInstance) {
	disks, err := p.disksOnRack(ctx)
	if err != nil {
		p.results.violation("the disks cannot be listed: %v", err)
		return
	}
	for _, detach := range found.deferred {
		if _, exists := disks[detach.Disk]; !exists {
			p.results.count("record left of a deleted disk")
			continue
		}
		attached := slices.ContainsFunc(list, func(i simtest.SimInstance) bool {
			return i.ID == detach.Instance &&
				slices.ContainsFunc(i.Disks, func(d simtest.SimDisk) bool { return d.ID == detach.Disk })
		})
		if !attached {
			p.results.violation(
				"the detach of disk %s from instance %s is deferred, and the disk is not attached to it",
				detach.Disk,
				detach.Instance,
			)
		}
	}
}

// deleteAll stops all instances as their owner does, and deletes all volumes. After that, no disk and no restart record
// may be left, and all instances must still be stopped.
func (p *plannedWorld) deleteAll(ctx context.Context, actors []*actor) {
	for _, instance := range p.instances {
		p.setRunState(ctx, instance, "stopped")
	}
	for _, a := range actors {
		if a.id == "" {
			continue
		}
		for ctx.Err() == nil {
			_, err := p.leadingController().ControllerUnpublishVolume(ctx, &csi.ControllerUnpublishVolumeRequest{VolumeId: a.id})
			if err == nil {
				_, err = p.leadingController().DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: a.id})
			}
			if err == nil {
				break
			}
			_ = pause(ctx, 100*time.Millisecond) // the loop condition checks the context
		}
	}
	found, err := p.readRecords(ctx)
	left, leftErr := p.control.Leftovers(ctx)
	list, listErr := p.control.ListInstances(ctx)
	p.auditRecords(ctx, found, list)
	if err != nil || leftErr != nil || listErr != nil || len(found.restarts)+left.Disks > 0 {
		p.results.violation("left on the rack: %+v, %+v, %v, %v, %v", found, left, err, leftErr, listErr)
	}
	for _, instance := range list {
		if instance.RunState != "stopped" {
			p.results.violation("instance %s was stopped by its owner, and now is %s", instance.ID, instance.RunState)
		}
	}
}

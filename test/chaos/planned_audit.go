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

// restartRecord and deferredDetach are the parts of the controllers' records that the audit reads.
type restartRecord struct {
	Instance string `json:"instance"`
	MayStop  bool   `json:"mayStop"`
}

type deferredDetach struct {
	Disk     string `json:"disk"`
	Instance string `json:"instance"`
}

type records struct {
	restarts []restartRecord
	deferred []deferredDetach
}

// readRecords lists the records, and notes which instances a restart may stop.
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
			var l deferredDetach
			if err := json.Unmarshal([]byte(group.Description), &l); err != nil {
				return found, err
			}
			found.deferred = append(found.deferred, l)
		}
	}
	return found, nil
}

// longestDown is how long an instance may be down for a restart, whatever fails.
const longestDown = plannedLease + time.Minute

// watch checks the rack all the time: how many instances are down, for how long, and where the published volumes are.
func (p *plannedWorld) watch(ctx context.Context, actors []*actor) {
	downSince := map[string]time.Time{}
	held := map[string]bool{}
	for pause(ctx, 20*time.Millisecond) == nil {
		owned := p.stoppedByOthersNow()
		before := publications(actors)
		list, err := p.control.ListInstances(ctx)
		if err != nil {
			continue // the rack is dead
		}
		_, _ = p.readRecords(ctx) // notes mayStop; the next look makes up for an error
		after, ownedAfter := publications(actors), p.stoppedByOthersNow()
		p.results.count("looks at the whole rack")
		p.checkDown(list, owned, ownedAfter, downSince)
		on := map[string]string{}
		for _, instance := range list {
			for _, disk := range instance.Disks {
				on[disk.ID] = instance.ID
			}
		}
		for disk, publication := range before {
			if after[disk] == publication && on[disk] != publication.node && !held[disk] {
				held[disk] = true
				p.results.violation(
					"volume %s is published on %s, and its disk is on %q: %s",
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
			p.results.violation("instance %s is %s since %s", instance.ID, instance.RunState, stamp(since[instance.ID]))
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

// auditRecords checks that each deferred detach is about an attached disk. A record may outlive its disk: a controller
// may be killed, or the rack may fail, after the disk was deleted.
func (p *plannedWorld) auditRecords(ctx context.Context, found records, list []simtest.SimInstance) {
	disks, err := p.disksOnRack(ctx)
	if err != nil {
		p.results.violation("the disks cannot be listed: %v", err)
		return
	}
	for _, l := range found.deferred {
		if _, lives := disks[l.Disk]; !lives {
			p.results.count("record left of a deleted disk")
			continue
		}
		attached := slices.ContainsFunc(list, func(i simtest.SimInstance) bool {
			return i.ID == l.Instance && slices.ContainsFunc(i.Disks, func(d simtest.SimDisk) bool { return d.ID == l.Disk })
		})
		if !attached {
			p.results.violation(
				"the detach of disk %s from instance %s is deferred, and the disk is not there",
				l.Disk,
				l.Instance,
			)
		}
	}
}

// deleteAll stops all instances as their owner and deletes all volumes. Nothing may be left, and no instance be
// started.
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
			p.results.violation("instance %s was stopped by its owner, and is %s", instance.ID, instance.RunState)
		}
	}
}

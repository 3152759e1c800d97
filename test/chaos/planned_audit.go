// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package main

import (
	"context"
	"encoding/json"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// restartRecord is the part of a controller's restart record that the audit reads.
type restartRecord struct {
	Instance string `json:"instance"`
	Holder   string `json:"by"`
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
		case strings.HasPrefix(string(group.Name), "csi-defer-"):
			var d deferredDetach
			if err := json.Unmarshal([]byte(group.Description), &d); err != nil {
				return found, err
			}
			found.deferred = append(found.deferred, d)
		}
	}
	return found, nil
}

// longestDown is the longest time that an instance may be down for a restart while the same controller holds it, with
// any faults. Each controller that takes it over starts with the change of the disks again, which may take a minute.
const longestDown = plannedLease + time.Minute

// down is an instance that is down for a restart.
type down struct {
	// since is when the instance went down, or when the last of its holders was first seen.
	since   time.Time
	holders map[string]bool
}

// watch checks the rack until the context ends. It checks how many instances are down and for how long, and to which
// instances the published volumes are attached.
func (p *plannedWorld) watch(ctx context.Context, actors []*actor) {
	downNow, stops := map[string]*down{}, ordered{}
	reported := map[string]bool{}
	for pause(ctx, 20*time.Millisecond) == nil {
		begun, before := time.Now(), publications(actors)
		list, err := p.control.ListInstances(ctx)
		if err != nil {
			continue // the rack is dead
		}
		found, _ := p.readRecords(ctx) // updates mayStop; after an error, the next check does
		after := publications(actors)
		p.results.count("check of the whole rack")
		p.checkStops(list, stops)
		p.checkDown(list, begun, downNow)
		p.checkDuration(list, found, downNow)
		p.checkAttached(list, before, after, reported)
	}
}

// checkAttached checks that the disk of each volume that is published before and after the list is attached there,
// unless the owner has deleted that instance. It reports each disk once.
func (p *plannedWorld) checkAttached(
	list []simtest.SimInstance, before, after map[string]publication, reported map[string]bool,
) {
	on, exists := map[string]string{}, map[string]bool{}
	for _, instance := range list {
		exists[instance.ID] = true
		for _, disk := range instance.Disks {
			on[disk.Name] = instance.ID
		}
	}
	now := time.Now()
	for disk, publication := range before {
		mayGo := !publication.mayGoAt.IsZero() && now.After(publication.mayGoAt) ||
			!exists[publication.node] && p.isDying(publication.node)
		if after[disk] == publication && on[disk] != publication.node && !mayGo && !reported[disk] {
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

// checkDown checks how many instances are down and were not stopped by their owner. The list was asked for after begun.
func (p *plannedWorld) checkDown(list []simtest.SimInstance, begun time.Time, downNow map[string]*down) {
	maps.DeleteFunc(downNow, func(id string, _ *down) bool {
		return !slices.ContainsFunc(list, func(i simtest.SimInstance) bool { return i.ID == id })
	})
	for _, instance := range list {
		if instance.RunState == "running" || p.ownedSince(instance.ID, begun) {
			delete(downNow, instance.ID)
			continue
		}
		if downNow[instance.ID] == nil {
			downNow[instance.ID] = &down{since: time.Now(), holders: map[string]bool{}}
			p.results.count("instance taken down for a restart")
		}
	}
	if len(downNow) > maxDown {
		p.results.violation("%d instances are down for restarts: %+v", len(downNow), list)
	}
}

// checkDuration checks for how long each instance has been down.
func (p *plannedWorld) checkDuration(list []simtest.SimInstance, found records, downNow map[string]*down) {
	for _, instance := range list {
		d := downNow[instance.ID]
		if d == nil {
			continue
		}
		for _, r := range found.restarts {
			if r.Instance == instance.ID && !d.holders[r.Holder] {
				d.since, d.holders[r.Holder] = time.Now(), true
			}
		}
		if time.Since(d.since) > longestDown {
			p.results.violation(
				"instance %s has been %s under the same controller since %s:\n%s",
				instance.ID, instance.RunState, stamp(d.since), p.logOf(instance.ID),
			)
			d.since = time.Now()
		}
	}
}

// logOf returns the last lines of the controllers' logs about the restarts of an instance.
func (p *plannedWorld) logOf(instance string) string {
	const most = 40
	text, err := os.ReadFile(p.path(plannerLog))
	if err != nil {
		return err.Error()
	}
	lines := slices.DeleteFunc(strings.Split(string(text), "\n"), func(line string) bool {
		return !strings.Contains(line, instance) || strings.Contains(line, "msg=responded")
	})
	return strings.Join(lines[max(0, len(lines)-most):], "\n")
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
	exists := map[string]bool{}
	for _, disk := range disks {
		exists[disk.Id] = true
	}
	for _, detach := range found.deferred {
		if !exists[detach.Disk] {
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

// deleteAll stops all instances as their owner does, and deletes all volumes. After that, no disk, no restart record
// and nothing of an expansion may be left, and all instances must still be stopped.
func (p *plannedWorld) deleteAll(ctx context.Context, actors []*actor) {
	p.deleteVolumes(ctx, actors)
	found, err := p.readRecords(ctx)
	left, leftErr := p.control.Leftovers(ctx)
	list, listErr := p.control.ListInstances(ctx)
	p.auditRecords(ctx, found, list)
	if err != nil || leftErr != nil || listErr != nil || len(found.restarts)+left.Disks > 0 {
		p.results.violation("left on the rack: %+v, %+v, %v, %v, %v", found, left, err, leftErr, listErr)
	}
	if err := p.auditExpansions(ctx, p.results); err != nil {
		p.results.violation("what is left of expansions cannot be listed: %v", err)
	}
	for _, instance := range list {
		if instance.RunState != "stopped" {
			p.results.violation("instance %s was stopped by its owner, and now is %s", instance.ID, instance.RunState)
		}
	}
}

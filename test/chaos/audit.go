// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package main

import (
	"context"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// audit compares the answers that the clients got with the rack.
func (w *world) audit(ctx context.Context, workers []*worker, b *results) error {
	disks, err := w.disksOnRack(ctx)
	if err != nil {
		return err
	}
	known, volumes := map[string]*volume{}, 0
	for _, worker := range workers {
		for _, v := range append(worker.volumes, worker.volumesPast...) {
			known[diskname.ForVolume(simtest.ClusterID, v.name)] = v
		}
		for _, v := range worker.volumes {
			volumes++
			if disk, found := disks[v.id]; !found {
				b.violation("a volume is lost: %s", v.historyText())
			} else {
				w.auditVolume(v, disk, b)
			}
		}
	}
	for id, disk := range disks {
		v := known[string(disk.Name)]
		switch {
		case v == nil:
			b.violation("disk %s (%s) is on the rack, but no client created it", disk.Name, id)
		case v.fate != lives || v.id != id:
			b.violation("disk %s (%s) leaked: it is on the rack for the volume %s", disk.Name, id, v.historyText())
		}
	}
	if err := w.auditGuests(workers, b); err != nil {
		return err
	}
	b.done["disks audited"] += len(disks)
	return w.auditSnapshots(ctx, workers, b)
}

func (w *world) auditVolume(v *volume, disk oxide.Disk, b *results) {
	if int64(disk.Size) != v.sizeBytes {
		b.violation("the disk has %d bytes instead of %d: %s", disk.Size, v.sizeBytes, v.historyText())
	}
	attached, _ := disk.State.AsAttached()
	switch {
	case v.node == nil && disk.State.State() != oxide.DiskStateStateDetached:
		b.violation("the disk is %s, and the volume published nowhere: %s", disk.State.State(), v.historyText())
	case v.node != nil && (attached == nil || attached.Instance != v.node.ID):
		b.violation("the disk is %v, and the volume published on %s: %s", disk.State.Value, v.node.ID, v.historyText())
	}
}

// auditGuests checks that each volume's disk appears in the guest of its node and in no other guest.
func (w *world) auditGuests(workers []*worker, b *results) error {
	if !w.guests {
		return nil
	}
	for _, worker := range workers {
		for _, v := range worker.volumes {
			for _, node := range worker.nodes {
				names, err := devices(node, diskname.ForVolume(simtest.ClusterID, v.name))
				if err != nil {
					return err
				}
				want := 0
				if v.node != nil && v.node.ID == node.ID {
					want = 1
				}
				if len(names) != want {
					b.violation("the guest of %s has the devices %v of a volume, want %d: %s", node.Name, names, want, v.historyText())
				}
			}
		}
	}
	return nil
}

// auditSnapshots is audit for snapshots.
func (w *world) auditSnapshots(ctx context.Context, workers []*worker, b *results) error {
	if !w.advertised[csi.ControllerServiceCapability_RPC_CREATE_DELETE_SNAPSHOT] {
		return nil
	}
	list, err := w.rack.SnapshotListAllPages(ctx, oxide.SnapshotListParams{Project: oxide.NameOrId(w.sim.Project)})
	if err != nil {
		return err
	}
	known := map[string]*snapshot{}
	for _, worker := range workers {
		for _, s := range append(worker.snapshots, worker.snapshotsPast...) {
			known[diskname.ForSnapshot(simtest.ClusterID, s.name)] = s
		}
	}
	onRack := map[string]bool{}
	for _, found := range list {
		onRack[found.Id] = true
		s := known[string(found.Name)]
		switch {
		case strings.HasPrefix(string(found.Name), temporaryPrefix): // auditTemporary checks these
		case isExpansion(found): // auditExpansions checks these
		case s == nil:
			b.violation("snapshot %s (%s) is on the rack, but no client created it", found.Name, found.Id)
		case s.fate != lives || s.id != found.Id:
			b.violation("snapshot %s (%s) leaked: it is on the rack for the snapshot %s", found.Name, found.Id, s.historyText())
		}
	}
	for _, worker := range workers {
		for _, s := range worker.snapshots {
			if !onRack[s.id] {
				b.violation("a snapshot is lost: %s", s.historyText())
			}
		}
	}
	b.done["snapshots audited"] += len(list)
	return w.auditTemporary(ctx, workers, b)
}

// auditEmpty checks that nothing is left after the clients deleted everything.
func (w *world) auditEmpty(ctx context.Context, workers []*worker, b *results) error {
	if err := w.audit(ctx, workers, b); err != nil {
		return err
	}
	if w.advertised[csi.ControllerServiceCapability_RPC_CLONE_VOLUME] {
		if err := w.auditSweep(ctx, b); err != nil {
			return err
		}
	}
	if err := w.auditExpansions(ctx, b); err != nil {
		return err
	}
	left, err := w.sim.Leftovers(ctx)
	if err != nil {
		return err
	}
	if left.Disks+left.Snapshots+left.Mounts > 0 || left.Loops > len(nodes) || len(left.GuestErrors) > 0 {
		b.violation("left on the rack: %+v", left)
	}
	return nil
}

// disksOnRack returns all disks of the first rack by the ID of their volume, without boot disks.
func (w *world) disksOnRack(ctx context.Context) (map[string]oxide.Disk, error) {
	return disksOn(ctx, w.rack, w.sim.Project)
}

func disksOn(ctx context.Context, client *oxide.Client, project string) (map[string]oxide.Disk, error) {
	all, err := client.DiskListAllPages(ctx, oxide.DiskListParams{Project: oxide.NameOrId(project)})
	if err != nil {
		return nil, err
	}
	disks := map[string]oxide.Disk{}
	for _, disk := range all {
		if !strings.HasSuffix(string(disk.Name), "-boot") {
			disks[volumeID(disk)] = disk
		}
	}
	return disks, nil
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/core/expand"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
)

// maxBytes is the size up to which volumes are expanded.
const maxBytes = 4 * gib

// maxExpansionTries is how often a worker repeats an expansion that does not end. It then deletes the volume: all
// workers could wait for room of the quota.
const maxExpansionTries = 20

// expand makes a volume larger. It repeats until it succeeds, or until the volume keeps its size. Then the volume is
// published, and has its data. A larger one gets new data.
func (w *worker) expand(ctx context.Context, v *volume) error {
	want := v.sizeBytes + gib
	request := &csi.ControllerExpandVolumeRequest{
		VolumeId: v.id, CapacityRange: &csi.CapacityRange{RequiredBytes: want}, VolumeCapability: capability,
	}
	for range maxExpansionTries {
		resp, err := ask(ctx, w, &v.object, w.ControllerExpandVolume, request, nil)
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err == nil && resp.GetCapacityBytes() == want:
			v.sizeBytes = want
			if err := w.publish(ctx, v); err != nil || v.node == nil || !w.guests {
				return err
			}
			return w.fill(ctx, v) // the end of the larger disk has data now, too
		case err == nil:
			return fmt.Errorf("expanded to %d bytes instead of %d: %s", resp.GetCapacityBytes(), want, v.historyText())
		case status.Code(err) == codes.OutOfRange:
			return w.publish(ctx, v)
		}
		w.wantCode(&v.object, "expand", err, codes.FailedPrecondition, codes.Internal)
		if err := pause(ctx, maxBackoff); err != nil {
			return err
		}
	}
	w.results.count("expansion given up")
	return w.deleteVolume(ctx, v)
}

// expandPublished tries to expand a published volume. It must fail.
func (w *worker) expandPublished(ctx context.Context, v *volume) error {
	_, err := ask(ctx, w, &v.object, w.ControllerExpandVolume, &csi.ControllerExpandVolumeRequest{
		VolumeId: v.id, CapacityRange: &csi.CapacityRange{RequiredBytes: v.sizeBytes + gib}, VolumeCapability: capability,
	}, nil)
	if err == nil {
		return fmt.Errorf("expanded while it is published: %s", v.historyText())
	}
	w.wantCode(&v.object, "expand while published", err, codes.FailedPrecondition, codes.Internal)
	return w.check(ctx, v)
}

// volumeID returns the ID of the volume whose disk this is. It differs from the disk's after an expansion.
func volumeID(disk oxide.Disk) string {
	if described, ours := rack.ParseDescription(disk.Description); ours && described.Volume != "" {
		return described.Volume
	}
	return disk.Id
}

// isExpansion reports whether a snapshot was made for an expansion.
func isExpansion(snapshot oxide.Snapshot) bool {
	return strings.HasPrefix(string(snapshot.Name), diskname.ForExpansion(""))
}

// auditExpansions checks that the controllers delete what interrupted expansions left. All volumes are deleted.
func (w *world) auditExpansions(ctx context.Context, b *results) error {
	for end := time.Now().Add(expand.SettleAge + sweepTime); ; {
		left, err := w.expansions(ctx)
		if err != nil || len(left) == 0 {
			return err
		}
		if time.Now().After(end) {
			b.violation("interrupted expansions have left %v", left)
			return nil
		}
		if err := pause(ctx, time.Second); err != nil {
			return err
		}
	}
}

// expansions returns the names of the snapshots and records of expansions.
func (w *world) expansions(ctx context.Context) (names []string, err error) {
	project := oxide.NameOrId(w.sim.Project)
	snapshots, err := w.rack.SnapshotListAllPages(ctx, oxide.SnapshotListParams{Project: project})
	if err != nil {
		return nil, err
	}
	for _, snapshot := range snapshots {
		if isExpansion(snapshot) {
			names = append(names, string(snapshot.Name))
		}
	}
	records, err := w.rack.AntiAffinityGroupListAllPages(ctx, oxide.AntiAffinityGroupListParams{Project: project})
	for _, record := range records {
		if name := string(record.Name); strings.HasPrefix(name, "csi-expand-") || strings.HasPrefix(name, "csi-grown-") {
			names = append(names, name)
		}
	}
	return names, err
}

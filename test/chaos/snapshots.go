// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package main

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
)

// stepSnapshot does something with a snapshot.
func (w *worker) stepSnapshot(ctx context.Context, s *snapshot) (bool, error) {
	if time.Now().Before(w.orphansDoneAt(&s.object)) {
		return false, nil
	}
	switch n := w.random.IntN(6); {
	case n < 3 && len(w.volumes) < maxVolumes:
		w.results.count("restore")
		return true, w.restore(ctx, s)
	case n == 3:
		w.results.count("snapshot again")
		return true, w.snapshotAgain(ctx, s)
	case n == 4:
		w.results.count("delete snapshot")
		return true, w.deleteSnapshot(ctx, s)
	case n == 5 && w.advertised[csi.ControllerServiceCapability_RPC_LIST_SNAPSHOTS]:
		w.results.count("list snapshots")
		return true, w.listSnapshots(ctx, s)
	}
	return false, nil
}

// snapshot makes a snapshot of a volume, published or not. All written data was flushed before.
func (w *worker) snapshot(ctx context.Context, v *volume) error {
	s := &snapshot{object: object{name: w.newName("snapshot"), fate: wanted, sizeBytes: v.sizeBytes, content: v.content}}
	s.request = &csi.CreateSnapshotRequest{Name: s.name, SourceVolumeId: v.id}
	s.remember("source %s, content %x", v.name, v.content.seed)
	w.snapshots = append(w.snapshots, s)
	err := w.finishSnapshot(ctx, s)
	v.orphansDone = later(v.orphansDone, w.orphansDoneAt(&s.object)) // later writes must not get into the snapshot
	return err
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// finishSnapshot repeats a create until the outcome is known and the snapshot is ready, see finishCreate.
func (w *worker) finishSnapshot(ctx context.Context, s *snapshot) error {
	for {
		resp, err := ask(ctx, w, &s.object, w.CreateSnapshot, s.request, nil)
		switch {
		case err == nil:
			if err := w.recordSnapshot(s, resp.GetSnapshot()); err != nil || resp.GetSnapshot().GetReadyToUse() {
				return err
			}
		case ctx.Err() != nil:
			return ctx.Err()
		default:
			w.wantCode(&s.object, snapshotting, err, codes.ResourceExhausted, codes.Internal)
			if s.fate == wanted && w.acceptsError(&s.object) {
				s.fate = failed
				w.dropSnapshot(s)
				return nil
			}
		}
		if err := pause(ctx, maxBackoff); err != nil {
			return err
		}
	}
}

// recordSnapshot records an answer, and compares it with an earlier answer.
func (w *worker) recordSnapshot(s *snapshot, answer *csi.Snapshot) error {
	if s.fate == wanted {
		s.fate, s.id, s.answer = lives, answer.GetSnapshotId(), answer
		if s.id == "" || answer.GetSizeBytes() != s.sizeBytes ||
			answer.GetSourceVolumeId() != s.request.GetSourceVolumeId() ||
			answer.GetCreationTime() == nil {
			return fmt.Errorf(
				"snapshot of %d bytes of %s answered %v: %s",
				s.sizeBytes,
				s.request.GetSourceVolumeId(),
				answer,
				s.historyText(),
			)
		}
		return nil
	}
	if answer.GetSnapshotId() != s.id || answer.GetSizeBytes() != s.sizeBytes ||
		!answer.GetCreationTime().AsTime().Equal(s.answer.GetCreationTime().AsTime()) {
		return fmt.Errorf("snapshot answered %v, and %v before: %s", answer, s.answer, s.historyText())
	}
	return nil
}

// snapshotAgain repeats a create that succeeded before. The source volume may be deleted by now.
func (w *worker) snapshotAgain(ctx context.Context, s *snapshot) error {
	resp, err := ask(ctx, w, &s.object, w.CreateSnapshot, s.request, nil)
	if err != nil {
		w.wantCode(&s.object, "snapshot again", err)
		return nil
	}
	return w.recordSnapshot(s, resp.GetSnapshot())
}

func (w *worker) dropSnapshot(s *snapshot) {
	w.snapshots = slices.DeleteFunc(w.snapshots, func(other *snapshot) bool { return other == s })
	w.snapshotsPast = append(w.snapshotsPast, s)
}

// restore creates a volume from a snapshot.
func (w *worker) restore(ctx context.Context, s *snapshot) error {
	return w.create(ctx, &origin{sizeBytes: s.sizeBytes, content: s.content, source: &csi.VolumeContentSource{
		Type: &csi.VolumeContentSource_Snapshot{Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: s.id}},
	}})
}

// clone creates a volume from another volume.
func (w *worker) clone(ctx context.Context, v *volume) error {
	return w.create(ctx, &origin{sizeBytes: v.sizeBytes, content: v.content, source: &csi.VolumeContentSource{
		Type: &csi.VolumeContentSource_Volume{Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: v.id}},
	}})
}

// deleteSnapshot repeats until it succeeds.
func (w *worker) deleteSnapshot(ctx context.Context, s *snapshot) error {
	for {
		_, err := ask(ctx, w, &s.object, w.DeleteSnapshot, &csi.DeleteSnapshotRequest{SnapshotId: s.id}, nil)
		if err == nil {
			s.fate = gone
			w.dropSnapshot(s)
			return nil
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		w.wantCode(&s.object, "delete snapshot", err, codes.Internal)
		if err := pause(ctx, maxBackoff); err != nil {
			return err
		}
	}
}

// listVolumes lists all volumes, page by page, and checks the entry of this volume.
func (w *worker) listVolumes(ctx context.Context, v *volume) error {
	request := &csi.ListVolumesRequest{MaxEntries: int32(w.random.IntN(20))}
	var found *csi.ListVolumesResponse_Entry
	for {
		resp, err := ask(ctx, w, &v.object, w.ListVolumes, request, nil)
		if err != nil {
			w.wantCode(&v.object, "list volumes", err, codes.Internal)
			return nil
		}
		for _, entry := range resp.GetEntries() {
			if entry.GetVolume().GetVolumeId() == v.id {
				if found != nil {
					return fmt.Errorf("listed twice: %s", v.historyText())
				}
				found = entry
			}
		}
		if request.StartingToken = resp.GetNextToken(); request.StartingToken == "" {
			break
		}
	}
	if found == nil {
		return fmt.Errorf("not among the listed volumes: %s", v.historyText())
	}
	return w.checkListed(v, found.GetVolume(), found.GetStatus().GetPublishedNodeIds())
}

// checkListed compares an entry of a list, or the answer of ControllerGetVolume, with the expected values.
func (w *worker) checkListed(v *volume, shown *csi.Volume, publishedOn []string) error {
	if shown.GetCapacityBytes() != v.sizeBytes {
		return fmt.Errorf("shown with %d bytes: %s", shown.GetCapacityBytes(), v.historyText())
	}
	if !w.advertised[csi.ControllerServiceCapability_RPC_LIST_VOLUMES_PUBLISHED_NODES] {
		return nil
	}
	var want []string
	if v.node != nil {
		want = []string{v.node.ID}
	}
	if !slices.Equal(publishedOn, want) {
		return fmt.Errorf("shown as published on %v, want %v: %s", publishedOn, want, v.historyText())
	}
	return nil
}

func (w *worker) getVolume(ctx context.Context, v *volume) error {
	resp, err := ask(ctx, w, &v.object, w.ControllerGetVolume, &csi.ControllerGetVolumeRequest{VolumeId: v.id}, nil)
	if err != nil {
		w.wantCode(&v.object, "get volume", err, codes.Internal)
		return nil
	}
	return w.checkListed(v, resp.GetVolume(), resp.GetStatus().GetPublishedNodeIds())
}

// listSnapshots lists a snapshot by its ID, by its source, or with all others.
func (w *worker) listSnapshots(ctx context.Context, s *snapshot) error {
	request := &csi.ListSnapshotsRequest{MaxEntries: int32(w.random.IntN(10))}
	switch w.random.IntN(3) {
	case 0:
		request.SnapshotId = s.id
	case 1:
		request.SourceVolumeId = s.request.GetSourceVolumeId()
	}
	found := 0
	for {
		resp, err := ask(ctx, w, &s.object, w.ListSnapshots, request, nil)
		if err != nil {
			w.wantCode(&s.object, "list snapshots", err, codes.Internal)
			return nil
		}
		for _, entry := range resp.GetEntries() {
			if entry.GetSnapshot().GetSnapshotId() == s.id {
				found++
			}
		}
		if request.StartingToken = resp.GetNextToken(); request.StartingToken == "" {
			break
		}
	}
	if found != 1 {
		return fmt.Errorf("%d times among the snapshots listed by %v: %s", found, request, s.historyText())
	}
	return nil
}

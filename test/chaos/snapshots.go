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
	if time.Now().Before(w.orphaned(&s.thing)) {
		return false, nil
	}
	switch n := w.random.IntN(6); {
	case n < 3 && len(w.volumes) < mostVolumes:
		w.books.count("restore")
		return true, w.restore(ctx, s)
	case n == 3:
		w.books.count("snapshot again")
		return true, w.snapshotAgain(ctx, s)
	case n == 4:
		w.books.count("delete snapshot")
		return true, w.deleteSnapshot(ctx, s)
	case n == 5 && w.advertised[csi.ControllerServiceCapability_RPC_LIST_SNAPSHOTS]:
		w.books.count("list snapshots")
		return true, w.listSnapshots(ctx, s)
	}
	return false, nil
}

// snapshot makes a snapshot of a volume, published or not. What was written was flushed.
func (w *worker) snapshot(ctx context.Context, v *volume) error {
	s := &snapshot{thing: thing{name: w.newName("snapshot"), fate: wanted, sizeBytes: v.sizeBytes, content: v.content}}
	s.request = &csi.CreateSnapshotRequest{Name: s.name, SourceVolumeId: v.id}
	s.remember("source %s, content %x", v.name, uint64(v.content))
	w.snapshots = append(w.snapshots, s)
	err := w.finishSnapshot(ctx, s)
	v.quiet = later(v.quiet, w.orphaned(&s.thing)) // what is written next must not get into it
	return err
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// finishSnapshot asks for a snapshot until the answer is clear and it is ready; see finishCreate.
func (w *worker) finishSnapshot(ctx context.Context, s *snapshot) error {
	for {
		resp, err := ask(ctx, w, &s.thing, w.CreateSnapshot, s.request, nil)
		switch {
		case err == nil:
			if err := w.toldSnapshot(s, resp.GetSnapshot()); err != nil || resp.GetSnapshot().GetReadyToUse() {
				return err
			}
		case ctx.Err() != nil:
			return ctx.Err()
		default:
			w.odd(&s.thing, "snapshot", err, codes.ResourceExhausted, codes.Internal)
			if s.fate == wanted && w.givesUp(&s.thing) {
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

// toldSnapshot takes note of an answer, and compares it with an earlier one.
func (w *worker) toldSnapshot(s *snapshot, told *csi.Snapshot) error {
	if s.fate == wanted {
		s.fate, s.id, s.told = lives, told.GetSnapshotId(), told
		if s.id == "" || told.GetSizeBytes() != s.sizeBytes || told.GetSourceVolumeId() != s.request.GetSourceVolumeId() ||
			told.GetCreationTime() == nil {
			return fmt.Errorf(
				"snapshot of %d bytes of %s answered %v: %s",
				s.sizeBytes,
				s.request.GetSourceVolumeId(),
				told,
				s.story(),
			)
		}
		return nil
	}
	if told.GetSnapshotId() != s.id || told.GetSizeBytes() != s.sizeBytes ||
		!told.GetCreationTime().AsTime().Equal(s.told.GetCreationTime().AsTime()) {
		return fmt.Errorf("snapshot answered %v, and %v before: %s", told, s.told, s.story())
	}
	return nil
}

// snapshotAgain repeats a request that has been answered, though the source may be gone by now.
func (w *worker) snapshotAgain(ctx context.Context, s *snapshot) error {
	resp, err := ask(ctx, w, &s.thing, w.CreateSnapshot, s.request, nil)
	if err != nil {
		w.odd(&s.thing, "snapshot again", err)
		return nil
	}
	return w.toldSnapshot(s, resp.GetSnapshot())
}

func (w *worker) dropSnapshot(s *snapshot) {
	w.snapshots = slices.DeleteFunc(w.snapshots, func(other *snapshot) bool { return other == s })
	w.snapshotsPast = append(w.snapshotsPast, s)
}

// restore makes a volume of a snapshot.
func (w *worker) restore(ctx context.Context, s *snapshot) error {
	return w.create(ctx, &origin{sizeBytes: s.sizeBytes, content: s.content, source: &csi.VolumeContentSource{
		Type: &csi.VolumeContentSource_Snapshot{Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: s.id}},
	}})
}

// clone makes a volume of another one.
func (w *worker) clone(ctx context.Context, v *volume) error {
	return w.create(ctx, &origin{sizeBytes: v.sizeBytes, content: v.content, source: &csi.VolumeContentSource{
		Type: &csi.VolumeContentSource_Volume{Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: v.id}},
	}})
}

// deleteSnapshot asks until it is told OK.
func (w *worker) deleteSnapshot(ctx context.Context, s *snapshot) error {
	for {
		_, err := ask(ctx, w, &s.thing, w.DeleteSnapshot, &csi.DeleteSnapshotRequest{SnapshotId: s.id}, nil)
		if err == nil {
			s.fate = gone
			w.dropSnapshot(s)
			return nil
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		w.odd(&s.thing, "delete snapshot", err, codes.Internal)
		if err := pause(ctx, maxBackoff); err != nil {
			return err
		}
	}
}

// listVolumes lists everything, page after page, and looks for this volume and where it is published.
func (w *worker) listVolumes(ctx context.Context, v *volume) error {
	request := &csi.ListVolumesRequest{MaxEntries: int32(w.random.IntN(20))}
	var found *csi.ListVolumesResponse_Entry
	for {
		resp, err := ask(ctx, w, &v.thing, w.ListVolumes, request, nil)
		if err != nil {
			w.odd(&v.thing, "list volumes", err, codes.Internal)
			return nil
		}
		for _, entry := range resp.GetEntries() {
			if entry.GetVolume().GetVolumeId() == v.id {
				if found != nil {
					return fmt.Errorf("listed twice: %s", v.story())
				}
				found = entry
			}
		}
		if request.StartingToken = resp.GetNextToken(); request.StartingToken == "" {
			break
		}
	}
	if found == nil {
		return fmt.Errorf("not among the listed volumes: %s", v.story())
	}
	return w.checkListed(v, found.GetVolume(), found.GetStatus().GetPublishedNodeIds())
}

// checkListed compares what a list or a look shows with what was told.
func (w *worker) checkListed(v *volume, shown *csi.Volume, publishedOn []string) error {
	if shown.GetCapacityBytes() != v.sizeBytes {
		return fmt.Errorf("shown with %d bytes: %s", shown.GetCapacityBytes(), v.story())
	}
	if !w.advertised[csi.ControllerServiceCapability_RPC_LIST_VOLUMES_PUBLISHED_NODES] {
		return nil
	}
	var want []string
	if v.node != nil {
		want = []string{v.node.ID}
	}
	if !slices.Equal(publishedOn, want) {
		return fmt.Errorf("shown as published on %v, want %v: %s", publishedOn, want, v.story())
	}
	return nil
}

func (w *worker) getVolume(ctx context.Context, v *volume) error {
	resp, err := ask(ctx, w, &v.thing, w.ControllerGetVolume, &csi.ControllerGetVolumeRequest{VolumeId: v.id}, nil)
	if err != nil {
		w.odd(&v.thing, "get volume", err, codes.Internal)
		return nil
	}
	return w.checkListed(v, resp.GetVolume(), resp.GetStatus().GetPublishedNodeIds())
}

// listSnapshots looks for a snapshot by its ID, by its source, or among all.
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
		resp, err := ask(ctx, w, &s.thing, w.ListSnapshots, request, nil)
		if err != nil {
			w.odd(&s.thing, "list snapshots", err, codes.Internal)
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
		return fmt.Errorf("%d times among the snapshots listed by %v: %s", found, request, s.story())
	}
	return nil
}

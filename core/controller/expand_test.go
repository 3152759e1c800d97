// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/core/coretest"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

func (r *rig) expand(t *testing.T, id string, requiredBytes int64) (int64, error) {
	t.Helper()
	resp, err := r.ControllerExpandVolume(t.Context(), &csi.ControllerExpandVolumeRequest{
		VolumeId: id, CapacityRange: &csi.CapacityRange{RequiredBytes: requiredBytes},
	})
	return resp.GetCapacityBytes(), err
}

// wantNothingLeft checks that no snapshot and no record of an expansion is on the rack.
func (r *rig) wantNothingLeft(t *testing.T) {
	t.Helper()
	snapshots, err := r.SDK.SnapshotListAllPages(t.Context(), oxide.SnapshotListParams{Project: coretest.Project})
	coretest.Must(t, err)
	records, err := r.SDK.AntiAffinityGroupListAllPages(
		t.Context(), oxide.AntiAffinityGroupListParams{Project: coretest.Project})
	coretest.Must(t, err)
	if len(snapshots) > 0 || len(records) > 0 {
		t.Errorf("left: %v %v", snapshots, records)
	}
}

// A volume that grew keeps its ID and all that an orchestrator stores of it.
func TestExpandedVolumeIsTheSame(t *testing.T) {
	r := newRig(t)
	created, err := r.CreateVolume(t.Context(), coretest.CreateRequest("v"))
	coretest.Must(t, err)
	id := created.GetVolume().GetVolumeId()
	for gib := int64(2); gib <= 4; gib++ {
		size, err := r.expand(t, id, (gib-1)*coretest.GiB+1)
		coretest.Must(t, err)
		if size != gib*coretest.GiB {
			t.Fatalf("%d bytes, want %d GiB", size, gib)
		}
		for _, c := range []*rig{r, r.again(t)} { // a controller that expanded the volume, and one that did not
			again, err := c.CreateVolume(t.Context(), coretest.CreateRequest("v"))
			coretest.Must(t, err)
			coretest.WantSame(t, again.GetVolume().GetVolumeContext(), created.GetVolume().GetVolumeContext())
			got, err := c.ControllerGetVolume(t.Context(), &csi.ControllerGetVolumeRequest{VolumeId: id})
			coretest.Must(t, err)
			if v := got.GetVolume(); v.GetVolumeId() != id || v.GetCapacityBytes() != size || v.GetContentSource() != nil {
				t.Errorf("the volume is %v", v)
			}
			list, err := c.ListVolumes(t.Context(), &csi.ListVolumesRequest{})
			coretest.Must(t, err)
			listed := slices.ContainsFunc(list.GetEntries(), func(e *csi.ListVolumesResponse_Entry) bool {
				return e.GetVolume().GetVolumeId() == id
			})
			if !listed || len(list.GetEntries()) != 3 { // the boot disks are attached
				t.Errorf("the list has %v", list.GetEntries())
			}
			published, err := c.ControllerPublishVolume(t.Context(), &csi.ControllerPublishVolumeRequest{
				VolumeId: id, NodeId: c.Node(t, "node-a"), VolumeCapability: coretest.MountWriter(),
			})
			coretest.Must(t, err)
			if p := published.GetPublishContext(); p["diskID"] != id || p["origin"] != "blank" || p["fsLineage"] != "" {
				t.Errorf("the publish context is %v", p)
			}
			coretest.Must(t, c.Unpublish(t, id, c.Node(t, "node-a")))
		}
		snapshot := r.snapshot(t, "s", id)
		shot, err := r.GetSnapshot(t.Context(), &csi.GetSnapshotRequest{SnapshotId: snapshot})
		coretest.Must(t, err)
		if shot.GetSnapshot().GetSourceVolumeId() != id {
			t.Errorf("the snapshot is of %s", shot.GetSnapshot().GetSourceVolumeId())
		}
		_, err = r.DeleteSnapshot(t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: snapshot})
		coretest.Must(t, err)
		copied, err := r.CreateVolume(t.Context(), from("c", fromVolume(id)))
		coretest.Must(t, err)
		again, err := r.CreateVolume(t.Context(), from("c", fromVolume(id)))
		coretest.Must(t, err)
		coretest.WantSame(t, again, copied)
		coretest.Must(t, r.Delete(t, copied.GetVolume().GetVolumeId()))
	}
	coretest.Must(t, r.Delete(t, id))
	r.wantNothingLeft(t)
	if left := r.Volumes(t); len(left) > 0 {
		t.Errorf("disks left: %v", left)
	}
}

func TestExpandNothingToDo(t *testing.T) {
	r := newRig(t)
	id := r.Create(t, "v")
	r.ClearCalls(t)
	size, err := r.expand(t, id, 1)
	coretest.Must(t, err)
	if size != coretest.GiB {
		t.Errorf("%d bytes", size)
	}
	r.WantCalls(t, map[string]int{"disk_view": 1})
}

func TestExpandRefused(t *testing.T) {
	r := newRig(t)
	id := r.Create(t, "v")
	_, err := r.expand(t, id, 1024*coretest.GiB)
	coretest.WantCode(t, err, codes.OutOfRange)
	_, err = r.expand(t, coretest.NoVolumeID, coretest.GiB)
	coretest.WantCode(t, err, codes.NotFound)
	coretest.Must(t, r.Publish(t, id, r.Node(t, "node-a")))
	_, err = r.expand(t, id, 2*coretest.GiB)
	coretest.WantCode(t, err, codes.FailedPrecondition, r.Node(t, "node-a"))
	mine := r.UserDisk(t, coretest.Project, "mine", "by hand")
	_, err = r.expand(t, mine.Id, 2*coretest.GiB)
	coretest.WantCode(t, err, codes.FailedPrecondition, "was not made by this plugin")
	r.wantNothingLeft(t)
}

// Without quota for the larger disk beside the snapshot, the volume stays as it is.
func TestExpandWithoutQuota(t *testing.T) {
	for _, quota := range []int64{1, 2, 3} { // not for the snapshot; for the snapshot only; for a smaller disk
		r := newRig(t, func(o *coretest.Options) { o.Rack.Instances = nil })
		id := r.Create(t, "v")
		coretest.Must(t, r.Sim.Set(t.Context(), simtest.Settings{QuotaBytes: new(quota * coretest.GiB)}))
		_, err := r.expand(t, id, 3*coretest.GiB)
		coretest.WantCode(t, err, codes.OutOfRange)
		r.wantNothingLeft(t)
		if int64(r.Disk(t, id).Size) != coretest.GiB {
			t.Error("the disk was replaced")
		}
	}
}

// The quota may be used up between the look and the new disk. Then the disk is made again at its old size, or the
// snapshot stays and every answer names it.
func TestExpandWhenTheRackFillsUp(t *testing.T) {
	for _, failures := range []int{1, 2} {
		r := newRig(t)
		id := r.Create(t, "v")
		for range failures {
			r.Inject(t, "disk_create", simtest.FaultStatus, 507)
		}
		_, err := r.expand(t, id, 3*coretest.GiB)
		if failures == 1 {
			coretest.WantCode(t, err, codes.OutOfRange)
			coretest.Must(t, r.Publish(t, id, r.Node(t, "node-a")))
			continue
		}
		coretest.WantCode(t, err, codes.FailedPrecondition, "csi-grow-", "do not delete it")
		for range 2 {
			r.Inject(t, "disk_create", simtest.FaultStatus, 507)
		}
		_, err = r.ControllerGetVolume(t.Context(), &csi.ControllerGetVolumeRequest{VolumeId: id})
		coretest.WantCode(t, err, codes.Aborted, "csi-grow-", "do not delete it")
		coretest.Must(t, r.Unpublish(t, id, r.Node(t, "node-a")))
		coretest.WantCode(t, r.Publish(t, id, r.Node(t, "node-a")), codes.FailedPrecondition, "csi-grow-")
		snapshots, err := r.SDK.SnapshotListAllPages(t.Context(), oxide.SnapshotListParams{Project: coretest.Project})
		coretest.Must(t, err)
		if len(snapshots) != 1 || !strings.HasPrefix(string(snapshots[0].Name), "csi-grow-") {
			t.Fatalf("the snapshots are %v", snapshots)
		}
		_, err = r.DeleteSnapshot(t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: snapshots[0].Id})
		coretest.WantCode(t, err, codes.FailedPrecondition, "only copy")
		coretest.Must(t, r.Publish(t, id, r.Node(t, "node-a"))) // there is room again
		coretest.Must(t, r.Unpublish(t, id, r.Node(t, "node-a")))
		coretest.Must(t, r.Delete(t, id))
		r.wantNothingLeft(t)
	}
}

// A volume without a disk can be deleted.
func TestDeleteVolumeThatIsOnlyASnapshot(t *testing.T) {
	r := newRig(t)
	id := r.Create(t, "v")
	for range 4 {
		r.Inject(t, "disk_create", simtest.FaultStatus, 507)
	}
	_, err := r.expand(t, id, 3*coretest.GiB)
	coretest.WantCode(t, err, codes.FailedPrecondition)
	coretest.Must(t, r.Delete(t, id))
	r.wantNothingLeft(t)
}

// A publish that finds its disk about to be replaced detaches the disk and finishes the expansion. Until the disk is
// detached, the answer is UNAVAILABLE.
func TestPublishGivesWayToACommittedExpansion(t *testing.T) {
	r := newRig(t)
	id, node := r.Create(t, "v"), r.Node(t, "node-a")
	r.Inject(t, "disk_delete", simtest.FaultStatus, 500)
	_, err := r.expand(t, id, 2*coretest.GiB)
	coretest.WantCode(t, err, codes.Aborted)
	r.AttachByHand(t, id, node)
	r.Inject(t, "instance_disk_detach", simtest.FaultStatus, 500)
	coretest.WantCode(t, r.Publish(t, id, node), codes.Unavailable, "must be detached first")
	coretest.WantCode(t, r.Publish(t, id, node), codes.FailedPrecondition, "is being expanded")
	coretest.Must(t, r.Publish(t, id, node))
	got, err := r.ControllerGetVolume(t.Context(), &csi.ControllerGetVolumeRequest{VolumeId: id})
	coretest.Must(t, err)
	if nodes := got.GetStatus().GetPublishedNodeIds(); got.GetVolume().GetCapacityBytes() != 2*coretest.GiB ||
		len(nodes) != 1 {
		t.Errorf("the volume is %v", got)
	}
}

// Another disk has taken the name of a volume's disk. The data stay on the snapshot until the volume is deleted, and the
// other disk stays.
func TestExpandWhenTheNameIsTaken(t *testing.T) {
	r := newRig(t)
	id := r.Create(t, "v")
	name := string(r.Disk(t, id).Name)
	r.Inject(t, "disk_create", simtest.FaultStatus, 500)
	_, err := r.expand(t, id, 2*coretest.GiB)
	coretest.WantCode(t, err, codes.Aborted)
	other := r.UserDisk(t, coretest.Project, name, "by hand").Id
	_, err = r.expand(t, id, 2*coretest.GiB)
	coretest.WantCode(t, err, codes.FailedPrecondition, "took its name", other)
	coretest.WantCode(t, r.Publish(t, id, r.Node(t, "node-a")), codes.FailedPrecondition, other)
	coretest.Must(t, r.Unpublish(t, id, r.Node(t, "node-a")))
	snapshots, err := r.SDK.SnapshotListAllPages(t.Context(), oxide.SnapshotListParams{Project: coretest.Project})
	coretest.Must(t, err)
	if len(snapshots) != 1 {
		t.Errorf("the snapshots are %v", snapshots)
	}
	coretest.Must(t, r.Delete(t, id))
	r.wantNothingLeft(t)
	if left := r.Volumes(t); len(left) != 1 || left[0] != other {
		t.Errorf("disks left: %v", left)
	}
}

// A repeated expansion to a larger size first finishes the earlier one.
func TestExpandAgainToAnotherSize(t *testing.T) {
	r := newRig(t)
	id := r.Create(t, "v")
	r.Inject(t, "disk_delete", simtest.FaultStatus, 500)
	_, err := r.expand(t, id, 2*coretest.GiB)
	coretest.WantCode(t, err, codes.Aborted)
	_, err = r.expand(t, id, 4*coretest.GiB)
	coretest.WantCode(t, err, codes.Aborted, "was finished first")
	if size, err := r.expand(t, id, 4*coretest.GiB); err != nil || size != 4*coretest.GiB {
		t.Errorf("%d bytes: %v", size, err)
	}
}

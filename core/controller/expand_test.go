// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller_test

import (
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/core/controller"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
	"github.com/oxidecomputer/oxide-csi-plugin/test/coretest"
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
	createdAt := func() time.Time {
		return askDetails(t, func(option grpc.CallOption) error {
			_, err := r.ControllerGetVolume(
				withQuestion(t.Context(), rpc.MetadataAskDetails), &csi.ControllerGetVolumeRequest{VolumeId: id}, option)
			return err
		})[id].Created
	}
	first := createdAt().Truncate(time.Second)
	for gib := int64(2); gib <= 4; gib++ {
		size, err := r.expand(t, id, (gib-1)*coretest.GiB+1)
		coretest.Must(t, err)
		if size != gib*coretest.GiB {
			t.Fatalf("%d bytes, want %d GiB", size, gib)
		}
		if now := createdAt(); !now.Equal(first) {
			t.Errorf("the volume was created at %s, and is said to be of %s", first, now)
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
			if p := published.GetPublishContext(); p["diskID"] != id || p["origin"] != "blank" || p["fsLineage"] != "" ||
				p["firstBytes"] != strconv.FormatInt(coretest.GiB, 10) {
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

// A rack makes no larger disk from a local disk, nor from the read-only disk of a snapshot.
func TestExpandOtherKindsOfDisks(t *testing.T) {
	r := newRig(t)
	local := coretest.CreateRequest("local")
	local.Parameters = map[string]string{rpc.ParameterDiskType: "local"}
	readOnly := from("read-only", fromSnapshot(r.snapshot(t, "s", r.Create(t, "v"))))
	readOnly.Parameters = map[string]string{rpc.KeyReadOnly: "true"}
	for _, req := range []*csi.CreateVolumeRequest{local, readOnly} {
		created, err := r.CreateVolume(t.Context(), req)
		coretest.Must(t, err)
		id := created.GetVolume().GetVolumeId()
		before := r.Disk(t, id)
		_, err = r.expand(t, id, 2*coretest.GiB)
		coretest.WantCode(t, err, codes.FailedPrecondition, req.GetName())
		coretest.WantSame(t, r.Disk(t, id), before)
	}
}

// A filesystem with bigalloc does not grow on every node. So its disk is not replaced by a larger one, and a copy of it
// is not larger. The disk says so, also to another controller.
func TestExpandOfAFilesystemThatMayNotGrow(t *testing.T) {
	r := newRig(t)
	req := coretest.CreateRequest("fixed")
	req.Parameters = map[string]string{rpc.KeyMkfsOptions: "-O bigalloc -C 65536"}
	ids := []string{r.create(t, req).GetVolumeId()}
	sources := []*csi.VolumeContentSource{fromSnapshot(r.snapshot(t, "s", ids[0])), fromVolume(ids[0])}
	for i, source := range sources {
		larger := from(fmt.Sprint("larger ", i), source)
		larger.CapacityRange = &csi.CapacityRange{RequiredBytes: 2 * coretest.GiB}
		_, err := r.CreateVolume(t.Context(), larger)
		coretest.WantCode(t, err, codes.OutOfRange, "bigalloc", strconv.FormatInt(coretest.GiB, 10))
		ids = append(ids, r.create(t, from(fmt.Sprint("copy ", i), source)).GetVolumeId())
	}
	for _, id := range ids {
		before := r.Disk(t, id)
		_, err := r.again(t).expand(t, id, 2*coretest.GiB)
		coretest.WantCode(t, err, codes.OutOfRange, "keeps its size", "bigalloc", "copy the data")
		coretest.WantSame(t, r.Disk(t, id), before)
	}
	without := coretest.CreateRequest("without")
	without.Parameters = map[string]string{rpc.KeyMkfsOptions: "-O ^bigalloc"}
	_, err := r.expand(t, r.create(t, without).GetVolumeId(), 2*coretest.GiB)
	coretest.Must(t, err)
}

// The limit of a request counts from the size that the volume has, also after an earlier expansion.
func TestExpandWithinALimit(t *testing.T) {
	r := newRig(t)
	id := r.Create(t, "v")
	for _, test := range []struct {
		required, limit, want int64 // in GiB; want is 0 for OUT_OF_RANGE
	}{{2, 2, 2}, {2, 3, 2}, {2, 1, 0}, {3, 2, 0}, {0, 1, 0}, {3, 4, 3}, {1, 2, 0}} {
		resp, err := r.ControllerExpandVolume(t.Context(), &csi.ControllerExpandVolumeRequest{
			VolumeId: id,
			CapacityRange: &csi.CapacityRange{
				RequiredBytes: test.required * coretest.GiB, LimitBytes: test.limit * coretest.GiB,
			},
		})
		if test.want == 0 {
			coretest.WantCode(t, err, codes.OutOfRange)
			continue
		}
		coretest.Must(t, err)
		if got := resp.GetCapacityBytes(); got != test.want*coretest.GiB {
			t.Errorf("%+v: %d bytes", test, got)
		}
	}
}

// What is made from a grown volume, and the list of its snapshots, know only its ID.
func TestCopiesOfAGrownVolume(t *testing.T) {
	r := newRig(t)
	encrypted := coretest.CreateRequest("v")
	encrypted.Parameters = map[string]string{rpc.KeyEncryption: rpc.EncryptionLUKS2}
	created, err := r.CreateVolume(t.Context(), encrypted)
	coretest.Must(t, err)
	id := created.GetVolume().GetVolumeId()
	_, err = r.expand(t, id, 2*coretest.GiB)
	coretest.Must(t, err)
	snapshot := r.snapshot(t, "s", id)
	list, err := r.ListSnapshots(t.Context(), &csi.ListSnapshotsRequest{SourceVolumeId: id})
	coretest.Must(t, err)
	if e := list.GetEntries(); len(e) != 1 || e[0].GetSnapshot().GetSnapshotId() != snapshot ||
		e[0].GetSnapshot().GetSourceVolumeId() != id {
		t.Errorf("the snapshots of the volume: %v", e)
	}
	for name, source := range map[string]*csi.VolumeContentSource{
		"restored": fromSnapshot(snapshot), "cloned": fromVolume(id),
	} {
		req := from(name, source)
		req.CapacityRange, req.Parameters = &csi.CapacityRange{RequiredBytes: 2 * coretest.GiB}, encrypted.GetParameters()
		copied, err := r.CreateVolume(t.Context(), req)
		coretest.Must(t, err)
		published, err := r.ControllerPublishVolume(t.Context(), &csi.ControllerPublishVolumeRequest{
			VolumeId: copied.GetVolume().GetVolumeId(), NodeId: r.Node(t, "node-a"), VolumeCapability: coretest.MountWriter(),
		})
		coretest.Must(t, err)
		if p := published.GetPublishContext(); p["fsLineage"] != id || p[rpc.KeyEncryption] != rpc.EncryptionLUKS2 {
			t.Errorf("%s: the publish context is %v", name, p)
		}
	}
	again, err := r.CreateVolume(t.Context(), encrypted)
	coretest.Must(t, err)
	coretest.WantSame(t, again.GetVolume().GetVolumeContext(), created.GetVolume().GetVolumeContext())
}

// A snapshot or clone waits for a disk that changes its state, and meanwhile another controller expands the volume.
// What is made then is of the new disk, and it names the volume.
func TestCopiesOfAVolumeThatGrowsMeanwhile(t *testing.T) {
	for name, test := range map[string]struct {
		call func(t *testing.T, r *rig, id string) error
		// check checks what the call has made.
		check func(t *testing.T, r *rig, id string)
	}{
		"snapshot": {func(t *testing.T, r *rig, id string) error {
			_, err := r.CreateSnapshot(t.Context(), &csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: id})
			return err
		}, func(t *testing.T, r *rig, id string) {
			again, err := r.CreateSnapshot(t.Context(), &csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: id})
			coretest.Must(t, err)
			coretest.WantSame(t, again.GetSnapshot().GetSourceVolumeId(), id)
		}},
		"clone": {func(t *testing.T, r *rig, id string) error {
			_, err := r.CreateVolume(t.Context(), from("c", fromVolume(id)))
			return err
		}, func(t *testing.T, r *rig, id string) {
			copied := r.volumeNamed(t, "c")
			coretest.WantSame(t, int64(r.Disk(t, copied).Size), int64(2*coretest.GiB))
			r.wantLineage(t, copied, id)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			id := r.Create(t, "v")
			coretest.Must(t, r.Sim.SetDiskState(t.Context(), id, "maintenance"))
			other, gate := r.gated(t)
			looks, looksAgain := gate.Hold("GET", "/v1/disks/"), gate.Hold("GET", "/v1/disks/")
			answered := make(chan error, 1)
			go func() { answered <- test.call(t, other, id) }()
			looks.Entered(t)
			looks.Release()
			looksAgain.Entered(t)
			coretest.Must(t, r.Sim.SetDiskState(t.Context(), id, "detached"))
			_, err := r.expand(t, id, 2*coretest.GiB)
			coretest.Must(t, err)
			looksAgain.Release()
			coretest.Must(t, <-answered)
			test.check(t, r, id)
		})
	}
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
	for _, failures := range []int{1, 2, 3} {
		r := newRig(t)
		id := r.Create(t, "v")
		for range failures {
			r.Inject(t, "disk_create", simtest.FaultStatus, 507)
		}
		_, err := r.expand(t, id, 3*coretest.GiB)
		switch failures {
		case 1:
			coretest.Must(t, err) // another disk of the name was just deleted
			continue
		case 2:
			coretest.WantCode(t, err, codes.OutOfRange)
			coretest.Must(t, r.Publish(t, id, r.Node(t, "node-a")))
			continue
		}
		coretest.WantCode(t, err, codes.FailedPrecondition, "csi-grow-", "do not delete it")
		list, err := r.ListVolumes(t.Context(), &csi.ListVolumesRequest{})
		coretest.Must(t, err)
		if i := slices.IndexFunc(list.GetEntries(), func(e *csi.ListVolumesResponse_Entry) bool {
			return e.GetVolume().GetVolumeId() == id && e.GetVolume().GetCapacityBytes() == coretest.GiB
		}); i < 0 || len(list.GetEntries()) != 3 { // the boot disks are attached
			t.Errorf("the list is %v", list)
		}
		health, err := r.ControllerListVolumeHealth(t.Context(), &csi.ControllerListVolumeHealthRequest{})
		coretest.Must(t, err)
		if len(health.GetEntries()) != 1 || health.GetEntries()[0].GetVolumeId() != id {
			t.Errorf("the health is %v", health)
		}
		for range 3 {
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

// A list names a volume without a disk, so that the commands find the volume by its name. The block size is not known.
func TestListOfAVolumeWithoutADisk(t *testing.T) {
	r := newRig(t)
	id := r.Create(t, "v")
	for range 3 {
		r.Inject(t, "disk_create", simtest.FaultStatus, 507)
	}
	_, err := r.expand(t, id, 3*coretest.GiB)
	coretest.WantCode(t, err, codes.FailedPrecondition)
	list, err := r.ListVolumes(t.Context(), &csi.ListVolumesRequest{})
	coretest.Must(t, err)
	want := map[string]string{
		rpc.KeyDiskName: diskname.ForVolume(coretest.Cluster, "v"), rpc.KeySizeBytes: fmt.Sprint(coretest.GiB),
	}
	for _, entry := range list.GetEntries() {
		if entry.GetVolume().GetVolumeId() == id {
			coretest.WantSame(t, entry.GetVolume().GetVolumeContext(), want)
			return
		}
	}
	t.Errorf("the volume is missing in %v", list)
}

// A volume without a disk can be deleted.
func TestDeleteVolumeThatIsOnlyASnapshot(t *testing.T) {
	r := newRig(t)
	id := r.Create(t, "v")
	for range 6 {
		r.Inject(t, "disk_create", simtest.FaultStatus, 507)
	}
	_, err := r.expand(t, id, 3*coretest.GiB)
	coretest.WantCode(t, err, codes.FailedPrecondition)
	coretest.Must(t, r.Delete(t, id))
	r.wantNothingLeft(t)
}

// Another cluster does not delete a volume that is only a snapshot: no disk says whose it is.
func TestDeleteOfAnotherClustersSnapshot(t *testing.T) {
	r := newRig(t)
	id := r.Create(t, "v")
	for range 3 {
		r.Inject(t, "disk_create", simtest.FaultStatus, 507)
	}
	_, err := r.expand(t, id, 3*coretest.GiB)
	coretest.WantCode(t, err, codes.FailedPrecondition)
	other := r.otherController(t, otherCluster)
	coretest.WantCode(t, other.Delete(t, id), codes.FailedPrecondition, otherCluster, "delete it in that cluster")
	coretest.Must(t, r.Publish(t, id, r.Node(t, "node-a")))
}

// A volume that another cluster has expanded and this one adopted is deleted, also when the rack failed in the middle.
func TestDeleteOfAnAdoptedGrownVolume(t *testing.T) {
	r := newRig(t)
	theirs := r.otherController(t, otherCluster)
	id := theirs.Create(t, "v")
	_, err := theirs.expand(t, id, 2*coretest.GiB)
	coretest.Must(t, err)
	coretest.Must(t, r.adopt(t, id, otherCluster))
	_, err = r.Sim.Inject(t.Context(), simtest.Fault{
		Operation: "anti_affinity_group_list", Kind: simtest.FaultStatus, Status: http.StatusServiceUnavailable,
		Count: new(2 * coretest.Attempts),
	})
	coretest.Must(t, err)
	coretest.WantCode(t, r.Delete(t, id), codes.Unavailable)
	coretest.Must(t, r.Sim.ClearFaults(t.Context()))
	coretest.Must(t, r.Delete(t, id))
	r.wantNothingLeft(t)
}

// A volume that this cluster has adopted leaves nothing, although another cluster's expansion of it was interrupted.
func TestDeleteOfAnAdoptedVolumeInExpansion(t *testing.T) {
	r := newRig(t)
	theirs := r.otherController(t, otherCluster)
	id := theirs.Create(t, "v")
	r.Inject(t, "utilization_view", simtest.FaultStatus, 500)
	_, err := theirs.expand(t, id, 2*coretest.GiB)
	coretest.WantCode(t, err, codes.Internal)
	coretest.Must(t, r.adopt(t, id, otherCluster))
	coretest.Must(t, r.Delete(t, id))
	r.wantNothingLeft(t)
}

// A disk with a copy of a volume's description is not taken for the volume's disk.
func TestCopiedDescription(t *testing.T) {
	r := newRig(t)
	id, node := r.Create(t, "v"), r.Node(t, "node-a")
	_, err := r.expand(t, id, 2*coretest.GiB)
	coretest.Must(t, err)
	list, err := r.SDK.DiskListAllPages(t.Context(), oxide.DiskListParams{Project: coretest.Project})
	coretest.Must(t, err)
	i := slices.IndexFunc(list, func(d oxide.Disk) bool { return strings.Contains(d.Description, `"vol":`) })
	copied := r.UserDisk(t, coretest.Project, "by-hand", list[i].Description)
	_, err = r.ListVolumes(t.Context(), &csi.ListVolumesRequest{}) // so that the controller sees the copy last
	coretest.Must(t, err)
	_, err = r.ControllerGetVolume(t.Context(), &csi.ControllerGetVolumeRequest{VolumeId: copied.Id})
	coretest.Must(t, err)
	coretest.Must(t, r.Publish(t, id, node))
	if attached := r.Volumes(t); !slices.Contains(attached, copied.Id) {
		t.Errorf("the disks are %v", attached)
	}
	if got, err := r.SDK.DiskView(t.Context(), oxide.DiskViewParams{Disk: oxide.NameOrId(copied.Id)}); err != nil ||
		got.State.State() != oxide.DiskStateStateDetached {
		t.Errorf("the copy is %v, %v", got, err)
	}
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

// A publish that cannot make the new disk now answers FAILED_PRECONDITION: Nomad repeats no other code.
func TestPublishOfAVolumeWithoutADisk(t *testing.T) {
	r := newRig(t)
	id, node := r.Create(t, "v"), r.Node(t, "node-a")
	r.Inject(t, "disk_create", simtest.FaultStatus, 500)
	_, err := r.expand(t, id, 2*coretest.GiB)
	coretest.WantCode(t, err, codes.Aborted)
	r.Inject(t, "disk_create", simtest.FaultStatus, 500)
	coretest.WantCode(t, r.Publish(t, id, node), codes.FailedPrecondition, "retry")
	coretest.Must(t, r.Publish(t, id, node))
}

// An expansion may delete the disk while an unpublish is under way, at its request or while it waits. A volume without
// a disk is attached nowhere.
func TestUnpublishMeetsAnExpansion(t *testing.T) {
	for name, async := range map[string]bool{"the detach": false, "the look at the disk": true} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, func(o *coretest.Options) { o.Rack.HotplugAsync, o.Rack.Latency = async, 20*time.Millisecond })
			id, node := r.Create(t, "v"), r.Node(t, "node-a")
			r.Must(t, r.Publish(t, id, node))
			other, gate := r.gated(t)
			held := gate.Hold("POST", "/v1/instances/")
			answer := make(chan error, 1)
			go func() { answer <- other.Unpublish(t, id, node) }()
			held.Entered(t)
			if async {
				detach := held
				held = gate.Hold("GET", "/v1/disks/")
				detach.Release()
				held.Entered(t)
			}
			r.Must(t, r.Unpublish(t, id, node))
			r.Inject(t, "disk_create", simtest.FaultStatus, 500)
			_, err := r.expand(t, id, 2*coretest.GiB)
			coretest.WantCode(t, err, codes.Aborted)
			held.Release()
			coretest.Must(t, <-answer)
			coretest.Must(t, r.Publish(t, id, node)) // makes the new disk
		})
	}
}

// An expansion counts as unfinished from its failure until a publish has finished it.
func TestUnfinishedExpansionsAreCounted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newBubbleRig(t)
		service := r.startController(t, controller.Options{})
		want := func(when string, unfinished int) {
			t.Helper()
			if got := service.UnfinishedExpansions(r.client); got != unfinished {
				t.Errorf("%s: %d expansions are unfinished, want %d", when, got, unfinished)
			}
		}
		created, err := service.CreateVolume(t.Context(), coretest.CreateRequest("v"))
		coretest.Must(t, err)
		id := created.GetVolume().GetVolumeId()
		want("before the first", 0)
		r.inject(t, simtest.Fault{Operation: "disk_create", Kind: simtest.FaultStatus, Status: 500})
		if _, err := service.ControllerExpandVolume(t.Context(), &csi.ControllerExpandVolumeRequest{
			VolumeId: id, CapacityRange: &csi.CapacityRange{RequiredBytes: 2 * coretest.GiB},
		}); err == nil {
			t.Error("an expansion without a new disk succeeded")
		}
		want("without the new disk", 1)
		_, err = service.ControllerPublishVolume(t.Context(), &csi.ControllerPublishVolumeRequest{
			VolumeId: id, NodeId: r.Node(t, "node-a"), VolumeCapability: coretest.MountWriter(),
		})
		coretest.Must(t, err)
		want("after the publish", 0)
	})
}

// Another disk has taken the name of a volume's disk. The data stay on the snapshot until the volume is deleted, and
// the other disk stays.
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

// While a volume has no disk, its disk's name is free. A repeated create must not make a blank disk of that name.
func TestCreateVolumeAgainWithoutADisk(t *testing.T) {
	for name, request := range map[string]func(t *testing.T, r *rig) *csi.CreateVolumeRequest{
		"blank": func(*testing.T, *rig) *csi.CreateVolumeRequest { return coretest.CreateRequest("v") },
		"restored": func(t *testing.T, r *rig) *csi.CreateVolumeRequest {
			return from("v", fromSnapshot(r.snapshot(t, "s", r.Create(t, "source"))))
		},
		"cloned": func(t *testing.T, r *rig) *csi.CreateVolumeRequest {
			return from("v", fromVolume(r.Create(t, "source")))
		},
		"of a source that is gone": func(t *testing.T, r *rig) *csi.CreateVolumeRequest {
			return from("v", fromVolume(coretest.NoVolumeID))
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			req := request(t, r)
			first := req
			if name == "of a source that is gone" {
				first = coretest.CreateRequest("v")
			}
			created, err := r.CreateVolume(t.Context(), first)
			coretest.Must(t, err)
			id := created.GetVolume().GetVolumeId()
			r.Inject(t, "disk_create", simtest.FaultStatus, 500)
			_, err = r.expand(t, id, 2*coretest.GiB)
			coretest.WantCode(t, err, codes.Aborted)
			before := r.snapshots(t)
			_, err = r.again(t).CreateVolume(t.Context(), req)
			coretest.WantCode(t, err, codes.Aborted, id, "volume expand")
			coretest.WantSame(t, r.snapshots(t), before)
			_, err = r.expand(t, id, 2*coretest.GiB)
			coretest.Must(t, err)
			if first != req {
				return
			}
			again, err := r.CreateVolume(t.Context(), req)
			coretest.Must(t, err)
			coretest.WantSame(t, again.GetVolume().GetVolumeId(), id)
		})
	}
}

// An expansion whose new disk exists already does not stop a repeated create, although its records are still there.
func TestCreateVolumeAgainBeforeTheRecordsAreGone(t *testing.T) {
	r := newRig(t)
	id := r.Create(t, "v")
	r.Inject(t, "snapshot_delete", simtest.FaultStatus, 500)
	_, err := r.expand(t, id, 2*coretest.GiB)
	coretest.WantCode(t, err, codes.Internal)
	coretest.WantSame(t, r.again(t).Create(t, "v"), id)
}

// The record of a finished expansion stays as long as its volume. If a user has deleted the disk by hand, the record
// does not block the name.
func TestCreateVolumeAfterAFinishedExpansion(t *testing.T) {
	r := newRig(t)
	id := r.Create(t, "v")
	_, err := r.expand(t, id, 2*coretest.GiB)
	coretest.Must(t, err)
	coretest.Must(t, r.SDK.DiskDelete(t.Context(), oxide.DiskDeleteParams{Disk: oxide.NameOrId(r.volumeNamed(t, "v"))}))
	if again := r.Create(t, "v"); again == id {
		t.Error("the new disk has the old volume ID")
	}
}

// A volume is deleted while another controller expands it, and that expansion leaves its records. They do not block the
// volume's name for the process that deleted it.
func TestCreateVolumeOfADeletedVolumesName(t *testing.T) {
	r := newRig(t)
	id := r.Create(t, "v")
	other, gate := r.gated(t)
	held := gate.Hold("DELETE", "/v1/disks/")
	answered := make(chan error, 1)
	go func() {
		_, err := other.expand(t, id, 2*coretest.GiB)
		answered <- err
	}()
	held.Entered(t) // the expansion is committed
	r = r.again(t)  // it remembers no disk: with a remembered one, the deletion looks for the expansion's records, too
	coretest.Must(t, r.Delete(t, id))
	held.Release()
	coretest.WantCode(t, <-answered, codes.Aborted)
	again := r.Create(t, "v")
	if again == id {
		t.Error("the deleted volume came back")
	}
	// The other one cannot tell this disk from one that was made while the volume had no disk.
	create := func() error {
		created, err := other.CreateVolume(t.Context(), coretest.CreateRequest("v"))
		if err == nil && created.GetVolume().GetVolumeId() != again {
			t.Error("the create has replaced the disk that it found")
		}
		return err
	}
	coretest.WantCode(t, create(), codes.Aborted, id, "delete that disk if it is unused")
	coretest.Must(t, r.Delete(t, id))
	coretest.Must(t, create())
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

// The rack has no room, and it cannot be recorded that the expansion is taken back. Another controller may still carry
// it out, so the answer must not say that the volume keeps its size.
func TestExpandThatCannotBeTakenBack(t *testing.T) {
	r := newRig(t)
	id := r.Create(t, "v")
	other, gate := r.gated(t)
	coretest.Must(t, r.Sim.Set(t.Context(), simtest.Settings{QuotaBytes: new(int64(coretest.GiB))}))
	held := gate.Hold("POST", "/v1/snapshots")
	answered := make(chan error, 1)
	go func() {
		_, err := other.expand(t, id, 3*coretest.GiB)
		answered <- err
	}()
	held.Entered(t) // the intent is recorded
	r.Inject(t, "anti_affinity_group_create", simtest.FaultStatus, 503)
	held.Release()
	coretest.WantCode(t, <-answered, codes.Unavailable, "taken back")
	_, err := r.expand(t, id, 3*coretest.GiB)
	coretest.WantCode(t, err, codes.OutOfRange)
	r.wantNothingLeft(t)
}

// While a controller prepares an expansion, another one finishes the same. The volume lives on, so the answer must not
// say that it was deleted.
func TestExpandThatAnotherControllerFinishes(t *testing.T) {
	r := newRig(t)
	id := r.Create(t, "v")
	_, err := r.expand(t, id, 2*coretest.GiB)
	coretest.Must(t, err)
	first, firstGate := r.gated(t)
	second, secondGate := r.gated(t)
	expand := func(by *rig) chan error {
		answered := make(chan error, 1)
		go func() {
			_, err := by.expand(t, id, 3*coretest.GiB)
			answered <- err
		}()
		return answered
	}
	prepares := firstGate.Hold("POST", "/v1/snapshots")
	finished := expand(first)
	prepares.Entered(t)
	joins := secondGate.Hold("POST", "/v1/anti-affinity-groups")
	joined := expand(second)
	joins.Entered(t)
	looks := secondGate.Hold("GET", "/v1/disks/")
	joins.Release()
	looks.Entered(t)
	prepares.Release()
	coretest.Must(t, <-finished)
	looks.Release()
	coretest.WantCode(t, <-joined, codes.Aborted, "is being expanded")
	size, err := second.expand(t, id, 3*coretest.GiB)
	coretest.Must(t, err)
	coretest.WantSame(t, size, int64(3*coretest.GiB))
}

// A volume whose deletion failed may be used again. Then no sweep deletes its disk.
func TestFailedDeletionDeletesNothingLater(t *testing.T) {
	r := newBubbleRig(t)
	c := r.startController(t, controller.Options{})
	created, err := c.CreateVolume(t.Context(), coretest.CreateRequest("v"))
	coretest.Must(t, err)
	id, node := created.GetVolume().GetVolumeId(), r.Node(t, "node-a")
	r.inject(t, simtest.Fault{Operation: "disk_create", Kind: simtest.FaultStatus, Status: 507, Count: new(3)})
	_, err = c.ControllerExpandVolume(t.Context(), &csi.ControllerExpandVolumeRequest{
		VolumeId: id, CapacityRange: &csi.CapacityRange{RequiredBytes: 2 * coretest.GiB},
	})
	if err == nil {
		t.Fatal("the expansion did not fail, so the volume has its disk")
	}
	r.inject(t, simtest.Fault{
		Operation: "anti_affinity_group_list", Kind: simtest.FaultStatus, Status: 503, Count: new(coretest.Attempts),
	})
	if _, err = c.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: id}); err == nil {
		t.Fatal("the deletion did not fail")
	}
	_, err = c.ControllerPublishVolume(t.Context(), &csi.ControllerPublishVolumeRequest{
		VolumeId: id, NodeId: node, VolumeCapability: coretest.MountWriter(),
	})
	coretest.Must(t, err)
	_, err = c.ControllerUnpublishVolume(
		t.Context(),
		&csi.ControllerUnpublishVolumeRequest{VolumeId: id, NodeId: node},
	)
	coretest.Must(t, err)
	coretest.Must(t, c.SettleNow(t.Context()))
	if _, err = c.ControllerGetVolume(t.Context(), &csi.ControllerGetVolumeRequest{VolumeId: id}); err != nil {
		t.Errorf("after the sweep: %v", err)
	}
}

// A volume is deleted while the record of an earlier expansion is left. Another controller's sweep deletes the record.
func TestRecordOfADeletedVolumeIsSwept(t *testing.T) {
	r := newBubbleRig(t)
	c := r.startController(t, controller.Options{})
	created, err := c.CreateVolume(t.Context(), coretest.CreateRequest("v"))
	coretest.Must(t, err)
	id := created.GetVolume().GetVolumeId()
	expand := func(bytes int64) error {
		_, err := c.ControllerExpandVolume(t.Context(), &csi.ControllerExpandVolumeRequest{
			VolumeId: id, CapacityRange: &csi.CapacityRange{RequiredBytes: bytes},
		})
		return err
	}
	coretest.Must(t, expand(2*coretest.GiB))
	r.inject(t, simtest.Fault{ // the intent is deleted, and then not the decision
		Operation: "anti_affinity_group_delete", Kind: simtest.FaultStatus, Status: 503, Skip: 1, Count: new(1),
	})
	if expand(3*coretest.GiB) == nil {
		t.Fatal("the record is deleted")
	}
	coretest.Must(t, expand(4*coretest.GiB))
	_, err = c.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: id})
	coretest.Must(t, err)
	if left := r.records(t, "csi-grown-"); len(left) != 1 {
		t.Fatalf("the records are %v, and that of the second expansion should be left", left)
	}
	coretest.Must(t, r.startController(t, controller.Options{}).SettleNow(t.Context()))
	r.wantNothingLeft(t)
}

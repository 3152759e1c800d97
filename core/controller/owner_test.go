// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller_test

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	gocmp "github.com/google/go-cmp/cmp"
	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	grpcmetadata "google.golang.org/grpc/metadata"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
	"github.com/oxidecomputer/oxide-csi-plugin/core/record"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
	"github.com/oxidecomputer/oxide-csi-plugin/test/await"
	"github.com/oxidecomputer/oxide-csi-plugin/test/coretest"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// otherCluster is the cluster whose volumes the tests of this file use. Its ID is as long as a cluster ID can be.
var otherCluster = strings.Repeat("o", 63)

// otherController starts the controller of another cluster on the same rack.
func (r *rig) otherController(t *testing.T, cluster string) *rig {
	t.Helper()
	other := r.copy()
	other.Options.Cluster = cluster
	other.Start(t)
	return other
}

// adopt adopts a volume of a cluster.
func (r *rig) adopt(t *testing.T, volumeID, from string) error {
	t.Helper()
	_, err := r.ControllerModifyVolume(t.Context(), &csi.ControllerModifyVolumeRequest{
		VolumeId:          volumeID,
		MutableParameters: map[string]string{rpc.KeyAdoptFromCluster: from},
	})
	return err
}

// owned lists the volumes of another cluster, sorted by ID.
func (r *rig) owned(t *testing.T, cluster string) []*csi.Volume {
	t.Helper()
	ctx := grpcmetadata.AppendToOutgoingContext(t.Context(), rpc.MetadataOfCluster, cluster)
	list, err := r.ListVolumes(ctx, &csi.ListVolumesRequest{})
	r.Must(t, err)
	var volumes []*csi.Volume
	for _, entry := range list.GetEntries() {
		volumes = append(volumes, entry.GetVolume())
	}
	slices.SortFunc(volumes, func(a, b *csi.Volume) int { return cmp.Compare(a.GetVolumeId(), b.GetVolumeId()) })
	return volumes
}

// wantOwned compares the volumes that are listed for a cluster.
func (r *rig) wantOwned(t *testing.T, cluster string, want ...string) {
	t.Helper()
	var got []string
	for _, volume := range r.owned(t, cluster) {
		got = append(got, volume.GetVolumeId())
	}
	slices.Sort(want)
	if diff := gocmp.Diff(want, got); diff != "" {
		t.Errorf("volumes of cluster %q (-want +got):\n%s", cluster, diff)
	}
}

// wantForeign checks the error of an RPC about a volume of the other cluster: its code,
// both clusters and the next step.
func wantForeign(t *testing.T, err error) {
	t.Helper()
	coretest.WantCode(t, err, codes.FailedPrecondition, `"`+otherCluster+`"`, `"`+coretest.Cluster+`"`,
		"oxide-csi volume adopt", "a snapshot that was made manually")
}

// What changes something on the rack is refused for a volume of another cluster, and changes nothing.
func TestAnotherClustersVolume(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	theirs := r.otherController(t, otherCluster)
	node := r.Node(t, "node-a")
	volume, attached := theirs.Create(t, "v"), theirs.Create(t, "attached")
	snapshot := theirs.snapshot(t, "s", volume)
	r.Must(t, theirs.Publish(t, attached, node))
	before := len(r.Volumes(t))
	for _, test := range []struct {
		name string
		call func() error
	}{
		{"publish", func() error { return r.Publish(t, volume, node) }},
		{"publish where it is", func() error { return r.Publish(t, attached, node) }},
		{"snapshot", func() error {
			_, err := r.CreateSnapshot(t.Context(), &csi.CreateSnapshotRequest{Name: "mine", SourceVolumeId: volume})
			return err
		}},
		{"clone", func() error {
			_, err := r.CreateVolume(t.Context(), from("c", fromVolume(volume)))
			return err
		}},
		{"restore", func() error {
			_, err := r.CreateVolume(t.Context(), from("r", fromSnapshot(snapshot)))
			return err
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			r.ClearCalls(t)
			wantForeign(t, test.call())
			for operation := range r.Calls(t) {
				// A refused create first looks whether an earlier call has made the volume.
				if !strings.HasSuffix(operation, "_view") {
					t.Errorf("the rack was asked for %s", operation)
				}
			}
		})
	}
	coretest.WantCode(t, r.Delete(t, volume), codes.FailedPrecondition, otherCluster)
	_, err := r.DeleteSnapshot(t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: snapshot})
	coretest.WantCode(t, err, codes.FailedPrecondition, otherCluster)
	for name, nodeID := range map[string]string{"of a node": node, "of any node": ""} {
		if err := r.Unpublish(t, attached, nodeID); err != nil || r.Holder(t, attached) != node {
			t.Errorf("unpublish %s: %v, and the disk is on %q", name, err, r.Holder(t, attached))
		}
	}
	if after := len(r.Volumes(t)); after != before {
		t.Errorf("%d disks, want %d", after, before)
	}
	r.Must(t, theirs.Unpublish(t, attached, node))
}

// No restart is planned for a volume of another cluster.
func TestPlannedAnotherClustersVolume(t *testing.T) {
	t.Parallel()
	r := newRestartRig(t)
	theirs := r.otherController(t, otherCluster)
	node := r.Node(t, "node-a")
	volume := theirs.Create(t, "v")
	wantForeign(t, r.Publish(t, volume, node))
	if list := r.reported(t, ""); len(list) != 0 {
		t.Errorf("planned restarts: %+v", list)
	}
	theirs.published(t, volume, node)
	wantForeign(t, r.Publish(t, volume, node))
	r.Must(t, r.Unpublish(t, volume, node))
	theirs.restartsDone(t)
	if got := r.records(t, "csi-defer-"); len(got) != 0 || r.Holder(t, volume) != node {
		t.Errorf("records %v, and the disk is on %q", got, r.Holder(t, volume))
	}
	theirs.wantRestarts(t, 1)
}

// A volume of no cluster, and a snapshot of no cluster, can be used by every cluster.
func TestVolumeOfNoCluster(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	disk := r.UserDisk(t, coretest.Project, "brought", "the database of 2019").Id
	node := r.Node(t, "node-a")
	for _, cluster := range []*rig{r, r.otherController(t, otherCluster)} {
		r.Must(t, cluster.Publish(t, disk, node))
		r.Must(t, cluster.Unpublish(t, disk, node))
		if got := r.Holder(t, disk); got != "" {
			t.Errorf("the disk is on %s", got)
		}
		cluster.snapshot(t, "s", disk)
		_, err := cluster.CreateVolume(t.Context(), from("c", fromVolume(disk)))
		r.Must(t, err)
	}
}

// While both clusters live, data of the other one comes through a snapshot that was made by hand: of its volume, or of
// the volume that it restores from its own snapshot. The volume knows whose filesystem and header it may have.
func TestDataOfALivingCluster(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	theirs, node := r.otherController(t, otherCluster), r.Node(t, "node-a")
	volume := theirs.create(t, encrypted(coretest.CreateRequest("v"))).GetVolumeId()
	snapshot := theirs.snapshot(t, "s", volume)
	restored := theirs.create(t, encrypted(from("restored", fromSnapshot(snapshot)))).GetVolumeId()
	for name, lineage := range map[string][]string{"now": {volume}, "then": {restored, volume}} {
		byHand := fromSnapshot(r.userSnapshot(t, coretest.Project, name, "for the other cluster", lineage[0]))
		copied := r.create(t, encrypted(from(name, byHand))).GetVolumeId()
		r.wantLineage(t, copied, lineage...)
		r.Must(t, r.Publish(t, copied, node))
	}
	_, err := r.CreateVolume(t.Context(), encrypted(from("refused", fromSnapshot(snapshot))))
	wantForeign(t, err)
	if !strings.Contains(err.Error(), "else restore a snapshot that was made manually") {
		t.Errorf("no way to the data of a cluster that lives: %v", err)
	}
	r.Must(t, theirs.Publish(t, volume, node))
}

// After an adoption the adopting cluster can do everything with the volume and its snapshots.
// A repeated adoption is OK.
func TestAdopt(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	theirs := r.otherController(t, otherCluster)
	node := r.Node(t, "node-a")
	volume := theirs.Create(t, "v")
	snapshot := theirs.snapshot(t, "s", volume)
	r.Must(t, r.adopt(t, volume, otherCluster))
	r.Must(t, r.adopt(t, strings.ToUpper(volume), otherCluster))
	if diff := gocmp.Diff([]string{"csi-adopt-" + volume}, r.records(t, "csi-")); diff != "" {
		t.Errorf("records (-want +got):\n%s", diff)
	}
	// A replica, or the controller after a restart, knows of the adoption.
	r = r.again(t)
	r.ClearCalls(t)
	r.Must(t, r.Publish(t, volume, node))
	if got := r.Calls(t)["anti_affinity_group_view"]; got != 3 {
		t.Errorf("%d records were read for a publish, want one beside those of an expansion and a deferred detach", got)
	}
	r.Must(t, r.Unpublish(t, volume, node))
	if got := r.Holder(t, volume); got != "" {
		t.Errorf("the unpublished disk is on %s", got)
	}
	own := r.snapshot(t, "s2", volume)
	for name, source := range map[string]*csi.VolumeContentSource{
		"restored": fromSnapshot(snapshot), "cloned": fromVolume(volume), "own": fromSnapshot(own),
	} {
		_, err := r.CreateVolume(t.Context(), from(name, source))
		r.Must(t, err)
	}
	_, err := r.DeleteSnapshot(t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: snapshot})
	r.Must(t, err)
	r.Must(t, r.Delete(t, volume))
	r.Must(t, r.Delete(t, volume))
	if slices.Contains(r.Volumes(t), volume) {
		t.Error("the disk was not deleted")
	}
	if got := r.records(t, "csi-"); len(got) != 0 {
		t.Errorf("records after the deletion: %v", got)
	}
}

// Volumes of this cluster and of no cluster cost no request for the record of an adoption. A publish reads the records
// of a deferred detach and an expansion, a create that of an expansion, and a deletion of a remembered disk that of a
// finished one.
func TestOwnVolumesReadNoRecord(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	node := r.Node(t, "node-a")
	own, brought := r.Create(t, "v"), r.UserDisk(t, coretest.Project, "brought", "").Id
	r.ClearCalls(t)
	for _, volume := range []string{own, brought} {
		r.Must(t, r.Publish(t, volume, node))
		snapshot := r.snapshot(t, "s-"+volume, volume)
		_, err := r.CreateVolume(t.Context(), from("r-"+volume, fromSnapshot(snapshot)))
		r.Must(t, err)
		_, err = r.CreateVolume(t.Context(), from("c-"+volume, fromVolume(volume)))
		r.Must(t, err)
		_, err = r.DeleteSnapshot(t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: snapshot})
		r.Must(t, err)
		r.Must(t, r.Unpublish(t, volume, node))
	}
	r.Must(t, r.Delete(t, own))
	for operation, count := range r.Calls(t) {
		want := 0
		if operation == "anti_affinity_group_view" {
			want = 9 // two for each publish, one for each create, and one for the deletion
		}
		if strings.HasPrefix(operation, "anti_affinity") && count != want {
			t.Errorf("%s: %d", operation, count)
		}
	}
}

// Only the cluster that owns a volume can lose it: by its description, or by an adoption.
func TestAdoptRejects(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	theirs, third := r.otherController(t, otherCluster), r.otherController(t, "third")
	volume, own := theirs.Create(t, "v"), r.Create(t, "own")
	brought := r.UserDisk(t, coretest.Project, "brought", "").Id
	coretest.WantCode(t, r.adopt(t, volume, "third"), codes.FailedPrecondition, otherCluster)
	coretest.WantCode(t, r.adopt(t, brought, otherCluster), codes.FailedPrecondition, "no cluster")
	coretest.WantCode(t, r.adopt(t, coretest.NoVolumeID, otherCluster), codes.NotFound)
	coretest.WantCode(t, r.adopt(t, "v", otherCluster), codes.NotFound)
	coretest.WantCode(t, r.adopt(t, volume, ""), codes.InvalidArgument, rpc.KeyAdoptFromCluster)
	coretest.WantCode(t, r.adopt(t, volume, coretest.Cluster), codes.FailedPrecondition, otherCluster)
	_, err := r.ControllerModifyVolume(t.Context(), &csi.ControllerModifyVolumeRequest{
		VolumeId:          volume,
		MutableParameters: map[string]string{rpc.KeyAdoptFromCluster: otherCluster, "iops": "3000"},
	})
	coretest.WantCode(t, err, codes.InvalidArgument, "iops")
	if got := r.records(t, "csi-"); len(got) != 0 {
		t.Errorf("records: %v", got)
	}
	r.Must(t, r.adopt(t, own, otherCluster)) // this cluster owns it
	r.Must(t, r.adopt(t, own, coretest.Cluster))
	r.wantOwned(t, coretest.Cluster, own)

	r.Must(t, third.adopt(t, volume, otherCluster))
	coretest.WantCode(t, r.adopt(t, volume, otherCluster), codes.FailedPrecondition, "third")
	coretest.WantCode(t, r.Publish(t, volume, r.Node(t, "node-a")), codes.FailedPrecondition,
		"third", "oxide-csi volume adopt")
	r.wantOwned(t, otherCluster)
	r.wantOwned(t, "third", volume)

	// The cluster that adopted the volume is rebuilt, too.
	r.Must(t, r.adopt(t, volume, "third"))
	r.Must(t, r.Publish(t, volume, r.Node(t, "node-a")))
	coretest.WantCode(t, third.Publish(t, volume, r.Node(t, "node-a")), codes.FailedPrecondition, coretest.Cluster)
	r.wantOwned(t, "third", volume) // a repeated adoption prints it again
	r.wantOwned(t, coretest.Cluster, own, volume)

	// The first cluster takes it back.
	r.Must(t, theirs.adopt(t, volume, coretest.Cluster))
	if got := r.records(t, "csi-"); len(got) != 0 {
		t.Errorf("records: %v", got)
	}
	wantForeign(t, r.Publish(t, volume, r.Node(t, "node-a")))
}

// A snapshot belongs to the cluster that owns its volume, also after the volume was deleted.
func TestAdoptADeletedVolumesSnapshots(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	theirs := r.otherController(t, otherCluster)
	volume := theirs.Create(t, "v")
	snapshot := theirs.snapshot(t, "s", volume)
	r.Must(t, theirs.Delete(t, volume))
	coretest.WantCode(t, r.adopt(t, volume, "third"), codes.FailedPrecondition, otherCluster)
	r.Must(t, r.adopt(t, volume, otherCluster))
	_, err := r.CreateVolume(t.Context(), from("r", fromSnapshot(snapshot)))
	r.Must(t, err)
	ctx := grpcmetadata.AppendToOutgoingContext(t.Context(), rpc.MetadataOfCluster, otherCluster)
	list, err := r.ListSnapshots(ctx, &csi.ListSnapshotsRequest{})
	r.Must(t, err)
	if len(list.GetEntries()) != 1 || list.GetEntries()[0].GetSnapshot().GetSnapshotId() != snapshot {
		t.Errorf("snapshots of the other cluster: %v", list.GetEntries())
	}
}

// An answer that is lost does not make a volume ownerless or end in a wrong answer.
func TestAdoptOnABadNetwork(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	theirs := r.otherController(t, otherCluster)
	node := r.Node(t, "node-a")
	volume := theirs.Create(t, "v")
	r.Inject(t, "anti_affinity_group_create", simtest.FaultLost, 0)
	coretest.WantCode(t, r.adopt(t, volume, otherCluster), codes.Unavailable)
	r.Must(t, r.adopt(t, volume, otherCluster))
	for _, test := range []struct {
		name string
		call func() error
	}{
		{"publish", func() error { return r.Publish(t, volume, node) }},
		{"unpublish", func() error { return r.Unpublish(t, volume, node) }},
		{"delete", func() error { return r.Delete(t, volume) }},
		{"clone", func() error {
			_, err := r.CreateVolume(t.Context(), from("c", fromVolume(volume)))
			return err
		}},
	} {
		r.Inject(t, "anti_affinity_group_view", simtest.FaultStatus, 503)
		if test.name == "unpublish" {
			r.AttachByHand(t, volume, node)
		}
		coretest.WantCode(t, test.call(), codes.Unavailable)
		r.Must(t, r.Sim.ClearFaults(t.Context()))
	}
	if got := r.Holder(t, volume); got != node {
		t.Errorf("the disk is on %q", got)
	}
}

// A group that has the name of a record and is none is never taken for an adoption. It stops only the adoption itself.
func TestAdoptionIsUnreadable(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	theirs := r.otherController(t, otherCluster)
	volume := theirs.Create(t, "v")
	for _, text := range []string{"", "mine", `{"v":1,"cluster":"rig","from":"x","disk":"` + coretest.NoVolumeID + `"}`} {
		group, err := r.SDK.AntiAffinityGroupCreate(t.Context(), oxide.AntiAffinityGroupCreateParams{
			Project: coretest.Project,
			Body: &oxide.AntiAffinityGroupCreate{
				Name:          oxide.Name("csi-adopt-" + volume),
				Description:   text,
				Policy:        oxide.AffinityPolicyAllow,
				FailureDomain: oxide.FailureDomainSled,
			},
		})
		r.Must(t, err)
		coretest.WantCode(t, r.Publish(t, volume, r.Node(t, "node-a")), codes.FailedPrecondition, otherCluster)
		coretest.WantCode(t, r.adopt(t, volume, otherCluster), codes.FailedPrecondition, "csi-adopt-"+volume, "delete it")
		theirs.Must(t, theirs.Publish(t, volume, r.Node(t, "node-a")))
		theirs.Must(t, theirs.Unpublish(t, volume, r.Node(t, "node-a")))
		r.Must(t, r.SDK.AntiAffinityGroupDelete(t.Context(),
			oxide.AntiAffinityGroupDeleteParams{AntiAffinityGroup: oxide.NameOrId(group.Id)}))
	}
}

// ListVolumes lists a cluster's volumes for an adoption, with the names that the orchestrator gave them.
func TestListOfAnotherCluster(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	theirs := r.otherController(t, otherCluster)
	req := coretest.CreateRequest("pvc-1")
	req.Parameters = map[string]string{rpc.ParameterPVCName: "data", rpc.ParameterPVCNamespace: "shop"}
	created, err := theirs.CreateVolume(t.Context(), req)
	r.Must(t, err)
	long := strings.Repeat("long", 32)
	req.Name, req.Parameters[rpc.ParameterPVCName] = long, strings.Repeat("x", 250)
	cut, err := theirs.CreateVolume(t.Context(), req)
	r.Must(t, err)
	r.Create(t, "own")
	r.UserDisk(t, coretest.Project, "brought", "")
	r.wantOwned(t, otherCluster, created.GetVolume().GetVolumeId(), cut.GetVolume().GetVolumeId())
	ctx := grpcmetadata.AppendToOutgoingContext(t.Context(), rpc.MetadataOfCluster, otherCluster)
	details := askDetails(t, func(option grpc.CallOption) error {
		_, err := r.ListVolumes(withQuestion(ctx, rpc.MetadataAskDetails), &csi.ListVolumesRequest{}, option)
		return err
	})
	wantDetails(t, map[string]rpc.Details{
		created.GetVolume().GetVolumeId(): {Name: "pvc-1", Cluster: otherCluster, Claim: "shop/data"},
		cut.GetVolume().GetVolumeId():     {Name: long, Cluster: otherCluster}, // the claim was cut
	}, details)
}

// The list for an adoption has a grown volume once, with the disk that the volume has now. The rack also lists the old
// disk, which it failed to delete.
func TestListOfAnotherClustersGrownVolume(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	theirs := r.otherController(t, otherCluster)
	id := theirs.Create(t, "v")
	old := r.Disk(t, id)
	_, err := theirs.expand(t, id, 2*coretest.GiB)
	r.Must(t, err)
	sim := *r.Sim
	sim.Host = r.HalfDeleted(t, old)
	r.Sim = &sim
	owned := r.again(t).owned(t, otherCluster)
	if len(owned) != 1 || owned[0].GetVolumeContext()[rpc.KeyDiskName] != string(old.Name) {
		t.Errorf("the list is %v, want the disk %s", owned, old.Name)
	}
}

// A volume of another cluster whose expansion has left it without a disk is listed for an adoption. The adoption makes
// the disk.
func TestAdoptAVolumeWithoutADisk(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	theirs := r.otherController(t, otherCluster)
	id := theirs.Create(t, "v")
	for range 3 {
		r.Inject(t, "disk_create", simtest.FaultStatus, 507)
	}
	_, err := theirs.expand(t, id, 2*coretest.GiB)
	coretest.WantCode(t, err, codes.FailedPrecondition)
	name := diskname.ForVolume(otherCluster, "v")
	if owned := r.owned(t, otherCluster); len(owned) != 1 || owned[0].GetVolumeContext()[rpc.KeyDiskName] != name {
		t.Fatalf("the list is %v, want the disk %s", owned, name)
	}
	r.Must(t, r.adopt(t, id, otherCluster))
	r.wantOwned(t, otherCluster, id) // a repeated adoption prints it again
	r.Must(t, r.Publish(t, id, r.Node(t, "node-a")))
	r.Must(t, r.Unpublish(t, id, r.Node(t, "node-a")))
	r.Must(t, r.Delete(t, id))
	r.wantNothingLeft(t)
}

// A deferred detach that the previous owner left does not stand in the way of the adopting cluster.
func TestPlannedAdoptAfterADeferredDetach(t *testing.T) {
	t.Parallel()
	r := newRestartRig(t)
	theirs := r.otherController(t, otherCluster)
	node := r.Node(t, "node-a")
	volume := theirs.unpublishedOn(t, "v", node)
	theirs.Crash()
	_, err := coretest.RackClient(t, r.Rig, nil).CreateRecord(t.Context(), record.Holds.Named(otherCluster, volume),
		fmt.Sprintf(`{"v":1,"cluster":%q,"disk":%q,"by":"ended"}`, otherCluster, volume))
	r.Must(t, err)
	r.Must(t, r.adopt(t, volume, otherCluster))
	if got := append(r.records(t, "csi-defer-"), r.records(t, "csi-hold-")...); len(got) != 0 {
		t.Errorf("records: %v", got)
	}
	r.Must(t, r.Publish(t, volume, node))
	r.Must(t, r.Unpublish(t, volume, node))
	if diff := gocmp.Diff(
		[]string{record.Deferrals.Named(coretest.Cluster, volume)},
		r.records(t, "csi-defer-"),
	); diff != "" {
		t.Errorf("records (-want +got):\n%s", diff)
	}
}

// Two calls that adopt a volume at the same time for two clusters leave it with one of them.
func TestTwoClustersAdopt(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	volume := r.otherController(t, otherCluster).Create(t, "v")
	third := r.otherController(t, "third")
	errs := make(chan error, 2)
	for _, cluster := range []*rig{r, third} {
		go func() { errs <- cluster.adopt(t, volume, otherCluster) }()
	}
	first, second := <-errs, <-errs
	if (first == nil) == (second == nil) {
		t.Fatalf("the adoptions ended with %v and %v", first, second)
	}
	await.Eventually(t, "one of the clusters can attach the volume", func() bool {
		node := r.Node(t, "node-a")
		return (r.Publish(t, volume, node) == nil) != (third.Publish(t, volume, node) == nil)
	})
}

// loseRole makes the rack answer as for a token that has lost its role on the project, but for what is looked up by ID.
func (r *rig) loseRole(t *testing.T, operations ...string) {
	t.Helper()
	for _, operation := range append(operations, "project_view") {
		_, err := r.Sim.Inject(t.Context(), simtest.Fault{
			Operation: operation, Kind: simtest.FaultStatus, Status: 404, ErrorCode: "ObjectNotFound",
			Message: `not found: something with name "x"`, Count: new(int),
		})
		r.Must(t, err)
	}
}

// A token that loses its role after the disk was looked up does not see the adoption. That is no proof that there is
// none: an unpublish that answered OK would leave the disk attached for good.
func TestRoleLostBeforeTheAdoptionIsRead(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	volume, node := r.otherController(t, otherCluster).Create(t, "v"), r.Node(t, "node-a")
	r.Must(t, r.adopt(t, volume, otherCluster))
	r.Must(t, r.Publish(t, volume, node))
	r.loseRole(t, "anti_affinity_group_view")
	coretest.WantCode(t, r.Unpublish(t, volume, node), codes.Unavailable)
	r.Must(t, r.Sim.ClearFaults(t.Context()))
	r.Must(t, r.Unpublish(t, volume, node))
	if on := r.Holder(t, volume); on != "" {
		t.Errorf("the disk is still on %s", on)
	}
}

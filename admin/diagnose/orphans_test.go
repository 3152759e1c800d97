// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package diagnose_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/go-cmp/cmp"
	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/admin/diagnose"
	"github.com/oxidecomputer/oxide-csi-plugin/core/controller"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
	"github.com/oxidecomputer/oxide-csi-plugin/test/coretest"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// fakeInventory knows what a test gives it.
type fakeInventory struct {
	has orchestrator.Inventory
	err error
}

func (o *fakeInventory) Inventory(context.Context) (orchestrator.Inventory, error) {
	return o.has, o.err
}

func newRack(t *testing.T, r *coretest.Rig) *rack.Client {
	t.Helper()
	client, err := rack.New(rack.Config{
		Name: r.Options.RackName, Host: r.Sim.Host, Project: coretest.Project,
		Token: rack.FixedToken(coretest.Token), LostAnswerWait: time.Millisecond,
	})
	coretest.Must(t, err)
	return client
}

// cleaner is a cleaner for which everything is two days old.
func cleaner(t *testing.T, r *coretest.Rig, known orchestrator.Inventorist) diagnose.Cleaner {
	racks := []*rack.Client{newRack(t, r)}
	return diagnose.Cleaner{
		Racks: racks, Cluster: coretest.Cluster, Orchestrator: known,
		Now: func() time.Time { return time.Now().Add(48 * time.Hour) },
		Service: controller.New(controller.Options{
			Racks: racks, Cluster: coretest.Cluster, MaxDisks: 8, Log: coretest.DiscardLog(),
		}),
	}
}

func find(t *testing.T, c diagnose.Cleaner) diagnose.Orphans {
	t.Helper()
	found, err := diagnose.FindOrphans(t.Context(), c.Racks, c.Cluster, c.Orchestrator, c.Now())
	coretest.Must(t, err)
	return found
}

// kept maps the ID of each orphan to the reason why it is kept.
func kept(found diagnose.Orphans) map[string]string {
	reasons := map[string]string{}
	for _, o := range found.Orphans {
		reasons[o.ID] = o.Keep
	}
	return reasons
}

func volumes(ids ...string) (known []orchestrator.KnownObject) {
	for _, id := range ids {
		known = append(known, orchestrator.KnownObject{ID: id, Object: "PersistentVolume " + id})
	}
	return known
}

// The snapshot of an expansion is no orphan as long as the orchestrator knows the volume, which may have no disk then.
// The snapshot of another volume is deleted with all that is left of that volume.
func TestOrphansOfExpansions(t *testing.T) {
	r := coretest.New(t)
	used, deleted := r.Create(t, "used"), r.Create(t, "deleted")
	other := r.Create(t, "other")
	for _, id := range []string{used, deleted} {
		for range 3 { // the larger disk twice, and one of the old size
			r.Inject(t, "disk_create", simtest.FaultStatus, 507)
		}
		_, err := r.ControllerExpandVolume(t.Context(), &csi.ControllerExpandVolumeRequest{
			VolumeId: id, CapacityRange: &csi.CapacityRange{RequiredBytes: 2 * coretest.GiB},
		})
		coretest.WantCode(t, err, codes.FailedPrecondition)
	}
	known := &fakeInventory{}
	known.has.Volumes = volumes(used, other)
	c := cleaner(t, r, known)
	found := find(t, c)
	if diff := cmp.Diff(map[string]string{deleted: ""}, kept(found)); diff != "" || len(found.Missing) > 0 {
		t.Fatalf("missing %v, orphans (-want +got):\n%s", found.Missing, diff)
	}
	if removed, err := c.Delete(t.Context(), []string{deleted}); err != nil || len(removed) != 1 {
		t.Errorf("deleted %v, %v", removed, err)
	}
	if left := find(t, c); len(left.Orphans) > 0 {
		t.Errorf("left: %v", left.Orphans)
	}
	coretest.Must(t, r.Publish(t, used, r.Node(t, "node-a")))
}

// grow expands a volume to 2 GiB. It returns the volume's disk before and after.
func grow(t *testing.T, r *coretest.Rig, id string) (old, now *oxide.Disk) {
	t.Helper()
	old = r.Disk(t, id)
	_, err := r.ControllerExpandVolume(t.Context(), &csi.ControllerExpandVolumeRequest{
		VolumeId: id, CapacityRange: &csi.CapacityRange{RequiredBytes: 2 * coretest.GiB},
	})
	coretest.Must(t, err)
	now, err = r.SDK.DiskView(t.Context(), oxide.DiskViewParams{
		Disk: oxide.NameOrId(old.Name), Project: coretest.Project,
	})
	coretest.Must(t, err)
	return old, now
}

// withHalfDeleted shows the rig's rack as if it had failed to delete a disk.
func withHalfDeleted(t *testing.T, r *coretest.Rig, disk *oxide.Disk) *coretest.Rig {
	t.Helper()
	other, sim := *r, *r.Sim
	sim.Host = r.HalfDeleted(t, disk)
	other.Sim = &sim
	return &other
}

// The old disk of a grown volume, which the rack failed to delete, is no orphan: it is deleted with the volume. An
// orphaned volume is one orphan, which can be deleted. The half-deleted disk of a deleted volume does not hide that an
// orchestrator's volume is missing.
func TestOrphansOfGrownVolumes(t *testing.T) {
	r := coretest.New(t)
	used, orphan, deleted := r.Create(t, "used"), r.Create(t, "orphan"), r.Create(t, "deleted")
	old, _ := grow(t, r, orphan)
	half := r.Disk(t, deleted)
	coretest.Must(t, r.Delete(t, deleted))
	known := &fakeInventory{}
	known.has.Volumes = volumes(used, deleted)
	r = withHalfDeleted(t, withHalfDeleted(t, r, old), half)
	c := cleaner(t, r, known)
	found := find(t, c)
	if diff := cmp.Diff(map[string]string{orphan: ""}, kept(found)); diff != "" || len(found.Orphans) != 1 {
		t.Fatalf("orphans (-want +got):\n%s\n%+v", diff, found.Orphans)
	}
	if len(found.Missing) != 1 || found.Missing[0].ID != deleted {
		t.Errorf("missing: %+v, want %s", found.Missing, deleted)
	}
	if removed, err := c.Delete(t.Context(), []string{orphan}); err != nil || len(removed) != 1 {
		t.Errorf("deleted %v, %v", removed, err)
	}
	if _, err := c.Racks[0].DiskByID(t.Context(), rack.DiskID(old.Id)); !errors.Is(err, rack.ErrNotFound) {
		t.Errorf("the old disk was not deleted: %v", err)
	}
}

// Orphans are this cluster's disks and snapshots that the orchestrator does not know. What may not be deleted says why.
func TestOrphans(t *testing.T) {
	r := coretest.New(t)
	used, orphan, attached := r.Create(t, "used"), r.Create(t, "orphan"), r.Create(t, "attached")
	coretest.Must(t, r.Publish(t, attached, r.Node(t, "node-a")))
	pending := r.Create(t, "pvc-123")
	snapshot, err := r.CreateSnapshot(t.Context(), &csi.CreateSnapshotRequest{SourceVolumeId: used, Name: "monday"})
	coretest.Must(t, err)
	snapshotID := snapshot.GetSnapshot().GetSnapshotId()
	// Of another cluster, of a user, and with a description that a user has copied.
	r.UserDisk(t, coretest.Project, "theirs", rack.NewDescription("other", "x", "").Encode())
	r.UserDisk(t, coretest.Project, "by-hand", "mine")
	copied := r.UserDisk(t, coretest.Project, "copied", rack.NewDescription(coretest.Cluster, "orphan", "").Encode()).Id

	known := &fakeInventory{}
	known.has.Volumes = append(volumes(used, coretest.NoVolumeID),
		orchestrator.KnownObject{CSIName: "pvc-123", Object: "PersistentVolumeClaim default/data"})
	c := cleaner(t, r, known)
	found := find(t, c)
	want := map[string]string{
		orphan: "", snapshotID: "", attached: "it is attached to instance " + r.Node(t, "node-a"),
		copied: "it is not certainly this plugin's: its name does not follow from its description",
	}
	if diff := cmp.Diff(want, kept(found)); diff != "" {
		t.Errorf("orphans (-want +got):\n%s", diff)
	}
	if len(found.Missing) != 1 || found.Missing[0].ID != coretest.NoVolumeID || found.QuotaBytes() != 4*coretest.GiB {
		t.Errorf("missing %+v, quota %d", found.Missing, found.QuotaBytes())
	}

	c.Now = time.Now
	for id, why := range kept(find(t, c)) {
		if why == "" {
			t.Errorf("%s is young and not kept", id)
		}
	}
	c = cleaner(t, r, known)
	for _, ids := range [][]string{{orphan, attached}, {orphan, copied}, {orphan, used}, {orphan, pending}} {
		if deleted, err := c.Delete(t.Context(), ids); err == nil || len(deleted) > 0 {
			t.Errorf("%v: deleted %v, %v", ids, deleted, err)
		}
	}
	deleted, err := c.Delete(t.Context(), []string{orphan, snapshotID})
	if err != nil || len(deleted) != 2 {
		t.Errorf("deleted %v, %v", deleted, err)
	}
	if left := kept(find(t, c)); len(left) != 2 {
		t.Errorf("left: %v", left)
	}
	for _, id := range []string{used, pending, attached} {
		r.Disk(t, id)
	}
}

// What is in a state that this version does not know is kept, and hides no other orphan.
func TestOrphansInAnUnknownState(t *testing.T) {
	r := coretest.New(t)
	used, orphan, unknown := r.Create(t, "used"), r.Create(t, "orphan"), r.Create(t, "unknown")
	snapshot, err := r.CreateSnapshot(t.Context(), &csi.CreateSnapshotRequest{SourceVolumeId: used, Name: "monday"})
	coretest.Must(t, err)
	snapshotID := snapshot.GetSnapshot().GetSnapshotId()
	coretest.Must(t, r.Sim.Show(t.Context(), unknown, map[string]any{"disk_type": "replicated"}))
	coretest.Must(t, r.Sim.Show(t.Context(), snapshotID, map[string]any{"state": "thawing"}))
	known := &fakeInventory{}
	known.has.Volumes = volumes(used)
	c := cleaner(t, r, known)
	want := map[string]string{
		orphan: "", snapshotID: `it is in state "thawing"`,
		unknown: `it has the type "replicated", which this version of the plugin does not know`,
	}
	if diff := cmp.Diff(want, kept(find(t, c))); diff != "" {
		t.Errorf("orphans (-want +got):\n%s", diff)
	}
	coretest.Must(t, r.Sim.Show(t.Context(), unknown, map[string]any{"state": map[string]any{"state": "hibernating"}}))
	if why := kept(find(t, c))[unknown]; !strings.Contains(why, "hibernating") {
		t.Errorf("the disk is kept because %q", why)
	}
	for _, id := range []string{unknown, snapshotID} {
		if deleted, err := c.Delete(t.Context(), []string{id}); err == nil || len(deleted) > 0 {
			t.Errorf("deleted %v, %v", deleted, err)
		}
	}
}

// An orchestrator that cannot be read completely, one that knows no disk at all, and a rack whose lists end early have
// no orphans to delete.
func TestOrphansAreNotGuessed(t *testing.T) {
	r := coretest.New(t)
	orphan := r.Create(t, "orphan")
	for name, known := range map[string]*fakeInventory{
		"incomplete":      {err: errors.New("forbidden")},
		"another cluster": {},
	} {
		if deleted, err := cleaner(t, r, known).Delete(t.Context(), []string{orphan}); err == nil || len(deleted) > 0 {
			t.Errorf("%s: deleted %v, %v", name, deleted, err)
		}
	}
	used := r.Create(t, "used")
	known := &fakeInventory{}
	known.has.Volumes = volumes(used)
	for _, operation := range []string{"disk_list", "snapshot_list", "anti_affinity_group_list"} {
		// More than once: a request that an earlier round has cancelled may still arrive.
		_, err := r.Sim.Inject(
			t.Context(),
			simtest.Fault{Operation: operation, Kind: simtest.FaultStatus, Status: 500, Count: new(9)},
		)
		coretest.Must(t, err)
		if deleted, err := cleaner(t, r, known).Delete(t.Context(), []string{orphan}); err == nil || len(deleted) > 0 {
			t.Errorf("%s: deleted %v, %v", operation, deleted, err)
		}
	}
	coretest.Must(t, r.Sim.ClearFaults(t.Context()))
	// The orchestrator gets its object between the list and the deletion.
	known.has.Volumes = volumes(used, orphan)
	if deleted, err := cleaner(t, r, known).Delete(t.Context(), []string{orphan}); err == nil || len(deleted) > 0 {
		t.Errorf("known again: deleted %v, %v", deleted, err)
	}
	r.Disk(t, orphan)
}

// A disk that another cluster has adopted is not ours, and one that we have adopted is. A record is an orphan when its
// disk is gone.
func TestOrphansOfAdoptions(t *testing.T) {
	r := coretest.New(t)
	used, away := r.Create(t, "used"), r.Create(t, "away")
	client := newRack(t, r)
	record := func(disk, cluster string) {
		_, err := client.CreateRecord(t.Context(), "csi-adopt-"+disk,
			fmt.Sprintf(`{"v":1,"cluster":%q,"from":"x","disk":%q}`, cluster, disk))
		coretest.Must(t, err)
	}
	record(away, "other")
	record(coretest.NoVolumeID, coretest.Cluster)
	known := &fakeInventory{}
	known.has.Volumes = volumes(used)
	c := cleaner(t, r, known)
	found := find(t, c)
	if len(found.Orphans) != 1 || found.Orphans[0].Kind != diagnose.KindRecord || found.Orphans[0].Keep != "" {
		t.Fatalf("%+v", found.Orphans)
	}
	if deleted, err := c.Delete(t.Context(), []string{found.Orphans[0].ID}); err != nil || len(deleted) != 1 {
		t.Errorf("%v, %v", deleted, err)
	}
	if found := find(t, c); len(found.Orphans) > 0 {
		t.Errorf("%+v", found.Orphans)
	}
}

// The number of calls follows from the size of the lists alone, and nothing is changed. 500 fit on a page, so 10,000
// volumes take 23 calls: at 50 ms a call little more than a second.
func TestOrphansAreFoundInOnePass(t *testing.T) {
	r := coretest.New(t)
	const count = 1100
	var ids []string
	for i := range count {
		disk := r.UserDisk(
			t,
			coretest.Project,
			fmt.Sprintf("csi-x-%d", i),
			rack.NewDescription(coretest.Cluster, fmt.Sprint(i), "").Encode(),
		)
		if i%2 == 0 {
			ids = append(ids, disk.Id)
		}
	}
	known := &fakeInventory{}
	known.has.Volumes = volumes(ids...)
	c := cleaner(t, r, known)
	r.ClearCalls(t)
	if found := find(t, c); len(found.Orphans) != count/2 {
		t.Errorf("%d orphans, want %d", len(found.Orphans), count/2)
	}
	total := 0
	for operation, calls := range r.Calls(t) {
		total += calls
		if !strings.HasSuffix(operation, "_list") && operation != "ping" && operation != "project_view" {
			t.Errorf("%d calls of %s", calls, operation)
		}
	}
	// Three pages of disks and one that ends the list, one page of snapshots and one of records, the project, two pings.
	if total > 9 {
		t.Errorf("%d calls: %v", total, r.Calls(t))
	}
}

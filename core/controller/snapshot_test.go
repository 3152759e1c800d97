// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/uuid"
	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
	"github.com/oxidecomputer/oxide-csi-plugin/test/coretest"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

func fromSnapshot(id string) *csi.VolumeContentSource {
	return &csi.VolumeContentSource{
		Type: &csi.VolumeContentSource_Snapshot{Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: id}},
	}
}

func fromVolume(id string) *csi.VolumeContentSource {
	return &csi.VolumeContentSource{
		Type: &csi.VolumeContentSource_Volume{Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: id}},
	}
}

// from is a request for a volume of the same size as its source.
func from(name string, source *csi.VolumeContentSource) *csi.CreateVolumeRequest {
	req := coretest.CreateRequest(name)
	req.CapacityRange, req.VolumeContentSource = nil, source
	return req
}

// snapshot makes a snapshot of a volume and returns its ID.
func (r *rig) snapshot(t *testing.T, name, volumeID string) string {
	t.Helper()
	resp, err := r.CreateSnapshot(t.Context(), &csi.CreateSnapshotRequest{Name: name, SourceVolumeId: volumeID})
	r.Must(t, err)
	return resp.GetSnapshot().GetSnapshotId()
}

// snapshots returns the names of the rack's snapshots.
func (r *rig) snapshots(t *testing.T) []string {
	t.Helper()
	all, err := r.SDK.SnapshotListAllPages(t.Context(), oxide.SnapshotListParams{Project: coretest.Project})
	r.Must(t, err)
	var names []string
	for _, snapshot := range all {
		names = append(names, string(snapshot.Name))
	}
	return names
}

// userSnapshot makes a snapshot as a user would by hand.
func (r *rig) userSnapshot(t *testing.T, project, name, description, diskID string) string {
	t.Helper()
	snapshot, err := r.SDK.SnapshotCreate(t.Context(), oxide.SnapshotCreateParams{
		Project: oxide.NameOrId(
			project,
		),
		Body: &oxide.SnapshotCreate{Name: oxide.Name(name), Description: description, Disk: oxide.NameOrId(diskID)},
	})
	r.Must(t, err)
	return snapshot.Id
}

func TestCreateSnapshot(t *testing.T) {
	r := newRig(t)
	volume := r.Create(t, "v")
	r.ClearCalls(t)
	req := &csi.CreateSnapshotRequest{
		Name: "s", SourceVolumeId: volume, AccessibilityRequirements: coretest.RequireRacks("default"),
		Parameters: map[string]string{"csi.storage.k8s.io/volumesnapshot/name": "x"},
	}
	got, err := r.CreateSnapshot(t.Context(), req)
	r.Must(t, err)
	r.WantCalls(t, map[string]int{"disk_view": 1, "snapshot_create": 1})
	made := got.GetSnapshot().GetCreationTime()
	if age := time.Since(made.AsTime()); age < 0 || age > time.Minute {
		t.Errorf("creation time %s ago", age)
	}
	coretest.WantSame(t, got, &csi.CreateSnapshotResponse{Snapshot: &csi.Snapshot{
		SnapshotId: got.GetSnapshot().
			GetSnapshotId(),
		SourceVolumeId:     volume,
		SizeBytes:          coretest.GiB,
		CreationTime:       made,
		ReadyToUse:         true,
		AccessibleTopology: []*csi.Topology{{Segments: map[string]string{"topology.csi.oxide.computer/rack": "default"}}},
	}})
	again, err := r.CreateSnapshot(t.Context(), req)
	r.Must(t, err)
	coretest.WantSame(t, again, got)

	single, err := r.GetSnapshot(
		t.Context(),
		&csi.GetSnapshotRequest{SnapshotId: strings.ToUpper(got.GetSnapshot().GetSnapshotId())},
	)
	r.Must(t, err)
	coretest.WantSame(t, single.GetSnapshot(), got.GetSnapshot())

	// The same name for another volume fails. The same call after the volume's deletion succeeds.
	other := r.Create(t, "other")
	_, err = r.CreateSnapshot(t.Context(), &csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: other})
	coretest.WantCode(t, err, codes.AlreadyExists, volume)
	r.Must(t, r.Delete(t, volume))
	again, err = r.CreateSnapshot(t.Context(), req)
	r.Must(t, err)
	coretest.WantSame(t, again, got)
	_, err = r.CreateSnapshot(t.Context(), &csi.CreateSnapshotRequest{Name: "new", SourceVolumeId: volume})
	coretest.WantCode(t, err, codes.NotFound, volume)
}

func TestCreateSnapshotRejects(t *testing.T) {
	for _, test := range []struct {
		name string
		// prepare returns the source.
		prepare  func(t *testing.T, r *rig) string
		change   func(*csi.CreateSnapshotRequest)
		code     codes.Code
		mentions string
	}{
		{"a volume ID that is not a UUID", func(*testing.T, *rig) string { return "v" }, nil, codes.NotFound, `"v"`},
		{"an unknown volume", func(*testing.T, *rig) string { return uuid.NewString() }, nil, codes.NotFound, ""},
		{"an unknown parameter", func(t *testing.T, r *rig) string { return r.Create(t, "v") }, func(req *csi.CreateSnapshotRequest) {
			req.Parameters = map[string]string{"compress": "true"}
		}, codes.InvalidArgument, "compress"},
		{"another rack", func(t *testing.T, r *rig) string { return r.Create(t, "v") }, func(req *csi.CreateSnapshotRequest) {
			req.AccessibilityRequirements = coretest.RequireRacks("west")
		}, codes.ResourceExhausted, "west"},
		{"a local disk", func(t *testing.T, r *rig) string {
			req := coretest.CreateRequest("v")
			req.Parameters = map[string]string{rpc.ParameterDiskType: "local"}
			resp, err := r.CreateVolume(t.Context(), req)
			r.Must(t, err)
			return resp.GetVolume().GetVolumeId()
		}, nil, codes.FailedPrecondition, "local"},
		{"a read-only disk", func(t *testing.T, r *rig) string {
			req := from("r", fromSnapshot(r.snapshot(t, "before", r.Create(t, "v"))))
			req.Parameters = map[string]string{rpc.KeyReadOnly: "true"}
			resp, err := r.CreateVolume(t.Context(), req)
			r.Must(t, err)
			return resp.GetVolume().GetVolumeId()
		}, nil, codes.FailedPrecondition, "read-only"},
		{"a faulted disk", func(t *testing.T, r *rig) string {
			id := r.Create(t, "v")
			r.Must(t, r.Sim.SetDiskState(t.Context(), id, "faulted"))
			return id
		}, nil, codes.FailedPrecondition, "faulted"},
		{"a disk of another project", func(t *testing.T, r *rig) string {
			r.otherProject(t)
			return r.UserDisk(t, "other", "theirs", "").Id
		}, nil, codes.FailedPrecondition, "another project"},
		{"a user's snapshot of that name", func(t *testing.T, r *rig) string {
			id := r.Create(t, "v")
			r.userSnapshot(t, coretest.Project, diskname.ForSnapshot(coretest.Cluster, "s"), "mine", id)
			return id
		}, nil, codes.AlreadyExists, `"mine"`},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := newRig(t)
			req := &csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: test.prepare(t, r)}
			if test.change != nil {
				test.change(req)
			}
			before := r.snapshots(t)
			_, err := r.CreateSnapshot(t.Context(), req)
			coretest.WantCode(t, err, test.code, test.mentions)
			coretest.WantSame(t, r.snapshots(t), before)
		})
	}
}

// A volume from the snapshot of a user's disk has that disk in its lineage.
func TestSnapshotOfUserDisk(t *testing.T) {
	r := newRig(t)
	disk := r.UserDisk(t, coretest.Project, "mine", "").Id
	snapshot := r.snapshot(t, "s", disk)
	restored, err := r.CreateVolume(t.Context(), from("r", fromSnapshot(snapshot)))
	r.Must(t, err)
	r.wantLineage(t, restored.GetVolume().GetVolumeId(), disk)
}

func (r *rig) wantLineage(t *testing.T, id string, want ...string) {
	t.Helper()
	description, _ := rack.ParseDescription(r.Disk(t, id).Description)
	coretest.WantSame(t, description.Lineage, want)
}

// After a fault in the create, a retry leads to exactly one snapshot.
func TestCreateSnapshotThroughFaults(t *testing.T) {
	for _, test := range []struct {
		kind string
		code int
		want codes.Code
		// made reports that the rack makes the snapshot in spite of the fault.
		made bool
	}{
		{simtest.FaultLost, 0, codes.OK, true},
		{simtest.FaultReset, 0, codes.Unavailable, false},
		{simtest.FaultStatus, 400, codes.FailedPrecondition, false},
		{simtest.FaultStatus, 401, codes.Unavailable, false},
		{simtest.FaultStatus, 403, codes.Unavailable, false},
		{simtest.FaultStatus, 500, codes.Unavailable, false},
		{simtest.FaultStatus, 503, codes.Unavailable, false},
		{simtest.FaultStatus, 507, codes.ResourceExhausted, false},
	} {
		t.Run(fmt.Sprint(test.kind, test.code), func(t *testing.T) {
			r := newRig(t)
			volume := r.Create(t, "v")
			r.Inject(t, "snapshot_create", test.kind, test.code)
			req := &csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: volume}
			_, err := r.CreateSnapshot(t.Context(), req)
			if code := status.Code(err); code != test.want {
				t.Errorf("code %s, want %s: %v", code, test.want, err)
			}
			if got := len(r.snapshots(t)); got != map[bool]int{true: 1}[test.made] {
				t.Errorf("%d snapshots", got)
			}
			r.snapshot(t, "s", volume)
			if got := len(r.snapshots(t)); got != 1 {
				t.Errorf("%d snapshots after the retry", got)
			}
		})
	}
}

// A repeated call returns the existing snapshot, also if a new one could not be made.
func TestRepeatedCreateSnapshot(t *testing.T) {
	for name, spoil := range map[string]func(t *testing.T, r *rig, volume string){
		"on a full quota":      func(t *testing.T, r *rig, _ string) { r.setQuota(t, 1) },
		"without capacity":     func(t *testing.T, r *rig, _ string) { r.Inject(t, "snapshot_create", simtest.FaultStatus, 507) },
		"while the rack fails": func(t *testing.T, r *rig, _ string) { r.Inject(t, "snapshot_create", simtest.FaultStatus, 500) },
		"of a faulted disk":    func(t *testing.T, r *rig, v string) { r.Must(t, r.Sim.SetDiskState(t.Context(), v, "faulted")) },
		"of a deleted disk":    func(t *testing.T, r *rig, v string) { r.Must(t, r.Delete(t, v)) },
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			volume := r.Create(t, "v")
			id := r.snapshot(t, "s", volume)
			spoil(t, r, volume)
			if again := r.snapshot(t, "s", volume); again != id {
				t.Errorf("another snapshot %s, not %s", again, id)
			}
		})
	}
}

// While the rack makes a snapshot of a detached disk, the disk is in maintenance. A repeated call that cannot wait
// until that ends returns the snapshot all the same.
func TestRepeatedCreateSnapshotWhileTheDiskIsInMaintenance(t *testing.T) {
	r := newRig(t)
	volume := r.Create(t, "v")
	made := r.snapshot(t, "s", volume)
	r.Must(t, r.Sim.SetDiskState(t.Context(), volume, "maintenance"))
	ctx := coretest.WithTimeout(t, 2100*time.Millisecond) // real time: the call waits for a tenth of a second of it
	again, err := r.CreateSnapshot(ctx, &csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: volume})
	r.Must(t, err)
	coretest.WantSame(t, again.GetSnapshot().GetSnapshotId(), made)
}

// While the rack makes another snapshot of the disk it answers 409. The call retries until its deadline.
func TestCreateSnapshotWaitsForAnother(t *testing.T) {
	r := newRig(t)
	volume := r.Create(t, "v")
	_, err := r.Sim.Inject(
		t.Context(),
		simtest.Fault{
			Operation: "snapshot_create",
			Kind:      simtest.FaultStatus,
			Status:    409,
			ErrorCode: "Conflict",
			Message:   "volume repair lock",
		},
	)
	r.Must(t, err)
	r.snapshot(t, "s", volume)
	_, err = r.Sim.Inject(
		t.Context(),
		simtest.Fault{
			Operation: "snapshot_create",
			Kind:      simtest.FaultStatus,
			Status:    409,
			ErrorCode: "Conflict",
			Message:   "volume repair lock",
			Count:     new(0),
		},
	)
	r.Must(t, err)
	ctx, cancel := context.WithTimeout(
		t.Context(),
		2500*time.Millisecond,
	) // real time: the call waits for half a second of it
	defer cancel()
	_, err = r.CreateSnapshot(ctx, &csi.CreateSnapshotRequest{Name: "s2", SourceVolumeId: volume})
	coretest.WantCode(t, err, codes.Unavailable, "volume repair lock")
}

func TestDeleteSnapshot(t *testing.T) {
	r := newRig(t)
	volume := r.Create(t, "v")
	id := r.snapshot(t, "s", volume)
	restored, err := r.CreateVolume(t.Context(), from("r", fromSnapshot(id)))
	r.Must(t, err)
	r.ClearCalls(t)
	for range 2 {
		_, err := r.DeleteSnapshot(t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: id})
		r.Must(t, err)
	}
	r.WantCalls(t, map[string]int{"snapshot_view": 2, "snapshot_delete": 1, "project_view": 1})
	r.Disk(t, restored.GetVolume().GetVolumeId())
	_, err = r.DeleteSnapshot(t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: "none"})
	r.Must(t, err)
	_, err = r.GetSnapshot(t.Context(), &csi.GetSnapshotRequest{SnapshotId: id})
	coretest.WantCode(t, err, codes.NotFound, id)

	mine := r.userSnapshot(t, coretest.Project, "mine", "", volume)
	_, err = r.DeleteSnapshot(t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: mine})
	coretest.WantCode(t, err, codes.FailedPrecondition, "was not made by this plugin")
	theirs := r.userSnapshot(
		t,
		coretest.Project,
		"theirs",
		rack.NewSnapshotDescription("another", "s", nil).Encode(),
		volume,
	)
	_, err = r.DeleteSnapshot(t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: theirs})
	coretest.WantCode(t, err, codes.FailedPrecondition, `"another"`)
	if got := len(r.snapshots(t)); got != 2 {
		t.Errorf("%d snapshots, want the two of others", got)
	}
}

func TestDeleteSnapshotThroughFaults(t *testing.T) {
	for _, test := range []struct {
		kind string
		code int
		want codes.Code
	}{
		{simtest.FaultLost, 0, codes.Unavailable},
		{simtest.FaultReset, 0, codes.Unavailable},
		{simtest.FaultStatus, 403, codes.PermissionDenied},
		{simtest.FaultStatus, 500, codes.Internal},
		{simtest.FaultStatus, 503, codes.Unavailable},
	} {
		t.Run(fmt.Sprint(test.kind, test.code), func(t *testing.T) {
			r := newRig(t)
			id := r.snapshot(t, "s", r.Create(t, "v"))
			r.Inject(t, "snapshot_delete", test.kind, test.code)
			_, err := r.DeleteSnapshot(t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: id})
			coretest.WantCode(t, err, test.want)
			_, err = r.DeleteSnapshot(t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: id})
			r.Must(t, err)
			if left := r.snapshots(t); len(left) != 0 {
				t.Errorf("snapshots left: %v", left)
			}
		})
	}
}

// A token without a role gets 404 for every snapshot and empty lists. The plugin must not conclude that all are
// deleted.
func TestTokenWithoutRoleSeesNoSnapshots(t *testing.T) {
	r := newRig(t)
	volume := r.Create(t, "v")
	id := r.snapshot(t, "s", volume)
	role, err := r.Sim.NewToken(t.Context(), "none")
	r.Must(t, err)
	r.Token.Store(role)
	_, err = r.DeleteSnapshot(t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: id})
	coretest.WantCode(t, err, codes.Unavailable, "cannot be believed")
	_, err = r.GetSnapshot(t.Context(), &csi.GetSnapshotRequest{SnapshotId: id})
	coretest.WantCode(t, err, codes.Unavailable)
	_, err = r.CreateVolume(t.Context(), from("r", fromSnapshot(id)))
	coretest.WantCode(t, err, codes.Unavailable)
	_, err = r.CreateVolume(t.Context(), from("c", fromVolume(volume)))
	coretest.WantCode(t, err, codes.Unavailable)
	_, err = r.ListSnapshots(t.Context(), &csi.ListSnapshotsRequest{SnapshotId: id})
	coretest.WantCode(t, err, codes.Unavailable)
	for name, list := range map[string]func() error{
		"ListVolumes":   func() error { _, err := r.ListVolumes(t.Context(), &csi.ListVolumesRequest{}); return err },
		"ListSnapshots": func() error { _, err := r.ListSnapshots(t.Context(), &csi.ListSnapshotsRequest{}); return err },
	} {
		if code := status.Code(list()); code == codes.OK {
			t.Errorf("%s: an empty list", name)
		}
	}
}

func TestRestore(t *testing.T) {
	r := newRig(t)
	req := coretest.CreateRequest("v")
	req.Parameters = map[string]string{rpc.KeyBlockSize: "512"}
	source, err := r.CreateVolume(t.Context(), req)
	r.Must(t, err)
	volume := source.GetVolume().GetVolumeId()
	snapshot := r.snapshot(t, "s", volume)
	for _, test := range []struct {
		name     string
		capacity *csi.CapacityRange
		params   map[string]string
		want     int64
		code     codes.Code
		mentions string
	}{
		{name: "same-size", want: coretest.GiB},
		{name: "larger", capacity: &csi.CapacityRange{RequiredBytes: 2*coretest.GiB + 1}, want: 3 * coretest.GiB},
		{name: "limit-below", capacity: &csi.CapacityRange{LimitBytes: coretest.GiB - 1}, code: codes.OutOfRange, mentions: "volume_content_source"},
		{name: "read-only", params: map[string]string{rpc.KeyReadOnly: "true"}, want: coretest.GiB},
		{name: "read-only-larger", capacity: &csi.CapacityRange{RequiredBytes: 2 * coretest.GiB}, params: map[string]string{rpc.KeyReadOnly: "true"}, code: codes.OutOfRange, mentions: "size of its snapshot"},
		{name: "local", params: map[string]string{rpc.ParameterDiskType: "local"}, code: codes.InvalidArgument, mentions: "local"},
	} {
		t.Run(test.name, func(t *testing.T) {
			r.ClearCalls(t)
			req := from(test.name, fromSnapshot(snapshot))
			req.CapacityRange, req.Parameters = test.capacity, test.params
			got, err := r.CreateVolume(t.Context(), req)
			if test.code != codes.OK {
				coretest.WantCode(t, err, test.code, test.mentions)
				return
			}
			r.Must(t, err)
			r.WantCalls(t, map[string]int{"anti_affinity_group_view": 1, "snapshot_view": 1, "disk_create": 1})
			id := got.GetVolume().GetVolumeId()
			if got.GetVolume().GetCapacityBytes() != test.want || got.GetVolume().GetVolumeContext()[rpc.KeyBlockSize] != "512" {
				t.Errorf("got %v", got)
			}
			coretest.WantSame(t, got.GetVolume().GetContentSource(), fromSnapshot(snapshot))
			disk := r.Disk(t, id)
			if disk.SnapshotId != snapshot || *disk.ReadOnly != (test.params != nil) {
				t.Errorf("the rack shows %+v", disk)
			}
			r.wantLineage(t, id, volume)
			again, err := r.CreateVolume(t.Context(), req)
			r.Must(t, err)
			coretest.WantSame(t, again, got)
		})
	}
	// With the same name and another source, or none, the call fails.
	_, err = r.CreateVolume(t.Context(), coretest.CreateRequest("same-size"))
	coretest.WantCode(t, err, codes.AlreadyExists, snapshot)
	_, err = r.CreateVolume(t.Context(), from("same-size", fromSnapshot(r.snapshot(t, "s2", volume))))
	coretest.WantCode(t, err, codes.AlreadyExists, snapshot)
	_, err = r.CreateVolume(t.Context(), from("v", fromSnapshot(snapshot)))
	coretest.WantCode(t, err, codes.AlreadyExists, "nothing")
	req = from("same-size", fromSnapshot(snapshot))
	req.Parameters = map[string]string{rpc.KeyReadOnly: "true"}
	_, err = r.CreateVolume(t.Context(), req)
	coretest.WantCode(t, err, codes.AlreadyExists, "read-only")
}

// A restore of a restore has both earlier disks in its lineage, because it may carry the filesystem of either.
func TestLineageOfRestores(t *testing.T) {
	r := newRig(t)
	first := r.Create(t, "first")
	second, err := r.CreateVolume(t.Context(), from("second", fromSnapshot(r.snapshot(t, "s1", first))))
	r.Must(t, err)
	third, err := r.CreateVolume(
		t.Context(),
		from("third", fromSnapshot(r.snapshot(t, "s2", second.GetVolume().GetVolumeId()))),
	)
	r.Must(t, err)
	r.wantLineage(t, third.GetVolume().GetVolumeId(), second.GetVolume().GetVolumeId(), first)
	node := r.Node(t, "node-a")
	resp, err := r.ControllerPublishVolume(
		t.Context(),
		&csi.ControllerPublishVolumeRequest{
			VolumeId:         third.GetVolume().GetVolumeId(),
			NodeId:           node,
			VolumeCapability: coretest.MountWriter(),
		},
	)
	r.Must(t, err)
	context := resp.GetPublishContext()
	if context[rpc.KeyOrigin] != rpc.OriginSnapshot ||
		context[rpc.KeyFSLineage] != second.GetVolume().GetVolumeId()+","+first {
		t.Errorf("publish context %v", context)
	}
}

func TestContentSource(t *testing.T) {
	r := newRig(t)
	volume := r.Create(t, "v")
	r.otherProject(t)
	foreign := r.userSnapshot(t, "other", "s", "", r.UserDisk(t, "other", "d", "").Id)
	for _, test := range []struct {
		name     string
		source   *csi.VolumeContentSource
		code     codes.Code
		mentions string
	}{
		{"neither", &csi.VolumeContentSource{}, codes.InvalidArgument, "volume_content_source"},
		{"snapshot without ID", fromSnapshot(""), codes.InvalidArgument, "snapshot_id"},
		{"volume without ID", fromVolume(""), codes.InvalidArgument, "volume_id"},
		{"snapshot ID too long", fromSnapshot(strings.Repeat("x", 129)), codes.InvalidArgument, "snapshot_id"},
		{"volume ID too long", fromVolume(strings.Repeat("x", 129)), codes.InvalidArgument, "volume_id"},
		{"snapshot ID that is not a UUID", fromSnapshot("s"), codes.NotFound, `"s"`},
		{"volume ID that is not a UUID", fromVolume("v"), codes.NotFound, `"v"`},
		{"unknown snapshot", fromSnapshot(coretest.NoVolumeID), codes.NotFound, coretest.NoVolumeID},
		{"unknown volume", fromVolume(coretest.NoVolumeID), codes.NotFound, coretest.NoVolumeID},
		{"a volume's ID as snapshot", fromSnapshot(volume), codes.NotFound, volume},
		{"snapshot of another project", fromSnapshot(foreign), codes.FailedPrecondition, "another project"},
	} {
		t.Run(test.name, func(t *testing.T) {
			_, err := r.CreateVolume(t.Context(), from("new", test.source))
			coretest.WantCode(t, err, test.code, test.mentions)
			if got := r.Volumes(t); len(got) != 1 {
				t.Errorf("%d volumes", len(got))
			}
		})
	}
	// A repeated call after the deletion of the source returns the existing volume.
	snapshot := r.snapshot(t, "s", volume)
	for name, source := range map[string]*csi.VolumeContentSource{"restored": fromSnapshot(snapshot), "copied": fromVolume(volume)} {
		got, err := r.CreateVolume(t.Context(), from(name, source))
		r.Must(t, err)
		if name == "restored" {
			_, err = r.DeleteSnapshot(t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: snapshot})
		} else {
			err = r.Delete(t, volume)
		}
		r.Must(t, err)
		again, err := r.CreateVolume(t.Context(), from(name, source))
		r.Must(t, err)
		coretest.WantSame(t, again, got)
	}
}

func TestReadOnlyNeedsASnapshot(t *testing.T) {
	r := newRig(t)
	volume := r.Create(t, "v")
	for _, source := range []*csi.VolumeContentSource{nil, fromVolume(volume)} {
		req := from("r", source)
		req.Parameters = map[string]string{rpc.KeyReadOnly: "true"}
		_, err := r.CreateVolume(t.Context(), req)
		coretest.WantCode(t, err, codes.InvalidArgument, "snapshot")
	}
}

func TestClone(t *testing.T) {
	r := newRig(t)
	volume := r.Create(t, "v")
	r.ClearCalls(t)
	req := from("copy", fromVolume(volume))
	req.CapacityRange = &csi.CapacityRange{RequiredBytes: 2 * coretest.GiB}
	got, err := r.CreateVolume(t.Context(), req)
	r.Must(t, err)
	r.WantCalls(t, map[string]int{
		"anti_affinity_group_view": 1, "disk_view": 2, "snapshot_create": 1, "disk_create": 1, "snapshot_delete": 1,
	})
	id := got.GetVolume().GetVolumeId()
	coretest.WantSame(t, got.GetVolume().GetContentSource(), fromVolume(volume))
	r.wantLineage(t, id, volume)
	if left := r.snapshots(t); len(left) != 0 {
		t.Errorf("snapshots left: %v", left)
	}
	again, err := r.CreateVolume(t.Context(), req)
	r.Must(t, err)
	coretest.WantSame(t, again, got)
	single, err := r.ControllerGetVolume(t.Context(), &csi.ControllerGetVolumeRequest{VolumeId: id})
	r.Must(t, err)
	coretest.WantSame(t, single.GetVolume().GetContentSource(), fromVolume(volume))

	_, err = r.CreateVolume(t.Context(), coretest.CreateRequest("copy"))
	coretest.WantCode(t, err, codes.AlreadyExists, volume)
	_, err = r.CreateVolume(t.Context(), from("copy", fromVolume(r.Create(t, "w"))))
	coretest.WantCode(t, err, codes.AlreadyExists, volume)
	_, err = r.CreateVolume(t.Context(), from("copy", fromSnapshot(r.snapshot(t, "s", volume))))
	coretest.WantCode(t, err, codes.AlreadyExists, volume)
}

// A repetition finds the copy also after the source has outgrown the limit of the request.
func TestCloneOfASourceThatHasGrown(t *testing.T) {
	r := newRig(t)
	volume := r.Create(t, "v")
	req := from("copy", fromVolume(volume))
	req.CapacityRange = &csi.CapacityRange{RequiredBytes: coretest.GiB, LimitBytes: coretest.GiB}
	got, err := r.CreateVolume(t.Context(), req)
	r.Must(t, err)
	_, err = r.ControllerExpandVolume(t.Context(), &csi.ControllerExpandVolumeRequest{
		VolumeId: volume, CapacityRange: &csi.CapacityRange{RequiredBytes: 2 * coretest.GiB},
	})
	r.Must(t, err)
	again, err := r.CreateVolume(t.Context(), req)
	r.Must(t, err)
	coretest.WantSame(t, again.GetVolume().GetVolumeId(), got.GetVolume().GetVolumeId())
	req.Name = "another"
	_, err = r.CreateVolume(t.Context(), req)
	coretest.WantCode(t, err, codes.OutOfRange)
}

// After a fault in any request no temporary snapshot stays, and a retry leads to exactly one copy.
func TestCloneThroughFaults(t *testing.T) {
	t.Parallel()
	for _, operation := range []string{"disk_view", "snapshot_create", "disk_create", "snapshot_delete", "snapshot_view"} {
		for _, fault := range []struct {
			kind string
			code int
		}{{simtest.FaultLost, 0}, {simtest.FaultReset, 0}, {simtest.FaultStatus, 403}, {simtest.FaultStatus, 500}, {simtest.FaultStatus, 503}, {simtest.FaultStatus, 507}} {
			t.Run(fmt.Sprint(operation, " ", fault.kind, fault.code), func(t *testing.T) {
				r := newRig(t)
				volume := r.Create(t, "v")
				r.Inject(t, operation, fault.kind, fault.code)
				_, err := r.CreateVolume(t.Context(), from("copy", fromVolume(volume)))
				code := status.Code(err)
				final := code == codes.ResourceExhausted || code == codes.PermissionDenied || code == codes.Internal
				if copies := len(r.Volumes(t)) - 1; final && copies > 0 {
					t.Errorf("%s is final for a provisioner, but there are %d copies: %v", code, copies, err)
				}
				if left := r.snapshots(t); len(left) > 0 && operation != "snapshot_delete" && code != codes.Unavailable {
					t.Errorf("%s, and snapshots are left: %v", code, left)
				}
				_, err = r.CreateVolume(t.Context(), from("copy", fromVolume(volume)))
				r.Must(t, err)
				if got := len(r.Volumes(t)); got != 2 {
					t.Errorf("%d volumes after the retry", got)
				}
				if left := r.snapshots(t); len(left) > 0 {
					t.Errorf("snapshots left after the retry: %v", left)
				}
			})
		}
	}
}

// A clone replaces the temporary snapshot of an earlier call, because that snapshot shows the disk at an earlier time.
func TestCloneReplacesAnOldSnapshot(t *testing.T) {
	r := newRig(t)
	volume := r.Create(t, "v")
	name := diskname.ForClone(coretest.Cluster, "copy")
	old := r.userSnapshot(
		t,
		coretest.Project,
		name,
		rack.NewTemporaryDescription(coretest.Cluster, "copy", []string{volume}).Encode(),
		volume,
	)
	got, err := r.CreateVolume(t.Context(), from("copy", fromVolume(volume)))
	r.Must(t, err)
	if disk := r.Disk(t, got.GetVolume().GetVolumeId()); disk.SnapshotId == old {
		t.Error("the old snapshot was used")
	}
	if left := r.snapshots(t); len(left) > 0 {
		t.Errorf("snapshots left: %v", left)
	}
	// A user's snapshot with the name of a temporary one is not deleted.
	mine := diskname.ForClone(coretest.Cluster, "second")
	r.userSnapshot(t, coretest.Project, mine, "mine", volume)
	_, err = r.CreateVolume(t.Context(), from("second", fromVolume(volume)))
	coretest.WantCode(t, err, codes.AlreadyExists, mine)
	coretest.WantSame(t, r.snapshots(t), []string{mine})
}

// The caller gives up while the disk is made. The temporary snapshot is deleted all the same.
func TestAbandonedCloneDeletesItsSnapshot(t *testing.T) {
	r := newRig(t)
	volume := r.Create(t, "v")
	r.abandon(t, "disk_create", func(ctx context.Context) error {
		_, err := r.CreateVolume(ctx, from("copy", fromVolume(volume)))
		return err
	})
	_, err := r.CreateVolume(t.Context(), from("copy", fromVolume(volume)))
	r.Must(t, err)
	if left := r.snapshots(t); len(left) > 0 {
		t.Errorf("snapshots left: %v", left)
	}
	if got := len(r.Volumes(t)); got != 2 {
		t.Errorf("%d volumes", got)
	}
}

// A repeated create answers the same although its source cannot be used any more.
func TestRepeatedCreateWithAnUnusableSource(t *testing.T) {
	r := newRig(t)
	source := r.Create(t, "v")
	clone := from("copy", fromVolume(source))
	first, err := r.CreateVolume(t.Context(), clone)
	r.Must(t, err)
	r.Must(t, r.Sim.SetDiskState(t.Context(), source, "faulted"))
	again, err := r.CreateVolume(t.Context(), clone)
	r.Must(t, err)
	coretest.WantSame(t, again, first)
	_, err = r.CreateVolume(t.Context(), from("another", fromVolume(source)))
	coretest.WantCode(t, err, codes.FailedPrecondition, "faulted")
}

func TestCloneRejects(t *testing.T) {
	r := newRig(t)
	local := coretest.CreateRequest("local")
	local.Parameters = map[string]string{rpc.ParameterDiskType: "local"}
	resp, err := r.CreateVolume(t.Context(), local)
	r.Must(t, err)
	_, err = r.CreateVolume(t.Context(), from("copy", fromVolume(resp.GetVolume().GetVolumeId())))
	coretest.WantCode(t, err, codes.FailedPrecondition, "local")
	readOnly := from("ro", fromSnapshot(r.snapshot(t, "s", r.Create(t, "v"))))
	readOnly.Parameters = map[string]string{rpc.KeyReadOnly: "true"}
	resp, err = r.CreateVolume(t.Context(), readOnly)
	r.Must(t, err)
	_, err = r.CreateVolume(t.Context(), from("copy", fromVolume(resp.GetVolume().GetVolumeId())))
	coretest.WantCode(t, err, codes.FailedPrecondition, "read-only")
	r.setQuota(t, 6*coretest.GiB) // two boot disks, three volumes, a snapshot
	_, err = r.CreateVolume(t.Context(), from("copy", fromVolume(r.volumeNamed(t, "v"))))
	coretest.WantCode(t, err, codes.ResourceExhausted, "Storage Limit Exceeded")
	r.setQuota(t, 7*coretest.GiB) // room for the temporary snapshot, not for the copy
	_, err = r.CreateVolume(t.Context(), from("copy", fromVolume(r.volumeNamed(t, "v"))))
	coretest.WantCode(t, err, codes.ResourceExhausted, "Storage Limit Exceeded")
	if left := r.snapshots(t); len(left) != 1 {
		t.Errorf("snapshots left: %v", left)
	}
}

// otherProject makes a second project with an instance.
func (r *rig) otherProject(t *testing.T) {
	t.Helper()
	_, err := r.Sim.AddInstance(t.Context(), "o", "other", "running")
	r.Must(t, err)
}

func (r *rig) setQuota(t *testing.T, quotaBytes int64) {
	t.Helper()
	r.Must(t, r.Sim.Set(t.Context(), simtest.Settings{QuotaBytes: &quotaBytes}))
}

func (r *rig) volumeNamed(t *testing.T, name string) string {
	t.Helper()
	disk, err := r.SDK.DiskView(
		t.Context(),
		oxide.DiskViewParams{Disk: oxide.NameOrId(diskname.ForVolume(coretest.Cluster, name)), Project: coretest.Project},
	)
	r.Must(t, err)
	return disk.Id
}

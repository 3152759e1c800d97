// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller_test

import (
	"context"
	"fmt"
	"strings"
	"testing"

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

func TestCreateVolume(t *testing.T) {
	r := newRig(t)
	req := coretest.CreateRequest("pvc-1")
	req.CapacityRange = &csi.CapacityRange{RequiredBytes: 2*coretest.GiB - 5}
	req.Parameters = map[string]string{
		rpc.KeyBlockSize: "512", rpc.ParameterPVCName: "data", rpc.ParameterPVCNamespace: "db",
		rpc.KeyMkfsOptions: "-m 1", rpc.KeyRootUID: "999", rpc.KeyRootMode: "0770", rpc.ParameterPrefixCO + "new": "x",
	}
	got, err := r.CreateVolume(t.Context(), req)
	r.Must(t, err)
	r.WantCalls(t, map[string]int{"anti_affinity_group_view": 1, "disk_create": 1})

	name := diskname.ForVolume(coretest.Cluster, "pvc-1")
	coretest.WantSame(t, got, &csi.CreateVolumeResponse{Volume: &csi.Volume{
		VolumeId:      got.GetVolume().GetVolumeId(),
		CapacityBytes: 2 * coretest.GiB,
		VolumeContext: map[string]string{
			"diskName":    name,
			"sizeBytes":   "2147483648",
			"blockSize":   "512",
			"mkfsOptions": "-m 1",
			"rootUid":     "999",
			"rootMode":    "0770",
		},
		AccessibleTopology: []*csi.Topology{{Segments: map[string]string{"topology.csi.oxide.computer/rack": "default"}}},
	}})
	disk := r.Disk(t, got.GetVolume().GetVolumeId())
	if string(disk.Name) != name || int(disk.BlockSize) != 512 || disk.DiskType != oxide.DiskTypeDistributed {
		t.Errorf("the rack shows %+v", disk)
	}
	owner, ours := rack.ParseDescription(disk.Description)
	if !ours || owner.Name != "pvc-1" || owner.PVC != "db/data" || owner.Cluster != coretest.Cluster {
		t.Errorf("description %s", disk.Description)
	}

	again, err := r.CreateVolume(t.Context(), req)
	r.Must(t, err)
	coretest.WantSame(t, again, got)
	if ids := r.Volumes(t); len(ids) != 1 {
		t.Errorf("%d disks, want 1", len(ids))
	}
}

// A volume that was created for raw block says so for good, also to a later caller that wants a filesystem.
func TestRawBlockVolumeSaysSo(t *testing.T) {
	r := newRig(t)
	req := coretest.CreateRequest("raw")
	block := coretest.MountWriter()
	block.AccessType = &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}
	req.VolumeCapabilities = []*csi.VolumeCapability{coretest.MountWriter(), block}
	created, err := r.CreateVolume(t.Context(), req)
	r.Must(t, err)
	id, node := created.GetVolume().GetVolumeId(), r.Node(t, "node-a")
	req.VolumeCapabilities = []*csi.VolumeCapability{coretest.MountWriter()}
	again, err := r.CreateVolume(t.Context(), req)
	r.Must(t, err)
	shown, err := r.ControllerGetVolume(t.Context(), &csi.ControllerGetVolumeRequest{VolumeId: id})
	r.Must(t, err)
	published, err := r.ControllerPublishVolume(
		t.Context(),
		&csi.ControllerPublishVolumeRequest{VolumeId: id, NodeId: node, VolumeCapability: coretest.MountWriter()},
	)
	r.Must(t, err)
	for what, context := range map[string]map[string]string{
		"CreateVolume":            created.GetVolume().GetVolumeContext(),
		"CreateVolume, repeated":  again.GetVolume().GetVolumeContext(),
		"ControllerGetVolume":     shown.GetVolume().GetVolumeContext(),
		"ControllerPublishVolume": published.GetPublishContext(),
	} {
		if context[rpc.KeyRawBlock] != "true" {
			t.Errorf("%s: %v", what, context)
		}
	}
}

// A repeated call can ask for raw block although the disk does not say so: an older version of this plugin made it.
func TestRawBlockOfAnExistingDisk(t *testing.T) {
	r := newRig(t)
	req := coretest.CreateRequest("raw")
	_, err := r.CreateVolume(t.Context(), req)
	r.Must(t, err)
	req.VolumeCapabilities[0].AccessType = &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}
	again, err := r.CreateVolume(t.Context(), req)
	r.Must(t, err)
	if context := again.GetVolume().GetVolumeContext(); context[rpc.KeyRawBlock] != "true" {
		t.Errorf("the volume context is %v", context)
	}
}

func TestCreateLocalVolume(t *testing.T) {
	r := newRig(t)
	req := coretest.CreateRequest("fast")
	req.Parameters = map[string]string{rpc.ParameterDiskType: "local"}
	got, err := r.CreateVolume(t.Context(), req)
	r.Must(t, err)
	if disk := r.Disk(t, got.GetVolume().GetVolumeId()); disk.DiskType != oxide.DiskTypeLocal || disk.BlockSize != 4096 {
		t.Errorf("the rack shows %+v", disk)
	}
	again, err := r.CreateVolume(t.Context(), req)
	r.Must(t, err)
	coretest.WantSame(t, again, got)
	req.Parameters[rpc.ParameterDiskType] = "distributed"
	_, err = r.CreateVolume(t.Context(), req)
	coretest.WantCode(t, err, codes.AlreadyExists, "distributed")
}

func TestCreateVolumeRejects(t *testing.T) {
	for _, test := range []struct {
		name     string
		change   func(*csi.CreateVolumeRequest)
		code     codes.Code
		mentions string
	}{
		{"larger than the largest disk", func(r *csi.CreateVolumeRequest) { r.CapacityRange.RequiredBytes = 1024 * coretest.GiB }, codes.OutOfRange, "1023 GiB"},
		{"larger than 2^62 bytes", func(r *csi.CreateVolumeRequest) { r.CapacityRange.RequiredBytes = 1<<62 + 1 }, codes.OutOfRange, ""},
		{"another rack", func(r *csi.CreateVolumeRequest) { r.AccessibilityRequirements = coretest.RequireRacks("west") }, codes.ResourceExhausted, "west"},
		{"an unknown segment", func(r *csi.CreateVolumeRequest) {
			r.AccessibilityRequirements = &csi.TopologyRequirement{Requisite: []*csi.Topology{{Segments: map[string]string{"zone": "z"}}}}
		}, codes.ResourceExhausted, "zone=z"},
		{"unknown parameter", func(r *csi.CreateVolumeRequest) { r.Parameters = map[string]string{"blocksize": "512"} }, codes.InvalidArgument, `"blocksize"`},
		{"unsupported block size", func(r *csi.CreateVolumeRequest) { r.Parameters = map[string]string{"blockSize": "1024"} }, codes.InvalidArgument, "blockSize"},
		{"mkfs options with a device", func(r *csi.CreateVolumeRequest) {
			r.Parameters = map[string]string{"mkfsOptions": "-J device=/dev/sda"}
		}, codes.InvalidArgument, "mkfsOptions"},
		{"mkfs options with blocks that are too small", func(r *csi.CreateVolumeRequest) {
			r.Parameters = map[string]string{"mkfsOptions": "-b 1024"}
		}, codes.InvalidArgument, "a smaller blockSize"},
		{"mkfs options with blocks that are too small for an encrypted disk", func(r *csi.CreateVolumeRequest) {
			r.Parameters = map[string]string{"mkfsOptions": "-b 2048", "blockSize": "512", "encryption": "luks2"}
		}, codes.InvalidArgument, "an encrypted disk has 4096"},
		{"mkfs options for a larger disk", func(r *csi.CreateVolumeRequest) {
			r.VolumeCapabilities[0].GetMount().FsType = "xfs"
			r.Parameters = map[string]string{"mkfsOptions": "-d agcount=64"}
		}, codes.InvalidArgument, "72 MiB"},
		{"local with another block size", func(r *csi.CreateVolumeRequest) {
			r.Parameters = map[string]string{"diskType": "local", "blockSize": "512"}
		}, codes.InvalidArgument, "blockSize"},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := newRig(t)
			req := coretest.CreateRequest("v")
			test.change(req)
			_, err := r.CreateVolume(t.Context(), req)
			coretest.WantCode(t, err, test.code, test.mentions)
			if ids := r.Volumes(t); len(ids) != 0 {
				t.Errorf("%d disks were made", len(ids))
			}
		})
	}
}

func TestCreateVolumeAcceptsTopology(t *testing.T) {
	for name, requirement := range map[string]*csi.TopologyRequirement{
		"empty, as Nomad sends it": {},
		"this rack":                coretest.RequireRacks("default"),
		"this rack and another":    coretest.RequireRacks("west", "default"),
		"preferred only":           {Preferred: coretest.RequireRacks("default").GetRequisite()},
		"another one is preferred": {Preferred: coretest.RequireRacks("elsewhere").GetRequisite()},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			req := coretest.CreateRequest("v")
			req.AccessibilityRequirements = requirement
			_, err := r.CreateVolume(t.Context(), req)
			r.Must(t, err)
		})
	}
}

func TestCreateVolumeConflicts(t *testing.T) {
	r := newRig(t)
	r.Create(t, "v")
	for _, test := range []struct {
		name     string
		change   func(*csi.CreateVolumeRequest)
		mentions string
	}{
		{"too small", func(r *csi.CreateVolumeRequest) { r.CapacityRange.RequiredBytes = 2 * coretest.GiB }, "was made with 1GiB, not 2GiB or more"},
		{"another block size", func(r *csi.CreateVolumeRequest) { r.Parameters = map[string]string{"blockSize": "512"} }, "4096"},
	} {
		t.Run(test.name, func(t *testing.T) {
			req := coretest.CreateRequest("v")
			test.change(req)
			_, err := r.CreateVolume(t.Context(), req)
			coretest.WantCode(t, err, codes.AlreadyExists, test.mentions)
		})
	}
	t.Run("made by a user", func(t *testing.T) {
		r.UserDisk(t, coretest.Project, diskname.ForVolume(coretest.Cluster, "mine"), "precious")
		_, err := r.CreateVolume(t.Context(), coretest.CreateRequest("mine"))
		coretest.WantCode(t, err, codes.AlreadyExists, "precious", "not made by this plugin")
	})
	t.Run("a hash collision with another volume's name", func(t *testing.T) {
		r.UserDisk(
			t,
			coretest.Project,
			diskname.ForVolume(coretest.Cluster, "x"),
			rack.NewDescription(coretest.Cluster, "y", "").Encode(),
		)
		_, err := r.CreateVolume(t.Context(), coretest.CreateRequest("x"))
		coretest.WantCode(t, err, codes.AlreadyExists, `volume "y"`)
	})
}

// The rack checks the quota before the name: on a full silo a repeated create gets 507 although the disk exists.
func TestRepeatedCreateVolumeOnFullQuota(t *testing.T) {
	r := newRig(t)
	want, err := r.CreateVolume(t.Context(), coretest.CreateRequest("v"))
	r.Must(t, err)
	one := coretest.GiB
	r.Must(t, r.Sim.Set(t.Context(), simtest.Settings{QuotaBytes: &one}))
	got, err := r.CreateVolume(t.Context(), coretest.CreateRequest("v"))
	r.Must(t, err)
	coretest.WantSame(t, got, want)
	_, err = r.CreateVolume(t.Context(), coretest.CreateRequest("w"))
	coretest.WantCode(t, err, codes.ResourceExhausted, "Storage Limit Exceeded")
}

// After a fault in one request, retries lead to exactly one disk.
func TestCreateVolumeThroughFaults(t *testing.T) {
	for _, fault := range []struct {
		kind  string
		code  int
		first codes.Code
	}{
		{simtest.FaultLost, 0, codes.OK},
		{simtest.FaultReset, 0, codes.Unavailable},
		{simtest.FaultStatus, 500, codes.Unavailable},
		{simtest.FaultStatus, 503, codes.Unavailable},
		{simtest.FaultStatus, 502, codes.Unavailable},
		{simtest.FaultStatus, 507, codes.ResourceExhausted},
		{simtest.FaultStatus, 401, codes.Unavailable},
		{simtest.FaultStatus, 403, codes.Unavailable},
	} {
		t.Run(fmt.Sprint(fault.kind, fault.code), func(t *testing.T) {
			r := newRig(t)
			r.Inject(t, "disk_create", fault.kind, fault.code)
			_, err := r.CreateVolume(t.Context(), coretest.CreateRequest("v"))
			coretest.WantCode(t, err, fault.first)
			first, err := r.CreateVolume(t.Context(), coretest.CreateRequest("v"))
			r.Must(t, err)
			second, err := r.CreateVolume(t.Context(), coretest.CreateRequest("v"))
			r.Must(t, err)
			coretest.WantSame(t, second, first)
			if ids := r.Volumes(t); len(ids) != 1 {
				t.Errorf("%d disks, want 1", len(ids))
			}
		})
	}
}

func TestCreateVolumeIsUnavailableIfTheLookupFails(t *testing.T) {
	r := newRig(t)
	r.Create(t, "v")
	r.Inject(t, "disk_view", simtest.FaultStatus, 503)
	_, err := r.CreateVolume(t.Context(), coretest.CreateRequest("v"))
	coretest.WantCode(t, err, codes.Unavailable)
}

func TestAbandonedCreateVolumeIsFoundByTheRetry(t *testing.T) {
	r := newRig(t)
	r.abandon(t, "disk_create", func(ctx context.Context) error {
		_, err := r.CreateVolume(ctx, coretest.CreateRequest("v"))
		return err
	})
	// The rack still makes the disk. The retry returns that disk.
	first, err := r.CreateVolume(t.Context(), coretest.CreateRequest("v"))
	r.Must(t, err)
	r.awaitCalls(t, "disk_create", 2)
	if ids := r.Volumes(t); len(ids) != 1 || ids[0] != first.GetVolume().GetVolumeId() {
		t.Errorf("disks %v, want %s", ids, first.GetVolume().GetVolumeId())
	}
}

func TestCreateVolumeRejectsAFaultedDisk(t *testing.T) {
	r := newRig(t)
	id := r.Create(t, "v")
	r.Must(t, r.Sim.SetDiskState(t.Context(), id, "faulted"))
	_, err := r.CreateVolume(t.Context(), coretest.CreateRequest("v"))
	coretest.WantCode(t, err, codes.Unavailable, "faulted", id)
}

func TestDeleteVolume(t *testing.T) {
	r := newRig(t)
	id := r.Create(t, "v")
	r.ClearCalls(t)
	r.Must(t, r.Delete(t, id))
	r.WantCalls(t, map[string]int{"disk_delete": 1, "anti_affinity_group_view": 1})
	r.ClearCalls(t)
	r.Must(t, r.Delete(t, id))
	// The ID may be that of a volume that has grown, whose first disk is gone, and its record, too.
	r.WantCalls(t, map[string]int{"disk_view": 1, "anti_affinity_group_view": 1, "project_view": 1, "disk_list": 2})
	r.ClearCalls(t)
	r.Must(t, r.Delete(t, "no-such-volume"))
	r.WantCalls(t, map[string]int{})
}

func TestDeleteFaultedVolume(t *testing.T) {
	r := newRig(t)
	id := r.Create(t, "v")
	r.Must(t, r.Sim.SetDiskState(t.Context(), id, "faulted"))
	r.Must(t, r.Delete(t, id))
	if ids := r.Volumes(t); len(ids) != 0 {
		t.Errorf("disks left: %v", ids)
	}
}

func TestDeleteAttachedVolume(t *testing.T) {
	r := newRig(t)
	id, node := r.Create(t, "v"), r.Node(t, "node-a")
	r.Must(t, r.Publish(t, id, node))
	r.ClearCalls(t)
	coretest.WantCode(t, r.Delete(t, id), codes.FailedPrecondition, node)
	if calls := r.Calls(t); calls["instance_disk_detach"] != 0 || calls["disk_delete"] != 0 {
		t.Errorf("calls %v", calls)
	}
	if got := r.Holder(t, id); got != node {
		t.Errorf("the disk is attached to %q", got)
	}
}

func TestDeleteRejectsDisksOfOthers(t *testing.T) {
	r := newRig(t)
	for name, description := range map[string]string{
		"mine":       "precious",
		"elsewhere":  rack.NewDescription("other", "v", "").Encode(),
		"csi-looks":  "",
		"not-object": "[]",
	} {
		disk := r.UserDisk(t, coretest.Project, name, description)
		coretest.WantCode(t, r.Delete(t, disk.Id), codes.FailedPrecondition, disk.Id, "delete it yourself")
	}
	if ids := r.Volumes(t); len(ids) != 4 {
		t.Errorf("%d disks are left, want 4", len(ids))
	}
}

func TestDeleteThroughFaults(t *testing.T) {
	for _, operation := range []string{"disk_view", "disk_delete"} {
		for _, fault := range []struct {
			kind string
			code int
			want codes.Code
		}{
			{simtest.FaultStatus, 500, codes.Internal},
			{simtest.FaultStatus, 503, codes.Unavailable},
			{simtest.FaultStatus, 409, codes.Unavailable},
			{simtest.FaultStatus, 401, codes.Unauthenticated},
			{simtest.FaultStatus, 403, codes.PermissionDenied},
		} {
			t.Run(fmt.Sprint(operation, fault.kind, fault.code), func(t *testing.T) {
				r := newRig(t)
				id := r.Create(t, "v")
				if operation == "disk_view" {
					r.Start(t) // it remembers no disk
				}
				r.Inject(t, operation, fault.kind, fault.code)
				coretest.WantCode(t, r.Delete(t, id), fault.want)
				r.Must(t, r.Delete(t, id))
				if ids := r.Volumes(t); len(ids) != 0 {
					t.Errorf("disks left: %v", ids)
				}
			})
		}
	}
}

// A token without a role gets 404 for every disk. The plugin must not conclude that the volumes are deleted.
func TestTokenWithoutRoleIsUnavailable(t *testing.T) {
	r := newRig(t)
	id, node := r.Create(t, "v"), r.Node(t, "node-a")
	none, err := r.Sim.NewToken(t.Context(), "none")
	r.Must(t, err)
	r.Token.Store(none)
	coretest.WantCode(t, r.Delete(t, id), codes.Unavailable, "token", coretest.Project)
	coretest.WantCode(t, r.Unpublish(t, id, node), codes.Unavailable, "token", coretest.Project)
	coretest.WantCode(t, r.Publish(t, id, node), codes.Unavailable, "token", coretest.Project)
	_, err = r.ValidateVolumeCapabilities(
		t.Context(),
		&csi.ValidateVolumeCapabilitiesRequest{
			VolumeId:           id,
			VolumeCapabilities: []*csi.VolumeCapability{coretest.MountWriter()},
		},
	)
	coretest.WantCode(t, err, codes.Unavailable, "token", coretest.Project)
	_, err = r.CreateVolume(t.Context(), coretest.CreateRequest("w"))
	coretest.WantCode(t, err, codes.Unavailable, coretest.Project)

	viewer, err := r.Sim.NewToken(t.Context(), "viewer")
	r.Must(t, err)
	r.Token.Store(viewer)
	_, err = r.CreateVolume(t.Context(), coretest.CreateRequest("w"))
	coretest.WantCode(t, err, codes.Unavailable, "Forbidden")
	r.Token.Store("oxide-token-unknown")
	coretest.WantCode(t, r.Delete(t, id), codes.Unauthenticated)

	r.Token.Store(coretest.Token)
	r.Must(t, r.Delete(t, id))
}

// The answer of a create is lost, and then the token expires or loses its role. A provisioner must not take any answer
// for final: it would forget the disk.
func TestCreateWithALostAnswerAndALostToken(t *testing.T) {
	r := newRig(t)
	source := r.Create(t, "source")
	creates := map[string]func() error{
		"disk_create": func() error { _, err := r.CreateVolume(t.Context(), coretest.CreateRequest("v")); return err },
		"snapshot_create": func() error {
			_, err := r.CreateSnapshot(t.Context(), &csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: source})
			return err
		},
	}
	none, err := r.Sim.NewToken(t.Context(), "none")
	r.Must(t, err)
	viewer, err := r.Sim.NewToken(t.Context(), "viewer")
	r.Must(t, err)
	for operation, create := range creates {
		r.Inject(t, operation, simtest.FaultLost, 0)
		r.Inject(t, strings.Replace(operation, "create", "view", 1), simtest.FaultStatus, 503)
		coretest.WantCode(t, create(), codes.Unavailable)
		r.Must(t, r.Sim.ClearFaults(t.Context()))
		for _, token := range []string{"oxide-token-revoked", viewer, none} {
			r.Token.Store(token)
			// A token that may only look can find what was made.
			if err := create(); err != nil || token != viewer {
				coretest.WantCode(t, err, codes.Unavailable)
			}
		}
		r.Token.Store(coretest.Token)
		r.Must(t, create())
	}
	if ids := r.Volumes(t); len(ids) != 2 {
		t.Errorf("%d disks, want 2", len(ids))
	}
}

// A rack refuses a repeated create, whose first answer was lost. The volume is found, and not dropped.
func TestRefusedCreateAfterALostAnswer(t *testing.T) {
	for _, code := range []string{"InvalidRequest", "InvalidValue"} {
		t.Run(code, func(t *testing.T) {
			r := newRig(t)
			create := func() error { _, err := r.CreateVolume(t.Context(), coretest.CreateRequest("v")); return err }
			r.Inject(t, "disk_create", simtest.FaultLost, 0)
			r.Inject(t, "disk_view", simtest.FaultStatus, 503)
			coretest.WantCode(t, create(), codes.Unavailable)
			_, err := r.Sim.Inject(t.Context(), simtest.Fault{
				Operation: "disk_create", Kind: simtest.FaultStatus, Status: 400,
				ErrorCode: code, Message: `unsupported value for "size": no`,
			})
			r.Must(t, err)
			r.Must(t, create())
			if ids := r.Volumes(t); len(ids) != 1 {
				t.Errorf("%d disks, want 1", len(ids))
			}
		})
	}
}

// A rack may word the 404 of a project differently. Nothing counts as deleted or detached then either.
func TestUnconfirmedNotFoundInOtherWords(t *testing.T) {
	r := newRig(t)
	id, node := r.Create(t, "v"), r.Node(t, "node-a")
	r.Must(t, r.Publish(t, id, node))
	snapshot, err := r.CreateSnapshot(t.Context(), &csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: id})
	r.Must(t, err)
	r.Start(t) // it remembers no disk
	for _, operation := range []string{"project_view", "disk_view", "snapshot_view", "disk_delete", "snapshot_delete"} {
		_, err := r.Sim.Inject(t.Context(), simtest.Fault{
			Operation: operation, Kind: simtest.FaultStatus, Count: new(0), Status: 404,
			ErrorCode: "ObjectNotFound", Message: "project not found",
		})
		r.Must(t, err)
	}
	coretest.WantCode(t, r.Unpublish(t, id, node), codes.Unavailable, "cannot be believed")
	coretest.WantCode(t, r.Delete(t, id), codes.Unavailable, "cannot be believed")
	_, err = r.DeleteSnapshot(
		t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: snapshot.GetSnapshot().GetSnapshotId()})
	coretest.WantCode(t, err, codes.Unavailable, "cannot be believed")
	// The rack refuses the create for lack of space, but a disk of an earlier call may exist.
	r.Inject(t, "disk_create", simtest.FaultStatus, 507)
	_, err = r.CreateVolume(t.Context(), coretest.CreateRequest("v"))
	coretest.WantCode(t, err, codes.Unavailable, "cannot be believed")
}

// A 404 that the rack could not be asked about again is not believed: Nomad takes a volume for unpublished on
// NOT_FOUND.
func TestUnconfirmedNotFoundWhileTheRackFails(t *testing.T) {
	for _, operation := range []string{"instance_disk_attach", "instance_disk_detach"} {
		for _, code := range []int{500, 503} {
			t.Run(fmt.Sprint(operation, code), func(t *testing.T) {
				r := newRig(t)
				id, node := r.Create(t, "v"), r.Node(t, "node-a")
				call := func() error { return r.Publish(t, id, node) }
				if operation == "instance_disk_detach" {
					r.Must(t, r.Publish(t, id, node))
					call = func() error { return r.Unpublish(t, id, node) }
				}
				r.Start(t) // it remembers no disk
				for _, fault := range []simtest.Fault{
					{Operation: operation, Status: 404, ErrorCode: "ObjectNotFound", Message: "not found: instance"},
					{Operation: "disk_view", Status: code, Skip: 1, Count: new(coretest.Attempts)},
				} {
					fault.Kind = simtest.FaultStatus
					_, err := r.Sim.Inject(t.Context(), fault)
					r.Must(t, err)
				}
				if err := call(); err == nil || status.Code(err) == codes.NotFound {
					t.Errorf("error %v, want another code than NOT_FOUND", err)
				}
			})
		}
	}
}

// A disk that changes state while the token loses its role is not taken for deleted.
func TestUnconfirmedNotFoundDuringAWait(t *testing.T) {
	r := newRig(t)
	id, node := r.Create(t, "v"), r.Node(t, "node-a")
	calls := map[string]func() error{
		"publish": func() error { return r.Publish(t, id, node) },
		"clone": func() error {
			_, err := r.CreateVolume(t.Context(), from("c", fromVolume(id)))
			return err
		},
		"delete": func() error { return r.Delete(t, id) },
	}
	r.Must(t, r.Sim.SetDiskState(t.Context(), id, "maintenance"))
	for name, call := range calls {
		r.Must(t, r.Sim.ClearFaults(t.Context()))
		for _, fault := range []simtest.Fault{{Operation: "disk_view", Skip: 1}, {Operation: "project_view"}, {Operation: "disk_delete"}} {
			fault.Kind, fault.Status, fault.Count = simtest.FaultStatus, 404, new(0)
			fault.ErrorCode, fault.Message = "ObjectNotFound", "not found: disk"
			_, err := r.Sim.Inject(t.Context(), fault)
			r.Must(t, err)
		}
		t.Run(name, func(t *testing.T) { coretest.WantCode(t, call(), codes.Unavailable, "cannot be believed") })
	}
}

func TestLimitedCollaboratorHasEnoughRights(t *testing.T) {
	r := newRig(t)
	node := r.Node(t, "node-a")
	limited, err := r.Sim.NewToken(t.Context(), "limited-collaborator")
	r.Must(t, err)
	r.Token.Store(limited)
	id := r.Create(t, "v")
	r.Must(t, r.Publish(t, id, node))
	r.Must(t, r.Unpublish(t, id, node))
	r.Must(t, r.Delete(t, id))
}

func TestValidateVolumeCapabilities(t *testing.T) {
	r := newRig(t)
	id := r.Create(t, "v")
	multi := coretest.MountWriter()
	multi.AccessMode.Mode = csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER
	vfat := coretest.MountWriter()
	vfat.GetMount().FsType = "vfat"
	block := &csi.VolumeCapability{
		AccessType: &csi.VolumeCapability_Block{},
		AccessMode: coretest.MountWriter().GetAccessMode(),
	}
	for _, test := range []struct {
		name      string
		change    func(*csi.ValidateVolumeCapabilitiesRequest)
		confirmed bool
		mentions  string
	}{
		{"mount and block", func(r *csi.ValidateVolumeCapabilitiesRequest) {
			r.VolumeCapabilities = append(r.VolumeCapabilities, block)
		}, true, ""},
		{"context of this disk", func(r *csi.ValidateVolumeCapabilitiesRequest) {
			r.VolumeContext = map[string]string{rpc.KeyDiskName: diskname.ForVolume(coretest.Cluster, "v"), "users": "own"}
			r.Parameters = map[string]string{rpc.KeyBlockSize: "4096"}
		}, true, ""},
		{"several nodes", func(r *csi.ValidateVolumeCapabilitiesRequest) {
			r.VolumeCapabilities = append(r.VolumeCapabilities, multi)
		}, false, "MULTI_NODE_MULTI_WRITER"},
		{"unknown filesystem", func(r *csi.ValidateVolumeCapabilitiesRequest) { r.VolumeCapabilities = []*csi.VolumeCapability{vfat} }, false, "vfat"},
		{"context of another disk", func(r *csi.ValidateVolumeCapabilitiesRequest) {
			r.VolumeContext = map[string]string{rpc.KeyDiskName: "other"}
		}, false, "diskName"},
		{"unknown parameter", func(r *csi.ValidateVolumeCapabilitiesRequest) { r.Parameters = map[string]string{"speed": "11"} }, false, "speed"},
	} {
		t.Run(test.name, func(t *testing.T) {
			req := &csi.ValidateVolumeCapabilitiesRequest{
				VolumeId:           id,
				VolumeCapabilities: []*csi.VolumeCapability{coretest.MountWriter()},
			}
			test.change(req)
			resp, err := r.ValidateVolumeCapabilities(t.Context(), req)
			r.Must(t, err)
			if got := resp.GetConfirmed() != nil; got != test.confirmed {
				t.Fatalf("confirmed %t, want %t (%s)", got, test.confirmed, resp.GetMessage())
			}
			if !test.confirmed && !strings.Contains(resp.GetMessage(), test.mentions) {
				t.Errorf("message %q does not mention %q", resp.GetMessage(), test.mentions)
			}
			if test.confirmed {
				coretest.WantSame(t, resp.GetConfirmed().GetVolumeCapabilities(), req.GetVolumeCapabilities())
				coretest.WantSame(t, resp.GetConfirmed().GetVolumeContext(), req.GetVolumeContext())
				coretest.WantSame(t, resp.GetConfirmed().GetParameters(), req.GetParameters())
			}
		})
	}
	_, err := r.ValidateVolumeCapabilities(
		t.Context(),
		&csi.ValidateVolumeCapabilitiesRequest{
			VolumeId:           uuid.NewString(),
			VolumeCapabilities: []*csi.VolumeCapability{coretest.MountWriter()},
		},
	)
	coretest.WantCode(t, err, codes.NotFound)
}

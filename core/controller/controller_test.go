// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/uuid"
	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/core/coretest"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
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
	r.WantCalls(t, map[string]int{"disk_create": 1})

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
	if owner, ours := rack.ParseDescription(
		disk.Description,
	); !ours || owner.Name != "pvc-1" || owner.PVC != "db/data" ||
		owner.Cluster != coretest.Cluster {
		t.Errorf("description %s", disk.Description)
	}

	again, err := r.CreateVolume(t.Context(), req)
	r.Must(t, err)
	coretest.WantSame(t, again, got)
	if ids := r.Volumes(t); len(ids) != 1 {
		t.Errorf("%d disks, want 1", len(ids))
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

func TestCreateVolumeRefuses(t *testing.T) {
	for _, test := range []struct {
		name     string
		change   func(*csi.CreateVolumeRequest)
		code     codes.Code
		mentions string
	}{
		{"larger than the rack makes", func(r *csi.CreateVolumeRequest) { r.CapacityRange.RequiredBytes = 1024 * coretest.GiB }, codes.OutOfRange, "1023 GiB"},
		{"larger than anything", func(r *csi.CreateVolumeRequest) { r.CapacityRange.RequiredBytes = 1<<62 + 1 }, codes.OutOfRange, ""},
		{"another rack", func(r *csi.CreateVolumeRequest) { r.AccessibilityRequirements = coretest.OnRack("west") }, codes.ResourceExhausted, "west"},
		{"a segment that we do not know", func(r *csi.CreateVolumeRequest) {
			r.AccessibilityRequirements = &csi.TopologyRequirement{Requisite: []*csi.Topology{{Segments: map[string]string{"zone": "z"}}}}
		}, codes.ResourceExhausted, "zone=z"},
		{"unknown parameter", func(r *csi.CreateVolumeRequest) { r.Parameters = map[string]string{"blocksize": "512"} }, codes.InvalidArgument, `"blocksize"`},
		{"block size", func(r *csi.CreateVolumeRequest) { r.Parameters = map[string]string{"blockSize": "1024"} }, codes.InvalidArgument, "blockSize"},
		{"mkfs options that name a device", func(r *csi.CreateVolumeRequest) {
			r.Parameters = map[string]string{"mkfsOptions": "-J device=/dev/sda"}
		}, codes.InvalidArgument, "mkfsOptions"},
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
		"ours":                     coretest.OnRack("default"),
		"ours among others":        coretest.OnRack("west", "default"),
		"preferred only":           {Preferred: coretest.OnRack("default").GetPreferred()},
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
		{"too small", func(r *csi.CreateVolumeRequest) { r.CapacityRange.RequiredBytes = 2 * coretest.GiB }, "1073741824 bytes"},
		{"block size", func(r *csi.CreateVolumeRequest) { r.Parameters = map[string]string{"blockSize": "512"} }, "4096"},
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
	t.Run("of another volume whose name has the same hash, as far as it is in the disk's name", func(t *testing.T) {
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

// The rack checks the quota before the name: a repetition on a full silo says 507 for a disk that exists.
func TestCreateVolumeOnFullQuota(t *testing.T) {
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

// Whatever the rack does to one call, the caller learns in the end of exactly one disk.
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
		{simtest.FaultStatus, 401, codes.Unauthenticated},
		{simtest.FaultStatus, 403, codes.PermissionDenied},
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

func TestCreateVolumeWhoseLookupFails(t *testing.T) {
	r := newRig(t)
	r.Create(t, "v")
	r.Inject(t, "disk_view", simtest.FaultStatus, 503)
	_, err := r.CreateVolume(t.Context(), coretest.CreateRequest("v"))
	coretest.WantCode(t, err, codes.Unavailable)
}

func TestCreateVolumeDeadline(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	_, err := r.Sim.Inject(
		t.Context(),
		simtest.Fault{Operation: "disk_create", Kind: simtest.FaultDelay, DelayMillis: 2000},
	)
	r.Must(t, err)
	_, err = r.CreateVolume(coretest.WithTimeout(t, 300*time.Millisecond), coretest.CreateRequest("v"))
	coretest.WantCode(t, err, codes.DeadlineExceeded)
	// The rack goes on without us; whoever asks again gets that very disk.
	first, err := r.CreateVolume(t.Context(), coretest.CreateRequest("v"))
	r.Must(t, err)
	coretest.Eventually(t, "the first create is answered", func() bool { return r.Calls(t)["disk_create"] >= 2 })
	if ids := r.Volumes(t); len(ids) != 1 || ids[0] != first.GetVolume().GetVolumeId() {
		t.Errorf("disks %v, want %s", ids, first.GetVolume().GetVolumeId())
	}
}

func TestCreateVolumeNeverHandsOutAFaultedDisk(t *testing.T) {
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
	r.WantCalls(t, map[string]int{"disk_view": 1, "disk_delete": 1})
	r.ClearCalls(t)
	r.Must(t, r.Delete(t, id))
	r.WantCalls(t, map[string]int{"disk_view": 1, "project_view": 1})
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
		t.Errorf("disks %v are left", ids)
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
		t.Errorf("the disk is on %q", got)
	}
}

func TestDeleteNeverTouchesForeignDisks(t *testing.T) {
	r := newRig(t)
	for name, description := range map[string]string{
		"mine":       "precious",
		"elsewhere":  rack.NewDescription("other", "v", "").Encode(),
		"csi-looks":  "",
		"not-object": "[]",
	} {
		disk := r.UserDisk(t, coretest.Project, name, description)
		coretest.WantCode(t, r.Delete(t, disk.Id), codes.FailedPrecondition, name, disk.Id)
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
				r.Inject(t, operation, fault.kind, fault.code)
				coretest.WantCode(t, r.Delete(t, id), fault.want)
				r.Must(t, r.Delete(t, id))
				if ids := r.Volumes(t); len(ids) != 0 {
					t.Errorf("disks %v are left", ids)
				}
			})
		}
	}
}

// A token that has lost its role gets 404 for everything, which must never look as if all volumes were gone.
func TestRevokedRoleIsNotGone(t *testing.T) {
	r := newRig(t)
	id, node := r.Create(t, "v"), r.Node(t, "node-a")
	none, err := r.Sim.NewToken(t.Context(), "none")
	r.Must(t, err)
	*r.Token = none
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
	coretest.WantCode(t, err, codes.FailedPrecondition, coretest.Project)

	viewer, err := r.Sim.NewToken(t.Context(), "viewer")
	r.Must(t, err)
	*r.Token = viewer
	_, err = r.CreateVolume(t.Context(), coretest.CreateRequest("w"))
	coretest.WantCode(t, err, codes.PermissionDenied)
	*r.Token = "oxide-token-unknown"
	coretest.WantCode(t, r.Delete(t, id), codes.Unauthenticated)

	*r.Token = coretest.Token
	r.Must(t, r.Delete(t, id))
}

func TestLimitedCollaboratorSuffices(t *testing.T) {
	r := newRig(t)
	node := r.Node(t, "node-a")
	limited, err := r.Sim.NewToken(t.Context(), "limited-collaborator")
	r.Must(t, err)
	*r.Token = limited
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

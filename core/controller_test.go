package core_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/uuid"
	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/core"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/lab"
)

func TestCreateVolume(t *testing.T) {
	r := newRig(t)
	req := createRequest("pvc-1")
	req.CapacityRange = &csi.CapacityRange{RequiredBytes: 2*gib - 5}
	req.Parameters = map[string]string{
		core.KeyBlockSize: "512", core.ParameterPVCName: "data", core.ParameterPVCNamespace: "db",
		core.KeyMkfsOptions: "-m 1", core.KeyRootUID: "999", core.KeyRootMode: "0770", core.ParameterPrefixCO + "new": "x",
	}
	got, err := r.CreateVolume(t.Context(), req)
	r.must(t, err)
	wantCalls(t, r, map[string]int{"disk_create": 1})

	name := diskname.ForVolume(testCluster, "pvc-1")
	wantSame(t, got, &csi.CreateVolumeResponse{Volume: &csi.Volume{
		VolumeId:      got.GetVolume().GetVolumeId(),
		CapacityBytes: 2 * gib,
		VolumeContext: map[string]string{
			"diskName": name, "sizeBytes": "2147483648", "blockSize": "512", "mkfsOptions": "-m 1", "rootUid": "999", "rootMode": "0770",
		},
		AccessibleTopology: []*csi.Topology{{Segments: map[string]string{"topology.csi.oxide.computer/rack": "default"}}},
	}})
	disk := r.disk(t, got.GetVolume().GetVolumeId())
	if string(disk.Name) != name || int(disk.BlockSize) != 512 || disk.DiskType != oxide.DiskTypeDistributed {
		t.Errorf("the rack shows %+v", disk)
	}
	if owner, ours := rack.ParseDescription(disk.Description); !ours || owner.Name != "pvc-1" || owner.PVC != "db/data" || owner.Cluster != testCluster {
		t.Errorf("description %s", disk.Description)
	}

	again, err := r.CreateVolume(t.Context(), req)
	r.must(t, err)
	wantSame(t, again, got)
	if ids := r.volumes(t); len(ids) != 1 {
		t.Errorf("%d disks, want 1", len(ids))
	}
}

func TestCreateLocalVolume(t *testing.T) {
	r := newRig(t)
	req := createRequest("fast")
	req.Parameters = map[string]string{core.ParameterDiskType: "local"}
	got, err := r.CreateVolume(t.Context(), req)
	r.must(t, err)
	if disk := r.disk(t, got.GetVolume().GetVolumeId()); disk.DiskType != oxide.DiskTypeLocal || disk.BlockSize != 4096 {
		t.Errorf("the rack shows %+v", disk)
	}
	again, err := r.CreateVolume(t.Context(), req)
	r.must(t, err)
	wantSame(t, again, got)
	req.Parameters[core.ParameterDiskType] = "distributed"
	_, err = r.CreateVolume(t.Context(), req)
	wantCode(t, err, codes.AlreadyExists, "distributed")
}

func TestCreateVolumeRefuses(t *testing.T) {
	for _, test := range []struct {
		name     string
		change   func(*csi.CreateVolumeRequest)
		code     codes.Code
		mentions string
	}{
		{"larger than the rack makes", func(r *csi.CreateVolumeRequest) { r.CapacityRange.RequiredBytes = 1024 * gib }, codes.OutOfRange, "1023 GiB"},
		{"larger than anything", func(r *csi.CreateVolumeRequest) { r.CapacityRange.RequiredBytes = 1<<62 + 1 }, codes.OutOfRange, ""},
		{"another rack", func(r *csi.CreateVolumeRequest) { r.AccessibilityRequirements = onRack("west") }, codes.ResourceExhausted, "west"},
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
			req := createRequest("v")
			test.change(req)
			_, err := r.CreateVolume(t.Context(), req)
			wantCode(t, err, test.code, test.mentions)
			if ids := r.volumes(t); len(ids) != 0 {
				t.Errorf("%d disks were made", len(ids))
			}
		})
	}
}

func onRack(names ...string) *csi.TopologyRequirement {
	requirement := &csi.TopologyRequirement{}
	for _, name := range names {
		requirement.Requisite = append(requirement.Requisite, &csi.Topology{Segments: map[string]string{core.TopologySegmentRack: name}})
	}
	requirement.Preferred = requirement.Requisite
	return requirement
}

func TestCreateVolumeAcceptsTopology(t *testing.T) {
	for name, requirement := range map[string]*csi.TopologyRequirement{
		"empty, as Nomad sends it": {},
		"ours":                     onRack("default"),
		"ours among others":        onRack("west", "default"),
		"preferred only":           {Preferred: onRack("default").GetPreferred()},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			req := createRequest("v")
			req.AccessibilityRequirements = requirement
			_, err := r.CreateVolume(t.Context(), req)
			r.must(t, err)
		})
	}
}

func TestCreateVolumeConflicts(t *testing.T) {
	r := newRig(t)
	r.create(t, "v")
	for _, test := range []struct {
		name     string
		change   func(*csi.CreateVolumeRequest)
		mentions string
	}{
		{"too small", func(r *csi.CreateVolumeRequest) { r.CapacityRange.RequiredBytes = 2 * gib }, "1073741824 bytes"},
		{"block size", func(r *csi.CreateVolumeRequest) { r.Parameters = map[string]string{"blockSize": "512"} }, "4096"},
	} {
		t.Run(test.name, func(t *testing.T) {
			req := createRequest("v")
			test.change(req)
			_, err := r.CreateVolume(t.Context(), req)
			wantCode(t, err, codes.AlreadyExists, test.mentions)
		})
	}
	t.Run("made by a user", func(t *testing.T) {
		r.userDisk(t, testProject, diskname.ForVolume(testCluster, "mine"), "precious")
		_, err := r.CreateVolume(t.Context(), createRequest("mine"))
		wantCode(t, err, codes.AlreadyExists, "precious", "not made by this plugin")
	})
	t.Run("of another volume whose name has the same hash, as far as it is in the disk's name", func(t *testing.T) {
		r.userDisk(t, testProject, diskname.ForVolume(testCluster, "x"), rack.NewDescription(testCluster, "y", "").Encode())
		_, err := r.CreateVolume(t.Context(), createRequest("x"))
		wantCode(t, err, codes.AlreadyExists, `volume "y"`)
	})
}

// The rack checks the quota before the name: a repetition on a full silo says 507 for a disk that exists.
func TestCreateVolumeOnFullQuota(t *testing.T) {
	r := newRig(t)
	want, err := r.CreateVolume(t.Context(), createRequest("v"))
	r.must(t, err)
	one := gib
	r.must(t, r.sim.Set(t.Context(), lab.Settings{QuotaBytes: &one}))
	got, err := r.CreateVolume(t.Context(), createRequest("v"))
	r.must(t, err)
	wantSame(t, got, want)
	_, err = r.CreateVolume(t.Context(), createRequest("w"))
	wantCode(t, err, codes.ResourceExhausted, "Storage Limit Exceeded")
}

// Whatever the rack does to one call, the caller learns in the end of exactly one disk.
func TestCreateVolumeThroughFaults(t *testing.T) {
	for _, fault := range []struct {
		kind  string
		code  int
		first codes.Code
	}{
		{lab.FaultLost, 0, codes.OK},
		{lab.FaultReset, 0, codes.Unavailable},
		{lab.FaultStatus, 500, codes.Unavailable},
		{lab.FaultStatus, 503, codes.Unavailable},
		{lab.FaultStatus, 502, codes.Unavailable},
		{lab.FaultStatus, 507, codes.ResourceExhausted},
		{lab.FaultStatus, 401, codes.Unauthenticated},
		{lab.FaultStatus, 403, codes.PermissionDenied},
	} {
		t.Run(fmt.Sprint(fault.kind, fault.code), func(t *testing.T) {
			r := newRig(t)
			r.inject(t, "disk_create", fault.kind, fault.code)
			_, err := r.CreateVolume(t.Context(), createRequest("v"))
			wantCode(t, err, fault.first)
			first, err := r.CreateVolume(t.Context(), createRequest("v"))
			r.must(t, err)
			second, err := r.CreateVolume(t.Context(), createRequest("v"))
			r.must(t, err)
			wantSame(t, second, first)
			if ids := r.volumes(t); len(ids) != 1 {
				t.Errorf("%d disks, want 1", len(ids))
			}
		})
	}
}

func TestCreateVolumeWhoseLookupFails(t *testing.T) {
	r := newRig(t)
	r.create(t, "v")
	r.inject(t, "disk_view", lab.FaultStatus, 503)
	_, err := r.CreateVolume(t.Context(), createRequest("v"))
	wantCode(t, err, codes.Unavailable)
}

func TestCreateVolumeDeadline(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	_, err := r.sim.Inject(t.Context(), lab.Fault{Operation: "disk_create", Kind: lab.FaultDelay, DelayMillis: 2000})
	r.must(t, err)
	_, err = r.CreateVolume(withTimeout(t, 300*time.Millisecond), createRequest("v"))
	wantCode(t, err, codes.DeadlineExceeded)
	// The rack goes on without us; whoever asks again gets that very disk.
	first, err := r.CreateVolume(t.Context(), createRequest("v"))
	r.must(t, err)
	eventually(t, "the first create is answered", func() bool { return r.calls(t)["disk_create"] >= 2 })
	if ids := r.volumes(t); len(ids) != 1 || ids[0] != first.GetVolume().GetVolumeId() {
		t.Errorf("disks %v, want %s", ids, first.GetVolume().GetVolumeId())
	}
}

func TestCreateVolumeNeverHandsOutAFaultedDisk(t *testing.T) {
	r := newRig(t)
	id := r.create(t, "v")
	r.must(t, r.sim.SetDiskState(t.Context(), id, "faulted"))
	_, err := r.CreateVolume(t.Context(), createRequest("v"))
	wantCode(t, err, codes.Unavailable, "faulted", id)
}

func TestDeleteVolume(t *testing.T) {
	r := newRig(t)
	id := r.create(t, "v")
	r.clearCalls(t)
	r.must(t, r.delete(t, id))
	wantCalls(t, r, map[string]int{"disk_view": 1, "disk_delete": 1})
	r.clearCalls(t)
	r.must(t, r.delete(t, id))
	wantCalls(t, r, map[string]int{"disk_view": 1, "project_view": 1})
	r.clearCalls(t)
	r.must(t, r.delete(t, "no-such-volume"))
	wantCalls(t, r, map[string]int{})
}

func TestDeleteFaultedVolume(t *testing.T) {
	r := newRig(t)
	id := r.create(t, "v")
	r.must(t, r.sim.SetDiskState(t.Context(), id, "faulted"))
	r.must(t, r.delete(t, id))
	if ids := r.volumes(t); len(ids) != 0 {
		t.Errorf("disks %v are left", ids)
	}
}

func TestDeleteAttachedVolume(t *testing.T) {
	r := newRig(t)
	id, node := r.create(t, "v"), r.node(t, "node-a")
	r.must(t, r.publish(t, id, node))
	r.clearCalls(t)
	wantCode(t, r.delete(t, id), codes.FailedPrecondition, node)
	if calls := r.calls(t); calls["instance_disk_detach"] != 0 || calls["disk_delete"] != 0 {
		t.Errorf("calls %v", calls)
	}
	if got := r.holder(t, id); got != node {
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
		disk := r.userDisk(t, testProject, name, description)
		wantCode(t, r.delete(t, disk.Id), codes.FailedPrecondition, name, disk.Id)
	}
	if ids := r.volumes(t); len(ids) != 4 {
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
			{lab.FaultStatus, 500, codes.Internal},
			{lab.FaultStatus, 503, codes.Unavailable},
			{lab.FaultStatus, 409, codes.Unavailable},
			{lab.FaultStatus, 401, codes.Unauthenticated},
			{lab.FaultStatus, 403, codes.PermissionDenied},
		} {
			t.Run(fmt.Sprint(operation, fault.kind, fault.code), func(t *testing.T) {
				r := newRig(t)
				id := r.create(t, "v")
				r.inject(t, operation, fault.kind, fault.code)
				wantCode(t, r.delete(t, id), fault.want)
				r.must(t, r.delete(t, id))
				if ids := r.volumes(t); len(ids) != 0 {
					t.Errorf("disks %v are left", ids)
				}
			})
		}
	}
}

// A token that has lost its role gets 404 for everything, which must never look as if all volumes were gone.
func TestRevokedRoleIsNotGone(t *testing.T) {
	r := newRig(t)
	id, node := r.create(t, "v"), r.node(t, "node-a")
	none, err := r.sim.NewToken(t.Context(), "none")
	r.must(t, err)
	*r.token = none
	wantCode(t, r.delete(t, id), codes.Unavailable, "token", testProject)
	wantCode(t, r.unpublish(t, id, node), codes.Unavailable, "token", testProject)
	wantCode(t, r.publish(t, id, node), codes.Unavailable, "token", testProject)
	_, err = r.ValidateVolumeCapabilities(t.Context(), &csi.ValidateVolumeCapabilitiesRequest{VolumeId: id, VolumeCapabilities: []*csi.VolumeCapability{mountWriter()}})
	wantCode(t, err, codes.Unavailable, "token", testProject)
	_, err = r.CreateVolume(t.Context(), createRequest("w"))
	wantCode(t, err, codes.FailedPrecondition, testProject)

	viewer, err := r.sim.NewToken(t.Context(), "viewer")
	r.must(t, err)
	*r.token = viewer
	_, err = r.CreateVolume(t.Context(), createRequest("w"))
	wantCode(t, err, codes.PermissionDenied)
	*r.token = "oxide-token-unknown"
	wantCode(t, r.delete(t, id), codes.Unauthenticated)

	*r.token = testToken
	r.must(t, r.delete(t, id))
}

func TestLimitedCollaboratorSuffices(t *testing.T) {
	r := newRig(t)
	node := r.node(t, "node-a")
	limited, err := r.sim.NewToken(t.Context(), "limited-collaborator")
	r.must(t, err)
	*r.token = limited
	id := r.create(t, "v")
	r.must(t, r.publish(t, id, node))
	r.must(t, r.unpublish(t, id, node))
	r.must(t, r.delete(t, id))
}

func TestValidateVolumeCapabilities(t *testing.T) {
	r := newRig(t)
	id := r.create(t, "v")
	multi := mountWriter()
	multi.AccessMode.Mode = csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER
	vfat := mountWriter()
	vfat.GetMount().FsType = "vfat"
	block := &csi.VolumeCapability{AccessType: &csi.VolumeCapability_Block{}, AccessMode: mountWriter().GetAccessMode()}
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
			r.VolumeContext = map[string]string{core.KeyDiskName: diskname.ForVolume(testCluster, "v"), "users": "own"}
			r.Parameters = map[string]string{core.KeyBlockSize: "4096"}
		}, true, ""},
		{"several nodes", func(r *csi.ValidateVolumeCapabilitiesRequest) {
			r.VolumeCapabilities = append(r.VolumeCapabilities, multi)
		}, false, "MULTI_NODE_MULTI_WRITER"},
		{"unknown filesystem", func(r *csi.ValidateVolumeCapabilitiesRequest) { r.VolumeCapabilities = []*csi.VolumeCapability{vfat} }, false, "vfat"},
		{"context of another disk", func(r *csi.ValidateVolumeCapabilitiesRequest) {
			r.VolumeContext = map[string]string{core.KeyDiskName: "other"}
		}, false, "diskName"},
		{"unknown parameter", func(r *csi.ValidateVolumeCapabilitiesRequest) { r.Parameters = map[string]string{"speed": "11"} }, false, "speed"},
	} {
		t.Run(test.name, func(t *testing.T) {
			req := &csi.ValidateVolumeCapabilitiesRequest{VolumeId: id, VolumeCapabilities: []*csi.VolumeCapability{mountWriter()}}
			test.change(req)
			resp, err := r.ValidateVolumeCapabilities(t.Context(), req)
			r.must(t, err)
			if got := resp.GetConfirmed() != nil; got != test.confirmed {
				t.Fatalf("confirmed %t, want %t (%s)", got, test.confirmed, resp.GetMessage())
			}
			if !test.confirmed && !strings.Contains(resp.GetMessage(), test.mentions) {
				t.Errorf("message %q does not mention %q", resp.GetMessage(), test.mentions)
			}
			if test.confirmed {
				wantSame(t, resp.GetConfirmed().GetVolumeCapabilities(), req.GetVolumeCapabilities())
				wantSame(t, resp.GetConfirmed().GetVolumeContext(), req.GetVolumeContext())
				wantSame(t, resp.GetConfirmed().GetParameters(), req.GetParameters())
			}
		})
	}
	_, err := r.ValidateVolumeCapabilities(t.Context(), &csi.ValidateVolumeCapabilitiesRequest{VolumeId: uuid.NewString(), VolumeCapabilities: []*csi.VolumeCapability{mountWriter()}})
	wantCode(t, err, codes.NotFound)
}

func eventually(t *testing.T, what string, done func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !done(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("in vain: %s", what)
		}
	}
}

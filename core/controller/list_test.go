// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/uuid"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
	"github.com/oxidecomputer/oxide-csi-plugin/test/coretest"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// listVolumes lists all volumes in pages of a size, 0 for one page, and returns the IDs on each page.
func (r *rig) listVolumes(t *testing.T, size int32) (pages [][]string) {
	t.Helper()
	token := ""
	for {
		resp, err := r.ListVolumes(t.Context(), &csi.ListVolumesRequest{MaxEntries: size, StartingToken: token})
		r.Must(t, err)
		var ids []string
		for _, entry := range resp.GetEntries() {
			ids = append(ids, entry.GetVolume().GetVolumeId())
		}
		pages = append(pages, ids)
		if token = resp.GetNextToken(); token == "" {
			return pages
		}
		if len(token) > 128 {
			t.Errorf("a token of %d bytes", len(token))
		}
	}
}

// bootDisks returns the sorted IDs of the boot disks in the project.
func (r *rig) bootDisks(t *testing.T) (ids []string) {
	t.Helper()
	instances, err := r.Sim.ListInstances(t.Context())
	r.Must(t, err)
	for _, instance := range instances {
		for _, disk := range instance.Disks {
			if instance.Project == coretest.Project && strings.HasSuffix(disk.Name, "-boot") {
				ids = append(ids, disk.ID)
			}
		}
	}
	slices.Sort(ids)
	return ids
}

// A disk or snapshot that the rack is still making is listed only for a caller that asks for it.
func TestListsOfUnfinished(t *testing.T) {
	r := newRig(t)
	volume := r.Create(t, "v")
	r.snapshot(t, "s", volume)
	making := r.copy()
	making.StartWith(t, coretest.RackClient(t, r.Rig, func(c *rack.Config) {
		c.HTTPClient = &http.Client{Transport: stillMaking{}}
	}))
	for _, asks := range []bool{false, true} {
		ctx, want := t.Context(), 0
		if asks {
			ctx, want = metadata.AppendToOutgoingContext(ctx, rpc.MetadataAskUnfinished, "yes"), 1
		}
		snapshots, err := making.ListSnapshots(ctx, &csi.ListSnapshotsRequest{})
		r.Must(t, err)
		volumes, err := making.ListVolumes(ctx, &csi.ListVolumesRequest{})
		r.Must(t, err)
		made := 0
		for _, entry := range volumes.GetEntries() {
			if entry.GetVolume().GetVolumeId() == volume {
				made++
			}
		}
		if len(snapshots.GetEntries()) != want || made != want {
			t.Errorf("asked %t: %d snapshots, %d volumes, want %d", asks, len(snapshots.GetEntries()), made, want)
		}
	}
}

// While the rack is making a disk, its creation can still fail. So a repeated create is not OK yet, and the disk is not
// attached.
func TestCallsWhileTheRackMakesTheDisk(t *testing.T) {
	r := newRig(t)
	volume, node := r.Create(t, "v"), r.Node(t, "node-a")
	making := r.copy()
	making.StartWith(t, coretest.RackClient(t, r.Rig, func(c *rack.Config) {
		c.HTTPClient = &http.Client{Transport: stillMaking{}}
	}))
	making.CallContext = func(ctx context.Context) (context.Context, context.CancelFunc) {
		return context.WithTimeout(ctx, 3*time.Second)
	}
	_, err := making.CreateVolume(t.Context(), coretest.CreateRequest("v"))
	coretest.WantCode(t, err, codes.Aborted, "creating")
	coretest.WantCode(t, making.Publish(t, volume, node), codes.Aborted, "creating")
	coretest.WantCode(t, making.Delete(t, volume), codes.Aborted, "creating")
	if on := r.Holder(t, volume); on != "" {
		t.Errorf("the disk is attached to %s", on)
	}
}

// stillMaking is a transport to a rack that is still making all of its detached disks and its snapshots.
type stillMaking struct{}

func (stillMaking) RoundTrip(req *http.Request) (*http.Response, error) {
	resp, err := http.DefaultTransport.RoundTrip(req)
	if err != nil || req.Method != http.MethodGet {
		return resp, err
	}
	list, err := io.ReadAll(resp.Body)
	for _, state := range []string{`"ready"`, `"detached"`} {
		list = bytes.ReplaceAll(list, []byte(state), []byte(`"creating"`))
	}
	resp.Body, resp.ContentLength = io.NopCloser(bytes.NewReader(list)), int64(len(list))
	return resp, err
}

func TestListVolumes(t *testing.T) {
	r := newRig(t)
	r.otherProject(t)
	want := r.bootDisks(t) // listed because they are attached
	for n := range 7 {
		want = append(want, r.Create(t, fmt.Sprint("v", n)))
		r.UserDisk(t, coretest.Project, fmt.Sprint("user-", n), "") // not listed
	}
	r.UserDisk(t, coretest.Project, "theirs", rack.NewDescription("another", "v", "").Encode())
	static := r.UserDisk(t, coretest.Project, "static", "").Id
	r.AttachByHand(t, static, r.Node(t, "node-a"))
	want = append(want, static)
	slices.Sort(want)
	for _, size := range []int32{0, 1, 2, 3, 5, 10, 11} {
		pages := r.listVolumes(t, size)
		coretest.WantSame(t, slices.Concat(pages...), want)
		for n, page := range pages {
			if size > 0 && (len(page) > int(size) || n < len(pages)-1 && len(page) != int(size)) {
				t.Errorf("pages of %d: page %d has %d entries", size, n, len(page))
			}
		}
		if count := (len(want) + int(max(size, 1)) - 1) / int(max(size, 1)); size > 0 && len(pages) != count {
			t.Errorf("pages of %d: %d pages, want %d", size, len(pages), count)
		}
	}
}

func TestListVolumesReturnsPublishedNodes(t *testing.T) {
	r := newRig(t)
	node := r.Node(t, "node-a")
	id := r.Create(t, "v")
	r.Must(t, r.Publish(t, id, node))
	single, err := r.ControllerGetVolume(t.Context(), &csi.ControllerGetVolumeRequest{VolumeId: id})
	r.Must(t, err)
	coretest.WantSame(t, single.GetStatus().GetPublishedNodeIds(), []string{node})
	list, err := r.ListVolumes(t.Context(), &csi.ListVolumesRequest{})
	r.Must(t, err)
	for _, entry := range list.GetEntries() {
		if entry.GetVolume().GetVolumeId() != id {
			continue
		}
		coretest.WantSame(t, entry.GetVolume(), single.GetVolume())
		coretest.WantSame(t, entry.GetStatus().GetPublishedNodeIds(), []string{node})
	}
	r.Must(t, r.Unpublish(t, id, node))
	single, err = r.ControllerGetVolume(t.Context(), &csi.ControllerGetVolumeRequest{VolumeId: id})
	r.Must(t, err)
	if nodes := single.GetStatus().GetPublishedNodeIds(); len(nodes) != 0 {
		t.Errorf("published on %v", nodes)
	}
	_, err = r.ControllerGetVolume(t.Context(), &csi.ControllerGetVolumeRequest{VolumeId: uuid.NewString()})
	coretest.WantCode(t, err, codes.NotFound)
}

// While disks are made and deleted between pages, each remaining disk is listed once.
func TestListVolumesWhileDisksChange(t *testing.T) {
	r := newRig(t)
	var stay []string
	for n := range 12 {
		stay = append(stay, r.Create(t, fmt.Sprint("v", n)))
	}
	slices.Sort(stay)
	var listed []string
	token := ""
	for {
		resp, err := r.ListVolumes(t.Context(), &csi.ListVolumesRequest{MaxEntries: 3, StartingToken: token})
		r.Must(t, err)
		for _, entry := range resp.GetEntries() {
			listed = append(listed, entry.GetVolume().GetVolumeId())
		}
		if token = resp.GetNextToken(); token == "" {
			break
		}
		// The last disk of the page is deleted, and another one is made.
		if last := listed[len(listed)-1]; slices.Contains(stay, last) {
			r.Must(t, r.Delete(t, last))
		}
		r.Create(t, fmt.Sprint("new", len(listed)))
	}
	for _, id := range stay {
		if count := len(slices.DeleteFunc(slices.Clone(listed), func(other string) bool { return other != id })); count != 1 {
			t.Errorf("%s was listed %d times", id, count)
		}
	}
}

// Another replica, or the same controller after a restart, accepts the token.
func TestListTokenIsValidForAnotherReplica(t *testing.T) {
	r := newRig(t)
	for n := range 9 {
		r.Create(t, fmt.Sprint("v", n))
	}
	all := slices.Concat(r.listVolumes(t, 0)...)
	first, err := r.ListVolumes(t.Context(), &csi.ListVolumesRequest{MaxEntries: 4})
	r.Must(t, err)
	again := r.again(t)
	second, err := again.ListVolumes(t.Context(), &csi.ListVolumesRequest{StartingToken: first.GetNextToken()})
	r.Must(t, err)
	got := []string{}
	for _, entry := range slices.Concat(first.GetEntries(), second.GetEntries()) {
		got = append(got, entry.GetVolume().GetVolumeId())
	}
	coretest.WantSame(t, got, all)
}

// A replica that did not issue the token reads the rack's list up to the token in large pages, also for a small
// max_entries.
func TestListTokenOfAnotherReplicaCostsFewCalls(t *testing.T) {
	r := newRig(t)
	for n := range 150 {
		r.Create(t, fmt.Sprint("v", n))
	}
	req := &csi.ListVolumesRequest{MaxEntries: 50}
	for {
		resp, err := r.ListVolumes(t.Context(), req)
		r.Must(t, err)
		if resp.GetNextToken() == "" {
			break
		}
		req.StartingToken = resp.GetNextToken()
	}
	again := r.again(t)
	_, err := again.ListVolumes(t.Context(), &csi.ListVolumesRequest{MaxEntries: 1})
	again.Must(t, err)
	again.ClearCalls(t)
	_, err = again.ListVolumes(t.Context(), req)
	again.Must(t, err)
	again.WantCalls(
		t,
		map[string]int{"anti_affinity_group_list": 2, "disk_list": 2},
	) // a rack ends its list with an empty page
}

func TestListRejectsUnrecognisedTokens(t *testing.T) {
	r := newRig(t)
	for _, token := range []string{"junk", ".", "default.", "default.junk", "." + uuid.NewString(), "west." + uuid.NewString(), uuid.NewString(), "default/" + uuid.NewString()} {
		_, err := r.ListVolumes(t.Context(), &csi.ListVolumesRequest{StartingToken: token})
		coretest.WantCode(t, err, codes.Aborted, "starting_token")
		_, err = r.ListSnapshots(t.Context(), &csi.ListSnapshotsRequest{StartingToken: token})
		coretest.WantCode(t, err, codes.Aborted, "starting_token")
		_, err = r.ControllerListVolumeHealth(t.Context(), &csi.ControllerListVolumeHealthRequest{StartingToken: token})
		coretest.WantCode(t, err, codes.Aborted, "starting_token")
	}
}

// A list whose second page fails returns an error and no partial list.
func TestListIsNeverPartial(t *testing.T) {
	r := newRig(t)
	for n := range 3 {
		r.Create(t, fmt.Sprint("v", n))
	}
	for _, test := range []struct {
		kind string
		code int
		want codes.Code
	}{{simtest.FaultStatus, 503, codes.Unavailable}, {simtest.FaultStatus, 500, codes.Unavailable}, {simtest.FaultLost, 0, codes.Unavailable}, {simtest.FaultStatus, 401, codes.Unauthenticated}} {
		fault := simtest.Fault{Operation: "disk_list", Kind: test.kind, Status: test.code, Skip: 1, Count: new(0)}
		_, err := r.Sim.Inject(t.Context(), fault)
		r.Must(t, err)
		_, err = r.ListVolumes(t.Context(), &csi.ListVolumesRequest{})
		if code := status.Code(err); code != test.want {
			t.Errorf("%s %d: %s, want %s", test.kind, test.code, code, test.want)
		}
		r.Must(t, r.Sim.ClearFaults(t.Context()))
	}
}

func TestListSnapshots(t *testing.T) {
	r := newRig(t)
	v, w := r.Create(t, "v"), r.Create(t, "w")
	byVolume := map[string][]string{}
	var all []string
	for n := range 5 {
		volume := []string{v, w}[n%2]
		id := r.snapshot(t, fmt.Sprint("s", n), volume)
		byVolume[volume] = append(byVolume[volume], id)
		all = append(all, id)
	}
	all = append(all, r.userSnapshot(t, coretest.Project, "mine", "", v))
	byVolume[v] = append(byVolume[v], all[len(all)-1])
	r.userSnapshot(
		t,
		coretest.Project,
		diskname.ForClone(coretest.Cluster, "copy"),
		rack.NewTemporaryDescription(coretest.Cluster, "copy", nil).Encode(),
		v,
	)
	for _, test := range []struct {
		name string
		req  *csi.ListSnapshotsRequest
		want []string
	}{
		{"all", &csi.ListSnapshotsRequest{}, all},
		{"of a volume", &csi.ListSnapshotsRequest{SourceVolumeId: v}, byVolume[v]},
		{"of a deleted volume", &csi.ListSnapshotsRequest{SourceVolumeId: coretest.NoVolumeID}, nil},
		{"of an ID that is not a UUID", &csi.ListSnapshotsRequest{SourceVolumeId: "v"}, nil},
		{"by snapshot ID", &csi.ListSnapshotsRequest{SnapshotId: all[3]}, all[3:4]},
		{"a deleted snapshot", &csi.ListSnapshotsRequest{SnapshotId: coretest.NoVolumeID}, nil},
		{"a snapshot ID that is not a UUID", &csi.ListSnapshotsRequest{SnapshotId: "s"}, nil},
		{"by snapshot ID and its volume", &csi.ListSnapshotsRequest{SnapshotId: byVolume[w][0], SourceVolumeId: w}, byVolume[w][:1]},
		{"by snapshot ID and another volume", &csi.ListSnapshotsRequest{SnapshotId: byVolume[w][0], SourceVolumeId: v}, nil},
	} {
		for _, size := range []int32{0, 1, 2} {
			t.Run(fmt.Sprint(test.name, " by ", size), func(t *testing.T) {
				var got []string
				req := &csi.ListSnapshotsRequest{
					MaxEntries:     size,
					SourceVolumeId: test.req.GetSourceVolumeId(),
					SnapshotId:     test.req.GetSnapshotId(),
				}
				for {
					resp, err := r.ListSnapshots(t.Context(), req)
					r.Must(t, err)
					for _, entry := range resp.GetEntries() {
						got = append(got, entry.GetSnapshot().GetSnapshotId())
					}
					if req.StartingToken = resp.GetNextToken(); req.StartingToken == "" {
						break
					}
				}
				want := slices.Sorted(slices.Values(test.want))
				coretest.WantSame(t, got, want)
			})
		}
	}
}

func TestGetCapacity(t *testing.T) {
	for _, test := range []struct {
		name  string
		quota int64
		req   *csi.GetCapacityRequest
		// available is the quota without two boot disks of 1 GiB.
		available, smallest int64
	}{
		{name: "no topology", quota: 100 * coretest.GiB, available: 98 * coretest.GiB, smallest: coretest.GiB},
		{name: "less than 1 GiB", quota: 3*coretest.GiB - 1, available: coretest.GiB - 1},
		{name: "used up", quota: 2 * coretest.GiB},
		{name: "quota below the used bytes", quota: coretest.GiB},
		{name: "more than the largest disk", quota: 5000 * coretest.GiB, available: 4998 * coretest.GiB, smallest: coretest.GiB},
		{name: "this rack", quota: 100 * coretest.GiB, req: &csi.GetCapacityRequest{AccessibleTopology: coretest.RequireRacks("default").GetRequisite()[0]}, available: 98 * coretest.GiB, smallest: coretest.GiB},
		{name: "another rack", quota: 100 * coretest.GiB, req: &csi.GetCapacityRequest{AccessibleTopology: coretest.RequireRacks("west").GetRequisite()[0]}},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := newRig(t)
			r.setQuota(t, test.quota)
			// A mistake in the parameters or the size must be told by CreateVolume, so GetCapacity does not know them.
			for _, parameters := range []map[string]string{nil, {"x": "y"}} {
				req := &csi.GetCapacityRequest{AccessibleTopology: test.req.GetAccessibleTopology(), Parameters: parameters}
				got, err := r.GetCapacity(t.Context(), req)
				r.Must(t, err)
				if got.GetAvailableCapacity() != test.available || got.GetMaximumVolumeSize() != nil ||
					got.GetMinimumVolumeSize().GetValue() != test.smallest {
					t.Errorf("with parameters %v: got %v", parameters, got)
				}
			}
		})
	}
}

// Kubernetes' external-provisioner calls GetCapacity for each storage class and segment. Only one call queries the
// rack.
func TestGetCapacityIsCached(t *testing.T) {
	r := newRig(t)
	for range 20 {
		_, err := r.GetCapacity(t.Context(), &csi.GetCapacityRequest{})
		r.Must(t, err)
	}
	r.WantCalls(t, map[string]int{"utilization_view": 1})
}

func TestGetCapacityDoesNotCacheErrors(t *testing.T) {
	r := newRig(t)
	r.Inject(t, "utilization_view", simtest.FaultStatus, 503)
	_, err := r.GetCapacity(t.Context(), &csi.GetCapacityRequest{})
	coretest.WantCode(t, err, codes.Unavailable)
	_, err = r.GetCapacity(t.Context(), &csi.GetCapacityRequest{})
	r.Must(t, err)
}

func TestControllerVolumeHealth(t *testing.T) {
	r := newRig(t)
	ids := map[string]string{}
	for _, state := range []string{"healthy", "faulted", "maintenance", "gone"} {
		ids[state] = r.Create(t, state)
	}
	faultedUser := r.UserDisk(t, coretest.Project, "user", "").Id
	for id, state := range map[string]string{ids["faulted"]: "faulted", ids["maintenance"]: "maintenance", faultedUser: "faulted"} {
		r.Must(t, r.Sim.SetDiskState(t.Context(), id, state))
	}
	r.Must(t, r.Delete(t, ids["gone"]))
	want := map[string]string{
		"healthy":     "",
		"faulted":     "INACCESSIBLE DiskFaulted",
		"maintenance": "DEGRADED DiskInMaintenance",
	}
	text := func(health *csi.VolumeHealth) string {
		var parts []string
		for _, entry := range health.GetHealthStatuses() {
			parts = append(parts, fmt.Sprint(entry.GetStatus(), " ", entry.GetReason()))
		}
		return strings.Join(parts, ", ")
	}
	for state, want := range want {
		got, err := r.ControllerGetVolumeHealth(t.Context(), &csi.ControllerGetVolumeHealthRequest{VolumeId: ids[state]})
		r.Must(t, err)
		if text(got.GetVolumeHealth()) != want || got.GetVolumeHealth().GetVolumeId() != ids[state] {
			t.Errorf("%s: %v", state, got)
		}
	}
	_, err := r.ControllerGetVolumeHealth(t.Context(), &csi.ControllerGetVolumeHealthRequest{VolumeId: ids["gone"]})
	coretest.WantCode(t, err, codes.NotFound)
	for _, size := range []int32{0, 1} {
		got := map[string]string{}
		req := &csi.ControllerListVolumeHealthRequest{MaxEntries: size}
		for {
			list, err := r.ControllerListVolumeHealth(t.Context(), req)
			r.Must(t, err)
			for _, entry := range list.GetEntries() {
				got[entry.GetVolumeId()] = text(entry)
			}
			if req.StartingToken = list.GetNextToken(); req.StartingToken == "" {
				break
			}
		}
		coretest.WantSame(t, got, map[string]string{ids["faulted"]: want["faulted"], ids["maintenance"]: want["maintenance"]})
	}
}

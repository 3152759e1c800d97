// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller_test

import (
	"context"
	"encoding/json"
	"fmt"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	gocmp "github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	grpcmetadata "google.golang.org/grpc/metadata"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
	"github.com/oxidecomputer/oxide-csi-plugin/test/coretest"
)

// withQuestion returns a context with keys in the metadata of a request.
func withQuestion(ctx context.Context, keys ...string) context.Context {
	for _, key := range keys {
		ctx = grpcmetadata.AppendToOutgoingContext(ctx, key, "yes")
	}
	return ctx
}

// answerIn makes a call and returns a value of the header of its answer, or the zero value if the header has none.
func answerIn[T any](t *testing.T, key string, call func(grpc.CallOption) error) (value T) {
	t.Helper()
	var header grpcmetadata.MD
	if err := call(grpc.Header(&header)); err != nil {
		t.Fatal(err)
	}
	return valueIn[T](t, header, key)
}

func valueIn[T any](t *testing.T, header grpcmetadata.MD, key string) (value T) {
	t.Helper()
	for _, text := range header.Get(key) {
		if err := json.Unmarshal([]byte(text), &value); err != nil {
			t.Fatal(err)
		}
	}
	return value
}

func askDetails(t *testing.T, call func(grpc.CallOption) error) map[string]rpc.Details {
	t.Helper()
	return answerIn[map[string]rpc.Details](t, rpc.MetadataDetails, call)
}

// wantDetails compares details. The times of creation must be known, and are not compared.
func wantDetails(t *testing.T, want, got map[string]rpc.Details) {
	t.Helper()
	for id, details := range got {
		if details.Created.IsZero() || time.Since(details.Created) > time.Hour {
			t.Errorf("%s was created at %s", id, details.Created)
		}
		details.Created = time.Time{}
		got[id] = details
	}
	if diff := gocmp.Diff(want, got); diff != "" {
		t.Errorf("details (-want +got):\n%s", diff)
	}
}

// A caller that asks gets the names of volumes and snapshots. Another caller gets the answer of the specification
// alone.
func TestDetails(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	volume := r.Create(t, "postgres")
	brought := r.UserDisk(t, coretest.Project, "brought", "").Id
	created, err := r.CreateSnapshot(t.Context(), &csi.CreateSnapshotRequest{Name: "monday", SourceVolumeId: volume})
	r.Must(t, err)
	snapshot := created.GetSnapshot().GetSnapshotId()
	ofVolume := map[string]rpc.Details{volume: {Name: "postgres"}}
	ofSnapshot := map[string]rpc.Details{
		snapshot: {Name: "monday", RackName: diskname.ForSnapshot(coretest.Cluster, "monday")},
	}
	boot := map[string]rpc.Details{volume: ofVolume[volume]}
	for _, id := range r.bootDisks(t) {
		boot[id] = rpc.Details{Holder: r.Holder(t, id)}
	}
	for _, test := range []struct {
		name string
		want map[string]rpc.Details
		call func(context.Context, grpc.CallOption) error
	}{
		{"ListVolumes", boot, func(ctx context.Context, option grpc.CallOption) error {
			_, err := r.ListVolumes(ctx, &csi.ListVolumesRequest{}, option)
			return err
		}},
		{"ControllerGetVolume", ofVolume, func(ctx context.Context, option grpc.CallOption) error {
			_, err := r.ControllerGetVolume(ctx, &csi.ControllerGetVolumeRequest{VolumeId: volume}, option)
			return err
		}},
		{"ControllerGetVolume of a disk made by hand", map[string]rpc.Details{brought: {}},
			func(ctx context.Context, option grpc.CallOption) error {
				_, err := r.ControllerGetVolume(ctx, &csi.ControllerGetVolumeRequest{VolumeId: brought}, option)
				return err
			}},
		{"ListSnapshots", ofSnapshot, func(ctx context.Context, option grpc.CallOption) error {
			_, err := r.ListSnapshots(ctx, &csi.ListSnapshotsRequest{}, option)
			return err
		}},
		{"ListSnapshots of one", ofSnapshot, func(ctx context.Context, option grpc.CallOption) error {
			_, err := r.ListSnapshots(ctx, &csi.ListSnapshotsRequest{SnapshotId: snapshot}, option)
			return err
		}},
		{"GetSnapshot", ofSnapshot, func(ctx context.Context, option grpc.CallOption) error {
			_, err := r.GetSnapshot(ctx, &csi.GetSnapshotRequest{SnapshotId: snapshot}, option)
			return err
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			wantDetails(t, test.want, askDetails(t, func(option grpc.CallOption) error {
				return test.call(withQuestion(t.Context(), rpc.MetadataAskDetails), option)
			}))
			if got := askDetails(t, func(option grpc.CallOption) error { return test.call(t.Context(), option) }); got != nil {
				t.Errorf("a caller that did not ask got %v", got)
			}
		})
	}
}

// A name that a description cannot hold in full is not told.
func TestDetailsOfACutName(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	description := rack.NewDescription(coretest.Cluster, "postgres", "")
	description.Name = "postg"
	disk := r.UserDisk(t, coretest.Project, "cut", description.Encode()).Id
	wantDetails(t, map[string]rpc.Details{disk: {}}, askDetails(t, func(option grpc.CallOption) error {
		_, err := r.ControllerGetVolume(withQuestion(t.Context(), rpc.MetadataAskDetails),
			&csi.ControllerGetVolumeRequest{VolumeId: disk}, option)
		return err
	}))
}

// The details of a list cost no call of the rack, and the names of the nodes cost one list, however many volumes there
// are.
func TestDetailsCostFewCalls(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	nodes := map[string]string{r.Node(t, "node-a"): "node-a", r.Node(t, "node-b"): "node-b"}
	for n := range 5 {
		r.Must(t, r.Publish(t, r.Create(t, fmt.Sprint("v", n)), r.Node(t, "node-a")))
	}
	list := func(token string) func(grpc.CallOption) error {
		return func(option grpc.CallOption) error {
			ctx := withQuestion(t.Context(), rpc.MetadataAskDetails, rpc.MetadataAskNodeNames)
			page, err := r.ListVolumes(ctx, &csi.ListVolumesRequest{MaxEntries: 3, StartingToken: token}, option)
			token = page.GetNextToken()
			return err
		}
	}
	plain, err := r.ListVolumes(t.Context(), &csi.ListVolumesRequest{MaxEntries: 3})
	r.Must(t, err)
	r.ClearCalls(t)
	_, err = r.ListVolumes(t.Context(), &csi.ListVolumesRequest{MaxEntries: 3})
	r.Must(t, err)
	want := r.Calls(t)
	want["instance_list"] += 2 // a rack ends its list with an empty page
	r.ClearCalls(t)
	if diff := gocmp.Diff(nodes, answerIn[map[string]string](t, rpc.MetadataNodeNames, list(""))); diff != "" {
		t.Errorf("names of nodes (-want +got):\n%s", diff)
	}
	r.WantCalls(t, want)
	if got := answerIn[map[string]string](t, rpc.MetadataNodeNames, list(plain.GetNextToken())); got != nil {
		t.Errorf("the second page has names of nodes: %v", got)
	}
}

// ControllerGetVolume tells the names of nodes also for a volume that does not exist: a detach from a named node
// succeeds for it.
func TestNodeNamesWithoutAVolume(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	var header grpcmetadata.MD
	_, err := r.ControllerGetVolume(withQuestion(t.Context(), rpc.MetadataAskNodeNames),
		&csi.ControllerGetVolumeRequest{VolumeId: coretest.NoVolumeID}, grpc.Header(&header))
	coretest.WantCode(t, err, codes.NotFound)
	if names := valueIn[map[string]string](t, header, rpc.MetadataNodeNames); names[r.Node(t, "node-a")] != "node-a" {
		t.Errorf("names of nodes: %v", names)
	}
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller

import (
	"context"
	"fmt"
	"io"
	"iter"
	"log/slog"
	"net/http"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/proto"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
)

const bigProject = "10000000-0000-4000-8000-000000000000"

// projectOnly is a rack that answers only the look-up of the project.
type projectOnly struct{}

func (projectOnly) RoundTrip(req *http.Request) (*http.Response, error) {
	status, body := http.StatusOK, fmt.Sprintf(`{"id":%q,"name":"demo"}`, bigProject)
	if strings.HasPrefix(req.Header.Get("Api-Version"), "9999") {
		status, body = http.StatusBadRequest, `{"message":"server does not support this API version: 9999"}`
	}
	return &http.Response{
		StatusCode: status, Header: http.Header{}, Request: req, Body: io.NopCloser(strings.NewReader(body)),
	}, nil
}

// bigList yields the disks of a project with many volumes, without a rack.
func bigList(
	disks int,
) func(*rack.Client, context.Context, rack.Cursor, int) iter.Seq2[rack.ListItem[rack.Disk], error] {
	return func(_ *rack.Client, _ context.Context, from rack.Cursor, _ int) iter.Seq2[rack.ListItem[rack.Disk], error] {
		return func(yield func(rack.ListItem[rack.Disk], error) bool) {
			for n := range disks {
				id := fmt.Sprintf("%08d-0000-4000-8000-000000000000", n)
				if id <= from.LastID {
					continue
				}
				disk := rack.Disk{
					VolumeID: id, Name: diskname.ForVolume("c", id), ProjectID: bigProject, SizeBytes: 1 << 40, BlockSize: 4096,
					State: rack.Attached, InstanceID: id,
				}
				if !yield(rack.ListItem[rack.Disk]{Value: disk, ID: id}, nil) {
					return
				}
			}
		}
	}
}

// A hundred thousand volumes are listed as external-attacher does it: without max_entries, following next_token. Each
// response fits into the message size that a gRPC client accepts by default.
func TestListOfManyVolumesFitsIntoMessages(t *testing.T) {
	const volumes, receiveLimit = 100_000, 4 << 20
	client, err := rack.New(rack.Config{
		Name: "east", Host: "http://rack", Project: "demo", Token: rack.FixedToken("oxide-token-x"),
		HTTPClient: &http.Client{Transport: projectOnly{}},
	})
	if err != nil {
		t.Fatal(err)
	}
	c := New(Options{Racks: []*rack.Client{client}, Cluster: "c", Log: slog.New(slog.DiscardHandler)})
	listed := map[string]bool{}
	responses := 0
	for token := ""; responses == 0 || token != ""; responses++ {
		entries, next, err := listPage(
			t.Context(), c, bigList(volumes), diskProject, &csi.ListVolumesRequest{StartingToken: token},
			func(rc rackController, disk rack.Disk) *csi.ListVolumesResponse_Entry {
				return &csi.ListVolumesResponse_Entry{
					Volume: rc.volume(disk, parameters{}),
					Status: &csi.ListVolumesResponse_VolumeStatus{PublishedNodeIds: publishedNodes(disk, nil)},
				}
			},
		)
		if err != nil {
			t.Fatal(err)
		}
		if size := proto.Size(&csi.ListVolumesResponse{Entries: entries, NextToken: next}); size > receiveLimit {
			t.Errorf("a response has %d bytes, more than %d", size, receiveLimit)
		}
		for _, entry := range entries {
			listed[entry.GetVolume().GetVolumeId()] = true
		}
		token = next
	}
	if len(listed) != volumes || responses > 12 {
		t.Errorf("%d volumes in %d responses, want %d in at most 12", len(listed), responses, volumes)
	}
}

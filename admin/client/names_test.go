// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package client_test

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"

	"github.com/oxidecomputer/oxide-csi-plugin/admin/client"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// oldController is a controller of a version that tells no names. It has one snapshot.
type oldController struct {
	csi.UnimplementedIdentityServer
	csi.UnimplementedControllerServer
}

func (oldController) GetPluginInfo(context.Context, *csi.GetPluginInfoRequest) (*csi.GetPluginInfoResponse, error) {
	return &csi.GetPluginInfoResponse{Manifest: map[string]string{rpc.ManifestClusterID: "lab"}}, nil
}

func (oldController) ListSnapshots(context.Context, *csi.ListSnapshotsRequest) (*csi.ListSnapshotsResponse, error) {
	return &csi.ListSnapshotsResponse{Entries: []*csi.ListSnapshotsResponse_Entry{
		{Snapshot: &csi.Snapshot{SnapshotId: "0b19a3c4-5a1e-4a56-8d5f-6a1c2e3d4f50", SourceVolumeId: "x"}},
	}}, nil
}

func (oldController) ListVolumes(context.Context, *csi.ListVolumesRequest) (*csi.ListVolumesResponse, error) {
	return &csi.ListVolumesResponse{}, nil
}

func (oldController) ControllerGetVolume(
	context.Context,
	*csi.ControllerGetVolumeRequest,
) (*csi.ControllerGetVolumeResponse, error) {
	return &csi.ControllerGetVolumeResponse{Volume: &csi.Volume{VolumeId: "x"}}, nil
}

// A controller that tells no names is an error. Otherwise a deletion by name would report that nothing has the name.
func TestControllerWithoutNames(t *testing.T) {
	dir, err := os.MkdirTemp("", "oxc") // the path of a socket is short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	socket := filepath.Join(dir, "csi.sock")
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	csi.RegisterIdentityServer(server, oldController{})
	csi.RegisterControllerServer(server, oldController{})
	go func() { _ = server.Serve(listener) }() // it ends with Stop
	t.Cleanup(server.Stop)
	plugin, err := client.New(client.Options{Controller: socket, Node: socket})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = plugin.Close() })
	const volume = "c7d20e51-9a41-4d5c-8e7f-1a232b7d4e58"
	for name, call := range map[string]func() error{
		"DeleteSnapshot": func() error { _, err := plugin.DeleteSnapshot(t.Context(), "monday"); return err },
		"ListVolumes":    func() error { _, err := plugin.ListVolumes(t.Context(), false); return err },
		"Attach":         func() error { _, err := plugin.Attach(t.Context(), volume, "worker-1"); return err },
	} {
		if err := call(); err == nil || !strings.Contains(err.Error(), "use oxide-csi in the controller's version") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package client_test

import (
	"net"
	"path/filepath"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"

	"github.com/oxidecomputer/oxide-csi-plugin/admin/client"
)

// On a busy host a plugin takes a connection late. That is no plugin that does not respond.
func TestPluginTakesAConnectionLate(t *testing.T) {
	t.Parallel()
	socket := filepath.Join(t.TempDir(), "csi.sock")
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	csi.RegisterControllerServer(server, csi.UnimplementedControllerServer{})
	late := time.AfterFunc(2*time.Second, func() { _ = server.Serve(listener) })
	t.Cleanup(func() { late.Stop(); server.Stop(); _ = listener.Close() })
	plugin, err := client.New(client.Options{Controller: socket, Node: socket})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = plugin.Close() })
	_, err = plugin.ListSnapshots(t.Context(), "")
	if got := client.ExitCode(err); got != 1 { // CSI's Unimplemented
		t.Errorf("exit code %d: %v", got, err)
	}
}

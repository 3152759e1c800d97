// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package core_test

import (
	"context"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/oxidecomputer/oxide-csi-plugin/core"
	"github.com/oxidecomputer/oxide-csi-plugin/core/controller"
	"github.com/oxidecomputer/oxide-csi-plugin/core/device/devicetest"
	"github.com/oxidecomputer/oxide-csi-plugin/core/node"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/socket"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata/static"
	"github.com/oxidecomputer/oxide-csi-plugin/test/await"
	"github.com/oxidecomputer/oxide-csi-plugin/test/coretest"
)

// TestCapabilities compares the complete lists of advertised capabilities.
func TestCapabilities(t *testing.T) {
	e := newEverything(t)
	plugin, err := e.IdentityClient.GetPluginCapabilities(t.Context(), &csi.GetPluginCapabilitiesRequest{})
	e.Must(t, err)
	var services []string
	for _, capability := range plugin.GetCapabilities() {
		if expansion := capability.GetVolumeExpansion(); expansion != nil {
			services = append(services, "volume expansion "+expansion.GetType().String())
			continue
		}
		services = append(services, capability.GetService().GetType().String())
	}
	coretest.WantSame(
		t,
		services,
		[]string{
			"CONTROLLER_SERVICE", "VOLUME_ACCESSIBILITY_CONSTRAINTS", "SNAPSHOT_ACCESSIBILITY_CONSTRAINTS",
			"volume expansion OFFLINE",
		},
	)

	controller, err := csi.NewControllerClient(e.Conn).
		ControllerGetCapabilities(t.Context(), &csi.ControllerGetCapabilitiesRequest{})
	e.Must(t, err)
	var rpcs []string
	for _, capability := range controller.GetCapabilities() {
		rpcs = append(rpcs, capability.GetRpc().GetType().String())
	}
	coretest.WantSame(t, rpcs, []string{
		"CREATE_DELETE_VOLUME",
		"PUBLISH_UNPUBLISH_VOLUME",
		"LIST_VOLUMES",
		"LIST_VOLUMES_PUBLISHED_NODES",
		"GET_VOLUME",
		"GET_VOLUME_HEALTH",
		"LIST_VOLUME_HEALTH",
		"GET_CAPACITY",
		"CREATE_DELETE_SNAPSHOT",
		"LIST_SNAPSHOTS",
		"GET_SNAPSHOT",
		"CLONE_VOLUME",
		"EXPAND_VOLUME",
		"SINGLE_NODE_MULTI_WRITER",
	})

	node, err := csi.NewNodeClient(e.Conn).NodeGetCapabilities(t.Context(), &csi.NodeGetCapabilitiesRequest{})
	e.Must(t, err)
	rpcs = nil
	for _, capability := range node.GetCapabilities() {
		rpcs = append(rpcs, capability.GetRpc().GetType().String())
	}
	coretest.WantSame(
		t,
		rpcs,
		[]string{
			"STAGE_UNSTAGE_VOLUME",
			"GET_VOLUME_STATS",
			"SINGLE_NODE_MULTI_WRITER",
			"GET_VOLUME_HEALTH",
			"GET_STORAGE_HEALTH",
		},
	)
}

// A service that the mode does not include answers UNIMPLEMENTED with the mode. GetPluginCapabilities is the same in
// every mode.
func TestModes(t *testing.T) {
	var descriptions []*csi.GetPluginCapabilitiesResponse
	for _, test := range []struct {
		mode             string
		controller, node bool
	}{{"controller", true, false}, {"node", false, true}, {"all", true, true}} {
		t.Run(test.mode, func(t *testing.T) {
			r := coretest.New(t)
			opts := coretest.ServerOptions(test.mode)
			if test.controller {
				opts.Controller = controller.New(
					controller.Options{
						Racks:    []*rack.Client{coretest.RackClient(t, r, nil)},
						Cluster:  coretest.Cluster,
						MaxDisks: 8,
						Log:      coretest.DiscardLog(),
					},
				)
			}
			if test.node {
				opts.Node = node.New(node.Options{
					Provider: static.New(static.Options{InstanceID: r.Node(t, "node-a")}), Rack: "default", MaxDisks: 8,
					Devices: devicetest.NewBare(t).Roots(), StateDir: t.TempDir(), Log: coretest.DiscardLog(),
				})
			}
			conn, _ := coretest.Serve(t, core.NewServer(opts))
			for service, on := range map[string]bool{"Identity": true, "Controller": test.controller, "Node": test.node} {
				for _, rpc := range rpcsOf(t, service) {
					_, err := invoke(t.Context(), conn, rpc, newRequest(t, rpc))
					_, served := badInputRPCs[string(rpc.Name())]
					switch {
					case !on:
						coretest.WantCode(t, err, codes.Unimplemented, `mode "`+test.mode+`"`, strings.ToLower(service)+" service")
					case !served:
						coretest.WantCode(t, err, codes.Unimplemented, string(rpc.Name()))
					case err != nil: // most empty requests are invalid
						coretest.WantCode(t, err, codes.InvalidArgument)
					}
				}
			}
			description, err := csi.NewIdentityClient(conn).
				GetPluginCapabilities(t.Context(), &csi.GetPluginCapabilitiesRequest{})
			r.Must(t, err)
			descriptions = append(descriptions, description)
		})
	}
	for _, description := range descriptions[1:] {
		if diff := cmp.Diff(descriptions[0], description, protocmp.Transform()); diff != "" {
			t.Errorf("the capabilities differ between modes:\n%s", diff)
		}
	}
}

func TestUnknownServices(t *testing.T) {
	e := newEverything(t)
	for _, rpc := range rpcsOf(t, "GroupController", "SnapshotMetadata") {
		stream, err := e.Conn.NewStream(
			t.Context(),
			&grpc.StreamDesc{ServerStreams: true},
			fmt.Sprintf("/%s/%s", rpc.Parent().FullName(), rpc.Name()),
		)
		e.Must(t, err)
		e.Must(t, stream.SendMsg(newRequest(t, rpc)))
		coretest.WantCode(t, stream.RecvMsg(&csi.ProbeResponse{}), codes.Unimplemented, string(rpc.Parent().Name()))
	}
}

func TestProbeAnswersReadiness(t *testing.T) {
	readiness := &core.Readiness{}
	opts := coretest.ServerOptions("node")
	opts.Identity = core.NewIdentity("1.2.3", "prod-1", readiness)
	conn, _ := coretest.Serve(t, core.NewServer(opts))
	client := csi.NewIdentityClient(conn)
	readiness.SetWaiting("something")
	resp, err := client.Probe(t.Context(), &csi.ProbeRequest{})
	if err != nil || resp.GetReady() == nil || resp.GetReady().GetValue() {
		t.Errorf("Probe answers %v, %v although the plugin is not ready", resp, err)
	}
	info, err := client.GetPluginInfo(t.Context(), &csi.GetPluginInfoRequest{})
	if err != nil {
		t.Fatal(err)
	}
	coretest.WantSame(
		t,
		info,
		&csi.GetPluginInfoResponse{
			Name:          "csi.oxide.computer",
			VendorVersion: "1.2.3",
			Manifest:      map[string]string{"clusterID": "prod-1"},
		},
	)
}

// goAllowed are the functions that may start a goroutine, in packages that serve RPCs. The values say why a panic in
// the goroutine does not end the process.
var goAllowed = map[string]string{
	"hostexec/hostexec.go: wait":     "it only waits for a program, in the standard library",
	"mount/check.go: startLocked":    "it hands its panic to the RPC that reads the result",
	"node/probe.go: run":             "it hands its panic to the RPCs that wait for it",
	"detach/detach.go: within":       "it recovers its panic itself",
	"controller/expand.go: recorded": "it recovers its panic itself",
	"expand/look.go: Look":           "it hands its panic to the caller that waits for it",
	"controller/racks.go: queryAll":  "it hands its panic to the RPC that reads the results",
	"controller/sweep.go: schedule":  "it recovers its panic itself",
	"rack/deadline.go: RoundTrip":    "it only ends a context, which cannot panic",
}

// TestGoroutinesRecoverPanics finds functions that start goroutines. The interceptor recovers only panics of the
// goroutine that serves the RPC. A panic in any other goroutine would end the process.
func TestGoroutinesRecoverPanics(t *testing.T) {
	found := map[string]bool{}
	for _, dir := range []string{".", "controller", "detach", "expand", "node", "rpc", "keylock", "rack", "device", "mount", "metrics", "shutdown", "hostexec", "volumelock", "volumerecord", "statefile"} {
		files := token.NewFileSet()
		entries, err := os.ReadDir(dir)
		coretest.Must(t, err)
		parsed := 0
		for _, entry := range entries {
			name := filepath.Join(dir, entry.Name())
			if !strings.HasSuffix(name, ".go") || strings.HasSuffix(name, "_test.go") {
				continue
			}
			file, err := parser.ParseFile(files, name, nil, 0)
			coretest.Must(t, err)
			parsed++
			for _, declaration := range file.Decls {
				function := "a variable"
				if f, is := declaration.(*ast.FuncDecl); is {
					function = f.Name.Name
				}
				ast.Inspect(declaration, func(node ast.Node) bool {
					if !startsGoroutine(node) {
						return true
					}
					place := name + ": " + function
					found[place] = true
					if goAllowed[place] == "" {
						t.Errorf("%s starts a goroutine, and nothing recovers its panic", files.Position(node.Pos()))
					}
					return true
				})
			}
		}
		if parsed == 0 {
			t.Errorf("no files in %s", dir)
		}
	}
	for place := range goAllowed {
		if !found[place] {
			t.Errorf("%s is allowed to start a goroutine and does not", place)
		}
	}
}

// startsGoroutine recognizes go statements, methods Go of WaitGroup and the like, and time.AfterFunc.
func startsGoroutine(node ast.Node) bool {
	if _, is := node.(*ast.GoStmt); is {
		return true
	}
	call, is := node.(*ast.CallExpr)
	if !is {
		return false
	}
	selector, is := call.Fun.(*ast.SelectorExpr)
	return is && (selector.Sel.Name == "Go" || selector.Sel.Name == "AfterFunc")
}

// A signal can stop the server before it serves.
func TestStopBeforeServe(t *testing.T) {
	for name, stop := range map[string]func(*core.Server){"Stop": (*core.Server).Stop, "StopNow": (*core.Server).StopNow} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "csi.sock")
			listener, err := socket.Listen(path)
			if err != nil {
				t.Fatal(err)
			}
			server := core.NewServer(
				core.ServerOptions{
					Mode:     "node",
					Identity: core.NewIdentity("test", "", &core.Readiness{}),
					Log:      slog.New(slog.DiscardHandler),
				},
			)
			stop(server)
			if err := server.Serve(listener); err != nil {
				t.Error(err)
			}
			if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("the socket is still there: %v", err)
			}
		})
	}
}

// A server that stops answers the calls in flight and rejects new ones.
func TestStopFinishesCallsInFlight(t *testing.T) {
	gate := &coretest.Gate{}
	r, conn, server := gatedController(t, gate)
	answered := make(chan error, 1)
	hold := gate.Hold("POST", "/v1/disks")
	go func() {
		_, err := csi.NewControllerClient(conn).CreateVolume(t.Context(), coretest.CreateRequest("v"))
		answered <- err
	}()
	hold.Entered(t)
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		server.Stop()
	}()
	await.Eventually(t, "a new call is rejected", func() bool {
		_, err := csi.NewIdentityClient(conn).Probe(context.Background(), &csi.ProbeRequest{})
		return err != nil
	})
	select {
	case <-stopped:
		t.Fatal("the server stopped with a call in flight")
	case err := <-answered:
		t.Fatalf("the call in flight ended: %v", err)
	default:
	}
	hold.Release()
	coretest.Must(t, <-answered)
	<-stopped
	if ids := r.Volumes(t); len(ids) != 1 {
		t.Errorf("%d disks, want 1", len(ids))
	}
}

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
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/oxidecomputer/oxide-csi-plugin/core"
	"github.com/oxidecomputer/oxide-csi-plugin/core/controller"
	"github.com/oxidecomputer/oxide-csi-plugin/core/device/devicetest"
	"github.com/oxidecomputer/oxide-csi-plugin/core/node"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata/static"
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

// answerDelay is how long a busy plugin of TestListen accepts no connections. Listen tries again meanwhile. This is
// real time, because nothing shows that Listen has tried.
const answerDelay = 100 * time.Millisecond

func TestListen(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name string
		// prepare creates a file at the path.
		prepare func(t *testing.T, path string)
		// rejected is a text in the error.
		rejected string
	}{
		{name: "no file", prepare: func(*testing.T, string) {}},
		{name: "a stale socket", prepare: staleSocket},
		{name: "a socket on which a killed process with a hung thread listens", prepare: func(t *testing.T, path string) {
			silentSocket(t, path)
		}},
		{name: "the same with a full queue", prepare: func(t *testing.T, path string) { fillQueue(t, silentSocket(t, path)) }},
		{name: "a busy plugin with a full queue", rejected: "is in use", prepare: func(t *testing.T, path string) {
			other := shortQueue(t, path)
			fillQueue(t, path)
			server := &http.Server{Handler: http.NotFoundHandler()}
			time.AfterFunc(answerDelay, func() { _ = server.Serve(other) }) // it ends with the test
			t.Cleanup(func() { coretest.Must(t, server.Close()) })
		}},
		{name: "a socket of a program that is no CSI plugin", rejected: "is in use", prepare: func(t *testing.T, path string) {
			other, err := net.Listen("unix", path)
			coretest.Must(t, err)
			server := &http.Server{Handler: http.NotFoundHandler()}
			go func() { _ = server.Serve(other) }() // it ends with the test
			t.Cleanup(func() { coretest.Must(t, server.Close()) })
		}},
		{name: "a file", rejected: "is not a socket", prepare: func(t *testing.T, path string) {
			coretest.Must(t, os.WriteFile(path, []byte("precious"), 0o600))
		}},
		{name: "an empty file", rejected: "is not a socket", prepare: func(t *testing.T, path string) {
			coretest.Must(t, os.WriteFile(path, nil, 0o600))
		}},
		{name: "a folder", rejected: "is not a socket", prepare: func(t *testing.T, path string) {
			coretest.Must(t, os.Mkdir(path, 0o700))
		}},
		{name: "a link to a stale socket", rejected: "is not a socket", prepare: func(t *testing.T, path string) {
			staleSocket(t, path+"-elsewhere")
			coretest.Must(t, os.Symlink(path+"-elsewhere", path))
		}},
		{name: "a link to nothing", rejected: "is not a socket", prepare: func(t *testing.T, path string) {
			coretest.Must(t, os.Symlink(path+"-elsewhere", path))
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			dir := coretest.ShortDir(t)
			path := filepath.Join(dir, "csi.sock")
			test.prepare(t, path)
			before := coretest.Listing(t, dir)
			listener, err := core.Listen(path)
			if test.rejected != "" {
				if err == nil || !strings.Contains(err.Error(), test.rejected) || !strings.Contains(err.Error(), path) {
					t.Errorf("error %v, want one with the path and %q", err, test.rejected)
				}
				if diff := cmp.Diff(before, coretest.Listing(t, dir)); diff != "" {
					t.Errorf("the folder changed (-before +after):\n%s", diff)
				}
				return
			}
			coretest.Must(t, err)
			if info, err := os.Lstat(path); err != nil || info.Mode() != fs.ModeSocket|0o660 {
				t.Errorf("socket %v, %v; want mode 0660", info.Mode(), err)
			}
			if entries := coretest.Listing(t, dir); len(entries) != 1 {
				t.Errorf("files beside the socket: %v", entries)
			}
			accepted := make(chan error, 1)
			go func() {
				conn, err := listener.Accept()
				if err == nil {
					err = conn.Close()
				}
				accepted <- err
			}()
			conn, err := net.Dial("unix", path)
			coretest.Must(t, err)
			coretest.Must(t, errors.Join(conn.Close(), <-accepted, listener.Close()))
			if entries := coretest.Listing(t, dir); len(entries) != 0 {
				t.Errorf("files after the close: %v", entries)
			}
		})
	}
	t.Run("the process that uses the socket is not disturbed", func(t *testing.T) {
		conn, path := coretest.Serve(t, core.NewServer(coretest.ServerOptions("all")))
		if _, err := core.Listen(path); err == nil {
			t.Fatal("a socket in use was taken")
		}
		if _, err := csi.NewIdentityClient(conn).Probe(t.Context(), &csi.ProbeRequest{}); err != nil {
			t.Error(err)
		}
		fresh, err := grpc.NewClient("unix://"+path, grpc.WithTransportCredentials(insecure.NewCredentials()))
		coretest.Must(t, err)
		defer func() { coretest.Must(t, fresh.Close()) }()
		if _, err := csi.NewIdentityClient(fresh).Probe(t.Context(), &csi.ProbeRequest{}); err != nil {
			t.Error(err)
		}
	})
	t.Run("missing folder", func(t *testing.T) {
		path := filepath.Join(coretest.ShortDir(t), "missing", "csi.sock")
		if _, err := core.Listen(
			path,
		); err == nil || !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), path) ||
			!strings.Contains(err.Error(), "folder exists") {
			t.Errorf("error %v", err)
		}
	})
}

// silentSocket listens on a socket and accepts no connection. It returns the path.
func silentSocket(t *testing.T, path string) string {
	t.Helper()
	other, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	coretest.Must(t, err)
	other.SetUnlinkOnClose(false) // as the kernel closes it
	t.Cleanup(func() { coretest.Must(t, other.Close()) })
	return path
}

// shortQueue listens on a socket whose queue is full after a few connections, so that a server has soon accepted them.
func shortQueue(t *testing.T, path string) net.Listener {
	t.Helper()
	fd, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	coretest.Must(t, err)
	file := os.NewFile(uintptr(fd), path)
	defer file.Close()
	coretest.Must(t, syscall.Bind(fd, &syscall.SockaddrUnix{Name: path}))
	coretest.Must(t, syscall.Listen(fd, 1))
	listener, err := net.FileListener(file)
	coretest.Must(t, err)
	return listener
}

// fillQueue connects to a socket until its queue is full.
func fillQueue(t *testing.T, path string) {
	t.Helper()
	for {
		conn, err := net.Dial("unix", path)
		if errors.Is(err, syscall.EAGAIN) {
			return
		}
		coretest.Must(t, err)
		t.Cleanup(func() { coretest.Must(t, conn.Close()) })
	}
}

// A socket whose file was removed or replaced reaches this process no longer. Closing it keeps the other's file.
func TestSocketThatLostItsFile(t *testing.T) {
	for name, lose := range map[string]func(t *testing.T, path string){
		"removed": func(t *testing.T, path string) { coretest.Must(t, os.Remove(path)) },
		"replaced": func(t *testing.T, path string) {
			coretest.Must(t, os.Remove(path))
			coretest.Must(t, os.WriteFile(path, []byte("precious"), 0o600))
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := coretest.ShortDir(t)
			path := filepath.Join(dir, "csi.sock")
			socket, err := core.Listen(path)
			coretest.Must(t, err)
			server := core.NewServer(coretest.ServerOptions("node"))
			served := make(chan error, 1)
			go func() { served <- server.Serve(socket) }()
			if err := socket.CheckLive(t.Context()); err != nil {
				t.Errorf("a good socket: %v", err)
			}
			lose(t, path)
			before := coretest.Listing(t, dir)
			if err := socket.CheckLive(t.Context()); err == nil || !strings.Contains(err.Error(), path) {
				t.Errorf("%v, want an error with the path", err)
			}
			server.StopNow()
			coretest.Must(t, <-served)
			if diff := cmp.Diff(before, coretest.Listing(t, dir)); diff != "" {
				t.Errorf("the folder changed (-before +after):\n%s", diff)
			}
		})
	}
}

// A server that does not answer is not live.
func TestSocketThatDoesNotAnswer(t *testing.T) {
	t.Parallel()
	socket, err := core.Listen(filepath.Join(coretest.ShortDir(t), "csi.sock"))
	coretest.Must(t, err)
	defer func() { coretest.Must(t, socket.Close()) }()
	if err := socket.CheckLive(t.Context()); status.Code(errors.Unwrap(err)) != codes.DeadlineExceeded {
		t.Errorf("%v, want that no RPC is answered in time", err)
	}
}

// staleSocket leaves a socket behind, as a killed process does.
func staleSocket(t *testing.T, path string) {
	t.Helper()
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	coretest.Must(t, err)
	listener.SetUnlinkOnClose(false)
	coretest.Must(t, listener.Close())
}

// goAllowed are the functions that may start a goroutine, in packages that serve RPCs. The values say why a panic in
// the goroutine does not end the process.
var goAllowed = map[string]string{
	"hostexec/hostexec.go: wait":    "it only waits for a program, in the standard library",
	"mount/check.go: startLocked":   "it hands its panic to the RPC that reads the result",
	"node/probe.go: run":            "it hands its panic to the RPCs that wait for it",
	"controller/racks.go: queryAll": "it hands its panic to the RPC that reads the results",
	"controller/sweep.go: schedule": "it recovers its panic itself",
	"rack/deadline.go: RoundTrip":   "it only ends a context, which cannot panic",
}

// TestGoroutinesRecoverPanics finds functions that start goroutines. The interceptor recovers only panics of the
// goroutine that serves the RPC. A panic in any other goroutine would end the process.
func TestGoroutinesRecoverPanics(t *testing.T) {
	found := map[string]bool{}
	for _, dir := range []string{".", "controller", "node", "rpc", "keylock", "rack", "device", "mount", "metrics", "shutdown", "hostexec", "volumelock", "volumerecord", "statefile"} {
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
			socket := filepath.Join(t.TempDir(), "csi.sock")
			listener, err := core.Listen(socket)
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
			if _, err := os.Lstat(socket); !errors.Is(err, fs.ErrNotExist) {
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
	coretest.Eventually(t, "a new call is rejected", func() bool {
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

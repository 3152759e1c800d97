// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main_test

import (
	"bufio"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/test/await"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

const instanceID = "6f3a1c9e-2b7d-4e58-9a41-0d5c8e7f1a23"

// freePort returns a loopback address that no process listens on.
func freePort(t *testing.T) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	must(t, listener.Close())
	return listener.Addr().String()
}

// get returns the status and body of a page. The status is 0 if the connection fails.
func get(t *testing.T, url string) (int, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	must(t, err)
	client := &http.Client{Timeout: 30 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Do(req)
	if err != nil {
		return 0, err.Error()
	}
	body, err := io.ReadAll(resp.Body)
	must(t, err)
	must(t, resp.Body.Close())
	return resp.StatusCode, string(body)
}

// A node without its identity is live but not ready, and says what it waits for. It becomes ready when the identity
// appears.
func TestNodeWaitsForItsIdentity(t *testing.T) {
	t.Parallel()
	dir, addr := shortDir(t), freePort(t)
	file := filepath.Join(dir, "identity.env")
	opts := simtest.PluginOptions{Mode: "node", Dir: dir, Instance: simtest.Instance{ID: "unused"}, Args: []string{
		"--instance-id=", "--metadata-file=" + file, "--http-endpoint=" + addr, "--sys-root=" + dir,
	}}
	must(t, os.Mkdir(filepath.Join(dir, "block"), 0o755)) // a guest without disks
	type started struct {
		plugin *simtest.Plugin
		err    error
	}
	ready := make(chan started, 1)
	go func() { // StartPlugin returns when the plugin is ready
		plugin, err := simtest.StartPlugin(programs.Plugin, opts)
		ready <- started{plugin, err}
	}()
	conn, err := grpc.NewClient("unix://"+opts.Socket(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	must(t, err)
	defer func() { must(t, conn.Close()) }()
	ctx := within(t, 2*time.Minute)
	probe, err := csi.NewIdentityClient(conn).Probe(ctx, &csi.ProbeRequest{}, grpc.WaitForReady(true))
	if err != nil || probe.GetReady() == nil || probe.GetReady().GetValue() {
		t.Errorf("Probe: %v, %v; want ready: false", probe, err)
	}
	_, err = csi.NewNodeClient(conn).NodeGetInfo(ctx, &csi.NodeGetInfoRequest{})
	if status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), file) {
		t.Errorf("NodeGetInfo: %v, want UNAVAILABLE naming the file", err)
	}
	if code, body := get(t, "http://"+addr+"/livez"); code != 200 || body != "ok\n" {
		t.Errorf("/livez: %d %q", code, body)
	}
	await.Eventually(t, "/readyz says what the plugin waits for", func() bool {
		code, body := get(t, "http://"+addr+"/readyz")
		return code == 503 && strings.HasPrefix(body, "not ready: identity of this node: wait for "+file)
	})
	if _, page := get(t, "http://"+addr+"/metrics"); !strings.Contains(page, "\noxide_csi_ready 0\n") {
		t.Error("the metrics do not say that the plugin is not ready")
	}
	select {
	case s := <-ready:
		t.Fatalf("the plugin is ready without an identity: %v", s.err)
	default:
	}

	must(t, os.WriteFile(file+".new", []byte("OXIDE_INSTANCE_ID="+instanceID+"\nOXIDE_RACK=west\n"), 0o644))
	must(t, os.Rename(file+".new", file))
	s := <-ready
	must(t, s.err)
	defer func() { must(t, s.plugin.Stop()) }()
	info, err := csi.NewNodeClient(conn).NodeGetInfo(ctx, &csi.NodeGetInfoRequest{})
	if err != nil || info.GetNodeId() != instanceID ||
		info.GetAccessibleTopology().GetSegments()["topology.csi.oxide.computer/rack"] != "west" {
		t.Errorf("NodeGetInfo: %v, %v", info, err)
	}
	if code, body := get(t, "http://"+addr+"/readyz"); code != 200 || body != "ok\n" {
		t.Errorf("/readyz: %d %q", code, body)
	}
	if _, page := get(t, "http://"+addr+"/metrics"); !strings.Contains(page, "\noxide_csi_ready 1\n") {
		t.Error("the metrics do not say that the plugin is ready")
	}
	if n := strings.Count(s.plugin.Stderr().String(), "this node is not known yet"); n != 1 {
		t.Errorf("the log has the reason %d times, want once: %s", n, s.plugin.Stderr())
	}
}

func TestSignalStopsANodeThatWaits(t *testing.T) {
	t.Parallel()
	dir := shortDir(t)
	opts := simtest.PluginOptions{
		Mode:     "all",
		Dir:      dir,
		Sim:      startSim(t),
		Instance: simtest.Instance{ID: instanceID},
		Args:     []string{"--instance-id=", "--metadata-file=" + dir + "/none"},
	}
	flags, err := opts.Flags()
	must(t, err)
	p := startProcess(t, flags...)
	await.Eventually(t, "the plugin serves", func() bool { return strings.Contains(p.stderr.String(), "msg=serving") })
	must(t, p.cmd.Process.Signal(os.Interrupt))
	if err := p.wait(t); err != nil {
		t.Errorf("%v: %s", err, p.stderr)
	}
	if exists(t, opts.Socket()) {
		t.Error("the socket was not removed")
	}
}

func TestHTTPEndpoint(t *testing.T) {
	t.Parallel()
	sim := startSim(t)
	for _, test := range []struct {
		name  string
		flags []string
		pages map[string]int
	}{
		{"without profiles", nil, map[string]int{"/livez": 200, "/readyz": 200, "/metrics": 200, "/debug/pprof/": 404, "/": 404}},
		{"with profiles", []string{"--pprof"}, map[string]int{"/livez": 200, "/debug/pprof/": 200, "/debug/pprof/heap": 200, "/debug/pprof/cmdline": 200, "/debug/pprof/profile?seconds=1": 200, "/debug/pprof/trace?seconds=1": 200}},
	} {
		t.Run(test.name, func(t *testing.T) {
			addr := freePort(t)
			plugin := startPlugin(
				t,
				simtest.PluginOptions{
					Mode: "controller",
					Dir:  shortDir(t),
					Sim:  sim,
					Args: append(test.flags, "--http-endpoint="+addr),
				},
			)
			_, err := plugin.CreateVolume(t.Context(), createRequest("v"))
			must(t, err)
			await.Eventually(
				t,
				"the rack responds",
				func() bool { code, _ := get(t, "http://"+addr+"/readyz"); return code == 200 },
			)
			for page, want := range test.pages {
				code, body := get(t, "http://"+addr+page)
				if code != want {
					t.Errorf("%s: %d, want %d: %.200s", page, code, want, body)
				}
				if strings.Contains(body, sim.Token) {
					t.Errorf("%s contains the token", page)
				}
			}
			must(t, plugin.Stop())
			if code, _ := get(t, "http://"+addr+"/livez"); code != 0 {
				t.Errorf("/livez answers %d after the plugin has ended", code)
			}
		})
	}
	t.Run("the address is in use", func(t *testing.T) {
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		must(t, err)
		addr := listener.Addr().String()
		plugin := startPlugin(t, simtest.PluginOptions{
			Mode: "controller", Dir: shortDir(t), Sim: sim, Args: []string{"--http-endpoint=" + addr},
		})
		if _, err := plugin.Probe(t.Context(), &csi.ProbeRequest{}); err != nil {
			t.Errorf("the plugin does not serve CSI: %v", err)
		}
		must(t, listener.Close())
		await.Eventually(t, "the address is served when it is free", func() bool {
			code, _ := get(t, "http://"+addr+"/livez")
			return code == 200
		})
	})
	t.Run("the socket was removed", func(t *testing.T) {
		addr := freePort(t)
		plugin := startPlugin(t, simtest.PluginOptions{
			Mode: "controller", Dir: shortDir(t), Sim: sim, Args: []string{"--http-endpoint=" + addr},
		})
		must(t, os.Remove(plugin.Socket))
		code, body := get(t, "http://"+addr+"/livez")
		_, err := os.Stat(plugin.Socket)
		madeAgain := code == 200 && err == nil // the plugin may be faster than this test
		if !madeAgain && (code != 503 || !strings.Contains(body, "removed or replaced")) {
			t.Errorf("/livez: %d %q", code, body)
		}
	})
	t.Run("no connection can be made", func(t *testing.T) {
		addr := freePort(t)
		plugin := startPlugin(t, simtest.PluginOptions{
			Mode: "controller", Dir: shortDir(t), Sim: sim, Args: []string{"--http-endpoint=" + addr},
		})
		early := []net.Conn{dial(t, addr), dial(t, addr)} // accepted before the limit
		live := func(conn net.Conn) (int, string) { return ask(t, conn, "/livez") }
		if code, body := live(dial(t, addr)); code != 200 {
			t.Fatalf("/livez: %d %q", code, body)
		}
		// Without a free file descriptor the plugin makes and accepts no connection. Those that it has go on.
		var limit unix.Rlimit
		must(t, unix.Prlimit(plugin.PID(), unix.RLIMIT_NOFILE, nil, &limit))
		defer func() { must(t, unix.Prlimit(plugin.PID(), unix.RLIMIT_NOFILE, &limit, nil)) }()
		must(t, unix.Prlimit(plugin.PID(), unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 4, Max: limit.Max}, nil))
		if code, body := live(early[0]); code != 503 || !strings.Contains(body, "no RPC gets a response on "+plugin.Socket) {
			t.Errorf("/livez: %d %q", code, body)
		}
		must(t, unix.Prlimit(plugin.PID(), unix.RLIMIT_NOFILE, &limit, nil))
		if code, body := live(early[1]); code != 200 {
			t.Errorf("/livez: %d %q", code, body)
		}
	})
}

// dial connects to an address until the test ends.
func dial(t *testing.T, addr string) net.Conn {
	t.Helper()
	conn, err := net.Dial("tcp", addr)
	must(t, err)
	t.Cleanup(func() { _ = conn.Close() }) // the plugin may have closed it
	must(t, conn.SetDeadline(time.Now().Add(time.Minute)))
	return conn
}

// ask sends a request for a page on a connection, and returns the status and the body of the answer.
func ask(t *testing.T, conn net.Conn, page string) (int, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://plugin"+page, nil)
	must(t, err)
	must(t, req.Write(conn))
	resp, err := http.ReadResponse(bufio.NewReader(conn), req)
	must(t, err)
	body, err := io.ReadAll(resp.Body)
	must(t, errors.Join(err, resp.Body.Close()))
	return resp.StatusCode, string(body)
}

// One client cannot close the connections of the others, however many it opens.
func TestClientsKeepTheirConnections(t *testing.T) {
	t.Parallel()
	addr := freePort(t)
	startPlugin(t, simtest.PluginOptions{
		Mode: "controller", Dir: shortDir(t), Sim: startSim(t), Args: []string{"--http-endpoint=" + addr},
	})
	ours := dial(t, addr)
	theirs := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 2)}}
	closed := make(chan error)
	for range 200 {
		conn, err := theirs.Dial("tcp", addr)
		must(t, err)
		t.Cleanup(func() { _ = conn.Close() }) // the plugin may have closed it
		go func() {
			_, err := conn.Read(make([]byte, 1))
			closed <- err
		}()
	}
	for range 200 - 63 { // with ours the plugin keeps 64
		if err := <-closed; err == nil {
			t.Error("the plugin answers without a request")
		}
	}
	if code, body := ask(t, ours, "/livez"); code != 200 {
		t.Errorf("/livez: %d %q", code, body)
	}
	for range 63 { // that end after their time for a request
		if err := <-closed; err == nil {
			t.Error("the plugin answers without a request")
		}
	}
}

// A connection is closed when its request does not come, and after one answer. A profile may take longer than any other
// page.
func TestConnectionsEnd(t *testing.T) {
	t.Parallel()
	addr := freePort(t)
	startPlugin(t, simtest.PluginOptions{
		Mode: "controller", Dir: shortDir(t), Sim: startSim(t), Args: []string{"--http-endpoint=" + addr, "--pprof"},
	})
	for _, test := range []struct {
		name, sends string
		answers     int
	}{
		{"silent", "", 0},
		{"half a request", "GET /livez HTTP/1.1\r\nHost: pl", 0},
		{"half a body", "GET /livez HTTP/1.1\r\nHost: plugin\r\nContent-Length: 100000\r\n\r\nbody", 1},
		{"many requests", strings.Repeat("GET /livez HTTP/1.1\r\nHost: plugin\r\n\r\n", 100), 1},
		{"a large header", "GET /livez HTTP/1.1\r\nHost: plugin\r\nA: " + strings.Repeat("a", 1<<20), 0},
		{"a long profile", "GET /debug/pprof/profile?seconds=11 HTTP/1.1\r\nHost: plugin\r\n\r\n", 1},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			conn, start := dial(t, addr), time.Now()
			_, _ = conn.Write([]byte(test.sends)) // fails if the plugin closes the connection before it has read all
			answer, err := io.ReadAll(conn)
			if err != nil && !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("the connection is not closed: %v", err)
			}
			if got := strings.Count(string(answer), "HTTP/1.1 200 OK\r\n"); got != test.answers {
				t.Errorf("%d answers, want %d: %.200q", got, test.answers, answer)
			}
			if took := time.Since(start); test.name == "a long profile" && took < 11*time.Second {
				t.Errorf("the profile has %s of 11 s", took)
			}
		})
	}
}

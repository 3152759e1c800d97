// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main_test

import (
	"context"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

func startSim(t *testing.T, args ...string) *simtest.Sim {
	t.Helper()
	sim, err := simtest.StartSim(programs.Sim, nil, append([]string{"--instances=node-a"}, args...)...)
	must(t, err)
	t.Cleanup(func() { must(t, sim.Stop()) })
	return sim
}

// startPlugin starts a plugin; it ends with the test where the test has not ended it.
func startPlugin(t *testing.T, opts simtest.PluginOptions) *simtest.Plugin {
	t.Helper()
	opts.Env = append(baseEnv(), opts.Env...)
	plugin, err := simtest.StartPlugin(programs.Plugin, opts)
	must(t, err)
	t.Cleanup(func() {
		select {
		case <-plugin.Done():
		default:
			must(t, plugin.Stop())
		}
		if log := plugin.Stderr().String(); strings.Contains(log, "DATA RACE") || strings.Contains(log, "panic") {
			t.Errorf("the plugin says: %s", log)
		}
	})
	return plugin
}

func createRequest(name string) *csi.CreateVolumeRequest {
	return &csi.CreateVolumeRequest{
		Name:          name,
		CapacityRange: &csi.CapacityRange{RequiredBytes: 1 << 30},
		VolumeCapabilities: []*csi.VolumeCapability{{
			AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{}},
			AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
		}},
	}
}

// slowCreate begins a CreateVolume that the rack holds up, and returns when the rack has it.
func slowCreate(t *testing.T, sim *simtest.Sim, plugin *simtest.Plugin, delay time.Duration) <-chan error {
	t.Helper()
	_, err := sim.Inject(
		t.Context(),
		simtest.Fault{Operation: "disk_create", Kind: simtest.FaultDelay, DelayMillis: int(delay / time.Millisecond)},
	)
	must(t, err)
	answered := make(chan error, 1)
	go func() {
		_, err := plugin.CreateVolume(t.Context(), createRequest("slow"))
		answered <- err
	}()
	eventually(t, "the rack has the request", func() bool {
		faults, err := sim.Faults(t.Context())
		must(t, err)
		return faults[0].Hits == 1
	})
	return answered
}

func isThere(t *testing.T, path string) bool {
	t.Helper()
	_, err := os.Lstat(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	return err == nil
}

func TestTerminationFinishesCallsInFlight(t *testing.T) {
	t.Parallel()
	sim := startSim(t)
	plugin := startPlugin(t, simtest.PluginOptions{Mode: "controller", Dir: shortDir(t), Sim: sim})
	start := time.Now()
	answered := slowCreate(t, sim, plugin, 5*time.Second)
	must(t, plugin.Signal(syscall.SIGTERM))
	eventually(t, "nothing new is taken", func() bool { return !isThere(t, plugin.Socket) })
	select {
	case err := <-answered:
		t.Fatalf("the call ended with the signal: %v", err)
	case <-plugin.Done():
		t.Fatal("the process ended with a call in flight")
	default:
	}
	if err := <-answered; err != nil {
		t.Errorf("the call in flight: %v", err)
	}
	if took := time.Since(start); took < 5*time.Second {
		t.Errorf("the call took %s: it was not held up", took)
	}
	code, err := plugin.ExitCode(within(t, 20*time.Second))
	if err != nil || code != 0 {
		t.Errorf("exit code %d, %v: %s", code, err, plugin.Stderr())
	}
	if isThere(t, plugin.Socket) {
		t.Error("the socket is still there")
	}
	left, err := sim.Leftovers(t.Context())
	if err != nil || left.Disks != 1 {
		t.Errorf("%+v, %v: want the disk that was reported", left, err)
	}
}

// A controller that is replaced in the middle of a restart hands it over, and answers the call that waits for it: an
// instance that is down does not wait until the lease of a minute is over.
func TestTerminationHandsRestartsOver(t *testing.T) {
	t.Parallel()
	sim := startSim(t, "--state-time=2s")
	start := func(wait string) *simtest.Plugin {
		return startPlugin(t, simtest.PluginOptions{Mode: "controller", Dir: shortDir(t), Sim: sim, Args: []string{
			"--attach-mode=restart",
			"--restart-shutdown=hard",
			"--metadata=none",
			"--restart-window=1s",
			"--restart-cool-down=0s",
			"--restart-wait=" + wait,
		}})
	}
	count := func(operation string) int {
		calls, err := sim.Calls(t.Context())
		must(t, err)
		return calls.Counts[operation]
	}
	first := start("100s")
	created, err := first.CreateVolume(t.Context(), createRequest("v"))
	must(t, err)
	request := &csi.ControllerPublishVolumeRequest{
		VolumeId: created.GetVolume().
			GetVolumeId(),
		NodeId:           sim.Instance("node-a").ID,
		VolumeCapability: createRequest("v").GetVolumeCapabilities()[0],
	}
	answered := make(chan error, 1)
	go func() {
		_, err := first.ControllerPublishVolume(t.Context(), request)
		answered <- err
	}()
	eventually(t, "the instance is stopped", func() bool { return count("instance_stop") > 0 })
	must(t, first.Signal(syscall.SIGTERM))
	if code, err := first.ExitCode(within(t, 15*time.Second)); err != nil || code != 0 {
		t.Errorf("exit code %d, %v: %s", code, err, first.Stderr())
	}
	if err := <-answered; status.Code(err) != codes.FailedPrecondition {
		t.Errorf("the call that waited: %v", err)
	}
	second := start("0s")
	eventually(t, "the instance is started", func() bool { return count("instance_start") > 0 })
	eventually(t, "the volume is published", func() bool {
		_, err := second.ControllerPublishVolume(t.Context(), request)
		return err == nil
	})
	if stops, starts := count("instance_stop"), count("instance_start"); stops != 1 || starts != 1 {
		t.Errorf("%d stops and %d starts, want one of each", stops, starts)
	}
}

func TestSecondTerminationLeavesAtOnce(t *testing.T) {
	t.Parallel()
	sim := startSim(t)
	plugin := startPlugin(t, simtest.PluginOptions{Mode: "controller", Dir: shortDir(t), Sim: sim})
	// A client that has connected and says nothing must not keep the plugin either.
	silent, err := net.Dial("unix", plugin.Socket)
	must(t, err)
	defer func() { must(t, silent.Close()) }()
	answered := slowCreate(t, sim, plugin, 10*time.Second)
	must(t, plugin.Signal(syscall.SIGTERM))
	eventually(t, "nothing new is taken", func() bool { return !isThere(t, plugin.Socket) })
	start := time.Now()
	must(t, plugin.Signal(syscall.SIGTERM))
	code, err := plugin.ExitCode(within(t, 20*time.Second))
	if err != nil || code != 1 {
		t.Errorf("exit code %d, %v", code, err)
	}
	if took := time.Since(start); took > 2*time.Second {
		t.Errorf("it took %s", took)
	}
	if !strings.Contains(plugin.Stderr().String(), "second signal") {
		t.Errorf("it says nothing of why: %s", plugin.Stderr())
	}
	if err := <-answered; err == nil {
		t.Error("the call in flight succeeded")
	}
	if isThere(t, plugin.Socket) {
		t.Error("the socket is still there")
	}
}

// A client that has connected and says nothing does not keep an idle plugin from ending.
func TestTerminationWithASilentClient(t *testing.T) {
	t.Parallel()
	sim := startSim(t)
	plugin := startPlugin(t, simtest.PluginOptions{Mode: "controller", Dir: shortDir(t), Sim: sim})
	silent, err := net.Dial("unix", plugin.Socket)
	must(t, err)
	defer func() { must(t, silent.Close()) }()
	must(t, plugin.Signal(syscall.SIGTERM))
	if code, err := plugin.ExitCode(within(t, 15*time.Second)); err != nil || code != 0 {
		t.Errorf("exit code %d, %v: %s", code, err, plugin.Stderr())
	}
}

func TestInterruptEndsThePlugin(t *testing.T) {
	t.Parallel()
	sim := startSim(t)
	plugin := startPlugin(
		t,
		simtest.PluginOptions{Mode: "all", Dir: shortDir(t), Sim: sim, Instance: sim.Instance("node-a")},
	)
	must(t, plugin.Signal(os.Interrupt))
	if code, err := plugin.ExitCode(within(t, 20*time.Second)); err != nil || code != 0 {
		t.Errorf("exit code %d, %v: %s", code, err, plugin.Stderr())
	}
}

func TestKillLeavesASocketThatTheNextStartReplaces(t *testing.T) {
	t.Parallel()
	sim, dir := startSim(t), shortDir(t)
	opts := simtest.PluginOptions{Mode: "controller", Dir: dir, Sim: sim}
	plugin := startPlugin(t, opts)
	must(t, plugin.Kill())
	if !isThere(t, plugin.Socket) {
		t.Fatal("no socket was left: this test shows nothing")
	}
	again := startPlugin(t, opts)
	if _, err := again.CreateVolume(t.Context(), createRequest("v")); err != nil {
		t.Error(err)
	}

	// A third one is refused, and the second goes on.
	flags, err := opts.Flags()
	must(t, err)
	got := runPlugin(t, nil, flags...)
	if got.code != 1 || !strings.Contains(got.stderr, "is in use") || !strings.Contains(got.stderr, opts.Socket()) {
		t.Errorf("%+v", got)
	}
	if _, err := again.Probe(t.Context(), &csi.ProbeRequest{}); err != nil {
		t.Error(err)
	}
	entries, err := os.ReadDir(dir)
	must(t, err)
	for _, entry := range entries {
		if name := entry.Name(); name != "csi.sock" && name != "token" {
			t.Errorf("beside the socket there is %s", name)
		}
	}
}

func TestWhatIsNoSocketIsNotRemoved(t *testing.T) {
	t.Parallel()
	sim, dir := startSim(t), shortDir(t)
	opts := simtest.PluginOptions{Mode: "controller", Dir: dir, Sim: sim}
	must(t, os.WriteFile(opts.Socket(), []byte("precious"), 0o600))
	flags, err := opts.Flags()
	must(t, err)
	if got := runPlugin(t, nil, flags...); got.code != 1 || !strings.Contains(got.stderr, "is not a socket") {
		t.Errorf("%+v", got)
	}
	if content, err := os.ReadFile(opts.Socket()); err != nil || string(content) != "precious" {
		t.Errorf("%q, %v", content, err)
	}
}

// The token can be replaced while calls go on: whoever asks for the file finds a whole one, and no call fails.
func TestTokenRotation(t *testing.T) {
	t.Parallel()
	sim, dir := startSim(t), shortDir(t)
	plugin := startPlugin(t, simtest.PluginOptions{Mode: "controller", Dir: dir, Sim: sim})
	created, err := plugin.CreateVolume(t.Context(), createRequest("v"))
	must(t, err)

	ctx, stop := context.WithCancel(t.Context())
	var calls atomic.Int64
	var workers sync.WaitGroup
	for range 4 {
		workers.Go(func() {
			for ctx.Err() == nil {
				// The plugin must not be cancelled in the middle of it.
				_, err := plugin.ValidateVolumeCapabilities(t.Context(), &csi.ValidateVolumeCapabilitiesRequest{
					VolumeId: created.GetVolume().GetVolumeId(), VolumeCapabilities: createRequest("v").GetVolumeCapabilities(),
				})
				if err != nil {
					t.Errorf("while the token changes: %v", err)
					return
				}
				calls.Add(1)
			}
		})
	}
	goOn := func(n int64) {
		want := calls.Load() + n
		eventually(t, "calls go on", func() bool { return calls.Load() >= want || t.Failed() })
	}
	old := sim.Token
	for range 3 {
		next, err := sim.NewToken(t.Context(), "limited-collaborator")
		must(t, err)
		fresh := filepath.Join(dir, "token.new")
		must(t, os.WriteFile(fresh, []byte(next+"\n"), 0o600))
		must(t, os.Rename(fresh, filepath.Join(dir, "token")))
		goOn(8) // those that were under way have ended: each of four workers has begun another one
		must(t, sim.RevokeToken(t.Context(), old))
		goOn(20)
		old = next
	}
	stop()
	workers.Wait()
	if _, err := plugin.CreateVolume(t.Context(), createRequest("w")); err != nil {
		t.Errorf("with the last token: %v", err)
	}
}

// What is wrong with the rack is one line in the log at start-up, and the plugin serves.
func TestRackTroubleAtStart(t *testing.T) {
	t.Parallel()
	sim := startSim(t)
	tooOld := startSim(t, "--api-version-max=2026013100.0.0")
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	nobody := "http://" + listener.Addr().String()
	must(t, listener.Close())
	rack, err := url.Parse(sim.Host)
	must(t, err)
	// Release 17 knows no versions.
	release17 := httptest.NewServer(&httputil.ReverseProxy{Rewrite: func(req *httputil.ProxyRequest) {
		req.SetURL(rack)
		req.Out.Header.Del("Api-Version")
	}})
	t.Cleanup(release17.Close)
	secure := httptest.NewUnstartedServer(http.NotFoundHandler())
	secure.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, 0)
	secure.StartTLS()
	t.Cleanup(secure.Close)
	for _, test := range []struct {
		name, flag string
		sim        *simtest.Sim
		token      string
		mentions   []string
	}{
		{name: "wrong token", token: "oxide-token-wrong", mentions: []string{"credentials missing or invalid", "HTTP 401", "give a token of this silo"}},
		{name: "wrong project", flag: "--oxide-project=elsewhere", mentions: []string{"elsewhere", "HTTP 404", "correct the project"}},
		{name: "wrong host", flag: "--oxide-host=" + nobody, mentions: []string{"connection refused", strings.TrimPrefix(nobody, "http://"), "see that the host"}},
		{name: "not a rack", flag: "--oxide-host=" + sim.Control, mentions: []string{"HTTP 404", "see that the host"}},
		{name: "private CA", flag: "--oxide-host=" + secure.URL, mentions: []string{"certificate", "--oxide-ca-file"}},
		{name: "release 17", flag: "--oxide-host=" + release17.URL, mentions: []string{"release 17 or older", "update the rack to release 18"}},
		{name: "no version that we know", sim: tooOld, mentions: []string{"2026021301.0.0", "update the rack to release 18"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			used := *sim
			if test.sim != nil {
				used = *test.sim
			}
			if test.token != "" {
				used.Token = test.token
			}
			opts := simtest.PluginOptions{Mode: "controller", Dir: shortDir(t), Sim: &used}
			if test.flag != "" {
				opts.Args = []string{test.flag}
			}
			plugin := startPlugin(t, opts)
			const line = "the rack cannot be used as configured"
			eventually(t, "the log says so", func() bool { return strings.Contains(plugin.Stderr().String(), line) })
			count := 0
			for text := range strings.Lines(plugin.Stderr().String()) {
				if strings.Contains(text, "level=ERROR") {
					count++
					for _, mention := range test.mentions {
						if !strings.Contains(text, mention) {
							t.Errorf("%q does not mention %q", text, mention)
						}
					}
				}
			}
			if count != 1 {
				t.Errorf("%d lines, want one: %s", count, plugin.Stderr())
			}
			if strings.Contains(plugin.Stderr().String(), used.Token) {
				t.Errorf("the token is shown: %s", plugin.Stderr())
			}
			ready, err := plugin.Probe(t.Context(), &csi.ProbeRequest{})
			if err != nil || !ready.GetReady().GetValue() {
				t.Errorf("Probe: %v, %v", ready, err)
			}
			if _, err := plugin.CreateVolume(t.Context(), createRequest("v")); err == nil {
				t.Error("a volume was made all the same")
			}
		})
	}
}

// A rack whose certificate a private CA signed is served with that CA's file; RPCs go there, and the plugin says who it
// is.
func TestPrivateCA(t *testing.T) {
	t.Parallel()
	sim := startSim(t)
	rack, err := url.Parse(sim.Host)
	must(t, err)
	agents := make(chan string, 100)
	secure := httptest.NewTLSServer(&httputil.ReverseProxy{Rewrite: func(req *httputil.ProxyRequest) {
		req.SetURL(rack)
		agents <- req.In.UserAgent()
	}})
	t.Cleanup(secure.Close)
	dir := shortDir(t)
	ca := filepath.Join(dir, "ca.pem")
	must(t, os.WriteFile(ca, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: secure.Certificate().Raw}), 0o600))
	plugin := startPlugin(
		t,
		simtest.PluginOptions{
			Mode: "controller",
			Dir:  dir,
			Sim:  sim,
			Args: []string{"--oxide-host=" + secure.URL, "--oxide-ca-file=" + ca},
		},
	)
	_, err = plugin.CreateVolume(t.Context(), createRequest("v"))
	must(t, err)
	eventually(
		t,
		"the rack was looked at",
		func() bool { return strings.Contains(plugin.Stderr().String(), "the rack answers") },
	)
	if len(agents) == 0 {
		t.Error("no request went there")
	}
	for range len(agents) { // the plugin may still be asking
		if agent := <-agents; !strings.HasPrefix(agent, "oxide-csi/") {
			t.Errorf("a request says that it comes from %q", agent)
		}
	}
}

// A rack of an older release is served, and the log says once in which version of the API.
func TestOlderRacks(t *testing.T) {
	t.Parallel()
	for _, version := range []string{"2026032500.0.0", "2026021301.0.0"} {
		t.Run(version, func(t *testing.T) {
			sim := startSim(t, "--api-version-max="+version)
			plugin := startPlugin(t, simtest.PluginOptions{Mode: "controller", Dir: shortDir(t), Sim: sim})
			_, err := plugin.CreateVolume(t.Context(), createRequest("v"))
			must(t, err)
			eventually(
				t,
				"the rack was looked at",
				func() bool { return strings.Contains(plugin.Stderr().String(), "the rack answers") },
			)
			if log := plugin.Stderr().
				String(); strings.Count(log, "api_version="+version) != 1 ||
				strings.Contains(log, "level=ERROR") {
				t.Errorf("the log says: %s", log)
			}
		})
	}
}

// What a volume costs the rack is one request, from the built program too; who asks is known there.
func TestOneRequestForAVolume(t *testing.T) {
	t.Parallel()
	sim := startSim(t)
	plugin := startPlugin(t, simtest.PluginOptions{Mode: "controller", Dir: shortDir(t), Sim: sim})
	eventually(
		t,
		"the rack was looked at",
		func() bool { return strings.Contains(plugin.Stderr().String(), "the rack answers") },
	)
	must(t, sim.ClearCalls(t.Context()))
	created, err := plugin.CreateVolume(t.Context(), createRequest("v"))
	must(t, err)
	calls, err := sim.Calls(t.Context())
	must(t, err)
	// The clean-up in the background lists anti-affinity groups at any time.
	delete(calls.Counts, "anti_affinity_group_list")
	if fmt.Sprint(calls.Counts) != "map[disk_create:1]" {
		t.Errorf("calls %v", calls.Counts)
	}
	sdk, err := oxide.NewClient(oxide.WithHost(sim.Host), oxide.WithToken(sim.Token))
	must(t, err)
	if _, err := sdk.DiskView(
		t.Context(),
		oxide.DiskViewParams{Disk: oxide.NameOrId(created.GetVolume().GetVolumeId())},
	); err != nil {
		t.Error(err)
	}
}

// When nobody reads the log any more, the plugin goes on: it must not die in the middle of an RPC because of a line.
func TestNobodyReadsTheLog(t *testing.T) {
	t.Parallel()
	sim := startSim(t)
	opts := simtest.PluginOptions{Mode: "controller", Dir: shortDir(t), Sim: sim}
	flags, err := opts.Flags()
	must(t, err)
	reader, writer, err := os.Pipe()
	must(t, err)
	cmd := exec.Command(programs.Plugin, flags...)
	cmd.Env, cmd.Stderr = baseEnv(), writer
	must(t, cmd.Start())
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	must(t, errors.Join(writer.Close(), reader.Close()))

	socket := filepath.Join(opts.Dir, "csi.sock")
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	must(t, err)
	defer func() { must(t, conn.Close()) }()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	_, err = csi.NewControllerClient(conn).CreateVolume(ctx, createRequest("v"), grpc.WaitForReady(true))
	must(t, err)
	must(t, cmd.Process.Signal(syscall.SIGTERM))
	select {
	case err := <-ended:
		must(t, err)
	case <-ctx.Done():
		t.Error("the plugin has not ended", cmd.Process.Kill())
	}
	if _, err := os.Lstat(socket); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the socket is still there: %v", err)
	}
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main_test

import (
	"bytes"
	"context"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
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
	"regexp"
	"strconv"
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

	"github.com/oxidecomputer/oxide-csi-plugin/test/await"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

func startSim(t *testing.T, args ...string) *simtest.Sim {
	t.Helper()
	sim, err := simtest.StartSim(programs.Sim, nil, append([]string{"--instances=node-a"}, args...)...)
	must(t, err)
	t.Cleanup(func() { must(t, sim.Stop()) })
	return sim
}

// panicked matches what the Go runtime prints of a panic or a data race, and what the plugin logs of a panic. A stack
// after SIGQUIT has the word in names of files.
var panicked = regexp.MustCompile(`(?m)DATA RACE|^panic: |msg=panic`)

// startPlugin starts a plugin and waits until it is ready. The plugin is stopped at the end of the test if it still
// runs.
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
		if log := plugin.Stderr().String(); panicked.MatchString(log) {
			t.Errorf("the plugin has panicked or has a data race: %s", log)
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

// holdDiskCreate returns the rack behind a proxy. The proxy holds requests to create a disk until release is called,
// and closes held at the first of them.
func holdDiskCreate(t *testing.T, sim *simtest.Sim) (proxied *simtest.Sim, held <-chan struct{}, release func()) {
	t.Helper()
	rack, err := url.Parse(sim.Host)
	must(t, err)
	proxy := &httputil.ReverseProxy{
		Rewrite:  func(req *httputil.ProxyRequest) { req.SetURL(rack) },
		ErrorLog: slog.NewLogLogger(slog.DiscardHandler, 0), // a test may end the plugin before release
	}
	arrived, released := make(chan struct{}), make(chan struct{})
	markArrived := sync.OnceFunc(func() { close(arrived) })
	release = sync.OnceFunc(func() { close(released) })
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPost && r.URL.Path == "/v1/disks" {
			markArrived()
			<-released
		}
		proxy.ServeHTTP(w, r)
	}))
	t.Cleanup(func() {
		release()
		server.Close()
	})
	clone := *sim
	clone.Host = server.URL
	return &clone, arrived, release
}

// A snapshot that the rack is still making, after a create that ended too early, is not missing for a deletion by name.
func TestDeleteOfAnUnfinishedSnapshot(t *testing.T) {
	t.Parallel()
	sim := startSim(t)
	rack, err := url.Parse(sim.Host)
	must(t, err)
	server := httptest.NewServer(&httputil.ReverseProxy{
		Rewrite: func(req *httputil.ProxyRequest) { req.SetURL(rack) },
		ModifyResponse: func(resp *http.Response) error {
			if resp.Request.Method != http.MethodGet || resp.Request.URL.Path != "/v1/snapshots" {
				return nil
			}
			list, err := io.ReadAll(resp.Body)
			list = bytes.ReplaceAll(list, []byte(`"ready"`), []byte(`"creating"`))
			resp.Body, resp.ContentLength = io.NopCloser(bytes.NewReader(list)), int64(len(list))
			resp.Header.Set("Content-Length", strconv.Itoa(len(list)))
			return err
		},
	})
	t.Cleanup(server.Close)
	proxied := *sim
	proxied.Host = server.URL
	plugin := startPlugin(t, simtest.PluginOptions{Mode: "controller", Dir: shortDir(t), Sim: &proxied})
	environ := []string{"CSI_ENDPOINT=unix://" + plugin.Socket}
	for _, args := range [][]string{
		{"volume", "create", "v", "--size=1GiB"}, {"snapshot", "create", "s", "--volume=v"}, {"snapshot", "delete", "s"},
	} {
		if got := runPlugin(t, environ, args...); got.code != 0 {
			t.Fatalf("%v: %+v", args, got)
		}
	}
	if left, err := sim.Leftovers(t.Context()); err != nil || left.Snapshots != 0 {
		t.Errorf("the snapshot was not deleted: %+v, %v", left, err)
	}
}

// startCreate starts a CreateVolume and waits until the proxy of holdDiskCreate holds its request.
func startCreate(t *testing.T, plugin *simtest.Plugin, held <-chan struct{}) (answered <-chan error) {
	t.Helper()
	result := make(chan error, 1)
	go func() {
		_, err := plugin.CreateVolume(t.Context(), createRequest("slow"))
		result <- err
	}()
	select {
	case <-held:
	case err := <-result:
		t.Fatalf("CreateVolume ended before the rack got its request: %v", err)
	}
	return result
}

// exists reports whether a path exists.
func exists(t *testing.T, path string) bool {
	t.Helper()
	_, err := os.Lstat(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	return err == nil
}

func TestSignalWaitsForCallsInFlight(t *testing.T) {
	t.Parallel()
	sim := startSim(t)
	proxied, held, release := holdDiskCreate(t, sim)
	plugin := startPlugin(t, simtest.PluginOptions{Mode: "controller", Dir: shortDir(t), Sim: proxied})
	answered := startCreate(t, plugin, held)
	must(t, plugin.Signal(syscall.SIGTERM))
	await.Eventually(t, "the plugin accepts no new calls", func() bool { return !exists(t, plugin.Socket) })
	select {
	case err := <-answered:
		t.Fatalf("the call ended with the signal: %v", err)
	case <-plugin.Done():
		t.Fatal("the process ended with a call in flight")
	case <-time.After(2500 * time.Millisecond): // some looks at the socket
	}
	if exists(t, plugin.Socket) || strings.Contains(plugin.Stderr().String(), "made the socket again") {
		t.Errorf("the stopping plugin made its socket again: %s", plugin.Stderr())
	}
	release()
	if err := <-answered; err != nil {
		t.Errorf("the call in flight: %v", err)
	}
	code, err := plugin.ExitCode(within(t, 2*time.Minute))
	if err != nil || code != 0 {
		t.Errorf("exit code %d, %v: %s", code, err, plugin.Stderr())
	}
	if exists(t, plugin.Socket) {
		t.Error("the socket was not removed")
	}
	left, err := sim.Leftovers(t.Context())
	if err != nil || left.Disks != 1 {
		t.Errorf("%+v, %v: want the disk of the call in flight", left, err)
	}
}

// A node plugin that stops waits for a check that goes on after its call. e2fsck of a filesystem with multi-mount
// protection waits 11 s to see whether another host uses it.
func TestSignalWaitsForACheck(t *testing.T) {
	t.Parallel()
	h := newHostWithGuest(t, false)
	data := filepath.Join(h.dir, "data")
	h.ok(t, "volume", "create", "db", "--size=1GiB")
	h.ok(t, "volume", "mount", "db", data, "--attach")
	h.ok(t, "volume", "unmount", "db", data)
	disks, err := filepath.Glob(filepath.Join(h.sim.Instances[0].Guest, "dev", "nvme*n1"))
	must(t, err)
	disk := disks[len(disks)-1] // after the boot disk
	for _, command := range [][]string{
		{"tune2fs", "-O", "mmp", disk},
		{"debugfs", "-w", "-R", "set_super_value state 0", disk},
		{"debugfs", "-w", "-R", "set_mmp_value seq 4711", disk},
	} {
		if said, err := exec.CommandContext(t.Context(), command[0], command[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %v: %s", command, err, said)
		}
	}
	if got := h.run(t, "volume", "mount", "db", data, "--attach", "--timeout=3s"); got.code != 3 {
		t.Fatalf("the check is no longer than the call: %+v", got)
	}
	must(t, h.node.Signal(syscall.SIGTERM))
	if code, err := h.node.ExitCode(within(t, 2*time.Minute)); err != nil || code != 0 {
		t.Errorf("exit code %d, %v: %s", code, err, h.node.Stderr())
	}
	state, err := exec.CommandContext(t.Context(), "dumpe2fs", "-h", disk).Output()
	if err != nil || !regexp.MustCompile(`Filesystem state: +clean\n`).Match(state) {
		t.Errorf("the check was not finished: %v: %s", err, state)
	}
}

// A controller that stops during a planned restart hands the restart over, and answers the call that waits for it. The
// next controller starts the stopped instance without waiting for the end of the one-minute lease.
func TestSignalHandsRestartsOver(t *testing.T) {
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
		VolumeId:         created.GetVolume().GetVolumeId(),
		NodeId:           sim.Instance("node-a").ID,
		VolumeCapability: createRequest("v").GetVolumeCapabilities()[0],
	}
	answered := make(chan error, 1)
	go func() {
		_, err := first.ControllerPublishVolume(t.Context(), request)
		answered <- err
	}()
	await.Eventually(t, "the instance is stopped", func() bool { return count("instance_stop") > 0 })
	must(t, first.Signal(syscall.SIGTERM))
	if code, err := first.ExitCode(within(t, 2*time.Minute)); err != nil || code != 0 {
		t.Errorf("exit code %d, %v: %s", code, err, first.Stderr())
	}
	if err := <-answered; status.Code(err) != codes.FailedPrecondition {
		t.Errorf("the call that waited: %v", err)
	}
	second := start("0s")
	await.Eventually(t, "the instance is started", func() bool { return count("instance_start") > 0 })
	await.Eventually(t, "the volume is published", func() bool {
		_, err := second.ControllerPublishVolume(t.Context(), request)
		return err == nil
	})
	if stops, starts := count("instance_stop"), count("instance_start"); stops != 1 || starts != 1 {
		t.Errorf("%d stops and %d starts, want one of each", stops, starts)
	}
}

// The systemd units start the plugin again after every end but one with wrong settings. Go's runtime chooses the exit
// code of a crash.
func TestOnlyWrongSettingsPreventARestart(t *testing.T) {
	t.Parallel()
	sim := startSim(t)
	wrong := runPlugin(t, nil, "--mode=node").code
	for _, mode := range []string{"controller", "node"} {
		unit, err := os.ReadFile("../../deploy/systemd/oxide-csi-" + mode + ".service")
		must(t, err)
		if line := fmt.Sprintf("\nRestartPreventExitStatus=%d\n", wrong); !strings.Contains(string(unit), line) {
			t.Errorf("the unit of the %s does not have %q", mode, line)
		}
	}
	plugin := startPlugin(t, simtest.PluginOptions{Mode: "controller", Dir: shortDir(t), Sim: sim})
	must(t, plugin.Signal(syscall.SIGQUIT))
	if code, err := plugin.ExitCode(within(t, 2*time.Minute)); err != nil || code == wrong {
		t.Errorf("after a crash: exit code %d, as with wrong settings, %v", code, err)
	}
}

// After a second signal the plugin waits neither for a call in flight nor for a client that has connected and sends
// nothing.
func TestSecondSignalEndsCallsInFlight(t *testing.T) {
	t.Parallel()
	proxied, held, _ := holdDiskCreate(t, startSim(t))
	plugin := startPlugin(t, simtest.PluginOptions{Mode: "controller", Dir: shortDir(t), Sim: proxied})
	silent, err := net.Dial("unix", plugin.Socket)
	must(t, err)
	defer func() { must(t, silent.Close()) }()
	answered := startCreate(t, plugin, held)
	must(t, plugin.Signal(syscall.SIGTERM))
	await.Eventually(t, "the plugin accepts no new calls", func() bool { return !exists(t, plugin.Socket) })
	must(t, plugin.Signal(syscall.SIGTERM))
	code, err := plugin.ExitCode(within(t, 2*time.Minute))
	if err != nil || code != 1 {
		t.Errorf("exit code %d, %v", code, err)
	}
	if !strings.Contains(plugin.Stderr().String(), "second signal") {
		t.Errorf("the log does not give the reason: %s", plugin.Stderr())
	}
	if err := <-answered; err == nil {
		t.Error("the call in flight succeeded")
	}
	if exists(t, plugin.Socket) {
		t.Error("the socket was not removed")
	}
}

// A client that has connected and sends nothing does not prevent the plugin from stopping.
//
// This test takes real time: the plugin waits 5 s for the client's handshake.
func TestSilentClientDoesNotPreventTheStop(t *testing.T) {
	t.Parallel()
	sim := startSim(t)
	plugin := startPlugin(t, simtest.PluginOptions{Mode: "controller", Dir: shortDir(t), Sim: sim})
	silent, err := net.Dial("unix", plugin.Socket)
	must(t, err)
	defer func() { must(t, silent.Close()) }()
	must(t, plugin.Signal(syscall.SIGTERM))
	if code, err := plugin.ExitCode(within(t, 2*time.Minute)); err != nil || code != 0 {
		t.Errorf("exit code %d, %v: %s", code, err, plugin.Stderr())
	}
}

func TestInterruptStopsThePlugin(t *testing.T) {
	t.Parallel()
	sim := startSim(t)
	plugin := startPlugin(
		t,
		simtest.PluginOptions{Mode: "all", Dir: shortDir(t), Sim: sim, Instance: sim.Instance("node-a")},
	)
	must(t, plugin.Signal(os.Interrupt))
	if code, err := plugin.ExitCode(within(t, 2*time.Minute)); err != nil || code != 0 {
		t.Errorf("exit code %d, %v: %s", code, err, plugin.Stderr())
	}
}

func TestStartReplacesTheSocketOfAKilledPlugin(t *testing.T) {
	t.Parallel()
	sim, dir := startSim(t), shortDir(t)
	opts := simtest.PluginOptions{Mode: "controller", Dir: dir, Sim: sim}
	plugin := startPlugin(t, opts)
	must(t, plugin.Kill())
	if !exists(t, plugin.Socket) {
		t.Fatal("the killed plugin left no socket, which this test needs")
	}
	again := startPlugin(t, opts)
	if _, err := again.CreateVolume(t.Context(), createRequest("v")); err != nil {
		t.Error(err)
	}

	// A third plugin cannot use the socket, and the second plugin continues.
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
			t.Errorf("unexpected file %s beside the socket", name)
		}
	}
}

// A socket that was removed is made again at once. Calls in flight go on, and new ones are answered.
func TestSocketIsMadeAgain(t *testing.T) {
	t.Parallel()
	sim, addr := startSim(t), freePort(t)
	plugin := startPlugin(t, simtest.PluginOptions{
		Mode: "controller", Dir: shortDir(t), Sim: sim, Args: []string{"--http-endpoint=" + addr},
	})
	_, err := sim.Inject(t.Context(), simtest.Fault{
		Operation: "disk_create", Kind: simtest.FaultDelay, DelayMillis: 3000, Count: new(1),
	})
	must(t, err)
	inFlight := make(chan error, 1)
	go func() {
		_, err := plugin.CreateVolume(t.Context(), createRequest("v"))
		inFlight <- err
	}()
	for range 2 {
		must(t, os.Remove(plugin.Socket))
		for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(10 * time.Millisecond) {
			_, err := os.Lstat(plugin.Socket)
			if code, _ := get(t, "http://"+addr+"/livez"); err == nil && code == http.StatusOK {
				break
			}
			if time.Now().After(deadline) {
				t.Fatalf("the socket is not there again: %v: %s", err, plugin.Stderr())
			}
		}
		conn, err := grpc.NewClient("unix://"+plugin.Socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
		must(t, err)
		_, err = csi.NewIdentityClient(conn).GetPluginInfo(t.Context(), &csi.GetPluginInfoRequest{})
		must(t, errors.Join(err, conn.Close()))
	}
	must(t, <-inFlight)
	must(t, plugin.Stop())
	if _, err := os.Lstat(plugin.Socket); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("after the end the socket is left: %v", err)
	}
}

// A plugin whose socket was replaced by something else ends, and leaves it alone.
func TestPluginEndsWithoutItsSocket(t *testing.T) {
	t.Parallel()
	plugin := startPlugin(t, simtest.PluginOptions{Mode: "controller", Dir: shortDir(t), Sim: startSim(t)})
	precious := plugin.Socket + ".new"
	must(t, os.WriteFile(precious, []byte("precious"), 0o600))
	must(t, os.Rename(precious, plugin.Socket))
	code, err := plugin.ExitCode(within(t, time.Minute))
	if err != nil || code != 1 || !strings.Contains(plugin.Stderr().String(), plugin.Socket+" was removed or replaced") {
		t.Errorf("exit code %d, %v: %s", code, err, plugin.Stderr())
	}
	if content, err := os.ReadFile(plugin.Socket); err != nil || string(content) != "precious" {
		t.Errorf("%q, %v", content, err)
	}
}

func TestStartKeepsAFileThatIsNoSocket(t *testing.T) {
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

// The token file can be replaced while the plugin is in use: no call fails.
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
				// This is not ctx, because the end of the loop must not cancel a call.
				_, err := plugin.ValidateVolumeCapabilities(t.Context(), &csi.ValidateVolumeCapabilitiesRequest{
					VolumeId: created.GetVolume().GetVolumeId(), VolumeCapabilities: createRequest("v").GetVolumeCapabilities(),
				})
				if err != nil {
					t.Errorf("during the token rotation: %v", err)
					return
				}
				calls.Add(1)
			}
		})
	}
	awaitCalls := func(n int64) {
		want := calls.Load() + n
		await.Eventually(t, "more calls have succeeded", func() bool { return calls.Load() >= want || t.Failed() })
	}
	old := sim.Token
	for range 3 {
		next, err := sim.NewToken(t.Context(), "limited-collaborator")
		must(t, err)
		fresh := filepath.Join(dir, "token.new")
		must(t, os.WriteFile(fresh, []byte(next+"\n"), 0o600))
		must(t, os.Rename(fresh, filepath.Join(dir, "token")))
		awaitCalls(8) // then each of the four workers has started a call with the new token
		must(t, sim.RevokeToken(t.Context(), old))
		awaitCalls(20)
		old = next
	}
	stop()
	workers.Wait()
	if _, err := plugin.CreateVolume(t.Context(), createRequest("w")); err != nil {
		t.Errorf("with the last token: %v", err)
	}
}

// If the rack cannot be used at the start, the plugin logs one error and serves.
func TestUnusableRackIsLoggedAtStart(t *testing.T) {
	t.Parallel()
	sim := startSim(t)
	tooOld := startSim(t, "--api-version-max=2026013100.0.0")
	const closed = "http://127.0.0.1:1" // no process takes this port
	rack, err := url.Parse(sim.Host)
	must(t, err)
	// Release 17 ignores the API version header.
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
		{name: "wrong host", flag: "--oxide-host=" + closed, mentions: []string{"connection refused", strings.TrimPrefix(closed, "http://"), "see that the host"}},
		{name: "not a rack", flag: "--oxide-host=" + sim.Control, mentions: []string{"HTTP 404", "see that the host"}},
		{name: "private CA", flag: "--oxide-host=" + secure.URL, mentions: []string{"certificate", "--oxide-ca-file"}},
		{name: "release 17", flag: "--oxide-host=" + release17.URL, mentions: []string{"release 17 or older", "update the rack to release 18"}},
		{name: "only unknown API versions", sim: tooOld, mentions: []string{"2026021301.0.0", "update the rack to release 18"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			used := *sim
			if test.sim != nil {
				used = *test.sim
			}
			if test.token != "" {
				used.Token = test.token
			}
			addr := freePort(t)
			opts := simtest.PluginOptions{
				Mode: "controller", Dir: shortDir(t), Sim: &used, Args: []string{"--http-endpoint=" + addr},
			}
			if test.flag != "" {
				opts.Args = append(opts.Args, test.flag)
			}
			plugin := startPlugin(t, opts)
			const line = "the rack cannot be used as configured"
			await.Eventually(t, "the error is logged", func() bool { return strings.Contains(plugin.Stderr().String(), line) })
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
				t.Errorf("%d error lines, want one: %s", count, plugin.Stderr())
			}
			if strings.Contains(plugin.Stderr().String(), used.Token) {
				t.Errorf("the log contains the token: %s", plugin.Stderr())
			}
			if log := plugin.Stderr().String(); test.token != "" && !strings.Contains(log, "the rack's request ID is") {
				t.Errorf("the log does not have the rack's request ID: %s", log)
			}
			code, page := get(t, "http://"+addr+"/readyz")
			for _, mention := range append(test.mentions, "cannot be used as configured") {
				if code != http.StatusServiceUnavailable || !strings.Contains(page, mention) {
					t.Errorf("/readyz: %d %q does not mention %q", code, page, mention)
				}
			}
			ready, err := plugin.Probe(t.Context(), &csi.ProbeRequest{})
			if err != nil || !ready.GetReady().GetValue() {
				t.Errorf("Probe: %v, %v", ready, err)
			}
			if _, err := plugin.CreateVolume(t.Context(), createRequest("v")); err == nil {
				t.Error("CreateVolume succeeded")
			}
		})
	}
}

// After a wrong token was corrected, the plugin becomes ready without a restart.
func TestReadyOnceTheTokenIsCorrected(t *testing.T) {
	t.Parallel()
	sim, dir, addr := startSim(t), shortDir(t), freePort(t)
	wrong := *sim
	wrong.Token = "oxide-token-wrong"
	startPlugin(t, simtest.PluginOptions{
		Mode: "controller", Dir: dir, Sim: &wrong, Args: []string{"--http-endpoint=" + addr},
	})
	await.Eventually(t, "/readyz says that the token is wrong", func() bool {
		code, page := get(t, "http://"+addr+"/readyz")
		return code == http.StatusServiceUnavailable && strings.Contains(page, "give a token of this silo")
	})
	must(t, os.WriteFile(filepath.Join(dir, "token"), []byte(sim.Token), 0o600))
	await.Eventually(
		t,
		"the plugin is ready",
		func() bool { code, _ := get(t, "http://"+addr+"/readyz"); return code == 200 },
	)
}

// A controller that was ready says on /readyz when the rack no longer accepts its token, or when its role is gone. The
// rack is asked again only after it has denied a call.
func TestReadyFollowsTheToken(t *testing.T) {
	t.Parallel()
	for name, deny := range map[string]func(*simtest.Sim, string) error{
		"token": func(_ *simtest.Sim, dir string) error {
			return os.WriteFile(filepath.Join(dir, "token"), []byte("oxide-token-revoked"), 0o600)
		},
		"project": func(sim *simtest.Sim, _ string) error {
			_, err := sim.Inject(t.Context(), simtest.Fault{
				Operation: "*", Kind: simtest.FaultStatus, Status: 404, ErrorCode: "ObjectNotFound",
				Message: `not found: project with name "demo"`, Count: new(int),
			})
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			sim, dir, addr := startSim(t), shortDir(t), freePort(t)
			plugin := startPlugin(t, simtest.PluginOptions{
				Mode: "controller", Dir: dir, Sim: sim, Args: []string{"--http-endpoint=" + addr},
			})
			ready := func() bool { code, _ := get(t, "http://"+addr+"/readyz"); return code == http.StatusOK }
			await.Eventually(t, "the plugin is ready", ready)
			must(t, deny(sim, dir))
			await.Eventually(t, "/readyz says what the rack denies", func() bool {
				_, err := plugin.CreateVolume(t.Context(), createRequest("v"))
				code, page := get(t, "http://"+addr+"/readyz")
				return err != nil && code == http.StatusServiceUnavailable && strings.Contains(page, name)
			})
			must(t, os.WriteFile(filepath.Join(dir, "token"), []byte(sim.Token), 0o600))
			must(t, sim.ClearFaults(t.Context()))
			await.Eventually(t, "the plugin is ready again", ready)
		})
	}
}

// With --oxide-ca-file the plugin uses a rack whose certificate is signed by a private CA. Each request has the
// plugin's user agent.
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
	await.Eventually(
		t,
		"the rack was checked",
		func() bool { return strings.Contains(plugin.Stderr().String(), "the rack responds") },
	)
	if len(agents) == 0 {
		t.Error("the rack got no request")
	}
	for range len(agents) { // the plugin may still send requests
		if agent := <-agents; !strings.HasPrefix(agent, "oxide-csi/") {
			t.Errorf("a request has the user agent %q", agent)
		}
	}
}

// The plugin works with racks of older releases, and logs the API version once.
func TestOlderRacks(t *testing.T) {
	t.Parallel()
	for _, version := range []string{"2026032500.0.0", "2026021301.0.0"} {
		t.Run(version, func(t *testing.T) {
			sim := startSim(t, "--api-version-max="+version)
			plugin := startPlugin(t, simtest.PluginOptions{Mode: "controller", Dir: shortDir(t), Sim: sim})
			_, err := plugin.CreateVolume(t.Context(), createRequest("v"))
			must(t, err)
			await.Eventually(
				t,
				"the rack was checked",
				func() bool { return strings.Contains(plugin.Stderr().String(), "the rack responds") },
			)
			log := plugin.Stderr().String()
			if strings.Count(log, "api_version="+version) != 1 || strings.Contains(log, "level=ERROR") {
				t.Errorf("want the API version once and no error in the log: %s", log)
			}
		})
	}
}

// CreateVolume makes one request to the rack beside its look at an expansion, and the SDK finds the volume as a disk.
func TestCreateVolumeMakesOneRequest(t *testing.T) {
	t.Parallel()
	sim := startSim(t)
	plugin := startPlugin(t, simtest.PluginOptions{Mode: "controller", Dir: shortDir(t), Sim: sim})
	await.Eventually(
		t,
		"the rack was checked",
		func() bool { return strings.Contains(plugin.Stderr().String(), "the rack responds") },
	)
	must(t, sim.ClearCalls(t.Context()))
	created, err := plugin.CreateVolume(t.Context(), createRequest("v"))
	must(t, err)
	calls, err := sim.Calls(t.Context())
	must(t, err)
	// Background clean-ups may list these at any time.
	delete(calls.Counts, "anti_affinity_group_list")
	delete(calls.Counts, "snapshot_list")
	if fmt.Sprint(calls.Counts) != "map[anti_affinity_group_view:1 disk_create:1]" {
		t.Errorf("calls %v", calls.Counts)
	}
	sdk, err := oxide.NewClient(oxide.WithHost(sim.Host), oxide.WithToken(sim.Token))
	must(t, err)
	disk := oxide.NameOrId(created.GetVolume().GetVolumeId())
	if _, err := sdk.DiskView(t.Context(), oxide.DiskViewParams{Disk: disk}); err != nil {
		t.Error(err)
	}
}

// The plugin serves after the reader of its log has gone: SIGPIPE must not end it during an RPC.
func TestLogReaderGone(t *testing.T) {
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
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
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
		t.Errorf("the socket was not removed: %v", err)
	}
}

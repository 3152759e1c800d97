// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package blackbox tests the built oxide-csi as an operator runs it: a CSI client calls it over its socket, and the
// built oxide-sim is its rack. The tests use neither program's internals. They read answers, the simulator's control
// endpoint and the kernel's state. They need real time, because both programs are separate processes.
package blackbox

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/go-cmp/cmp"
	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

const gib = int64(1) << 30

// programs are built once, with the race detector if the test uses it.
var programs simtest.Programs

func TestMain(m *testing.M) { os.Exit(run(m)) }

// parallel is how many tests run at once. Tests wait most of the time, so this may exceed the number of processors.
const parallel = "6"

func run(m *testing.M) int {
	flag.Parse()
	if err := flag.Set("test.parallel", parallel); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	dir, err := os.MkdirTemp("", "blackbox")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	code := 1
	if programs, err = simtest.Build(dir, simtest.RaceDetector()); err == nil {
		code = m.Run()
	}
	if err := errors.Join(err, os.RemoveAll(dir)); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return code
}

// isRoot reports whether the simulated rack can have guests, with disks to format and mount.
func isRoot() bool { return os.Geteuid() == 0 }

func needRoot(t *testing.T) {
	t.Helper()
	if !isRoot() {
		t.Skip("needs root: the guests of the simulated rack are made of loop devices, device nodes and mounts")
	}
}

// within returns a context that ends after limit. Limits are generous, because other tests may slow the machine.
func within(t *testing.T, limit time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	t.Cleanup(cancel)
	return ctx
}

// shortDir returns a temporary folder with a short path, so that the path of a socket in it fits. t.TempDir is too
// long.
func shortDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "bb")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		// Mounted volumes must not be emptied.
		if mounts := mountsBelow(t, dir); len(mounts) > 0 {
			t.Errorf("mounts left behind: %v", mounts)
			return
		}
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// startSim starts a simulated rack with TLS and HTTP/2, as a rack has. At the end of the test it must stop cleanly.
func startSim(t *testing.T, args ...string) *simtest.Sim {
	t.Helper()
	args = append([]string{"--tls=" + t.TempDir()}, args...)
	sim, err := simtest.StartSim(programs.Sim, nil, args...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := sim.Stop(); err != nil {
			t.Error(err)
		}
		logOf(t, "oxide-sim", sim.Process)
	})
	return sim
}

// startSimWithGuests is startSim with guests below dir. At the end no loop device may be left.
func startSimWithGuests(t *testing.T, dir string, args ...string) *simtest.Sim {
	t.Helper()
	state := filepath.Join(dir, "state")
	t.Cleanup(func() {
		if loops := loopsBelow(t, state); len(loops) > 0 {
			t.Errorf("loop devices left behind: %v", loops)
		}
	})
	return startSim(t, append([]string{"--guest-root=" + filepath.Join(dir, "guests"), "--state=" + state}, args...)...)
}

// startPlugin starts a plugin that is stopped at the end of the test. To stop a plugin earlier, start it with simtest.
func startPlugin(t *testing.T, opts simtest.PluginOptions) *simtest.Plugin {
	t.Helper()
	if opts.Dir == "" {
		opts.Dir = shortDir(t)
	}
	plugin, err := simtest.StartPlugin(programs.Plugin, opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := plugin.Stop(); err != nil {
			t.Error(err)
		}
		logOf(t, "oxide-csi", plugin.Process)
	})
	return plugin
}

// logOf logs a program's stderr if the test failed. A data race fails the test.
func logOf(t *testing.T, name string, process *simtest.Process) {
	t.Helper()
	text := process.Stderr().String()
	if strings.Contains(text, "DATA RACE") {
		t.Errorf("%s: the race detector found a data race", name)
	}
	if t.Failed() {
		t.Logf("%s printed:\n%s", name, text)
	}
}

// mountsBelow returns the mounts below a folder, in this mount namespace.
func mountsBelow(t *testing.T, dir string) (found []string) {
	t.Helper()
	table, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(table)) {
		if fields := strings.Fields(line); len(fields) > 4 && strings.HasPrefix(fields[4], dir+"/") {
			found = append(found, strings.TrimSpace(line))
		}
	}
	return found
}

// loopsBelow returns the loop devices with a backing file below a folder, including deleted files.
func loopsBelow(t *testing.T, dir string) (found []string) {
	t.Helper()
	paths, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range paths {
		text, err := os.ReadFile(path)
		if err == nil && strings.HasPrefix(string(text), dir+"/") { // otherwise the device was detached meanwhile
			found = append(found, path+": "+strings.TrimSpace(string(text)))
		}
	}
	return found
}

// checkLeftovers checks how many disks the rack has beside boot disks. For 0 disks it checks that nothing else is left
// either.
func checkLeftovers(t *testing.T, sim *simtest.Sim, disks int) {
	t.Helper()
	left, err := sim.Leftovers(within(t, time.Minute))
	if err != nil {
		t.Fatal(err)
	}
	if disks == 0 {
		if diff := cmp.Diff(simtest.Leftovers{}, left); diff != "" {
			t.Errorf("left on the rack (-want +got):\n%s", diff)
		}
		return
	}
	if left.Disks != disks || len(left.GuestErrors) > 0 {
		t.Errorf("the rack has %d disks, want %d; guest errors %q", left.Disks, disks, left.GuestErrors)
	}
}

// disksOnRack returns the rack's disks without the instances' boot disks.
func disksOnRack(t *testing.T, sim *simtest.Sim) []oxide.Disk {
	t.Helper()
	client, err := sim.Client()
	if err != nil {
		t.Fatal(err)
	}
	all, err := client.DiskListAllPages(within(t, time.Minute), oxide.DiskListParams{Project: oxide.NameOrId(sim.Project)})
	if err != nil {
		t.Fatal(err)
	}
	var disks []oxide.Disk
	for _, disk := range all {
		if !strings.HasSuffix(string(disk.Name), "-boot") {
			disks = append(disks, disk)
		}
	}
	return disks
}

// pause waits for d, or returns the context's error. It is the interval of polls.
func pause(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return nil
	}
}

const (
	// maxAttempts is how often a client sends the same request at most.
	maxAttempts = 10
	// requestTimeout is the deadline of one attempt, unless a test sets another.
	requestTimeout = 30 * time.Second
	// firstBackoff is the wait before the second attempt. It doubles with each attempt.
	firstBackoff = 20 * time.Millisecond
)

// client repeats each request like an orchestrator until it succeeds, at most maxAttempts times.
type client struct {
	// deadline is the time limit of one attempt.
	deadline time.Duration
	// failed holds the codes of failed attempts by RPC.
	failed map[string][]codes.Code
}

func newClient() *client { return &client{deadline: requestTimeout, failed: map[string][]codes.Code{}} }

// rpc is an RPC method of a client that protoc generated.
type rpc[Request, Response proto.Message] = func(context.Context, Request, ...grpc.CallOption) (Response, error)

// try sends a request until it succeeds. Its error joins the errors of all attempts.
func try[Request, Response proto.Message](
	ctx context.Context,
	c *client,
	call rpc[Request, Response],
	req Request,
) (Response, error) {
	name := string(req.ProtoReflect().Descriptor().Name())
	errs := []error{fmt.Errorf("%s failed %d times", name, maxAttempts)}
	for backoff := firstBackoff; len(errs) <= maxAttempts; backoff *= 2 {
		attempt, cancel := context.WithTimeout(ctx, c.deadline)
		resp, err := call(attempt, req)
		cancel()
		if err == nil {
			return resp, nil
		}
		c.failed[name] = append(c.failed[name], status.Code(err))
		errs = append(errs, err)
		if err := pause(ctx, backoff); err != nil {
			errs = append(errs, err)
			break
		}
	}
	var none Response
	return none, errors.Join(errs...)
}

// send is try for a test's own goroutine: it fails the test.
func send[Request, Response proto.Message](t *testing.T, c *client, call rpc[Request, Response], req Request) Response {
	t.Helper()
	resp, err := try(t.Context(), c, call, req)
	if err != nil {
		t.Fatal(err)
	}
	return resp
}

// twice sends a request until it succeeds, and then once more. Both answers must be equal.
func twice[Request, Response proto.Message](
	t *testing.T,
	c *client,
	call rpc[Request, Response],
	req Request,
) Response {
	t.Helper()
	first := send(t, c, call, req)
	if diff := cmp.Diff(first, send(t, c, call, req), protocmp.Transform()); diff != "" {
		t.Fatalf(
			"%s answers a repetition differently (-first +repetition):\n%s",
			req.ProtoReflect().Descriptor().Name(),
			diff,
		)
	}
	return first
}

// mountVolume returns the capability of a volume with a filesystem. An empty fsType means the default.
func mountVolume(fsType string, flags ...string) *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
		AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{FsType: fsType, MountFlags: flags}},
	}
}

// blockVolume returns the capability of a raw block volume.
func blockVolume() *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
		AccessType: &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}},
	}
}

func createRequest(name string, capability *csi.VolumeCapability) *csi.CreateVolumeRequest {
	return &csi.CreateVolumeRequest{
		Name:               name,
		CapacityRange:      &csi.CapacityRange{RequiredBytes: gib},
		VolumeCapabilities: []*csi.VolumeCapability{capability},
	}
}

func publishRequest(
	volume *csi.Volume,
	node simtest.Instance,
	capability *csi.VolumeCapability,
) *csi.ControllerPublishVolumeRequest {
	return &csi.ControllerPublishVolumeRequest{
		VolumeId:         volume.GetVolumeId(),
		NodeId:           node.ID,
		VolumeCapability: capability,
		VolumeContext:    volume.GetVolumeContext(),
	}
}

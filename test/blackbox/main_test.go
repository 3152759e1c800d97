// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package blackbox tests what an operator gets: the built oxide-csi, driven over its socket by a CSI client, before the
// built oxide-sim. Nothing here reaches into either program; what happened is read from their answers, from the
// simulator's control endpoint, and from the kernel.
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

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/lab"
)

const gib = int64(1) << 30

// programs are built once, with the race detector where the test has it.
var programs lab.Programs

func TestMain(m *testing.M) { os.Exit(run(m)) }

// parallel is how many tests run at once: more than there are processors, since they wait most of the time.
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
	if programs, err = lab.Build(dir, lab.RaceDetector()); err == nil {
		code = m.Run()
	}
	if err := errors.Join(err, os.RemoveAll(dir)); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return code
}

// isRoot says whether there can be guests, with disks to format and mount.
func isRoot() bool { return os.Geteuid() == 0 }

func needRoot(t *testing.T) {
	t.Helper()
	if !isRoot() {
		t.Skip("needs root: the guests of the simulated rack are made of loop devices, device nodes and mounts")
	}
}

// within bounds everything that a test waits for. A machine that runs other tests at the same time is slow.
func within(t *testing.T, limit time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	t.Cleanup(cancel)
	return ctx
}

// shortDir is a folder with a path that leaves room for a socket's name; t.TempDir's holds the test's whole name.
func shortDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "bb")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		// What was not unmounted must not be emptied.
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

// startSim starts a simulated rack that ends with the test, without complaint and leaving nothing.
func startSim(t *testing.T, args ...string) *lab.Sim {
	t.Helper()
	sim, err := lab.StartSim(programs.Sim, nil, args...)
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

// startSimWithGuests is startSim with guests below dir, and with the check that no loop device stays behind.
func startSimWithGuests(t *testing.T, dir string, args ...string) *lab.Sim {
	t.Helper()
	state := filepath.Join(dir, "state")
	t.Cleanup(func() {
		if loops := loopsBelow(t, state); len(loops) > 0 {
			t.Errorf("loop devices left behind: %v", loops)
		}
	})
	return startSim(t, append([]string{"--guest-root=" + filepath.Join(dir, "guests"), "--state=" + state}, args...)...)
}

// startPlugin starts a plugin that ends with the test. A test that ends it itself has to start it with lab.
func startPlugin(t *testing.T, opts lab.PluginOptions) *lab.Plugin {
	t.Helper()
	if opts.Dir == "" {
		opts.Dir = shortDir(t)
	}
	plugin, err := lab.StartPlugin(programs.Plugin, opts)
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

// logOf shows what a program said, for a test that failed. A data race is a failure of its own.
func logOf(t *testing.T, name string, process *lab.Process) {
	t.Helper()
	text := process.Stderr().String()
	if strings.Contains(text, "DATA RACE") {
		t.Errorf("%s: the race detector found something", name)
	}
	if t.Failed() {
		t.Logf("%s printed:\n%s", name, text)
	}
}

// mountsBelow lists the mounts of this mount namespace below a folder.
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

// loopsBelow lists the loop devices with a backing file below a folder, deleted files included.
func loopsBelow(t *testing.T, dir string) (found []string) {
	t.Helper()
	paths, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range paths {
		text, err := os.ReadFile(path)
		if err == nil && strings.HasPrefix(string(text), dir+"/") { // else it was detached meanwhile
			found = append(found, path+": "+strings.TrimSpace(string(text)))
		}
	}
	return found
}

// checkLeftovers checks how many disks the rack has, boot disks excepted. Without any there must be no trace of one.
func checkLeftovers(t *testing.T, sim *lab.Sim, disks int) {
	t.Helper()
	left, err := sim.Leftovers(within(t, time.Minute))
	if err != nil {
		t.Fatal(err)
	}
	if disks == 0 {
		if diff := cmp.Diff(lab.Leftovers{}, left); diff != "" {
			t.Errorf("something is left on the rack (-want +got):\n%s", diff)
		}
		return
	}
	if left.Disks != disks || len(left.GuestErrors) > 0 {
		t.Errorf("the rack has %d disks, want %d; guest errors %q", left.Disks, disks, left.GuestErrors)
	}
}

// disksOnRack asks the rack's API for all disks but the instances' boot disks.
func disksOnRack(t *testing.T, sim *lab.Sim) []oxide.Disk {
	t.Helper()
	client, err := oxide.NewClient(oxide.WithHost(sim.Host), oxide.WithToken(sim.Token))
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

// eventually waits until something holds.
func eventually(t *testing.T, what string, holds func() bool) {
	t.Helper()
	ctx := within(t, time.Minute)
	for !holds() {
		if err := pause(ctx, 10*time.Millisecond); err != nil {
			t.Fatalf("waiting until %s: %v", what, err)
		}
	}
}

// pause is the time between two looks at the same thing.
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
	// maxAttempts is how often a client sends the same request.
	maxAttempts = 10
	// patience is the deadline of an attempt, unless a test wants another.
	patience = 30 * time.Second
	// firstBackoff is how long the client waits before the second attempt; each further time it waits twice as long.
	firstBackoff = 20 * time.Millisecond
)

// client sends requests as an orchestrator does: the same again until it is answered, at most maxAttempts times.
type client struct {
	// deadline is that of one attempt.
	deadline time.Duration
	// failed has the codes of the attempts that failed, by RPC.
	failed map[string][]codes.Code
}

func newClient() *client { return &client{deadline: patience, failed: map[string][]codes.Code{}} }

// rpc is an RPC as the clients that protoc makes offer it.
type rpc[Request, Response proto.Message] = func(context.Context, Request, ...grpc.CallOption) (Response, error)

// try sends a request until it is answered with OK. Its error holds those of all attempts.
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

// send is try in a test's own goroutine.
func send[Request, Response proto.Message](t *testing.T, c *client, call rpc[Request, Response], req Request) Response {
	t.Helper()
	resp, err := try(t.Context(), c, call, req)
	if err != nil {
		t.Fatal(err)
	}
	return resp
}

// twice sends a request until it is answered, and then once more: the answer to the repetition must be the same.
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

// mountVolume is the capability of a volume with a filesystem, empty for the default one.
func mountVolume(fsType string, flags ...string) *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
		AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{FsType: fsType, MountFlags: flags}},
	}
}

// blockVolume is the capability of a raw block volume.
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
	node lab.Instance,
	capability *csi.VolumeCapability,
) *csi.ControllerPublishVolumeRequest {
	return &csi.ControllerPublishVolumeRequest{
		VolumeId:         volume.GetVolumeId(),
		NodeId:           node.ID,
		VolumeCapability: capability,
		VolumeContext:    volume.GetVolumeContext(),
	}
}

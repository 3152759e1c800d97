// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/go-cmp/cmp"
	"github.com/oxidecomputer/oxide.go/oxide"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/core/fault"
	"github.com/oxidecomputer/oxide-csi-plugin/core/record"
	"github.com/oxidecomputer/oxide-csi-plugin/test/await"
	"github.com/oxidecomputer/oxide-csi-plugin/test/coretest"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

var update = flag.Bool("update", false, "rewrite testdata/volume.txt and docs/reference/cli.md")

// host is a host without an orchestrator: a controller plugin, a node plugin, and the commands that a person runs.
type host struct {
	sim              *simtest.Sim
	controller, node *simtest.Plugin
	dir              string
	environ          []string
	// noHotplug disables hot-plug on the rack.
	noHotplug bool
	// args are further flags of the controller.
	args []string
	// hold makes held and release those of holdDiskCreate.
	hold    bool
	held    <-chan struct{}
	release func()
	// replacements are pairs of a text that differs from run to run, and its replacement in the golden file.
	replacements []string
	// transcript has the commands with their output.
	transcript strings.Builder
}

// newHost starts a rack without guests, and the controller and the node: in one process, or in two.
func newHost(t *testing.T, oneProcess bool, simArgs ...string) *host {
	t.Helper()
	h := &host{dir: shortDir(t)}
	h.start(t, oneProcess, simArgs...)
	return h
}

// newHostWithGuest starts a rack whose instance has a guest, so that volumes can be mounted.
func newHostWithGuest(t *testing.T, oneProcess bool) *host {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: the guests of the simulated rack use loop devices, device nodes and mounts")
	}
	h := &host{dir: shortDir(t)}
	t.Cleanup(func() { unmountBelow(t, h.dir) })
	h.start(t, oneProcess, "--guest-root="+filepath.Join(h.dir, "guests"), "--state="+filepath.Join(h.dir, "state"))
	return h
}

func (h *host) start(t *testing.T, oneProcess bool, simArgs ...string) {
	t.Helper()
	if !h.noHotplug {
		simArgs = append([]string{"--hotplug"}, simArgs...)
	}
	h.sim = startSim(t, simArgs...)
	rack := h.sim
	if h.hold {
		rack, h.held, h.release = holdDiskCreate(t, h.sim)
	}
	h.environ = []string{"OXIDE_CSI_STAGING_DIR=" + filepath.Join(h.dir, "staging")}
	if guest := h.sim.Instances[0].Guest; guest != "" {
		h.environ = append(h.environ, "OXIDE_CSI_SYS_ROOT="+filepath.Join(guest, "sys"))
	}
	if oneProcess {
		h.controller = startPlugin(
			t,
			simtest.PluginOptions{Mode: "all", Dir: h.folder(t, "all"), Sim: rack, Instance: h.sim.Instances[0]},
		)
		h.node = h.controller
		h.environ = append(h.environ, "CSI_ENDPOINT=unix://"+h.node.Socket)
	} else {
		h.controller = startPlugin(
			t,
			simtest.PluginOptions{Mode: "controller", Dir: h.folder(t, "controller"), Sim: rack, Args: h.args},
		)
		h.node = startPlugin(
			t,
			simtest.PluginOptions{Mode: "node", Dir: h.folder(t, "node"), Sim: h.sim, Instance: h.sim.Instances[0]},
		)
		h.environ = append(
			h.environ,
			"OXIDE_CSI_CONTROLLER_ENDPOINT="+h.controller.Socket,
			"OXIDE_CSI_NODE_ENDPOINT="+h.node.Socket,
		)
	}
	h.replacements = []string{h.dir, "DIR", h.sim.Instances[0].ID, "NODE"}
}

// folder creates a folder of the host.
func (h *host) folder(t *testing.T, name string) string {
	t.Helper()
	dir := filepath.Join(h.dir, name)
	must(t, os.MkdirAll(dir, 0o755))
	return dir
}

// unmountBelow reports mounts that a test has left, and unmounts them.
func unmountBelow(t *testing.T, dir string) {
	t.Helper()
	table, err := os.ReadFile("/proc/self/mountinfo")
	must(t, err)
	for _, entry := range slices.Backward(strings.Split(string(table), "\n")) {
		if fields := strings.Fields(entry); len(fields) > 4 && strings.HasPrefix(fields[4], dir+"/") {
			t.Errorf("the test has left a mount: %s", entry)
			must(t, unix.Unmount(fields[4], unix.MNT_DETACH))
		}
	}
}

// run runs a command of this host.
func (h *host) run(t *testing.T, args ...string) result {
	t.Helper()
	return runPlugin(t, h.environ, args...)
}

// ok runs a command twice. Both runs must succeed with the same output, which ok returns without its last newline. Ages
// are not compared. A second deletion says that there is nothing to delete.
func (h *host) ok(t *testing.T, args ...string) string {
	t.Helper()
	first, second := h.run(t, args...), h.run(t, args...)
	if first.code != 0 || first.stderr != "" {
		t.Fatalf("%v: %+v", args, first)
	}
	first.stdout, second.stdout = ages.ReplaceAllString(
		first.stdout,
		"  AGE  ",
	), ages.ReplaceAllString(
		second.stdout,
		"  AGE  ",
	)
	if args[1] == "delete" && second.code == 0 && strings.HasSuffix(second.stderr, ": nothing to delete\n") {
		second = first
	}
	if diff := cmp.Diff(first, second, cmp.AllowUnexported(result{})); diff != "" {
		t.Fatalf("%v, repeated (-first +second):\n%s", args, diff)
	}
	h.record(args, first)
	return strings.TrimSuffix(first.stdout, "\n")
}

// fails runs a command that must fail with this exit code, and returns its message.
func (h *host) fails(t *testing.T, code int, args ...string) string {
	t.Helper()
	got := h.run(t, args...)
	got.stderr = progress.ReplaceAllString(got.stderr, "") // on a busy machine a call takes long enough for it
	if got.code != code || got.stdout != "" || strings.Count(got.stderr, "\n") != 1 {
		t.Fatalf("%v: %+v, want exit code %d and one line", args, got, code)
	}
	h.record(args, got)
	return got.stderr
}

// record adds a command and its output to the transcript.
func (h *host) record(args []string, got result) {
	fmt.Fprintf(&h.transcript, "$ oxide-csi %s\n%s%s", strings.Join(args, " "), got.stdout, got.stderr)
	if got.code != 0 {
		fmt.Fprintf(&h.transcript, "[exit code %d]\n", got.code)
	}
	h.transcript.WriteString("\n")
}

var (
	progress   = regexp.MustCompile(`(?m)^\S+ waiting \S+ for the .*\n`)
	ages       = regexp.MustCompile(` {2,}\d{1,3}[smhdy] {2,}`)
	times      = regexp.MustCompile(`\d{4}-\d\d-\d\dT[0-9:.]+Z`)
	otherUUIDs = regexp.MustCompile(`[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}`)
	blanks     = regexp.MustCompile(` {2,}`)
)

// compare compares the transcript with a golden file.
func (h *host) compare(t *testing.T, file string) {
	t.Helper()
	text := strings.NewReplacer(h.replacements...).Replace(h.transcript.String())
	text = times.ReplaceAllString(text, "TIME")
	text = otherUUIDs.ReplaceAllString(text, "UUID")
	// The width of columns depends on the replaced IDs.
	lines := strings.Split(text, "\n")
	for i, line := range lines {
		indent := len(line) - len(strings.TrimLeft(line, " "))
		lines[i] = line[:indent] + blanks.ReplaceAllString(line[indent:], "  ")
	}
	checkFile(t, file, strings.Join(lines, "\n"))
}

// checkFile compares a golden file with the output of the commands, or writes it with -update.
func checkFile(t *testing.T, file, output string) {
	t.Helper()
	if *update {
		must(t, os.WriteFile(file, []byte(output), 0o644))
		return
	}
	text, err := os.ReadFile(file)
	must(t, err)
	if diff := cmp.Diff(string(text), output); diff != "" {
		t.Errorf(
			"%s differs from the output of the commands; if the output is right, run the test with -update (-file +output):\n%s",
			file,
			diff,
		)
	}
}

// The commands create, attach, mount, unmount, detach and delete volumes and snapshots, with the output of the golden
// file. The controller and the node are two processes.
func TestVolumeLifecycle(t *testing.T) {
	t.Parallel()
	h := newHostWithGuest(t, false)
	data, copied := filepath.Join(h.dir, "data"), filepath.Join(h.dir, "copied")

	id := h.ok(t, "volume", "create", "postgres", "--size=1GiB")
	h.replacements = append(h.replacements, id, "VOLUME")
	h.ok(t, "volume", "show", "postgres")
	h.fails(t, 5, "volume", "mount", id, data)
	h.ok(t, "volume", "attach", "postgres")
	h.ok(t, "volume", "attach", id, "--json")
	h.ok(t, "volume", "list")
	h.ok(t, "volume", "list", "--json")
	h.ok(t, "volume", "mount", "postgres", data, "--volume-context=rootUid=999", "--volume-context=rootMode=0750")
	h.ok(t, "volume", "mount", "postgres", data, "--json")
	h.ok(t, "volume", "list")
	h.ok(t, "volume", "show", "postgres")
	info, err := os.Stat(data)
	must(t, err)
	var owner unix.Stat_t
	must(t, unix.Stat(data, &owner))
	if info.Mode().Perm() != 0o750 || owner.Uid != 999 {
		t.Errorf("the root folder has mode %s and owner %d", info.Mode(), owner.Uid)
	}
	const text = "precious\n"
	must(t, os.WriteFile(filepath.Join(data, "file"), []byte(text), 0o600))
	unix.Sync()
	h.fails(t, 5, "volume", "delete", id)
	h.fails(t, 5, "volume", "detach", id)

	snapshot := h.ok(t, "snapshot", "create", "monday", "--volume=postgres")
	h.replacements = append(h.replacements, snapshot, "SNAPSHOT")
	h.ok(t, "snapshot", "create", "monday", "--volume=postgres", "--json")
	h.ok(t, "snapshot", "list")
	h.ok(t, "snapshot", "list", "--json", "--volume="+id)
	h.ok(t, "snapshot", "show", "monday")

	restored := h.ok(t, "volume", "create", "restored", "--from-snapshot=monday")
	h.replacements = append(h.replacements, restored, "COPY")
	attachment := filepath.Join(h.dir, "attachment.json")
	must(t, os.WriteFile(attachment, []byte(h.ok(t, "volume", "attach", "restored", "--json")), 0o600))
	noController := "--controller-endpoint=" + filepath.Join(h.dir, "none")
	h.ok(t, "volume", "mount", restored, copied, "--read-only", "--attachment="+attachment, noController)
	h.fails(t, 5, "volume", "mount", id, copied, "--attachment="+attachment, noController)
	if got, err := os.ReadFile(filepath.Join(copied, "file")); err != nil || string(got) != text {
		t.Errorf("the file of the snapshot contains %q, %v", got, err)
	}
	if err := os.WriteFile(filepath.Join(copied, "file"), nil, 0o600); !errors.Is(err, unix.EROFS) {
		t.Errorf("writing to the read-only mount returns %v", err)
	}

	for volume, target := range map[string]string{restored: copied, id: data} {
		if got := h.run(t, "volume", "unmount", volume, target); got.code != 0 {
			t.Errorf("%+v", got)
		}
	}
	h.ok(t, "volume", "unmount", "postgres", data)
	h.ok(t, "volume", "unmount", id, data, "--json")
	for _, gone := range []string{data, filepath.Join(h.dir, "staging", id)} {
		if exists(t, gone) {
			t.Errorf("%s was not removed", gone)
		}
	}
	h.ok(t, "volume", "detach", "postgres")
	h.ok(t, "volume", "detach", restored, "--json")
	for _, object := range [][]string{
		{"snapshot", "delete", "monday"}, {"volume", "delete", "postgres"}, {"snapshot", "delete", snapshot}, {"volume", "delete", id},
	} {
		for range 2 {
			got := h.run(t, object...)
			if got.code != 0 {
				t.Errorf("%v: %+v", object, got)
			}
			h.record(object, got)
		}
	}
	h.ok(t, "volume", "delete", restored, "--json")
	h.fails(t, 4, "volume", "show", "postgres")
	h.ok(t, "volume", "detach", id)
	h.ok(t, "volume", "list")
	h.ok(t, "snapshot", "list", "--json")
	h.compare(t, "testdata/volume.txt")

	left, err := h.sim.Leftovers(t.Context())
	if diff := cmp.Diff(simtest.Leftovers{}, left); err != nil || diff != "" {
		t.Errorf("%v, objects left on the rack (-want +got):\n%s", err, diff)
	}
}

// One process serves both services. Volumes are mounted as raw block, with mount options, and at several targets.
func TestMountOptions(t *testing.T) {
	t.Parallel()
	h := newHostWithGuest(t, true)
	id := h.ok(t, "volume", "create", "my volume", "--size=1G", "--parameter=blockSize=512")
	h.ok(t, "volume", "attach", "my volume")
	device := filepath.Join(h.dir, "device")
	h.ok(t, "volume", "mount", id, device, "--block")
	info, err := os.Stat(device)
	if err != nil || info.Mode()&os.ModeDevice == 0 {
		t.Errorf("%v, %v: want a device", info, err)
	}
	must(t, os.WriteFile(device, bytes.Repeat([]byte("mine"), 1024), 0))
	h.fails(t, 5, "volume", "mount", id, filepath.Join(h.dir, "data"))
	h.ok(t, "volume", "unmount", id, device)

	a, b := filepath.Join(h.dir, "a"), filepath.Join(h.dir, "b")
	shared := []string{"--access-mode=SINGLE_NODE_MULTI_WRITER", "--fs-type=xfs", "--option=noatime"}
	h.fails(t, 5, append([]string{"volume", "mount", id, a}, shared...)...) // the disk is not blank
	h.ok(t, "volume", "detach", id)
	h.ok(t, "volume", "delete", id)

	id = h.ok(t, "volume", "create", "shared", "--size=1GiB")
	h.ok(t, "volume", "attach", id)
	for _, target := range []string{a, b} {
		h.ok(t, append([]string{"volume", "mount", id, target}, shared...)...)
	}
	table, err := os.ReadFile("/proc/self/mountinfo")
	must(t, err)
	if mounted := regexp.MustCompile(`(?m)^.* ` + a + ` .*noatime.* - xfs .*$`); !mounted.Match(table) {
		t.Errorf("%s is not mounted as xfs with noatime", a)
	}
	if message := h.fails(t, 5, "volume", "unmount", id, a); !strings.Contains(message, b) {
		t.Errorf("the message does not name the other target: %s", message)
	}
	h.ok(t, "volume", "unmount", id, a, "--keep-staged")
	if exists(t, a) || !exists(t, b) {
		t.Error("want the first target removed and the second target kept")
	}
	h.ok(t, "volume", "unmount", id, b)
	h.ok(t, "volume", "mount", id, b) // with the filesystem on the disk
	h.ok(t, "volume", "unmount", id, b)
	copied := h.ok(t, "volume", "create", "copy", "--from-volume=shared", "--size=2GiB")
	var shown struct{ SourceVolumeID string }
	must(t, json.Unmarshal([]byte(h.ok(t, "volume", "show", copied, "--json")), &shown))
	if shown.SourceVolumeID != id {
		t.Errorf("the source of the copy is %q", shown.SourceVolumeID)
	}
	h.ok(t, "volume", "detach", id)
	h.ok(t, "volume", "delete", id)
	h.ok(t, "volume", "delete", copied)
}

// detach reads the mount table: it rejects a mounted volume with any staging folder, and after a restart of the plugin.
// A disk that a workload used as raw block is not formatted by a later mount. The commands store nothing, so the rack
// remembers that the volume was created for raw block.
func TestMountAfterRawBlock(t *testing.T) {
	t.Parallel()
	h := newHostWithGuest(t, true)
	target := filepath.Join(h.dir, "target")
	h.ok(t, "volume", "create", "raw", "--size=1GiB", "--block")
	h.ok(t, "volume", "attach", "raw")
	h.ok(t, "volume", "mount", "raw", target, "--block")
	disk, err := os.OpenFile(target, os.O_WRONLY|unix.O_SYNC, 0)
	must(t, err)
	_, err = disk.WriteAt([]byte("data"), 90<<20)
	must(t, errors.Join(err, disk.Close()))
	h.ok(t, "volume", "unmount", "raw", target)
	if message := h.fails(t, 5, "volume", "mount", "raw", target); !strings.Contains(message, "first at byte 94371840") {
		t.Errorf("mount fails with: %s", message)
	}
	h.ok(t, "volume", "detach", "raw")
}

func TestDetachRejectsAMountedVolume(t *testing.T) {
	t.Parallel()
	h := newHostWithGuest(t, false)
	id := h.ok(t, "volume", "create", "held", "--size=1GiB")
	data := filepath.Join(h.dir, "data")
	h.ok(t, "volume", "attach", id)
	h.ok(t, "volume", "mount", id, data)
	must(t, h.node.Stop())
	h.node = startPlugin(
		t,
		simtest.PluginOptions{Mode: "node", Dir: h.folder(t, "node"), Sim: h.sim, Instance: h.sim.Instances[0]},
	)
	attached := func() bool {
		instances, err := h.sim.ListInstances(t.Context())
		must(t, err)
		return len(instances[0].Disks) == 2
	}
	other := "--staging-dir=" + filepath.Join(h.dir, "other")
	node := "--node=" + h.sim.Instances[0].ID
	for name, args := range map[string][]string{
		"no flags": {}, "another staging folder": {other}, "with --node": {node},
		"with --node and --unmounted": {node, "--unmounted"},
	} {
		got := h.run(t, append([]string{"volume", "detach", id}, args...)...)
		if got.code != 5 || !attached() {
			t.Errorf("%s: %+v, attached %t", name, got, attached())
		}
	}
	h.ok(t, "volume", "unmount", id, data)
	h.ok(t, "volume", "detach", id)
	if attached() {
		t.Error("the volume is still attached")
	}
}

// A misspelt target, or a volume that is mounted elsewhere, is no reason to remove what is there.
func TestUnmountOfSomethingElse(t *testing.T) {
	t.Parallel()
	h := newHostWithGuest(t, false)
	data, other, own := filepath.Join(h.dir, "data"), filepath.Join(h.dir, "more"), h.folder(t, "own")
	must(t, os.WriteFile(filepath.Join(own, "file"), nil, 0o600))
	for volume, target := range map[string]string{"mounted": data, "another": other} {
		h.ok(t, "volume", "create", volume, "--size=1GiB")
		h.ok(t, "volume", "mount", volume, target, "--attach")
	}
	for _, target := range []string{own, other} {
		message := h.fails(t, 5, "volume", "unmount", "mounted", target)
		if !strings.Contains(message, "is not mounted at "+target) || !strings.Contains(message, "it is mounted at "+data) {
			t.Errorf("%s: %s", target, message)
		}
	}
	h.ok(t, "volume", "unmount", "mounted", data)
	h.ok(t, "volume", "unmount", "another", other)
}

// detach cannot see the mounts of another node, so it requires --unmounted.
func TestDetachFromAnotherNode(t *testing.T) {
	t.Parallel()
	h := newHost(t, false, "--instances=node-a,node-b")
	node := h.sim.Instance("node-b").ID
	id := h.ok(t, "volume", "create", "far", "--size=1GiB")
	h.ok(t, "volume", "detach", id, "--node="+node) // the volume is not attached there
	h.ok(t, "volume", "attach", id, "--node="+strings.ToUpper(node))
	h.ok(t, "volume", "attach", "far", "--node=node-b")
	where := "attached to node node-b (" + node + ")"
	if message := h.fails(t, 5, "volume", "mount", id, h.dir+"/data"); !strings.Contains(message, where) {
		t.Errorf("the message does not name the node: %s", message)
	}
	for _, from := range [][]string{nil, {"--node=" + instanceID}, {"--node=" + instanceID, "--unmounted"}} {
		message := h.fails(t, 5, append([]string{"volume", "detach", id}, from...)...)
		if !strings.Contains(message, where+", not to node") {
			t.Errorf("detach %v: the message does not say where the volume is: %s", from, message)
		}
	}
	if message := h.fails(t, 5, "volume", "detach", id, "--node="+node); !strings.Contains(message, "--unmounted") {
		t.Errorf("the message does not mention --unmounted: %s", message)
	}
	if message := h.ok(t, "volume", "show", id); !strings.Contains(message, "attached to node node-b ("+node+")") {
		t.Errorf("the volume was detached: %s", message)
	}
	h.ok(t, "volume", "detach", id, "--node=node-b", "--unmounted")
	h.ok(t, "volume", "delete", id)
	h.ok(t, "volume", "detach", id, "--node="+node)
	h.ok(t, "volume", "detach", id, "--node=node-b")
}

// The controller leaves a boot disk and another cluster's volume where they are. In CSI that is a success.
func TestDetachOfWhatTheControllerLeavesAlone(t *testing.T) {
	t.Parallel()
	h := newHost(t, false, "--instances=node-a")
	sdk, err := h.sim.Client()
	must(t, err)
	boot, err := sdk.DiskView(
		t.Context(),
		oxide.DiskViewParams{Project: oxide.NameOrId(h.sim.Project), Disk: "node-a-boot"},
	)
	must(t, err)
	gone := h.startGone(t)
	foreign := createOn(t, gone, coretest.CreateRequest("foreign"))
	_, err = gone.ControllerClient.ControllerPublishVolume(t.Context(), &csi.ControllerPublishVolumeRequest{
		VolumeId: foreign, NodeId: h.sim.Instance("node-a").ID, VolumeCapability: coretest.MountWriter(),
	})
	must(t, err)
	for name, id := range map[string]string{"boot disk": boot.Id, "another cluster's volume": foreign} {
		message := h.fails(t, 5, "volume", "detach", id, "--node=node-a", "--unmounted")
		if !strings.Contains(message, "is still attached to node node-a") {
			t.Errorf("%s: %s", name, message)
		}
	}
}

// While another process detaches the disk, detach reports no success.
func TestDetachThatAnotherProcessCarriesOut(t *testing.T) {
	t.Parallel()
	h := &host{dir: shortDir(t), args: []string{"--detach-grace=1m"}}
	h.start(t, false, "--instances=node-a,node-b")
	id := h.ok(t, "volume", "create", "data", "--size=1GiB")
	h.ok(t, "volume", "attach", id, "--node=node-b")
	rack, err := h.sim.Client()
	must(t, err)
	_, err = rack.AntiAffinityGroupCreate(t.Context(), oxide.AntiAffinityGroupCreateParams{
		Project: oxide.NameOrId(h.sim.Project),
		Body: &oxide.AntiAffinityGroupCreate{
			Name:          oxide.Name(record.Holds.Named(simtest.ClusterID, id)),
			Description:   fmt.Sprintf(`{"v":1,"cluster":%q,"disk":%q,"by":"another"}`, simtest.ClusterID, id),
			FailureDomain: oxide.FailureDomainSled,
			Policy:        oxide.AffinityPolicyAllow,
		},
	})
	must(t, err)
	message := h.fails(t, 3, "volume", "detach", id, "--node=node-b", "--unmounted")
	if !strings.Contains(message, "just being detached") {
		t.Errorf("detach: %s", message)
	}
}

// After an unpublish show says that the node still has the disk.
func TestShowOfADeferredDetach(t *testing.T) {
	t.Parallel()
	h := &host{dir: shortDir(t), args: []string{"--detach-grace=1m"}}
	h.start(t, false, "--instances=node-a,node-b")
	id := h.ok(t, "volume", "create", "data", "--size=1GiB")
	h.ok(t, "volume", "attach", id, "--node=node-b")
	node := h.sim.Instances[1].ID
	_, err := h.controller.ControllerUnpublishVolume(
		t.Context(),
		&csi.ControllerUnpublishVolumeRequest{VolumeId: id, NodeId: node},
	)
	must(t, err)
	want := "unpublished; its detach from node node-b (" + node + ") is deferred"
	if shown := h.ok(t, "volume", "show", "data"); !strings.Contains(shown, want) {
		t.Errorf("show says %s, want %q", shown, want)
	}
	for _, from := range [][]string{nil, {"--node=node-a"}, {"--node=node-a", "--unmounted"}} {
		message := h.fails(t, 5, append([]string{"volume", "detach", id}, from...)...)
		if !strings.Contains(message, "attached to node node-b ("+node+"), not to node") {
			t.Errorf("detach %v: the message does not say where the disk is: %s", from, message)
		}
	}
	h.ok(t, "volume", "detach", id, "--node=node-b", "--unmounted")
	if shown := h.ok(t, "volume", "show", "data"); !strings.Contains(shown, "not attached") {
		t.Errorf("after the detach show says %s", shown)
	}
}

// A mount that fails leaves nothing staged, unless the volume was staged before.
func TestFailedMountIsUnstaged(t *testing.T) {
	t.Parallel()
	h := newHostWithGuest(t, true)
	full, data := h.folder(t, "full"), filepath.Join(h.dir, "data")
	must(t, os.WriteFile(filepath.Join(full, "file"), nil, 0o600)) // nothing can be mounted there
	id := h.ok(t, "volume", "create", "v", "--size=1GiB")
	h.ok(t, "volume", "attach", id)
	staging := filepath.Join(h.dir, "staging", id)
	staged := func() bool {
		table, err := os.ReadFile("/proc/self/mountinfo")
		must(t, err)
		return strings.Contains(string(table), " "+staging+" ")
	}
	shared := "--access-mode=SINGLE_NODE_MULTI_WRITER"
	for _, flags := range [][]string{{shared}, {"--block", shared}} {
		message := h.fails(t, 5, append([]string{"volume", "mount", id, full}, flags...)...)
		if !strings.Contains(message, full) || strings.Contains(message, "stay staged") {
			t.Errorf("mount %v: the message is %s", flags, message)
		}
		if staged() || exists(t, staging) {
			t.Errorf("mount %v: the volume stays staged", flags)
		}
	}
	h.ok(t, "volume", "mount", id, data, shared)
	h.fails(t, 5, "volume", "mount", id, full, shared)
	if !staged() || !exists(t, data) {
		t.Error("a failed mount has unstaged a volume that was mounted elsewhere")
	}
	h.ok(t, "volume", "unmount", id, data, "--keep-staged")
	h.fails(t, 5, "volume", "mount", id, full, shared)
	if !staged() {
		t.Error("a failed mount has unstaged a volume that was staged before")
	}
	h.ok(t, "volume", "unmount", id, data)
	if staged() {
		t.Error("the volume stays staged")
	}
	h.ok(t, "volume", "detach", id)
}

// No command waits for a socket that its user may not use. With --wait a command waits for a plugin that has not
// started.
func TestUnreachablePlugin(t *testing.T) {
	t.Parallel()
	h := newHost(t, true)
	if os.Geteuid() == 0 {
		dir, program := h.folder(t, "closed"), filepath.Join(h.dir, "oxide-csi")
		must(t, errors.Join(os.Chmod(h.dir, 0o755), os.Chmod(dir, 0o700), os.Link(programs.Plugin, program)))
		cmd := exec.CommandContext(within(t, 2*time.Minute), program, "volume", "list", "--wait", "--timeout=0",
			"--endpoint="+filepath.Join(dir, "csi.sock"))
		cmd.Env = baseEnv()
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
		output, _ := cmd.CombinedOutput() // the exit code tells
		if code := cmd.ProcessState.ExitCode(); code != 8 ||
			!strings.Contains(string(output), "permission denied: run this as root") {
			t.Errorf("exit code %d: %s", code, output)
		}
	}
	late := filepath.Join(h.dir, "late.sock")
	waiting := exec.CommandContext(within(t, 2*time.Minute), programs.Plugin, "volume", "list", "--wait", "--timeout=0",
		"--endpoint="+late)
	waiting.Env = baseEnv()
	stderr := &simtest.Output{}
	waiting.Stderr = stderr
	must(t, waiting.Start())
	await.Eventually(
		t,
		"the command waits",
		func() bool { return strings.Contains(stderr.String(), "waiting: no plugin responds at "+late) },
	)
	must(t, os.Symlink(h.controller.Socket, late))
	if err := waiting.Wait(); err != nil {
		t.Errorf("%v: %s", err, stderr)
	}
}

// A volume keeps its data and its ID when it grows, and its filesystem grows with the next mount.
func TestVolumeExpand(t *testing.T) {
	t.Parallel()
	h := newHostWithGuest(t, true)
	id, target := h.ok(t, "volume", "create", "postgres", "--size=1GiB"), filepath.Join(h.dir, "data")
	sizes := make([]uint64, 0, 3)
	for gib := 1; gib <= 3; gib++ {
		if got := h.ok(
			t,
			"volume",
			"expand",
			"postgres",
			fmt.Sprintf("--size=%dGiB", gib),
		); got != fmt.Sprintf(
			"volume postgres has %dGiB",
			gib,
		) {
			t.Errorf("expand printed %q", got)
		}
		h.ok(t, "volume", "attach", id)
		h.ok(t, "volume", "mount", id, target)
		file := filepath.Join(target, "file")
		if text, err := os.ReadFile(file); gib > 1 && (err != nil || string(text) != "precious") {
			t.Errorf("the file has %q: %v", text, err)
		}
		must(t, os.WriteFile(file, []byte("precious"), 0o600))
		var stat unix.Statfs_t
		must(t, unix.Statfs(target, &stat))
		sizes = append(sizes, stat.Blocks*uint64(stat.Bsize)>>20)
		h.fails(t, 5, "volume", "expand", id, "--size=9GiB")
		h.ok(t, "volume", "unmount", id, target)
		h.ok(t, "volume", "detach", id)
	}
	if sizes[0] > 1024 || sizes[1] < 1500 || sizes[2] < 2500 {
		t.Errorf("the filesystem had %v MiB", sizes)
	}
	h.ok(t, "volume", "delete", id)
	left, err := h.sim.Leftovers(t.Context())
	if err != nil || left.Disks != 0 || left.Snapshots != 0 {
		t.Errorf("left: %+v, %v", left, err)
	}
}

func TestVolumeExitCodes(t *testing.T) {
	t.Parallel()
	h := newHost(t, false, "--quota=5GiB")
	id := h.ok(t, "volume", "create", "existing", "--size=1GiB")
	h.ok(t, "volume", "create", "large", "--size=2GiB")
	missing := filepath.Join(h.dir, "missing")
	file := filepath.Join(h.dir, "file")
	must(t, os.WriteFile(file, nil, 0o600))
	for _, test := range []struct {
		name    string
		args    []string
		code    int
		message string
	}{
		{"unknown command", []string{"volume", "fly", id}, 2, `"fly" is not a command: see oxide-csi volume --help`},
		{"another word for expand, without a size", []string{"volume", "resize", id}, 2, "--size: is required"},
		{"another tool's word", []string{"volume", "ls"}, 2, `"ls" is not a command: did you mean oxide-csi volume list?`},
		{"another tool's word for a snapshot", []string{"snapshot", "rm", id}, 2, `"rm" is not a command: did you mean oxide-csi snapshot delete?`},
		{"a command of volumes without its group", []string{"list"}, 78, `"list" is not a command: did you mean oxide-csi volume list?`},
		{"a command of another group", []string{"volume", "explain", id}, 2, `did you mean oxide-csi explain?`},
		{"a copy in another tool's words", []string{"snapshot", "restore", id}, 2, `did you mean oxide-csi volume create?`},
		{"a misspelt command", []string{"volum"}, 78, `"volum" is not a command: did you mean oxide-csi volume?`},
		{"a misspelt command with its flags", []string{"volume", "creat", "x", "--size=1GiB"}, 2, "did you mean oxide-csi volume create?"},
		{"an unknown flag", []string{"volume", "create", "x", "--sise=1GiB"}, 2, "--sise"},
		{"a node without its flag", []string{"volume", "attach", id, "node-a"}, 2, "--node=node-a?"},
		{"a size without its flag", []string{"volume", "expand", id, "2GiB"}, 2, "--size=2GiB?"},
		{"a copy smaller than its source", []string{"volume", "create", "x", "--size=1GiB", "--from-volume=large"}, 2, "--size: the request allows 1GiB at most, and the source has 2GiB"},
		{"no name", []string{"volume", "create"}, 2, "needs NAME; arguments given: 0; see oxide-csi volume create --help"},
		{"an empty name", []string{"volume", "show", ""}, 2, "VOLUME is empty"},
		{"a name with the form of an ID", []string{"volume", "create", instanceID, "--size=1GiB"}, 2, "has the form of a volume ID"},
		{"no size", []string{"volume", "create", "x"}, 2, "config: --size: is required"},
		{"a size without a unit", []string{"volume", "create", "x", "--size=1"}, 2, `config: --size: "1" is not a size: write a whole number with a unit, such as 20GiB`},
		{"a size of nothing", []string{"volume", "create", "x", "--size=0GiB"}, 2, `config: --size: "0GiB" is no size: write 1GiB or more`},
		{"a duration without a unit", []string{"volume", "list", "--timeout=5"}, 2, `config: --timeout: "5" is not a duration; write a number and a unit`},
		{"neither true nor false", []string{"volume", "list", "--wait=perhaps"}, 2, `config: --wait: "perhaps" is neither true nor false`},
		{"a parameter without a value", []string{"volume", "create", "x", "--size=1GiB", "--parameter=x"}, 2, `config: --parameter: "x" is not of the form key=value`},
		{"a word too many, with the flag", []string{"volume", "create", "x", "y", "--size=1GiB"}, 2, "needs NAME; arguments given: 2"},
		{"an argument of a command that takes none", []string{"volume", "list", "everything"}, 2, `oxide-csi volume list takes no argument such as "everything"`},
		{"invalid size", []string{"volume", "create", "x", "--size=big"}, 2, "is not a size"},
		{"two sources", []string{"volume", "create", "x", "--from-snapshot=" + id, "--from-volume=" + id}, 2, "cannot be combined"},
		{"a parameter of the mount", []string{"volume", "create", "x", "--size=1GiB", "--parameter=rootUid=1"}, 2, "--volume-context=rootUid="},
		{"a parameter twice", []string{"volume", "create", "x", "--size=1GiB", "--parameter=blockSize=512", "--parameter=blockSize=4096"}, 2, "given twice"},
		{"unknown parameter", []string{"volume", "create", "x", "--size=1GiB", "--parameter=colour=red"}, 2, `parameter "colour" is not known`},
		{"a size above the limit of a disk", []string{"volume", "create", "x", "--size=2000GiB"}, 2, "--size: "},
		{"a TCP endpoint", []string{"volume", "list", "--controller-endpoint=tcp://127.0.0.1:1"}, 2, "is not a unix socket"},
		{"negative timeout", []string{"volume", "list", "--timeout=-1s"}, 2, "config: --timeout: -1s is negative"},
		{"a snapshot's name with the form of an ID", []string{"snapshot", "create", instanceID, "--volume=" + id}, 2, "has the form of a snapshot ID"},
		{"unknown access mode", []string{"volume", "mount", id, h.dir + "/data", "--access-mode=ANY"}, 2, "is not one of SINGLE_NODE_WRITER"},
		{"raw block with a filesystem", []string{"volume", "mount", id, h.dir + "/data", "--block", "--fs-type=xfs"}, 2, "--block cannot be combined with"},
		{"invalid attachment", []string{"volume", "mount", id, h.dir + "/data", "--attachment=" + file}, 2, "not the output of attach"},
		{"snapshot without a volume", []string{"snapshot", "create", "x"}, 2, "config: --volume: is required"},
		{"--unmounted without --node", []string{"volume", "detach", id, "--unmounted"}, 2, "--unmounted needs --node"},

		{"missing socket", []string{"volume", "list", "--controller-endpoint=" + missing}, 8, "no plugin responds at " + missing + ": connect: no such file or directory: start the plugin"},
		{"a file that is no socket", []string{"volume", "list", "--controller-endpoint=" + file}, 8, "connection refused"},
		{"a missing socket of the node", []string{"volume", "attach", id, "--node-endpoint=" + missing}, 8, "or name the node with --node"},
		{"unknown volume ID", []string{"volume", "show", instanceID}, 4, "[NotFound]"},
		{"unknown volume name", []string{"volume", "show", "nowhere"}, 4, `cluster "lab" has no volume named "nowhere"`},
		{"unknown snapshot ID", []string{"snapshot", "show", instanceID}, 4, "[NotFound]"},
		{"unknown snapshot name", []string{"snapshot", "show", "nowhere"}, 4, `cluster "lab" has no snapshot named "nowhere"`},
		{"unknown source", []string{"volume", "create", "x", "--from-snapshot=nowhere"}, 4, `cluster "lab" has no snapshot named "nowhere"`},
		{"unknown node name", []string{"volume", "attach", id, "--node=nowhere"}, 4, `no instance in the controller's projects is named "nowhere"`},
		{"unknown node name for a volume that does not exist", []string{"volume", "detach", instanceID, "--node=nowhere"}, 4, `is named "nowhere"`},
		{"unknown node ID", []string{"volume", "attach", id, "--node=" + instanceID}, 4, "--node: rack \"default\" has no such instance"},
		{"existing volume of another size", []string{"volume", "create", "existing", "--size=2GiB"}, 5, "was made with 1GiB, not 2GiB: use another name; or ask for what it was made with"},
		{"missing parent of the target", []string{"volume", "mount", id, h.dir + "/none/data"}, 5, "/none is not a directory"},
		{"not attached", []string{"volume", "mount", id, h.dir + "/data"}, 5, `"oxide-csi volume attach"`},
		{"no space", []string{"volume", "create", "x", "--size=3GiB"}, 6, "[QuotaExhausted]"},
		{"unknown rack", []string{"volume", "create", "x", "--size=1GiB", "--rack=west"}, 2, "--rack: this plugin serves rack=default, not {rack=west}"},
		{"a socket without a node", []string{"volume", "attach", "existing", "--node-endpoint=" + h.controller.Socket}, 1, "name the socket of one with --node-endpoint"},
		{"a name at a socket without a controller", []string{"volume", "show", "existing", "--controller-endpoint=" + h.node.Socket}, 1, "is no controller: name the socket of one with --controller-endpoint"},
		{"a name at a missing socket", []string{"volume", "show", "existing", "--controller-endpoint=" + missing}, 8, "no plugin responds at " + missing},
		{"a socket without a controller", []string{"volume", "list", "--controller-endpoint=" + h.node.Socket}, 1, "name the socket of one with --controller-endpoint"},
	} {
		t.Run(test.name, func(t *testing.T) {
			if message := h.fails(t, test.code, test.args...); !strings.Contains(message, test.message) {
				t.Errorf("the message is %s", message)
			}
		})
	}
	t.Run("invalid endpoints in the environment", func(t *testing.T) {
		for _, name := range []string{"CSI_ENDPOINT", "OXIDE_CSI_CONTROLLER_ENDPOINT", "OXIDE_CSI_NODE_ENDPOINT"} {
			got := runPlugin(t, []string{name + "=tcp://x"}, "volume", "list")
			if got.code != 2 || !strings.Contains(got.stderr, "set by "+name) {
				t.Errorf("%s: %+v", name, got)
			}
		}
	})
	t.Run("flags override the environment", func(t *testing.T) {
		sys := filepath.Dir(h.folder(t, "sys/block"))
		environ := []string{
			"OXIDE_CSI_SYS_ROOT=" + sys,
			"CSI_ENDPOINT=" + missing,
			"OXIDE_CSI_CONTROLLER_ENDPOINT=" + missing,
			"OXIDE_CSI_NODE_ENDPOINT=" + missing,
			"OXIDE_CSI_STAGING_DIR=" + missing,
		}
		for _, flags := range [][]string{
			{"--endpoint=" + h.controller.Socket, "--node-endpoint=" + h.node.Socket},
			{"--endpoint=" + h.node.Socket, "--controller-endpoint=" + h.controller.Socket},
		} {
			staging := h.dir + "/elsewhere"
			flags = append(flags, "--staging-dir="+staging)
			detach := append([]string{"volume", "detach", "existing"}, flags...)
			unmount := append([]string{"volume", "unmount", "existing", h.dir + "/none", "--json"}, flags...)
			if got := runPlugin(t, environ, detach...); got.code != 0 {
				t.Errorf("%v: %+v", flags, got)
			}
			if got := runPlugin(t, environ, unmount...); got.code != 0 || !strings.Contains(got.stdout, staging+"/") {
				t.Errorf("%v: %+v", flags, got)
			}
		}
	})
	_, err := h.sim.Inject(
		t.Context(),
		simtest.Fault{Operation: "*", Kind: simtest.FaultStatus, Status: 503, Count: new(0)},
	)
	must(t, err)
	t.Run("a rack that does not answer", func(t *testing.T) { h.fails(t, 3, "volume", "show", id) })
	must(t, h.sim.ClearFaults(t.Context()))
	must(t, h.sim.RevokeToken(t.Context(), h.sim.Token))
	t.Run("token without permission", func(t *testing.T) {
		if message := h.fails(t, 7, "volume", "show", id); !strings.Contains(message, fault.TokenRejected.OnHosts) {
			t.Errorf("the message is %s", message)
		}
	})
}

// A command prints the plugin's message once, and adds one next step.
func TestVolumeErrorsHaveNoRepetition(t *testing.T) {
	t.Parallel()
	h := newHost(t, true)
	off := false
	must(t, h.sim.Set(t.Context(), simtest.Settings{Hotplug: &off}))
	id := h.ok(t, "volume", "create", "cold", "--size=1GiB")
	message := h.fails(t, 5, "volume", "attach", id)
	for _, part := range []string{"this rack attaches disks only while the instance is stopped", "stop the instance", "--wait"} {
		if strings.Count(message, part) != 1 {
			t.Errorf("the message has %q %d times: %s", part, strings.Count(message, part), message)
		}
	}
}

func TestVolumeHealth(t *testing.T) {
	t.Parallel()
	h := newHost(t, true)
	id := h.ok(t, "volume", "create", "faulty", "--size=1GiB")
	must(t, h.sim.SetDiskState(t.Context(), id, "faulted"))
	if message := h.ok(
		t,
		"volume",
		"show",
		"faulty",
	); !regexp.MustCompile(`health: +INACCESSIBLE: disk csi-`).
		MatchString(message) {
		t.Errorf("the message is %s", message)
	}
	var shown struct {
		Health []struct{ Status, Reason, Message string }
	}
	must(t, json.Unmarshal([]byte(h.ok(t, "volume", "show", "faulty", "--json")), &shown))
	if len(shown.Health) != 1 || shown.Health[0].Status != "INACCESSIBLE" || shown.Health[0].Reason != "DiskFaulted" ||
		shown.Health[0].Message == "" {
		t.Errorf("%+v", shown)
	}
}

// If the plugin ends during a call, the command exits with code 3, and can be repeated.
func TestPluginEndsDuringACall(t *testing.T) {
	t.Parallel()
	h := &host{dir: shortDir(t), hold: true}
	h.start(t, false)
	ended := make(chan result, 1)
	go func() { ended <- h.run(t, "volume", "create", "orphan", "--size=1GiB") }()
	<-h.held
	must(t, h.controller.Kill())
	if got := <-ended; got.code != 3 || strings.Count(got.stderr, "\n") != 1 {
		t.Errorf("%+v", got)
	}
	h.controller = startPlugin(t, simtest.PluginOptions{Mode: "controller", Dir: h.folder(t, "controller"), Sim: h.sim})
	h.ok(t, "volume", "create", "orphan", "--size=1GiB")
}

func TestVolumeTimeout(t *testing.T) {
	t.Parallel()
	h := &host{dir: shortDir(t), hold: true}
	h.start(t, true)
	message := h.fails(t, 3, "volume", "create", "late", "--size=1GiB", "--timeout=300ms")
	if !strings.Contains(message, "CreateVolume: ") || !strings.Contains(message, "repeat the command") {
		t.Errorf("the message is %s", message)
	}
	h.release()
	h.ok(t, "volume", "create", "late", "--size=1GiB", "--timeout=0")
}

// A command shows on a terminal which call it waits for, and clears the line afterwards. Elsewhere it shows nothing for
// so short a time.
//
// This test takes real time: the command shows its progress after 2 s.
func TestVolumeProgress(t *testing.T) {
	t.Parallel()
	h := newHost(t, true)
	always := 0
	_, err := h.sim.Inject(t.Context(), simtest.Fault{
		Operation: "disk_create", Kind: simtest.FaultDelay, Count: &always, DelayMillis: 2800,
	})
	must(t, err)
	var shown, hidden string
	both, _ := errgroup.WithContext(t.Context())
	both.Go(func() error {
		got := h.run(t, "volume", "create", "unseen", "--size=1GiB")
		hidden = got.stderr
		return nil
	})
	both.Go(func() (err error) {
		shown, err = onTerminal(t, h.environ, "volume", "create", "seen", "--size=1GiB")
		return err
	})
	must(t, both.Wait())
	if hidden != "" {
		t.Errorf("progress without a terminal: %q", hidden)
	}
	if !regexp.MustCompile(`\d+s without a response from the controller \(CreateVolume\)`).MatchString(shown) ||
		!strings.HasSuffix(shown, "\r\x1b[K") {
		t.Errorf("progress on a terminal: %q", shown)
	}
	// Commands print no colours, so NO_COLOR has nothing to change.
	if regexp.MustCompile("\x1b\\[[0-9;]*m").MatchString(shown) {
		t.Errorf("progress on a terminal has a colour: %q", shown)
	}
	// With --wait the reason stands there, too.
	lost, err := onTerminal(t, h.environ, "volume", "list", "--wait", "--timeout=4s", "--endpoint="+h.dir+"/none",
		"--controller-endpoint="+h.dir+"/none")
	lines := regexp.MustCompile(`\r\x1b\[Kwaiting \ds, next try in [12]s: no plugin responds at `).FindAllString(lost, -1)
	if err == nil || len(lines) < 2 || len(lines) > 4 || // one each second, on a quick machine

		!strings.Contains(lost, "\r\x1b[Koxide-csi: ") {
		t.Errorf("progress of --wait: %q, %v", lost, err)
	}
	if quick, err := onTerminal(t, h.environ, "volume", "list"); err != nil || quick != "" {
		t.Errorf("progress of a quick command: %q, %v", quick, err)
	}
}

// onTerminal runs a command whose stderr is a terminal, and returns what was written there.
func onTerminal(t *testing.T, environ []string, args ...string) (string, error) {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		return "", err
	}
	defer func() { must(t, master.Close()) }()
	// File.Fd would make the descriptor blocking, so the ioctls use SyscallConn.
	raw, err := master.SyscallConn()
	must(t, err)
	var number int
	var ioctlErr error
	must(t, raw.Control(func(fd uintptr) {
		number, ioctlErr = unix.IoctlGetInt(int(fd), unix.TIOCGPTN)
		if ioctlErr == nil {
			ioctlErr = unix.IoctlSetPointerInt(int(fd), unix.TIOCSPTLCK, 0)
		}
	}))
	if ioctlErr != nil {
		return "", ioctlErr
	}
	slave, err := os.OpenFile("/dev/pts/"+strconv.Itoa(number), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		return "", err
	}
	cmd := exec.CommandContext(within(t, 2*time.Minute), programs.Plugin, args...)
	cmd.Env = append(baseEnv(), environ...)
	cmd.Stderr = slave
	err = errors.Join(cmd.Start(), slave.Close())
	if err != nil {
		return "", err
	}
	var text bytes.Buffer
	_, _ = text.ReadFrom(master) // it ends with EIO when the command has closed the terminal
	return text.String(), cmd.Wait()
}

func TestVolumeCompletion(t *testing.T) {
	t.Parallel()
	h := newHost(t, false)
	id := h.ok(t, "volume", "create", "one", "--size=1GiB")
	snapshot := h.ok(t, "snapshot", "create", "one", "--volume="+id)
	suggested := func(environ []string, args ...string) []string {
		got := runPlugin(t, environ, append([]string{"__complete"}, args...)...)
		if got.code != 0 {
			t.Errorf("%v: %+v", args, got)
		}
		var suggestions []string
		for line := range strings.Lines(got.stdout) {
			if !strings.HasPrefix(line, ":") {
				suggestion, _, _ := strings.Cut(strings.TrimSpace(line), "\t")
				suggestions = append(suggestions, suggestion)
			}
		}
		return suggestions
	}
	for _, test := range []struct {
		args []string
		want []string
	}{
		{[]string{"volume", "show", ""}, []string{"one"}},
		{[]string{"volume", "show", "o"}, []string{"one"}},
		{[]string{"volume", "mount", id[:9]}, []string{id}},
		{[]string{"volume", "attach", "--node", ""}, []string{"node-a"}},
		{[]string{"volume", "detach", "--node", h.sim.Instances[0].ID[:9]}, []string{h.sim.Instances[0].ID}},
		{[]string{"volume", "mount", "zz"}, nil},
		{[]string{"volume", "mount", id, ""}, nil},
		{[]string{"snapshot", "delete", ""}, []string{"one"}},
		{[]string{"snapshot", "delete", snapshot[:9]}, []string{snapshot}},
		{[]string{"volume", "create", "x", "--from-snapshot", ""}, []string{"one"}},
		{[]string{"volume", "mount", "--fs-type", "x"}, []string{"ext4", "ext3", "xfs", "btrfs"}},
		{[]string{"volume", "u"}, []string{"unmount"}},
		{[]string{"volume", "show", "--controller-endpoint=" + h.dir + "/none", ""}, nil},
	} {
		got := suggested(h.environ, test.args...)
		if test.args[len(test.args)-1] == "x" { // the shell removes suggestions without the prefix
			got = slices.DeleteFunc(got, func(suggestion string) bool { return !slices.Contains(test.want, suggestion) })
		}
		if diff := cmp.Diff(test.want, got); diff != "" {
			t.Errorf("%v (-want +got):\n%s", test.args, diff)
		}
	}
	// The commands of an operator ask the rack, or the orchestrator if there is one.
	c := simtest.NewCluster(canary, pvList, pvcList)
	c.Put(pvList, "", "pv-1", map[string]any{"spec": map[string]any{
		"claimRef": map[string]any{"namespace": "shop", "name": "data"},
		"csi":      map[string]any{"driver": "csi.oxide.computer", "volumeHandle": id},
	}})
	kubeconfig, operator := serveCluster(t, c), h.rackEnv(t)
	for _, test := range []struct {
		args, want []string
	}{
		{[]string{"explain", ""}, []string{"one"}},
		{[]string{"explain", id[:9]}, []string{id}},
		{[]string{"explain", kubeconfig, "sh"}, []string{"shop/data"}},
		{[]string{"explain", kubeconfig, id[:9]}, []string{id}},
		{[]string{"orphans", kubeconfig, "--delete", "--yes", ""}, []string{snapshot}},
		{[]string{"orphans", "--delete", "--yes", ""}, nil},
	} {
		if diff := cmp.Diff(test.want, suggested(operator, test.args...)); diff != "" {
			t.Errorf("%v (-want +got):\n%s", test.args, diff)
		}
	}
	for _, shell := range []string{"bash", "zsh", "fish"} {
		if got := runPlugin(t, nil, "completion", shell); got.code != 0 || !strings.Contains(got.stdout, "__complete") {
			t.Errorf("%s: exit code %d", shell, got.code)
		}
	}
}

// A list with more than one page is complete.
func TestLongVolumeList(t *testing.T) {
	t.Parallel()
	h := newHost(t, true)
	const count = 501
	creators, ctx := errgroup.WithContext(t.Context())
	creators.SetLimit(8)
	for i := range count {
		creators.Go(func() error {
			_, err := h.controller.CreateVolume(ctx, createRequest("volume-"+strconv.Itoa(i)))
			return err
		})
	}
	must(t, creators.Wait())
	var list []struct{ VolumeID string }
	must(t, json.Unmarshal([]byte(h.run(t, "volume", "list", "--json").stdout), &list))
	ids := map[string]bool{}
	for _, volume := range list {
		ids[volume.VolumeID] = true
	}
	if len(ids) != count || len(list) != count {
		t.Errorf("%d volumes with %d different IDs, want %d", len(list), len(ids), count)
	}
	if got := h.run(t, "volume", "show", "volume-500"); got.code != 0 {
		t.Errorf("%+v", got)
	}
	all := h.run(t, "volume", "list", "--all", "--json").stdout
	if strings.Count(all, "volumeID") != count+1 || !strings.Contains(all, "node-a-boot") {
		t.Error("the list with --all lacks the boot disk")
	}
}

// commandPage returns docs/reference/cli.md: the introduction of the file, which is written by hand, and the help of
// each command.
func commandPage(t *testing.T) string {
	t.Helper()
	const page, begin = "../../docs/reference/cli.md", "<!-- From here on made from --help by: go test ./cmd/oxide-csi -run TestCommandPage -update -->\n"
	text, err := os.ReadFile(page)
	must(t, err)
	written, _, ok := strings.Cut(string(text), begin)
	if !ok {
		t.Fatalf("%s lacks the line %s", page, begin)
	}
	const table, after = "| code | it means |", "\nAn error is one line"
	before, rest, _ := strings.Cut(written, table)
	_, rest, ok = strings.Cut(rest, after)
	if !ok {
		t.Fatalf("%s lacks the table of exit codes, or the line after it", page)
	}
	var b strings.Builder
	b.WriteString(before + exitTable() + after + rest + begin)
	for _, command := range []string{
		"volume", "volume create", "volume expand", "volume list", "volume show", "volume attach", "volume mount", "volume unmount", "volume detach", "volume delete", "volume adopt",
		"volume header-backup",
		"snapshot", "snapshot create", "snapshot list", "snapshot show", "snapshot delete",
		"doctor", "explain", "orphans", "support-bundle",
	} {
		got := runPlugin(t, nil, append(strings.Fields(command), "--help")...)
		if got.code != 0 || got.stderr != "" {
			t.Fatalf("%s: %+v", command, got)
		}
		help, _, _ := strings.Cut(got.stdout, "\nGlobal Flags:\n")
		help, _, _ = strings.Cut(help, "\nUse \"oxide-csi")
		// The page has the exit codes, the commands and the settings already, and the heading is the usage.
		heading := "oxide-csi " + command
		if _, usage, has := strings.Cut(help, "\nUsage:\n"); has && command != "volume" && command != "snapshot" {
			usage, _, _ = strings.Cut(usage, "\n")
			heading = strings.TrimSuffix(strings.TrimSpace(usage), " [flags]")
		}
		for _, known := range []string{
			"\nExit codes:\n  0", "\nAvailable Commands:\n", "\nUsage:\n", "\nIn the plugin's container nothing has to be set.",
		} {
			before, rest, has := strings.Cut(help, known)
			if _, after, ended := strings.Cut(rest, "\n\n"); has && ended {
				help = before + "\n" + after
			}
		}
		help = regexp.MustCompile(`(?m)^  -h, --help .*\n?`).ReplaceAllString(help, "")
		help = strings.TrimSuffix(strings.TrimRight(help, "\n"), "\n\nFlags:")
		if before, rest, has := strings.Cut(help, "\nServing:\n"); has {
			_, own, _ := strings.Cut(rest, "\nFlags:\n")
			help = before + "\nFlags:\n" + own
		}
		help = strings.ReplaceAll(help, " [flags]", "")
		if command == "snapshot" { // its flags are those of volume
			help, _, _ = strings.Cut(help, "\nFlags:\n")
		}
		fmt.Fprintf(&b, "\n## %s\n\n```text\n%s\n```\n", heading, strings.TrimRight(help, "\n"))
	}
	return b.String()
}

func TestCommandPage(t *testing.T) { checkFile(t, "../../docs/reference/cli.md", commandPage(t)) }

func publishRequest(id, node string) *csi.ControllerPublishVolumeRequest {
	return &csi.ControllerPublishVolumeRequest{
		VolumeId:         id,
		NodeId:           node,
		VolumeCapability: createRequest("").GetVolumeCapabilities()[0],
	}
}

// The example at the beginning of the page works. The test uses a smaller volume and its own folders.
func TestCommandPageExample(t *testing.T) {
	t.Parallel()
	h := newHostWithGuest(t, true)
	page, err := os.ReadFile("../../docs/reference/cli.md")
	must(t, err)
	_, rest, _ := strings.Cut(string(page), "```sh\n")
	example, _, ok := strings.Cut(rest, "```\n")
	if !ok || !strings.Contains(example, "/srv/postgres") || !strings.Contains(example, "20GiB") {
		t.Fatalf("the example of the page has changed: %s", example)
	}
	target := filepath.Join(h.dir, "postgres")
	example = strings.NewReplacer("/srv/postgres", target, "20GiB", "1GiB").Replace(example)
	cmd := exec.CommandContext(within(t, 2*time.Minute), "bash", "-euc", example)
	cmd.Env = append(baseEnv(), h.environ...)
	cmd.Env = append(cmd.Env, "PATH="+filepath.Dir(programs.Plugin)+":"+os.Getenv("PATH"))
	if output, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(output), "is mounted at "+target) {
		t.Errorf("%v: %s", err, output)
	}
	left, err := h.sim.Leftovers(t.Context())
	if err != nil || left.Disks != 1 || left.Snapshots != 1 {
		t.Errorf("%+v, %v: want postgres-test and the snapshot", left, err)
	}
}

// With --wait a command waits for a rack that fails, and does not end with the first error of the rack.
func TestWaitForARackThatFails(t *testing.T) {
	t.Parallel()
	h := newHost(t, false)
	id := h.ok(t, "volume", "create", "postgres", "--size=1GiB")
	for _, operation := range []string{"anti_affinity_group_view", "anti_affinity_group_list"} {
		_, err := h.sim.Inject(t.Context(), simtest.Fault{
			Operation: operation, Kind: simtest.FaultStatus, Status: 500, ErrorCode: "Internal",
			Message: "Internal Server Error", Count: new(0),
		})
		must(t, err)
	}
	h.fails(t, 3, "volume", "attach", id)
	time.AfterFunc(3*time.Second, func() { _ = h.sim.ClearFaults(t.Context()) })
	if got := runPlugin(t, h.environ, "volume", "attach", id, "--wait", "--timeout=1m"); got.code != 0 ||
		!strings.Contains(got.stderr, "waiting: ") {
		t.Errorf("%+v", got)
	}
}

// A rack with hot-plug may show a disk as attached before the guest has it. A mount waits for the device.
func TestMountWaitsForThePlug(t *testing.T) {
	t.Parallel()
	h := newHostWithGuest(t, false)
	node := h.sim.Instance("node-a").ID
	must(t, h.sim.SetRunState(t.Context(), node, "stopped"))
	must(t, h.sim.Set(t.Context(), simtest.Settings{Hotplug: "attach-first", PlugDelayMillis: new(5000)}))
	must(t, h.sim.SetRunState(t.Context(), node, "running"))
	command := mounting()(t, h)
	began := time.Now()
	h.ok(t, command...)
	if took := time.Since(began); took < time.Second {
		t.Errorf("mounted after %s: the device was there", took)
	}
	h.ok(t, "volume", "unmount", "data", filepath.Join(h.dir, "data"))
}

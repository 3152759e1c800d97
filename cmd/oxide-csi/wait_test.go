// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/test/await"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// Every command with --wait waits for the rack, and mount and unmount for the node, and says once what for. When the
// time is up, it ends as without --wait. Ctrl-C ends it and leaves nothing half done: afterwards the same command waits
// again, succeeds when the rack or the node is back, and can be repeated.
func TestEveryCommandWaits(t *testing.T) {
	t.Parallel()
	before := map[string][]string{
		"volume create data --size=1GiB": nil, "volume list": {"volume create data --size=1GiB"},
	}
	for _, command := range []string{
		"volume expand data --size=2GiB", "volume show data", "volume attach data", "volume delete data",
		"volume adopt --from-cluster=" + simtest.ClusterID + " --yes", "snapshot create monday --volume=data",
	} {
		before[command] = before["volume list"]
	}
	for _, command := range []string{"snapshot list", "snapshot show monday", "snapshot delete monday"} {
		before[command] = append(before["volume list"], "snapshot create monday --volume=data")
	}
	for _, command := range []string{"volume detach data", "volume mount data DIR/data"} {
		before[command] = append(before["volume list"], "volume attach data")
	}
	before["volume unmount data DIR/data"] = append(before["volume mount data DIR/data"], "volume mount data DIR/data")
	before["volume header-backup data DIR/header"] = []string{}
	named := func(command string) string { return strings.Join(strings.Fields(command)[:2], " ") }
	known := map[string]bool{}
	for command := range before {
		known[named(command)] = true
	}
	page, err := os.ReadFile("../../docs/reference/cli.md")
	must(t, err)
	for _, found := range regexp.MustCompile(`(?m)^## oxide-csi ((?:volume|snapshot) \S+)`).FindAllSubmatch(page, -1) {
		if !known[string(found[1])] {
			t.Errorf("%s is not tested", found[1])
		}
	}
	for text, earlier := range before {
		t.Run(named(text), func(t *testing.T) {
			t.Parallel()
			var h *host
			split := func(text string) []string { return strings.Fields(strings.ReplaceAll(text, "DIR", h.dir)) }
			ofNode, ofHeader := strings.Contains(text, "mount "), strings.Contains(text, "header")
			if ofNode || ofHeader {
				h = newHostWithGuest(t, false)
			} else {
				h = newHost(t, false)
			}
			if ofHeader {
				usedHeader(t, h)
			}
			for _, command := range earlier {
				h.ok(t, split(command)...)
			}
			mend, means := func() { must(t, h.sim.ClearFaults(t.Context())) }, "the rack is unavailable: "
			if ofNode {
				must(t, h.node.Stop())
				mend, means = func() { h.restartNode(t, programs.Plugin) }, "no plugin responds at "
			} else {
				_, err := h.sim.Inject(t.Context(), simtest.Fault{
					Operation: "*", Kind: simtest.FaultStatus, Status: 503, ErrorCode: "x", Message: "x", Count: new(0),
				})
				must(t, err)
			}
			reason := func(stderr string) string { return stderr[max(0, strings.LastIndex(stderr, means)):] }
			plain := h.run(t, split(text)...)
			if plain.code != 3 && plain.code != 8 || !strings.Contains(plain.stderr, means) {
				t.Fatalf("without --wait: %+v", plain)
			}
			waiting := append(split(text), "--wait", "--timeout=3s")
			late := h.run(t, waiting...)
			if late.code != plain.code || reason(late.stderr) != reason(plain.stderr) || late.stdout != "" ||
				strings.Count(late.stderr, " waiting: ") != 1 {
				t.Errorf("when the time is up: %+v, want the end of %+v", late, plain)
			}
			waiting[len(waiting)-1] = "--timeout=1m"
			waits := func() (*exec.Cmd, *simtest.Output) {
				cmd, stderr := h.begin(t, waiting...)
				await.Eventually(t, "the command waits", func() bool { return strings.Contains(stderr.String(), means) })
				return cmd, stderr
			}
			cmd, stderr := waits()
			must(t, cmd.Process.Signal(os.Interrupt))
			_ = cmd.Wait() // the exit code tells
			if cmd.ProcessState.ExitCode() != 130 || !strings.Contains(stderr.String(), "oxide-csi: interrupted") ||
				!strings.Contains(stderr.String(), "a repeated command finds it; it waited: ") ||
				reason(stderr.String()) != reason(plain.stderr) {
				t.Errorf("Ctrl-C: exit code %d: %s", cmd.ProcessState.ExitCode(), stderr)
			}
			cmd, stderr = waits()
			mend()
			if err := cmd.Wait(); err != nil {
				t.Errorf("when it can go on: %v: %s", err, stderr)
			}
			if again := h.run(t, split(text)...); again.code != 0 && !ofHeader { // which does not replace a file
				t.Errorf("repeated: %+v", again)
			}
			if ofNode {
				h.ok(t, split("volume unmount data DIR/data")...)
			}
			want := 1
			if strings.HasPrefix(text, "volume delete") {
				want = 0
			}
			if made := strings.Count(h.ok(t, "volume", "list"), "\ndata "); made != want {
				t.Errorf("there are %d volumes, want %d", made, want)
			}
		})
	}
}

// detach waits until the volume is unmounted here.
func TestDetachWaitsForUnmount(t *testing.T) {
	t.Parallel()
	h := newHostWithGuest(t, false)
	h.ok(t, mounting()(t, h)...)
	h.fails(t, 5, "volume", "detach", "data")
	cmd, stderr := h.begin(t, "volume", "detach", "data", "--wait")
	await.Eventually(t, "the command waits", func() bool { return strings.Contains(stderr.String(), "waiting: ") })
	h.ok(t, "volume", "unmount", "data", filepath.Join(h.dir, "data"))
	if err := cmd.Wait(); err != nil {
		t.Errorf("%v: %s", err, stderr)
	}
	if list := h.ok(t, "volume", "list"); strings.Contains(list, h.sim.Instances[0].Name) {
		t.Errorf("the volume is attached: %s", list)
	}
}

// usedHeader attaches an encrypted volume that was used, and returns the command that mounts it, and its device. In the
// simulated guest the first mount ends before the header says that its disk was used.
func usedHeader(t *testing.T, h *host) (mount []string, device string) {
	t.Helper()
	mount = append(encrypted()(t, h), "--passphrase-file="+filepath.Join(h.dir, "key"))
	h.run(t, mount...)
	device = h.device(t, h.ok(t, "volume", "create", "data", "--size=1GiB", "--parameter=encryption=luks2"))
	runHost(t, "cryptsetup", "config", "--disable-locks", "--label=", device)
	h.environ = append(h.environ, "OXIDE_CSI_DEV_ROOT="+filepath.Join(h.sim.Instances[0].Guest, "dev"))
	return mount, device
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main_test

import (
	"bytes"
	"fmt"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// goneCluster is the cluster whose volumes are adopted.
const goneCluster = "prod-1"

// startGone starts the controller of goneCluster.
func (h *host) startGone(t *testing.T) *simtest.Plugin {
	t.Helper()
	return startPlugin(t, simtest.PluginOptions{
		Mode: "controller", Dir: h.folder(t, "gone"), Sim: h.sim, Args: []string{"--cluster-id=" + goneCluster},
	})
}

// createOn creates a volume by the CSI call of an orchestrator.
func createOn(t *testing.T, plugin *simtest.Plugin, req *csi.CreateVolumeRequest) string {
	t.Helper()
	created, err := plugin.ControllerClient.CreateVolume(t.Context(), req)
	must(t, err)
	return created.GetVolume().GetVolumeId()
}

// answer runs a command with this text on its stdin.
func (h *host) answer(t *testing.T, stdin string, args ...string) result {
	t.Helper()
	cmd := exec.CommandContext(within(t, time.Minute), programs.Plugin, args...)
	var stdout, stderr bytes.Buffer
	cmd.Env, cmd.Stdin, cmd.Stdout, cmd.Stderr = append(
		baseEnv(),
		h.environ...), strings.NewReader(
		stdin,
	), &stdout, &stderr
	_ = cmd.Run() // the exit code tells
	got := result{code: cmd.ProcessState.ExitCode(), stdout: stdout.String(), stderr: stderr.String()}
	h.record(append(args, fmt.Sprintf("<<< %q", stdin)), got)
	return got
}

// adopt takes over the volumes of a cluster that is gone, with the output of the golden file.
func TestVolumeAdopt(t *testing.T) {
	t.Parallel()
	h := newHost(t, true)
	gone := h.startGone(t)
	req := createRequest("pvc-1")
	req.Parameters = map[string]string{rpc.ParameterPVCName: "data", rpc.ParameterPVCNamespace: "shop"}
	id := createOn(t, gone, req)
	req.Name = "deleted"
	deleted := createOn(t, gone, req)
	h.replacements = append(h.replacements, id, "VOLUME", deleted, "DELETED")
	for _, volume := range []string{id, deleted} {
		_, err := gone.ControllerClient.CreateSnapshot(t.Context(),
			&csi.CreateSnapshotRequest{Name: "snapshot of " + volume, SourceVolumeId: volume})
		must(t, err)
	}
	_, err := gone.ControllerClient.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: deleted})
	must(t, err)
	must(t, gone.Stop())
	own := h.ok(t, "volume", "create", "own", "--size=1GiB")
	h.replacements = append(h.replacements, own, "OWN")

	h.fails(t, 5, "volume", "attach", id)
	h.fails(t, 2, "volume", "adopt")
	h.fails(t, 2, "volume", "adopt", "--from-cluster="+goneCluster, "--for=swarm")
	h.fails(t, 4, "volume", "adopt", "--from-cluster=prod-2", "--yes")
	h.ok(t, "volume", "adopt", "--from-cluster="+simtest.ClusterID) // it only prints, so it does not ask
	adopt := []string{"volume", "adopt", "--from-cluster=" + goneCluster}
	for _, no := range []string{"", "n\n", "maybe\n"} {
		if got := h.answer(t, no, adopt...); got.code != 1 || got.stdout != "" {
			t.Errorf("answer %q: %+v", no, got)
		}
	}
	h.fails(t, 5, "volume", "attach", id)
	if got := h.answer(t, "y\n", adopt...); got.code != 0 || !strings.Contains(got.stdout, id) {
		t.Errorf("answer y: %+v", got)
	}
	h.ok(t, append(adopt, "--yes")...)
	h.ok(t, append(adopt, "--yes", "--json")...)
	h.ok(t, append(adopt, "--yes", "--for=kubernetes", "--storage-class=fast")...)
	h.ok(t, append(adopt, "--yes", "--for=nomad", "--plugin-id=disks")...)
	h.ok(t, "volume", "attach", id)
	h.ok(t, append(adopt, "--yes")...) // with the node's name
	h.ok(t, "volume", "detach", id)
	h.ok(t, "volume", "delete", id)
	h.compare(t, "testdata/adopt.txt")
}

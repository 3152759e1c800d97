// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package blackbox

import (
	"fmt"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/go-cmp/cmp"

	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
	"github.com/oxidecomputer/oxide-csi-plugin/test/await"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// TestNodePluginInGuest runs the node plugin in a guest that really goes down while a volume is in use. After an
// orderly shutdown all written data is there at the next boot, synced or not. The same holds if the plugin itself
// powered the guest off for a planned restart. After a power cut only unsynced data is lost. The rack has no hot-plug,
// so disks change only while the instance is stopped.
func TestNodePluginInGuest(t *testing.T) {
	needRoot(t)
	// Not parallel: the guest would copy the mounts of other tests, and keep them mounted.
	dir := shortDir(t)
	place := filepath.Join(dir, "node-a")
	if err := os.Mkdir(place, 0o755); err != nil {
		t.Fatal(err)
	}
	api, kubeconfig := startNodeAPI(t, "worker")
	node := simtest.PluginOptions{
		Mode:     "node",
		Dir:      place,
		Instance: simtest.Instance{Guest: "$OXIDE_SIM_GUEST"},
		Args: []string{
			"--attach-mode=restart", "--restart-poweroff=signal:SIGRTMIN+4", "--node-name=worker", "--kubeconfig=" + kubeconfig,
		},
	}
	flags, err := node.Flags()
	if err != nil {
		t.Fatal(err)
	}
	boot, err := simtest.WriteBoot(
		dir,
		programs.Sim,
		10*time.Second,
		fmt.Sprintf(`exec %s "%s"`, programs.Plugin, strings.Join(flags, `" "`)),
	)
	if err != nil {
		t.Fatal(err)
	}
	sim := startSimWithGuests(t, dir, "--instances=node-a", "--guest-boot="+boot)
	guest := &machine{t: t, sim: sim, Instance: sim.Instance("node-a"), socket: node.Socket()}
	controller := startPlugin(t, simtest.PluginOptions{Mode: "controller", Sim: sim})
	c := newClient()

	guest.halt()
	volume := twice(t, c, controller.CreateVolume, createRequest("guest", mountVolume(""))).GetVolume()
	published := twice(t, c, controller.ControllerPublishVolume, publishRequest(volume, guest.Instance, mountVolume("")))
	// life boots the guest and runs a workload that finds these files and writes others.
	life := func(finds map[string]string, writes ...string) (*mounted, func()) {
		t.Helper()
		plugin, root := guest.start()
		m := stageAndPublish(
			t,
			c,
			&simtest.Plugin{Client: plugin},
			place,
			volume,
			mountVolume(""),
			published.GetPublishContext(),
		)
		data := filepath.Join(root, m.target)
		found := map[string]string{}
		files, err := filepath.Glob(filepath.Join(data, "*.txt"))
		if err != nil {
			t.Fatal(err)
		}
		for _, path := range files {
			text, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			found[filepath.Base(path)] = string(text)
		}
		if diff := cmp.Diff(finds, found); diff != "" {
			t.Errorf("files that the workload finds (-want +got):\n%s", diff)
		}
		for _, name := range writes {
			writeText(t, filepath.Join(data, name), name)
		}
		return m, func() {
			if err := plugin.Close(); err != nil {
				t.Error(err)
			}
		}
	}
	_, gone := life(map[string]string{}, "synced-1.txt", "quiet-1.txt")
	gone()
	guest.halt()
	first := map[string]string{"synced-1.txt": "synced-1.txt", "quiet-1.txt": "quiet-1.txt"}
	_, gone = life(first, "synced-2.txt", "quiet-2.txt")
	gone()
	if err := sim.PowerCut(within(t, time.Minute), guest.ID); err != nil {
		t.Fatal(err)
	}
	guest.await("stopped")
	first["synced-2.txt"] = "synced-2.txt"
	_, gone = life(first, "quiet-3.txt")
	gone()
	restart := orchestrator.NewRestartID(time.Now())
	api.RequestRestart(restart)
	guest.await("stopped") // although no client told the rack to stop it
	accepted := api.RestartReply(restart)
	first["quiet-3.txt"] = "quiet-3.txt"
	m, gone := life(first)
	await.Eventually(
		t,
		"the plugin reports that its guest is back",
		func() bool { return api.RestartReply(restart).State == orchestrator.RestartBack },
	)
	if back := api.RestartReply(
		restart,
	); accepted.State != orchestrator.RestartAccepted || accepted.Boot == "" ||
		accepted.Boot == back.Boot {
		t.Errorf("the replies are %+v, then %+v", accepted, back)
	}
	m.unpublishAndUnstage(t)
	gone()
	guest.halt()
	twice(
		t,
		c,
		controller.ControllerUnpublishVolume,
		&csi.ControllerUnpublishVolumeRequest{VolumeId: volume.GetVolumeId(), NodeId: guest.ID},
	)
	twice(t, c, controller.DeleteVolume, &csi.DeleteVolumeRequest{VolumeId: volume.GetVolumeId()})
	checkLeftovers(t, sim, 0)
	if len(c.failed) > 0 {
		t.Errorf("requests failed without a fault: %v", c.failed)
	}
}

// startNodeAPI starts a fake Kubernetes API server with one Node.
func startNodeAPI(t *testing.T, name string) (api *simtest.Node, kubeconfig string) {
	t.Helper()
	api = &simtest.Node{Name: name}
	server := httptest.NewServer(api)
	t.Cleanup(server.Close)
	kubeconfig = filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(kubeconfig, []byte(api.Kubeconfig(server.URL)), 0o600); err != nil {
		t.Fatal(err)
	}
	return api, kubeconfig
}

// machine is an instance whose guest runs the node plugin.
type machine struct {
	simtest.Instance
	t      *testing.T
	sim    *simtest.Sim
	socket string
}

// pids returns the /proc folders of the host's processes with the plugin's socket in their command line.
func (m *machine) pids() (found []string) {
	m.t.Helper()
	lines, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		m.t.Fatal(err)
	}
	for _, path := range lines {
		if line, err := os.ReadFile(
			path,
		); err == nil &&
			strings.Contains(string(line), "--endpoint=unix://"+m.socket+"\x00") {
			found = append(found, filepath.Dir(path))
		}
	}
	return found
}

// start starts the instance, unless it runs, and waits for its plugin. root is the guest's root folder as seen from
// the host.
func (m *machine) start() (plugin *simtest.Client, root string) {
	m.t.Helper()
	if err := m.sim.SetRunState(within(m.t, time.Minute), m.ID, "running"); err != nil {
		m.t.Fatal(err)
	}
	plugin, err := simtest.Connect(m.socket)
	if err != nil {
		m.t.Fatal(err)
	}
	pids := m.pids()
	if len(pids) != 1 {
		m.t.Fatalf("the plugin runs %d times", len(pids))
	}
	return plugin, filepath.Join(pids[0], "root")
}

// halt presses the power button, and waits until the instance is stopped.
func (m *machine) halt() {
	m.t.Helper()
	plugin, _ := m.start() // a guest reacts to the button only after it has booted
	if err := plugin.Close(); err != nil {
		m.t.Fatal(err)
	}
	if err := m.sim.Halt(within(m.t, time.Minute), m.ID); err != nil {
		m.t.Fatal(err)
	}
	m.await("stopped")
}

// await waits until the instance is in this state. No process of its guest may be left then.
func (m *machine) await(state string) {
	m.t.Helper()
	await.Eventually(m.t, m.Name+" is "+state, func() bool {
		list, err := m.sim.ListInstances(within(m.t, time.Minute))
		if err != nil {
			m.t.Fatal(err)
		}
		return list[0].RunState == state
	})
	if left := m.pids(); len(left) > 0 {
		m.t.Errorf("processes %v are left although the guest is %s", left, state)
	}
}

// writeText writes a file, and syncs it if its name begins with "synced".
func writeText(t *testing.T, path, text string) {
	t.Helper()
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	_, err = f.WriteString(text)
	if err == nil && strings.HasPrefix(filepath.Base(path), "synced") {
		err = f.Sync()
	}
	if closeErr := f.Close(); err == nil {
		err = closeErr
	}
	if err != nil {
		t.Fatal(err)
	}
}

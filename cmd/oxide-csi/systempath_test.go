// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device/devicetest"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// A volume is mounted at an empty folder of the host's own system, again and again. The folder stays. The plugin and
// the commands run where /var is another filesystem, so that this machine keeps its folders whatever happens.
func TestMountAtAFolderOfTheSystem(t *testing.T) {
	t.Parallel()
	h := newHostWithGuest(t, false)
	host := devicetest.HoldMountNamespace(t, h.dir, "mount -t tmpfs var /var\nmkdir -p /var/log\nchmod 711 /var/log")
	inside := filepath.Join(t.TempDir(), "plugin")
	script := fmt.Sprintf(
		"#!/bin/sh\nexec nsenter --mount=/proc/%d/ns/mnt %s \"$@\"\n",
		host.PID(),
		simtest.Quote(programs.Plugin),
	)
	must(t, os.WriteFile(inside, []byte(script), 0o755))
	plugin, err := simtest.StartPlugin(inside, simtest.PluginOptions{
		Mode: "node", Dir: h.folder(t, "inside"), Sim: h.sim, Instance: h.sim.Instances[0], Env: baseEnv(),
	})
	must(t, err)
	t.Cleanup(func() { must(t, plugin.Stop()) })
	volume := func(args ...string) {
		t.Helper()
		cmd := exec.Command(inside, append([]string{"volume"}, args...)...)
		cmd.Env = append(append(baseEnv(), h.environ...), "OXIDE_CSI_NODE_ENDPOINT="+plugin.Socket)
		if output, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%v: %v: %s", args, err, output)
		}
	}
	const target = "/var/log"
	path := fmt.Sprintf("/proc/%d/root%s", host.PID(), target)
	before, err := os.Stat(path)
	must(t, err)
	volume("create", "logs", "--size=1GiB")
	for range 2 {
		for range 2 {
			volume("mount", "logs", target, "--attach")
		}
		must(t, os.WriteFile(filepath.Join(path, "file"), []byte("data"), 0o600))
		for range 2 {
			volume("unmount", "logs", target)
		}
		if after, err := os.Stat(path); err != nil || !os.SameFile(before, after) || before.Mode() != after.Mode() {
			t.Errorf("%s is %v (%v), and was %v", target, after, err, before)
		}
	}
	volume("detach", "logs")
}

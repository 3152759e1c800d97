// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main_test

import (
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/test/await"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// The command prints what /readyz answers. Kubelet shows it in an Event.
func TestReadyCommand(t *testing.T) {
	t.Parallel()
	sim, dir, addr := startSim(t), shortDir(t), freePort(t)
	_, port, err := net.SplitHostPort(addr)
	must(t, err)
	ready := func() result { return runPlugin(t, nil, "ready", "--http-endpoint=:"+port) }
	if got := ready(); got.code != 1 || !strings.Contains(got.stderr, "the plugin does not respond at :"+port) {
		t.Errorf("without a plugin: %+v", got)
	}
	if got := runPlugin(t, nil, "ready"); got.code != 2 || !strings.Contains(got.stderr, "--http-endpoint: is required") {
		t.Errorf("without an address: %+v", got)
	}
	wrong := *sim
	wrong.Token = "oxide-token-wrong"
	startPlugin(t, simtest.PluginOptions{
		Mode: "controller", Dir: dir, Sim: &wrong, Args: []string{"--http-endpoint=" + addr},
	})
	await.Eventually(t, "the command says that the token is wrong", func() bool {
		got := ready()
		return got.code == 1 && strings.Contains(got.stderr, "not ready: cannot be used as configured: ") &&
			strings.Contains(got.stderr, "give a token of this silo")
	})
	if _, page := get(t, "http://"+addr+"/readyz"); ready().stderr != "oxide-csi: "+page {
		t.Errorf("the command prints %q, and /readyz %q", ready().stderr, page)
	}
	must(t, os.WriteFile(filepath.Join(dir, "token"), []byte(sim.Token), 0o600))
	await.Eventually(t, "the command succeeds", func() bool { return ready() == result{stdout: "ok\n"} })
}

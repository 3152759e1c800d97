// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main_test

import (
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// A controller is started for systemd although it cannot use its rack. Its status says so until it can.
func TestStatusForSystemd(t *testing.T) {
	t.Parallel()
	dir := shortDir(t)
	path := filepath.Join(dir, "notify")
	systemd, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	must(t, err)
	defer func() { must(t, systemd.Close()) }()
	must(t, systemd.SetReadDeadline(time.Now().Add(2*time.Minute)))
	sim := startSim(t)
	_, err = sim.Inject(t.Context(), simtest.Fault{
		Operation: "project_view", Kind: simtest.FaultStatus, Status: http.StatusUnauthorized,
		ErrorCode: "Unauthorized", Message: "credentials missing or invalid",
	})
	must(t, err)
	plugin := startPlugin(t, simtest.PluginOptions{
		Mode: "controller", Dir: dir, Sim: sim,
		Env: []string{"PATH=" + os.Getenv("PATH"), "NOTIFY_SOCKET=" + path},
	})
	next := func() string {
		t.Helper()
		message := make([]byte, 4096)
		n, err := systemd.Read(message)
		must(t, err)
		return string(message[:n])
	}
	message := next()
	if strings.Contains(message, "first response") {
		message = next()
	}
	if !strings.HasPrefix(message, "READY=1\nSTATUS=serving, but not ready: ") || !strings.Contains(message, "token") {
		t.Fatalf("the plugin said %q", message)
	}
	must(t, sim.ClearFaults(t.Context()))
	if message := next(); message != "READY=1\nSTATUS=serving" {
		t.Errorf("the plugin said %q", message)
	}
	must(t, plugin.Stop())
}

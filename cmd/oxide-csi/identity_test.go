// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/test/await"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// instanceSys creates a /sys with the firmware of an Oxide instance and no disks.
func instanceSys(t *testing.T, id string) string {
	t.Helper()
	sys := t.TempDir()
	dmi := filepath.Join(sys, "class/dmi/id")
	must(t, errors.Join(os.MkdirAll(dmi, 0o755), os.Mkdir(filepath.Join(sys, "block"), 0o755)))
	for name, text := range map[string]string{"sys_vendor": "Oxide", "product_uuid": id, "product_serial": id} {
		must(t, os.WriteFile(filepath.Join(dmi, name), []byte(text+"\n"), 0o400))
	}
	return sys
}

// nomadAgent is a server for the node metadata of a Nomad client agent.
func nomadAgent(t *testing.T, meta string) *httptest.Server {
	t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("X-Nomad-Token") != canary {
			w.WriteHeader(http.StatusForbidden)
		}
		fmt.Fprintf(w, `{"Meta": {%s}}`, meta)
	}))
	t.Cleanup(server.Close)
	return server
}

// serveUnix serves a handler on a unix socket and returns its path.
func serveUnix(t *testing.T, handler http.Handler) string {
	t.Helper()
	path := filepath.Join(shortDir(t), "api.sock")
	listener, err := net.Listen("unix", path)
	must(t, err)
	server := &httptest.Server{Listener: listener, Config: &http.Server{Handler: handler}}
	server.Start()
	t.Cleanup(server.Close)
	return path
}

// On an instance of the rack, a node finds its identity in the firmware.
func TestNodeNeedsNoIdentitySettings(t *testing.T) {
	t.Parallel()
	dir := shortDir(t)
	p := startProcess(
		t,
		"--mode=node",
		"--endpoint="+dir+"/csi.sock",
		"--sys-root="+instanceSys(t, instanceID),
		"--state-dir="+dir,
	)
	conn, err := grpc.NewClient("unix://"+dir+"/csi.sock", grpc.WithTransportCredentials(insecure.NewCredentials()))
	must(t, err)
	defer func() { must(t, conn.Close()) }()
	info, err := csi.NewNodeClient(conn).
		NodeGetInfo(within(t, 2*time.Minute), &csi.NodeGetInfoRequest{}, grpc.WaitForReady(true))
	if err != nil || info.GetNodeId() != instanceID ||
		info.GetAccessibleTopology().GetSegments()["topology.csi.oxide.computer/rack"] != "default" {
		t.Errorf("NodeGetInfo: %v, %v", info, err)
	}
	must(t, p.cmd.Process.Signal(os.Interrupt))
	must(t, p.wait(t))
	if !strings.Contains(p.stderr.String(), "instance_id_from=guest") {
		t.Errorf("the log does not name the source of the instance ID: %s", p.stderr)
	}
}

// A node with a list of several racks waits until it is told its own.
func TestNodeOfSeveralRacks(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	config := filepath.Join(dir, "config.yaml")
	must(t, os.WriteFile(config, []byte("racks: [{name: default}, {name: west}]\n"), 0o644))
	identity := func(rack ...string) result {
		return runPlugin(t, baseEnv(), append([]string{
			"metadata", "--timeout=0", "--config=" + config, "--sys-root=" + instanceSys(t, instanceID),
		}, rack...)...)
	}
	if got := identity(); got.code == 0 || !strings.Contains(got.stderr, "has several (default, west)") {
		t.Errorf("without a name: %+v", got)
	}
	if got := identity("--rack=west"); got.code != 0 || !strings.Contains(got.stdout, "OXIDE_RACK=west") {
		t.Errorf("with a name: %+v", got)
	}
}

// addressForLater returns a loopback address that no process listens on for a while. Its IP address is random: a
// process that meanwhile takes a free port of 127.0.0.1 does not get this one.
func addressForLater(t *testing.T) string {
	t.Helper()
	listener, err := net.Listen("tcp", fmt.Sprintf("127.%d.%d.%d:0", 1+rand.N(254), rand.N(255), 1+rand.N(254)))
	must(t, err)
	must(t, listener.Close())
	return listener.Addr().String()
}

// A node that gets its rack from a Nomad agent waits while the agent is down. It becomes ready when the agent answers.
func TestNodeWaitsForItsRack(t *testing.T) {
	t.Parallel()
	dir, addr, nomad := shortDir(t), freePort(t), addressForLater(t)
	opts := simtest.PluginOptions{Mode: "node", Dir: dir, Args: []string{
		"--metadata=auto", "--instance-id=", "--sys-root=" + instanceSys(t, instanceID), "--http-endpoint=" + addr,
	}, Env: append(baseEnv(), "NOMAD_TOKEN="+canary, "NOMAD_ADDR=http://"+nomad)}
	type started struct {
		plugin *simtest.Plugin
		err    error
	}
	ready := make(chan started, 1)
	go func() {
		plugin, err := simtest.StartPlugin(programs.Plugin, opts)
		ready <- started{plugin, err}
	}()
	await.Eventually(t, "/readyz says what the plugin waits for", func() bool {
		code, body := get(t, "http://"+addr+"/readyz")
		return code == 503 &&
			strings.Contains(
				body,
				"guest knows the instance, but nomad, which may know the rack, failed: ask the Nomad agent at http://"+nomad,
			)
	})
	conn, err := grpc.NewClient("unix://"+opts.Socket(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	must(t, err)
	defer func() { must(t, conn.Close()) }()
	ctx := within(t, 2*time.Minute)
	_, err = csi.NewNodeClient(conn).NodeGetInfo(ctx, &csi.NodeGetInfoRequest{})
	if status.Code(err) != codes.Unavailable {
		t.Errorf("NodeGetInfo: %v, want UNAVAILABLE", err)
	}
	if code, _ := get(t, "http://"+addr+"/livez"); code != 200 {
		t.Errorf("/livez: %d", code)
	}

	listener, err := net.Listen("tcp", nomad)
	must(t, err)
	server := nomadAgent(t, `"oxide.rack": "east"`)
	proxied := &http.Server{Handler: server.Config.Handler}
	go func() { _ = proxied.Serve(listener) }() // until it is closed
	defer func() { must(t, proxied.Close()) }()
	s := <-ready
	must(t, s.err)
	defer func() { must(t, s.plugin.Stop()) }()
	info, err := csi.NewNodeClient(conn).NodeGetInfo(ctx, &csi.NodeGetInfoRequest{})
	if err != nil || info.GetNodeId() != instanceID ||
		info.GetAccessibleTopology().GetSegments()["topology.csi.oxide.computer/rack"] != "east" {
		t.Errorf("NodeGetInfo: %v, %v", info, err)
	}
	if text := s.plugin.Stderr().String(); strings.Contains(text, canary) {
		t.Errorf("the log contains the token: %s", text)
	}
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main_test

import (
	"errors"
	"fmt"
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

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// machine makes a /sys with the firmware of an Oxide instance and no disks.
func machine(t *testing.T, id string) string {
	t.Helper()
	sys := t.TempDir()
	dmi := filepath.Join(sys, "class/dmi/id")
	must(t, errors.Join(os.MkdirAll(dmi, 0o755), os.Mkdir(filepath.Join(sys, "block"), 0o755)))
	for name, text := range map[string]string{"sys_vendor": "Oxide", "product_uuid": id, "product_serial": id} {
		must(t, os.WriteFile(filepath.Join(dmi, name), []byte(text+"\n"), 0o400))
	}
	return sys
}

// agent is the metadata part of a Nomad client agent.
func agent(t *testing.T, meta string) *httptest.Server {
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

// socket serves a handler on a unix socket, whose path it returns.
func socket(t *testing.T, handler http.Handler) string {
	t.Helper()
	path := filepath.Join(shortDir(t), "api.sock")
	listener, err := net.Listen("unix", path)
	must(t, err)
	server := &httptest.Server{Listener: listener, Config: &http.Server{Handler: handler}}
	server.Start()
	t.Cleanup(server.Close)
	return path
}

// In a guest of a rack nothing but the endpoint need be configured.
func TestNodeWithNoConfiguration(t *testing.T) {
	t.Parallel()
	dir := shortDir(t)
	p := begin(t, "--mode=node", "--endpoint="+dir+"/csi.sock", "--sys-root="+machine(t, instanceID), "--state-dir="+dir)
	conn, err := grpc.NewClient("unix://"+dir+"/csi.sock", grpc.WithTransportCredentials(insecure.NewCredentials()))
	must(t, err)
	defer func() { must(t, conn.Close()) }()
	info, err := csi.NewNodeClient(conn).
		NodeGetInfo(within(t, 30*time.Second), &csi.NodeGetInfoRequest{}, grpc.WaitForReady(true))
	if err != nil || info.GetNodeId() != instanceID ||
		info.GetAccessibleTopology().GetSegments()["topology.csi.oxide.computer/rack"] != "default" {
		t.Errorf("NodeGetInfo: %v, %v", info, err)
	}
	must(t, p.cmd.Process.Signal(os.Interrupt))
	must(t, p.wait(t))
	if !strings.Contains(p.stderr.String(), "instance_id_from=guest") {
		t.Errorf("the log does not say who answered: %s", p.stderr)
	}
}

// A node whose rack is asked of an agent that is not there yet waits, and becomes ready by itself.
func TestNodeWaitsForItsRack(t *testing.T) {
	t.Parallel()
	dir, addr, nomad := shortDir(t), freePort(t), freePort(t)
	opts := simtest.PluginOptions{Mode: "node", Dir: dir, Args: []string{
		"--metadata=auto", "--instance-id=", "--sys-root=" + machine(t, instanceID), "--http-endpoint=" + addr,
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
	eventually(t, "/readyz says what it waits for", func() bool {
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
	ctx := within(t, 30*time.Second)
	if _, err := csi.NewNodeClient(conn).
		NodeGetInfo(ctx, &csi.NodeGetInfoRequest{}); status.Code(
		err,
	) != codes.Unavailable {
		t.Errorf("NodeGetInfo: %v, want UNAVAILABLE", err)
	}
	if code, _ := get(t, "http://"+addr+"/livez"); code != 200 {
		t.Errorf("/livez: %d", code)
	}

	listener, err := net.Listen("tcp", nomad)
	must(t, err)
	server := agent(t, `"oxide.rack": "east"`)
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
		t.Errorf("the token is shown: %s", text)
	}
}

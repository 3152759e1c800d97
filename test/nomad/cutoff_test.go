// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build nomad

package nomad_test

import (
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/nomad/api"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// TestCutOff cuts a client off from the servers for longer than stop_on_client_after, and for a shorter time than
// lost_after: what docs/explanation/nomad.md says about both.
func TestCutOff(t *testing.T) {
	t.Parallel() // it waits most of the time
	w := &wires{}
	c := newWiredCluster(t, impatient, w)
	c.grace = "20s" // longer than stop_on_client_after, as the page says
	c.install(t)
	c.moveController(t, "node-a")
	operator := c.operator(t)
	for _, volume := range []string{"stops", "stays"} {
		operator.run(t, "volume", "create", c.filled(t, "volumes/create.volume.hcl", `"data"`, `"`+volume+`"`))
	}
	stops := c.consumer(t, operator, "stops", "node-b", "disconnect {\n stop_on_client_after = \"10s\"\n}\n")
	stays := c.consumer(t, operator, "stays", "node-b",
		// Nomad places no replacement while a deployment is under way.
		"disconnect {\n lost_after = \"10m\"\n}\nupdate {\n min_healthy_time = \"0s\"\n}\n")
	c.server.eventually("the deployment has ended", func() bool {
		deployment, _, err := c.admin.Jobs().LatestDeployment("stays", nil)
		return err == nil && deployment != nil && deployment.Status == api.DeploymentStatusSuccessful
	})
	c.lines(t, operator, stops[0], stops...)
	c.lines(t, operator, stays[0], stays...)
	volume, _, err := c.admin.CSIVolumes().Info("stops", nil)
	must(t, err)

	m := c.clients["node-b"]
	unstaged := m.answered("NodeUnstageVolume")
	began := time.Now()
	mend := w.cutOff(m)
	m.eventually("the client has stopped the allocation and unmounted its volume", func() bool {
		at := c.holder(t, volume.ExternalID)
		done := m.answered("NodeUnstageVolume") > unstaged
		if !done && at != "node-b" {
			t.Fatalf("the disk is attached to %q, and was still mounted on node-b a moment ago", at)
		}
		return done
	})
	// The client counts from its last heartbeat.
	c.took(t, "stop of an allocation on a client that is cut off", began, 5*time.Second, 25*time.Second)
	stops = append(stops, c.runs("stops", "node-a", 1)...)
	c.lines(t, operator, stops[1], stops...)
	t.Logf("measured: it runs elsewhere after %s", since(began))
	if at := c.holder(t, volume.ExternalID); at != "node-a" {
		t.Errorf("the disk is attached to %q", at)
	}
	if n := m.answered("NodeUnstageVolume"); n != unstaged+1 {
		t.Errorf("%d volumes were unmounted, want only one", n-unstaged)
	}
	c.server.eventually("the other allocation is unknown, and its replacement waits", func() bool {
		allocs, _, err := c.admin.Jobs().Allocations("stays", false, nil)
		return err == nil && len(allocs) == 2 && !slices.ContainsFunc(allocs, func(a *api.AllocationListStub) bool {
			want := api.AllocClientStatusPending
			if a.ID == stays[0] {
				want = api.AllocClientStatusUnknown
			}
			return a.ClientStatus != want
		})
	})
	c.says(t, "NodeNotReady: ", "explain", stays[0])

	mend()
	c.running(stays[0])
	c.running(stops[1])
	c.healthy(1, 2)
	c.logged(t, operator, stays[0], c.printed[stays[0]])
	if n := c.attached(t); n != 2 {
		t.Errorf("%d disks are attached, want both", n)
	}
}

// holder returns the name of the instance to which a disk is attached, or "".
func (c *cluster) holder(t *testing.T, diskID string) string {
	t.Helper()
	list, err := c.sim.ListInstances(t.Context())
	must(t, err)
	for _, instance := range list {
		if slices.ContainsFunc(instance.Disks, func(d simtest.SimDisk) bool { return d.ID == diskID }) {
			return instance.Name
		}
	}
	return ""
}

// consumer runs a job like the example with a volume of the same name, and with this text in its group. It begins on a
// client, and may move to any other. The result is the allocation.
func (c *cluster) consumer(t *testing.T, user cli, job, client, group string) (alloc []string) {
	t.Helper()
	other := c.node(nodes[1-slices.Index(nodes, client)]).ID
	_, err := c.admin.Nodes().ToggleEligibility(other, false, nil)
	must(t, err)
	user.variables = []string{"NOMAD_VAR_volume=" + job}
	user.run(t, "job", "run", "-detach", c.filled(t, "example.nomad.hcl",
		`job "example" {`, fmt.Sprintf("job %q {", job), `group "example" {`, "group \"example\" {\n"+group))
	alloc = c.runs(job, client, 1)
	_, err = c.admin.Nodes().ToggleEligibility(other, true, nil)
	must(t, err)
	return alloc
}

// wires forward the clients' connections to the server, and can cut a client off. All clients share this machine's
// network, so a connection is known by the process that holds its other end.
type wires struct {
	mu sync.Mutex
	// cut is the process ID of the agent that is cut off, or 0.
	cut int
	// open are the connections of clients.
	open map[net.Conn]bool
}

// to begins to forward to a port of this machine, and returns the port for clients.
func (w *wires) to(t *testing.T, server int) int {
	t.Helper()
	w.open = map[net.Conn]bool{}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	t.Cleanup(func() { must(t, listener.Close()) })
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			go w.forward(conn, fmt.Sprintf("127.0.0.1:%d", server))
		}
	}()
	return listener.Addr().(*net.TCPAddr).Port
}

// forward carries a connection until one of its ends closes it, or its client is cut off.
func (w *wires) forward(client net.Conn, server string) {
	defer client.Close()
	if !w.enter(client) {
		return
	}
	defer w.leave(client)
	other, err := net.Dial("tcp", server)
	if err != nil {
		return
	}
	defer other.Close()
	// A copy ends with an error when a connection is cut, which is what the wires are for.
	go func() {
		_, _ = io.Copy(client, other)
		_ = client.Close()
	}()
	_, _ = io.Copy(other, client)
}

func (w *wires) enter(client net.Conn) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.cut != 0 && holds(w.cut, client.RemoteAddr()) {
		return false
	}
	w.open[client] = true
	return true
}

func (w *wires) leave(client net.Conn) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.open, client)
}

// cutOff takes the server away from a client until mend is called.
func (w *wires) cutOff(m *machine) (mend func()) {
	m.t.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	w.cut = m.agent()
	closed := 0
	for client := range w.open {
		if holds(w.cut, client.RemoteAddr()) {
			must(m.t, client.Close())
			closed++
		}
	}
	if closed == 0 {
		m.t.Fatalf("%s had no connection to the server", m.name)
	}
	return func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.cut = 0
	}
}

// holds reports whether a process has a TCP socket with this local address.
func holds(pid int, address net.Addr) bool {
	sockets, _ := os.ReadFile("/proc/net/tcp")
	local := fmt.Sprintf(":%04X", address.(*net.TCPAddr).Port)
	for line := range strings.Lines(string(sockets)) {
		fields := strings.Fields(line)
		if len(fields) < 10 || !strings.HasSuffix(fields[1], local) {
			continue
		}
		files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
		if slices.ContainsFunc(files, func(file string) bool {
			link, _ := os.Readlink(file)
			return link == "socket:["+fields[9]+"]"
		}) {
			return true
		}
	}
	return false
}

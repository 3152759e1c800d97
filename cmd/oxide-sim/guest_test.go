// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package main

import (
	"bytes"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/oxidecomputer/oxide-csi-plugin/test/await"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// machines is a simulator whose guests run guest-init with one service.
type machines struct {
	*sim
	// notes is a folder that the services know as $notes; state is the folder of the disks.
	notes, state string
	args         []string
}

func startMachines(t *testing.T, service string) machines {
	t.Helper()
	needRoot(t)
	path, err := binary()
	must(t, err)
	m := machines{notes: t.TempDir(), state: t.TempDir()}
	boot, err := simtest.WriteBoot(
		t.TempDir(),
		path,
		time.Second,
		fmt.Sprintf("notes=%s/$OXIDE_SIM_INSTANCE\n%s", m.notes, service),
	)
	must(t, err)
	must(t, os.MkdirAll(filepath.Join(m.notes, "node-a", "mnt"), 0o755))
	m.args = []string{"--listen=127.0.0.1:0", "--control=127.0.0.1:0", "--instances=node-a", "--state", m.state,
		"--guest-root", filepath.Join(t.TempDir(), "guests"), "--guest-boot", boot}
	m.sim = start(t, m.args...)
	return m
}

// awaitMessage waits for a message of the service, and removes it.
func (m machines) awaitMessage(what string) {
	m.t.Helper()
	path := filepath.Join(m.notes, "node-a", what)
	await.Eventually(m.t, "the guest says "+what, func() bool { return os.Remove(path) == nil })
}

func (m machines) waitFor(state string) {
	m.t.Helper()
	id, _ := m.instance("node-a")
	await.Eventually(m.t, "node-a is "+state, func() bool {
		var view struct {
			RunState string `json:"run_state"`
		}
		m.call("GET", "/v1/instances/"+id, nil, &view)
		return view.RunState == state
	})
}

func (m machines) do(what string) {
	m.t.Helper()
	id, _ := m.instance("node-a")
	var ignored any
	m.call("POST", "/v1/instances/"+id+"/"+what, nil, &ignored)
}

// alive lists the processes with the text in their command line.
func alive(t *testing.T, text string) (pids []int) {
	t.Helper()
	lines, err := filepath.Glob("/proc/[0-9]*/cmdline")
	must(t, err)
	for _, path := range lines {
		if line, err := os.ReadFile(path); err == nil && bytes.Contains(line, []byte(text)) {
			pid, err := strconv.Atoi(filepath.Base(filepath.Dir(path)))
			must(t, err)
			pids = append(pids, pid)
		}
	}
	return pids
}

// database creates a filesystem on the second disk if it has none, mounts it, and writes to it without a sync.
const database = `
disk=$OXIDE_SIM_GUEST/dev/nvme1n1
if [ -b "$disk" ]; then
    blkid -p "$disk" >/dev/null || mkfs.ext4 -q "$disk"
    mount "$disk" "$notes/mnt"
    echo more >>"$notes/mnt/log"
    cp "$notes/mnt/log" "$notes/log"
fi
: >"$notes/up"
`

// TestGuestHaltsInOrder takes an instance through planned restarts: all data of its services is there afterwards,
// although they never sync. A power cut then loses the data since the last halt.
func TestGuestHaltsInOrder(t *testing.T) {
	haltsInOrder(t, "exec sleep", func(int) func() { return func() {} })
}

// TestGuestHaltsBeforeItsMountsEnd is the same for a service with its own mount namespace, as containers have. The
// kernel removes that namespace only when the machine is off.
func TestGuestHaltsBeforeItsMountsEnd(t *testing.T) {
	haltsInOrder(t, "exec unshare --mount --propagation=private sleep", func(pid int) func() {
		namespace, err := os.Open(fmt.Sprintf("/proc/%d/ns/mnt", pid))
		must(t, err)
		return func() { must(t, namespace.Close()) }
	})
}

// haltsInOrder runs the database, and then a program with a number as its argument. During each halt hold keeps the
// mounts of that program busy.
func haltsInOrder(t *testing.T, program string, hold func(pid int) (release func())) {
	mark := fmt.Sprintf("300%d", os.Getpid())
	m := startMachines(t, database+program+" "+mark)
	m.awaitMessage("up")
	halt := func() {
		t.Helper()
		await.Eventually(t, "the program runs", func() bool { return len(alive(t, "sleep\x00"+mark)) == 1 })
		defer hold(alive(t, "sleep\x00"+mark)[0])()
		res, err := http.Post(
			m.value("OXIDE_SIM_CONTROL")+"/v0/halt",
			"application/json",
			strings.NewReader(`{"instance":"node-a"}`),
		)
		must(t, err)
		must(t, res.Body.Close())
		m.waitFor("stopped")
		if n := len(alive(t, mark)); n > 0 {
			t.Errorf("%d processes are left", n)
		}
	}
	halt()
	var disk diskView
	m.call("POST", "/v1/disks?project=demo", map[string]any{
		"name":        "volume",
		"description": "",
		"size":        1 << 30,
		"disk_backend": map[string]any{
			"type":        "distributed",
			"disk_source": map[string]any{"type": "blank", "block_size": 512},
		},
	}, &disk)
	id, _ := m.instance("node-a")
	m.call("POST", "/v1/instances/"+id+"/disks/attach", map[string]any{"disk": disk.ID}, &disk)
	log := func() string {
		t.Helper()
		m.do("start")
		m.awaitMessage("up")
		m.waitFor("running")
		text, err := os.ReadFile(filepath.Join(m.notes, "node-a", "log"))
		must(t, err)
		return string(text)
	}
	var logs []string
	logs = append(logs, log())
	halt()
	logs = append(logs, log())
	m.do("stop")
	m.waitFor("stopped")
	if n := len(alive(t, mark)); n > 0 {
		t.Errorf("%d processes are left", n)
	}
	logs = append(logs, log())
	if diff := cmp.Diff([]string{"more\n", "more\nmore\n", "more\nmore\n"}, logs); diff != "" {
		t.Errorf("what the service finds at its starts (-want +got):\n%s", diff)
	}
	if _, code := m.end(syscall.SIGTERM); code != 0 {
		t.Errorf("exit code after SIGTERM: got %d\n%s", code, m.stderr.String())
	}
	if left := loopsBelow(t, m.state); len(left) > 0 || len(alive(t, mark)) > 0 {
		t.Errorf("left: %v, and %d processes", left, len(alive(t, mark)))
	}
}

// TestGuestsDieWithTheirSimulator ends a simulator with SIGKILL, and in order, while a guest ignores SIGTERM.
func TestGuestsDieWithTheirSimulator(t *testing.T) {
	for _, signal := range []syscall.Signal{syscall.SIGKILL, syscall.SIGTERM} {
		t.Run(signal.String(), func(t *testing.T) {
			mark := fmt.Sprintf("300%d", os.Getpid())
			m := startMachines(t, "trap '' TERM\n: >\"$notes/up\"\nsetsid sleep "+mark+"\nsleep "+mark)
			m.awaitMessage("up")
			await.Eventually(t, "the service runs", func() bool { return len(alive(t, mark)) > 0 })
			_, code := m.end(signal)
			if signal == syscall.SIGTERM && code != 0 {
				t.Errorf("exit code %d\n%s", code, m.stderr.String())
			}
			await.Eventually(t, "its guests are dead", func() bool { return len(alive(t, mark)) == 0 })
			if signal == syscall.SIGKILL { // the next simulator with the same state removes the loop devices
				m.sim = start(t, m.args...)
				m.awaitMessage("up")
				_, code = m.end(syscall.SIGTERM)
			}
			if left := loopsBelow(t, m.state); len(left) > 0 || code != 0 {
				t.Errorf("exit code %d, and loop devices are left: %v", code, left)
			}
		})
	}
}

// TestGuestInit checks the help of the command, and its error outside of a guest.
func TestGuestInit(t *testing.T) {
	for _, test := range []struct {
		args []string
		code int
		want string
	}{
		{[]string{"guest-init", "true"}, 1, "oxide-sim: this is not the first process of a machine"},
		{[]string{"guest-init", "--grace=-1s"}, 2, `config: --grace: -1s is not a time: write one such as 10s`},
		{[]string{"guest-init", "--help"}, 0, "exec oxide-sim guest-init PROGRAM..."},
	} {
		t.Run(strings.Join(test.args, " "), func(t *testing.T) {
			cmd := command(t, test.args...)
			out, err := cmd.CombinedOutput()
			if cmd.ProcessState.ExitCode() != test.code || !strings.Contains(string(out), test.want) {
				t.Errorf("got %v: %s", err, out)
			}
		})
	}
}

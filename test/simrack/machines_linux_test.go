// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package simrack_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack"
)

// resetThis resets the machine of a guest.
func resetThis() {
	fmt.Fprintln(os.Stderr, syscall.Reboot(syscall.LINUX_REBOOT_CMD_RESTART))
	os.Exit(1)
}

// machineWorld is a world with guests that have processes.
type machineWorld struct {
	*world
	*recordingGuests
	notes string
}

// newMachines creates a rack with the stopped instance i, whose guest runs a script. In the script "say" writes a file
// to $notes, and "await" waits until the test has written one.
func newMachines(t *testing.T, o simrack.Options, script string) machineWorld {
	t.Helper()
	m := machineWorld{notes: t.TempDir()}
	boot := filepath.Join(t.TempDir(), "boot")
	text := fmt.Sprintf(`#!/bin/sh
notes=%s
say() { echo "$2" >"$notes/.$1"; mv "$notes/.$1" "$notes/$1"; }
await() { while [ ! -e "$notes/$1" ]; do sleep 0.005; done; }
%s
`, m.notes, script)
	if err := os.WriteFile(boot, []byte(text), 0o755); err != nil {
		t.Fatal(err)
	}
	m.world, m.recordingGuests = newMachineWorld(t, o, boot)
	m.operate("POST", "/instances", `{"name":"i","run_state":"stopped"}`, 201, nil)
	m.recorded()
	return m
}

// awaitMessage waits for a message of the guest, and returns it once.
func (m machineWorld) awaitMessage(word string) (text string) {
	m.t.Helper()
	path := filepath.Join(m.notes, word)
	m.waitFor("said: "+word, func() bool {
		raw, err := os.ReadFile(path)
		text = strings.TrimSpace(string(raw))
		return err == nil
	})
	if err := os.Remove(path); err != nil {
		m.t.Fatal(err)
	}
	return text
}

// send ends an await of the guest.
func (m machineWorld) send(word string) {
	m.t.Helper()
	if err := os.WriteFile(filepath.Join(m.notes, word), nil, 0o600); err != nil {
		m.t.Fatal(err)
	}
}

func (m machineWorld) start() {
	m.t.Helper()
	m.must("POST", "/instances/i/start?project=proj", "")
}

func (m machineWorld) stop() {
	m.t.Helper()
	m.must("POST", "/instances/i/stop?project=proj", "")
}

// alive reports whether a process of a guest still runs. The mark is part of its command line.
func alive(t *testing.T, mark string) bool {
	t.Helper()
	lines, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range lines {
		if line, err := os.ReadFile(path); err == nil && strings.Contains(string(line), mark) {
			return true
		}
	}
	return false
}

// withService is a guest that never halts, with a second process.
func withService(mark string) string {
	return "setsid sleep " + mark + " & say up \"$(ls \"$OXIDE_SIM_GUEST/dev\" | tr '\\n' ' ')\"; while :; do sleep 1000; done"
}

// TestStopEndsAllProcesses powers an instance off in several ways. When the instance shows the new state, no process is
// left. Then a disk can be attached, and the guest sees it at its next start.
func TestStopEndsAllProcesses(t *testing.T) {
	for way, test := range map[string]struct {
		do   func(m machineWorld)
		then string
	}{
		"stop":            {func(m machineWorld) { m.stop() }, "stopped"},
		"power cut":       {func(m machineWorld) { m.operate("POST", "/power-cut", `{"instance":"i"}`, 200, nil) }, "stopped"},
		"failure":         {func(m machineWorld) { m.setRun("i", "failed") }, "failed"},
		"stopped at once": {func(m machineWorld) { m.setRun("i", "stopped") }, "stopped"},
	} {
		t.Run(way, func(t *testing.T) {
			mark := fmt.Sprintf("200%d", os.Getpid())
			m := newMachines(t, simrack.Options{}, withService(mark))
			m.start()
			if got := m.awaitMessage("up"); got != "nvme0n1" {
				t.Errorf("the guest has %q", got)
			}
			m.waitName("i", "running")
			test.do(m)
			m.waitName("i", test.then)
			if alive(t, mark) {
				t.Errorf("a process is left in a guest whose instance is %s", test.then)
			}
			m.setRun("i", "stopped")
			m.disk("d")
			m.move("attach", "d")
			m.start()
			if got := m.awaitMessage("up"); got != "nvme0n1 nvme1n1" {
				t.Errorf("started again the guest has %q", got)
			}
			m.waitName("i", "running")
			m.stop()
			m.waitName("i", "stopped")
			m.move("detach", "d")
			m.must("DELETE", "/disks/d?project=proj", "")
			if got := m.leftovers(); got != `{"disks":0,"snapshots":0,"loops":0,"mounts":0,"files":0}` {
				t.Errorf("leftovers: %s", got)
			}
		})
	}
}

// TestInstanceStopsWhenItsGuestPowersOff ends a guest from inside. Its instance stops and stays stopped, with its
// disks.
func TestInstanceStopsWhenItsGuestPowersOff(t *testing.T) {
	m := newMachines(t, simrack.Options{}, `say up ""; await off; rm "$notes/off"`)
	m.disk("d")
	m.move("attach", "d")
	m.start()
	m.awaitMessage("up")
	m.waitName("i", "running")
	m.recorded()
	m.send("off")
	id := m.machines()["i"].ID
	m.waitRun(id, "stopped")
	if diff := cmp.Diff([]string{"cut power: running"}, m.recorded()); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff(map[string]int{"i-boot": 0, "d": 1}, m.slots("i")); diff != "" {
		t.Error(diff)
	}
	m.start()
	m.awaitMessage("up")
	m.waitRun(id, "running")
	m.set(`{"state_ms":3600000}`)
	m.send("off")
	m.waitRun(id, "stopping")
}

// TestInstanceRebootsWhenItsGuestResets has a guest reset its machine. It boots again, and no disk can be attached
// meanwhile.
func TestInstanceRebootsWhenItsGuestResets(t *testing.T) {
	m := newMachines(
		t,
		simrack.Options{},
		`say up ""; await reset; rm "$notes/reset"; exec env `+resetMachine+`=1 `+os.Args[0],
	)
	m.disk("d")
	m.start()
	m.awaitMessage("up")
	m.waitName("i", "running")
	m.recorded()
	m.send("reset")
	m.awaitMessage("up")
	m.waitName("i", "running")
	if diff := cmp.Diff([]string{"cut power: running", "power on: rebooting"}, m.recorded()); diff != "" {
		t.Error(diff)
	}
	m.set(`{"state_ms":3600000}`)
	m.send("reset")
	m.waitName("i", "rebooting")
	m.attach(m.machines()["i"].ID, "d").
		check(t, wants{400, "InvalidRequest", "cannot attach disk: instance is not fully stopped"})
}

// TestHaltAsksTheGuest sends the halt request to a guest that takes its time to halt, and to a guest that ignores the
// request.
func TestHaltAsksTheGuest(t *testing.T) {
	t.Run("it halts", func(t *testing.T) {
		m := newMachines(
			t,
			simrack.Options{},
			`trap 'say asked ""; await now; exit 0' 38; say up ""; while :; do sleep 1000 & wait; done`,
		)
		m.start()
		m.awaitMessage("up")
		m.waitName("i", "running")
		m.operate("POST", "/halt", `{"instance":"i"}`, 200, nil)
		m.awaitMessage("asked")
		if got := m.machines()["i"].RunState; got != "running" {
			t.Errorf("while the guest halts its instance is %s", got)
		}
		m.send("now")
		m.waitName("i", "stopped")
		m.operate("POST", "/halt", `{"instance":"i"}`, 409, nil)
	})
	t.Run("it ignores the request", func(t *testing.T) {
		mark := fmt.Sprintf("200%d", os.Getpid())
		m := newMachines(t, simrack.Options{}, `trap 'say asked ""' 38; sleep `+mark+` & say up ""; while :; do wait; done`)
		m.start()
		m.awaitMessage("up")
		m.waitName("i", "running")
		for range 2 {
			m.operate("POST", "/halt", `{"instance":"i"}`, 200, nil)
			m.awaitMessage("asked")
		}
		if got := m.machines()["i"].RunState; got != "running" || !alive(t, mark) {
			t.Errorf("the instance is %s", got)
		}
		m.stop()
		m.waitName("i", "stopped")
		if alive(t, mark) {
			t.Error("a process is left")
		}
	})
}

// TestCloseEndsAllProcesses closes a rack with a guest that halts in order, and one that does not.
func TestCloseEndsAllProcesses(t *testing.T) {
	mark, log := fmt.Sprintf("200%d", os.Getpid()), filepath.Join(t.TempDir(), "log")
	t.Run("rack", func(t *testing.T) {
		m := newMachines(t, simrack.Options{}, `
[ "$OXIDE_SIM_INSTANCE" = hangs ] || trap 'echo halted >>`+log+`; sleep 0.2; exit 0' 38
sleep `+mark+` &
say "$OXIDE_SIM_INSTANCE" ""
while :; do wait; done`)
		for _, name := range []string{"halts", "hangs"} {
			m.operate("POST", "/instances", fmt.Sprintf(`{"name":%q,"run_state":"running"}`, name), 201, nil)
			m.awaitMessage(name)
		}
	})
	if alive(t, mark) {
		t.Error("a process is left")
	}
	if got, err := os.ReadFile(log); err != nil || string(got) != "halted\n" {
		t.Errorf("%q, %v", got, err)
	}
}

// TestManyGuestsEndConcurrently starts and stops instances whose guests end by themselves at about the same time. Every
// instance reaches stopped.
func TestManyGuestsEndConcurrently(t *testing.T) {
	m := newMachines(t, simrack.Options{}, `sleep "0.00$(date +%N | cut -c 6)"`)
	var all sync.WaitGroup
	for n := range 4 {
		name := "n" + strconv.Itoa(n)
		m.operate("POST", "/instances", fmt.Sprintf(`{"name":%q,"run_state":"stopped"}`, name), 201, nil)
		all.Go(func() {
			for round := range 6 {
				m.must("POST", "/instances/"+name+"/start?project=proj", "")
				if (round+n)%2 == 0 {
					m.must("POST", "/instances/"+name+"/stop?project=proj", "")
				}
				m.waitFor(name+" stopped "+fmt.Sprint(round), func() bool {
					return m.must("GET", "/instances/"+name+"?project=proj", "").RunState == "stopped"
				})
			}
		})
	}
	all.Wait()
	if got := m.leftovers(); got != `{"disks":0,"snapshots":0,"loops":0,"mounts":0,"files":0}` {
		t.Errorf("leftovers: %s", got)
	}
}

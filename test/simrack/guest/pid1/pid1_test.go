// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package pid1

import (
	"bytes"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// servicesEnv makes this test binary an init with the services that the variable names.
const servicesEnv = "PID1_TEST_SERVICES"

// grace is short because the tests wait for it: real processes run in real time.
const grace = 300 * time.Millisecond

func TestMain(m *testing.M) {
	if paths := os.Getenv(servicesEnv); paths != "" {
		log := slog.New(slog.NewTextHandler(os.Stdout, nil))
		if err := Run(Options{Services: strings.Split(paths, ":"), Grace: grace, Log: log}); err != nil {
			fmt.Println("error:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// testMachine is an init in its own namespaces.
type testMachine struct {
	t      *testing.T
	dir    string
	cmd    *exec.Cmd
	output bytes.Buffer
}

// boot starts an init with shell scripts as services. In them, $dir is a folder of the test.
func boot(t *testing.T, scripts ...string) *testMachine {
	t.Helper()
	needRoot(t)
	m := &testMachine{t: t, dir: t.TempDir()}
	var paths []string
	for n, script := range scripts {
		path := filepath.Join(t.TempDir(), fmt.Sprint("service-", n))
		text := fmt.Sprintf("#!/bin/sh\ndir=%s\nsay() { : >\"$dir/$1\"; }\n%s\n", m.dir, script)
		if err := os.WriteFile(path, []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
		paths = append(paths, path)
	}
	m.cmd = initOf(paths...)
	m.cmd.Stdout, m.cmd.Stderr = &m.output, &m.output
	if err := m.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if m.cmd.ProcessState == nil {
			_ = m.cmd.Process.Kill() // the test failed before the machine ended
			_ = m.cmd.Wait()
		}
	})
	return m
}

func needRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: namespaces and mounts")
	}
}

// initOf is the command for an init with these services, in new namespaces.
func initOf(paths ...string) *exec.Cmd {
	cmd := exec.Command("sh", "-c", `mount --make-rprivate / && mount -t proc proc /proc && exec "$0"`, os.Args[0])
	cmd.Env = append(os.Environ(), servicesEnv+"="+strings.Join(paths, ":"), "GORACE=atexit_sleep_ms=0")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID | syscall.CLONE_NEWNS}
	return cmd
}

// awaitMessage waits for a message of a service.
func (m *testMachine) awaitMessage(what string) {
	m.t.Helper()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
		if _, err := os.Stat(filepath.Join(m.dir, what)); err == nil {
			return
		}
		if time.Now().After(deadline) {
			m.t.Fatalf("not within 10 s: %s", what)
		}
	}
}

// end sends a request and waits for the end of the machine.
func (m *testMachine) end(request syscall.Signal) syscall.WaitStatus {
	m.t.Helper()
	if err := m.cmd.Process.Signal(request); err != nil {
		m.t.Fatal(err)
	}
	timer := time.AfterFunc(time.Minute, func() { _ = m.cmd.Process.Kill() })
	defer timer.Stop()
	_ = m.cmd.Wait() // its state says how it ended
	return m.cmd.ProcessState.Sys().(syscall.WaitStatus)
}

const inOrder = `
mkdir "$dir/mnt"
mount -t tmpfs tmpfs "$dir/mnt"
mkdir "$dir/mnt/nested"
mount -t tmpfs tmpfs "$dir/mnt/nested"
mount -t tmpfs tmpfs "$dir/mnt/nested" # over the other
cd "$dir/mnt/nested"
( sleep 0.01 & ) # an orphan
trap 'say told; exit 0' TERM
sleep 1000 &
until [ "$(cat /proc/$!/comm)" = sleep ]; do :; done # until then it is this shell, and loses the signal
say up
while :; do wait; done`

func TestPowerOff(t *testing.T) {
	for _, request := range []syscall.Signal{PowerOff, syscall.SIGTERM} {
		t.Run(fmt.Sprint(request), func(t *testing.T) {
			m := boot(t, inOrder)
			m.awaitMessage("up")
			if status := m.end(request); !status.Exited() || status.ExitStatus() != 0 {
				t.Errorf("ended with %#x: %s", status, &m.output)
			}
			m.awaitMessage("told")
			if text := m.output.String(); !strings.Contains(text, "msg=down") || strings.Contains(text, "ERROR") ||
				strings.Contains(text, "WARN") {
				t.Error(text)
			}
		})
	}
}

func TestReboot(t *testing.T) {
	m := boot(t, inOrder)
	m.awaitMessage("up")
	// The effect of reboot(2) in a PID namespace.
	if status := m.end(Reboot); !status.Signaled() || status.Signal() != syscall.SIGHUP {
		t.Errorf("ended with %#x: %s", status, &m.output)
	}
	m.awaitMessage("told")
}

// TestStubbornProcessIsKilled runs two services in a mounted folder. The first ends in order within its grace; the
// second ignores SIGTERM and is killed. Then the folder can be unmounted.
func TestStubbornProcessIsKilled(t *testing.T) {
	m := boot(t, inOrder, `
trap '' TERM
cd "$dir"
while [ ! -e up ]; do sleep 0.01; done
( cd "$dir/mnt/nested"; setsid sleep 1000 ) &
say stubborn
while :; do sleep 1000; done`)
	m.awaitMessage("stubborn")
	begun := time.Now()
	if status := m.end(PowerOff); !status.Exited() || status.ExitStatus() != 0 {
		t.Errorf("ended with %#x: %s", status, &m.output)
	}
	m.awaitMessage("told")
	if took := time.Since(begun); took < grace {
		t.Errorf("after %s, less than the grace", took)
	}
	if text := m.output.String(); !strings.Contains(text, "processes are killed") || strings.Contains(text, "ERROR") {
		t.Error(text)
	}
}

// TestServiceThatEnds ends a service and an orphan: the machine stays up, and both are reaped.
func TestServiceThatEnds(t *testing.T) {
	m := boot(t, "exit 3", `
( sh -c 'echo $$' >"$dir/orphan" & )
while [ ! -s "$dir/orphan" ]; do sleep 0.01; done
while [ -e "/proc/$(cat "$dir/orphan")" ]; do sleep 0.01; done
say reaped
sleep 1000`)
	m.awaitMessage("reaped")
	m.end(PowerOff)
	if text := m.output.String(); !strings.Contains(text, "a service has ended") ||
		!strings.Contains(text, "exit_code=3") {
		t.Error(text)
	}
}

func TestServiceThatCannotBeStarted(t *testing.T) {
	needRoot(t)
	out, err := initOf("/nonexistent").CombinedOutput()
	if err == nil || !strings.Contains(string(out), "start /nonexistent: no such file") {
		t.Errorf("%v: %s", err, out)
	}
}

func TestRunRejectsOtherProcesses(t *testing.T) {
	if err := Run(
		Options{Log: slog.New(slog.DiscardHandler)},
	); err == nil ||
		!strings.Contains(err.Error(), "not the first process") {
		t.Errorf("got %v", err)
	}
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build k8s

package k8s_test

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/godbus/dbus/v5"
)

// A node that the rack boots has the D-Bus that the manifests mount. The daemon is real, but systemd and logind on it
// are fakes.

const busSocket = "/run/dbus/system_bus_socket"

const busConfig = `<busconfig>
  <listen>unix:path=` + busSocket + `</listen>
  <auth>EXTERNAL</auth>
  <policy context="default"><allow user="*"/><allow own="*"/><allow send_destination="*" eavesdrop="true"/><allow eavesdrop="true"/></policy>
</busconfig>`

// startBus starts the D-Bus, and returns when the fake systemd and logind are on it.
func (n *node) startBus(systemd *manager) error {
	if err := os.Mkdir(filepath.Dir(busSocket), 0o755); err != nil {
		return err
	}
	if err := n.write("bus.conf", busConfig); err != nil {
		return err
	}
	if _, err := n.run(
		"/usr/bin/dbus-daemon",
		"--nofork",
		"--nopidfile",
		"--config-file="+n.path("bus.conf"),
	); err != nil {
		return err
	}
	var bus *dbus.Conn
	for deadline := time.Now().Add(waitLimit); bus == nil; time.Sleep(20 * time.Millisecond) {
		var err error
		if bus, err = dbus.Connect("unix:path=" + busSocket); err != nil && time.Now().After(deadline) {
			return fmt.Errorf("connect to the D-Bus: %w", err)
		}
	}
	for _, o := range []struct {
		name string
		path dbus.ObjectPath
		is   any
	}{
		{"org.freedesktop.systemd1", "/org/freedesktop/systemd1", systemd},
		{"org.freedesktop.login1", "/org/freedesktop/login1", &logind{}},
	} {
		for _, kind := range []string{o.name + ".Manager", "org.freedesktop.DBus.Properties"} {
			if err := bus.Export(o.is, o.path, kind); err != nil {
				return err
			}
		}
		if reply, err := bus.RequestName(
			o.name,
			dbus.NameFlagDoNotQueue,
		); err != nil ||
			reply != dbus.RequestNameReplyPrimaryOwner {
			return fmt.Errorf("become %s: %v, %w", o.name, reply, err)
		}
	}
	return nil
}

// manager is the part of systemd that powers a machine off. It stops the services that systemd would stop as units,
// and then signals the first process, which is not systemd here.
type manager struct {
	// pods is the name of the control groups above the pods.
	pods    string
	kubelet atomic.Int64
	// stopping means that kubelet must end.
	stopping atomic.Bool
}

func (*manager) Get(string, string) (dbus.Variant, *dbus.Error) { return dbus.MakeVariant("252"), nil }

func (m *manager) StartUnit(unit, mode string) (dbus.ObjectPath, *dbus.Error) {
	if unit != "poweroff.target" || mode != "replace-irreversibly" {
		return "/", dbus.MakeFailedError(fmt.Errorf("%s of %s is not known", mode, unit))
	}
	if !m.stopping.Swap(true) {
		go func() { fmt.Fprintln(os.Stderr, "going down:", m.powerOff()) }()
	}
	return "/org/freedesktop/systemd1/job/1", nil
}

// powerOff ends kubelet and all processes of pods, and then the machine. They end first because the first process
// signals all processes at once: then containerd would kill containers whose shim ended before them.
func (m *manager) powerOff() error {
	const grace = 10 * time.Second
	asked := map[int]bool{int(m.kubelet.Load()): true}
	errs := []error{syscall.Kill(int(m.kubelet.Load()), syscall.SIGTERM)}
	for deadline := time.Now().Add(grace); time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
		processes, err := processesIn(m.pods)
		errs = append(errs, err)
		for _, pid := range processes {
			if !asked[pid] {
				asked[pid] = true
				_ = syscall.Kill(pid, syscall.SIGTERM) // the process may have ended
			}
		}
		if len(processes) == 0 {
			break
		}
	}
	const powerOff = syscall.Signal(34 + 4) // SIGRTMIN+4
	return errors.Join(append(errs, syscall.Kill(1, powerOff))...)
}

// processesIn returns the processes in control groups with this name, and in the groups below.
func processesIn(name string) (pids []int, err error) {
	err = eachHierarchy(name, func(group, _ string) error {
		return filepath.WalkDir(group, func(path string, d fs.DirEntry, err error) error {
			if errors.Is(err, fs.ErrNotExist) {
				return nil // The group disappears with its pod.
			}
			if err != nil || d.Name() != "cgroup.procs" {
				return err
			}
			text, err := os.ReadFile(path)
			for _, field := range strings.Fields(string(text)) {
				pid, notANumber := strconv.Atoi(field)
				pids, err = append(pids, pid), errors.Join(err, notANumber)
			}
			if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENODEV) {
				return nil
			}
			return err
		})
	})
	return pids, err
}

// logind is the part of logind that kubelet's graceful node shutdown uses.
type logind struct {
	mu   sync.Mutex
	held []inhibitor
}

type inhibitor struct {
	What, Who, Why, Mode string
	UID, PID             uint32
}

// Get returns the longest delay in microseconds. It is long enough for kubelet.
func (*logind) Get(string, string) (dbus.Variant, *dbus.Error) {
	return dbus.MakeVariant(uint64(time.Minute / time.Microsecond)), nil
}

// Inhibit takes a lock, which the caller releases by closing the descriptor. In these tests no caller does before the
// machine goes down.
func (l *logind) Inhibit(what, who, why, mode string) (dbus.UnixFD, *dbus.Error) {
	null, err := syscall.Open("/dev/null", syscall.O_RDONLY|syscall.O_CLOEXEC, 0)
	if err != nil {
		return 0, dbus.MakeFailedError(err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.held = append(l.held, inhibitor{What: what, Who: who, Why: why, Mode: mode})
	return dbus.UnixFD(null), nil
}

func (l *logind) ListInhibitors() ([]inhibitor, *dbus.Error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.held), nil
}

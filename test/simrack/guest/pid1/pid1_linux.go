// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package pid1

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"slices"
	"syscall"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// Requests to the first process of a machine. The real-time signals are those of systemd: SIGRTMIN+4 and SIGRTMIN+5.
const (
	PowerOff = syscall.Signal(34 + 4)
	Reboot   = syscall.Signal(34 + 5)
)

// killTime is how long processes may take to die of SIGKILL. After that the filesystems are unmounted anyway.
const killTime = 5 * time.Second

// loopMajor is the major device number of loop devices.
const loopMajor = 7

// Options configure [Run].
type Options struct {
	// Services are executable files, started in this order. A service that ends is not started again.
	Services []string
	// Grace is the time between SIGTERM and SIGKILL for processes that do not end.
	Grace time.Duration
	// Log receives what happens.
	Log *slog.Logger
}

// Run starts the services, and shuts the machine down on request. It returns when the machine must power off, which the
// end of this process does. After a reset of the machine it does not return. SIGTERM has the effect of [PowerOff].
//
// Run works only in the first process of a machine, because at the end it kills all other processes that it sees.
func Run(o Options) error {
	if os.Getpid() != 1 {
		return errors.New(
			"this is not the first process of a machine: name a program that runs it to oxide-sim serve --guest-boot",
		)
	}
	requests, children := make(chan os.Signal, 8), make(chan os.Signal, 1)
	signal.Notify(requests, PowerOff, Reboot, syscall.SIGTERM)
	signal.Notify(children, syscall.SIGCHLD)
	before, err := mounts()
	if err != nil {
		return err
	}
	m := &machine{Options: o, services: map[int]string{}, children: children}
	for _, path := range o.Services {
		if err := m.start(path); err != nil {
			return err
		}
	}
	for {
		select {
		case <-children:
			m.reap()
		case request := <-requests:
			o.Log.Info("going down", "signal", request)
			m.end()
			m.sync(before)
			m.unmount(before)
			o.Log.Info("down")
			if request == Reboot {
				return unix.Reboot(unix.LINUX_REBOOT_CMD_RESTART)
			}
			return nil
		}
	}
}

// machine is the state of a running machine.
type machine struct {
	Options
	// services are the paths of the running services, by process ID.
	services map[int]string
	children <-chan os.Signal
}

// start starts a service in its own session, with the standard files of this process.
func (m *machine) start(path string) error {
	// Not os.StartProcess: its children must be waited for one by one, but the first process must reap every child.
	pid, err := syscall.ForkExec(path, []string{path}, &syscall.ProcAttr{
		Env: os.Environ(), Files: []uintptr{0, 1, 2}, Sys: &syscall.SysProcAttr{Setsid: true},
	})
	if err != nil {
		return fmt.Errorf("start %s: %w", path, err)
	}
	m.services[pid] = path
	return nil
}

// reap reaps all children that have ended, and reports whether others remain.
func (m *machine) reap() (more bool) {
	for {
		var status syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &status, syscall.WNOHANG, nil)
		switch {
		case errors.Is(err, syscall.EINTR):
			continue
		case err != nil:
			return false // no children
		case pid == 0:
			return true
		}
		if path, is := m.services[pid]; is {
			delete(m.services, pid)
			m.Log.Info("a service has ended", "service", path, "exit_code", status.ExitStatus(), "signal", status.Signal())
		}
	}
}

// end ends all processes with SIGTERM, and after the grace with SIGKILL.
func (m *machine) end() {
	if m.signalAll(syscall.SIGTERM, m.Grace) {
		return
	}
	m.Log.Warn("processes are killed", "after", m.Grace)
	if !m.signalAll(syscall.SIGKILL, killTime) {
		m.Log.Error("processes do not die", "after", killTime)
	}
}

// signalAll sends a signal to all other processes and waits until none is left.
func (m *machine) signalAll(s syscall.Signal, timeout time.Duration) (none bool) {
	// Only once: many programs take a second SIGTERM as a request to exit without cleaning up.
	if err := syscall.Kill(-1, s); err != nil && !errors.Is(err, syscall.ESRCH) {
		m.Log.Error("processes cannot be signalled", "error", err)
	}
	deadline := time.After(timeout)
	for m.reap() {
		select {
		case <-m.children:
		case <-deadline:
			return false
		}
	}
	return true
}

// sync writes the cached data of the filesystems on the machine's disks, which are loop devices. To unmount them is not
// enough: after the last process of a namespace has ended, the kernel removes its mounts with a delay, and only then
// writes the filesystem.
func (m *machine) sync(before []*mountinfo.Info) {
	mounted, err := since(before)
	if err != nil {
		m.Log.Error("mounts cannot be seen", "error", err)
		return
	}
	for _, one := range mounted {
		if one.Major != loopMajor {
			continue
		}
		if err := syncFilesystem(one.Mountpoint); err != nil {
			m.Log.Error("a filesystem is not written", "mounted", one.Mountpoint, "error", err)
		}
	}
}

func syncFilesystem(path string) error {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd) // nothing was written to it
	return unix.Syncfs(fd)
}

// unmount undoes all mounts that were not there before, the latest first, until no further one can be undone.
func (m *machine) unmount(before []*mountinfo.Info) {
	for {
		left, err := since(before)
		if err != nil {
			m.Log.Error("mounts cannot be seen", "error", err)
			return
		}
		progress := false
		var errs []error
		for _, one := range slices.Backward(left) {
			if err := unix.Unmount(one.Mountpoint, unix.UMOUNT_NOFOLLOW); err != nil {
				errs = append(errs, fmt.Errorf("unmount %s: %w", one.Mountpoint, err))
				continue
			}
			progress = true
		}
		if !progress {
			for _, err := range errs {
				m.Log.Error("a filesystem stays mounted", "error", err)
			}
			return
		}
	}
}

// since lists the mounts that were not there before.
func since(before []*mountinfo.Info) ([]*mountinfo.Info, error) {
	now, err := mounts()
	return slices.DeleteFunc(now, func(one *mountinfo.Info) bool {
		return slices.ContainsFunc(before, func(other *mountinfo.Info) bool { return same(one, other) })
	}), err
}

// same reports whether a and b are the same mount. The ID alone is not enough, because the kernel reuses it.
func same(a, b *mountinfo.Info) bool {
	return a.ID == b.ID && a.Mountpoint == b.Mountpoint && a.Root == b.Root && a.Major == b.Major && a.Minor == b.Minor
}

// mounts lists the mounts of this namespace.
func mounts() ([]*mountinfo.Info, error) {
	text, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	return mountinfo.GetMountsFromReader(bytes.NewReader(text), nil)
}

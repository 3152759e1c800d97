// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package iohang makes a disk hang for some processes, and come back. A process that reads the disk then waits in the
// kernel (state D), also after SIGKILL.
//
// It uses the kernel's throttle of a control group: the processes move to a group of their own, whose limit for the
// disk is a few bytes a second. Processes of other groups are not affected, so tests of other packages do not hang. A
// read of 4 KiB hangs for 40 s, so nothing hangs for ever if a test is killed before it releases the disk.
//
// Writes that the kernel makes by itself, such as those of a journal, belong to no group and do not hang.
package iohang

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// bytesPerSecond is the limit of a disk that hangs.
const bytesPerSecond = 100

const (
	blkio   = "/sys/fs/cgroup/blkio" // version 1
	unified = "/sys/fs/cgroup"       // version 2
)

// running is held while a disk hangs: a process can be in one group only.
var running sync.Mutex

// Start makes the disk with this device number hang for a process and for the programs that it starts from now on.
// release makes the disk answer again. It is safe to repeat, and it runs at the end of the test. Only one disk of a
// test process hangs at a time: Start waits until the earlier test has ended.
func Start(t testing.TB, pid int, major, minor uint32) (release func()) {
	t.Helper()
	running.Lock()
	t.Cleanup(running.Unlock)
	g := &group{t: t, pid: pid, disk: fmt.Sprintf("%d:%d", major, minor)}
	if err := g.find(); err != nil {
		t.Fatalf("make a disk hang: %v", err)
	}
	g.must(os.Mkdir(g.folder, 0o755))
	t.Cleanup(g.remove)
	g.releaseLater()
	g.limit(bytesPerSecond)
	g.must(os.WriteFile(filepath.Join(g.folder, "cgroup.procs"), fmt.Append(nil, pid), 0))
	return func() { g.limit(0) }
}

// group is a control group.
type group struct {
	t    testing.TB
	pid  int
	disk string
	// folder is the group's folder. before is the folder of the group from which the process came.
	folder, before string
	unified        bool
}

// find chooses the version of control groups that has the throttle.
func (g *group) find() error {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", g.pid))
	if err != nil {
		return err
	}
	root, name := unified, ""
	for line := range strings.Lines(string(text)) {
		// number:controllers:path, where version 2 has no controllers
		fields := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(fields) == 3 && fields[1] == "blkio" {
			root, name = blkio, fields[2]
			break
		}
		if len(fields) == 3 && fields[1] == "" {
			name = fields[2]
		}
	}
	g.unified = root == unified
	g.before = filepath.Join(root, name)
	g.folder = filepath.Join(root, fmt.Sprintf("oxide-csi-iohang-%d-%d", os.Getpid(), g.pid))
	if !g.unified {
		return nil
	}
	// The root group may have members and pass on controllers. Other groups may not.
	return os.WriteFile(filepath.Join(root, "cgroup.subtree_control"), []byte("+io"), 0)
}

// longest is how long a disk hangs at most.
const longest = time.Minute

// releaseLater starts a program that releases the disk after a minute. A process whose thread waits for the disk runs
// no cleanup, and a disk that hangs for ever stops every program that lists the machine's disks.
func (g *group) releaseLater() {
	g.t.Helper()
	script := fmt.Sprintf("sleep %d", int(longest.Seconds()))
	for file, value := range g.limits(0) {
		script += fmt.Sprintf("; echo '%s' >'%s'", value, file)
	}
	cmd := exec.Command("/bin/sh", "-c", script)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // it outlives this process
	g.must(cmd.Start())
	g.t.Cleanup(func() {
		if err := syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL); err != nil {
			g.t.Error(err)
		}
		_ = cmd.Wait() // it was killed
	})
}

// limit sets how many bytes a second the group may read and write. 0 means no limit.
func (g *group) limit(perSecond int) {
	g.t.Helper()
	for file, value := range g.limits(perSecond) {
		g.must(os.WriteFile(file, []byte(value), 0))
	}
}

// limits returns the content of the group's files for a limit.
func (g *group) limits(perSecond int) map[string]string {
	if !g.unified {
		value := fmt.Sprintf("%s %d", g.disk, perSecond)
		return map[string]string{
			filepath.Join(g.folder, "blkio.throttle.read_bps_device"):  value,
			filepath.Join(g.folder, "blkio.throttle.write_bps_device"): value,
		}
	}
	value := fmt.Sprint(perSecond)
	if perSecond == 0 {
		value = "max"
	}
	return map[string]string{filepath.Join(g.folder, "io.max"): fmt.Sprintf("%s rbps=%s wbps=%s", g.disk, value, value)}
}

// remove releases the disk, moves the members to the group from which they came, and removes the group.
func (g *group) remove() {
	g.limit(0)
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		members, err := os.ReadFile(filepath.Join(g.folder, "cgroup.procs"))
		g.must(err)
		for member := range strings.Lines(string(members)) {
			err := os.WriteFile(filepath.Join(g.before, "cgroup.procs"), []byte(strings.TrimSpace(member)), 0)
			if err != nil && !errors.Is(err, syscall.ESRCH) { // a member that is ending
				g.t.Errorf("move process %s: %v", strings.TrimSpace(member), err)
			}
		}
		err = os.Remove(g.folder)
		if err == nil || errors.Is(err, fs.ErrNotExist) {
			return
		}
		if time.Now().After(end) {
			g.t.Errorf("remove the control group: %v", err)
			return
		}
	}
}

func (g *group) must(err error) {
	g.t.Helper()
	if err != nil {
		g.t.Fatalf("control group of a disk that hangs: %v", err)
	}
}

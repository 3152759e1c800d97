// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux && amd64

package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// steps are the system calls before which the plugin may be killed: those that read or change files, devices, mounts or
// processes. System calls for memory and waiting are not steps, and neither are writes to the log and the socket.
var steps = map[uint64]bool{
	unix.SYS_OPENAT:        true,
	unix.SYS_PREAD64:       true,
	unix.SYS_PWRITE64:      true,
	unix.SYS_IOCTL:         true,
	unix.SYS_FLOCK:         true,
	unix.SYS_FSYNC:         true,
	unix.SYS_FDATASYNC:     true,
	unix.SYS_FALLOCATE:     true,
	unix.SYS_MKDIR:         true,
	unix.SYS_MKDIRAT:       true,
	unix.SYS_RMDIR:         true,
	unix.SYS_UNLINK:        true,
	unix.SYS_UNLINKAT:      true,
	unix.SYS_RENAME:        true,
	unix.SYS_RENAMEAT:      true,
	unix.SYS_RENAMEAT2:     true,
	unix.SYS_MOUNT:         true,
	unix.SYS_UMOUNT2:       true,
	unix.SYS_OPEN_TREE:     true,
	unix.SYS_MOVE_MOUNT:    true,
	unix.SYS_MOUNT_SETATTR: true,
	unix.SYS_FSPICK:        true,
	unix.SYS_FSCONFIG:      true,
	unix.SYS_CHMOD:         true,
	unix.SYS_FCHMODAT:      true,
	unix.SYS_FCHOWNAT:      true,
	unix.SYS_LCHOWN:        true,
	unix.SYS_CLONE:         true,
	unix.SYS_CLONE3:        true,
	unix.SYS_VFORK:         true,
	unix.SYS_EXECVE:        true,
	unix.SYS_WAITID:        true,
	unix.SYS_WAIT4:         true,
}

// childSteps are the system calls of the plugin's programs before which they may be killed, without the loading of
// libraries.
var childSteps = map[uint64]bool{
	unix.SYS_PWRITE64:   true,
	unix.SYS_WRITE:      true,
	unix.SYS_IOCTL:      true,
	unix.SYS_FSYNC:      true,
	unix.SYS_FDATASYNC:  true,
	unix.SYS_FALLOCATE:  true,
	unix.SYS_MOUNT:      true,
	unix.SYS_MOVE_MOUNT: true,
	unix.SYS_FSCONFIG:   true,
	unix.SYS_FSMOUNT:    true,
	unix.SYS_EXECVE:     true,
}

// tracer follows a process and all processes that it starts, and counts their steps.
type tracer struct {
	pid int
	// killAt is the step before which to kill. 0 means no kill.
	killAt int
	// all says that the programs of the process are killed with it.
	all bool

	count int
	// threads says for each followed thread whether it belongs to the process itself.
	threads map[int]bool
}

// trace follows the process until it has ended, and returns the number of steps. It closes ready when it follows the
// process. It releases programs that outlive the process.
func trace(pid, killAt int, all bool, ready chan<- struct{}) (count int, err error) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		// The thread is never unlocked, so it ends with this function. Processes that it still follows continue.
		runtime.LockOSThread()
		t := &tracer{pid: pid, killAt: killAt, all: all, threads: map[int]bool{}}
		if err = t.attach(); err == nil {
			close(ready)
			err = t.follow()
		} else {
			close(ready)
		}
		count = t.count
	}()
	<-done
	return count, err
}

const options = unix.PTRACE_O_TRACESYSGOOD | unix.PTRACE_O_TRACECLONE | unix.PTRACE_O_TRACEFORK | unix.PTRACE_O_TRACEVFORK | unix.PTRACE_O_TRACEEXEC

// attach follows every thread of the process.
func (t *tracer) attach() error {
	for found := true; found; {
		found = false
		tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", t.pid))
		if err != nil {
			return err
		}
		for _, task := range tasks {
			tid, err := strconv.Atoi(task.Name())
			if err != nil || t.threads[tid] {
				continue
			}
			found = true
			_, _, errno := unix.Syscall6(unix.SYS_PTRACE, unix.PTRACE_SEIZE, uintptr(tid), 0, options, 0, 0)
			if errno == unix.EPERM {
				t.threads[tid] = true // a followed thread has made it, so it is followed already
				continue
			}
			if errno == 0 {
				errno = interrupt(tid)
			}
			if errno != 0 && errno != unix.ESRCH {
				return fmt.Errorf("follow thread %d: %w", tid, errno)
			}
			t.threads[tid] = true
		}
	}
	return nil
}

func interrupt(tid int) unix.Errno {
	_, _, errno := unix.Syscall6(unix.SYS_PTRACE, unix.PTRACE_INTERRUPT, uintptr(tid), 0, 0, 0, 0)
	return errno
}

// follow continues every stopped thread until the process has ended.
func (t *tracer) follow() error {
	for {
		var status unix.WaitStatus
		tid, err := unix.Wait4(-1, &status, unix.WALL|unix.WNOTHREAD|unix.WNOHANG, nil)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err == nil && tid == 0 {
			// The kernel does not always report the end of a process whose programs continue.
			if t.ended() {
				return nil
			}
			time.Sleep(50 * time.Microsecond)
			continue
		}
		if errors.Is(err, unix.ECHILD) {
			return nil
		}
		if err != nil {
			return err
		}
		if status.Exited() || status.Signaled() {
			delete(t.threads, tid)
			if tid == t.pid {
				return nil
			}
			continue
		}
		if !status.Stopped() {
			continue
		}
		if err := t.stopped(tid, status); err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("thread %d: %w", tid, err)
		}
	}
}

func (t *tracer) stopped(tid int, status unix.WaitStatus) error {
	own, known := t.threads[tid]
	if !known {
		own = t.owns(tid)
		t.threads[tid] = own
	}
	switch signal := status.StopSignal(); {
	case signal == unix.SIGTRAP|0x80:
		var regs unix.PtraceRegs
		if err := unix.PtraceGetRegs(tid, &regs); err != nil {
			return err
		}
		entering := int64(regs.Rax) == -int64(unix.ENOSYS)
		if entering && (own && steps[regs.Orig_rax] && !looksAtProcess(tid, regs) || !own && childSteps[regs.Orig_rax]) {
			t.count++
			if t.count == t.killAt {
				return t.kill()
			}
		}
		return unix.PtraceSyscall(tid, 0)
	case status>>16 != 0: // an event of ptrace
		return unix.PtraceSyscall(tid, 0)
	default:
		return unix.PtraceSyscall(tid, int(signal))
	}
}

// looksAtProcess reports whether a system call opens a file of a process in /proc. NodeUnstage does that for every
// process of the machine, changes nothing, and would have more such steps than others.
func looksAtProcess(tid int, regs unix.PtraceRegs) bool {
	const folder = "/proc/"
	path := make([]byte, len(folder)+1)
	if regs.Orig_rax != unix.SYS_OPENAT {
		return false
	}
	if _, err := unix.PtracePeekData(tid, uintptr(regs.Rsi), path); err != nil {
		return false
	}
	digit := path[len(folder)]
	return string(path[:len(folder)]) == folder && digit >= '0' && digit <= '9'
}

// ended reports whether the process has ended, also if nothing has read its exit status yet.
func (t *tracer) ended() bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", t.pid))
	if err != nil {
		return true
	}
	_, after, _ := strings.Cut(string(stat), ") ")
	return strings.HasPrefix(after, "Z") || strings.HasPrefix(after, "X")
}

// owns reports whether a thread belongs to the process.
func (t *tracer) owns(tid int) bool {
	_, err := os.Stat(filepath.Join("/proc", strconv.Itoa(t.pid), "task", strconv.Itoa(tid)))
	return err == nil
}

func (t *tracer) kill() error {
	if t.all {
		for tid, own := range t.threads {
			if !own {
				// Some have ended already.
				_ = unix.Kill(tid, unix.SIGKILL)
			}
		}
	}
	return unix.Kill(t.pid, unix.SIGKILL)
}

// stillRuns reports whether any program, except the plugin, has a path below dir in its arguments.
func stillRuns(dir string) bool {
	lines, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		return false
	}
	for _, path := range lines {
		line, err := os.ReadFile(path)
		if err == nil && strings.Contains(string(line), dir) && !strings.Contains(string(line), "oxide-csi") {
			return true
		}
	}
	return false
}

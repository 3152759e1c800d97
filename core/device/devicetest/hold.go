// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package devicetest

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/core/hostexec"
)

// Holder is a process that keeps something in use until End or the end of the test. It ends also if the test's process
// is killed: it reads from a pipe whose other end is in that process.
type Holder struct {
	t    testing.TB
	cmd  *exec.Cmd
	done bool
}

// Hold starts a shell that runs a script and then waits for ever, with the files that the script has opened.
func Hold(t testing.TB, script string) *Holder {
	t.Helper()
	return hold(t, exec.Command("/bin/sh", "-c", ready(script)))
}

// HoldMountNamespace is Hold in a new mount namespace. The namespace keeps private copies of the mounts below the
// folder keep. It has no copies of the mounts of other tests, which may run in the same process.
func HoldMountNamespace(t testing.TB, keep, script string) *Holder {
	t.Helper()
	// A mount whose mount point another test has just removed cannot be unmounted. The kernel does that by itself.
	const leaveOthers = `cut -d ' ' -f 5 /proc/self/mountinfo | grep '^/tmp/' | grep -v "^$0/" | sort -r |
while read -r path; do umount -l "$path" 2>/dev/null; done
`
	return hold(
		t,
		exec.Command("unshare", "--mount", "--propagation=private", "/bin/sh", "-c", leaveOthers+ready(script), keep),
	)
}

// holdVariable names the file that a process of [HoldWithoutMainThread] holds, mapVariable that of [HoldMapping].
const holdVariable, mapVariable = "OXIDE_CSI_TEST_HOLDS", "OXIDE_CSI_TEST_MAPS"

// HoldWithoutMainThread starts a process that has the file open for reading and writing, and whose main thread ends.
// The process is this test program again.
func HoldWithoutMainThread(t testing.TB, path string) *Holder {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), holdVariable+"="+path)
	return hold(t, cmd)
}

// HoldMapping starts a process that has the first page of the file in its memory, writable, and has closed the file.
// The process is this test program again.
func HoldMapping(t testing.TB, path string) *Holder {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), mapVariable+"="+path)
	return hold(t, cmd)
}

func init() {
	path := os.Getenv(mapVariable)
	if path == "" {
		return
	}
	file, err := os.OpenFile(path, os.O_RDWR, 0)
	if err == nil {
		_, err = unix.Mmap(int(file.Fd()), 0, os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		err = errors.Join(err, file.Close())
	}
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	fmt.Println("ready")
	_, _ = io.Copy(io.Discard, os.Stdin) // ends with the test's process, as Holder says
	os.Exit(0)
}

// The main thread executes init.
func init() {
	path := os.Getenv(holdVariable)
	if path == "" {
		return
	}
	file, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	go func() {
		for {
			if stat, err := os.ReadFile("/proc/self/stat"); err == nil && strings.Contains(string(stat), ") Z ") {
				break
			}
			time.Sleep(time.Millisecond)
		}
		fmt.Println("ready")
		_, _ = io.Copy(io.Discard, os.Stdin) // ends with the test's process, as Holder says
		runtime.KeepAlive(file)
		os.Exit(0)
	}()
	_, _, errno := unix.Syscall(unix.SYS_EXIT, 0, 0, 0)
	panic(errno)
}

func ready(script string) string { return "set -e\n" + script + "\necho ready\nexec cat >/dev/null" }

func hold(t testing.TB, cmd *exec.Cmd) *Holder {
	t.Helper()
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stderr = cmd.Stdout
	if _, err := cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	if err := hostexec.Start(cmd); err != nil {
		t.Fatal(err)
	}
	h := &Holder{t: t, cmd: cmd}
	t.Cleanup(h.End)
	var said string
	for lines := bufio.NewScanner(out); lines.Scan(); {
		if lines.Text() == "ready" {
			return h
		}
		said += fmt.Sprintln(lines.Text())
	}
	t.Fatalf("the holder has ended: %s", said)
	return nil
}

// PID is the process's ID.
func (h *Holder) PID() int { return h.cmd.Process.Pid }

// End ends the process and waits for its end.
func (h *Holder) End() {
	if h.done {
		return
	}
	h.done = true
	if err := h.cmd.Process.Kill(); err != nil {
		h.t.Error(err)
	}
	_ = h.cmd.Wait() // it was killed
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package writecache gives tests a disk with a volatile write cache. A power cut loses what was not flushed.
//
// The disk is a file in a FUSE filesystem (serve.go), for a loop device. The kernel sends a write of the loop device to
// the server, which keeps it in memory. A flush of the loop device becomes an fsync of the file, and the server then
// writes to the backing file. So the rig does not depend on the filesystem of the backing file, unlike an immutable
// file of ext4 (package guest), and it loses also writes that the guest has sent to its disk without a flush.
//
// The server is a process of its own, which runs the test's program again. In the test's process, a thread that waits
// for the disk would wait for its own process, and a killed test could never end.
package writecache

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/core/hostexec"
)

// serverEnv tells a test's program to be the server. Its value is the path of the backing file.
const serverEnv = "OXIDE_TEST_WRITECACHE"

// Main must be the first call of TestMain in a package that uses [New]: the server is the same program.
func Main() {
	backing := os.Getenv(serverEnv)
	if backing == "" {
		return
	}
	if err := serve(backing, os.NewFile(3, "/dev/fuse"), os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "writecache:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// Cache is the write cache of a disk.
type Cache struct {
	// Path is the file for a loop device.
	Path string

	t       testing.TB
	server  *exec.Cmd
	command io.WriteCloser
	answers *bufio.Reader
	mounted string
}

// New returns a cache before the file backing, which keeps its size. It needs root and /dev/fuse. At the end of the
// test it is removed, and unflushed writes are lost.
func New(t testing.TB, backing string) *Cache {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: FUSE and loop devices")
	}
	c := &Cache{t: t, mounted: t.TempDir()}
	c.Path = filepath.Join(c.mounted, fileName)
	fuse, err := os.OpenFile("/dev/fuse", os.O_RDWR, 0)
	c.must(err)
	defer fuse.Close() // the server has its own copy
	c.must(unix.Mount("writecache", c.mounted, "fuse", unix.MS_NOSUID|unix.MS_NODEV,
		fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0", fuse.Fd())))
	t.Cleanup(func() {
		if err := unix.Unmount(c.mounted, unix.MNT_DETACH); err != nil {
			t.Errorf("unmount %s: %v", c.mounted, err)
		}
	})
	c.server = exec.Command("/proc/self/exe")
	c.server.Env = append(os.Environ(), serverEnv+"="+backing)
	c.server.ExtraFiles = []*os.File{fuse}
	c.server.Stderr = os.Stderr
	c.server.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // Ctrl-C must not end the server before the test
	c.command, err = c.server.StdinPipe()
	c.must(err)
	output, err := c.server.StdoutPipe()
	c.must(err)
	c.answers = bufio.NewReader(output)
	c.must(hostexec.Start(c.server))
	t.Cleanup(func() {
		_ = c.command.Close() // ends the server
		if err := c.server.Wait(); err != nil {
			t.Errorf("the server of the write cache: %v", err)
		}
	})
	return c
}

// Cut cuts the power: writes that were not flushed are lost, and the disk answers no more. With a seed other than 0,
// each page of 4 KiB that was not flushed is lost or kept by chance, as a real cache writes in any order. Cut returns
// the number of lost pages. The next disk with these bytes takes the backing file.
func (c *Cache) Cut(seed uint64) (lostPages int) {
	c.t.Helper()
	_, err := fmt.Fprintf(c.command, "cut %d\n", seed)
	c.must(err)
	answer, err := c.answers.ReadString('\n')
	c.must(err)
	if _, err := fmt.Sscanf(answer, "lost %d", &lostPages); err != nil {
		c.t.Fatalf("the server answers %q", strings.TrimSpace(answer))
	}
	return lostPages
}

func (c *Cache) must(err error) {
	c.t.Helper()
	if err != nil {
		c.t.Fatal(err)
	}
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package iohang_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device/devicetest"
	"github.com/oxidecomputer/oxide-csi-plugin/test/iohang"
)

// A disk hangs for the processes of the test, also when they are killed. Another disk answers meanwhile. Then the disk
// answers again.
func TestDiskHangsAndComesBack(t *testing.T) {
	g := devicetest.New(t)
	hung, other := g.Add("csi-hung", 1<<20), g.Add("csi-other", 1<<20)
	release := iohang.Start(t, os.Getpid(), hung.Number.Major, hung.Number.Minor)
	read := func(disk *devicetest.Disk) *exec.Cmd {
		t.Helper()
		cmd := exec.Command("dd", "if="+disk.Loop, "of=/dev/null", "iflag=direct", "bs=4096", "count=1", "status=none")
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		return cmd
	}
	if err := read(other).Wait(); err != nil {
		t.Errorf("the other disk: %v", err)
	}
	cmd := read(hung)
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	waitForStateD(t, cmd.Process.Pid)
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-ended:
		t.Errorf("the read ended while the disk hung: %v", err)
	case <-time.After(200 * time.Millisecond):
	}
	release()
	release()
	var exit *exec.ExitError
	if err := <-ended; !errors.As(err, &exit) {
		t.Errorf("the killed read ended with %v", err)
	}
	if err := read(hung).Wait(); err != nil {
		t.Errorf("after it came back: %v", err)
	}
}

func waitForStateD(t *testing.T, pid int) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(time.Millisecond) {
		status, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err == nil && strings.Contains(string(status), ") D ") {
			return
		}
	}
	t.Fatal("the read does not hang")
}

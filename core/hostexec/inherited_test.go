// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package hostexec_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/core/hostexec"
)

// After CloseUninherited no program has the file, although programs start for other volumes all the time. Between fork
// and exec they have copies of all open files. A disk that is open exclusively would still be in use. Here a locked
// file stands for the disk, because other tests may open a disk.
func TestCloseUninheritedWhileProgramsStart(t *testing.T) {
	t.Run("with the limit of this process", func(t *testing.T) { closeWhileProgramsStart(t, 900) })
	t.Run("with the least limit", func(t *testing.T) {
		limitOpenFiles(t, hostexec.MinOpenFiles)
		closeWhileProgramsStart(t, 180)
	})
}

// limitOpenFiles sets the limit of open files until the end of the test.
func limitOpenFiles(t *testing.T, files uint64) {
	t.Helper()
	var before unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &before); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Prlimit(0, unix.RLIMIT_NOFILE, &before, nil); err != nil {
			t.Error(err)
		}
	})
	if err := unix.Prlimit(0, unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: files, Max: before.Max}, nil); err != nil {
		t.Fatal(err)
	}
}

// Programs are started with the least limit, and one less is an error.
func TestCheckOpenFiles(t *testing.T) {
	limitOpenFiles(t, hostexec.MinOpenFiles)
	if err := hostexec.CheckOpenFiles(); err != nil {
		t.Error(err)
	}
	if _, err := hostexec.Run(t.Context(), "blkid", "-V"); err != nil {
		t.Error(err)
	}
	limitOpenFiles(t, hostexec.MinOpenFiles-1)
	if err := hostexec.CheckOpenFiles(); err == nil || !strings.Contains(err.Error(), "is 255, and the plugin needs 256") {
		t.Errorf("one less: %v", err)
	}
}

// closeWhileProgramsStart closes a file with the number high. Files with all other numbers below are open.
func closeWhileProgramsStart(t *testing.T, high int) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "disk")
	ctx, cancel := context.WithCancel(t.Context())
	var starters sync.WaitGroup
	for range 2 {
		starters.Go(func() {
			for ctx.Err() == nil {
				_, _ = hostexec.Run(ctx, "blkid", "-V")
			}
		})
	}
	defer starters.Wait()
	defer cancel()
	// A starting program closes its copies in the order of their numbers: that of a file with a high number after many
	// files comes late. The low numbers are left for the pipes that belong to a start.
	const low = 40
	files := make([]*os.File, high-low)
	for n := range files {
		var err error
		if files[n], err = os.Open(os.DevNull); err != nil {
			t.Fatal(err)
		}
		defer func() { _ = files[n].Close() }()
	}
	for _, file := range files[:low] {
		if err := file.Close(); err != nil {
			t.Fatal(err)
		}
	}
	// Real time: the race is between processes of the kernel.
	for start := time.Now(); time.Since(start) < time.Second; {
		file, err := os.Create(path)
		if err != nil {
			t.Fatal(err)
		}
		if err := unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
			t.Fatalf("a program has the file that was closed: %v", err)
		}
		number, err := unix.FcntlInt(file.Fd(), unix.F_DUPFD_CLOEXEC, high)
		if err = errors.Join(err, file.Close()); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Millisecond) // a program starts
		if err := hostexec.CloseUninherited(os.NewFile(uintptr(number), path)); err != nil {
			t.Fatal(err)
		}
	}
}

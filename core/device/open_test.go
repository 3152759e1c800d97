// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package device_test

import (
	"context"
	"errors"
	"os"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device/devicetest"
	"github.com/oxidecomputer/oxide-csi-plugin/core/hostexec"
)

// Close releases the disk while the plugin starts programs for other volumes. Between fork and exec, such a program has
// copies of all open files. If it had the exclusive file of this disk, mkfs or mount would find the disk in use.
func TestCloseReleasesTheDiskWhileProgramsStart(t *testing.T) {
	t.Parallel()
	g := devicetest.New(t)
	dev, err := g.Roots().ByNumber(g.Add("csi-abcdefghijklmnop", 64*mib).Number)
	if err != nil {
		t.Fatal(err)
	}
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
	// A starting program closes its copies in the order of their numbers: that of a disk with a high number after many
	// files comes late. The low numbers are left for the pipes that belong to a start.
	const low, high = 40, 900
	files := make([]*os.File, high-low)
	for n := range files {
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
		held, err := dev.Open(unix.O_RDONLY | unix.O_EXCL)
		if err != nil {
			t.Fatalf("the disk is in use, and no program has it: %v", err)
		}
		number, err := unix.FcntlInt(held.Fd(), unix.F_DUPFD_CLOEXEC, high)
		if err = errors.Join(err, held.Close()); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Millisecond) // a program starts
		if err := hostexec.CloseUninherited(os.NewFile(uintptr(number), dev.Path)); err != nil {
			t.Fatal(err)
		}
	}
}

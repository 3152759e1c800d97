// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package device_test

import (
	"context"
	"sync"
	"testing"
	"time"

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
	// Real time: the race is between processes of the kernel.
	for start := time.Now(); time.Since(start) < time.Second; {
		if err := dev.CheckUnused(); err != nil {
			t.Fatalf("the disk is in use, and no program has it: %v", err)
		}
	}
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller_test

import (
	"slices"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/core/coretest"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

const sweepAge = 400 * time.Millisecond

// left makes a temporary snapshot as a crash leaves it, and returns its name.
func (r *rig) left(t *testing.T, cluster, volume, of string) string {
	t.Helper()
	name := diskname.ForClone(cluster, volume)
	r.userSnapshot(t, coretest.Project, name, rack.NewTemporaryDescription(cluster, volume, []string{of}).Encode(), of)
	return name
}

// waitSnapshots waits until the rack has just these snapshots.
func (r *rig) waitSnapshots(t *testing.T, want ...string) {
	t.Helper()
	slices.Sort(want)
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		got := r.snapshots(t)
		if slices.Equal(got, want) {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("the rack has %v, want %v", got, want)
		}
	}
}

// What a crash left goes without anybody asking for anything, once it is old enough; nothing else does.
func TestSweep(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	volume := r.Create(t, "v")
	keep := []string{r.left(t, "another-cluster", "copy", volume)}
	r.snapshot(t, "s", volume)
	keep = append(keep, diskname.ForSnapshot(coretest.Cluster, "s"), diskname.ForClone(coretest.Cluster, "only the name"))
	r.userSnapshot(t, coretest.Project, keep[2], "mine", volume)
	old := r.left(t, coretest.Cluster, "old", volume)
	time.Sleep(sweepAge)
	young := r.left(t, coretest.Cluster, "young", volume)
	r.waitSnapshots(t, append(slices.Clone(keep), old, young)...)

	r.Options.SweepAge = sweepAge
	sweeping := r.again(t)
	begun := time.Now()
	r.waitSnapshots(t, append(slices.Clone(keep), young)...)
	r.waitSnapshots(t, keep...)
	if waited := time.Since(begun); waited < sweepAge/4 {
		t.Errorf("the young one went after %s", waited)
	}
	// Then all is quiet.
	time.Sleep(2 * sweepAge)
	sweeping.ClearCalls(t)
	time.Sleep(2 * sweepAge)
	sweeping.WantCalls(t, map[string]int{})
}

// A sweep that the rack does not answer is tried again.
func TestSweepThroughFaults(t *testing.T) {
	r := newRig(t)
	volume := r.Create(t, "v")
	r.left(t, coretest.Cluster, "old", volume)
	time.Sleep(sweepAge)
	for _, operation := range []string{"snapshot_list", "snapshot_delete"} {
		_, err := r.Sim.Inject(
			t.Context(),
			simtest.Fault{Operation: operation, Kind: simtest.FaultStatus, Status: 503, Count: new(5)},
		)
		r.Must(t, err)
	}
	r.Options.SweepAge = sweepAge
	r.again(t)
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		left, err := r.Sim.Leftovers(t.Context()) // a list would meet the fault
		r.Must(t, err)
		if left.Snapshots == 0 {
			return
		}
		if time.Now().After(end) {
			t.Fatal("the snapshot is still there")
		}
	}
}

// A temporary snapshot that a call could not delete, or not know of, is deleted later.
func TestSweepAfterAClone(t *testing.T) {
	t.Parallel()
	for name, fault := range map[string]simtest.Fault{
		"that could not be deleted": {Operation: "snapshot_delete", Kind: simtest.FaultStatus, Status: 503, Count: new(2)},
		"that was made unseen":      {Operation: "snapshot_create", Kind: simtest.FaultLost},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, func(o *coretest.Options) { o.SweepAge = sweepAge })
			volume := r.Create(t, "v")
			time.Sleep(3 * sweepAge) // what it does at its start is done
			_, err := r.Sim.Inject(t.Context(), fault)
			r.Must(t, err)
			if fault.Kind == simtest.FaultLost {
				_, err := r.Sim.Inject(
					t.Context(),
					simtest.Fault{
						Operation: "snapshot_view",
						Kind:      simtest.FaultStatus,
						Status:    503,
						Count:     new(2 * coretest.Attempts),
					},
				)
				r.Must(t, err)
			}
			_, err = r.CreateVolume(t.Context(), from("copy", fromVolume(volume)))
			if fault.Kind != simtest.FaultLost {
				r.Must(t, err)
			}
			if len(r.snapshots(t)) != 1 {
				t.Errorf("snapshots: %v", r.snapshots(t))
			}
			r.waitSnapshots(t)
		})
	}
}

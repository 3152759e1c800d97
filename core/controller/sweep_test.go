// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller_test

import (
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/core/controller"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
	"github.com/oxidecomputer/oxide-csi-plugin/test/coretest"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// sweepAge is the age at which the controllers of these tests delete temporary snapshots. Its time is that of a
// synctest bubble.
const sweepAge = time.Hour

// startSweeping starts a controller that sweeps, and waits for its first sweep.
func (r *bubbleRig) startSweeping(t *testing.T) *controller.Service {
	t.Helper()
	service := r.startController(t, controller.Options{TemporaryAge: sweepAge})
	service.StartSweeping(t.Context())
	synctest.Wait()
	return service
}

// wantSnapshots compares the names of the rack's snapshots.
func (r *bubbleRig) wantSnapshots(t *testing.T, want ...string) {
	t.Helper()
	synctest.Wait()
	slices.Sort(want)
	coretest.WantSame(t, r.snapshots(t), want)
}

// leaveTemporary makes a temporary snapshot, as a crash leaves it behind, and returns its name.
func (r *rig) leaveTemporary(t *testing.T, cluster, volume, diskID string) string {
	t.Helper()
	name := diskname.ForClone(cluster, volume)
	description := rack.NewTemporaryDescription(cluster, volume, []string{diskID}).Encode()
	r.userSnapshot(t, coretest.Project, name, description, diskID)
	return name
}

// The sweeper deletes a temporary snapshot of its cluster as soon as the snapshot is old enough, and no other snapshot.
func TestSweep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newBubbleRig(t)
		disk := r.UserDisk(t, coretest.Project, "disk", "").Id
		kept := []string{
			r.leaveTemporary(t, "another-cluster", "copy", disk),
			diskname.ForSnapshot(coretest.Cluster, "s"),
			diskname.ForClone(coretest.Cluster, "only the name"),
		}
		r.userSnapshot(
			t,
			coretest.Project,
			kept[1],
			rack.NewSnapshotDescription(coretest.Cluster, "s", []string{disk}).Encode(),
			disk,
		)
		r.userSnapshot(t, coretest.Project, kept[2], "mine", disk)
		r.leaveTemporary(t, coretest.Cluster, "old", disk)
		time.Sleep(sweepAge)
		young := r.leaveTemporary(t, coretest.Cluster, "young", disk)
		time.Sleep(sweepAge / 2)

		r.startSweeping(t)
		r.wantSnapshots(t, append(slices.Clone(kept), young)...)
		time.Sleep(sweepAge/2 - time.Second)
		r.wantSnapshots(t, append(slices.Clone(kept), young)...)
		time.Sleep(2 * time.Second)
		r.wantSnapshots(t, kept...)

		// After that the sweeper sends no requests, except for the second sweep at age.
		time.Sleep(sweepAge)
		synctest.Wait()
		before := r.requests.Load()
		time.Sleep(100 * sweepAge)
		synctest.Wait()
		if sent := r.requests.Load() - before; sent != 0 {
			t.Errorf("%d requests although there is nothing to sweep", sent)
		}
	})
}

// The sweeper retries after requests that the rack did not answer.
func TestSweepThroughFaults(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newBubbleRig(t)
		r.leaveTemporary(t, coretest.Cluster, "old", r.UserDisk(t, coretest.Project, "disk", "").Id)
		time.Sleep(sweepAge)
		for _, operation := range []string{"snapshot_list", "snapshot_delete"} {
			r.inject(t, simtest.Fault{Operation: operation, Kind: simtest.FaultStatus, Status: 503, Count: new(4)})
		}
		r.startSweeping(t)
		time.Sleep(sweepAge)
		r.wantSnapshots(t)
		if sent := r.requests.Load(); sent <= 8 {
			t.Errorf("%d requests, so the faults were not hit", sent)
		}
	})
}

// The sweeper deletes the temporary snapshot of a clone that the call itself could not delete or did not know of.
func TestSweepAfterAClone(t *testing.T) {
	for name, faults := range map[string][]simtest.Fault{
		"whose snapshot could not be deleted": {
			{Operation: "snapshot_delete", Kind: simtest.FaultStatus, Status: 503, Count: new(2)},
		},
		"whose snapshot was made without an answer": {
			{Operation: "snapshot_create", Kind: simtest.FaultLost},
			{Operation: "snapshot_view", Kind: simtest.FaultStatus, Status: 503, Count: new(2 * coretest.Attempts)},
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newBubbleRig(t)
				disk := r.UserDisk(t, coretest.Project, "disk", "").Id
				service := r.startSweeping(t)
				time.Sleep(3 * sweepAge) // after the two sweeps at the start
				for _, fault := range faults {
					r.inject(t, fault)
				}
				_, err := service.CreateVolume(t.Context(), from("copy", fromVolume(disk)))
				if len(faults) == 1 {
					coretest.Must(t, err)
				}
				r.wantSnapshots(t, diskname.ForClone(coretest.Cluster, "copy"))
				time.Sleep(sweepAge + time.Minute)
				r.wantSnapshots(t)
			})
		})
	}
}

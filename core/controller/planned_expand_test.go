// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/test/await"
	"github.com/oxidecomputer/oxide-csi-plugin/test/coretest"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// committed is a rack with a volume whose expansion is committed, and whose old disk is attached to a running instance:
// a controller ended after it had attached the disk, and before it looked at the records.
func committed(t *testing.T) (r *rig, volume, node string) {
	t.Helper()
	r = newRestartRig(t)
	volume, node = r.Create(t, "v"), r.Node(t, "node-a")
	r.Inject(t, "disk_delete", simtest.FaultStatus, 500)
	_, err := r.expand(t, volume, 2*coretest.GiB)
	coretest.WantCode(t, err, codes.Aborted)
	r.Must(t, r.Sim.SetRunState(t.Context(), node, "stopped"))
	r.AttachByHand(t, volume, node)
	r.Must(t, r.Sim.SetRunState(t.Context(), node, "running"))
	return r, volume, node
}

// The rack does not detach the disk from the running instance, so the volume is not published. The next restart of the
// instance detaches the disk before it starts the instance, and the volume grows.
func TestPlannedRestartGivesWayToAnExpansion(t *testing.T) {
	t.Parallel()
	r, volume, node := committed(t)
	coretest.WantCode(t, r.Publish(t, volume, node), codes.FailedPrecondition, "is being expanded")
	if got := r.Holder(t, volume); got != node {
		t.Fatalf("the disk is on %q", got)
	}
	r.published(t, r.Create(t, "another"), node)
	r.restartsDone(t)
	if slices.Contains(r.Volumes(t), volume) {
		t.Fatal("the instance was started with the old disk")
	}
	await.Eventually(t, "the volume is published", func() bool { return r.Publish(t, volume, node) == nil })
	r.restartsDone(t)
	r.Must(t, r.Unpublish(t, volume, node))
	r.Must(t, r.Sim.SetRunState(t.Context(), node, "stopped")) // nothing else detaches the disk
	if size, err := r.expand(t, volume, 3*coretest.GiB); err != nil || size != 3*coretest.GiB {
		t.Errorf("the volume has %d bytes: %v", size, err)
	}
	r.Must(t, r.Delete(t, volume))
}

// The deferred detach of such a disk stays until the disk is detached.
func TestPlannedExpansionKeepsADeferredDetach(t *testing.T) {
	t.Parallel()
	r, volume, node := committed(t)
	r.Must(t, r.Unpublish(t, volume, node))
	if got := r.records(t, "csi-defer-"); len(got) == 0 {
		t.Fatalf("the detach is not deferred: %v", r.records(t, "csi-"))
	}
	coretest.WantCode(t, r.Publish(t, volume, node), codes.FailedPrecondition, "is being expanded")
	if got := r.records(t, "csi-defer-"); len(got) == 0 {
		t.Error("the deferred detach has ended, and the disk is still attached")
	}
}

// A publish on a stopped instance takes an expansion back that is not committed, and the instance starts with the disk.
func TestPlannedPublishTakesAnExpansionBack(t *testing.T) {
	t.Parallel()
	r := newRestartRig(t)
	volume, node := r.Create(t, "v"), r.Node(t, "node-a")
	r.Inject(t, "utilization_view", simtest.FaultStatus, 500)
	_, err := r.expand(t, volume, 2*coretest.GiB)
	if err == nil {
		t.Fatal("the volume was expanded")
	}
	r.published(t, volume, node)
	r.restartsDone(t)
	r.wantNothingLeft(t)
}

// A disk whose records cannot be read keeps its instance down, because the instance could write to a disk that is being
// replaced. The reason is told, and after it is gone the instance starts.
func TestPlannedUnreadableDecisionIsReported(t *testing.T) {
	t.Parallel()
	r := newRestartRig(t)
	volume, node := r.Create(t, "v"), r.Node(t, "node-a")
	r.Inject(t, "utilization_view", simtest.FaultStatus, 500)
	_, err := r.expand(t, volume, 2*coretest.GiB)
	coretest.WantCode(t, err, codes.Internal)
	name := "csi-grown-" + volume
	_, err = r.SDK.AntiAffinityGroupCreate(t.Context(), oxide.AntiAffinityGroupCreateParams{
		Project: coretest.Project,
		Body: &oxide.AntiAffinityGroupCreate{
			Name: oxide.Name(name), Description: "not a record",
			Policy: oxide.AffinityPolicyAllow, FailureDomain: oxide.FailureDomainSled,
		},
	})
	r.Must(t, err)
	await.Eventually(t, "the reason is told", func() bool {
		err := r.Publish(t, volume, node)
		coretest.WantCode(t, err, codes.FailedPrecondition)
		return strings.Contains(err.Error(), name)
	})
	if got := r.runState(t, node); got != oxide.InstanceStateStopped {
		t.Errorf("the instance is %s", got)
	}
	r.Must(t, r.SDK.AntiAffinityGroupDelete(t.Context(), oxide.AntiAffinityGroupDeleteParams{
		AntiAffinityGroup: oxide.NameOrId(name), Project: coretest.Project,
	}))
	r.published(t, volume, node)
}

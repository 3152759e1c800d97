package core_test

import "testing"

// stop stops an instance as its owner would.
func (r *rig) stop(t *testing.T, node string) {
	t.Helper()
	r.must(t, r.sim.SetRunState(t.Context(), node, "stopped"))
}

// unused is a volume that a running node has no use for any more, and still has.
func (r *rig) unused(t *testing.T, name, node string) string {
	t.Helper()
	volume := r.create(t, name)
	r.stop(t, node)
	r.must(t, r.publish(t, volume, node))
	r.must(t, r.sim.SetRunState(t.Context(), node, "running"))
	r.must(t, r.unpublish(t, volume, node))
	if got := r.holder(t, volume); got != node {
		t.Fatalf("the disk is on %q", got)
	}
	return volume
}

// Whoever stops the instance that still has it can be rid of a volume at once.
func TestPlannedDeleteOnStopped(t *testing.T) {
	r := newRestartRig(t)
	node := r.node(t, "node-a")
	volume := r.unused(t, "v", node)
	r.stop(t, node)
	r.must(t, r.delete(t, volume))
	if got := r.records(t, "csi-"); len(got) > 0 {
		t.Errorf("records are left: %v", got)
	}
	r.wantRestarts(t, 0)
}

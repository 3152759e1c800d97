package core_test

import (
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/core/restart"
)

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

// Without any restart, volumes move where somebody stops the instances.
func TestPlannedMoveOnStopped(t *testing.T) {
	for _, policy := range []restart.Policy{restart.Never, restart.Plan, restart.Allow} {
		t.Run(string(policy), func(t *testing.T) {
			r := newRestartRig(t, func(o *rigOptions) { o.restarts.Policy, o.restarts.CoolDown = policy, time.Hour })
			from, to := r.node(t, "node-a"), r.node(t, "node-b")
			volume := r.unused(t, "v", from)
			r.stop(t, from)
			r.stop(t, to)
			r.published(t, volume, to)
			r.rest(t)
			r.wantRestarts(t, 0)
			if got := r.records(t, "csi-"); len(got) > 0 {
				t.Errorf("records are left: %v", got)
			}
		})
	}
}

// A restart that another process has planned, and nobody has begun, is begun by nobody who must not restart.
func TestPlannedByAnother(t *testing.T) {
	for name, change := range map[string]func(*restart.Options, string){
		"never":        func(o *restart.Options, _ string) { o.Policy = restart.Never },
		"plan":         func(o *restart.Options, _ string) { o.Policy = restart.Plan },
		"closed":       func(o *restart.Options, _ string) { o.Open = func(time.Time) bool { return false } },
		"self unknown": func(o *restart.Options, _ string) { o.Self = func() (string, bool) { return "", false } },
	} {
		t.Run(name, func(t *testing.T) {
			first := newRestartRig(t)
			node := first.node(t, "node-a")
			volume := first.create(t, "v")
			first.crash()
			on := func(change func(*restart.Options)) *rig {
				restarts := *first.options.restarts
				change(&restarts.Options)
				other := *first
				other.options.restarts = &restarts
				return other.again(t)
			}
			here := on(func(o *restart.Options) { o.Self = func() (string, bool) { return node, true } })
			if err := here.publish(t, volume, node); status.Code(err) != codes.FailedPrecondition {
				t.Fatal(err)
			}
			eventually(t, "the restart is planned, and handed over", func() bool { return len(here.records(t, "csi-restart-")) == 1 })
			here.crash()
			there := on(func(o *restart.Options) { change(o, node) })
			for range 20 {
				if err := there.publish(t, volume, node); status.Code(err) != codes.FailedPrecondition {
					t.Fatal(err)
				}
			}
			there.rest(t)
			there.wantRestarts(t, 0)
			if got := there.holder(t, volume); got != "" {
				t.Errorf("the disk is on %s", got)
			}
		})
	}
}

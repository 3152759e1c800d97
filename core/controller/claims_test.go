// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/test/await"
	"github.com/oxidecomputer/oxide-csi-plugin/test/coretest"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack"
)

// claimant is an orchestrator that knows who has claimed a volume. It never leaves an unpublish out.
type claimant struct {
	mu sync.Mutex
	// nodes are the nodes with a claim, by volume.
	nodes map[string][]string
	// names are the names of a volume in the orchestrator.
	names map[string][]string
	// silent makes it not answer; failure is the answer if it is not nil.
	silent  bool
	failure error
	// asked are the volumes of each question, and about which node it was.
	asked []string
}

func (c *claimant) Moved(context.Context, string, string, string) (bool, error) { return false, nil }

func (c *claimant) Claimed(ctx context.Context, nodeID string, volumeIDs []string) (map[string]string, error) {
	c.mu.Lock()
	c.asked = append(c.asked, nodeID+": "+strings.Join(volumeIDs, " "))
	silent, failure := c.silent, c.failure
	claimed := map[string]string{}
	for _, id := range volumeIDs {
		if slices.Contains(c.nodes[id], nodeID) {
			claimed[id] = "allocation 5a7d9b11 (web)"
		}
	}
	c.mu.Unlock()
	if silent {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	return claimed, failure
}

func (c *claimant) Registered(ctx context.Context, volumeID string) ([]string, error) {
	c.mu.Lock()
	silent, names := c.silent, c.names[volumeID]
	c.mu.Unlock()
	if silent {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	return names, nil
}

func (c *claimant) register(volumeID string, names ...string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.names = map[string][]string{volumeID: names}
}

// set sets the nodes that have claimed a volume.
func (c *claimant) set(volumeID string, nodes ...string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.nodes[volumeID] = nodes
}

func (c *claimant) answer(silent bool, failure error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.silent, c.failure = silent, failure
}

func (c *claimant) questions() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.asked)
}

// inClaiming runs a test in a bubble, with an orchestrator and a volume that a job uses on the first node.
func inClaiming(
	t *testing.T, test func(t *testing.T, d *deferring, c *claimant, id string), change ...func(*simrack.Options),
) {
	t.Helper()
	c := &claimant{nodes: map[string][]string{}}
	inDeferring(t, func(t *testing.T, d *deferring) {
		d.orchestrator = c
		d.start(t)
		id := d.create(t, "v")
		c.set(id, d.nodes[0])
		coretest.Must(t, d.publish(t, id, d.nodes[0]))
		test(t, d, c, id)
	}, change...)
}

// refusedTwin is a second job with the same disk under another ID, on the first node. The node refuses to mount the
// disk a second time, and the orchestrator unpublishes what it has published for this job.
func (d *deferring) refusedTwin(t *testing.T, id string) {
	t.Helper()
	coretest.Must(t, d.publish(t, id, d.nodes[0]))
	d.unpublish(t, id, d.nodes[0])
}

// wantHeld expects that a disk stays attached to the first node for an hour.
func (d *deferring) wantHeld(t *testing.T, id string) {
	t.Helper()
	for range 60 {
		time.Sleep(time.Minute)
		d.wantHolder(t, id, d.nodes[0])
	}
}

// An unpublish for a second job with the same disk takes nothing from the first one, whichever controller is there at
// the end of the grace period. The unpublish of the first job has its own grace period.
func TestRefusedJobTakesNoDisk(t *testing.T) {
	for _, restarted := range []bool{false, true} {
		for _, after := range []time.Duration{3 * time.Minute, time.Hour} {
			t.Run(fmt.Sprintf("other controller %t, stopped after %s", restarted, after), func(t *testing.T) {
				inClaiming(t, func(t *testing.T, d *deferring, c *claimant, id string) {
					d.refusedTwin(t, id)
					if restarted {
						d.start(t)
					}
					for began := time.Now(); time.Since(began) < after; time.Sleep(time.Minute) {
						d.wantHolder(t, id, d.nodes[0])
					}
					if got := d.publishedOn(t, id); !slices.Equal(got, []string{d.nodes[0]}) {
						t.Errorf("the volume is shown on %v", got)
					}
					c.set(id)
					d.unpublish(t, id, d.nodes[0])
					time.Sleep(grace - time.Second)
					d.wantHolder(t, id, d.nodes[0])
					time.Sleep(grace + 2*within)
					d.wantHolder(t, id, "")
				})
			})
		}
	}
}

// Without a certain answer a disk stays attached. The log and the error of a publish elsewhere say why. When the
// orchestrator answers, the disk is detached.
func TestDiskStaysWithoutAnAnswer(t *testing.T) {
	for name, failure := range map[string]error{"silent": nil, "an error": errors.New("the token may not read")} {
		t.Run(name, func(t *testing.T) {
			inClaiming(t, func(t *testing.T, d *deferring, c *claimant, id string) {
				var log bytes.Buffer
				d.log = slog.New(slog.NewTextHandler(&log, nil))
				d.start(t)
				c.set(id)
				c.answer(failure == nil, failure)
				d.unpublish(t, id, d.nodes[0])
				d.wantHeld(t, id)
				began := time.Now()
				wantRejected(t, d.publish(t, id, d.nodes[1]), codes.FailedPrecondition,
					"it may be in use")
				if took := time.Since(began); took > 6*time.Second {
					t.Errorf("the publish took %s", took)
				}
				c.answer(false, nil)
				time.Sleep(2 * within)
				d.wantHolder(t, id, "")
				d.stop() // it writes the log
				if n := strings.Count(log.String(), "does not say whether a workload"); n == 0 || n > 2 {
					t.Errorf("the log has %d lines with the reason: %s", n, log.String())
				}
			})
		})
	}
}

// Nomad repeats the unpublish of an old allocation, after eleven minutes once more. The claim of the new one decides.
func TestStaleUnpublishesElevenMinutesApart(t *testing.T) {
	inClaiming(t, func(t *testing.T, d *deferring, c *claimant, id string) {
		d.unpublish(t, id, d.nodes[0])
		coretest.Must(t, d.publish(t, id, d.nodes[0]))
		for range 3 {
			d.unpublish(t, id, d.nodes[0])
			time.Sleep(11 * time.Minute)
			d.wantHolder(t, id, d.nodes[0])
		}
		d.wantHeld(t, id)
	})
}

// untimed makes the last unpublish of a volume one that may be an old one, and releases the claim.
func (d *deferring) untimed(t *testing.T, c *claimant, id string) {
	t.Helper()
	d.unpublish(t, id, d.nodes[0])
	coretest.Must(t, d.publish(t, id, d.nodes[0]))
	d.unpublish(t, id, d.nodes[0]) // the claim is still there: the orchestrator waits for the answer
	c.set(id)
}

// An unpublish soon after a return may be an old one. If the orchestrator says that no workload uses the volume, its
// disk leaves by itself, but not before its grace period. Then the volume can be deleted or expanded.
func TestUnclaimedDiskLeavesByItself(t *testing.T) {
	for name, wanted := range map[string]func(ctx context.Context, d *deferring, id string) error{
		"deletion": func(ctx context.Context, d *deferring, id string) error {
			_, err := d.service.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: id})
			return err
		},
		"expansion": func(ctx context.Context, d *deferring, id string) error {
			_, err := d.service.ControllerExpandVolume(ctx, &csi.ControllerExpandVolumeRequest{
				VolumeId: id, CapacityRange: &csi.CapacityRange{RequiredBytes: 2 * coretest.GiB},
			})
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			inClaiming(t, func(t *testing.T, d *deferring, c *claimant, id string) {
				d.untimed(t, c, id)
				wantRejected(t, wanted(t.Context(), d, id), codes.FailedPrecondition,
					"the claims on it are asked in 1m0s (--detach-grace)")
				time.Sleep(2*grace - time.Second)
				d.wantHolder(t, id, d.nodes[0])
				time.Sleep(2 * within)
				d.wantHolder(t, id, "")
				coretest.Must(t, wanted(t.Context(), d, id))
			})
		})
	}
}

// A publish waits for the slots of such disks. One question is about all of an instance.
func TestUnclaimedDisksMakeRoom(t *testing.T) {
	inClaiming(t, func(t *testing.T, d *deferring, c *claimant, first string) {
		volumes := []string{first}
		for i := range 6 {
			id := d.create(t, fmt.Sprint("v", i))
			c.set(id, d.nodes[0])
			coretest.Must(t, d.publish(t, id, d.nodes[0]))
			volumes = append(volumes, id)
		}
		next := d.create(t, "next")
		for _, id := range volumes[1:] {
			d.untimed(t, c, id)
		}
		wantRejected(t, d.publish(t, next, d.nodes[0]), codes.FailedPrecondition, "the claims on it are asked in 1m0s")
		before := len(c.questions())
		time.Sleep(2*grace + within)
		coretest.Must(t, d.publish(t, next, d.nodes[0]))
		d.wantHolder(t, first, d.nodes[0])
		if asked := c.questions()[before:]; len(asked) != 2 {
			t.Errorf("%d questions, want one before the disks get their time, and one before they leave: %q", len(asked), asked)
		}
	})
}

// While the first node has a claim, a publish on another node neither starts the time of such a disk nor waits for it.
func TestClaimedDiskStaysForAnotherNode(t *testing.T) {
	inClaiming(t, func(t *testing.T, d *deferring, c *claimant, id string) {
		d.untimed(t, c, id)
		c.set(id, d.nodes[0], d.nodes[1])
		wantRejected(t, d.publish(t, id, d.nodes[1]), codes.FailedPrecondition, "a workload there claims it")
		d.wantHeld(t, id)
		wantRejected(t, d.publish(t, id, d.nodes[1]), codes.FailedPrecondition, "end its use there first")
		c.set(id, d.nodes[1])
		d.unpublish(t, id, d.nodes[0])
		time.Sleep(grace + within)
		coretest.Must(t, d.publish(t, id, d.nodes[1]))
	})
}

// A job ends shortly before the end of the grace period that an old request has begun. Its own request counts, although
// its claim was seen just before, or is released a moment later.
func TestRequestAtTheEndOfAGracePeriod(t *testing.T) {
	for name, elsewhere := range map[string]bool{"claim was seen before": true, "claim is released later": false} {
		t.Run(name, func(t *testing.T) {
			inClaiming(t, func(t *testing.T, d *deferring, c *claimant, id string) {
				d.unpublish(t, id, d.nodes[0])
				coretest.Must(t, d.publish(t, id, d.nodes[0]))
				d.unpublish(t, id, d.nodes[0]) // the old request
				time.Sleep(grace - 4*time.Second)
				if elsewhere {
					wantRejected(t, d.publish(t, id, d.nodes[1]), codes.FailedPrecondition, "a workload there claims it")
				} else {
					time.Sleep(3 * time.Second)
				}
				d.unpublish(t, id, d.nodes[0])
				if !elsewhere {
					time.Sleep(2 * time.Second)
				}
				c.set(id)
				time.Sleep(2*grace + 2*within)
				d.wantHolder(t, id, "")
			})
		})
	}
}

// An instance that is stopped for a moment keeps the disk of a job that comes back with it. A disk without a claim
// leaves at once.
func TestClaimedDiskStaysOnAStoppedInstance(t *testing.T) {
	inClaiming(t, func(t *testing.T, d *deferring, c *claimant, id string) {
		other := d.create(t, "other")
		coretest.Must(t, d.publish(t, other, d.nodes[0]))
		d.refusedTwin(t, id)
		d.unpublish(t, other, d.nodes[0])
		d.runState(t, d.nodes[0], "stopped")
		time.Sleep(within)
		d.wantHolder(t, id, d.nodes[0])
		d.wantHolder(t, other, "")
		d.wantHeld(t, id)
	})
}

// The orchestrator releases a claim only when the unpublish has succeeded. So the claims of a request that is carried
// out at once are not asked.
func TestRequestIsNotHeldUpByItsOwnClaim(t *testing.T) {
	inClaiming(t, func(t *testing.T, d *deferring, c *claimant, id string) {
		d.runState(t, d.nodes[0], "failed")
		d.unpublish(t, id, d.nodes[0])
		d.wantHolder(t, id, "")
	})
	inClaiming(t, func(t *testing.T, d *deferring, c *claimant, id string) {
		d.unpublishNow(t, id, d.nodes[0])
		d.wantHolder(t, id, "")
	})
}

// A volume is not created a second time while the orchestrator has its disk under another ID, used or not. A repeated
// create succeeds: nothing is registered yet. Without an answer it succeeds, too.
func TestSecondIDOfADisk(t *testing.T) {
	inClaiming(t, func(t *testing.T, d *deferring, c *claimant, id string) {
		create := func() error {
			_, err := d.service.CreateVolume(t.Context(), coretest.CreateRequest("v"))
			return err
		}
		coretest.Must(t, create())
		c.register(id, "blue/data")
		wantRejected(t, create(), codes.AlreadyExists, "under another ID or in another namespace: use another name")
		c.answer(true, nil)
		coretest.Must(t, create())
	})
}

// A disk is not deleted while the orchestrator has it under a second ID.
func TestDeletionOfADiskWithTwoIDs(t *testing.T) {
	inClaiming(t, func(t *testing.T, d *deferring, c *claimant, _ string) {
		id := d.create(t, "other")
		remove := func() error {
			_, err := d.service.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: id})
			return err
		}
		c.register(id, "blue/data", "red/data")
		wantRejected(
			t,
			remove(),
			codes.FailedPrecondition,
			"under 2 IDs, which the controller's log names: deregister the others",
		)
		c.register(id, "blue/data")
		coretest.Must(t, remove())
		coretest.Must(t, remove())
	})
}

// unpublishedTimed attaches disks to a node and unpublishes their volumes. That is long after their publish, so their
// detaches have a time. Before that the controller learns that the rack has no hot-plug.
func (r *rig) unpublishedTimed(t *testing.T, node string, volumes ...string) {
	t.Helper()
	r.published(t, r.Create(t, "elsewhere"), r.Node(t, "node-c"))
	r.restartsDone(t)
	r.Must(t, r.Sim.SetRunState(t.Context(), node, "stopped"))
	for _, volume := range volumes {
		r.AttachByHand(t, volume, node)
	}
	r.Must(t, r.Sim.SetRunState(t.Context(), node, "running"))
	for _, volume := range volumes {
		r.Must(t, r.Unpublish(t, volume, node))
	}
}

// A planned restart for another volume leaves the disk of a volume attached that a job on the instance has claimed. It
// asks for the claims of all disks at once, before it stops the instance.
func TestPlannedRestartKeepsAClaimedDisk(t *testing.T) {
	t.Parallel()
	for name, failure := range map[string]error{"claimed": nil, "no answer": errors.New("the token may not read")} {
		t.Run(name, func(t *testing.T) {
			c := &claimant{nodes: map[string][]string{}}
			r := newRestartRig(t, func(o *coretest.Options) { o.DetachGrace, o.Orchestrator = time.Hour, c })
			node, used, leaves := r.Node(t, "node-a"), r.Create(t, "used"), r.Create(t, "leaves")
			c.set(used, node)
			r.unpublishedTimed(t, node, used, leaves)
			c.answer(false, failure)
			before := len(c.questions())
			r.published(t, r.Create(t, "other"), node)
			r.restartsDone(t)
			want := map[string]string{used: node, leaves: ""}
			if failure != nil {
				want[leaves] = node
			}
			for volume, node := range want {
				if got := r.Holder(t, volume); got != node {
					t.Errorf("disk %s is on %q, want %q", volume, got, node)
				}
			}
			asked := c.questions()[before:]
			if len(asked) == 0 || !strings.Contains(asked[0], used) || !strings.Contains(asked[0], leaves) {
				t.Errorf("the first question is not about both volumes: %q", asked)
			}
		})
	}
}

// No instance is restarted for a disk, or for the slot of a disk, that would stay attached there. The error of the
// publish says why.
func TestNoRestartInVain(t *testing.T) {
	t.Parallel()
	for name, needs := range map[string]func(r *rig, used, other string) error{
		"the disk": func(r *rig, used, _ string) error { return r.Publish(t, used, r.Node(t, "node-b")) },
		"the slot": func(r *rig, _, other string) error { return r.Publish(t, other, r.Node(t, "node-a")) },
	} {
		t.Run(name, func(t *testing.T) {
			c := &claimant{nodes: map[string][]string{}}
			r := newRestartRig(t, func(o *coretest.Options) { o.DetachGrace, o.Orchestrator, o.MaxDisks = time.Hour, c, 2 })
			node, used, other := r.Node(t, "node-a"), r.Create(t, "used"), r.Create(t, "other")
			c.set(used, node)
			r.unpublishedTimed(t, node, used)
			stops, _ := r.restarts(t)
			await.Eventually(t, "the publish says why", func() bool {
				err := needs(r, used, other)
				coretest.WantCode(t, err, codes.FailedPrecondition)
				return strings.Contains(err.Error(), "a workload on it has claimed volume "+used)
			})
			c.set(used)
			await.Eventually(t, "the publish succeeds", func() bool { return needs(r, used, other) == nil })
			if now, _ := r.restarts(t); now-stops > 2 {
				t.Errorf("%d restarts", now-stops)
			}
		})
	}
}

// An instance that its owner has stopped keeps the disk of a job that comes back with it, although another node asks
// for the volume.
func TestStoppedInstanceKeepsAClaimedDisk(t *testing.T) {
	t.Parallel()
	c := &claimant{nodes: map[string][]string{}}
	r := newRestartRig(t, func(o *coretest.Options) { o.DetachGrace, o.Orchestrator = time.Hour, c })
	node, used := r.Node(t, "node-a"), r.Create(t, "used")
	c.set(used, node)
	r.unpublishedTimed(t, node, used)
	r.Must(t, r.Sim.SetRunState(t.Context(), node, "stopped"))
	publish := func() bool { return r.Publish(t, used, r.Node(t, "node-b")) == nil }
	await.Eventually(t, "a planned restart has begun and ended", func() bool {
		if publish() {
			t.Fatalf("the disk was taken from node-a; the questions were %q", c.questions())
		}
		return len(r.records(t, "csi-restart-")) > 0
	})
	r.restartsDone(t)
	if got := r.Holder(t, used); got != node {
		t.Errorf("the disk is on %q", got)
	}
	c.set(used)
	await.Eventually(t, "the volume is published on the other node", publish)
}

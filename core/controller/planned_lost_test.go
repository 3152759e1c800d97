// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/core/controller"
	"github.com/oxidecomputer/oxide-csi-plugin/core/restart"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
	"github.com/oxidecomputer/oxide-csi-plugin/test/coretest"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack"
)

// losingOrchestrator loses one of its nodes. Calls about that node have the result of reach, from the call on that is
// named lostFrom. The guests of other nodes halt when they are asked.
type losingOrchestrator struct {
	rig      *bubbleRig
	lost     string
	lostFrom string
	reach    func(context.Context) error

	mu    sync.Mutex
	isOut bool
	asked map[string]string // the ID of the accepted restart, by instance
}

func (o *losingOrchestrator) call(ctx context.Context, name, instance string) error {
	o.mu.Lock()
	if instance == o.lost && name == o.lostFrom {
		o.isOut = true
	}
	unreachable := instance == o.lost && o.isOut
	o.mu.Unlock()
	if unreachable {
		return o.reach(ctx)
	}
	return nil
}

func (o *losingOrchestrator) Request(ctx context.Context, instance, id string) error {
	if err := o.call(ctx, "Request", instance); err != nil {
		return err
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.asked[instance] == id {
		return nil
	}
	o.asked[instance] = id
	if instance == o.lost {
		return nil
	}
	return o.rig.halt(instance)
}

func (o *losingOrchestrator) Reply(ctx context.Context, instance, id string) (orchestrator.RestartReply, error) {
	if err := o.call(ctx, "Reply", instance); err != nil {
		return orchestrator.RestartReply{}, err
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.asked[instance] != id {
		return orchestrator.RestartReply{}, nil
	}
	instanceNow, err := o.rig.SDK.InstanceView(ctx, oxide.InstanceViewParams{Instance: oxide.NameOrId(instance)})
	if err == nil && instanceNow.RunState == oxide.InstanceStateRunning && instance != o.lost {
		return orchestrator.RestartReply{State: orchestrator.RestartBack}, nil
	}
	return orchestrator.RestartReply{State: orchestrator.RestartAccepted}, err
}

func (o *losingOrchestrator) Withdraw(ctx context.Context, instance, id string) (orchestrator.RestartReply, error) {
	return o.Reply(ctx, instance, id)
}

func (o *losingOrchestrator) Forget(ctx context.Context, instance, _ string) error {
	return o.call(ctx, "Forget", instance)
}

func (o *losingOrchestrator) Report(context.Context, string, orchestrator.Report) error {
	return nil
}

// A node that is lost in the middle of its restart does not prevent the restarts of other nodes. If its guest halts
// after all, its instance is started again.
func TestPlannedLostNodeFreesItsSlot(t *testing.T) {
	refuse := func(context.Context) error { return errors.New("no node has this instance") }
	hang := func(ctx context.Context) error {
		<-ctx.Done()
		return ctx.Err()
	}
	for _, test := range []struct {
		name, lostFrom string
		reach          func(context.Context) error
	}{
		{"before it was asked", "Request", refuse},
		{"before it was asked, and calls hang", "Request", hang},
		{"before it replied", "Reply", refuse},
		{"before it replied, and calls hang", "Reply", hang},
		{"it accepted and does not halt", "never", refuse},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newBubbleRig(t, func(o *simrack.Options) {
					o.Hotplug, o.Instances = false, []string{"node-a", "node-b"}
				})
				lost, other := r.Node(t, "node-a"), r.Node(t, "node-b")
				o := &losingOrchestrator{
					rig: r, lost: lost, lostFrom: test.lostFrom, reach: test.reach, asked: map[string]string{},
				}
				c := r.startController(t, controller.Options{Restarts: &controller.PlannedRestarts{Options: restart.Options{
					Shutdown: restart.Guest, Requester: o, MaxDown: 1, HaltTimeout: 10 * time.Minute,
				}}})
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				publish := func(name, node string) error {
					created, err := c.CreateVolume(ctx, coretest.CreateRequest(name))
					coretest.Must(t, err)
					_, err = c.ControllerPublishVolume(ctx, &csi.ControllerPublishVolumeRequest{
						VolumeId: created.GetVolume().GetVolumeId(), NodeId: node, VolumeCapability: coretest.MountWriter(),
					})
					return err
				}
				if err := publish("first", lost); err == nil {
					t.Fatal("published on a running instance")
				}
				go c.PlanRestarts(ctx, r.client)
				time.Sleep(time.Minute)
				start := time.Now()
				for publish("second", other) != nil {
					if time.Since(start) > time.Hour {
						t.Fatal("the other node was not restarted within an hour")
					}
					time.Sleep(10 * time.Second)
				}
				t.Logf("the other node was restarted after %s", time.Since(start))
				coretest.Must(t, r.halt(lost))
				for start = time.Now(); fmt.Sprint(r.runState(t, lost)) != "running"; time.Sleep(time.Second) {
					if time.Since(start) > 5*time.Minute {
						t.Fatalf("the lost node halted and is %s after 5 minutes", r.runState(t, lost))
					}
				}
				cancel()
				synctest.Wait()
			})
		})
	}
}

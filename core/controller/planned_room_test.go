// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller_test

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/core/controller"
	"github.com/oxidecomputer/oxide-csi-plugin/core/restart"
	"github.com/oxidecomputer/oxide-csi-plugin/test/coretest"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack"
)

// A restart attaches a disk to an instance just when an RPC attaches another one. Both must not take the last place.
func TestPlannedAttachAtOnceKeepsTheLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newBubbleRig(t, func(o *simrack.Options) { o.Hotplug = false })
		ctx, node := t.Context(), r.Node(t, "node-a")
		_, err := r.SDK.InstanceStop(ctx, oxide.InstanceStopParams{Instance: oxide.NameOrId(node)})
		r.Must(t, err)
		awaitState := func(want string) {
			for fmt.Sprint(r.runState(t, node)) != want {
				time.Sleep(time.Second)
			}
		}
		awaitState("stopped")
		for n := range 6 { // with the boot disk, the instance has place for one more
			r.AttachByHand(t, r.UserDisk(t, coretest.Project, fmt.Sprint("user-", n), "").Id, node)
		}
		_, err = r.SDK.InstanceStart(ctx, oxide.InstanceStartParams{Instance: oxide.NameOrId(node)})
		r.Must(t, err)
		awaitState("running")

		var c *controller.Service
		publish := func(volume string) error {
			_, err := c.ControllerPublishVolume(ctx, &csi.ControllerPublishVolumeRequest{
				VolumeId: volume, NodeId: node, VolumeCapability: coretest.MountWriter(),
			})
			return err
		}
		var volumes []string
		var once sync.Once
		var published sync.WaitGroup
		r.before = func(req *http.Request) {
			// The engine has looked at the room of the instance, and is about to attach the first disk.
			if req.Method == http.MethodPost && strings.HasSuffix(req.URL.Path, "/anti-affinity-groups") &&
				fmt.Sprint(r.runState(t, node)) == "stopped" {
				once.Do(func() {
					published.Go(func() { _ = publish(volumes[1]) }) // the test looks at the rack
					time.Sleep(time.Second)
				})
			}
		}
		c = r.startController(t, controller.Options{Restarts: &controller.PlannedRestarts{Options: restart.Options{
			Shutdown: restart.Hard, MaxDown: 1,
		}}})
		for _, name := range []string{"first", "second"} {
			created, err := c.CreateVolume(ctx, coretest.CreateRequest(name))
			r.Must(t, err)
			volumes = append(volumes, created.GetVolume().GetVolumeId())
		}
		if err := publish(volumes[0]); err == nil {
			t.Fatal("published on a running instance")
		}
		engine, stop := context.WithCancel(ctx)
		done := make(chan struct{})
		go func() {
			defer close(done)
			c.PlanRestarts(engine, r.client)
		}()
		time.Sleep(5 * time.Minute)
		published.Wait()
		disks, err := r.SDK.InstanceDiskListAllPages(ctx, oxide.InstanceDiskListParams{Instance: oxide.NameOrId(node)})
		r.Must(t, err)
		if len(disks) != 8 {
			t.Errorf("the instance has %d disks, want 8", len(disks))
		}
		stop()
		<-done
	})
}

// Orchestrators ask for more than the rack can do, and repeat what fails. An instance that is down for
// its restart comes back.
func TestPlannedRestartEndsUnderOverload(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newBubbleRig(t, func(o *simrack.Options) { o.Hotplug = false })
		ctx, cancel := context.WithCancel(t.Context())
		node := r.Node(t, "node-a")
		turn := make(chan struct{}, 1)
		r.before = func(*http.Request) { // 20 requests a second
			turn <- struct{}{}
			time.Sleep(50 * time.Millisecond)
			<-turn
		}
		c := r.startController(t, controller.Options{Restarts: &controller.PlannedRestarts{Options: restart.Options{
			Shutdown: restart.Hard, MaxDown: 1,
		}}})
		created, err := c.CreateVolume(ctx, coretest.CreateRequest("v"))
		r.Must(t, err)
		volume := created.GetVolume().GetVolumeId()
		publish := &csi.ControllerPublishVolumeRequest{
			VolumeId:         volume,
			NodeId:           node,
			VolumeCapability: coretest.MountWriter(),
		}
		if _, err := c.ControllerPublishVolume(ctx, publish); err == nil {
			t.Fatal("published on a running instance")
		}
		var tasks sync.WaitGroup
		tasks.Go(func() { c.PlanRestarts(ctx, r.client) })
		for fmt.Sprint(r.runState(t, node)) == "running" {
			time.Sleep(time.Millisecond)
		}
		for n := range 600 {
			tasks.Go(func() {
				for ctx.Err() == nil {
					limited, cancel := context.WithTimeout(ctx, 15*time.Second)
					// Many calls fail.
					_, _ = c.ControllerGetVolumeHealth(limited, &csi.ControllerGetVolumeHealthRequest{
						VolumeId: fmt.Sprintf("00000000-0000-4000-8000-%012d", n),
					})
					cancel()
				}
			})
		}
		start := time.Now()
		for fmt.Sprint(r.runState(t, node)) != "running" {
			if time.Since(start) > 5*time.Minute {
				t.Errorf("after 5 minutes the instance is %s", r.runState(t, node))
				break
			}
			time.Sleep(time.Second)
		}
		t.Logf("the instance was down for %s", time.Since(start))
		cancel()
		tasks.Wait()
	})
}

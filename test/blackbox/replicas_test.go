// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package blackbox

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/oxidecomputer/oxide-csi-plugin/test/await"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// TestTwoControllers sends the same requests to two controllers of one cluster at the same time. This happens when a
// leader was replaced and does not know it yet.
func TestTwoControllers(t *testing.T) {
	t.Parallel()
	sim := startSim(t, "--hotplug", "--instances=node-a", "--latency=5ms")
	var replicas [2]*simtest.Plugin
	for i := range replicas {
		replicas[i] = startPlugin(t, simtest.PluginOptions{Mode: "controller", Sim: sim})
	}
	capability, node := mountVolume(""), sim.Instance("node-a")
	const volumes = 6 // with the boot disk, this is what --max-disks allows
	var created [volumes]*csi.Volume
	both(t, volumes, func(i int) [2]call {
		return sameCall(
			replicas,
			func(p *simtest.Plugin) rpc[*csi.CreateVolumeRequest, *csi.CreateVolumeResponse] {
				return p.CreateVolume
			},
			createRequest(fmt.Sprintf("pvc-%d", i), capability),
		)
	}, func(i int, answer proto.Message) {
		created[i] = answer.(*csi.CreateVolumeResponse).GetVolume()
	})
	checkLeftovers(t, sim, volumes)

	both(t, volumes, func(i int) [2]call {
		return sameCall(
			replicas,
			func(p *simtest.Plugin) rpc[*csi.ControllerPublishVolumeRequest, *csi.ControllerPublishVolumeResponse] {
				return p.ControllerPublishVolume
			},
			publishRequest(created[i], node, capability),
		)
	}, func(i int, answer proto.Message) {
		if id := answer.(*csi.ControllerPublishVolumeResponse).GetPublishContext()["diskID"]; id != created[i].GetVolumeId() {
			t.Errorf("volume %s is published with the disk %s", created[i].GetVolumeId(), id)
		}
	})
	if disks := attachedDisks(t, sim, node); len(disks) != volumes {
		t.Errorf("the instance has %d disks, want %d", len(disks), volumes)
	}

	both(t, volumes, func(i int) [2]call {
		return sameCall(
			replicas,
			func(p *simtest.Plugin) rpc[*csi.ControllerUnpublishVolumeRequest, *csi.ControllerUnpublishVolumeResponse] {
				return p.ControllerUnpublishVolume
			},
			&csi.ControllerUnpublishVolumeRequest{VolumeId: created[i].GetVolumeId(), NodeId: node.ID},
		)
	}, nil)
	both(t, volumes, func(i int) [2]call {
		return sameCall(
			replicas,
			func(p *simtest.Plugin) rpc[*csi.DeleteVolumeRequest, *csi.DeleteVolumeResponse] {
				return p.DeleteVolume
			},
			&csi.DeleteVolumeRequest{VolumeId: created[i].GetVolumeId()},
		)
	}, nil)
	checkLeftovers(t, sim, 0)
}

// call sends one request until it succeeds.
type call func(context.Context) (proto.Message, error)

// sameCall returns calls with the same request, one for each replica.
func sameCall[Request, Response proto.Message](
	replicas [2]*simtest.Plugin,
	of func(*simtest.Plugin) rpc[Request, Response],
	req Request,
) (calls [2]call) {
	for i, replica := range replicas {
		calls[i] = func(ctx context.Context) (proto.Message, error) { return try(ctx, newClient(), of(replica), req) }
	}
	return calls
}

// both makes n pairs of calls concurrently, and compares the two answers of each pair.
func both(t *testing.T, n int, pair func(int) [2]call, check func(int, proto.Message)) {
	t.Helper()
	answers := make([][2]proto.Message, n)
	errs := make([][2]error, n)
	var group sync.WaitGroup
	for i := range n {
		for side, do := range pair(i) {
			group.Go(func() { answers[i][side], errs[i][side] = do(t.Context()) })
		}
	}
	group.Wait()
	for i, answer := range answers {
		if err := errors.Join(errs[i][:]...); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(answer[0], answer[1], protocmp.Transform()); diff != "" {
			t.Errorf("the controllers' answers differ (-first +second):\n%s", diff)
		}
		if check != nil {
			check(i, answer[0])
		}
	}
}

// TestKilledController kills the plugin while the rack creates a disk for it. The rack still creates the disk. The
// next process must find the disk, whether it asks before or after the disk exists.
func TestKilledController(t *testing.T) {
	for name, row := range map[string]struct {
		fault simtest.Fault
		// first means to wait for the disk before the next process starts.
		first bool
	}{
		"next process asks before the disk exists": {simtest.Fault{Operation: "disk_create", Kind: simtest.FaultDelay, DelayMillis: 4000}, false},
		"next process asks after the disk exists":  {simtest.Fault{Operation: "disk_create", Kind: simtest.FaultDelay, DelayMillis: 500}, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			sim := startSim(t, "--hotplug", "--instances=node-a")
			ctx := within(t, time.Minute)
			options := simtest.PluginOptions{Mode: "controller", Sim: sim, Dir: shortDir(t)}
			killDuringCreate(t, sim, options, row.fault, createRequest("killed", mountVolume("")))
			made := func() bool { // for the killed process
				calls, err := sim.Calls(ctx)
				if err != nil {
					t.Fatal(err)
				}
				for _, call := range calls.Log {
					if call.Fault == simtest.FaultDelay {
						return true
					}
				}
				return false
			}
			if row.first {
				await.Eventually(t, "the rack has made the disk", made)
			} else if made() {
				t.Fatal("the rack created the disk before the process was killed, so the test proves nothing")
			}

			c := newClient()
			next := startPlugin(t, options)
			volume := twice(t, c, next.CreateVolume, createRequest("killed", mountVolume(""))).GetVolume()
			await.Eventually(t, "the rack has finished the killed process's request", made)
			twice(t, c, next.CreateVolume, createRequest("killed", mountVolume("")))
			if disks := disksOnRack(t, sim); len(disks) != 1 || disks[0].Id != volume.GetVolumeId() {
				t.Errorf("the rack has the disks %+v, want the one of volume %s", disks, volume.GetVolumeId())
			}
			checkLeftovers(t, sim, 1)
			twice(t, c, next.DeleteVolume, &csi.DeleteVolumeRequest{VolumeId: volume.GetVolumeId()})
			checkLeftovers(t, sim, 0)
		})
	}
}

// killDuringCreate starts a plugin, sends CreateVolume, and kills the plugin while the rack delays the create.
func killDuringCreate(
	t *testing.T,
	sim *simtest.Sim,
	options simtest.PluginOptions,
	delay simtest.Fault,
	create *csi.CreateVolumeRequest,
) {
	t.Helper()
	ctx := within(t, time.Minute)
	victim, err := simtest.StartPlugin(programs.Plugin, options)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := victim.Kill(); err != nil {
			t.Error(err)
		}
	})
	if _, err := sim.Inject(ctx, delay); err != nil {
		t.Fatal(err)
	}
	answered := make(chan error, 1)
	go func() {
		_, err := victim.CreateVolume(ctx, create)
		answered <- err
	}()
	await.Eventually(t, "the rack has the request", func() bool {
		faults, err := sim.Faults(ctx)
		if err != nil {
			t.Fatal(err)
		}
		return faults[0].Hits == 1
	})
	if err := victim.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := <-answered; err == nil {
		t.Fatal("the plugin answered before it was killed, so the test proves nothing")
	}
}

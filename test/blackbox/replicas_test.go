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

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/lab"
)

// TestTwoControllers lets two controllers of one cluster do the same at the same time, as when a leader has been replaced
// and does not know it yet.
func TestTwoControllers(t *testing.T) {
	t.Parallel()
	sim := startSim(t, "--hotplug", "--instances=node-a", "--latency=5ms")
	var replicas [2]*lab.Plugin
	for i := range replicas {
		replicas[i] = startPlugin(t, lab.PluginOptions{Mode: "controller", Sim: sim})
	}
	capability, node := mountVolume(""), sim.Instance("node-a")
	const volumes = 6 // with the boot disk, what --max-disks allows
	var created [volumes]*csi.Volume
	both(t, volumes, func(i int) [2]call {
		return sameCall(
			replicas,
			func(p *lab.Plugin) rpc[*csi.CreateVolumeRequest, *csi.CreateVolumeResponse] { return p.CreateVolume },
			createRequest(fmt.Sprintf("pvc-%d", i), capability),
		)
	}, func(i int, answer proto.Message) {
		created[i] = answer.(*csi.CreateVolumeResponse).GetVolume()
	})
	checkLeftovers(t, sim, volumes)

	both(t, volumes, func(i int) [2]call {
		return sameCall(
			replicas,
			func(p *lab.Plugin) rpc[*csi.ControllerPublishVolumeRequest, *csi.ControllerPublishVolumeResponse] {
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
			func(p *lab.Plugin) rpc[*csi.ControllerUnpublishVolumeRequest, *csi.ControllerUnpublishVolumeResponse] {
				return p.ControllerUnpublishVolume
			},
			&csi.ControllerUnpublishVolumeRequest{VolumeId: created[i].GetVolumeId(), NodeId: node.ID},
		)
	}, nil)
	both(t, volumes, func(i int) [2]call {
		return sameCall(
			replicas,
			func(p *lab.Plugin) rpc[*csi.DeleteVolumeRequest, *csi.DeleteVolumeResponse] { return p.DeleteVolume },
			&csi.DeleteVolumeRequest{VolumeId: created[i].GetVolumeId()},
		)
	}, nil)
	checkLeftovers(t, sim, 0)
}

// call sends one request until it is answered.
type call func(context.Context) (proto.Message, error)

// sameCall is the same request to each replica.
func sameCall[Request, Response proto.Message](
	replicas [2]*lab.Plugin,
	of func(*lab.Plugin) rpc[Request, Response],
	req Request,
) (calls [2]call) {
	for i, replica := range replicas {
		calls[i] = func(ctx context.Context) (proto.Message, error) { return try(ctx, newClient(), of(replica), req) }
	}
	return calls
}

// both makes n pairs of calls, all at once, and compares the answers of each pair.
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
			t.Errorf("the controllers answer differently (-one +other):\n%s", diff)
		}
		if check != nil {
			check(i, answer[0])
		}
	}
}

// TestKilledController kills the plugin while the rack is making a disk for it. The rack makes it all the same; the next
// process must find it, before and after it is there.
func TestKilledController(t *testing.T) {
	for name, row := range map[string]struct {
		fault lab.Fault
		// first waits until the rack has done what the killed process had asked for.
		first bool
	}{
		"the next process asks before the disk is there": {lab.Fault{Operation: "disk_create", Kind: lab.FaultDelay, DelayMillis: 1500}, false},
		"the next process asks after the disk is there":  {lab.Fault{Operation: "disk_create", Kind: lab.FaultDelay, DelayMillis: 500}, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			sim := startSim(t, "--hotplug", "--instances=node-a")
			ctx := within(t, time.Minute)
			options := lab.PluginOptions{Mode: "controller", Sim: sim, Dir: shortDir(t)}
			killDuringCreate(t, sim, options, row.fault, createRequest("killed", mountVolume("")))
			made := func() bool { // by the request of the process that was killed
				calls, err := sim.Calls(ctx)
				if err != nil {
					t.Fatal(err)
				}
				for _, call := range calls.Log {
					if call.Fault == lab.FaultDelay {
						return true
					}
				}
				return false
			}
			if row.first {
				eventually(t, "the rack has made the disk", made)
			} else if made() {
				t.Fatal("the rack made the disk before the process could be killed; the test has shown nothing")
			}

			c := newClient()
			next := startPlugin(t, options)
			volume := twice(t, c, next.CreateVolume, createRequest("killed", mountVolume(""))).GetVolume()
			eventually(t, "the rack has done what the killed process asked for", made)
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

// killDuringCreate starts a plugin, asks it for a volume, and kills it when the rack has the request and delays it.
func killDuringCreate(
	t *testing.T,
	sim *lab.Sim,
	options lab.PluginOptions,
	delay lab.Fault,
	create *csi.CreateVolumeRequest,
) {
	t.Helper()
	ctx := within(t, time.Minute)
	victim, err := lab.StartPlugin(programs.Plugin, options)
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
	eventually(t, "the rack has the request", func() bool {
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
		t.Fatal("the plugin answered before it was killed; the test has shown nothing")
	}
}

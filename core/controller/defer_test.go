// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"

	"github.com/oxidecomputer/oxide-csi-plugin/core/controller"
	"github.com/oxidecomputer/oxide-csi-plugin/core/detach"
	"github.com/oxidecomputer/oxide-csi-plugin/core/record"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
	"github.com/oxidecomputer/oxide-csi-plugin/test/coretest"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

const (
	// grace is the time from the unpublish to the detach.
	grace = time.Minute
	// within is the time from the end of a grace period to the detach, at most.
	within = 35 * time.Second
)

// deferring is a controller that defers detaches, on a rack in a synctest bubble with the instances node-a and node-b.
type deferring struct {
	*bubbleRig
	service *controller.Service
	// orchestrator is for the next controller. It may be nil.
	orchestrator orchestrator.Claims
	// log is the log of the next controller. It may be nil.
	log *slog.Logger
	// stop ends what the controller does beside the RPCs.
	stop  func()
	nodes [2]string
}

// inDeferring runs a test in a bubble.
func inDeferring(t *testing.T, test func(t *testing.T, d *deferring), change ...func(*simrack.Options)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		two := func(o *simrack.Options) { o.Instances = []string{"node-a", "node-b"} }
		d := &deferring{bubbleRig: newBubbleRig(t, append(change, two)...)}
		d.nodes = [2]string{d.Node(t, "node-a"), d.Node(t, "node-b")}
		d.start(t)
		test(t, d)
		d.stop()
	})
}

// start starts a controller, which replaces the one before.
func (d *deferring) start(t *testing.T) {
	t.Helper()
	if d.stop != nil {
		d.stop()
	}
	d.service = d.startController(t, controller.Options{DetachGrace: grace, Orchestrator: d.orchestrator, Log: d.log})
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	service, client := d.service, d.client
	running.Go(func() { service.DetachLater(ctx, client) })
	d.stop = sync.OnceFunc(func() {
		cancel()
		running.Wait()
	})
}

func (d *deferring) create(t *testing.T, name string) (volumeID string) {
	t.Helper()
	created, err := d.service.CreateVolume(t.Context(), coretest.CreateRequest(name))
	coretest.Must(t, err)
	return created.GetVolume().GetVolumeId()
}

func (d *deferring) publish(t *testing.T, id, node string) error {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context()) // as gRPC does after the answer
	defer cancel()
	_, err := d.service.ControllerPublishVolume(
		ctx,
		&csi.ControllerPublishVolumeRequest{VolumeId: id, NodeId: node, VolumeCapability: coretest.MountWriter()},
	)
	return err
}

// unpublish unpublishes a volume twice, as Nomad does.
func (d *deferring) unpublish(t *testing.T, id, node string) {
	t.Helper()
	for range 2 {
		_, err := d.service.ControllerUnpublishVolume(
			t.Context(),
			&csi.ControllerUnpublishVolumeRequest{VolumeId: id, NodeId: node},
		)
		coretest.Must(t, err)
	}
}

// unpublishNow unpublishes a volume as a person does who knows that it is unmounted.
func (d *deferring) unpublishNow(t *testing.T, id, node string) {
	t.Helper()
	_, err := d.service.ControllerUnpublishVolume(
		metadata.NewIncomingContext(t.Context(), metadata.Pairs(rpc.MetadataDetachNow, "yes")),
		&csi.ControllerUnpublishVolumeRequest{VolumeId: id, NodeId: node},
	)
	coretest.Must(t, err)
}

// lateUnpublish unpublishes a volume five minutes after it came back to the first node, and expects that this detaches
// nothing.
func (d *deferring) lateUnpublish(t *testing.T, id string) {
	t.Helper()
	time.Sleep(5 * time.Minute)
	d.unpublish(t, id, d.nodes[0])
	for range 60 {
		time.Sleep(time.Minute)
		d.wantHolder(t, id, d.nodes[0])
	}
}

func (d *deferring) wantHolder(t *testing.T, id, want string) {
	t.Helper()
	if got := d.Holder(t, id); got != want {
		t.Errorf("after %s the disk is attached to %q, want %q", time.Since(bubbleStart), got, want)
	}
}

// bubbleStart is when the clock of a bubble starts.
var bubbleStart = time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)

// wantRejected checks the code and the text of an error of a service that is called without gRPC.
func wantRejected(t *testing.T, err error, code codes.Code, mentions string) {
	t.Helper()
	var coded *rpc.Error
	if !errors.As(err, &coded) || coded.Code() != code || !strings.Contains(err.Error(), mentions) {
		t.Errorf("got %v, want %s that mentions %q", err, code, mentions)
	}
}

func (d *deferring) publishedOn(t *testing.T, id string) []string {
	t.Helper()
	list, err := d.service.ListVolumes(t.Context(), &csi.ListVolumesRequest{})
	coretest.Must(t, err)
	got, err := d.service.ControllerGetVolume(t.Context(), &csi.ControllerGetVolumeRequest{VolumeId: id})
	coretest.Must(t, err)
	for _, entry := range list.GetEntries() {
		if entry.GetVolume().GetVolumeId() == id {
			nodes := entry.GetStatus().GetPublishedNodeIds()
			if !slices.Equal(nodes, got.GetStatus().GetPublishedNodeIds()) {
				t.Errorf("the list says %v, the volume %v", nodes, got.GetStatus().GetPublishedNodeIds())
			}
			return nodes
		}
	}
	t.Fatalf("volume %s is not in the list", id)
	return nil
}

// runState sets the run state of an instance.
func (d *deferring) runState(t *testing.T, node, state string) {
	t.Helper()
	coretest.Must(t, d.control(http.MethodPatch, "/v0/instances/"+node, map[string]string{"run_state": state}))
}

// An unpublish succeeds at once, and the disk is detached when the grace period is over. Until then the volume is shown
// as not published.
func TestDetachIsDeferred(t *testing.T) {
	inDeferring(t, func(t *testing.T, d *deferring) {
		id := d.create(t, "v")
		coretest.Must(t, d.publish(t, id, d.nodes[0]))
		d.unpublish(t, id, d.nodes[0])
		if got := d.publishedOn(t, id); len(got) > 0 {
			t.Errorf("the unpublished volume is shown on %v", got)
		}
		time.Sleep(grace - time.Second)
		d.wantHolder(t, id, d.nodes[0])
		time.Sleep(within)
		d.wantHolder(t, id, "")
	})
}

// A disk that waits to be detached counts as attached, and the answer says for how long.
func TestExpandWaitsForTheDetach(t *testing.T) {
	inDeferring(t, func(t *testing.T, d *deferring) {
		id := d.create(t, "v")
		coretest.Must(t, d.publish(t, id, d.nodes[0]))
		d.unpublish(t, id, d.nodes[0])
		grow := func() error {
			_, err := d.service.ControllerExpandVolume(t.Context(), &csi.ControllerExpandVolumeRequest{
				VolumeId: id, CapacityRange: &csi.CapacityRange{RequiredBytes: 2 * coretest.GiB},
			})
			return err
		}
		time.Sleep(grace / 2)
		wantRejected(t, grow(), codes.FailedPrecondition, "in 30s (--detach-grace), then expand it again")
		d.wantHolder(t, id, d.nodes[0])
		time.Sleep(grace/2 + within)
		coretest.Must(t, grow())
	})
}

// A controller that ends leaves the detach to another one, which counts the grace period from its own start.
func TestDetachIsDeferredToAnotherController(t *testing.T) {
	inDeferring(t, func(t *testing.T, d *deferring) {
		id := d.create(t, "v")
		coretest.Must(t, d.publish(t, id, d.nodes[0]))
		d.unpublish(t, id, d.nodes[0])
		d.stop()
		time.Sleep(time.Hour)
		d.wantHolder(t, id, d.nodes[0])
		d.start(t)
		time.Sleep(grace - time.Second)
		d.wantHolder(t, id, d.nodes[0])
		time.Sleep(within)
		d.wantHolder(t, id, "")
	})
}

// A volume that returns to its node is published at once, and its disk stays attached.
func TestReturningVolumeStaysAttached(t *testing.T) {
	inDeferring(t, func(t *testing.T, d *deferring) {
		id := d.create(t, "v")
		coretest.Must(t, d.publish(t, id, d.nodes[0]))
		for range 3 {
			d.unpublish(t, id, d.nodes[0])
			time.Sleep(grace / 2)
			coretest.Must(t, d.publish(t, id, d.nodes[0]))
			if got := d.publishedOn(t, id); !slices.Equal(got, []string{d.nodes[0]}) {
				t.Errorf("the published volume is shown on %v", got)
			}
		}
		time.Sleep(time.Hour)
		d.wantHolder(t, id, d.nodes[0])
	})
}

// Nomad repeats the unpublish of an old allocation. Within ten minutes after the volume was published again, it
// detaches nothing under the new one, whichever controller receives it.
func TestLateUnpublishDetachesNothing(t *testing.T) {
	for _, other := range []bool{false, true} {
		for _, detached := range []bool{false, true} {
			t.Run(fmt.Sprintf("other controller %t, detached in between %t", other, detached), func(t *testing.T) {
				inDeferring(t, func(t *testing.T, d *deferring) {
					id := d.create(t, "v")
					coretest.Must(t, d.publish(t, id, d.nodes[0]))
					d.unpublish(t, id, d.nodes[0])
					if detached {
						time.Sleep(grace + within)
						d.wantHolder(t, id, "")
						time.Sleep(8 * time.Minute) // the time counts from the volume's return
					}
					coretest.Must(t, d.publish(t, id, d.nodes[0]))
					if other {
						d.start(t)
					}
					time.Sleep(8 * time.Minute)
					d.unpublish(t, id, d.nodes[0])
					for range 60 {
						time.Sleep(time.Minute)
						d.wantHolder(t, id, d.nodes[0])
					}
					// Only another node's publish ends the attachment, after a whole grace period.
					wantRejected(t, d.publish(t, id, d.nodes[1]), codes.FailedPrecondition, "in 1m0s (--detach-grace)")
					time.Sleep(grace - time.Second)
					d.wantHolder(t, id, d.nodes[0])
					time.Sleep(within)
					d.wantHolder(t, id, "")
					coretest.Must(t, d.publish(t, id, d.nodes[1]))
				})
			})
		}
	}
}

// Nomad repeats the unpublish of an allocation that ran here before the volume was on another node and came back.
// Within ten minutes that detaches nothing either.
func TestLateUnpublishAfterAnotherNode(t *testing.T) {
	inDeferring(t, func(t *testing.T, d *deferring) {
		id := d.create(t, "v")
		for _, node := range d.nodes {
			coretest.Must(t, d.publish(t, id, node))
			d.unpublish(t, id, node)
			time.Sleep(grace + within)
			d.wantHolder(t, id, "")
		}
		coretest.Must(t, d.publish(t, id, d.nodes[0]))
		d.lateUnpublish(t, id)
	})
}

// Nomad repeats an unpublish that was carried out at once, because the instance had no guest or a person asked for it.
// After the volume has come back, that detaches nothing.
func TestLateUnpublishAfterADetachAtOnce(t *testing.T) {
	for name, detachAtOnce := range map[string]func(t *testing.T, d *deferring, id string){
		"stopped": func(t *testing.T, d *deferring, id string) {
			d.runState(t, d.nodes[0], "stopped")
			d.unpublish(t, id, d.nodes[0])
			d.wantHolder(t, id, "")
			d.runState(t, d.nodes[0], "running")
		},
		"a person": func(t *testing.T, d *deferring, id string) {
			d.unpublishNow(t, id, d.nodes[0])
			d.wantHolder(t, id, "")
		},
	} {
		for _, elsewhere := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, on another node in between %t", name, elsewhere), func(t *testing.T) {
				inDeferring(t, func(t *testing.T, d *deferring) {
					id := d.create(t, "v")
					coretest.Must(t, d.publish(t, id, d.nodes[0]))
					detachAtOnce(t, d, id)
					if elsewhere {
						coretest.Must(t, d.publish(t, id, d.nodes[1]))
						d.unpublish(t, id, d.nodes[1])
						time.Sleep(grace + within)
						d.wantHolder(t, id, "")
					}
					coretest.Must(t, d.publish(t, id, d.nodes[0]))
					d.lateUnpublish(t, id)
				})
			})
		}
	}
}

// A volume whose unpublish came too early after a return is unpublished again later: that counts.
func TestLaterUnpublishIsTrusted(t *testing.T) {
	inDeferring(t, func(t *testing.T, d *deferring) {
		id := d.create(t, "v")
		coretest.Must(t, d.publish(t, id, d.nodes[0]))
		for range 2 {
			d.unpublish(t, id, d.nodes[0])
			coretest.Must(t, d.publish(t, id, d.nodes[0]))
		}
		d.unpublish(t, id, d.nodes[0]) // perhaps an old one
		time.Sleep(11 * time.Minute)
		d.wantHolder(t, id, d.nodes[0])
		d.unpublish(t, id, d.nodes[0])
		time.Sleep(grace + within)
		d.wantHolder(t, id, "")
	})
}

// After ten minutes nothing is remembered of a volume that was published again.
func TestReturnIsForgotten(t *testing.T) {
	inDeferring(t, func(t *testing.T, d *deferring) {
		id := d.create(t, "v")
		coretest.Must(t, d.publish(t, id, d.nodes[0]))
		d.unpublish(t, id, d.nodes[0])
		coretest.Must(t, d.publish(t, id, d.nodes[0]))
		time.Sleep(10*time.Minute + within)
		records, err := d.client.Records(t.Context())
		if err != nil || len(records) > 0 {
			t.Errorf("records %v, %v", records, err)
		}
		d.unpublish(t, id, d.nodes[0])
		time.Sleep(grace + within)
		d.wantHolder(t, id, "")
	})
}

// A publish on another node is refused with the time that is left, and succeeds when the grace period is over. At most
// 5 s are spent in an RPC.
func TestPublishElsewhereWaitsForTheGracePeriod(t *testing.T) {
	inDeferring(t, func(t *testing.T, d *deferring) {
		id := d.create(t, "v")
		coretest.Must(t, d.publish(t, id, d.nodes[0]))
		wantRejected(t, d.publish(t, id, d.nodes[1]), codes.FailedPrecondition, "end its use there first")
		d.unpublish(t, id, d.nodes[0])
		time.Sleep(20 * time.Second)
		wantRejected(t, d.publish(t, id, d.nodes[1]), codes.FailedPrecondition, "in 40s (--detach-grace)")
		time.Sleep(36 * time.Second)
		began := time.Now()
		coretest.Must(t, d.publish(t, id, d.nodes[1]))
		if took := time.Since(began); took < 3*time.Second || took > 5*time.Second {
			t.Errorf("the publish took %s", took)
		}
		d.wantHolder(t, id, d.nodes[1])
		d.unpublish(t, id, d.nodes[0]) // an old request
		time.Sleep(time.Hour)
		d.wantHolder(t, id, d.nodes[1])
	})
}

// An instance without a guest holds up no publish elsewhere, and its disks are detached soon.
func TestStoppedInstanceHoldsNothingUp(t *testing.T) {
	for _, state := range []string{"stopped", "failed"} {
		t.Run(state, func(t *testing.T) {
			inDeferring(t, func(t *testing.T, d *deferring) {
				id, other := d.create(t, "v"), d.create(t, "other")
				for _, volume := range []string{id, other} {
					coretest.Must(t, d.publish(t, volume, d.nodes[0]))
					d.unpublish(t, volume, d.nodes[0])
				}
				d.runState(t, d.nodes[0], state)
				began := time.Now()
				coretest.Must(t, d.publish(t, id, d.nodes[1]))
				if took := time.Since(began); took > time.Second {
					t.Errorf("the publish took %s", took)
				}
				time.Sleep(within)
				d.wantHolder(t, other, "")
			})
		})
	}
}

// A detach that takes long holds up no publish for longer than 5 s. It goes on, and a later publish finds a free disk.
func TestSlowDetachElsewhere(t *testing.T) {
	inDeferring(t, func(t *testing.T, d *deferring) {
		id := d.create(t, "v")
		coretest.Must(t, d.publish(t, id, d.nodes[0]))
		d.unpublish(t, id, d.nodes[0])
		d.runState(t, d.nodes[0], "stopped")
		d.stop() // only the publish detaches
		d.inject(t, simtest.Fault{
			Operation: "instance_disk_detach", Kind: simtest.FaultDelay, DelayMillis: 12_000, Count: new(1),
		})
		for range 2 {
			began := time.Now()
			wantRejected(t, d.publish(t, id, d.nodes[1]), codes.FailedPrecondition, "is just being detached")
			if took := time.Since(began); took > 5*time.Second {
				t.Errorf("the publish took %s", took)
			}
			d.wantHolder(t, id, d.nodes[0])
		}
		wantRejected(t, d.publish(t, id, d.nodes[0]), codes.FailedPrecondition, "is just being detached")
		time.Sleep(5 * time.Second)
		d.wantHolder(t, id, "")
		coretest.Must(t, d.publish(t, id, d.nodes[1]))
		d.wantHolder(t, id, d.nodes[1])
	})
}

// A rack that takes longer than the time for a detach, and then detaches the disk, holds up no later publish.
func TestVerySlowDetachElsewhere(t *testing.T) {
	inDeferring(t, func(t *testing.T, d *deferring) {
		id := d.create(t, "v")
		coretest.Must(t, d.publish(t, id, d.nodes[0]))
		d.unpublish(t, id, d.nodes[0])
		d.runState(t, d.nodes[0], "stopped")
		d.stop() // only the publish detaches
		d.inject(t, simtest.Fault{
			Operation: "instance_disk_detach", Kind: simtest.FaultDelay, DelayMillis: 40_000, Count: new(1),
		})
		wantRejected(t, d.publish(t, id, d.nodes[1]), codes.FailedPrecondition, "is just being detached")
		time.Sleep(36 * time.Second)
		coretest.Must(t, d.publish(t, id, d.nodes[1]))
		d.wantHolder(t, id, d.nodes[1])
	})
}

// A slow detach holds up no unpublish that asks for it either.
func TestSlowDetachOfAnUnpublish(t *testing.T) {
	inDeferring(t, func(t *testing.T, d *deferring) {
		id := d.create(t, "v")
		coretest.Must(t, d.publish(t, id, d.nodes[0]))
		d.runState(t, d.nodes[0], "stopped")
		d.inject(t, simtest.Fault{
			Operation: "instance_disk_detach", Kind: simtest.FaultDelay, DelayMillis: 12_000, Count: new(1),
		})
		d.stop() // only the unpublish detaches
		began := time.Now()
		_, err := d.service.ControllerUnpublishVolume(
			t.Context(), &csi.ControllerUnpublishVolumeRequest{VolumeId: id, NodeId: d.nodes[0]})
		coretest.Must(t, err)
		if took := time.Since(began); took > 5*time.Second {
			t.Errorf("the unpublish took %s", took)
		}
		if got := d.publishedOn(t, id); len(got) > 0 {
			t.Errorf("the unpublished volume is shown on %v", got)
		}
		time.Sleep(10 * time.Second)
		d.wantHolder(t, id, "")
		coretest.Must(t, d.publish(t, id, d.nodes[1]))
	})
}

// The rack records only after the publish that a process is detaching the disk. Meanwhile the volume has come back to
// its instance, and an old request to detach it is repeated.
func TestSlowDetachMeetsAReturn(t *testing.T) {
	inDeferring(t, func(t *testing.T, d *deferring) {
		id := d.create(t, "v")
		coretest.Must(t, d.publish(t, id, d.nodes[0]))
		d.unpublish(t, id, d.nodes[0])
		d.stop() // only the publish detaches
		time.Sleep(grace)
		d.inject(t, simtest.Fault{
			Operation: "anti_affinity_group_create", Kind: simtest.FaultDelay, DelayMillis: 12_000, Count: new(1),
		})
		wantRejected(t, d.publish(t, id, d.nodes[1]), codes.FailedPrecondition, "is just being detached")
		coretest.Must(t, d.publish(t, id, d.nodes[0]))
		d.unpublish(t, id, d.nodes[0])
		time.Sleep(30 * time.Second)
		d.wantHolder(t, id, d.nodes[0])
	})
}

// A disk whose state changes holds up no publish for longer either, and Nomad repeats the publish.
func TestPublishOfAChangingDisk(t *testing.T) {
	inDeferring(t, func(t *testing.T, d *deferring) {
		id := d.create(t, "v")
		coretest.Must(t, d.control(http.MethodPatch, "/v0/disks/"+id, map[string]string{"state": "maintenance"}))
		began := time.Now()
		wantRejected(t, d.publish(t, id, d.nodes[0]), codes.FailedPrecondition, "retry")
		if took := time.Since(began); took > 5*time.Second {
			t.Errorf("the publish took %s", took)
		}
		coretest.Must(t, d.control(http.MethodPatch, "/v0/disks/"+id, map[string]string{"state": "detached"}))
		coretest.Must(t, d.publish(t, id, d.nodes[0]))
	})
}

// A disk that is on no instance does not hold up an unpublish, whatever happens to it.
func TestUnpublishOfAChangingDisk(t *testing.T) {
	inDeferring(t, func(t *testing.T, d *deferring) {
		id := d.create(t, "v")
		coretest.Must(t, d.control(http.MethodPatch, "/v0/disks/"+id, map[string]string{"state": "maintenance"}))
		began := time.Now()
		d.unpublish(t, id, d.nodes[0])
		if took := time.Since(began); took > time.Second {
			t.Errorf("the unpublish took %s", took)
		}
	})
}

// A slot whose disk is detached soon is worth waiting for.
func TestFullInstanceWithADeferredDetach(t *testing.T) {
	inDeferring(t, func(t *testing.T, d *deferring) {
		var volumes []string
		for i := range 8 {
			volumes = append(volumes, d.create(t, fmt.Sprint("v", i)))
		}
		for _, id := range volumes[:7] { // the eighth disk is the boot disk
			coretest.Must(t, d.publish(t, id, d.nodes[0]))
		}
		wantRejected(t, d.publish(t, volumes[7], d.nodes[0]), codes.ResourceExhausted, "--max-disks is 8")
		d.unpublish(t, volumes[3], d.nodes[0])
		wantRejected(t, d.publish(t, volumes[7], d.nodes[0]), codes.FailedPrecondition, "in 1m0s (--detach-grace)")
		time.Sleep(grace + within)
		coretest.Must(t, d.publish(t, volumes[7], d.nodes[0]))
	})
}

// Disks whose unpublish may be an old one again make no room by themselves. The error names one, and how to detach it.
func TestFullInstanceWithUntimedDetaches(t *testing.T) {
	inDeferring(t, func(t *testing.T, d *deferring) {
		var volumes []string
		for i := range 8 {
			volumes = append(volumes, d.create(t, fmt.Sprint("v", i)))
		}
		for _, id := range volumes[:7] {
			coretest.Must(t, d.publish(t, id, d.nodes[0]))
			d.unpublish(t, id, d.nodes[0])
			coretest.Must(t, d.publish(t, id, d.nodes[0]))
		}
		time.Sleep(5 * time.Minute)
		for _, id := range volumes[:7] {
			d.unpublish(t, id, d.nodes[0])
		}
		for _, wait := range []time.Duration{0, 24 * time.Hour} {
			time.Sleep(wait)
			wantRejected(t, d.publish(t, volumes[7], d.nodes[0]), codes.FailedPrecondition, "oxide-csi volume detach")
		}
	})
}

// A deletion never detaches. It says when the volume can be deleted.
func TestDeleteWaitsForTheDeferredDetach(t *testing.T) {
	inDeferring(t, func(t *testing.T, d *deferring) {
		id := d.create(t, "v")
		coretest.Must(t, d.publish(t, id, d.nodes[0]))
		d.unpublish(t, id, d.nodes[0])
		_, err := d.service.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: id})
		wantRejected(t, err, codes.FailedPrecondition, "in 1m0s (--detach-grace)")
		d.wantHolder(t, id, d.nodes[0])
		time.Sleep(grace + within)
		_, err = d.service.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: id})
		coretest.Must(t, err)
		records, err := d.client.Records(t.Context())
		if err != nil || len(records) > 0 {
			t.Errorf("records %v, %v", records, err)
		}
	})
}

// A person who asks for the detach gets it at once.
func TestDetachNow(t *testing.T) {
	inDeferring(t, func(t *testing.T, d *deferring) {
		id := d.create(t, "v")
		coretest.Must(t, d.publish(t, id, d.nodes[0]))
		d.unpublish(t, id, d.nodes[0])
		ctx := metadata.NewIncomingContext(t.Context(), metadata.Pairs(rpc.MetadataDetachNow, "yes"))
		_, err := d.service.ControllerUnpublishVolume(
			ctx,
			&csi.ControllerUnpublishVolumeRequest{VolumeId: id, NodeId: d.nodes[0]},
		)
		coretest.Must(t, err)
		d.wantHolder(t, id, "")
		coretest.Must(t, d.publish(t, id, d.nodes[1]))
		time.Sleep(time.Hour)
		d.wantHolder(t, id, d.nodes[1])
	})
}

// A boot disk is never published, so an unpublish of it needs nothing. A record of its detach would stay for ever.
func TestUnpublishOfABootDisk(t *testing.T) {
	inDeferring(t, func(t *testing.T, d *deferring) {
		instance, err := d.SDK.InstanceView(t.Context(), oxide.InstanceViewParams{Instance: oxide.NameOrId(d.nodes[0])})
		coretest.Must(t, err)
		for _, state := range []string{"running", "stopped"} {
			d.runState(t, d.nodes[0], state)
			d.unpublish(t, instance.BootDiskId, d.nodes[0])
			records, err := d.client.Records(t.Context())
			if err != nil || len(records) > 0 {
				t.Errorf("%s: records %v, %v", state, records, err)
			}
		}
	})
}

// On a rack without hot-plug the disk stays attached until the instance stops. A publish elsewhere says so.
func TestDeferredDetachWithoutHotplug(t *testing.T) {
	inDeferring(t, func(t *testing.T, d *deferring) {
		id := d.create(t, "v")
		d.runState(t, d.nodes[0], "stopped")
		coretest.Must(t, d.publish(t, id, d.nodes[0]))
		d.runState(t, d.nodes[0], "running")
		d.unpublish(t, id, d.nodes[0])
		time.Sleep(time.Hour)
		d.wantHolder(t, id, d.nodes[0])
		wantRejected(t, d.publish(t, id, d.nodes[1]), codes.FailedPrecondition, "only while the instance is stopped")
		coretest.Must(t, d.publish(t, id, d.nodes[0]))
		d.unpublish(t, id, d.nodes[0])
		d.runState(t, d.nodes[0], "stopped")
		time.Sleep(within)
		d.wantHolder(t, id, "")
	}, func(o *simrack.Options) { o.Hotplug = false })
}

// A process that ended while it detached a disk holds a volume up for some minutes, and not for good.
func TestAbandonedDetachingRecordExpires(t *testing.T) {
	inDeferring(t, func(t *testing.T, d *deferring) {
		id := d.create(t, "v")
		coretest.Must(t, d.publish(t, id, d.nodes[0]))
		_, err := d.client.CreateRecord(
			t.Context(),
			record.Holds.Named(coretest.Cluster, id),
			fmt.Sprintf(`{"v":1,"cluster":%q,"disk":%q,"by":"ended"}`, coretest.Cluster, id),
		)
		coretest.Must(t, err)
		d.unpublish(t, id, d.nodes[0])
		time.Sleep(time.Minute)
		wantRejected(t, d.publish(t, id, d.nodes[0]), codes.FailedPrecondition, "retry")
		time.Sleep(2 * time.Minute)
		coretest.Must(t, d.publish(t, id, d.nodes[0]))
		d.wantHolder(t, id, d.nodes[0])
	})
}

// A publish on another node that meets the end of a detach attaches the disk.
func TestPublishElsewhereMeetsADetach(t *testing.T) {
	for _, end := range []time.Duration{0, 200 * time.Millisecond} { // of the detaching record, after the publish has read the disk
		t.Run(end.String(), func(t *testing.T) {
			inDeferring(t, func(t *testing.T, d *deferring) {
				var id string
				var armed atomic.Bool
				d.stop() // nothing else reads before
				d.before = func(req *http.Request) {
					if !strings.HasSuffix(req.URL.Path, "/anti-affinity-groups") || !armed.CompareAndSwap(true, false) {
						return
					}
					// Another controller carries the detach out. Its record is removed last.
					other := detach.New(d.client, detach.Options{
						Cluster: coretest.Cluster, Grace: grace, Log: slog.New(slog.DiscardHandler),
					})
					coretest.Must(t, other.Detach(req.Context(), id, d.nodes[0]))
					record, err := d.client.CreateRecord(
						req.Context(),
						record.Holds.Named(coretest.Cluster, id),
						fmt.Sprintf(`{"v":1,"cluster":%q,"disk":%q,"by":"other"}`, coretest.Cluster, id),
					)
					coretest.Must(t, err)
					time.AfterFunc(end, func() { coretest.Must(t, d.client.DeleteRecord(t.Context(), record.ID)) })
				}
				d.start(t)
				id = d.create(t, "v")
				coretest.Must(t, d.publish(t, id, d.nodes[0]))
				d.unpublish(t, id, d.nodes[0])
				d.stop()
				armed.Store(true)
				coretest.Must(t, d.publish(t, id, d.nodes[1]))
				d.wantHolder(t, id, d.nodes[1])
				if armed.Load() {
					t.Error("the publish read no records")
				}
			})
		})
	}
}

// A publish that meets the end of a detach attaches the disk again.
func TestPublishSeesAFinishedDetach(t *testing.T) {
	inDeferring(t, func(t *testing.T, d *deferring) {
		var id string
		var armed atomic.Bool // the controller's background tasks send requests too
		d.stop()              // nothing else reads before
		d.before = func(req *http.Request) {
			if strings.Contains(req.URL.Path, "/anti-affinity-groups/") && armed.CompareAndSwap(true, false) {
				_, err := d.SDK.InstanceDiskDetach(req.Context(), oxide.InstanceDiskDetachParams{
					Instance: oxide.NameOrId(d.nodes[0]), Body: &oxide.DiskPath{Disk: oxide.NameOrId(id)},
				})
				coretest.Must(t, err)
			}
		}
		d.start(t)
		id = d.create(t, "v")
		coretest.Must(t, d.publish(t, id, d.nodes[0]))
		armed.Store(true)
		coretest.Must(t, d.publish(t, id, d.nodes[0]))
		if armed.Load() {
			t.Fatal("the publish looked at no record")
		}
		d.wantHolder(t, id, d.nodes[0])
	})
}

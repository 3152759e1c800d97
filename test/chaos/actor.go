// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// actor is an orchestrator of one volume. It repeats a request after FAILED_PRECONDITION, and sends it to the
// controller that leads.
type actor struct {
	*plannedWorld
	random *rand.Rand
	number int
	made   int

	id string
	// disk is the name of the volume's disk. Unlike the disk's ID it stays when the volume grows.
	disk      string
	sizeBytes int64
	// last is the node where the volume was published last.
	last string
	// outcomeUnknown means that the last request may still be executed. breaksAt is the number of kills and changes of
	// leader at that time.
	outcomeUnknown bool
	// mayBeDeleted means that a deletion was requested while the volume's instance was being deleted.
	mayBeDeleted bool
	breaksAt     int64

	mu sync.Mutex
	// node is where the volume is published, from the successful publish until the unpublish is sent. times counts
	// publications.
	node  string
	times int
	// mayGoAt is when the disk may be detached although the volume is still mounted, or zero.
	mayGoAt time.Time
	history object
}

// publication is one time that a volume is published.
type publication struct {
	actor   *actor
	node    string
	times   int
	mayGoAt time.Time
}

// publications returns the current publications by the disk's name.
func publications(actors []*actor) map[string]publication {
	all := map[string]publication{}
	for _, a := range actors {
		a.mu.Lock()
		if a.node != "" {
			all[a.disk] = publication{a, a.node, a.times, a.mayGoAt}
		}
		a.mu.Unlock()
	}
	return all
}

func (p *plannedWorld) newActors() (actors []*actor) {
	for number := range p.workers {
		actors = append(
			actors,
			&actor{plannedWorld: p, number: number, random: rand.New(rand.NewPCG(p.seed, uint64(number)+1))},
		)
	}
	return actors
}

func (a *actor) historyText() string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return strings.Join(a.history.history, "\n    ")
}

func (a *actor) published(node string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.node = node
	a.times++
	a.mayGoAt = time.Time{}
}

// act makes random steps until end, and then publishes its volume once more.
func (a *actor) act(ctx context.Context, end time.Time) {
	for time.Now().Before(end) && ctx.Err() == nil {
		a.step(ctx)
		_ = pause(ctx, time.Duration(a.random.IntN(1000))*time.Millisecond) // the loop checks the context
	}
	for ctx.Err() == nil && a.id != "" && (a.node == "" || a.isDying(a.node)) {
		if a.node != "" {
			a.evict(ctx)
		}
		if node := a.randomNode(); !a.isDying(node) {
			a.results.count("publish after the last fault")
			a.publish(ctx, node, false)
		}
	}
}

func (a *actor) randomNode() string {
	return a.instanceOf(a.machines[a.random.IntN(len(a.machines))])
}

func (a *actor) step(ctx context.Context) {
	switch {
	case a.id == "":
		a.create(ctx)
	case a.isDying(a.node):
		a.evict(ctx)
	case a.node == "":
		switch a.random.IntN(10) {
		case 0:
			a.delete(ctx)
		case 1:
			a.checkShown(ctx)
		case 2, 3:
			if a.sizeBytes < maxBytes {
				a.expand(ctx)
			}
		case 4, 5, 6:
			if a.last != "" {
				a.results.count("publish on the same node again")
				a.publish(ctx, a.last, true)
			}
		default:
			a.results.count("publish anywhere")
			a.publish(ctx, a.randomNode(), true)
		}
	default:
		switch a.random.IntN(8) {
		case 0:
			a.results.count("publish twice")
			a.publish(ctx, a.node, false)
		case 1:
			a.refused(ctx)
		case 2:
			a.checkShown(ctx)
		default:
			a.unpublish(ctx, a.node)
		}
	}
}

func (a *actor) create(ctx context.Context) {
	a.made++
	name := fmt.Sprintf("planned-%d-%d", a.number, a.made)
	a.results.count("create")
	for ctx.Err() == nil {
		resp, err := send(ctx, a, csi.ControllerClient.CreateVolume, &csi.CreateVolumeRequest{
			Name:               name,
			CapacityRange:      &csi.CapacityRange{RequiredBytes: gib},
			VolumeCapabilities: []*csi.VolumeCapability{capability},
		})
		if err == nil {
			a.mu.Lock()
			a.id, a.last = resp.GetVolume().GetVolumeId(), ""
			a.disk, a.sizeBytes = diskname.ForVolume(simtest.ClusterID, name), gib
			a.mu.Unlock()
			return
		}
	}
}

// publish repeats until it succeeds. An impatient publish may stop at random and unpublish instead.
func (a *actor) publish(ctx context.Context, node string, impatient bool) {
	for ctx.Err() == nil {
		_, err := send(
			ctx,
			a,
			csi.ControllerClient.ControllerPublishVolume,
			&csi.ControllerPublishVolumeRequest{VolumeId: a.id, NodeId: node, VolumeCapability: capability},
		)
		if err == nil {
			a.last = node
			if a.node == "" {
				a.published(node)
			}
			return
		}
		if status.Code(err) == codes.NotFound && a.isDying(node) {
			a.evict(ctx)
			return
		}
		a.allow("publish", err, codes.FailedPrecondition, codes.ResourceExhausted, codes.Internal)
		if impatient && a.random.IntN(60) == 0 {
			a.results.count("publish cancelled")
			a.unpublish(ctx, node)
			return
		}
	}
}

// evict unpublishes a volume whose instance is deleted, from all instances: while the instance was being deleted, a
// publish on another one may have succeeded. Then the volume may also be deleted.
func (a *actor) evict(ctx context.Context) {
	a.results.count("unpublish from a deleted instance")
	a.last = ""
	deleted := a.mayBeDeleted
	a.unpublish(ctx, "")
	if deleted {
		a.delete(ctx)
	}
}

// unpublish repeats until it succeeds. Without a node it unpublishes from all.
func (a *actor) unpublish(ctx context.Context, node string) {
	a.published("")
	a.results.count("unpublish")
	for ctx.Err() == nil {
		_, err := send(
			ctx,
			a,
			csi.ControllerClient.ControllerUnpublishVolume,
			&csi.ControllerUnpublishVolumeRequest{VolumeId: a.id, NodeId: node},
		)
		if err == nil {
			if !a.mayBeDeleted {
				a.checkShown(ctx)
			}
			return
		}
		a.allow("unpublish", err, codes.Internal)
	}
}

// delete deletes the volume, unless its disk is still attached.
func (a *actor) delete(ctx context.Context) {
	a.results.count("delete")
	for ctx.Err() == nil {
		_, err := send(ctx, a, csi.ControllerClient.DeleteVolume, &csi.DeleteVolumeRequest{VolumeId: a.id})
		switch status.Code(err) {
		case codes.OK:
			a.mu.Lock()
			a.id, a.mayBeDeleted = "", false
			a.mu.Unlock()
			return
		case codes.FailedPrecondition:
			a.results.count("delete refused: still attached")
			return
		}
		a.allow("delete", err, codes.Internal)
	}
}

// expand makes the volume larger. It gives up if the disk is still attached or the rack has no room, and after some
// tries: then a publish takes back what the last try left.
func (a *actor) expand(ctx context.Context) {
	a.results.count("expand")
	want := a.sizeBytes + gib
	for ctx.Err() == nil {
		resp, err := send(ctx, a, csi.ControllerClient.ControllerExpandVolume, &csi.ControllerExpandVolumeRequest{
			VolumeId: a.id, CapacityRange: &csi.CapacityRange{RequiredBytes: want}, VolumeCapability: capability,
		})
		switch status.Code(err) {
		case codes.OK:
			if got := resp.GetCapacityBytes(); got != want {
				a.results.violation("expanded to %d bytes instead of %d: %s", got, want, a.historyText())
			}
			a.sizeBytes = want
			return
		case codes.FailedPrecondition:
			a.results.count("expand refused: still attached")
			return
		case codes.OutOfRange:
			return
		}
		a.allow("expand", err, codes.Internal)
		if a.random.IntN(20) == 0 {
			a.results.count("expand given up")
			return
		}
	}
}

// refused sends requests that must fail because the volume is published, unless its instance is deleted meanwhile.
func (a *actor) refused(ctx context.Context) {
	if other := a.randomNode(); other != a.node {
		_, err := send(
			ctx,
			a,
			csi.ControllerClient.ControllerPublishVolume,
			&csi.ControllerPublishVolumeRequest{VolumeId: a.id, NodeId: other, VolumeCapability: capability},
		)
		if err == nil && !a.isDying(a.node) {
			a.results.violation("published on %s while on %s: %s", other, a.node, a.historyText())
		}
	}
	_, err := send(ctx, a, csi.ControllerClient.DeleteVolume, &csi.DeleteVolumeRequest{VolumeId: a.id})
	a.mayBeDeleted = a.isDying(a.node)
	if err == nil && !a.mayBeDeleted {
		a.results.violation("deleted while on %s: %s", a.node, a.historyText())
	}
	a.results.count("refusals asked for")
}

// checkShown compares the published nodes that the plugin shows with the expected ones.
func (a *actor) checkShown(ctx context.Context) {
	if a.id == "" {
		return
	}
	var want []string
	if a.node != "" {
		want = []string{a.node}
	}
	resp, err := send(ctx, a, csi.ControllerClient.ControllerGetVolume, &csi.ControllerGetVolumeRequest{VolumeId: a.id})
	if a.isDying(a.node) {
		return // the disk of a deleted instance is detached
	}
	if err == nil {
		a.results.count("shown nodes compared")
		if got := resp.GetStatus().GetPublishedNodeIds(); !slices.Equal(got, want) {
			a.results.violation("ControllerGetVolume shows volume %s on %v, want %v: %s", a.id, got, want, a.historyText())
		}
	}
	list, err := send(ctx, a, csi.ControllerClient.ListVolumes, &csi.ListVolumesRequest{})
	if err != nil || a.isDying(a.node) {
		return
	}
	a.results.count("shown nodes compared")
	i := slices.IndexFunc(
		list.GetEntries(),
		func(e *csi.ListVolumesResponse_Entry) bool { return e.GetVolume().GetVolumeId() == a.id },
	)
	if i < 0 {
		a.results.violation("ListVolumes has no volume %s: %s", a.id, a.historyText())
	} else if got := list.GetEntries()[i].GetStatus().GetPublishedNodeIds(); !slices.Equal(got, want) {
		a.results.violation("ListVolumes shows volume %s on %v, want %v: %s", a.id, got, want, a.historyText())
	}
}

// allow reports a code that the request must not get.
func (a *actor) allow(doing string, err error, codes ...codes.Code) {
	if !isUnknown(err) && !slices.Contains(slices.Concat(codes, accessCodes), status.Code(err)) {
		a.results.violation("%s: unexpected code %v: %s", doing, err, a.historyText())
	}
}

// send sends a request to the controller that leads, and pauses after an error. If the outcome of the last request is
// unknown and the leader has changed or was started again, send first waits until the rack has executed that request.
// A replica that becomes leader has the same time, in which the old lease ends.
func send[Request, Response proto.Message](
	ctx context.Context,
	a *actor,
	call func(csi.ControllerClient, context.Context, Request, ...grpc.CallOption) (Response, error),
	req Request,
) (Response, error) {
	var zero Response
	if a.outcomeUnknown && a.breaks.Load() != a.breaksAt {
		if err := pause(ctx, lateness); err != nil {
			return zero, err
		}
		a.outcomeUnknown = false
	}
	if !a.outcomeUnknown {
		a.breaksAt = a.breaks.Load()
	}
	deadline := 10 * time.Second
	if a.random.IntN(10) == 0 {
		deadline = 5*time.Millisecond + time.Duration(a.random.IntN(400))*time.Millisecond
	}
	limited, cancel := context.WithTimeout(ctx, deadline)
	defer cancel()
	resp, err := call(a.leadingController(), limited, req)
	name := strings.TrimSuffix(string(req.ProtoReflect().Descriptor().Name()), "Request")
	a.results.answered(name, status.Code(err))
	a.mu.Lock()
	a.history.remember("%s %s", name, outcome(err))
	a.mu.Unlock()
	// The old controller may still execute a request that was sent before the kill or change.
	a.outcomeUnknown = isUnknown(err) || (err == nil && a.outcomeUnknown && a.breaks.Load() != a.breaksAt)
	if err != nil {
		_ = pause(ctx, time.Duration(50+a.random.IntN(200))*time.Millisecond) // the caller checks the context
	}
	return resp, err
}

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
)

// actor is an orchestrator as far as one volume goes: it repeats what is refused with FAILED_PRECONDITION, and asks whichever
// controller leads.
type actor struct {
	*plannedWorld
	random *rand.Rand
	number int
	made   int

	id string
	// last is where it was published last.
	last string
	// unclear says that what was asked last may still be done, and breaks how many kills and changes there had been then.
	unclear  bool
	breaksAt int64

	mu sync.Mutex
	// node is where the volume is published: from the answer OK until the unpublish is sent. times counts publications.
	node    string
	times   int
	history thing
}

// publication is one time that a volume is published.
type publication struct {
	actor *actor
	node  string
	times int
}

// publications are those that stand at this moment, by disk.
func publications(actors []*actor) map[string]publication {
	all := map[string]publication{}
	for _, a := range actors {
		a.mu.Lock()
		if a.node != "" {
			all[a.id] = publication{a, a.node, a.times}
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

func (a *actor) story() string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return strings.Join(a.history.history, "\n    ")
}

func (a *actor) published(node string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.node = node
	a.times++
}

// act leads volumes through their lives until the end, and then publishes the last one once more.
func (a *actor) act(ctx context.Context, end time.Time) {
	for time.Now().Before(end) && ctx.Err() == nil {
		a.step(ctx)
		_ = pause(ctx, time.Duration(a.random.IntN(1000))*time.Millisecond) // the loop looks at the context
	}
	if a.id != "" && a.node == "" {
		a.books.count("publish after the last fault")
		a.publish(ctx, a.somewhere(), false)
	}
}

func (a *actor) somewhere() string {
	return a.instances[a.random.IntN(len(a.instances))].ID
}

func (a *actor) step(ctx context.Context) {
	switch {
	case a.id == "":
		a.create(ctx)
	case a.node == "":
		switch a.random.IntN(8) {
		case 0:
			a.delete(ctx)
		case 1:
			a.look(ctx)
		case 2, 3, 4:
			if a.last != "" {
				a.books.count("publish on the same node again")
				a.publish(ctx, a.last, true)
			}
		default:
			a.books.count("publish anywhere")
			a.publish(ctx, a.somewhere(), true)
		}
	default:
		switch a.random.IntN(8) {
		case 0:
			a.books.count("publish twice")
			a.publish(ctx, a.node, false)
		case 1:
			a.refused(ctx)
		case 2:
			a.look(ctx)
		default:
			a.unpublish(ctx, a.node)
		}
	}
}

func (a *actor) create(ctx context.Context) {
	a.made++
	name := fmt.Sprintf("planned-%d-%d", a.number, a.made)
	a.books.count("create")
	for ctx.Err() == nil {
		resp, err := send(ctx, a, csi.ControllerClient.CreateVolume, &csi.CreateVolumeRequest{
			Name:               name,
			CapacityRange:      &csi.CapacityRange{RequiredBytes: gib},
			VolumeCapabilities: []*csi.VolumeCapability{capability},
		})
		if err == nil {
			a.mu.Lock()
			a.id, a.last = resp.GetVolume().GetVolumeId(), ""
			a.mu.Unlock()
			return
		}
	}
}

// publish asks until it is told OK; it may lose patience, and then takes the wish back. It never does at the end.
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
		a.allow("publish", err, codes.FailedPrecondition, codes.ResourceExhausted, codes.Internal)
		if impatient && a.random.IntN(60) == 0 {
			a.books.count("wish taken back")
			a.unpublish(ctx, node)
			return
		}
	}
}

// unpublish asks until it is told OK.
func (a *actor) unpublish(ctx context.Context, node string) {
	a.published("")
	a.books.count("unpublish")
	for ctx.Err() == nil {
		_, err := send(
			ctx,
			a,
			csi.ControllerClient.ControllerUnpublishVolume,
			&csi.ControllerUnpublishVolumeRequest{VolumeId: a.id, NodeId: node},
		)
		if err == nil {
			a.look(ctx)
			return
		}
		a.allow("unpublish", err, codes.Internal)
	}
}

// delete deletes the volume, unless an instance still has its disk.
func (a *actor) delete(ctx context.Context) {
	a.books.count("delete")
	for ctx.Err() == nil {
		_, err := send(ctx, a, csi.ControllerClient.DeleteVolume, &csi.DeleteVolumeRequest{VolumeId: a.id})
		switch status.Code(err) {
		case codes.OK:
			a.mu.Lock()
			a.id = ""
			a.mu.Unlock()
			return
		case codes.FailedPrecondition:
			a.books.count("delete refused: still attached")
			return
		}
		a.allow("delete", err, codes.Internal)
	}
}

// refused asks for what must not be done with a published volume.
func (a *actor) refused(ctx context.Context) {
	if other := a.somewhere(); other != a.node {
		_, err := send(
			ctx,
			a,
			csi.ControllerClient.ControllerPublishVolume,
			&csi.ControllerPublishVolumeRequest{VolumeId: a.id, NodeId: other, VolumeCapability: capability},
		)
		if err == nil {
			a.books.violation("published on %s while on %s: %s", other, a.node, a.story())
		}
	}
	_, err := send(ctx, a, csi.ControllerClient.DeleteVolume, &csi.DeleteVolumeRequest{VolumeId: a.id})
	if err == nil {
		a.books.violation("deleted while on %s: %s", a.node, a.story())
	}
	a.books.count("refusals asked for")
}

// look compares what is shown of the volume with what the actor was told.
func (a *actor) look(ctx context.Context) {
	if a.id == "" {
		return
	}
	var want []string
	if a.node != "" {
		want = []string{a.node}
	}
	resp, err := send(ctx, a, csi.ControllerClient.ControllerGetVolume, &csi.ControllerGetVolumeRequest{VolumeId: a.id})
	if err == nil {
		a.books.count("shown nodes compared")
		if got := resp.GetStatus().GetPublishedNodeIds(); !slices.Equal(got, want) {
			a.books.violation("ControllerGetVolume shows volume %s on %v, want %v: %s", a.id, got, want, a.story())
		}
	}
	list, err := send(ctx, a, csi.ControllerClient.ListVolumes, &csi.ListVolumesRequest{})
	if err != nil {
		return
	}
	a.books.count("shown nodes compared")
	i := slices.IndexFunc(
		list.GetEntries(),
		func(e *csi.ListVolumesResponse_Entry) bool { return e.GetVolume().GetVolumeId() == a.id },
	)
	if i < 0 {
		a.books.violation("ListVolumes has no volume %s: %s", a.id, a.story())
	} else if got := list.GetEntries()[i].GetStatus().GetPublishedNodeIds(); !slices.Equal(got, want) {
		a.books.violation("ListVolumes shows volume %s on %v, want %v: %s", a.id, got, want, a.story())
	}
}

// allow reports a code that this request may not get.
func (a *actor) allow(doing string, err error, codes ...codes.Code) {
	if !isUnknown(err) && !slices.Contains(codes, status.Code(err)) {
		a.books.violation("%s: odd answer %v: %s", doing, err, a.story())
	}
}

// send asks the controller that leads, and lets a while pass after an answer that was no OK. Where the last answer was unclear
// and another controller is asked now, or the same one in its next life, what the first one had begun is waited for: a replica
// that leads anew has the time in which the old lease ended.
func send[Request, Response proto.Message](
	ctx context.Context,
	a *actor,
	call func(csi.ControllerClient, context.Context, Request, ...grpc.CallOption) (Response, error),
	req Request,
) (Response, error) {
	var zero Response
	if a.unclear && a.breaks.Load() != a.breaksAt {
		if err := pause(ctx, lateness); err != nil {
			return zero, err
		}
		a.unclear = false
	}
	if !a.unclear {
		a.breaksAt = a.breaks.Load()
	}
	patience := 10 * time.Second
	if a.random.IntN(10) == 0 {
		patience = 5*time.Millisecond + time.Duration(a.random.IntN(400))*time.Millisecond
	}
	limited, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	resp, err := call(a.leadingController(), limited, req)
	name := strings.TrimSuffix(string(req.ProtoReflect().Descriptor().Name()), "Request")
	a.books.answered(name, status.Code(err))
	a.mu.Lock()
	a.history.remember("%s %s", name, outcome(err))
	a.mu.Unlock()
	// What was asked before a kill or change may be done by the old one even now.
	a.unclear = isUnknown(err) || (err == nil && a.unclear && a.breaks.Load() != a.breaksAt)
	if err != nil {
		_ = pause(ctx, time.Duration(50+a.random.IntN(200))*time.Millisecond) // the caller looks at the context
	}
	return resp, err
}

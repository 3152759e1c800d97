// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// worker is a client with its own volumes and snapshots.
type worker struct {
	*world
	number    int
	random    *rand.Rand
	nodes     []simtest.Instance
	volumes   []*volume
	snapshots []*snapshot
	// volumesPast and snapshotsPast were deleted, or their creation finally failed.
	volumesPast   []*volume
	snapshotsPast []*snapshot
	// made is the number of names that the worker has used.
	made int
}

// volume is a volume of one worker.
type volume struct {
	object
	request *csi.CreateVolumeRequest
	answer  *csi.Volume
	// node is where the volume is published, according to the plugin's answers. Nil means nowhere.
	node *simtest.Instance
	// diskName comes from the publish context.
	diskName string
	// mayHaveTwo means that there was a kill or a hand-over, or a request to the wrong controller without an answer, while
	// the volume was requested on the other rack. Then an older request can make a second disk.
	mayHaveTwo bool
}

// snapshot is a snapshot of one worker.
type snapshot struct {
	object
	request *csi.CreateSnapshotRequest
	answer  *csi.Snapshot
}

func (w *world) newWorkers() (workers []*worker) {
	var instances []simtest.Instance
	for _, name := range nodes {
		instances = append(instances, w.sim.Instance(name))
	}
	for number := range w.workers {
		workers = append(workers, &worker{
			world: w, number: number, random: rand.New(rand.NewPCG(w.seed, uint64(number)+1)), nodes: instances,
		})
	}
	return workers
}

// Limits of what a worker has at a time.
const (
	maxVolumes   = 4
	maxSnapshots = 3
)

// work makes random steps until end. It finishes the step in progress.
func (w *worker) work(ctx context.Context, end time.Time) {
	for time.Now().Before(end) && ctx.Err() == nil {
		did, err := w.step(ctx)
		if err != nil && ctx.Err() == nil {
			w.results.violation("worker %d: %v", w.number, err)
		}
		if !did {
			if pause(ctx, 10*time.Millisecond) != nil {
				return
			}
		}
	}
}

// wantCode reports a violation if the request must not get this code. The rack may refuse access to every request, but
// after a create that is no final answer: an earlier request may have made the object.
func (w *worker) wantCode(t *object, doing string, err error, allowed ...codes.Code) {
	if doing != creating && doing != snapshotting {
		allowed = append(allowed, accessCodes...)
	}
	if err == nil || isUnknown(err) || slices.Contains(allowed, status.Code(err)) || errors.Is(err, context.Canceled) ||
		errors.Is(err, context.DeadlineExceeded) {
		return
	}
	if !t.reported {
		t.reported = true
		w.results.violation("%s: unexpected code: %s", doing, t.historyText())
	}
}

// step makes one random step. It returns false if the chosen step is impossible now.
func (w *worker) step(ctx context.Context) (bool, error) {
	if w.random.IntN(8) == 0 || len(w.volumes) == 0 {
		if len(w.volumes) >= maxVolumes {
			return false, nil
		}
		w.results.count("create")
		return true, w.create(ctx, nil)
	}
	if len(w.snapshots) > 0 && w.random.IntN(5) == 0 {
		return w.stepSnapshot(ctx, w.snapshots[w.random.IntN(len(w.snapshots))])
	}
	v := w.volumes[w.random.IntN(len(w.volumes))]
	if time.Now().Before(w.orphansDoneAt(&v.object)) {
		return false, nil
	}
	steps := w.stepsDetached()
	if v.node != nil {
		steps = w.stepsPublished()
	}
	s := steps[w.random.IntN(len(steps))]
	if !s.can(v) {
		return false, nil
	}
	w.results.count(s.name)
	return true, s.do(ctx, v)
}

// step is one kind of action on a volume.
type step struct {
	name string
	can  func(*volume) bool
	do   func(context.Context, *volume) error
}

func always(*volume) bool { return true }

func (w *worker) stepsDetached() []step {
	return append(w.stepsAny(),
		step{"publish", always, w.publish},
		step{"publish", always, w.publish},
		step{"publish", always, w.publish},
		step{"unpublish again", always, w.unpublishAgain},
		step{"expand", func(v *volume) bool { return v.sizeBytes < maxBytes }, w.expand},
		step{"delete volume", always, w.deleteVolume},
	)
}

func (w *worker) stepsPublished() []step {
	withData := func(*volume) bool { return w.guests }
	return append(w.stepsAny(),
		step{"write", withData, w.fill},
		step{"compare", withData, w.check},
		step{"move", always, w.move},
		step{"move", always, w.move},
		step{"publish again", always, w.publishAgain},
		step{"unpublish", always, w.unpublish},
		step{"unpublish", always, w.unpublish},
		step{"unpublish elsewhere", always, w.unpublishElsewhere},
		step{"publish elsewhere", always, w.publishElsewhere},
		step{"delete published volume", always, w.deletePublished},
		step{"expand published volume", always, w.expandPublished},
	)
}

func (w *worker) stepsAny() []step {
	room := func(*volume) bool { return len(w.volumes) < maxVolumes }
	can := func(rpc csi.ControllerServiceCapability_RPC_Type, also func(*volume) bool) func(*volume) bool {
		return func(v *volume) bool { return w.advertised[rpc] && also(v) }
	}
	return []step{
		{"create again", always, w.createAgain},
		{
			"create with a moved requirement",
			func(v *volume) bool { return v.request.VolumeContentSource == nil },
			w.createElsewhere,
		},
		{"clone", can(csi.ControllerServiceCapability_RPC_CLONE_VOLUME, room), w.clone},
		{
			"snapshot",
			can(
				csi.ControllerServiceCapability_RPC_CREATE_DELETE_SNAPSHOT,
				func(*volume) bool { return len(w.snapshots) < maxSnapshots },
			),
			w.snapshot,
		},
		{"list volumes", can(csi.ControllerServiceCapability_RPC_LIST_VOLUMES, always), w.listVolumes},
		{"get volume", can(csi.ControllerServiceCapability_RPC_GET_VOLUME, always), w.getVolume},
	}
}

func (w *worker) newName(kind string) string {
	w.made++
	return fmt.Sprintf("%s-%d-%d", kind, w.number, w.made)
}

func (w *worker) node() *simtest.Instance { return &w.nodes[w.random.IntN(len(w.nodes))] }

// nodeOtherThan returns a random node that is not this one.
func (w *worker) nodeOtherThan(not *simtest.Instance) *simtest.Instance {
	for {
		if node := w.node(); node.ID != not.ID {
			return node
		}
	}
}

var capability = &csi.VolumeCapability{
	AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
	AccessType: &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}},
}

// origin is the source of a volume.
type origin struct {
	source    *csi.VolumeContentSource
	sizeBytes int64
	content   content
}

// create creates a volume, blank or from an origin.
func (w *worker) create(ctx context.Context, from *origin) error {
	v := &volume{object: object{name: w.newName("volume"), fate: wanted, sizeBytes: (1 + w.random.Int64N(2)) * gib}}
	v.request = &csi.CreateVolumeRequest{
		Name:                      v.name,
		VolumeCapabilities:        []*csi.VolumeCapability{capability},
		AccessibilityRequirements: requireRack(simtest.DefaultRack),
		Parameters: map[string]string{
			"csi.storage.k8s.io/pvc/name":      v.name,
			"csi.storage.k8s.io/pvc/namespace": "chaos",
		},
	}
	if from != nil {
		v.sizeBytes = from.sizeBytes + w.random.Int64N(2)*gib
		v.content = from.content
		v.request.VolumeContentSource = from.source
	}
	v.request.CapacityRange = &csi.CapacityRange{RequiredBytes: v.sizeBytes - w.random.Int64N(2)*(gib/2)}
	w.volumes = append(w.volumes, v)
	return w.finishCreate(ctx, v)
}

// finishCreate repeats a create until the outcome is known. After an error it tries again, or drops the volume for
// ever, as external-provisioner does when the claim was deleted meanwhile.
func (w *worker) finishCreate(ctx context.Context, v *volume) error {
	for {
		resp, err := ask(ctx, w, &v.object, w.CreateVolume, v.request, func() bool { return w.mayMove(v) })
		switch {
		case err == nil:
			return errors.Join(w.recordVolume(v, resp.GetVolume()), w.prove(ctx, v))
		case ctx.Err() != nil:
			return ctx.Err()
		case isUnknown(err):
			if err := w.createMoved(ctx, v); err != nil {
				return err
			}
			continue
		}
		w.wantCode(&v.object, creating, err, codes.ResourceExhausted, codes.Internal)
		if w.acceptsError(&v.object) {
			v.fate = failed
			w.dropVolume(v)
			return nil
		}
		if err := pause(ctx, maxBackoff); err != nil {
			return err
		}
	}
}

// acceptsError decides at random whether the worker accepts an error as final. It must not accept it while the rack may
// still execute a request of a killed plugin, because no plugin can know of that request.
func (w *worker) acceptsError(t *object) bool {
	return w.random.IntN(2) == 0 && !time.Now().Before(w.orphansDoneAt(t))
}

// recordVolume records the answer to a create, and compares it with an earlier answer.
func (w *worker) recordVolume(v *volume, answer *csi.Volume) error {
	if v.fate == wanted {
		v.fate, v.id, v.answer = lives, answer.GetVolumeId(), answer
		if answer.GetCapacityBytes() != v.sizeBytes || answer.GetVolumeId() == "" {
			return fmt.Errorf("create of %d bytes answered %v: %s", v.sizeBytes, answer, v.historyText())
		}
		return nil
	}
	if answer.GetVolumeId() != v.id || answer.GetCapacityBytes() != v.sizeBytes {
		return fmt.Errorf("create answered %v, and %v before: %s", answer, v.answer, v.historyText())
	}
	return nil
}

// createAgain repeats a create that succeeded before.
func (w *worker) createAgain(ctx context.Context, v *volume) error {
	resp, err := ask(ctx, w, &v.object, w.CreateVolume, v.request, nil)
	if err != nil {
		w.wantCode(&v.object, "create again", err)
		return nil
	}
	return errors.Join(w.recordVolume(v, resp.GetVolume()), w.prove(ctx, v))
}

func (w *worker) dropVolume(v *volume) {
	w.volumes = slices.DeleteFunc(w.volumes, func(other *volume) bool { return other == v })
	w.volumesPast = append(w.volumesPast, v)
}

// publish publishes a volume on a random node and compares its data there.
func (w *worker) publish(ctx context.Context, v *volume) error { return w.publishOn(ctx, v, w.node()) }

// publishOn publishes until the outcome is known. After an error the worker unpublishes. So does external-attacher: it
// detaches a volume that it failed to attach and that no longer should be attached.
func (w *worker) publishOn(ctx context.Context, v *volume, node *simtest.Instance) error {
	begun := time.Now()
	resp, err := ask(
		ctx,
		w,
		&v.object,
		w.ControllerPublishVolume,
		publishRequest(v, node),
		func() bool { return w.random.IntN(8) == 0 },
	)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err != nil {
		w.wantCode(&v.object, "publish", err, w.refusals(node, begun, codes.ResourceExhausted)...)
		return w.unpublishFrom(ctx, v, node)
	}
	v.node, v.diskName = node, resp.GetPublishContext()["diskName"]
	return errors.Join(w.prove(ctx, v), w.check(ctx, v))
}

// refusals returns the codes that a change of an instance's disks may get, including also.
func (w *worker) refusals(node *simtest.Instance, since time.Time, also ...codes.Code) []codes.Code {
	if w.wasDown(node, since) {
		also = append(also, codes.FailedPrecondition)
	}
	return append(also, codes.Internal)
}

func publishRequest(v *volume, node *simtest.Instance) *csi.ControllerPublishVolumeRequest {
	return &csi.ControllerPublishVolumeRequest{
		VolumeId:         v.id,
		NodeId:           node.ID,
		VolumeCapability: capability,
		VolumeContext:    v.answer.GetVolumeContext(),
	}
}

// publishAgain repeats a publish that succeeded before.
func (w *worker) publishAgain(ctx context.Context, v *volume) error {
	if _, err := ask(ctx, w, &v.object, w.ControllerPublishVolume, publishRequest(v, v.node), nil); err != nil {
		w.wantCode(&v.object, "publish again", err, codes.Internal)
		return nil
	}
	return errors.Join(w.prove(ctx, v), w.check(ctx, v))
}

// unpublish unpublishes a volume from its node.
func (w *worker) unpublish(ctx context.Context, v *volume) error {
	return w.unpublishFrom(ctx, v, v.node)
}

// unpublishFrom repeats until it succeeds, as external-attacher does. Sometimes it leaves out the node ID, as the
// specification allows.
func (w *worker) unpublishFrom(ctx context.Context, v *volume, node *simtest.Instance) error {
	if err := pause(ctx, time.Until(w.orphansDoneAt(&v.object))); err != nil {
		return err
	}
	request := &csi.ControllerUnpublishVolumeRequest{VolumeId: v.id, NodeId: node.ID}
	if w.random.IntN(10) == 0 {
		request.NodeId = ""
	}
	for {
		begun := time.Now()
		_, err := ask(ctx, w, &v.object, w.ControllerUnpublishVolume, request, nil)
		if err == nil {
			v.node = nil
			return w.prove(ctx, v)
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		w.wantCode(&v.object, "unpublish", err, w.refusals(node, begun)...)
		if err := pause(ctx, maxBackoff); err != nil {
			return err
		}
	}
}

// unpublishAgain unpublishes a volume that is not published.
func (w *worker) unpublishAgain(ctx context.Context, v *volume) error {
	return w.unpublishFrom(ctx, v, w.node())
}

// move publishes a volume on another node.
func (w *worker) move(ctx context.Context, v *volume) error {
	to := w.nodeOtherThan(v.node)
	if err := w.unpublish(ctx, v); err != nil {
		return err
	}
	if err := pause(ctx, time.Until(w.orphansDoneAt(&v.object))); err != nil {
		return err
	}
	return w.publishOn(ctx, v, to)
}

// unpublishElsewhere unpublishes from a node that does not hold the volume. It must succeed and change nothing.
func (w *worker) unpublishElsewhere(ctx context.Context, v *volume) error {
	request := &csi.ControllerUnpublishVolumeRequest{VolumeId: v.id, NodeId: w.nodeOtherThan(v.node).ID}
	if _, err := ask(ctx, w, &v.object, w.ControllerUnpublishVolume, request, nil); err != nil {
		w.wantCode(&v.object, "unpublish elsewhere", err, codes.Internal)
		return nil
	}
	return w.check(ctx, v)
}

// publishElsewhere tries to publish a volume that another node holds. It must fail.
func (w *worker) publishElsewhere(ctx context.Context, v *volume) error {
	_, err := ask(ctx, w, &v.object, w.ControllerPublishVolume, publishRequest(v, w.nodeOtherThan(v.node)), nil)
	if err == nil {
		return fmt.Errorf("published on two nodes: %s", v.historyText())
	}
	w.wantCode(&v.object, "publish elsewhere", err, codes.FailedPrecondition, codes.Internal)
	return w.check(ctx, v)
}

// deletePublished tries to delete a published volume. It must fail.
func (w *worker) deletePublished(ctx context.Context, v *volume) error {
	_, err := ask(ctx, w, &v.object, w.DeleteVolume, &csi.DeleteVolumeRequest{VolumeId: v.id}, nil)
	if err == nil {
		return fmt.Errorf("deleted while it is published: %s", v.historyText())
	}
	w.wantCode(&v.object, "delete while published", err, codes.FailedPrecondition, codes.Internal)
	return w.check(ctx, v)
}

// deleteVolume repeats until it succeeds.
func (w *worker) deleteVolume(ctx context.Context, v *volume) error {
	for {
		_, err := ask(ctx, w, &v.object, w.DeleteVolume, &csi.DeleteVolumeRequest{VolumeId: v.id}, nil)
		if err == nil {
			v.fate = gone
			w.dropVolume(v)
			return w.prove(ctx, v)
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		w.wantCode(&v.object, "delete", err, codes.Internal)
		if err := pause(ctx, maxBackoff); err != nil {
			return err
		}
	}
}

// fill writes new data to a published volume.
func (w *worker) fill(_ context.Context, v *volume) error {
	c, err := w.write(*v.node, v.diskName, w.random.Uint64())
	if errors.Is(err, errGuestOff) {
		return nil
	} else if err != nil {
		return fmt.Errorf("write: %w: %s", err, v.historyText())
	}
	v.remember("wrote %x on %s", c.seed, v.node.Name)
	v.content = c
	return nil
}

// check compares the data of a published volume with the expected data.
func (w *worker) check(_ context.Context, v *volume) error {
	if v.node == nil || !w.guests {
		return nil
	}
	w.results.count("data compared")
	if err := w.compare(*v.node, v.diskName, v.content); err != nil && !errors.Is(err, errGuestOff) {
		return fmt.Errorf("compare with %x on %s: %w: %s", v.content.seed, v.node.Name, err, v.historyText())
	}
	return nil
}

// cleanUp compares the data of all volumes and snapshots once more, and deletes everything.
func (w *worker) cleanUp(ctx context.Context) {
	for _, s := range slices.Clone(w.snapshots) {
		w.must(w.restore(ctx, s))
		w.must(w.deleteSnapshot(ctx, s))
	}
	for _, v := range slices.Clone(w.volumes) {
		if v.fate != lives {
			continue
		}
		if v.node != nil {
			w.must(w.move(ctx, v))
		} else {
			w.must(w.publish(ctx, v))
		}
		if v.node != nil {
			w.must(w.unpublish(ctx, v))
		}
		w.must(w.deleteVolume(ctx, v))
	}
}

func (w *worker) must(err error) {
	if err != nil && !errors.Is(err, context.DeadlineExceeded) {
		w.results.violation("worker %d, at the end: %v", w.number, err)
	}
}

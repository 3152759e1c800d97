// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package main

import (
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
)

// nomadGrace is the grace period of the controllers. Many jobs return within it, and many do not.
const nomadGrace = 3 * time.Second

// longestMove is how long a job may wait for its volume on another node after the last fault. The rack may not have
// answered a detach: then no publish relies on the disk for two minutes (docs/explanation/nomad.md).
const longestMove = 3 * time.Minute

// claimsName is the name of the folder of [claims] in the world's folder.
const claimsName = "claims"

// claims is a folder that has a file for each volume that a job claims. The file has the ID of the job's node. The
// folder stands for Nomad: with it the controllers find out that a job has moved although no unpublish came, and that a
// volume is in use although an unpublish came.
type claims string

// Moved implements [orchestrator.Claims].
func (c claims) Moved(_ context.Context, volumeID, fromNode, toNode string) (bool, error) {
	node, err := os.ReadFile(c.file(volumeID))
	if errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	return err == nil && string(node) == toNode && fromNode != toNode, err
}

// Claimed implements [orchestrator.Claims].
func (c claims) Claimed(_ context.Context, nodeID string, volumeIDs []string) (map[string]string, error) {
	claimed := map[string]string{}
	for _, volumeID := range volumeIDs {
		node, err := os.ReadFile(c.file(volumeID))
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return nil, err
		}
		if err == nil && string(node) == nodeID {
			claimed[volumeID] = "the job of the volume"
		}
	}
	return claimed, nil
}

// Registered implements [orchestrator.Claims]. Each volume has one ID here.
func (claims) Registered(context.Context, string) ([]string, error) { return nil, nil }

func (c claims) file(volumeID string) string { return filepath.Join(string(c), volumeID) }

// set makes a node the only one that may use a volume.
func (c claims) set(volumeID, node string) error {
	next := c.file(volumeID) + ".new"
	if err := os.WriteFile(next, []byte(node), 0o600); err != nil {
		return err
	}
	return os.Rename(next, c.file(volumeID))
}

// release ends the claim on a volume.
func (c claims) release(volumeID string) error {
	if err := os.Remove(c.file(volumeID)); !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

// job is a job of Nomad with one volume. Its node, and that of its [publication], is where the volume is mounted.
type job struct {
	*actor
	claims claims
	// unpublished are the nodes from which the volume was unpublished. Nomad may repeat each of these requests.
	unpublished map[string]bool
}

// runNomad runs the campaign of Nomad's habits.
func runNomad(ctx context.Context, o options) (err error) {
	begun := time.Now()
	base, err := newWorld(o)
	if err != nil {
		return err
	}
	kind := forNomad
	if o.restarts {
		kind = forNomadRestarts
	}
	p := newPlannedWorld(base, kind, 1)
	b := newResults()
	defer func() { err = errors.Join(err, p.end(o.keep || err != nil)) }()
	if err := errors.Join(os.Mkdir(p.path(claimsName), 0o755), p.begin(ctx, b)); err != nil {
		return err
	}
	end := time.Now().Add(o.duration)
	ctx, cancel := context.WithDeadline(ctx, end.Add(plannedSettleTime))
	defer cancel()
	var jobs []*job
	actors := p.newActors()
	for _, a := range actors {
		jobs = append(jobs, &job{actor: a, claims: claims(p.path(claimsName)), unpublished: map[string]bool{}})
	}
	var acting, watching sync.WaitGroup
	for _, j := range jobs {
		acting.Go(func() { j.act(ctx, end) })
	}
	watch, stopWatching := context.WithCancel(ctx)
	watching.Go(func() { p.watchMounted(watch, actors) })
	defer func() {
		stopWatching()
		watching.Wait()
	}()
	if err := p.causeNomadTrouble(ctx, end); err != nil {
		cancel()
		acting.Wait()
		return err
	}
	acting.Wait()
	stopWatching()
	watching.Wait()
	p.deleteVolumes(ctx, actors)
	if left, err := p.control.Leftovers(ctx); err != nil || left.Disks > 0 {
		b.violation("left on the rack: %+v, %v", left, err)
	}
	if err := ctx.Err(); err != nil {
		b.violation("interrupted, or not at an end %s after the last fault: %v", plannedSettleTime, err)
	}
	if err := errors.Join(p.auditLog(plannerLog, b), p.auditLog(rackLog, b)); err != nil {
		return err
	}
	return b.report(p.world, time.Since(begun),
		"audit: every mounted volume stayed attached, every volume moved in time, and all could be deleted")
}

// causeNomadTrouble kills the controller and the rack at random until the end.
func (p *plannedWorld) causeNomadTrouble(ctx context.Context, end time.Time) error {
	for {
		wait := time.Until(end)
		if p.kills > 0 {
			wait = min(wait, time.Duration(p.random.ExpFloat64()*float64(p.kills)))
		}
		if err := pause(ctx, wait); err != nil {
			return nil // interrupted, which runNomad reports
		}
		if !time.Now().Before(end) {
			return p.stopFaults(ctx)
		}
		var err error
		if p.random.IntN(4) == 0 {
			err = p.killRack(ctx)
		} else {
			err = p.killController(ctx, 0)
		}
		if err != nil {
			return err
		}
	}
}

// watchMounted checks the rack until the context ends: each volume that is mounted is attached there.
func (p *plannedWorld) watchMounted(ctx context.Context, actors []*actor) {
	reported := map[string]bool{}
	for pause(ctx, 20*time.Millisecond) == nil {
		before := publications(actors)
		list, err := p.control.ListInstances(ctx)
		if err != nil {
			continue // the rack is dead
		}
		p.results.count("check of the whole rack")
		p.checkAttached(list, before, publications(actors), reported)
	}
}

// act runs the job again and again until end. Then it moves the job to another node once more.
func (j *job) act(ctx context.Context, end time.Time) {
	for time.Now().Before(end) && ctx.Err() == nil {
		j.step(ctx)
		_ = pause(ctx, time.Duration(j.random.IntN(1500))*time.Millisecond) // the loop checks the context
	}
	if j.id == "" {
		return
	}
	if j.node != "" {
		j.stopInOrder(ctx)
	}
	j.results.count("move after the last fault")
	begun := time.Now()
	j.run(ctx, j.otherNode(), false)
	if took := time.Since(begun); took > longestMove {
		j.results.violation(
			"volume %s moved only %s after the last fault: %s",
			j.id,
			took.Round(time.Second),
			j.historyText(),
		)
	}
}

func (j *job) otherNode() string {
	for {
		if node := j.randomNode(); node != j.last {
			return node
		}
	}
}

func (j *job) step(ctx context.Context) {
	switch {
	case j.id == "":
		j.create(ctx)
		clear(j.unpublished)
	case j.node == "":
		switch j.random.IntN(8) {
		case 0:
			j.delete(ctx)
		case 1, 2, 3:
			j.results.count("run on another node")
			j.run(ctx, j.otherNode(), true)
		default:
			j.results.count("run on the same node again")
			j.run(ctx, j.lastOrAny(), true)
		}
	default:
		switch j.random.IntN(10) {
		case 0:
			j.results.count("publish twice")
			j.publish(ctx, j.node, false)
		case 8, 9:
			j.results.count("a second job with the same disk is refused by the node")
			j.publish(ctx, j.node, false)
			j.sendUnpublish(ctx, j.node)
			_ = pause(ctx, nomadGrace+time.Second) // the caller checks the context
		case 1, 2, 3:
			if j.unpublished[j.node] {
				j.results.count("late repetition of an unpublish")
				j.sendUnpublish(ctx, j.node)
			}
		case 4:
			j.results.count("stop without an unpublish")
			j.published("")
			j.release()
		case 5:
			j.stopInOrder(ctx)
		default:
			j.stopUnmountedLater(ctx)
		}
	}
}

func (j *job) lastOrAny() string {
	if j.last == "" {
		return j.randomNode()
	}
	return j.last
}

// run claims the volume for a node, and publishes it there until that succeeds. An impatient job may be stopped at
// random before that, and then is unpublished as Nomad does.
func (j *job) run(ctx context.Context, node string, impatient bool) {
	if err := j.claims.set(j.id, node); err != nil {
		j.results.violation("the claim cannot be written: %v", err)
		return
	}
	for ctx.Err() == nil {
		_, err := send(ctx, j.actor, csi.ControllerClient.ControllerPublishVolume,
			&csi.ControllerPublishVolumeRequest{VolumeId: j.id, NodeId: node, VolumeCapability: capability})
		if err == nil {
			j.last = node
			j.published(node)
			return
		}
		j.allow("publish", err, codes.FailedPrecondition, codes.ResourceExhausted, codes.Internal)
		if impatient && j.random.IntN(60) == 0 {
			j.results.count("stopped before it ran")
			j.last = node
			j.unpublishOnce(ctx, node)
			return
		}
	}
}

// stopInOrder unmounts the volume, and then unpublishes it.
func (j *job) stopInOrder(ctx context.Context) {
	j.results.count("stop in order")
	node := j.node
	j.published("")
	j.unpublished[node] = j.unpublishOnce(ctx, node) || j.unpublished[node]
}

// stopUnmountedLater unpublishes the volume, which is unmounted only during the grace period.
func (j *job) stopUnmountedLater(ctx context.Context) {
	j.results.count("stop, unmounted after the unpublish")
	node := j.node
	j.mu.Lock()
	j.mayGoAt = time.Now().Add(nomadGrace) // the workload may unmount late if this machine is slow
	j.mu.Unlock()
	var unmounting sync.WaitGroup
	unmounting.Go(func() {
		_ = pause(ctx, rand.N(nomadGrace/2)) // a run that ends unmounts at once
		j.published("")
	})
	j.unpublished[node] = j.unpublishOnce(ctx, node) || j.unpublished[node]
	unmounting.Wait()
}

// unpublishOnce ends the job with one unpublish, and reports whether that succeeded. Nomad does not repeat it after an
// error. It releases the claim when it has the answer.
func (j *job) unpublishOnce(ctx context.Context, node string) bool {
	defer j.release()
	return j.sendUnpublish(ctx, node)
}

func (j *job) release() {
	if err := j.claims.release(j.id); err != nil {
		j.results.violation("the claim cannot be released: %v", err)
	}
}

// sendUnpublish sends one unpublish, and reports whether it succeeded.
func (j *job) sendUnpublish(ctx context.Context, node string) bool {
	_, err := send(ctx, j.actor, csi.ControllerClient.ControllerUnpublishVolume,
		&csi.ControllerUnpublishVolumeRequest{VolumeId: j.id, NodeId: node})
	if err != nil {
		j.allow("unpublish", err, codes.Internal)
	}
	return err == nil
}

// deleteVolumes stops all instances, as the end of a cluster, and deletes all volumes.
func (p *plannedWorld) deleteVolumes(ctx context.Context, actors []*actor) {
	for _, instance := range p.instances {
		p.setRunState(ctx, instance, "stopped")
	}
	for _, a := range actors {
		if a.id == "" {
			continue
		}
		for ctx.Err() == nil {
			_, err := p.leadingController().ControllerUnpublishVolume(ctx, &csi.ControllerUnpublishVolumeRequest{VolumeId: a.id})
			if err == nil {
				_, err = p.leadingController().DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: a.id})
			}
			if err == nil {
				break
			}
			_ = pause(ctx, 100*time.Millisecond) // the loop condition checks the context
		}
	}
}

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
	"slices"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// nomadGrace is the grace period of the controllers. Many jobs return within it, and many do not.
const nomadGrace = 3 * time.Second

// longestMove is how long a job may wait for its volume on another node after the last fault. The rack may not have
// answered a detach: then no publish relies on the disk for two minutes (docs/explanation/nomad.md).
const longestMove = 3 * time.Minute

// claimsName is the name of the folder of [claims] in the world's folder.
const claimsName = "claims"

// nomadMaxDisks is how many disks an instance of the campaign can have, its boot disk included. Twelve jobs on four
// nodes often find an instance full, most of the time because of disks that wait for their detach.
const nomadMaxDisks = 5

// The files that a disk has in [claims], one for each of its IDs in Nomad. The second is registered later, and then has
// a job of its own.
const (
	firstID  = ".first"
	secondID = ".second"
)

// claims is a folder that stands for Nomad. A file says that a disk has an ID there, and has the node whose job claims
// the volume of this ID, or nothing. With it the controllers find out that a job has moved although no unpublish came,
// and that a volume is in use although an unpublish came.
type claims string

// of returns the nodes with a claim on a disk, under all its IDs, and how many IDs it has.
func (c claims) of(volumeID string) (claimants []string, registered int, err error) {
	for _, id := range []string{firstID, secondID} {
		node, err := os.ReadFile(c.file(volumeID, id))
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, 0, err
		}
		registered++
		if len(node) > 0 {
			claimants = append(claimants, string(node))
		}
	}
	return claimants, registered, nil
}

// Moved implements [orchestrator.Claims].
func (c claims) Moved(_ context.Context, volumeID, fromNode, toNode string) (bool, error) {
	claimants, _, err := c.of(volumeID)
	elsewhere := slices.ContainsFunc(claimants, func(node string) bool { return node != toNode })
	return len(claimants) > 0 && !elsewhere && fromNode != toNode, err
}

// Claimed implements [orchestrator.Claims].
func (c claims) Claimed(_ context.Context, nodeID string, volumeIDs []string) (map[string]string, error) {
	claimed := map[string]string{}
	for _, volumeID := range volumeIDs {
		claimants, _, err := c.of(volumeID)
		if err != nil {
			return nil, err
		}
		if slices.Contains(claimants, nodeID) {
			claimed[volumeID] = "a job of the volume"
		}
	}
	return claimed, nil
}

// Registered implements [orchestrator.Claims].
func (c claims) Registered(_ context.Context, volumeID string) ([]string, error) {
	_, registered, err := c.of(volumeID)
	return []string{"default/first", "default/second"}[:registered], err
}

func (c claims) file(volumeID, id string) string { return filepath.Join(string(c), volumeID+id) }

// set registers an ID of a disk, and makes a node the only one that may use the volume of this ID. Without a node
// nothing claims it.
func (c claims) set(volumeID, id, node string) error {
	next := c.file(volumeID, id) + ".new"
	if err := os.WriteFile(next, []byte(node), 0o600); err != nil {
		return err
	}
	return os.Rename(next, c.file(volumeID, id))
}

// deregister removes an ID of a disk.
func (c claims) deregister(volumeID, id string) error {
	if err := os.Remove(c.file(volumeID, id)); !errors.Is(err, os.ErrNotExist) {
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
	for _, j := range jobs {
		if err := j.claims.deregister(j.id, secondID); err != nil {
			return err
		}
	}
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
			j.deleteRegistered(ctx)
		case 1, 2, 3:
			j.results.count("run on another node")
			j.run(ctx, j.otherNode(), true)
		case 4:
			j.periodic(ctx)
		default:
			j.results.count("run on the same node again")
			j.run(ctx, j.lastOrAny(), true)
		}
	default:
		switch j.random.IntN(11) {
		case 0:
			j.results.count("publish twice")
			j.publish(ctx, j.node, false)
		case 7, 8, 9:
			j.second(ctx)
		case 1, 2, 3:
			if j.unpublished[j.node] {
				j.results.count("late repetition of an unpublish")
				j.sendUnpublish(ctx, j.node)
			}
		case 4:
			j.results.count("stop without an unpublish")
			j.published("")
			j.claim(firstID, "")
		case 5:
			j.stopInOrder(ctx)
		default:
			j.stopUnmountedLater(ctx)
		}
	}
}

// periodic runs the job on its node some times, each time for a moment.
func (j *job) periodic(ctx context.Context) {
	j.results.count("periodic job")
	for range 2 + j.random.IntN(3) {
		if j.run(ctx, j.lastOrAny(), true); j.node == "" {
			return // it was stopped before it ran
		}
		_ = pause(ctx, time.Duration(j.random.IntN(300))*time.Millisecond) // the calls check the context
		j.stopInOrder(ctx)
	}
}

// second runs a job on the same disk, under the disk's second ID in Nomad, while the first job runs. On the same node
// the node refuses to mount the disk again. On another node the publish is refused. Then Nomad unpublishes the volume.
func (j *job) second(ctx context.Context) {
	node := j.node
	if j.random.IntN(2) == 0 {
		node = j.otherNode()
	}
	j.claim(secondID, node)
	if node == j.node {
		j.results.count("a second job with the same disk is refused by the node")
		j.publish(ctx, node, false)
	} else {
		j.results.count("a second job with the same disk is refused on another node")
		for range 1 + j.random.IntN(3) {
			if _, err := j.sendPublish(ctx, node); err == nil {
				j.results.violation("published on %s while a job runs on %s: %s", node, j.node, j.historyText())
			}
		}
	}
	j.sendUnpublish(ctx, node)
	j.claim(secondID, "")
	_ = pause(ctx, nomadGrace+time.Second) // the caller checks the context
}

// deleteRegistered deletes the volume. While the disk has two IDs in Nomad, that must be refused.
func (j *job) deleteRegistered(ctx context.Context) {
	id := j.id
	_, registered, err := j.claims.of(id)
	if j.delete(ctx); registered > 1 && j.id == "" {
		j.results.violation("volume %s was deleted while it had two IDs: %s", id, j.historyText())
	}
	if registered > 1 {
		j.results.count("delete refused: two IDs")
		err = errors.Join(err, j.claims.deregister(id, secondID))
	}
	if err != nil {
		j.results.violation("the IDs cannot be read or removed: %v", err)
	}
}

// claim gives the claim on the volume under one of its IDs to a node, and takes it from all others. Without a node it
// ends the claim.
func (j *job) claim(id, node string) {
	if err := j.claims.set(j.id, id, node); err != nil {
		j.results.violation("the claim cannot be written: %v", err)
	}
}

func (j *job) lastOrAny() string {
	if j.last == "" {
		return j.randomNode()
	}
	return j.last
}

// run claims the volume for a node, and publishes it there until that succeeds. If the instance is full, Nomad may run
// the job on another node. An impatient job may be stopped at random before it runs. In both cases it is unpublished
// once, as Nomad does.
func (j *job) run(ctx context.Context, node string, impatient bool) {
	j.claim(firstID, node)
	for ctx.Err() == nil {
		code, err := j.sendPublish(ctx, node)
		if err == nil {
			j.last = node
			j.published(node)
			return
		}
		switch {
		case code == codes.ResourceExhausted && j.random.IntN(4) == 0:
			j.results.count("moved on from a full instance")
			j.unpublishOnce(ctx, node)
			node = j.otherNode()
			j.claim(firstID, node)
		case impatient && j.random.IntN(60) == 0:
			j.results.count("stopped before it ran")
			j.last = node
			j.unpublishOnce(ctx, node)
			return
		}
	}
}

// sendPublish sends one publish.
func (j *job) sendPublish(ctx context.Context, node string) (codes.Code, error) {
	_, err := send(ctx, j.actor, csi.ControllerClient.ControllerPublishVolume,
		&csi.ControllerPublishVolumeRequest{VolumeId: j.id, NodeId: node, VolumeCapability: capability})
	if err != nil {
		j.allow("publish", err, codes.FailedPrecondition, codes.ResourceExhausted, codes.Internal)
	}
	return status.Code(err), err
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
	defer j.claim(firstID, "")
	return j.sendUnpublish(ctx, node)
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
	for _, m := range p.machines {
		p.setRunState(ctx, p.instanceOf(m), "stopped")
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

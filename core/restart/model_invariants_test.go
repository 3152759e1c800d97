// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package restart

import (
	"hash/maphash"
	"slices"
	"strconv"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
)

// check fails if a promise is broken in this state.
func (m *model) check() {
	down := 0
	for _, i := range m.instances {
		if i.down && !i.asked {
			m.fail("instance %s is down without a request", i.id)
		}
		if i.down && !m.stuckRestart(i) {
			down++
		}
	}
	if down > m.scenario.maxDown {
		m.fail("%d instances are down", down)
	}
	for _, i := range m.instances {
		m.checkRestartedOnce(i)
	}
	for i, v := range m.volumes {
		m.checkVolume(v, m.disks[i])
		m.checkGrowth(v, m.disks[i])
	}
}

// checkRestartedOnce fails if two restarts take an instance down.
func (m *model) checkRestartedOnce(i *modelInstance) {
	var sent []string
	for _, p := range m.processes {
		for id, w := range p.engine.held {
			// Without its record a restart is over, even if its holder does not know that yet.
			if w.requestSent && w.record.Instance == i.id &&
				m.records[restartName(modelCluster, w.record.Slot, w.record.Epoch)].ID == w.record.Stored.ID {
				sent = append(sent, id)
			}
		}
	}
	if len(sent) > 1 && sent[0] != sent[1] {
		m.fail("instance %s is taken down by two restarts: %s", i.id, sent)
	}
}

func (m *model) checkVolume(v *modelVolume, d *modelDisk) {
	detach, isDeferred := m.records[detachName(modelCluster, d.id)]
	deferredHere := isDeferred && d.instance != "" && strings.Contains(detach.Text, d.instance)
	switch {
	case v.published != "" && m.instance(v.published).run == runDeleted:
	case v.published != "" && d.instance != v.published:
		m.fail("volume %s is published on %s, and its disk is on %q", v.id, v.published, d.instance)
	// In mode hot the clean-up deletes the record.
	case v.published != "" && deferredHere && m.mode != modeHot:
		m.fail("volume %s is published on %s, and its detach from there is deferred", v.id, v.published)
	case v.released && !v.busy && d.instance != "" && !deferredHere:
		m.fail("volume %s is unpublished, and its disk is on %s with no record of it", v.id, d.instance)
	}
}

// stuckRestart reports whether the restart of an instance is stuck. Its guest may still halt.
func (m *model) stuckRestart(i *modelInstance) bool {
	for _, r := range m.records {
		if strings.Contains(r.Text, i.id) && strings.Contains(r.Text, `"stuck":true`) {
			return true
		}
	}
	return false
}

// settled reports whether everything is done and only deferred detaches of disks that exist are left. Every run must be
// able to settle. In mode hot no restart is made for what is wanted.
func (m *model) settled() bool {
	if len(m.activities) > 0 || len(m.lateCalls) > 0 || m.rackDown || m.orchestratorDown || m.hidden ||
		len(m.modesLeft) > 0 {
		return false
	}
	for i, v := range m.volumes {
		if !v.done() && m.mode == modeRestart && !m.stays(v, m.disks[i]) {
			return false
		}
	}
	return m.recordsSettled() && m.growthSettled() &&
		!slices.ContainsFunc(m.instances, func(i *modelInstance) bool { return !m.atRest(i) })
}

// recordsSettled reports whether the records are those that stay: the stuck restart of a lost node, and the deferred
// detaches, which end in mode hot.
func (m *model) recordsSettled() bool {
	for name, r := range m.records {
		volume, isDetach := strings.CutPrefix(name, detachName(modelCluster, ""))
		switch {
		case isDetach && (m.mode == modeHot || m.disk(volume).deleted):
			return false
		case isDetach, strings.HasPrefix(name, replacementPrefix), strings.HasPrefix(name, intentPrefix):
			// see growthSettled
		case !slices.ContainsFunc(m.instances, func(i *modelInstance) bool {
			return i.guest == guestLost && i.run != runDeleted && strings.Contains(r.Text, i.id) && m.stuckRestart(i)
		}):
			return false
		}
	}
	return true
}

// atRest reports whether an instance runs, or its owner has ended that, and nothing is requested of its node. A request
// whose guest is back already has no effect any more. An instance that an engine has stopped is started again, unless
// it is deleted.
func (m *model) atRest(i *modelInstance) bool {
	rests := i.run == rack.Running || i.run == runDeleted || i.run == rack.Stopped && i.ownerKeeps && !i.down
	return rests &&
		(i.guest == guestLost || i.drain == drainNone && (i.request == "" || i.reply.State == orchestrator.RestartBack))
}

// stays reports whether what is wanted of a volume may stay undone: it needs a lost node, or it is the deletion of a
// disk that no running instance is restarted for.
func (m *model) stays(v *modelVolume, d *modelDisk) bool {
	return m.isStranded(d) || m.isLost(v.goal[v.at]) || m.isLost(d.instance) || v.goal[v.at] == gone && d.instance != ""
}

func (m *model) isLost(instance string) bool {
	return slices.ContainsFunc(
		m.instances,
		func(i *modelInstance) bool { return i.id == instance && i.guest == guestLost },
	)
}

// --- hashes of states

var modelSeed = maphash.MakeSeed()

func (m *model) hash() uint64 {
	var h maphash.Hash
	h.SetSeed(modelSeed)
	m.hashWorld(&h)
	for _, p := range m.processes {
		m.hashProcess(&h, p)
	}
	// The order in which activities began does not matter.
	var acts []uint64
	for _, a := range m.activities {
		acts = append(acts, m.activityHash(a))
	}
	slices.Sort(acts)
	for _, one := range acts {
		maphash.WriteComparable(&h, one)
	}
	maphash.WriteComparable(&h, [3]int{m.faults, m.switches, len(m.modesLeft)})
	if m.last != nil {
		maphash.WriteComparable(&h, m.activityHash(m.last))
	}
	return h.Sum64()
}

// work hashes what controllers change on the rack. A cycle of states in which it changes is work without progress.
func (m *model) work() uint64 {
	var h maphash.Hash
	h.SetSeed(modelSeed)
	m.hashRack(&h)
	return h.Sum64()
}

func (m *model) hashRack(h *maphash.Hash) {
	for _, i := range m.instances {
		write(h, i.run)
	}
	for _, d := range m.disks {
		write(h, d.instance, d.backing, boolText(d.deleted), boolText(d.replaced), boolText(d.late))
	}
	for _, name := range sortedKeys(m.records) {
		write(h, m.records[name].ID, m.records[name].Text)
	}
}

// hashWorld hashes everything except the processes.
func (m *model) hashWorld(h *maphash.Hash) {
	m.hashRack(h)
	for _, i := range m.instances {
		write(h, string(i.guest), string(i.drain), i.request, string(i.reply.State))
		write(
			h,
			boolText(i.down),
			boolText(i.asked),
			boolText(i.stoppedByOwner),
			boolText(i.ownerStarts),
			boolText(i.ownerActed),
		)
	}
	if m.scenario.hasOthers() {
		for _, i := range m.instances {
			write(h, boolText(i.ownerKeeps), boolText(i.cooling), boolText(i.recent), boolText(i.broughtBack))
		}
	}
	for _, v := range m.volumes {
		write(h, strconv.Itoa(v.at), v.published, boolText(v.released), boolText(v.busy))
	}
	write(h, string(m.growth.phase), m.growth.volume, boolText(m.growth.snapshot))
	for _, l := range m.lateCalls {
		write(h, append(l.during, l.holder, l.name, l.text)...)
	}
	write(h, boolText(m.rackDown), boolText(m.orchestratorDown), boolText(m.hidden))
}

// hashProcess hashes the state of a process.
func (m *model) hashProcess(h *maphash.Hash, p *modelProcess) {
	e := p.engine
	write(h, e.holder, boolText(p.cleaned), boolText(e.refusesPlug.Load() && m.scenario.moves()))
	for _, d := range sortedKeys(p.wants) {
		write(h, "wants", d, p.wants[d])
	}
	for _, d := range sortedKeys(e.requests) {
		r := e.requests[d]
		write(h, "request", d, string(r.failedDisk), r.instance, r.fromRestart, boolText(r.attachFailed))
		write(h, boolText(r.justFreed()))
	}
	for _, d := range sortedKeys(e.locked) {
		write(h, "locked", d)
	}
	for _, id := range sortedKeys(e.held) {
		hashHeld(h, id, e.held[id])
		if w := e.held[id]; m.scenario.hasOthers() {
			others := w.startedByOthers(m.instance(w.record.Instance).view())
			write(h, boolText(w.ownersStop), boolText(w.up), boolText(w.run.IsZero()), boolText(others))
		}
	}
	for _, id := range sortedKeys(e.lastSeen) {
		write(h, "seen", id, e.lastSeen[id].Text)
	}
	for _, id := range sortedKeys(e.refusals) {
		write(h, "rest", id)
	}
}

func hashHeld(h *maphash.Hash, id string, w *heldRestart) {
	write(h, "held", id, string(w.stage), w.takenFrom, w.record.Stored.ID, restartText(w.record))
	write(h, boolText(w.recovering), boolText(w.requestSent), boolText(w.wasStopped))
	write(h, sortedKeys(w.deferredAtStart)...)
	write(h, "attached", boolText(w.attached != nil))
	for _, d := range w.attached {
		write(h, d.VolumeID, string(d.ID))
	}
}

func (m *model) activityHash(a *activity) uint64 {
	var h maphash.Hash
	h.SetSeed(modelSeed)
	write(&h, a.process.name, a.label, boolText(a.hasListed), a.pending.name)
	write(&h, sortedKeys(a.wanted)...)
	maphash.WriteComparable(&h, a.history)
	return h.Sum64()
}

func write(h *maphash.Hash, texts ...string) {
	for _, text := range texts {
		_, _ = h.WriteString(text)
		_ = h.WriteByte(0)
	}
}

func boolText(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}

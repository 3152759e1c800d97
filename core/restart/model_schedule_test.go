// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package restart

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"iter"
	"maps"
	"slices"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/record"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
)

// abandoned is the panic that ends the goroutine of an activity when its run is over or its process was killed.
type abandoned struct{}

// activity is an RPC or a tick of a process.
type activity struct {
	process   *modelProcess
	label     string
	tick      bool
	hasListed bool // a tick that has read the records
	// wanted are the instances for which the process was asked when the activity began.
	wanted  map[string]bool
	next    func() (modelCall, bool)
	stop    func()
	yield   func(modelCall) bool
	pending modelCall
	// value and err are the result of the call that is being resumed.
	value   any
	err     error
	history uint64
}

func (m *model) begin(p *modelProcess, label string, tick bool, run func(ctx context.Context)) {
	a := &activity{process: p, label: label, tick: tick, wanted: m.wantedFrom(p)}
	a.next, a.stop = iter.Pull(func(yield func(modelCall) bool) {
		defer func() {
			if reason := recover(); reason != nil {
				if _, ok := reason.(abandoned); !ok {
					panic(reason)
				}
			}
		}()
		a.yield = yield
		run(context.Background())
	})
	m.activities = append(m.activities, a)
	m.resume(a)
}

// resume continues an activity up to its next call.
func (m *model) resume(a *activity) {
	m.current, m.last = a, a
	call, going := a.next()
	m.current = nil
	if !going {
		m.activities = slices.DeleteFunc(m.activities, func(other *activity) bool { return other == a })
		return
	}
	a.pending = call
}

// returnTo gives an activity the result of its call.
func (m *model) returnTo(a *activity, value any, err error) {
	a.value, a.err = value, err
	var h maphash.Hash
	h.SetSeed(modelSeed)
	maphash.WriteComparable(&h, a.history)
	write(&h, a.pending.name)
	if records, ok := value.([]record.Record); ok {
		for _, r := range records {
			write(&h, r.ID, r.Text)
		}
	} else {
		write(&h, fmt.Sprint(value))
	}
	write(&h, fmt.Sprint(err))
	m.hashProcess(&h, a.process)
	a.history = h.Sum64()
	m.resume(a)
}

// finish continues all activities to their end.
func (m *model) finish() {
	for len(m.activities) > 0 {
		ready := slices.IndexFunc(m.activities, m.ready)
		m.last = m.activities[ready]
		m.take(m.options()[0])
	}
	m.last = nil
}

// end stops the goroutines of a run that is over.
func (m *model) end() {
	for _, a := range m.activities {
		m.current = a
		a.stop()
	}
}

// --- what the orchestrator asks for

func (m *model) publish(p *modelProcess, v *modelVolume, instance string) {
	v.busy, v.released = true, false
	m.noteWish(p, v, instance)
	m.begin(p, "publish "+v.id, false, func(ctx context.Context) {
		disk, err := m.publishIn(ctx, p, v, instance)
		v.busy = false
		if errors.Is(err, ErrPlanned) {
			m.checkGrowthAfterPublish(m.disk(v.id))
		}
		if err != nil {
			return
		}
		if now := m.disk(v.id).instance; disk.InstanceID != instance || now != instance {
			m.fail("publish of %s on %s succeeded with the disk on %q, and reports %q", v.id, instance, now, disk.InstanceID)
		}
		delete(p.wants, v.id)
		v.published = instance
		v.at++
	})
}

// noteWish notes which instances this publish may take down: the volume's new one, and the one that still has the disk.
func (m *model) noteWish(p *modelProcess, v *modelVolume, instance string) {
	if len(m.processes) == 1 {
		p.wants[v.id] = instance // see checkWanted
	}
	m.instance(instance).asked = true
	if on := m.disk(v.id).instance; on != "" {
		m.instance(on).asked = true
	}
}

// publishIn is the controller's part of ControllerPublishVolume: in mode hot there is no engine.
func (m *model) publishIn(ctx context.Context, p *modelProcess, v *modelVolume, instance string) (rack.Disk, error) {
	if m.mode != modeHot {
		return p.engine.Publish(ctx, v.id, instance)
	}
	view := &modelView{m: m}
	disk, err := view.Disk(ctx, v.id)
	if err == nil && disk.InstanceID != instance {
		return view.Attach(ctx, disk.ID, instance)
	}
	if err == nil {
		err = view.deleteRecordNamed(detachName(modelCluster, v.id))
	}
	return disk, err
}

func (m *model) unpublish(p *modelProcess, v *modelVolume, instance string) {
	v.busy, v.published = true, ""
	delete(p.wants, v.id)
	m.begin(p, "unpublish "+v.id, false, func(ctx context.Context) {
		var err error
		if m.mode == modeHot {
			_, err = (&modelView{m: m}).Detach(ctx, rack.DiskID(v.id), instance)
		} else {
			_, _, err = p.engine.Unpublish(ctx, v.id, instance, false)
		}
		v.busy = false
		if err == nil {
			v.released = true
			v.at++
		}
	})
}

// deleteVolume is the controller's part of DeleteVolume.
func (m *model) deleteVolume(p *modelProcess, v *modelVolume) {
	v.busy = true
	m.begin(p, "delete "+v.id, false, func(ctx context.Context) {
		if m.deleteDisk(ctx, p, v.id) == nil {
			v.at++
		}
		v.busy = false
	})
}

func (m *model) deleteDisk(ctx context.Context, p *modelProcess, id string) error {
	view := &modelView{m: m}
	disk, err := view.Disk(ctx, id)
	if errors.Is(err, rack.ErrNotFound) {
		return view.ConfirmProject(ctx)
	}
	if err == nil && disk.InstanceID != "" {
		_, _, err = p.engine.Unpublish(ctx, id, disk.InstanceID, false)
	}
	if err == nil {
		err = view.deleteDisk(id)
	}
	if err == nil {
		_ = p.engine.opts.Detacher.Forget(ctx, id) // the volume is deleted anyway
	}
	return err
}

// --- the scheduler

type option struct {
	what, which string
	// fault is true if the option counts as a fault, leaves if it interrupts an activity that could continue.
	fault, leaves bool
	// outside is true if no controller acts, but the orchestrator, a guest, the rack, the operator or an owner.
	outside bool
	do      func()
}

func (o option) name() string { return o.what + " " + o.which }

// cost sorts the options that count as faults behind all others.
func cost(o option) int {
	if o.fault {
		return 1
	}
	return 0
}

// options returns everything that can happen next, in an order that depends on the state alone. The number of
// interrupted activities is limited: most concurrency errors need few of them. Interrupted activities continue last, so
// that the first runs are those in which much happens in between.
func (m *model) options() []option {
	m.opts = m.opts[:0]
	if m.last != nil && m.ready(m.last) {
		m.callOptions(m.last)
		if m.switches == 0 {
			return m.opts
		}
	}
	before := len(m.opts)
	for _, i := range m.instances {
		m.instanceOptions(i)
	}
	m.outageOptions()
	m.expansionOptions()
	for i, l := range m.lateCalls {
		m.add("late", l.name, func() {
			m.lateCalls = slices.Delete(m.lateCalls, i, i+1)
			_, _ = l.do(m) // the process that would get the answer has died
			for _, i := range m.instances {
				i.stoppedByOwner = false // whether the owner stopped it before or after the call is unknown
			}
		})
	}
	for _, p := range m.processes {
		for _, v := range m.volumes {
			m.volumeOptions(p, v)
		}
	}
	for i := before; i < len(m.opts); i++ {
		m.opts[i].outside = true
	}
	for _, p := range m.processes {
		m.processOptions(p)
	}
	for _, a := range m.activities {
		if a != m.last && m.ready(a) {
			m.callOptions(a)
		}
	}
	slices.SortStableFunc(m.opts[before:], func(x, y option) int { return cost(x) - cost(y) })
	for i := before; before > 0 && i < len(m.opts); i++ {
		m.opts[i].leaves = true
	}
	return m.opts
}

func (m *model) ready(a *activity) bool { return a.pending.ready == nil || a.pending.ready() }

func (m *model) add(what, which string, do func()) {
	m.opts = append(m.opts, option{what: what, which: which, do: do})
}

func (m *model) fault(kind, what, which string, do func()) {
	if m.faults > 0 && m.scenario.hasFault(kind) {
		m.opts = append(m.opts, option{what: what, which: which, fault: true, do: do})
	}
}

// take carries an option out.
func (m *model) take(o option) {
	if o.fault {
		m.faults--
	}
	if o.leaves {
		m.switches--
	}
	o.do()
	for _, p := range m.processes {
		if p.retired {
			m.crash(p)
		}
	}
	if m.last != nil && !slices.Contains(m.activities, m.last) {
		m.last = nil
	}
	m.forgetLeases()
}

// forgetLeases makes states equal that differ only in which records the processes have seen, once no lease can expire
// any more.
func (m *model) forgetLeases() {
	s := m.scenario
	if m.faults > 0 && (s.hasFault("crash") || s.hasFault("early lease")) || len(m.modesLeft) > 0 {
		return
	}
	for _, p := range m.processes {
		if !m.holdersLive() || p.ticking {
			return
		}
	}
	for _, p := range m.processes {
		clear(p.engine.lastSeen)
	}
}

// holdersLive reports whether the holders of all restarts live.
func (m *model) holdersLive() bool {
	for name, r := range m.records {
		live := !strings.HasPrefix(name, "csi-restart-")
		for _, p := range m.processes {
			live = live || strings.Contains(r.Text, `"by":"`+p.engine.holder+`"`)
		}
		if !live {
			return false
		}
	}
	return true
}

func (m *model) processOptions(p *modelProcess) {
	if !p.ticking && !p.cleaned {
		m.add("tick", p.name, func() {
			p.ticking = true
			m.begin(p, "tick", true, func(ctx context.Context) {
				// A tick may fail, for instance by a fault: what counts is the state that it leaves.
				if m.mode == modeHot {
					p.cleaned, _ = p.engine.cleanUpOnce(ctx)
				} else {
					_ = p.engine.tick(ctx)
				}
				p.ticking = false
			})
		})
	}
	if !p.ticking && len(p.engine.held) > 0 {
		m.fault("retire", "retires", p.name, func() {
			p.ticking = true
			m.begin(p, "retire", true, func(ctx context.Context) {
				p.engine.handOverAll(ctx)
				p.retired = true
			})
		})
	}
}

func (m *model) callOptions(a *activity) {
	c := a.pending
	where := a.process.name + " " + a.label + ": " + c.name
	if c.choice {
		m.add("not", where, func() { m.returnTo(a, false, nil) })
		m.fault(c.name, "is", where, func() { m.returnTo(a, true, nil) })
		return
	}
	if c.ready == nil && (c.asks && m.orchestratorDown || !c.asks && m.rackDown) {
		m.add("no answer", where, func() { m.returnTo(a, nil, errTransient) })
		return
	}
	if c.ready == nil && !c.asks && m.hidden {
		m.add("not found", where, func() { m.returnTo(a, nil, hiddenError(c.name)) })
		return
	}
	m.add("", where, func() {
		m.current = a
		value, err := c.do(m)
		m.returnTo(a, value, err)
	})
	if c.ready == nil {
		m.callFaults(a, c, where)
	}
}

// hiddenError is what a rack answers while it shows nothing of the project: "not found" for an ID, and an error of the
// project for what it looks up in the project.
func hiddenError(call string) error {
	if call == "records" || strings.HasPrefix(call, "create ") {
		return errTransient
	}
	return rack.ErrNotFound
}

// callFaults are the ways in which a call, or its process, can fail.
func (m *model) callFaults(a *activity, c modelCall, where string) {
	m.fault("refused", "no answer, not done", where, func() { m.returnTo(a, nil, errTransient) })
	if c.mutates {
		m.fault("lost", "no answer, done", where, func() {
			m.current = a
			_, _ = c.do(m) // the answer is lost
			m.returnTo(a, nil, errTransient)
		})
	}
	if c.mutates || a.history == 0 {
		// A crash before a later read has the same effect as one before the next change.
		m.fault("crash", "crash before", where, func() { m.crash(a.process) })
	}
	if !c.mutates {
		return
	}
	if a.tick {
		m.fault("crash", "crash, and later", where, func() {
			m.lateCalls = append(m.lateCalls, lateCall{
				during: m.takeovers(), process: a.process.name, holder: a.process.engine.holder,
				name: c.name, text: c.text, do: c.do,
			})
			m.crash(a.process)
		})
	}
	m.fault("crash", "crash after", where, func() {
		m.current = a
		_, _ = c.do(m) // the process dies before the answer
		m.crash(a.process)
	})
}

// takeovers returns the records that are being taken over.
func (m *model) takeovers() (from []string) {
	for _, p := range m.processes {
		for _, id := range sortedKeys(p.engine.held) {
			from = append(from, p.engine.held[id].takenFrom)
		}
	}
	return from
}

// crash kills a process and starts it again with empty memory.
func (m *model) crash(p *modelProcess) {
	for _, a := range slices.Clone(m.activities) {
		if a.process == p {
			m.current = a
			a.stop()
			m.activities = slices.DeleteFunc(m.activities, func(other *activity) bool { return other == a })
			for _, v := range m.volumes {
				if !a.tick && strings.HasSuffix(a.label, v.id) {
					v.busy = false
				}
			}
		}
	}
	m.current = nil
	for _, w := range p.engine.held {
		i := m.instance(w.record.Instance)
		if i.broughtBack || !w.requestSent && !w.recovering {
			i.stoppedByOwner = false // the only moments in which a crash leaves this unknown
		}
		i.broughtBack = false
	}
	p.ticking, p.retired, p.cleaned = false, false, false
	p.crashes++
	m.boot(p)
}

func (m *model) volumeOptions(p *modelProcess, v *modelVolume) {
	if v.busy || v.done() || !m.asks(p, v) {
		return
	}
	switch on := v.goal[v.at]; on {
	case gone:
		m.add("delete "+v.id, p.name, func() { m.deleteVolume(p, v) })
	case "":
		from := m.previous(v)
		m.add("unpublish "+v.id+" from "+from, p.name, func() { m.unpublish(p, v, from) })
	default:
		if m.instance(on).drain != drainNone && !m.waiting(v) {
			return // the orchestrator places no new work on a drained node
		}
		m.add("publish "+v.id+" on "+on, p.name, func() { m.publish(p, v, on) })
		if m.scenario.givesUpEarly {
			m.add("give up "+v.id+" on "+on, p.name, func() {
				v.at++
				m.unpublish(p, v, on)
			})
		}
	}
}

// asks reports whether the orchestrator calls this controller for the volume.
func (m *model) asks(p *modelProcess, v *modelVolume) bool {
	asked := m.scenario.asked
	return asked == nil || m.processes[asked[slices.Index(m.volumes, v)]] == p
}

// waiting reports whether the orchestrator has asked for the volume where it wants it.
func (m *model) waiting(v *modelVolume) bool {
	return slices.ContainsFunc(m.processes, func(p *modelProcess) bool {
		request := p.engine.requests[v.id]
		return request != nil && request.instance == v.goal[v.at]
	})
}

// previous returns the instance from which a volume is unpublished.
func (m *model) previous(v *modelVolume) string {
	if v.at > 0 {
		return v.goal[v.at-1]
	}
	return cmp.Or(v.published, m.scenario.attached[slices.Index(m.volumes, v)])
}

func (m *model) instanceOptions(i *modelInstance) {
	running := i.run == rack.Running
	switch {
	case i.run == "stopping":
		m.add("stopped", i.id, func() { m.changeRun(i, rack.Stopped) })
	case i.run == "starting":
		m.add("running", i.id, func() {
			m.changeRun(i, rack.Running)
			i.down, i.stoppedByOwner, i.ownerStarts, i.ownerKeeps, i.guest = false, false, false, false, guestUp
			i.cooling = m.scenario.hasOthers()
			switch {
			case i.reply.State == orchestrator.RestartAccepted:
				i.reply.State = "booted"
			case i.reply.State == "" && m.mode == modeHot:
				i.request = "" // older than the guest's boot, so its node plugin ignores it
			}
		})
	case running && i.guest == guestUp && i.reply.State == "booted":
		m.add("back", i.id, func() { i.reply.State = orchestrator.RestartBack })
	case running && i.guest == guestHalts, running && i.guest == guestHangs:
		m.add("halted", i.id, func() {
			i.guest = guestUp
			m.changeRun(i, rack.Stopped)
		})
	case running && i.guest == guestUp && i.request != "" && i.reply.State == "":
		m.requestOptions(i)
	case running && i.guest == guestSilent && i.request == "":
		m.add("speaks again", i.id, func() { i.guest = guestUp })
	case i.ownerStarts && i.run == rack.Stopped:
		m.add("started by its owner", i.id, func() { m.changeRun(i, "starting") })
	}
	if running && i.cooling {
		m.add("has cooled down", i.id, func() { i.cooling, i.recent = false, false })
	}
	if running && i.drain == drainStarted && !m.usedOn(i.id) {
		m.add("drained", i.id, func() { i.drain = drainDone })
		m.fault("stays", "is not drained", i.id, func() { i.drain = drainStays })
	}
	m.ownerOptions(i)
}

// requestOptions are a guest's answers to a request.
func (m *model) requestOptions(i *modelInstance) {
	accepts := func(g guest) func() {
		return func() {
			i.reply.State, i.guest = orchestrator.RestartAccepted, g
			m.bringDown(i)
		}
	}
	m.add("accepts", i.id, accepts(guestHalts))
	m.fault("refuses", "refuses", i.id, func() { i.reply.State = orchestrator.RestartRefused })
	m.fault("hangs", "accepts and hangs", i.id, accepts(guestHangs))
	m.fault("silent", "says nothing", i.id, func() { i.guest = guestSilent })
}

// ownerOptions are what an instance's owner does, and what happens to its node.
func (m *model) ownerOptions(i *modelInstance) {
	if i.run == rack.Running && i.guest == guestUp {
		m.fault("user stop", "stopped by its owner", i.id, func() {
			m.stopByOwner(i)
			i.ownerStarts = true
		})
		m.fault(ownerStops, "stopped by its owner for good", i.id, func() {
			m.stopByOwner(i)
			i.ownerKeeps = true
		})
		m.fault("lost node", "is lost", i.id, func() { i.guest = guestLost })
	}
	if i.run != rack.Stopped {
		return
	}
	m.fault(ownerStarts, "started by others", i.id, func() {
		i.ownerActed, i.stoppedByOwner, i.ownerKeeps = true, false, false
		m.changeRun(i, "starting")
	})
	m.fault(ownerDeletes, "deleted", i.id, func() {
		m.changeRun(i, runDeleted)
		i.guest, i.down = guestLost, false
		for _, d := range m.disks {
			if d.instance == i.id {
				d.instance, d.late = "", false
			}
		}
	})
}

// stopByOwner stops an instance that runs. stoppedByOwner says whether a process must know that.
func (m *model) stopByOwner(i *modelInstance) {
	m.changeRun(i, rack.Stopped)
	i.stoppedByOwner, i.ownerActed = true, true
	for _, r := range m.records {
		if strings.Contains(r.Text, i.id) && strings.Contains(r.Text, mayStop) && !m.unrequested(r.ID) && !i.broughtBack {
			i.stoppedByOwner = false
		}
	}
}

// bringDown notes that an engine has caused a stop.
func (m *model) bringDown(i *modelInstance) {
	if i.cooling && i.recent {
		m.fail("instance %s is stopped twice in a cool-down", i.id)
	}
	i.down, i.recent = true, m.scenario.hasOthers()
}

// unrequested reports whether a process knows that the restart of this record has not asked for a stop yet.
func (m *model) unrequested(recordID string) bool {
	for _, p := range m.processes {
		for _, w := range p.engine.held {
			if w.record.Stored.ID == recordID && !w.requestSent && !w.recovering {
				return true
			}
		}
	}
	return false
}

// usedOn reports whether a volume is published on an instance. A volume whose work can go elsewhere leaves first.
func (m *model) usedOn(instance string) bool {
	return slices.ContainsFunc(m.volumes, func(v *modelVolume) bool { return v.published == instance && !v.done() })
}

// outageOptions are the begin and the end of an outage, and what the operator does.
func (m *model) outageOptions() {
	for _, part := range []struct {
		name string
		down *bool
	}{{"rack", &m.rackDown}, {"orchestrator", &m.orchestratorDown}, {"project", &m.hidden}} {
		if *part.down {
			m.add("answers again", part.name, func() { *part.down = false })
		} else {
			m.fault(part.name+" down", "answers no more", part.name, func() { *part.down = true })
		}
	}
	// The operator leaves mode hot only after its clean-up. Calls of the old controllers have arrived by then.
	unclean := func(p *modelProcess) bool { return m.mode == modeHot && !p.cleaned }
	if len(m.modesLeft) > 0 && len(m.lateCalls) == 0 && !slices.ContainsFunc(m.processes, unclean) {
		m.add("mode", string(m.modesLeft[0]), m.changeMode)
	}
}

// changeMode stops all controllers and starts them in another mode. In mode hot an attached disk is a published one.
func (m *model) changeMode() {
	m.mode, m.modesLeft = m.modesLeft[0], m.modesLeft[1:]
	for _, p := range m.processes {
		m.crash(p)
	}
	if m.mode == modeHot {
		for _, v := range m.volumes {
			v.released = false
		}
	}
}

// wantedFrom returns the instances for which a process was asked.
func (m *model) wantedFrom(p *modelProcess) map[string]bool {
	wanted := map[string]bool{}
	for disk, instance := range p.wants {
		wanted[instance] = true
		wanted[m.disk(disk).instance] = true
	}
	return wanted
}

// mayStop is how a record says that its instance may be stopped.
const mayStop = `"mayStop":true`

// checkWanted fails if the only controller of a scenario may stop an instance for which it was not asked. One of
// several may do so for a volume that another one has given up, and so may one that takes a restart over.
func (m *model) checkWanted(a *activity, name, record string) {
	if len(m.processes) > 1 || !strings.HasSuffix(name, "-1") {
		return
	}
	wanted := m.wantedFrom(m.processes[0])
	maps.Copy(wanted, a.wanted)
	for _, i := range m.instances {
		if strings.Contains(record, i.id) && !wanted[i.id] {
			m.fail("instance %s is restarted without a request", i.id)
		}
	}
}

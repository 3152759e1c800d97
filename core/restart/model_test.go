// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package restart

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"hash/maphash"
	"iter"
	"log/slog"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
)

// The model check runs the engine's own code, in up to two processes, against a model of the rack, its guests and an
// orchestrator. It explores every order of their calls, with a bounded number of faults in each run. The code of a
// process between two calls is one step. A state that was seen before is not explored again.
//
// Time is a choice of the scheduler: each wait of an engine is over or not, as far as the package's rules on time
// allow. The model trusts one of these rules: a live holder carries out its decisions before its lease is over.

var modelTime = flag.Duration("model", 10*time.Second, "total time of the exploration")

const modelCluster = "model"

// abandoned is the panic that ends the goroutine of an activity when its run is over or its process was killed.
type abandoned struct{}

// guest is the state of an instance's guest.
type guest string

const (
	guestUp     guest = "up"
	guestHalts  guest = "halts"
	guestHangs  guest = "hangs"
	guestSilent guest = "silent" // its node plugin does not reply
)

type modelInstance struct {
	id    string
	run   string
	guest guest
	// down is true from the moment that an engine caused the stop until the instance runs again.
	down bool
	// stoppedByOwner is true while the owner has stopped it and no restart had been requested before.
	stoppedByOwner bool
	// ownerStarts is true while the owner has stopped it. The owner will start it.
	ownerStarts bool
	// request is the ID of the restart that its node plugin is asked for.
	request string
	reply   metadata.RestartReply
}

type modelDisk struct {
	id, instance string
}

// modelVolume is the orchestrator's view of a volume. The orchestrator publishes it on each instance of goal in turn.
type modelVolume struct {
	disk string
	goal []string // instances; "" means unpublished
	at   int      // index into goal
	// published is the instance of the last successful publish. It is cleared before an unpublish.
	published string
	// released is true from a successful unpublish until the next publish.
	released bool
	busy     bool
}

func (v *modelVolume) done() bool { return v.at == len(v.goal) }

type modelProcess struct {
	name    string
	engine  *Engine
	self    string
	crashes int
	ticking bool
	// retired is true once the process has handed over its restarts and only has to end.
	retired bool
}

// modelCall is the call that an activity waits for.
type modelCall struct {
	name string
	// do carries the call out and returns its result.
	do func() (any, error)
	// mutates is true if the call changes the modelled world.
	mutates bool
	// ready reports whether the call can return now. Nil means always.
	ready func() bool
	// choice is true for a wait; the scheduler decides whether it is over.
	choice bool
}

// activity is an RPC or a tick of a process.
type activity struct {
	process   *modelProcess
	label     string
	tick      bool
	hasListed bool // a tick that has read the records
	next      func() (modelCall, bool)
	stop      func()
	yield     func(modelCall) bool
	pending   modelCall
	// value and err are the result of the call that is being resumed.
	value   any
	err     error
	history uint64
}

// model is one run.
type model struct {
	t          testing.TB
	scenario   scenario
	instances  []*modelInstance
	disks      []*modelDisk
	volumes    []*modelVolume
	records    map[string]rack.Record // by name
	lateCalls  []lateCall
	processes  []*modelProcess
	activities []*activity
	current    *activity
	faults     int
	// switches is how often another activity may still interrupt one that could continue.
	switches int
	// last is the activity that was resumed last.
	last    *activity
	failure string
	opts    []option
}

// lateCall is a call that arrives after the process that sent it has died.
type lateCall struct {
	process      *modelProcess
	holder, name string
	do           func() (any, error)
}

type scenario struct {
	// name of the scenario.
	name      string
	shutdown  Shutdown
	maxDown   int
	goals     [][]string // for each volume
	attached  []string   // the instance on which each volume is attached and published at the start
	processes int
	selves    []string
	faults    int
	switches  int
	// prelude are the steps before the exploration, see [model.run].
	prelude []string
	// givesUpEarly lets the orchestrator unpublish a volume before its publish succeeded.
	givesUpEarly bool
	// kinds are the kinds of faults that happen. Empty means all.
	kinds []string
}

func (s scenario) hasFault(kind string) bool {
	return len(s.kinds) == 0 || slices.Contains(s.kinds, kind)
}

var errTransient = fmt.Errorf("model: %w", rack.ErrUnavailable)

func instanceID(i int) string { return fmt.Sprintf("10000000-0000-4000-8000-00000000000%d", i) }
func diskID(i int) string     { return fmt.Sprintf("20000000-0000-4000-8000-00000000000%d", i) }

func newModel(t testing.TB, s scenario) *model {
	m := &model{t: t, scenario: s, records: map[string]rack.Record{}, faults: s.faults, switches: s.switches}
	for i := range 2 {
		m.instances = append(m.instances, &modelInstance{id: instanceID(i), run: rack.Running, guest: guestUp})
	}
	for i, goal := range s.goals {
		m.disks = append(m.disks, &modelDisk{id: diskID(i)})
		v := &modelVolume{disk: diskID(i), goal: goal}
		if i < len(s.attached) {
			m.disks[i].instance, v.published = s.attached[i], s.attached[i]
		}
		m.volumes = append(m.volumes, v)
	}
	for i := range s.processes {
		p := &modelProcess{name: fmt.Sprintf("p%d", i)}
		if i < len(s.selves) {
			p.self = s.selves[i]
		}
		m.processes = append(m.processes, p)
		m.boot(p)
	}
	for _, begin := range s.prelude {
		m.run(begin)
	}
	return m
}

// run starts or continues one activity without interruption. It runs to the end, or to the first call whose name
// follows the bar in step.
func (m *model) run(step string) {
	begin, call, stops := strings.Cut(step, " | ")
	for _, o := range m.options() {
		if strings.HasPrefix(strings.TrimSpace(o.what+" "+o.which), begin) {
			m.take(o)
			for m.last != nil && !(stops && strings.HasPrefix(m.last.pending.name, call)) {
				m.take(m.options()[0])
			}
			if stops && m.last == nil {
				break
			}
			m.last = nil
			return
		}
	}
	m.t.Fatalf("%s: step %q is not possible", m.scenario.name, step)
}

func (m *model) boot(p *modelProcess) {
	view := &modelView{m: m}
	p.engine = New(view, Options{
		Cluster: modelCluster, MaxDisks: 8, Policy: Allow, Shutdown: m.scenario.shutdown, Requester: view,
		Self:   func() (string, bool) { return p.self, true },
		Window: time.Second, MaxDown: m.scenario.maxDown, CoolDown: time.Second, HaltTimeout: time.Second,
		Log: slog.New(slog.DiscardHandler),
	})
	p.engine.clock = modelClock{m: m, p: p}
	p.engine.holder = fmt.Sprintf("%s.%d", p.name, p.crashes)
	p.engine.newID = func() string { return m.unusedID(p.engine.holder) }
}

// unusedID returns the first restart ID of a holder that no process or record knows. IDs are used again, so that the
// number of states is finite.
func (m *model) unusedID(holder string) string {
	for n := 0; ; n++ {
		id := fmt.Sprintf("%s.r%d", holder, n)
		used := slices.ContainsFunc(m.instances, func(i *modelInstance) bool { return i.request == id })
		for _, r := range m.records {
			used = used || strings.Contains(r.Text, `"`+id+`"`)
		}
		for _, p := range m.processes {
			used = used || p.engine.held[id] != nil
		}
		if !used {
			return id
		}
	}
}

func (m *model) instance(id string) *modelInstance {
	for _, i := range m.instances {
		if i.id == id {
			return i
		}
	}
	m.fail("no such instance: %s", id)
	return nil
}

func (m *model) disk(id string) *modelDisk {
	for _, d := range m.disks {
		if d.id == id {
			return d
		}
	}
	m.fail("no such disk: %s", id)
	return nil
}

func (m *model) fail(format string, args ...any) {
	if m.failure == "" {
		m.failure = fmt.Sprintf(format, args...)
	}
}

// --- the engine's calls

// modelView is the rack and the orchestrator as the current activity sees them.
type modelView struct{ m *model }

func call[T any](v *modelView, changes bool, name string, do func() (T, error)) (T, error) {
	value, err := v.m.call(modelCall{name: name, mutates: changes, do: func() (any, error) { return do() }})
	got, _ := value.(T)
	return got, err
}

func (m *model) call(c modelCall) (any, error) {
	a := m.current
	if !a.yield(c) {
		panic(abandoned{})
	}
	return a.value, a.err
}

func (d *modelDisk) view() rack.Disk {
	disk := rack.Disk{ID: d.id, Name: d.id[len(d.id)-4:], State: rack.Detached}
	if d.instance != "" {
		disk.State, disk.InstanceID = rack.Attached, d.instance
	}
	return disk
}

func (v *modelView) Disk(_ context.Context, id string) (rack.Disk, error) {
	return call(v, false, "disk "+id, func() (rack.Disk, error) { return v.m.disk(id).view(), nil })
}

func (v *modelView) Instance(_ context.Context, id string) (rack.Instance, error) {
	return call(v, false, "instance "+id, func() (rack.Instance, error) {
		return rack.Instance{ID: id, RunState: v.m.instance(id).run}, nil
	})
}

func (v *modelView) Disks(context.Context, rack.Cursor, int) iter.Seq2[rack.ListItem[rack.Disk], error] {
	panic("scenarios have fewer disks than a tick lists")
}

func (v *modelView) Instances(context.Context) ([]rack.Instance, error) {
	panic("scenarios have fewer instances than a tick lists")
}

func (v *modelView) InstanceDisks(_ context.Context, id string) ([]rack.Disk, error) {
	return call(v, false, "instance disks "+id, func() ([]rack.Disk, error) {
		var disks []rack.Disk
		for _, d := range v.m.disks {
			if d.instance == id {
				disks = append(disks, d.view())
			}
		}
		return disks, nil
	})
}

func (v *modelView) Attach(_ context.Context, id, instance string) (rack.Disk, error) {
	return call(v, true, "attach "+id+" to "+instance, func() (rack.Disk, error) {
		d := v.m.disk(id)
		switch {
		case d.instance == instance:
		case d.instance != "":
			return rack.Disk{}, fmt.Errorf("attached elsewhere: %w", rack.ErrRefused)
		case v.m.instance(instance).run != rack.Stopped:
			return rack.Disk{}, rack.ErrNotStopped
		default:
			d.instance = instance
		}
		return d.view(), nil
	})
}

func (v *modelView) Detach(_ context.Context, id, instance string) (rack.Disk, error) {
	return call(v, true, "detach "+id+" from "+instance, func() (rack.Disk, error) {
		d := v.m.disk(id)
		switch {
		case d.instance == "":
		case d.instance != instance:
			return rack.Disk{}, fmt.Errorf("attached elsewhere: %w", rack.ErrRefused)
		case v.m.instance(instance).run != rack.Stopped:
			return rack.Disk{}, rack.ErrNotStopped
		default:
			d.instance = ""
		}
		return d.view(), nil
	})
}

func (v *modelView) StopInstance(_ context.Context, id string) error {
	for _, w := range v.m.current.process.engine.held {
		if w.record.Instance == id && w.recovering && v.m.instance(id).run != rack.Failed {
			v.m.fail("instance %s is stopped by a process that should only bring it back", id)
		}
	}
	_, err := call(v, true, "stop "+id, func() (struct{}, error) {
		if i := v.m.instance(id); i.run == rack.Running {
			i.run, i.down = "stopping", true
		}
		return struct{}{}, nil
	})
	return err
}

func (v *modelView) StartInstance(_ context.Context, id string) error {
	_, err := call(v, true, "start "+id, func() (struct{}, error) {
		switch i := v.m.instance(id); i.run {
		case rack.Stopped:
			if i.stoppedByOwner {
				v.m.fail("instance %s was stopped by its owner, and was started by a process", id)
			}
			i.run = "starting"
		case rack.Running, "starting":
		default:
			return struct{}{}, rack.ErrConflict
		}
		return struct{}{}, nil
	})
	return err
}

func (v *modelView) ConfirmProject(context.Context) error { return nil }

func (v *modelView) Records(context.Context) ([]rack.Record, error) {
	return call(v, false, "records", func() ([]rack.Record, error) {
		if v.m.current.tick {
			v.m.current.hasListed = true
		}
		var records []rack.Record
		for _, name := range sortedKeys(v.m.records) {
			records = append(records, v.m.records[name])
		}
		return records, nil
	})
}

func (v *modelView) CreateRecord(_ context.Context, name, text string) (rack.Record, error) {
	return call(v, true, "create "+name, func() (rack.Record, error) {
		if _, taken := v.m.records[name]; taken {
			return rack.Record{}, rack.ErrAlreadyExists
		}
		// A record that is deleted and created again gets another ID.
		n := 0
		for v.m.remembered(fmt.Sprintf("%s/%d", name, n)) {
			n++
		}
		v.m.records[name] = rack.Record{ID: fmt.Sprintf("%s/%d", name, n), Name: name, Text: text}
		return v.m.records[name], nil
	})
}

// remembered reports whether a process may know a record by this ID.
func (m *model) remembered(recordID string) bool {
	for _, p := range m.processes {
		if _, seen := p.engine.lastSeen[recordID]; seen {
			return true
		}
		for _, w := range p.engine.held {
			if w.record.recordID == recordID || w.takenFrom == recordID {
				return true
			}
		}
	}
	return false
}

func (v *modelView) byID(id string) (string, bool) {
	for name, r := range v.m.records {
		if r.ID == id {
			return name, true
		}
	}
	return "", false
}

func (v *modelView) UpdateRecord(_ context.Context, id, text string) error {
	_, err := call(v, true, "update "+id, func() (struct{}, error) {
		name, ok := v.byID(id)
		if !ok {
			return struct{}{}, rack.ErrNotFound
		}
		r := v.m.records[name]
		r.Text = text
		v.m.records[name] = r
		return struct{}{}, nil
	})
	return err
}

func (v *modelView) DeleteRecord(_ context.Context, id string) error {
	_, err := call(v, true, "delete "+id, func() (struct{}, error) {
		name, ok := v.byID(id)
		if !ok {
			return struct{}{}, rack.ErrNotFound
		}
		delete(v.m.records, name)
		return struct{}{}, nil
	})
	return err
}

func (v *modelView) Request(_ context.Context, instance, id string) error {
	_, err := call(v, true, "ask "+instance, func() (struct{}, error) {
		if i := v.m.instance(instance); i.request != id {
			i.request, i.reply = id, metadata.RestartReply{}
		}
		return struct{}{}, nil
	})
	return err
}

func (v *modelView) Reply(_ context.Context, instance, id string) (metadata.RestartReply, error) {
	return call(v, false, "answer "+instance, func() (metadata.RestartReply, error) {
		if i := v.m.instance(instance); i.request == id {
			return i.reply, nil
		}
		return metadata.RestartReply{}, nil
	})
}

func (v *modelView) Withdraw(_ context.Context, instance, id string) (metadata.RestartReply, error) {
	return call(v, true, "withdraw "+instance, func() (metadata.RestartReply, error) {
		i := v.m.instance(instance)
		if i.request != id {
			return metadata.RestartReply{}, nil
		}
		said := i.reply
		if said.State != metadata.RestartAccepted {
			i.request, i.reply = "", metadata.RestartReply{}
		}
		return said, nil
	})
}

func (v *modelView) Forget(_ context.Context, instance, id string) error {
	_, err := call(v, true, "forget "+instance, func() (struct{}, error) {
		if i := v.m.instance(instance); i.request == id {
			i.request, i.reply = "", metadata.RestartReply{}
		}
		return struct{}{}, nil
	})
	return err
}

func (v *modelView) Report(context.Context, string, metadata.RestartReport) error { return nil }

// modelClock ends waits where the rules on time allow it, see [modelClock.Passed].
type modelClock struct {
	m *model
	p *modelProcess
}

func (modelClock) Now() time.Time { return time.Time{} }

func (c modelClock) Passed(what timer, key string, _ time.Time, _ time.Duration) bool {
	switch what {
	case timerWindow, timerRefusal, timerCoolDown, timerGuestStop:
		return true
	case timerLateCalls:
		return true // this rack carries out calls at once, except the late calls of dead processes
	case timerSweep:
		return false // this model deletes no disks
	case timerStuck:
		return true
	case timerOutdated:
		return false // guests accept requests of any age
	case timerRenewal, timerRequest, timerBack, timerApply, timerHandover:
		// These waits end operations that would otherwise continue for ever. Ending one early is a fault.
		return c.endsEarly(what)
	case timerLease:
		return c.callsArrived() && c.m.leaseMayExpire(key, func() bool { return c.endsEarly(what) })
	case timerTakeover:
		return c.callsArrived() && c.m.leaseMayExpire(key, func() bool { return true })
	case timerReply:
		return c.m.guestOf(key) == guestSilent || c.endsEarly(what)
	case timerHalt:
		return c.m.guestOf(key) == guestHangs || c.endsEarly(what)
	}
	c.m.fail("unknown timer %q", what)
	return false
}

// callsArrived reports whether all calls of the process' earlier lives have arrived. That takes less time than a lease
// or the wait of a takeover.
func (c modelClock) callsArrived() bool {
	return !slices.ContainsFunc(c.m.lateCalls, func(l lateCall) bool { return l.process == c.p })
}

// endsEarly lets a wait end early, which counts as a fault.
func (c modelClock) endsEarly(what timer) bool {
	if c.m.faults == 0 || !c.m.scenario.hasFault("early "+string(what)) {
		return false
	}
	value, _ := c.m.call(modelCall{name: "early " + string(what), choice: true})
	early, _ := value.(bool)
	return early
}

func (c modelClock) Wait(_ context.Context, done <-chan struct{}) error {
	ready := func() bool {
		select {
		case <-done:
			return true
		default:
			return false
		}
	}
	_, err := c.m.call(modelCall{name: "wait", ready: ready, do: func() (any, error) { return nil, nil }})
	return err
}

func (m *model) guestOf(restartID string) guest {
	for _, p := range m.processes {
		if w := p.engine.held[restartID]; w != nil {
			return m.instance(w.record.Instance).guest
		}
	}
	return guestUp
}

// leaseMayExpire reports whether the lease of a record may be over. It may if the holder has died and its late calls
// have arrived. The lease of a live holder that is not carrying out a decision may end too, if slow allows that fault.
func (m *model) leaseMayExpire(recordID string, slow func() bool) bool {
	var r restartRecord
	for _, record := range m.records {
		if record.ID == recordID {
			_ = json.Unmarshal([]byte(record.Text), &r)
		}
	}
	if slices.ContainsFunc(m.lateCalls, func(l lateCall) bool { return l.holder == r.Holder }) {
		return false
	}
	for _, p := range m.processes {
		if p.engine.holder != r.Holder {
			continue
		}
		for _, a := range m.activities {
			if a.process == p && a.tick && a.hasListed {
				return false
			}
		}
		return slow()
	}
	return true
}

// --- activities

func (m *model) begin(p *modelProcess, label string, tick bool, run func(ctx context.Context)) {
	a := &activity{process: p, label: label, tick: tick}
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
	if records, ok := value.([]rack.Record); ok {
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

var modelSeed = maphash.MakeSeed()

// hashProcess hashes the state of a process.
func (m *model) hashProcess(h *maphash.Hash, p *modelProcess) {
	e := p.engine
	write(h, e.holder)
	for _, d := range sortedKeys(e.requests) {
		write(h, "request", d, e.requests[d].instance, e.requests[d].fromRestart, boolText(e.requests[d].attachFailed))
	}
	for _, d := range sortedKeys(e.locked) {
		write(h, "locked", d)
	}
	for _, id := range sortedKeys(e.held) {
		w := e.held[id]
		write(
			h,
			"held",
			id,
			string(w.stage),
			boolText(w.recovering),
			boolText(w.requestSent),
			w.takenFrom,
			w.record.recordID,
			boolText(w.record.MayStop),
			boolText(w.record.Handover),
			boolText(w.record.Stuck),
			w.reported,
		)
	}
	for _, id := range sortedKeys(e.lastSeen) {
		write(h, "seen", id, e.lastSeen[id].text)
	}
	for _, id := range sortedKeys(e.refusals) {
		write(h, "rest", id)
	}
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

// --- the orchestrator

func (m *model) publish(p *modelProcess, v *modelVolume, instance string) {
	v.busy, v.released = true, false
	m.begin(p, "publish "+v.disk, false, func(ctx context.Context) {
		disk, err := p.engine.Publish(ctx, v.disk, instance)
		v.busy = false
		if err != nil {
			return
		}
		if disk.InstanceID != instance {
			m.fail("publish of %s on %s succeeded with the disk on %q", v.disk, instance, disk.InstanceID)
		}
		v.published = instance
		v.at++
	})
}

func (m *model) unpublish(p *modelProcess, v *modelVolume, instance string) {
	v.busy, v.published = true, ""
	m.begin(p, "unpublish "+v.disk, false, func(ctx context.Context) {
		_, err := p.engine.Unpublish(ctx, v.disk, instance)
		v.busy = false
		if err == nil {
			v.released = true
			v.at++
		}
	})
}

// --- the scheduler

type option struct {
	what, which string
	// fault is true if the option counts as a fault, leaves if it interrupts an activity that could continue.
	fault, leaves bool
	do            func()
}

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
	for i, l := range m.lateCalls {
		m.add("late", l.name, func() {
			m.lateCalls = slices.Delete(m.lateCalls, i, i+1)
			_, _ = l.do()
			for _, i := range m.instances {
				i.stoppedByOwner = false // whether the owner stopped it before or after the call is unknown
			}
		})
	}
	for _, p := range m.processes {
		if !p.ticking {
			m.add("tick", p.name, func() {
				p.ticking = true
				m.begin(p, "tick", true, func(ctx context.Context) {
					_ = p.engine.tick(ctx)
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
		for _, v := range m.volumes {
			m.volumeOptions(p, v)
		}
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
}

func (m *model) callOptions(a *activity) {
	c := a.pending
	where := a.process.name + " " + a.label + ": " + c.name
	if c.choice {
		m.add("not", where, func() { m.returnTo(a, false, nil) })
		m.fault(c.name, "is", where, func() { m.returnTo(a, true, nil) })
		return
	}
	m.add("", where, func() {
		m.current = a
		value, err := c.do()
		m.returnTo(a, value, err)
	})
	if c.ready != nil {
		return
	}
	m.fault("refused", "no answer, not done", where, func() { m.returnTo(a, nil, errTransient) })
	if c.mutates {
		m.fault("lost", "no answer, done", where, func() {
			m.current = a
			_, _ = c.do()
			m.returnTo(a, nil, errTransient)
		})
	}
	if c.mutates || a.history == 0 {
		// A crash before a later read has the same effect as one before the next change.
		m.fault("crash", "crash before", where, func() { m.crash(a.process) })
	}
	if c.mutates {
		if a.tick {
			m.fault("crash", "crash, and later", where, func() {
				m.lateCalls = append(
					m.lateCalls,
					lateCall{process: a.process, holder: a.process.engine.holder, name: c.name, do: c.do},
				)
				m.crash(a.process)
			})
		}
		m.fault("crash", "crash after", where, func() {
			m.current = a
			_, _ = c.do()
			m.crash(a.process)
		})
	}
}

// crash kills a process and starts it again with empty memory.
func (m *model) crash(p *modelProcess) {
	for _, a := range slices.Clone(m.activities) {
		if a.process == p {
			m.current = a
			a.stop()
			m.activities = slices.DeleteFunc(m.activities, func(other *activity) bool { return other == a })
			for _, v := range m.volumes {
				if strings.HasSuffix(a.label, "publish "+v.disk) {
					v.busy = false
				}
			}
		}
	}
	for _, w := range p.engine.held {
		if !w.requestSent && !w.recovering {
			m.instance(w.record.Instance).stoppedByOwner = false // the only moment in which a crash leaves this unknown
		}
	}
	p.ticking, p.retired = false, false
	p.crashes++
	m.boot(p)
}

func (m *model) volumeOptions(p *modelProcess, v *modelVolume) {
	if v.busy || v.done() {
		return
	}
	if on := v.goal[v.at]; on != "" {
		m.add("publish "+v.disk+" on "+on, p.name, func() { m.publish(p, v, on) })
		if m.scenario.givesUpEarly {
			m.add("give up "+v.disk+" on "+on, p.name, func() {
				v.at++
				m.unpublish(p, v, on)
			})
		}
		return
	}
	from := v.published
	if v.at > 0 {
		from = v.goal[v.at-1]
	} else if from == "" {
		from = m.scenario.attached[slices.Index(m.volumes, v)]
	}
	m.add("unpublish "+v.disk+" from "+from, p.name, func() { m.unpublish(p, v, from) })
}

func (m *model) instanceOptions(i *modelInstance) {
	running := i.run == rack.Running
	switch {
	case i.run == "stopping":
		m.add("stopped", i.id, func() { i.run = rack.Stopped })
	case i.run == "starting":
		m.add("running", i.id, func() {
			i.run, i.down, i.stoppedByOwner, i.ownerStarts, i.guest = rack.Running, false, false, false, guestUp
			if i.reply.State == metadata.RestartAccepted {
				i.reply.State = "booted"
			}
		})
	case running && i.guest == guestUp && i.reply.State == "booted":
		m.add("back", i.id, func() { i.reply.State = metadata.RestartBack })
	case running && i.guest == guestHalts, running && i.guest == guestHangs:
		m.add("halted", i.id, func() { i.run, i.guest = rack.Stopped, guestUp })
	case running && i.guest == guestUp && i.request != "" && i.reply.State == "":
		m.add("accepts", i.id, func() { i.reply.State, i.guest, i.down = metadata.RestartAccepted, guestHalts, true })
		m.fault("refuses", "refuses", i.id, func() { i.reply.State = metadata.RestartRefused })
		m.fault(
			"hangs",
			"accepts and hangs",
			i.id,
			func() { i.reply.State, i.guest, i.down = metadata.RestartAccepted, guestHangs, true },
		)
		m.fault("silent", "says nothing", i.id, func() { i.guest = guestSilent })
	case running && i.guest == guestSilent && i.request == "":
		m.add("speaks again", i.id, func() { i.guest = guestUp })
	case i.ownerStarts && i.run == rack.Stopped:
		m.add("started by its owner", i.id, func() { i.run = "starting" })
	}
	if running && i.guest == guestUp {
		m.fault("user stop", "stopped by its owner", i.id, func() {
			i.run, i.stoppedByOwner, i.ownerStarts = rack.Stopped, true, true
			for _, r := range m.records {
				if strings.Contains(r.Text, i.id) && strings.Contains(r.Text, `"mayStop":true`) {
					i.stoppedByOwner = false // unknown to every process
				}
			}
		})
	}
}

// --- invariants

func (m *model) check() {
	down := 0
	for _, i := range m.instances {
		if i.down && !m.stuckRestart(i) {
			down++
		}
	}
	if down > m.scenario.maxDown {
		m.fail("%d instances are down", down)
	}
	for _, i := range m.instances {
		var sent []string
		for _, p := range m.processes {
			for id, w := range p.engine.held {
				// Without its record a restart is over, even if its holder does not know that yet.
				if m.records[restartName(modelCluster, w.record.slot, w.record.epoch)].ID == w.record.recordID &&
					w.record.Instance == i.id &&
					w.requestSent {
					sent = append(sent, id)
				}
			}
		}
		if len(sent) > 1 && sent[0] != sent[1] {
			m.fail("instance %s is taken down by two restarts: %s", i.id, sent)
		}
	}
	for i, v := range m.volumes {
		d := m.disks[i]
		detach, isDeferred := m.records[detachName(d.id)]
		deferredHere := isDeferred && d.instance != "" && strings.Contains(detach.Text, d.instance)
		if v.published != "" && d.instance != v.published {
			m.fail("volume %s is published on %s, and its disk is on %q", v.disk, v.published, d.instance)
		}
		if v.published != "" && deferredHere {
			m.fail("volume %s is published on %s, and its detach from there is deferred", v.disk, v.published)
		}
		if v.released && !v.busy && d.instance != "" && !deferredHere {
			m.fail("volume %s is unpublished, and its disk is on %s with no record of it", v.disk, d.instance)
		}
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

// settled reports whether everything is done and only deferred detaches are left. Every run must be able to settle.
func (m *model) settled() bool {
	if len(m.activities) > 0 || len(m.lateCalls) > 0 {
		return false
	}
	for name := range m.records {
		if strings.HasPrefix(name, restartPrefix) {
			return false
		}
	}
	for _, v := range m.volumes {
		if !v.done() {
			return false
		}
	}
	for _, i := range m.instances {
		// A request whose guest is back already has no effect any more.
		if i.run != rack.Running || i.request != "" && i.reply.State != metadata.RestartBack {
			return false
		}
	}
	return true
}

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
	maphash.WriteComparable(&h, [2]int{m.faults, m.switches})
	if m.last != nil {
		maphash.WriteComparable(&h, m.activityHash(m.last))
	}
	return h.Sum64()
}

// hashWorld hashes everything except the processes.
func (m *model) hashWorld(h *maphash.Hash) {
	for _, i := range m.instances {
		write(
			h,
			i.run,
			string(i.guest),
			boolText(i.down),
			boolText(i.stoppedByOwner),
			boolText(i.ownerStarts),
			i.request,
			string(i.reply.State),
		)
	}
	for _, d := range m.disks {
		write(h, d.instance)
	}
	for _, v := range m.volumes {
		maphash.WriteComparable(h, v.at)
		write(h, v.published, boolText(v.released), boolText(v.busy))
	}
	for _, name := range sortedKeys(m.records) {
		write(h, m.records[name].ID, m.records[name].Text)
	}
	for _, l := range m.lateCalls {
		write(h, l.holder, l.name)
	}
}

func (m *model) activityHash(a *activity) uint64 {
	var h maphash.Hash
	h.SetSeed(modelSeed)
	write(&h, a.process.name, a.label, boolText(a.hasListed), a.pending.name)
	maphash.WriteComparable(&h, a.history)
	return h.Sum64()
}

func (m *model) end() {
	for _, a := range m.activities {
		m.current = a
		a.stop()
	}
}

// --- exploration

type explorer struct {
	t        *testing.T
	scenario scenario
	seen     map[uint64]bool
	// predecessors are the states from which a state was reached without a fault or an interruption.
	predecessors map[uint64][]uint64
	settled      []uint64
	steps        int
	// failing are states that count as failures.
	failing map[uint64]bool
}

// explore explores all runs, the shortest first. It reports whether it finished before the deadline.
func (x *explorer) explore(deadline time.Time) bool {
	todo := [][]byte{nil}
	for n := 0; n < len(todo); n++ {
		if n%64 == 0 && time.Now().After(deadline) {
			return false
		}
		todo = append(todo, x.expand(todo[n])...)
		todo[n] = nil
	}
	return true
}

// expand repeats a path and continues it with the first option each time, until it reaches a known state. It returns
// the paths that branch off. A path lists the chosen options wherever there was more than one.
func (x *explorer) expand(path []byte) [][]byte {
	m := newModel(x.t, x.scenario)
	defer m.end()
	var from uint64
	free := true // whether the last step of the path was no fault
	for n, taken := range path {
		opts := x.choices(m, path[:n])
		if n == len(path)-1 {
			from = m.hash()
		}
		free = !opts[taken].fault
		x.take(m, opts[taken], path[:n+1])
	}
	var branches [][]byte
	for {
		opts := x.choices(m, path)
		h := m.hash()
		if from != 0 && free {
			x.predecessors[h] = append(x.predecessors[h], from)
		}
		if x.seen[h] {
			return branches
		}
		x.seen[h] = true
		if x.failing[h] {
			x.fail(path, "this state never settles")
		}
		if m.settled() {
			x.settled = append(x.settled, h)
		}
		for i := 1; i < len(opts); i++ {
			branches = append(branches, append(slices.Clone(path), byte(i)))
		}
		from, free = h, !opts[0].fault
		path = append(path, 0)
		x.take(m, opts[0], path)
	}
}

// choices continues until an activity has ended or more than one thing can happen, and returns the options.
func (x *explorer) choices(m *model, path []byte) []option {
	for {
		opts := m.options()
		if len(opts) == 0 {
			x.fail(path, "nothing can happen any more: deadlock")
		}
		if len(opts) > 1 || m.last == nil {
			return opts
		}
		x.take(m, opts[0], path)
	}
}

func (x *explorer) take(m *model, o option, path []byte) {
	x.steps++
	m.take(o)
	m.check()
	if m.failure != "" {
		x.fail(path, m.failure)
	}
}

// fail prints the steps that led to a failure.
func (x *explorer) fail(path []byte, failure string) {
	m := newModel(x.t, x.scenario)
	defer m.end()
	var story strings.Builder
	for n := 0; m.failure == "" || n < len(path); {
		opts := m.options()
		o := opts[0]
		if len(opts) > 1 || m.last == nil {
			if n == len(path) {
				break
			}
			o, n = opts[path[n]], n+1
		}
		fmt.Fprintf(&story, "%s %s\n", o.what, o.which)
		m.take(o)
		m.check()
	}
	x.t.Fatalf("%s: %s after:\n%s", x.scenario.name, failure, &story)
}

// stuck returns the states from which no settled state can be reached without a fault.
func (x *explorer) stuck() map[uint64]bool {
	reached := map[uint64]bool{}
	todo := slices.Clone(x.settled)
	for len(todo) > 0 {
		h := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		if !reached[h] {
			reached[h] = true
			todo = append(todo, x.predecessors[h]...)
		}
	}
	stuck := map[uint64]bool{}
	for h := range x.seen {
		if !reached[h] {
			stuck[h] = true
		}
	}
	return stuck
}

var n0, n1 = instanceID(0), instanceID(1)

// scenarios are the goals of the orchestrator and the processes that serve it.
var scenarios = []scenario{
	{name: "one volume", shutdown: Guest, maxDown: 1, processes: 1, goals: [][]string{{n0}}},
	{name: "one volume and a power cut", shutdown: Hard, maxDown: 1, processes: 1, goals: [][]string{{n0}}},
	{
		name:      "a volume that comes back",
		shutdown:  Hard,
		maxDown:   1,
		processes: 1,
		attached:  []string{n0},
		goals:     [][]string{{"", n0}, {n0}},
		prelude:   []string{"publish " + diskID(1), "unpublish " + diskID(0)},
	},
	{
		name:      "a volume that moves",
		shutdown:  Hard,
		maxDown:   1,
		processes: 1,
		attached:  []string{n0},
		goals:     [][]string{{"", n1}},
		prelude:   []string{"unpublish " + diskID(0), "publish " + diskID(0)},
	},
	{name: "two controllers", shutdown: Guest, maxDown: 1, processes: 2, goals: [][]string{{n0}},
		prelude: []string{"publish " + diskID(0)}},
	{name: "two controllers want the same", shutdown: Hard, maxDown: 2, processes: 2, goals: [][]string{{n0}},
		prelude: []string{"publish " + diskID(0) + " on " + n0 + " p0", "publish " + diskID(0) + " on " + n0 + " p1"}},
	{
		name:      "two controllers and a volume that comes back",
		shutdown:  Hard,
		maxDown:   1,
		processes: 2,
		attached:  []string{n0},
		goals:     [][]string{{"", n0}, {n0}},
		prelude:   []string{"publish " + diskID(1) + " on " + n0 + " p0", "unpublish " + diskID(0)},
	},
	{
		name:         "two controllers and a volume that is given up",
		shutdown:     Hard,
		maxDown:      1,
		processes:    2,
		goals:        [][]string{{n0, ""}},
		givesUpEarly: true,
		prelude:      []string{"publish " + diskID(0) + " on " + n0 + " p0"},
	},
	{name: "one instance after the other", shutdown: Hard, maxDown: 1, processes: 2, goals: [][]string{{n0}, {n1}},
		prelude: []string{"publish " + diskID(0) + " on " + n0 + " p0", "publish " + diskID(1) + " on " + n1 + " p1"}},
	{
		name:      "two slots and two controllers",
		shutdown:  Hard,
		maxDown:   2,
		processes: 2,
		goals:     [][]string{{n1}, {n0}},
		prelude: []string{
			"publish " + diskID(0) + " on " + n1 + " p0",
			"tick p0",
			"tick p0",
			"stopped",
			"tick p0",
			"tick p0",
			"tick p0",
			"running",
			"tick p0",
			"publish " + diskID(1) + " on " + n0 + " p0",
			"publish " + diskID(1) + " on " + n0 + " p1",
			"tick p0 | create",
			"tick p1",
			"p0 tick",
		},
	},
	{
		name:         "a holder that loses its restart",
		shutdown:     Guest,
		maxDown:      1,
		processes:    2,
		goals:        [][]string{{n0, ""}},
		givesUpEarly: true,
		prelude:      []string{"publish " + diskID(0) + " on " + n0 + " p0", "tick p0", "tick p1"},
	},
	{
		name:      "a restart that ends while its volume comes back",
		shutdown:  Hard,
		maxDown:   1,
		processes: 2,
		attached:  []string{n0},
		goals:     [][]string{{"", n0}, {n0}},
		prelude: []string{
			"publish " + diskID(1) + " on " + n0 + " p0",
			"unpublish " + diskID(0),
			"tick p0",
			"tick p0",
			"stopped",
		},
	},
	{
		name:      "a volume that comes back as a restart begins",
		shutdown:  Hard,
		maxDown:   1,
		processes: 2,
		attached:  []string{n0},
		goals:     [][]string{{"", n0}, {n0}},
		prelude: []string{
			"publish " + diskID(1) + " on " + n0 + " p0",
			"unpublish " + diskID(0),
			"publish " + diskID(0) + " on " + n0 + " p1 | delete",
			"tick p0",
			"tick p0",
			"stopped",
		},
	},
	{
		name:      "the controller's own instance",
		shutdown:  Guest,
		maxDown:   1,
		processes: 2,
		selves:    []string{n0, n1},
		goals:     [][]string{{n0}},
		prelude:   []string{"publish " + diskID(0) + " on " + n0 + " p0"},
	},
	{
		name:      "a volume that leaves the controller's own instance",
		shutdown:  Guest,
		maxDown:   1,
		processes: 2,
		selves:    []string{n0, n1},
		attached:  []string{n0},
		goals:     [][]string{{"", n1}},
		prelude:   []string{"unpublish " + diskID(0) + " from " + n0 + " p0", "publish " + diskID(0) + " on " + n1 + " p0"},
	},
	{
		name:      "three volumes change places",
		shutdown:  Guest,
		maxDown:   1,
		processes: 2,
		attached:  []string{n0, n1},
		goals:     [][]string{{"", n1}, {"", n0}, {n0}},
		prelude: []string{
			"unpublish " + diskID(0),
			"unpublish " + diskID(1),
			"publish " + diskID(0),
			"publish " + diskID(1),
		},
	},
}

// bounds are the faults that may happen in one run.
var bounds = []struct {
	name             string
	faults, switches int
	kinds            []string
}{
	{"any order", 0, 2, nil},
	{"crashes", 2, 0, []string{"crash"}},
	{"processes that retire", 2, 1, []string{"retire", "crash"}},
	{"answers that do not come", 2, 0, []string{"lost", "refused"}},
	{
		"an orchestrator that does not answer",
		3,
		0,
		[]string{"silent", "refused", "early reply", "early back", "early halt"},
	},
	{"a slow holder", 1, 2, []string{"early lease"}},
	{"a slow holder, and one that retires", 2, 2, []string{"early lease", "retire"}},
	{"a user in between", 1, 1, []string{"user stop"}},
	{"crashes and users", 2, 0, []string{"crash", "user stop"}},
	{"one of all", 1, 1, nil},
	{
		"early ends, guests and users",
		2,
		0,
		[]string{
			"retire",
			"user stop",
			"refuses",
			"hangs",
			"silent",
			"early reply",
			"early halt",
			"early back",
			"early request",
			"early renewal",
			"early apply",
			"early handover",
			"early lease",
		},
	},
}

// TestModel explores as many runs as the time allows, the shortest first, or all runs within the bounds if they are few
// enough.
func TestModel(t *testing.T) {
	var states, complete, started atomic.Int64
	explorations := len(scenarios) * len(bounds)
	deadline := time.Now().Add(*modelTime)
	// An exploration that ends early leaves its time to the others.
	share := func() time.Duration {
		left := explorations + 1 - int(started.Add(1))
		return time.Until(deadline) * time.Duration(runtime.GOMAXPROCS(0)) / time.Duration(max(left, runtime.GOMAXPROCS(0)))
	}
	defer debug.SetGCPercent(debug.SetGCPercent(400)) // a run keeps nothing, so a larger heap only saves time
	t.Run("of", func(t *testing.T) {
		for _, s := range scenarios {
			for _, bound := range bounds {
				s := s // the explorations run in parallel
				s.faults, s.switches, s.kinds = bound.faults, bound.switches, bound.kinds
				t.Run(s.name+"/"+bound.name, func(t *testing.T) {
					t.Parallel()
					x := &explorer{t: t, scenario: s, seen: map[uint64]bool{}, predecessors: map[uint64][]uint64{}}
					start := time.Now()
					all := x.explore(start.Add(share()))
					t.Logf(
						"%d states, %d steps in %s; complete: %t",
						len(x.seen),
						x.steps,
						time.Since(start).Round(time.Millisecond),
						all,
					)
					states.Add(int64(len(x.seen)))
					if !all {
						return
					}
					complete.Add(1)
					if stuck := x.stuck(); len(stuck) > 0 {
						t.Errorf("%d of %d states never settle (%d are settled)", len(stuck), len(x.seen), len(x.settled))
						again := &explorer{
							t:            t,
							scenario:     s,
							seen:         map[uint64]bool{},
							predecessors: map[uint64][]uint64{},
							failing:      stuck,
						}
						again.explore(time.Now().Add(time.Hour))
					}
				})
			}
		}
	})
	t.Logf("%d states; %d of %d explorations were complete", states.Load(), complete.Load(), explorations)
}

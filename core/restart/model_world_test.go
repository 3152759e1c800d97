// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package restart

import (
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/record"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
)

// guest is the state of an instance's guest.
type guest string

const (
	guestUp     guest = "up"
	guestHalts  guest = "halts"
	guestHangs  guest = "hangs"
	guestSilent guest = "silent" // its node plugin does not reply
	guestLost   guest = "lost"   // the orchestrator cannot reach the node any more, for ever
)

// drain is how far an instance's node is drained.
type drain string

const (
	drainNone    drain = ""
	drainStarted drain = "started"
	drainDone    drain = "done"
	drainStays   drain = "stays" // some work never leaves
)

type modelInstance struct {
	id    string
	run   string
	guest guest
	drain drain
	// down is true from the moment that an engine caused the stop until the instance runs again.
	down bool
	// asked is true once the orchestrator has asked for something that needs a restart of this instance.
	asked bool
	// stoppedByOwner is true while the owner has stopped it and no restart had been requested before.
	stoppedByOwner bool
	// ownerStarts is true while the owner has stopped it and will start it, ownerKeeps while it may stay stopped.
	// ownerActed stays true.
	ownerStarts, ownerKeeps, ownerActed bool
	// since is the time of the run state, as far as an engine can compare it: see [model.changeRun].
	since int
	// cooling is true from a start until the cool-down is over, recent from a stop by an engine until then.
	cooling, recent bool
	// broughtBack is true after a process has started it for its own restart, until that process dies or a record allows
	// the next stop.
	broughtBack bool
	// request is the ID of the restart that its node plugin is asked for.
	request string
	reply   orchestrator.RestartReply
}

// runDeleted is the run state of a deleted instance.
const runDeleted = "deleted"

// view is the instance as the rack shows it.
func (i *modelInstance) view() rack.Instance {
	return rack.Instance{ID: i.id, RunState: i.run, RunStateSince: time.Unix(int64(i.since), 0)}
}

// changeRun changes the run state of an instance. Beside others it also changes its time, to one that no engine
// remembers.
func (m *model) changeRun(i *modelInstance, run string) {
	i.run, i.since = run, 0
	for m.scenario.hasOthers() && m.remembersRun(i) {
		i.since++
	}
}

// remembersRun reports whether an engine has seen the instance's present run state before.
func (m *model) remembersRun(i *modelInstance) bool {
	for _, p := range m.processes {
		for _, h := range p.engine.held {
			if h.record.Instance == i.id && h.run.Equal(i.view().RunStateSince) {
				return true
			}
		}
	}
	return false
}

type modelDisk struct {
	id, instance string
	deleted      bool
	// disk is the ID of the disk that the volume has, replaced says that it has none between its old one and its new one.
	backing  string
	replaced bool
	// late says that a publish attached it to a stopped instance after a restart had looked at the instance's disks.
	late bool
}

// gone in a volume's goal means that the volume is deleted.
const gone = "deleted"

// modelVolume is the orchestrator's view of a volume. The orchestrator publishes it on each instance of goal in turn.
type modelVolume struct {
	id   string
	goal []string // instances; "" means unpublished; the last may be gone
	at   int      // index into goal
	// published is the instance of the last successful publish. It is cleared before an unpublish.
	published string
	// released is true from a successful unpublish until the next publish.
	released bool
	busy     bool
}

func (v *modelVolume) done() bool { return v.at == len(v.goal) }

// mode is the attach mode of the controllers.
type mode string

const (
	modeRestart mode = "restart"
	modeHot     mode = "hot"
)

type modelProcess struct {
	name    string
	engine  *Engine
	self    string
	crashes int
	ticking bool
	// retired is true once the process has handed over its restarts and only has to end.
	retired bool
	// cleaned is true once a process in mode hot has cleaned up. Then it ticks no more.
	cleaned bool
	// wants is the instance for which this process was last asked, by disk, until the publish succeeds or the volume is
	// unpublished.
	wants map[string]string
}

// model is one run.
type model struct {
	t          testing.TB
	scenario   scenario
	instances  []*modelInstance
	disks      []*modelDisk
	volumes    []*modelVolume
	records    map[string]record.Record // by name
	lateCalls  []lateCall
	growth     modelGrowth
	processes  []*modelProcess
	activities []*activity
	current    *activity
	faults     int
	// switches is how often another activity may still interrupt one that could continue.
	switches int
	// rackDown and orchestratorDown are true while it answers no call.
	rackDown, orchestratorDown bool
	// hidden is true while the rack shows nothing of the project, such as after a lost role.
	hidden bool
	// mode is the mode of all controllers, modesLeft are those that the operator will set.
	mode      mode
	modesLeft []mode
	// last is the activity that was resumed last.
	last    *activity
	failure string
	opts    []option
}

var errTransient = fmt.Errorf("model: %w", rack.ErrUnavailable)

func instanceID(i int) string { return fmt.Sprintf("10000000-0000-4000-8000-00000000000%d", i) }
func volumeID(i int) string   { return fmt.Sprintf("20000000-0000-4000-8000-00000000000%d", i) }

func newModel(t testing.TB, s scenario) *model {
	m := &model{
		t: t, scenario: s, records: map[string]record.Record{}, faults: s.faults, switches: s.switches,
		mode: modeRestart, modesLeft: s.modes,
	}
	for i := range 2 {
		m.instances = append(m.instances, &modelInstance{id: instanceID(i), run: rack.Running, guest: guestUp})
	}
	for i, goal := range s.goals {
		m.disks = append(m.disks, &modelDisk{id: volumeID(i), backing: volumeID(i)})
		v := &modelVolume{id: volumeID(i), goal: goal}
		if i < len(s.attached) {
			m.disks[i].instance, v.published = s.attached[i], s.attached[i]
		}
		m.volumes = append(m.volumes, v)
	}
	for i := range s.processes {
		p := &modelProcess{name: fmt.Sprintf("p%d", i), wants: map[string]string{}}
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
		if strings.HasPrefix(strings.TrimSpace(o.name()), begin) {
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
	opts := Options{
		Cluster: modelCluster, MaxDisks: m.scenario.room(), Shutdown: m.scenario.shutdown, Requester: view,
		Drainer: view,
		Self:    func() (string, bool) { return p.self, true },
		Window:  time.Second, MaxDown: m.scenario.maxDown, CoolDown: time.Second, HaltTimeout: time.Second,
		Log: slog.New(slog.DiscardHandler),
	}
	if m.mode == modeHot { // what CleanUpRestarts of core/controller sets
		opts.Shutdown, opts.MaxDown = Hard, 0
	}
	if m.scenario.hasFault("expansion") {
		opts.Yield = view.yield
	}
	p.engine = New(view, opts)
	p.engine.clock = modelClock{m: m, p: p}
	p.engine.holder = fmt.Sprintf("%s.%d", p.name, p.crashes)
	p.engine.newID = func() string { return m.unusedID(p.engine.holder) }
}

// quiet reports whether no call is under way. Only then a model can be copied.
func (m *model) quiet() bool { return len(m.activities) == 0 }

// clone copies a quiet model.
func (m *model) clone() *model {
	c := *m
	c.instances, c.disks, c.volumes = cloneAll(m.instances), cloneAll(m.disks), cloneAll(m.volumes)
	c.records, c.lateCalls = maps.Clone(m.records), slices.Clone(m.lateCalls)
	c.activities, c.opts, c.processes = nil, nil, nil
	for _, p := range m.processes {
		q := *p
		q.wants = maps.Clone(p.wants)
		c.boot(&q)
		cloneEngine(p.engine, q.engine)
		c.processes = append(c.processes, &q)
	}
	return &c
}

func cloneAll[T any](all []*T) []*T {
	copies := make([]*T, len(all))
	for i, one := range all {
		copied := *one
		copies[i] = &copied
	}
	return copies
}

// cloneEngine copies what an engine remembers. Nothing is locked in a quiet model, and the engine's times are all zero.
func cloneEngine(from, to *Engine) {
	to.refusesHot.Store(from.refusesHot.Load())
	to.refusesPlug.Store(from.refusesPlug.Load())
	to.watched, to.statuses = maps.Clone(from.watched), maps.Clone(from.statuses)
	to.lastSeen, to.refusals = maps.Clone(from.lastSeen), maps.Clone(from.refusals)
	for disk, request := range from.requests {
		copied := *request
		to.requests[disk] = &copied
	}
	for id, h := range from.held {
		copied := *h
		to.held[id] = &copied
	}
}

// unusedID returns the first restart ID of a holder that no process, record or late call knows. IDs are used again, so
// that the number of states is finite.
func (m *model) unusedID(holder string) string {
	for n := 0; ; n++ {
		id := fmt.Sprintf("%s.r%d", holder, n)
		used := slices.ContainsFunc(m.instances, func(i *modelInstance) bool { return i.request == id })
		for _, r := range m.records {
			used = used || strings.Contains(r.Text, `"`+id+`"`)
		}
		for _, l := range m.lateCalls {
			used = used || strings.Contains(l.text, `"`+id+`"`)
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

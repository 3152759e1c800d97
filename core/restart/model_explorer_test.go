// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package restart

import (
	"fmt"
	"slices"
	"strings"
	"testing"
)

// explorer finds all states of a scenario, the nearest first, and the steps between them.
type explorer struct {
	t        *testing.T
	scenario scenario
	// start is where the search begins. The zero value is the beginning of the scenario.
	start  snapshot
	seen   map[uint64]int // the number of each state, by hash
	states []modelState
	// failing are the hashes of states that count as failures, each with its reason.
	failing map[uint64]string
	// named is true if the steps keep their names.
	named bool
}

// modelState is a state in which more than one thing can happen, or no call is under way.
type modelState struct {
	hash, work uint64
	settled    bool
	next       []modelStep
}

// modelStep is a step without a fault to another state.
type modelStep struct {
	to int
	// outside is true if no controller acts, see [option].
	outside bool
	// name is set if the exploration repeats another one to report its failure.
	name string
}

// snapshot is a copy of a quiet model, and the path to it from the start. A path lists the chosen options wherever
// there was more than one.
type snapshot struct {
	model *model
	path  []byte
}

// branch is a path that goes on from a snapshot.
type branch struct {
	from  snapshot
	steps []byte
}

func (b branch) path() []byte { return append(slices.Clone(b.from.path), b.steps...) }

// explore explores all runs, the shortest first. It reports whether they have no more states than the limit.
func (x *explorer) explore(limit int) (whole bool) {
	x.seen, x.states = map[uint64]int{}, nil
	todo := []branch{{from: x.start}}
	for n := 0; n < len(todo); n++ {
		if len(x.states) > limit {
			return false
		}
		todo = append(todo, x.expand(todo[n])...)
		todo[n] = branch{}
	}
	return true
}

// expand follows a branch and continues it with the first option each time, until it reaches a known state. It returns
// the branches that it passes.
func (x *explorer) expand(b branch) (branches []branch) {
	m := x.begin(b.from)
	defer func() { m.end() }()
	b.steps = slices.Clone(b.steps)
	from, step := -1, option{}
	for n, taken := range b.steps {
		at := branch{from: b.from, steps: b.steps[:n]}
		opts := x.choices(m, at)
		var known bool
		if from, known = x.seen[m.hash()]; !known || int(taken) >= len(opts) {
			x.t.Fatalf("the same steps lead to another state: does the engine depend on the order in a map, or on the time?")
		}
		step = opts[taken]
		x.take(m, opts[taken], at, taken)
	}
	for {
		opts := x.choices(m, b)
		to, known := x.visit(m, b)
		if from >= 0 && !step.fault {
			taken := modelStep{to: to, outside: step.outside}
			if x.named {
				taken.name = strings.TrimSpace(step.name())
			}
			x.states[from].next = append(x.states[from].next, taken)
		}
		if known || len(opts) == 0 {
			return branches
		}
		if m.quiet() && len(opts) > 1 {
			b = branch{from: snapshot{model: m.clone(), path: b.path()}}
		}
		for i := 1; i < len(opts); i++ {
			branches = append(branches, branch{from: b.from, steps: append(slices.Clone(b.steps), byte(i))})
		}
		from, step = to, opts[0]
		x.take(m, opts[0], b, 0)
		b.steps = append(b.steps, 0)
	}
}

// begin returns a model in the state of a snapshot, or in the first state.
func (x *explorer) begin(from snapshot) *model {
	if from.model == nil {
		return newModel(x.t, x.scenario)
	}
	return from.model.clone()
}

// visit returns the number of the model's state, and whether it was known before.
func (x *explorer) visit(m *model, b branch) (number int, known bool) {
	h := m.hash()
	if number, known = x.seen[h]; known {
		return number, true
	}
	if reason := x.failing[h]; reason != "" {
		x.fail(b.path(), reason)
	}
	x.seen[h] = len(x.states)
	x.states = append(x.states, modelState{hash: h, work: m.work(), settled: m.settled()})
	return len(x.states) - 1, false
}

// choices continues until an activity has ended or more than one thing can happen, and returns the options.
func (x *explorer) choices(m *model, b branch) []option {
	for {
		opts := m.options()
		if len(opts) != 1 || m.last == nil {
			return opts
		}
		m.take(opts[0])
		m.check()
		if m.failure != "" {
			x.fail(b.path(), m.failure)
		}
	}
}

func (x *explorer) take(m *model, o option, b branch, taken byte) {
	m.take(o)
	m.check()
	if m.failure != "" {
		x.fail(append(b.path(), taken), m.failure)
	}
}

// fail prints the steps that led to a failure.
func (x *explorer) fail(path []byte, failure string) {
	m := x.begin(x.start)
	defer m.end()
	var story strings.Builder
	for n := 0; m.failure == "" || n < len(path); {
		opts := m.options()
		taken := byte(0)
		if len(opts) != 1 || m.last == nil {
			if n == len(path) {
				break
			}
			taken, n = path[n], n+1
		}
		o := opts[taken]
		fmt.Fprintf(&story, "%s\n", strings.TrimSpace(o.name()))
		m.take(o)
		m.check()
	}
	x.t.Fatalf("%s after the steps of this trace:\n%s\n%s%s", failure, x.scenario.title(), &story, m.describe())
}

// describe returns what the rack, the guests and the orchestrator know.
func (m *model) describe() string {
	var text strings.Builder
	for _, i := range m.instances {
		fmt.Fprintf(&text, "= instance %s %s, guest %s, request %q %s\n", i.id, i.run, i.guest, i.request, i.reply.State)
	}
	for n, v := range m.volumes {
		fmt.Fprintf(
			&text,
			"= disk %s on %q, published on %q, %d of %q done\n",
			v.id,
			m.disks[n].instance,
			v.published,
			v.at,
			v.goal,
		)
	}
	for _, name := range sortedKeys(m.records) {
		fmt.Fprintf(&text, "= %s: %s\n", m.records[name].ID, m.records[name].Text)
	}
	return text.String()
}

// neverSettle returns the states from which no settled state can be reached without a fault.
func (x *explorer) neverSettle() map[uint64]string {
	before := make([][]int, len(x.states))
	var todo []int
	for from, s := range x.states {
		for _, step := range s.next {
			before[step.to] = append(before[step.to], from)
		}
		if s.settled {
			todo = append(todo, from)
		}
	}
	settles := make([]bool, len(x.states))
	for len(todo) > 0 {
		at := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		if !settles[at] {
			settles[at] = true
			todo = append(todo, before[at]...)
		}
	}
	failing := map[uint64]string{}
	for n, s := range x.states {
		if !settles[n] {
			failing[s.hash] = "this state never settles"
		}
	}
	return failing
}

// endlessWork returns the states of cycles without a fault in which controllers change the rack again and again. A
// cycle that ends as soon as a guest, the rack, an owner or the orchestrator acts is not endless.
func (x *explorer) endlessWork() map[uint64]string {
	group := x.cycles()
	work, works, ends := map[int]uint64{}, map[int]bool{}, map[int]bool{}
	for n, s := range x.states {
		g := group[n]
		if first, ok := work[g]; ok && first != s.work {
			works[g] = true
		}
		work[g] = s.work
		for _, step := range s.next {
			ends[g] = ends[g] || step.outside && group[step.to] != g
		}
	}
	failing := map[uint64]string{}
	for n, s := range x.states {
		if works[group[n]] && !ends[group[n]] {
			failing[s.hash] = "this state is in an endless cycle of work"
		}
	}
	return failing
}

// round returns the steps of a cycle of work through one of the states.
func (x *explorer) round(among map[uint64]string) string {
	for n, s := range x.states {
		if among[s.hash] == "" {
			continue
		}
		there, at := x.walk(n, among, func(to int) bool { return x.states[to].work != s.work })
		back, _ := x.walk(at, among, func(to int) bool { return to == n })
		if there != nil && back != nil {
			return strings.Join(append(there, back...), "\n")
		}
	}
	return "no cycle"
}

// walk returns the names of the fewest steps from a state to one that is the end.
func (x *explorer) walk(from int, among map[uint64]string, end func(int) bool) (names []string, at int) {
	type way struct {
		before *way
		state  int
		name   string
	}
	seen := map[int]bool{}
	for todo := []*way{{state: from}}; len(todo) > 0; todo = todo[1:] {
		for _, step := range x.states[todo[0].state].next {
			if seen[step.to] || among[x.states[step.to].hash] == "" {
				continue
			}
			seen[step.to] = true
			w := &way{todo[0], step.to, step.name}
			if !end(step.to) {
				todo = append(todo, w)
				continue
			}
			for ; w.before != nil; w = w.before {
				names = append([]string{w.name}, names...)
			}
			return names, step.to
		}
	}
	return nil, from
}

// cycles numbers the strongly connected components of the graph, by Tarjan's algorithm without recursion. States with
// the same number can reach each other.
func (x *explorer) cycles() []int {
	const unseen, onStack = 0, -1
	type frame struct{ state, next int }
	group, order, low := make([]int, len(x.states)), make([]int, len(x.states)), make([]int, len(x.states))
	var stack []int
	count := 0
	for root := range x.states {
		if group[root] != unseen {
			continue
		}
		frames := []frame{{state: root}}
		for len(frames) > 0 {
			f := &frames[len(frames)-1]
			if f.next == 0 {
				count++
				order[f.state], low[f.state], group[f.state] = count, count, onStack
				stack = append(stack, f.state)
			}
			if f.next < len(x.states[f.state].next) {
				to := x.states[f.state].next[f.next].to
				f.next++
				switch group[to] {
				case unseen:
					frames = append(frames, frame{state: to})
				case onStack:
					low[f.state] = min(low[f.state], order[to])
				}
				continue
			}
			done := f.state
			frames = frames[:len(frames)-1]
			if len(frames) > 0 {
				parent := frames[len(frames)-1].state
				low[parent] = min(low[parent], low[done])
			}
			for low[done] == order[done] && group[done] == onStack {
				top := stack[len(stack)-1]
				stack = stack[:len(stack)-1]
				group[top] = order[done]
			}
		}
	}
	return group
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package restart

import (
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// The model check runs the engine's own code, in up to two processes, against a model of the rack, its guests and an
// orchestrator. The code of a process between two calls is one step. Each scenario is small enough that all its states
// are found: every order of calls, with a bounded number of faults and interruptions. testdata/states.txt lists the
// scenarios with their bounds and numbers of states, and docs/development/model-check.md says what is checked.
//
//	model_scenarios_test.go   what is explored
//	model_world_test.go       the state of the model
//	model_calls_test.go       the rack and the orchestrator, as the engine calls them
//	model_expansion_test.go   an expansion of a volume meanwhile
//	model_clock_test.go       which waits may be over
//	model_schedule_test.go    what can happen next
//	model_invariants_test.go  the promises
//	model_explorer_test.go    the search

var (
	modelTime = flag.Duration(
		"model",
		time.Second,
		"explore the scenarios of which a computer with 2 cores finds this much",
	)
	updateModel = flag.Bool("update", false, "write the numbers of states to "+statesFile)
)

const (
	modelCluster = "model"
	// statesPerSecond says which explorations are left out: for each second of -model one may have so many states.
	statesPerSecond = 500
	// maxStates is the budget of one exploration. One that has more states fails.
	maxStates = 200_000
)

// explored has the number of states of each exploration of this run.
var explored sync.Map

// TestModel finds all states of the scenarios, and fails if a promise is broken in one of them, if one never comes to
// rest, if controllers can work without end, or if there are more states than the budget.
func TestModel(t *testing.T) {
	recorded := recordedStates(t)
	defer debug.SetGCPercent(debug.SetGCPercent(400)) // a run keeps nothing, so a larger heap only saves time
	t.Run("of", func(t *testing.T) {
		for _, s := range explorations() {
			if float64(recorded[s.title()]) > modelTime.Seconds()*statesPerSecond {
				continue
			}
			t.Run(s.title(), func(t *testing.T) {
				t.Parallel()
				x, began := &explorer{t: t, scenario: s}, time.Now()
				if !x.explore(maxStates) {
					t.Fatalf("more than %d states: make the scenario or its bound smaller", maxStates)
				}
				explored.Store(s.title(), len(x.states))
				x.checkRest()
				t.Logf("%d states in %s", len(x.states), time.Since(began).Round(time.Millisecond))
			})
		}
	})
	total, count := 0, 0
	for _, states := range explored.Range {
		total, count = total+states.(int), count+1
	}
	t.Logf("%d of %d explorations, all complete, with %d states", count, len(explorations()), total)
}

// TestModelTraces repeats runs that once broke a promise. It follows each one as far as the engine does the same, and
// then everything must come to rest.
func TestModelTraces(t *testing.T) {
	files, err := filepath.Glob("testdata/traces/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatalf("no traces: %v", err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			title, steps, _ := strings.Cut(strings.TrimSpace(string(text)), "\n")
			all := explorations()
			n := slices.IndexFunc(all, func(s scenario) bool { return s.title() == title })
			if n < 0 {
				t.Fatalf("no exploration %q", title)
			}
			followTrace(t, all[n], strings.Split(steps, "\n"))
		})
	}
}

func followTrace(t *testing.T, s scenario, steps []string) {
	m := newModel(t, s)
	defer m.end()
	for done, step := range steps {
		options := m.options()
		n := slices.IndexFunc(options, func(o option) bool { return strings.TrimSpace(o.name()) == step })
		if n < 0 && done == 0 {
			t.Fatalf("the scenario does not begin with %q any more: record the trace again", step)
		}
		if n < 0 {
			break
		}
		m.take(options[n])
		if m.check(); m.failure != "" {
			t.Fatalf("%s after %q", m.failure, step)
		}
	}
	m.faults, m.switches = 0, 0
	m.finish()
	x := &explorer{t: t, scenario: s, start: snapshot{model: m}}
	if !x.explore(maxStates) {
		t.Fatalf("more than %d states", maxStates)
	}
	x.checkRest()
}

// --- the numbers of states

const statesFile = "testdata/states.txt"

// TestModelStates compares the file with the scenarios, their bounds, and the numbers of states that TestModel found.
func TestModelStates(t *testing.T) {
	text, err := os.ReadFile(statesFile)
	if err != nil {
		t.Fatal(err)
	}
	states := recordedStates(t)
	for title, count := range explored.Range {
		if was := states[title.(string)]; was != count && !*updateModel {
			t.Errorf("%s has %d states, and %s says %d: run make model-states", title, count, statesFile, was)
		}
		states[title.(string)] = count.(int)
	}
	now := modelTables(states)
	if *updateModel && now != string(text) {
		if err := os.WriteFile(statesFile, []byte(now), 0o600); err != nil {
			t.Fatal(err)
		}
	} else if now != string(text) && !t.Failed() {
		t.Errorf("%s does not show the scenarios and bounds as they are: run make model-states", statesFile)
	}
}

// modelTables returns the tables of the bounds and of the scenarios.
func modelTables(states map[string]int) string {
	var b strings.Builder
	b.WriteString("| | bound | faults | interruptions | kinds of faults |\n|---|---|---|---|---|\n")
	for n, bound := range allBounds() {
		fmt.Fprintf(
			&b,
			"| %c | %s | %d | %d | %s |\n",
			'a'+n,
			bound.what,
			bound.faults,
			bound.switches,
			strings.Join(bound.kinds, ", "),
		)
	}
	b.WriteString("\n| scenario | controllers | stop | volumes |")
	for n := range allBounds() {
		fmt.Fprintf(&b, " %c |", 'a'+n)
	}
	b.WriteString("\n|---|---|---|---|" + strings.Repeat("---:|", len(allBounds())) + "\n")
	total := 0
	for _, s := range scenarios {
		fmt.Fprintf(&b, "| %s | %d | %s | %s |", s.name, s.processes, s.shutdown, s.describeVolumes())
		for _, bound := range allBounds() {
			s.bound = bound
			total += states[s.title()]
			count := strconv.Itoa(states[s.title()])
			if !s.hasBound(bound) {
				count = ""
			}
			fmt.Fprintf(&b, " %s |", count)
		}
		b.WriteString("\n")
	}
	fmt.Fprintf(&b, "\n%d explorations with %d states.\n", len(explorations()), total)
	return b.String()
}

// recordedStates returns the numbers of states in the file.
func recordedStates(t *testing.T) map[string]int {
	text, err := os.ReadFile(statesFile)
	if err != nil {
		t.Fatal(err)
	}
	states := map[string]int{}
	const before = 5 // the cells before the first number
	for line := range strings.Lines(string(text)) {
		cells := strings.Split(line, "|")
		for n, bound := range allBounds() {
			if len(cells) != before+len(allBounds())+1 {
				break
			}
			if count, err := strconv.Atoi(strings.TrimSpace(cells[before+n])); err == nil {
				states[strings.TrimSpace(cells[1])+"/"+bound.what] = count
			}
		}
	}
	return states
}

// checkRest fails if a state never settles, or if controllers can work without end.
func (x *explorer) checkRest() {
	for _, failing := range []map[uint64]string{x.neverSettle(), x.endlessWork()} {
		if len(failing) == 0 {
			continue
		}
		x.t.Errorf("%d of %d states fail", len(failing), len(x.states))
		reason := slices.Collect(maps.Values(failing))[0]
		again := &explorer{t: x.t, scenario: x.scenario, start: x.start, named: true}
		again.explore(len(x.states))
		x.t.Logf("%s, for instance by these steps again and again:\n%s", reason, again.round(failing))
		again = &explorer{t: x.t, scenario: x.scenario, start: x.start, failing: failing}
		again.explore(len(x.states))
	}
}

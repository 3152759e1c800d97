// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package restart

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// scenario is what the orchestrator wants, and the controllers that serve it.
type scenario struct {
	name     string
	shutdown Shutdown
	maxDown  int
	goals    [][]string // for each volume
	attached []string   // the instance on which each volume is attached and published at the start
	// processes is the number of controllers, selves are the instances on which they run, if they run on any.
	processes int
	selves    []string
	// prelude are the steps before the exploration, see [model.run].
	prelude []string
	// givesUpEarly lets the orchestrator unpublish a volume before its publish succeeded.
	givesUpEarly bool
	// bound is set by the exploration, bounds are those under which it is explored. Nil means all usual ones.
	bound
	bounds []bound
	// asked is the controller that the orchestrator calls, for each volume. Nil means that it calls any of them.
	asked []int
	// maxDisks is how many disks an instance can have. 0 means more than the scenario has.
	maxDisks int
	// sweeps is true if each tick looks for records about deleted disks.
	sweeps bool
	// modes are the attach modes that the operator sets, one after the other.
	modes []mode
}

// room is how many disks an instance can have.
func (s scenario) room() int { return cmp.Or(s.maxDisks, 8) }

// moves reports whether a volume leaves one instance for another one.
func (s scenario) moves() bool {
	for i, from := range s.attached {
		if slices.ContainsFunc(s.goals[i], func(to string) bool { return to != from && (to == n0 || to == n1) }) {
			return true
		}
	}
	return false
}

func (s scenario) hasFault(kind string) bool { return slices.Contains(s.kinds, kind) }

// bound is what may go wrong in one run.
type bound struct {
	what string
	// faults is how often one of the kinds happens.
	faults int
	// switches is how often an activity is interrupted by another one that could also have waited.
	switches int
	kinds    []string
}

var (
	anyOrder = bound{"any order of calls", 0, 1, nil}
	crash    = bound{"a crash", 1, 0, []string{"crash"}}
	noAnswer = bound{"a call without an answer", 1, 0, []string{"lost", "refused"}}
	retires  = bound{"a controller that hands over", 1, 0, []string{"retire"}}
	overdue  = bound{"a wait that ends early", 1, 0, []string{
		"early reply", "early halt", "early back", "early request", "early renewal", "early apply", "early handover",
	}}
	badGuest    = bound{"a guest that fails", 1, 0, []string{"refuses", "hangs", "silent", "stays"}}
	owner       = bound{"an owner who stops an instance", 1, 0, []string{"user stop"}}
	outage      = bound{"an outage", 1, 0, []string{"rack down", "orchestrator down", "project down"}}
	nodeLost    = bound{"a lost node", 1, 0, []string{"lost node"}}
	atAnyMoment = []bound{
		{"an owner who stops an instance at any moment", 1, 1, owner.kinds},
		{"an outage at any moment", 1, 1, outage.kinds},
	}
	expansion = bound{"an expansion", 1, 0, []string{"expansion"}}
	anyGrowth = bound{"an expansion at any moment", 1, 1, expansion.kinds}
	others    = bound{"others start, stop and delete", 2, 0, []string{ownerStarts, ownerStops, ownerDeletes}}
	anyOthers = bound{"others at any moment", 2, 1, others.kinds}
	few       = []bound{crash, noAnswer, owner, outage}
	// In mode hot the controllers cannot ask whether a guest will answer.
	withoutGuests = slices.DeleteFunc(slices.Clone(usual), func(b bound) bool { return b.what == badGuest.what })
	usual         = []bound{anyOrder, crash, noAnswer, retires, overdue, badGuest, owner, outage, nodeLost}
)

// kinds of faults of an owner who starts, stops and deletes
const (
	ownerStarts  = "owner starts"
	ownerStops   = "owner stops"
	ownerDeletes = "owner deletes"
)

// hasOthers reports whether others start, stop and delete instances.
func (s scenario) hasOthers() bool { return s.hasFault(ownerStarts) }

func (s scenario) title() string { return s.name + "/" + s.what }

// hasBound reports whether the scenario is explored under a bound.
func (s scenario) hasBound(b bound) bool {
	bounds := s.bounds
	if bounds == nil {
		bounds = usual
	}
	return slices.ContainsFunc(bounds, func(other bound) bool { return other.what == b.what })
}

// describeVolumes returns where each volume is, where the orchestrator wants it then, and what else is special.
func (s scenario) describeVolumes() string {
	var volumes []string
	for i, goal := range s.goals {
		ways := slices.Clone(goal)
		if i < len(s.attached) {
			ways = append([]string{s.attached[i]}, ways...)
		}
		for n, way := range ways {
			ways[n] = cmp.Or(map[string]string{n0: "A", n1: "B"}[way], way, "none")
		}
		volumes = append(volumes, strings.Join(ways, " → "))
	}
	text := strings.Join(volumes, ", ")
	if s.maxDisks > 0 {
		text += fmt.Sprintf("; an instance has room for %d", s.maxDisks)
	}
	if s.maxDown > 1 {
		text += fmt.Sprintf("; %d may be down", s.maxDown)
	}
	if s.sweeps {
		text += "; each tick sweeps"
	}
	for _, m := range s.modes {
		text += "; then mode " + string(m)
	}
	return text
}

// allBounds returns all bounds under which a scenario is explored.
func allBounds() []bound {
	all := slices.Clone(usual)
	for _, s := range scenarios {
		for _, b := range s.bounds {
			if !slices.ContainsFunc(all, func(other bound) bool { return other.what == b.what }) {
				all = append(all, b)
			}
		}
	}
	return all
}

// explorations returns each scenario with each of its bounds.
func explorations() []scenario {
	var all []scenario
	for _, s := range scenarios {
		for _, b := range allBounds() {
			if s.hasBound(b) {
				s.bound = b
				all = append(all, s)
			}
		}
	}
	return all
}

var n0, n1 = instanceID(0), instanceID(1)

// scenarios are the goals of the orchestrator and the processes that serve it.
var scenarios = []scenario{
	{
		name:      "one volume",
		shutdown:  Guest,
		maxDown:   1,
		processes: 1,
		goals:     [][]string{{n0}},
		bounds:    slices.Concat(usual, atAnyMoment, []bound{others, anyOthers}),
	},
	{
		name:      "one volume and a power cut",
		shutdown:  Hard,
		maxDown:   1,
		processes: 1,
		goals:     [][]string{{n0}},
		bounds:    slices.Concat(usual, atAnyMoment, []bound{expansion, anyGrowth, others, anyOthers}),
	},
	{
		name:         "a volume that is given up",
		shutdown:     Hard,
		maxDown:      1,
		processes:    1,
		goals:        [][]string{{n0, ""}},
		givesUpEarly: true,
	},
	{
		name:      "a volume that comes back",
		shutdown:  Hard,
		maxDown:   1,
		processes: 1,
		attached:  []string{n0},
		goals:     [][]string{{"", n0}, {n0}},
		prelude:   []string{"publish " + volumeID(1), "unpublish " + volumeID(0)},
		bounds:    slices.Concat(usual, []bound{expansion}),
	},
	{
		name:      "a volume that moves",
		shutdown:  Hard,
		maxDown:   1,
		processes: 1,
		attached:  []string{n0},
		goals:     [][]string{{"", n1}},
		prelude:   []string{"unpublish " + volumeID(0), "publish " + volumeID(0)},
		bounds:    slices.Concat(usual, []bound{expansion, others}),
	},
	{name: "two controllers", shutdown: Guest, maxDown: 1, processes: 2, goals: [][]string{{n0}},
		prelude: []string{"publish " + volumeID(0)}, bounds: slices.Concat(usual, []bound{expansion, others})},
	{name: "two controllers want the same", shutdown: Hard, maxDown: 2, processes: 2, goals: [][]string{{n0}},
		prelude: []string{"publish " + volumeID(0) + " on " + n0 + " p0", "publish " + volumeID(0) + " on " + n0 + " p1"}},
	{
		name:      "two controllers and a volume that comes back",
		shutdown:  Hard,
		maxDown:   1,
		processes: 2,
		asked:     []int{1, 0},
		attached:  []string{n0},
		goals:     [][]string{{"", n0}, {n0}},
		prelude:   []string{"publish " + volumeID(1) + " on " + n0 + " p0", "unpublish " + volumeID(0)},
	},
	{
		name:         "two controllers and a volume that is given up",
		shutdown:     Hard,
		maxDown:      1,
		processes:    2,
		goals:        [][]string{{n0, ""}},
		givesUpEarly: true,
		prelude:      []string{"publish " + volumeID(0) + " on " + n0 + " p0"},
	},
	{
		name:      "one instance after the other",
		shutdown:  Hard,
		maxDown:   1,
		processes: 2,
		asked:     []int{0, 1},
		goals:     [][]string{{n0}, {n1}},
		prelude:   []string{"publish " + volumeID(0) + " on " + n0 + " p0", "publish " + volumeID(1) + " on " + n1 + " p1"},
	},
	{
		name:      "two slots and two controllers",
		shutdown:  Hard,
		maxDown:   2,
		processes: 2,
		goals:     [][]string{{n1}, {n0}},
		prelude: []string{
			"publish " + volumeID(0) + " on " + n1 + " p0",
			"tick p0",
			"tick p0",
			"stopped",
			"tick p0",
			"tick p0",
			"tick p0",
			"tick p0",
			"running",
			"tick p0",
			"publish " + volumeID(1) + " on " + n0 + " p0",
			"publish " + volumeID(1) + " on " + n0 + " p1",
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
		prelude:      []string{"publish " + volumeID(0) + " on " + n0 + " p0", "tick p0", "tick p1"},
	},
	{
		name:      "a restart that ends while its volume comes back",
		shutdown:  Hard,
		maxDown:   1,
		processes: 2,
		asked:     []int{1, 0},
		attached:  []string{n0},
		goals:     [][]string{{"", n0}, {n0}},
		prelude: []string{
			"publish " + volumeID(1) + " on " + n0 + " p0",
			"unpublish " + volumeID(0),
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
		asked:     []int{1, 0},
		attached:  []string{n0},
		goals:     [][]string{{"", n0}, {n0}},
		prelude: []string{
			"publish " + volumeID(1) + " on " + n0 + " p0",
			"unpublish " + volumeID(0),
			"publish " + volumeID(0) + " on " + n0 + " p1 | delete",
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
		prelude:   []string{"publish " + volumeID(0) + " on " + n0 + " p0"},
	},
	{
		name:      "a volume that leaves the controller's own instance",
		shutdown:  Guest,
		maxDown:   1,
		processes: 2,
		selves:    []string{n0, n1},
		attached:  []string{n0},
		goals:     [][]string{{"", n1}},
		prelude: []string{
			"unpublish " + volumeID(0) + " from " + n0 + " p0",
			"publish " + volumeID(0) + " on " + n1 + " p0",
		},
	},
	{
		name:      "three volumes change places",
		shutdown:  Guest,
		maxDown:   1,
		processes: 1,
		attached:  []string{n0, n1},
		goals:     [][]string{{"", n1}, {"", n0}, {n0}},
		prelude: []string{
			"unpublish " + volumeID(0),
			"unpublish " + volumeID(1),
			"publish " + volumeID(0),
			"publish " + volumeID(1),
		},
		bounds: few,
	},
	{
		name:      "a full instance",
		shutdown:  Guest,
		maxDown:   1,
		maxDisks:  1,
		processes: 1,
		attached:  []string{n0},
		goals:     [][]string{{""}, {n0}},
	},
	{
		name:      "two full instances swap",
		shutdown:  Hard,
		maxDown:   1,
		maxDisks:  1,
		processes: 1,
		attached:  []string{n0, n1},
		goals:     [][]string{{"", n1}, {"", n0}},
		prelude:   []string{"unpublish " + volumeID(0), "unpublish " + volumeID(1)},
	},
	{
		name:      "a controller hands over to another",
		shutdown:  Hard,
		maxDown:   1,
		processes: 2,
		asked:     []int{0},
		goals:     [][]string{{n0}},
		prelude:   []string{"publish " + volumeID(0) + " on " + n0 + " p0", "tick p0", "tick p1"},
		bounds: []bound{
			anyOrder, noAnswer, overdue, owner, outage,
			{"a slow holder", 1, 2, []string{"early lease"}},
			{"a crash, and one that hands over", 2, 0, []string{"retire", "crash"}},
		},
	},
	{
		name:      "a node is drained",
		shutdown:  Drain,
		maxDown:   1,
		processes: 1,
		attached:  []string{n0},
		goals:     [][]string{{"", n1}, {n0}},
		prelude:   []string{"publish " + volumeID(1)},
	},
	{
		name:      "a volume is deleted",
		shutdown:  Hard,
		maxDown:   1,
		processes: 1,
		sweeps:    true,
		attached:  []string{n0},
		goals:     [][]string{{"", gone}, {n0}},
		prelude:   []string{"unpublish " + volumeID(0), "publish " + volumeID(1)},
		bounds:    slices.Concat(usual, []bound{{"two crashes", 2, 0, crash.kinds}}),
	},
	{
		name:      "the mode becomes hot",
		shutdown:  Guest,
		maxDown:   1,
		processes: 1,
		attached:  []string{n0},
		goals:     [][]string{{"", n0}, {n0}},
		modes:     []mode{modeHot},
		bounds:    withoutGuests,
		prelude:   []string{"publish " + volumeID(1), "unpublish " + volumeID(0), "tick p0"},
	},
	{
		name:      "the mode becomes hot and restart again",
		shutdown:  Hard,
		maxDown:   1,
		processes: 1,
		attached:  []string{n0},
		goals:     [][]string{{"", n0}, {n0}},
		modes:     []mode{modeHot, modeRestart},
		bounds:    withoutGuests,
		prelude:   []string{"publish " + volumeID(1), "unpublish " + volumeID(0), "tick p0"},
	},
}

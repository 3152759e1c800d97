// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package verify

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"
)

const reportFormat = "oxide-sim verify 1"

// Report is the result of a run. It has neither token, host, IDs nor names that the run did not choose.
type Report struct {
	Format  string `json:"format"`
	Version string `json:"version"`
	// Problem says why the run could not begin, or could not go to its end. Left is what could not be removed.
	Problem string    `json:"problem,omitempty"`
	Left    []string  `json:"left,omitempty"`
	Rack    RackFacts `json:"rack"`
	Results []Result  `json:"results"`
	Times   times     `json:"times"`
	// Guest is what the guest printed last.
	Guest json.RawMessage `json:"guest,omitempty"`
}

// RackFacts are what the run learnt about the rack. An empty text, or 0, means that it did not.
type RackFacts struct {
	Release          string `json:"release,omitempty"`
	APIVersion       string `json:"api_version,omitempty"`
	Hotplug          string `json:"hotplug,omitempty"`
	HotUnplug        string `json:"hot_unplug,omitempty"`
	DisksPerInstance int    `json:"disks_per_instance,omitempty"`
	QuotaBytes       int64  `json:"quota_bytes,omitempty"`
	FreeBytes        int64  `json:"free_bytes,omitempty"`
}

// fact is what an answer says about the rack.
type fact int

const (
	nothing fact = iota
	hotplug
	noHotplug
	unplug
	noUnplug
	twelveDisks
)

func (r *Report) learn(f fact) {
	switch f {
	case hotplug:
		r.Rack.Hotplug = "yes"
	case noHotplug:
		r.Rack.Hotplug = "no"
	case unplug:
		r.Rack.HotUnplug = "yes"
	case noUnplug:
		r.Rack.HotUnplug = "no"
	case twelveDisks:
		r.Rack.DisksPerInstance = maxDisks
	}
}

// Outcome is the outcome of a case.
type Outcome string

// The outcomes.
const (
	AsAssumed Outcome = "as assumed"
	Different Outcome = "different"
	NotTried  Outcome = "not tried"
)

// Result is the result of a case.
type Result struct {
	ID      string  `json:"id"`
	What    string  `json:"what"`
	Outcome Outcome `json:"outcome"`
	// Why says why a case was not tried. Failed means that it should have been.
	Why    string `json:"why,omitempty"`
	Failed bool   `json:"failed,omitempty"`
	// The rest belongs to a case that differs.
	Request  string `json:"request,omitempty"`
	Expected string `json:"expected,omitempty"`
	Seen     string `json:"seen,omitempty"`
	Means    string `json:"means,omitempty"`
	GoOn     string `json:"go_on,omitempty"`
}

// times are how long operations took.
type times map[string][]time.Duration

func (t times) add(what string, took time.Duration) { t[what] = append(t[what], took) }

// timeView is the JSON of the times of an operation.
type timeView struct {
	Count int   `json:"count"`
	P50   int64 `json:"p50_ms"`
	Max   int64 `json:"max_ms"`
}

func (t times) view() map[string]timeView {
	views := map[string]timeView{}
	for what, all := range t {
		all = slices.Sorted(slices.Values(all))
		views[what] = timeView{len(all), all[len(all)/2].Milliseconds(), all[len(all)-1].Milliseconds()}
	}
	return views
}

// MarshalJSON leaves out the single times.
func (t times) MarshalJSON() ([]byte, error) { return json.Marshal(t.view()) }

// UnmarshalJSON reads nothing: who reads a report does not need the times.
func (t times) UnmarshalJSON([]byte) error { return nil }

// The exit codes of the command.
const (
	exitAsAssumed = iota
	exitDifferent
	exitProblem
)

// ExitCode is 0 if all is as assumed, 1 if something differs, and 2 if the run could not begin or go to its end.
func (r *Report) ExitCode() int {
	switch {
	case r.Problem != "" || len(r.Left) > 0:
		return exitProblem
	case slices.ContainsFunc(r.Results, func(one Result) bool { return one.Outcome == Different || one.Failed }):
		return exitDifferent
	}
	return exitAsAssumed
}

func (r *Report) with(o Outcome) (list []Result) {
	for _, one := range r.Results {
		if one.Outcome == o {
			list = append(list, one)
		}
	}
	return list
}

// Markdown writes the report for people, to attach to an issue.
func (r *Report) Markdown(b *strings.Builder) {
	same, different, untried := r.with(AsAssumed), r.with(Different), r.with(NotTried)
	fmt.Fprintf(b, "# oxide-sim verify\n\n")
	if r.Problem != "" {
		fmt.Fprintf(b, "**The run did not go to its end:** %s.\n\n", r.Problem)
	}
	for _, left := range r.Left {
		fmt.Fprintf(b, "- not removed: %s\n", left)
	}
	if len(r.Left) > 0 {
		fmt.Fprintf(b, "\nRun the command again to remove this, or remove it by hand.\n\n")
	}
	if r.Rack.Release == "" {
		return
	}
	fmt.Fprintf(b, "%d cases as assumed, %d different, %d not tried. Version of the program: %s.\n\n",
		len(same), len(different), len(untried), r.Version)
	for _, one := range different {
		fmt.Fprintf(b, "## %s: %s: different\n\n", one.ID, one.What)
		fmt.Fprintf(b, "| | |\n|---|---|\n| request | %s |\n| expected | %s |\n| seen | %s |\n\n",
			cell(one.Request), cell(one.Expected), cell(one.Seen))
		fmt.Fprintf(b, "%s\n\n", strings.TrimSpace(one.Means+" **"+one.GoOn+"**"))
	}
	r.facts(b)
	fmt.Fprintf(b, "## As assumed\n\n")
	for _, one := range same {
		fmt.Fprintf(b, "- %s: %s\n", one.ID, one.What)
	}
	fmt.Fprintf(b, "\n## Not tried\n\n")
	for _, one := range untried {
		fmt.Fprintf(b, "- %s: %s: %s\n", one.ID, one.What, one.Why)
	}
	fmt.Fprintf(b, "\n## Cannot be tried from outside\n\n")
	for _, one := range beyond {
		fmt.Fprintf(b, "- %s: %s\n", one.ids, one.why)
	}
	if len(r.Guest) > 0 {
		fmt.Fprintf(b, "\n## The guest\n\n```json\n%s\n```\n", r.Guest)
	}
}

// facts writes what the run learnt about the rack.
func (r *Report) facts(b *strings.Builder) {
	known := func(s string) string {
		if s == "" || s == "0" {
			return "not tried"
		}
		return s
	}
	fmt.Fprintf(b, "## The rack\n\n| | |\n|---|---|\n")
	for _, row := range [][2]string{
		{"release", r.Rack.Release}, {"newest API version known to this program", r.Rack.APIVersion},
		{"hot-plug", known(r.Rack.Hotplug)}, {"detach from a running instance", known(r.Rack.HotUnplug)},
		{"disks per instance", known(fmt.Sprint(r.Rack.DisksPerInstance))},
		{"storage quota of the silo, free at the start", fmt.Sprintf("%d GiB, %d GiB", r.Rack.QuotaBytes/gib, r.Rack.FreeBytes/gib)},
	} {
		fmt.Fprintf(b, "| %s | %s |\n", row[0], row[1])
	}
	fmt.Fprintf(b, "\n| operation | number | half took at most | the longest |\n|---|---|---|---|\n")
	views := r.Times.view()
	for _, what := range slices.Sorted(maps.Keys(views)) {
		v := views[what]
		fmt.Fprintf(b, "| %s | %d | %d ms | %d ms |\n", what, v.Count, v.P50, v.Max)
	}
	fmt.Fprintln(b)
}

// cell is a text in a cell of a table.
func cell(s string) string {
	return "`" + strings.NewReplacer("|", `\|`, "`", "'", "\n", " ").Replace(s) + "`"
}

// progress prints a line for each case, with the time that is left.
type progress struct {
	w           io.Writer
	begin       time.Time
	n, of       int
	done, total int // weights
}

func newProgress(w io.Writer, chosen []testCase) *progress {
	p := &progress{w: w, begin: time.Now(), of: len(chosen)}
	for _, c := range chosen {
		p.total += c.weight()
	}
	return p
}

// weight is how long a case takes, compared with one that only asks.
func (c testCase) weight() int {
	weight := len(c.asks) + 2*len(strings.Split(c.given, ", "))
	if c.need&(starts|guest) != 0 {
		weight += 15
	}
	if strings.Contains(c.given, "full") {
		weight += 3 * maxDisks
	}
	return weight
}

func (p *progress) played(c testCase, r Result) {
	p.n++
	if r.Outcome == NotTried {
		p.total -= c.weight()
	} else {
		p.done += c.weight()
	}
	left := ""
	if p.done > 0 && p.n < p.of {
		took := time.Since(p.begin) / time.Duration(p.done) * time.Duration(max(0, p.total-p.done))
		left = ", about " + max(took, time.Second).Round(time.Second).String() + " left"
	}
	why := ""
	if r.Why != "" {
		why = " (" + r.Why + ")"
	}
	fmt.Fprintf(p.w, "%d/%d %s %s: %s%s%s\n", p.n, p.of, r.ID, r.What, r.Outcome, why, left)
}

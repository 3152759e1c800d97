// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"

	"golang.org/x/sys/unix"
)

// row is one line of the table and one entry of the results.
type row struct {
	// Name is stable, so that results of different commits can be compared.
	Name  string  `json:"name"`
	Value float64 `json:"value"`
	Unit  string  `json:"unit"`
	// Bar is the limit of the value, such as "≤ 20"; empty without a limit.
	Bar string `json:"bar"`
	OK  bool   `json:"ok"`
	// At says what was measured and where: the commit and the machine. It is empty for rows that were written before.
	At string `json:"at,omitempty"`

	bar     bar
	samples []float64
}

// bar is a limit for a row.
type bar struct {
	limit float64
	sign  string // "≤", "≥", or empty for no limit
	// strict bars fail the run. Counts and sizes are strict. Times are not, because they depend on the machine and its
	// load.
	strict bool
}

func atMost(limit float64) bar  { return bar{limit: limit, sign: "≤"} }
func atLeast(limit float64) bar { return bar{limit: limit, sign: "≥"} }

// strictly makes a bar strict.
func strictly(b bar) bar {
	b.strict = true
	return b
}

func (b bar) String() string {
	if b.sign == "" {
		return ""
	}
	return b.sign + " " + number(b.limit)
}

func (b bar) holds(value float64) bool {
	switch b.sign {
	case "≤":
		return value <= b.limit
	case "≥":
		return value >= b.limit
	}
	return true
}

// median makes a row with the median of several samples.
func median(name, unit string, samples []float64) row {
	return newRow(name, unit, samples, middle(samples))
}

// worst makes a row with the highest sample, for a limit that must hold each time.
func worst(name, unit string, samples []float64) row {
	return newRow(name, unit, samples, slices.Max(samples))
}

func newRow(name, unit string, samples []float64, value float64) row {
	b := bar{}
	if l := limitOf(name); l != nil {
		b = l.bar
	}
	return row{
		Name:    name,
		Value:   rounded(value),
		Unit:    unit,
		Bar:     b.String(),
		OK:      b.holds(value),
		bar:     b,
		samples: samples,
	}
}

func middle[T cmp.Ordered](samples []T) T {
	sorted := slices.Sorted(slices.Values(samples))
	return sorted[len(sorted)/2]
}

// rounded keeps four digits, which is the precision of the measurements.
func rounded(value float64) float64 {
	short, err := strconv.ParseFloat(strconv.FormatFloat(value, 'g', 4, 64), 64)
	if err != nil {
		panic(fmt.Sprintf("a formatted number does not parse: %v", err))
	}
	return short
}

func number(value float64) string { return strconv.FormatFloat(rounded(value), 'f', -1, 64) }

// table prints the rows as a table.
func table(out io.Writer, rows []row) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "measurement\tvalue\tunit\tbar\tok\tn\tmin – max")
	for _, r := range rows {
		verdict := "ok"
		switch {
		case r.Bar == "":
			verdict = ""
		case !r.OK && r.bar.strict:
			verdict = "FAILED"
		case !r.OK:
			verdict = "missed"
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%d\t%s – %s\n", r.Name, number(r.Value), r.Unit, r.Bar, verdict,
			len(r.samples), number(slices.Min(r.samples)), number(slices.Max(r.samples)))
	}
	return w.Flush()
}

// apart are the beginnings of the names of rows that a command of its own writes.
var apart = []string{fullScalePrefix, onNomad.prefix, ofUpgrades.prefix, bucketsPrefix, peersPrefix, releasePrefix}

// writer returns which command writes a row: its index in apart, or -1 for make bench.
func writer(r row) int {
	return slices.IndexFunc(apart, func(prefix string) bool { return strings.HasPrefix(r.Name, prefix) })
}

// read reads the rows of a file of results.
func read(file string) (rows []row, err error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	if err := json.Unmarshal(text, &rows); err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	return rows, nil
}

// readBefore reads the rows that are about to be replaced. No bar may have been loosened since.
func readBefore(file string) ([]row, error) {
	rows, err := read(file)
	if err != nil {
		return nil, err
	}
	return rows, loosened(".", rows)
}

// write writes the rows as JSON, in place of all rows of the same command if it was measured whole, and else in place
// of those of the same parts. All other rows stay.
func write(file string, rows []row, whole bool) error {
	old, err := readBefore(file)
	if err != nil {
		return err
	}
	at, err := origin()
	if err != nil {
		return err
	}
	rows = slices.Clone(rows)
	for i := range rows {
		rows[i].At = at
	}
	measured := map[string]bool{}
	for _, r := range rows {
		measured[part(r)] = true
	}
	old = slices.DeleteFunc(old, func(r row) bool { return writer(r) == writer(rows[0]) && (whole || measured[part(r)]) })
	return writeAll(file, slices.Concat(old, rows))
}

// part is what a row is about, such as throughput.
func part(r row) string {
	name, _, _ := strings.Cut(r.Name, "/")
	return name
}

// writeCounts writes those of the rows that count something, each in the place of the same row.
func writeCounts(file string, rows []row) error {
	all, err := readBefore(file)
	if err != nil {
		return err
	}
	at, err := origin()
	if err != nil {
		return err
	}
	for _, r := range rows {
		if _, counted := counts[r.Unit]; !counted {
			continue
		}
		r.At = at
		if i := slices.IndexFunc(all, func(old row) bool { return old.Name == r.Name }); i >= 0 {
			all[i] = r
		} else {
			all = append(all, r)
		}
	}
	return writeAll(file, all)
}

// counts are the units of rows that are the same on every machine, with the part by which they may differ.
var counts = map[string]float64{"calls": 0, "processes": 0, "MB": 0.02}

// compareCounts returns an error for each row that counts something and differs from the written results: those are of
// another code.
func compareCounts(file string, rows []row) error {
	written, err := read(file)
	if err != nil {
		return err
	}
	var errs []error
	for _, r := range rows {
		part, counted := counts[r.Unit]
		i := slices.IndexFunc(written, func(old row) bool { return old.Name == r.Name })
		if !counted || i >= 0 && math.Abs(r.Value-written[i].Value) <= part*written[i].Value {
			continue
		}
		was := "no value"
		if i >= 0 {
			was = number(written[i].Value)
		}
		errs = append(errs, fmt.Errorf("%s is %s %s, and %s has %s: make bench-counts, and look at what cites it",
			r.Name, number(r.Value), r.Unit, file, was))
	}
	return errors.Join(errs...)
}

// origin says what is measured, and where.
func origin() (string, error) {
	commit, err := exec.Command("git", "describe", "--always", "--dirty", "--exclude=*").Output()
	if err != nil {
		return "", fmt.Errorf("git: %w", err)
	}
	var system unix.Utsname
	if err := unix.Uname(&system); err != nil {
		return "", err
	}
	return fmt.Sprintf("commit %s; %d CPUs, Linux %s, %s, %s", strings.TrimSpace(string(commit)), runtime.NumCPU(),
		unix.ByteSliceToString(system.Release[:]), runtime.GOARCH, runtime.Version()), nil
}

func writeAll(file string, rows []row) error {
	slices.SortStableFunc(rows, func(a, b row) int { return cmp.Compare(writer(a), writer(b)) })
	text, err := json.MarshalIndent(rows, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(file, append(text, '\n'), 0o644)
}

// verdict returns an error if a strict bar was missed.
func verdict(rows []row) error {
	var errs []error
	for _, r := range rows {
		if !r.OK && r.bar.strict {
			errs = append(errs, fmt.Errorf("%s is %s %s, and must be %s", r.Name, number(r.Value), r.Unit, r.Bar))
		}
	}
	return errors.Join(errs...)
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package main

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	"google.golang.org/grpc/codes"
)

// results collects what all workers have seen, for the report.
type results struct {
	mu sync.Mutex
	// answers counts the answers by RPC and code.
	answers map[string]map[codes.Code]int
	// done counts the steps of workers and the checks.
	done map[string]int
	// violations are the findings that fail the run.
	violations []string
}

func newResults() *results {
	return &results{answers: map[string]map[codes.Code]int{}, done: map[string]int{}}
}

func (b *results) answered(rpc string, code codes.Code) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.answers[rpc] == nil {
		b.answers[rpc] = map[codes.Code]int{}
	}
	b.answers[rpc][code]++
}

func (b *results) count(what string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.done[what]++
}

func (b *results) violation(format string, args ...any) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.violations = append(b.violations, fmt.Sprintf(format, args...))
	fmt.Printf("%s VIOLATION %s\n", stamp(time.Now()), b.violations[len(b.violations)-1])
}

// stamp formats a time like the programs' logs.
func stamp(t time.Time) string { return t.Format("15:04:05.000") }

// report prints the results, and returns an error if there was a violation.
func (b *results) report(w *world, took time.Duration, success string) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := errors.Join(
		b.printAnswers(),
		printCounts("steps and checks", b.done),
		printCounts("faults hit", w.hits),
		printCounts("kills", w.killed),
	); err != nil {
		return err
	}
	retries := 0
	for _, byCode := range b.answers {
		for code, n := range byCode {
			if code != codes.OK {
				retries += n
			}
		}
	}
	fmt.Printf("\n%d answers other than OK; %s in all\n", retries, took.Round(time.Second))
	if n := len(b.violations); n > 0 {
		// They are printed again because the reader of a failed run's log often sees only its end.
		return fmt.Errorf("%d violations:\n%s", n, strings.Join(b.violations, "\n"))
	}
	fmt.Println(success)
	return nil
}

func (b *results) printAnswers() error {
	var all []codes.Code
	for _, byCode := range b.answers {
		for code := range byCode {
			if !slices.Contains(all, code) {
				all = append(all, code)
			}
		}
	}
	slices.Sort(all)
	table := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprint(table, "\nanswers\t")
	for _, code := range all {
		fmt.Fprintf(table, "%s\t", code)
	}
	fmt.Fprintln(table)
	for _, rpc := range slices.Sorted(maps.Keys(b.answers)) {
		fmt.Fprintf(table, "%s\t", rpc)
		for _, code := range all {
			fmt.Fprintf(table, "%d\t", b.answers[rpc][code])
		}
		fmt.Fprintln(table)
	}
	return table.Flush()
}

func printCounts(title string, counts map[string]int) error {
	var parts []string
	for _, key := range slices.Sorted(maps.Keys(counts)) {
		parts = append(parts, fmt.Sprintf("%s %d", key, counts[key]))
	}
	_, err := fmt.Printf("\n%s: %s\n", title, strings.Join(parts, ", "))
	return err
}

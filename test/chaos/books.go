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

// books are what all workers have seen, for the report.
type books struct {
	mu sync.Mutex
	// answers counts the answers by RPC and code.
	answers map[string]map[codes.Code]int
	// done counts what was lived through: steps of workers and checks.
	done map[string]int
	// violations are what must not be.
	violations []string
}

func newBooks() *books {
	return &books{answers: map[string]map[codes.Code]int{}, done: map[string]int{}}
}

func (b *books) answered(rpc string, code codes.Code) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.answers[rpc] == nil {
		b.answers[rpc] = map[codes.Code]int{}
	}
	b.answers[rpc][code]++
}

func (b *books) count(what string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.done[what]++
}

func (b *books) violation(format string, args ...any) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.violations = append(b.violations, fmt.Sprintf(format, args...))
	fmt.Printf("%s VIOLATION %s\n", stamp(time.Now()), b.violations[len(b.violations)-1])
}

// stamp is a time as the histories and the programs' logs show it.
func stamp(t time.Time) string { return t.Format("15:04:05.000") }

// report prints what happened, and returns an error if anything was wrong.
func (b *books) report(w *world, took time.Duration, allWell string) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := errors.Join(
		b.printAnswers(),
		printCounts("lived through", b.done),
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
		return fmt.Errorf("%d violations, printed above where they were found", n)
	}
	fmt.Println(allWell)
	return nil
}

func (b *books) printAnswers() error {
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

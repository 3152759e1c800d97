// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Command mutate plants bugs into the plugin, one at a time, and expects that a named test fails. A bug that no test
// finds fails the command. The bugs are in planted.go. The source tree stays as it is: the compiler reads the changed
// file through an overlay.
//
//	go run ./test/mutate                      all bugs
//	go run ./test/mutate -match '^restart'    those whose name matches
//	go run ./test/mutate -sample 5 -seed X    five of them, the same five for the same X
//	go run ./test/mutate -record              also write the results to results.json
//	go run ./test/mutate -list                run nothing: print the bugs, their tests, and when each was last found
//
// It needs root, for loop devices and mounts. Each test runs in its own mount namespace.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"syscall"
	"time"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:], os.Stdout)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "mutate:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, out io.Writer) error {
	flags := flag.NewFlagSet("mutate", flag.ContinueOnError)
	match := flags.String("match", "", "only bugs whose name matches this regular expression")
	count := flags.Int("sample", 0, "only this many of them, chosen by -seed; 0 means all")
	seed := flags.String("seed", "", "text that chooses the sample, such as the hash of a commit")
	record := flags.Bool("record", false, "write the results to results.json")
	list := flags.Bool("list", false, "run nothing: print the bugs, their tests, and when each was last found")
	if err := flags.Parse(args); err != nil {
		return err
	}
	root, err := moduleRoot()
	if err != nil {
		return err
	}
	wanted, err := regexp.Compile(*match)
	if err != nil {
		return err
	}
	chosen := choose(planted, wanted, *count, *seed)
	if len(chosen) == 0 {
		return fmt.Errorf("no bug has a name that matches %q", *match)
	}
	if *list {
		results, err := readResults(root)
		if err != nil {
			return err
		}
		return printList(out, chosen, results)
	}
	if os.Geteuid() != 0 {
		return errors.New("run it as root: the tests need loop devices and mounts, and a skipped test finds nothing")
	}
	dir, err := os.MkdirTemp("", "mutate-")
	if err != nil {
		return err
	}
	found, err := plantAll(
		ctx,
		chosen,
		&builder{root: root, dir: dir, works: map[string]error{}, unchanged: map[string]string{}},
		out,
	)
	if *record {
		err = errors.Join(err, recordResults(root, found))
	}
	return errors.Join(err, os.RemoveAll(dir))
}

// plantAll plants the bugs, and returns the results of those that were found.
func plantAll(ctx context.Context, bugs []bug, b *builder, out io.Writer) (map[string]result, error) {
	found, missed := map[string]result{}, 0
	for _, bug := range bugs {
		start := time.Now()
		err := b.plant(ctx, bug)
		if ctx.Err() != nil {
			return found, ctx.Err()
		}
		took := time.Since(start).Round(100 * time.Millisecond)
		if err != nil {
			missed++
			fmt.Fprintf(out, "NOT FOUND  %s (%s): %v\n", bug.name, took, err)
			continue
		}
		fmt.Fprintf(out, "found      %s (%s) by %s\n", bug.name, took, bug.test)
		found[bug.name] = result{Bug: bug.digest(), Found: time.Now().UTC().Format(time.DateOnly)}
	}
	fmt.Fprintf(out, "%d planted, %d found\n", len(bugs), len(found))
	if missed > 0 {
		return found, fmt.Errorf("%d of %d planted bugs were not found: see above", missed, len(bugs))
	}
	return found, nil
}

// moduleRoot returns the folder with go.mod, from the current folder upwards.
func moduleRoot() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for ; ; dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir, nil
		}
		if dir == filepath.Dir(dir) {
			return "", errors.New("no folder above has a go.mod")
		}
	}
}

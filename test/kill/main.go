// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux && amd64

// Command kill kills the node plugin at every step of its calls, and checks that the orchestrator's retry succeeds: the
// volume becomes usable, no mount is left, no file is lost, and only a blank disk is formatted.
//
//	make chaos-node
//
// A step is a system call that reads or changes files, devices, mounts or processes: see tracer.go. The plugin runs in
// a guest of loop devices (test/simrack/guest). The command follows it with ptrace while it handles a call, and kills
// it just before its N-th step, for each N. It kills the plugin alone, whose mkfs or mount may then continue, or the
// plugin with its programs, like the end of a container. The steps of the plugin and of its programs are counted
// together.
//
// Then a new plugin starts. The orchestrator repeats the call or, at every second step, gives up, undoes the call and
// comes back later. campaign.go has the calls and the checks, and rig.go the guest and the plugin.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

func init() {
	// The main goroutine keeps the first thread, which never ends. A thread that has followed a plugin must end, see
	// trace.
	runtime.LockOSThread()
}

func main() {
	only := flag.String("only", "", "run only campaigns whose names hold this `text`")
	point := flag.Int("point", 0, "kill at this `step` only")
	most := flag.Int("most", 10, "kill at no more than this `many` steps of a campaign, at equal distances; 0 means all")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, *only, *point, *most); err != nil {
		fmt.Fprintf(os.Stderr, "kill: %v\n", err)
		os.Exit(1)
	}
}

// workers is the number of plugins that run at the same time.
const workers = 2

func run(ctx context.Context, only string, point, most int) (err error) {
	if os.Geteuid() != 0 {
		return errors.New("needs root: loop devices, device nodes and mounts")
	}
	start := time.Now()
	dir, err := os.MkdirTemp("", "kill")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	programs, err := simtest.Build(dir, false)
	if err != nil {
		return err
	}
	chosen := slices.DeleteFunc(campaigns(), func(c campaign) bool { return !strings.Contains(c.name(), only) })
	results := make([]result, len(chosen))
	next := make(chan int)
	errs := make([]error, workers)
	var wg sync.WaitGroup
	for worker := range workers {
		wg.Go(func() {
			r, err := newRig(dir, fmt.Sprint("rig-", worker), programs.Plugin)
			if err != nil {
				errs[worker] = err
			}
			for i := range next {
				if err == nil {
					results[i] = chosen[i].run(ctx, r, point, most)
				}
			}
			if r != nil {
				errs[worker] = errors.Join(errs[worker], r.guests.Close())
			}
		})
	}
	for i := range chosen {
		next <- i
	}
	close(next)
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		return err
	}
	return report(chosen, results, time.Since(start))
}

// result is what one campaign came to.
type result struct {
	// steps is how many there are, kills how many of them the plugin did not survive.
	steps, kills int
	// retries is how often the orchestrator had to repeat a call in all, besides the first repetition.
	retries  int
	failures []string
}

func report(chosen []campaign, results []result, took time.Duration) error {
	table := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(table, "killed in\tsteps\tkills\tfurther retries\tfailures\t")
	var kills, failures int
	for i, c := range chosen {
		r := results[i]
		fmt.Fprintf(table, "%s\t%d\t%d\t%d\t%d\t\n", c.name(), r.steps, r.kills, r.retries, len(r.failures))
		kills += r.kills
		failures += len(r.failures)
	}
	if err := table.Flush(); err != nil {
		return err
	}
	for i, c := range chosen {
		for _, failure := range results[i].failures {
			fmt.Printf("FAILED %s: %s\n", c.name(), failure)
		}
	}
	if failures > 0 {
		return fmt.Errorf("%d of %d kills left something wrong", failures, kills)
	}
	fmt.Printf("%d kills in %s: each volume was usable afterwards\n", kills, took.Round(time.Second))
	return nil
}

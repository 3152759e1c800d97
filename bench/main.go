// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Command bench measures the cost of the plugin. The built programs run as separate processes: a simulated rack and
// plugins. For comparison the bare SDK does the same work in this process. The command prints a table and writes
// bench/results.json.
//
//   - row.go: rows and the results
//   - rig.go: the rack and the plugin of a measurement
//   - calls.go: API calls per RPC, counted by the rack
//   - latency.go: single RPCs, compared with calls of the bare SDK
//   - load.go: the lives of many volumes at the same time, compared with the bare SDK
//   - restarts.go: planned restarts on a rack without hot-plug: restarts per volume, and downtime of instances
//   - list.go: the list of 10,000 disks: time, calls, peak memory, size
//   - commands.go: the commands doctor and orphans with 10,000 volumes
//   - scale.go: one controller with many volumes on a slow rack: calls per second, memory, outages; scaleload.go
//   - startup.go: time from exec to the first answer
//   - identity.go: nodes by the source of their identity: time until it is known, memory
//   - staging.go: time from the appearance of a disk to its mount, and a node's four calls, on real devices
//   - life.go: system calls, processes and CPU time of a life, on a node full of work too
//   - peer.go: other drivers' node plugins, and one built on mount-utils, for comparison with the four calls
//   - bars.go: all bars
//   - size.go: the memory and the wakeups of an idle process, the size of the program
//
// With -scale it measures one controller on racks of up to 10,000 instances instead (scalefull.go), writes those rows
// into bench/results.json and the plot of docs/explanation/scale.md, and prints their table.
//
// With -nomad it measures how long a job on a real Nomad is without its volume, with -upgrade how long a pod that
// writes waits while the plugin is replaced on a real Kubernetes (orchestrated.go).
//
// With -buckets it measures the gateway of buckets beside the filesystem below it (buckets.go).
//
// With -peers it measures a node's four calls beside the node plugins of other drivers. The flag names a directory with
// a program for each. The program serves CSI on the socket that is its argument, in the process that was started.
//
// With -release it measures the sizes of the files of a release (release.go).
//
// To add a row, write a function that returns it, add the function to the list of measurements below, and its bar to
// bars.go.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"regexp"
	"runtime"
	"strings"
	"syscall"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// measurement makes rows of the results.
type measurement struct {
	name string
	run  func(context.Context, *bench) ([]row, error)
}

// measurements run one at a time in this order, so that none disturbs another.
var measurements = []measurement{
	{"calls", countCalls},
	{"latency", latency},
	{"throughput", throughput},
	{"restarts", plannedRestarts},
	{"list", lists},
	{"commands", commands},
	{"scale", shortScale},
	{"startup", startup},
	{"identity", identity},
	{"staging", staging},
	{"life", lifeCost},
	{"memory", memory},
	{"wakeups", wakeups},
	{"binary", binarySize},
}

// bench is the common state of all measurements.
type bench struct {
	programs simtest.Programs
	// dir is a new folder with a short path, because the paths of unix sockets are limited.
	dir string
	// args are further flags for the plugin.
	args []string
	// peers is the directory of [besidePeers].
	peers string
}

const resultsFile = "bench/results.json"

func main() {
	only := flag.String(
		"run",
		"",
		"run only the measurements whose names match this regular `expression`; results are written only with -write",
	)
	args := flag.String(
		"args",
		"",
		"further `flags` for the plugin, separated by spaces, for example for profiling; results are not written then",
	)
	check := flag.Bool("compare", false, "compare what is counted with the written results")
	update := flag.Bool("counts", false, "write what is counted to the results")
	part := flag.Bool("write", false, "write the results of -run, too, in the place of earlier ones")
	scale := flag.Bool("scale", false, "measure only the scale of a controller, for about ten minutes")
	nomad := flag.Bool("nomad", false, "measure only a redeployment and a move on a real Nomad, for about five minutes")
	upgrades := flag.Bool(
		"upgrade",
		false,
		"measure only an upgrade and a rollback on a real Kubernetes, for about five minutes",
	)
	buckets := flag.Bool("buckets", false, "measure only the gateway of buckets beside the filesystem below it")
	peers := flag.String("peers", "", "measure only a node's calls beside the programs in this `directory`")
	comparator := flag.Bool(
		"comparator",
		false,
		"serve a node plugin that is built on mount-utils, on the socket that follows",
	)
	release := flag.String("release", "", "measure only the sizes of the files of a release in this `folder`")
	flag.Parse()
	if *comparator {
		fmt.Fprintln(os.Stderr, serveComparator(flag.Arg(0)))
		os.Exit(1)
	}
	if *peers != "" {
		measurements = []measurement{{"peers", besidePeers}}
	}
	if *release != "" {
		measurements = []measurement{{"release", releaseSizes(*release)}}
	}
	if *buckets {
		measurements = []measurement{{"buckets", bucketThroughput}}
	}
	if *nomad {
		measurements = []measurement{{"nomad", onNomad.measure}}
	}
	if *upgrades {
		measurements = []measurement{{"upgrade", ofUpgrades.measure}}
	}
	if *scale {
		measurements = []measurement{{"scale", fullScale}}
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	with := func([]row) error { return nil }
	if whole := *only == ""; (whole || *part) && *args == "" {
		with = func(rows []row) error { return write(resultsFile, rows, whole) }
	}
	switch {
	case *check:
		with = func(rows []row) error { return compareCounts(resultsFile, rows) }
	case *update:
		with = func(rows []row) error { return writeCounts(resultsFile, rows) }
	}
	if err := run(ctx, *only, &bench{args: strings.Fields(*args), peers: *peers}, with); err != nil {
		fmt.Fprintf(os.Stderr, "bench: %v\n", err)
		os.Exit(1)
	}
}

// run measures, and calls with with the rows.
func run(ctx context.Context, only string, b *bench, with func([]row) error) (err error) {
	start := time.Now()
	chosen, err := regexp.Compile(only)
	if err != nil {
		return fmt.Errorf("-run: %w", err)
	}
	if b.dir, err = os.MkdirTemp("", "bench-"); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(b.dir)) }()
	if b.programs, err = simtest.Build(b.dir, false); err != nil {
		return err
	}
	rows, err := measure(ctx, b, chosen)
	if err != nil {
		return err
	}
	if err := table(os.Stdout, rows); err != nil {
		return err
	}
	fmt.Printf(
		"\n%d CPUs, %s/%s, %s; took %s\n",
		runtime.NumCPU(),
		runtime.GOOS,
		runtime.GOARCH,
		runtime.Version(),
		time.Since(start).Round(time.Second),
	)
	return errors.Join(verdict(rows), with(rows))
}

func measure(ctx context.Context, b *bench, chosen *regexp.Regexp) ([]row, error) {
	var rows []row
	for _, m := range measurements {
		if !chosen.MatchString(m.name) {
			continue
		}
		start := time.Now()
		more, err := m.run(ctx, b)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", m.name, err)
		}
		fmt.Fprintf(os.Stderr, "%s: measured in %s\n", m.name, time.Since(start).Round(time.Millisecond))
		rows = append(rows, more...)
	}
	if len(rows) == 0 {
		return nil, fmt.Errorf("-run %q: no such measurement", chosen)
	}
	return rows, nil
}

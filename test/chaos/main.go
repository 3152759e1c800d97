// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

// Command chaos lets many clients live through the lives of volumes while everything around them fails, and proves at the
// end that nothing was lost and nothing is left over.
//
//	make chaos-controller DURATION=2m
//
// The built plugin serves the controller's RPCs before the built simulated rack. Workers send what orchestrators send, with
// the same retries, deadlines that are sometimes too short, and at times the same request twice at once (worker.go,
// call.go). Meanwhile calls of the rack fail in every way that it knows, instances stop, fail and migrate, and plugin and rack
// are killed and started again on what they left behind (world.go). As root the rack has guests, and what was written to a volume's block device is compared
// wherever that data appears again (guest.go).
//
// Then all is well again: every client gets an answer, and what clients were told is compared with what the rack has
// (audit.go). A disk or snapshot on the rack must be one that a client was told of and did not delete; what a client was told
// to exist must be there, attached where it was told. The temporary snapshots of clones that were cut off are gone an hour
// later (sweep.go).
//
// The seed that is printed gives each worker its own random numbers, so that a run can be repeated as far as concurrency
// allows: which call a fault hits is decided by the rack, and which answer comes first by the machine.
//
// One thing is kept from happening, since no client of a rack can prevent it: what a plugin had asked of the rack when it was
// killed is done all the same, perhaps late. A worker whose request was under way then turns to something else, and comes
// back to this volume when the rack must have done it (lateness).
//
// With -restarts (make chaos-restart) the rack changes disks only of stopped instances, and two controllers restart these,
// with a lease of 12 seconds. Orchestrators publish, repeat, move and delete volumes and ask now one controller, now the
// other; controllers and rack are killed, controllers also told to end, and somebody else stops and starts instances. All the
// while the rack is looked at: what is published stays attached, no more instances are down than may be, none for longer than
// the lease and a minute, and none that somebody else has stopped is started (planned.go, actor.go, planned_audit.go, planner.go).
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"
)

// options are the flags.
type options struct {
	seed     uint64
	workers  int
	duration time.Duration
	// faults is the probability of each kind of fault in each call.
	faults float64
	// kills is the mean time between two kills; 0 means none.
	kills time.Duration
	// restarts is for planned restarts (planned.go) instead of the lives on a rack that hot-plugs.
	restarts bool
	race     bool
	keep     bool
}

func main() {
	if os.Getenv(planner) != "" {
		if err := runPlanner(os.Args[1:]); err != nil {
			fmt.Fprintf(os.Stderr, "planner: %v\n", err)
			os.Exit(1)
		}
		return
	}
	var o options
	flag.Uint64Var(
		&o.seed,
		"seed",
		rand.Uint64(),
		"`number` that all random choices of the workers follow from (default random)",
	)
	flag.IntVar(&o.workers, "workers", 12, "how `many` clients there are at a time")
	flag.DurationVar(&o.duration, "duration", 2*time.Minute, "how `long` things go wrong")
	flag.Float64Var(&o.faults, "faults", 0.1, "`probability` of each kind of fault in each call of the rack")
	flag.DurationVar(&o.kills, "kills", 4*time.Second, "mean `time` between two kills of plugin or rack; 0 means none")
	flag.BoolVar(&o.restarts, "restarts", false, "planned restarts on a rack that changes disks only of stopped instances")
	flag.BoolVar(&o.race, "race", false, "build plugin and rack with the race detector")
	flag.BoolVar(&o.keep, "keep", false, "keep the folder with the logs, which is kept anyway when something is wrong")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	campaign := run
	if o.restarts {
		campaign = runPlanned
	}
	fmt.Printf(
		"chaos: seed %d, %d workers, %s, each kind of fault with probability %v, a kill every %s\n",
		o.seed,
		o.workers,
		o.duration,
		o.faults,
		o.kills,
	)
	if err := campaign(ctx, o); err != nil {
		fmt.Fprintf(os.Stderr, "chaos: %v\n", err)
		os.Exit(1)
	}
}

// settleTime is how long the clients may take to get their answers once nothing goes wrong any more.
const settleTime = 2 * time.Minute

const lastWord = "audit: no disk or snapshot leaked, none lost, no double attach, no data mismatch"

func run(ctx context.Context, o options) (err error) {
	begun := time.Now()
	w, err := newWorld(o)
	if err != nil {
		return err
	}
	books := newBooks()
	defer func() {
		err = errors.Join(err, w.end(o.keep || err != nil))
	}()
	if err := w.begin(ctx, books); err != nil {
		return err
	}
	workers := w.newWorkers()
	end := time.Now().Add(o.duration)
	ctx, cancel := context.WithDeadline(ctx, end.Add(settleTime))
	defer cancel()
	var wg sync.WaitGroup
	for _, worker := range workers {
		wg.Go(func() { worker.work(ctx, end) })
	}
	if err := w.trouble(ctx, end); err != nil {
		cancel()
		wg.Wait()
		return err
	}
	wg.Wait()
	if err := pause(ctx, lateness); err != nil {
		books.violation("interrupted, or not every client had its answer %s after the last fault: %v", settleTime, err)
		return books.report(w, time.Since(begun), lastWord)
	}
	if err := w.audit(ctx, workers, books); err != nil {
		return err
	}
	if err := w.setQuota(ctx, 0); err != nil {
		return err
	}
	for _, worker := range workers {
		wg.Go(func() { worker.leave(ctx) })
	}
	wg.Wait()
	if err := ctx.Err(); err != nil {
		books.violation("not everything could be deleted within %s after the last fault: %v", settleTime, err)
	} else if err := w.auditEmpty(ctx, workers, books); err != nil {
		return err
	}
	if err := w.auditLogs(books); err != nil {
		return err
	}
	return books.report(w, time.Since(begun), lastWord)
}

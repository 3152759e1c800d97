// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

// Command chaos runs many clients with volumes while the rack and the plugin fail. At the end it proves that nothing
// was lost and nothing is left over.
//
//	make chaos-controller DURATION=2m
//
// Two of the built plugins serve the controller's RPCs, and the built oxide-sim is their rack. Workers send requests as
// orchestrators do: with retries, with deadlines that are sometimes too short, and sometimes twice at once (worker.go,
// call.go). As with Kubernetes' sidecars, one controller gets all RPCs of a kind, and at random the other one takes
// over (sidecars.go). Meanwhile calls of the rack fail in every possible way. Instances stop, fail and migrate. Plugins
// and rack are killed and started again with the state that they left (world.go). Creates are repeated with the
// requirement moved to a second rack, which must stay empty (otherrack.go). As root the rack has guests. Then the data
// on each volume's block device is compared wherever it appears again, for instance in a clone (guest.go).
//
// Then all faults end. Every client gets an answer, and the audit compares the answers with the rack (audit.go). Each
// disk and snapshot on the rack must be one that a client created and did not delete. Each volume that a client created
// must exist, attached where the client published it. The temporary snapshots of interrupted clones must be gone an
// hour later (sweep.go). Volumes grow, and what an interrupted expansion leaves must be gone soon after (expand.go).
//
// The printed seed determines the random numbers of each worker. A run can be repeated only as far as concurrency
// allows: the rack decides which call a fault hits, and timing decides which answer comes first.
//
// One situation is avoided, because no client of a rack can handle it: after a plugin was killed or has lost the lease,
// the rack still executes the plugin's requests, perhaps late. A worker with such a request leaves the volume alone
// until the rack must have executed it (lateness).
//
// With -restarts (make chaos-restart) the rack changes the disks of stopped instances only. Two controllers restart the
// instances, with a lease of 12 seconds. Orchestrators publish, repeat, move, expand and delete volumes through either
// controller. Controllers and rack are killed, controllers are also stopped. Owners stop and start instances, and
// with -owners (make chaos-owners) stop, start, delete and replace them at any moment, and start some whenever they are
// stopped. The audit watches the rack all the time (planned.go, owner.go, actor.go, planned_audit.go, planner.go):
//
//   - A published volume stays attached, unless its instance is deleted. Then it can be published on another one.
//   - No more instances are down than allowed.
//   - No instance is down for longer than the lease and a minute, unless its owner stopped it.
//   - The controllers stop no instance twice within a cool-down.
//   - No instance that its owner stopped is started, unless it was being restarted.
//
// With -nomad (make chaos-nomad) one controller serves jobs as Nomad runs them. An unpublish comes once: before the
// volume is unmounted or after that, again when the volume has been published anew, or never. A second job uses a disk
// under another ID and is refused. Periodic jobs run for a moment, and instances are full. The controller and the rack
// are killed. The audit watches the rack all the time (nomad.go):
//
//   - A volume that is mounted stays attached.
//   - A disk with two IDs is not deleted.
//   - After the last fault each volume moves to another node within three minutes.
//   - At the end each volume can be deleted.
//
// With -nomad and -restarts the rack has no hot-plug, and the controller restarts instances.
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

// options are the command's flags.
type options struct {
	seed     uint64
	workers  int
	duration time.Duration
	// faults is the probability of each kind of fault in each call.
	faults float64
	// kills is the mean time between two kills. 0 means no kills.
	kills time.Duration
	// handOvers is the mean time between two hand-overs of each kind of RPC. 0 means none.
	handOvers time.Duration
	// restarts selects planned restarts (planned.go) instead of a rack with hot-plug.
	restarts bool
	// owners lets owners of instances act at any moment, also during a restart (owner.go).
	owners bool
	// proofs compares the rack's lists with a volume after each OK (proof.go).
	proofs bool
	// nomad selects what Nomad does (nomad.go) instead of what Kubernetes' sidecars do.
	nomad bool
	race  bool
	keep  bool
}

func main() {
	if kind := os.Getenv(planner); kind != "" {
		if err := runPlanner(kind, os.Args[1:]); err != nil {
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
		"`number` that determines the workers' random choices (default random)",
	)
	flag.IntVar(&o.workers, "workers", 12, "`number` of concurrent clients")
	flag.DurationVar(&o.duration, "duration", 2*time.Minute, "how `long` faults and kills last")
	flag.Float64Var(&o.faults, "faults", 0.1, "`probability` of each kind of fault in each call of the rack")
	flag.DurationVar(&o.kills, "kills", 4*time.Second, "mean `time` between two kills of plugin or rack; 0 means no kills")
	flag.DurationVar(
		&o.handOvers,
		"hand-overs",
		8*time.Second,
		"mean `time` between two hand-overs of each kind of RPC to the other controller; 0 means none",
	)
	flag.BoolVar(&o.restarts, "restarts", false, "planned restarts on a rack that changes disks only of stopped instances")
	flag.BoolVar(&o.owners, "owners", false, "owners who stop, start, delete and replace instances at any moment")
	flag.BoolVar(&o.proofs, "proofs", false, "after each OK a proof from lists of all records and disks")
	flag.BoolVar(&o.nomad, "nomad", false, "what Nomad asks of a controller: unpublishes that come early, late or never")
	flag.BoolVar(&o.race, "race", false, "build plugin and rack with the race detector")
	flag.BoolVar(&o.keep, "keep", false, "keep the folder with the logs also after a run without violations")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	campaign := run
	switch {
	case o.nomad:
		campaign = runNomad
	case o.restarts:
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

// settleTime is how long the clients may take to finish after the last fault.
const settleTime = 2 * time.Minute

const successLine = "audit: no disk or snapshot leaked, none lost, no double attach, no data mismatch"

func run(ctx context.Context, o options) (err error) {
	begun := time.Now()
	w, err := newWorld(o)
	if err != nil {
		return err
	}
	results := newResults()
	defer func() {
		err = errors.Join(err, w.end(o.keep || err != nil))
	}()
	if err := w.begin(ctx, results); err != nil {
		return err
	}
	workers := w.newWorkers()
	end := time.Now().Add(o.duration)
	clients, cancel := context.WithDeadline(ctx, end.Add(settleTime))
	defer cancel()
	var wg sync.WaitGroup
	for _, worker := range workers {
		wg.Go(func() { worker.work(clients, end) })
	}
	for kind := range w.leases {
		wg.Go(func() { w.handOverMany(clients, kind, end) })
	}
	if err := w.disrupt(clients, end); err != nil {
		cancel()
		wg.Wait()
		return err
	}
	wg.Wait()
	if err := pause(clients, lateness); err != nil {
		results.violation("interrupted, or a client had no answer %s after the last fault: %v", settleTime, err)
		return results.report(w, time.Since(begun), successLine)
	}
	if err := w.audit(clients, workers, results); err != nil {
		return err
	}
	if err := w.setQuota(clients, 0); err != nil {
		return err
	}
	if err := w.auditOtherRack(clients, workers, results); err != nil {
		return err
	}
	for _, worker := range workers {
		wg.Go(func() { worker.cleanUp(clients) })
	}
	wg.Wait()
	if err := clients.Err(); err != nil {
		results.violation("not everything could be deleted within %s after the last fault: %v", settleTime, err)
	} else if err := w.auditEmpty(ctx, workers, results); err != nil {
		return err
	}
	if err := w.auditLogs(results); err != nil {
		return err
	}
	return results.report(w, time.Since(begun), successLine)
}

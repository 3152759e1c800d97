// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

// Command chaos runs clients of the COSI driver while the driver, its store and the way between them fail. It proves
// that no bucket, user or key leaks or is lost, and that no access is wider than granted.
//
//	make chaos-buckets DURATION=5m
//
// The built oxide-cosi serves the RPCs, and the real versitygw is its store. Workers send requests as COSI's sidecar
// does: they repeat a call until its final answer, with deadlines that are sometimes too short, and sometimes twice at
// once (call.go). They make buckets, grant and revoke accesses, several at once for one bucket, write and read objects
// with the granted keys, and delete buckets (worker.go). Meanwhile a proxy refuses, loses and delays requests to the
// store, and driver and gateway are killed (world.go).
//
// Each granted access is tried at once, on its bucket and on others. Every few seconds all faults end, and the audit
// compares the store with what the workers were answered (audit.go). At the end everything is revoked and deleted, and
// nothing may be left but a bucket that the driver did not make.
//
// The printed seed determines the random numbers of each worker. Timing decides the rest.
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
	program  string
	seed     uint64
	workers  int
	duration time.Duration
	// faults is the probability of a fault in each request of the driver.
	faults float64
	// kills is the mean time between two kills.
	kills time.Duration
}

func main() {
	var o options
	flag.StringVar(&o.program, "program", "bin/oxide-cosi", "the driver")
	flag.Uint64Var(&o.seed, "seed", rand.Uint64(), "`number` that determines the workers' random choices (default random)")
	flag.IntVar(&o.workers, "workers", 6, "`number` of concurrent clients")
	flag.DurationVar(&o.duration, "duration", 30*time.Second, "how `long` faults and kills last")
	flag.Float64Var(&o.faults, "faults", 0.1, "`probability` of a fault in each request of the driver")
	flag.DurationVar(&o.kills, "kills", time.Second, "mean `time` between two kills of driver or gateway")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	fmt.Printf("chaos: seed %d, %d workers, %s, a fault in a request with probability %v, a kill every %s\n",
		o.seed, o.workers, o.duration, o.faults, o.kills)
	err := run(ctx, o)
	stop()
	if err != nil {
		fmt.Fprintf(os.Stderr, "chaos: %v\n", err)
		os.Exit(1)
	}
}

const (
	// roundTime is how long faults last between two audits.
	roundTime = 6 * time.Second

	successLine = "audit: no bucket, user or key leaked, none lost, no access wider than granted"
)

func run(ctx context.Context, o options) (err error) {
	w, err := newWorld(ctx, o)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.end(err != nil)) }()
	var workers []*worker
	for n := range o.workers {
		workers = append(workers, newWorker(w, n))
	}
	for end := time.Now().Add(o.duration); time.Now().Before(end) && ctx.Err() == nil; {
		w.round(ctx, workers, min(roundTime, time.Until(end)))
		w.audit(ctx, workers)
		if len(w.violations) > 0 {
			break
		}
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	each(workers, func(worker *worker) { worker.cleanUp(ctx) })
	w.audit(ctx, workers)
	w.auditLog()
	w.report()
	if len(w.violations) > 0 {
		return fmt.Errorf("%d violations", len(w.violations))
	}
	fmt.Println(successLine)
	return nil
}

// round lets the workers work while everything fails. At its end no call is in flight, and nothing fails.
func (w *world) round(ctx context.Context, workers []*worker, length time.Duration) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	w.begin()
	killed := make(chan struct{})
	killing, stopKilling := context.WithTimeout(ctx, length)
	defer stopKilling()
	go func() {
		defer close(killed)
		w.kill(killing)
	}()
	end := time.Now().Add(length)
	working := make(chan struct{})
	go func() {
		defer close(working)
		each(workers, func(worker *worker) {
			for time.Now().Before(end) && ctx.Err() == nil {
				worker.step(ctx)
			}
		})
	}()
	<-killed
	w.proxy.SetFault(nil)
	<-working
}

// each runs a function for all workers at once.
func each(workers []*worker, do func(*worker)) {
	var group sync.WaitGroup
	for _, worker := range workers {
		group.Go(func() { do(worker) })
	}
	group.Wait()
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main

import (
	"context"
	"math"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// How Kubernetes' sidecars repeat an RPC: --timeout in the manifests, and the defaults of --retry-interval-start and
// --retry-interval-max.
const (
	sidecarTimeout  = 2 * time.Minute
	sidecarRetry    = time.Second
	sidecarMaxRetry = 5 * time.Minute
)

// untilDone makes an RPC, and repeats it as Kubernetes' sidecars do. All work is done at the same time, which is harder
// for a controller than the few workers of a sidecar. The waits are not random, as in the sidecars.
func (s *scaleRun) untilDone(ctx context.Context, rpc string, do func(context.Context) error) error {
	for wait := sidecarRetry; ; wait = min(2*wait, sidecarMaxRetry) {
		limited, cancel := context.WithTimeout(ctx, sidecarTimeout)
		began := time.Now()
		err := do(limited)
		cancel()
		if ctx.Err() != nil {
			return ctx.Err()
		}
		s.times.add(rpc, time.Since(began), err)
		switch status.Code(err) {
		case codes.OK:
			return nil
		case codes.Unavailable, codes.DeadlineExceeded, codes.Aborted:
		default:
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(wait):
		}
	}
}

// rpcTimes are the durations of RPCs.
type rpcTimes struct {
	mu sync.Mutex
	// took has the durations of the RPCs that succeeded, by the names of the RPCs.
	took map[string][]time.Duration
	all  int
}

func newRPCTimes() *rpcTimes { return &rpcTimes{took: map[string][]time.Duration{}} }

func (t *rpcTimes) add(rpc string, took time.Duration, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.all++
	if err == nil {
		t.took[rpc] = append(t.took[rpc], took)
	}
}

// total is the number of RPCs so far, also of those that failed.
func (t *rpcTimes) total() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.all
}

// clone is a copy of the durations so far.
func (t *rpcTimes) clone() map[string][]time.Duration {
	t.mu.Lock()
	defer t.mu.Unlock()
	copied := map[string][]time.Duration{}
	for rpc, took := range t.took {
		copied[rpc] = slices.Clone(took)
	}
	return copied
}

// percentile is the smallest duration, in ms, that so many percent do not exceed.
func percentile(took []time.Duration, percent float64) float64 {
	sorted := slices.Sorted(slices.Values(took))
	return milliseconds(sorted[int(math.Ceil(percent/100*float64(len(sorted))))-1])
}

// memoryPeak watches the anonymous memory of a process.
type memoryPeak struct {
	mu   sync.Mutex
	peak float64
}

const memoryPeriod = 100 * time.Millisecond

// watch reads the memory until the process has ended.
func (m *memoryPeak) watch(pid int) {
	go func() {
		for {
			now, err := memoryOf(pid, "RssAnon")
			if err != nil {
				return // the process has ended
			}
			m.mu.Lock()
			m.peak = max(m.peak, now)
			m.mu.Unlock()
			time.Sleep(memoryPeriod)
		}
	}()
}

func (m *memoryPeak) reset() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.peak = 0
}

// read is the peak since the last reset, in MiB.
func (m *memoryPeak) read() float64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.peak
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package simrack

import (
	"maps"
	"sync"
	"time"
)

// maxLoggedCalls is the length of the call log of the control endpoint.
const maxLoggedCalls = 10000

// maxSeconds is how many seconds the calls of each second are counted.
const maxSeconds = 24 * 60 * 60

// callEntry is one call of the API. Status 0 means that no answer was sent.
type callEntry struct {
	Seq int `json:"seq"`
	// Operation is the operation ID in the schema; empty if no route matched.
	Operation string `json:"operation"`
	Method    string `json:"method"`
	Path      string `json:"path"`
	Status    int    `json:"status"`
	// Fault is the kind of the fault that hit the call; empty if none did.
	Fault string `json:"fault"`
}

// calls counts and logs the calls of the API. A call is recorded just before its answer is sent, so that a client with
// an answer finds its call here.
type calls struct {
	mu     sync.Mutex
	seq    int
	counts map[string]int
	log    []callEntry // a ring buffer once it is full
	// began is the time of the first call since the last reset. seconds has the number of calls that arrived in each
	// second from then on.
	began   time.Time
	seconds []int
}

// arrive counts a call at its arrival, before its latency.
func (c *calls) arrive() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.began.IsZero() {
		c.began = time.Now()
	}
	second := int(time.Since(c.began) / time.Second)
	if second >= maxSeconds {
		return
	}
	for len(c.seconds) <= second {
		c.seconds = append(c.seconds, 0)
	}
	c.seconds[second]++
}

// rateView is the JSON of the calls of each second.
type rateView struct {
	// Began is the time of the first call, the begin of the first second; zero before a call.
	Began   time.Time `json:"began"`
	Seconds []int     `json:"seconds"`
}

func (c *calls) rate() rateView {
	c.mu.Lock()
	defer c.mu.Unlock()
	return rateView{Began: c.began, Seconds: append([]int{}, c.seconds...)}
}

func (c *calls) record(e callEntry) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.seq++
	e.Seq = c.seq
	if e.Operation != "" {
		if c.counts == nil {
			c.counts = map[string]int{}
		}
		c.counts[e.Operation]++
	}
	if len(c.log) < maxLoggedCalls {
		c.log = append(c.log, e)
		return
	}
	c.log[(e.Seq-1)%maxLoggedCalls] = e
}

// callsView is the JSON of the calls, the oldest first.
type callsView struct {
	Counts map[string]int `json:"counts"`
	Log    []callEntry    `json:"log"`
}

func (c *calls) view() callsView {
	c.mu.Lock()
	defer c.mu.Unlock()
	v := callsView{Counts: map[string]int{}, Log: make([]callEntry, 0, len(c.log))}
	maps.Copy(v.Counts, c.counts)
	oldest := 0
	if len(c.log) == maxLoggedCalls {
		oldest = c.seq % maxLoggedCalls
	}
	v.Log = append(append(v.Log, c.log[oldest:]...), c.log[:oldest]...)
	return v
}

func (c *calls) reset() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.seq, c.counts, c.log, c.began, c.seconds = 0, nil, nil, time.Time{}, nil
}

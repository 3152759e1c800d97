// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package simrack

import (
	"maps"
	"sync"
)

// maxLoggedCalls is the length of the call log of the control endpoint.
const maxLoggedCalls = 10000

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
	c.seq, c.counts, c.log = 0, nil, nil
}

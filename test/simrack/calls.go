// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package simrack

import (
	"maps"
	"sync"
)

// keptCalls is how many calls the log of the control endpoint goes back.
const keptCalls = 10000

// callEntry is one call of the API. Status 0 means that no answer was sent.
type callEntry struct {
	Seq int `json:"seq"`
	// Operation is the operationId of the schema, empty where no route matched.
	Operation string `json:"operation"`
	Method    string `json:"method"`
	Path      string `json:"path"`
	Status    int    `json:"status"`
	// Fault is the kind of the fault that hit the call, or empty.
	Fault string `json:"fault"`
}

// calls counts and logs the calls of the API. A call is recorded when it is done, just before its answer is sent: who has
// an answer finds the call here.
type calls struct {
	mu     sync.Mutex
	seq    int
	counts map[string]int
	log    []callEntry // a ring once it is full
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
	if len(c.log) < keptCalls {
		c.log = append(c.log, e)
		return
	}
	c.log[(e.Seq-1)%keptCalls] = e
}

// callsView is what the control endpoint shows of the calls, the oldest first.
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
	if len(c.log) == keptCalls {
		oldest = c.seq % keptCalls
	}
	v.Log = append(append(v.Log, c.log[oldest:]...), c.log[:oldest]...)
	return v
}

func (c *calls) reset() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.seq, c.counts, c.log = 0, nil, nil
}

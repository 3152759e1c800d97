// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller

import (
	"sync"
	"time"
)

// detachRequestTTL is how long a detach request counts after its last repetition.
const detachRequestTTL = 10 * time.Minute

// detachGrace records when the detach of each disk was first requested, so that a disk is detached from a running
// instance only after the grace period.
type detachGrace struct {
	grace time.Duration

	mu sync.Mutex
	// requests are keyed by disk ID.
	requests map[string]detachRequest
}

type detachRequest struct {
	instanceID  string
	first, last time.Time
}

func newDetachGrace(grace time.Duration) *detachGrace {
	return &detachGrace{grace: grace, requests: map[string]detachRequest{}}
}

// request records a request to detach a disk from an instance, and returns the earliest time for the detach.
func (g *detachGrace) request(diskID, instanceID string) (earliest time.Time) {
	if g.grace == 0 {
		return time.Time{}
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	now := time.Now()
	for id, r := range g.requests {
		if now.Sub(r.last) > detachRequestTTL {
			delete(g.requests, id)
		}
	}
	r, ok := g.requests[diskID]
	if !ok || r.instanceID != instanceID {
		r = detachRequest{instanceID: instanceID, first: now}
	}
	r.last = now
	g.requests[diskID] = r
	return r.first.Add(g.grace)
}

// cancel removes the request for a disk, after the volume was published again or the disk was detached.
func (g *detachGrace) cancel(diskID string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.requests, diskID)
}

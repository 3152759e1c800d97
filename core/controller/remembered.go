// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller

import (
	"log/slog"
	"math"
	"sync"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// refusalMemory is how long the rack is not asked again for what it has just refused. Nomad repeats some calls every
// second and per volume.
const refusalMemory = 5 * time.Second

// lasting is for a refusal that ends only when somebody does something.
const lasting = time.Duration(math.MaxInt64)

type operation string

const (
	opAttach operation = "attach"
	opDetach operation = "detach"
)

type attachment struct {
	operation          operation
	diskID, instanceID string
}

// refusals remembers for a moment that an attach or a detach was refused for something that lasts longer: the instance runs.
type refusals struct {
	mu    sync.Mutex
	known map[attachment]refused
}

type refused struct {
	until time.Time
	err   error
}

func newRefusals() *refusals {
	return &refusals{known: map[attachment]refused{}}
}

// remember keeps an error for [refusalMemory], or less long if it ends earlier, and returns it.
func (r *refusals) remember(op operation, diskID, instanceID string, ends time.Duration, err error) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := time.Now()
	for key, entry := range r.known {
		if now.After(entry.until) {
			delete(r.known, key)
		}
	}
	r.known[attachment{op, diskID, instanceID}] = refused{until: now.Add(min(ends, refusalMemory)), err: err}
	return err
}

// remembered is the error kept for this, if it is not too old. It was logged when it was new.
func (r *refusals) remembered(op operation, diskID, instanceID string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	entry, ok := r.known[attachment{op, diskID, instanceID}]
	if !ok || time.Now().After(entry.until) {
		return nil
	}
	return rpc.LoggedAt(slog.LevelDebug, entry.err)
}

// forget ends what is remembered of a disk: it was attached.
func (r *refusals) forget(diskID string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for key := range r.known {
		if key.diskID == diskID {
			delete(r.known, key)
		}
	}
}

// wishLifetime ends a wish to detach that nobody has repeated.
const wishLifetime = 10 * time.Minute

// detachGrace remembers since when a detach has been wished for.
type detachGrace struct {
	grace time.Duration

	mu     sync.Mutex
	wishes map[string]wish
}

type wish struct {
	instanceID      string
	first, repeated time.Time
}

func newDetachGrace(grace time.Duration) *detachGrace {
	return &detachGrace{grace: grace, wishes: map[string]wish{}}
}

// due notes the wish to detach a disk from an instance and says when it may be granted.
func (g *detachGrace) due(diskID, instanceID string) time.Time {
	if g.grace == 0 {
		return time.Time{}
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	now := time.Now()
	for id, w := range g.wishes {
		if now.Sub(w.repeated) > wishLifetime {
			delete(g.wishes, id)
		}
	}
	w, ok := g.wishes[diskID]
	if !ok || w.instanceID != instanceID {
		w = wish{instanceID: instanceID, first: now}
	}
	w.repeated = now
	g.wishes[diskID] = w
	return w.first.Add(g.grace)
}

// forget ends the wish: the volume was published again, or is detached.
func (g *detachGrace) forget(diskID string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.wishes, diskID)
}

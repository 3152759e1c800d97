// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package keylock has one lock for each key, such as a volume.
package keylock

import (
	"context"
	"sync"
	"time"
)

// Locks has one lock for each key. A second operation on a key waits for the first. The CSI specification also allows
// rejecting the second operation with ABORTED, but under Nomad that fails the whole allocation.
type Locks struct {
	mu   sync.Mutex
	held map[string]*lock
}

type lock struct {
	// users counts the holder and the waiters. The last one deletes the entry.
	users int
	// free is a channel of capacity 1. It contains a value while the lock is free.
	free chan struct{}
}

// New returns an empty set of locks.
func New() *Locks {
	return &Locks{held: map[string]*lock{}}
}

// Acquire locks a key and returns the function that unlocks it. It blocks while the key is locked, for at most wait or
// until ctx ends, and then returns false.
func (l *Locks) Acquire(ctx context.Context, key string, wait time.Duration) (release func(), ok bool) {
	l.mu.Lock()
	entry := l.held[key]
	if entry == nil {
		entry = &lock{free: make(chan struct{}, 1)}
		entry.free <- struct{}{}
		l.held[key] = entry
	}
	entry.users++
	l.mu.Unlock()

	leave := func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		if entry.users--; entry.users == 0 {
			delete(l.held, key)
		}
	}
	select {
	case <-entry.free:
	default:
		timer := time.NewTimer(wait)
		defer timer.Stop()
		select {
		case <-entry.free:
		case <-timer.C:
			leave()
			return nil, false
		case <-ctx.Done():
			leave()
			return nil, false
		}
	}
	return func() {
		entry.free <- struct{}{}
		leave()
	}, true
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package keylock lets one operation at a time work on a key, such as a volume.
package keylock

import (
	"context"
	"sync"
	"time"
)

// Locks lets one operation at a time work on a key. A second operation waits for the first and then finds its work done.
// The CSI specification allows to reject it with ABORTED, but that fails a whole allocation under Nomad.
type Locks struct {
	mu   sync.Mutex
	held map[string]*lock
}

type lock struct {
	// users counts the holder and those who wait, so that the last one clears the entry away.
	users int
	// free holds one value while nobody has the lock.
	free chan struct{}
}

// New returns locks of which none is held.
func New() *Locks {
	return &Locks{held: map[string]*lock{}}
}

// Acquire waits for the lock of a key, up to wait or until ctx ends, and returns the function that releases it. It returns
// false if it did not get the lock.
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

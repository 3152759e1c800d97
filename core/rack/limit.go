// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package rack

import (
	"context"
	"fmt"
	"net/http"
	"sync"
)

// maxCalls is how many calls of one rack are under way at most. A rack with more work than it can do gets slower for
// all its users, and each waiting call holds memory on both sides. Further calls wait here.
const maxCalls = 64

// urgentCalls is how many of them are kept free for urgent calls.
const urgentCalls = 4

type urgentKey struct{}

// Urgent returns a context whose calls do not wait behind those of other contexts, unless many urgent calls are under
// way. It is for few calls, one after the other, that must not fail because orchestrators ask for more than a rack can do.
func Urgent(ctx context.Context) context.Context { return context.WithValue(ctx, urgentKey{}, true) }

// limiter bounds the calls that are under way. The other calls wait in the order in which they came, each until the
// end of its context. So a call whose caller has gone costs the rack nothing.
type limiter struct {
	next http.RoundTripper
	// slots holds one value for each call under way. The runtime serves the goroutines that wait to send in their order.
	slots chan struct{}
	// urgent is the like for urgent calls.
	urgent chan struct{}
}

var _ http.RoundTripper = (*limiter)(nil)

func newLimiter(next http.RoundTripper) *limiter {
	return &limiter{
		next: next, slots: make(chan struct{}, maxCalls-urgentCalls), urgent: make(chan struct{}, urgentCalls),
	}
}

func (l *limiter) RoundTrip(req *http.Request) (*http.Response, error) {
	slots := l.slots
	if req.Context().Value(urgentKey{}) != nil {
		slots = l.urgent
	}
	select {
	case slots <- struct{}{}:
	case <-req.Context().Done():
		if req.Body != nil {
			_ = req.Body.Close() // nothing was read from it
		}
		return nil, fmt.Errorf("wait while %d other calls are under way: %w", maxCalls, req.Context().Err())
	}
	defer func() { <-slots }()
	return l.next.RoundTrip(req)
}

const (
	// repetitionShare is how many repetitions each request earns: with an overloaded rack, repetitions add a tenth to the
	// load. Without a budget they would treble it.
	repetitionShare = 0.1
	// repetitionBurst is how many repetitions are possible at once. It is enough for the calls under way when their
	// connection ends.
	repetitionBurst = maxCalls
)

// retryBudget limits the repetitions of requests. Its zero value has the whole burst left.
type retryBudget struct {
	mu   sync.Mutex
	used float64
}

// earn is called for each request that is not a repetition.
func (b *retryBudget) earn() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.used = max(0, b.used-repetitionShare)
}

// spend reports whether a request may be repeated.
func (b *retryBudget) spend() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.used+1 > repetitionBurst {
		return false
	}
	b.used++
	return true
}

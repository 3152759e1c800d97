// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package rack

import (
	"container/heap"
	"context"
	"fmt"
	"net/http"
	"sync"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// maxCalls is how many calls of one rack are under way at most, and leastCalls how many always may be. A rack with more
// work than it can do gets slower for all its users, each waiting call holds memory on both sides, and an urgent call
// would wait behind all of them. So each look that the rack has answered quickly beside many other calls allows one
// call more, and one that took as long as slowAnswer sets the number back. Further calls wait here.
const (
	leastCalls = 64
	maxCalls   = 256
	slowAnswer = 500 * time.Millisecond
)

// urgentCalls is how many of them are kept free for urgent calls.
const urgentCalls = 4

type urgentKey struct{}

// Urgent returns a context whose calls do not wait behind those of other contexts, unless many urgent calls are under
// way. It is for few calls, one after the other, that must not fail because orchestrators ask for more than a rack can
// do.
func Urgent(ctx context.Context) context.Context { return context.WithValue(ctx, urgentKey{}, true) }

// limiter bounds the calls that are under way. Of the calls that wait, the next is one of the RPC that arrived first,
// see [rpc.WithArrival]. If each call waited behind all earlier ones, many RPCs with several calls each would all reach
// their deadlines, and none would end. A call waits until the end of its context: a call whose caller has gone costs
// the rack nothing.
type limiter struct {
	next http.RoundTripper
	// urgent holds one value for each urgent call under way.
	urgent chan struct{}

	mu sync.Mutex
	// underWay are the calls that have begun, without the urgent ones.
	underWay int
	// most is how many calls may be under way.
	most    int
	waiting queue
}

var _ http.RoundTripper = (*limiter)(nil)

func newLimiter(next http.RoundTripper) *limiter {
	return &limiter{next: next, most: leastCalls, urgent: make(chan struct{}, urgentCalls)}
}

func (l *limiter) RoundTrip(req *http.Request) (*http.Response, error) {
	acquire, release := l.acquire, l.release
	if req.Context().Value(urgentKey{}) != nil {
		acquire, release = l.acquireUrgent, func() { <-l.urgent }
	}
	if err := acquire(req.Context()); err != nil {
		if req.Body != nil {
			_ = req.Body.Close() // nothing was read from it
		}
		return nil, fmt.Errorf("wait while many other calls are under way: %w", err)
	}
	defer release()
	if req.Method == http.MethodGet { // a change may take long on a rack without much work
		defer l.judge(time.Now(), l.busy())
	}
	return l.next.RoundTrip(req)
}

// judge changes the number of calls that may be under way, at the end of a look. busy says that many were under way
// when it began.
func (l *limiter) judge(begun time.Time, busy bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case time.Since(begun) >= slowAnswer:
		l.most = leastCalls
	case busy:
		l.most = min(l.most+1, maxCalls)
	}
}

func (l *limiter) busy() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.underWay > leastCalls/2
}

// full reports whether a further call has to wait. The lock is held.
func (l *limiter) full() bool { return l.underWay >= l.most-urgentCalls }

// Calls returns how many calls of this rack are under way, and how many wait until one of them ends. Urgent calls that
// wait are not counted.
func (c *Client) Calls() (underWay, waiting int) {
	l := c.limiter
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.underWay + len(l.urgent), len(l.waiting)
}

func (l *limiter) acquireUrgent(ctx context.Context) error {
	select {
	case l.urgent <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (l *limiter) acquire(ctx context.Context) error {
	l.mu.Lock()
	if len(l.waiting) == 0 && !l.full() {
		l.underWay++
		l.mu.Unlock()
		return nil
	}
	call := &waitingCall{arrival: rpc.Arrival(ctx), begin: make(chan struct{})}
	heap.Push(&l.waiting, call)
	l.mu.Unlock()
	select {
	case <-call.begin:
		return nil
	case <-ctx.Done():
	}
	l.mu.Lock()
	waits := call.index >= 0
	if waits {
		heap.Remove(&l.waiting, call.index)
	}
	l.mu.Unlock()
	if !waits { // it could have begun at the same moment
		l.release()
	}
	return ctx.Err()
}

func (l *limiter) release() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for l.underWay--; len(l.waiting) > 0 && !l.full(); l.underWay++ {
		close(heap.Pop(&l.waiting).(*waitingCall).begin)
	}
}

// waitingCall is a call that may begin once begin is closed.
type waitingCall struct {
	// arrival is the place of the call's RPC in the order of arrival.
	arrival uint64
	begin   chan struct{}
	// index is the place in the queue, -1 after the end of the wait.
	index int
}

// queue is a heap of calls: the call whose RPC arrived first comes first.
type queue []*waitingCall

var _ heap.Interface = (*queue)(nil)

func (q queue) Len() int { return len(q) }

func (q queue) Less(i, j int) bool { return q[i].arrival < q[j].arrival }

func (q queue) Swap(i, j int) {
	q[i], q[j] = q[j], q[i]
	q[i].index, q[j].index = i, j
}

func (q *queue) Push(call any) {
	c := call.(*waitingCall)
	c.index = len(*q)
	*q = append(*q, c)
}

func (q *queue) Pop() any {
	last := len(*q) - 1
	c := (*q)[last]
	(*q)[last] = nil
	*q = (*q)[:last]
	c.index = -1
	return c
}

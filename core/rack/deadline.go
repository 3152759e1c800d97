// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package rack

import (
	"context"
	"net/http"
	"net/http/httptrace"
	"sync/atomic"
	"time"
)

// changeGrace is how long a change is waited for after the caller's deadline. A rack that takes longer has most likely
// lost the request, and the volume should not stay locked for it.
const changeGrace = 30 * time.Second

// lostAnswerWait is how long a change waits after its answer was lost, before it is repeated or fails. With HTTP/2 a
// connection that ends takes the answers of all its requests along, and the rack may still execute them. An attach
// could then follow the detach of a later RPC, and a create could follow the deletion. The volume stays locked
// meanwhile. The test test/chaos found this order with waits up to 2 s on a rack that executes a request within 0.7 s,
// and not with 5 s. A rack that executes a request later still is not covered (docs/explanation/controller.md).
const lostAnswerWait = 5 * time.Second

// changeWaiter waits for the answer to a change even if the caller's context has ended. The rack makes the change in
// any case, perhaps late (docs/reference/rack.md §1). Meanwhile the RPC keeps its volume locked, so that the next RPC
// sees the result. If the RPC returned at once, the rack could attach the disk after the volume was unpublished, or
// detach it after the volume was published again and mounted. A deferred detach can take longer than its RPC: it has
// records instead of the lock (core/detach).
//
// A change that has no connection yet when the caller's context ends is not sent any more. next reads answers to their
// end.
type changeWaiter struct {
	next http.RoundTripper
	// lostAnswerWait is [lostAnswerWait], or a shorter time in tests.
	lostAnswerWait time.Duration
}

var _ http.RoundTripper = (*changeWaiter)(nil)

func (f *changeWaiter) RoundTrip(req *http.Request) (*http.Response, error) {
	caller := req.Context()
	if req.Method == http.MethodGet || caller.Err() != nil {
		return f.next.RoundTrip(req)
	}
	ctx, cancel := outlive(caller)
	defer cancel()
	var sent atomic.Bool
	trace := &httptrace.ClientTrace{GotConn: func(httptrace.GotConnInfo) { sent.Store(true) }}
	ctx = httptrace.WithClientTrace(ctx, trace)
	stop := context.AfterFunc(caller, func() {
		if !sent.Load() {
			cancel()
		}
	})
	defer stop()
	resp, err := f.next.RoundTrip(req.WithContext(ctx))
	if err != nil && sent.Load() && orderMatters(req) {
		time.Sleep(f.lostAnswerWait) // also if the caller has gone
	}
	return resp, err
}

// outlive returns a context that ends [changeGrace] after the caller's deadline, and with nothing else of the caller. A
// call without a deadline ends by the transport's ResponseHeaderTimeout.
func outlive(caller context.Context) (context.Context, context.CancelFunc) {
	if deadline, has := caller.Deadline(); has {
		return context.WithDeadline(context.WithoutCancel(caller), deadline.Add(changeGrace))
	}
	return context.WithCancel(context.WithoutCancel(caller))
}

// orderMatters reports whether executing a request late can undo what a later request did. A deletion names an ID,
// which no later request uses again.
func orderMatters(req *http.Request) bool { return req.Method != http.MethodDelete }

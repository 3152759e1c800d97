// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package rack

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"time"
)

const (
	// maxAttempts is how often a request is sent at most. This is enough for a broken connection or the restart of one
	// server of several. For longer trouble the CO repeats the RPC.
	maxAttempts = 3
	// firstBackoff is the longest wait before the second attempt. It doubles with each attempt.
	firstBackoff = 100 * time.Millisecond
)

// retrier repeats requests that got no answer or HTTP 503, the only status that a rack returns for temporary trouble
// (docs/reference/rack.md §7). It repeats only requests that are safe to repeat, since a lost answer may have been a
// success.
type retrier struct {
	next   http.RoundTripper
	budget retryBudget
}

var _ http.RoundTripper = (*retrier)(nil)

func (r *retrier) RoundTrip(req *http.Request) (*http.Response, error) {
	r.budget.earn()
	for attempt := 1; ; attempt++ {
		resp, err := r.next.RoundTrip(req)
		if err != nil {
			err = explainTLS(err)
		}
		if attempt == maxAttempts || !temporary(resp, err) || !safeToRepeat(req) ||
			!r.budget.spend() || !waitForRetry(req.Context(), attempt) {
			return resp, err
		}
		next, ok := cloneForRetry(req)
		if !ok {
			return resp, err
		}
		if resp != nil {
			drain(resp)
		}
		req = next
	}
}

const (
	// repetitionShare is how many repetitions each request earns: with an overloaded rack, repetitions add a tenth to the
	// load. Without a budget they would treble it.
	repetitionShare = 0.1
	// repetitionBurst is how many repetitions are possible at once. It is enough for the calls under way when their
	// connection ends.
	repetitionBurst = leastCalls
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

// safeToRepeat reports whether a request can be sent twice: reads, and attaching and detaching, which change nothing
// the second time. A second create finds its name taken and a second delete finds nothing, and only the RPC that made
// the call knows what that means. Starting and stopping an instance are never repeated here: another client may have
// changed the instance in between.
func safeToRepeat(req *http.Request) bool {
	switch req.Method {
	case http.MethodGet:
		return true
	case http.MethodPost:
		return strings.HasSuffix(req.URL.Path, "/disks/attach") || strings.HasSuffix(req.URL.Path, "/disks/detach")
	}
	return false
}

// temporary reports whether the trouble may be over in a moment.
func temporary(resp *http.Response, err error) bool {
	if err != nil {
		return !errors.Is(err, errUntrusted)
	}
	return resp.StatusCode == http.StatusServiceUnavailable
}

// waitForRetry waits before the next attempt. If the deadline leaves no time for one, it returns false at once, so
// that the caller learns the actual error instead of a passed deadline.
func waitForRetry(ctx context.Context, attempt int) bool {
	wait := backoff(attempt)
	if deadline, has := ctx.Deadline(); has && time.Until(deadline) <= wait {
		return false
	}
	return sleep(ctx, wait) == nil
}

// backoff returns the wait after an attempt. It is random, so that callers that failed together do not return
// together.
func backoff(attempt int) time.Duration {
	longest := firstBackoff << (attempt - 1)
	return longest/2 + rand.N(longest/2)
}

// errUntrusted means that the server's certificate has no trusted issuer.
var errUntrusted = errors.New(
	"its certificate is not trusted; if a private CA signed it, name that CA's file with --oxide-ca-file",
)

// explainTLS adds the next step to a TLS error.
func explainTLS(err error) error {
	if untrusted := (*tls.CertificateVerificationError)(nil); errors.As(err, &untrusted) {
		return fmt.Errorf("%w: %w", errUntrusted, err)
	}
	return err
}

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
	"time"
)

const (
	// attempts is how often a request is sent at most. It rides out a connection that broke, or one server of several
	// being restarted; longer trouble is for the CO, which asks again by itself.
	attempts = 3
	// firstBackoff is the longest wait before the second attempt. It doubles from attempt to attempt.
	firstBackoff = 100 * time.Millisecond
)

// retries sends again what has got no answer, or HTTP 503, which is the only one that a rack gives for a moment's trouble
// (docs/reference/rack.md §7), and what does no harm when it is done twice. An answer that was lost may have been given.
type retries struct {
	next http.RoundTripper
}

var _ http.RoundTripper = (*retries)(nil)

func (r *retries) RoundTrip(req *http.Request) (*http.Response, error) {
	for attempt := 1; ; attempt++ {
		resp, err := r.next.RoundTrip(req)
		if err != nil {
			err = explain(err)
		}
		if attempt == attempts || !passing(resp, err) || !repeatable(req) || !backOff(req.Context(), attempt) {
			return resp, err
		}
		next, ok := again(req)
		if !ok {
			return resp, err
		}
		if resp != nil {
			discard(resp)
		}
		req = next
	}
}

// repeatable says what may be sent twice: what changes nothing, and attaching and detaching, which leave alone what is so
// already. A second create finds the name of the first taken, and a second delete finds nothing: what that means is known
// to the RPC that asked. The call that starts or stops an instance is never repeated here: somebody else may have changed
// their mind in between.
func repeatable(req *http.Request) bool {
	switch req.Method {
	case http.MethodGet:
		return true
	case http.MethodPost:
		return strings.HasSuffix(req.URL.Path, "/disks/attach") || strings.HasSuffix(req.URL.Path, "/disks/detach")
	}
	return false
}

// passing reports whether the trouble may be gone in a moment.
func passing(resp *http.Response, err error) bool {
	if err != nil {
		return !errors.Is(err, errUntrusted)
	}
	return resp.StatusCode == http.StatusServiceUnavailable
}

// backOff waits before the next attempt. It reports false, at once where it can, when there is no time for one: the
// caller then learns what went wrong, and not only that its time is up.
func backOff(ctx context.Context, attempt int) bool {
	wait := backoff(attempt)
	if deadline, has := ctx.Deadline(); has && time.Until(deadline) <= wait {
		return false
	}
	return sleep(ctx, wait) == nil
}

// backoff is the wait after an attempt. Callers that failed together should not come back together.
func backoff(attempt int) time.Duration {
	longest := firstBackoff << (attempt - 1)
	return longest/2 + rand.N(longest/2)
}

// errUntrusted says that what answers shows a certificate that nobody trusted has signed.
var errUntrusted = errors.New(
	"its certificate is not trusted; if a private CA signed it, name that CA's file with --oxide-ca-file",
)

// explain adds what to do to an error of TLS.
func explain(err error) error {
	if untrusted := (*tls.CertificateVerificationError)(nil); errors.As(err, &untrusted) {
		return fmt.Errorf("%w: %w", errUntrusted, err)
	}
	return err
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package metadata

import (
	"context"
	"time"
)

const (
	firstRetry = 250 * time.Millisecond
	maxRetry   = 10 * time.Second
	// attemptTimeout bounds one call, so that a source that hangs is named as the
	// reason, and asked anew over a new connection.
	attemptTimeout = 10 * time.Second
)

// Await asks the provider until it answers or ctx ends. Each failure is handed
// to failed, which returns false to give up. The error is that of the last call.
func Await(ctx context.Context, provider Provider, failed func(error) (again bool)) (Instance, error) {
	for retry := firstRetry; ; retry = min(2*retry, maxRetry) {
		instance, err := attempt(ctx, provider)
		if err == nil || !failed(err) || !pause(ctx, retry) {
			return instance, err
		}
	}
}

func attempt(ctx context.Context, provider Provider) (Instance, error) {
	ctx, cancel := context.WithTimeout(ctx, attemptTimeout)
	defer cancel()
	return provider.Instance(ctx)
}

// pause waits, and reports whether ctx has not ended meanwhile.
func pause(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

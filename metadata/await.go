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
	// attemptTimeout bounds one call. So a source that hangs is reported, and asked again over a new connection.
	attemptTimeout = 10 * time.Second
)

// Await calls the provider until it answers or ctx ends. It passes each error to failed, which returns false to give
// up. The error is that of the last call.
//
// After the first failure, Await follows a [Follower], and calls it again as soon as its source has changed.
func Await(ctx context.Context, provider Provider, failed func(error) (again bool)) (Instance, error) {
	following, cancel := context.WithCancel(ctx)
	defer cancel()
	var changes <-chan struct{}
	for retry := firstRetry; ; retry = min(2*retry, maxRetry) {
		instance, err := attempt(ctx, provider)
		if err == nil || !failed(err) {
			return instance, err
		}
		if follower, ok := provider.(Follower); ok && changes == nil {
			changes = follower.Follow(following)
		}
		if !pause(ctx, retry, changes) {
			return instance, err
		}
	}
}

func attempt(ctx context.Context, provider Provider) (Instance, error) {
	ctx, cancel := context.WithTimeout(ctx, attemptTimeout)
	defer cancel()
	return provider.Instance(ctx)
}

// pause waits for a time or until a change. It returns false if ctx has ended.
func pause(ctx context.Context, d time.Duration, changes <-chan struct{}) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-changes:
		return true
	case <-ctx.Done():
		return false
	}
}

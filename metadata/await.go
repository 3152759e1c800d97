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

// Follower is an optional second interface of a [Provider] whose source reports its changes.
type Follower interface {
	// Follow follows the source until ctx ends. Meanwhile the provider answers from memory, without a request to the
	// source. If the source cannot be followed, the provider returns that error until it can be followed again. The
	// channel receives when the first answer is known, and when the answer may have changed. Several changes can make
	// one signal. The channel is never closed.
	Follow(ctx context.Context) <-chan struct{}
}

// Signal sends a signal into a channel with capacity one, unless it still holds the last signal.
func Signal(changes chan<- struct{}) {
	select {
	case changes <- struct{}{}:
	default:
	}
}

// Merge returns a channel that receives when one of several channels does, until ctx ends. It is nil for no channels.
func Merge(ctx context.Context, several ...<-chan struct{}) <-chan struct{} {
	if len(several) == 0 {
		return nil
	}
	merged := make(chan struct{}, 1)
	for _, changes := range several {
		go func() {
			for {
				select {
				case <-changes:
					Signal(merged)
				case <-ctx.Done():
					return
				}
			}
		}()
	}
	return merged
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package metadata

import "context"

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

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package metadata

import "context"

// Follower is a further ability of a [Provider] whose source tells of its changes.
type Follower interface {
	// Follow keeps up with the source until ctx ends. Meanwhile the provider answers from what it has seen last, and an
	// error lasts until the source can be followed again: asking costs the source nothing. The channel receives when
	// the first answer is there, and when the answer may have changed. Several changes may be one. It is not closed.
	Follow(ctx context.Context) <-chan struct{}
}

// Signal puts a signal into a channel with room for one, unless the last one has not been taken yet.
func Signal(changes chan<- struct{}) {
	select {
	case changes <- struct{}{}:
	default:
	}
}

// Merge returns a channel that receives when one of several does, until ctx ends. It is nil if there are none.
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

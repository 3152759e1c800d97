// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package rpc

import (
	"context"
	"sync/atomic"
)

// arrivals counts the RPCs, and the calls of a rack that belong to none.
var arrivals atomic.Uint64

type arrivalKey struct{}

// WithArrival returns a context of an RPC that arrives now. An overloaded rack gets the calls of the oldest RPC first.
func WithArrival(ctx context.Context) context.Context {
	return context.WithValue(ctx, arrivalKey{}, arrivals.Add(1))
}

// Arrival returns the place of the context's RPC in the order of arrival. A context that belongs to no RPC arrives now.
func Arrival(ctx context.Context) uint64 {
	if arrival, ok := ctx.Value(arrivalKey{}).(uint64); ok {
		return arrival
	}
	return arrivals.Add(1)
}

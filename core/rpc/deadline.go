// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package rpc

import (
	"context"
	"time"
)

const (
	// answerReserve is the part of a caller's deadline that is reserved for the work and the answer.
	answerReserve = 2 * time.Second
	// defaultWait is the wait budget of a call without a deadline.
	defaultWait = 60 * time.Second
)

// WaitBudget returns how long an RPC may wait for a state before it must answer.
func WaitBudget(ctx context.Context) time.Duration {
	deadline, ok := ctx.Deadline()
	if !ok {
		return defaultWait
	}
	return max(0, time.Until(deadline)-answerReserve)
}

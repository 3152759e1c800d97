// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package rpc

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

func TestWaitBudget(t *testing.T) {
	for _, test := range []struct {
		name     string
		deadline time.Duration // 0: none
		want     time.Duration
	}{
		{name: "no deadline", want: defaultWait},
		{name: "a deadline leaves time to answer", deadline: 10 * time.Second, want: 10*time.Second - answerReserve},
		{name: "a short deadline leaves no time to wait", deadline: time.Second, want: 0},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx := t.Context()
				if test.deadline != 0 {
					var cancel context.CancelFunc
					ctx, cancel = context.WithTimeout(ctx, test.deadline)
					defer cancel()
				}
				if got := WaitBudget(ctx); got != test.want {
					t.Errorf("%s, want %s", got, test.want)
				}
			})
		})
	}
}

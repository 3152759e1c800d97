// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package keylock

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

// wait is how long the operations of these tests wait for a lock.
const wait = time.Minute

func TestLocksWaitForTheFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := New()
		release, ok := l.Acquire(t.Context(), "v", wait)
		if !ok {
			t.Fatal("a free lock was not given")
		}
		got := make(chan bool)
		go func() {
			second, ok := l.Acquire(context.Background(), "v", wait)
			if ok {
				second()
			}
			got <- ok
		}()
		synctest.Wait()
		select {
		case <-got:
			t.Fatal("two operations had the lock at once")
		default:
		}
		time.Sleep(wait - time.Second)
		release()
		if !<-got {
			t.Fatal("the second operation did not get the lock that had become free in time")
		}
		if len(l.held) != 0 {
			t.Fatalf("%d entries are left behind", len(l.held))
		}
	})
}

func TestLocksGiveUpInTime(t *testing.T) {
	for _, test := range []struct {
		name   string
		cancel time.Duration // 0: never
		want   time.Duration
	}{
		{name: "the wait is over", want: wait},
		{name: "cancelled", cancel: 3 * time.Second, want: 3 * time.Second},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l := New()
				release, _ := l.Acquire(t.Context(), "v", wait)
				defer release()
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				if test.cancel != 0 {
					time.AfterFunc(test.cancel, cancel)
				}
				start := time.Now()
				if _, ok := l.Acquire(ctx, "v", wait); ok {
					t.Fatal("got a lock that is held")
				}
				if got := time.Since(start); got != test.want {
					t.Errorf("gave up after %s, want %s", got, test.want)
				}
				if other, ok := l.Acquire(ctx, "w", wait); ok {
					other()
				} else {
					t.Error("the lock of another key was not free")
				}
			})
		})
	}
}

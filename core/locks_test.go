package core

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

func TestLocksWaitForTheFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLocks()
		release, ok := l.acquire(t.Context(), "v")
		if !ok {
			t.Fatal("a free lock was not given")
		}
		got := make(chan bool)
		go func() {
			second, ok := l.acquire(context.Background(), "v")
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
		time.Sleep(lockPatience - time.Second)
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
		name     string
		deadline time.Duration // 0 = none
		cancel   time.Duration // 0 = not cancelled
		want     time.Duration
	}{
		{name: "no deadline", want: lockPatience},
		{name: "a deadline leaves time to answer", deadline: 10 * time.Second, want: 10*time.Second - lockReserve},
		{name: "a short deadline does not wait", deadline: time.Second, want: 0},
		{name: "cancelled", cancel: 3 * time.Second, want: 3 * time.Second},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l := newLocks()
				release, _ := l.acquire(t.Context(), "v")
				defer release()
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				if test.deadline != 0 {
					var stop context.CancelFunc
					ctx, stop = context.WithTimeout(ctx, test.deadline)
					defer stop()
				}
				if test.cancel != 0 {
					time.AfterFunc(test.cancel, cancel)
				}
				start := time.Now()
				if _, ok := l.acquire(ctx, "v"); ok {
					t.Fatal("got a lock that is held")
				}
				if got := time.Since(start); got != test.want {
					t.Errorf("gave up after %s, want %s", got, test.want)
				}
				if other, ok := l.acquire(ctx, "w"); ok {
					other()
				} else {
					t.Error("another volume's lock was not free")
				}
			})
		})
	}
}

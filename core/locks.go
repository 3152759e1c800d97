package core

import (
	"context"
	"sync"
	"time"
)

const (
	// lockReserve is left of a caller's deadline for the work itself and its answer.
	lockReserve = 2 * time.Second
	// lockPatience is how long a caller without a deadline waits.
	lockPatience = 60 * time.Second
)

// locks lets one operation at a time work on a volume. A second one waits for the first, and then finds the work done:
// refusing it at once, as the specification allows, fails a whole allocation under Nomad.
type locks struct {
	mu   sync.Mutex
	held map[string]*lock
}

type lock struct {
	// users counts the holder and those who wait, so that the last one clears the entry away.
	users int
	// free holds one value while nobody has the lock.
	free chan struct{}
}

func newLocks() *locks {
	return &locks{held: map[string]*lock{}}
}

// acquire waits for the lock of a key and returns what releases it. False means that the caller's own time ran out.
func (l *locks) acquire(ctx context.Context, key string) (release func(), ok bool) {
	l.mu.Lock()
	entry := l.held[key]
	if entry == nil {
		entry = &lock{free: make(chan struct{}, 1)}
		entry.free <- struct{}{}
		l.held[key] = entry
	}
	entry.users++
	l.mu.Unlock()

	leave := func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		if entry.users--; entry.users == 0 {
			delete(l.held, key)
		}
	}
	select {
	case <-entry.free:
	default:
		timer := time.NewTimer(patience(ctx))
		defer timer.Stop()
		select {
		case <-entry.free:
		case <-timer.C:
			leave()
			return nil, false
		case <-ctx.Done():
			leave()
			return nil, false
		}
	}
	return func() {
		entry.free <- struct{}{}
		leave()
	}, true
}

// patience is how long to wait for something before an RPC must answer.
func patience(ctx context.Context) time.Duration {
	deadline, ok := ctx.Deadline()
	if !ok {
		return lockPatience
	}
	return max(0, time.Until(deadline)-lockReserve)
}

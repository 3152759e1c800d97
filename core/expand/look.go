// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package expand

import (
	"context"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/core/record"
)

// Look is the question whether a volume is being expanded, which is asked beside a request that must not meet an
// expansion: the create of a disk of that name, or the attach of the disk.
type Look struct {
	expander *Expander
	diskName string
	sent     instant
	// ended is closed when the fields below are set.
	ended    chan struct{}
	intent   record.Intent
	found    bool
	err      error
	panicked any
}

// Look asks for the intent of the volume with disks of this name. It does not wait for the answer.
func (e *Expander) Look(ctx context.Context, diskName string) *Look {
	l := &Look{expander: e, diskName: diskName, sent: now(), ended: make(chan struct{})}
	go func() {
		defer close(l.ended)
		defer func() { l.panicked = recover() }()
		l.intent, l.found, l.err = e.intent(ctx, diskName)
	}()
	return l
}

// UnderWay returns the intent of the volume, if it has one. The caller calls UnderWay as soon as its own request was
// answered. The look counts if it was sent so short a time before that every expansion that has begun since still
// waits, and will see what the request has done. Otherwise UnderWay asks again. An expansion of a volume that this
// process has deleted is not under way.
func (l *Look) UnderWay(ctx context.Context) (record.Intent, bool, error) {
	age := l.sent.elapsed()
	<-l.ended
	if l.panicked != nil {
		panic(l.panicked)
	}
	i, found, err := l.intent, l.found, l.err
	if age >= l.expander.LookAge {
		i, found, err = l.expander.intent(ctx, l.diskName)
	}
	return i, found && !l.expander.isDeleted(i.Volume), err
}

// letOthersAct waits until no look from before the intent counts any more.
func (e *Expander) letOthersAct(ctx context.Context) error {
	timer := time.NewTimer(e.LookAge)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// instant is a moment on two clocks. Only sinceBoot counts the time for which the machine is suspended. Only the other
// one passes in a test's bubble.
type instant struct {
	time      time.Time
	sinceBoot time.Duration
}

func now() instant { return instant{time.Now(), sinceBoot()} }

func (i instant) elapsed() time.Duration { return max(time.Since(i.time), now().sinceBoot-i.sinceBoot) }

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package restart

import (
	"context"
	"time"
)

// CleanUp removes the traces of attach mode restart, for a process in attach mode hot. It brings back the instances
// that were taken down, and then deletes the deferred detaches, unless they are timed. In attach mode hot without a
// grace period an attached disk is a published one, and no later restart may detach it. CleanUp returns when no records
// are left; without records that is after one look.
func (e *Engine) CleanUp(ctx context.Context) {
	logged := false
	for {
		over, err := e.cleanUpOnce(ctx)
		if over || ctx.Err() != nil {
			return
		}
		wait := e.opts.Poll
		if err != nil {
			wait = e.opts.Idle
			if !logged {
				e.opts.Log.Warn("cannot clean up after planned restarts, retrying", "error", err.Error())
			}
			logged = true
		}
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-ctx.Done():
		}
		timer.Stop()
	}
}

// cleanUpOnce takes one step, and reports whether it was the last.
func (e *Engine) cleanUpOnce(ctx context.Context) (over bool, err error) {
	records, err := e.readRecords(ctx)
	if err != nil {
		return false, err
	}
	if len(records.restarts) > 0 {
		e.runOnce(ctx)
		return false, nil
	}
	if e.opts.Detacher.Timed() {
		return true, nil
	}
	for _, volume := range records.deferred.Volumes() {
		if err := e.opts.Detacher.Delete(ctx, records.deferred, volume); err != nil {
			return false, err
		}
	}
	return true, nil
}

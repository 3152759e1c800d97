// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package restart

import (
	"context"
	"time"
)

// WindUp ends what processes in attach mode restart have left behind, for one in attach mode hot: it brings back the instances that
// they took down, and then forgets which disks are attached for nobody. In attach mode hot an attached disk is a published one,
// and no later restart may take it for another. It returns once nothing is left; on a rack without records after one look.
func (e *Engine) CleanUp(ctx context.Context) {
	told := false
	for {
		over, err := e.cleanUpOnce(ctx)
		if over || ctx.Err() != nil {
			return
		}
		wait := e.opts.Poll
		if err != nil {
			wait = e.opts.Idle
			if !told {
				e.opts.Log.Warn(
					"what planned restarts have left behind cannot be looked after, which is tried again",
					"error",
					err.Error(),
				)
			}
			told = true
		}
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-ctx.Done():
		}
		timer.Stop()
	}
}

// windUp takes one step, and reports whether it was the last.
func (e *Engine) cleanUpOnce(ctx context.Context) (over bool, err error) {
	records, err := e.readRecords(ctx)
	if err != nil {
		return false, err
	}
	if len(records.restarts) > 0 {
		e.runOnce(ctx)
		return false, nil
	}
	for _, disk := range sortedKeys(records.deferred) {
		if err := e.deleteRecord(ctx, records.deferred[disk].recordID); err != nil {
			return false, err
		}
	}
	return true, nil
}

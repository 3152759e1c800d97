// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package expand

import (
	"time"

	"golang.org/x/sys/unix"
)

// sinceBoot is the time since the boot, with that for which the machine was suspended.
func sinceBoot() time.Duration {
	var since unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &since); err != nil {
		panic("every Linux has CLOCK_BOOTTIME: " + err.Error())
	}
	return time.Duration(since.Nano())
}

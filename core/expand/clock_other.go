// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build !linux

package expand

import "time"

// sinceBoot is 0: only commands run here, and no controller, so no look has to count.
func sinceBoot() time.Duration { return 0 }

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package pid1 is a minimal init for the guests of the simulated rack. It is the first process of its own PID and mount
// namespace, starts programs, and on request powers its machine off in order. It handles the same signals as systemd
// does as process 1, so a halt works the same way for both.
package pid1

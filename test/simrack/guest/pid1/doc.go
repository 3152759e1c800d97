// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package pid1 is an init for the guests of the simulated rack, as small as one can be: the first process of a PID and a mount
// namespace of its own, which starts programs, and on request powers its machine off in order. It knows the signals that
// systemd knows as process 1, so whoever tells one to halt can tell the other.
package pid1

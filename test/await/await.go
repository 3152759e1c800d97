// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package await waits in tests until something has become true.
package await

import (
	"testing"
	"time"
)

// limit is how long [Eventually] waits. It is long, so that a busy machine does not fail a test.
const limit = time.Minute

// longestPause is the longest pause between two questions, which can be calls of programs.
const longestPause = 100 * time.Millisecond

// Eventually waits until done returns true, for at most a minute. The text what describes the awaited state.
func Eventually(t testing.TB, what string, done func() bool) {
	t.Helper()
	Within(t, limit, what, done)
}

// Within waits until done returns true, for at most this time. The text what describes the awaited state.
func Within(t testing.TB, limit time.Duration, what string, done func() bool) {
	t.Helper()
	pause := time.Millisecond
	for deadline := time.Now().Add(limit); !done(); time.Sleep(pause) {
		if time.Now().After(deadline) {
			t.Fatalf("not within %s: %s", limit, what)
		}
		pause = min(2*pause, longestPause)
	}
}

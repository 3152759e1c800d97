// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package rpc

import (
	"runtime/debug"
	"strings"
)

// Stack returns the stack of this goroutine without the value of a panic, which may contain secrets.
func Stack() string {
	lines := strings.Split(string(debug.Stack()), "\n")
	kept := lines[:0]
	for _, line := range lines {
		if name, _, found := strings.Cut(line, "("); found && strings.HasPrefix(line, "panic(") {
			line = name
		}
		kept = append(kept, line)
	}
	return strings.Join(kept, "\n")
}

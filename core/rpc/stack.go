// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package rpc

import (
	"fmt"
	"log/slog"
	"runtime/debug"
	"strings"
)

// LogPanic logs a panic that a deferred function has recovered. where says what panicked: an RPC's method or a task of
// the process. The value of the panic is not logged, because it may contain secrets.
func LogPanic(log *slog.Logger, where slog.Attr, reason any) {
	log.Error("panic", where, slog.String("type", fmt.Sprintf("%T", reason)), slog.String("stack", stack()))
}

// stack returns the stack of this goroutine without the value of a panic.
func stack() string {
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

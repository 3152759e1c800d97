package rpc

import (
	"runtime/debug"
	"strings"
)

// Stack returns the stack of this goroutine without the arguments of its calls, which may hold secrets.
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

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package orchestrator

import (
	"context"
)

// Limits of the logs that a [LogReader] reads.
const (
	// MaxLogBytes is how much of the end of a log is read.
	MaxLogBytes = 64 << 10
	// MaxLogs is how many logs are read: those of the controllers first, then those of nodes, the unhealthy ones first.
	MaxLogs = 20
)

// Log is the end of the log of one of the plugin's processes.
type Log struct {
	// Name names the process. It is a file name.
	Name string
	// Text holds whole lines. It is empty if Err is not nil.
	Text string
	// Err says why the log could not be read.
	Err error
}

// LogReader reads the last lines of what the plugin's processes have logged, at most [MaxLogs] of them. The error says
// why the processes could not be found.
type LogReader interface {
	Logs(ctx context.Context) ([]Log, error)
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package client

import (
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// Progress shows what a command waits for. The zero value shows nothing.
type Progress struct {
	// Terminal gets a line that is overwritten.
	Terminal io.Writer
	// Lines gets lines with the time. It is used if Terminal is nil.
	Lines io.Writer
	// Columns is the width of the terminal. A longer line could not be overwritten.
	Columns int
}

const (
	// progressDelay is how long a call takes before its progress is shown.
	progressDelay    = 2 * time.Second
	progressInterval = time.Second
	// lineInterval is the time between two lines about a call where there is no terminal. It is longer than the 30 s that
	// an unmount waits for those who use the volume.
	lineInterval = 45 * time.Second
	clearLine    = "\r\x1b[K"
)

// NewProgress shows progress on out. It is a changing line if out is a terminal.
func NewProgress(out io.Writer) Progress {
	if file, is := out.(*os.File); is {
		if size, err := unix.IoctlGetWinsize(int(file.Fd()), unix.TIOCGWINSZ); err == nil {
			p := Progress{Terminal: file, Columns: int(size.Col)}
			if p.Columns == 0 { // it does not know
				p.Columns = 80
			}
			return p
		}
	}
	return Progress{Lines: out}
}

// Show shows a text. It escapes what a terminal would obey. A failed write must not end the command.
func (p Progress) Show(text string) {
	text = strings.ReplaceAll(rpc.Printable(text), "\n", "; ")
	switch {
	case p.Terminal != nil:
		if runes := []rune(text); p.Columns > 0 && len(runes) >= p.Columns {
			text = string(runes[:p.Columns-2]) + "…"
		}
		_, _ = io.WriteString(p.Terminal, clearLine+text)
	case p.Lines != nil:
		_, _ = fmt.Fprintf(p.Lines, "%s %s\n", time.Now().UTC().Format(time.RFC3339), text)
	}
}

// Clear removes the line on a terminal.
func (p Progress) Clear() {
	if p.Terminal != nil {
		_, _ = io.WriteString(p.Terminal, clearLine)
	}
}

// during shows which call the command waits for, until the returned function is called.
func (p Progress) during(method string) (end func()) {
	delay, interval := progressDelay, progressInterval
	switch {
	case p == Progress{}:
		return func() {}
	case p.Terminal == nil:
		delay, interval = lineInterval, lineInterval
	}
	start := time.Now()
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for wait, shown := delay, false; ; wait = interval {
			select {
			case <-time.After(wait):
				shown = true
				p.Show(
					fmt.Sprintf(
						"%s without a response from the %s (%s)",
						time.Since(start).Round(time.Second),
						serviceOf(method),
						method,
					),
				)
			case <-stop:
				if shown {
					p.Clear()
				}
				return
			}
		}
	}()
	return func() { close(stop); <-stopped }
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package main

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// narrator prints the story. It stops printing after the first write error, which is err.
type narrator struct {
	w   io.Writer
	err error
	// terminal means that the title of the running step is marked until the step has ended.
	terminal bool
	// plain means that the mark is not bold, because the user has set NO_COLOR (https://no-color.org).
	plain bool
	// title is the title of the step under way.
	title string
	// enter receives a value whenever the user presses Enter, and is closed at the end of the input. Nil means that the
	// demo does not wait between steps.
	enter chan struct{}
}

func newNarrator(w io.Writer, in io.Reader, pauses bool) *narrator {
	n := &narrator{w: w, plain: os.Getenv("NO_COLOR") != ""}
	if file, ok := w.(*os.File); ok {
		_, err := unix.IoctlGetTermios(int(file.Fd()), unix.TCGETS)
		n.terminal = err == nil
	}
	if pauses {
		n.enter = make(chan struct{})
		// This goroutine reads until the process ends.
		go func() {
			defer close(n.enter)
			for lines := bufio.NewScanner(in); lines.Scan(); {
				n.enter <- struct{}{}
			}
		}()
	}
	return n
}

func (n *narrator) print(text string) {
	if n.err == nil {
		_, n.err = io.WriteString(n.w, text)
	}
}

func (n *narrator) line(format string, args ...any) { n.print(fmt.Sprintf(format, args...) + "\n") }

// Control sequences of a terminal: bold, the end of bold, and removing the line under the cursor.
const (
	bold    = "\x1b[1m"
	regular = "\x1b[0m"
	erase   = "\r\x1b[K"
)

// begin prints the title of a step, which is under way until [narrator.end].
func (n *narrator) begin(title string) {
	n.title = title
	switch {
	case n.terminal && n.plain:
		n.print("> " + title)
	case n.terminal:
		n.print(bold + "> " + title + regular)
	}
}

// end prints what has happened in the step.
func (n *narrator) end(lines []string) {
	if n.terminal {
		n.print(erase)
	}
	n.line("%s", n.title)
	for _, line := range lines {
		n.line("   %s", line)
	}
}

// pause waits for the reader's Enter, if there is a reader. It returns the first write error.
func (n *narrator) pause(ctx context.Context) error {
	if n.enter != nil {
		n.line("   -- press Enter --")
		select {
		case <-n.enter:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return n.err
}

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
	"strings"
)

// Widths of the output, in columns.
const (
	lineWidth = 98
	indent    = 4
	// rackWidth and guestWidth are the widths of the first two columns of a view.
	rackWidth  = 26
	guestWidth = 26
	nameWidth  = 12
)

// narrator prints the story. It stops printing after the first write error, which is err.
type narrator struct {
	w   io.Writer
	err error
	// steps counts the printed steps.
	steps int
	// enter receives a value for each Enter of the reader, and is closed at the end of the input. Nil means that the demo
	// does not wait between steps.
	enter chan struct{}
}

func newNarrator(w io.Writer, in io.Reader, pauses bool) *narrator {
	n := &narrator{w: w}
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

func (n *narrator) line(format string, args ...any) {
	if n.err == nil {
		_, n.err = fmt.Fprintln(n.w, strings.TrimRight(fmt.Sprintf(format, args...), " "))
	}
}

func (n *narrator) blank() { n.line("") }

// paragraph prints text with line breaks.
func (n *narrator) paragraph(text string) {
	for _, line := range wrap(text, lineWidth) {
		n.line("%s", line)
	}
}

// entry prints a line of a list of named things.
func (n *narrator) entry(name, format string, args ...any) {
	n.line("%*s%-*s %s", indent, "", nameWidth, name, fmt.Sprintf(format, args...))
}

// step prints the purpose of a step and returns its number.
func (n *narrator) step(says string) int {
	n.steps++
	n.line("%2d. %s", n.steps, says)
	return n.steps
}

// command prints a command, and its CSI calls at the right.
func (n *narrator) command(prompt, line, calls string) {
	typed := prompt + "$ " + line
	if len(typed)+2+len(calls) > lineWidth-indent {
		n.line("%*s%s", indent, "", typed)
		typed = ""
	}
	n.line("%*s%-*s%s", indent, "", lineWidth-indent-len(calls), typed, calls)
}

// output prints the output of a command unchanged.
func (n *narrator) output(text string) {
	for line := range strings.Lines(text) {
		n.line("%*s%s", indent, "", strings.TrimSuffix(line, "\n"))
	}
}

// fact prints a fact that was found within a step.
func (n *narrator) fact(name, format string, args ...any) {
	n.line("%*s%s: %s", indent, "", name, fmt.Sprintf(format, args...))
}

// quotation prints a text of any length from another program.
func (n *narrator) quotation(text string) {
	for i, line := range wrap(text, lineWidth-2*indent) {
		n.line("%*s%s", indent*min(i+1, 2), "", line)
	}
}

// view prints the location of the volume.
func (n *narrator) view(v view) {
	if v.guest == "" {
		n.fact("rack", "%s", v.rack)
		return
	}
	n.line("%*s%-*s%-*s%s", indent, "", rackWidth, "rack: "+v.rack, guestWidth, "guest: "+v.guest, "mounts: "+v.mounts)
}

// pause waits for the reader's Enter, if there is a reader. It returns the first write error.
func (n *narrator) pause(ctx context.Context) error {
	if n.enter != nil {
		n.line("%*s-- press Enter --", indent, "")
		select {
		case <-n.enter:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return n.err
}

// wrap breaks text between words.
func wrap(text string, width int) []string {
	var lines []string
	line := ""
	for _, word := range strings.Fields(text) {
		if line != "" && len(line)+1+len(word) > width {
			lines, line = append(lines, line), ""
		}
		line = strings.TrimLeft(line+" "+word, " ")
	}
	return append(lines, line)
}

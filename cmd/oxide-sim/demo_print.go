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

// Measures of what is printed, in columns.
const (
	lineWidth = 98
	indent    = 4
	// rackWidth and guestWidth are those of the first two columns of a view.
	rackWidth  = 26
	guestWidth = 26
	nameWidth  = 12
)

// narrator prints the story. After the first failure to print it keeps silent; err is that failure.
type narrator struct {
	w   io.Writer
	err error
	// steps counts the steps told.
	steps int
	// enter has something in it when the reader wants the next step; it is closed when he has gone. Nil means that he does
	// not choose.
	enter chan struct{}
}

func newNarrator(w io.Writer, in io.Reader, pauses bool) *narrator {
	n := &narrator{w: w}
	if pauses {
		n.enter = make(chan struct{})
		// It waits for input until the process ends.
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

// paragraph prints text in lines of the right width.
func (n *narrator) paragraph(text string) {
	for _, line := range wrap(text, lineWidth) {
		n.line("%s", line)
	}
}

// entry prints a line of a list of named things.
func (n *narrator) entry(name, format string, args ...any) {
	n.line("%*s%-*s %s", indent, "", nameWidth, name, fmt.Sprintf(format, args...))
}

// step prints what is wanted now and returns its number.
func (n *narrator) step(says string) int {
	n.steps++
	n.line("%2d. %s", n.steps, says)
	return n.steps
}

// command prints a command, and at the right the CSI calls that it makes.
func (n *narrator) command(prompt, line, calls string) {
	typed := prompt + "$ " + line
	if len(typed)+2+len(calls) > lineWidth-indent {
		n.line("%*s%s", indent, "", typed)
		typed = ""
	}
	n.line("%*s%-*s%s", indent, "", lineWidth-indent-len(calls), typed, calls)
}

// output prints what a command has printed, as it is.
func (n *narrator) output(text string) {
	for line := range strings.Lines(text) {
		n.line("%*s%s", indent, "", strings.TrimSuffix(line, "\n"))
	}
}

// fact prints something that came to light within a step.
func (n *narrator) fact(name, format string, args ...any) {
	n.line("%*s%s: %s", indent, "", name, fmt.Sprintf(format, args...))
}

// quotation prints what somebody else has said, of any length.
func (n *narrator) quotation(text string) {
	for i, line := range wrap(text, lineWidth-2*indent) {
		n.line("%*s%s", indent*min(i+1, 2), "", line)
	}
}

// view prints where the volume is.
func (n *narrator) view(v view) {
	if v.guest == "" {
		n.fact("rack", "%s", v.rack)
		return
	}
	n.line("%*s%-*s%-*s%s", indent, "", rackWidth, "rack: "+v.rack, guestWidth, "guest: "+v.guest, "mounts: "+v.mounts)
}

// pause waits until the reader wants to go on, if he is asked, and returns what has kept anything from being printed.
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

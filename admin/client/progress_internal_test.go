// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package client

import (
	"bytes"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// A line on a terminal is as wide as the terminal at most, and is overwritten. Elsewhere lines have the time.
func TestProgress(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var terminal, file bytes.Buffer
		for _, p := range []Progress{{Terminal: &terminal, Columns: 24}, {Lines: &file}, {}} {
			p.Show("a\x1b[2J\nb")
			p.Show(strings.Repeat("é", 30))
			end := p.during("CreateVolume")
			time.Sleep(61500 * time.Millisecond)
			end()
			p.during("quick")()
		}
		const clear = "\r\x1b[K"
		lines := strings.Split(terminal.String(), clear)
		if len(lines) != 64 || lines[1] != `a\u001b[2J; b` || lines[2] != strings.Repeat("é", 22)+"…" ||
			lines[3] != "2s without a response …" || lines[63] != "" {
			t.Errorf("on a terminal: %d lines, %q", len(lines), lines[:4])
		}
		const want = "2000-01-01T00:01:01Z a\\u001b[2J; b\n" +
			"2000-01-01T00:01:01Z éééééééééééééééééééééééééééééé\n" +
			"2000-01-01T00:01:46Z 45s without a response from the controller (CreateVolume)\n"
		if file.String() != want {
			t.Errorf("elsewhere: %s", file.String())
		}
	})
}

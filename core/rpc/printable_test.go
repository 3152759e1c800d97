// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package rpc

import "testing"

func TestPrintable(t *testing.T) {
	for text, want := range map[string]string{
		"plain\ttext, é and 日本\n":  "plain\ttext, é and 日本\n",
		"\x1b[2J\x1b]0;title\a":    "\uFFFD[2J\uFFFD]0;title\uFFFD",
		"C1 \u009b31m":             "C1 \uFFFD31m",
		"reversed \u202etxt":       "reversed \uFFFDtxt",
		"overwritten\rOK":          "overwritten\uFFFDOK",
		"not UTF-8: \x9b31m, \xff": "not UTF-8: \uFFFD31m, \uFFFD",
	} {
		if got := Printable(text); got != want {
			t.Errorf("%q became %q, want %q", text, got, want)
		}
	}
}

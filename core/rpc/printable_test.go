// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package rpc

import (
	"encoding/json"
	"testing"
)

func TestPrintable(t *testing.T) {
	for text, want := range map[string]string{
		"plain\ttext, é and 日本\n":  "plain\ttext, é and 日本\n",
		"\x1b[2J\x1b]0;title\a":    `\u001b[2J\u001b]0;title\u0007`,
		"C1 \u009b31m":             `C1 \u009b31m`,
		"reversed \u202etxt":       `reversed \u202etxt`,
		"a tag \U000e0041":         `a tag \udb40\udc41`,
		"overwritten\rOK":          `overwritten\u000dOK`,
		"not UTF-8: \x9b31m, \xff": "not UTF-8: \uFFFD31m, \uFFFD",
	} {
		if got := Printable(text); got != want {
			t.Errorf("%q became %q, want %q", text, got, want)
		}
	}
	const hostile = "\x1b[2J\u009b31m\u202e\U000e0041"
	encoded, err := json.Marshal(hostile)
	if err != nil {
		t.Fatal(err)
	}
	var decoded string
	if err := json.Unmarshal([]byte(Printable(string(encoded))), &decoded); err != nil || decoded != hostile {
		t.Errorf("JSON became %q, %v", decoded, err)
	}
}

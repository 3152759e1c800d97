// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package rpc

import (
	"strings"
	"unicode"
	"unicode/utf8"
)

// Printable replaces each control and format character by U+FFFD, except line feeds and tabs. Any user of a rack can
// put an escape sequence into a description, and a terminal would obey it. It also replaces what is not UTF-8.
func Printable(text string) string {
	return strings.Map(func(r rune) rune {
		if r != '\n' && r != '\t' && (unicode.IsControl(r) || unicode.Is(unicode.Cf, r)) {
			return utf8.RuneError
		}
		return r
	}, text)
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package rpc

import (
	"fmt"
	"strings"
	"unicode"
	"unicode/utf16"
)

// Printable escapes each control and format character, except line feeds and tabs: an escape character becomes \u001b.
// Any user of a rack can put an escape sequence into a description, and a terminal would obey it. The escapes are those
// of JSON, so JSON keeps its meaning. What is not UTF-8 becomes U+FFFD.
func Printable(text string) string {
	if text = strings.ToValidUTF8(text, "\uFFFD"); !strings.ContainsFunc(text, unprintable) {
		return text
	}
	var escaped strings.Builder
	for _, r := range text {
		if !unprintable(r) {
			escaped.WriteRune(r)
			continue
		}
		for _, unit := range utf16.AppendRune(nil, r) {
			fmt.Fprintf(&escaped, `\u%04x`, unit)
		}
	}
	return escaped.String()
}

func unprintable(r rune) bool {
	return r != '\n' && r != '\t' && (unicode.IsControl(r) || unicode.Is(unicode.Cf, r))
}

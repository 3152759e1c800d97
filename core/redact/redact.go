// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package redact takes the users and passwords of URLs out of texts, for logs, errors and files that are passed on.
package redact

import (
	"log/slog"
	"regexp"
	"strings"
)

// Redacted stands for what was taken out.
const Redacted = "(redacted)"

var (
	// inURL matches what a URL has before its host. It takes in more rather than less: a password that is not escaped may
	// hold any character of a URL.
	inURL = regexp.MustCompile("(://)[^\\s\"'`<>]*@")
	// withoutScheme matches a user and a password before a host, as variables of a proxy may have them.
	withoutScheme = regexp.MustCompile("(^|[\\s\"'`=(\\[{])[^\\s\"'`<>@/:=()\\[\\]{}]+:[^\\s\"'`<>@/]+@([[:alnum:]\\[])")
)

// UserInfo replaces the users and passwords of all URLs in a text.
func UserInfo(text string) string {
	if !strings.Contains(text, "@") {
		return text
	}
	text = inURL.ReplaceAllString(text, "${1}"+Redacted+"@")
	return withoutScheme.ReplaceAllString(text, "${1}"+Redacted+"@${2}")
}

// Attribute is a [slog.HandlerOptions.ReplaceAttr] that replaces them in a text or an error of a log line.
func Attribute(_ []string, a slog.Attr) slog.Attr {
	switch a.Value.Kind() {
	case slog.KindString:
		a.Value = slog.StringValue(UserInfo(a.Value.String()))
	case slog.KindAny:
		if err, is := a.Value.Any().(error); is {
			a.Value = slog.StringValue(UserInfo(err.Error()))
		}
	}
	return a
}

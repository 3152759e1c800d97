// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package config

import (
	"fmt"
	"regexp"
	"strings"
)

// Problem is one thing that is wrong with the configuration.
type Problem struct {
	// Flag names the setting: "--max-disks", or the key where there is no flag,
	// such as "racks[1].host".
	Flag string
	// What is wrong with it and what to do, one line without a token in it.
	What string
}

// String is the line that an operator sees: "config: --max-disks: …".
func (p Problem) String() string { return "config: " + p.Flag + ": " + p.What }

// Problems is everything that is wrong with the configuration. It is the only
// kind of error that [Load] returns.
type Problems []Problem

// Error is one line per problem.
func (p Problems) Error() string {
	lines := make([]string, len(p))
	for i, problem := range p {
		lines[i] = problem.String()
	}
	return strings.Join(lines, "\n")
}

// add notes a problem. Format and args are fmt.Sprintf's.
func (p *Problems) add(flag, format string, args ...any) {
	*p = append(*p, Problem{Flag: flag, What: fmt.Sprintf(format, args...)})
}

// has reports whether a problem of that setting is noted already.
func (p Problems) has(flag string) bool {
	for _, problem := range p {
		if problem.Flag == flag {
			return true
		}
	}
	return false
}

// redactTokens makes s one line without a token in it: neither anything that looks
// like one, nor the one that is configured. Most messages repeat what the user
// wrote, and a token pasted into the wrong setting must not end in a log.
func redactTokens(s string, token Token) string {
	if t := strings.TrimSpace(token.Reveal()); len(t) >= minSecret {
		s = strings.ReplaceAll(s, t, redacted)
	}
	s = regexp.MustCompile(`(?i)oxide-token-[^\s"'`+"`"+`]+`).ReplaceAllStringFunc(s, func(found string) string {
		// The name of the flag looks like a token.
		if rest, ok := strings.CutPrefix(found, "oxide-token-file"); ok && !startsTokenChar(rest) {
			return found
		}
		return redacted
	})
	return strings.Join(strings.Fields(s), " ")
}

// minSecret is the length under which a token is no secret, and from which on
// replacing it everywhere spoils no message.
const minSecret = 6

func startsTokenChar(s string) bool {
	return s != "" && regexp.MustCompile(`^[0-9A-Za-z_-]`).MatchString(s)
}

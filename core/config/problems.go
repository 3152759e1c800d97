// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package config

import (
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/core/redact"
)

// Problem is one problem of the configuration.
type Problem struct {
	// Flag names the setting: "--max-disks", or the key if there is no flag, such as "racks[1].host".
	Flag string
	// What says what is wrong and what to do, on one line without a token.
	What string
	// Missing says that the setting is required and has no value.
	Missing bool
}

// String is the line for the operator: "config: --max-disks: …".
func (p Problem) String() string { return "config: " + p.Flag + ": " + p.What }

// Problems are all problems of the configuration. It is the only type of error that [Load] returns.
type Problems []Problem

// Error is one line per problem.
func (p Problems) Error() string {
	lines := make([]string, len(p))
	for i, problem := range p {
		lines[i] = problem.String()
	}
	return strings.Join(lines, "\n")
}

// add adds a problem. format and args are those of fmt.Sprintf.
func (p *Problems) add(flag, format string, args ...any) {
	*p = append(*p, Problem{Flag: flag, What: fmt.Sprintf(format, args...)})
}

// addMissing adds the problem of a required setting without a value.
func (p *Problems) addMissing(flag, format string, args ...any) {
	*p = append(*p, Problem{Flag: flag, What: fmt.Sprintf(format, args...), Missing: true})
}

// Missing reports whether that setting is required and has no value.
func (p Problems) Missing(flag string) bool {
	return slices.ContainsFunc(p, func(problem Problem) bool { return problem.Flag == flag && problem.Missing })
}

// has reports whether there is a problem of that setting.
func (p Problems) has(flag string) bool {
	for _, problem := range p {
		if problem.Flag == flag {
			return true
		}
	}
	return false
}

// redactTokens returns s on one line without tokens and without users and passwords of URLs: neither the configured
// token nor a text that looks like one. Most messages quote the user's value, and a secret in the wrong setting must
// not get into a log.
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
	return redact.UserInfo(strings.Join(strings.Fields(s), " "))
}

// minSecret is the shortest token that is redacted. A shorter text is no secret, and replacing it everywhere would make
// messages unreadable.
const minSecret = 6

func startsTokenChar(s string) bool {
	return s != "" && regexp.MustCompile(`^[0-9A-Za-z_-]`).MatchString(s)
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package simrack

import (
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
)

// maxNameBytes is the length of the longest name that the rack accepts (docs/reference/rack.md §2).
const maxNameBytes = 63

// parseUUID reads each notation that a rack takes for a UUID: 32 hex digits, the usual form with hyphens, the usual
// form in braces, and the usual form as a URN. It returns the usual form in lower case. A text that parseUUID accepts
// is an ID wherever the API takes a name or an ID (docs/reference/rack.md §1).
func parseUUID(s string) (string, bool) {
	switch {
	case len(s) == 38 && s[0] == '{' && s[37] == '}':
		s = s[1:37]
	case len(s) == 45 && strings.HasPrefix(s, "urn:uuid:"):
		s = s[9:]
	case len(s) == 32:
		s = s[:8] + "-" + s[8:12] + "-" + s[12:16] + "-" + s[16:20] + "-" + s[20:]
	}
	if len(s) != 36 || s[8] != '-' || s[13] != '-' || s[18] != '-' || s[23] != '-' {
		return "", false
	}
	digits := s[:8] + s[9:13] + s[14:18] + s[19:23] + s[24:]
	if _, err := hex.DecodeString(digits); err != nil {
		return "", false
	}
	return strings.ToLower(s), true
}

// checkName returns the rack's message about an invalid name, or nil (docs/reference/rack.md §2). The published schema
// allows upper case; the rack does not.
func checkName(s string) error {
	if len(s) > maxNameBytes {
		return errors.New("name may contain at most 63 characters")
	}
	if s == "" {
		return errors.New("name requires at least one character")
	}
	if s[0] < 'a' || s[0] > 'z' {
		return errors.New("name must begin with an ASCII lowercase character")
	}
	for _, c := range s {
		if (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '-' {
			return fmt.Errorf(
				`name contains invalid character: "%c" (allowed characters are lowercase ASCII, digits, and "-")`,
				c,
			)
		}
	}
	if s[len(s)-1] == '-' {
		return errors.New(`name cannot end with "-"`)
	}
	if _, is := parseUUID(s); is {
		return errors.New("name cannot be a UUID to avoid ambiguity with IDs")
	}
	return nil
}

// kind is a type of object: its name in messages, the message for an ID with a project, and the message for a name
// without a project. The rack words these differently for each type (docs/reference/rack.md §1).
type kind struct{ name, idAndProject, nameAlone string }

var (
	kindDisk = kind{"disk", "when providing disk as an ID project should not be specified",
		"disk should either be UUID or project should be specified"}
	kindInstance = kind{"instance", "when providing instance as an ID project should not be specified",
		"instance should either be UUID or project should be specified"}
	kindSnapshot = kind{"snapshot", "when providing snapshot as an ID, project should not be specified",
		"snapshot should either be an ID or project should be specified"}
	kindGroup = kind{"anti-affinity-group", "when providing anti_affinity_group as an ID, project should not be specified",
		"anti_affinity_group should either be UUID or project should be specified"}
)

// selector is how a request addresses an object: by ID or by name. Exactly one is set.
type selector struct {
	id   string
	name string
}

var errNameOrID = errors.New("data did not match any variant of untagged enum NameOrId")

// parseSelector reads a "name or ID". A text that parses as a UUID is an ID.
func parseSelector(s string) (selector, error) {
	if id, is := parseUUID(s); is {
		return selector{id: id}, nil
	}
	if checkName(s) != nil {
		return selector{}, errNameOrID
	}
	return selector{name: s}, nil
}

func (s selector) String() string {
	if s.id != "" {
		return s.id
	}
	return s.name
}

// notFound is the 404 for an object of this kind. The message repeats how the request addressed the object.
func (s selector) notFound(kind string) error {
	if s.id != "" {
		return fail(404, codeNotFound, `not found: %s with id "%s"`, kind, s.id)
	}
	return fail(404, codeNotFound, `not found: %s with name "%s"`, kind, s.name)
}

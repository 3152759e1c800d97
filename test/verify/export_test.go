// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package verify

import (
	"regexp"
)

// CaseIDs are the IDs of all cases.
func CaseIDs() (ids []string) {
	for _, c := range cases {
		ids = append(ids, c.id)
	}
	return ids
}

// BeyondIDs are the IDs of the cases that cannot be played.
func BeyondIDs() (ids []string) {
	for _, b := range beyond {
		ids = append(ids, regexp.MustCompile(`\b[A-Z]\d+\b`).FindAllString(b.ids, -1)...)
	}
	return ids
}

// Forget removes a case from a recording.
func (rec Recording) Forget(id string) {
	for at := range rec.lines {
		if at.Case == id {
			delete(rec.lines, at)
		}
	}
}

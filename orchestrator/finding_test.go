// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package orchestrator_test

import (
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
)

func TestSome(t *testing.T) {
	for names, want := range map[string]string{
		"a": "a", "a b c d e": "a, b, c, d, e", "a b c d e f g": "a, b, c, d, e and 2 others",
	} {
		if got := orchestrator.Some(strings.Fields(names)); got != want {
			t.Errorf("Some(%s) = %q, want %q", names, got, want)
		}
	}
}

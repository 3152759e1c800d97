// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package core

import (
	"os"
	"strings"
	"testing"
)

// Each error that an RPC can answer has an entry in the page for operators.
func TestEveryErrorHasAnEntry(t *testing.T) {
	const page = "../docs/how-to/troubleshooting.md"
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	_, entries, found := strings.Cut(string(text), "\n## The text of an error\n")
	if !found {
		t.Fatalf("%s has no section with the errors", page)
	}
	for _, row := range codeTable {
		if !strings.Contains(entries, "\n| `"+row.err.Error()+"` | ") {
			t.Errorf("%s has no entry for %q: add it to admin/diagnose/errors.go", page, row.err)
		}
	}
}

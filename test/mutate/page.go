// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// result is the result of a planted bug that was found.
type result struct {
	// Bug is the digest of the row.
	Bug string `json:"bug"`
	// Found is the date on which the test last failed with the bug.
	Found string `json:"found"`
}

const (
	resultsFile = "test/mutate/results.json"
	pageFile    = "docs/development/planted-bugs.md"
)

// readResults returns the results by the names of the bugs.
func readResults(root string) (map[string]result, error) {
	results := map[string]result{}
	text, err := os.ReadFile(filepath.Join(root, resultsFile))
	if errors.Is(err, fs.ErrNotExist) {
		return results, nil
	}
	if err != nil {
		return nil, err
	}
	return results, json.Unmarshal(text, &results)
}

// recordResults adds results to results.json, and removes those of bugs that are not in the list any more.
func recordResults(root string, found map[string]result) error {
	before, err := readResults(root)
	if err != nil {
		return err
	}
	results := map[string]result{}
	for _, bug := range planted {
		if r, ok := found[bug.name]; ok {
			results[bug.name] = r
		} else if r, ok := before[bug.name]; ok {
			results[bug.name] = r
		}
	}
	text, err := json.MarshalIndent(results, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(root, resultsFile), append(text, '\n'), 0o644)
}

func writePage(root string) error {
	results, err := readResults(root)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(root, pageFile), []byte(page(planted, results)), 0o644)
}

const introduction = `# Planted bugs

A test is worth something only if it can fail. ` + "`make mutate`" + ` plants each of these bugs, one at a time, and expects that the named
test fails. A bug that survives fails the command. Continuous integration plants five of them, chosen by the commit's hash
(` + "`make mutate-sample`" + `).

To add a bug, add a row to ` + "`test/mutate/planted.go`" + ` and run ` + "`go run ./test/mutate -match NAME -record`" + ` as root. It writes this page.
A bug that survives shows that a test is missing: write the test first.

`

// page returns the page about the bugs and their results.
func page(bugs []bug, results map[string]result) string {
	var text strings.Builder
	text.WriteString(introduction)
	fmt.Fprintf(&text, "%d bugs:\n\n| bug | in | found by | on |\n|---|---|---|---|\n", len(bugs))
	for _, bug := range bugs {
		found := "not run yet"
		if r, ok := results[bug.name]; ok && r.Bug == bug.digest() {
			found = r.Found
		}
		fmt.Fprintf(&text, "| %s | `%s` | `%s` | %s |\n", bug.name, bug.file, bug.test, found)
	}
	return text.String()
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"text/tabwriter"
)

// result is the result of a planted bug that was found.
type result struct {
	// Bug is the digest of the row.
	Bug string `json:"bug"`
	// Found is the date on which the test last failed with the bug.
	Found string `json:"found"`
}

const resultsFile = "test/mutate/results.json"

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

// printList prints each bug with the test that finds it, and the date on which it last did.
func printList(out io.Writer, bugs []bug, results map[string]result) error {
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	for _, bug := range bugs {
		found := "not run yet"
		if r := results[bug.name]; r.Bug == bug.digest() {
			found = r.Found
		}
		fmt.Fprintf(table, "%s\t%s\t%s\t%s\n", bug.name, bug.file, bug.test, found)
	}
	fmt.Fprintf(table, "%d bugs\n", len(bugs))
	return table.Flush()
}

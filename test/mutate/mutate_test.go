// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main

import (
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const root = "../.."

// Each row can be planted: its text is in the file once, the result is Go, and its test exists.
func TestRowsCanBePlanted(t *testing.T) {
	seen := map[string]bool{}
	for _, bug := range planted {
		t.Run(bug.name, func(t *testing.T) {
			if seen[bug.name] {
				t.Fatal("two rows have this name")
			}
			seen[bug.name] = true
			if strings.ContainsAny(bug.name, "|\n`") {
				t.Error("the name does not fit into the page's table")
			}
			content, err := bug.apply(root)
			if err != nil {
				t.Fatal(err)
			}
			if bug.original == bug.planted {
				t.Error("nothing is changed")
			}
			if _, err := parser.ParseFile(token.NewFileSet(), bug.file, content, parser.SkipObjectResolution); err != nil {
				t.Errorf("the planted bug is not Go: %v", err)
			}
			name, _, _ := strings.Cut(bug.test, "/")
			if !hasTest(t, bug.pkg, name) {
				t.Errorf("%s has no test %s", bug.pkg, name)
			}
		})
	}
	const enough = 25
	if len(planted) < enough {
		t.Errorf("%d bugs, want at least %d", len(planted), enough)
	}
}

func hasTest(t *testing.T, pkg, name string) bool {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(root, pkg, "*_test.go"))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		content, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(string(content), "func "+name+"(t *testing.T)") {
			return true
		}
	}
	return false
}

func TestPageIsCurrent(t *testing.T) {
	results, err := readResults(root)
	if err != nil {
		t.Fatal(err)
	}
	for _, bug := range planted {
		if results[bug.name].Bug != bug.digest() {
			t.Errorf("%s: the row is new or was changed: run go run ./test/mutate -match %q -record", bug.name, bug.name)
		}
	}
	content, err := os.ReadFile(filepath.Join(root, pageFile))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(page(planted, results), string(content)); diff != "" {
		t.Errorf("%s is not current: run go run ./test/mutate -page (-want +file):\n%s", pageFile, diff)
	}
}

// The sample depends on the seed alone, and every bug is in some sample.
func TestSample(t *testing.T) {
	all := regexp.MustCompile("")
	first, again := choose(planted, all, 5, "a"), choose(planted, all, 5, "a")
	if diff := cmp.Diff(first, again, cmp.AllowUnexported(bug{})); diff != "" || len(first) != 5 {
		t.Errorf("%d bugs, then others:\n%s", len(first), diff)
	}
	seen := map[string]bool{}
	for seed := range 1000 {
		for _, bug := range choose(planted, all, 5, string(rune(seed))) {
			seen[bug.name] = true
		}
	}
	if len(seen) != len(planted) {
		t.Errorf("1000 samples have %d of %d bugs", len(seen), len(planted))
	}
}

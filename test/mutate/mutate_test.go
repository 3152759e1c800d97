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
			if strings.ContainsAny(bug.name, "\t\n") {
				t.Error("the name does not fit into the list")
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

// Each row was planted as it is now, and its test found it.
func TestResultsAreCurrent(t *testing.T) {
	results, err := readResults(root)
	if err != nil {
		t.Fatal(err)
	}
	for _, bug := range planted {
		if results[bug.name].Bug != bug.digest() {
			t.Errorf("%s: the row is new or was changed: run go run ./test/mutate -match %q -record", bug.name, bug.name)
		}
	}
	if len(results) != len(planted) {
		t.Errorf("%s has %d results for %d bugs: run go run ./test/mutate -record", resultsFile, len(results), len(planted))
	}
}

// Code that moves keeps its result; a row with another text, bug, test or flag needs a new one.
func TestDigest(t *testing.T) {
	row := bug{name: "a", file: "core/a/a.go", original: "x", planted: "y", pkg: "core/a", test: "TestA", flag: "-a"}
	moved := row
	moved.file, moved.pkg = "core/b/b.go", "core/b"
	if moved.digest() != row.digest() {
		t.Error("code that moved to another file has no result")
	}
	for name, change := range map[string]func(*bug){
		"original": func(b *bug) { b.original = "z" },
		"planted":  func(b *bug) { b.planted = "z" },
		"test":     func(b *bug) { b.test = "TestZ" },
		"flag":     func(b *bug) { b.flag = "" },
	} {
		changed := row
		if change(&changed); changed.digest() == row.digest() {
			t.Errorf("a row with another %s keeps its result", name)
		}
	}
}

// A result counts only for the row that was planted.
func TestList(t *testing.T) {
	bugs := []bug{
		{name: "found", file: "a.go", test: "TestA"},
		{name: "changed", file: "b.go", test: "TestB"},
		{name: "new", file: "c.go", test: "TestC"},
	}
	var out strings.Builder
	err := printList(&out, bugs, map[string]result{
		"found":   {Bug: bugs[0].digest(), Found: "2026-01-02"},
		"changed": {Bug: "of another row", Found: "2026-01-02"},
	})
	const want = "found    a.go  TestA  2026-01-02\n" +
		"changed  b.go  TestB  not run yet\n" +
		"new      c.go  TestC  not run yet\n" +
		"3 bugs\n"
	if diff := cmp.Diff(want, out.String()); diff != "" || err != nil {
		t.Error(err, diff)
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

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package repo

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/oxidecomputer/oxide-csi-plugin/test/pages"
)

// TestBlocks checks that every fenced block of tutorials and how-to is run by a test, or says why it is not. A test
// that runs a block reads it from its page.
func TestBlocks(t *testing.T) {
	packages := testFiles(t)
	found := 0
	for _, folder := range []string{"tutorials", "how-to"} {
		files, err := filepath.Glob(filepath.Join(root, "docs", folder, "*.md"))
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			page := folder + "/" + filepath.Base(file)
			text := read(t, "docs/"+page)
			found += len(pages.Parse(text))
			for _, problem := range blockProblems(page, text, packages) {
				t.Error(problem)
			}
		}
	}
	if found < 80 {
		t.Errorf("only %d blocks were found", found)
	}
}

// testFiles returns the source of what the test files of each folder declare, by its name.
// Methods of one name are joined.
func testFiles(t *testing.T) map[string]map[string]string {
	t.Helper()
	packages := map[string]map[string]string{}
	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		folder := filepath.Dir(path)
		if packages[folder] == nil {
			packages[folder] = map[string]string{}
		}
		return declare(packages[folder], string(text))
	})
	if err != nil {
		t.Fatal(err)
	}
	return packages
}

// declare adds the declarations of a file.
func declare(declared map[string]string, text string) error {
	files := token.NewFileSet()
	file, err := parser.ParseFile(files, "", text, 0)
	if err != nil {
		return err
	}
	add := func(name *ast.Ident, node ast.Node) {
		declared[name.Name] += text[files.Position(node.Pos()).Offset:files.Position(node.End()).Offset] + "\n"
	}
	for _, declaration := range file.Decls {
		if function, ok := declaration.(*ast.FuncDecl); ok {
			add(function.Name, function)
			continue
		}
		for _, spec := range declaration.(*ast.GenDecl).Specs {
			if values, ok := spec.(*ast.ValueSpec); ok {
				for _, name := range values.Names {
					add(name, values)
				}
			}
		}
	}
	return nil
}

// blockProblems returns what is wrong with the marks of a page's blocks.
func blockProblems(page, text string, packages map[string]map[string]string) (problems []string) {
	for _, block := range pages.Parse(text) {
		switch {
		case block.Test == "" && block.Reason == "":
			problems = append(problems, fmt.Sprintf(
				"docs/%s:%d: the line before the block should be <!-- run: TestName --> or <!-- not run: REASON -->",
				page, block.Line))
		case block.Test != "" && !reads(packages, block.Test, page):
			problems = append(problems, fmt.Sprintf("docs/%s:%d: there is no %s that reads this page with pages.Of",
				page, block.Line, block.Test))
		}
		for _, test := range inReason.FindAllString(block.Reason, -1) {
			if !exists(packages, test) {
				problems = append(problems, fmt.Sprintf("docs/%s:%d: there is no %s", page, block.Line, test))
			}
		}
	}
	return problems
}

var inReason = regexp.MustCompile(`\bTest[A-Z]\w*`)

func exists(packages map[string]map[string]string, test string) bool {
	for _, declared := range packages {
		if strings.HasPrefix(declared[test], "func ") {
			return true
		}
	}
	return false
}

// reads reports whether a test, with what it uses of its package's test files, reads the blocks of a page.
func reads(packages map[string]map[string]string, test, page string) bool {
	for _, declared := range packages {
		code := used(declared, test, map[string]bool{})
		if strings.Contains(code, "pages.Of(") && strings.Contains(code, strings.TrimSuffix(page, ".md")) {
			return true
		}
	}
	return false
}

var word = regexp.MustCompile(`\w+`)

// used returns the source of a declaration and of all that it mentions. Names of other scopes count, too.
func used(declared map[string]string, name string, seen map[string]bool) string {
	if seen[name] {
		return ""
	}
	seen[name] = true
	code := declared[name]
	for _, mentioned := range word.FindAllString(declared[name], -1) {
		code += used(declared, mentioned, seen)
	}
	return code
}

func TestBlocksThatAreRefused(t *testing.T) {
	packages := map[string]map[string]string{"a": {}, "b": {}, "c": {}}
	for folder, code := range map[string]string{
		"a": `func TestOne(t *testing.T) { run(t, "how-to/page.md") }
			func run(t *testing.T, page string) { pages.Of(t, page) }
			func TestOfTheSamePackage(t *testing.T) { run(t, "how-to/other.md") }`,
		"b": `func TestTwo(t *testing.T) { pages.Of(t, "how-to/other.md") }`,
		"c": `func TestThree(t *testing.T) { run("how-to/page.md") }`,
	} {
		if err := declare(packages[folder], "package "+folder+"\n"+code); err != nil {
			t.Fatal(err)
		}
	}
	page := strings.Join([]string{
		"<!-- run: TestOne -->", "```sh", "run", "```",
		"1. A list:", "", "   <!-- not run: TestOne runs it with other names -->", "   ```sh", "   not run", "   ```",
		"<!-- run: TestOne -->", "", "```sh", "an empty line after the mark", "```",
		"<!-- not run: -->", "```sh", "no reason", "```",
		"<!-- run: TestTwo -->", "```sh", "a test that reads another page", "```",
		"<!-- run: TestThree -->", "```sh", "a test that repeats the block", "```",
		"<!-- run: TestFour -->", "```sh", "no such test", "```",
		"<!-- not run: TestFive runs it -->", "```sh", "no such test", "```",
		"<!-- run: TestOfTheSamePackage -->", "```sh", "a test beside one that reads the page", "```", "",
	}, "\n")
	const unmarked = "the line before the block should be <!-- run: TestName --> or <!-- not run: REASON -->"
	want := []string{
		"docs/how-to/page.md:13: " + unmarked,
		"docs/how-to/page.md:17: " + unmarked,
		"docs/how-to/page.md:21: there is no TestTwo that reads this page with pages.Of",
		"docs/how-to/page.md:25: there is no TestThree that reads this page with pages.Of",
		"docs/how-to/page.md:29: there is no TestFour that reads this page with pages.Of",
		"docs/how-to/page.md:33: there is no TestFive",
		"docs/how-to/page.md:37: there is no TestOfTheSamePackage that reads this page with pages.Of",
	}
	if diff := cmp.Diff(want, blockProblems("how-to/page.md", page, packages)); diff != "" {
		t.Errorf("want (-), got (+):\n%s", diff)
	}
	if got := pages.Parse(page)[1].Text; got != "not run\n" {
		t.Errorf("the text of an indented block is %q", got)
	}
}

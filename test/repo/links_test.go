// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package repo

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode"

	"github.com/google/go-cmp/cmp"
)

// TestLinks checks every relative link of every page, including its heading.
func TestLinks(t *testing.T) {
	pages, links, broken, err := checkLinks(root)
	if err != nil {
		t.Fatal(err)
	}
	if pages < 10 || links < 50 {
		t.Errorf("only %d links were found on %d pages", links, pages)
	}
	for _, problem := range broken {
		t.Error(problem)
	}
}

func TestLinksThatDoNotResolve(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{
		"README.md": "# One\n\n## What `it` does\n\n## One\n\n```sh\n# comment\n[code](missing.md)\n```\n\n" +
			"[page](docs/page.md), [heading](docs/page.md#a-heading), ![picture](docs/missing.png), [folder](docs)\n" +
			"[here](#what-it-does), [twice](#one-1), [nowhere](#comment), [gone](docs/gone.md \"title\")\n" +
			"[site](https://example.com/missing.md), `[text](missing.md)`, [escapes](../README.md)\n\n[named]: docs/named.md\n",
		"docs/page.md": "A heading\n=========\n\n### A [heading](../README.md)\n\n[old](../README.md#three)\n",
	} {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	pages, links, broken, err := checkLinks(dir)
	if err != nil {
		t.Fatal(err)
	}
	want := []string{
		"README.md links to docs/missing.png: there is no such file",
		"README.md links to #comment: there is no such heading",
		"README.md links to docs/gone.md: there is no such file",
		"README.md links to ../README.md: it is outside the repository",
		"README.md links to docs/named.md: there is no such file",
		"docs/page.md links to ../README.md#three: there is no such heading",
	}
	if diff := cmp.Diff(want, broken); diff != "" || pages != 2 || links != 12 {
		t.Errorf("%d links on %d pages, want (-), got (+):\n%s", links, pages, diff)
	}
}

var (
	fence      = regexp.MustCompile("(?ms)^ *```.*?^ *```[^\n]*$")
	inlineCode = regexp.MustCompile("`[^`\n]*`")
	link       = regexp.MustCompile(`\]\(([^)\s]+)(?: +"[^"]*")?\)|(?m:^ *\[[^\]]+\]: *(\S+))`)
	heading    = regexp.MustCompile(`(?m)^#{1,6} +(.+?) *#*$`)
	linkText   = regexp.MustCompile(`\[([^\]]*)\]\([^)]*\)`)
)

// checkLinks counts the pages below a folder and their relative links, and returns the broken links.
func checkLinks(root string) (pages, links int, broken []string, err error) {
	err = filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case entry.IsDir() && (entry.Name() == ".git" || entry.Name() == "bin"):
			return fs.SkipDir
		case entry.IsDir() || filepath.Ext(path) != ".md":
			return nil
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		page, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		pages++
		prose := inlineCode.ReplaceAllString(fence.ReplaceAllString(string(text), ""), "")
		for _, found := range link.FindAllStringSubmatch(prose, -1) {
			target := found[1] + found[2]
			if strings.Contains(target, "://") || strings.HasPrefix(target, "mailto:") {
				continue
			}
			links++
			if problem := resolve(root, page, target); problem != "" {
				broken = append(broken, fmt.Sprintf("%s links to %s: %s", page, target, problem))
			}
		}
		return nil
	})
	return pages, links, broken, err
}

// resolve returns why a link on a page is broken, or an empty text.
func resolve(root, page, target string) string {
	name, anchor, _ := strings.Cut(target, "#")
	file := page
	if name != "" {
		file = filepath.Join(filepath.Dir(page), name)
	}
	if !filepath.IsLocal(file) {
		return "it is outside the repository"
	}
	if _, err := os.Stat(filepath.Join(root, file)); err != nil {
		return "there is no such file"
	}
	if anchor == "" {
		return ""
	}
	text, err := os.ReadFile(filepath.Join(root, file))
	if err != nil || !anchors(string(text))[anchor] {
		return "there is no such heading"
	}
	return ""
}

// anchors returns the anchors that GitHub gives to a page's headings.
func anchors(text string) map[string]bool {
	all := map[string]bool{}
	for _, found := range heading.FindAllStringSubmatch(fence.ReplaceAllString(text, ""), -1) {
		base := strings.Map(func(r rune) rune {
			switch {
			case r == ' ':
				return '-'
			case r == '-' || r == '_' || unicode.IsLetter(r) || unicode.IsDigit(r):
				return unicode.ToLower(r)
			}
			return -1
		}, linkText.ReplaceAllString(found[1], "$1"))
		anchor := base
		for i := 1; all[anchor]; i++ {
			anchor = fmt.Sprintf("%s-%d", base, i)
		}
		all[anchor] = true
	}
	return all
}

var namedPage = regexp.MustCompile(`docs/[\w/-]+\.md(?:#[\w-]+)?`)

// TestNamedPages checks every page, with its heading, that messages, comments, manifests and job files name.
func TestNamedPages(t *testing.T) {
	named := 0
	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case entry.IsDir() && (entry.Name() == ".git" || entry.Name() == "bin" || path == filepath.Join(root, "test/repo")):
			return fs.SkipDir
		case entry.IsDir() || !slices.Contains([]string{".go", ".hcl", ".sh", ".yaml", ".yml"}, filepath.Ext(path)):
			return nil
		}
		text, err := os.ReadFile(path)
		for _, page := range namedPage.FindAllString(string(text), -1) {
			named++
			if problem := resolve(root, "README.md", page); problem != "" {
				t.Errorf("%s names %s: %s", path, page, problem)
			}
		}
		return err
	})
	if err != nil || named < 100 {
		t.Errorf("%v, only %d names of pages were found", err, named)
	}
}

// The most words of a page, and of one in reference. A longer one is two pages.
const mostWords, mostReferenceWords = 1500, 1800

// longPages are exempt: made from code, or cited by section.
var longPages = []string{
	"docs/reference/errors.md",
	"docs/reference/rack.md",
}

// TestPages checks that docs/README.md links to every page of docs, and that no page is long. Decisions are in a list
// of their own.
func TestPages(t *testing.T) {
	index := read(t, "docs/README.md")
	err := filepath.WalkDir(filepath.Join(root, "docs"), func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || filepath.Ext(path) != ".md" {
			return err
		}
		page, err := filepath.Rel(filepath.Join(root, "docs"), path)
		if err != nil {
			return err
		}
		if page != "README.md" && !strings.HasPrefix(page, "development/decisions/") &&
			!strings.Contains(index, "("+page+")") {
			t.Errorf("docs/README.md has no link to %s", page)
		}
		page = "docs/" + page
		most := mostWords
		if strings.HasPrefix(page, "docs/reference/") {
			most = mostReferenceWords
		}
		if words := countWords(read(t, page)); words > most && !slices.Contains(longPages, page) {
			t.Errorf("%s has %d words, more than %d: make two pages of it", page, words, most)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// countWords counts the words of a page outside of its code blocks.
func countWords(text string) int {
	words := 0
	for _, word := range strings.Fields(fence.ReplaceAllString(text, "")) {
		if strings.ContainsFunc(word, unicode.IsLetter) {
			words++
		}
	}
	return words
}

func TestCountWords(t *testing.T) {
	if got := countWords("| two | words |\n|---|---|\n\n```sh\nnot counted\n```\n\nand 3 - more\n"); got != 4 {
		t.Errorf("%d words, want 4", got)
	}
}

// TestQuestions checks that the README leads to the answers of a newcomer's questions in at most two clicks.
func TestQuestions(t *testing.T) {
	for question, test := range map[string]struct {
		clicks []string // the pages after the README
		answer string   // on the last page
	}{
		"can I use it on my rack?":              {nil, "## Does it work on my rack today?"},
		"how do I install it on Nomad?":         {[]string{"docs/how-to/nomad.md"}, "## Install"},
		"my pod hangs with FailedAttachVolume":  {[]string{"docs/how-to/troubleshooting.md"}, "| `FailedAttachVolume` with `[RackHasNoHotplug]`"},
		"the restart that it waits for":         {[]string{"docs/how-to/troubleshooting.md", "docs/how-to/planned-restarts.md"}, "| `restart` |"},
		"how do I grow a volume?":               {[]string{"docs/how-to/grow-volumes.md"}, "kubectl patch pvc"},
		"what rights does it need?":             {[]string{"docs/reference/rights.md"}, "limited-collaborator"},
		"what rights does it need, one by one?": {[]string{"docs/reference/rights.md", "docs/reference/kubernetes-rights.md"}, "| verbs |"},
	} {
		if len(test.clicks) > 2 {
			t.Errorf("%s takes %d clicks", question, len(test.clicks))
		}
		page := "README.md"
		for _, next := range test.clicks {
			if !linksTo(t, page, next) {
				t.Errorf("%s: %s has no link to %s", question, page, next)
			}
			page = next
		}
		if !strings.Contains(read(t, page), test.answer) {
			t.Errorf("%s: %s does not have %q", question, page, test.answer)
		}
	}
}

// linksTo reports whether a page links to another page, or to a heading of it.
func linksTo(t *testing.T, from, to string) bool {
	t.Helper()
	for _, found := range link.FindAllStringSubmatch(read(t, from), -1) {
		name, _, _ := strings.Cut(found[1]+found[2], "#")
		if filepath.Join(filepath.Dir(from), name) == to {
			return true
		}
	}
	return false
}

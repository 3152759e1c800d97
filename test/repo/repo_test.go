// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package repo checks what the repository says about itself: the links of its pages, and the commands that
// CONTRIBUTING.md lists.
package repo

import (
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const root = "../.."

func read(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, name))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// TestStepsOfCI compares the sentence in CONTRIBUTING.md with .ci/run, in order.
func TestStepsOfCI(t *testing.T) {
	var steps []string
	for line := range strings.Lines(read(t, ".ci/run")) {
		words := strings.Fields(line)
		background := len(words) > 2 && (words[0] == "beside" || words[0] == "idle") && words[1] != `"$name"`
		switch {
		case len(words) < 3 || words[0] != "step" && !background:
		case words[0] == "step" && words[1] == "make":
			steps = append(steps, words[2:]...)
		case background && words[2] == "make":
			steps = append(steps, words[3:]...)
		case !slices.Contains(words, "test/programs/build.sh"): // it only builds programs for later steps
			t.Errorf("the step %q of .ci/run is not a target of the Makefile", strings.TrimSpace(line))
		}
	}
	_, sentence, found := strings.Cut(read(t, "CONTRIBUTING.md"), "Continuous integration runs `.ci/run`")
	sentence, _, ended := strings.Cut(sentence, ".\n")
	if !found || !ended {
		t.Fatal("CONTRIBUTING.md has no sentence about what .ci/run does")
	}
	if diff := cmp.Diff(steps, quoted(sentence)); diff != "" {
		t.Errorf(".ci/run (-) and CONTRIBUTING.md (+):\n%s", diff)
	}
	for _, step := range steps {
		if !slices.Contains(targets(t), step) {
			t.Errorf(".ci/run calls %q, which the Makefile does not describe", step)
		}
	}
}

// TestCommands checks that the Makefile describes the commands in CONTRIBUTING.md.
func TestCommands(t *testing.T) {
	var commands []string
	for line := range strings.Lines(read(t, "CONTRIBUTING.md")) {
		cells := strings.Split(line, "|")
		if len(cells) < 3 || !strings.Contains(cells[1], "`make ") {
			continue
		}
		for _, command := range quoted(cells[1]) {
			commands = append(commands, strings.TrimPrefix(command, "make "))
		}
	}
	if len(commands) == 0 {
		t.Error("CONTRIBUTING.md has no table of commands")
	}
	for _, command := range commands {
		if !slices.Contains(targets(t), command) {
			t.Errorf("CONTRIBUTING.md has make %s, which the Makefile does not describe", command)
		}
	}
}

// targets returns the targets that "make help" lists, without help itself.
func targets(t *testing.T) []string {
	t.Helper()
	var names []string
	for _, found := range regexp.MustCompile(`(?m)^([a-z0-9-]+):.*## `).FindAllStringSubmatch(read(t, "Makefile"), -1) {
		if found[1] != "help" {
			names = append(names, found[1])
		}
	}
	return names
}

// quoted returns the texts in backquotes.
func quoted(text string) []string {
	var all []string
	for _, found := range regexp.MustCompile("`([^`]+)`").FindAllStringSubmatch(text, -1) {
		all = append(all, found[1])
	}
	return all
}

var testName = regexp.MustCompile("`(Test[A-Z][A-Za-z0-9]*)[`/]")

// TestNamedTestsExist checks that every test that a page names exists. A promise whose test was renamed or removed is
// shown by nothing.
func TestNamedTestsExist(t *testing.T) {
	var code strings.Builder
	pages := map[string]string{}
	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		test, page := strings.HasSuffix(path, "_test.go"), strings.HasSuffix(path, ".md")
		if entry.IsDir() || !test && !page {
			return nil
		}
		text, err := os.ReadFile(path)
		if test {
			code.Write(text)
		} else {
			pages[path] = string(text)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	named := 0
	for path, text := range pages {
		for _, match := range testName.FindAllStringSubmatch(text, -1) {
			named++
			if !strings.Contains(code.String(), "func "+match[1]+"(") {
				t.Errorf("%s names %s, and there is no such test", path, match[1])
			}
		}
	}
	if named < 100 {
		t.Errorf("only %d names of tests were found", named)
	}
}

// TestMapsNameEachPackage checks that the map of core/doc.go and the tree of CONTRIBUTING.md have each folder of core.
func TestMapsNameEachPackage(t *testing.T) {
	_, packages, _ := strings.Cut(read(t, "core/doc.go"), "# Map")
	_, tree, _ := strings.Cut(read(t, "CONTRIBUTING.md"), "## Where things are")
	tree, _, _ = strings.Cut(tree, "###")
	entries, err := os.ReadDir(filepath.Join(root, "core"))
	if err != nil {
		t.Fatal(err)
	}
	for _, entry := range entries {
		if !entry.IsDir() {
			continue
		}
		name := regexp.MustCompile(`\bcore/` + entry.Name() + `\b`)
		if !name.MatchString(packages) {
			t.Errorf("the map of core/doc.go has no core/%s", entry.Name())
		}
		if !name.MatchString(tree) {
			t.Errorf("the tree of CONTRIBUTING.md has no core/%s", entry.Name())
		}
	}
}

var (
	comment  = regexp.MustCompile(`(?m)(?:^//.*\n)+`)
	fileMap  = regexp.MustCompile(`(?m)^//   - \w+\.go\b`)
	fileName = regexp.MustCompile(`[\w/.-]*\w\.go\b`)
)

// TestMapsNameEachFile checks the comments that list the files of their package: each file that they name exists, and
// together they have all files but tests and the file with the list.
func TestMapsNameEachFile(t *testing.T) {
	maps := 0
	for folder, files := range packages(t) {
		var named, own []string
		for _, file := range files {
			for _, text := range comment.FindAllString(read(t, filepath.Join(folder, file)), -1) {
				if fileMap.MatchString(text) {
					own = append(own, file)
					named = append(named, fileName.FindAllString(text, -1)...)
				}
			}
		}
		if own == nil {
			continue
		}
		maps++
		for _, file := range files {
			test := strings.HasSuffix(file, "_test.go")
			if !test && !slices.Contains(named, file) && !slices.Contains(own, file) {
				t.Errorf("the map in %s/%s has no %s", folder, own[0], file)
			}
		}
		for _, file := range named {
			if !slices.Contains(files, file) {
				t.Errorf("the map in %s/%s names %s, which does not exist", folder, own[0], file)
			}
		}
	}
	if maps < 12 {
		t.Errorf("only %d packages with a map were found", maps)
	}
}

// TestPlannedRestartsCanGo counts the files that know planned restarts. When all racks attach disks to running
// instances, the two packages are deleted, and these files are what is left to change.
func TestPlannedRestartsCanGo(t *testing.T) {
	restarts := regexp.MustCompile(`"github.com/oxidecomputer/oxide-csi-plugin/core/(restart|shutdown)"`)
	var knowing []string
	for folder, files := range packages(t) {
		top, _, _ := strings.Cut(folder, "/")
		if folder == "core/restart" || folder == "core/shutdown" || top == "orchestrator" || top == "test" {
			continue
		}
		for _, file := range files {
			name := path.Join(folder, file)
			if !strings.HasSuffix(file, "_test.go") && restarts.MatchString(read(t, name)) {
				knowing = append(knowing, name)
			}
		}
	}
	if len(knowing) == 0 || len(knowing) > 4 {
		t.Errorf("%d files import core/restart or core/shutdown, and at most four may: %v", len(knowing), knowing)
	}
}

// packages returns the Go files of each folder.
func packages(t *testing.T) map[string][]string {
	t.Helper()
	all := map[string][]string{}
	err := fs.WalkDir(os.DirFS(root), ".", func(name string, entry fs.DirEntry, err error) error {
		if err == nil && !entry.IsDir() && path.Ext(name) == ".go" {
			all[path.Dir(name)] = append(all[path.Dir(name)], path.Base(name))
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// TestDecisionRecords checks that each decision record is as short as docs/development/decisions/README.md asks, and
// has its parts in order.
func TestDecisionRecords(t *testing.T) {
	const folder = "docs/development/decisions"
	form := regexp.MustCompile(`(?s)^# (\d{3}): [^\n]+\n\n\*\*Context\.\*\*.*\n\*\*Decision\.\*\*.*` +
		`\n\*\*Ruled out\.\*\*.*\n\*\*Held by\*\* `)
	records, err := filepath.Glob(filepath.Join(root, folder, "[0-9]*.md"))
	if err != nil || len(records) == 0 {
		t.Fatal(records, err)
	}
	for _, path := range records {
		name := filepath.Base(path)
		text := read(t, filepath.Join(folder, name))
		if words := len(strings.Fields(text)); words > 250 {
			t.Errorf("%s has %d words, want at most 250", name, words)
		}
		if found := form.FindStringSubmatch(text); found == nil || !strings.HasPrefix(name, found[1]) {
			t.Errorf("%s is not of the form of the other records", name)
		}
	}
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package pages reads what pages of docs show in fenced blocks, so that a test runs what a reader would run.
//
// A comment on the line before a block says who runs it, or why nothing does:
//
//	<!-- run: TestName -->
//	<!-- not run: REASON -->
package pages

import (
	"os"
	"regexp"
	"strings"
	"testing"
)

// Block is a fenced block of a page.
type Block struct {
	// Line is the number of the line with the opening fence, from 1.
	Line int
	// Text is the block's content without the indentation of its fence.
	Text string
	// Test is the name of the test that runs the block, Reason why no test does. Both are empty if the block is not
	// marked.
	Test, Reason string
}

var (
	fence    = regexp.MustCompile("^( *)```")
	runBy    = regexp.MustCompile(`^ *<!-- run: (Test[A-Z]\w*) -->$`)
	isNotRun = regexp.MustCompile(`^ *<!-- not run: (\S.*\S) -->$`)
)

// Parse returns the blocks of a page in their order.
func Parse(page string) (blocks []Block) {
	lines := strings.Split(page, "\n")
	for i := 0; i < len(lines); i++ {
		open := fence.FindStringSubmatch(lines[i])
		if open == nil {
			continue
		}
		block := Block{Line: i + 1}
		if i > 0 {
			if mark := runBy.FindStringSubmatch(lines[i-1]); mark != nil {
				block.Test = mark[1]
			}
			if mark := isNotRun.FindStringSubmatch(lines[i-1]); mark != nil {
				block.Reason = mark[1]
			}
		}
		for i++; i < len(lines) && !fence.MatchString(lines[i]); i++ {
			block.Text += strings.TrimPrefix(lines[i], open[1]) + "\n"
		}
		blocks = append(blocks, block)
	}
	return blocks
}

// Of returns the texts of the blocks of a page that the calling test runs, in their order. The test fails if there is
// none.
func Of(t *testing.T, path string) (texts []string) {
	t.Helper()
	page, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	name, _, _ := strings.Cut(t.Name(), "/")
	for _, block := range Parse(string(page)) {
		if block.Test == name {
			texts = append(texts, block.Text)
		}
	}
	if len(texts) == 0 {
		t.Fatalf("%s has no block with <!-- run: %s -->", path, name)
	}
	return texts
}

// Fill replaces what a page asks its reader to replace: pairs of the page's text and the reader's. The test fails if
// the text is not there.
func Fill(t *testing.T, text string, pairs ...string) string {
	t.Helper()
	for i := 0; i < len(pairs); i += 2 {
		if !strings.Contains(text, pairs[i]) {
			t.Fatalf("the page has no %q to replace:\n%s", pairs[i], text)
		}
		text = strings.ReplaceAll(text, pairs[i], pairs[i+1])
	}
	return text
}

// Shows checks that a page shows texts that the code keeps, such as golden values.
func Shows(t *testing.T, path string, texts ...string) {
	t.Helper()
	page, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, text := range texts {
		if !strings.Contains(string(page), text) {
			t.Errorf("%s does not show\n%s", path, text)
		}
	}
}

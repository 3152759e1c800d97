// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package repo

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// Strings that users read have the field's words, as test/prose/Plain/Field.yml has them for pages. In an error the
// cause comes before the next step.
var (
	notTheFieldsWords = regexp.MustCompile(`(?i)\bfolders?\b|\bby hand\b|\banswer(s|ed|ing)?\b|\bin clear\b|\banew\b`)
	nextStepFirst     = regexp.MustCompile(
		`[:;,] (check|correct|delete|find|free|read|remove|repair|repeat|restore|retry|set|start|unstage|use)\b[^:]*: %w$`)
)

// otherWords are strings that are right, and why.
var otherWords = map[string]string{
	"%s: store %q does not respond: check its gateway: %w":            "a store's own words come last",
	"nothing was adopted: answer y, or repeat the command with --yes": "a person answers",
	"oxide-csi-answer-soon": "the key of a gRPC header, which older controllers know",
}

func TestWordsOfMessages(t *testing.T) {
	for _, folder := range []string{"admin", "cmd", "core", "deploy", "metadata", "orchestrator"} {
		err := filepath.WalkDir("../../"+folder, func(path string, entry fs.DirEntry, err error) error {
			switch {
			case err != nil:
				return err
			case entry.IsDir() && strings.HasSuffix(path, "test"): // a suite or a fake of tests
				return filepath.SkipDir
			case filepath.Ext(path) != ".go" || strings.HasSuffix(path, "_test.go"):
				return nil
			}
			file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
			if err != nil {
				return err
			}
			for _, text := range texts(file) {
				if problem := problemOf(text); problem != "" && otherWords[text] == "" {
					t.Errorf("%s: %s: %q", path, problem, text)
				}
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}

// problemOf says what is wrong with a string for users, or nothing.
func problemOf(text string) string {
	switch found := notTheFieldsWords.FindString(text); {
	case found != "":
		return found + " is not the field's word: directory, manually, response, plaintext, again"
	case nextStepFirst.MatchString(text):
		return "the next step comes before the cause"
	}
	return ""
}

// texts are the string literals of a file.
func texts(file *ast.File) (all []string) {
	ast.Inspect(file, func(node ast.Node) bool {
		if literal, is := node.(*ast.BasicLit); is && literal.Kind == token.STRING {
			text, err := strconv.Unquote(literal.Value)
			if err == nil {
				all = append(all, text)
			}
		}
		return true
	})
	return all
}

func TestWordsThatAreRefused(t *testing.T) {
	for text, bad := range map[string]bool{
		"create the folder for it": true, "the rack answered": true, "unmount it by hand": true,
		"%s has no room: free quota: %w": true, "the disk is gone, check the rack: %w": true,
		"%s has no room: %w: free quota": false, "the directory is missing": false, "core/rack/answers": true,
		"unanswered": false, "check the project: %s": false,
	} {
		if problem := problemOf(text); (problem != "") != bad {
			t.Errorf("%q: %q", text, problem)
		}
	}
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package repo

import (
	"go/build/constraint"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.yaml.in/yaml/v3"
)

// TestLintHasAllTags compares the build tags in .golangci.yaml with those of all Go files. A file whose tag is missing
// there is not linted.
func TestLintHasAllTags(t *testing.T) {
	var lint struct {
		Run struct {
			BuildTags []string `yaml:"build-tags"`
		}
	}
	if err := yaml.Unmarshal([]byte(read(t, ".golangci.yaml")), &lint); err != nil {
		t.Fatal(err)
	}
	// This tag takes the plugin away, so that less would be linted. make lint has another run with it.
	tags := slices.DeleteFunc(buildTags(t), func(tag string) bool { return tag == "noplugin" })
	slices.Sort(lint.Run.BuildTags)
	if diff := cmp.Diff(tags, lint.Run.BuildTags); diff != "" {
		t.Errorf("build tags of the Go files (-) and .golangci.yaml (+):\n%s", diff)
	}
}

// buildTags returns the tags in all lines //go:build, without the platforms, which Go sets by itself.
func buildTags(t *testing.T) []string {
	t.Helper()
	var tags []string
	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || filepath.Ext(path) != ".go" {
			return err
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		head, _, _ := strings.Cut(string(text), "\npackage ")
		for line := range strings.Lines(head) {
			if !constraint.IsGoBuild(line) {
				continue
			}
			expression, err := constraint.Parse(strings.TrimSpace(line))
			if err != nil {
				return err
			}
			expression.Eval(func(tag string) bool {
				tags = append(tags, tag)
				return true
			})
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	tags = slices.DeleteFunc(tags, func(tag string) bool { return tag == "linux" || tag == "amd64" })
	slices.Sort(tags)
	return slices.Compact(tags)
}

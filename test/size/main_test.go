// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main

import (
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// A file with a long function, a branched one and names without a comment, next to others that are not listed.
func TestMeasure(t *testing.T) {
	source := "package p\n\nfunc long() {\n" + strings.Repeat("\tprintln()\n", maxFunctionLines) + "}\n\n" +
		"func branched(a, b bool) {\n" + strings.Repeat("\tif a && b {\n\t}\n", maxFunctionBranches/2+1) + "}\n\n" +
		"func Bare() {}\n\n// Commented is.\nfunc Commented() {}\n\ntype T int\n\nconst C = 1 // said here\n"
	path := filepath.Join(t.TempDir(), "p.go")
	if err := os.WriteFile(path, []byte(source), 0o600); err != nil {
		t.Fatal(err)
	}
	got, err := measure(map[string][]string{"core/p": {path}})
	if err != nil {
		t.Fatal(err)
	}
	want := code{
		packages: map[string]int{"core/p": strings.Count(source, "\n")},
		long:     map[string]int{"core/p.long": maxFunctionLines + 2},
		branched: map[string]int{"core/p.branched": 2 * (maxFunctionBranches/2 + 1)},
		files:    map[string]int{},
		bare:     map[string]int{"core/p.Bare": 1, "core/p.T": 1},
	}
	for name, pair := range map[string][2]map[string]int{
		"packages": {got.packages, want.packages}, "long": {got.long, want.long}, "branched": {got.branched, want.branched},
		"files": {got.files, want.files}, "bare": {got.bare, want.bare},
	} {
		if diff := cmp.Diff(pair[1], pair[0]); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

// The plugin's own packages are found, and nothing else is.
func TestLinked(t *testing.T) {
	t.Chdir("../..")
	packages, err := linked("./cmd/oxide-csi")
	if err != nil {
		t.Fatal(err)
	}
	for name := range maps.Keys(packages) {
		if strings.HasPrefix(name, "test/") {
			t.Errorf("%s is linked into the plugin", name)
		}
	}
	if len(packages["core/controller"]) == 0 || len(packages["cmd/oxide-csi"]) == 0 {
		t.Errorf("found %d packages", len(packages))
	}
}

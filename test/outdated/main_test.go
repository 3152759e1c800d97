// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main

import (
	"io"
	"os"
	"slices"
	"strings"
	"testing"
)

func TestBehind(t *testing.T) {
	for _, test := range []struct {
		version, newest string
		want            bool
	}{
		{"v1.2.3", "v1.2.9", false},
		{"v1.2.3", "v1.3.0", false},
		{"v1.2.3", "v1.4.0", true},
		{"v1.9.0", "v1.10.0", false},
		{"v1.9.0", "v1.11.0", true},
		{"v0.60.0", "v0.62.0", true},
		{"v28.1.0+incompatible", "v29.0.0+incompatible", true},
		{"v1.5.0", "v1.4.0", false},
		{"v0.0.0-20260907080526-08ef8f3d26da", "v0.0.0-20261016150620-df630b26e78a", false},
	} {
		if got := behind(test.version, test.newest); got != test.want {
			t.Errorf("%s, newest %s: %t, want %t", test.version, test.newest, got, test.want)
		}
	}
}

// What is behind needs a reason, and a reason needs something that is behind.
func TestReport(t *testing.T) {
	pins := []pin{{"go.mod", "example.com/a", "v1.0.0", "v1.2.0"}, {"go.mod", "example.com/b", "v1.0.0", "v1.1.0"}}
	for reasons, want := range map[string]string{
		"":                               "example.com/a v1.0.0, the newest is v1.2.0",
		"example.com/a breaks":           "",
		"example.com/a":                  "has no reason",
		"example.com/a x\nexample.com/b": "has no reason",
		"example.com/a breaks\nexample.com/b breaks": "example.com/b, which is not behind",
	} {
		parsed, err := parseReasons(reasons)
		if err == nil {
			err = report(io.Discard, pins, parsed)
		}
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%q: %v, want %q", reasons, err, want)
		}
	}
	unknown := []pin{{"go.mod", "example.com/a", "v1.0.0", ""}, {"go.mod", "example.com/b", "v1.0.0", "v1.1.0"}}
	if err := report(io.Discard, unknown, nil); err != nil {
		t.Error(err)
	}
	if report(io.Discard, unknown[:1], nil) == nil {
		t.Error("a proxy that tells nothing is no failure")
	}
}

// The versions outside of every go.mod are found, and the programs of test/programs.
func TestPinsAreFound(t *testing.T) {
	t.Chdir("../..")
	named, err := namedVersions()
	if err != nil {
		t.Fatal(err)
	}
	tools, err := required("test/programs/helm/go.mod")
	if err != nil {
		t.Fatal(err)
	}
	all, err := required("go.mod")
	if err != nil {
		t.Fatal(err)
	}
	if len(named) != 4 || len(tools) != 2 || len(all) < 80 {
		t.Errorf("found %v, %v and %d modules of go.mod", named, tools, len(all))
	}
	if !slices.ContainsFunc(named, func(p pin) bool { return p.path == "golang.org/x/vuln" }) {
		t.Errorf("govulncheck of the workflow is not in %v", named)
	}
	text, err := os.ReadFile("test/outdated/reasons.txt")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := parseReasons(string(text)); err != nil {
		t.Error(err)
	}
}

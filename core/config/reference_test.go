// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package config

import (
	"bytes"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/pflag"
)

var update = flag.Bool("update", false, "rewrite the table of docs/reference/configuration.md")

const (
	reference  = "../../docs/reference/configuration.md"
	tableBegin = "<!-- Made from the struct in core/config by: go test ./core/config -update -->\n"
	tableEnd   = "<!-- End of the generated table. -->\n"
)

// table returns the reference of all settings that are not hidden. It has one table for each group, in the order of the
// struct.
func table() string {
	var b strings.Builder
	code := func(text string) string {
		if text == "" {
			return ""
		}
		return "`" + text + "`"
	}
	all := settings()
	for i, s := range all {
		if i == 0 || s.group != all[i-1].group {
			fmt.Fprintf(&b, "\n### %s\n\n", s.group)
			b.WriteString("| name | default | meaning |\n|---|---|---|\n")
		}
		if !s.hidden {
			var names []string
			if s.flag != "" {
				names = append(names, code("--"+s.flag))
			}
			if s.env != "" {
				names = append(names, code(s.env))
			}
			if s.inFile {
				names = append(names, code(s.key))
			}
			def := code(s.def)
			switch {
			case s.required == "always":
				def = "required"
			case s.required == "controller":
				def = "required in `controller`, `all`"
			case s.derived != "":
				def = s.derived
			}
			meaning := strings.ToUpper(s.help[:1]) + s.help[1:]
			meaning = strings.ReplaceAll(meaning, "|", `\|`)
			fmt.Fprintf(&b, "| %s | %s | %s |\n", strings.Join(names, ", "), def, meaning)
		}
		if last := i == len(all)-1 || s.group != all[i+1].group; last && groupNote(s.group) != "" {
			fmt.Fprintf(&b, "\n%s.\n", groupNote(s.group))
		}
	}
	return b.String() + "\n"
}

func TestReferenceIsMadeFromTheStruct(t *testing.T) {
	text, err := os.ReadFile(reference)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, begun := strings.Cut(string(text), tableBegin)
	old, after, ended := strings.Cut(rest, tableEnd)
	if !begun || !ended {
		t.Fatalf("%s lacks the two comments around its table", reference)
	}
	if *update && old != table() {
		if err := os.WriteFile(reference, []byte(before+tableBegin+table()+tableEnd+after), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if diff := cmp.Diff(table(), old); diff != "" {
		t.Errorf("the table differs from the struct; run go test ./core/config -update\n-struct +page:\n%s", diff)
	}
}

// Each YAML block of the page is a valid configuration, except for the files of tokens and CAs. These do not exist on a
// machine that runs tests.
func TestExamplesOfTheReferenceLoad(t *testing.T) {
	text, err := os.ReadFile(reference)
	if err != nil {
		t.Fatal(err)
	}
	blocks := regexp.MustCompile("(?s)```yaml\n(.*?)```").FindAllSubmatch(text, -1)
	if len(blocks) == 0 {
		t.Fatal("the page has no example")
	}
	tokenFile := regexp.MustCompile(`(?i)(tokenFile: )\S+`)
	here := []byte("${1}" + write(t, token))
	caFile := regexp.MustCompile(`(?i)(caFile: )\S+`)
	_, certificate := testCA(t)
	ca := []byte("${1}" + write(t, string(certificate)))
	for _, block := range blocks {
		yaml := tokenFile.ReplaceAll(block[1], here)
		if bytes.Equal(yaml, block[1]) {
			t.Errorf("no token file in:\n%s", yaml)
		}
		yaml = caFile.ReplaceAll(yaml, ca)
		if _, _, err := load(t, nil, nil, string(yaml)); err != nil {
			t.Errorf("%v in:\n%s", err, yaml)
		}
	}
}

// Every setting has a valid help text. The texts of --help and of the page come from the struct's tags alone.
func TestEverySettingIsExplained(t *testing.T) {
	fs := pflag.NewFlagSet("oxide-csi", pflag.ContinueOnError)
	Flags(fs)
	seen := map[string]bool{}
	for _, s := range settings() {
		for _, name := range []string{"key " + s.key, "flag " + s.flag, "env " + s.env} {
			if seen[name] && !strings.HasSuffix(name, " ") {
				t.Errorf("%s is the name of two settings", name)
			}
			seen[name] = true
		}
		if s.help == "" || strings.HasSuffix(s.help, ".") || strings.Contains(s.help, "\n") {
			t.Errorf("%s: help %q is not one line without a full stop", s.key, s.help)
		}
		if s.flag == "" {
			continue
		}
		f := fs.Lookup(s.flag)
		if f == nil || f.Hidden != s.hidden || f.DefValue != s.def || !strings.Contains(f.Usage, s.env) ||
			f.Value.Type() == "" {
			t.Errorf("--%s is missing or differs: %+v", s.flag, f)
		}
	}
	if fs.Lookup("oxide-token") != nil {
		t.Error("there is a flag for the token")
	}
}

// The number of documented settings is limited, because operators read all of them. Settings that an orchestrator or a
// test sets are hidden.
func TestFewSettings(t *testing.T) {
	const most = 36
	documented, groups := 0, []string{}
	for _, s := range settings() {
		if !s.hidden {
			documented++
		}
		if len(groups) == 0 || groups[len(groups)-1] != s.group {
			groups = append(groups, s.group)
		}
		if s.hidden && s.required != "" {
			t.Errorf("%s is required and hidden", s.key)
		}
		if s.def != "" && s.derived != "" {
			t.Errorf("%s has two defaults", s.key)
		}
	}
	if documented > most {
		t.Errorf("%d settings are documented, want at most %d", documented, most)
	}
	want := []string{"Serving", "Rack", "Node identity", "Attaching", "Kubernetes", "Nomad", "Diagnostics"}
	if diff := cmp.Diff(want, groups); diff != "" {
		t.Errorf("groups: -want +got:\n%s", diff)
	}
}

// Pages show no hidden setting, because tests and orchestrators set these.
func TestPagesShowNoHiddenSetting(t *testing.T) {
	err := filepath.WalkDir("../../docs", func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || filepath.Ext(path) != ".md" {
			return err
		}
		page, err := os.ReadFile(path)
		for _, s := range settings() {
			if !s.hidden || s.flag == "" {
				continue
			}
			if regexp.MustCompile(`--` + s.flag + `\b`).Match(page) {
				t.Errorf("%s shows --%s, which is hidden", path, s.flag)
			}
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

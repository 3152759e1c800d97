// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package repo

import (
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
)

type workflow struct {
	Permissions map[string]string
	Jobs        map[string]struct {
		Permissions map[string]string
		Timeout     int `yaml:"timeout-minutes"`
		Steps       []struct {
			Uses, Run string
			With      map[string]any
		}
	}
}

// byDigest is a commit with the version that it has.
var byDigest = regexp.MustCompile(`uses: [a-z/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+\n`)

// TestWorkflows checks what actionlint does not: rights, time limits, pins, and that no step keeps the token of a
// checkout for the steps after it.
func TestWorkflows(t *testing.T) {
	paths, err := filepath.Glob(filepath.Join(root, ".github/workflows/*"))
	if err != nil {
		t.Fatal(err)
	}
	if len(paths) < 3 {
		t.Errorf("there are only %d workflows", len(paths))
	}
	for _, path := range paths {
		name := ".github/workflows/" + filepath.Base(path)
		text := read(t, name)
		for _, problem := range workflowProblems(t, text) {
			t.Errorf("%s: %s", name, problem)
		}
	}
}

func TestWorkflowsThatAreRefused(t *testing.T) {
	const fine = `permissions: {contents: read}
jobs:
  one:
    timeout-minutes: 5
    steps:
      - uses: actions/checkout@de0fac2e4500dabe0009e67214ff5f5447ce83dd # v6.0.2
        with:
          persist-credentials: false
      - run: make lint
`
	if problems := workflowProblems(t, fine); len(problems) > 0 {
		t.Errorf("a workflow without a problem: %q", problems)
	}
	for old, changed := range map[string]string{
		"permissions: {contents: read}":                              "permissions: {contents: write}",
		"permissions: {contents: read}\n":                            "",
		"    timeout-minutes: 5\n":                                   "",
		"persist-credentials: false":                                 "fetch-depth: 1",
		"@de0fac2e4500dabe0009e67214ff5f5447ce83dd # v6.0.2":         "@main",
		"de0fac2e4500dabe0009e67214ff5f5447ce83dd # v6.0.2":          "v6",
		"actions/checkout@de0fac2e4500dabe0009e67214ff5f5447ce83dd ": "other/checkout@v6 ",
		"run: make lint":                                             "run: echo ${{ github.event.pull_request.title }}",
	} {
		if problems := workflowProblems(t, strings.Replace(fine, old, changed, 1)); len(problems) == 0 {
			t.Errorf("no problem with %q instead of %q", changed, old)
		}
	}
}

func workflowProblems(t *testing.T, text string) (problems []string) {
	t.Helper()
	var w workflow
	if err := yaml.Unmarshal([]byte(text), &w); err != nil {
		t.Fatal(err)
	}
	for right, access := range w.Permissions {
		if access != "read" {
			problems = append(problems, "all jobs have the right "+right+": "+access)
		}
	}
	if !strings.HasPrefix(text, "permissions:") && !strings.Contains(text, "\npermissions:") {
		problems = append(problems, "it does not limit the rights of its jobs")
	}
	for _, line := range strings.SplitAfter(text, "\n") {
		if strings.Contains(line, "uses: ") && !byDigest.MatchString(line) {
			problems = append(problems, "not a digest with its version: "+strings.TrimSpace(line))
		}
	}
	for name, job := range w.Jobs {
		if job.Timeout == 0 {
			problems = append(problems, "job "+name+" has no time limit")
		}
		for _, step := range job.Steps {
			if strings.HasPrefix(step.Uses, "actions/checkout@") && step.With["persist-credentials"] != false {
				problems = append(problems, "job "+name+" keeps the token of its checkout")
			}
			// Anyone chooses such a text, and a shell would run it.
			if strings.Contains(step.Run, "${{") {
				problems = append(problems, "job "+name+" has an expression in a script: "+step.Run)
			}
		}
	}
	return problems
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package main

import (
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/test/pages"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// TestSimulatorTutorial runs the commands of docs/tutorials/simulator.md as they stand. Only make build, which writes
// to the clone, is replaced.
func TestSimulatorTutorial(t *testing.T) {
	t.Parallel()
	script := strings.Join(pages.Of(t, "../../docs/tutorials/simulator.md"), "")
	commands, found := strings.CutPrefix(script, "make build\n")
	if !found {
		t.Fatal("the first command of docs/tutorials/simulator.md is not make build")
	}
	dir := t.TempDir()
	_, err := simtest.Build(filepath.Join(dir, "bin"), false)
	must(t, err)
	commands = "set -eu -o pipefail; trap 'kill $(jobs -p) 2>/dev/null || true' EXIT; " + commands
	cmd := exec.Command("bash", "-c", commands)
	cmd.Dir = dir
	shown, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, shown)
	}
	for _, want := range []string{
		`data +1GiB +\S+ +- `,
		`refused with exit code 5`,
		`data +1GiB +\S+ +node-a `,
		`restored +2GiB +\S+ +- `,
		`not deleted, exit code 5`,
	} {
		if !regexp.MustCompile(want).Match(shown) {
			t.Errorf("the tutorial prints nothing that matches %q:\n%s", want, shown)
		}
	}
	left, err := filepath.Glob(filepath.Join(dir, "*"))
	must(t, err)
	if len(left) != 1 {
		t.Errorf("the tutorial leaves %v", left)
	}
}

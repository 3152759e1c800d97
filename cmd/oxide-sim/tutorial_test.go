// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/test/pages"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// TestSimulatorTutorial runs the commands of docs/tutorials/simulator.md as they stand. Only make build, which writes
// to the clone, is replaced. With the files of a release it runs the commands that unpack the archive instead.
func TestSimulatorTutorial(t *testing.T) {
	t.Parallel()
	blocks := pages.Of(t, "../../docs/tutorials/simulator.md")
	if blocks[0] != "make build\n" || !strings.Contains(blocks[1], "tar -xzf ") {
		t.Fatalf("docs/tutorials/simulator.md begins with %q", blocks[:2])
	}
	dir := t.TempDir()
	commands := strings.Join(blocks[2:], "")
	if simtest.ReleaseFiles() != "" {
		commands = fromRelease(t, dir, blocks[1]) + commands
	} else {
		_, err := simtest.Build(filepath.Join(dir, "bin"), false)
		must(t, err)
	}
	shown := runBlock(t, dir, "trap 'kill $(jobs -p) 2>/dev/null || true' EXIT; "+commands)
	for _, want := range []string{
		`data +1GiB +\S+ +- `,
		`refused with exit code 5`,
		`data +1GiB +\S+ +node-a `,
		`restored +2GiB +\S+ +- `,
		`not deleted, exit code 5`,
	} {
		if !regexp.MustCompile(want).MatchString(shown) {
			t.Errorf("the tutorial prints nothing that matches %q:\n%s", want, shown)
		}
	}
	left, err := filepath.Glob(filepath.Join(dir, "*"))
	must(t, err)
	left = slices.DeleteFunc(left, func(path string) bool { return strings.HasSuffix(path, ".tar.gz") })
	if len(left) != 1 {
		t.Errorf("the tutorial leaves %v", left)
	}
}

// fromRelease puts the archive that a page's commands unpack into a folder. It returns the commands with the version.
func fromRelease(t *testing.T, dir, commands string) string {
	t.Helper()
	commands = pages.Fill(t, commands, "VERSION", simtest.ReleaseVersion())
	archive := regexp.MustCompile(`oxide-csi-\S+\.tar\.gz`).FindString(commands)
	must(t, os.Symlink(filepath.Join(simtest.ReleaseFiles(), archive), filepath.Join(dir, archive)))
	return commands
}

// runBlock runs commands of a page in a folder, and returns what they print.
func runBlock(t *testing.T, dir, commands string) string {
	t.Helper()
	cmd := exec.Command("bash", "-eu", "-o", "pipefail", "-c", commands)
	cmd.Dir = dir
	shown, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, shown)
	}
	return string(shown)
}

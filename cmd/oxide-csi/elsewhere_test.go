// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main_test

import (
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestWithoutThePlugin runs the program that macOS gets, built for this machine: it has the commands that need neither
// the plugin nor its host, and they work.
func TestWithoutThePlugin(t *testing.T) {
	t.Parallel()
	h := newHost(t, false)
	id := h.ok(t, "volume", "create", "postgres", "--size=1GiB")
	h.ok(t, "volume", "attach", id)
	program := filepath.Join(h.dir, "noplugin")
	if out, err := exec.Command("go", "build", "-tags=noplugin", "-o", program, ".").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	run := func(args ...string) string {
		t.Helper()
		cmd := exec.Command(program, args...)
		cmd.Env = append(baseEnv(), h.rackEnv(t)...)
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Errorf("%v: %v, %s", args, err, out)
		}
		return string(out)
	}
	var commands []string
	for _, match := range regexp.MustCompile(`(?m)^  ([a-z-]+) +[A-Z]`).FindAllStringSubmatch(run(), -1) {
		commands = append(commands, match[1])
	}
	slices.Sort(commands)
	want := []string{"completion", "doctor", "explain", "help", "orphans", "support-bundle", "version"}
	if diff := cmp.Diff(want, commands); diff != "" {
		t.Errorf("commands (-want +got):\n%s", diff)
	}
	unseen := "device in the guest of " + h.sim.Instances[0].ID
	if got := run("explain", id); !strings.Contains(got, "disk ") || !strings.Contains(got, unseen) {
		t.Errorf("explain: %s", got)
	}
	if got := run("doctor"); !strings.Contains(got, "API version") || strings.Contains(got, "NVMe") {
		t.Errorf("doctor: %s", got)
	}
	out, err := exec.Command(program, "--mode=node").CombinedOutput()
	if err == nil || !strings.Contains(string(out), "--mode: unknown flag") {
		t.Errorf("it serves: %v, %s", err, out)
	}
}

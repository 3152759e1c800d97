// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// TestWithoutThePlugin runs the program that macOS gets, built for this machine: it has the commands that need neither
// the plugin nor its host, and they work. They look at nothing on this host, which is a node with the volume's disk.
func TestWithoutThePlugin(t *testing.T) {
	t.Parallel()
	h := newHostWithGuest(t, false)
	id := h.ok(t, "volume", "create", "postgres", "--size=1GiB")
	h.ok(t, "volume", "attach", id)
	guest := h.sim.Instances[0].Guest
	environ := append(h.rackEnv(t),
		"OXIDE_CSI_DEV_ROOT="+guest+"/dev", "OXIDE_CSI_SYS_ROOT="+guest+"/sys", "OXIDE_CSI_MODE=all")
	program, link := filepath.Join(h.dir, "noplugin"), filepath.Join(h.dir, "kubectl-oxide")
	if out, err := exec.Command("go", "build", "-tags=noplugin", "-o", program, ".").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	must(t, os.Symlink(program, link))
	run := func(name string, code int, args ...string) string {
		t.Helper()
		cmd := exec.Command(name, args...)
		cmd.Env = append(baseEnv(), environ...)
		out, err := cmd.CombinedOutput()
		if cmd.ProcessState == nil || cmd.ProcessState.ExitCode() != code {
			t.Errorf("%v: %v, want exit code %d: %s", args, err, code, out)
		}
		return string(out)
	}
	says := func(out string, wanted ...string) {
		t.Helper()
		for _, want := range wanted {
			if !strings.Contains(out, want) {
				t.Errorf("no %q in: %s", want, out)
			}
		}
	}
	var commands []string
	for _, match := range regexp.MustCompile(`(?m)^  ([a-z-]+) +[A-Z]`).FindAllStringSubmatch(run(program, 0), -1) {
		commands = append(commands, match[1])
	}
	slices.Sort(commands)
	want := []string{"completion", "doctor", "explain", "help", "orphans", "support-bundle", "version"}
	if diff := cmp.Diff(want, commands); diff != "" {
		t.Errorf("commands (-want +got):\n%s", diff)
	}
	says(run(link, 0), "kubectl oxide says what is wrong", "  kubectl oxide explain default/data")
	says(run(program, 0, "explain", id), "disk ", "device in the guest of "+h.sim.Instances[0].ID+"  not read")
	if got := run(program, 0, "doctor"); !strings.Contains(got, "API version") || strings.Contains(got, "NVMe") {
		t.Errorf("doctor: %s", got)
	}
	if got := run(program, 0, "doctor", "--help"); !strings.Contains(got, "--oxide-host") ||
		strings.Contains(got, "--mode ") || strings.Contains(got, "--state-dir") {
		t.Errorf("doctor --help: %s", got)
	}
	kubeconfig := serveCluster(t, simtest.NewCluster(canary, pvList, pvcList))
	says(run(program, 0, "orphans", kubeconfig), "1 orphans")
	bundle := filepath.Join(h.dir, "bundle.tar.gz")
	run(program, 0, "support-bundle", bundle, kubeconfig)
	if _, err := os.Stat(bundle); err != nil {
		t.Error(err)
	}
	says(run(program, 2, "volume", "list", "--all"), "oxide-csi volume needs the plugin: run it on a host of the plugin")
	says(run(program, 78, "--mode=node"), "--mode: unknown flag")
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build monitoring

package monitoring

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// program returns the path of a program that test/programs/build.sh has built.
func program(t *testing.T, name string) string {
	t.Helper()
	dir := os.Getenv("OXIDE_CSI_PROGRAMS")
	if dir == "" {
		cache, err := os.UserCacheDir()
		must(t, err)
		dir = filepath.Join(cache, "oxide-csi-plugin", "programs")
	}
	path := filepath.Join(dir, name)
	if _, err := os.Stat(path); err != nil {
		t.Skipf("needs %s, which is not in %s; run test/programs/build.sh prometheus", name, dir)
	}
	return path
}

// TestPromtool checks the rules with promtool, and runs their unit tests.
func TestPromtool(t *testing.T) {
	for _, args := range [][]string{
		{"check", "rules", "--lint=all", "--lint-fatal", root + "/deploy/monitoring/rules.yaml"},
		{"test", "rules", "testdata/rules_test.yaml"},
	} {
		if output, err := exec.Command(program(t, "promtool"), args...).CombinedOutput(); err != nil {
			t.Errorf("promtool %v: %v\n%s", args, err, output)
		}
	}
}

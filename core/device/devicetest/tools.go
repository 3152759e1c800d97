// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package devicetest

import (
	"context"
	"fmt"
	"regexp"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/core/hostexec"
)

var version = regexp.MustCompile(`[0-9]+\.[0-9]+(\.[0-9]+)?`)

// OlderThan reports whether a tool of this machine is older than a version, such as "1.46.3", by what its -V says. A
// test asks it for what the tools of an older Debian cannot do.
func OlderThan(t testing.TB, tool, oldest string) bool {
	t.Helper()
	result, err := hostexec.Run(context.Background(), tool, "-V")
	said := version.FindString(result.Stdout + result.Stderr)
	if err != nil || said == "" {
		t.Fatalf("%s -V: %v: %s", tool, err, result.Message())
	}
	number := func(text string) (n int) {
		var major, minor, patch int
		_, _ = fmt.Sscanf(text+".0", "%d.%d.%d", &major, &minor, &patch) // the expression has matched
		return major*1_000_000 + minor*1_000 + patch
	}
	return number(said) < number(oldest)
}

// StopsWithoutJournal reports whether e2fsck -p of this machine does not repair an ext4 without journal after a power
// cut. Version 1.46.2 repairs the descriptor of a group, starts again, and calls its checksum an unexpected
// inconsistency. The repair by hand works: [RepairByHand].
func StopsWithoutJournal(t testing.TB) bool {
	t.Helper()
	return OlderThan(t, "e2fsck", "1.47")
}

// RepairByHand does what errors of the plugin advise an operator to do with an ext that e2fsck -p does not repair.
func RepairByHand(t testing.TB, path string) {
	t.Helper()
	const fixed = 1
	result, err := hostexec.Run(context.Background(), "e2fsck", "-f", "-y", path)
	if err != nil || result.ExitCode != fixed {
		t.Fatalf("e2fsck -f -y: %v, exit code %d: %s", err, result.ExitCode, result.Message())
	}
}

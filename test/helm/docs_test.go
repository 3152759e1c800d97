// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package helm_test

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// kubernetes are the messages of the page that come from Kubernetes.
var kubernetes = []string{
	"FailedAttachVolume",
	"CreateContainerConfigError",
	"CrashLoopBackOff",
	"Unhealthy",
	"violates PodSecurity",
	"Init:0/1",
	"CSINode … does not contain driver csi.oxide.computer",
	"detected topology value collision",
	"Pending",
	"waiting for first consumer",
	"did not have enough free storage",
	"exceed max volume count",
	"Multi-Attach error",
	"Waiting for detach",
	"no topology key found for node",
	"Released",
	"is still attached to node",
	"readyToUse",
	"reclaimPolicy: Delete",
	"cluster-id",
	"FailedPreStopHook",
}

// TestSymptoms checks the symptom table of docs/how-to/troubleshooting.md: the plugin or the chart must
// contain each quoted message, so that an operator finds the row.
func TestSymptoms(t *testing.T) {
	page, err := os.ReadFile("../../docs/how-to/troubleshooting.md")
	if err != nil {
		t.Fatal(err)
	}
	_, table, _ := strings.Cut(string(page), "| you see | it means | do |")
	sources := messages(t)
	rows := 0
	for _, line := range strings.Split(table, "\n") {
		cells := strings.Split(line, "|")
		if len(cells) < 4 {
			continue
		}
		rows++
		for _, quoted := range regexp.MustCompile("`([^`]+)`").FindAllStringSubmatch(cells[1], -1) {
			if slices.Contains(kubernetes, quoted[1]) {
				continue
			}
			for _, part := range strings.Split(quoted[1], "…") {
				if part = strings.Trim(part, " []"); !strings.Contains(sources, part) {
					t.Errorf("neither plugin nor chart contains %q", part)
				}
			}
		}
	}
	if rows < 20 {
		t.Errorf("the table has %d rows", rows)
	}
}

// messages returns all texts of the plugin and the chart.
func messages(t *testing.T) string {
	t.Helper()
	var text strings.Builder
	for _, root := range []string{"../../core", "../../cmd/oxide-csi", "../../metadata", "../../deploy/helm"} {
		err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
			switch {
			case err != nil:
				return err
			case strings.HasSuffix(path, "_test.go"), entry.IsDir():
				return nil
			case !strings.HasSuffix(path, ".go") && !strings.HasSuffix(path, ".tpl"):
				return nil
			}
			source, err := os.ReadFile(path)
			text.WriteString(strings.ReplaceAll(string(source), `\"`, `"`))
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return text.String()
}

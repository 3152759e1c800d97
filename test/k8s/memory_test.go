// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build k8s

package k8s_test

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// sidecarsOfController are the sidecars of the controller's pods, by the names of their programs.
var sidecarsOfController = []string{"csi-provisioner", "csi-attacher", "csi-resizer", "csi-snapshotter"}

// sidecarMemory logs the memory of the sidecars: the highest since their start, and the anonymous memory now, each time
// of the sidecar that has most.
func (c *cluster) sidecarMemory(t *testing.T, after string) {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/status")
	must(t, err)
	peaks, anonymous := map[string]float64{}, map[string]float64{}
	for _, file := range files {
		status, err := os.ReadFile(file)
		if err != nil {
			continue // the process has ended
		}
		first, _, _ := strings.Cut(string(status), "\n")
		name := strings.TrimPrefix(first, "Name:\t")
		peaks[name] = max(peaks[name], mebibytes(t, string(status), "VmHWM"))
		anonymous[name] = max(anonymous[name], mebibytes(t, string(status), "RssAnon"))
	}
	var parts []string
	for _, name := range sidecarsOfController {
		if peaks[name] == 0 {
			t.Errorf("no process %s was found", name)
		}
		parts = append(parts, fmt.Sprintf("%s %.0f (%.0f)", name, peaks[name], anonymous[name]))
	}
	t.Logf("measured: memory of sidecars %s, the peak (and anonymous now) in MiB: %s", after, strings.Join(parts, ", "))
}

// mebibytes reads a field of /proc/PID/status. A process that is ending has no memory.
func mebibytes(t *testing.T, status, field string) float64 {
	t.Helper()
	match := regexp.MustCompile(field + `:\s+(\d+) kB`).FindStringSubmatch(status)
	if match == nil {
		return 0
	}
	kib, err := strconv.ParseFloat(match[1], 64)
	must(t, err)
	return kib / 1024
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
)

// limit is the bar of some rows.
type limit struct {
	// rows is a regular expression for their whole names, without the suffix of [foreignGroups].
	rows string
	bar  bar
	// record is the decision record that says what users get for a bar that was loosened, such as "044".
	record string
}

// limits are all bars. A row has the first bar that matches its name. A bar may be tightened at any time. It may be
// loosened only with a decision record: [loosened]. A measurement that no longer makes a row with a bar fails.
var limits = []limit{
	// Decisions 039, 044, 049 and 052 say what each call is for.
	{"calls/CreateVolume", strictly(atMost(2)), ""},
	{"calls/ControllerPublishVolume", strictly(atMost(4)), "044"},
	{"calls/ControllerUnpublishVolume", strictly(atMost(1)), ""},
	{"calls/CreateSnapshot", strictly(atMost(2)), ""},
	{"calls/CreateVolume/restored", strictly(atMost(3)), ""},
	{"calls/CreateVolume/cloned", strictly(atMost(6)), ""},
	{"calls/DeleteSnapshot", strictly(atMost(2)), ""},
	{"calls/DeleteVolume/restored", strictly(atMost(2)), ""},
	// Missed: decision 039 needs 11. Who adds one fails against the written results.
	{"calls/ControllerExpandVolume", atMost(9), ""},
	{"calls/ControllerExpandVolume/again", strictly(atMost(1)), ""},
	{"calls/ControllerPublishVolume/grown", strictly(atMost(5)), ""},
	{"calls/ControllerUnpublishVolume/grown", strictly(atMost(2)), ""},
	{"calls/DeleteVolume/grown", strictly(atMost(5)), ""},
	{"calls/DeleteVolume", strictly(atMost(2)), ""},
	// With a list of all disks: decision 039.
	{"calls/ControllerUnpublishVolume/gone", strictly(atMost(5)), ""},
	{"calls/DeleteVolume/gone", strictly(atMost(5)), ""},
	{"calls/DeleteSnapshot/gone", strictly(atMost(2)), ""},

	// An expansion has none: it waits.
	{"rounds/CreateVolume", atMost(1), ""},
	{"rounds/ControllerPublishVolume", atMost(2), ""},
	{"rounds/ControllerUnpublishVolume", atMost(1), ""},
	{"rounds/CreateSnapshot", atMost(2), ""},
	{"rounds/CreateVolume/restored", atMost(2), ""},
	{"rounds/CreateVolume/cloned", atMost(5), ""},
	{"rounds/DeleteSnapshot", atMost(2), ""},
	{"rounds/DeleteVolume/restored", atMost(1), ""},
	{"rounds/ControllerExpandVolume/again", atMost(1), ""},
	{"rounds/ControllerPublishVolume/grown", atMost(3), ""},
	{"rounds/ControllerUnpublishVolume/grown", atMost(2), ""},
	{"rounds/DeleteVolume/grown", atMost(4), ""},
	{"rounds/DeleteVolume", atMost(1), ""},
	{"rounds/ControllerUnpublishVolume/gone", atMost(5), ""},
	{"rounds/DeleteVolume/gone", atMost(5), ""},
	{"rounds/DeleteSnapshot/gone", atMost(2), ""},

	{"throughput/0ms/100-workers/create/plugin", atLeast(1000), ""},
	{"throughput/50ms/20-workers/publish/ratio", atLeast(0.5), ""},
	{"throughput/50ms/20-workers/.*/ratio", atLeast(0.9), ""},
	{"throughput/50ms/100-workers/create/ratio", atLeast(0.9), ""},
	{"throughput/50ms/500-at-once/publish/ratio", atLeast(0.3), ""},
	// At most three times as long as the bare SDK.
	{"throughput/50ms/11-on-one-node/publish/ratio", atLeast(1 / 3.), ""},

	{"restarts/8-volumes-on-1-node", strictly(atMost(1)), ""},
	{"restarts/8-volumes-return", strictly(atMost(0)), ""},
	{"restarts/24-volumes-on-3-nodes", strictly(atMost(restartedNodes)), ""},

	// A list of as many volumes as there are disks must fit into the client's limit.
	{"list/whole/entry", strictly(atMost(receiveLimit / listedDisks)), ""},
	// Each RPC reads the records twice (core/expand), and each list of the rack ends with an empty page.
	{"list/pages/calls", strictly(atMost(320)), ""},
	{"list/.*/calls", strictly(atMost(9)), ""},
	{"list/.*/peak memory", strictly(atMost(64)), ""},
	{"list/20000-disks-at-110ms", atMost(3200), ""},
	{"commands/.*", atMost(10), ""},

	// A page of the rack had 500 disks. Each RPC reads its last page again, and the last page of all is empty.
	{"scale/short/list/calls", strictly(atMost(4)), ""},
	{"scale/full/1000/list/calls", strictly(atMost(5)), ""},
	{"scale/full/7000/list/calls", strictly(atMost(19)), ""},
	{"scale/full/70000/list/calls", strictly(atMost(173)), ""},
	// More than 64 calls of 110 ms on average: the load of a busy controller.
	{"scale/.*/most calls in a second of the return", atMost(700), ""},
	{"scale/.*/anonymous memory/at the end", bar{}, ""},
	{"scale/.*/anonymous memory/.*", strictly(atMost(128)), ""},

	{"startup/.*", atMost(25), ""},
	{"ready/.*", atMost(25), ""},

	// Times and CPU times are compared with another driver's in the same run.
	{"staging/.*/used/mount-utils/ratio", atMost(0.9), ""},
	{"staging/.*-1GiB/blank/mount-utils/ratio", atMost(1), ""},
	{"peers/ext4-1GiB/used/hetzner/cpu-ratio", atMost(0.9), ""},
	{"peers/xfs-1GiB/used/hetzner/cpu-ratio", atMost(1), ""},
	{"peers/.*/blank/(hetzner|ebs)/cpu-ratio", atMost(1), ""},
	{"staging/appeared-found/.*", atMost(20), ""},
	{"staging/.*/blank/scan", atMost(5), ""},
	{"staging/.*/blank/rest", atMost(10), ""},

	{"life/used-ext4/system-calls", atMost(2000), ""},
	{"life/used-ext4/processes", strictly(atMost(3)), ""},
	{"life/used-ext4/cpu-(50000-files|200-namespaces)/ratio", atMost(1.15), ""},

	// In MiB. Anonymous memory is what the process takes from the machine. Resident memory also includes pages of the
	// program file, which the kernel can drop at any time.
	{"memory/controller/(after a volume/)?anonymous", strictly(atMost(16)), ""},
	{"memory/node/.*anonymous", strictly(atMost(12)), ""},
	{"memory/.*/resident", strictly(atMost(32)), ""},
	{"wakeups/controller", atMost(60), ""},
	{"wakeups/node", atMost(30), ""},
	{"binary", strictly(atMost(32)), ""},

	{"nomad/redeployment on the same client", atMost(5), ""},
	// The grace, and what Nomad needs.
	{"nomad/move to another client", atMost(60 + 60), ""},
	{"upgrade/.*/longest pause of a writing pod", atMost(1), ""},
	// In MB. The layers of the images are compressed.
	{"release/oxide-csi-plugin.oci.tar", strictly(atMost(40)), ""},
	{"release/oxide-(csi-controller|cosi).oci.tar", strictly(atMost(16)), ""},
}

// limitOf returns the bar of a row, or nil.
func limitOf(name string) *limit {
	name = strings.TrimSuffix(name, foreignSuffix)
	for i := range limits {
		if regexp.MustCompile("^(" + limits[i].rows + ")$").MatchString(name) {
			return &limits[i]
		}
	}
	return nil
}

// unmeasured returns an error for each bar without a row, of those whose names begin with one of the prefixes.
func unmeasured(rows []row, prefixes ...string) error {
	measured := map[*limit]bool{}
	for _, r := range rows {
		measured[limitOf(r.Name)] = true
	}
	var errs []error
	for i := range limits {
		for _, prefix := range prefixes {
			if l := &limits[i]; strings.HasPrefix(l.rows, prefix) && !measured[l] {
				errs = append(errs, fmt.Errorf("nothing was measured for the bar of %s", l.rows))
			}
		}
	}
	return errors.Join(errs...)
}

// loosened returns an error for each row whose bar is looser than the one that it was written with, unless a decision
// record names the row. The records are below root, the repository's.
func loosened(root string, written []row) error {
	var errs []error
	for _, r := range written {
		sign, text, _ := strings.Cut(r.Bar, " ")
		before, err := strconv.ParseFloat(text, 64)
		l := limitOf(r.Name)
		if err != nil || l != nil && l.bar.sign == sign && (bar{limit: before, sign: sign}).holds(rounded(l.bar.limit)) {
			continue // it had no bar, or it has the same one or a tighter one
		}
		if l == nil || !l.recorded(root) {
			errs = append(
				errs,
				fmt.Errorf("the bar of %s was %s, and is looser without a decision record that names it", r.Name, r.Bar),
			)
		}
	}
	return errors.Join(errs...)
}

// recorded reports whether the limit's decision record names its rows.
func (l *limit) recorded(root string) bool {
	files, err := filepath.Glob(filepath.Join(root, "docs", "development", "decisions", l.record+"-*.md"))
	if err != nil || len(files) != 1 {
		return false
	}
	text, err := os.ReadFile(files[0])
	return err == nil && strings.Contains(string(text), l.rows)
}

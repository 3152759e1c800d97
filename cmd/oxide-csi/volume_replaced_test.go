// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main_test

import (
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// An expansion that ended before it made the larger disk leaves a volume without a disk. The commands find the volume
// by its name: list shows it, expand and attach make its disk, and delete deletes it.
func TestCommandsOnAVolumeWithoutADisk(t *testing.T) {
	t.Parallel()
	h := newHost(t, true)
	node := "--node=" + h.sim.Instances[0].Name
	for _, test := range []struct {
		name string
		args []string
	}{
		{"expanded", []string{"volume", "expand", "expanded", "--size=2GiB"}},
		{"attached", []string{"volume", "attach", "attached"}},
		{"on-a-node", []string{"volume", "attach", "on-a-node", node}},
		{"deleted", []string{"volume", "delete", "deleted"}},
	} {
		id := h.ok(t, "volume", "create", test.name, "--size=1GiB")
		always := 0
		_, err := h.sim.Inject(t.Context(), simtest.Fault{
			Operation: "disk_create", Kind: simtest.FaultStatus, Status: 507, Count: &always,
		})
		must(t, err)
		h.fails(t, 5, "volume", "expand", test.name, "--size=2GiB")
		if list := h.ok(t, "volume", "list"); !strings.Contains(list, test.name) {
			t.Errorf("the list lacks %s:\n%s", test.name, list)
		}
		if text := h.fails(t, 3, "volume", "show", test.name); !strings.Contains(text, "do not delete it") {
			t.Errorf("show %s: %s", test.name, text)
		}
		must(t, h.sim.ClearFaults(t.Context()))
		got := h.run(t, test.args...)
		if got.code != 0 || strings.Contains(got.stderr, "nothing to delete") {
			t.Errorf("%v: %+v", test.args, got)
		}
		if got := h.run(t, "volume", "show", test.name); (got.code == 0) != (test.name != "deleted") {
			t.Errorf("after %v: %+v", test.args, got)
		}
		if got := h.run(t, "snapshot", "list"); strings.Contains(got.stdout, id) {
			t.Errorf("after %v, snapshots are left: %+v", test.args, got)
		}
	}
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// The lists are sorted by name, and have the ID of each row.
func TestLists(t *testing.T) {
	t.Parallel()
	h := newHost(t, true)
	ids := map[string]string{}
	for _, name := range []string{"large", "tiny", "middle"} {
		ids[name] = h.ok(t, "volume", "create", name, "--size=1GiB")
	}
	h.ok(t, "snapshot", "create", "second", "--volume=tiny")
	h.ok(t, "snapshot", "create", "first", "--volume=large")
	for list, want := range map[string][]string{
		h.ok(t, "volume", "list"):   {"NAME", "large", "middle", "tiny"},
		h.ok(t, "snapshot", "list"): {"NAME", "first", "second"},
	} {
		var names []string
		for row := range strings.Lines(list) {
			name := strings.Fields(row)[0]
			names = append(names, name)
			if id := ids[name]; !strings.Contains(row, id) {
				t.Errorf("volume %s: the row lacks %s: %s", name, id, row)
			}
		}
		if diff := cmp.Diff(want, names); diff != "" {
			t.Errorf("the first column (-want +got):\n%s", diff)
		}
	}
}

// A list asks a controller's socket for no node: that would be an error in the log and in the metrics, each time.
func TestListAtAControllerAlone(t *testing.T) {
	t.Parallel()
	h := newHost(t, false)
	h.ok(t, "volume", "create", "one", "--size=1GiB")
	h.ok(t, "volume", "attach", "one", "--node="+h.sim.Instances[0].Name)
	for _, args := range [][]string{{"volume", "list"}, {"volume", "show", "one"}} {
		if got := h.run(t, append(args, "--node-endpoint="+h.controller.Socket)...); got.code != 0 {
			t.Errorf("%+v", got)
		}
	}
	if log := h.controller.Process.Stderr().String(); strings.Contains(log, "NodeGetInfo") {
		t.Errorf("the controller was asked for a node: %s", log)
	}
}

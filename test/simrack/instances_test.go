// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package simrack_test

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack"
)

// TestInstanceStates has the table of docs/reference/rack.md §5, for the states that this rack can reach.
func TestInstanceStates(t *testing.T) {
	const (
		notStopped = "cannot delete instance: instance is running or has not yet fully stopped"
		noAttach   = "cannot attach disk: instance is not fully stopped"
		noDetach   = "cannot detach disk: instance is not fully stopped"
	)
	ok := func(state string) string { return "202 " + state }
	tests := []struct {
		state                                       string
		stop, start, reboot, delete, attach, detach string
	}{
		{
			"starting",
			ok("stopping"),
			ok("starting"),
			ok("starting"),
			"400 " + notStopped,
			"400 " + noAttach,
			"400 " + noDetach,
		},
		{
			"running",
			ok("stopping"),
			ok("running"),
			ok("rebooting"),
			"400 " + notStopped,
			"400 " + noAttach,
			"400 " + noDetach,
		},
		{"stopping", ok("stopping"), "409 instance must finish stopping before it can be started",
			"400 instance state cannot be changed from stopping", "400 " + notStopped, "400 " + noAttach, "400 " + noDetach},
		{"stopped", ok("stopped"), ok("starting"), "400 cannot reboot an instance in state stopped with no VMM", "204 ",
			ok("attached"), ok("detached")},
		{
			"rebooting",
			ok("stopping"),
			ok("rebooting"),
			ok("rebooting"),
			"400 " + notStopped,
			"400 " + noAttach,
			"400 " + noDetach,
		},
		{
			"migrating",
			ok("stopping"),
			ok("migrating"),
			ok("migrating"),
			"400 " + notStopped,
			"400 " + noAttach,
			"400 " + noDetach,
		},
		{"failed", ok("stopped"), ok("starting"), "400 instance state cannot be changed from failed", "204 ",
			"400 cannot attach disk to instance in failed state", ok("detached")},
	}
	for _, test := range tests {
		for request, want := range map[string]string{
			"stop": test.stop, "start": test.start, "reboot": test.reboot, "delete": test.delete,
			"attach": test.attach, "detach": test.detach,
		} {
			t.Run(test.state+" "+request, func(t *testing.T) {
				t.Parallel()
				w := newWorld(t, simrack.Options{StateTime: time.Hour})
				i, on, off := w.instance("i"), w.disk("on"), w.disk("off")
				w.attach(i, on).check(t, wants{status: 202})
				w.bring(i, test.state)
				var r reply
				switch request {
				case "delete":
					r = w.do("DELETE", "/instances/"+i, "")
				case "attach":
					r = w.attach(i, off)
				case "detach":
					r = w.detach(i, on)
				default:
					r = w.do("POST", "/instances/"+i+"/"+request, "")
				}
				if got := fmt.Sprint(r.status, " ", r.Message, r.RunState, r.state()); got != want {
					t.Errorf("got %s, want %s", got, want)
				}
			})
		}
	}
}

// bring brings a stopped instance to a state, on a rack whose transitions do not end.
func (w *world) bring(id, state string) {
	w.t.Helper()
	switch state {
	case "starting":
		w.must("POST", "/instances/"+id+"/start", "")
	case "stopping", "rebooting":
		w.setRun(id, "running")
		w.must("POST", "/instances/"+id+"/"+map[string]string{"stopping": "stop", "rebooting": "reboot"}[state], "")
	case "stopped":
	default:
		w.setRun(id, state)
	}
	if got := w.must("GET", "/instances/"+id, "").RunState; got != state {
		w.t.Fatalf("the instance is %s, not %s", got, state)
	}
}

func TestRebootComesBackToRunning(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newTimedWorld(t, simrack.Options{Instances: []string{"n"}, StateTime: 10 * time.Millisecond})
		id := w.machines()["n"].ID
		if r := w.must("POST", "/instances/"+id+"/reboot", ""); r.RunState != "rebooting" {
			t.Errorf("got %s", r.raw)
		}
		w.waitRun(id, "running")
	})
}

func TestInstanceCreate(t *testing.T) {
	create := func(name string) string { return `{"type":"create",` + body(name)[1:] }
	attach := func(name string) string { return fmt.Sprintf(`{"type":"attach","name":%q}`, name) }
	w := newWorld(t, simrack.Options{QuotaBytes: 20 * gib})
	w.disk("old")
	w.disk("taken")
	w.attach(w.instance("holder"), "taken").check(t, wants{status: 202})

	t.Run("disks in the order of their slots, the boot disk first", func(t *testing.T) {
		r := w.must("POST", "/instances?project=proj", instanceBody("whole",
			`"boot_disk":`+create("boot")+`,"disks":[`+create("data")+`,`+attach("old")+`,`+attach("old")+`]`))
		if r.RunState != "starting" || r.BootDiskID == nil {
			t.Errorf("got %s", r.raw)
		}
		w.waitRun(r.ID, "running")
		if diff := cmp.Diff(map[string]int{"boot": 0, "data": 1, "old": 2}, w.slots("whole")); diff != "" {
			t.Error(diff)
		}
	})
	tests := []struct {
		name, more string
		want       wants
	}{
		{"whole", `"start":false`, wants{400, "ObjectAlreadyExists", `already exists: instance "whole"`}},
		{"i", `"disks":[` + attach("nope") + `]`, wants{404, "ObjectNotFound", `not found: disk with name "nope"`}},
		{"i", `"disks":[` + attach("taken") + `]`,
			wants{400, "InvalidRequest", `cannot attach disk "taken": disk is attached to another instance`}},
		{"i", `"disks":[` + create("new") + `,` + create("new") + `]`,
			wants{400, "ObjectAlreadyExists", `already exists: disk "new"`}},
		{"i", `"disks":[` + create("new") + `,` + `{"type":"create",` + body("big", "size", fmt.Sprint(16*gib))[1:] + `]`,
			wants{507, "InsufficientCapacity", storageQuota}},
		{
			"i",
			`"boot_disk":` + create("b") + manyDisks(12),
			wants{400, "InvalidRequest", "cannot attach more than 12 disks to instance"},
		},
		{"i", `"disks":[{"type":"borrow","name":"old"}]`, wants{400, "",
			"unable to parse JSON body: disks[0].type: unknown variant `borrow`, expected `create` or `attach`"}},
		{"i", `"disks":{}`, wants{400, "", "unable to parse JSON body: disks: invalid type: map, expected a sequence"}},
		{"i", `"start":1`, wants{400, "", "unable to parse JSON body: start: invalid type: integer `1`, expected a boolean"}},
		{"i", `"auto_restart_policy":"always"`, wants{400, "",
			"unable to parse JSON body: auto_restart_policy: unknown variant `always`, expected `never` or `best_effort`"}},
	}
	before := w.must("GET", "/disks?project=proj", "").names()
	for _, test := range tests {
		t.Run(test.want.message, func(t *testing.T) {
			w.do("POST", "/instances?project=proj", instanceBody(test.name, test.more)).check(t, test.want)
		})
	}
	// A rejected request leaves nothing behind.
	if diff := cmp.Diff(before, w.must("GET", "/disks?project=proj", "").names()); diff != "" {
		t.Error(diff)
	}
	w.do("GET", "/instances/i?project=proj", "").
		check(t, wants{404, "ObjectNotFound", `not found: instance with name "i"`})
}

func manyDisks(n int) string {
	list := ""
	for k := range n {
		list += fmt.Sprintf(`,{"type":"attach","name":"d-%d"}`, k)
	}
	return `,"disks":[` + list[1:] + `]`
}

func TestInstanceThatCannotStartIsCreated(t *testing.T) {
	w := newWorld(t, simrack.Options{CPUQuota: 1, Instances: []string{"other"}})
	r := w.must("POST", "/instances?project=proj", instanceBody("i", ""))
	if got := w.must("GET", "/instances/"+r.ID, ""); got.RunState != "stopped" {
		t.Errorf("got %s", got.raw)
	}
}

func TestBootDiskIsSetWhileStopped(t *testing.T) {
	w := newWorld(t, simrack.Options{})
	i, d := w.instance("i"), w.disk("d")
	update := func(boot string) string {
		return `{"auto_restart_policy":"never","boot_disk":` + boot +
			`,"cpu_platform":null,"enable_jumbo_frames":false,"memory":1073741824,"ncpus":2}`
	}
	w.do("PUT", "/instances/"+i, update(`"d"`)).check(t, wants{409, "Conflict", "boot disk must be attached"})
	w.do("PUT", "/instances/"+i, update(`"nope"`)).
		check(t, wants{404, "ObjectNotFound", `not found: disk with name "nope"`})
	w.attach(i, d).check(t, wants{status: 202})
	if r := w.must("PUT", "/instances/"+i, update(`"`+d+`"`)); r.BootDiskID == nil || *r.BootDiskID != d {
		t.Errorf("got %s", r.raw)
	}
	w.detach(i, d).check(t, wants{409, "Conflict", "boot disk cannot be detached"})
	w.setRun(i, "running")
	w.do("PUT", "/instances/"+i, update("null")).
		check(t, wants{409, "Conflict", "instance must be stopped to set boot disk"})
	w.setRun(i, "stopped")
	w.must("PUT", "/instances/"+i, update("null"))
	w.detach(i, d).check(t, wants{status: 202})
	w.do("PUT", "/instances/"+i, `{"boot_disk":null}`).check(t,
		wants{400, "", "unable to parse JSON body: missing field `auto_restart_policy`"})
}

// TestLocalDisksTakeSpaceFromTheirFirstStart checks docs/reference/rack.md §2: before that they only count against the
// quota.
func TestLocalDisksTakeSpaceFromTheirFirstStart(t *testing.T) {
	w := newWorld(t, simrack.Options{SpaceBytes: 2 * gib})
	i := w.instance("i")
	w.must("POST", "/disks?project=proj", diskBody("l", "local", "", "size", fmt.Sprint(2000*gib)))
	w.attach(i, w.must("GET", "/disks/l?project=proj", "").ID).check(t, wants{status: 202})
	w.do("POST", "/instances/"+i+"/start", "").check(t, wants{
		507,
		"InsufficientCapacity",
		"Insufficient capacity: Failed to place instance: Could not find any valid sled on which this instance can be placed",
	})
	w.set(fmt.Sprintf(`{"space_bytes":%d}`, 2000*gib))
	w.do("POST", "/instances/"+i+"/start", "").check(t, wants{status: 202})
	w.do("POST", "/disks?project=proj", body("d")).check(t,
		wants{507, "InsufficientCapacity", "Insufficient capacity: Not enough storage"})
}

func TestDisksForImportAreImportReady(t *testing.T) {
	w := newWorld(t, simrack.Options{})
	r := w.must(
		"POST",
		"/disks?project=proj",
		diskBody("d", "distributed", `{"type":"importing_blocks","block_size":512}`),
	)
	if r.state() != "creating" {
		t.Errorf("got %s", r.raw)
	}
	if got := w.must("GET", "/disks/"+r.ID, ""); got.state() != "import_ready" {
		t.Errorf("then %s", got.raw)
	}
	w.do("DELETE", "/disks/"+r.ID, "").
		check(t, wants{400, "InvalidRequest", `disk cannot be deleted in state "import_ready"`})
	w.attach(w.instance("i"), r.ID).
		check(t, wants{400, "InvalidRequest", `cannot attach disk "d": invalid state import_ready`})
}

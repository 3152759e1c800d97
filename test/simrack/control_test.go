// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package simrack_test

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack"
)

func TestSettings(t *testing.T) {
	w := newWorld(t, simrack.Options{
		Latency: 1500 * time.Microsecond, StateTime: time.Second, QuotaBytes: 7, SpaceBytes: 8, CPUQuota: 9,
		GuestsOff: "no root",
	})
	want := map[string]any{
		"hotplug": false, "hotplug_async": false, "max_disks": 12.0, "latency_ms": 1.5,
		"latency_max_ms": 0.0, "state_ms": 1000.0,
		"quota_bytes": 7.0, "cpu_quota": 9.0, "space_bytes": 8.0, "api_version_max": "2026060800.0.0",
		"guests": false, "guests_off": "no root", "messages": "",
		"unplug": true, "plug_delay_ms": 0.0, "plug_fails": 0.0, "snapshot_ms": 0.0, "creating_ms": 0.0, "pantry": false,
		"space_returns_ms": 0.0, "start_refusal": "",
	}
	check := func() {
		t.Helper()
		var got map[string]any
		w.operate("GET", "/settings", "", 200, &got)
		if diff := cmp.Diff(want, got); diff != "" {
			t.Error(diff)
		}
	}
	check()
	w.set(`{"hotplug":true,"max_disks":8,"latency_ms":0,"latency_max_ms":2.5}`)
	want["hotplug"], want["max_disks"], want["latency_ms"], want["latency_max_ms"] = true, 8.0, 0.0, 2.5
	check()
	for _, refused := range []string{
		`{"max_disks":13}`, `{"max_disks":-1}`, `{"latency_ms":-1}`, `{"latency_ms":3}`, `{"latency_max_ms":-1}`, `{"quota_bytes":-1}`, `{"api_version_max":"new"}`,
		`{"guests":true}`, `{"colour":"red"}`, `{`, `{"hotplug":"yes"}`, `{"messages":"none"}`,
		`{"start_refusal":"x"}`, `{"plug_fails":-2}`, `{"plug_delay_ms":-1}`,
	} {
		w.operate("PATCH", "/settings", refused, 400, nil)
	}
	check()
}

func TestSettingsHoldForTheNextCall(t *testing.T) {
	w := newWorld(t, simrack.Options{})
	w.set(`{"quota_bytes":1073741824}`)
	w.disk("a")
	w.do("POST", "/disks?project=proj", body("b")).check(t, wants{507, "InsufficientCapacity", storageQuota})
	w.set(`{"quota_bytes":0,"space_bytes":1073741824}`)
	w.do("POST", "/disks?project=proj", body("b")).check(t,
		wants{507, "InsufficientCapacity", "Insufficient capacity: Not enough storage"})
	w.set(`{"space_bytes":0,"max_disks":1}`)
	w.disk("b")
	i := w.instance("i")
	w.attach(i, "a").check(t, wants{status: 202})
	w.attach(i, "b").check(t, wants{400, "InvalidRequest", "cannot attach more than 1 disks to instance"})
	w.set(`{"api_version_max":"2026032500.0.0"}`)
	w.do("GET", "/ping", "", "API-Version", "2026060800.0.0").check(t,
		wants{400, "", "server does not support this API version: 2026060800.0.0"})
}

func TestControlRejects(t *testing.T) {
	w := newWorld(t, simrack.Options{Instances: []string{"n"}})
	id := w.disk("d")
	tests := []struct {
		method, path, body string
		status             int
		says               string
	}{
		{"GET", "/nonexistent", "", 404, "no such request"},
		{"POST", "/settings", "{}", 404, "no such request"},
		{"POST", "/instances", `{"name":"Bad"}`, 400, "lowercase"},
		{"POST", "/instances", `{"name":"x","run_state":"failed"}`, 400, "running or stopped"},
		{"POST", "/instances", `{"name":"n"}`, 400, `already exists: instance \"n\"`},
		{"POST", "/instances", `{"name":"x","colour":1}`, 400, "unknown field"},
		{"PATCH", "/instances/nope", `{"run_state":"failed"}`, 404, "nope"},
		{"PATCH", "/instances/No", `{"run_state":"failed"}`, 400, "neither a name nor an ID"},
		{"PATCH", "/instances/n", `{"run_state":"rebooting"}`, 400, "failed, stopped, running or migrating"},
		{"PATCH", "/disks/" + id, `{"state":"attached"}`, 400, "faulted, maintenance or detached"},
		{"PATCH", "/disks/" + missingUUID, `{"state":"faulted"}`, 404, missingUUID},
		{"POST", "/tokens", `{"role":"admin"}`, 400, "viewer"},
		{"POST", "/faults", `{"operation":"disk_craete","kind":"lost"}`, 400, "disk_craete"},
		{"POST", "/faults", `{"operation":"*","kind":"smoke"}`, 400, "smoke"},
		{"POST", "/faults", `{"operation":"*","kind":"status","status":200}`, 400, "200"},
		{"POST", "/faults", `{"operation":"*","kind":"lost","probability":2}`, 400, "probability"},
		{"POST", "/faults", `{"operation":"*","kind":"lost","skip":-1}`, 400, "skip"},
		{"POST", "/faults", `{"operation":"*","kind":"lost","times":1}`, 400, "unknown field"},
		{"POST", "/halt", `{"instance":"nope"}`, 404, "nope"},
	}
	for _, test := range tests {
		t.Run(test.method+" "+test.path+" "+test.body, func(t *testing.T) {
			var got struct{ Error string }
			w.operate(test.method, test.path, test.body, test.status, &got)
			if !strings.Contains(got.Error, strings.ReplaceAll(test.says, `\"`, `"`)) {
				t.Errorf("error is %q", got.Error)
			}
		})
	}
}

func TestInstancesOfTheControlEndpoint(t *testing.T) {
	w := newWorld(t, simrack.Options{Instances: []string{"node-a", "node-b"}})
	w.operate("POST", "/instances", `{"name":"node-c","project":"other","run_state":"stopped"}`, 201, nil)
	got := w.machines()
	want := map[string]string{"node-a": "running", "node-b": "running", "node-c": "stopped"}
	for name, state := range want {
		m := got[name]
		if m.RunState != state || len(m.Disks) != 1 || m.Disks[0].Name != name+"-boot" || m.Disks[0].Slot != 0 ||
			m.Guest != "" {
			t.Errorf("%s: %+v", name, m)
		}
	}
	if got["node-c"].Project != "other" || got["node-a"].Project != "proj" {
		t.Errorf("projects: %+v", got)
	}
	view := w.must("GET", "/instances/node-a?project=proj", "")
	if view.BootDiskID == nil || *view.BootDiskID != got["node-a"].Disks[0].ID {
		t.Errorf("boot disk: %s", view.raw)
	}
	list := w.rack.Instances()
	if len(list) != 2 || list[0].ID != got["node-a"].ID || list[1].Name != "node-b" || list[0].Dir != "" {
		t.Errorf("Instances: %+v", list)
	}
}

func TestHaltAndPowerCut(t *testing.T) {
	w := newWorld(t, simrack.Options{Instances: []string{"n"}, StateTime: time.Hour})
	id := w.machines()["n"].ID
	w.operate("POST", "/halt", `{"instance":"n"}`, 200, nil)
	if got := w.machines()["n"].RunState; got != "stopping" {
		t.Errorf("after a halt: %s", got)
	}
	w.operate("POST", "/halt", `{"instance":"n"}`, 409, nil)
	w.operate("POST", "/power-cut", `{"instance":"`+id+`"}`, 200, nil)
	if got := w.machines()["n"].RunState; got != "stopped" {
		t.Errorf("after a power cut: %s", got)
	}
	w.set(`{"state_ms":0}`)
	w.must("POST", "/instances/"+id+"/start", "")
	w.waitRun(id, "running")
	w.operate("POST", "/halt", `{"instance":"n"}`, 200, nil)
	w.waitRun(id, "stopped")
	if slots := w.slots("n"); len(slots) != 1 {
		t.Errorf("disks: %v", slots)
	}
}

// TestOvertakenTransitionDoesNotHappen makes an instance fail while it starts: it must not show running afterwards.
func TestOvertakenTransitionDoesNotHappen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newTimedWorld(t, simrack.Options{StateTime: 20 * time.Millisecond})
		i, other := w.instance("i"), w.instance("other")
		w.must("POST", "/instances/"+i+"/start", "")
		w.setRun(i, "failed")
		w.must("POST", "/instances/"+other+"/start", "") // started later, so it is running later
		w.waitRun(other, "running")
		if got := w.must("GET", "/instances/"+i, "").RunState; got != "failed" {
			t.Errorf("got %s", got)
		}
	})
}

func TestDiskStatesOfTheControlEndpoint(t *testing.T) {
	w := newWorld(t, simrack.Options{})
	d, i := w.disk("d"), w.instance("i")
	w.attach(i, d).check(t, wants{status: 202})
	w.setDisk(d, "faulted")
	w.do("DELETE", "/instances/"+i, "").check(t, wants{status: 204})
	if got := w.must("GET", "/disks/"+d, ""); got.state() != "faulted" {
		t.Errorf("got %s", got.raw)
	}
	w.setDisk("d", "maintenance")
	w.do("DELETE", "/disks/"+d, "").check(t, wants{400, "InvalidRequest", `disk cannot be deleted in state "maintenance"`})
	w.setDisk(d, "faulted")
	w.do("DELETE", "/disks/"+d, "").check(t, wants{status: 204})
}

func TestLeftoversDoNotCountBootDisks(t *testing.T) {
	w := newWorld(t, simrack.Options{Instances: []string{"n"}})
	check := func(disks int) {
		t.Helper()
		var got map[string]any
		w.operate("GET", "/leftovers", "", 200, &got)
		want := map[string]any{"disks": float64(disks), "snapshots": 0.0, "loops": 0.0, "mounts": 0.0, "files": 0.0}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Error(diff)
		}
	}
	check(0)
	w.disk("d")
	check(1)
	w.must("DELETE", "/disks/d?project=proj", "")
	check(0)
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package simrack_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack"
)

func TestHotplugIsForRunningInstancesOnly(t *testing.T) {
	const (
		noAttach = "cannot attach disk: instance is not fully stopped"
		noDetach = "cannot detach disk: instance is not fully stopped"
	)
	for _, state := range []string{"starting", "stopping", "rebooting", "migrating"} {
		t.Run(state, func(t *testing.T) {
			w := newWorld(t, simrack.Options{Hotplug: true, StateTime: time.Hour})
			i, on, off := w.instance("i"), w.disk("on"), w.disk("off")
			w.attach(i, on).check(t, wants{status: 202})
			w.bring(i, state)
			w.attach(i, off).check(t, wants{400, "InvalidRequest", noAttach})
			w.detach(i, on).check(t, wants{400, "InvalidRequest", noDetach})
		})
	}
	t.Run("running", func(t *testing.T) {
		s := newScene(t, simrack.Options{Hotplug: true})
		s.setRun(s.i, "running")
		r := s.attach(s.i, s.d)
		r.check(t, wants{status: 202})
		isOn(t, s, r)
		r = s.detach(s.i, s.d)
		r.check(t, wants{status: 202})
		isOff(t, s, r)
		s.fill(s.i, 12)
		s.attach(s.i, s.d).check(t, wants{400, "InvalidRequest", "cannot attach more than 12 disks to instance"})
	})
	t.Run("boot disk", func(t *testing.T) {
		w := newWorld(t, simrack.Options{Hotplug: true, Instances: []string{"n"}})
		id := w.machines()["n"].ID
		w.detach(id, "n-boot").check(t, wants{400, "InvalidRequest", noDetach})
		w.setRun("n", "stopped")
		w.detach(id, "n-boot").check(t, wants{409, "Conflict", "boot disk cannot be detached"})
	})
	t.Run("off by default", func(t *testing.T) {
		s := newScene(t, simrack.Options{})
		s.setRun(s.i, "running")
		s.attach(s.i, s.d).check(t, wants{400, "InvalidRequest", noAttach})
		s.set(`{"hotplug":true}`)
		s.attach(s.i, s.d).check(t, wants{status: 202})
		s.set(`{"hotplug":false}`)
		s.detach(s.i, s.d).check(t, wants{400, "InvalidRequest", noDetach})
	})
}

func TestAsyncHotplugShowsIntermediateStates(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newTimedWorld(t, simrack.Options{Hotplug: true, HotplugAsync: true}).scene()
		i2 := s.instance("i2")
		s.setRun(s.i, "running")
		s.set(`{"latency_ms":100}`)
		r := s.attach(s.i, s.d)
		if r.status != 202 || r.state() != "attaching" || r.State.Instance != s.i {
			t.Fatalf("got %d %s", r.status, r.raw)
		}
		s.set(`{"latency_ms":0}`)
		// A disk that is being attached has its slot, and can be neither attached nor detached.
		if got := s.slots("i"); len(got) != 1 {
			t.Errorf("slots: %v", got)
		}
		s.attach(s.i, s.d).check(t, wants{400, "InvalidRequest", `cannot attach disk "d": invalid state attaching`})
		s.detach(s.i, s.d).check(t, wants{400, "InvalidRequest", `cannot detach disk "d": invalid state attaching`})
		s.do("DELETE", "/disks/"+s.d, "").
			check(t, wants{400, "InvalidRequest", `disk cannot be deleted in state "attaching"`})
		s.waitDisk(s.d, "attached")

		s.set(`{"latency_ms":100}`)
		r = s.detach(s.i, s.d)
		if r.status != 202 || r.state() != "detaching" || r.State.Instance != s.i {
			t.Fatalf("got %d %s", r.status, r.raw)
		}
		s.set(`{"latency_ms":0}`)
		s.detach(s.i, s.d).check(t, wants{status: 202})
		s.detach(i2, s.d).check(t, wants{400, "InvalidRequest", `cannot detach disk "d": invalid state detaching`})
		s.attach(i2, s.d).check(t, wants{400, "InvalidRequest", `cannot attach disk "d": invalid state detaching`})
		s.waitDisk(s.d, "detached")
		s.attach(i2, s.d).check(t, wants{status: 202})
	})
}

func (w *world) waitDisk(id, state string) {
	w.t.Helper()
	w.waitFor("disk "+state, func() bool { return w.must("GET", "/disks/"+id, "").state() == state })
}

func TestAsyncHotplugWhenTheInstanceStops(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newTimedWorld(t, simrack.Options{Hotplug: true, HotplugAsync: true}).scene()
		s.setRun(s.i, "running")
		s.set(`{"latency_ms":30}`)
		s.attach(s.i, s.d).check(t, wants{status: 202})
		s.set(`{"latency_ms":0}`)
		s.setRun(s.i, "stopped")
		s.waitDisk(s.d, "attached")
	})
}

func TestAsyncHotplugWhenTheDiskFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newTimedWorld(t, simrack.Options{Hotplug: true, HotplugAsync: true}).scene()
		e := s.disk("e")
		s.setRun(s.i, "running")
		s.set(`{"latency_ms":30}`)
		s.attach(s.i, s.d).check(t, wants{status: 202})
		s.setDisk(s.d, "faulted")
		s.attach(s.i, e).check(t, wants{status: 202}) // begun later, so it ends later
		s.set(`{"latency_ms":0}`)
		s.waitDisk(e, "attached")
		if got := s.must("GET", "/disks/"+s.d, ""); got.state() != "faulted" {
			t.Errorf("got %s", got.raw)
		}
	})
}

// TestOvertakenAsyncDetachDoesNotHappen sets a disk detached while it is being detached, and attaches it again. The end
// of the first detach must not detach it.
func TestOvertakenAsyncDetachDoesNotHappen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newTimedWorld(t, simrack.Options{Hotplug: true}).scene()
		e := s.disk("e")
		s.setRun(s.i, "running")
		s.attach(s.i, s.d).check(t, wants{status: 202})
		s.attach(s.i, e).check(t, wants{status: 202})
		s.set(`{"latency_ms":200,"hotplug_async":true}`)
		s.detach(s.i, s.d).check(t, wants{status: 202})
		s.set(`{"latency_ms":0,"hotplug_async":false}`) // otherwise the next calls would wait for the latency
		s.setDisk(s.d, "detached")
		s.attach(s.i, s.d).check(t, wants{status: 202})
		s.set(`{"latency_ms":200,"hotplug_async":true}`)
		s.detach(s.i, e).check(t, wants{status: 202}) // begun later, so it ends later
		s.set(`{"latency_ms":0}`)
		s.waitDisk(e, "detached")
		if got := s.must("GET", "/disks/"+s.d, ""); got.state() != "attached" {
			t.Errorf("got %s", got.raw)
		}
	})
}

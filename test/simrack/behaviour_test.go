// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package simrack_test

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack"
)

// The codes of refusals stay when their messages change. Parse errors have no code, and keep their words.
func TestOtherMessages(t *testing.T) {
	s := newScene(t, simrack.Options{})
	s.setRun(s.i, "running")
	s.set(`{"messages":"other"}`)
	s.attach(s.i, s.d).check(t, wants{400, "InvalidRequest", "the request was turned down"})
	s.do("GET", "/disks/"+s.d+"?project=proj", "").check(t, wants{400, "InvalidRequest", "the request was turned down"})
	s.do("GET", "/disks", "").check(t, wants{400, "", "unable to parse query string: missing field `project`"})
	s.set(`{"messages":""}`)
	s.attach(s.i, s.d).check(t, wants{400, "InvalidRequest", "cannot attach disk: instance is not fully stopped"})
}

// The prototype of hot-plug writes the attach first and then asks the hypervisor. What the hypervisor refuses stays
// attached, without a device, until the instance starts again.
func TestAttachFirst(t *testing.T) {
	s := newScene(t, simrack.Options{AttachFirst: true, World: simrack.World{NoUnplug: true}})
	s.setRun(s.i, "running")
	r := s.attach(s.i, s.d)
	r.check(t, wants{status: 202})
	isOn(t, s, r)
	s.detach(s.i, s.d).check(t, wants{400, "InvalidRequest", "cannot detach disk: instance is not fully stopped"})
	s.set(`{"plug_fails":1}`)
	second, third := s.disk("second"), s.disk("third")
	s.attach(s.i, second).check(t, wants{500, "Internal", "Internal Server Error"})
	if got := s.do("GET", "/disks/"+second, ""); got.state() != "attached" {
		t.Errorf("the disk is %s after the failure", got.state())
	}
	s.attach(s.i, second).check(t, wants{status: 202}) // unchanged
	s.attach(s.i, third).check(t, wants{status: 202})
	for _, state := range []string{"starting", "stopping", "migrating"} {
		t.Run(state, func(t *testing.T) {
			w := newWorld(t, simrack.Options{AttachFirst: true, StateTime: time.Hour})
			i, d := w.instance("i"), w.disk("d")
			w.bring(i, state)
			w.attach(i, d).check(t, wants{500, "Internal", "Internal Server Error"})
			if got := w.do("GET", "/disks/"+d, ""); got.state() != "attached" {
				t.Errorf("the disk is %s", got.state())
			}
		})
	}
	t.Run("slot_number", func(t *testing.T) {
		i, d, e := s.instance("by-slot"), s.disk("d7"), s.disk("e7")
		s.must("POST", "/instances/"+i+"/disks/attach", fmt.Sprintf(`{"disk":%q,"slot_number":7}`, d))
		if got := s.slots("by-slot")["d7"]; got != 7 {
			t.Errorf("slot %d", got)
		}
		s.do("POST", "/instances/"+i+"/disks/attach", fmt.Sprintf(`{"disk":%q,"slot_number":7}`, e)).
			check(t, wants{400, "InvalidRequest", "slot 7 is not free"})
	})
	t.Run("local disk", func(t *testing.T) {
		local := s.must("POST", "/disks?project=proj",
			`{"name":"local","description":"","size":1073741824,"disk_backend":{"type":"local"}}`).ID
		s.attach(s.i, local).
			check(t, wants{400, "InvalidRequest", "local storage disks cannot be attached to a running instance"})
	})
}

// An instance that was started before the rack could hot-plug needs one restart.
func TestAttachFirstNeedsARestart(t *testing.T) {
	s := newScene(t, simrack.Options{})
	s.setRun(s.i, "running")
	s.set(`{"hotplug":"attach-first"}`)
	s.attach(s.i, s.d).check(t, wants{500, "Internal", "Internal Server Error"})
	s.setRun(s.i, "stopped")
	s.setRun(s.i, "running")
	s.attach(s.i, s.disk("later")).check(t, wants{status: 202})
}

func TestSnapshotThroughThePantry(t *testing.T) {
	for _, test := range []struct {
		start time.Duration
		want  wants
	}{
		{time.Minute, wants{status: 201}},
		{time.Second, wants{400 + 9, "Conflict", "Pantry: possible Propolis "}},
		{7 * time.Second, wants{500, "Internal", "Internal Server Error"}},
	} {
		t.Run(test.start.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newTimedWorld(t, simrack.Options{World: simrack.World{Pantry: true, SnapshotMS: 10_000}}).scene()
				s.attach(s.i, s.d).check(t, wants{status: 202})
				done := make(chan reply, 1)
				go func() {
					done <- s.do("POST", "/snapshots?project=proj", fmt.Sprintf(`{"name":"s","description":"","disk":%q}`, s.d))
				}()
				time.Sleep(test.start)
				s.do("POST", "/instances/"+s.i+"/start", "").check(t, wants{status: 202})
				got := <-done
				if test.want.message == "Pantry: possible Propolis " {
					test.want.message += s.i
				}
				got.check(t, test.want)
			})
		})
	}
}

func TestSpaceReturnsLater(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newTimedWorld(t, simrack.Options{SpaceBytes: 1 << 30, World: simrack.World{SpaceReturnsMS: 5000}})
		w.do("DELETE", "/disks/"+w.disk("a"), "").check(t, wants{status: 204})
		w.do("POST", "/disks?project=proj", body("b")).check(t,
			wants{507, "InsufficientCapacity", "Insufficient capacity: Not enough storage"})
		time.Sleep(6 * time.Second)
		w.do("POST", "/disks?project=proj", body("b")).check(t, wants{status: 201})
	})
}

func TestRefusedStartShowsStarting(t *testing.T) {
	for refusal, final := range map[string]string{"quota": "stopped", "failed": "failed"} {
		synctest.Test(t, func(t *testing.T) {
			s := newTimedWorld(t, simrack.Options{StateTime: time.Second, World: simrack.World{StartRefusal: refusal}}).scene()
			done := make(chan reply, 1)
			go func() { done <- s.do("POST", "/instances/"+s.i+"/start", "") }()
			time.Sleep(500 * time.Millisecond)
			s.waitRun(s.i, "starting")
			if got := <-done; got.status != 507 {
				t.Errorf("status %d", got.status)
			}
			s.waitRun(s.i, final)
		})
	}
}

func TestDiskShowsCreating(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newTimedWorld(t, simrack.Options{World: simrack.World{CreatingMS: 5000}})
		done := make(chan reply, 1)
		go func() { done <- w.do("POST", "/disks?project=proj", body("a")) }()
		time.Sleep(time.Second)
		if got := w.do("GET", "/disks/a?project=proj", ""); got.state() != "creating" {
			t.Errorf("the disk is %s", got.state())
		}
		(<-done).check(t, wants{status: 201})
	})
}

func TestStarter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newTimedWorld(t, simrack.Options{}).scene()
		s.operate("POST", "/starter", fmt.Sprintf(`{"instance":%q,"every_ms":1000}`, s.i), 200, nil)
		time.Sleep(3 * time.Second)
		s.waitRun(s.i, "running")
		s.operate("POST", "/starter", fmt.Sprintf(`{"instance":%q,"every_ms":0}`, s.i), 200, nil)
		s.setRun(s.i, "stopped")
		time.Sleep(time.Minute)
		s.waitRun(s.i, "stopped")
	})
}

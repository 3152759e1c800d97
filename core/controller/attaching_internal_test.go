// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller

import (
	"fmt"
	"slices"
	"testing"
	"testing/synctest"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
)

// attachingWorld is an instance with room for some disks, and the attaches to it.
type attachingWorld struct {
	attaching *attaching
	rc        rackController
	attached  []rack.Disk
	// seen is what the look under way sees.
	seen    []rack.Disk
	refused int
}

// attachStep is the next step of an attach. It returns nil if the attach has ended. It returns false if it has to wait.
type attachStep func() (next attachStep, ok bool)

// publish is what checkAndAttach does, in steps.
func (w *attachingWorld) publish(t *testing.T, disk rack.Disk, rackRefuses bool) attachStep {
	attach := func() {
		if !rackRefuses {
			w.attached = append(w.attached, disk)
		}
	}
	alone := func() (attachStep, bool) {
		release, ok := w.attaching.lock(t.Context(), "i", 0)
		if !ok {
			return nil, false
		}
		if !w.rc.hasRoom(disk, w.attached) {
			w.refused++
			release()
			return nil, true
		}
		return func() (attachStep, bool) { attach(); release(); return nil, true }, true
	}
	return func() (attachStep, bool) {
		leave, ok := w.attaching.join(t.Context(), "i", 0)
		if !ok {
			return nil, false
		}
		at, leads := w.attaching.beginLook("i")
		reserve := func() (attachStep, bool) {
			if leads {
				w.attaching.endLook("i", at, w.seen, nil)
			}
			select {
			case <-at.done:
			default:
				return nil, false
			}
			if w.rc.hasRoom(disk, append(w.attaching.reserve("i", disk), at.disks...)) {
				return func() (attachStep, bool) { attach(); leave(); return nil, true }, true
			}
			leave()
			return alone, true
		}
		if !leads {
			return reserve, true
		}
		return func() (attachStep, bool) { w.seen = slices.Clone(w.attached); return reserve, true }, true
	}
}

// All orders of the steps of three attaches to an instance with room for one or two disks, one of which the rack may
// refuse, and two of which may have one serial.
func TestAttachesInEveryOrder(t *testing.T) {
	for _, room := range []int{1, 2} {
		for _, twins := range []bool{false, true} {
			for _, refused := range []int{-1, 0, 2} {
				t.Run(fmt.Sprintf("room for %d, twins %t, the rack refuses %d", room, twins, refused), func(t *testing.T) {
					orders := 0
					for order := []int{}; order != nil; order = nextOrder(order) {
						order = attachInOrder(t, order, room, twins, refused)
						orders++
					}
					if orders < 100 {
						t.Errorf("only %d orders", orders)
					}
				})
			}
		}
	}
}

// attachInOrder runs three attaches. order says which one makes each step, of those that can. It returns the whole
// order, in which each choice is below 3 in the units digit, with the number of choices in the tens digit.
func attachInOrder(t *testing.T, order []int, room int, twins bool, refused int) []int {
	w := &attachingWorld{attaching: newAttaching(), rc: rackController{Service: &Service{maxDisks: room}}}
	steps := make([]attachStep, 3)
	for n := range steps {
		name := fmt.Sprintf("%020d", n)
		if twins && n > 0 {
			name = fmt.Sprintf("%020d-%d", 1, n)
		}
		steps[n] = w.publish(t, rack.Disk{VolumeID: fmt.Sprint(n), ID: rack.DiskID(fmt.Sprint(n)), Name: name}, n == refused)
	}
	for at := 0; ; at++ {
		active := []int{}
		for n, step := range steps {
			if step != nil {
				active = append(active, n)
			}
		}
		if len(active) == 0 {
			break
		}
		if at == len(order) {
			order = append(order, 10*len(active))
		}
		step := active[order[at]%10]
		next, ok := steps[step]()
		if !ok { // in another order the others come first
			if !slices.ContainsFunc(active, func(n int) bool { _, ok := steps[n](); return ok }) {
				t.Fatalf("order %v: all wait", order)
			}
			return order
		}
		steps[step] = next
		for i, one := range w.attached {
			if one.CheckSerial(w.attached[:i]) != nil {
				t.Fatalf("order %v: two disks of one serial are attached", order)
			}
		}
		if len(w.attached) > room {
			t.Fatalf("order %v: %d disks are attached, with room for %d", order, len(w.attached), room)
		}
	}
	possible := 3
	if refused >= 0 {
		possible--
	}
	if twins && refused != 2 {
		possible--
	}
	if len(w.attached) != min(room, possible) {
		t.Fatalf("order %v: %d disks are attached and %d were refused", order, len(w.attached), w.refused)
	}
	if len(w.attaching.instances) > 0 {
		t.Fatalf("order %v: the instance is not forgotten", order)
	}
	return order
}

// nextOrder returns the order after this one, or nil after the last one.
func nextOrder(order []int) []int {
	for len(order) > 0 {
		last := order[len(order)-1]
		order = order[:len(order)-1]
		if last%10+1 < last/10 {
			return append(order, last+1)
		}
	}
	return nil
}

// An attach that has to run alone waits for those under way, and keeps later ones away.
func TestAttachAloneIsAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAttaching()
		const long = 1 << 40
		leave, _ := a.join(t.Context(), "i", long)
		var did []string
		go func() {
			release, _ := a.lock(t.Context(), "i", long)
			did = append(did, "alone")
			release()
		}()
		synctest.Wait()
		go func() {
			leave, _ := a.join(t.Context(), "i", long)
			did = append(did, "beside")
			leave()
		}()
		synctest.Wait()
		if len(did) > 0 {
			t.Errorf("%q did not wait for the attach under way", did)
		}
		other, ok := a.join(t.Context(), "other", 0)
		if !ok {
			t.Error("an attach to another instance waits")
		}
		other()
		leave()
		synctest.Wait()
		if want := []string{"alone", "beside"}; !slices.Equal(did, want) {
			t.Errorf("the order is %q, want %q", did, want)
		}
	})
}

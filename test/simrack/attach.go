// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package simrack

import (
	"errors"
	"math"
	"slices"
)

// pair is an instance and a disk, as a request to attach or detach addresses them.
type pair struct {
	instance target
	disk     selector
	// slot is the slot that an attach asks for, or -1.
	slot int
}

func parsePair(q *request) (pair, error) {
	t, err := q.target()
	if err != nil {
		return pair{}, err
	}
	body, err := readBody(q.http)
	if err != nil {
		return pair{}, err
	}
	d, err := body.selector("disk")
	if err != nil {
		return pair{}, err
	}
	p := pair{instance: t, disk: d, slot: -1}
	if raw, given := body.values["slot_number"]; given && string(raw) != "null" {
		slot, err := body.unsigned("slot_number", "u16", math.MaxUint16)
		if err != nil {
			return pair{}, err
		}
		p.slot = int(slot)
	}
	return p, nil
}

// lockPair looks up instance and disk, in this order, and locks both. A disk's name is looked up in the project of the
// instance.
func (r *Rack) lockPair(who caller, p pair) (i *instance, d *disk, release func(), err error) {
	release, err = r.lock(func() (ids []string, err error) {
		if i, err = r.lookupInstance(who, p.instance, accessModify); err != nil {
			return nil, err
		}
		t := target{sel: p.disk}
		if p.disk.name != "" {
			t.project = &selector{id: i.ProjectID}
		}
		if d, err = r.lookupDisk(who, t, accessModify); err != nil {
			return nil, err
		}
		return append(d.waitsFor(), i.ID), nil
	})
	return i, d, release, err
}

func parseAttach(r *Rack, q *request) (action, error) {
	p, err := parsePair(q)
	if err != nil {
		return nil, err
	}
	return func(who caller) (answer, error) { return r.attach(who, p) }, nil
}

func parseDetach(r *Rack, q *request) (action, error) {
	p, err := parsePair(q)
	if err != nil {
		return nil, err
	}
	return func(who caller) (answer, error) { return r.detach(who, p) }, nil
}

// errNothingToDo means that the requested state already holds.
var errNothingToDo = errors.New("nothing to do")

func (r *Rack) attach(who caller, p pair) (answer, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	i, d, release, err := r.lockPair(who, p)
	if err != nil {
		return answer{}, err
	}
	defer release()
	if err = r.checkAttach(i, d); err == nil {
		err = r.attachDisk(i, d, p.slot)
	}
	if err != nil && !errors.Is(err, errNothingToDo) {
		return answer{}, err
	}
	return answer{202, d.view()}, nil
}

// checkAttach implements the attach table of docs/reference/rack.md §4, in its order. It leaves out the row for a local
// disk on an instance that is being placed: such an instance shows starting here, which an earlier row rejects.
func (r *Rack) checkAttach(i *instance, d *disk) error {
	if d.ProjectID != i.ProjectID {
		return invalidRequest("disk must be in the same project as the instance")
	}
	switch d.State {
	case diskAttached:
		if d.InstanceID == i.ID {
			return errNothingToDo
		}
		return invalidRequest(`cannot attach disk "%s": disk is attached to another instance`, d.Name)
	case diskDetached:
	default: // never creating: the lock waits for the create
		return invalidRequest(`cannot attach disk "%s": invalid state %s`, d.Name, d.State)
	}
	set := r.settings.Load()
	switch {
	case i.hasVMM() && !i.canHotplug(set):
		return invalidRequest("cannot attach disk: instance is not fully stopped")
	case i.RunState == runFailed:
		return invalidRequest("cannot attach disk to instance in failed state")
	case len(i.disks) >= set.MaxDisks:
		return invalidRequest("cannot attach more than %d disks to instance", set.MaxDisks)
	}
	return nil
}

// canHotplug reports whether a disk can be attached although the instance has a virtual machine. The prototype writes
// the attach before the hypervisor is asked, in each of its states.
func (i *instance) canHotplug(s *settings) bool {
	return s.Hotplug == hotplugAttachFirst || s.Hotplug == hotplugOn && i.RunState == runRunning
}

// canUnplug reports whether a disk can be detached although the instance has a virtual machine.
func (i *instance) canUnplug(s *settings) bool {
	return s.Hotplug != hotplugOff && s.Unplug && i.RunState == runRunning
}

// attachDisk puts the disk into a slot, or into the lowest free one if slot is negative.
func (r *Rack) attachDisk(i *instance, d *disk, slot int) error {
	set := r.settings.Load()
	if slot < 0 {
		slot = i.freeSlot()
	} else if slot >= slots || slices.ContainsFunc(i.disks, func(d *disk) bool { return d.Slot == slot }) {
		return invalidRequest("slot %d is not free", slot)
	}
	place := func(d *disk) { d.State, d.InstanceID, d.Slot = diskAttached, i.ID, slot }
	if i.hasVMM() && set.Hotplug == hotplugAttachFirst {
		return r.plugFirst(i, d, set, place)
	}
	if i.canHotplug(set) && set.HotplugAsync {
		err := r.changeDisk(d, func(d *disk) { place(d); d.State = diskAttaching })
		if err == nil {
			r.finishMoveLater(set, r.finishAttach, i.ID, d.ID)
		}
		return err
	}
	next := *d
	place(&next)
	if err := r.plug(i, &next); err != nil {
		return err
	}
	return r.changeDisk(d, place)
}

func (r *Rack) plug(i *instance, d *disk) error {
	if !i.powered {
		return nil
	}
	shown := d.forGuest(i.BootDiskID)
	return r.callGuests("plug disk "+d.ID, func(g Guests) error { return g.Plug(i.ID, shown) })
}

func (r *Rack) unplug(i *instance, d *disk) error {
	if !i.powered || r.guests != nil && r.guests.Device(i.ID, d.ID) == "" {
		return nil
	}
	return r.callGuests("unplug disk "+d.ID, func(g Guests) error { return g.Unplug(i.ID, d.ID) })
}

// finishAttach ends an attach in the background. If the guest cannot show the disk, the disk is detached again, and the
// failure of the simulator is recorded.
func (r *Rack) finishAttach(instanceID, diskID string) {
	r.finishMove(instanceID, diskID, diskAttaching, func(i *instance, d *disk) error {
		if err := r.plug(i, d); err != nil {
			return errors.Join(err, r.changeDisk(d, (*disk).detach))
		}
		return r.changeDisk(d, func(d *disk) { d.State = diskAttached })
	})
}

// finishMoveLater ends an attach or detach in the background, after the latency.
func (r *Rack) finishMoveLater(set *settings, finish func(instanceID, diskID string), instanceID, diskID string) {
	r.runAfter(set.latency(), func() { finish(instanceID, diskID) })
}

// finishMove ends an attach or detach, unless the disk's state has changed since.
func (r *Rack) finishMove(instanceID, diskID, state string, do func(*instance, *disk) error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	release, err := r.lock(func() ([]string, error) {
		d := r.disks[diskID]
		if d == nil || d.State != state || d.InstanceID != instanceID {
			return nil, errNothingToDo
		}
		return []string{instanceID, diskID}, nil
	})
	if err != nil {
		return
	}
	defer release()
	if err := do(r.instances[instanceID], r.disks[diskID]); err != nil {
		r.log.Error("cannot finish an attach or detach", "disk", diskID, "instance", instanceID, "error", err)
	}
}

func (r *Rack) detach(who caller, p pair) (answer, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	i, d, release, err := r.lockPair(who, p)
	if err != nil {
		return answer{}, err
	}
	defer release()
	if err = r.checkDetach(i, d); err == nil {
		err = r.detachDisk(i, d)
	}
	if err != nil && !errors.Is(err, errNothingToDo) {
		return answer{}, err
	}
	return answer{202, d.view()}, nil
}

// checkDetach implements the detach table of docs/reference/rack.md §4, in its order.
func (r *Rack) checkDetach(i *instance, d *disk) error {
	elsewhere := d.InstanceID != i.ID
	switch {
	case d.State == diskDetached, d.State == diskDetaching && !elsewhere:
		return errNothingToDo
	case d.State == diskAttached && elsewhere:
		return invalidRequest(`cannot detach disk "%s": disk is attached to another instance`, d.Name)
	case d.State != diskAttached:
		return invalidRequest(`cannot detach disk "%s": invalid state %s`, d.Name, d.State)
	}
	boot := d.ID == i.BootDiskID
	switch {
	case i.hasVMM() && (boot || !i.canUnplug(r.settings.Load())):
		return invalidRequest("cannot detach disk: instance is not fully stopped")
	case boot && i.RunState == runFailed:
		return invalidRequest("cannot detach disk from instance in failed state")
	case boot:
		return fail(409, codeConflict, "boot disk cannot be detached")
	}
	return nil
}

func (r *Rack) detachDisk(i *instance, d *disk) error {
	set := r.settings.Load()
	if i.canUnplug(set) && set.HotplugAsync {
		err := r.changeDisk(d, func(d *disk) { d.State = diskDetaching })
		if err == nil {
			r.finishMoveLater(set, r.finishDetach, i.ID, d.ID)
		}
		return err
	}
	if err := r.unplug(i, d); err != nil {
		return err
	}
	return r.changeDisk(d, (*disk).detach)
}

func (r *Rack) finishDetach(instanceID, diskID string) {
	r.finishMove(instanceID, diskID, diskDetaching, func(i *instance, d *disk) error {
		return errors.Join(r.unplug(i, d), r.changeDisk(d, (*disk).detach))
	})
}

// freeSlot is the lowest slot without a disk.
func (i *instance) freeSlot() int {
	slot := 0
	for slices.ContainsFunc(i.disks, func(d *disk) bool { return d.Slot == slot }) {
		slot++
	}
	return slot
}

// removeDisk removes a disk from the list of the instance's disks.
func (i *instance) removeDisk(d *disk) {
	i.disks = slices.DeleteFunc(i.disks, func(other *disk) bool { return other == d })
}

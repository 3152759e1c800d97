// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/core/keylock"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
)

// attaching orders the attaches to each instance, so that two disks never take the last place and never have one
// serial. Attaches to one instance run side by side. Each first joins the others, then looks at the disks of the
// instance, and then reserves its place, which returns the disks that the others have reserved. An attach goes on only
// if these disks, together with those on the instance, leave room for its own disk. Of all disks that are attached, the
// last one to be reserved was thus checked against each other one: that one was reserved before and is returned, or its
// attach had ended before anybody had joined, thus before the look. So attaches may share a look that is under way. An
// attach for which only the reserved disks leave no room runs alone instead: those attaches may fail.
type attaching struct {
	// alone has a lock for each instance, for attaches that run alone.
	alone *keylock.Locks

	mu        sync.Mutex
	instances map[string]*attachesTo
}

// attachesTo are the attaches to one instance.
type attachesTo struct {
	// alone says that an attach runs alone, or will as soon as the others have ended. Until its end no other one joins.
	alone bool
	// joined counts the attaches that run side by side.
	joined int
	// reserved are the disks of all attaches since joined was 0, also of those that have ended.
	reserved []rack.Disk
	// look is under way, or nil.
	look *look
	// changed is closed when alone or joined becomes less.
	changed chan struct{}
}

func newAttaching() *attaching {
	return &attaching{alone: keylock.New(), instances: map[string]*attachesTo{}}
}

// lock waits until no attach to the instance is under way, and keeps others away until release is called. It waits for
// maxWait at most, or until ctx ends, and then returns false.
func (a *attaching) lock(ctx context.Context, instanceID string, maxWait time.Duration) (release func(), ok bool) {
	deadline := time.Now().Add(maxWait)
	unlock, ok := a.alone.Acquire(ctx, instanceID, maxWait)
	if !ok {
		return nil, false
	}
	a.change(instanceID, func(to *attachesTo) { to.alone = true })
	release = func() {
		a.change(instanceID, func(to *attachesTo) { to.alone = false })
		unlock()
	}
	if !a.await(ctx, instanceID, time.Until(deadline), func(to *attachesTo) bool { return to.joined == 0 }) {
		release()
		return nil, false
	}
	return release, true
}

// join waits until no attach to the instance runs alone or waits for that, and lets the caller attach disks beside
// others until leave is called, which may be called twice. It waits like lock.
func (a *attaching) join(ctx context.Context, instanceID string, maxWait time.Duration) (leave func(), ok bool) {
	ok = a.await(ctx, instanceID, maxWait, func(to *attachesTo) bool {
		if !to.alone {
			to.joined++
		}
		return !to.alone
	})
	return sync.OnceFunc(func() { a.change(instanceID, func(to *attachesTo) { to.joined-- }) }), ok
}

// look is a look at the disks of an instance. The others are valid when done is closed.
type look struct {
	done  chan struct{}
	disks []rack.Disk
	err   error
}

// beginLook returns the look at the instance that is under way, or a new one. The caller leads a new one: he looks, and
// calls endLook. He has joined.
func (a *attaching) beginLook(instanceID string) (at *look, leads bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	to := a.instances[instanceID]
	if leads = to.look == nil; leads {
		to.look = &look{done: make(chan struct{})}
	}
	return to.look, leads
}

func (a *attaching) endLook(instanceID string, at *look, disks []rack.Disk, err error) {
	a.change(instanceID, func(to *attachesTo) { to.look = nil })
	at.disks, at.err = disks, err
	close(at.done)
}

// reserve adds a disk to those that are being attached to the instance, and returns the others. The caller has joined.
func (a *attaching) reserve(instanceID string, disk rack.Disk) (others []rack.Disk) {
	a.mu.Lock()
	defer a.mu.Unlock()
	to := a.instances[instanceID]
	others = slices.Clone(to.reserved)
	to.reserved = append(to.reserved, disk)
	return others
}

// await waits until ready returns true.
func (a *attaching) await(
	ctx context.Context, instanceID string, maxWait time.Duration, ready func(*attachesTo) bool,
) bool {
	timer := time.NewTimer(maxWait)
	defer timer.Stop()
	for {
		var changed <-chan struct{}
		if a.change(instanceID, func(to *attachesTo) {
			if !ready(to) {
				changed = to.changed
			}
		}); changed == nil {
			return true
		}
		select {
		case <-changed:
		case <-timer.C:
			return false
		case <-ctx.Done():
			return false
		}
	}
}

// change changes the attaches to an instance and wakes who waits for that.
func (a *attaching) change(instanceID string, by func(*attachesTo)) {
	a.mu.Lock()
	defer a.mu.Unlock()
	to := a.instances[instanceID]
	if to == nil {
		to = &attachesTo{changed: make(chan struct{})}
		a.instances[instanceID] = to
	}
	alone, joined := to.alone, to.joined
	by(to)
	if alone && !to.alone || to.joined < joined {
		close(to.changed)
		to.changed = make(chan struct{})
	}
	if to.joined == 0 {
		to.reserved = nil
		if !to.alone {
			delete(a.instances, instanceID)
		}
	}
}

// lookBeside lists the disks of an instance to which a disk is about to be attached, together with the other attaches
// that have joined. A list that another one began may be of a time before this disk's last detach. So if the disk is on
// it, it does not count.
func (c rackController) lookBeside(ctx context.Context, disk rack.Disk, instanceID string) ([]rack.Disk, error) {
	at, leads := c.attaching.beginLook(instanceID)
	if leads {
		disks, err := c.instanceDisks(ctx, instanceID)
		c.attaching.endLook(instanceID, at, disks, err)
		return disks, err
	}
	select {
	case <-at.done:
	case <-ctx.Done():
		return nil, attachingError(ctx, instanceID)
	}
	if at.err != nil || slices.ContainsFunc(at.disks, func(on rack.Disk) bool { return on.ID == disk.ID }) {
		return c.instanceDisks(ctx, instanceID)
	}
	return at.disks, nil
}

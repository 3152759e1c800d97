// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package simrack

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"
)

// World holds the settings for what a rack may do and mostly does not. The zero value is a kind rack.
type World struct {
	// Messages is "other" for a rack whose refusals have other words and the same codes: messages are not part of the
	// versioned API.
	Messages string `json:"messages"`
	// PlugDelayMS is how long the guest lacks a disk that was attached while it ran, with hot-plug "attach-first".
	PlugDelayMS float64 `json:"plug_delay_ms"`
	// PlugFails is how many of the next such attaches fail after the disk shows attached: their answer is a 500, and the
	// guest never gets the disk. -1 means all of them.
	PlugFails int `json:"plug_fails"`
	// NoUnplug refuses to detach a disk while its instance has a virtual machine, also with hot-plug. The control endpoint
	// shows the opposite, as unplug.
	NoUnplug bool `json:"-"`
	// SnapshotMS and CreatingMS are how long a snapshot and a disk show creating.
	SnapshotMS float64 `json:"snapshot_ms"`
	CreatingMS float64 `json:"creating_ms"`
	// Pantry takes the snapshot of an attached disk of a stopped instance apart from the instance: nothing is locked, and
	// the snapshot fails if the instance starts meanwhile.
	Pantry bool `json:"pantry"`
	// SpaceReturnsMS is how long after the deletion of a disk its space returns.
	SpaceReturnsMS float64 `json:"space_returns_ms"`
	// StartRefusal makes a start show starting first and then refuses it for the quota. After "quota" the instance is
	// stopped, after "failed" it has failed.
	StartRefusal string `json:"start_refusal"`
}

// hotplugMode says whether disks can be attached to a running instance. Its JSON is a boolean, or the word.
type hotplugMode string

const (
	hotplugOff hotplugMode = ""
	hotplugOn  hotplugMode = "on"
	// hotplugAttachFirst is the prototype of 2026: the rack shows the disk as attached first, and then asks the
	// hypervisor. An instance that was booted before needs a restart.
	hotplugAttachFirst hotplugMode = "attach-first"
)

// MarshalJSON implements json.Marshaler.
func (m hotplugMode) MarshalJSON() ([]byte, error) {
	if m == hotplugAttachFirst {
		return json.Marshal(string(m))
	}
	return json.Marshal(m == hotplugOn)
}

// UnmarshalJSON implements json.Unmarshaler.
func (m *hotplugMode) UnmarshalJSON(text []byte) error {
	switch string(text) {
	case "true":
		*m = hotplugOn
	case "false":
		*m = hotplugOff
	case `"attach-first"`:
		*m = hotplugAttachFirst
	default:
		return fmt.Errorf("hotplug %s: true, false or %q", text, hotplugAttachFirst)
	}
	return nil
}

// otherMessages is the value of [World.Messages] for other words.
const otherMessages = "other"

func (w World) check() error {
	if w.Messages != "" && w.Messages != otherMessages {
		return fmt.Errorf("messages %q: empty or %s", w.Messages, otherMessages)
	}
	if !slices.Contains([]string{"", refusedForQuota, refusedAndFailed}, w.StartRefusal) {
		return fmt.Errorf("start_refusal %q: empty, %s or %s", w.StartRefusal, refusedForQuota, refusedAndFailed)
	}
	if w.PlugDelayMS < 0 || w.PlugFails < -1 || w.SnapshotMS < 0 || w.CreatingMS < 0 || w.SpaceReturnsMS < 0 {
		return errors.New("plug_delay_ms, snapshot_ms, creating_ms and space_returns_ms cannot be negative")
	}
	return nil
}

// The values of [World.StartRefusal].
const (
	refusedForQuota  = "quota"
	refusedAndFailed = "failed"
)

// inOtherWords replaces the message of a refusal. Parse errors have no code, and keep their words: they come from the
// HTTP server, not from the rack.
func (w World) inOtherWords(refusal *apiError) *apiError {
	if w.Messages != otherMessages || refusal.code == codeNone {
		return refusal
	}
	other := *refusal
	other.message = "the request was turned down"
	return &other
}

// refuseStart shows a start that the rack refuses after it has begun. The caller has locked the instance.
func (r *Rack) refuseStart(i *instance, set *settings) error {
	if err := r.setState(i, runStarting); err != nil {
		return err
	}
	r.pause(set.stateTime())
	final := runStopped
	if set.StartRefusal == refusedAndFailed {
		final = runFailed
	}
	if err := r.setState(i, final); err != nil {
		return err
	}
	return fail(507, codeCapacity, messageCPUQuota)
}

// pause waits without mu.
func (r *Rack) pause(d time.Duration) {
	if d > 0 {
		r.mu.Unlock()
		r.sleep(d)
		r.mu.Lock()
	}
}

// plugFirst attaches a disk to an instance with a virtual machine as the prototype of hot-plug does: the disk shows
// attached, then the guest gets it, or never. place puts the disk into its slot.
func (r *Rack) plugFirst(i *instance, d *disk, set *settings, place func(*disk)) error {
	if d.Type == typeLocal {
		return invalidRequest("local storage disks cannot be attached to a running instance")
	}
	if err := r.changeDisk(d, place); err != nil {
		return err
	}
	if set.PlugFails != 0 {
		left := *set
		left.PlugFails = max(-1, left.PlugFails-1)
		if set.PlugFails < 0 {
			left.PlugFails = -1
		}
		r.settings.Store(&left)
	}
	if set.PlugFails != 0 || i.RunState != runRunning || !i.plugs {
		return fail(500, codeInternal, messageInternal)
	}
	if set.PlugDelayMS == 0 {
		return r.plug(i, d)
	}
	boot, id := i.boots, i.ID
	r.runAfter(milliseconds(set.PlugDelayMS), func() {
		r.finishMove(id, d.ID, diskAttached, func(i *instance, d *disk) error {
			if i.boots != boot { // its boot has shown the disk
				return nil
			}
			return r.plug(i, d)
		})
	})
	return nil
}

// waitInPantry is the time that a snapshot of an attached disk of a stopped instance takes. Nothing is locked
// meanwhile.
func (r *Rack) waitInPantry(d *disk, set *settings) error {
	i := r.instances[d.InstanceID]
	if i == nil {
		return nil
	}
	started := func() bool { return i.hasVMM() }
	r.pause(milliseconds(set.SnapshotMS) / 2)
	if started() {
		return fail(409, codeConflict, "Pantry: possible Propolis %s", i.ID)
	}
	r.pause(milliseconds(set.SnapshotMS) / 2)
	if started() {
		return fail(500, codeInternal, messageInternal)
	}
	return nil
}

// starter is somebody who starts an instance whenever it is stopped, such as a controller of another product.
func (r *Rack) starter(id string, every time.Duration) {
	r.background.Go(func() {
		for r.sleep(every) {
			r.mu.Lock()
			i, still := r.instances[id]
			on := still && r.starters[id] == every
			if on && i.RunState == runStopped && !r.locked[id] {
				if err := r.start(i); err != nil {
					r.log.Info("a starter was refused", "instance", id, "error", err)
				}
			}
			r.mu.Unlock()
			if !on {
				return
			}
		}
	})
}

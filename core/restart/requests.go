// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package restart

import (
	"cmp"
	"context"
	"slices"
	"strings"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/record"
)

// attachRequest asks for a volume's disk to be attached to an instance.
type attachRequest struct {
	volume, instance        string
	requestedAt, repeatedAt time.Time
	// problem says what blocks this volume alone. It goes into the error of the RPC.
	problem string
	// heldBy is an instance that still has the unpublished disk and must be restarted first, or "".
	heldBy string
	// fromRestart is the ID of a restart that was taken over and that listed this volume. Such a request ends with that
	// restart, because the orchestrator may have unpublished the volume through another process. It is empty once this
	// process was asked to publish the volume itself.
	fromRestart string
	// attachFailed says that the rack did not attach the disk although the instance was stopped. No instance is
	// restarted for that disk again. The next restart that happens anyway tries it again.
	attachFailed bool
	// failedDisk is that disk, or "" if the volume had no disk then. Everything else goes by the volume.
	failedDisk rack.DiskID
}

// refusal is the last refused restart of an instance.
type refusal struct {
	since  time.Time
	reason string
}

// forgetUnseen forgets records that were deleted and refusals that are over.
func (e *Engine) forgetUnseen(records recordSet) {
	for id := range e.lastSeen {
		if !slices.ContainsFunc(records.restarts, func(r record.Restart) bool { return r.Stored.ID == id }) {
			delete(e.lastSeen, id)
		}
	}
	for instance, r := range e.refusals {
		if e.clock.Passed(timerRefusal, instance, r.since, e.opts.CoolDown) {
			delete(e.refusals, instance)
		}
	}
}

// expireRequests ends requests that were not repeated, and those that came with a restart that is over.
func (e *Engine) expireRequests() {
	e.mu.Lock()
	repeated := map[string]time.Time{}
	for volume, request := range e.requests {
		if request.fromRestart != "" && e.held[request.fromRestart] == nil {
			delete(e.requests, volume)
			continue
		}
		repeated[volume] = request.repeatedAt
	}
	e.mu.Unlock()
	for _, volume := range sortedKeys(repeated) {
		if e.clock.Passed(timerRequest, volume, repeated[volume], requestLifetime) {
			e.expireRequest(volume, repeated[volume])
		}
	}
}

// expireRequest ends a request that was not repeated since then.
func (e *Engine) expireRequest(volume string, since time.Time) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if request := e.requests[volume]; request != nil && request.repeatedAt.Equal(since) {
		delete(e.requests, volume)
	}
}

// requestsFor returns copies of the attach requests for an instance, the oldest first.
func (e *Engine) requestsFor(instance string) []attachRequest {
	return slices.DeleteFunc(e.allRequests(), func(request attachRequest) bool { return request.instance != instance })
}

// allRequests returns copies of all attach requests, the oldest first.
func (e *Engine) allRequests() []attachRequest {
	e.mu.Lock()
	defer e.mu.Unlock()
	all := make([]attachRequest, 0, len(e.requests))
	for _, request := range e.requests {
		all = append(all, *request)
	}
	slices.SortFunc(all, func(x, y attachRequest) int {
		return cmp.Or(x.requestedAt.Compare(y.requestedAt), strings.Compare(x.volume, y.volume))
	})
	return all
}

// notifyWaiters wakes callers that wait for [Engine.Changed].
func (e *Engine) notifyWaiters() {
	e.mu.Lock()
	defer e.mu.Unlock()
	close(e.changed)
	e.changed = make(chan struct{})
}

// notifyEnded wakes waiting callers if a restart ended. Only the records show the end of another process's restart.
func (e *Engine) notifyEnded(records recordSet) {
	now := map[string]bool{}
	for _, r := range records.restarts {
		now[r.ID] = true
	}
	e.mu.Lock()
	over := false
	for id := range e.watched {
		over = over || !now[id]
	}
	e.watched = now
	e.mu.Unlock()
	if over {
		e.notifyWaiters()
	}
}

// watchEnd notes that a caller may wait for the end of a restart.
func (e *Engine) watchEnd(r record.Restart) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.watched[r.ID] = true
}

// recordAttachFailure notes that a restart could not attach this disk of the volume.
func (e *Engine) recordAttachFailure(volume string, disk rack.DiskID, problem string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if request := e.requests[volume]; request != nil {
		request.problem, request.attachFailed, request.failedDisk = problem, true, disk
	}
}

// noteUnplugged records that the guest of an instance may lack the disk which the rack has just failed to attach: a
// rack with hot-plug may show a disk as attached before it asks the hypervisor. It reports whether that is so.
func (e *Engine) noteUnplugged(ctx context.Context, volume, instance string) (unplugged bool, err error) {
	disk, err := e.rack.Disk(ctx, volume)
	if err != nil || disk.InstanceID != instance {
		return false, err
	}
	on, err := e.rack.Instance(ctx, instance)
	if err != nil || on.RunState == rack.Stopped {
		return false, err
	}
	return true, e.opts.Detacher.NoteNoDevice(ctx, volume, instance, on.RunStateSince)
}

// stillUnplugged reports whether the instance still is in the run whose guest may lack the volume's disk.
func (e *Engine) stillUnplugged(ctx context.Context, volume, instance string, records recordSet) (bool, error) {
	noted, _ := records.deferred.Recorded(volume)
	if noted.NoDevice.IsZero() || noted.Instance != instance {
		return false, nil
	}
	on, err := e.rack.Instance(ctx, instance)
	return err == nil && on.RunState != rack.Stopped && on.RunStateSince.Equal(noted.NoDevice), err
}

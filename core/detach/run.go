// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package detach

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"slices"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/record"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

const (
	// maxPause is the longest time between two looks at the records. They show the detaches that a process deferred which
	// has ended since.
	maxPause = 30 * time.Second
	// failedPause is the time until the next look after an error.
	failedPause = 5 * time.Second
	// refusalBackoff is how long a detach is not tried again after the rack refused it because the instance runs.
	refusalBackoff = 10 * time.Minute
)

// States of an instance in which no guest can use a disk (docs/reference/rack.md §5).
var withoutGuest = []string{rack.Stopped, rack.Failed, "destroyed"}

// WithoutGuest reports whether the instance has no guest that could use a disk.
func WithoutGuest(instance rack.Instance) bool {
	return slices.Contains(withoutGuest, instance.RunState)
}

// Run carries out deferred detaches until ctx ends. It returns when all detaches that have begun are finished. It
// returns at once if [Options.Grace] is 0.
func (d *Detacher) Run(ctx context.Context) {
	if d.opts.Grace == 0 {
		return
	}
	defer d.end()
	reported := ""
	for ctx.Err() == nil {
		next, err := d.lookOnce(ctx)
		switch {
		case err == nil:
			reported = ""
		case ctx.Err() == nil && err.Error() != reported:
			reported = err.Error()
			d.opts.Log.Warn("cannot detach the disks of unpublished volumes, retrying", "error", reported)
		}
		timer := time.NewTimer(next)
		select {
		case <-timer.C:
		case <-d.wake:
		case <-ctx.Done():
		}
		timer.Stop()
	}
}

// lookOnce carries out what is due, and returns the time until the next look. An error of one volume does not stop the
// others, and a panic ends one look: disks would stay attached for the life of the process.
func (d *Detacher) lookOnce(ctx context.Context) (next time.Duration, err error) {
	defer func() {
		if reason := recover(); reason != nil {
			rpc.LogPanic(d.opts.Log, slog.String("task", "deferred detaches"), reason)
			next, err = failedPause, nil
		}
	}()
	defer func() {
		if err != nil {
			next = min(next, failedPause)
		}
	}()
	records, err := d.rack.Records(ctx)
	if err != nil {
		return maxPause, err
	}
	set := Parse(records, d.opts.Cluster)
	failed := d.Tidy(ctx, set)
	restarting := d.opts.Restarting(records)
	next = maxPause
	running := map[string]bool{}          // by instance
	due := map[string][]record.Deferral{} // by instance
	for _, volumeID := range set.Volumes() {
		deferred := set.records[volumeID]
		if restarting(deferred.Instance) {
			continue
		}
		wait, err := d.untilDue(ctx, deferred, running)
		failed = errors.Join(failed, err)
		switch {
		case err == nil && wait == 0:
			due[deferred.Instance] = append(due[deferred.Instance], deferred)
		case wait > 0:
			next = min(next, wait)
		}
	}
	for _, instanceID := range slices.Sorted(maps.Keys(due)) {
		staying := d.Staying(ctx, due[instanceID])
		for _, deferred := range due[instanceID] {
			failed = errors.Join(failed, d.carryOut(ctx, deferred, staying[deferred.VolumeID], running[instanceID]))
		}
	}
	return next, failed
}

// Tidy removes the records of detaching processes that have ended, and drops what is known of records that are gone.
// The set must come from a list that was read just now.
func (d *Detacher) Tidy(ctx context.Context, set Set) error {
	d.forgetUnseen(set)
	var failed error
	for _, volumeID := range slices.Sorted(maps.Keys(set.detaching)) {
		c := set.detaching[volumeID]
		if d.sinceSeen(c.Stored.ID, "") >= detachingLifetime || d.isAbandoned(c.Holder) {
			failed = errors.Join(failed, d.delete(ctx, c.Stored.ID))
		}
	}
	return failed
}

// untilDue returns the time until something has to be done for a deferred detach. 0 means now. Without a guest that
// uses the disk, a detach is safe before its time. running holds what this look at the records has learned of the
// instances.
func (d *Detacher) untilDue(
	ctx context.Context,
	deferred record.Deferral,
	running map[string]bool,
) (time.Duration, error) {
	if deferred.Over {
		return maxPause, d.expireOld(ctx, deferred)
	}
	left := d.Left(deferred)
	timeless := deferred.Untimed && !d.Asks() || d.refusedLately(deferred.Stored.ID)
	if !deferred.Untimed && !timeless && left == 0 {
		return 0, nil
	}
	if !running[deferred.Instance] { // a stopped instance is read again: it may have been started since
		runs, err := d.runs(ctx, deferred.Instance)
		if err != nil {
			return maxPause, err
		}
		running[deferred.Instance] = runs
	}
	switch {
	case !running[deferred.Instance]:
		return 0, nil
	case timeless:
		return maxPause, nil
	}
	return left, nil
}

// expireOld deletes a record that has been over for long enough. A disk without a device waits for its publish.
func (d *Detacher) expireOld(ctx context.Context, deferred record.Deferral) error {
	if !deferred.NoDevice.IsZero() || d.sinceSeen(deferred.Stored.ID, deferred.Stored.Text) < repetitionTime {
		return nil
	}
	return unlessGaveWay(d.expire(ctx, deferred))
}

// carryOut does what is due for a deferred detach, after the claims were asked. stays is why the disk stays attached,
// or nil. An untimed deferred detach gets its time, unless its instance has no guest.
func (d *Detacher) carryOut(ctx context.Context, deferred record.Deferral, stays error, runs bool) error {
	var err error
	switch {
	case stays != nil:
		err = d.drop(ctx, deferred, stays)
	case deferred.Untimed && runs:
		_, err = d.startClock(ctx, deferred)
		d.wakeUp()
	default:
		err = d.detachListed(ctx, deferred, d.detachNow)
	}
	if errors.Is(err, rack.ErrNotStopped) {
		d.noteRefusal(deferred)
		return nil
	}
	return unlessGaveWay(err)
}

// gaveWay reports whether an error says that another process works on the deferred detach, or that it has changed.
func gaveWay(err error) bool { return errors.Is(err, ErrDetaching) || errors.Is(err, ErrNotDeferred) }

func unlessGaveWay(err error) error {
	if gaveWay(err) {
		return nil
	}
	return err
}

// runs reports whether an instance may have a guest. An instance that was deleted has none.
func (d *Detacher) runs(ctx context.Context, instanceID string) (bool, error) {
	instance, err := d.rack.Instance(ctx, instanceID)
	if errors.Is(err, rack.ErrNotFound) {
		return false, d.rack.ConfirmProject(ctx)
	}
	return !WithoutGuest(instance), err
}

func (d *Detacher) refusedLately(recordID string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	at, refused := d.refused[recordID]
	return refused && time.Since(at) < refusalBackoff
}

func (d *Detacher) noteRefusal(deferred record.Deferral) {
	d.mu.Lock()
	_, known := d.refused[deferred.Stored.ID]
	d.refused[deferred.Stored.ID] = time.Now()
	d.mu.Unlock()
	if !known {
		d.opts.Log.Info(
			"the disk of an unpublished volume stays attached: this rack detaches disks only while the instance is stopped",
			"volume_id", deferred.VolumeID, "node_id", deferred.Instance,
		)
	}
}

// forgetUnseen drops what is known of records that are gone.
func (d *Detacher) forgetUnseen(set Set) {
	there := map[string]bool{}
	for _, deferred := range set.records {
		there[deferred.Stored.ID] = true
	}
	for _, c := range set.detaching {
		there[c.Stored.ID] = true
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for id, s := range d.seen {
		// A record that was created after the list was read is not in it.
		if !there[id] && time.Since(s.Since) > maxPause {
			delete(d.seen, id)
			delete(d.refused, id)
			delete(d.stays, id)
		}
	}
	maps.DeleteFunc(d.abandoned, func(_ string, at time.Time) bool { return time.Since(at) > detachingLifetime })
	maps.DeleteFunc(d.deleting, func(id string, _ bool) bool { return !there[id] })
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package detach

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/core/fault"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/record"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// Rack is the part of [rack.Client] that a [Detacher] uses.
type Rack interface {
	Disk(ctx context.Context, id string) (rack.Disk, error)
	WaitForDisk(ctx context.Context, disk rack.Disk, maxWait time.Duration) (rack.Disk, error)
	Instance(ctx context.Context, id string) (rack.Instance, error)
	Detach(ctx context.Context, diskID rack.DiskID, instanceID string) (rack.Disk, error)
	ConfirmProject(ctx context.Context) error

	Records(ctx context.Context) ([]record.Record, error)
	CreateRecord(ctx context.Context, name, text string) (record.Record, error)
	RecordNamed(ctx context.Context, name string) (r record.Record, found bool, err error)
	UpdateRecord(ctx context.Context, id, text string) (found bool, err error)
	DeleteRecord(ctx context.Context, id string) error
}

var (
	// ErrDetaching says that a process is detaching the disk now.
	ErrDetaching = fault.DetachDeferred.New("the disk is being detached")
	// ErrRestarting says that a restart of another instance may be attaching the disk there.
	ErrRestarting = errors.New("the disk belongs to the restart of another instance")
	// ErrNotDeferred says that the detach is not deferred any more: the volume was published again, or another process
	// has detached the disk.
	ErrNotDeferred = errors.New("the detach is not deferred any more")
	// errBeingChanged says that a process has held the volume's detaching record for a long time.
	errBeingChanged = errors.New("the record of the deferred detach is being changed")
	// errUnanswered says that the rack may have done what it was asked for under the detaching record, or may still do so.
	errUnanswered = errors.New("the rack has not responded yet")
)

// MaxWait is how long an RPC of an orchestrator waits at one point for the detach of a disk. Nomad sends one RPC at a
// time for all volumes of a cluster.
const MaxWait = 5 * time.Second

const (
	// repetitionTime is how long a deferred detach that is over is remembered. Nomad repeats the unpublish of an old
	// allocation when that allocation's client comes back, and when it collects the allocation's claim (each 5 minutes).
	repetitionTime = 10 * time.Minute
	// detachTime limits the steps up to the request that is made under a detaching record. core/rack waits up to 30 s more
	// for the rack's answer.
	detachTime = 30 * time.Second
	// endTime is the least time for the request that records the end of a detach. core/rack waits up to 30 s more again,
	// which is still within detachingLifetime.
	endTime = 10 * time.Second
	// A process that uses a record again which was over looks so often, and with this pause, whether another process is
	// deleting it. That takes two calls of the rack.
	keptLooks = 10
	keptPause = time.Second
	// detachingLifetime is how long such a record counts if its holder does not remove it. No holder takes that long.
	detachingLifetime = 2 * time.Minute
)

// Options configure a [Detacher].
type Options struct {
	// Cluster distinguishes clusters that share a project.
	Cluster string
	// Grace is the time from the deferral to the detach. 0 means that no deferred detach has a time of its own, and that
	// those that are over are not remembered.
	Grace time.Duration
	// Restarting returns a function that reports whether a planned restart of an instance is under way. Its argument are
	// all records of the rack. Nil means that there are no planned restarts.
	Restarting func([]record.Record) func(instanceID string) bool
	// Claimed asks the orchestrator which of the volumes a workload on the instance may use. It returns a text about the
	// claim on each of them, and an error if the answer is not certain. Nil means that there is no orchestrator to ask.
	Claimed func(ctx context.Context, instanceID string, volumeIDs []string) (map[string]string, error)
	Log     *slog.Logger
}

// Detacher keeps the deferred detaches of one rack and carries them out. It is safe for concurrent use.
type Detacher struct {
	rack Rack
	opts Options
	// wake ends the wait between two looks at the records.
	wake chan struct{}
	// running counts the detaches that may go on without their callers. Nothing is added after ended.
	running sync.WaitGroup

	mu    sync.Mutex
	ended bool
	// seen is since when the records have their text, by record ID.
	seen map[string]record.Seen
	// refused is when the rack last refused to detach a disk because its instance runs, by record ID.
	refused map[string]time.Time
	// stays is why a disk stays attached although its detach is due, by record ID.
	stays map[string]stay
	// deleting has the IDs of records whose deletion was not answered: the rack may delete them at any moment.
	deleting map[string]bool
	// abandoned has the detaching records under which nothing is done, by their holders, and since when: their creation
	// was not answered, or they could not be deleted. The rack may have them.
	abandoned map[string]time.Time
}

// New returns a detacher. It carries nothing out by itself until [Detacher.Run].
func New(r Rack, opts Options) *Detacher {
	if opts.Restarting == nil {
		opts.Restarting = noRestart
	}
	return &Detacher{
		rack:      r,
		opts:      opts,
		wake:      make(chan struct{}, 1),
		seen:      map[string]record.Seen{},
		refused:   map[string]time.Time{},
		stays:     map[string]stay{},
		deleting:  map[string]bool{},
		abandoned: map[string]time.Time{},
	}
}

// Timed reports whether deferred detaches are carried out when a time has passed.
func (d *Detacher) Timed() bool { return d.opts.Grace > 0 }

// Left returns the rest of the grace period. For an untimed deferred detach it is the time until [Detacher.Run] asks
// for the claims, if there is an orchestrator to ask.
func (d *Detacher) Left(deferred record.Deferral) time.Duration {
	return max(0, d.opts.Grace-d.sinceSeen(deferred.Stored.ID, deferred.Stored.Text))
}

// Detach carries out the deferred detach of a volume's disk from an instance, whatever is left of its grace period. It
// returns [ErrDetaching] or [ErrNotDeferred] if it gave way, [ErrClaimed] or [ErrClaimsUnknown] if a workload may use
// the volume, and [rack.ErrNotStopped] if the rack detaches disks only while the instance is stopped.
func (d *Detacher) Detach(ctx context.Context, volumeID, instanceID string) error {
	return d.hold(ctx, volumeID, func(ctx context.Context) error {
		set, err := d.List(ctx)
		if err != nil {
			return err
		}
		if err := set.Check(volumeID); err != nil {
			return err
		}
		deferred, ok := set.Of(volumeID, instanceID)
		if !ok {
			return fmt.Errorf("volume %s: %w", volumeID, ErrNotDeferred)
		}
		return d.detachUnclaimed(ctx, deferred)
	})
}

// DetachWithin is [Detacher.Detach] for a caller that waits no longer than maxWait, and for a deferred detach as it was
// listed. If the rack takes longer, the error is [ErrDetaching], and what has begun goes on without the caller.
//
// The caller's volume may be locked only as long as it waits. The record that this process is detaching the disk keeps
// later RPCs away, and it may be created only after the caller has left. So the deferred detach must be as it was.
func (d *Detacher) DetachWithin(ctx context.Context, maxWait time.Duration, listed record.Deferral) error {
	return d.within(ctx, maxWait, listed, d.detachUnclaimed)
}

// within is [Detacher.DetachWithin] with one of detachUnclaimed and detachNow.
func (d *Detacher) within(
	ctx context.Context,
	maxWait time.Duration,
	listed record.Deferral,
	detach func(context.Context, record.Deferral) error,
) error {
	timer := time.NewTimer(maxWait)
	defer timer.Stop()
	ended, left := make(chan error), make(chan struct{})
	defer close(left)
	done := d.begin()
	go func() {
		defer done()
		err := d.detachOrLog(ctx, listed, detach)
		select {
		case ended <- err:
		case <-left:
			if err != nil && !gaveWay(err) {
				d.opts.Log.Warn("a detach that took long has failed",
					"volume_id", listed.VolumeID, "node_id", listed.Instance, "error", err.Error())
			}
		}
	}()
	select {
	case err := <-ended:
		return err
	case <-timer.C:
		return fmt.Errorf("volume %s: %w", listed.VolumeID, ErrDetaching)
	case <-ctx.Done():
		return ctx.Err()
	}
}

// begin notes that a detach begins that may go on without its caller. [Detacher.Run] waits for it, if it runs.
func (d *Detacher) begin() (done func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.ended {
		return func() {}
	}
	d.running.Add(1)
	return d.running.Done
}

// end waits for the detaches that have begun.
func (d *Detacher) end() {
	d.mu.Lock()
	d.ended = true
	d.mu.Unlock()
	d.running.Wait()
}

// detachOrLog is detachListed, and recovers a panic. After a panic the volume's detaching record may still be on the
// rack.
func (d *Detacher) detachOrLog(
	ctx context.Context, listed record.Deferral, detach func(context.Context, record.Deferral) error,
) (err error) {
	defer func() {
		if reason := recover(); reason != nil {
			rpc.LogPanic(d.opts.Log, slog.String("task", "deferred detach"), reason)
			err = fmt.Errorf("volume %s: %w", listed.VolumeID, ErrDetaching)
		}
	}()
	return d.detachListed(ctx, listed, detach)
}

// detachListed carries out a deferred detach as it was listed. With another text it may be untimed, or belong to a
// later use of the volume.
func (d *Detacher) detachListed(
	ctx context.Context, listed record.Deferral, detach func(context.Context, record.Deferral) error,
) error {
	return d.holdListed(ctx, listed, func(ctx context.Context) error { return detach(ctx, listed) })
}

// DetachNow defers the detach of a volume's disk from an instance and carries it out at once, with the errors of
// [Detacher.DetachWithin]. Only a person waits longer than [MaxWait]: vouched says that one asks, as for
// [Detacher.DeferVouched]. Where deferred detaches are timed, the record stays: an unpublish soon after the volume has
// come back may then be the repetition of this one. The claims are not asked: the orchestrator releases its claim only
// when the request has succeeded, and a person has confirmed that the volume is not in use.
func (d *Detacher) DetachNow(ctx context.Context, volumeID, instanceID string, vouched bool) error {
	change := d.untimedIfRepeated
	if vouched {
		change = timed
	}
	deferred, err := d.put(ctx, record.Deferral{VolumeID: volumeID, Instance: instanceID}, noRestart, change)
	switch {
	case err != nil:
		return err
	case vouched:
		return d.detachListed(ctx, deferred, d.detachNow)
	}
	return d.within(ctx, MaxWait, deferred, d.detachNow)
}

// holdListed is hold for a record that was listed before. [ErrNotDeferred] means that it has changed since.
func (d *Detacher) holdListed(ctx context.Context, listed record.Deferral, do func(ctx context.Context) error) error {
	return d.hold(ctx, listed.VolumeID, func(ctx context.Context) error {
		set, err := d.List(ctx)
		if err != nil {
			return err
		}
		if !set.records[listed.VolumeID].Unchanged(listed) {
			return fmt.Errorf("volume %s: %w", listed.VolumeID, ErrNotDeferred)
		}
		return do(ctx)
	})
}

// hold does something while this process has the volume's detaching record. [ErrDetaching] means that another one has
// it. What has begun is finished also if the caller leaves: the record of an unfinished detach holds all publishes up
// for its lifetime.
func (d *Detacher) hold(ctx context.Context, volumeID string, do func(ctx context.Context) error) error {
	deadline := time.Now().Add(detachTime)
	creating, cancel := context.WithDeadline(ctx, deadline)
	defer cancel()
	mine := record.Hold{Cluster: d.opts.Cluster, VolumeID: volumeID, Holder: uuid.NewString()}
	made, err := record.Holds.Create(creating, d.rack, mine)
	if errors.Is(err, rack.ErrAlreadyExists) {
		return fmt.Errorf("volume %s: %w", volumeID, ErrDetaching)
	}
	if err != nil {
		d.abandon(mine.Holder)
		return err
	}
	begun, cancelBegun := context.WithDeadline(context.WithoutCancel(ctx), deadline)
	defer cancelBegun()
	err = do(begun)
	if errors.Is(err, errUnanswered) {
		return err // the rack may still do it, so the record stays for its lifetime
	}
	after, cancelAfter := context.WithTimeout(context.WithoutCancel(ctx), detachTime)
	defer cancelAfter()
	removed := d.delete(after, made.Stored.ID)
	if removed != nil {
		d.abandon(mine.Holder)
	}
	return errors.Join(err, removed)
}

// detachNow detaches a volume's disk after this process has recorded that. deferred was read afterwards.
func (d *Detacher) detachNow(ctx context.Context, deferred record.Deferral) error {
	volumeID, instanceID := deferred.VolumeID, deferred.Instance
	disk, err := d.rack.Disk(ctx, volumeID)
	if errors.Is(err, rack.ErrReplaced) {
		return d.End(ctx, deferred) // a volume without a disk is attached nowhere
	}
	if errors.Is(err, rack.ErrNotFound) {
		if err := d.rack.ConfirmProject(ctx); err != nil {
			return err
		}
		return d.delete(ctx, deferred.Stored.ID)
	}
	if err != nil {
		return err
	}
	if disk.InstanceID == instanceID {
		if disk, err = d.rack.Detach(ctx, disk.ID, instanceID); err != nil {
			answered := errors.Is(err, rack.ErrRefused) || errors.Is(err, rack.ErrBusy) || errors.Is(err, rack.ErrNotFound)
			if !answered {
				err = fmt.Errorf("%w: %w", errUnanswered, err)
			}
			return err
		}
		// The rack has accepted the detach. Until it is seen to be done, no publish may rely on the disk.
		// A volume without a disk is attached nowhere, also then.
		disk, err = d.rack.WaitForDisk(ctx, disk, detachTime)
		if err != nil && !errors.Is(err, rack.ErrReplaced) {
			return fmt.Errorf("%w: %w", errUnanswered, err)
		}
		if disk.InstanceID == instanceID {
			return fmt.Errorf("%w: disk %q (%s) is still attached to instance %s: %w",
				errUnanswered, disk.Name, disk.ID, instanceID, rack.ErrBusy)
		}
		d.opts.Log.Info("detached the disk of an unpublished volume", "volume_id", volumeID, "node_id", instanceID)
	}
	// The time may be used up by now, and an unfinished detach would hold publishes up.
	if deadline, ok := ctx.Deadline(); ok && time.Until(deadline) < endTime {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(context.WithoutCancel(ctx), endTime)
		defer cancel()
	}
	if err := d.End(ctx, deferred); err != nil {
		return fmt.Errorf("%w: %w", errUnanswered, err) // it may still overwrite what an unpublish records
	}
	return nil
}

// update changes a record from old to now, and counts the change. It returns false if the record was deleted.
func (d *Detacher) update(ctx context.Context, old record.Deferral, now *record.Deferral) (updated bool, err error) {
	now.Changes, now.Stored = old.Changes+1, old.Stored
	*now, updated, err = record.Deferrals.Replace(ctx, d.rack, *now)
	if updated && err == nil {
		d.sinceSeen(now.Stored.ID, now.Stored.Text)
	}
	return updated && err == nil, err
}

// delete deletes a record. It succeeds if the record was deleted before.
func (d *Detacher) delete(ctx context.Context, recordID string) error {
	err := d.rack.DeleteRecord(ctx, recordID)
	if err != nil {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.deleting[recordID] = true
	}
	return err
}

// abandon makes [Detacher.Tidy] remove a detaching record as soon as it sees the record.
func (d *Detacher) abandon(holder string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.abandoned[holder] = time.Now()
}

func (d *Detacher) isAbandoned(holder string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	_, abandoned := d.abandoned[holder]
	return abandoned
}

// mayVanish reports whether the rack may still delete the record although this process does not ask for it now.
func (d *Detacher) mayVanish(recordID string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.deleting[recordID]
}

// sinceSeen returns how long this process has known a record with this text.
func (d *Detacher) sinceSeen(recordID, text string) time.Duration {
	d.mu.Lock()
	defer d.mu.Unlock()
	s, ok := d.seen[recordID]
	if !ok || s.Text != text {
		s = record.Seen{Text: text, Since: time.Now()}
		d.seen[recordID] = s
	}
	return time.Since(s.Since)
}

// wakeUp makes Run look at the records at once.
func (d *Detacher) wakeUp() {
	select {
	case d.wake <- struct{}{}:
	default:
	}
}

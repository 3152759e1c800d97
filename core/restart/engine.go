// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package restart

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/core/detach"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/record"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
)

// Rack is the part of [rack.Client] that an [Engine] uses.
type Rack interface {
	Disk(ctx context.Context, id string) (rack.Disk, error)
	Disks(ctx context.Context, from rack.Cursor, wanted int) iter.Seq2[rack.ListItem[rack.Disk], error]
	Instance(ctx context.Context, id string) (rack.Instance, error)
	Instances(ctx context.Context) ([]rack.Instance, error)
	InstanceDisks(ctx context.Context, id string) ([]rack.Disk, error)
	Attach(ctx context.Context, diskID rack.DiskID, instanceID string) (rack.Disk, error)
	Detach(ctx context.Context, diskID rack.DiskID, instanceID string) (rack.Disk, error)
	WaitForDisk(ctx context.Context, disk rack.Disk, maxWait time.Duration) (rack.Disk, error)
	StopInstance(ctx context.Context, id string) error
	StartInstance(ctx context.Context, id string) (rack.Instance, error)
	ConfirmProject(ctx context.Context) error

	Records(ctx context.Context) ([]record.Record, error)
	CreateRecord(ctx context.Context, name, text string) (record.Record, error)
	RecordNamed(ctx context.Context, name string) (r record.Record, found bool, err error)
	UpdateRecord(ctx context.Context, id, text string) (found bool, err error)
	DeleteRecord(ctx context.Context, id string) error
}

// Shutdown says how an instance is stopped.
type Shutdown string

const (
	// Guest has the node plugin shut its guest down from inside.
	Guest Shutdown = "guest"
	// Drain moves the workloads off the node first, then continues like Guest.
	Drain Shutdown = "drain"
	// Hard has the rack stop the instance, which is a power cut.
	Hard Shutdown = "hard"
)

// Options configure an [Engine].
type Options struct {
	// Cluster distinguishes clusters that share a project.
	Cluster string
	// MaxDisks is how many disks an instance can have, its boot disk included.
	MaxDisks int
	Shutdown Shutdown
	// Requester reaches the node plugins. It may be nil if Shutdown is Hard. Drainer may be nil unless Shutdown is Drain.
	Requester orchestrator.RestartRequester
	Drainer   orchestrator.Drainer
	// Self returns the instance that this process runs on, or "" if it runs on none. False means that the instance is
	// not known yet. A nil Self means that the process runs on none.
	Self func() (instanceID string, known bool)
	// Window is how long attach requests for an instance are collected, counted from the first one.
	Window time.Duration
	// MaxDown is how many instances may be down at once. With 0 no restart begins, see [Engine.CleanUp].
	MaxDown int
	// CoolDown is how long an instance is left alone after its run state changed, and after a restart of it was
	// refused.
	CoolDown time.Duration
	// NextStart returns the first time, at or after the given one, at which a restart may start. Nil means at any time.
	NextStart func(time.Time) time.Time
	// HaltTimeout limits the time from a guest's acceptance until its instance has stopped, and the time for a drain.
	HaltTimeout time.Duration
	// Detacher keeps the deferred detaches. Nil means one without a grace period.
	Detacher *detach.Detacher
	// Yield is called for an attached disk, with all records of the rack, which were read after it was attached: before
	// its instance starts, and before its volume counts as published. [rack.ErrRefused] means that the disk is being
	// replaced and was detached again, [rack.ErrNotStopped] that it could not be detached. It may be nil.
	Yield func(ctx context.Context, disk rack.Disk, records []record.Record) error
	// LockInstance locks an instance while the engine looks at its disks and attaches another one, so that no RPC attaches
	// one at the same time. A caller of [Engine.Publish] holds the lock already. Nil means no lock.
	LockInstance func(ctx context.Context, instanceID string) (release func(), err error)
	// Poll is the interval while a restart is under way, Idle the interval otherwise. 0 means the default.
	Poll, Idle time.Duration
	// Lease is how long a holder may leave its record unchanged before another process takes over. 0 means the default.
	Lease time.Duration
	// Observe receives measurements. It may be nil.
	Observe func(Observation)
	Log     *slog.Logger
}

const (
	defaultPoll  = 2 * time.Second
	defaultIdle  = 10 * time.Second
	defaultLease = time.Minute
	// replyTimeout limits the wait for a node plugin's reply.
	replyTimeout = time.Minute
	// backTimeout limits the wait for a node plugin after the start of its instance, and then the wait for an
	// orchestrator that does not accept the end of the request.
	backTimeout = 5 * time.Minute
	// stuckInterval is the time between two attempts to finish a stuck restart.
	stuckInterval = 30 * time.Second
	// requestOutdated is the age from which no node plugin accepts a request: two hours by the guest's clock
	// (core/shutdown), and an hour for the difference of the clocks.
	requestOutdated = 3 * time.Hour
	// applyTimeout limits the retries of disk changes that the rack does not answer.
	applyTimeout = time.Minute
	// downTimeout is how long an instance that was stopped for a restart stays down at most. Then it is started whatever
	// else has failed.
	downTimeout = 80 * time.Second
	// unseenTimeout is how long an instance that may be down is not seen before it is started unseen, and then the time
	// between two such starts.
	unseenTimeout = 40 * time.Second
	// handoverTimeout limits the wait for another process to take over the restart of this process's own instance.
	handoverTimeout = 2 * time.Minute
	// sweepInterval is the time between searches for records about deleted disks. The first search is at the start.
	sweepInterval = time.Hour
	// requestLifetime is how long an attach request lives after its last repetition.
	requestLifetime = 10 * time.Minute
)

// Engine plans and carries out the restarts of one rack's instances. It is safe for concurrent use.
type Engine struct {
	rack         Rack
	opts         Options
	orchestrator carrier
	clock        clock
	holder       string
	// newID returns the ID of a new restart.
	newID func() string
	// wake ends the wait between two ticks.
	wake chan struct{}
	// retiring is closed by Retire: Run hands its restarts over and ends. retired is closed when Run has ended.
	retiring, retired chan struct{}
	retire            sync.Once
	// refusesHot says that the rack last refused to attach or detach a disk because its instance runs.
	refusesHot atomic.Bool
	// refusesPlug is the same for an attach.
	refusesPlug atomic.Bool

	mu sync.Mutex
	// requests are the attach requests, by volume.
	requests map[string]*attachRequest
	// locked are the volumes that a call is working on. The channel is closed at the end of the call.
	locked map[string]chan struct{}
	// changed is closed when a disk was attached or a restart ended, and then replaced.
	changed chan struct{}
	// watched are the IDs of the restarts, held by any process, whose end callers may wait for.
	watched map[string]bool
	// statuses are those of the instances that need a restart or are being restarted.
	statuses restartStatuses

	// Only tick uses the fields below.

	// held are the restarts that this process holds, by ID.
	held map[string]*heldRestart
	// lastSeen has the text of other processes' records and since when it is unchanged, by record ID.
	lastSeen map[string]record.Seen
	// lastSweep is when records about deleted disks were last searched for.
	lastSweep time.Time
	// refusals are the instances that are left alone after a refused restart.
	refusals map[string]refusal
	// lastFailure is when a tick last failed. After that the rack may still carry out a call that it did not answer.
	lastFailure time.Time
	// longList says that a list of all disks took too long.
	longList bool
}

// New returns an engine. The engine is idle until [Engine.Run].
func New(r Rack, opts Options) *Engine {
	if opts.Poll == 0 {
		opts.Poll = defaultPoll
	}
	if opts.Idle == 0 {
		opts.Idle = defaultIdle
	}
	if opts.Lease == 0 {
		opts.Lease = defaultLease
	}
	if opts.Detacher == nil {
		opts.Detacher = detach.New(r, detach.Options{
			Cluster:    opts.Cluster,
			Restarting: func(records []record.Record) func(string) bool { return record.Restarting(records, opts.Cluster) },
			Log:        opts.Log,
		})
	}
	return &Engine{
		rack:         r,
		opts:         opts,
		orchestrator: carrier{opts.Requester, opts.Drainer},
		clock:        wallClock{},
		holder:       newID(),
		newID:        func() string { return orchestrator.NewRestartID(time.Now()) },
		wake:         make(chan struct{}, 1),
		retiring:     make(chan struct{}),
		retired:      make(chan struct{}),
		requests:     map[string]*attachRequest{},
		locked:       map[string]chan struct{}{},
		changed:      make(chan struct{}),
		watched:      map[string]bool{},
		statuses:     restartStatuses{},
		held:         map[string]*heldRestart{},
		lastSeen:     map[string]record.Seen{},
		refusals:     map[string]refusal{},
	}
}

// newID returns a random ID.
func newID() string {
	return strings.ReplaceAll(uuid.NewString(), "-", "")[:16]
}

// ownInstance reports whether this process runs on the instance, and whether it knows where it runs.
func (e *Engine) ownInstance(instance string) (own, known bool) {
	if e.opts.Self == nil {
		return false, true
	}
	id, known := e.opts.Self()
	return known && id == instance, known
}

// Run works until ctx ends or [Engine.Retire] is called. Call it once. When ctx ends, a restart that is under way is
// left to the process that reads its record after the lease: another replica, or this plugin after its next start.
func (e *Engine) Run(ctx context.Context) {
	defer close(e.retired)
	for ctx.Err() == nil {
		timer := time.NewTimer(e.runOnce(ctx))
		select {
		case <-timer.C:
		case <-e.wake:
		case <-e.retiring:
		case <-ctx.Done():
		}
		timer.Stop()
		select {
		case <-e.retiring:
			e.handOverAll(ctx)
			return
		default:
		}
	}
}

// Retire makes Run hand over its restarts and end, before its next tick. The process that reads the records continues
// at once and does not wait for the lease.
func (e *Engine) Retire() { e.retire.Do(func() { close(e.retiring) }) }

// Retiring is closed when Retire was called: this engine fulfils no more attach requests.
func (e *Engine) Retiring() <-chan struct{} { return e.retiring }

// Retired is closed when Run has ended.
func (e *Engine) Retired() <-chan struct{} { return e.retired }

// runOnce runs one tick and returns the time until the next. The tick is limited to the time for which the listed
// records can be trusted. A panic counts as an error: instances may be down that no other process brings back.
func (e *Engine) runOnce(ctx context.Context) (again time.Duration) {
	defer func() {
		if reason := recover(); reason != nil {
			rpc.LogPanic(e.opts.Log, slog.String("task", "planned restarts"), reason)
			again, e.lastFailure = e.opts.Poll, e.clock.Now()
		}
	}()
	// Many RPCs must not keep an instance down.
	ctx, cancel := context.WithTimeout(rack.Urgent(ctx), e.opts.Lease/renewalsPerLease)
	defer cancel()
	err := e.tick(ctx)
	if err != nil {
		e.lastFailure = e.clock.Now()
	}
	if err != nil && !errors.Is(err, context.Canceled) {
		e.opts.Log.Warn("cannot process planned restarts, retrying", "error", err.Error())
		return e.opts.Poll
	}
	e.mu.Lock()
	busy := len(e.requests) > 0
	e.mu.Unlock()
	// Other processes' restarts are polled as often as our own: their holder may die while an instance is down.
	if busy || len(e.held) > 0 || len(e.lastSeen) > 0 {
		return e.opts.Poll
	}
	return e.opts.Idle
}

const (
	// renewalsPerLease is how often a holder renews its record within a lease. A tick ends within the same time.
	renewalsPerLease = 4
	// takeoverWaitShare is the part of a lease that a tick can last, and so how long a takeover waits. A tick ends
	// after a quarter of the lease, and core/rack waits up to 30 s more for the answer to a change sent at its end.
	takeoverWaitShare = 3 / 4.0
)

// wakeUp makes Run start the next tick at once.
func (e *Engine) wakeUp() {
	select {
	case e.wake <- struct{}{}:
	default:
	}
}

// tick looks at all restarts once, and takes each held one step further.
func (e *Engine) tick(ctx context.Context) error {
	e.expireRequests()
	reading, cancel := halfOf(ctx)
	defer cancel()
	records, err := e.readRecords(reading)
	if err != nil {
		for _, id := range sortedKeys(e.held) {
			e.held[id].changing = time.Time{}
			err = errors.Join(err, e.bringBack(ctx, e.held[id]))
		}
		return err
	}
	e.notifyEnded(records)
	restored := e.restoreVanished(ctx, records)
	e.dropLost(records, restored)
	// An error belongs to its restart. It neither stops the other restarts nor the planning of new ones.
	failed := e.opts.Detacher.Tidy(ctx, records.deferred)
	for _, r := range records.restarts {
		if err := e.advanceInTime(ctx, r, records); err != nil {
			failed = errors.Join(failed, fmt.Errorf("restart %s of instance %s: %w", r.ID, r.Instance, err))
		}
	}
	e.forgetUnseen(records)
	known := e.restartsUnderWay(records)
	unplanned := e.plan(ctx, records, known)
	e.setStatuses(known, unplanned == nil)
	failed = errors.Join(failed, unplanned)
	if failed == nil && e.clock.Passed(timerSweep, "", e.lastSweep, sweepInterval) {
		failed = e.sweep(ctx, records)
	}
	e.observe("", 0)
	return failed
}

// sweep deletes records about deleted volumes. The process that deleted a volume may have died before it deleted the
// record.
func (e *Engine) sweep(ctx context.Context, records recordSet) error {
	volumes := records.deferred.Volumes()
	lookUp, err := e.diskLookup(ctx, volumes)
	if err != nil {
		return err
	}
	for _, volume := range volumes {
		_, err := lookUp(volume)
		if errors.Is(err, rack.ErrNotFound) {
			if err = e.rack.ConfirmProject(ctx); err == nil {
				err = e.opts.Detacher.Delete(ctx, records.deferred, volume)
			}
		}
		if err != nil && !errors.Is(err, rack.ErrReplaced) {
			return err
		}
	}
	e.lastSweep = e.clock.Now()
	return nil
}

// advanceInTime advances a restart within half of the time that the tick has left. So calls that hang for one restart
// leave time for the others and for planning.
func (e *Engine) advanceInTime(ctx context.Context, r record.Restart, records recordSet) error {
	ctx, cancel := halfOf(ctx)
	defer cancel()
	return e.advance(ctx, r, records)
}

// advance takes one restart further if this process holds it, or takes it over if that is due.
func (e *Engine) advance(ctx context.Context, r record.Restart, records recordSet) error {
	if h := e.held[r.ID]; h != nil && r.Holder == e.holder {
		h.record = r
		return e.step(ctx, h, records)
	}
	own, known := e.ownInstance(r.Instance)
	switch {
	case r.Holder == e.holder:
		return e.adopt(ctx, r, records)
	case e.leaseExpired(r) || (r.Handover && known && !own):
		return e.takeOver(ctx, r)
	}
	return nil
}

// sortedKeys makes the engine independent of the order in a map.
func sortedKeys[T any](m map[string]T) []string {
	return slices.Sorted(maps.Keys(m))
}

// lockVolume locks a volume until release is called. It waits while another call has the lock.
func (e *Engine) lockVolume(ctx context.Context, volume string) (release func(), err error) {
	for {
		e.mu.Lock()
		taken := e.locked[volume]
		if taken == nil {
			mine := make(chan struct{})
			e.locked[volume] = mine
			e.mu.Unlock()
			return func() {
				e.mu.Lock()
				defer e.mu.Unlock()
				delete(e.locked, volume)
				close(mine)
			}, nil
		}
		e.mu.Unlock()
		if err := e.clock.Wait(ctx, taken); err != nil {
			return nil, err
		}
	}
}

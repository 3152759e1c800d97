// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package restart

import (
	"cmp"
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
	StartInstance(ctx context.Context, id string) error
	ConfirmProject(ctx context.Context) error

	Records(ctx context.Context) ([]record.Record, error)
	CreateRecord(ctx context.Context, name, text string) (record.Record, error)
	RecordNamed(ctx context.Context, name string) (r record.Record, found bool, err error)
	UpdateRecord(ctx context.Context, id, text string) (found bool, err error)
	DeleteRecord(ctx context.Context, id string) error
}

// Policy says what an engine may do.
type Policy string

const (
	// Plan reports the restarts that it would make, and makes none. A volume that needs one waits until its instance is
	// stopped.
	Plan Policy = "plan"
	// Allow makes restarts.
	Allow Policy = "allow"
)

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
	Policy   Policy
	Shutdown Shutdown
	// Requester reaches the node plugins. It may be nil if Shutdown is Hard. Drainer may be nil unless Shutdown is Drain.
	Requester orchestrator.RestartRequester
	Drainer   orchestrator.Drainer
	// Self returns the instance that this process runs on, or "" if it runs on none. False means that the instance is
	// not known yet. A nil Self means that the process runs on none.
	Self func() (instanceID string, known bool)
	// Window is how long attach requests for an instance are collected, counted from the first one.
	Window time.Duration
	// MaxDown is how many instances may be down at once.
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
			Restarting: func(records []record.Record) func(string) bool { return Restarting(records, opts.Cluster) },
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

// handOverAll marks all restarts that this process holds as handed over. It leaves a restart to the lease where only
// time makes a takeover safe: the rack still owes an answer to this process, or may still owe one to the previous
// holder.
func (e *Engine) handOverAll(ctx context.Context) {
	if len(e.held) == 0 ||
		!e.clock.Passed(timerLateCalls, "", e.lastFailure, e.takeoverWait()) {
		return
	}
	ctx, cancel := context.WithTimeout(rack.Urgent(ctx), e.opts.Lease/renewalsPerLease)
	defer cancel()
	records, err := e.readRecords(ctx)
	if err != nil {
		e.opts.Log.Warn(
			"could not hand restarts over; another controller continues them after the lease",
			"error",
			err.Error(),
		)
		return
	}
	for _, r := range records.restarts {
		h := e.held[r.ID]
		if h == nil || r.Holder != e.holder || h.takenFrom != "" {
			continue
		}
		h.record = r
		h.record.HandOver("")
		if held, err := e.renewRecord(ctx, h); err != nil || !held {
			e.opts.Log.Warn("could not hand a restart over", "node_id", r.Instance, "restart_id", r.ID, "error", err)
			continue
		}
		e.opts.Log.Info("handed a restart over", "node_id", r.Instance, "restart_id", r.ID, "stage", string(h.stage))
	}
}

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

// takeoverWait is how long a takeover waits for the previous holder's tick to end.
func (e *Engine) takeoverWait() time.Duration {
	return time.Duration(takeoverWaitShare * float64(e.opts.Lease))
}

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

// adopt handles a record with this process as holder that it does not know: the answer to its creation was lost.
func (e *Engine) adopt(ctx context.Context, r record.Restart, records recordSet) error {
	for _, from := range records.superseded {
		if from.ID == r.ID {
			e.addHeld(r, from)
			return nil
		}
	}
	return e.rack.DeleteRecord(ctx, r.Stored.ID) // nothing was requested yet, or the restart is over
}

// leaseExpired reports whether a record did not change for the length of the lease.
func (e *Engine) leaseExpired(r record.Restart) bool {
	s := e.lastSeen[r.Stored.ID]
	if s.Text != r.Stored.Text {
		e.lastSeen[r.Stored.ID] = record.Seen{Text: r.Stored.Text, Since: e.clock.Now()}
		return false
	}
	return e.clock.Passed(timerLease, r.Stored.ID, s.Since, e.opts.Lease)
}

// takeOver creates the next epoch of a restart whose lease expired or that was handed over.
func (e *Engine) takeOver(ctx context.Context, from record.Restart) error {
	now, mine := e.clock.Now(), from
	mine.Epoch++
	mine.Holder, mine.Heartbeat, mine.Handover = e.holder, 0, false
	creating, cancel := halfOf(ctx)
	defer cancel()
	mine, ok, err := e.createRestart(creating, mine)
	if err != nil {
		return errors.Join(err, e.startAbandoned(ctx, from))
	}
	if !ok {
		return nil
	}
	e.addHeld(mine, from)
	e.held[mine.ID].renewed = now
	return nil
}

// startAbandoned starts an instance that may be down for a restart whose holder has been silent for so long that this
// process would have trusted the record, if it could take the restart over.
func (e *Engine) startAbandoned(ctx context.Context, from record.Restart) error {
	seen := e.lastSeen[from.Stored.ID].Since
	if !from.MayStop || seen.IsZero() ||
		!e.clock.Passed(timerUnseen, from.ID, seen, e.opts.Lease+e.takeoverWait()+unseenTimeout) {
		return nil
	}
	instance, err := e.instance(ctx, from.Instance)
	if err != nil || instance.RunState != rack.Stopped && instance.RunState != rack.Failed {
		return err
	}
	e.opts.Log.Warn("started the instance of a restart that cannot be taken over",
		"node_id", from.Instance, "restart_id", from.ID)
	return e.rack.StartInstance(ctx, from.Instance)
}

// addHeld starts to work on a restart that another process held.
func (e *Engine) addHeld(mine, from record.Restart) {
	e.opts.Log.Warn(
		"took over a restart",
		"node_id",
		from.Instance,
		"restart_id",
		from.ID,
		"holder",
		from.Holder,
		"may_stop",
		from.MayStop,
	)
	now := e.clock.Now()
	e.held[mine.ID] = &heldRestart{record: mine, stage: stagePlanned, since: now, renewed: now, takenFrom: from.Stored.ID}
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, volume := range record.LongIDs(mine.Volumes) {
		if e.requests[volume] == nil {
			e.requests[volume] = &attachRequest{
				volume:      volume,
				instance:    mine.Instance,
				requestedAt: now,
				repeatedAt:  now,
				fromRestart: mine.ID,
			}
		}
	}
}

// dropLost forgets the restarts that another process has taken over.
func (e *Engine) dropLost(records recordSet, restored map[string]bool) {
	for id, h := range e.held {
		ours := restored[id] || slices.ContainsFunc(
			records.restarts,
			func(r record.Restart) bool { return r.ID == id && r.Holder == e.holder },
		)
		if !ours {
			e.opts.Log.Warn("lost a restart to another process", "node_id", h.record.Instance, "restart_id", id)
			delete(e.held, id)
		}
	}
}

// restoreVanished creates the record of a restart again that somebody deleted or overwrote by hand while the instance
// may be down. It returns these restarts. No process has taken them over: it would have waited for the whole lease
// since the record was last written. After half of it, nothing is restored.
func (e *Engine) restoreVanished(ctx context.Context, records recordSet) map[string]bool {
	restored := map[string]bool{}
	for _, id := range sortedKeys(e.held) {
		h := e.held[id]
		known := func(r record.Restart) bool { return r.ID == id }
		if !h.mayBeDown() || h.record.Handover || slices.ContainsFunc(records.restarts, known) ||
			slices.ContainsFunc(records.newer, func(n record.Newer[record.Restart]) bool { return n.Fields.ID == id }) ||
			e.clock.Passed(timerVanished, id, h.renewed, e.opts.Lease/2) {
			continue
		}
		restored[id] = true
		again, now := h.record, e.clock.Now()
		again.Epoch++
		made, created, err := e.createRestart(ctx, again)
		e.opts.Log.Error("the record of a restart has vanished while its instance may be down",
			"node_id", h.record.Instance, "restart_id", id, "record", h.record.Stored.Name, "created_again", created)
		if err == nil && created {
			h.record, h.renewed = made, now
		}
	}
	return restored
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

// sortedKeys makes the engine independent of the order in a map.
func sortedKeys[T any](m map[string]T) []string {
	return slices.Sorted(maps.Keys(m))
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

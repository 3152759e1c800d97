// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package restart

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
)

// Rack is what an [Engine] asks of a rack: [rack.Client].
type Rack interface {
	Disk(ctx context.Context, id string) (rack.Disk, error)
	Instance(ctx context.Context, id string) (rack.Instance, error)
	InstanceDisks(ctx context.Context, id string) ([]rack.Disk, error)
	Attach(ctx context.Context, diskID, instanceID string) (rack.Disk, error)
	Detach(ctx context.Context, diskID, instanceID string) (rack.Disk, error)
	StopInstance(ctx context.Context, id string) error
	StartInstance(ctx context.Context, id string) error
	ConfirmProject(ctx context.Context) error

	Records(ctx context.Context) ([]rack.Record, error)
	CreateRecord(ctx context.Context, name, text string) (rack.Record, error)
	UpdateRecord(ctx context.Context, id, text string) error
	DeleteRecord(ctx context.Context, id string) error
}

// Policy says what an engine may do.
type Policy string

const (
	// Never restarts nothing: a volume that needs a restart waits until somebody stops its instance.
	Never Policy = "never"
	// Plan restarts nothing either, and tells what it would restart.
	Plan Policy = "plan"
	// Allow restarts.
	Allow Policy = "allow"
)

// Shutdown says how a guest goes down.
type Shutdown string

const (
	// Guest: its node plugin shuts it down from inside.
	Guest Shutdown = "guest"
	// Drain: first its work is taken off it, then as Guest.
	Drain Shutdown = "drain"
	// Hard: the rack stops it, which is a power cut.
	Hard Shutdown = "hard"
)

// Options configure an [Engine].
type Options struct {
	// Cluster tells apart clusters that share a project.
	Cluster string
	// MaxDisks is how many disks an instance takes, its boot disk included.
	MaxDisks int
	Policy   Policy
	Shutdown Shutdown
	// Requester carries word to the node plugins. It may be nil if Shutdown is Hard; for Drain it has to be a [metadata.Drainer].
	Requester metadata.RestartRequester
	// Self is the instance that this process runs on, empty if it runs on none; false means that this is not known yet. Nil means
	// that it runs on none.
	Self func() (instanceID string, known bool)
	// Window is how long wishes for an instance are collected, from the first on.
	Window time.Duration
	// MaxDown is how many instances may be down at once.
	MaxDown int
	// CoolDown is how long an instance is left alone after its run state changed, and after a restart that was refused.
	CoolDown time.Duration
	// Next is the first time at which restarts may begin, at or after the given one. Nil means that they may at any.
	NextStart func(time.Time) time.Time
	// HaltTimeout is how long a guest may take from accepting until its instance has stopped, and a drain until all has gone.
	HaltTimeout time.Duration
	// Poll is the time from one look at a restart that is under way to the next; Idle is that between looks for what others
	// have left behind. 0 means the defaults.
	Poll, Idle time.Duration
	// Lease is how long a holder may be silent. 0 means the default.
	Lease time.Duration
	// Observe is told what is to be measured. Nil means that nobody wants to know.
	Observe func(Observation)
	Log     *slog.Logger
}

const (
	defaultPoll  = 2 * time.Second
	defaultIdle  = 10 * time.Second
	defaultLease = time.Minute
	// answerTimeout is how long a node plugin may take to say anything.
	answerTimeout = time.Minute
	// backTimeout is how long after the start of its instance a node plugin is waited for, and then an orchestrator that cannot be
	// told that all is over.
	backTimeout = 5 * time.Minute
	// applyTimeout is how long disks are tried to be changed of which the rack says nothing.
	applyTimeout = time.Minute
	// handoverTimeout is how long somebody else may take to take over the restart of our own instance.
	handoverTimeout = 2 * time.Minute
	// sweepInterval is how often records about deleted disks are looked for, from the start of the process on.
	sweepInterval = time.Hour
	// wishLifetime ends a wish that nobody has repeated.
	requestLifetime = 10 * time.Minute
)

// Engine plans and carries out the restarts of one rack's instances. It is safe for concurrent use; one call of
// [Engine.Tick] at a time.
type Engine struct {
	rack   Rack
	opts   Options
	clock  clock
	holder string
	// newID names a restart.
	newID func() string
	// wake is for whoever ticks.
	wake chan struct{}
	// retiring is closed to have Run hand over what it holds and end, retired once it has ended.
	retiring, retired chan struct{}
	retire            sync.Once
	// hotplugs says that the rack was last seen to attach a disk to an instance that runs.
	hotplugs atomic.Bool

	mu sync.Mutex
	// wishes are disks that are to be attached, by disk.
	requests map[string]*attachRequest
	// claimed are the disks that somebody is attaching, detaching or judging just now.
	locked map[string]chan struct{}
	// changed is closed when a restart is over, and then replaced.
	changed chan struct{}
	// underway are the IDs of restarts, of whichever process, whose end callers may wait for.
	watched map[string]bool
	// outlooks are the instances whose restart is wanted or under way.
	statuses restartStatuses

	// What follows belongs to Tick.

	// works are the restarts that this process holds, by their IDs.
	held map[string]*heldRestart
	// seen is since when the text of somebody else's record is as it is, by record ID.
	lastSeen map[string]seenRecord
	// swept is when records about deleted disks were last looked for.
	lastSweep time.Time
	// rest is until when an instance is left alone after a refusal, and why.
	refusals map[string]refusal
	// failed is when a tick last failed, after which the rack may still do what it has not answered to.
	lastFailure time.Time
}

// attachRequest is a disk that is to be attached to an instance.
type attachRequest struct {
	disk, instance  string
	requestedAt, repeatedAt time.Time
	// problem is what stands in the way of this disk alone, for the RPC's error.
	problem string
	// holder is the instance that still has the disk, for nobody, and so has to be restarted first; empty if none.
	heldBy string
	// restart is the one that this process has taken over and that told of the wish, empty once somebody has asked this process
	// itself. Without that it ends with the restart: who asks another process unpublishes there, too.
	fromRestart string
	// refused says that the rack would not attach the disk although the instance was stopped. No instance is restarted for it
	// again, but it is tried whenever one is.
	attachFailed bool
}

type seenRecord struct {
	text  string
	since time.Time
}

type refusal struct {
	since  time.Time
	reason string
}

// New returns an engine that does nothing before [Engine.Run].
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
	return &Engine{
		rack:     r,
		opts:     opts,
		clock:    wallClock{},
		holder:   newID(),
		newID:    func() string { return metadata.NewRestartID(time.Now()) },
		wake:     make(chan struct{}, 1),
		retiring: make(chan struct{}),
		retired:  make(chan struct{}),
		requests:   map[string]*attachRequest{},
		locked:  map[string]chan struct{}{},
		changed:  make(chan struct{}),
		watched: map[string]bool{},
		statuses: restartStatuses{},
		held:    map[string]*heldRestart{},
		lastSeen:     map[string]seenRecord{},
		refusals:     map[string]refusal{},
	}
}

// newID is a name that nobody else has.
func newID() string {
	return strings.ReplaceAll(uuid.NewString(), "-", "")[:16]
}

// self reports whether this process runs on an instance, and whether it knows on which it runs at all.
func (e *Engine) ownInstance(instance string) (own, known bool) {
	if e.opts.Self == nil {
		return false, true
	}
	id, known := e.opts.Self()
	return known && id == instance, known
}

// Run works until ctx ends, or until [Engine.Retire]. When ctx ends, a restart that is under way is left to whoever reads its record
// once the lease is over: another replica, or this plugin once it is started again. It is called once.
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

// Retire has Run end between two looks, with all restarts that it holds handed over: whoever reads their records goes on with them at
// once, and does not wait for the lease.
func (e *Engine) Retire() { e.retire.Do(func() { close(e.retiring) }) }

// Retiring is closed when the engine is to end: nothing that is wished for comes true here any more.
func (e *Engine) Retiring() <-chan struct{} { return e.retiring }

// Retired is closed when Run has ended.
func (e *Engine) Retired() <-chan struct{} { return e.retired }

// handAllOver marks what this process holds as free for others, and does nothing about it any more. Where the rack owes an answer, or
// another process may do so to the holder before, only time makes it safe to go on: that is left to the lease.
func (e *Engine) handOverAll(ctx context.Context) {
	if len(e.held) == 0 || !e.clock.Passed(timerLateCalls, "", e.lastFailure, time.Duration(takeoverWaitShare*float64(e.opts.Lease))) {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, e.opts.Lease/renewalsPerLease)
	defer cancel()
	records, err := e.readRecords(ctx)
	if err != nil {
		e.opts.Log.Warn(
			"restarts could not be handed over: whoever goes on with them waits for the end of the lease",
			"error",
			err.Error(),
		)
		return
	}
	for _, r := range records.restarts {
		w := e.held[r.ID]
		if w == nil || r.Holder != e.holder || w.takenFrom != "" {
			continue
		}
		w.record = r
		w.record.handOver("")
		if held, err := e.renewRecord(ctx, w); err != nil || !held {
			e.opts.Log.Warn("a restart could not be handed over", "instance_id", r.Instance, "restart_id", r.ID, "error", err)
			continue
		}
		e.opts.Log.Info("handed a restart over", "instance_id", r.Instance, "restart_id", r.ID, "stage", string(w.stage))
	}
}

// tick is Tick within the time for which what it reads may be believed, and says when to look again. A panic is an error like
// others: instances may be down that nobody else brings back.
func (e *Engine) runOnce(ctx context.Context) (again time.Duration) {
	defer func() {
		if reason := recover(); reason != nil {
			e.opts.Log.Error(
				"panic",
				"task",
				"planned restarts",
				"type",
				fmt.Sprintf("%T", reason),
				"stack",
				string(debug.Stack()),
			)
			again, e.lastFailure = e.opts.Poll, e.clock.Now()
		}
	}()
	ctx, cancel := context.WithTimeout(ctx, e.opts.Lease/renewalsPerLease)
	defer cancel()
	err := e.tick(ctx)
	if err != nil {
		e.lastFailure = e.clock.Now()
	}
	if err != nil && !errors.Is(err, context.Canceled) {
		e.opts.Log.Warn("planned restarts could not be looked after, which is tried again", "error", err.Error())
		return e.opts.Poll
	}
	e.mu.Lock()
	busy := len(e.requests) > 0
	e.mu.Unlock()
	// A restart of somebody else is watched as closely as one's own: an instance may be down while its holder has died.
	if busy || len(e.held) > 0 || len(e.lastSeen) > 0 {
		return e.opts.Poll
	}
	return e.opts.Idle
}

const (
	// leaseShare is the part of a lease in which a tick has to be done, and after which a holder shows that it lives.
	renewalsPerLease = 4
	// takingShare of a lease is what a tick may last that has asked something of the rack in its last moment: that is waited for
	// 30 s longer (core/rack). So long does whoever outbids a holder do nothing.
	takeoverWaitShare = 3 / 4.0
)

func (e *Engine) wakeUp() {
	select {
	case e.wake <- struct{}{}:
	default:
	}
}

// Tick looks at all restarts once, and takes each one step further.
func (e *Engine) tick(ctx context.Context) error {
	e.expireRequests()
	records, err := e.readRecords(ctx)
	if err != nil {
		return err
	}
	e.notifyEnded(records)
	e.dropLost(records)
	var failed error
	for _, r := range records.restarts {
		failed = errors.Join(failed, e.advance(ctx, r, records))
	}
	e.forgetUnseen(records)
	known := e.restartsUnderWay(records)
	if failed == nil {
		failed = e.plan(ctx, records, known)
	}
	e.setStatuses(known, failed == nil)
	if failed == nil && e.clock.Passed(timerSweep, "", e.lastSweep, sweepInterval) {
		failed = e.sweep(ctx, records)
	}
	e.observe("", 0)
	return failed
}

// sweep clears away what is recorded about disks that are gone: whoever deleted one may have died before it could do so.
func (e *Engine) sweep(ctx context.Context, records recordSet) error {
	for _, disk := range sortedKeys(records.deferred) {
		_, err := e.rack.Disk(ctx, disk)
		if errors.Is(err, rack.ErrNotFound) {
			if err = e.rack.ConfirmProject(ctx); err == nil {
				err = e.deleteRecord(ctx, records.deferred[disk].recordID)
			}
		}
		if err != nil {
			return err
		}
	}
	e.lastSweep = e.clock.Now()
	return nil
}

// look takes one restart further if it is ours, or has become so.
func (e *Engine) advance(ctx context.Context, r restartRecord, records recordSet) error {
	if w := e.held[r.ID]; w != nil && r.Holder == e.holder {
		w.record = r
		return e.step(ctx, w, records)
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

// adopt takes a record of our own into work, of whose creation the answer was lost.
func (e *Engine) adopt(ctx context.Context, r restartRecord, records recordSet) error {
	for _, from := range records.outbid {
		if from.ID == r.ID {
			e.addHeld(r, from)
			return nil
		}
	}
	return e.deleteRecord(ctx, r.recordID) // nothing has been asked, or all is over
}

// silent reports whether the holder of a record has not shown that it lives for the length of the lease.
func (e *Engine) leaseExpired(r restartRecord) bool {
	s := e.lastSeen[r.recordID]
	if s.text != r.recordedText {
		e.lastSeen[r.recordID] = seenRecord{text: r.recordedText, since: e.clock.Now()}
		return false
	}
	return e.clock.Passed(timerLease, r.recordID, s.since, e.opts.Lease)
}

// takeOver outbids a silent holder, or takes what was handed over.
func (e *Engine) takeOver(ctx context.Context, from restartRecord) error {
	mine := from
	mine.epoch++
	mine.Holder, mine.Heartbeat, mine.Handover = e.holder, 0, false
	mine, ok, err := e.createRestart(ctx, mine)
	if err != nil || !ok {
		return err
	}
	e.addHeld(mine, from)
	return nil
}

// hold begins to work on a restart that another process held.
func (e *Engine) addHeld(mine, from restartRecord) {
	e.opts.Log.Warn(
		"took over a restart",
		"instance_id",
		from.Instance,
		"restart_id",
		from.ID,
		"holder",
		from.Holder,
		"asked",
		from.MayStop,
	)
	now := e.clock.Now()
	e.held[mine.ID] = &heldRestart{record: mine, stage: stagePlanned, since: now, renewed: now, takenFrom: from.recordID}
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, disk := range decodeDisks(mine.Disks) {
		if e.requests[disk] == nil {
			e.requests[disk] = &attachRequest{disk: disk, instance: mine.Instance, requestedAt: now, repeatedAt: now, fromRestart: mine.ID}
		}
	}
}

// dropLost forgets the restarts whose records are no longer ours: somebody else goes on with them.
func (e *Engine) dropLost(records recordSet) {
	for id, w := range e.held {
		ours := slices.ContainsFunc(
			records.restarts,
			func(r restartRecord) bool { return r.ID == id && r.Holder == e.holder },
		)
		if !ours {
			e.opts.Log.Warn("lost a restart to another process", "instance_id", w.record.Instance, "restart_id", id)
			delete(e.held, id)
		}
	}
}

func (e *Engine) forgetUnseen(records recordSet) {
	for id := range e.lastSeen {
		if !slices.ContainsFunc(records.restarts, func(r restartRecord) bool { return r.recordID == id }) {
			delete(e.lastSeen, id)
		}
	}
	for instance, r := range e.refusals {
		if e.clock.Passed(timerRefusal, instance, r.since, e.opts.CoolDown) {
			delete(e.refusals, instance)
		}
	}
}

// endWishes ends those that nobody has repeated, and those that were taken over with a restart that is over.
func (e *Engine) expireRequests() {
	e.mu.Lock()
	repeated := map[string]time.Time{}
	for disk, w := range e.requests {
		if w.fromRestart != "" && e.held[w.fromRestart] == nil {
			delete(e.requests, disk)
			continue
		}
		repeated[disk] = w.repeatedAt
	}
	e.mu.Unlock()
	for _, disk := range sortedKeys(repeated) {
		if e.clock.Passed(timerRequest, disk, repeated[disk], requestLifetime) {
			e.expireRequest(disk, repeated[disk])
		}
	}
}

// endWish ends a wish that was not repeated since then.
func (e *Engine) expireRequest(disk string, since time.Time) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if w := e.requests[disk]; w != nil && w.repeatedAt.Equal(since) {
		delete(e.requests, disk)
	}
}

// sortedKeys makes what an engine does independent of the order in a map.
func sortedKeys[T any](m map[string]T) []string {
	keys := make([]string, 0, len(m))
	for key := range m {
		keys = append(keys, key)
	}
	slices.Sort(keys)
	return keys
}

// wishesFor are copies of the wishes for an instance, the oldest first.
func (e *Engine) requestsFor(instance string) []attachRequest {
	e.mu.Lock()
	defer e.mu.Unlock()
	var found []attachRequest
	for _, disk := range sortedKeys(e.requests) {
		if w := e.requests[disk]; w.instance == instance {
			found = append(found, *w)
		}
	}
	slices.SortStableFunc(found, func(x, y attachRequest) int { return x.requestedAt.Compare(y.requestedAt) })
	return found
}

// fulfil ends a wish that has come true.
func (e *Engine) removeRequest(disk string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.requests, disk)
}

// announce tells those who wait that something has changed.
func (e *Engine) notifyWaiters() {
	e.mu.Lock()
	defer e.mu.Unlock()
	close(e.changed)
	e.changed = make(chan struct{})
}

// hearOfEnds tells those who wait of restarts that are over, since another process that carries one out does not.
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

// awaits notes that a caller may wait for the end of a restart.
func (e *Engine) watchEnd(r restartRecord) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.watched[r.ID] = true
}

// refuseWish notes that a restart did not help.
func (e *Engine) recordAttachFailure(disk, problem string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if w := e.requests[disk]; w != nil {
		w.problem, w.attachFailed = problem, true
	}
}

// claim keeps a disk to the caller until release is called. It waits for whoever has it.
func (e *Engine) lockDisk(ctx context.Context, disk string) (release func(), err error) {
	for {
		e.mu.Lock()
		taken := e.locked[disk]
		if taken == nil {
			mine := make(chan struct{})
			e.locked[disk] = mine
			e.mu.Unlock()
			return func() {
				e.mu.Lock()
				defer e.mu.Unlock()
				delete(e.locked, disk)
				close(mine)
			}, nil
		}
		e.mu.Unlock()
		if err := e.clock.Wait(ctx, taken); err != nil {
			return nil, err
		}
	}
}

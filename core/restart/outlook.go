// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package restart

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"
)

// Reason says in a word how it stands with the restart of an instance. Metrics have it for a label.
type Reason string

const (
	// ReasonWindow: what is wanted of the instance is still being collected.
	ReasonWindow Reason = "window"
	// ReasonCoolDown: it has been running for too short a time.
	ReasonCoolDown Reason = "cool-down"
	// ReasonHours: restarts may begin at other times only.
	ReasonHours Reason = "hours"
	// ReasonPolicy: nothing is restarted, and this is only told.
	ReasonPolicy Reason = "policy"
	// ReasonOthers: other instances are restarted first.
	ReasonOthers Reason = "other-restart"
	// ReasonRefused: a restart was given up a short while ago.
	ReasonRefused Reason = "refused"
	// ReasonSelf: this controller does not know yet where it runs itself.
	ReasonSelf Reason = "self"
	// ReasonState: the instance is neither running nor stopped, or gone.
	ReasonState Reason = "state"
	// ReasonUnderWay: it is being restarted.
	ReasonUnderWay Reason = "under-way"
)

// waiting are the reasons of restarts that have not begun.
var waiting = []Reason{
	ReasonWindow,
	ReasonCoolDown,
	ReasonHours,
	ReasonPolicy,
	ReasonOthers,
	ReasonRefused,
	ReasonSelf,
	ReasonState,
}

// outlook is how it stands with the restart of an instance.
type outlook struct {
	reason Reason
	// text says the same to people.
	text string
	// restart is its ID, if it is under way.
	restart string
	// since is when the reason came to be the one that it is.
	since time.Time
	// disks are those that are to be attached there, for the log.
	disks string
	// before is why a restart was given up that was to do the same.
	before string
}

func (o outlook) message() string {
	if o.before != "" && o.reason != ReasonRefused {
		return o.text + "; it was given up before: " + o.before
	}
	return o.text
}

// outlooks are how it stands, by instance.
type outlooks map[string]outlook

// add notes how it stands with an instance that is not being restarted.
func (known outlooks) add(instance string, reason Reason, text string) {
	if known[instance].reason != ReasonUnderWay {
		known[instance] = outlook{reason: reason, text: text}
	}
}

// elsewhere is how far a restart is that another process holds.
const elsewhere = "another controller works on it"

// underWay are the restarts that these records tell of, as they are after this tick's step.
func (e *Engine) underWay(records book) outlooks {
	all := outlooks{}
	for _, r := range records.restarts {
		o := outlook{reason: ReasonUnderWay, restart: r.ID, text: elsewhere}
		w := e.works[r.ID]
		refused, resting := e.rest[r.Instance]
		switch {
		case w != nil && w.trouble != "":
			o.text = w.trouble
		case w != nil && w.takenFrom != "":
			o.text = "taken over, and goes on as soon as the controller that had it can do nothing more"
		case w != nil && r.Handover:
			o.text = "this controller runs on it, and waits for another one to take over"
		case w != nil:
			o.text = string(w.stage)
		case r.Holder == e.holder && resting: // given up in this tick
			o = outlook{reason: ReasonRefused, text: e.again(refused)}
		case r.Holder == e.holder:
			o.text = "done"
		}
		all[r.Instance] = o
	}
	return all
}

// afterOthers adds what cannot begin because as many instances are down as may be.
func (e *Engine) afterOthers(known outlooks, due []wish) {
	full := fmt.Sprintf("as many instances are being restarted as --restart-max-down allows, which is %d", e.opts.MaxDown)
	for _, w := range due {
		refused, resting := e.rest[w.instance]
		switch forbidden := e.forbidden(); {
		case w.problem != "" && w.holder == "": // no restart helps
		case forbidden != "":
			known.add(w.instance, ReasonPolicy, forbidden)
		case resting:
			known.add(w.instance, ReasonRefused, e.again(refused))
		default:
			known.add(w.instance, ReasonOthers, full)
		}
	}
}

// attachedAlready is said of a disk that nobody has asked for since it was attached.
const attachedAlready = "the disk is attached by now: ask for it once more"

// holderFirst is said of an instance that waits for what another one still has.
const holderFirst = "an instance that still has a disk for it is restarted first"

// afterHolders adds what waits for other instances to give up disks.
func (e *Engine) afterHolders(known outlooks) {
	forbidden := e.forbidden()
	for _, w := range e.allWishes() {
		switch {
		case w.holder == "":
		case forbidden != "":
			known.add(w.instance, ReasonPolicy, forbidden)
		default:
			known.add(w.instance, ReasonOthers, holderFirst)
		}
	}
}

// show makes this how things stand, and logs what has changed. What is not complete leaves all else as it was.
func (e *Engine) show(known outlooks, complete bool) {
	now := e.clock.Now()
	for _, instance := range sortedKeys(known) {
		o := known[instance]
		var disks []string
		for _, w := range e.wishesFor(instance) {
			disks = append(disks, w.disk)
		}
		old := e.outlook(instance)
		o.since, o.disks, o.before = now, strings.Join(disks, ","), old.before
		if old.reason == o.reason {
			o.since = old.since
		}
		if o.reason != ReasonUnderWay && (old.reason != o.reason || o.disks != "" && old.disks != o.disks) {
			e.opts.Log.Info(
				"a restart is wanted",
				"instance_id",
				instance,
				"disks",
				o.disks,
				"reason",
				string(o.reason),
				"not_yet",
				o.message(),
			)
		}
		known[instance] = o
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if !complete {
		for instance, o := range e.outlooks {
			if _, told := known[instance]; !told {
				known[instance] = o
			}
		}
	}
	e.outlooks = known
}

func (e *Engine) outlook(instance string) outlook {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.outlooks[instance]
}

// gaveUp keeps in mind why a restart was given up, until one goes further.
func (e *Engine) gaveUp(instance, why string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if o, shown := e.outlooks[instance]; shown || why != "" {
		o.before = why
		e.outlooks[instance] = o
	}
}

// hinder notes what stands in the way of one wish for which an instance may be restarted, whatever becomes of that.
func (e *Engine) hinder(disk, problem string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if w := e.wishes[disk]; w != nil && !w.refused {
		w.problem, w.holder = problem, ""
	}
}

// waitFor notes that an instance has to give a disk up first, which it has for nobody.
func (e *Engine) waitFor(disk, holder string) {
	e.hinder(disk, fmt.Sprintf("instance %s still has the disk, and is to be restarted first", holder))
	e.mu.Lock()
	defer e.mu.Unlock()
	if w := e.wishes[disk]; w != nil {
		w.holder = holder
	}
}

// again says why a restart was given up, and when it is tried again.
func (e *Engine) again(r refusal) string {
	return fmt.Sprintf("%s; it is tried again after %s", r.reason, moment(r.since.Add(e.opts.CoolDown)))
}

// moment is a time for people to read.
func moment(t time.Time) string { return t.UTC().Format(time.RFC3339) }

// waitsFor says what a wish waits for.
func (e *Engine) waitsFor(w wish) string {
	o, forbidden := e.outlook(w.instance), e.forbidden()
	switch {
	case w.holder != "":
		return fmt.Sprintf(
			"instance %s is to be restarted for it, and before that instance %s, which still has the disk: %s",
			w.instance,
			w.holder,
			cmp.Or(forbidden, e.outlook(w.holder).message()),
		)
	case w.problem != "":
		return fmt.Sprintf("it is to be attached to instance %s: %s", w.instance, w.problem)
	case o.reason == ReasonUnderWay:
		return fmt.Sprintf("instance %s is being restarted for it: %s", w.instance, o.message())
	case forbidden != "":
		return fmt.Sprintf("instance %s is to be restarted for it, but %s", w.instance, forbidden)
	case o.reason == ReasonWindow, o.reason == "":
		return fmt.Sprintf(
			"instance %s is restarted for it, %s after the first such wish at the earliest",
			w.instance,
			e.opts.Window,
		)
	}
	return fmt.Sprintf("instance %s is to be restarted for it, but %s", w.instance, o.message())
}

// Restart is a restart that is wanted, planned or under way; or none, of an instance that still has disks which go with its
// next one. Its JSON is what the controller tells the commands of oxide-csi.
type Restart struct {
	InstanceID string `json:"nodeID"`
	// Reason is empty where nothing is wanted of the instance.
	Reason Reason `json:"reason,omitempty"`
	// Message says the same to people: why it has not begun, or how far it is.
	Message string `json:"message,omitempty"`
	// Since is when Reason came to be so, as far as this process knows.
	Since time.Time `json:"since,omitzero"`
	// ID is set where it is under way.
	ID string `json:"restartID,omitempty"`
	// Attach are the disks that are wanted there, Detach those that are there for nobody any more.
	Attach []Wanted `json:"attach,omitempty"`
	Detach []string `json:"detach,omitempty"`
}

// Concerns reports whether it changes where a disk is.
func (r Restart) Concerns(diskID string) bool {
	return slices.Contains(r.Detach, diskID) ||
		slices.ContainsFunc(r.Attach, func(w Wanted) bool { return w.DiskID == diskID })
}

// Wanted is a disk that is to be attached.
type Wanted struct {
	DiskID string `json:"volumeID"`
	// Since is when it was first wanted, Repeated when last. Both are zero where another controller was asked for it.
	Since    time.Time `json:"since,omitzero"`
	Repeated time.Time `json:"repeated,omitzero"`
	// Problem is what stands in the way of this disk alone.
	Problem string `json:"problem,omitempty"`
}

// Report is what the records say, which are listed once, and what this process was asked for; others may have been asked for
// more. It is sorted by instance.
func (e *Engine) Report(ctx context.Context) ([]Restart, error) {
	records, err := e.read(ctx)
	if err != nil {
		return nil, err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	all := map[string]*Restart{}
	at := func(instance string) *Restart {
		if all[instance] == nil {
			o := e.outlooks[instance]
			all[instance] = &Restart{InstanceID: instance, Reason: o.reason, Message: o.message(), Since: o.since, ID: o.restart}
		}
		return all[instance]
	}
	for instance, o := range e.outlooks {
		if o.reason != ReasonUnderWay {
			at(instance)
		}
	}
	for _, r := range records.restarts {
		one := at(r.Instance)
		if one.ID != r.ID {
			*one = Restart{InstanceID: r.Instance, Reason: ReasonUnderWay, Message: elsewhere, ID: r.ID}
			if r.Holder == e.holder {
				one.Message = string(stagePlanned) // a moment ago
			}
		}
		for _, disk := range lengthen(r.Disks) {
			if r.Holder != e.holder && !e.wishes[disk].on(r.Instance) {
				one.Attach = append(one.Attach, Wanted{DiskID: disk})
			}
		}
	}
	for _, disk := range sortedKeys(e.wishes) {
		w := e.wishes[disk]
		at(w.instance).Attach = append(
			at(w.instance).Attach,
			Wanted{DiskID: disk, Since: w.first, Repeated: w.repeated, Problem: w.problem},
		)
	}
	for _, disk := range sortedKeys(records.lazy) {
		if l := records.lazy[disk]; !e.wishes[disk].on(l.Instance) {
			at(l.Instance).Detach = append(at(l.Instance).Detach, disk)
		}
	}
	restarts := []Restart{}
	for _, instance := range sortedKeys(all) {
		restarts = append(restarts, *all[instance])
	}
	return restarts, nil
}

func (w *wish) on(instance string) bool { return w != nil && w.instance == instance }

// count says of how many instances the restart waits, for each reason that there is.
func (e *Engine) count() map[Reason]int {
	counts := map[Reason]int{}
	for _, reason := range waiting {
		counts[reason] = 0
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, o := range e.outlooks {
		if slices.Contains(waiting, o.reason) {
			counts[o.reason]++
		}
	}
	return counts
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package verify

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
)

const gib = int64(1) << 30

// The kinds of objects, as paths name them.
const (
	disks     = "disks"
	instances = "instances"
	snapshots = "snapshots"
	groups    = "anti-affinity-groups"
)

var kinds = []string{instances, disks, snapshots, groups}

const (
	// namePrefix begins the names of all that a run makes, and marker their descriptions.
	namePrefix = "csi-verify-"
	marker     = "made by oxide-sim verify, which deletes it"
	// uuidName is a name that a rack must refuse. A rack that accepts it has an object without the prefix.
	uuidName = "a123456789abcdef0123456789abcdef"
	// theInstance is the fixture that the user names: it is stopped and started, but not made.
	theInstance = "instance"
)

// fixture is an object that cases work with. The zero value is a blank disk of 1 GiB.
type fixture struct {
	kind string // "" is a disk
	gib  int64
	// source is the snapshot of a disk, or the disk of a snapshot. boot is the boot disk of an instance.
	source, boot    string
	readOnly, local bool
}

// fixtures are all but blank disks of 1 GiB.
var fixtures = map[string]fixture{
	"big":       {gib: 2},
	"local":     {local: true},
	"read":      {source: "s", readOnly: true},
	"child":     {source: "s"},
	"s":         {kind: snapshots, source: "d"},
	"s2":        {kind: snapshots, source: "d"},
	"sbig":      {kind: snapshots, source: "big"},
	"i":         {kind: instances},
	"i2":        {kind: instances},
	"packed":    {kind: instances},
	"booted":    {kind: instances, boot: "boot"},
	theInstance: {kind: instances},
	"g":         {kind: groups},
	"probe":     {kind: groups},
	ran:         {kind: groups},
	stood:       {kind: groups},
}

func fixtureOf(key string) fixture {
	f := fixtures[key]
	if f.kind == "" {
		f.kind = disks
	}
	f.gib = max(f.gib, 1)
	return f
}

// body is the request that makes the object.
func (f fixture) body(key string) string {
	switch {
	case f.kind == instances && f.boot != "":
		return instanceBody(key, fmt.Sprintf(`"boot_disk":{"type":"attach","name":"[%s]"}`, f.boot))
	case f.kind == instances:
		return instanceBody(key, `"boot_disk":null`)
	case f.kind == snapshots:
		return snapshotBody(key, f.source)
	case f.kind == groups:
		return groupBody(key)
	case f.local:
		return diskBody(key, `{"type":"local"}`)
	case f.source != "":
		return restoreBody(key, f.source, f.readOnly)
	}
	return blankBody(key, "size", fmt.Sprint(f.gib*gib))
}

// object is what the rack shows of an object.
type object struct {
	kind, id, name, description string
	state                       string // of an instance its run state; of a group ""
	instance                    string // the instance that holds a disk
	boot                        string // the boot disk of an instance
	size                        int64
}

func objectFrom(kind string, v any) object {
	o := object{
		kind: kind, id: text(get(v, "id")), name: text(get(v, "name")), description: text(get(v, "description")),
		instance: text(get(v, "state.instance")), boot: text(get(v, "boot_disk_id")),
	}
	for _, path := range []string{"run_state", "state", "state.state"} {
		o.state += text(get(v, path))
	}
	if size, is := get(v, "size").(json.Number); is {
		o.size, _ = size.Int64() // another number is a difference that no case needs
	}
	return o
}

// String names an object for people: without its ID, which a report must not have.
func (o object) String() string {
	return strings.TrimSuffix(strings.ReplaceAll(o.kind, "-", " "), "s") + " " + o.name
}

// isOurs reports whether a run of this program made the object. A disk whose deletion failed has another name.
func (o object) isOurs() bool {
	named := strings.HasPrefix(o.name, namePrefix) || o.name == uuidName || o.name == "deleted-"+o.id
	return named && strings.HasPrefix(o.description, marker)
}

func (o object) path() string { return "/" + o.kind + "/" + o.id }

// runs reports whether an instance has a virtual machine that a stop ends.
func (o object) runs() bool { return o.state == "running" }

func (o object) atRest() bool { return o.state == "stopped" || o.state == "failed" }

// step says how a state is approached: it is there, something was done for it, or it has to be waited for.
type step int

const (
	done step = iota
	acted
	waiting
)

// retry calls next until it is done, repeats it after transient failures, and gives up after the time for a state.
func (r *run) retry(ctx context.Context, next func() (step, error)) error {
	const maxFailures, maxActs = 8, 200
	deadline := time.Now().Add(r.o.Wait)
	failures, acts := 0, 0
	for {
		s, err := next()
		pause := r.o.Pause
		switch {
		case err == nil && s == done:
			return nil
		case isTransient(err):
			if failures++; failures > maxFailures {
				return err
			}
			pause <<= min(failures, 5)
		case err != nil:
			return err
		case s == acted:
			if acts++; acts > maxActs {
				return fmt.Errorf("the rack does not do what it answers: no result after %d requests", acts)
			}
			continue
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("no result after %s: %s", r.o.Wait, r.seen)
		}
		if err := sleep(ctx, pause); err != nil {
			return err
		}
	}
}

// unexpected is an answer that prevents a preparation.
type unexpected struct {
	q    request
	want string
	seen answer
}

func (e unexpected) Error() string { return fmt.Sprintf("%s: %s", e.q, e.seen) }

// act sends a request of a preparation, which must have one of the answers.
func (r *run) act(ctx context.Context, q request, statuses ...int) (answer, error) {
	a, err := r.send(ctx, q)
	if err != nil || slices.Contains(statuses, a.status) {
		return a, err
	}
	if err := r.checkRole(ctx, a); err != nil {
		return a, err
	}
	return a, unexpected{q, strings.Trim(fmt.Sprint(statuses), "[]"), a}
}

// look finds a fixture by its name in the project.
func (r *run) look(ctx context.Context, key string) (o object, exists bool, err error) {
	kind := fixtureOf(key).kind
	path := "/" + kind + "/" + r.name(key) + "?project=" + r.projectID
	if key == theInstance {
		path = "/instances/" + r.instance.id
	}
	a, err := r.act(ctx, request{method: "GET", path: path}, 200, 404)
	if err != nil || a.status == 404 {
		if err == nil {
			err = r.checkRole(ctx, a)
		}
		return object{}, false, err
	}
	o = objectFrom(kind, a.body)
	r.seen = fmt.Sprintf("%s is %q", o, o.state)
	if !o.isOurs() && key != theInstance {
		return o, true, abort("%s in the project was not made by this program: it is not touched", o)
	}
	r.ids[key] = o.id
	return o, true, nil
}

// establish brings about what a case is given: "d" (a detached disk, a stopped instance, a snapshot or a group),
// "no d", "d on i", "i runs", or "full i" (with 12 disks).
func (r *run) establish(ctx context.Context, condition string) error {
	words := strings.Fields(condition)
	switch {
	case len(words) == 1:
		return r.retry(ctx, func() (step, error) { return r.present(ctx, words[0]) })
	case words[0] == "no":
		return r.absent(ctx, words[1])
	case words[0] == "full":
		return r.fillInstance(ctx, words[1])
	case words[1] == "runs":
		return r.retry(ctx, func() (step, error) { return r.running(ctx, words[0]) })
	}
	return r.retry(ctx, func() (step, error) { return r.attached(ctx, words[0], words[2]) })
}

func (r *run) present(ctx context.Context, key string) (step, error) {
	f := fixtureOf(key)
	o, exists, err := r.look(ctx, key)
	switch {
	case err != nil:
		return done, err
	case !exists && key == theInstance:
		return done, abort("the instance of --instance is gone")
	case !exists:
		return r.create(ctx, key)
	case f.kind == groups, f.kind == snapshots && o.state == "ready":
		return done, nil
	case f.kind == instances && o.atRest():
		return done, nil
	case f.kind == instances && o.runs():
		return r.stop(ctx, o)
	case f.kind == disks && o.state == "attached":
		return r.release(ctx, o)
	case f.kind == disks && o.state == "detached" && o.size == f.gib*gib:
		return done, nil
	case o.state == "faulted", f.kind == disks && o.state == "detached":
		return r.delete(ctx, o)
	}
	return waiting, nil
}

func (r *run) create(ctx context.Context, key string) (step, error) {
	f := fixtureOf(key)
	for _, needed := range []string{f.source, f.boot} {
		if needed == "" {
			continue
		}
		if s, err := r.present(ctx, needed); s != done || err != nil {
			return s, err
		}
	}
	if f.kind == disks || f.kind == snapshots {
		size := f.gib
		if f.kind == snapshots {
			size = fixtureOf(f.source).gib
		}
		if err := r.reserve(ctx, size*gib, key, f.source); err != nil {
			return done, err
		}
	}
	q := request{method: "POST", path: "/" + f.kind + "?project=" + r.projectID, body: r.fill(f.body(key))}
	_, err := r.act(ctx, q, 201)
	return acted, err
}

// budgetError says that a case needs more than the run may use.
type budgetError struct{ needs, budget int64 }

func (e budgetError) Error() string {
	return fmt.Sprintf("it needs %d GiB at the same time, and this run may use %d GiB", e.needs/gib, e.budget/gib)
}

// reserve makes room for a disk or a snapshot: it deletes those that the case does not need.
func (r *run) reserve(ctx context.Context, bytes int64, keep ...string) error {
	for {
		used, victim := bytes, object{}
		for _, o := range r.made {
			used += o.size
			key := strings.TrimPrefix(o.name, namePrefix)
			if o.size > 0 && !r.needed[key] && !slices.Contains(keep, key) {
				victim = o
			}
		}
		switch {
		case used <= r.budget:
			return nil
		case victim.id == "":
			return budgetError{used, r.budget}
		}
		if err := r.remove(ctx, victim); err != nil {
			return err
		}
	}
}

func (r *run) absent(ctx context.Context, key string) error {
	var o object
	var exists bool
	err := r.retry(ctx, func() (_ step, err error) {
		o, exists, err = r.look(ctx, key)
		return done, err
	})
	if err != nil || !exists {
		return err
	}
	return r.remove(ctx, o)
}

// remove deletes an object of ours, by its ID. First it does what the rack requires: it detaches a disk, and stops an
// instance.
func (r *run) remove(ctx context.Context, o object) error {
	return r.retry(ctx, func() (step, error) {
		a, err := r.act(ctx, request{method: "GET", path: o.path()}, 200, 404)
		if err != nil {
			return done, err
		}
		if a.status == 404 {
			if err := r.checkRole(ctx, a); err != nil {
				return done, err
			}
			delete(r.made, o.id)
			return done, nil
		}
		now := objectFrom(o.kind, a.body)
		r.seen = fmt.Sprintf("%s is %q", now, now.state)
		switch {
		case !now.isOurs() || now.id != o.id:
			return done, abort("%s was not made by this program: it is not touched", now)
		case now.kind == disks && now.state == "attached":
			return r.release(ctx, now)
		case now.kind == instances && now.runs():
			return r.stop(ctx, now)
		case now.kind == groups, now.state == "ready", now.state == "detached", now.state == "faulted", now.atRest():
			return r.delete(ctx, now)
		}
		return waiting, nil
	})
}

func (r *run) delete(ctx context.Context, o object) (step, error) {
	_, err := r.act(ctx, request{method: "DELETE", path: o.path()}, 204, 404)
	return acted, err
}

// release takes a disk of ours off its instance. An own instance lets its boot disk go only when it is deleted.
func (r *run) release(ctx context.Context, d object) (step, error) {
	a, err := r.act(ctx, request{method: "GET", path: "/instances/" + d.instance}, 200)
	if err != nil {
		return done, err
	}
	i := objectFrom(instances, a.body)
	switch {
	case !i.isOurs() && i.id != r.instance.id:
		return done, fmt.Errorf(
			"%s is on instance %s, which was not made by this program: stop it and detach the disk",
			d,
			i.name,
		)
	case i.runs():
		return r.stop(ctx, i)
	case !i.atRest():
		return waiting, nil
	case i.boot == d.id && i.isOurs():
		return r.delete(ctx, i)
	}
	_, err = r.act(ctx, move("detach", i.id, d.id), 202)
	return acted, err
}

func move(what, instance, disk string) request {
	body := fmt.Sprintf(`{"disk":%q}`, disk)
	return request{method: "POST", path: "/instances/" + instance + "/disks/" + what, body: body}
}

func (r *run) stop(ctx context.Context, i object) (step, error) {
	if err := r.remember(ctx, i); err != nil {
		return done, err
	}
	_, err := r.act(ctx, request{method: "POST", path: i.path() + "/stop"}, 202)
	return acted, err
}

func (r *run) running(ctx context.Context, key string) (step, error) {
	i, exists, err := r.look(ctx, key)
	switch {
	case err != nil:
		return done, err
	case !exists:
		return r.orPresent(ctx, key, nil)
	case i.runs():
		return done, nil
	case !i.atRest():
		return waiting, nil
	}
	if err := r.remember(ctx, i); err != nil {
		return done, err
	}
	_, err = r.act(ctx, request{method: "POST", path: i.path() + "/start"}, 202)
	return acted, err
}

func (r *run) attached(ctx context.Context, disk, instance string) (step, error) {
	i, exists, err := r.look(ctx, instance)
	if err != nil || !exists {
		return r.orPresent(ctx, instance, err)
	}
	d, exists, err := r.look(ctx, disk)
	if err == nil && exists && d.state == "attached" && d.instance == i.id {
		return done, nil
	}
	if err != nil || !exists || d.state != "detached" {
		return r.orPresent(ctx, disk, err)
	}
	if !i.atRest() {
		return r.orPresent(ctx, instance, nil)
	}
	_, err = r.act(ctx, move("attach", i.id, d.id), 202)
	return acted, err
}

// orPresent approaches the presence of a fixture, which is not the state that was asked for.
func (r *run) orPresent(ctx context.Context, key string, err error) (step, error) {
	if err != nil {
		return done, err
	}
	s, err := r.present(ctx, key)
	if s == done {
		s = acted
	}
	return s, err
}

// maxDisks is how many disks an instance takes (docs/reference/rack.md §4).
const maxDisks = 12

// fillInstance attaches disks until the instance is full.
func (r *run) fillInstance(ctx context.Context, key string) error {
	for n := range maxDisks {
		r.needed[fillName(n)] = true
	}
	for n := range maxDisks {
		if err := r.establish(ctx, fillName(n)+" on "+key); err != nil {
			if errors.As(err, new(unexpected)) {
				r.report.Rack.DisksPerInstance = n
			}
			return err
		}
	}
	return nil
}

func fillName(n int) string { return fmt.Sprintf("fill-%d", n) }

// name is the name of a fixture on the rack.
func (r *run) name(key string) string {
	if key == theInstance {
		return r.o.Instance
	}
	return namePrefix + key
}

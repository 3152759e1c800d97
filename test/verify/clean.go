// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package verify

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
)

// settleLooks is how often a run looks for objects whose creation got no answer and which may appear later.
const settleLooks = 5

// sweep removes all objects of this program from the project, whichever run made them, and gives the
// user's instance its old state. It adds to the report what it could not remove.
func (r *run) sweep(ctx context.Context, what string) error {
	r.at = place{Prepares: true}
	r.needed = nil
	why := map[string]error{}
	for looks := 0; looks < settleLooks; looks++ {
		objects, err := r.ours(ctx)
		if err != nil {
			return r.leave(what, fmt.Errorf("the project cannot be looked at: %w", err))
		}
		for _, o := range objects {
			if err := r.remove(ctx, o); err != nil {
				why[o.id] = err
			}
		}
		if len(objects) == 0 && !r.unanswered {
			clear(r.made)
			break
		}
		if len(objects) == 0 {
			if err := sleep(ctx, r.o.Pause); err != nil {
				return err
			}
		}
	}
	return r.check(ctx, what, why)
}

// check looks once more, after sweep, and restores the user's instance.
func (r *run) check(ctx context.Context, what string, why map[string]error) error {
	left, err := r.ours(ctx)
	if err != nil {
		return r.leave(what, fmt.Errorf("the project cannot be looked at: %w", err))
	}
	clear(r.made)
	for _, o := range left {
		r.made[o.id] = o
		r.left(o, why[o.id])
	}
	if err := r.restore(ctx); err != nil {
		r.left(r.instance, fmt.Errorf("it is not as it was before: %w", err))
	}
	if len(r.report.Left) > 0 {
		return abort("%s could not be removed completely", what)
	}
	r.unanswered = false
	return nil
}

// leave reports all that this run has made and does not know to be gone.
func (r *run) leave(what string, err error) error {
	for _, id := range slices.Sorted(maps.Keys(r.made)) {
		r.left(r.made[id], errors.New("it is not known to be gone"))
	}
	return abort("%s could not be removed: %v", what, err)
}

// ours lists what this program has made, instances first: a disk is free when its instance is gone. The record of the
// state of the user's instance stays until the instance has that state.
func (r *run) ours(ctx context.Context) (objects []object, err error) {
	for _, kind := range kinds {
		all, err := r.list(ctx, "/"+kind+"?project="+r.projectID)
		if err != nil {
			return nil, err
		}
		for _, o := range all {
			if o.isOurs() && o.name != r.name(ran) && o.name != r.name(stood) {
				objects = append(objects, o)
			}
		}
	}
	return objects, nil
}

// The fixtures that keep the state of the user's instance: it ran, or it was stopped.
const (
	ran   = "ran"
	stood = "stood"
)

// remember keeps the state of the user's instance on the rack, before this program changes it for the first time.
func (r *run) remember(ctx context.Context, i object) error {
	if i.id != r.instance.id || r.before != "" {
		return nil
	}
	key := stood
	if i.runs() {
		key = ran
	}
	err := r.retry(ctx, func() (step, error) { return r.present(ctx, key) })
	if err == nil {
		r.before = key
	}
	return err
}

// restore gives the user's instance the state that it had before. Then the record of that can go.
func (r *run) restore(ctx context.Context) error {
	if r.before == "" {
		return nil
	}
	if r.instance.id != "" { // otherwise the project has no such instance any more
		condition := map[string]string{ran: theInstance + " runs", stood: theInstance}[r.before]
		if err := r.establish(ctx, condition); err != nil {
			return err
		}
	}
	if err := r.absent(ctx, r.before); err != nil {
		return err
	}
	r.before = ""
	return nil
}

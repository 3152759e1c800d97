// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main

import (
	"context"
	"errors"
	"fmt"
)

// countedLives is the number of volumes whose API calls are counted.
const countedLives = 5

// countedStep is a step in the life of a volume whose API calls are counted.
type countedStep struct {
	name string
	bar  bar
	do   func(name string) error
}

// countCalls counts the API calls of each RPC in the life of a volume, its snapshot and its copies. It also counts the
// RPCs that find a deleted object: the plugin verifies a 404 with one more call, and asks for the record of a volume
// that has grown with another.
func countCalls(ctx context.Context, b *bench) (_ []row, err error) {
	r, err := b.newRig()
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, r.stop()) }()
	var id, snapshot, restored, cloned string
	steps := []countedStep{
		{"CreateVolume", atMost(2), func(name string) (err error) { id, err = r.createVolume(ctx, name); return err }},
		{"ControllerPublishVolume", atMost(4), func(string) error { _, err := r.publish(ctx, id); return err }},
		{"ControllerUnpublishVolume", atMost(2), func(string) error { return r.unpublish(ctx, id) }},
		{
			"CreateSnapshot",
			atMost(2),
			func(name string) (err error) { snapshot, err = r.createSnapshot(ctx, name, id); return err },
		},
		{
			"CreateVolume/restored",
			atMost(3),
			func(name string) (err error) { restored, err = r.restore(ctx, name+"-restored", snapshot); return err },
		},
		{
			"CreateVolume/cloned",
			atMost(6),
			func(name string) (err error) { cloned, err = r.clone(ctx, name+"-cloned", id); return err },
		},
		{"DeleteSnapshot", atMost(2), func(string) error { return r.deleteSnapshot(ctx, snapshot) }},
		{"DeleteVolume/restored", atMost(2), func(string) error { return r.deleteVolume(ctx, restored) }},
		// docs/development/decisions/039-a-volume-grows-by-a-new-disk.md says what each call is for.
		{"ControllerExpandVolume", atMost(11), func(string) error { return r.expand(ctx, cloned) }},
		{"ControllerExpandVolume/again", atMost(1), func(string) error { return r.expand(ctx, cloned) }},
		{"ControllerPublishVolume/grown", atMost(5), func(string) error { _, err := r.publish(ctx, cloned); return err }},
		{"ControllerUnpublishVolume/grown", atMost(2), func(string) error { return r.unpublish(ctx, cloned) }},
		{"DeleteVolume/grown", atMost(8), func(string) error { return r.deleteVolume(ctx, cloned) }},
		{"DeleteVolume", atMost(2), func(string) error { return r.deleteVolume(ctx, id) }},
		// With a list of all disks, see docs/development/decisions/039-a-volume-grows-by-a-new-disk.md.
		{"ControllerUnpublishVolume/gone", atMost(5), func(string) error { return r.unpublish(ctx, id) }},
		{"DeleteVolume/gone", atMost(5), func(string) error { return r.deleteVolume(ctx, id) }},
		{"DeleteSnapshot/gone", atMost(2), func(string) error { return r.deleteSnapshot(ctx, snapshot) }},
	}
	counts, err := r.callsOfLives(ctx, steps)
	if err != nil {
		return nil, err
	}
	var rows []row
	for i, step := range steps {
		rows = append(rows, worst("calls/"+step.name, "calls", strictly(step.bar), counts[i]))
	}
	return rows, r.checkEmpty(ctx)
}

// callsOfLives is the number of API calls of each step, in each of the counted lives. The first life is not counted:
// during it the plugin makes the call that checks its rack at start.
func (r *rig) callsOfLives(ctx context.Context, steps []countedStep) ([][]float64, error) {
	counts := make([][]float64, len(steps))
	for life := range countedLives + 1 {
		for i, step := range steps {
			count, err := r.callsOf(ctx, func() error { return step.do(fmt.Sprintf("counted-%d", life)) })
			if err != nil {
				return nil, fmt.Errorf("%s: %w", step.name, err)
			}
			if life > 0 {
				counts[i] = append(counts[i], float64(count))
			}
		}
	}
	return counts, nil
}

// checkEmpty checks that the rack has no disks and snapshots left.
func (r *rig) checkEmpty(ctx context.Context) error {
	left, err := r.sim.Leftovers(ctx)
	if err == nil && left.Disks+left.Snapshots > 0 {
		err = fmt.Errorf("%d disks and %d snapshots are left", left.Disks, left.Snapshots)
	}
	return err
}

// callsOf is the number of API calls that the rack received during do.
func (r *rig) callsOf(ctx context.Context, do func() error) (count int, err error) {
	if err := r.sim.ClearCalls(ctx); err != nil {
		return 0, err
	}
	if err := do(); err != nil {
		return 0, err
	}
	calls, err := r.sim.Calls(ctx)
	for _, n := range calls.Counts {
		count += n
	}
	return count, err
}

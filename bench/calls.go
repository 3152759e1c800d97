// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// countedLives is the number of volumes whose API calls are counted.
const countedLives = 5

// countedStep is a step in the life of a volume whose API calls are counted.
type countedStep struct {
	name string
	do   func(name string) error
}

// foreignGroups is how many anti-affinity groups of other users a project has in the second part of countCalls.
const foreignGroups = 2500

// foreignSuffix ends the names of the rows that were measured with them.
const foreignSuffix = "/foreign-groups"

// roundLatency is the latency of the rack while the round trips are counted: an RPC takes this time for each call that
// waits for another one.
const roundLatency = 200 * time.Millisecond

// countCalls counts the API calls and the round trips of each RPC in the life of a volume, its snapshot and its copies,
// in a project without foreign groups and in one with many. It also counts the RPCs that find a deleted object: the
// plugin verifies a 404 with one more call, and asks for the record of a volume that has grown with another.
func countCalls(ctx context.Context, b *bench) (rows []row, err error) {
	r, err := b.newRig()
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, r.stop()) }()
	for _, groups := range []int{0, foreignGroups} {
		if err := r.createGroups(ctx, groups); err != nil {
			return nil, err
		}
		more, err := r.countLife(ctx, map[int]string{foreignGroups: foreignSuffix}[groups])
		if err != nil {
			return nil, err
		}
		rows = append(rows, more...)
	}
	return rows, nil
}

// createGroups makes anti-affinity groups that are no records.
func (r *rig) createGroups(ctx context.Context, groups int) error {
	return inParallel(ctx, groups, func(ctx context.Context, i int) error {
		_, err := r.sdk.AntiAffinityGroupCreate(ctx, oxide.AntiAffinityGroupCreateParams{
			Project: oxide.NameOrId(r.sim.Project),
			Body: &oxide.AntiAffinityGroupCreate{
				Name: oxide.Name(fmt.Sprintf("csi-foreign-%d", i)), Description: "of another user",
				Policy: oxide.AffinityPolicyAllow, FailureDomain: oxide.FailureDomainSled,
			},
		})
		return err
	})
}

// countLife is countCalls for one project. The names of the rows end with suffix.
func (r *rig) countLife(ctx context.Context, suffix string) ([]row, error) {
	var id, snapshot, restored, cloned string
	steps := []countedStep{
		{"CreateVolume", func(name string) (err error) { id, err = r.createVolume(ctx, name); return err }},
		// docs/development/decisions/044-a-look-beside-the-act.md says why it asks for two records.
		{"ControllerPublishVolume", func(string) error { _, err := r.publish(ctx, id); return err }},
		{"ControllerUnpublishVolume", func(string) error { return r.unpublish(ctx, id) }},
		{
			"CreateSnapshot",
			func(name string) (err error) { snapshot, err = r.createSnapshot(ctx, name, id); return err },
		},
		{
			"CreateVolume/restored",
			func(name string) (err error) { restored, err = r.restore(ctx, name+"-restored", snapshot); return err },
		},
		{
			"CreateVolume/cloned",
			func(name string) (err error) { cloned, err = r.clone(ctx, name+"-cloned", id); return err },
		},
		{"DeleteSnapshot", func(string) error { return r.deleteSnapshot(ctx, snapshot) }},
		{"DeleteVolume/restored", func(string) error { return r.deleteVolume(ctx, restored) }},
		// docs/development/decisions/039-a-volume-grows-by-a-new-disk.md says what each call is for.
		{"ControllerExpandVolume", func(string) error { return r.expand(ctx, cloned) }},
		{"ControllerExpandVolume/again", func(string) error { return r.expand(ctx, cloned) }},
		{"ControllerPublishVolume/grown", func(string) error { _, err := r.publish(ctx, cloned); return err }},
		{"ControllerUnpublishVolume/grown", func(string) error { return r.unpublish(ctx, cloned) }},
		{"DeleteVolume/grown", func(string) error { return r.deleteVolume(ctx, cloned) }},
		{"DeleteVolume", func(string) error { return r.deleteVolume(ctx, id) }},
		// With a list of all disks, see docs/development/decisions/039-a-volume-grows-by-a-new-disk.md.
		{"ControllerUnpublishVolume/gone", func(string) error { return r.unpublish(ctx, id) }},
		{"DeleteVolume/gone", func(string) error { return r.deleteVolume(ctx, id) }},
		{"DeleteSnapshot/gone", func(string) error { return r.deleteSnapshot(ctx, snapshot) }},
	}
	counts, err := r.callsOfLives(ctx, steps)
	if err != nil {
		return nil, err
	}
	rounds, err := r.roundsOf(ctx, steps)
	if err != nil {
		return nil, err
	}
	var rows []row
	for i, step := range steps {
		rows = append(rows, worst("calls/"+step.name+suffix, "calls", counts[i]))
		if name := "rounds/" + step.name + suffix; limitOf(name) != nil { // an expansion also waits
			rows = append(rows, worst(name, "round trips", rounds[i:i+1]))
		}
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

// roundsOf is the number of round trips of each step in one life on a rack with latency.
func (r *rig) roundsOf(ctx context.Context, steps []countedStep) (rounds []float64, err error) {
	set := func(latency time.Duration) error {
		millis := int(latency.Milliseconds())
		return r.sim.Set(ctx, simtest.Settings{LatencyMillis: &millis})
	}
	if err := set(roundLatency); err != nil {
		return nil, err
	}
	for _, step := range steps {
		begun := time.Now()
		if err := step.do("rounds"); err != nil {
			return nil, fmt.Errorf("%s: %w", step.name, err)
		}
		rounds = append(rounds, math.Floor(float64(time.Since(begun))/float64(roundLatency)))
	}
	return rounds, set(0)
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
	for operation, n := range calls.Counts {
		if operation != "current_user_access_token_list" { // of no RPC: a minute after the start, and then each hour
			count += n
		}
	}
	return count, err
}

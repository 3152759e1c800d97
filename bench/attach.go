// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

const (
	attachRounds    = 7
	attachInstances = 20
	// attachedEach is how many volumes each instance gets, all at the same time.
	attachedEach = 5
	attachments  = attachInstances * attachedEach
)

// attachMany attaches volumes to many instances at once by the plugin and by the bare SDK, in turns: on a rack that answers at
// once and on one that takes 50 ms for each call. The bare SDK makes the one call that attaches, or the three that the plugin
// makes.
func attachMany(ctx context.Context, b *bench) (_ []row, err error) {
	r, err := b.newRig("--instances=" + strings.Join(instanceNames(attachInstances), ","))
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, r.stop()) }()
	ids := make([]string, attachments)
	if err := inParallel(ctx, attachments, func(ctx context.Context, i int) (err error) {
		ids[i], err = r.createVolume(ctx, fmt.Sprintf("pvc-%032d", i))
		return err
	}); err != nil {
		return nil, err
	}
	var rows []row
	for _, latencyMillis := range []int{0, 50} {
		more, err := r.attachRounds(ctx, ids, latencyMillis)
		if err != nil {
			return nil, err
		}
		rows = append(rows, more...)
	}
	return rows, nil
}

func instanceNames(count int) (names []string) {
	for i := range count {
		names = append(names, fmt.Sprintf("node-%d", i))
	}
	return names
}

func (r *rig) attachRounds(ctx context.Context, ids []string, latencyMillis int) ([]row, error) {
	publish := func(r *rig, ctx context.Context, id string) error { _, err := r.publish(ctx, id); return err }
	plugin := contestant{publish: func() error { return r.onAll(ctx, ids, publish) }}
	sdk := contestant{publish: func() error { return r.onAll(ctx, ids, (*rig).attach) }}
	same := contestant{publish: func() error { return r.onAll(ctx, ids, (*rig).lookAndAttach) }}
	var calls []float64
	for range attachRounds + 1 {
		for _, c := range []*contestant{&plugin, &sdk, &same} {
			count, err := r.attachRound(ctx, c, ids, latencyMillis)
			if err != nil {
				return nil, err
			}
			if c == &plugin {
				calls = append(calls, float64(count)/attachments)
			}
		}
	}
	// Connections are made in the first round, which does not count.
	for _, c := range []*contestant{&plugin, &sdk, &same} {
		c.rounds = c.rounds[1:]
	}
	name := fmt.Sprintf("attach/%dms", latencyMillis)
	return []row{
		median(name+"/plugin", "ms", bar{}, plugin.rounds),
		median(name+"/sdk", "ms", bar{}, sdk.rounds),
		median(name+"/ratio", "×", bar{}, ratios(plugin.rounds, sdk.rounds)),
		median(name+"/ratio-same-calls", "×", bar{}, ratios(plugin.rounds, same.rounds)),
		worst(name+"/calls", "calls", strictly(atMost(3)), calls[1:]),
	}, nil
}

// attachRound lets one attach all volumes, and returns how many API calls that took.
func (r *rig) attachRound(ctx context.Context, c *contestant, ids []string, latencyMillis int) (calls int, err error) {
	if err := r.sim.Set(ctx, simtest.Settings{LatencyMillis: &latencyMillis}); err != nil {
		return 0, err
	}
	calls, err = r.callsOf(ctx, func() error { return c.time(c.publish) })
	if err != nil {
		return 0, err
	}
	c.endRound()
	return calls, r.detachAll(ctx, ids)
}

// detachAll takes the volumes back, once the rack has been asked whether they are all attached.
func (r *rig) detachAll(ctx context.Context, ids []string) error {
	if err := r.sim.Set(ctx, simtest.Settings{LatencyMillis: new(int)}); err != nil {
		return err
	}
	instances, err := r.sim.ListInstances(ctx)
	if err != nil {
		return err
	}
	for _, instance := range instances {
		if count := len(instance.Disks) - 1; count != attachedEach {
			return fmt.Errorf("%s has %d disks beside its boot disk, want %d", instance.Name, count, attachedEach)
		}
	}
	return r.onAll(ctx, ids, (*rig).detach)
}

// onAll does something with each volume and its instance, all at once.
func (r *rig) onAll(ctx context.Context, ids []string, do func(r *rig, ctx context.Context, id string) error) error {
	return inParallel(ctx, len(ids), func(ctx context.Context, i int) error {
		return do(r.at(r.sim.Instances[i%attachInstances]), ctx, ids[i])
	})
}

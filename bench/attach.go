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
	// attachedEach is the number of volumes per instance, attached at the same time.
	attachedEach = 5
	attachments  = attachInstances * attachedEach
)

// attachMany attaches volumes to many instances concurrently, alternating between the plugin and the bare SDK. It does
// so on a rack without latency and on a rack with 50 ms per call. The bare SDK makes either only the attach call, or
// the same four calls as the plugin.
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
	plugin := variant{publish: func() error { return r.onAll(ctx, ids, publish) }}
	sdk := variant{publish: func() error { return r.onAll(ctx, ids, (*rig).attach) }}
	same := variant{publish: func() error { return r.onAll(ctx, ids, (*rig).readAndAttach) }}
	var calls []float64
	for range attachRounds + 1 {
		for _, c := range []*variant{&plugin, &sdk, &same} {
			count, err := r.attachRound(ctx, c, ids, latencyMillis)
			if err != nil {
				return nil, err
			}
			if c == &plugin {
				calls = append(calls, float64(count)/attachments)
			}
		}
	}
	// The first round is not counted, because it opens the connections.
	for _, c := range []*variant{&plugin, &sdk, &same} {
		c.rounds = c.rounds[1:]
	}
	name := fmt.Sprintf("attach/%dms", latencyMillis)
	return []row{
		median(name+"/plugin", "ms", bar{}, plugin.rounds),
		median(name+"/sdk", "ms", bar{}, sdk.rounds),
		median(name+"/ratio", "×", bar{}, ratios(plugin.rounds, sdk.rounds)),
		median(name+"/ratio-same-calls", "×", bar{}, ratios(plugin.rounds, same.rounds)),
		worst(name+"/calls", "calls", strictly(atMost(4)), calls[1:]),
	}, nil
}

// attachRound attaches all volumes in one way, and returns the number of API calls.
func (r *rig) attachRound(ctx context.Context, c *variant, ids []string, latencyMillis int) (calls int, err error) {
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

// detachAll detaches all volumes, after a check that all were attached.
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

// onAll calls do for each volume with its instance, all concurrently.
func (r *rig) onAll(ctx context.Context, ids []string, do func(r *rig, ctx context.Context, id string) error) error {
	return inParallel(ctx, len(ids), func(ctx context.Context, i int) error {
		return do(r.at(r.sim.Instances[i%attachInstances]), ctx, ids[i])
	})
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

const (
	throughputRounds  = 5
	throughputVolumes = 3000
	// throughputWorkers is the default of Kubernetes' external-provisioner. The plugin asks for a record beside each
	// disk that it makes, and has at most 256 calls of a rack under way, as soon as that was seen to be quick.
	throughputWorkers = 100
)

// throughput creates many volumes concurrently, alternating between the plugin and the bare SDK. It does so on a rack
// without latency, where the processors are the limit, and on a rack with 50 ms per call, where the rack is the limit.
func throughput(ctx context.Context, b *bench) (_ []row, err error) {
	r, err := b.newRig()
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, r.stop()) }()
	// The first round is not counted: connections are opened, and buffers grow.
	if _, err := r.createMany(ctx, r.createVolume, 0); err != nil {
		return nil, err
	}
	var rows []row
	for _, at := range []struct {
		name          string
		latencyMillis int
		plugin, ratio bar
	}{
		{name: "throughput/0ms", plugin: atLeast(1000)},
		{name: "throughput/50ms", latencyMillis: 50, ratio: atLeast(0.9)},
	} {
		var plugin, sdk []float64
		for range throughputRounds {
			perSecond, err := r.createMany(ctx, r.createVolume, at.latencyMillis)
			if err != nil {
				return nil, fmt.Errorf("plugin: %w", err)
			}
			plugin = append(plugin, perSecond)
			if perSecond, err = r.createMany(ctx, r.createDisk, at.latencyMillis); err != nil {
				return nil, fmt.Errorf("bare SDK: %w", err)
			}
			sdk = append(sdk, perSecond)
		}
		rows = append(rows,
			median(at.name+"/plugin", "volumes/s", at.plugin, plugin),
			median(at.name+"/sdk", "volumes/s", bar{}, sdk),
			median(at.name+"/ratio", "×", at.ratio, ratios(plugin, sdk)))
	}
	return rows, nil
}

// createMany creates many volumes concurrently and returns the number per second. It checks that all disks exist, and
// deletes them.
func (r *rig) createMany(
	ctx context.Context,
	create func(context.Context, string) (string, error),
	latencyMillis int,
) (perSecond float64, err error) {
	if err := r.sim.Set(ctx, simtest.Settings{LatencyMillis: &latencyMillis}); err != nil {
		return 0, err
	}
	ids := make([]string, throughputVolumes)
	start := time.Now()
	err = inParallel(ctx, throughputVolumes, func(ctx context.Context, i int) (err error) {
		ids[i], err = create(ctx, fmt.Sprintf("pvc-%032d", i))
		return err
	})
	took := time.Since(start)
	if err != nil {
		return 0, err
	}
	left, err := r.sim.Leftovers(ctx)
	if err != nil {
		return 0, err
	}
	if left.Disks != throughputVolumes {
		return 0, fmt.Errorf("%d volumes were created, and the rack has %d disks", throughputVolumes, left.Disks)
	}
	if err := r.sim.Set(ctx, simtest.Settings{LatencyMillis: new(int)}); err != nil {
		return 0, err
	}
	err = inParallel(ctx, throughputVolumes, func(ctx context.Context, i int) error { return r.deleteDisk(ctx, ids[i]) })
	return throughputVolumes / took.Seconds(), err
}

// inParallel calls do for each index below count, with a fixed number of workers.
func inParallel(ctx context.Context, count int, do func(ctx context.Context, i int) error) error {
	workers, ctx := errgroup.WithContext(ctx)
	workers.SetLimit(throughputWorkers)
	for i := range count {
		workers.Go(func() error { return do(ctx, i) })
	}
	return workers.Wait()
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// loadRounds is how often each load is measured. The first round is not counted: it opens connections, and buffers
// grow.
const loadRounds = 4

// manyWorkers is how many calls [inParallel] makes at the same time.
const manyWorkers = 100

// load is many volumes at the same time: each is made, published, unpublished and deleted, by so many workers.
type load struct {
	name                    string
	workers, volumes, nodes int
	latency                 time.Duration
}

// loads are measured on a rack without latency, where the processors are the limit, and with 50 ms for each call. The
// manifests give each sidecar 20 workers, and external-provisioner's own default is 100. Eleven volumes fill an
// instance.
var loads = []load{
	{"0ms/100-workers", 100, 1000, 100, 0},
	{"50ms/20-workers", 20, 300, 50, 50 * time.Millisecond},
	{"50ms/100-workers", 100, 1000, 100, 50 * time.Millisecond},
	{"50ms/500-at-once", 500, 500, 50, 50 * time.Millisecond},
	{"50ms/11-on-one-node", 11, 11, 1, 50 * time.Millisecond},
}

// volumesPerNode is what an instance takes beside its boot disk.
const volumesPerNode = 11

// steps are the steps in the life of each volume of a load. The bare SDK makes only the call that changes something.
var steps = []struct {
	name        string
	plugin, sdk func(r *rig, ctx context.Context, name string, id *string) error
}{
	{
		"create",
		func(r *rig, ctx context.Context, name string, id *string) (err error) {
			*id, err = r.createVolume(ctx, name)
			return err
		},
		func(r *rig, ctx context.Context, name string, id *string) (err error) {
			*id, err = r.createDisk(ctx, name)
			return err
		},
	},
	{
		"publish",
		func(r *rig, ctx context.Context, _ string, id *string) error {
			_, err := r.publish(ctx, *id)
			return err
		},
		func(r *rig, ctx context.Context, _ string, id *string) error { return r.attach(ctx, *id) },
	},
	{
		"unpublish",
		func(r *rig, ctx context.Context, _ string, id *string) error { return r.unpublish(ctx, *id) },
		func(r *rig, ctx context.Context, _ string, id *string) error { return r.detach(ctx, *id) },
	},
	{
		"delete",
		func(r *rig, ctx context.Context, _ string, id *string) error { return r.deleteVolume(ctx, *id) },
		func(r *rig, ctx context.Context, _ string, id *string) error { return r.deleteDisk(ctx, *id) },
	},
}

// throughput measures each load, alternating between the plugin and the bare SDK.
func throughput(ctx context.Context, b *bench) (rows []row, err error) {
	for _, l := range loads {
		more, err := b.measureLoad(ctx, l)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", l.name, err)
		}
		rows = append(rows, more...)
	}
	return rows, nil
}

func (b *bench) measureLoad(ctx context.Context, l load) (rows []row, err error) {
	b = &bench{
		programs: b.programs,
		dir:      b.dir,
		args:     append([]string{fmt.Sprint("--max-disks=", volumesPerNode+1)}, b.args...),
	}
	r, err := b.newRig("--instances=" + strings.Join(instanceNames(l.nodes), ","))
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, r.stop()) }()
	millis := int(l.latency.Milliseconds())
	if err := r.sim.Set(ctx, simtest.Settings{LatencyMillis: &millis}); err != nil {
		return nil, err
	}
	plugin, sdk := map[string][]float64{}, map[string][]float64{}
	for round := range loadRounds {
		for way, rates := range []map[string][]float64{plugin, sdk} {
			ids := make([]string, l.volumes)
			for _, step := range steps {
				do := []func(*rig, context.Context, string, *string) error{step.plugin, step.sdk}[way]
				begun := time.Now()
				if err := inParallelBy(ctx, l.workers, l.volumes, func(ctx context.Context, i int) error {
					return do(r.at(r.sim.Instances[i%l.nodes]), ctx, fmt.Sprintf("pvc-%032d", i), &ids[i])
				}); err != nil {
					return nil, fmt.Errorf("%s: %w", step.name, err)
				}
				if round > 0 {
					rates[step.name] = append(rates[step.name], float64(l.volumes)/time.Since(begun).Seconds())
				}
			}
		}
	}
	for _, step := range steps {
		name := "throughput/" + l.name + "/" + step.name
		rows = append(rows,
			median(name+"/plugin", "volumes/s", plugin[step.name]),
			median(name+"/sdk", "volumes/s", sdk[step.name]),
			median(name+"/ratio", "×", ratios(plugin[step.name], sdk[step.name])))
	}
	return rows, r.checkEmpty(ctx)
}

func instanceNames(count int) (names []string) {
	for i := range count {
		names = append(names, fmt.Sprintf("node-%d", i))
	}
	return names
}

// inParallel calls do for each index below count, with many workers.
func inParallel(ctx context.Context, count int, do func(ctx context.Context, i int) error) error {
	return inParallelBy(ctx, manyWorkers, count, do)
}

func inParallelBy(ctx context.Context, workers, count int, do func(ctx context.Context, i int) error) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(workers)
	for i := range count {
		group.Go(func() error { return do(ctx, i) })
	}
	return group.Wait()
}

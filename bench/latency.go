// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"
)

const (
	latencyRounds = 11
	// perRound is how often each operation runs in a round. The operations alternate, so that noise affects all of them
	// equally.
	perRound = 50
	// An expansion waits four seconds (docs/development/decisions/044-a-look-beside-the-act.md), so few are measured.
	expandRounds = 5
)

// latency compares single RPCs with calls of the bare SDK. The rack adds no latency, so the ratio is an upper bound.
// With a slow rack the number of calls matters instead, see calls.go.
func latency(ctx context.Context, b *bench) (_ []row, err error) {
	r, err := b.newRig()
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, r.stop()) }()
	blanks, err := r.createLatency(ctx, "CreateVolume", r.createVolume, r.createDisk)
	if err != nil {
		return nil, err
	}
	restores, err := r.restoreLatency(ctx)
	if err != nil {
		return nil, err
	}
	expansions, err := r.expandLatency(ctx)
	if err != nil {
		return nil, err
	}
	publishes, err := r.publishLatency(ctx)
	return slices.Concat(blanks, restores, expansions, publishes), err
}

// restoreLatency compares a volume from a snapshot with the one API call that creates such a disk. The plugin reads the
// snapshot first.
func (r *rig) restoreLatency(ctx context.Context) (_ []row, err error) {
	id, err := r.createVolume(ctx, "source")
	if err != nil {
		return nil, err
	}
	snapshot, err := r.createSnapshot(ctx, "snapshot", id)
	if err != nil {
		return nil, err
	}
	rows, err := r.createLatency(ctx, "CreateVolume/restored",
		func(ctx context.Context, name string) (string, error) { return r.restore(ctx, name, snapshot) },
		func(ctx context.Context, name string) (string, error) {
			return r.createDiskFrom(
				ctx,
				anotherCluster,
				name,
				oxide.DiskSource{Value: &oxide.DiskSourceSnapshot{SnapshotId: snapshot}},
			)
		})
	return rows, errors.Join(err, r.deleteSnapshot(ctx, snapshot), r.deleteVolume(ctx, id))
}

// expandLatency compares an expansion with the one API call that creates a disk from a snapshot, which is the step of
// it that a user would wait for at least.
func (r *rig) expandLatency(ctx context.Context) (_ []row, err error) {
	source, err := r.createVolume(ctx, "source")
	if err != nil {
		return nil, err
	}
	snapshot, err := r.createSnapshot(ctx, "snapshot", source)
	if err != nil {
		return nil, err
	}
	plugin, sdk := variant{}, variant{}
	for round := range expandRounds {
		name := fmt.Sprintf("expanded-%d", round)
		id, err := r.createVolume(ctx, name)
		if err != nil {
			return nil, err
		}
		if err := plugin.time(func() error { return r.expand(ctx, id) }); err != nil {
			return nil, err
		}
		var copied string
		if err := sdk.time(func() (err error) {
			copied, err = r.createDiskFrom(
				ctx, anotherCluster, name, oxide.DiskSource{Value: &oxide.DiskSourceSnapshot{SnapshotId: snapshot}})
			return err
		}); err != nil {
			return nil, err
		}
		if err := errors.Join(r.deleteVolume(ctx, id), r.deleteDisk(ctx, copied)); err != nil {
			return nil, err
		}
		plugin.endRound()
		sdk.endRound()
	}
	return []row{
		median("latency/ControllerExpandVolume/plugin", "ms", plugin.rounds),
		median("latency/ControllerExpandVolume/sdk", "ms", sdk.rounds),
		median("latency/ControllerExpandVolume/ratio", "×", ratios(plugin.rounds, sdk.rounds)),
	}, errors.Join(r.deleteSnapshot(ctx, snapshot), r.deleteVolume(ctx, source))
}

// createLatency creates disks in both ways, alternating, and deletes them.
func (r *rig) createLatency(
	ctx context.Context,
	rpc string,
	byPlugin, bySDK func(context.Context, string) (string, error),
) ([]row, error) {
	plugin, sdk := variant{create: byPlugin}, variant{create: bySDK}
	for round := range latencyRounds {
		for i := range perRound {
			for _, c := range []*variant{&plugin, &sdk} {
				var id string
				err := c.time(func() (err error) { id, err = c.create(ctx, fmt.Sprintf("latency-%d-%d", round, i)); return err })
				if err != nil {
					return nil, err
				}
				if err := r.deleteDisk(ctx, id); err != nil {
					return nil, err
				}
			}
		}
		plugin.endRound()
		sdk.endRound()
	}
	return []row{
		median("latency/"+rpc+"/plugin", "ms", plugin.rounds),
		median("latency/"+rpc+"/sdk", "ms", sdk.rounds),
		median("latency/"+rpc+"/ratio", "×", ratios(plugin.rounds, sdk.rounds)),
	}, nil
}

// publishLatency compares ControllerPublishVolume with the attach call alone, and with the four calls that the plugin
// makes: before it attaches, it reads the disk and the instance's other disks, and afterwards the rack's records, of
// which there are none.
func (r *rig) publishLatency(ctx context.Context) ([]row, error) {
	id, err := r.createVolume(ctx, "published")
	if err != nil {
		return nil, err
	}
	plugin := variant{publish: func() error { _, err := r.publish(ctx, id); return err }}
	sdk := variant{publish: func() error { return r.attach(ctx, id) }}
	same := variant{publish: func() error { return r.readAndAttach(ctx, id) }}
	all := []*variant{&plugin, &sdk, &same}
	for range latencyRounds {
		for range perRound {
			for _, c := range all {
				if err := c.time(c.publish); err != nil {
					return nil, err
				}
				if err := r.detach(ctx, id); err != nil {
					return nil, err
				}
			}
		}
		for _, c := range all {
			c.endRound()
		}
	}
	return []row{
		median("latency/ControllerPublishVolume/plugin", "ms", plugin.rounds),
		median("latency/ControllerPublishVolume/sdk", "ms", sdk.rounds),
		median("latency/ControllerPublishVolume/ratio", "×", ratios(plugin.rounds, sdk.rounds)),
		median("latency/ControllerPublishVolume/ratio-same-calls", "×", ratios(plugin.rounds, same.rounds)),
	}, r.deleteVolume(ctx, id)
}

// readAndAttach makes the calls of a ControllerPublishVolume by the bare SDK.
func (r *rig) readAndAttach(ctx context.Context, diskID string) error {
	if _, err := r.sdk.DiskView(ctx, oxide.DiskViewParams{Disk: oxide.NameOrId(diskID)}); err != nil {
		return err
	}
	if _, err := r.sdk.InstanceDiskList(
		ctx,
		oxide.InstanceDiskListParams{Instance: oxide.NameOrId(r.node.ID)},
	); err != nil {
		return err
	}
	if err := r.attach(ctx, diskID); err != nil {
		return err
	}
	_, err := r.sdk.AntiAffinityGroupList(
		ctx,
		oxide.AntiAffinityGroupListParams{Project: oxide.NameOrId(r.sim.Project)},
	)
	return err
}

// variant is one of several ways to do the same operation. They are timed alternately.
type variant struct {
	create  func(ctx context.Context, name string) (id string, err error)
	publish func() error

	took []time.Duration
	// rounds has the median of each round, in ms.
	rounds []float64
}

func (c *variant) time(do func() error) error {
	start := time.Now()
	err := do()
	c.took = append(c.took, time.Since(start))
	return err
}

func (c *variant) endRound() {
	c.rounds = append(c.rounds, milliseconds(middle(c.took)))
	c.took = c.took[:0]
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// ratios divides round by round, because noise of the machine in a round affects both.
func ratios(a, b []float64) []float64 {
	quotients := make([]float64, len(a))
	for i := range a {
		quotients[i] = a[i] / b[i]
	}
	return quotients
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

const (
	// restartedVolumes is the number of volumes of one instance.
	restartedVolumes = 8
	restartedNodes   = 3
	// restartTakes is the time of a stop and of a start on this rack. An instance is down for at least twice that time.
	restartTakes = 100 * time.Millisecond
	restartAgain = 50 * time.Millisecond
)

// plannedRestarts measures a rack that attaches disks only to stopped instances. It counts the restarts for a number of
// volumes, and measures the downtime of instances: for all volumes of one instance at once, for their return to that
// instance, and for a rollout over three instances.
func plannedRestarts(ctx context.Context, b *bench) (_ []row, err error) {
	with := *b
	with.args = append(
		slices.Clone(b.args),
		"--max-disks=12",
		"--attach-mode=restart",
		"--restart-shutdown=hard",
		"--metadata=none",
		"--restart-window=1s",
		"--restart-max-down=3",
		"--restart-cool-down=0s",
	)
	r, err := with.newRigOn("--instances=node-0,node-1,node-2,node-3", "--state-time="+restartTakes.String())
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, r.stop()) }()
	ids := make([]string, restartedVolumes*(restartedNodes+1))
	for i := range ids {
		if ids[i], err = r.createVolume(ctx, fmt.Sprintf("restarted-%d", i)); err != nil {
			return nil, err
		}
	}
	one := ids[:restartedVolumes]
	var rows []row
	for _, part := range []struct {
		name string
		do   func() error
	}{
		{"restarts/8-volumes-on-1-node", func() error { return r.publishOn(ctx, one, r.sim.Instances[:1]) }},
		{"restarts/8-volumes-return", func() error {
			for _, id := range one {
				if err := r.unpublish(ctx, id); err != nil {
					return err
				}
			}
			return r.publishOn(ctx, one, r.sim.Instances[:1])
		}},
		{"restarts/24-volumes-on-3-nodes", func() error { return r.publishOn(ctx, ids[restartedVolumes:], r.sim.Instances[1:]) }},
	} {
		count, down, err := r.restartsOf(ctx, part.do)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", part.name, err)
		}
		rows = append(rows, worst(part.name, "restarts", []float64{float64(count)}))
		if len(down) > 0 {
			rows = append(rows, median(part.name+"/down", "ms", down))
		}
	}
	return rows, nil
}

// publishOn publishes volumes concurrently, on the nodes in turn. It repeats each request while a restart is planned.
func (r *rig) publishOn(ctx context.Context, ids []string, nodes []simtest.Instance) error {
	publishing, ctx := errgroup.WithContext(ctx)
	for i, id := range ids {
		at := r.at(nodes[i%len(nodes)])
		publishing.Go(func() error {
			for {
				_, err := at.publish(ctx, id)
				if status.Code(err) != codes.FailedPrecondition {
					return err
				}
				select {
				case <-ctx.Done():
					return ctx.Err()
				case <-time.After(restartAgain):
				}
			}
		})
	}
	return publishing.Wait()
}

// restartsOf returns how many instances the rack stopped and started during do, and the downtime of each, in
// milliseconds.
func (r *rig) restartsOf(ctx context.Context, do func() error) (count int, down []float64, err error) {
	if err := r.sim.ClearCalls(ctx); err != nil {
		return 0, nil, err
	}
	var watching sync.WaitGroup
	watch, stop := context.WithCancel(ctx)
	watching.Go(func() { down = r.measureDowntimes(watch) })
	err = do()
	stop()
	watching.Wait()
	if err != nil {
		return 0, nil, err
	}
	calls, err := r.sim.Calls(ctx)
	if err != nil {
		return 0, nil, err
	}
	if stops, starts := calls.Counts["instance_stop"], calls.Counts["instance_start"]; starts != stops ||
		len(down) != stops {
		return 0, nil, fmt.Errorf("%d stops, %d starts, and instances were seen down %d times", stops, starts, len(down))
	}
	return calls.Counts["instance_stop"], down, nil
}

// measureDowntimes returns each downtime of an instance, in milliseconds, until ctx is done.
func (r *rig) measureDowntimes(ctx context.Context) (down []float64) {
	since := map[string]time.Time{}
	for {
		instances, err := r.sim.ListInstances(ctx)
		if err != nil {
			return down // the context is done
		}
		for _, instance := range instances {
			begun, known := since[instance.ID]
			switch running := instance.RunState == "running"; {
			case running && known:
				down = append(down, milliseconds(time.Since(begun)))
				delete(since, instance.ID)
			case !running && !known:
				since[instance.ID] = time.Now()
			}
		}
		select {
		case <-ctx.Done():
			return down
		case <-time.After(5 * time.Millisecond):
		}
	}
}

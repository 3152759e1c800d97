// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sync/errgroup"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// scaleSize is the size of a rack, and of the work that its one controller gets.
type scaleSize struct {
	instances, volumes int
	// rolled is the number of instances that restart, and rolledAtOnce how many of them do so at the same time.
	rolled, rolledAtOnce int
	// created is the number of volumes that are created at the same time.
	created int
	// listEvery is the pause between two lists of all volumes. Kubernetes' attacher lists every minute.
	listEvery time.Duration
	// outage is how long the rack is away; 0 means no outage. During it begin so many creates, and as many moves of a
	// volume to another instance.
	outage  time.Duration
	backlog int
}

const (
	// volumesEach is the number of volumes of an instance.
	volumesEach = 7
	// Each call of the rack takes a random time between these.
	scaleLatency    = 20 * time.Millisecond
	scaleLatencyMax = 200 * time.Millisecond
)

// shortScale is the scale measurement of every run: a small rack and a short outage.
func shortScale(ctx context.Context, b *bench) ([]row, error) {
	s, err := b.scale(ctx, scaleSize{
		instances: 70, volumes: 490, rolled: 10, rolledAtOnce: 5, created: 200,
		listEvery: 2 * time.Second, outage: 5 * time.Second, backlog: 30,
	})
	if err != nil {
		return nil, err
	}
	return s.rows("scale/short/"), nil
}

// scaleRun is one controller at work on a rack.
type scaleRun struct {
	*rig
	size scaleSize
	// ids are the volumes, and where has the indexes of the instances on which they are published.
	ids   []string
	where []int
	// made counts the created volumes that still exist.
	made atomic.Int64

	memory *memoryPeak
	times  *rpcTimes
	// usual are the times of the RPCs before the outages.
	usual  map[string][]time.Duration
	phases []phase
	ready  time.Duration
	// firstList is the time of the first list of all volumes, listCalls the API calls for it, and listRPCs its RPCs.
	firstList           time.Duration
	listCalls, listRPCs int
	rate                simtest.Rate
	atRest              float64
}

// phase is a part of the work.
type phase struct {
	name         string
	began, ended time.Time
	// back is when the rack was back, after an outage.
	back time.Time
	// peak is the highest anonymous memory, in MiB, and rpcs the number of RPCs, repetitions included.
	peak float64
	rpcs int
}

// scale seeds a rack, starts a controller, gives it work, and checks where all volumes are at the end.
func (b *bench) scale(ctx context.Context, size scaleSize) (_ *scaleRun, err error) {
	with := *b
	with.args = append(slices.Clone(b.args), "--max-disks=12", "--log-level=error")
	r, err := with.newRack("--hotplug", "--instances="+strings.Join(instanceNames(size.instances), ","))
	if err != nil {
		return nil, err
	}
	s := &scaleRun{rig: r, size: size, memory: &memoryPeak{}, times: newRPCTimes()}
	defer func() { err = errors.Join(err, s.stop()) }()
	if err := s.seed(ctx); err != nil {
		return nil, err
	}
	least, most := int(scaleLatency.Milliseconds()), int(scaleLatencyMax.Milliseconds())
	if err := errors.Join(
		s.sim.Set(ctx, simtest.Settings{LatencyMillis: &least, LatencyMaxMillis: &most}),
		s.sim.ClearCalls(ctx),
	); err != nil {
		return nil, err
	}
	if err := s.phase("cold start", func(*phase) error { return s.coldStart(ctx, &with) }); err != nil {
		return nil, err
	}
	if err := s.work(ctx); err != nil {
		return nil, err
	}
	if s.atRest, err = memoryOf(s.plugin.PID(), "RssAnon"); err != nil {
		return nil, err
	}
	if s.rate, err = s.sim.Rate(ctx); err != nil {
		return nil, err
	}
	return s, s.audit(ctx)
}

// seed creates the volumes by the bare SDK, each attached to its instance.
func (s *scaleRun) seed(ctx context.Context) error {
	s.ids, s.where = make([]string, s.size.volumes), make([]int, s.size.volumes)
	return inParallel(ctx, s.size.volumes, func(ctx context.Context, i int) (err error) {
		s.where[i] = i / volumesEach
		if s.ids[i], err = s.createDiskFrom(ctx, simtest.ClusterID, fmt.Sprintf("pvc-%032d", i), blank); err != nil {
			return err
		}
		return s.on(s.where[i]).attach(ctx, s.ids[i])
	})
}

// on is the rig with one of its instances.
func (s *scaleRun) on(instance int) *rig { return s.rig.at(s.sim.Instances[instance]) }

// phase times a part of the work. The pause before it keeps its calls in seconds of their own.
func (s *scaleRun) phase(name string, do func(*phase) error) error {
	time.Sleep(time.Second)
	s.memory.reset()
	p := phase{name: name, began: time.Now(), rpcs: -s.times.total()}
	if err := do(&p); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	p.ended, p.peak = time.Now(), s.memory.read()
	p.rpcs += s.times.total()
	s.phases = append(s.phases, p)
	return nil
}

// coldStart starts the controller and lists all volumes, as Kubernetes' attacher does at its start.
func (s *scaleRun) coldStart(ctx context.Context, b *bench) (err error) {
	began := time.Now()
	if s.plugin, err = b.startPlugin("controller", s.sim); err != nil {
		return err
	}
	s.ready = time.Since(began)
	s.memory.watch(s.plugin.PID())
	before, err := s.sim.Calls(ctx)
	if err != nil {
		return err
	}
	began = time.Now()
	count, err := s.listAll(ctx)
	s.firstList = time.Since(began)
	if err != nil {
		return err
	}
	// Every instance has a boot disk, which is in use and is listed.
	if want := s.size.volumes + s.size.instances; count != want {
		return fmt.Errorf("%d volumes are listed, want %d", count, want)
	}
	after, err := s.sim.Calls(ctx)
	s.listCalls = after.Counts["disk_list"] - before.Counts["disk_list"]
	s.listRPCs = s.times.total()
	return err
}

// listAll lists all volumes without max_entries, as Kubernetes' attacher does.
func (s *scaleRun) listAll(ctx context.Context) (count int, err error) {
	for token := ""; ; {
		var resp *csi.ListVolumesResponse
		if err := s.untilDone(ctx, "ListVolumes", func(ctx context.Context) (err error) {
			resp, err = s.plugin.ListVolumes(ctx, &csi.ListVolumesRequest{StartingToken: token})
			return err
		}); err != nil {
			return count, err
		}
		count += len(resp.GetEntries())
		if token = resp.GetNextToken(); token == "" {
			return count, nil
		}
	}
}

// work gives the controller its work, with a list of all volumes now and then in the background.
func (s *scaleRun) work(ctx context.Context) (err error) {
	listing, stop := context.WithCancel(ctx)
	lists := make(chan error, 1)
	go func() { lists <- s.listRepeatedly(listing) }()
	defer func() {
		stop()
		if listed := <-lists; err == nil && !errors.Is(listed, context.Canceled) {
			err = listed
		}
	}()
	if err := s.phase("rolling restart", func(*phase) error { return s.rollingRestart(ctx) }); err != nil {
		return err
	}
	if err := s.phase("storm of creates", func(*phase) error { return s.createMany(ctx) }); err != nil {
		return err
	}
	s.usual = s.times.clone()
	if s.size.outage == 0 {
		return nil
	}
	endless := 0
	refusing := simtest.Fault{Operation: "*", Kind: simtest.FaultReset, Count: &endless}
	if err := s.phase("outage, reset", func(p *phase) error {
		return s.outage(ctx, p,
			func() error { _, err := s.sim.Inject(ctx, refusing); return err },
			func() error { return s.sim.ClearFaults(ctx) })
	}); err != nil {
		return err
	}
	return s.phase("outage, silence", func(p *phase) error {
		return s.outage(ctx, p,
			func() error { return s.sim.Signal(syscall.SIGSTOP) },
			func() error { return s.sim.Signal(syscall.SIGCONT) })
	})
}

func (s *scaleRun) listRepeatedly(ctx context.Context) error {
	every := time.NewTicker(s.size.listEvery)
	defer every.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-every.C:
		}
		if _, err := s.listAll(ctx); err != nil {
			return err
		}
	}
}

// rollingRestart moves all volumes of some instances to other instances, and back.
func (s *scaleRun) rollingRestart(ctx context.Context) error {
	rolling, ctx := errgroup.WithContext(ctx)
	rolling.SetLimit(s.size.rolledAtOnce)
	for instance := range s.size.rolled {
		rolling.Go(func() error {
			for range 2 {
				moving, ctx := errgroup.WithContext(ctx)
				for i := instance * volumesEach; i < (instance+1)*volumesEach; i++ {
					moving.Go(func() error { return s.move(ctx, i) })
				}
				if err := moving.Wait(); err != nil {
					return err
				}
			}
			return nil
		})
	}
	return rolling.Wait()
}

// move unpublishes a volume and publishes it on another instance, or back on its first one. Volumes with neighbouring
// indexes go to different instances.
func (s *scaleRun) move(ctx context.Context, i int) error {
	from, to := s.where[i], i/volumesEach
	if from == to {
		to = (i + s.size.instances/2) % s.size.instances
	}
	if err := s.untilDone(ctx, "ControllerUnpublishVolume", func(ctx context.Context) error {
		return s.on(from).unpublish(ctx, s.ids[i])
	}); err != nil {
		return err
	}
	s.where[i] = to
	return s.untilDone(ctx, "ControllerPublishVolume", func(ctx context.Context) error {
		_, err := s.on(to).publish(ctx, s.ids[i])
		return err
	})
}

// createMany creates volumes all at the same time, and then deletes them.
func (s *scaleRun) createMany(ctx context.Context) error {
	ids := make([]string, s.size.created)
	creating, all := errgroup.WithContext(ctx)
	for i := range ids {
		creating.Go(func() (err error) { ids[i], err = s.create(all, fmt.Sprintf("storm-%d", i)); return err })
	}
	if err := creating.Wait(); err != nil {
		return err
	}
	deleting, all := errgroup.WithContext(ctx)
	for _, id := range ids {
		deleting.Go(func() error {
			defer s.made.Add(-1)
			return s.untilDone(all, "DeleteVolume", func(ctx context.Context) error { return s.deleteVolume(ctx, id) })
		})
	}
	return deleting.Wait()
}

func (s *scaleRun) create(ctx context.Context, name string) (id string, err error) {
	defer s.made.Add(1)
	return id, s.untilDone(ctx, "CreateVolume", func(ctx context.Context) (err error) {
		id, err = s.createVolume(ctx, name)
		return err
	})
}

// outage takes the rack away for a time, during which work goes on coming in, and waits until all work is done.
func (s *scaleRun) outage(ctx context.Context, p *phase, begin, end func() error) (err error) {
	name := strings.ReplaceAll(p.name, " ", "-")
	if err := begin(); err != nil {
		return err
	}
	back := sync.OnceValue(end)
	defer func() { err = errors.Join(err, back()) }()
	working, ctx := errgroup.WithContext(ctx)
	first := s.size.rolled * volumesEach
	every := time.NewTicker(s.size.outage / time.Duration(s.size.backlog))
	defer every.Stop()
	for i := range s.size.backlog {
		working.Go(func() error { _, err := s.create(ctx, fmt.Sprintf("%s-%d", name, i)); return err })
		working.Go(func() error { return s.move(ctx, first+i) })
		select {
		case <-ctx.Done():
			return working.Wait()
		case <-every.C:
		}
	}
	if err := back(); err != nil {
		return err
	}
	p.back = time.Now()
	return working.Wait()
}

// audit compares the rack with what the controller has answered.
func (s *scaleRun) audit(ctx context.Context) error {
	instances, err := s.sim.ListInstances(ctx)
	if err != nil {
		return err
	}
	holder, attached := map[string]string{}, 0
	for _, instance := range instances {
		for _, disk := range instance.Disks {
			holder[disk.ID] = instance.ID
			attached++
		}
	}
	for i, id := range s.ids {
		if want := s.sim.Instances[s.where[i]]; holder[id] != want.ID {
			return fmt.Errorf("volume %s is published on %s, and its disk is attached to %q", id, want.ID, holder[id])
		}
	}
	if want := len(s.ids) + len(instances); attached != want || len(holder) != want {
		return fmt.Errorf("%d disks are attached, want %d", attached, want)
	}
	left, err := s.sim.Leftovers(ctx)
	if want := len(s.ids) + int(s.made.Load()); err == nil && left.Disks != want {
		err = fmt.Errorf("the rack has %d disks, want %d", left.Disks, want)
	}
	return err
}

// rows are the results, with a prefix before their names.
func (s *scaleRun) rows(prefix string) []row {
	one := func(name, unit string, value float64) row {
		return median(prefix+name, unit, []float64{value})
	}
	rows := []row{
		one("cold start/ready", "ms", milliseconds(s.ready)),
		one("list/time", "s", s.firstList.Seconds()),
		one("list/RPCs", "RPCs", float64(s.listRPCs)),
		one("list/calls", "calls", float64(s.listCalls)),
	}
	for _, p := range s.phases {
		rows = append(rows, s.phaseRows(p, one)...)
	}
	for _, rpc := range slices.Sorted(maps.Keys(s.usual)) {
		took := s.usual[rpc]
		rows = append(rows,
			one(rpc+"/p50", "ms", percentile(took, 50)),
			one(rpc+"/p99", "ms", percentile(took, 99)))
	}
	for _, p := range s.phases {
		rows = append(rows, one("anonymous memory/"+p.name, "MiB", p.peak))
	}
	return append(rows, one("anonymous memory/at the end", "MiB", s.atRest))
}

func (s *scaleRun) phaseRows(p phase, one func(name, unit string, value float64) row) []row {
	if p.back.IsZero() {
		calls, took := s.callsBetween(p.began, p.ended), p.ended.Sub(p.began).Seconds()
		return []row{
			one(p.name+"/time", "s", took),
			one(p.name+"/calls per second", "calls/s", sum(calls)/took),
			one(p.name+"/most calls in a second", "calls", slices.Max(calls)),
		}
	}
	during, after := s.callsBetween(p.began, p.back), s.callsBetween(p.back, p.ended)
	return []row{
		one(p.name+"/calls per second", "calls/s", sum(during)/p.back.Sub(p.began).Seconds()),
		one(p.name+"/most calls in a second of the return", "calls", slices.Max(after)),
		one(p.name+"/RPCs with repetitions", "RPCs", float64(p.rpcs)),
		one(p.name+"/backlog is done after", "s", p.ended.Sub(p.back).Seconds()),
	}
}

// callsBetween are the rack's calls in each second of a time.
func (s *scaleRun) callsBetween(from, to time.Time) []float64 {
	first, last := int(from.Sub(s.rate.Began).Seconds()), int(to.Sub(s.rate.Began).Seconds())
	calls := make([]float64, 0, last-first+1)
	for second := first; second <= last; second++ {
		count := 0.0
		if second >= 0 && second < len(s.rate.Seconds) {
			count = float64(s.rate.Seconds[second])
		}
		calls = append(calls, count)
	}
	return calls
}

func sum(values []float64) (total float64) {
	for _, v := range values {
		total += v
	}
	return total
}

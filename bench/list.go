// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main

import (
	"context"
	"errors"
	"fmt"
	"math"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

const (
	listRounds = 5
	// listedDisks is the number of disks on the rack. foreignDisks of them belong to another cluster, so no list shows
	// them.
	listedDisks  = 10_000
	foreignDisks = 3_000
	// listPage is the number of entries per page. Kubernetes' attacher requests 100.
	listPage = 100
	// receiveLimit is the default limit for the size of a message that a gRPC client receives, in bytes.
	receiveLimit = 4 << 20
)

// lists measures the list of a project with many disks: in one response, by pages, and the last page by another
// replica, which first has to find its position. A separate plugin makes each list, so its peak memory is the memory of
// the lists. For comparison the bare SDK reads all disks into memory.
func lists(ctx context.Context, b *bench) (_ []row, err error) {
	r, err := b.newRig()
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, r.stop()) }()
	if err := r.fill(ctx, 0); err != nil {
		return nil, err
	}
	// The boot disk of an instance is in use and is listed.
	volumes := listedDisks - foreignDisks + len(r.sim.Instances)
	whole := &lister{name: "list/whole", volumes: volumes}
	pages := &lister{name: "list/pages", volumes: volumes, pageSize: listPage}
	replica := &lister{
		name:     "list/another replica",
		volumes:  (volumes-1)%listPage + 1,
		pageSize: listPage,
	}
	for _, l := range []*lister{whole, pages, replica} {
		if l.plugin, err = b.startPlugin("controller", r.sim); err != nil {
			return nil, err
		}
		defer func() { err = errors.Join(err, l.plugin.Stop()) }()
	}
	sdk, err := r.measureLists(ctx, whole, pages, replica)
	if err != nil {
		return nil, err
	}
	rows := []row{
		median("list/sdk", "ms", sdk.rounds),
		median("list/whole/ratio", "×", ratios(whole.rounds, sdk.rounds)),
		median("list/pages/ratio", "×", ratios(pages.rounds, sdk.rounds)),
		median("list/whole/response", "MB", []float64{float64(whole.bytes) / megabyte}),
		median(
			"list/whole/entry",
			"bytes",
			[]float64{float64(whole.bytes) / float64(volumes)},
		),
	}
	for _, l := range []*lister{whole, pages, replica} {
		more, err := l.rows()
		if err != nil {
			return nil, err
		}
		rows = append(rows, more...)
	}
	slow, err := r.slowList(ctx, whole)
	return append(rows, slow), err
}

// slowList lists twice as many disks on a rack that takes 110 ms for each call, as in docs/explanation/scale.md.
func (r *rig) slowList(ctx context.Context, l *lister) (row, error) {
	if err := r.fill(ctx, listedDisks); err != nil {
		return row{}, err
	}
	l.volumes += listedDisks
	millis := 110
	if err := r.sim.Set(ctx, simtest.Settings{LatencyMillis: &millis}); err != nil {
		return row{}, err
	}
	slow := variant{}
	err := slow.time(func() error { return l.list(ctx) })
	slow.endRound()
	return median("list/20000-disks-at-110ms", "ms", slow.rounds), err
}

// measureLists measures the three lists and the bare SDK in turn.
func (r *rig) measureLists(ctx context.Context, whole, pages, replica *lister) (sdk variant, err error) {
	// The first round is not counted: it opens connections, and the plugins make the calls that check their rack at start.
	for round := range listRounds + 1 {
		if err := errors.Join(
			whole.measure(ctx, r),
			pages.measure(ctx, r),
			replica.takeOver(ctx, r, pages.lastToken),
		); err != nil {
			return variant{}, err
		}
		if err := sdk.time(func() error { return r.listDisks(ctx) }); err != nil {
			return variant{}, err
		}
		sdk.endRound()
		if round == 0 {
			for _, l := range []*lister{whole, pages, replica} {
				l.rounds, l.counts = nil, nil
			}
			sdk.rounds = nil
		}
	}
	return sdk, nil
}

// fill creates the disks by the bare SDK.
func (r *rig) fill(ctx context.Context, from int) error {
	return inParallel(ctx, listedDisks, func(ctx context.Context, i int) error {
		cluster := simtest.ClusterID
		if from+i < foreignDisks {
			cluster = anotherCluster
		}
		_, err := r.createDiskFrom(ctx, cluster, fmt.Sprintf("pvc-%032d", from+i), blank)
		return err
	})
}

// listDisks reads all disks by the bare SDK.
func (r *rig) listDisks(ctx context.Context) error {
	disks, err := r.sdk.DiskListAllPages(ctx, oxide.DiskListParams{Project: oxide.NameOrId(r.sim.Project)})
	if err != nil {
		return fmt.Errorf("list disks: %w", err)
	}
	if want := listedDisks + len(r.sim.Instances); len(disks) != want {
		return fmt.Errorf("the bare SDK lists %d disks, and the rack has %d", len(disks), want)
	}
	return nil
}

// lister is a plugin that only lists.
type lister struct {
	variant
	name   string
	plugin *simtest.Plugin
	// volumes is the expected number of entries.
	volumes int
	// pageSize 0 means a list in one response. from is the first token.
	pageSize int32
	from     string

	counts []float64
	// bytes is the size of the last list; lastToken is the token of its last page.
	bytes     int
	lastToken string
}

// takeOver lists from a token that another plugin has issued.
func (l *lister) takeOver(ctx context.Context, r *rig, token string) error {
	l.from = token
	return l.measure(ctx, r)
}

// measure is one round.
func (l *lister) measure(ctx context.Context, r *rig) error {
	count, err := r.callsOf(ctx, func() error { return l.time(func() error { return l.list(ctx) }) })
	if err != nil {
		return fmt.Errorf("%s: %w", l.name, err)
	}
	l.endRound()
	l.counts = append(l.counts, float64(count))
	return nil
}

func (l *lister) list(ctx context.Context) error {
	entries := 0
	l.bytes = 0
	for token := l.from; ; {
		resp, err := l.plugin.ListVolumes(
			ctx,
			&csi.ListVolumesRequest{MaxEntries: l.pageSize, StartingToken: token},
			grpc.MaxCallRecvMsgSize(math.MaxInt32),
		)
		if err != nil {
			return err
		}
		entries += len(resp.GetEntries())
		l.bytes += proto.Size(resp)
		l.lastToken = token
		if token = resp.GetNextToken(); token == "" {
			break
		}
	}
	if entries != l.volumes {
		return fmt.Errorf("%d volumes are listed, want %d", entries, l.volumes)
	}
	return nil
}

func (l *lister) rows() ([]row, error) {
	peak, err := memoryOf(l.plugin.PID(), "VmHWM")
	return []row{
		median(l.name+"/plugin", "ms", l.rounds),
		worst(l.name+"/calls", "calls", l.counts),
		median(l.name+"/peak memory", "MiB", []float64{peak}),
	}, err
}

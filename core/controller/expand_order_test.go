// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/core/controller"
	"github.com/oxidecomputer/oxide-csi-plugin/core/coretest"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack"
)

// The tests of this file explore an expansion. Each actor is a controller of its own, on one simulated rack. The requests
// of all actors run one at a time, in every order within the bound of the test. An actor can end at one of its requests.
// After each request the data of the volume must be in a safe place, and at the end the volume must be usable.

// growth is a rack with one volume, and the data of its disks and snapshots as a number: the last write.
type growth struct {
	*bubbleRig
	t      *testing.T
	volume string
	nodes  [2]string
	// data is the last write that a disk or a snapshot contains, by ID. written is the last write of all.
	data    map[string]int
	written int
	// deleted says that DeleteVolume answered OK.
	deleted bool
	// published is the node on which the volume is published.
	published string
	actors    []*growthActor
	broken    string
	log       []string
}

// growthActor is a controller whose requests wait for their turn.
type growthActor struct {
	*growth
	name    string
	service *controller.Service
	ctx     context.Context
	end     context.CancelFunc
	// next receives the actor that waits for its turn, and then it waits for turn.
	next chan<- *growthActor
	turn chan struct{}
	// endsAt is the number of the request at which the actor ends, -1 for never. executed says that the rack still executes
	// that request. fails makes the request fail instead, without an end.
	endsAt   int
	executed bool
	fails    bool
	sent     int
	ended    atomic.Bool
	free     bool
}

var errGrowthFault = errors.New("the connection broke")

func (a *growthActor) RoundTrip(req *http.Request) (*http.Response, error) {
	if a.ended.Load() {
		return nil, errEnded
	}
	if !a.free {
		a.next <- a
		<-a.turn
	}
	number := a.sent
	a.sent++
	if number == a.endsAt && !a.executed {
		return nil, a.fault()
	}
	resp, err := handlerTransport{a.rack.API()}.RoundTrip(req)
	if err == nil {
		a.log = append(a.log, fmt.Sprintf("%s: %s %s %d", a.name, req.Method, req.URL.Path, resp.StatusCode))
		resp = a.observe(req, resp)
	}
	a.check(req)
	if number == a.endsAt {
		return nil, a.fault()
	}
	return resp, err
}

func (a *growthActor) fault() error {
	if a.fails {
		return errGrowthFault
	}
	a.ended.Store(true)
	a.end()
	return errEnded
}

// observe copies the data of a snapshot and of a disk from a snapshot.
func (a *growthActor) observe(req *http.Request, resp *http.Response) *http.Response {
	body, err := io.ReadAll(resp.Body)
	coretest.Must(a.t, err)
	resp.Body = io.NopCloser(bytes.NewReader(body))
	if req.Method != http.MethodPost || resp.StatusCode != http.StatusCreated {
		return resp
	}
	var made struct {
		ID       string `json:"id"`
		Disk     string `json:"disk_id"`
		Snapshot string `json:"snapshot_id"`
	}
	coretest.Must(a.t, json.Unmarshal(body, &made))
	switch {
	case strings.HasPrefix(req.URL.Path, "/v1/snapshots"):
		a.data[made.ID] = a.data[made.Disk]
	case strings.HasPrefix(req.URL.Path, "/v1/disks") && made.Snapshot != "":
		a.data[made.ID] = a.data[made.Snapshot]
	}
	return resp
}

// check checks what must be true after each request.
func (g *growth) check(req *http.Request) {
	if g.broken != "" || g.deleted || req.Method == http.MethodGet {
		return
	}
	disks, snapshots, records := g.everything()
	for _, d := range disks {
		if g.data[d.Id] == g.written && g.isVolume(d) {
			return
		}
	}
	for _, s := range snapshots {
		attempt, is := strings.CutPrefix(string(s.Name), "csi-grow-")
		named := func(r oxide.AntiAffinityGroup) bool { return strings.Contains(r.Description, attempt) }
		if is && g.data[s.Id] == g.written && s.State == oxide.SnapshotStateReady && slices.ContainsFunc(records, named) {
			return
		}
	}
	if len(disks) > 0 || !g.deleting() {
		g.broken = "the data of the last write are nowhere, after " + req.Method + " " + req.URL.Path
	}
}

// deleting reports whether an actor deletes the volume.
func (g *growth) deleting() bool {
	return slices.ContainsFunc(g.actors, func(a *growthActor) bool { return a.name == "delete" })
}

// isVolume reports whether a disk is the volume's.
func (g *growth) isVolume(d oxide.Disk) bool {
	described, _ := rack.ParseDescription(d.Description)
	return d.Id == g.volume || described.Volume == g.volume
}

// everything lists the disks except boot disks, the snapshots and the records of the rack.
func (g *growth) everything() (disks []oxide.Disk, snapshots []oxide.Snapshot, records []oxide.AntiAffinityGroup) {
	ctx := context.Background()
	disks, err := g.SDK.DiskListAllPages(ctx, oxide.DiskListParams{Project: coretest.Project})
	coretest.Must(g.t, err)
	disks = slices.DeleteFunc(disks, func(d oxide.Disk) bool { return strings.HasSuffix(string(d.Name), "-boot") })
	snapshots, err = g.SDK.SnapshotListAllPages(ctx, oxide.SnapshotListParams{Project: coretest.Project})
	coretest.Must(g.t, err)
	records, err = g.SDK.AntiAffinityGroupListAllPages(ctx, oxide.AntiAffinityGroupListParams{Project: coretest.Project})
	coretest.Must(g.t, err)
	return disks, snapshots, records
}

func newGrowth(t *testing.T, quota int64, earlier bool) *growth {
	g := &growth{
		t: t, data: map[string]int{},
		bubbleRig: newBubbleRig(t, func(o *simrack.Options) {
			o.Instances = []string{"node-a", "node-b"}
			o.QuotaBytes = quota
		}),
	}
	g.nodes = [2]string{g.Node(t, "node-a"), g.Node(t, "node-b")}
	a := g.actor("setup", nil)
	created, err := a.service.CreateVolume(t.Context(), coretest.CreateRequest("v"))
	coretest.Must(t, err)
	g.volume = created.GetVolume().GetVolumeId()
	g.written = 1
	g.data[g.volume] = 1
	if earlier { // the volume has grown before
		coretest.Must(t, a.expand(2))
	}
	g.actors = nil
	return g
}

// actor returns an actor. Without a channel its requests do not wait.
func (g *growth) actor(name string, next chan<- *growthActor) *growthActor {
	a := &growthActor{growth: g, name: name, next: next, turn: make(chan struct{}), endsAt: -1, free: next == nil}
	client, err := rack.New(rack.Config{
		Name: "default", Host: "http://rack", Project: coretest.Project, Token: rack.FixedToken(coretest.Token),
		HTTPClient: &http.Client{Transport: a}, LostAnswerWait: time.Nanosecond,
	})
	coretest.Must(g.t, err)
	free := a.free
	a.free = true
	_, err = client.ProjectID(context.Background()) // the plugin asks when it starts
	coretest.Must(g.t, err)
	a.free, a.sent = free, 0
	a.service = controller.New(controller.Options{
		Racks: []*rack.Client{client}, Cluster: coretest.Cluster, MaxDisks: 8, Log: coretest.DiscardLog(),
		TemporaryAge: time.Hour,
	})
	a.ctx, a.end = context.WithCancel(context.Background())
	g.actors = append(g.actors, a)
	return a
}

func (a *growthActor) expand(gib int64) error {
	_, err := a.service.ControllerExpandVolume(a.ctx, &csi.ControllerExpandVolumeRequest{
		VolumeId: a.volume, CapacityRange: &csi.CapacityRange{RequiredBytes: gib * coretest.GiB},
	})
	return err
}

func (a *growthActor) publish(node string) error {
	resp, err := a.service.ControllerPublishVolume(a.ctx, &csi.ControllerPublishVolumeRequest{
		VolumeId: a.volume, NodeId: node, VolumeCapability: coretest.MountWriter(),
	})
	if err == nil && resp.GetPublishContext()["diskID"] != a.volume {
		a.broken = "the publish context has another ID"
	}
	return err
}

// backing is the disk of the volume as the rack has it.
func (g *growth) backing() (oxide.Disk, bool) {
	disks, _, _ := g.everything()
	i := slices.IndexFunc(disks, g.isVolume)
	if i < 0 {
		return oxide.Disk{}, false
	}
	return disks[i], true
}

// write is a write of the workload to the volume, which is published.
func (g *growth) write() {
	disk, found := g.backing()
	if _, attached := disk.State.AsAttached(); !found || !attached {
		g.broken = "the volume is published, and no disk of it is attached"
		return
	}
	g.written++
	g.data[disk.Id] = g.written
}

// growthStories are what actors do.
var growthStories = map[string]func(a *growthActor){
	"expand":      func(a *growthActor) { _ = a.expand(3) },
	"expand more": func(a *growthActor) { _ = a.expand(4) },
	"publish": func(a *growthActor) {
		if a.publish(a.nodes[0]) == nil {
			a.published = a.nodes[0]
			a.write()
		}
	},
	"publish, unpublish": func(a *growthActor) {
		if a.publish(a.nodes[0]) == nil {
			a.write()
		}
		_, _ = a.service.ControllerUnpublishVolume(
			a.ctx, &csi.ControllerUnpublishVolumeRequest{VolumeId: a.volume, NodeId: a.nodes[0]})
	},
	"delete": func(a *growthActor) {
		_, err := a.service.DeleteVolume(a.ctx, &csi.DeleteVolumeRequest{VolumeId: a.volume})
		a.deleted = a.deleted || err == nil
	},
	"snapshot": func(a *growthActor) {
		resp, err := a.service.CreateSnapshot(a.ctx, &csi.CreateSnapshotRequest{SourceVolumeId: a.volume, Name: "s"})
		if err == nil && (resp.GetSnapshot().GetSourceVolumeId() != a.volume ||
			a.data[resp.GetSnapshot().GetSnapshotId()] != a.written) {
			a.broken = "the snapshot is of another volume or lacks data"
		}
	},
	"clone": func(a *growthActor) {
		resp, err := a.service.CreateVolume(a.ctx, from("c", fromVolume(a.volume)))
		if err == nil && a.data[resp.GetVolume().GetVolumeId()] != a.written {
			a.broken = "the clone lacks data"
		}
	},
	"settle": func(a *growthActor) { _ = a.service.SettleNow(a.ctx) },
}

// explored is one run of actors: which of them ends, at which of its requests.
type explored struct {
	stories  []string
	earlier  bool
	endsAt   int // of the first story
	executed bool
	fails    bool
	// switches is how often another actor continues although the last one could.
	switches int
}

// runOrder runs the actors in the order that choose decides, and then brings the volume to an end.
func runOrder(t *testing.T, e explored, choose func(waiting []string, last string) string) (order []string) {
	g := newGrowth(t, 0, e.earlier)
	next, done := make(chan *growthActor), make(chan string)
	var actors []*growthActor
	for i, story := range e.stories {
		a := g.actor(story, next)
		if i == 0 {
			a.endsAt, a.executed, a.fails = e.endsAt, e.executed, e.fails
		}
		actors = append(actors, a)
	}
	for _, a := range actors {
		go func() {
			growthStories[a.name](a)
			done <- a.name
		}()
	}
	waiting, ended, last := map[string]*growthActor{}, 0, ""
	for ended < len(actors) {
		for len(waiting)+ended < len(actors) {
			select {
			case a := <-next:
				waiting[a.name] = a
			case <-done:
				ended++
			}
		}
		if len(waiting) == 0 {
			break
		}
		var names []string
		for _, story := range e.stories {
			if waiting[story] != nil {
				names = append(names, story)
			}
		}
		last = choose(names, last)
		order = append(order, last)
		a := waiting[last]
		delete(waiting, last)
		a.turn <- struct{}{}
	}
	g.conclude(e)
	if g.broken != "" {
		t.Fatalf("%s: %v ends at %d:\n%s", g.broken, e.stories, e.endsAt, strings.Join(g.log, "\n"))
	}
	return order
}

// conclude uses the volume with a new controller, as an orchestrator does that repeats its calls.
func (g *growth) conclude(e explored) {
	if g.broken != "" {
		return
	}
	a := g.actor("end", nil)
	if g.deleted || g.deleting() {
		// An expansion that ended after its commit brings the volume back, because it cannot tell who deleted the disk.
		g.concludeDeleted(a, !g.deleted || e.endsAt >= 0)
		return
	}
	if g.published != "" {
		if disk, found := g.backing(); !found || g.data[disk.Id] != g.written {
			g.broken = "the published volume has lost its disk"
			return
		}
		a.mustSucceed("unpublish", func() error {
			_, err := a.service.ControllerUnpublishVolume(
				a.ctx, &csi.ControllerUnpublishVolumeRequest{VolumeId: a.volume, NodeId: g.published})
			return err
		})
	}
	_, err := a.service.ControllerUnpublishVolume(
		a.ctx, &csi.ControllerUnpublishVolumeRequest{VolumeId: a.volume, NodeId: g.nodes[0]})
	coretest.Must(g.t, err)
	a.mustSucceed("publish", func() error { return a.publish(g.nodes[1]) })
	if g.broken == "" {
		if disk, _ := g.backing(); g.data[disk.Id] != g.written {
			g.broken = fmt.Sprintf("the volume has the data of write %d, the last was %d", g.data[disk.Id], g.written)
		}
	}
	a.mustSucceed("unpublish", func() error {
		_, err := a.service.ControllerUnpublishVolume(
			a.ctx, &csi.ControllerUnpublishVolumeRequest{VolumeId: a.volume, NodeId: g.nodes[1]})
		return err
	})
	a.mustSucceed("expand", func() error { return a.expand(6) })
	if disk, _ := g.backing(); g.broken == "" && (g.data[disk.Id] != g.written || int64(disk.Size) != 6*coretest.GiB) {
		g.broken = "the expanded volume has other data or another size"
	}
	g.deleted = g.broken == ""
	g.concludeDeleted(a, true)
}

// concludeDeleted checks that a deleted volume leaves nothing.
func (g *growth) concludeDeleted(a *growthActor, repeat bool) {
	if repeat {
		a.mustSucceed("settle", func() error { return a.service.SettleNow(a.ctx) })
		a.mustSucceed("delete", func() error {
			_, err := a.service.DeleteVolume(a.ctx, &csi.DeleteVolumeRequest{VolumeId: a.volume})
			return err
		})
	}
	a.mustSucceed("settle", func() error { return a.service.SettleNow(a.ctx) })
	disks, snapshots, records := g.everything()
	for _, d := range disks {
		if g.isVolume(d) {
			g.broken = "the deleted volume has a disk"
		}
	}
	for _, s := range snapshots {
		if strings.HasPrefix(string(s.Name), "csi-grow-") {
			g.broken = "the deleted volume has a snapshot"
		}
	}
	if len(records) > 0 && g.broken == "" {
		g.broken = fmt.Sprintf("the deleted volume has %d records: %s %s", len(records), records[0].Name, records[0].Description)
	}
}

// mustSucceed repeats a call. An orchestrator's first repetition may find that an expansion has to be finished.
func (a *growthActor) mustSucceed(what string, call func() error) {
	var err error
	for range 4 {
		if err = call(); err == nil || a.broken != "" {
			return
		}
	}
	a.broken = fmt.Sprintf("%s does not succeed: %v", what, err)
}

// everyGrowthOrder calls one for every order in which the requests of the actors can follow each other, with at most this
// many switches.
func everyGrowthOrder(switches int, one func(choose func(waiting []string, last string) string)) (orders int) {
	prefixes := [][]int{{}}
	for len(prefixes) > 0 {
		prefix := prefixes[len(prefixes)-1]
		prefixes = prefixes[:len(prefixes)-1]
		var choices, widths []int
		used := 0
		one(func(waiting []string, last string) string {
			// The last actor comes first, so that the choice 0 is no switch.
			if i := slices.Index(waiting, last); i > 0 {
				waiting = append([]string{last}, slices.Delete(slices.Clone(waiting), i, i+1)...)
			}
			could := len(waiting) > 0 && waiting[0] == last
			width := len(waiting)
			if could && used == switches {
				width = 1
			}
			choice := 0
			if len(choices) < len(prefix) {
				choice = prefix[len(choices)]
			}
			if could && choice > 0 {
				used++
			}
			choices, widths = append(choices, choice), append(widths, width)
			return waiting[choice]
		})
		orders++
		for i := len(prefix); i < len(choices); i++ {
			for other := choices[i] + 1; other < widths[i]; other++ {
				prefixes = append(prefixes, append(slices.Clone(choices[:i]), other))
			}
		}
	}
	return orders
}

// In every order of the requests of an expansion and another call, no data are lost and the volume stays usable.
func TestExpansionInEveryOrder(t *testing.T) {
	for _, earlier := range []bool{false, true} {
		for _, other := range []string{
			"publish", "publish, unpublish", "delete", "snapshot", "clone", "expand more", "settle",
		} {
			t.Run(fmt.Sprintf("%s, grown before %t", other, earlier), func(t *testing.T) {
				e := explored{stories: []string{"expand", other}, earlier: earlier, endsAt: -1, switches: 2}
				orders := everyGrowthOrder(e.switches, func(choose func([]string, string) string) { runOrder(t, e, choose) })
				t.Logf("%d orders", orders)
			})
		}
	}
}

// A controller ends at each of its requests, before or after the rack executes it, or the answer is lost, while another
// controller serves a call.
func TestExpansionWhenAControllerEnds(t *testing.T) {
	for _, earlier := range []bool{false, true} {
		for _, other := range []string{
			"", "publish", "publish, unpublish", "delete", "snapshot", "clone", "expand more", "settle",
		} {
			for _, kind := range []string{"ends", "ends after", "fails", "fails after"} {
				t.Run(fmt.Sprintf("%s, %s, grown before %t", other, kind, earlier), func(t *testing.T) {
					orders := 0
					for endsAt := 0; ; endsAt++ {
						e := explored{
							stories: []string{"expand"}, earlier: earlier, endsAt: endsAt, switches: 1,
							executed: strings.HasSuffix(kind, "after"), fails: strings.HasPrefix(kind, "fails"),
						}
						if other != "" {
							e.stories = append(e.stories, other)
						}
						requests := 0
						orders += everyGrowthOrder(e.switches, func(choose func([]string, string) string) {
							order := runOrder(t, e, choose)
							sent := len(slices.DeleteFunc(order, func(name string) bool { return name != "expand" }))
							requests = max(requests, sent)
						})
						if requests <= endsAt {
							break
						}
					}
					t.Logf("%d orders", orders)
				})
			}
		}
	}
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc/codes"
	grpcmetadata "google.golang.org/grpc/metadata"

	"github.com/oxidecomputer/oxide-csi-plugin/core/controller"
	"github.com/oxidecomputer/oxide-csi-plugin/core/expand"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
	"github.com/oxidecomputer/oxide-csi-plugin/test/coretest"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack"
)

// The tests of this file explore an expansion. Each actor is a controller of its own, on one simulated rack. The
// requests of all actors run one at a time, in every order within the bound of the test. An actor can end at one of its
// requests. After each request the data of the volume must be in a safe place, and at the end the volume must be
// usable.

// growth is a rack with one volume, and the data of its disks and snapshots as a number: the last write.
type growth struct {
	oneByOne sync.Mutex
	*bubbleRig
	t      *testing.T
	volume string
	nodes  [2]string
	// data is the last write that a disk or a snapshot contains, by ID. written is the last write of all.
	data    map[string]int
	written int
	// lastDelete says that the orchestrator deletes the volume in the end. deletedBy is the actor whose DeleteVolume
	// was answered with OK.
	deletedBy  *growthActor
	lastDelete bool
	// published is the node on which the volume is published.
	published string
	actors    []*growthActor
	broken    string
	log       []string
	// grace is the controllers' --detach-grace.
	grace time.Duration
	// nameTaken says that another disk took the volume's name.
	nameTaken bool
	// halves are the disks that the rack failed to delete, by path. hidden is for how many requests it shows no disk then.
	halves map[string]halfDisk
	hidden int
	// delayed executes a request that the rack has not executed yet, if that is not nil. It is due when the log has this
	// length.
	delayed    func()
	delayedDue int
}

// halfDisk is a disk that the rack failed to delete (docs/reference/rack.md §3). For a while the rack shows no disk.
type halfDisk struct {
	view  *oxide.Disk
	shown int // the length of the log from which on the rack shows the disk
}

// growthActor is a controller whose requests wait for their turn.
type growthActor struct {
	*growth
	name    string
	client  *rack.Client
	service *controller.Service
	ctx     context.Context
	end     context.CancelFunc
	// next receives the actor that waits for its turn, and then it waits for turn.
	next  chan<- *growthActor
	turn  chan struct{}
	fault growthFault
	sent  int
	// slow is how long an answer takes to a request that changes something.
	slow  time.Duration
	ended atomic.Bool
	free  atomic.Bool
}

// growthFault is what happens at one request of an actor.
type growthFault struct {
	at   int // the number of the request, among those that the kind is about, -1 for none
	kind string
}

// The kinds of [growthFault]. The last two are about requests to delete a disk.
const (
	endsAfter  = "ends after"         // the rack executes the request, and the actor ends
	endsSwept  = "ends after, swept"  // then a sweep comes before everything else
	late       = "executed later"     // the connection breaks, and the rack executes the request some requests later
	answerLost = "the answer is lost" // the rack executes the request
	fails500   = "500"                // the rack does not execute the request
	half       = "half a deletion"    // the disk stays as a faulted one of another name
	halfLater  = "half, shown later"  // the answer is lost too, and for a while the rack shows no disk
)

var errGrowthFault = errors.New("the connection broke")

func (a *growthActor) RoundTrip(req *http.Request) (*http.Response, error) {
	if a.ended.Load() {
		return nil, errEnded
	}
	if a.free.Load() { // it gets no turns, and sends a look and its act at the same time
		a.oneByOne.Lock()
		defer a.oneByOne.Unlock()
	} else {
		a.next <- a
		<-a.turn
	}
	if (a.fault.kind == half || a.fault.kind == halfLater) && !deletesDisk(req) {
		return a.send(req)
	}
	if len(a.log) >= a.delayedDue {
		a.executeDelayed()
	}
	number := a.sent
	a.sent++
	if number == a.fault.at {
		return a.sendWithFault(req)
	}
	return a.send(req)
}

func (g *growth) executeDelayed() {
	if execute := g.delayed; execute != nil {
		g.delayed = nil
		execute()
	}
}

// delay executes a request some requests later.
func (a *growthActor) delay(req *http.Request) {
	var body []byte
	if req.Body != nil {
		var err error
		body, err = io.ReadAll(req.Body)
		coretest.Must(a.t, err)
	}
	again := req.Clone(context.Background())
	again.Body = io.NopCloser(bytes.NewReader(body))
	a.delayed, a.delayedDue = func() { _, _ = a.send(again) }, len(a.log)+6
}

func deletesDisk(req *http.Request) bool {
	return req.Method == http.MethodDelete && strings.HasPrefix(req.URL.Path, "/v1/disks/")
}

func (a *growthActor) send(req *http.Request) (*http.Response, error) {
	resp := a.answerHalf(req)
	if resp == nil {
		var err error
		if resp, err = (handlerTransport{a.rack.API()}).RoundTrip(req); err != nil {
			return nil, err
		}
	}
	a.log = append(a.log, fmt.Sprintf("%s: %s %s %d", a.name, req.Method, req.URL.Path, resp.StatusCode))
	resp = a.observe(req, resp)
	a.check(req)
	if req.Method != http.MethodGet && !a.free.Load() {
		time.Sleep(a.slow)
	}
	return resp, nil
}

func (a *growthActor) sendWithFault(req *http.Request) (*http.Response, error) {
	a.log = append(a.log, a.name+": "+a.fault.kind)
	kind := a.fault.kind
	if (kind == half || kind == halfLater) && !a.deleteHalf(req) {
		kind = fails500
	}
	if kind == endsAfter || kind == endsSwept || kind == answerLost {
		_, _ = a.send(req)
	}
	if kind == late {
		a.delay(req)
	}
	switch kind {
	case endsAfter, endsSwept:
		a.ended.Store(true)
		a.end()
		return nil, errEnded
	case answerLost, halfLater, late:
		return nil, errGrowthFault
	}
	return answer(req, http.StatusInternalServerError, map[string]any{
		"request_id": "r", "error_code": "Internal", "message": "Internal Server Error",
	}), nil
}

func answer(req *http.Request, status int, body any) *http.Response {
	text, _ := json.Marshal(body)
	return &http.Response{
		StatusCode: status, Request: req, Header: http.Header{"Content-Type": {"application/json"}},
		Body: io.NopCloser(bytes.NewReader(text)),
	}
}

// deleteHalf executes a request to delete a disk so that the rack keeps the disk as faulted.
func (a *growthActor) deleteHalf(req *http.Request) bool {
	disk, err := a.SDK.DiskView(context.Background(), oxide.DiskViewParams{
		Disk: oxide.NameOrId(strings.TrimPrefix(req.URL.Path, "/v1/disks/")),
	})
	if err != nil {
		return false
	}
	resp, err := a.send(req)
	if err != nil || resp.StatusCode != http.StatusNoContent {
		return false
	}
	disk.Name, disk.State = oxide.Name("deleted-"+disk.Id), oxide.DiskState{Value: &oxide.DiskStateFaulted{}}
	shown := len(a.log)
	if a.fault.kind == halfLater {
		shown += a.hidden
	}
	a.halves[req.URL.Path] = halfDisk{disk, shown}
	return true
}

// answerHalf answers a request for a disk that the rack failed to delete.
func (a *growthActor) answerHalf(req *http.Request) *http.Response {
	if req.Method == http.MethodGet && req.URL.Path == "/v1/disks" && len(a.halves) > 0 {
		return a.listHalves(req)
	}
	disk, found := a.halves[req.URL.Path]
	switch {
	case !found || len(a.log) < disk.shown:
		return nil
	case req.Method == http.MethodDelete:
		delete(a.halves, req.URL.Path)
		return &http.Response{StatusCode: http.StatusNoContent, Request: req, Header: http.Header{}, Body: http.NoBody}
	}
	return answer(req, http.StatusOK, disk.view)
}

// listHalves lists the disks, and those that the rack failed to delete.
func (a *growthActor) listHalves(req *http.Request) *http.Response {
	resp, err := (handlerTransport{a.rack.API()}).RoundTrip(req)
	coretest.Must(a.t, err)
	var page map[string]any
	coretest.Must(a.t, json.NewDecoder(resp.Body).Decode(&page))
	for _, half := range a.halves {
		if len(a.log) >= half.shown {
			page["items"] = append(page["items"].([]any), half.view)
		}
	}
	return answer(req, http.StatusOK, page)
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
	if g.broken != "" || req.Method == http.MethodGet {
		return
	}
	disks, snapshots, records := g.everything()
	if g.deletedBy != nil {
		if _, found := g.backing(); found {
			g.broken = "the deleted volume came back, after " + req.Method + " " + req.URL.Path
		}
		return
	}
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
	if g.lastDelete {
		return
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
	ctx := context.Background() // one page has all of them
	diskPage, err := g.SDK.DiskList(ctx, oxide.DiskListParams{Project: coretest.Project})
	coretest.Must(g.t, err)
	disks = slices.DeleteFunc(
		diskPage.Items,
		func(d oxide.Disk) bool { return strings.HasSuffix(string(d.Name), "-boot") },
	)
	snapshotPage, err := g.SDK.SnapshotList(ctx, oxide.SnapshotListParams{Project: coretest.Project})
	coretest.Must(g.t, err)
	recordPage, err := g.SDK.AntiAffinityGroupList(ctx, oxide.AntiAffinityGroupListParams{Project: coretest.Project})
	coretest.Must(g.t, err)
	return disks, snapshotPage.Items, recordPage.Items
}

func newGrowth(t *testing.T, quota int64, earlier bool, grace time.Duration) *growth {
	g := &growth{
		t: t, grace: grace, data: map[string]int{}, halves: map[string]halfDisk{}, hidden: 8,
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
	if grace > 0 { // the volume has left a node, and its disk is still there
		coretest.Must(t, a.publish(g.nodes[1]))
		coretest.Must(t, a.unpublish(g.nodes[1]))
		time.Sleep(grace)
	}
	g.actors = nil
	return g
}

// actor returns an actor. Without a channel its requests do not wait.
func (g *growth) actor(name string, next chan<- *growthActor) *growthActor {
	a := &growthActor{
		growth: g,
		name:   name,
		next:   next,
		turn:   make(chan struct{}),
		fault:  growthFault{at: -1},
	}
	client, err := rack.New(rack.Config{
		Name: "default", Host: "http://rack", Project: coretest.Project, Token: rack.FixedToken(coretest.Token),
		HTTPClient: &http.Client{Transport: a}, LostAnswerWait: time.Nanosecond,
	})
	coretest.Must(g.t, err)
	a.free.Store(true)
	_, err = client.ProjectID(context.Background()) // the plugin asks when it starts
	coretest.Must(g.t, err)
	a.sent = 0
	a.free.Store(next == nil)
	a.service = controller.New(controller.Options{
		Racks: []*rack.Client{client}, Cluster: coretest.Cluster, MaxDisks: 8, Log: coretest.DiscardLog(),
		TemporaryAge: time.Hour, DetachGrace: g.grace,
	})
	a.client = client
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

// create repeats the create of the volume. Only the volume that exists may be answered.
func (a *growthActor) create() {
	resp, err := a.service.CreateVolume(a.ctx, coretest.CreateRequest("v"))
	if err == nil && resp.GetVolume().GetVolumeId() != a.volume {
		a.broken = fmt.Sprintf("the create answers volume %s", resp.GetVolume().GetVolumeId())
	}
}

func (a *growthActor) unpublish(node string) error {
	_, err := a.service.ControllerUnpublishVolume(
		a.ctx, &csi.ControllerUnpublishVolumeRequest{VolumeId: a.volume, NodeId: node})
	return err
}

// detachLater carries out the deferred detach of the volume, as a controller does in the background.
func (a *growthActor) detachLater() {
	ctx, cancel := context.WithTimeout(a.ctx, a.grace+a.grace/8) // never at the moment of another timer
	defer cancel()
	a.service.DetachLater(ctx, a.client)
}

// detachNow detaches the disk as a person does with the command oxide-csi volume detach.
func (a *growthActor) detachNow() {
	if a.grace == 0 {
		return
	}
	ctx := grpcmetadata.NewIncomingContext(a.ctx, grpcmetadata.Pairs(rpc.MetadataDetachNow, "yes"))
	_, err := a.service.ControllerUnpublishVolume(ctx, &csi.ControllerUnpublishVolumeRequest{VolumeId: a.volume})
	coretest.Must(a.t, err)
}

func (a *growthActor) publish(node string) error {
	resp, err := a.service.ControllerPublishVolume(a.ctx, &csi.ControllerPublishVolumeRequest{
		VolumeId: a.volume, NodeId: node, VolumeCapability: coretest.MountWriter(),
	})
	if err == nil && resp.GetPublishContext()["diskID"] != a.volume {
		a.broken = "the publish context has another ID"
	}
	var coded *rpc.Error
	errors.As(err, &coded)
	deleting := slices.ContainsFunc(a.actors, func(other *growthActor) bool { return other.name == "delete" })
	switch {
	case err == nil || coded != nil && coded.Code() == codes.FailedPrecondition:
	case errors.Is(err, expand.ErrUnderWay), errors.Is(err, rack.ErrReplaced):
		a.broken = fmt.Sprintf("Nomad does not repeat a publish after %v", err)
	case errors.Is(err, rack.ErrNotFound) && !deleting:
		a.broken = fmt.Sprintf("the volume exists, and its publish answers %v", err)
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

// growthStories are what actors do. Calls may fail in any order: the records and disks that they leave are checked.
var growthStories = map[string]func(a *growthActor){
	"expand": func(a *growthActor) {
		a.detachLater()
		_ = a.expand(3)
	},
	"expand more": func(a *growthActor) { _ = a.expand(4) },
	"publish": func(a *growthActor) {
		if a.publish(a.nodes[0]) == nil {
			a.published = a.nodes[0]
			a.write()
		}
	},
	"publish slowly": func(a *growthActor) { // see create slowly
		a.slow = 5 * time.Second
		if a.publish(a.nodes[0]) == nil {
			a.published = a.nodes[0]
			a.write()
		}
	},
	"publish, unpublish": func(a *growthActor) {
		if a.publish(a.nodes[0]) == nil {
			a.write()
			_, _ = a.service.ControllerGetVolume(a.ctx, &csi.ControllerGetVolumeRequest{VolumeId: a.volume})
			a.write() // after requests of other actors
		}
		_ = a.unpublish(a.nodes[0])
	},
	"publish again": func(a *growthActor) { // on the node that has the disk, if its detach is deferred
		if a.publish(a.nodes[1]) == nil {
			a.published = a.nodes[1]
			a.write()
		}
	},
	"delete": func(a *growthActor) {
		_, err := a.service.DeleteVolume(a.ctx, &csi.DeleteVolumeRequest{VolumeId: a.volume})
		if err == nil {
			a.deletedBy = a
		}
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
	"create": func(a *growthActor) { a.create() },
	"create slowly": func(a *growthActor) { // the answers of the rack take longer than a look counts
		a.slow = 5 * time.Second
		a.create()
	},
	"list": func(a *growthActor) {
		resp, err := a.service.ListVolumes(a.ctx, &csi.ListVolumesRequest{})
		listed := 0
		for _, e := range resp.GetEntries() {
			if e.GetVolume().GetVolumeId() == a.volume && e.GetVolume().GetCapacityBytes() >= coretest.GiB {
				listed++
			}
		}
		if err == nil && listed != 1 {
			a.broken = fmt.Sprintf("the list has the volume %d times", listed)
		}
	},
}

// explored is one run of actors: which of them ends, at which of its requests.
type explored struct {
	stories []string
	earlier bool
	grace   time.Duration
	fault   growthFault // of the first story
	// nameTaken counts the runs that leave another disk of the volume's name.
	nameTaken *int
	// switches is how often another actor continues although the last one could.
	switches int
}

// runOrder runs the actors in the order that choose decides, and then brings the volume to an end. It reports whether
// the fault occurred. It waits in a bubble's time, so that waiting costs none.
func runOrder(t *testing.T, e explored, choose func(waiting []string, last string) string) (faulty bool) {
	synctest.Test(t, func(t *testing.T) { faulty = runInBubble(t, e, choose) })
	return faulty
}

func runInBubble(t *testing.T, e explored, choose func(waiting []string, last string) string) (faulty bool) {
	g := newGrowth(t, 0, e.earlier, e.grace)
	turns := schedule{
		next: make(chan *growthActor), done: make(chan *growthActor),
		waiting: map[*growthActor]int{}, ended: map[*growthActor]bool{},
	}
	for i, story := range e.stories {
		a := g.actor(story, turns.next)
		if i == 0 {
			a.fault = e.fault
		}
		turns.actors = append(turns.actors, a)
	}
	for _, a := range turns.actors {
		go func() {
			growthStories[a.name](a)
			turns.done <- a
		}()
	}
	for last := ""; ; {
		names := turns.wait()
		if len(names) == 0 {
			break
		}
		last = choose(names, last)
		turns.give(last)
	}
	for _, a := range turns.actors {
		a.free.Store(true)
	}
	faulty = turns.actors[0].sent > e.fault.at
	g.conclude(e.fault.kind == endsSwept)
	if g.broken != "" {
		t.Fatalf("%s: %v, fault %v:\n%s", g.broken, e.stories, e.fault, strings.Join(g.log, "\n"))
	}
	if g.nameTaken && e.nameTaken != nil {
		*e.nameTaken++
	}
	return faulty
}

// schedule gives turns to actors.
type schedule struct {
	actors     []*growthActor
	next, done chan *growthActor
	// waiting counts the requests that wait for their turn. An actor has two if it detaches a disk in the background.
	waiting map[*growthActor]int
	// ended has the actors whose stories have ended.
	ended map[*growthActor]bool
}

// wait waits until every actor waits for its turn or has ended its story, and returns the names of those that wait.
// Meanwhile time may pass.
func (s *schedule) wait() (waiting []string) {
	for {
		synctest.Wait()
		for more := true; more; {
			select {
			case a := <-s.next:
				s.waiting[a]++
			case a := <-s.done:
				s.ended[a] = true
			default:
				more = false
			}
		}
		if !slices.ContainsFunc(s.actors, func(a *growthActor) bool { return s.waiting[a] == 0 && !s.ended[a] }) {
			break
		}
		select {
		case a := <-s.next:
			s.waiting[a]++
		case a := <-s.done:
			s.ended[a] = true
		}
	}
	for _, a := range s.actors {
		if s.waiting[a] > 0 {
			waiting = append(waiting, a.name)
		}
	}
	return waiting
}

// give gives a turn to an actor that waits.
func (s *schedule) give(name string) {
	a := s.actors[slices.IndexFunc(s.actors, func(a *growthActor) bool { return a.name == name })]
	s.waiting[a]--
	a.turn <- struct{}{}
}

// conclude uses the volume with a new controller, as an orchestrator does that repeats its calls.
func (g *growth) conclude(swept bool) {
	if g.broken != "" {
		return
	}
	a := g.actor("end", nil)
	if g.deleting() {
		g.concludeDeleted(a)
		return
	}
	a.freeName()
	if swept {
		a.mustSucceed("settle", func() error { return a.service.SettleNow(a.ctx) })
	}
	if g.published != "" {
		if disk, found := g.backing(); !found || g.data[disk.Id] != g.written {
			g.broken = "the published volume has lost its disk"
			return
		}
		a.mustSucceed("unpublish", func() error { return a.unpublish(g.published) })
	}
	coretest.Must(g.t, a.unpublish(g.nodes[0]))
	a.mustSucceed("publish", func() error { return a.publish(g.nodes[1]) })
	if g.broken == "" {
		if disk, _ := g.backing(); g.data[disk.Id] != g.written {
			g.broken = fmt.Sprintf("the volume has the data of write %d, the last was %d", g.data[disk.Id], g.written)
		}
	}
	a.mustSucceed("unpublish", func() error { return a.unpublish(g.nodes[1]) })
	a.detachNow()
	a.mustSucceed("expand", func() error { return a.expand(6) })
	if disk, _ := g.backing(); g.broken == "" && (g.data[disk.Id] != g.written || int64(disk.Size) != 6*coretest.GiB) {
		g.broken = "the expanded volume has other data or another size"
	}
	a.mustSucceed("settle", func() error { return a.service.SettleNow(a.ctx) })
	_, snapshots, records := g.everything()
	grows := func(s oxide.Snapshot) bool { return strings.HasPrefix(string(s.Name), "csi-grow-") }
	records = g.withoutDetaches(records)
	if g.broken == "" && (slices.ContainsFunc(snapshots, grows) || len(records) != 1) {
		g.broken = fmt.Sprintf("the finished expansions have left %v %v", snapshots, records)
	}
	g.concludeDeleted(a)
}

// freeName deletes the disk that has the volume's name and is none of it, as a person does whom the error tells. Only a
// create that ended leaves one.
func (a *growthActor) freeName() {
	taken := func() (oxide.Disk, bool) {
		disks, _, _ := a.everything()
		i := slices.IndexFunc(disks, func(d oxide.Disk) bool {
			return string(d.Name) == diskname.ForVolume(coretest.Cluster, "v") && !a.isVolume(d)
		})
		if i < 0 {
			return oxide.Disk{}, false
		}
		return disks[i], true
	}
	if _, found := taken(); !found {
		return
	}
	a.executeDelayed() // it can be the deletion of that disk
	disk, found := taken()
	if !found {
		return
	}
	a.nameTaken = true
	_ = a.service.SettleNow(a.ctx) // it cannot finish the expansion
	a.create()
	if err := a.publish(a.nodes[1]); !errors.Is(err, expand.ErrNameTaken) {
		a.broken = fmt.Sprintf("disk %s has the volume's name, and a publish says %v", disk.Id, err)
		return
	}
	coretest.Must(a.t, a.SDK.DiskDelete(a.ctx, oxide.DiskDeleteParams{Disk: oxide.NameOrId(disk.Id)}))
}

// withoutDetaches leaves out the records of core/detach, which are kept for a while.
func (g *growth) withoutDetaches(records []oxide.AntiAffinityGroup) []oxide.AntiAffinityGroup {
	return slices.DeleteFunc(records, func(r oxide.AntiAffinityGroup) bool {
		return g.grace > 0 && strings.HasPrefix(string(r.Name), "csi-defer-")
	})
}

// concludeDeleted checks that a deleted volume does not come back, and that in the end nothing is left of it. An
// orchestrator repeats DeleteVolume until it is answered with OK, and never calls it again.
func (g *growth) concludeDeleted(a *growthActor) {
	if g.broken != "" {
		return
	}
	if g.lastDelete = true; g.deletedBy == nil {
		a.detachNow()
		a.mustSucceed("delete", func() error {
			_, err := a.service.DeleteVolume(a.ctx, &csi.DeleteVolumeRequest{VolumeId: a.volume})
			return err
		})
		g.deletedBy = a
	}
	g.executeDelayed()
	settling := append(g.actors, g.actor("new", nil), g.deletedBy)
	for _, other := range settling {
		if !other.ended.Load() {
			other.fault = growthFault{at: -1}
			other.free.Store(true)
			other.mustSucceed("settle", func() error { return other.service.SettleNow(other.ctx) })
		}
	}
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
	if records = g.withoutDetaches(records); len(records) > 0 && g.broken == "" {
		g.broken = fmt.Sprintf(
			"the deleted volume has %d records: %s %s",
			len(records),
			records[0].Name,
			records[0].Description,
		)
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

// allOrders says that all orders are explored, which takes minutes: make orders.
var allOrders = flag.Bool("orders", false, "explore all orders of an expansion's requests")

// grownBefore says which volumes are explored: one that never grew, and one that has grown.
func grownBefore() []bool {
	if !*allOrders {
		return []bool{false}
	}
	return []bool{false, true}
}

// growthFaults are the kinds of faults that are explored: without -orders only one of a controller and one of a
// request.
func growthFaults() []string {
	if !*allOrders {
		return []string{endsAfter, late}
	}
	return []string{endsAfter, endsSwept, answerLost, late, fails500, half, halfLater}
}

// meetings are the calls that meet an expansion. With RACE=1 it is only the first, because one call runs at a time:
// the race detector finds nothing here that costs its time, and CI tries the others without it.
func meetings(all ...string) []string {
	if os.Getenv("RACE") != "" {
		return all[:1]
	}
	return all
}

// everyGrowthOrder calls one for every order in which the requests of the actors can follow each other, with at most
// this many switches. Without -orders it tries fewer, and with RACE=1 only those without a switch.
func everyGrowthOrder(switches int, one func(choose func(waiting []string, last string) string)) (orders int) {
	switch {
	case *allOrders:
	case os.Getenv("RACE") != "":
		switches = 0 // as in meetings
	default:
		switches--
	}
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
				choice = min(prefix[len(choices)], width-1) // a list's requests depend on the order of random IDs
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

// The same with a grace period. At the beginning the volume has left a node, and the expansion waits for the detach. A
// publish goes to that node or to the other one, or is followed by a deferred detach.
func TestExpansionMeetsADeferredDetach(t *testing.T) {
	for _, other := range meetings("publish", "publish again", "publish, unpublish", "delete") {
		t.Run(other, func(t *testing.T) {
			e := explored{
				stories: []string{"expand", other}, grace: time.Second, fault: growthFault{at: -1}, switches: 2,
			}
			orders := everyGrowthOrder(e.switches, func(choose func([]string, string) string) { runOrder(t, e, choose) })
			t.Logf("%d orders", orders)
		})
	}
}

// In every order of the requests of an expansion and another call, no data are lost and the volume stays usable.
func TestExpansionInEveryOrder(t *testing.T) {
	for _, earlier := range grownBefore() {
		for _, other := range meetings(
			"publish", "publish, unpublish", "delete", "snapshot", "clone", "expand more", "settle", "list",
			"create", "create slowly", "publish slowly",
		) {
			t.Run(fmt.Sprintf("%s, grown before %t", other, earlier), func(t *testing.T) {
				e := explored{stories: []string{"expand", other}, earlier: earlier, fault: growthFault{at: -1}, switches: 2}
				switch other {
				case "publish, unpublish", "delete", "create", "create slowly", "publish slowly":
					if !earlier {
						e.switches = 3 // a take-back, a create, or the end of an expansion, has to be interrupted twice
					}
				}
				orders := everyGrowthOrder(e.switches, func(choose func([]string, string) string) { runOrder(t, e, choose) })
				t.Logf("%d orders", orders)
			})
		}
	}
}

// A controller ends after each of its requests, or the answer is lost, or the rack fails, while another controller
// serves a call.
func TestExpansionWhenAControllerEnds(t *testing.T) {
	for _, earlier := range grownBefore() {
		for _, other := range meetings(
			"publish", "", "publish, unpublish", "delete", "snapshot", "clone", "expand more", "settle", "list", "create",
		) {
			for _, kind := range growthFaults() {
				t.Run(fmt.Sprintf("%s, %s, grown before %t", other, kind, earlier), func(t *testing.T) {
					orders := 0
					for at := 0; ; at++ {
						e := explored{
							stories: []string{"expand"}, earlier: earlier, fault: growthFault{at, kind}, switches: 1,
						}
						if other != "" {
							e.stories = append(e.stories, other)
						}
						faulty := false
						orders += everyGrowthOrder(e.switches, func(choose func([]string, string) string) {
							faulty = runOrder(t, e, choose) || faulty
						})
						if !faulty {
							break
						}
					}
					t.Logf("%d orders", orders)
				})
			}
		}
	}
}

// A repeated create ends after each of its requests while the volume grows. A disk that it leaves has no data, is never
// taken for the volume, and is named to the person who has to delete it.
func TestExpansionWhenACreateEnds(t *testing.T) {
	for _, earlier := range grownBefore() {
		taken := 0
		for _, kind := range growthFaults() {
			t.Run(fmt.Sprintf("%s, grown before %t", kind, earlier), func(t *testing.T) {
				orders := 0
				for at, faulty := 0, true; faulty; at++ {
					e := explored{
						stories: []string{
							"create",
							"expand",
						},
						earlier:   earlier,
						fault:     growthFault{at, kind},
						switches:  2,
						nameTaken: &taken,
					}
					faulty = false
					orders += everyGrowthOrder(e.switches, func(choose func([]string, string) string) {
						faulty = runOrder(t, e, choose) || faulty
					})
				}
				t.Logf("%d orders", orders)
			})
		}
		if t.Logf("%d of them left a disk of the volume's name", taken); taken == 0 && os.Getenv("RACE") == "" {
			t.Error("no order left a disk of the volume's name")
		}
	}
}

// A volume that is deleted after its expansion failed does not come back, and nothing is left of it. One controller
// serves both calls.
func TestDeleteAfterAFailedExpansion(t *testing.T) {
	for _, earlier := range []bool{false, true} {
		for _, kind := range []string{answerLost, late, fails500, half, halfLater} {
			for at, more := 0, true; more; at++ {
				synctest.Test(t, func(t *testing.T) {
					g := newGrowth(t, 0, earlier, 0)
					a := g.actor("expand", nil)
					a.fault = growthFault{at, kind}
					_ = a.expand(3)
					more = a.sent > at
					g.lastDelete = true
					growthStories["delete"](a)
					_, snapshots, records := g.everything()
					// What the rack makes after DeleteVolume is left to the sweep.
					if g.deletedBy != nil && kind != late && len(snapshots)+len(records) > 0 {
						t.Errorf("%v: DeleteVolume has left %v %v", a.fault, snapshots, records)
					}
					g.concludeDeleted(a)
					if g.broken != "" {
						t.Fatalf("%s: %v:\n%s", g.broken, a.fault, strings.Join(g.log, "\n"))
					}
				})
			}
		}
	}
}

// settleByAdopter sweeps for another cluster, before and after that cluster adopts the volume.
func (a *growthActor) settleByAdopter() {
	adopter := controller.New(controller.Options{
		Racks: []*rack.Client{a.client}, Cluster: otherCluster, MaxDisks: 8, Log: coretest.DiscardLog(),
	})
	coretest.Must(a.t, adopter.SettleNow(a.ctx))
	if len(a.halves) == 0 {
		a.t.Error("a cluster deleted the disk of another one")
	}
	_, err := adopter.ControllerModifyVolume(a.ctx, &csi.ControllerModifyVolumeRequest{
		VolumeId: a.volume, MutableParameters: map[string]string{rpc.KeyAdoptFromCluster: coretest.Cluster},
	})
	coretest.Must(a.t, err)
	coretest.Must(a.t, adopter.SettleNow(a.ctx))
}

// An old disk that appears again after the expansion, because the rack failed to delete it, is no volume. It is deleted
// by the next sweep, and with the volume.
func TestOldDiskThatAppearsAgain(t *testing.T) {
	for _, with := range []string{"the sweep", "the volume", "the sweep of an adopter"} {
		t.Run(with, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g := newGrowth(t, 0, false, 0)
				a := g.actor("expand", nil)
				a.fault, g.hidden = growthFault{0, halfLater}, 20
				if err := a.expand(3); err == nil {
					t.Fatal("the first call cannot know that the disk is gone")
				}
				coretest.Must(t, a.expand(3))
				for path, disk := range g.halves {
					g.halves[path] = halfDisk{view: disk.view}
				}
				list, err := a.service.ListVolumes(a.ctx, &csi.ListVolumesRequest{})
				coretest.Must(t, err)
				health, err := a.service.ControllerListVolumeHealth(a.ctx, &csi.ControllerListVolumeHealthRequest{})
				coretest.Must(t, err)
				volumes := slices.DeleteFunc(list.GetEntries(), func(e *csi.ListVolumesResponse_Entry) bool {
					return e.GetVolume().GetVolumeId() != a.volume
				})
				if len(volumes) != 1 || len(health.GetEntries()) != 0 {
					t.Errorf("listed %v, health %v", volumes, health)
				}
				coretest.Must(t, a.publish(a.nodes[0]))
				unpublish := &csi.ControllerUnpublishVolumeRequest{VolumeId: a.volume, NodeId: a.nodes[0]}
				_, err = a.service.ControllerUnpublishVolume(a.ctx, unpublish)
				coretest.Must(t, err)
				switch with {
				case "the sweep":
					coretest.Must(t, a.service.SettleNow(a.ctx))
				case "the sweep of an adopter":
					a.settleByAdopter()
				default:
					_, err = a.service.DeleteVolume(a.ctx, &csi.DeleteVolumeRequest{VolumeId: a.volume})
					coretest.Must(t, err)
				}
				if len(g.halves) > 0 {
					t.Errorf("left: %v", g.halves)
				}
			})
		})
	}
}

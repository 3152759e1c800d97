// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller_test

import (
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/core/coretest"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack"
)

// several is one controller with three racks, each a rig of its own whose way to the controller can be cut.
type several struct {
	*rig
	racks map[string]*rackSite
}

// rackSite is a rack and the line to it.
type rackSite struct {
	*rig
	// line is what happens to requests: one of the constants below.
	line atomic.Value
	// hangUp ends what is slow: some requests are seen through to their end although the caller has gone.
	hangUp chan struct{}
	// elsewhere is where requests go on the line "another".
	elsewhere http.Handler
}

const (
	lineUp = "up"
	// lineDown refuses every request.
	lineDown = "down"
	// lineSlow answers nothing before the caller gives up.
	lineSlow = "slow"
	// lineAnother leads to a rack with a project of the same name.
	lineAnother = "another"
)

var rackNames = []string{"east", "north", "west"}

func newSeveral(t *testing.T) *several {
	t.Helper()
	s := &several{racks: map[string]*rackSite{}}
	var clients []*rack.Client
	for _, name := range rackNames {
		site := &rackSite{
			hangUp: make(chan struct{}),
			rig:    newRig(t, func(o *coretest.Options) { o.RackName = name; o.Rack.Instances = []string{"node-" + name} }),
		}
		site.line.Store(lineUp)
		site.elsewhere = proxyTo(
			t,
			coretest.Simulate(t, simrack.Options{Token: coretest.Token, Project: coretest.Project}).Host,
		)
		direct := proxyTo(t, site.Sim.Host)
		line := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			switch site.line.Load() {
			case lineDown:
				panic(http.ErrAbortHandler)
			case lineSlow:
				select {
				case <-req.Context().Done():
				case <-site.hangUp:
				}
				panic(http.ErrAbortHandler)
			case lineAnother:
				site.elsewhere.ServeHTTP(w, req)
			default:
				direct.ServeHTTP(w, req)
			}
		}))
		t.Cleanup(line.Close)
		client, err := rack.New(
			rack.Config{
				Name:    name,
				Host:    line.URL,
				Project: coretest.Project,
				Token:   func() (string, error) { return coretest.Token, nil },
			},
		)
		coretest.Must(t, err)
		_, err = client.ProjectID(t.Context())
		coretest.Must(t, err)
		s.racks[name], clients = site, append(clients, client)
	}
	s.rig = &rig{&coretest.Rig{Options: s.racks["east"].Options, Patience: new(atomic.Int64)}}
	s.StartWith(t, clients...)
	return s
}

func proxyTo(t *testing.T, host string) http.Handler {
	t.Helper()
	target, err := url.Parse(host)
	coretest.Must(t, err)
	proxy := httputil.NewSingleHostReverseProxy(target)
	proxy.ErrorHandler = func(w http.ResponseWriter, _ *http.Request, _ error) { w.WriteHeader(http.StatusBadGateway) }
	return proxy
}

func (s *several) cut(name, line string) { s.racks[name].line.Store(line) }

// on makes a volume on the rack of that name.
func (s *several) on(t *testing.T, rackName, volume string) string {
	t.Helper()
	req := coretest.CreateRequest(volume)
	req.AccessibilityRequirements = coretest.OnRack(rackName)
	resp, err := s.CreateVolume(t.Context(), req)
	coretest.Must(t, err)
	coretest.WantSame(t, resp.GetVolume().GetAccessibleTopology(), coretest.OnRack(rackName).GetRequisite())
	return resp.GetVolume().GetVolumeId()
}

// where lists the racks on which there are disks for a volume's name.
func (s *several) where(t *testing.T, volume string) (names []string) {
	t.Helper()
	for _, name := range rackNames {
		_, err := s.racks[name].SDK.DiskView(
			t.Context(),
			oxide.DiskViewParams{Disk: oxide.NameOrId(diskname.ForVolume(coretest.Cluster, volume)), Project: coretest.Project},
		)
		if errors.Is(err, oxide.ErrObjectNotFound) {
			continue
		}
		coretest.Must(t, err)
		names = append(names, name)
	}
	return names
}

// forget starts another controller, which has seen nothing yet.
func (s *several) forget(t *testing.T) {
	t.Helper()
	var clients []*rack.Client
	for _, name := range rackNames {
		client, err := rack.New(
			rack.Config{
				Name:    name,
				Host:    s.racks[name].Sim.Host,
				Project: coretest.Project,
				Token:   func() (string, error) { return coretest.Token, nil },
			},
		)
		coretest.Must(t, err)
		clients = append(clients, client)
	}
	s.StartWith(t, clients...)
}

func TestSeveralRacksLife(t *testing.T) {
	s := newSeveral(t)
	for _, name := range rackNames {
		id := s.on(t, name, "v-"+name)
		s.forget(t)
		site := s.racks[name]
		node := site.Node(t, "node-"+name)
		coretest.Must(t, s.Publish(t, id, node))
		if holder := site.Holder(t, id); holder != node {
			t.Errorf("the disk is on %q", holder)
		}
		snapshot := s.snapshot(t, "s-"+name, id)
		restored, err := s.CreateVolume(t.Context(), from("r-"+name, fromSnapshot(snapshot)))
		coretest.Must(t, err)
		copied, err := s.CreateVolume(t.Context(), from("c-"+name, fromVolume(id)))
		coretest.Must(t, err)
		for _, volume := range []*csi.Volume{restored.GetVolume(), copied.GetVolume()} {
			coretest.WantSame(t, volume.GetAccessibleTopology(), coretest.OnRack(name).GetRequisite())
		}
		// What is made of it stays on its rack.
		elsewhere := rackNames[(slices.Index(rackNames, name)+1)%3]
		req := from("x-"+name, fromSnapshot(snapshot))
		req.AccessibilityRequirements = coretest.OnRack(elsewhere)
		_, err = s.CreateVolume(t.Context(), req)
		coretest.WantCode(t, err, codes.ResourceExhausted, name)
		_, err = s.CreateSnapshot(
			t.Context(),
			&csi.CreateSnapshotRequest{
				Name:                      "x-" + name,
				SourceVolumeId:            id,
				AccessibilityRequirements: coretest.OnRack(elsewhere),
			},
		)
		coretest.WantCode(t, err, codes.ResourceExhausted, name)
		// A node of another rack.
		coretest.WantCode(
			t,
			s.Publish(t, restored.GetVolume().GetVolumeId(), s.racks[elsewhere].Node(t, "node-"+elsewhere)),
			codes.NotFound,
			name,
		)
		coretest.Must(t, s.Unpublish(t, id, node))
		for _, volume := range []string{id, restored.GetVolume().GetVolumeId(), copied.GetVolume().GetVolumeId()} {
			coretest.Must(t, s.Delete(t, volume))
			coretest.Must(t, s.Delete(t, volume))
		}
		_, err = s.DeleteSnapshot(t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: snapshot})
		coretest.Must(t, err)
		if left, snapshots := site.Volumes(t), site.snapshots(t); len(left)+len(snapshots) > 0 {
			t.Errorf("left on %s: %v, %v", name, left, snapshots)
		}
	}
}

func TestCreateVolumeOnSeveralRacks(t *testing.T) {
	s := newSeveral(t)
	preferred := func(names ...string) *csi.TopologyRequirement {
		return &csi.TopologyRequirement{
			Requisite: coretest.OnRack(rackNames...).GetRequisite(),
			Preferred: coretest.OnRack(names...).GetRequisite(),
		}
	}
	create := func(volume string, requirement *csi.TopologyRequirement) (string, error) {
		req := coretest.CreateRequest(volume)
		req.AccessibilityRequirements = requirement
		resp, err := s.CreateVolume(t.Context(), req)
		return resp.GetVolume().GetVolumeId(), err
	}
	first, err := create("v", preferred("west", "east"))
	coretest.Must(t, err)
	coretest.WantSame(t, s.where(t, "v"), []string{"west"})
	// Asked again with another preference, as after a pod was scheduled anew, and by another replica.
	s.forget(t)
	again, err := create("v", preferred("north"))
	coretest.Must(t, err)
	if again != first {
		t.Errorf("another volume: %s, not %s", again, first)
	}
	coretest.WantSame(t, s.where(t, "v"), []string{"west"})
	// A rack that is full, and then all.
	s.racks["west"].setQuota(t, 1)
	_, err = create("w", preferred("west", "north"))
	coretest.Must(t, err)
	coretest.WantSame(t, s.where(t, "w"), []string{"north"})
	_, err = create("x", coretest.OnRack("west"))
	coretest.WantCode(t, err, codes.ResourceExhausted)
	s.racks["north"].setQuota(t, 1)
	s.racks["east"].setQuota(t, 1)
	_, err = create("x", preferred("west"))
	coretest.WantCode(t, err, codes.ResourceExhausted)
	coretest.WantSame(t, s.where(t, "x"), []string(nil))
	_, err = create("x", coretest.OnRack("south"))
	coretest.WantCode(t, err, codes.ResourceExhausted, "south", "east, north, west")
}

// While one rack is out of reach, it stops what it could have a part in, and nothing else.
func TestOneRackOutOfReach(t *testing.T) {
	t.Parallel()
	for _, line := range []string{lineDown, lineSlow, lineAnother} {
		t.Run(line, func(t *testing.T) {
			t.Parallel()
			s := newSeveral(t)
			there, here := s.on(t, "north", "there"), s.on(t, "west", "here")
			node := s.racks["west"].Node(t, "node-west")
			s.cut("north", line)
			if line == lineSlow { // as long as an orchestrator is ready to wait
				s.Patience.Store(int64(300 * time.Millisecond))
			}
			// What another rack has works as ever.
			coretest.Must(t, s.Publish(t, here, node))
			coretest.Must(t, s.Unpublish(t, here, node))
			s.on(t, "west", "new")
			// What the rack has, or may have, is not gone, and nothing is made in its place.
			unknown := "00000000-0000-4000-8000-000000000001"
			for what, err := range map[string]error{
				"delete":           s.Delete(t, there),
				"delete unknown":   s.Delete(t, unknown),
				"publish":          s.Publish(t, there, node),
				"publish unknown":  s.Publish(t, unknown, node),
				"unpublish":        s.Unpublish(t, there, node),
				"get unknown":      second(s.ControllerGetVolume(t.Context(), &csi.ControllerGetVolumeRequest{VolumeId: unknown})),
				"get snapshot":     second(s.GetSnapshot(t.Context(), &csi.GetSnapshotRequest{SnapshotId: unknown})),
				"delete snapshot":  second(s.DeleteSnapshot(t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: unknown})),
				"list":             second(s.ListVolumes(t.Context(), &csi.ListVolumesRequest{})),
				"list snapshots":   second(s.ListSnapshots(t.Context(), &csi.ListSnapshotsRequest{})),
				"list one":         second(s.ListSnapshots(t.Context(), &csi.ListSnapshotsRequest{SnapshotId: unknown})),
				"create anywhere":  second(s.CreateVolume(t.Context(), coretest.CreateRequest("there"))),
				"restore unknown":  second(s.CreateVolume(t.Context(), from("r", fromSnapshot(unknown)))),
				"copy":             second(s.CreateVolume(t.Context(), from("c", fromVolume(there)))),
				"snapshot unknown": second(s.CreateSnapshot(t.Context(), &csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: unknown})),
			} {
				switch code := status.Code(err); {
				case code == codes.Unavailable || line == lineSlow && code == codes.DeadlineExceeded:
				case line == lineAnother && strings.HasPrefix(what, "list") && code == codes.FailedPrecondition: // an operator must act
				case line == lineAnother && what == "create anywhere" && code == codes.OK:
					t.Errorf("%s: a second volume of that name was made", what)
				default:
					t.Errorf("%s: %s: %v", what, code, err)
				}
			}
			s.cut("north", lineUp)
			close(s.racks["north"].hangUp)
			coretest.WantSame(t, s.where(t, "there"), []string{"north"})
			s.racks["north"].Disk(t, there)
			s.Patience.Store(0)
			coretest.Must(t, s.Delete(t, there))
		})
	}
}

func second[T any](_ T, err error) error { return err }

func TestCapacityOfSeveralRacks(t *testing.T) {
	s := newSeveral(t)
	for n, name := range rackNames {
		s.racks[name].setQuota(t, int64(n+2)*10*coretest.GiB) // one boot disk each
	}
	all, err := s.GetCapacity(t.Context(), &csi.GetCapacityRequest{})
	coretest.Must(t, err)
	if all.GetAvailableCapacity() != 87*coretest.GiB || all.GetMaximumVolumeSize().GetValue() != 39*coretest.GiB {
		t.Errorf("all: %v", all)
	}
	one, err := s.GetCapacity(
		t.Context(),
		&csi.GetCapacityRequest{AccessibleTopology: coretest.OnRack("north").GetRequisite()[0]},
	)
	coretest.Must(t, err)
	if one.GetAvailableCapacity() != 29*coretest.GiB || one.GetMaximumVolumeSize().GetValue() != 29*coretest.GiB {
		t.Errorf("north: %v", one)
	}
	s = newSeveral(t)
	s.cut("east", lineDown)
	_, err = s.GetCapacity(
		t.Context(),
		&csi.GetCapacityRequest{AccessibleTopology: coretest.OnRack("north").GetRequisite()[0]},
	)
	coretest.Must(t, err)
	_, err = s.GetCapacity(t.Context(), &csi.GetCapacityRequest{})
	coretest.WantCode(t, err, codes.Unavailable, "east")
}

func TestListsOfSeveralRacks(t *testing.T) {
	s := newSeveral(t)
	var want []string
	for _, name := range rackNames {
		want = append(want, s.racks[name].bootDisks(t)...)
		for n := range 3 {
			id := s.on(t, name, fmt.Sprint("v-", name, n))
			want = append(want, id)
			s.snapshot(t, fmt.Sprint("s-", name, n), id)
		}
	}
	slices.Sort(want)
	for _, size := range []int32{0, 1, 4, 5} {
		got := slices.Concat(s.listVolumes(t, size)...)
		slices.Sort(got)
		coretest.WantSame(t, got, want)
	}
	snapshots, err := s.ListSnapshots(t.Context(), &csi.ListSnapshotsRequest{MaxEntries: 8})
	coretest.Must(t, err)
	rest, err := s.ListSnapshots(t.Context(), &csi.ListSnapshotsRequest{StartingToken: snapshots.GetNextToken()})
	coretest.Must(t, err)
	if len(snapshots.GetEntries()) != 8 || len(rest.GetEntries()) != 1 {
		t.Errorf("%d and %d snapshots", len(snapshots.GetEntries()), len(rest.GetEntries()))
	}
}

// The same name on two racks is nobody's to choose from.
func TestVolumeOnTwoRacks(t *testing.T) {
	s := newSeveral(t)
	for _, name := range []string{"east", "west"} {
		s.racks[name].Create(t, "v")
	}
	_, err := s.CreateVolume(t.Context(), coretest.CreateRequest("v"))
	coretest.WantCode(t, err, codes.AlreadyExists, "both")
}

// A panic in a question to one of several racks is the RPC's.
func TestPanicOfOneRack(t *testing.T) {
	gate := &coretest.Gate{}
	r := newRig(t)
	client := func(name string) *rack.Client {
		client, err := rack.New(rack.Config{
			Name:       name,
			Host:       r.Sim.Host,
			Project:    coretest.Project,
			Token:      func() (string, error) { return coretest.Token, nil },
			HTTPClient: &http.Client{Transport: gate},
		})
		coretest.Must(t, err)
		return client
	}
	several := &rig{&coretest.Rig{Options: r.Options, Patience: new(atomic.Int64)}}
	several.StartWith(t, client("a"), client("b"))
	gate.Panic("GET", "/v1/disks/", "broken")
	_, err := several.ControllerGetVolume(t.Context(), &csi.ControllerGetVolumeRequest{VolumeId: coretest.NoVolumeID})
	coretest.WantCode(t, err, codes.Internal, "ControllerGetVolume")
}

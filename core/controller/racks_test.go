// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller_test

import (
	"context"
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

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
	"github.com/oxidecomputer/oxide-csi-plugin/test/coretest"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// multiRig is one controller with three racks. Each rack is a rig, and the network to it can fail.
type multiRig struct {
	*rig
	racks map[string]*rackSite
	// clients are the controller's clients of the racks.
	clients []*rack.Client
}

// rackSite is a rack and the network to it.
type rackSite struct {
	*rig
	// network is what happens to requests: one of the constants below.
	network atomic.Value
	// arrived gets a value for each request on a slow network, if nothing is in it.
	arrived chan struct{}
	// hangUp ends the requests on a slow network. Some requests go on after their caller has gone.
	hangUp chan struct{}
	// otherRack serves requests if the network leads to another rack.
	otherRack http.Handler
}

const (
	networkUp = "up"
	// networkDown closes the connection of every request.
	networkDown = "down"
	// networkSlow never answers.
	networkSlow = "slow"
	// networkOther leads to another rack, which has a project of the same name.
	networkOther = "another rack"
)

var rackNames = []string{"east", "north", "west"}

func newMultiRig(t *testing.T) *multiRig {
	t.Helper()
	m := &multiRig{racks: map[string]*rackSite{}}
	var clients []*rack.Client
	for _, name := range rackNames {
		site := &rackSite{
			arrived: make(chan struct{}, 1),
			hangUp:  make(chan struct{}),
			rig:     newRig(t, func(o *coretest.Options) { o.RackName = name; o.Rack.Instances = []string{"node-" + name} }),
		}
		site.network.Store(networkUp)
		site.otherRack = proxyTo(
			t,
			coretest.Simulate(t, simrack.Options{Token: coretest.Token, Project: coretest.Project}).Host,
		)
		direct := proxyTo(t, site.Sim.Host)
		network := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			switch site.network.Load() {
			case networkDown:
				panic(http.ErrAbortHandler)
			case networkSlow:
				select {
				case site.arrived <- struct{}{}:
				default:
				}
				select {
				case <-req.Context().Done():
				case <-site.hangUp:
				}
				panic(http.ErrAbortHandler)
			case networkOther:
				site.otherRack.ServeHTTP(w, req)
			default:
				direct.ServeHTTP(w, req)
			}
		}))
		t.Cleanup(network.Close)
		client, err := rack.New(
			rack.Config{
				Name:    name,
				Host:    network.URL,
				Project: coretest.Project,
				Token:   func() (string, error) { return coretest.Token, nil },
				// The network to these racks loses answers, and the racks execute a request at once.
				LostAnswerWait: time.Millisecond,
			},
		)
		coretest.Must(t, err)
		_, err = client.ProjectID(t.Context())
		coretest.Must(t, err)
		m.racks[name], clients = site, append(clients, client)
	}
	m.rig = &rig{&coretest.Rig{Options: m.racks["east"].Options}}
	m.clients = clients
	m.StartWith(t, clients...)
	return m
}

// Two projects of one rack are two racks for a controller. The rack finds an ID also through the wrong one of them,
// here first. That must change nothing.
func TestTwoProjectsOfOneRack(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	_, err := r.Sim.AddInstance(t.Context(), "stranger", "other", "running")
	r.Must(t, err)
	volume, node := r.Create(t, "v"), r.Node(t, "node-a")
	r.Must(t, r.Publish(t, volume, node))
	snapshot, err := r.CreateSnapshot(t.Context(), &csi.CreateSnapshotRequest{SourceVolumeId: volume, Name: "s"})
	r.Must(t, err)
	both, gate := r.copy(), &coretest.Gate{}
	both.StartWith(t,
		coretest.RackClient(t, r.Rig, func(c *rack.Config) { c.HTTPClient = &http.Client{Transport: gate} }),
		coretest.RackClient(t, r.Rig, func(c *rack.Config) { c.Name, c.Project = "other", "other" }),
	)
	// late calls an RPC while the look-up through the right project takes longer than the other one.
	late := func(path string, call func() error) error {
		held, done := gate.Hold(http.MethodGet, path), make(chan error, 1)
		go func() { done <- call() }()
		held.Entered(t)
		time.AfterFunc(100*time.Millisecond, held.Release)
		return <-done
	}
	r.Must(t, late("/v1/disks/"+volume, func() error { return both.Unpublish(t, volume, node) }))
	if on := r.Holder(t, volume); on != "" {
		t.Errorf("unpublish was OK, and the disk is still on %s", on)
	}
	r.Must(t, both.Publish(t, volume, node))
	r.Must(t, both.Unpublish(t, volume, node))
	r.Must(t, late("/v1/snapshots/"+snapshot.GetSnapshot().GetSnapshotId(), func() error {
		_, err := both.DeleteSnapshot(
			t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: snapshot.GetSnapshot().GetSnapshotId()})
		return err
	}))
	r.Must(t, both.Delete(t, volume))
	_, err = r.Sim.AddInstance(t.Context(), "third", "third", "running")
	r.Must(t, err)
	theirs := r.UserDisk(t, "third", "theirs", "")
	coretest.WantCode(t, both.Publish(t, theirs.Id, node), codes.FailedPrecondition, "another project")
}

func proxyTo(t *testing.T, host string) http.Handler {
	t.Helper()
	target, err := url.Parse(host)
	coretest.Must(t, err)
	proxy := httputil.NewSingleHostReverseProxy(target)
	proxy.ErrorHandler = func(w http.ResponseWriter, _ *http.Request, _ error) { w.WriteHeader(http.StatusBadGateway) }
	return proxy
}

func (m *multiRig) setNetwork(rackName, network string) { m.racks[rackName].network.Store(network) }

// createOn makes a volume on the rack of that name.
func (m *multiRig) createOn(t *testing.T, rackName, volume string) string {
	t.Helper()
	req := coretest.CreateRequest(volume)
	req.AccessibilityRequirements = coretest.RequireRacks(rackName)
	resp, err := m.CreateVolume(t.Context(), req)
	coretest.Must(t, err)
	coretest.WantSame(t, resp.GetVolume().GetAccessibleTopology(), coretest.RequireRacks(rackName).GetRequisite())
	return resp.GetVolume().GetVolumeId()
}

// racksWith lists the racks that have a disk for a volume's name.
func (m *multiRig) racksWith(t *testing.T, volume string) (names []string) {
	t.Helper()
	for _, name := range rackNames {
		_, err := m.racks[name].SDK.DiskView(
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

// restart starts another controller, whose caches are empty.
func (m *multiRig) restart(t *testing.T) {
	t.Helper()
	var clients []*rack.Client
	for _, name := range rackNames {
		client, err := rack.New(
			rack.Config{
				Name:    name,
				Host:    m.racks[name].Sim.Host,
				Project: coretest.Project,
				Token:   func() (string, error) { return coretest.Token, nil },
			},
		)
		coretest.Must(t, err)
		clients = append(clients, client)
	}
	m.StartWith(t, clients...)
}

// A volume without a disk, because its expansion is not finished, is not made on another rack, nor twice on its own.
func TestCreateVolumeAgainWithoutADiskOnSeveralRacks(t *testing.T) {
	m := newMultiRig(t)
	id := m.createOn(t, "west", "v")
	m.racks["west"].Inject(t, "disk_create", simtest.FaultStatus, 500)
	_, err := m.expand(t, id, 2*coretest.GiB)
	coretest.WantCode(t, err, codes.Aborted)
	for _, names := range [][]string{rackNames, {"west"}} {
		req := coretest.CreateRequest("v")
		req.AccessibilityRequirements = coretest.RequireRacks(names...)
		_, err := m.CreateVolume(t.Context(), req)
		coretest.WantCode(t, err, codes.Aborted, id)
	}
	if with := m.racksWith(t, "v"); len(with) > 0 {
		t.Errorf("disks on the racks %v", with)
	}
}

func TestVolumeLifeOnSeveralRacks(t *testing.T) {
	m := newMultiRig(t)
	for _, name := range rackNames {
		id := m.createOn(t, name, "v-"+name)
		m.restart(t)
		site := m.racks[name]
		node := site.Node(t, "node-"+name)
		coretest.Must(t, m.Publish(t, id, node))
		if holder := site.Holder(t, id); holder != node {
			t.Errorf("the disk is attached to %q", holder)
		}
		snapshot := m.snapshot(t, "s-"+name, id)
		restored, err := m.CreateVolume(t.Context(), from("r-"+name, fromSnapshot(snapshot)))
		coretest.Must(t, err)
		copied, err := m.CreateVolume(t.Context(), from("c-"+name, fromVolume(id)))
		coretest.Must(t, err)
		for _, volume := range []*csi.Volume{restored.GetVolume(), copied.GetVolume()} {
			coretest.WantSame(t, volume.GetAccessibleTopology(), coretest.RequireRacks(name).GetRequisite())
		}
		// A copy stays on the rack of its source.
		elsewhere := rackNames[(slices.Index(rackNames, name)+1)%3]
		req := from("x-"+name, fromSnapshot(snapshot))
		req.AccessibilityRequirements = coretest.RequireRacks(elsewhere)
		_, err = m.CreateVolume(t.Context(), req)
		coretest.WantCode(t, err, codes.ResourceExhausted, name)
		_, err = m.CreateSnapshot(
			t.Context(),
			&csi.CreateSnapshotRequest{
				Name:                      "x-" + name,
				SourceVolumeId:            id,
				AccessibilityRequirements: coretest.RequireRacks(elsewhere),
			},
		)
		coretest.WantCode(t, err, codes.ResourceExhausted, name)
		// A node of another rack is not found.
		coretest.WantCode(
			t,
			m.Publish(t, restored.GetVolume().GetVolumeId(), m.racks[elsewhere].Node(t, "node-"+elsewhere)),
			codes.NotFound,
			name,
		)
		coretest.Must(t, m.Unpublish(t, id, node))
		for _, volume := range []string{id, restored.GetVolume().GetVolumeId(), copied.GetVolume().GetVolumeId()} {
			coretest.Must(t, m.Delete(t, volume))
			coretest.Must(t, m.Delete(t, volume))
		}
		_, err = m.DeleteSnapshot(t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: snapshot})
		coretest.Must(t, err)
		if left, snapshots := site.Volumes(t), site.snapshots(t); len(left)+len(snapshots) > 0 {
			t.Errorf("left on %s: %v, %v", name, left, snapshots)
		}
	}
}

func TestCreateVolumeOnSeveralRacks(t *testing.T) {
	m := newMultiRig(t)
	preferred := func(names ...string) *csi.TopologyRequirement {
		return &csi.TopologyRequirement{
			Requisite: coretest.RequireRacks(rackNames...).GetRequisite(),
			Preferred: coretest.RequireRacks(names...).GetRequisite(),
		}
	}
	create := func(volume string, requirement *csi.TopologyRequirement) (string, error) {
		req := coretest.CreateRequest(volume)
		req.AccessibilityRequirements = requirement
		resp, err := m.CreateVolume(t.Context(), req)
		return resp.GetVolume().GetVolumeId(), err
	}
	first, err := create("v", preferred("west", "east"))
	coretest.Must(t, err)
	coretest.WantSame(t, m.racksWith(t, "v"), []string{"west"})
	// Another replica gets the call with another preference, as after a pod was rescheduled.
	m.restart(t)
	again, err := create("v", preferred("north"))
	coretest.Must(t, err)
	if again != first {
		t.Errorf("a second volume %s was made, want the first one, %s", again, first)
	}
	coretest.WantSame(t, m.racksWith(t, "v"), []string{"west"})
	// First one rack has no free quota, then all.
	m.racks["west"].setQuota(t, 1)
	_, err = create("w", preferred("west", "north"))
	coretest.Must(t, err)
	coretest.WantSame(t, m.racksWith(t, "w"), []string{"north"})
	_, err = create("x", coretest.RequireRacks("west"))
	coretest.WantCode(t, err, codes.ResourceExhausted)
	// A preference without a requisite rack is a wish.
	_, err = create("wish", &csi.TopologyRequirement{Preferred: coretest.RequireRacks("west").GetRequisite()})
	coretest.Must(t, err)
	coretest.WantSame(t, m.racksWith(t, "wish"), []string{"east"})
	m.racks["north"].setQuota(t, 1)
	m.racks["east"].setQuota(t, 1)
	_, err = create("x", preferred("west"))
	coretest.WantCode(t, err, codes.ResourceExhausted)
	coretest.WantSame(t, m.racksWith(t, "x"), []string(nil))
	_, err = create("x", coretest.RequireRacks("south"))
	coretest.WantCode(t, err, codes.ResourceExhausted, "south", "east, north, west")
}

// The requirement of a volume moves to another rack after the volume was made, and its rack may be down then.
func TestCreateVolumeWithAMovedRequirement(t *testing.T) {
	t.Parallel()
	m := newMultiRig(t)
	m.createOn(t, "west", "v")
	m.restart(t)
	req := coretest.CreateRequest("v")
	req.AccessibilityRequirements = coretest.RequireRacks("north")
	_, err := m.CreateVolume(t.Context(), req)
	coretest.WantCode(t, err, codes.AlreadyExists, "west")
	coretest.WantSame(t, m.racksWith(t, "v"), []string{"west"})
}

// One error of the rack that has the volume must not lead to a second disk.
func TestCreateVolumeWithAMovedRequirementThroughFaults(t *testing.T) {
	t.Parallel()
	for _, fault := range []struct {
		kind string
		code int
	}{
		{simtest.FaultStatus, 401}, {simtest.FaultStatus, 403}, {simtest.FaultStatus, 500}, {simtest.FaultStatus, 503},
		{simtest.FaultLost, 0}, {simtest.FaultReset, 0},
	} {
		t.Run(fmt.Sprint(fault.kind, fault.code), func(t *testing.T) {
			t.Parallel()
			m := newMultiRig(t)
			m.Options.OtherRacksWait = time.Minute // on a busy machine the repetitions take longer than two seconds
			m.StartWith(t, m.clients...)
			m.createOn(t, "west", "v")
			m.racks["west"].Inject(t, "disk_view", fault.kind, fault.code)
			req := coretest.CreateRequest("v")
			req.AccessibilityRequirements = coretest.RequireRacks("north")
			_, err := m.CreateVolume(t.Context(), req)
			coretest.WantCode(t, err, codes.AlreadyExists, "west")
			coretest.WantSame(t, m.racksWith(t, "v"), []string{"west"})
		})
	}
}

// A rack that does not answer blocks a create on another rack for a bounded time only, and is named in the log.
func TestCreateVolumeWhileAnotherRackIsSilent(t *testing.T) {
	t.Parallel()
	m := newMultiRig(t)
	log := &simtest.Output{}
	m.Options.Log = log
	m.setNetwork("north", networkSlow)
	defer close(m.racks["north"].hangUp)
	m.StartWith(t, m.clients...)
	start := time.Now()
	m.createOn(t, "west", "new")
	if took := time.Since(start); took > 10*time.Second {
		t.Errorf("the create took %s", took)
	}
	if text := log.String(); !strings.Contains(text, "does not respond") || !strings.Contains(text, "north") {
		t.Errorf("the log does not name the rack:\n%s", text)
	}
}

// A volume can get a second disk while the rack of the first one does not answer. A repeated create has the answer of
// the first time all the same, and the log names the other disk. Where there is neither, nothing is made.
func TestCreateVolumeAgainWithASecondDisk(t *testing.T) {
	t.Parallel()
	m := newMultiRig(t)
	log := &simtest.Output{}
	m.Options.Log = log
	m.StartWith(t, m.clients...)
	first, second := m.racks["east"].Create(t, "v"), m.racks["west"].Create(t, "v")
	for rackName, want := range map[string]string{"east": first, "west": second} {
		if got := m.createOn(t, rackName, "v"); got != want {
			t.Errorf("the create on rack %s answers volume %s, want %s", rackName, got, want)
		}
	}
	for _, id := range []string{first, second} {
		if !strings.Contains(log.String(), id) {
			t.Errorf("the log does not name disk %s:\n%s", id, log)
		}
	}
	req := coretest.CreateRequest("v")
	req.AccessibilityRequirements = coretest.RequireRacks("north")
	_, err := m.CreateVolume(t.Context(), req)
	coretest.WantCode(t, err, codes.AlreadyExists, "outside of accessibility_requirements")
	// A token without its role does not see a disk of the allowed rack.
	north := &rig{m.racks["north"].Rig}
	north.loseRole(t)
	_, err = m.CreateVolume(t.Context(), req)
	coretest.WantCode(t, err, codes.Unavailable, "north")
	coretest.WantSame(t, m.racksWith(t, "v"), []string{"east", "west"})
}

// A caller that gives up while another rack is asked leaves no disk.
func TestCreateVolumeGivenUpWhileAnotherRackIsAsked(t *testing.T) {
	t.Parallel()
	m := newMultiRig(t)
	m.setNetwork("north", networkSlow)
	defer close(m.racks["north"].hangUp)
	ctx, cancel := m.racks["north"].cancelOnArrival(t.Context())
	defer cancel()
	log := &simtest.Output{}
	m.Options.Log = log
	m.StartWith(t, m.clients...)
	req := coretest.CreateRequest("v")
	req.AccessibilityRequirements = coretest.RequireRacks("west")
	_, err := m.CreateVolume(ctx, req)
	coretest.WantCode(t, err, codes.Canceled, "")
	coretest.WantSame(t, m.racksWith(t, "v"), nil)
	if text := log.String(); strings.Contains(text, "does not respond") {
		t.Errorf("the log blames a rack that had no time to answer:\n%s", text)
	}
}

// While one rack does not answer, calls that may concern it fail with a code on which the caller retries. All other
// calls succeed.
func TestOneRackOutOfReach(t *testing.T) {
	t.Parallel()
	for _, network := range []string{networkDown, networkSlow, networkOther} {
		t.Run(network, func(t *testing.T) {
			t.Parallel()
			m := newMultiRig(t)
			there, here := m.createOn(t, "north", "there"), m.createOn(t, "west", "here")
			m.StartWith(t, m.clients...) // it remembers no disk, so each call begins with a look
			node := m.racks["west"].Node(t, "node-west")
			m.setNetwork("north", network)
			// Calls for another rack succeed.
			coretest.Must(t, m.Publish(t, here, node))
			coretest.Must(t, m.Unpublish(t, here, node))
			m.createOn(t, "west", "new")
			if network == networkSlow {
				m.CallContext = m.racks["north"].cancelOnArrival
			}
			// A disk that the rack has, or may have, does not count as deleted, and no second one is made.
			unknown := "00000000-0000-4000-8000-000000000001"
			for what, call := range map[string]func() error{
				"delete":          func() error { return m.Delete(t, there) },
				"delete unknown":  func() error { return m.Delete(t, unknown) },
				"publish":         func() error { return m.Publish(t, there, node) },
				"publish unknown": func() error { return m.Publish(t, unknown, node) },
				"unpublish":       func() error { return m.Unpublish(t, there, node) },
				"get unknown": func() error {
					return second(m.ControllerGetVolume(t.Context(), &csi.ControllerGetVolumeRequest{VolumeId: unknown}))
				},
				"get snapshot": func() error { return second(m.GetSnapshot(t.Context(), &csi.GetSnapshotRequest{SnapshotId: unknown})) },
				"delete snapshot": func() error {
					return second(m.DeleteSnapshot(t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: unknown}))
				},
				"list":           func() error { return second(m.ListVolumes(t.Context(), &csi.ListVolumesRequest{})) },
				"list snapshots": func() error { return second(m.ListSnapshots(t.Context(), &csi.ListSnapshotsRequest{})) },
				"list one snapshot": func() error {
					return second(m.ListSnapshots(t.Context(), &csi.ListSnapshotsRequest{SnapshotId: unknown}))
				},
				"create anywhere": func() error { return second(m.CreateVolume(t.Context(), coretest.CreateRequest("there"))) },
				"restore unknown": func() error { return second(m.CreateVolume(t.Context(), from("r", fromSnapshot(unknown)))) },
				"copy":            func() error { return second(m.CreateVolume(t.Context(), from("c", fromVolume(there)))) },
				"snapshot unknown": func() error {
					return second(m.CreateSnapshot(t.Context(), &csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: unknown}))
				},
			} {
				err := call()
				switch code := status.Code(err); {
				case code == codes.Unavailable || network == networkSlow && code == codes.Canceled:
				case network == networkOther && strings.HasPrefix(what, "list") && code == codes.FailedPrecondition: // an operator must act
				case network == networkOther && what == "create anywhere" && code == codes.OK:
					t.Errorf("%s: a second volume of that name was made", what)
				default:
					t.Errorf("%s: %s: %v", what, code, err)
				}
			}
			m.setNetwork("north", networkUp)
			close(m.racks["north"].hangUp)
			coretest.WantSame(t, m.racksWith(t, "there"), []string{"north"})
			m.racks["north"].Disk(t, there)
			m.CallContext = nil
			coretest.Must(t, m.Delete(t, there))
		})
	}
}

// cancelOnArrival returns a context that ends when a request arrives on the slow network: the caller gives up while the
// rack does not answer, after any time on any machine.
func (s *rackSite) cancelOnArrival(ctx context.Context) (context.Context, context.CancelFunc) {
	select {
	case <-s.arrived: // from an earlier call
	default:
	}
	ctx, cancel := context.WithCancel(ctx)
	go func() {
		select {
		case <-s.arrived:
			cancel()
		case <-ctx.Done():
		}
	}()
	return ctx, cancel
}

func second[T any](_ T, err error) error { return err }

func TestCapacityOfSeveralRacks(t *testing.T) {
	m := newMultiRig(t)
	for n, name := range rackNames {
		m.racks[name].setQuota(t, int64(n+2)*10*coretest.GiB) // one boot disk each
	}
	all, err := m.GetCapacity(t.Context(), &csi.GetCapacityRequest{})
	coretest.Must(t, err)
	if all.GetAvailableCapacity() != 87*coretest.GiB {
		t.Errorf("all: %v", all)
	}
	one, err := m.GetCapacity(
		t.Context(),
		&csi.GetCapacityRequest{AccessibleTopology: coretest.RequireRacks("north").GetRequisite()[0]},
	)
	coretest.Must(t, err)
	if one.GetAvailableCapacity() != 29*coretest.GiB {
		t.Errorf("north: %v", one)
	}
	m = newMultiRig(t)
	m.setNetwork("east", networkDown)
	_, err = m.GetCapacity(
		t.Context(),
		&csi.GetCapacityRequest{AccessibleTopology: coretest.RequireRacks("north").GetRequisite()[0]},
	)
	coretest.Must(t, err)
	_, err = m.GetCapacity(t.Context(), &csi.GetCapacityRequest{})
	coretest.WantCode(t, err, codes.Unavailable, "east")
}

func TestListsOfSeveralRacks(t *testing.T) {
	m := newMultiRig(t)
	var want []string
	for _, name := range rackNames {
		want = append(want, m.racks[name].bootDisks(t)...)
		for n := range 3 {
			id := m.createOn(t, name, fmt.Sprint("v-", name, n))
			want = append(want, id)
			m.snapshot(t, fmt.Sprint("s-", name, n), id)
		}
	}
	slices.Sort(want)
	for _, size := range []int32{0, 1, 4, 5} {
		got := slices.Concat(m.listVolumes(t, size)...)
		slices.Sort(got)
		coretest.WantSame(t, got, want)
	}
	snapshots, err := m.ListSnapshots(t.Context(), &csi.ListSnapshotsRequest{MaxEntries: 8})
	coretest.Must(t, err)
	rest, err := m.ListSnapshots(t.Context(), &csi.ListSnapshotsRequest{StartingToken: snapshots.GetNextToken()})
	coretest.Must(t, err)
	if len(snapshots.GetEntries()) != 8 || len(rest.GetEntries()) != 1 {
		t.Errorf("%d and %d snapshots", len(snapshots.GetEntries()), len(rest.GetEntries()))
	}
}

// With the same name on two racks the controller must not choose one.
func TestCreateRejectsANameOnTwoRacks(t *testing.T) {
	m := newMultiRig(t)
	for _, name := range []string{"east", "west"} {
		m.racks[name].Create(t, "v")
	}
	_, err := m.CreateVolume(t.Context(), coretest.CreateRequest("v"))
	coretest.WantCode(t, err, codes.AlreadyExists, "both")
}

// A panic in the query to one of several racks fails only the RPC.
func TestPanicInTheQueryToOneRack(t *testing.T) {
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
	twoRacks := &rig{&coretest.Rig{Options: r.Options}}
	twoRacks.StartWith(t, client("a"), client("b"))
	gate.Panic("GET", "/v1/disks/", "broken")
	_, err := twoRacks.ControllerGetVolume(t.Context(), &csi.ControllerGetVolumeRequest{VolumeId: coretest.NoVolumeID})
	coretest.WantCode(t, err, codes.Internal, "ControllerGetVolume")
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller_test

import (
	"context"
	"net/http"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/oxidecomputer/oxide-csi-plugin/core/controller"
	"github.com/oxidecomputer/oxide-csi-plugin/core/fault"
	"github.com/oxidecomputer/oxide-csi-plugin/test/coretest"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack"
)

// slowGuests need time for a snapshot, and do nothing else.
type slowGuests struct {
	simrack.Guests
	snapshot time.Duration
	begun    atomic.Int32
}

func (*slowGuests) CreateDisk(string, int64) error          { return nil }
func (*slowGuests) RestoreDisk(string, int64, string) error { return nil }
func (*slowGuests) DeleteDisk(string) error                 { return nil }
func (*slowGuests) DeleteSnapshot(string) error             { return nil }
func (*slowGuests) CreateInstance(string, string) error     { return nil }
func (*slowGuests) DeleteInstance(string) error             { return nil }
func (*slowGuests) PowerOff(string, bool) error             { return nil }
func (*slowGuests) PowerOn(string, []simrack.GuestDisk, func(bool)) error {
	return nil
}

func (g *slowGuests) CreateSnapshot(string, string) error {
	g.begun.Add(1)
	time.Sleep(g.snapshot)
	return nil
}

// abandonable lets a caller go when its context ends, and the rack goes on.
type abandonable struct{ handlerTransport }

func (a abandonable) RoundTrip(req *http.Request) (*http.Response, error) {
	type result struct {
		resp *http.Response
		err  error
	}
	answered := make(chan result, 1)
	go func() {
		resp, err := a.handlerTransport.RoundTrip(req.Clone(context.WithoutCancel(req.Context())))
		answered <- result{resp, err}
	}()
	select {
	case <-req.Context().Done():
		return nil, req.Context().Err()
	case r := <-answered:
		return r.resp, r.err
	}
}

// An expansion ends, however long the rack needs for the snapshot: Kubernetes' resizer limits each call to two minutes
// and pauses up to a minute, and meanwhile two controllers sweep.
func TestExpansionWithASlowSnapshot(t *testing.T) {
	for _, snapshot := range []time.Duration{
		time.Second, time.Minute, 3*time.Minute + 40*time.Second, 4 * time.Minute, 10 * time.Minute, time.Hour,
	} {
		for _, pause := range []time.Duration{time.Second, time.Minute} {
			t.Run(snapshot.String()+", pauses of "+pause.String(), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					guests := &slowGuests{snapshot: snapshot}
					r := newBubbleRig(t, func(o *simrack.Options) { o.Instances, o.Guests = nil, guests })
					r.transport = func(h handlerTransport) http.RoundTripper { return abandonable{h} }
					service, other := r.startController(t, controller.Options{}), r.startController(t, controller.Options{})
					service.StartSweeping(t.Context())
					other.StartSweeping(t.Context())
					created, err := service.CreateVolume(t.Context(), coretest.CreateRequest("v"))
					coretest.Must(t, err)
					begun := time.Now()
					defer time.Sleep(snapshot) // the rack ends what was abandoned
					for {
						ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
						_, err := service.ControllerExpandVolume(ctx, &csi.ControllerExpandVolumeRequest{
							VolumeId: created.GetVolume().GetVolumeId(), CapacityRange: &csi.CapacityRange{RequiredBytes: 2 * coretest.GiB},
						})
						cancel()
						if err == nil {
							break
						}
						if took := time.Since(begun); took > snapshot+5*time.Minute || guests.begun.Load() > 2 {
							t.Fatalf("not done after %s and %d snapshots: %v", took, guests.begun.Load(), err)
						}
						time.Sleep(pause)
					}
					t.Logf("done after %s and %d snapshots", time.Since(begun), guests.begun.Load())
				})
			})
		}
	}
}

// A process does not take back what one of its own calls carries out, before the rack shows a snapshot.
func TestSettleDuringAnExpansion(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		guests := &slowGuests{}
		r := newBubbleRig(t, func(o *simrack.Options) { o.Instances, o.Guests = nil, guests })
		r.before = func(req *http.Request) {
			if req.Method == http.MethodPost && req.URL.Path == "/v1/snapshots" {
				time.Sleep(10 * time.Minute)
			}
		}
		service := r.startController(t, controller.Options{})
		created, err := service.CreateVolume(t.Context(), coretest.CreateRequest("v"))
		coretest.Must(t, err)
		settled := make(chan error, 1)
		go func() {
			time.Sleep(5 * time.Minute)
			settled <- service.SettleNow(t.Context())
		}()
		_, err = service.ControllerExpandVolume(t.Context(), &csi.ControllerExpandVolumeRequest{
			VolumeId: created.GetVolume().GetVolumeId(), CapacityRange: &csi.CapacityRange{RequiredBytes: 2 * coretest.GiB},
		})
		coretest.Must(t, err)
		coretest.Must(t, <-settled)
		if guests.begun.Load() != 1 {
			t.Errorf("%d snapshots were made", guests.begun.Load())
		}
	})
}

// An instance that starts during a snapshot of its disk spoils the snapshot. The rack says so as a conflict, after
// which the call makes the snapshot again, or as an error of its own, after which the orchestrator repeats the call.
func TestSnapshotSpoiltByAStart(t *testing.T) {
	const takes = 10 * time.Second
	for name, test := range map[string]struct {
		start time.Duration
		want  *fault.Row
	}{
		"before the rack looks": {takes / 4, nil},
		"after the rack looked": {takes * 3 / 4, fault.RackFailed},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newBubbleRig(t, func(o *simrack.Options) {
					o.World = simrack.World{Pantry: true, SnapshotMS: float64(takes.Milliseconds())}
				})
				service := r.startController(t, controller.Options{})
				created, err := service.CreateVolume(t.Context(), coretest.CreateRequest("v"))
				coretest.Must(t, err)
				volume, node := created.GetVolume().GetVolumeId(), r.Node(t, "node-a")
				_, err = service.ControllerPublishVolume(t.Context(), &csi.ControllerPublishVolumeRequest{
					VolumeId: volume, NodeId: node, VolumeCapability: coretest.MountWriter(),
				})
				coretest.Must(t, err)
				runState := func(state string) {
					coretest.Must(t, r.control(http.MethodPatch, "/v0/instances/"+node, map[string]string{"run_state": state}))
				}
				runState("stopped")
				take := func() error {
					_, err := service.CreateSnapshot(t.Context(), &csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: volume})
					return err
				}
				done := make(chan error, 1)
				go func() { done <- take() }()
				time.Sleep(test.start)
				runState("running")
				if err := <-done; fault.Of(err) != test.want || err != nil && test.want == nil {
					t.Errorf("%v, want %v", err, test.want)
				}
				coretest.Must(t, take())
				if got := r.snapshots(t); len(got) != 1 {
					t.Errorf("snapshots %v", got)
				}
			})
		})
	}
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package restart

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/record"
)

// oneInstance is a rack that only knows the run state of an instance.
type oneInstance struct {
	Rack
	run string
}

func (r oneInstance) Instance(context.Context, string) (rack.Instance, error) {
	return rack.Instance{RunState: r.run}, nil
}

// A refusal by the node plugin does not matter once the owner has stopped the instance.
func TestStoppedInstanceIsEligibleDespiteRefusal(t *testing.T) {
	for run, want := range map[string]int{rack.Running: 0, rack.Stopped: 1} {
		t.Run(run, func(t *testing.T) {
			e := New(oneInstance{run: run}, Options{CoolDown: time.Hour, Log: slog.New(slog.DiscardHandler)})
			e.refusals["i"] = refusal{since: time.Now(), reason: "no"}
			eligible, err := e.eligible(t.Context(), []candidate{{instance: "i", frees: "d"}}, restartStatuses{})
			if err != nil || len(eligible) != want {
				t.Errorf("eligible: %+v, %v, want %d", eligible, err, want)
			}
		})
	}
}

// An attach request lasts as long as it is repeated.
func TestUnrepeatedAttachRequestExpires(t *testing.T) {
	e := New(nil, Options{Log: slog.New(slog.DiscardHandler)})
	e.addRequest(rack.Disk{VolumeID: "repeated"}, "i")
	e.addRequest(rack.Disk{VolumeID: "not repeated"}, "i")
	e.requests["repeated"].repeatedAt = time.Now().Add(-requestLifetime + time.Minute)
	e.requests["not repeated"].repeatedAt = time.Now().Add(-requestLifetime)
	e.expireRequests()
	if len(e.requests) != 1 || e.requests["repeated"] == nil {
		t.Errorf("left: %v", sortedKeys(e.requests))
	}
	if requestLifetime != 10*time.Minute {
		t.Errorf("the docs say 10 minutes, not %s", requestLifetime)
	}
}

// failingRack is a rack that cannot look up one disk, or one instance.
type failingRack struct {
	slowRack
	failing string
	failure error
}

func (r *failingRack) Disk(ctx context.Context, id string) (rack.Disk, error) {
	if id == r.failing {
		return rack.Disk{}, r.failure
	}
	return r.slowRack.Disk(ctx, id)
}

func (r *failingRack) Instance(ctx context.Context, id string) (rack.Instance, error) {
	if id == r.failing {
		return rack.Instance{}, r.failure
	}
	return r.slowRack.Instance(ctx, id)
}

// A disk or an instance that the rack cannot show does not prevent the restarts of other instances.
func TestFailingLookUpDoesNotBlockOtherRestarts(t *testing.T) {
	for _, failing := range []string{"disk-0", "instance-0"} {
		t.Run(failing, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := &failingRack{failing: failing, failure: rack.ErrInternal}
				e := New(r, Options{Shutdown: Hard, MaxDown: 1, Log: slog.New(slog.DiscardHandler)})
				for i := range 2 {
					instance, disk := fmt.Sprintf("instance-%d", i), fmt.Sprintf("disk-%d", i)
					r.instances = append(r.instances, rack.Instance{ID: instance, RunState: rack.Running})
					r.disks = append(r.disks, rack.Disk{VolumeID: disk, State: rack.Detached})
					e.addRequest(rack.Disk{VolumeID: disk}, instance)
				}
				if err := e.tick(t.Context()); !errors.Is(err, rack.ErrInternal) || len(r.created) != 1 {
					t.Errorf("error %v, records %q; want the rack's error and one restart", err, r.created)
				}
				if len(e.held) != 1 {
					t.Fatalf("%d restarts are held", len(e.held))
				}
				for _, h := range e.held {
					if h.record.Instance != "instance-1" {
						t.Errorf("a restart of %s is planned", h.record.Instance)
					}
				}
			})
		})
	}
}

// In a project with a long list of disks, more than maxLookups disks are looked up at the same time. A look-up that
// fails belongs to its volume, also there.
func TestFailingLookUpAmongManyDoesNotBlockOtherRestarts(t *testing.T) {
	for _, failure := range []error{rack.ErrReplaced, rack.ErrInternal} {
		t.Run(failure.Error(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := &failingRack{failing: "disk-0", failure: failure}
				e := New(r, Options{Shutdown: Hard, MaxDown: 1, Log: slog.New(slog.DiscardHandler)})
				e.longList = true
				for i := range maxLookups + 1 {
					instance := fmt.Sprintf("instance-%d", i)
					disk := rack.Disk{VolumeID: fmt.Sprintf("disk-%d", i), State: rack.Detached}
					r.instances = append(r.instances, rack.Instance{ID: instance, RunState: rack.Running})
					r.disks = append(r.disks, disk)
					e.addRequest(disk, instance)
				}
				_ = e.tick(t.Context()) // its error, if any, is that of the look-up, which fails on purpose
				if len(r.created) != 1 {
					t.Errorf("records %q, want that of one restart", r.created)
				}
			})
		})
	}
}

// When the time of a tick is over, the look-ups that are left fail as one: their errors come to the log.
func TestEndOfATickIsOneError(t *testing.T) {
	r := &slowRack{latency: time.Hour}
	e := New(r, Options{Log: slog.New(slog.DiscardHandler)})
	e.longList = true
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	volumes := make([]string, maxLookups+1)
	for i := range volumes {
		volumes[i] = volumeID(i)
	}
	if _, err := e.diskLookup(ctx, volumes); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}

// A volume that has grown has another disk than the one that it is named after. It needs one slot, not two, also when
// it is asked for again; and each volume of a restart that was taken over needs one.
func TestRoomCountsEachVolumeOnce(t *testing.T) {
	e := New(&slowRack{}, Options{Log: slog.New(slog.DiscardHandler)})
	grown := rack.Disk{VolumeID: volumeID(0), ID: rack.DiskID(volumeID(9))}
	boot := []rack.Disk{{VolumeID: "boot", ID: "boot"}}
	for range 2 {
		if got := e.expectedDisks(grown, "instance", boot, recordSet{}); got != 1 {
			t.Errorf("the instance will have %d disks besides the grown one; want 1", got)
		}
		e.addRequest(grown, "instance")
	}
	recorded := record.ShortIDs([]string{volumeID(0), volumeID(1), volumeID(2)})
	e.addHeld(record.Restart{ID: "restart", Instance: "instance", Volumes: recorded}, record.Restart{})
	if got := e.expectedDisks(grown, "instance", boot, recordSet{}); got != 3 {
		t.Errorf("the instance will have %d disks besides the grown one after a takeover; want 3", got)
	}
}

// Which request comes first must not depend on the order in a map.
func TestRequestsOfOneTimeAreInTheOrderOfTheirVolumes(t *testing.T) {
	e := New(&slowRack{}, Options{Log: slog.New(slog.DiscardHandler)})
	var volumes []string
	for i := range 8 {
		volumes = append(volumes, fmt.Sprintf("volume-%d", i))
		e.requests[volumes[i]] = &attachRequest{volume: volumes[i]}
	}
	var got []string
	for _, request := range e.allRequests() {
		got = append(got, request.volume)
	}
	if !slices.Equal(got, volumes) {
		t.Errorf("got %q", got)
	}
}

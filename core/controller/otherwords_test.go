// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller_test

import (
	"regexp"
	"slices"
	"testing"

	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/core/controller"
	"github.com/oxidecomputer/oxide-csi-plugin/core/restart"
	"github.com/oxidecomputer/oxide-csi-plugin/test/coretest"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// refusedCall makes the rack refuse a request for a volume and returns the answer to the caller. The gate holds
// requests of the controller back, so that something can change behind its checks.
type refusedCall func(t *testing.T, r *rig, gate *coretest.Gate, volume, node string) error

// behindTheCheck changes something while the request to attach is on its way.
func behindTheCheck(change func(t *testing.T, r *rig, volume, node string)) refusedCall {
	return func(t *testing.T, r *rig, gate *coretest.Gate, volume, node string) error {
		held := gate.Hold("POST", "/v1/instances/"+node+"/disks/attach")
		done := make(chan error, 1)
		go func() { done <- r.Publish(t, volume, node) }()
		held.Entered(t)
		change(t, r, volume, node)
		held.Release()
		return <-done
	}
}

func inState(state string) refusedCall {
	return func(t *testing.T, r *rig, _ *coretest.Gate, volume, node string) error {
		r.Must(t, r.Sim.SetRunState(t.Context(), node, state))
		return r.Publish(t, volume, node)
	}
}

func fill(t *testing.T, r *rig, _, node string) {
	for _, name := range []string{"by-hand-b", "by-hand-c"} {
		r.AttachByHand(t, r.UserDisk(t, coretest.Project, name, "").Id, node)
	}
}

// refusals has a call for each refusal of an attach, a detach or a deletion in docs/reference/rack.md §3 and §4, with
// its answer in the attach modes hot and restart.
var refusals = map[string]struct {
	call        refusedCall
	hot         string
	restart     string
	withHotplug bool
}{
	"attach, running":   {call: inState("running"), hot: "RackHasNoHotplug", restart: "RestartPlanned"},
	"attach, migrating": {call: inState("migrating"), hot: "RackHasNoHotplug", restart: "RestartPlanned"},
	"attach, failed":    {call: inState("failed"), hot: "failed", restart: "RestartPlanned"},
	"attach, another project": {
		call: func(t *testing.T, r *rig, _ *coretest.Gate, volume, _ string) error {
			stranger, err := r.Sim.AddInstance(t.Context(), "stranger", "elsewhere", "running")
			r.Must(t, err)
			return r.Publish(t, volume, stranger.ID)
		}, hot: "different projects", restart: "different projects",
	},
	"attach, faulted": {call: behindTheCheck(func(t *testing.T, r *rig, volume, _ string) {
		r.Must(t, r.Sim.SetDiskState(t.Context(), volume, "faulted"))
	}), hot: "DiskFaulted", restart: "DiskFaulted"},
	"attach, faulted, with hot-plug": {call: behindTheCheck(func(t *testing.T, r *rig, volume, _ string) {
		r.Must(t, r.Sim.SetDiskState(t.Context(), volume, "faulted"))
	}), hot: "DiskFaulted", restart: "DiskFaulted", withHotplug: true},
	"attach, elsewhere": {call: behindTheCheck(func(t *testing.T, r *rig, volume, _ string) {
		other := r.Node(t, "node-b")
		r.Must(t, r.Sim.SetRunState(t.Context(), other, "stopped"))
		r.AttachByHand(t, volume, other)
	}), hot: "AttachedElsewhere", restart: "AttachedElsewhere"},
	"attach, full": {call: func(t *testing.T, r *rig, gate *coretest.Gate, volume, node string) error {
		r.Must(t, r.Sim.SetRunState(t.Context(), node, "stopped"))
		return behindTheCheck(fill)(t, r, gate, volume, node)
	}, hot: "InstanceFull", restart: "InstanceFull"},
	"attach, full, with hot-plug": {
		call: behindTheCheck(fill), hot: "InstanceFull", restart: "InstanceFull", withHotplug: true,
	},
	"detach, running": {call: func(t *testing.T, r *rig, _ *coretest.Gate, volume, node string) error {
		r.Must(t, r.Sim.Set(t.Context(), simtest.Settings{Hotplug: new(true)}))
		r.AttachByHand(t, volume, node)
		r.Must(t, r.Sim.Set(t.Context(), simtest.Settings{Hotplug: new(false)}))
		return r.Unpublish(t, volume, node)
	}, hot: "RackHasNoHotplug", restart: "OK"},
	"detach, boot disk": {call: func(t *testing.T, r *rig, _ *coretest.Gate, _, node string) error {
		instance, err := r.SDK.InstanceView(t.Context(), oxide.InstanceViewParams{Instance: oxide.NameOrId(node)})
		r.Must(t, err)
		return r.Unpublish(t, instance.BootDiskId, node)
	}, hot: "OK", restart: "OK"},
	"detach, elsewhere": {call: func(t *testing.T, r *rig, gate *coretest.Gate, volume, node string) error {
		other := r.Node(t, "node-b")
		r.Must(t, r.Sim.SetRunState(t.Context(), node, "stopped"))
		r.Must(t, r.Sim.SetRunState(t.Context(), other, "stopped"))
		r.AttachByHand(t, volume, node)
		held := gate.Hold("POST", "/v1/instances/"+node+"/disks/detach")
		done := make(chan error, 1)
		go func() { done <- r.Unpublish(t, volume, node) }()
		held.Entered(t)
		r.Must(t, r.Sim.SetDiskState(t.Context(), volume, "detached"))
		r.AttachByHand(t, volume, other)
		held.Release()
		return <-done
	}, hot: "OK", restart: "OK"},
	"delete, attached": {call: func(t *testing.T, r *rig, gate *coretest.Gate, volume, node string) error {
		r.Must(t, r.Sim.SetRunState(t.Context(), node, "stopped"))
		held := gate.Hold("DELETE", "/v1/disks/")
		done := make(chan error, 1)
		go func() { done <- r.Delete(t, volume) }()
		held.Entered(t)
		r.AttachByHand(t, volume, node)
		held.Release()
		return <-done
	}, hot: "AttachedElsewhere", restart: "AttachedElsewhere"},
	"delete, maintenance": {call: func(t *testing.T, r *rig, gate *coretest.Gate, volume, _ string) error {
		held := gate.Hold("DELETE", "/v1/disks/")
		done := make(chan error, 1)
		go func() { done <- r.Delete(t, volume) }()
		held.Entered(t)
		r.Must(t, r.Sim.SetDiskState(t.Context(), volume, "maintenance"))
		held.Release()
		return <-done
	}, hot: "DiskBusy", restart: "DiskBusy"},
}

// The messages of a rack are not part of its versioned API. So an answer depends on what disk and instance are, and a
// rack with other words gets the same answer. None of them is INTERNAL, but that of a disk which
// only the rack's operator can mend.
func TestRefusalsInOtherWords(t *testing.T) {
	t.Parallel()
	word := regexp.MustCompile(`\[(\w+)\]$`)
	for name, test := range refusals {
		for _, mode := range []string{"hot", "restart"} {
			for _, words := range []string{"", "other"} {
				t.Run(name+", "+mode+", "+words, func(t *testing.T) {
					t.Parallel()
					want := test.hot
					r := newRig(t, func(o *coretest.Options) {
						o.Rack.Hotplug, o.MaxDisks, o.Rack.MaxDisks = test.withHotplug, 3, 3
						o.Rack.Messages = words
						if mode == "restart" {
							want = test.restart
							o.Restarts = &controller.PlannedRestarts{Options: restart.Options{
								Shutdown: restart.Hard, MaxDown: 1,
							}}
						}
					})
					volume, node := r.Create(t, "v"), r.Node(t, "node-a")
					other, gate := r.gated(t)
					err := test.call(t, other, gate, volume, node)
					if status.Code(err) == codes.Internal && want != "DiskFaulted" {
						t.Errorf("INTERNAL: %v", err)
					}
					got := []string{status.Code(err).String()}
					if found := word.FindStringSubmatch(status.Convert(err).Message()); found != nil {
						got = append(got, found[1])
					}
					if err != nil && want != "OK" && !slices.Contains(got, want) {
						coretest.WantCode(t, err, codes.FailedPrecondition, want)
					}
					if (err == nil) != (want == "OK") {
						t.Errorf("%v, want %s", err, want)
					}
				})
			}
		}
	}
}

// A reason that neither disk nor instance shows is told with the rack's own words.
func TestUnknownRefusal(t *testing.T) {
	r := newRig(t, func(o *coretest.Options) { o.MaxDisks, o.Rack.MaxDisks = 8, 1 })
	node := r.Node(t, "node-a")
	r.Must(t, r.Sim.SetRunState(t.Context(), node, "stopped"))
	r.Must(t, r.Sim.Set(t.Context(), simtest.Settings{Messages: new("other")}))
	coretest.WantCode(
		t, r.Publish(t, r.Create(t, "v"), node), codes.FailedPrecondition, "turned down", "[RackRefused]")
}

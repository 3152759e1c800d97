// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// otherRack is a second rack of the controllers, without instances. Requests with a moved requirement name it. It must
// stay empty: the volumes exist on the first rack.
type otherRack struct {
	// api and control stay the same when the rack is started again.
	api, control string
	sim          *simtest.Sim
	client       *oxide.Client
}

// otherRackName is the rack's name in the topology.
const otherRackName = "other"

// otherRackLog is the file for the rack's log.
const otherRackLog = "other-sim.log"

// requireRack is a topology requirement for one rack.
func requireRack(name string) *csi.TopologyRequirement {
	only := []*csi.Topology{{Segments: map[string]string{"topology.csi.oxide.computer/rack": name}}}
	return &csi.TopologyRequirement{Requisite: only, Preferred: only}
}

func (w *world) startOtherRack() error {
	log, err := w.log(otherRackLog)
	if err != nil {
		return err
	}
	w.other.sim, err = simtest.StartSimWith(w.programs.Sim, simtest.SimOptions{
		Args: []string{
			"--listen=" + w.other.api,
			"--control=" + w.other.control,
			"--tls=" + w.path("other-tls"),
			"--state=" + w.path("other-rack"),
			"--latency=" + latency.String(),
		},
		Stderr:          log,
		OwnProcessGroup: true,
	})
	if err != nil {
		return err
	}
	w.other.client, err = w.other.sim.Client()
	return err
}

// maxOutage is how long the other rack is down at most. It exceeds the time that a create waits for such a rack.
const maxOutage = 3 * time.Second

// killOtherRack kills the other rack, and starts it again after a while.
func (w *world) killOtherRack(ctx context.Context) error {
	w.killed["other rack"]++
	if err := w.other.sim.Kill(); err != nil {
		return err
	}
	if err := pause(ctx, time.Duration(w.random.Int64N(int64(maxOutage)))); err != nil {
		return err
	}
	if err := w.startOtherRack(); err != nil {
		return err
	}
	return w.injectFaultsInto(ctx, w.other.sim)
}

// mayMove decides at random whether the requirement of a volume moves before the outcome of its create is known. It
// must not move while the first rack may still execute a request of before a kill or a hand-over, because no plugin can
// know of that request.
func (w *worker) mayMove(v *volume) bool {
	return w.random.IntN(2) == 0 && v.request.VolumeContentSource == nil &&
		!time.Now().Before(w.orphansDoneAt(&v.object)) &&
		w.lastBreak([]string{provisioner}).Before(v.begun)
}

// createMoved requests a volume on the other rack after a create on the first one had an unknown outcome. If the first
// rack has the disk, there must be no second one.
func (w *worker) createMoved(ctx context.Context, v *volume) error {
	w.results.count("requirement moved after an unknown outcome")
	orphansDone := w.orphansDoneAt(&v.object)
	request := proto.CloneOf(v.request)
	request.AccessibilityRequirements = requireRack(otherRackName)
	resp, err := ask(ctx, w, &v.object, w.CreateVolume, request, nil)
	v.mayHaveTwo = v.mayHaveTwo || !w.orphansDoneAt(&v.object).Equal(orphansDone)
	if err != nil {
		w.wantCode(&v.object, creating, err, codes.AlreadyExists, codes.ResourceExhausted, codes.Internal)
		return ctx.Err()
	}
	second := resp.GetVolume().GetVolumeId()
	if !v.mayHaveTwo && w.onFirstRack(ctx, v.name) && !w.wasSilent(v.name) {
		return fmt.Errorf("a second disk %s: %s", second, v.historyText())
	}
	return w.deleteSecond(ctx, v, second)
}

// deleteSecond deletes the disk of a volume on the other rack. It repeats until that succeeds.
func (w *worker) deleteSecond(ctx context.Context, v *volume, id string) error {
	for {
		_, err := ask(ctx, w, &v.object, w.DeleteVolume, &csi.DeleteVolumeRequest{VolumeId: id}, nil)
		if err == nil || ctx.Err() != nil {
			return ctx.Err()
		}
		w.wantCode(&v.object, "delete", err, codes.Internal)
	}
}

// onFirstRack reports whether the first rack has the disk of a volume. It repeats the question after faults.
func (w *world) onFirstRack(ctx context.Context, name string) bool {
	params := oxide.DiskViewParams{
		Disk:    oxide.NameOrId(diskname.ForVolume(simtest.ClusterID, name)),
		Project: oxide.NameOrId(w.sim.Project),
	}
	for ctx.Err() == nil {
		_, err := w.rack.DiskView(ctx, params)
		var refusal *oxide.HTTPError
		switch {
		case err == nil:
			return true
		case errors.As(err, &refusal) && refusal.HTTPResponse.StatusCode == http.StatusNotFound:
			return false
		}
	}
	return false
}

// createElsewhere requests a volume that exists, with the requirement moved to the other rack, as a provisioner does
// when the pod of a claim is scheduled again. It must not get a second disk.
func (w *worker) createElsewhere(ctx context.Context, v *volume) error {
	request := proto.CloneOf(v.request)
	request.AccessibilityRequirements = requireRack(otherRackName)
	resp, err := ask(ctx, w, &v.object, w.CreateVolume, request, nil)
	if err != nil {
		allowed := []codes.Code{codes.AlreadyExists}
		if w.wasSilent(v.name) {
			allowed = append(allowed, codes.ResourceExhausted) // the other rack was tried, and is full
		}
		w.wantCode(&v.object, creating, err, allowed...)
		return nil
	}
	if !v.mayHaveTwo && !w.wasSilent(v.name) {
		return fmt.Errorf("a second disk %s: %s", resp.GetVolume().GetVolumeId(), v.historyText())
	}
	w.results.count("second disks with a reason")
	return w.deleteSecond(ctx, v, resp.GetVolume().GetVolumeId())
}

// wasSilent reports whether a controller logged that the first rack did not answer when it looked for this volume. Only
// then a second disk is possible: a rack that is down must not block a create on another one.
func (w *world) wasSilent(name string) bool {
	for range 10 {
		log, err := os.ReadFile(w.path(pluginLog))
		if err != nil {
			return false
		}
		for line := range strings.Lines(string(log)) {
			if strings.Contains(line, "was not asked for the volume") &&
				strings.Contains(line, " rack="+simtest.DefaultRack+" name="+name+" ") {
				return true
			}
		}
		time.Sleep(50 * time.Millisecond) // the log comes through a pipe
	}
	return false
}

// auditOtherRack checks that the other rack is empty, that a volume is not made there a second time, and that a create
// does not wait for the other rack while that is down.
func (w *world) auditOtherRack(ctx context.Context, workers []*worker, b *results) error {
	if err := w.auditOtherDisks(ctx, workers, b); err != nil {
		return err
	}
	for _, worker := range workers {
		for _, v := range worker.volumes {
			if v.fate != lives {
				continue
			}
			request := proto.CloneOf(v.request)
			request.AccessibilityRequirements = requireRack(otherRackName)
			if _, err := w.CreateVolume(ctx, request); status.Code(err) != codes.AlreadyExists {
				b.violation("a moved requirement without any fault: %v, for %s", err, v.historyText())
			}
			b.count("moved requirements audited")
		}
	}
	if err := w.auditOtherDisks(ctx, workers, b); err != nil {
		return err
	}
	if err := w.other.sim.Kill(); err != nil {
		return err
	}
	err := w.auditCreateAlone(ctx, b)
	return errors.Join(err, w.startOtherRack())
}

// createLimit is how long a create may take while the other rack is down.
const createLimit = 5 * time.Second

// auditCreateAlone makes a volume and deletes it while the other rack is down.
func (w *world) auditCreateAlone(ctx context.Context, b *results) error {
	limited, cancel := context.WithTimeout(ctx, createLimit)
	defer cancel()
	resp, err := w.CreateVolume(limited, &csi.CreateVolumeRequest{
		Name:                      "alone",
		CapacityRange:             &csi.CapacityRange{RequiredBytes: gib},
		VolumeCapabilities:        []*csi.VolumeCapability{capability},
		AccessibilityRequirements: requireRack(simtest.DefaultRack),
	})
	if err != nil {
		b.violation("a create while the other rack is down: %v", err)
		return nil
	}
	_, err = w.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: resp.GetVolume().GetVolumeId()})
	return err
}

// auditOtherDisks reports each disk on the other rack, unless the volume was requested there while the first rack did
// not answer, or an older request could make it. It deletes such disks, as an operator would.
func (w *world) auditOtherDisks(ctx context.Context, workers []*worker, b *results) error {
	known := map[oxide.Name]*volume{}
	for _, worker := range workers {
		for _, v := range append(worker.volumes, worker.volumesPast...) {
			known[oxide.Name(diskname.ForVolume(simtest.ClusterID, v.name))] = v
		}
	}
	disks, err := disksOn(ctx, w.other.client, w.other.sim.Project)
	if err != nil {
		return err
	}
	for _, disk := range disks {
		switch v := known[disk.Name]; {
		case v == nil:
			b.violation("disk %s (%s) is on the other rack, but no client created it", disk.Name, disk.Id)
		case !v.mayHaveTwo && !w.wasSilent(v.name):
			b.violation("disk %s (%s) is on the other rack, a second one for %s", disk.Name, disk.Id, v.historyText())
		default:
			b.count("second disks with a reason")
		}
		if err := w.other.client.DiskDelete(ctx, oxide.DiskDeleteParams{Disk: oxide.NameOrId(disk.Id)}); err != nil {
			return err
		}
	}
	return nil
}

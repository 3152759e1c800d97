// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package simrack_test

import (
	"errors"
	"testing"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack"
)

// TestSDKSeesARack takes a disk through its life with the Go SDK's client. Its types decode the rack's answers, and its
// errors match the rack's.
func TestSDKSeesARack(t *testing.T) {
	w := newWorld(t, simrack.Options{Instances: []string{"n"}})
	c, ctx := w.sdk(), t.Context()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	project := oxide.NameOrId("proj")
	pong, err := c.Ping(ctx)
	must(err)
	me, err := c.CurrentUserView(ctx)
	must(err)
	if pong.Status != oxide.PingStatusOk || me.Id == "" || *me.FleetViewer {
		t.Errorf("ping %v, me %+v", pong, me)
	}
	p, err := c.ProjectView(ctx, oxide.ProjectViewParams{Project: project})
	must(err)
	if p.Name != "proj" {
		t.Errorf("project %+v", p)
	}

	create := oxide.DiskCreateParams{Project: project, Body: &oxide.DiskCreate{
		Name: "d", Description: "", Size: oxide.ByteCount(gib),
		DiskBackend: oxide.DiskBackend{Value: &oxide.DiskBackendDistributed{
			DiskSource: oxide.DiskSource{Value: &oxide.DiskSourceBlank{BlockSize: 4096}},
		}},
	}}
	d, err := c.DiskCreate(ctx, create)
	must(err)
	if d.State.State() != oxide.DiskStateStateCreating || d.BlockSize != 4096 || *d.ReadOnly ||
		d.DiskType != oxide.DiskTypeDistributed {
		t.Errorf("made %+v", d)
	}
	_, err = c.DiskCreate(ctx, create)
	wantError(t, err, oxide.ErrObjectAlreadyExists)

	i, err := c.InstanceView(ctx, oxide.InstanceViewParams{Instance: "n", Project: project})
	must(err)
	disk := oxide.NameOrId(d.Id)
	attach := oxide.InstanceDiskAttachParams{Instance: oxide.NameOrId(i.Id), Body: &oxide.DiskPath{Disk: disk}}
	_, err = c.InstanceDiskAttach(ctx, attach)
	wantError(t, err, oxide.ErrInvalidRequest)

	_, err = c.InstanceStop(ctx, oxide.InstanceStopParams{Instance: oxide.NameOrId(i.Id)})
	must(err)
	w.waitRun(i.Id, "stopped")
	d, err = c.InstanceDiskAttach(ctx, attach)
	must(err)
	if at, is := d.State.AsAttached(); !is || at.Instance != i.Id {
		t.Errorf("attached %+v", d.State)
	}
	_, err = c.InstanceStart(ctx, oxide.InstanceStartParams{Instance: oxide.NameOrId(i.Id)})
	must(err)
	w.waitRun(i.Id, "running")
	wantError(t, c.DiskDelete(ctx, oxide.DiskDeleteParams{Disk: disk}), oxide.ErrInvalidRequest)

	attached, err := c.InstanceDiskListAllPages(ctx, oxide.InstanceDiskListParams{Instance: oxide.NameOrId(i.Id)})
	must(err)
	all, err := c.DiskListAllPages(ctx, oxide.DiskListParams{Project: project})
	must(err)
	instances, err := c.InstanceListAllPages(ctx, oxide.InstanceListParams{Project: project})
	must(err)
	if len(attached) != 2 || len(all) != 2 || len(instances) != 1 {
		t.Errorf("%d disks attached, %d disks, %d instances", len(attached), len(all), len(instances))
	}

	w.setRun("n", "stopped")
	detach := oxide.InstanceDiskDetachParams{Instance: oxide.NameOrId(i.Id), Body: &oxide.DiskPath{Disk: disk}}
	_, err = c.InstanceDiskDetach(ctx, detach)
	must(err)
	boot := oxide.InstanceDiskDetachParams{Instance: oxide.NameOrId(i.Id), Body: &oxide.DiskPath{Disk: "n-boot"}}
	_, err = c.InstanceDiskDetach(ctx, boot)
	wantError(t, err, oxide.ErrConflict)
	must(c.DiskDelete(ctx, oxide.DiskDeleteParams{Disk: disk}))
	wantError(t, c.DiskDelete(ctx, oxide.DiskDeleteParams{Disk: disk}), oxide.ErrObjectNotFound)

	w.set(`{"quota_bytes":1}`)
	_, err = c.DiskCreate(ctx, create)
	wantError(t, err, oxide.ErrInsufficientCapacity)
	u, err := c.UtilizationView(ctx)
	must(err)
	if u.Provisioned.Storage != oxide.ByteCount(gib) || *u.Provisioned.Cpus != 0 || u.Capacity.Storage != 1 {
		t.Errorf("utilization %+v", u)
	}
	_, err = c.RackList(ctx, oxide.RackListParams{})
	wantError(t, err, oxide.ErrForbidden)
	w.token = w.newToken("fleet-viewer")
	racks, err := w.sdk().RackListAllPages(ctx, oxide.RackListParams{})
	must(err)
	if len(racks) != 1 {
		t.Errorf("%d racks", len(racks))
	}
	w.token = "oxide-token-unknown"
	_, err = w.sdk().CurrentUserView(ctx)
	wantError(t, err, oxide.ErrUnauthenticated)
}

func wantError(t *testing.T, err error, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Errorf("got error %v, want %v", err, want)
	}
}

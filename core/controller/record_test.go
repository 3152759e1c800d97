// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
	"github.com/oxidecomputer/oxide-csi-plugin/core/record"
	"github.com/oxidecomputer/oxide-csi-plugin/test/await"
	"github.com/oxidecomputer/oxide-csi-plugin/test/coretest"
)

// foreignGroups are groups of other clusters and users: of a newer format, with the name of a record and another text,
// and with a text of the longest length.
func foreignGroups(volume string) map[string]string {
	const newer = `{"v":2,"cluster":"staging"}`
	return map[string]string{
		"csi-nodes-spread":                                   newer,
		"nodes-spread":                                       newer,
		"csi-long":                                           strings.Repeat("x", 512),
		record.Restarts.Named("staging", "0-1"):              newer,
		record.Deferrals.Named("staging", volume):            newer,
		record.Holds.Named("staging", volume):                newer,
		record.Restarts.Named(coretest.Cluster, "0-1"):       `{"v":0}`,
		record.Restarts.Named(coretest.Cluster, "0-2"):       "text",
		record.Intents.Named("", coretest.NoVolumeID):        "",
		record.Replacements.Named("", coretest.NoVolumeID):   `{"v":1,"cluster":"staging"`,
		record.Adoptions.Named("", coretest.NoVolumeID):      "[]",
		record.Deferrals.Named(coretest.Cluster, "spread"):   `{"v":1,"cluster":"rig","disk":"nodes","instance":"x"}`,
		record.Holds.Named(coretest.Cluster, "nodes-spread"): `{"v":2}`,
	}
}

// restartsLeft waits until there are so many groups with names of restarts.
func (r *rig) restartsLeft(t *testing.T, left int) {
	t.Helper()
	await.Eventually(t, "no restart is under way", func() bool { return len(r.records(t, "csi-restart-")) == left })
}

// Groups that this cluster did not write stop no call, in no mode, and leave no instance stopped.
func TestForeignGroupsStopNothing(t *testing.T) {
	for mode, start := range map[string]func(*testing.T) *rig{
		"hot": func(t *testing.T) *rig { return newRig(t) },
		"grace": func(t *testing.T) *rig {
			return newRig(t, func(o *coretest.Options) { o.DetachGrace = time.Minute })
		},
		"restart": func(t *testing.T) *rig { return newRestartRig(t) },
	} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			r := start(t)
			node, kept := r.Node(t, "node-a"), r.Create(t, "kept")
			for name, text := range foreignGroups(kept) {
				r.userGroup(t, name, text)
			}
			for _, c := range []*rig{r, r.again(t)} {
				volume, grown := c.Create(t, "v"), c.Create(t, "grown")
				_, err := c.expand(t, grown, 2*coretest.GiB)
				c.Must(t, err)
				c.Must(t, c.Delete(t, grown))
				if mode == "restart" {
					c.published(t, volume, node)
					c.restartsLeft(t, 3)
				} else {
					c.Must(t, c.Publish(t, volume, node))
				}
				if got := c.runState(t, node); got != oxide.InstanceStateRunning {
					t.Errorf("the instance is %s", got)
				}
				_, err = c.ListVolumes(t.Context(), &csi.ListVolumesRequest{})
				c.Must(t, err)
				c.Must(t, c.Unpublish(t, volume, node))
				c.Must(t, c.Sim.SetRunState(t.Context(), node, "stopped"))
				await.Eventually(t, "the volume is deleted", func() bool { return c.Delete(t, volume) == nil })
				c.Must(t, c.Sim.SetRunState(t.Context(), node, "running"))
			}
		})
	}
}

// A record of a newer format refuses what its volume needs, with its name, and no list and no other volume.
func TestNewerRecordStopsItsSubject(t *testing.T) {
	disk := diskname.ForVolume(coretest.Cluster, "v")
	for name, test := range map[string]struct {
		named  func(volume string) string
		fields string
		start  func(*testing.T) *rig
	}{
		"intent": {
			func(string) string { return record.Intents.Named("", diskname.ForWork(disk)) }, `"vol":%q,"name":"` + disk + `"`,
			func(t *testing.T) *rig { return newRig(t) },
		},
		"deferral": {
			func(volume string) string { return record.Deferrals.Named(coretest.Cluster, volume) }, `"disk":%q`,
			func(t *testing.T) *rig { return newRig(t) },
		},
		"deferral with a grace period": {
			func(volume string) string { return record.Deferrals.Named(coretest.Cluster, volume) }, `"disk":%q`,
			func(t *testing.T) *rig { return newRig(t, func(o *coretest.Options) { o.DetachGrace = time.Minute }) },
		},
		"hold": {
			func(volume string) string { return record.Holds.Named(coretest.Cluster, volume) }, `"disk":%q`,
			func(t *testing.T) *rig { return newRestartRig(t) },
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := test.start(t)
			node, volume, other := r.Node(t, "node-a"), r.Create(t, "v"), r.Create(t, "other")
			r.Must(t, r.Sim.SetRunState(t.Context(), node, "stopped")) // a rack without hot-plug attaches at once
			group := test.named(volume)
			id := r.userGroup(t, group, fmt.Sprintf(`{"v":2,"cluster":%q,`+test.fields+`}`, coretest.Cluster, volume))
			coretest.WantCode(t, r.Publish(t, volume, node), codes.FailedPrecondition, group, "format 2, not 1", "upgrade")
			r.Must(t, r.Publish(t, other, node))
			for _, c := range []*rig{r, r.again(t)} {
				_, err := c.ListVolumes(t.Context(), &csi.ListVolumesRequest{})
				c.Must(t, err)
				c.Must(t, c.Delete(t, c.Create(t, "third")))
			}
			r.Must(t, coretest.RackClient(t, r.Rig, nil).DeleteRecord(t.Context(), id))
			r.Must(t, r.Publish(t, volume, node))
		})
	}
}

// A restart in a newer format keeps its slot, and its instance is left alone. Other instances are restarted.
func TestNewerRestartStopsItsInstance(t *testing.T) {
	t.Parallel()
	r := newRestartRig(t, func(o *coretest.Options) { o.Restarts.MaxDown = 2 })
	node, other := r.Node(t, "node-a"), r.Node(t, "node-b")
	volume := r.Create(t, "v")
	group := record.Restarts.Named(coretest.Cluster, "0-7")
	id := r.userGroup(t, group, fmt.Sprintf(
		`{"v":2,"cluster":%q,"id":"x","instance":%q,"by":"newer","beat":{}}`, coretest.Cluster, node))
	r.published(t, r.Create(t, "elsewhere"), other)
	r.restartsLeft(t, 1)
	coretest.WantCode(t, r.Publish(t, volume, node), codes.FailedPrecondition, group, "format 2, not 1", "upgrade")
	r.wantRestarts(t, 1)
	if got := r.records(t, "csi-restart-"); len(got) != 1 || got[0] != group {
		t.Errorf("records %v", got)
	}
	r.Must(t, coretest.RackClient(t, r.Rig, nil).DeleteRecord(t.Context(), id))
	r.published(t, volume, node)
}

// A replacement of a newer format stops its volume, which only this record leads to its disk.
func TestNewerReplacementStopsItsVolume(t *testing.T) {
	r := newRig(t)
	node, volume := r.Node(t, "node-a"), r.Create(t, "v")
	_, err := r.expand(t, volume, 2*coretest.GiB)
	r.Must(t, err)
	client, group := coretest.RackClient(t, r.Rig, nil), record.Replacements.Named("", volume)
	old, found, err := client.RecordNamed(t.Context(), group)
	if err != nil || !found {
		t.Fatal(found, err)
	}
	_, err = client.UpdateRecord(t.Context(), old.ID, strings.Replace(old.Text, `"v":1`, `"v":2`, 1))
	r.Must(t, err)
	again := r.again(t)
	coretest.WantCode(t, again.Publish(t, volume, node), codes.FailedPrecondition, group, "format 2, not 1", "upgrade")
	again.Must(t, again.Delete(t, again.Create(t, "third")))
}

// Who has to write a record whose name another group has is told so.
func TestNameOfARecordIsTaken(t *testing.T) {
	r := newRig(t)
	volume := r.Create(t, "v")
	group := record.Intents.Named("", diskname.ForWork(diskname.ForVolume(coretest.Cluster, "v")))
	id := r.userGroup(t, group, "text")
	_, err := r.expand(t, volume, 2*coretest.GiB)
	coretest.WantCode(t, err, codes.FailedPrecondition, group, "no record of this plugin", "delete it")
	r.Must(t, coretest.RackClient(t, r.Rig, nil).DeleteRecord(t.Context(), id))
	_, err = r.expand(t, volume, 2*coretest.GiB)
	r.Must(t, err)
}

// A user of the project writes the description of a grown volume on a disk of his own. No volume has that disk.
func TestDescriptionThatClaimsAnotherVolume(t *testing.T) {
	r := newRig(t)
	node := r.Node(t, "node-a")
	for i := range 4 { // the claiming disk comes before or after the other one in a list
		victim := r.Create(t, fmt.Sprint("victim ", i))
		taken := fmt.Sprint("x", i)
		claim := rack.NewDescription(coretest.Cluster, taken, "")
		claim.Volume, claim.CreatedBytes = victim, coretest.GiB
		claiming := r.UserDisk(t, coretest.Project, diskname.ForVolume(coretest.Cluster, taken), claim.Encode()).Id
		for _, c := range []*rig{r.again(t), r.again(t)} {
			_, err := c.ListVolumes(t.Context(), &csi.ListVolumesRequest{})
			c.Must(t, err)
			c.Must(t, c.Publish(t, victim, node))
			if got := c.Holder(t, claiming); got != "" {
				t.Fatal("the disk that claims the volume was attached")
			}
			list, err := c.ListVolumes(t.Context(), &csi.ListVolumesRequest{})
			c.Must(t, err)
			listed := map[string][]string{}
			for _, entry := range list.GetEntries() {
				listed[entry.GetVolume().GetVolumeId()] = entry.GetStatus().GetPublishedNodeIds()
			}
			if !slices.Equal(listed[victim], []string{node}) || len(listed[claiming]) > 0 {
				t.Errorf("listed %v", listed)
			}
			c.Must(t, c.Unpublish(t, victim, node))
			_, err = c.CreateVolume(t.Context(), coretest.CreateRequest(taken))
			coretest.WantCode(t, err, codes.AlreadyExists, claiming, victim)
		}
		r.Must(t, r.Delete(t, victim))
		if left := r.Volumes(t); !slices.Equal(left, []string{claiming}) {
			t.Errorf("disks left: %v", left)
		}
		r.Must(t, r.SDK.DiskDelete(t.Context(), oxide.DiskDeleteParams{Disk: oxide.NameOrId(claiming)}))
	}
}

// The record of a grown volume is deleted by hand. The volume is found all the same, also by a new controller.
func TestRecordOfAGrownVolumeDeletedByHand(t *testing.T) {
	r := newRig(t)
	node, volume := r.Node(t, "node-a"), r.Create(t, "v")
	_, err := r.expand(t, volume, 2*coretest.GiB)
	r.Must(t, err)
	r.Must(t, coretest.RackClient(t, r.Rig, nil).DeleteRecordNamed(t.Context(), record.Replacements.Named("", volume)))
	fresh := r.again(t)
	fresh.Must(t, fresh.Publish(t, volume, node))
	fresh.Must(t, fresh.Unpublish(t, volume, node))
	fresh = r.again(t)
	fresh.Must(t, fresh.Delete(t, volume))
	if left := r.Volumes(t); len(left) > 0 {
		t.Errorf("disks left: %v", left)
	}
	fresh.Must(t, fresh.Delete(t, volume))
	coretest.WantCode(t, fresh.Publish(t, volume, node), codes.NotFound)
}

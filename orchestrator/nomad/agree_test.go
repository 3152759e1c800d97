// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package nomad_test

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/admin/diagnose"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator/nomad"
	"github.com/oxidecomputer/oxide-csi-plugin/test/coretest"
)

// What the four know of an allocation's volume: the rack of its disk, Nomad of the claim and of the client, and the
// client's guest of the mounts. The allocation is on the client whose instance is node-a. The guest is seen only if the
// command runs there. An allocation that is stopping still runs: its task has a shutdown_delay.
var (
	allocations = []string{"pending", "running", "stopping"}
	whereDisk   = []string{"detached", "here", "elsewhere"}
	claimants   = []string{"nobody", "it", "it and ended", "another"}
	clients     = []string{"ready", "no plugin", "down"}
	mounts      = []string{"not seen", "writable", "none"}
)

// started are the allocations whose task runs.
const started = "running|stopping"

// verdicts has the verdict of each combination: that of the first row that matches, in which "" matches all.
var verdicts = []struct{ alloc, disk, claim, client, mount, want string }{
	{started, "detached", "", "", "", "RunsWithoutDisk"},
	{started, "elsewhere", "", "", "", "RunsWithoutDisk"},
	{started, "here", "", "", "none", "RunsWithoutMount"},
	{started, "here", "nobody", "", "", "RunsWithoutClaim"},
	{started, "here", "another", "", "", "RunsWithoutClaim"},
	{started, "here", "", "no plugin", "", "PluginNotRegistered"},
	{started, "here", "", "down", "", "NodeNotReady"},
	{"running", "here", "", "ready", "", "Works"},
	{"stopping", "here", "", "ready", "", "WorkloadTerminating"},
	{"pending", "elsewhere", "", "", "", "AttachedElsewhere"},
	{"pending", "", "another", "", "", "ClaimHeld"},
	{"pending", "", "it and ended", "", "", "ClaimNotReleased"},
	{"pending", "", "", "no plugin", "", "PluginNotRegistered"},
	{"pending", "", "", "down", "", "NodeNotReady"},
	{"pending", "", "", "ready", "", "NotStartedYet"},
}

func matches(row, is string) bool { return row == "" || slices.Contains(strings.Split(row, "|"), is) }

// mounted is a guest with this state of its mounts.
type mounted string

func (m mounted) Steps(context.Context, string, string) []orchestrator.TraceStep {
	return []orchestrator.TraceStep{{Link: "mount", Object: "mounts", State: string(m)}}
}

func (mounted) Waits(context.Context, string) (string, []orchestrator.TraceMessage) { return "", nil }

func guestWith(mount string) diagnose.Guest {
	if mount == "not seen" {
		return nil
	}
	return mounted(mount)
}

// nomadOf is a Nomad in which the allocation waits, runs or is stopping, and says nothing.
func nomadOf(alloc, claim, client, volumeID, instance string) answers {
	a := waiting()
	a["/v1/client/fs/logs/"+allocOurs] = ""
	a["/v1/volumes"].([]object)[0]["ExternalID"] = volumeID
	a.at("/v1/volume/csi/data")["ExternalID"] = volumeID
	it, ended := stub(allocWaits, "client-1", alloc), stub(allocEnded, "client-2", "lost")
	if alloc == "stopping" {
		it["ClientStatus"], it["DesiredStatus"] = "pending", "stop"
		it["TaskStates"] = object{"redis": object{"State": "pending", "StartedAt": time.Now()}}
	}
	maps.Copy(a.at("/v1/allocation/"+allocWaits), it)
	a["/v1/allocations"] = []object{it}
	another := stub(allocEnded, "client-2", "running")
	a.at("/v1/volume/csi/data")["Allocations"] = map[string][]object{
		"nobody": {}, "it": {it}, "it and ended": {ended, it}, "another": {another},
	}[claim]
	half := object{"Healthy": true, "AllocID": allocNode, "NodeInfo": object{"ID": instance}}
	a.at("/v1/plugin/csi/oxide")["Nodes"] = object{nodeA: half}
	// Nomad's entry of the client has the ID of the node plugin that it had last.
	a.at("/v1/node/" + nodeA)["CSINodePlugins"] = object{"oxide": half}
	switch client {
	case "no plugin":
		a.at("/v1/plugin/csi/oxide")["Nodes"] = object{}
	case "down":
		a.at("/v1/node/" + nodeA)["Status"] = "down"
	}
	return a
}

// explain has a verdict for each combination of disk, claim, client and mounts: nothing "Works" while two of them
// disagree.
func TestNothingWorksWhileTwoDisagree(t *testing.T) {
	r := coretest.New(t)
	id, here := r.Create(t, "data"), r.Node(t, "node-a")
	client, err := rack.New(rack.Config{
		Name: "default", Host: r.Sim.Host, Project: coretest.Project, Token: rack.FixedToken(coretest.Token),
	})
	coretest.Must(t, err)
	used := make([]bool, len(verdicts))
	// doctor compares the disk with the claim of each allocation that runs, the allocation with its claim, and on the
	// allocation's client the disk with the mounts.
	doctor := func(t *testing.T, alloc, disk, claim, on, mount string) {
		a := nomadOf(alloc, claim, on, id, here)
		a["/v1/volumes"].([]object)[0]["CurrentWriters"] = len(a.at("/v1/volume/csi/data")["Allocations"].([]object))
		options, _ := serveNomad(t, a)
		operator := nomad.NewOperator(options)
		operator.Needs = []string{nomad.PolicyOperator}
		examined, attachments := operator.Examine(t.Context())
		unclaimed := slices.ContainsFunc(examined, func(f orchestrator.Finding) bool {
			return f.Status == orchestrator.StatusFailure && f.Next == "oxide-csi explain "+allocWaits
		})
		runs := matches(started, alloc)
		if want := runs && !strings.HasPrefix(claim, "it"); unclaimed != want {
			t.Errorf("doctor: %+v; want the allocation as one without a claim: %t", examined, want)
		}
		_, disks := diagnose.ExamineRack(t.Context(), client, nil, coretest.Cluster, orchestrator.Nomad, time.Now())
		findings := diagnose.ExamineAttachments(t.Context(), "nomad", attachments, disks, guestWith(mount))
		claimed := runs && strings.HasPrefix(claim, "it") || claim == "another" // all are on node-a
		lost := disk == "detached" || on != "no plugin" && (disk == "elsewhere" || mount == "none")
		if len(findings) > 1 || (len(findings) == 1) != claimed ||
			claimed && (findings[0].Status != orchestrator.StatusOK) != lost {
			t.Errorf("doctor: %+v; want a lost disk or mount: %t", findings, lost)
		}
	}
	explain := func(t *testing.T, alloc, disk, claim, on, mount string) {
		options, _ := serveNomad(t, nomadOf(alloc, claim, on, id, here))
		got, err := diagnose.Explain(t.Context(), orchestrator.Subject{VolumeID: allocWaits}, nomad.NewOperator(options),
			[]*rack.Client{client}, coretest.Cluster, guestWith(mount))
		coretest.Must(t, err)
		for i, row := range verdicts {
			if matches(row.alloc, alloc) && matches(row.disk, disk) && matches(row.claim, claim) &&
				matches(row.client, on) && matches(row.mount, mount) {
				used[i] = true
				if got.Reason != row.want || strings.ContainsAny(got.Verdict+got.Next, "{}") {
					t.Errorf("%s: %s; want %s", got.Reason, got.Verdict, row.want)
				}
				return
			}
		}
		t.Errorf("no row: %s", got.Reason)
	}
	for _, disk := range whereDisk {
		if disk != "detached" {
			coretest.Must(t, r.Publish(t, id, r.Node(t, map[string]string{"here": "node-a", "elsewhere": "node-b"}[disk])))
		}
		for _, alloc := range allocations {
			for _, claim := range claimants {
				for _, on := range clients {
					for _, mount := range mounts {
						state := []string{alloc, "disk " + disk, "claimed by " + claim, "client " + on, "mounts " + mount}
						name := strings.Join(state, ", ")
						t.Run(name, func(t *testing.T) {
							explain(t, alloc, disk, claim, on, mount)
							doctor(t, alloc, disk, claim, on, mount)
						})
					}
				}
			}
		}
		if disk != "detached" {
			coretest.Must(t, r.Unpublish(t, id, r.Holder(t, id)))
		}
	}
	for i, row := range verdicts {
		if !used[i] {
			t.Errorf("no combination has the row %+v", row)
		}
	}
}

// Of an allocation with two volumes, the one that it waits for gives the verdict. The refusal is the last that nothing
// has cured: a snapshot that was made since says nothing about the workload.
func TestExplainTheSecondVolumeOfAnAllocation(t *testing.T) {
	r := coretest.New(t)
	first, second, here := r.Create(t, "data"), r.Create(t, "logs"), r.Node(t, "node-a")
	coretest.Must(t, r.Publish(t, first, here))
	client, err := rack.New(rack.Config{
		Name: "default", Host: r.Sim.Host, Project: coretest.Project, Token: rack.FixedToken(coretest.Token),
	})
	coretest.Must(t, err)
	a := nomadOf("pending", "it", "ready", first, here)
	logs := maps.Clone(a.at("/v1/volume/csi/data"))
	logs["ID"], logs["ExternalID"] = "logs", second
	a["/v1/volume/csi/logs"] = logs
	a["/v1/volumes"] = append(a["/v1/volumes"].([]object), object{
		"ID": "logs", "Namespace": "shop", "ExternalID": second, "Provider": "csi.oxide.computer",
	})
	groups := a.at("/v1/allocation/" + allocWaits)["Job"].(object)["TaskGroups"].([]object)
	groups[1]["Volumes"].(object)["w"] = object{"Type": "csi", "Source": "logs"}
	said := func(at, method, volume, rest string) string {
		return fmt.Sprintf("time=2026-01-02T03:%sZ level=INFO msg=responded method=%s volume_id=%s %s\n",
			at, method, volume, rest)
	}
	a["/v1/client/fs/logs/"+allocOurs] = said("04:06", "ControllerPublishVolume", second,
		`code=FailedPrecondition error="it is detached in 1m0s [DetachDeferred]"`) +
		said("04:07", "CreateSnapshot", second, "code=OK") +
		said("04:08", "ControllerPublishVolume", first, "code=OK")
	options, _ := serveNomad(t, a)
	for _, subject := range []orchestrator.Subject{{VolumeID: allocWaits}, {Name: allocWaits[:8]}, {Claim: "shop/logs"}} {
		got, err := diagnose.Explain(
			t.Context(), subject, nomad.NewOperator(options), []*rack.Client{client}, coretest.Cluster, nil)
		if err != nil || got.Reason != "DetachDeferred" {
			t.Errorf("%+v: %s: %s, %v", subject, got.Reason, got.Verdict, err)
		}
	}
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package nomad

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"golang.org/x/sync/errgroup"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata/nomad"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
)

var listPlugins = nomad.Operation{
	What:   "list the plugins through",
	Wrong:  "the response is not from a Nomad agent",
	Policy: `plugin { policy = "list" }`,
}

// pluginStub is a plugin in Nomad's list.
type pluginStub struct {
	ID, Provider                                                         string
	ControllersHealthy, ControllersExpected, NodesHealthy, NodesExpected int
}

// examination collects findings.
type examination struct {
	*Operator
	findings    []orchestrator.Finding
	attachments []orchestrator.Attachment
	// nodeIDs maps clients to the IDs of their node plugins.
	nodeIDs map[string]string
}

func (e *examination) add(status orchestrator.Status, looked, found, next string) {
	e.findings = append(
		e.findings,
		orchestrator.Finding{Area: "nomad", Status: status, Looked: looked, Found: found, Next: next},
	)
}

// unreadable adds an error of a request, which mostly has its own next step.
func (e *examination) unreadable(status orchestrator.Status, looked string, err error, next string) {
	found := err.Error()
	if known, ok := errors.AsType[*metadata.Error](err); ok {
		found, next = known.Fact(), known.Next
	}
	e.add(status, looked, found, next)
}

// Examine implements [orchestrator.Examiner]. With ACLs on it needs plugin { policy = "read" } and the capability
// "csi-read-volume"; without node { policy = "read" } the reports about clients are not known. With the identity of a
// job of the plugin, whose Needs lack [PolicyOperator], it looks only at what that job may read. It reads each list
// once, and at most [maxClaimed] volumes.
func (o *Operator) Examine(ctx context.Context) ([]orchestrator.Finding, []orchestrator.Attachment) {
	e := &examination{Operator: o, nodeIDs: map[string]string{}}
	e.acl(ctx, o.Needs)
	operator := slices.Contains(o.Needs, PolicyOperator)
	if operator || slices.ContainsFunc(o.Needs, func(name string) bool { return policyRules[name].plugin != "" }) {
		e.health(ctx)
	}
	if operator {
		e.claims(ctx)
		e.reports(ctx)
	}
	return e.findings, e.attachments
}

// health looks whether the plugin's controllers and nodes are healthy.
func (e *examination) health(ctx context.Context) {
	const looked = "plugins"
	all, err := e.plugins(ctx)
	if err != nil {
		e.unreadable(orchestrator.StatusFailure, looked, err, "set NOMAD_ADDR, and NOMAD_TOKEN if ACLs are on")
		return
	}
	if len(all) == 0 {
		e.add(orchestrator.StatusFailure, looked, "no plugin of this driver is known", "run the jobs: docs/how-to/nomad.md")
	}
	for _, p := range all {
		found := fmt.Sprintf("%s: %d of %d controllers and %d of %d nodes are healthy",
			p.ID, p.ControllersHealthy, p.ControllersExpected, p.NodesHealthy, p.NodesExpected)
		status := orchestrator.StatusOK
		switch {
		case p.ControllersHealthy == 0 || p.NodesHealthy == 0:
			status = orchestrator.StatusFailure
		case p.ControllersHealthy < p.ControllersExpected || p.NodesHealthy < p.NodesExpected:
			status = orchestrator.StatusWarning
		default:
			e.add(status, looked, found, "")
			continue
		}
		e.add(status, looked, found+e.sick(ctx, p.ID),
			"nomad plugin status -verbose "+p.ID+" names the allocations; their logs say why")
	}
	if len(all) > 0 && slices.Contains(e.Needs, PolicyOperator) {
		e.uncovered(ctx, all)
	}
}

// sick says on which clients a plugin is not healthy, and why, if that can be read.
func (e *examination) sick(ctx context.Context, plugin string) string {
	info, err := e.plugin(ctx, plugin)
	if err != nil {
		return ""
	}
	var where []string
	for _, half := range []map[string]pluginInstance{info.Controllers, info.Nodes} {
		for _, client := range slices.Sorted(maps.Keys(half)) {
			if i := half[client]; !i.Healthy {
				where = append(where, fmt.Sprintf("%.8s (%s)", client, cmp.Or(i.HealthDescription, "no reason is given")))
			}
		}
	}
	if len(where) == 0 {
		return ""
	}
	return "; not on " + orchestrator.Some(where)
}

// uncovered looks for clients whose metadata names a rack and on which no node plugin runs. Nomad expects a plugin only
// where the job's allocations run, so after an update that ends them it calls those that are left all.
func (e *examination) uncovered(ctx context.Context, plugins []pluginStub) {
	const looked = "clients without node plugin"
	var clients []struct{ ID, Name string }
	query := url.Values{"filter": {fmt.Sprintf(`%q in Meta and Status == "ready"`, nomad.KeyRack)}}
	op := reading("list the clients", `node { policy = "read" }`)
	_, err := e.get(ctx, op, "/v1/nodes?"+query.Encode(), &clients)
	for i := 0; err == nil && i < len(plugins); i++ {
		var info pluginInfo
		info, err = e.plugin(ctx, plugins[i].ID)
		for client, half := range info.Nodes {
			e.nodeIDs[client] = half.NodeInfo.ID
		}
	}
	var without []string
	for _, client := range clients {
		if _, runs := e.nodeIDs[client.ID]; !runs {
			without = append(without, client.Name)
		}
	}
	switch {
	case errors.Is(err, nomad.HTTPStatus(http.StatusForbidden)):
		e.add(orchestrator.StatusOK, looked, `not known: the token lacks node { policy = "read" }`, "")
	case err != nil:
		e.unreadable(orchestrator.StatusWarning, looked, err, "repeat the command")
	case len(without) > 0:
		e.add(orchestrator.StatusWarning, looked, orchestrator.Some(without)+": their metadata names a rack",
			"nomad job status -namespace=oxide-csi oxide-csi-node says why; after a bad update, "+
				"nomad job revert -namespace=oxide-csi oxide-csi-node VERSION")
	}
}

const (
	// maxClaimed is how many volumes with claims are looked at, those first whose claims changed last: the list of
	// volumes does not tell whose claims they are.
	maxClaimed = 200
	// readsAtOnce bounds the reads that are under way.
	readsAtOnce = 8
)

// claims looks for volumes that are claimed by allocations that have ended, which no other allocation gets, and for
// allocations that run without their claim.
func (e *examination) claims(ctx context.Context) {
	const looked = "claims of volumes"
	var running []allocationStub // before the claims: an allocation claims its volumes before it runs
	query := url.Values{"namespace": {"*"}, "filter": {mayRun}}
	_, unread := e.get(ctx, reading("list the allocations", tracePolicy), "/v1/allocations?"+query.Encode(), &running)
	all, err := e.volumes(ctx, tracePolicy)
	if err != nil {
		e.unreadable(orchestrator.StatusWarning, looked, err, "repeat the command with a token that may read volumes")
		return
	}
	claimed := slices.Clone(all)
	claimed = slices.DeleteFunc(claimed, func(v volumeStub) bool { return v.CurrentReaders+v.CurrentWriters == 0 })
	slices.SortFunc(claimed, func(a, b volumeStub) int { return cmp.Compare(b.ModifyTime, a.ModifyTime) })
	read, err := e.readVolumes(ctx, claimed[:min(len(claimed), maxClaimed)])
	if err != nil {
		e.unreadable(orchestrator.StatusWarning, looked, err, "repeat the command with a token that may read volumes")
		return
	}
	dead, holds := 0, map[string]bool{}
	for _, v := range read {
		for _, a := range v.Allocations {
			holds[a.ID] = true
			if a.runs() {
				e.attachments = append(e.attachments, orchestrator.Attachment{
					VolumeID: v.ExternalID, NodeID: e.nodeIDs[a.NodeID], Claim: v.Namespace + "/" + v.ID, By: a.label(), Runs: true,
				})
			}
		}
		ended := slices.IndexFunc(v.Allocations, allocationStub.ended)
		if ended < 0 {
			continue
		}
		dead++
		e.add(
			orchestrator.StatusWarning, looked,
			fmt.Sprintf("%s/%s is claimed by %s, which is %s", v.Namespace, v.ID, v.Allocations[ended].label(),
				v.Allocations[ended].ClientStatus),
			"nomad system gc; if the claim is still there after five minutes: docs/how-to/troubleshooting-nomad.md#stuck",
		)
	}
	if dead == 0 {
		e.add(
			orchestrator.StatusOK,
			looked,
			fmt.Sprintf("%d are claimed; of the %d that changed last, none by an allocation "+
				"that has ended", len(claimed), len(read)),
			"",
		)
	}
	running = slices.DeleteFunc(running, func(a allocationStub) bool { return holds[a.ID] })
	running = slices.DeleteFunc(running, func(a allocationStub) bool { return !a.runs() })
	if unread == nil && len(claimed) == len(read) {
		unread = e.unclaimed(ctx, running[:min(len(running), maxClaimed)], all)
	}
	if unread != nil && !errors.Is(unread, nomad.HTTPStatus(http.StatusForbidden)) {
		e.add(orchestrator.StatusWarning, lookedUnclaimed, unread.Error(), "repeat the command")
	}
}

// readVolumes reads volumes with their claims, in the same order.
func (e *examination) readVolumes(ctx context.Context, volumes []volumeStub) ([]volumeInfo, error) {
	read := make([]volumeInfo, len(volumes))
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(readsAtOnce)
	for i := range read {
		group.Go(func() (err error) {
			read[i], _, err = e.readVolume(ctx, volumes[i], tracePolicy)
			return err
		})
	}
	return read, group.Wait()
}

const (
	lookedUnclaimed = "workloads without a claim"
	// mayRun selects the allocations that may run and whose job has CSI volumes.
	mayRun      = `(ClientStatus == "running" or ClientStatus == "pending") and ` + usesVolumes
	usesVolumes = `(any Job.TaskGroups as g { any g.Volumes as _, v { v.Type == "csi" } })`
)

// unclaimed looks which of the volumes are used by allocations that claim nothing.
func (e *examination) unclaimed(ctx context.Context, allocations []allocationStub, volumes []volumeStub) error {
	for _, a := range allocations {
		var job volumeJob
		op := reading("read "+a.label(), tracePolicy)
		if _, err := e.get(ctx, op, "/v1/allocation/"+url.PathEscape(a.ID), &job); err != nil {
			return err
		}
		for _, v := range volumes {
			if job.runs() && v.Namespace == job.Namespace && slices.Contains(job.sources(), v.ID) {
				e.add(orchestrator.StatusFailure, lookedUnclaimed,
					fmt.Sprintf("%s/%s is used by %s, which does not claim it", v.Namespace, v.ID, job.label()),
					"oxide-csi explain "+job.ID)
			}
		}
	}
	return nil
}

const lookedReports = "reports about clients"

// reports shows the last report about each client. An operator of volumes need not be allowed to read clients.
func (e *examination) reports(ctx context.Context) {
	switch err := e.readReports(ctx); {
	case errors.Is(err, nomad.HTTPStatus(http.StatusForbidden)):
		e.add(orchestrator.StatusOK, lookedReports, `not known: the token lacks node { policy = "read" }`, "")
	case err != nil:
		e.unreadable(orchestrator.StatusWarning, lookedReports, err, "repeat the command")
	}
}

// readReports reads the reports, which a controller has written into the metadata of the clients: what a planned
// restart waits for.
func (e *examination) readReports(ctx context.Context) error {
	op := reading("read the reports about clients", `node { policy = "read" }`)
	var nodes []struct{ ID, Name string }
	query := url.Values{"filter": {fmt.Sprintf("%q in Meta", keyReport)}}
	if _, err := e.get(ctx, op, "/v1/nodes?"+query.Encode(), &nodes); err != nil {
		return err
	}
	for _, n := range nodes[:min(len(nodes), maxClaimed)] {
		var info nodeInfo
		if _, err := e.get(ctx, op, "/v1/node/"+url.PathEscape(n.ID), &info); err != nil {
			return err
		}
		if report := info.Meta[keyReport]; report != "" {
			found := fmt.Sprintf("client %s: %s", n.Name, strings.Join(strings.Fields(report), " "))
			e.add(orchestrator.StatusOK, lookedReports, found, "")
		}
	}
	return nil
}

var _ orchestrator.Examiner = (*Operator)(nil)

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package nomad

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
)

// tracePolicy is what explaining a volume needs with ACLs on.
const tracePolicy = `deploy/nomad/policies/operator.policy.hcl, and node { policy = "read" }`

// volumeInfo has the fields of a volume that are read.
type volumeInfo struct {
	volumeStub
	PluginID           string
	Schedulable        bool
	ControllersHealthy int
	Allocations        []allocationStub
	CreateTime         int64
}

// volumeJob is an allocation with what its job says about volumes.
type volumeJob struct {
	allocationStub
	TaskGroup string
	Job       struct {
		TaskGroups []struct {
			Name    string
			Volumes map[string]struct {
				Type, Source string
				PerAlloc     bool
			}
		}
	}
}

// sources are the IDs of the CSI volumes that an allocation uses.
func (j volumeJob) sources() (ids []string) {
	for _, g := range j.Job.TaskGroups {
		for _, v := range g.Volumes {
			if g.Name != j.TaskGroup || v.Type != "csi" {
				continue
			}
			id := v.Source
			if at := strings.LastIndex(j.Name, "["); v.PerAlloc && at >= 0 {
				id += j.Name[at:]
			}
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	return ids
}

// tracer collects a trace.
type tracer struct {
	*Operator
	trace orchestrator.Trace
}

// Trace implements [orchestrator.Tracer]. The claim of a subject is NAMESPACE/VOLUME, its name the ID of a volume, or
// the ID of an allocation or its beginning. With ACLs on it needs the policy operator.policy.hcl, node { policy =
// "read" }, and for what the plugin says the capabilities "read-job" and "read-logs" in the namespace of its jobs.
func (o *Operator) Trace(ctx context.Context, subject orchestrator.Subject) (orchestrator.Trace, error) {
	t := &tracer{Operator: o, trace: orchestrator.Trace{Orchestrator: orchestrator.Nomad}}
	if subject.Pod != "" {
		return orchestrator.Trace{}, notThere("a pod in Nomad")
	}
	stub, used, err := t.find(ctx, subject)
	if err != nil {
		return orchestrator.Trace{}, err
	}
	volume, err := t.volume(ctx, stub)
	if err != nil {
		return orchestrator.Trace{}, err
	}
	if used == nil {
		used = volume.user()
	}
	plugin, err := t.plugin(ctx, volume.PluginID)
	if err != nil {
		return orchestrator.Trace{}, err
	}
	t.claims(volume, used)
	if used == nil {
		return t.trace, nil
	}
	if err := t.node(ctx, *used, plugin); err != nil {
		return orchestrator.Trace{}, err
	}
	t.workload(ctx, *used, plugin)
	return t.trace, nil
}

// notThere is the error for a subject that does not exist.
func notThere(what string) error {
	return fmt.Errorf(
		"%s %w, or the token may not see it: check the name and the namespace: nomad volume status -namespace='*'",
		what, orchestrator.ErrNotFound)
}

// find finds the subject's volume, and its allocation if the subject is one.
func (t *tracer) find(ctx context.Context, s orchestrator.Subject) (volumeStub, *allocationStub, error) {
	volumes, err := t.volumes(ctx, tracePolicy)
	if err != nil {
		return volumeStub{}, nil, err
	}
	var found []volumeStub
	for _, v := range volumes {
		if s.VolumeID != "" && v.ExternalID == s.VolumeID || s.Claim != "" && v.Namespace+"/"+v.ID == s.Claim ||
			s.Name != "" && v.ID == s.Name {
			found = append(found, v)
		}
	}
	asked := cmp.Or(s.VolumeID, s.Claim, s.Name)
	switch {
	case len(found) == 1 && s.Workload != "":
		job, err := t.allocation(ctx, s.Workload)
		if err != nil || job == nil {
			return found[0], nil, err
		}
		return found[0], &job.allocationStub, nil
	case len(found) == 1:
		return found[0], nil, nil
	case len(found) > 1:
		return volumeStub{}, nil, &metadata.Error{
			Kind: metadata.ErrInvalid, What: fmt.Sprintf("%d namespaces have a volume %s", len(found), asked),
			Next: "name it NAMESPACE/VOLUME",
		}
	}
	job, err := t.allocation(ctx, cmp.Or(s.VolumeID, s.Name))
	if err != nil || job == nil {
		return volumeStub{}, nil, cmp.Or(err, notThere("volume "+asked))
	}
	for _, v := range volumes {
		if v.Namespace == job.Namespace && slices.Contains(job.sources(), v.ID) {
			found = append(found, v)
		}
	}
	if len(found) == 0 {
		return volumeStub{}, nil, notThere("a volume of this plugin of " + job.label())
	}
	for _, v := range found[1:] {
		other := orchestrator.Subject{Claim: v.Namespace + "/" + v.ID, Workload: job.ID}
		t.trace.Others = append(t.trace.Others, other)
	}
	return found[0], &job.allocationStub, nil
}

// allocationID matches the beginning of an allocation's ID.
var allocationID = regexp.MustCompile(`^([0-9a-f]{4,7}|[0-9a-f]{8}(-[0-9a-f-]*)?)$`)

// allocation reads the allocation whose ID begins so. It returns nil if there is none, or more than one.
func (t *tracer) allocation(ctx context.Context, prefix string) (*volumeJob, error) {
	if !allocationID.MatchString(prefix) {
		return nil, nil
	}
	op := reading("look for allocation "+prefix, tracePolicy)
	var list []struct{ ID string }
	// Nomad takes an even number of digits, not counting hyphens. The first hyphen is after eight.
	query := url.Values{"namespace": {"*"}, "prefix": {prefix[:min(len(prefix), 8)&^1]}}
	if _, err := t.get(ctx, op, "/v1/allocations?"+query.Encode(), &list); err != nil {
		return nil, err
	}
	var matching []string
	for _, a := range list {
		if strings.HasPrefix(a.ID, prefix) {
			matching = append(matching, a.ID)
		}
	}
	if len(matching) != 1 {
		return nil, nil
	}
	var job volumeJob
	exists, err := t.get(ctx, op, "/v1/allocation/"+url.PathEscape(matching[0]), &job)
	if err != nil || !exists {
		return nil, err
	}
	return &job, nil
}

// volume adds a volume.
func (t *tracer) volume(ctx context.Context, stub volumeStub) (v volumeInfo, err error) {
	v, exists, err := t.readVolume(ctx, stub, tracePolicy)
	if err == nil && !exists {
		err = notThere("volume " + stub.ID)
	}
	if err != nil {
		return volumeInfo{}, err
	}
	t.trace.VolumeID, t.trace.Claim = v.ExternalID, v.Namespace+"/"+v.ID
	state := "schedulable"
	if !v.Schedulable {
		state = "not schedulable"
	}
	t.step("volume", "Nomad volume "+t.trace.Claim, state, unixNano(v.CreateTime))
	if v.ControllersHealthy == 0 {
		t.trace.Conditions = append(t.trace.Conditions, orchestrator.NoController)
	}
	return v, nil
}

// user is the allocation that uses the volume: first one that waits, then one that runs.
func (v volumeInfo) user() *allocationStub {
	var found *allocationStub
	for i, a := range v.Allocations {
		if !a.ended() && (found == nil || found.runs()) {
			found = &v.Allocations[i]
		}
	}
	return found
}

// claims adds the claims of a volume. One of an allocation that has ended keeps others from the volume.
func (t *tracer) claims(v volumeInfo, used *allocationStub) {
	waits := used != nil && used.ClientStatus == "pending" && !used.runs() &&
		!slices.ContainsFunc(v.Allocations, func(a allocationStub) bool { return a.ID == used.ID })
	for _, a := range v.Allocations {
		t.step("attachment", "claim of "+a.label(), a.state()+" on client "+cmp.Or(a.NodeName, a.NodeID), a.created())
		switch {
		case a.ended() && !slices.Contains(t.trace.Conditions, orchestrator.ClaimOfEnded):
			t.trace.Conditions = append(t.trace.Conditions, orchestrator.ClaimOfEnded)
		case !a.ended() && waits && !slices.Contains(t.trace.Conditions, orchestrator.ClaimOfAnother):
			t.trace.Conditions = append(t.trace.Conditions, orchestrator.ClaimOfAnother)
		case used != nil && a.ID == used.ID && a.runs():
			t.trace.Conditions = append(t.trace.Conditions, orchestrator.Attached)
		}
	}
}

// node adds the client of an allocation and the node plugin there.
func (t *tracer) node(ctx context.Context, a allocationStub, plugin pluginInfo) error {
	if a.NodeID == "" {
		return nil
	}
	var node struct {
		Name, Status   string
		Meta           map[string]string
		CSINodePlugins map[string]pluginInstance
	}
	op := reading("read client "+a.NodeID, tracePolicy)
	exists, err := t.get(ctx, op, "/v1/node/"+url.PathEscape(a.NodeID), &node)
	if err != nil {
		return err
	}
	t.trace.Node = cmp.Or(node.Name, a.NodeName, a.NodeID)
	state := node.Status
	if !exists {
		state = "does not exist"
	}
	t.step("node", "Nomad client "+t.trace.Node, state, time.Time{})
	if state != "ready" {
		t.trace.Conditions = append(t.trace.Conditions, orchestrator.NodeNotReady)
	}
	if report := node.Meta[keyReport]; report != "" && !a.runs() {
		t.say("instance", report, time.Time{})
	}
	half, has := plugin.Nodes[a.NodeID]
	t.trace.NodeID = cmp.Or(half.NodeInfo.ID, node.CSINodePlugins[plugin.ID].NodeInfo.ID)
	switch {
	case half.Healthy:
	case has:
		t.step("node", "node plugin there", "not healthy: "+half.HealthDescription, time.Time{})
		t.trace.Conditions = append(t.trace.Conditions, orchestrator.NotRegistered)
	case state == "ready":
		t.step("node", "node plugin there", "does not run", time.Time{})
		t.trace.Conditions = append(t.trace.Conditions, orchestrator.NotRegistered)
	}
	return nil
}

// workload adds an allocation, and what its tasks and the plugin said about it unless it runs. Nomad does not repeat
// what the plugin answers while an allocation waits, so that is read from the plugin's logs.
func (t *tracer) workload(ctx context.Context, a allocationStub, plugin pluginInfo) {
	t.trace.Workload = a.label()
	t.step("workload", a.label(), a.state(), a.created())
	if a.ends() {
		t.trace.Conditions = append(t.trace.Conditions, orchestrator.WorkloadTerminating)
	}
	if a.runs() {
		t.trace.Conditions = append(t.trace.Conditions, orchestrator.Running)
		return
	}
	for _, task := range a.TaskStates {
		for _, e := range task.Events {
			if e.Type == "Setup Failure" || e.Type == "Driver Failure" {
				t.say("workload", e.Type+": "+e.DisplayMessage, unixNano(e.Time))
			}
		}
	}
	allocations, err := plugin.interesting()
	if err != nil {
		t.unknown(err)
	}
	for _, own := range allocations {
		_, controller := plugin.Controllers[own.NodeID]
		if !controller && own.NodeID != a.NodeID {
			continue
		}
		for _, log := range t.log(ctx, own) {
			if log.Err != nil {
				t.unknown(log.Err)
			} else if text, last := lastError(log.Text, t.trace.VolumeID); text != "" && !last.Before(a.created()) {
				t.say("volume", text, last)
			}
		}
	}
}

// logAttribute matches an attribute of a line in the plugin's text log.
var logAttribute = regexp.MustCompile(`(\w+)=("(?:[^"\\]|\\.)*"|\S+)`)

// curedBy are the calls that a workload needs, with those that leave nothing of their errors. Others, such as that of a
// snapshot, say nothing about a workload.
var curedBy = map[string][]string{
	"ControllerPublishVolume":   {"ControllerPublishVolume", "ControllerUnpublishVolume"},
	"ControllerUnpublishVolume": {"ControllerPublishVolume", "ControllerUnpublishVolume"},
	"NodeStageVolume":           {"NodeStageVolume", "NodeUnstageVolume", "NodePublishVolume", "NodeUnpublishVolume"},
	"NodeUnstageVolume":         {"NodeStageVolume", "NodeUnstageVolume"},
	"NodePublishVolume":         {"NodePublishVolume", "NodeUnpublishVolume"},
	"NodeUnpublishVolume":       {"NodePublishVolume", "NodeUnpublishVolume", "NodeUnstageVolume"},
}

// lastError is the last error of a call for a volume in a log that no later call has cured, or empty.
func lastError(log, volumeID string) (text string, last time.Time) {
	failed := map[string]string{}
	at := map[string]time.Time{}
	for line := range strings.Lines(log) {
		if volumeID == "" || !strings.Contains(line, volumeID) {
			continue
		}
		attributes := parseLine(line)
		method := attributes["method"]
		if attributes["msg"] != "responded" || curedBy[method] == nil {
			continue
		}
		for earlier, cures := range curedBy {
			if slices.Contains(cures, method) {
				delete(failed, earlier)
			}
		}
		if attributes["error"] != "" {
			failed[method] = method + ": " + attributes["error"]
			at[method], _ = time.Parse(time.RFC3339Nano, attributes["time"]) // one without a time counts as too old
		}
	}
	for method, why := range failed {
		if text == "" || at[method].After(last) {
			text, last = why, at[method]
		}
	}
	return text, last
}

// parseLine returns the attributes of a line of the log, which is text or JSON.
func parseLine(line string) map[string]string {
	attributes := map[string]string{}
	var fields map[string]any
	if json.Unmarshal([]byte(line), &fields) == nil {
		for key, value := range fields {
			attributes[key] = fmt.Sprint(value)
		}
		return attributes
	}
	for _, match := range logAttribute.FindAllStringSubmatch(line, -1) {
		value := match[2]
		if unquoted, err := strconv.Unquote(value); err == nil {
			value = unquoted
		}
		attributes[match[1]] = value
	}
	return attributes
}

// unknown says why the plugin's logs were not read.
func (t *tracer) unknown(err error) {
	t.say("volume", "what the plugin says is not known: "+err.Error(), time.Time{})
}

func (t *tracer) step(link, object, state string, since time.Time) {
	t.trace.Steps = append(t.trace.Steps, orchestrator.TraceStep{Link: link, Object: object, State: state, Since: since})
}

func (t *tracer) say(link, text string, last time.Time) {
	t.trace.Messages = append(
		t.trace.Messages,
		orchestrator.TraceMessage{Link: link, Text: strings.Join(strings.Fields(text), " "), Last: last},
	)
}

var _ orchestrator.Tracer = (*Operator)(nil)

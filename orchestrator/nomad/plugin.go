// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package nomad

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/hashicorp/nomad/api"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata/nomad"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
)

// pluginInfo has the fields of a plugin that are read. Its two halves are keyed by the ID of the client.
type pluginInfo struct {
	ID                 string
	Controllers, Nodes map[string]pluginInstance
	Allocations        []allocationStub
}

// pluginInstance is a plugin's half on a client.
type pluginInstance struct {
	Healthy                    bool
	HealthDescription, AllocID string
	NodeInfo                   struct{ ID string }
}

// allocationStub has the fields of an allocation in a list that are read.
type allocationStub struct {
	ID, Name, Namespace, NodeID, NodeName, JobID string
	ClientStatus, DesiredStatus                  string
	// CreateTime is in nanoseconds since 1970.
	CreateTime int64
	TaskStates map[string]taskState
}

type taskState struct {
	// StartedAt is when the task has started last.
	StartedAt time.Time
	Events    []struct {
		Type, DisplayMessage string
		// Time is in nanoseconds since 1970.
		Time int64
	}
}

// ended reports whether the allocation has ended, or is lost with its client.
func (a allocationStub) ended() bool {
	return slices.Contains([]string{"complete", "failed", "lost"}, a.ClientStatus)
}

// ends reports whether the allocation was stopped, and has not ended.
func (a allocationStub) ends() bool {
	return slices.Contains([]string{"stop", "evict"}, a.DesiredStatus) && !a.ended()
}

// runs reports whether the allocation uses its volumes. Nomad calls one that was stopped "pending" again while its
// tasks run on for their shutdown_delay: Nomad v1.11.1, client/allocrunner/taskrunner/task_runner.go, handleKill.
func (a allocationStub) runs() bool {
	return a.ClientStatus == "running" || a.ClientStatus == "pending" && a.mayHaveVolumes()
}

// mayHaveVolumes reports whether an allocation that was stopped may still have its volumes mounted. One that is pending
// has them if a task of it was started.
func (a allocationStub) mayHaveVolumes() bool {
	started := func(t taskState) bool { return !t.StartedAt.IsZero() }
	return a.ends() && (a.ClientStatus != "pending" ||
		slices.ContainsFunc(slices.Collect(maps.Values(a.TaskStates)), started))
}

// state is the allocation's status for people.
func (a allocationStub) state() string {
	if a.ends() {
		return "stopping"
	}
	return a.ClientStatus
}

// label names the allocation for people.
func (a allocationStub) label() string { return fmt.Sprintf("allocation %.8s (%s)", a.ID, a.Name) }

func (a allocationStub) created() time.Time { return unixNano(a.CreateTime) }

// unixNano returns the zero time for 0.
func unixNano(ns int64) time.Time {
	if ns == 0 {
		return time.Time{}
	}
	return time.Unix(0, ns)
}

// reading is the operation of a command of an operator.
func reading(what, policy string) nomad.Operation {
	return nomad.Operation{What: what + " through", Wrong: "the response is not from a Nomad agent", Policy: policy}
}

// get reads an object. It returns false if the object does not exist.
func (o *Operator) get(ctx context.Context, op nomad.Operation, path string, out any) (exists bool, err error) {
	exists = true
	err = o.options.Call(ctx, op, func(client *api.Client) error {
		_, err := client.Raw().Query(path, out, (&api.QueryOptions{}).WithContext(ctx))
		var refused api.UnexpectedResponseError
		if errors.As(err, &refused) && refused.StatusCode() == http.StatusNotFound {
			exists = false
			return nil
		}
		return err
	})
	return exists, err
}

// plugins lists the plugins of this driver.
func (o *Operator) plugins(ctx context.Context) ([]pluginStub, error) {
	var all []pluginStub
	_, err := o.get(ctx, listPlugins, "/v1/plugins?type=csi", &all)
	return slices.DeleteFunc(all, func(p pluginStub) bool { return p.Provider != driver }), err
}

// plugin reads a plugin. Of its allocations Nomad shows those in the namespaces of the request for which the token has
// the capability "read-job": Nomad v1.11.1, nomad/csi_endpoint.go.
func (o *Operator) plugin(ctx context.Context, id string) (info pluginInfo, err error) {
	op := reading("read plugin "+id, `plugin { policy = "read" }`)
	_, err = o.get(ctx, op, "/v1/plugin/csi/"+url.PathEscape(id)+"?namespace=*", &info)
	return info, err
}

// Logs implements [orchestrator.LogReader]. With ACLs on it needs plugin { policy = "read" }, and for the namespace of
// the plugin's jobs the capabilities "read-logs" and "read-job".
func (o *Operator) Logs(ctx context.Context) ([]orchestrator.Log, error) {
	plugins, err := o.plugins(ctx)
	if err != nil {
		return nil, err
	}
	var logs []orchestrator.Log
	for _, stub := range plugins {
		info, err := o.plugin(ctx, stub.ID)
		if err != nil {
			return nil, err
		}
		allocations, err := info.interesting()
		if err != nil {
			return nil, err
		}
		for _, a := range allocations {
			if len(logs) < orchestrator.MaxLogs {
				logs = append(logs, o.log(ctx, a)...)
			}
		}
	}
	return logs[:min(len(logs), orchestrator.MaxLogs)], nil
}

// interesting are the allocations of the plugin in the order in which their logs are of interest. It returns an error
// if the token may see none of them.
func (p pluginInfo) interesting() ([]allocationStub, error) {
	if len(p.Allocations) == 0 && len(p.Controllers)+len(p.Nodes) > 0 {
		return nil, &metadata.Error{
			Kind: metadata.ErrInvalid, What: "no allocations of the plugin are visible",
			Next: `give the token the capabilities "read-job" and "read-logs" for the namespace of the plugin's jobs`,
		}
	}
	rank := map[string]int{}
	for i, half := range []map[string]pluginInstance{p.Controllers, p.Nodes} {
		for _, instance := range half {
			rank[instance.AllocID] = 1 + 2*i
			if instance.Healthy {
				rank[instance.AllocID]++
			}
		}
	}
	sorted := slices.DeleteFunc(slices.Clone(p.Allocations), allocationStub.ended)
	slices.SortStableFunc(sorted, func(a, b allocationStub) int { return rank[a.ID] - rank[b.ID] })
	return sorted, nil
}

// log reads the logs of an allocation's tasks.
func (o *Operator) log(ctx context.Context, a allocationStub) (logs []orchestrator.Log) {
	for _, task := range slices.Sorted(maps.Keys(a.TaskStates)) {
		one := orchestrator.Log{Name: url.PathEscape(fmt.Sprintf("%s_%.8s_%s", a.JobID, a.ID, task))}
		one.Text, one.Err = o.logOf(ctx, a.ID, task)
		logs = append(logs, one)
	}
	return logs
}

func (o *Operator) logOf(ctx context.Context, allocation, task string) (text string, err error) {
	query := url.Values{
		"task": {task}, "type": {"stderr"}, "origin": {"end"}, "offset": {strconv.Itoa(orchestrator.MaxLogBytes)},
		"plain": {"true"},
	}
	op := reading(
		fmt.Sprintf("read the log of allocation %.8s", allocation),
		`the capability "read-logs" for the namespace of the plugin's jobs`,
	)
	err = o.options.Call(ctx, op, func(client *api.Client) error {
		body, err := client.Raw().Response(
			"/v1/client/fs/logs/"+url.PathEscape(allocation)+"?"+query.Encode(), (&api.QueryOptions{}).WithContext(ctx),
		)
		if err != nil {
			return err
		}
		raw, err := io.ReadAll(io.LimitReader(body, orchestrator.MaxLogBytes))
		text = wholeLines(string(raw))
		return errors.Join(err, body.Close())
	})
	return text, err
}

// wholeLines leaves out the first line of a text of the full length, which may lack its begin.
func wholeLines(text string) string {
	if len(text) < orchestrator.MaxLogBytes {
		return text
	}
	_, rest, _ := strings.Cut(text, "\n")
	return rest
}

var _ orchestrator.LogReader = (*Operator)(nil)

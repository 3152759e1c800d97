// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package nomad

import (
	"context"
	"fmt"
	"net/url"
	"slices"
	"time"

	"github.com/hashicorp/nomad/api"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
)

// Drain implements [metadata.Drainer]: it makes the node ineligible and stops its allocations, which Nomad then places elsewhere.
//
// It is not Nomad's own drain, which would take allocations that wait for their volume too: they would take their wish to
// another node, which would be restarted next. Of each group one allocation at a time is stopped. Allocations of system jobs
// belong to the node; those of batch jobs are left to come to their end.
func (r *Restarts) Drain(ctx context.Context, instanceID, restartID string) (left []string, err error) {
	node, err := r.nodeID(ctx, r.options, instanceID)
	if err != nil {
		return nil, err
	}
	if err := r.makeIneligible(ctx, node, restartID); err != nil {
		return nil, err
	}
	var allocations []allocation
	if err := r.options.query(
		ctx,
		"list the allocations of "+node,
		"/v1/node/"+url.PathEscape(node)+"/allocations",
		0,
		&allocations,
		nil,
	); err != nil {
		return nil, err
	}
	allocations = slices.DeleteFunc(allocations, allocation.exemptFromDrain)
	ending := map[string]bool{}
	for _, a := range allocations {
		ending[a.group()] = ending[a.group()] || a.ending()
	}
	for _, a := range allocations {
		why := "is ending"
		switch {
		case a.ending():
		case a.Job.Type == "batch":
			why = "is of a batch job: wait for its end, or stop it"
		case ending[a.group()]:
			why = "waits for another one of its group to end"
		default:
			if err := r.options.write(
				ctx,
				"stop allocation "+a.ID,
				"/v1/allocation/"+url.PathEscape(a.ID)+"/stop",
				nil,
			); err != nil {
				return nil, err
			}
			ending[a.group()] = true
		}
		left = append(left, fmt.Sprintf("allocation %.8s (%s of job %s) %s", a.ID, a.Name, a.JobID, why))
	}
	slices.Sort(left)
	return left, nil
}

// ineligible is said of a node that gets no new work.
const ineligible = "ineligible"

// Undrain implements [metadata.Drainer]. While the plugin there is not known, the node is known by what its drain has written. Where
// there is no such node, it was purged, and its drain with it.
func (r *Restarts) Undrain(ctx context.Context, instanceID, restartID string) error {
	known, err := r.lookUpNodeID(ctx, r.options, instanceID)
	if err != nil {
		return err
	}
	var all []struct{ ID, SchedulingEligibility string }
	if err := r.options.query(ctx, "look for a drained node", "/v1/nodes", 0, &all, nil); err != nil {
		return err
	}
	for _, node := range all {
		if node.ID != known && (known != "" || node.SchedulingEligibility != ineligible) {
			continue
		}
		if err := r.undrain(ctx, node.ID, restartID); err != nil {
			return err
		}
	}
	return nil
}

func (r *Restarts) undrain(ctx context.Context, node, restartID string) error {
	meta, err := r.options.readOrAskServers(ctx, node)
	if err != nil || meta[keyDrain] != restartID {
		return err
	}
	if err := r.options.setEligible(ctx, node, "eligible"); err != nil {
		return err
	}
	_, err = r.options.apply(ctx, "forget the drain of "+node, node, keys{keyDrain: nil})
	return err
}

// makeIneligible makes a node ineligible and remembers for which restart, unless somebody else has made it so.
func (r *Restarts) makeIneligible(ctx context.Context, node, restartID string) error {
	info, _, err := r.options.nodeInfo(ctx, node, 0)
	if err != nil {
		return err
	}
	meta, err := r.options.read(ctx, "read the metadata of "+node, node)
	if err != nil {
		return err
	}
	by := meta[keyDrain]
	if info.SchedulingEligibility == ineligible && (by == "" || by == restartID) {
		return nil
	}
	if _, err := r.options.apply(ctx, "remember the drain of "+node, node, keys{keyDrain: &restartID}); err != nil {
		return err
	}
	return r.options.setEligible(ctx, node, ineligible)
}

func (o Options) setEligible(ctx context.Context, node, eligibility string) error {
	return o.write(
		ctx,
		"make node "+node+" "+eligibility,
		"/v1/node/"+url.PathEscape(node)+"/eligibility",
		map[string]string{"NodeID": node, "Eligibility": eligibility},
	)
}

// write changes something on the servers.
func (o Options) write(ctx context.Context, what, path string, in any) error {
	return o.call(ctx, restartOperation(what), func(client *api.Client) error {
		_, err := client.Raw().Write(path, in, nil, (&api.WriteOptions{}).WithContext(ctx))
		return err
	})
}

// allocation is what is read of one.
type allocation struct {
	ID, Name, Namespace, JobID, TaskGroup string
	DesiredStatus, ClientStatus           string
	DesiredTransition                     struct{ Migrate *bool }
	TaskStates                            map[string]struct{ StartedAt time.Time }
	Job                                   struct {
		Type       string
		TaskGroups []struct {
			Name    string
			Volumes map[string]struct{ Type string }
		}
	}
}

func (a allocation) group() string { return a.Namespace + "\x00" + a.JobID + "\x00" + a.TaskGroup }

// ending reports whether the allocation is to go already.
func (a allocation) ending() bool {
	return a.DesiredStatus != "run" || a.DesiredTransition.Migrate != nil && *a.DesiredTransition.Migrate
}

// exemptFromDrain reports whether an allocation has nothing to do with a drain.
func (a allocation) exemptFromDrain() bool {
	switch {
	case a.ClientStatus != "running" && a.ClientStatus != "pending":
		return true
	case a.Job.Type == "system" || a.Job.Type == "sysbatch":
		return true
	}
	return a.hasVolume() && !a.started()
}

// started reports whether a task has ever started; one that is to be started again makes the allocation pending, too.
func (a allocation) started() bool {
	for _, task := range a.TaskStates {
		if !task.StartedAt.IsZero() {
			return true
		}
	}
	return a.ClientStatus != "pending"
}

// hasVolume reports whether the allocation has volumes by CSI: none of its tasks starts before they are there.
func (a allocation) hasVolume() bool {
	for _, g := range a.Job.TaskGroups {
		for _, v := range g.Volumes {
			if g.Name == a.TaskGroup && v.Type == "csi" {
				return true
			}
		}
	}
	return false
}

var _ interface {
	metadata.RestartRequester
	metadata.Drainer
} = (*Restarts)(nil)

var _ metadata.RestartListener = (*Listener)(nil)

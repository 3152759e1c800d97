// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package nomad

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"time"

	"github.com/hashicorp/nomad/api"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
)

// Drain implements [orchestrator.Drainer]. It makes the node ineligible and stops its allocations, which Nomad then
// places on other nodes. In each task group it stops one allocation at a time.
//
// It does not use Nomad's own drain, which also moves allocations that wait for their volumes. Those would request an
// attach on another node, which would be restarted next. Allocations of system jobs belong to the node and stay.
// Allocations of batch jobs are not stopped, but must end first.
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
			why = "belongs to a batch job: wait for its end, or stop it"
		case ending[a.group()]:
			why = "waits until another allocation of its group has ended"
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

// ineligible is the scheduling eligibility of a node that gets no new work.
const ineligible = "ineligible"

// Undrain implements [orchestrator.Drainer]. It finds the node also by the key that Drain has written: the node plugin
// there may not be known, or another node may be this instance now. If there is no such node, it was purged, and
// nothing is left to do.
func (r *Restarts) Undrain(ctx context.Context, instanceID, restartID string) error {
	id, err := r.lookUpNodeID(ctx, r.options, instanceID)
	if err != nil && !errors.Is(err, metadata.ErrConflict) {
		return err
	}
	var all []struct{ ID, SchedulingEligibility string }
	if err := r.options.query(ctx, "look for a drained node", "/v1/nodes", 0, &all, nil); err != nil {
		return err
	}
	for _, node := range all {
		if node.ID != id && node.SchedulingEligibility != ineligible {
			continue
		}
		if node.ID != id { // not asked of its client, which may hang
			info, _, err := r.options.nodeInfo(ctx, node.ID, 0)
			if err != nil {
				return err
			}
			if info.Meta[keyDrain] != restartID {
				continue
			}
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

// makeIneligible makes a node ineligible and records the restart. A node that another client has made ineligible stays
// as it is.
func (r *Restarts) makeIneligible(ctx context.Context, node, restartID string) error {
	info, _, err := r.options.nodeInfo(ctx, node, 0)
	if err != nil {
		return err
	}
	meta, err := r.options.readClient(ctx, node)
	if err != nil {
		return err
	}
	by := meta[keyDrain]
	if info.SchedulingEligibility == ineligible && (by == "" || by == restartID) {
		return nil
	}
	if _, err := r.options.apply(ctx, "record the drain of "+node, node, keys{keyDrain: &restartID}); err != nil {
		return err
	}
	return r.options.setEligible(ctx, node, ineligible)
}

func (o options) setEligible(ctx context.Context, node, eligibility string) error {
	return o.write(
		ctx,
		"make node "+node+" "+eligibility,
		"/v1/node/"+url.PathEscape(node)+"/eligibility",
		map[string]string{"NodeID": node, "Eligibility": eligibility},
	)
}

// write changes something on the servers.
func (o options) write(ctx context.Context, what, path string, in any) error {
	return o.Call(ctx, restartOperation(what), func(client *api.Client) error {
		_, err := client.Raw().Write(path, in, nil, (&api.WriteOptions{}).WithContext(ctx))
		return err
	})
}

// allocation has the fields of an allocation that are read.
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

// ending reports whether the allocation is already stopping.
func (a allocation) ending() bool {
	return a.DesiredStatus != "run" || a.DesiredTransition.Migrate != nil && *a.DesiredTransition.Migrate
}

// exemptFromDrain reports whether a drain leaves the allocation where it is.
func (a allocation) exemptFromDrain() bool {
	switch {
	case a.ClientStatus != "running" && a.ClientStatus != "pending":
		return true
	case a.Job.Type == "system" || a.Job.Type == "sysbatch":
		return true
	}
	return a.hasVolume() && !a.started()
}

// started reports whether a task has ever started. An allocation whose task is to start again is pending too.
func (a allocation) started() bool {
	for _, task := range a.TaskStates {
		if !task.StartedAt.IsZero() {
			return true
		}
	}
	return a.ClientStatus != "pending"
}

// hasVolume reports whether the allocation has CSI volumes. None of its tasks starts before they are mounted.
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

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package client

import (
	"context"
	"encoding/json"
	"slices"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// Restart is the state of a node's planned restart, as the called controller knows it.
type Restart struct {
	NodeID   string `json:"nodeID"`
	NodeName string `json:"nodeName,omitempty"`
	// Reason is one word: why the restart has not started, or that it is in progress. It is empty if none is planned.
	Reason rpc.RestartReason `json:"reason,omitempty"`
	// Message is the text of Reason for people.
	Message string `json:"message,omitempty"`
	// Since is when Reason began.
	Since time.Time `json:"since,omitzero"`
	// ID is the ID of a restart in progress.
	ID string `json:"restartID,omitempty"`
}

// PendingAttach is the restart that attaches a volume.
type PendingAttach struct {
	Restart
	// RequestedSince is the time of the first request to attach the volume, LastRequested that of the last. Both are
	// zero if another controller got the requests.
	RequestedSince time.Time `json:"requestedSince,omitzero"`
	LastRequested  time.Time `json:"lastRequested,omitzero"`
	// Problem says why even a restart cannot attach this volume now.
	Problem string `json:"problem,omitempty"`
}

// Restarts returns the planned restarts that the controller knows, with the names of their nodes. It returns false if
// the controller plans none. Each call that lists volumes can ask for them; this one lists a single volume.
func (c *Client) Restarts(ctx context.Context) (restarts []Restart, planned bool, err error) {
	asking, option, decode := ask(ctx, wantRestarts, wantNames)
	if _, err := c.controller.ListVolumes(asking, &csi.ListVolumesRequest{MaxEntries: 1}, option); err != nil {
		return nil, false, err
	}
	answered, err := decode()
	for _, r := range answered.restarts {
		state := toRestart(r)
		state.NodeName = answered.nodeNames[r.InstanceID]
		restarts = append(restarts, state)
	}
	return restarts, answered.restarts != nil, err
}

func toRestart(r rpc.Restart) Restart {
	return Restart{NodeID: r.InstanceID, Reason: r.Reason, Message: r.Message, Since: r.Since, ID: r.ID}
}

// setRestarts sets the restart that the volume waits for, and the node that still has the disk of a detached volume.
func (v *Volume) setRestarts(restarts []rpc.Restart) {
	v.planned = restarts != nil
	for _, r := range restarts {
		state := toRestart(r)
		for _, request := range r.Attach {
			if request.VolumeID == v.ID {
				v.WaitsFor = &PendingAttach{
					Restart:        state,
					RequestedSince: request.Since,
					LastRequested:  request.LastRequested,
					Problem:        request.Problem,
				}
			}
		}
		if slices.Contains(r.Detach, v.ID) {
			v.StillOn = &state
		}
	}
}

// Planned reports whether the called controller plans restarts.
func (v Volume) Planned() bool { return v.planned }

// VolumeList is a controller's list of volumes. Its JSON is the array of volumes.
type VolumeList struct {
	Volumes []Volume
	// Restarts are the planned restarts that the controller knows. Nil means that it does not plan restarts.
	Restarts []rpc.Restart
	// NodeNames maps the IDs of all nodes to their names.
	NodeNames map[string]string
}

// MarshalJSON leaves out Restarts and NodeNames, because each volume contains its own.
func (l VolumeList) MarshalJSON() ([]byte, error) { return json.Marshal(l.Volumes) }

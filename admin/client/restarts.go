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
	"google.golang.org/grpc"

	"github.com/oxidecomputer/oxide-csi-plugin/core/restart"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// Restart is the state of a node's planned restart, as the called controller knows it.
type Restart struct {
	NodeID   string `json:"nodeID"`
	NodeName string `json:"nodeName,omitempty"`
	// Reason is one word: why the restart has not started, or that it is in progress. It is empty if none is planned.
	Reason restart.Reason `json:"reason,omitempty"`
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

// requestRestarts is [ask] for planned restarts. They are nil if the controller does not plan restarts.
func requestRestarts(
	ctx context.Context,
) (asking context.Context, option grpc.CallOption, decode func() ([]restart.Restart, error)) {
	asking, option, answer := ask[[]restart.Restart](ctx, rpc.MetadataAskRestarts, rpc.MetadataRestarts)
	return asking, option, func() ([]restart.Restart, error) {
		restarts, _, err := answer() // a controller that plans no restarts does not answer
		return restarts, err
	}
}

// Restarts returns the planned restarts that the controller knows, with the names of their nodes. It returns false if
// the controller plans none. Each call that lists volumes can ask for them; this one lists a single volume.
func (c *Client) Restarts(ctx context.Context) (restarts []Restart, planned bool, err error) {
	asking, option, decode := requestRestarts(ctx)
	asking, nodes, decodeNodes := askNodeNames(asking)
	if _, err := c.controller.ListVolumes(asking, &csi.ListVolumesRequest{MaxEntries: 1}, option, nodes); err != nil {
		return nil, false, err
	}
	names, err := decodeNodes()
	if err != nil {
		return nil, false, err
	}
	all, err := decode()
	for _, r := range all {
		restarts = append(restarts, Restart{
			NodeID: r.InstanceID, NodeName: names[r.InstanceID], Reason: r.Reason, Message: r.Message, Since: r.Since, ID: r.ID,
		})
	}
	return restarts, all != nil, err
}

// setRestarts sets the restart that the volume waits for, and the node that still has the disk of a detached volume.
func (v *Volume) setRestarts(restarts []restart.Restart) {
	v.planned = restarts != nil
	for _, r := range restarts {
		state := Restart{NodeID: r.InstanceID, Reason: r.Reason, Message: r.Message, Since: r.Since, ID: r.ID}
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
	Restarts []restart.Restart
	// NodeNames maps the IDs of all nodes to their names.
	NodeNames map[string]string
}

// MarshalJSON leaves out Restarts and NodeNames, because each volume contains its own.
func (l VolumeList) MarshalJSON() ([]byte, error) { return json.Marshal(l.Volumes) }

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package client

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	"github.com/oxidecomputer/oxide-csi-plugin/core/restart"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// Restart is the state of a node's planned restart, as the called controller knows it.
type Restart struct {
	NodeID string `json:"nodeID"`
	// Reason is one word: why the restart has not begun, or that it is in progress. Empty means that none is planned.
	Reason restart.Reason `json:"reason,omitempty"`
	// Message says the same for people.
	Message string `json:"message,omitempty"`
	// Since is when Reason began.
	Since time.Time `json:"since,omitzero"`
	// ID is the ID of a restart in progress.
	ID string `json:"restartID,omitempty"`
}

// Waits is the restart after which a volume is attached.
type Waits struct {
	Restart
	// WantedSince is the time of the first request to attach the volume, AskedAgain that of the last. Both are zero if
	// another controller got the requests.
	WantedSince time.Time `json:"wantedSince,omitzero"`
	AskedAgain  time.Time `json:"askedAgain,omitzero"`
	// Problem is what prevents attaching this volume even after a restart.
	Problem string `json:"problem,omitempty"`
}

// askRestarts makes a controller add its planned restarts to an answer. The returned function decodes them.
func askRestarts(
	ctx context.Context,
) (asking context.Context, header grpc.CallOption, told func() ([]restart.Restart, error)) {
	var answer metadata.MD
	return metadata.AppendToOutgoingContext(
			ctx,
			rpc.MetadataAskRestarts,
			"yes",
		), grpc.Header(
			&answer,
		), func() ([]restart.Restart, error) {
			texts := answer.Get(rpc.MetadataRestarts)
			if len(texts) == 0 {
				return nil, nil // it plans none
			}
			restarts := []restart.Restart{}
			if err := json.Unmarshal([]byte(texts[0]), &restarts); err != nil {
				return nil, fmt.Errorf(
					"what the controller tells of planned restarts cannot be read, which is not of this version: %w",
					err,
				)
			}
			return restarts, nil
		}
}

// concerned sets the restart that a volume waits for, and the node that still has the disk of a detached volume.
func (v *Volume) concerned(restarts []restart.Restart) {
	v.planned = restarts != nil
	for _, r := range restarts {
		of := Restart{NodeID: r.InstanceID, Reason: r.Reason, Message: r.Message, Since: r.Since, ID: r.ID}
		for _, wanted := range r.Attach {
			if wanted.DiskID == v.ID {
				v.WaitsFor = &Waits{
					Restart:     of,
					WantedSince: wanted.Since,
					AskedAgain:  wanted.LastRequested,
					Problem:     wanted.Problem,
				}
			}
		}
		for _, disk := range r.Detach {
			if disk == v.ID {
				v.StillOn = &of
			}
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
}

// MarshalJSON leaves out Restarts, because each volume contains its own.
func (l VolumeList) MarshalJSON() ([]byte, error) { return json.Marshal(l.Volumes) }

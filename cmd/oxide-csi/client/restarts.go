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

// Restart is how it stands with the restart of a node, as the controller knows it that was asked.
type Restart struct {
	NodeID string `json:"nodeID"`
	// Reason says in a word why it has not begun, or that it is under way; empty where none is wanted.
	Reason restart.Reason `json:"reason,omitempty"`
	// Message says the same to people.
	Message string `json:"message,omitempty"`
	// Since is when Reason came to be so.
	Since time.Time `json:"since,omitzero"`
	// ID is set where it is under way.
	ID string `json:"restartID,omitempty"`
}

// Waits is the restart that a volume waits for, to be attached there.
type Waits struct {
	Restart
	// WantedSince is when the volume was first asked for there, AskedAgain when last; zero where another controller was asked.
	WantedSince time.Time `json:"wantedSince,omitzero"`
	AskedAgain  time.Time `json:"askedAgain,omitzero"`
	// Problem is what stands in the way of this volume, whatever becomes of the node.
	Problem string `json:"problem,omitempty"`
}

// askRestarts has a controller tell which restarts are planned beside its answer, and returns how to read that.
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

// concerned tells a volume what it waits for, and where its disk still is although it is published nowhere.
func (v *Volume) concerned(restarts []restart.Restart) {
	v.planned = restarts != nil
	for _, r := range restarts {
		of := Restart{NodeID: r.InstanceID, Reason: r.Reason, Message: r.Message, Since: r.Since, ID: r.ID}
		for _, wanted := range r.Attach {
			if wanted.DiskID == v.ID {
				v.WaitsFor = &Waits{Restart: of, WantedSince: wanted.Since, AskedAgain: wanted.LastRequested, Problem: wanted.Problem}
			}
		}
		for _, disk := range r.Detach {
			if disk == v.ID {
				v.StillOn = &of
			}
		}
	}
}

// Planned reports whether the controller that was asked plans restarts.
func (v Volume) Planned() bool { return v.planned }

// VolumeList is what a controller tells of all volumes. Its JSON is the array of volumes.
type VolumeList struct {
	Volumes []Volume
	// Restarts are those that the controller knows of; nil where it plans none.
	Restarts []restart.Restart
}

// MarshalJSON leaves out Restarts: each volume has what concerns it.
func (l VolumeList) MarshalJSON() ([]byte, error) { return json.Marshal(l.Volumes) }

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package orchestrator

import (
	"context"
	"fmt"
	"strings"
)

// Status says how serious a finding is.
type Status string

// The statuses. A warning is something that will become a problem, or that limits the plugin.
const (
	StatusOK      Status = "ok"
	StatusWarning Status = "warning"
	StatusFailure Status = "failure"
)

// Finding is one line of an examination.
type Finding struct {
	// Area is rack, node, kubernetes or nomad.
	Area   string `json:"area"`
	Status Status `json:"status"`
	// Looked says what was looked at, Found what was found. They hold no secret.
	Looked string `json:"lookedAt"`
	Found  string `json:"found"`
	// Next is what to do. It is empty if Status is ok.
	Next string `json:"next,omitempty"`
}

// Some is the text of a finding that names at most five of the names.
func Some(names []string) string {
	const most = 5
	if len(names) > most {
		return fmt.Sprintf("%s and %d others", strings.Join(names[:most], ", "), len(names)-most)
	}
	return strings.Join(names, ", ")
}

// Attachment is a volume, and where the orchestrator has it attached.
type Attachment struct {
	// VolumeID is the CSI ID, and NodeID the CSI node ID, or empty if it is not known.
	VolumeID, NodeID string
	// Claim names the claim as oxide-csi explain takes it. By names who uses it there, or is empty if the orchestrator
	// has the volume attached nowhere.
	Claim, By string
	// Runs says that a workload runs there, so the volume is mounted.
	Runs bool
}

// Examiner examines how an orchestrator is set up for the plugin. It changes nothing. What cannot be read is a finding.
// It reads each list once. It also returns the attachments that the racks should have, as far as it has seen them.
type Examiner interface {
	Examine(ctx context.Context) ([]Finding, []Attachment)
}

// StorageClass has what an orchestrator passes to each CreateVolume of a kind of volumes.
type StorageClass struct {
	Name string
	// FSType is the filesystem type, or "" for the plugin's default.
	FSType     string
	MountFlags []string
	Parameters map[string]string
}

// ClassLister lists the storage classes that name the plugin, for an orchestrator that has any.
type ClassLister interface {
	StorageClasses(ctx context.Context) ([]StorageClass, error)
}

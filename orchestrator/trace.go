// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package orchestrator

import (
	"context"
	"errors"
	"time"
)

// Subject is what an operator asks about. Exactly one field is set, beside Workload.
type Subject struct {
	// VolumeID is the CSI ID of a volume.
	VolumeID string
	// Claim and Pod are namespace/name of what claims or uses a volume. In Nomad a claim is a volume.
	Claim, Pod string
	// Name is the orchestrator's own name of a volume, or the ID of an allocation.
	Name string
	// Workload is the ID of the allocation that is asked about, beside one of its volumes: see [Trace.Others].
	Workload string
}

// The orchestrators of traces. The empty one is that of a plain host.
const (
	None       = ""
	Kubernetes = "kubernetes"
	Nomad      = "nomad"
)

// Trace is what an orchestrator knows of one volume.
type Trace struct {
	// Orchestrator is the orchestrator, whose commands an operator uses.
	Orchestrator string
	// VolumeID is the CSI ID, CSIName the name in the call that creates the volume. Either may be unknown.
	VolumeID, CSIName string
	// Claim and Workload name the claim, and the pod or allocation, for people. Node names the node that needs the volume.
	// They are empty if there is none.
	Claim, Workload, Node string
	// NodeID is the CSI node ID that the node has, or had last.
	NodeID string
	// Others are the other volumes of the workload that was asked about.
	Others []Subject
	// Steps are the links of the chain in its order, as far as the orchestrator has them.
	Steps []TraceStep
	// Conditions are the conditions that are true.
	Conditions []TraceCondition
	// Messages are what the plugin and the orchestrator said last about a step that is not done. They hold no secret.
	Messages []TraceMessage
}

// TraceStep is an object of the orchestrator in a volume's chain.
type TraceStep struct {
	// Link is claim, volume, attachment, node or workload.
	Link string `json:"link"`
	// Object names the object, and State says how it is.
	Object string `json:"object"`
	State  string `json:"state"`
	// Since is zero if it is unknown.
	Since time.Time `json:"since,omitzero"`
}

// TraceMessage is an error or an event.
type TraceMessage struct {
	Link string    `json:"link"`
	Text string    `json:"text"`
	Last time.Time `json:"last,omitzero"`
}

// TraceCondition is something that only the orchestrator can know.
type TraceCondition string

// The conditions.
const (
	// OtherDriver: the claim's class names another driver, or does not exist.
	OtherDriver TraceCondition = "OtherDriver"
	// NotRegistered: the node has no plugin.
	NotRegistered TraceCondition = "NotRegistered"
	// NodeNotReady: the orchestrator does not hear from the node, or has deleted it.
	NodeNotReady TraceCondition = "NodeNotReady"
	// SnapshotNotReady: the snapshot from which the volume is made is not ready.
	SnapshotNotReady TraceCondition = "SnapshotNotReady"
	// ExpansionPending: a larger size is requested, and the volume does not have it yet.
	ExpansionPending TraceCondition = "ExpansionPending"
	// Attached: the orchestrator takes the volume for attached to Node.
	Attached TraceCondition = "Attached"
	// NoController: the orchestrator knows no controller of the plugin that is well.
	NoController TraceCondition = "NoController"
	// ClaimOfEnded: a workload that has ended still claims the volume.
	ClaimOfEnded TraceCondition = "ClaimOfEnded"
	// ClaimOfAnother: another workload, which has not ended, claims the volume, and this one waits.
	ClaimOfAnother TraceCondition = "ClaimOfAnother"
	// Terminating: the claim is being deleted.
	Terminating TraceCondition = "Terminating"
	// WorkloadTerminating: the workload is being deleted, and is still there.
	WorkloadTerminating TraceCondition = "WorkloadTerminating"
	// ClaimMissing: the claim that the workload names does not exist.
	ClaimMissing TraceCondition = "ClaimMissing"
	// NoConsumer: the volume is made when a workload uses the claim, and there is none.
	NoConsumer TraceCondition = "NoConsumer"
	// Released: the claim of the volume is gone, and the orchestrator still has the volume.
	Released TraceCondition = "Released"
	// Running: the workload runs.
	Running TraceCondition = "Running"
)

// ErrNotFound says that the subject of a trace does not exist.
var ErrNotFound = errors.New("does not exist")

// Tracer follows one volume through an orchestrator. It changes nothing. A link that does not exist yet is no error.
// If the subject does not exist, the error is [ErrNotFound].
type Tracer interface {
	Trace(ctx context.Context, subject Subject) (Trace, error)
}

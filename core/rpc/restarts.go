// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package rpc

import (
	"slices"
	"time"
)

// RestartReason is the reason why the restart of an instance has not started, or ReasonUnderWay. It is a label in
// metrics.
type RestartReason string

const (
	// ReasonWindow means that more attach requests for the instance are being collected.
	ReasonWindow RestartReason = "window"
	// ReasonCoolDown means that the instance started too recently.
	ReasonCoolDown RestartReason = "cool-down"
	// ReasonHours means that restarts may start only at other times.
	ReasonHours RestartReason = "hours"
	// ReasonManual means that the plugin restarts nothing, in attach mode hot: somebody must stop the instance.
	ReasonManual RestartReason = "manual"
	// ReasonOthers means that --restart-max-down is reached, or that another instance must release a disk first.
	ReasonOthers RestartReason = "other-restart"
	// ReasonRefused means that a restart was recently refused or given up.
	ReasonRefused RestartReason = "refused"
	// ReasonSelf means that this controller does not know yet which instance it runs on.
	ReasonSelf RestartReason = "self"
	// ReasonState means that the instance is neither running nor stopped, or was deleted.
	ReasonState RestartReason = "state"
	// ReasonUnderWay means that the restart is under way.
	ReasonUnderWay RestartReason = "under-way"
)

// Restart describes a restart that is needed, planned or under way. It also describes an instance that needs no restart
// but still has unpublished disks. Its JSON is what the controller sends to the commands of oxide-csi.
type Restart struct {
	InstanceID string `json:"nodeID"`
	// Reason is empty if the instance needs no restart.
	Reason RestartReason `json:"reason,omitempty"`
	// Message explains it to people: why the restart has not started, or its progress.
	Message string `json:"message,omitempty"`
	// Since is when Reason last changed, as far as this process knows.
	Since time.Time `json:"since,omitzero"`
	// ID is set if the restart is under way.
	ID string `json:"restartID,omitempty"`
	// Attach are the volumes whose disks are to be attached. Detach are the IDs of the unpublished volumes whose disks are
	// to be detached.
	Attach []PendingAttach `json:"attach,omitempty"`
	Detach []string        `json:"detach,omitempty"`
}

// Concerns reports whether the restart attaches or detaches the disk of the volume.
func (r Restart) Concerns(volumeID string) bool {
	return slices.Contains(r.Detach, volumeID) ||
		slices.ContainsFunc(r.Attach, func(w PendingAttach) bool { return w.VolumeID == volumeID })
}

// PendingAttach is a volume whose disk a restart will attach.
type PendingAttach struct {
	VolumeID string `json:"volumeID"`
	// Since is the time of the first request, LastRequested of the last. Both are zero if another controller got the
	// request.
	Since         time.Time `json:"since,omitzero"`
	LastRequested time.Time `json:"repeated,omitzero"`
	// Problem says what blocks this volume alone.
	Problem string `json:"problem,omitempty"`
}

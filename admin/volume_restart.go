// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package admin

import (
	"cmp"
	"io"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/admin/client"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// printRestarts prints the restart of each node: its status, and the disks it attaches and detaches.
func printRestarts(w io.Writer, list client.VolumeList) {
	names := map[string]string{} // of volumes
	for _, v := range list.Volumes {
		names[v.ID] = v.UsableName()
	}
	line(w)
	for _, r := range list.Restarts {
		node := cmp.Or(list.NodeNames[r.InstanceID], r.InstanceID)
		status := cmp.Or(describeStatus(r.Reason, r.Message), "needs no restart, but its next restart will")
		line(w, "node "+node+" "+status+":")
		for _, pending := range r.Attach {
			volume := cmp.Or(names[pending.VolumeID], pending.VolumeID)
			line(w, "  attach "+volume+describeRequest(pending.Since, pending.LastRequested, pending.Problem))
		}
		for _, disk := range r.Detach {
			line(w, "  detach "+cmp.Or(names[disk], disk)+", which is no longer wanted there")
		}
	}
	if len(list.Restarts) == 0 {
		line(w, "no node needs a restart, as far as this controller knows: another replica may have got requests")
		return
	}
	line(w, "this is what one controller knows: another replica may have got requests for other volumes")
}

// printVolumeRestart prints the restart that attaches a volume, and the restart that detaches it from its previous
// node.
func printVolumeRestart(w io.Writer, v client.Volume) {
	if pending := v.WaitsFor; pending != nil {
		request := describeRequest(pending.RequestedSince, pending.LastRequested, pending.Problem)
		line(w, "waits:", "to be attached to "+client.NodeText(pending.NodeName, pending.NodeID)+request)
		printStatus(w, pending.Restart)
	} else if v.NodeID == "" {
		line(w, "waits:",
			"for nothing, as far as this controller knows: another replica may have got a request for the volume")
	}
	if on := v.StillOn; on != nil && (v.WaitsFor == nil || v.WaitsFor.NodeID != on.NodeID) {
		until := "it is detached when that node is stopped or restarted"
		if on.Reason == rpc.ReasonManual {
			until = "when that node is stopped, detach it again"
		}
		line(w, "still on:", client.NodeText(on.NodeName, on.NodeID)+", where it is no longer wanted: "+until)
		printStatus(w, *on)
	}
}

// printStatus prints the status of a restart, if the node needs one.
func printStatus(w io.Writer, r client.Restart) {
	if text := describeStatus(r.Reason, r.Message); text != "" {
		line(w, "restart:", client.NodeText(r.NodeName, r.NodeID)+" "+text)
	}
}

// describeStatus describes the status of a node's restart, or returns "" if the node needs none.
func describeStatus(reason rpc.RestartReason, message string) string {
	switch reason {
	case "":
		return ""
	case rpc.ReasonUnderWay:
		return "is being restarted (" + message + ")"
	case rpc.ReasonManual:
		return "must be stopped manually (" + message + ")"
	}
	return "needs a restart, which has not started (" + message + ")"
}

// describeRequest describes since when an attach is requested, and what prevents it.
func describeRequest(since, last time.Time, problem string) string {
	text := ""
	if !since.IsZero() {
		text = ", requested since " + since.UTC().Format(time.RFC3339) + ", last at " + last.UTC().Format(time.RFC3339)
	}
	if problem != "" {
		text += ": " + problem
	}
	return text
}

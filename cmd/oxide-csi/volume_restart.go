// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main

import (
	"cmp"
	"io"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/cmd/oxide-csi/client"
	"github.com/oxidecomputer/oxide-csi-plugin/core/restart"
)

// sayRestarts tells of each node what its restart is for, and how it stands.
func printRestarts(w io.Writer, restarts []restart.Restart) {
	line(w)
	for _, r := range restarts {
		line(
			w,
			"node "+r.InstanceID+" "+cmp.Or(describeStatus(r.Reason, r.Message), "is not to be restarted, and if it ever is")+":",
		)
		for _, wanted := range r.Attach {
			line(w, "  attach "+wanted.DiskID+describeRequest(wanted.Since, wanted.LastRequested, wanted.Problem))
		}
		for _, disk := range r.Detach {
			line(w, "  detach "+disk+", which is published there no more")
		}
	}
	if len(restarts) == 0 {
		line(
			w,
			"no restart of a node is wanted, as far as this controller knows: another replica may have been asked for one",
		)
		return
	}
	line(w, "this is what one controller knows: another replica may have been asked for other volumes")
}

// sayRestartOf tells what a volume waits for, and what with it leaves a node.
func printVolumeRestart(w io.Writer, v client.Volume) {
	if waits := v.WaitsFor; waits != nil {
		line(w, "waits:", "to be attached to node "+waits.NodeID+describeRequest(waits.WantedSince, waits.AskedAgain, waits.Problem))
		printStatus(w, waits.Restart)
	} else if v.NodeID == "" {
		line(w, "waits:", "for nothing, as far as this controller knows: another replica may have been asked for the volume")
	}
	if on := v.StillOn; on != nil {
		line(
			w,
			"still on:",
			"node "+on.NodeID+", where it is published no more: it is detached with the next restart of that node",
		)
		printStatus(w, *on)
	}
}

func printStatus(w io.Writer, r client.Restart) {
	if text := describeStatus(r.Reason, r.Message); text != "" {
		line(w, "restart:", "node "+r.NodeID+" "+text)
	}
}

// standing is how it stands with the restart of a node; empty where none is wanted.
func describeStatus(reason restart.Reason, message string) string {
	switch reason {
	case "":
		return ""
	case restart.ReasonUnderWay:
		return "is being restarted (" + message + ")"
	case restart.ReasonPolicy:
		return "would be restarted (" + message + ")"
	}
	return "is to be restarted, and is not yet (" + message + ")"
}

// asked is since when a volume is wanted, and what is in the way.
func describeRequest(since, again time.Time, problem string) string {
	text := ""
	if !since.IsZero() {
		text = ", wanted since " + since.UTC().
			Format(time.RFC3339) +
			", last asked for at " + again.UTC().
			Format(time.RFC3339)
	}
	if problem != "" {
		text += ": " + problem
	}
	return text
}

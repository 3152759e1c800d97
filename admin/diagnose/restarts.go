// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package diagnose

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/admin/client"
	"github.com/oxidecomputer/oxide-csi-plugin/core/fault"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
)

// restartNext are the next steps for a planned restart that has not begun, by the reason.
// The others begin by themselves.
var restartNext = map[rpc.RestartReason]string{
	rpc.ReasonHours:   "wait for the hours, or change --restart-hours",
	rpc.ReasonManual:  "stop it; once its volumes are attached and detached (on a plain host repeat the commands), start it; or use --attach-mode=restart: docs/how-to/planned-restarts.md",
	rpc.ReasonRefused: "remove what the node names; the restart is tried again after the cool-down",
	rpc.ReasonSelf:    "see the controller's log: it must know which instance it runs on",
	rpc.ReasonState:   "see the instance in the rack's console: start it, or delete its node in the orchestrator",
}

// ExamineRestarts looks at the planned restarts of a controller, and why those have not begun that have not.
func ExamineRestarts(restarts []client.Restart, now time.Time) []orchestrator.Finding {
	e := &examination{area: "restarts"}
	needed := 0
	for _, r := range restarts {
		if r.Reason == "" {
			continue // nothing waits for it
		}
		needed++
		looked, since := "instance "+cmp.Or(r.NodeName, r.NodeID), ""
		if !r.Since.IsZero() {
			since = fmt.Sprintf(" since %s", now.Sub(r.Since).Round(time.Second))
		}
		switch next := restartNext[r.Reason]; {
		case r.Reason == rpc.ReasonUnderWay:
			e.ok(looked, "is being restarted%s: %s", since, r.Message)
		case r.Reason == rpc.ReasonManual: // in attach mode hot, which plans no restart
			e.warn(looked, next, "must be stopped manually%s: %s", since, r.Message)
		case next != "":
			e.warn(looked, next, "its restart has not begun%s (%s): %s", since, r.Reason, r.Message)
		default:
			e.ok(looked, "its restart begins by itself; it waits%s (%s): %s", since, r.Reason, r.Message)
		}
	}
	if needed == 0 {
		e.ok("planned restarts", "no instance needs one, as far as this controller knows")
	}
	return e.findings
}

// RestartsUnknown is the finding if the controller at a socket does not answer.
func RestartsUnknown(socket string, err error) []orchestrator.Finding {
	e := &examination{area: "restarts"}
	e.warn(
		"planned restarts",
		"see the controller's log",
		"the controller at %s does not say which it plans: %s",
		socket,
		err,
	)
	return e.findings
}

// waitsRow are the faults of a volume that waits for a restart, by the reason. The others are [fault.RestartPlanned].
var waitsRow = map[rpc.RestartReason]*fault.Row{
	rpc.ReasonManual: fault.RackHasNoHotplug, rpc.ReasonRefused: fault.RestartRefused,
}

// controllerTimeout bounds the wait for a controller that explain can do without.
const controllerTimeout = 10 * time.Second

// Waits implements [Guest]. A volume that the controller does not know waits for nothing.
func (h Host) Waits(ctx context.Context, volumeID string) (node string, messages []orchestrator.TraceMessage) {
	if h.Controller == "" {
		return "", nil
	}
	plugin, err := client.New(client.Options{Controller: h.Controller, Node: h.Controller})
	if err != nil {
		return "", nil
	}
	ctx, cancel := context.WithTimeout(ctx, controllerTimeout)
	defer cancel()
	volume, err := plugin.ShowVolume(ctx, volumeID)
	err = errors.Join(err, plugin.Close())
	var row *fault.Row
	var text string
	var since time.Time
	switch waits, on := volume.WaitsFor, volume.StillOn; {
	case err != nil:
		return "", nil
	case waits != nil:
		row, node, since = cmp.Or(waitsRow[waits.Reason], fault.RestartPlanned), waits.NodeName, waits.LastRequested
		text = fmt.Sprintf("it waits to be attached to %s: %s", client.NodeText(node, waits.NodeID),
			cmp.Or(waits.Problem, waits.Message))
	case on != nil && on.Reason == rpc.ReasonManual:
		row, node, since = waitsRow[on.Reason], on.NodeName, on.Since
		text = fmt.Sprintf("it waits to be detached from %s: %s", client.NodeText(node, on.NodeID), on.Message)
	default:
		return "", nil
	}
	return node, []orchestrator.TraceMessage{{Link: "attachment", Text: text + " [" + row.Word + "]", Last: since}}
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package orchestrator

import (
	"context"
)

// Event is a kind of event that the plugin publishes for operators. docs/reference/events.md lists all.
type Event struct {
	// Reason is one permanent word in CamelCase: scripts and alerts may use it.
	Reason string
	// Problem is true if an operator has to look at the object. It makes a Warning of the event in Kubernetes.
	Problem bool
	// Object is what the event is about: [ObjectNode], [ObjectClaim] or [ObjectController].
	Object string
	// When says when the event comes, Next what to do. Both are for the page.
	When, Next string
}

// Objects of events.
const (
	ObjectNode       = "node"
	ObjectClaim      = "claim"
	ObjectController = "pod of the controller"
)

// The events. No other code makes an Event.
var (
	EventRestartPlanned = Event{
		"RestartPlanned", false, ObjectNode,
		"The controller has asked the node for a restart, to attach or detach disks.",
		"Nothing: the restart begins, or another event says why not.",
	}
	EventRestartRefused = Event{
		"RestartRefused", true, ObjectNode,
		"A restart was not carried out. The message has the reason, mostly the node's own.",
		"Remove the reason. The restart is tried again after the cool-down.",
	}
	EventRestartHangs = Event{
		"RestartHangs", true, ObjectNode,
		"The guest has accepted the restart, and has not halted within `--restart-halt-timeout`.",
		"Look at the instance's console. Stop the instance if it hangs: it is then started again.",
	}
	EventRestartStuck = Event{
		"RestartStuck", true, ObjectNode,
		"A restart goes on for too long. Other instances may be restarted now.",
		"Check the node, as the message says.",
	}
	EventRestartNotStarted = Event{
		"RestartNotStarted", true, ObjectNode,
		"The rack does not start the stopped instance. The controller tries again.",
		"The message has the rack's reason. Make room on the rack, or ask its operator.",
	}
	EventRestartWaitsForDisk = Event{
		"RestartWaitsForDisk", true, ObjectNode,
		"The disks of the stopped instance cannot be changed or checked. 80 s after it stopped, it is started all the same.",
		"The message names the record or the disk. Until then the publish of that volume is refused.",
	}
	EventRestartNotBack = Event{
		"RestartNotBack", true, ObjectNode,
		"The instance runs again, and its node plugin has not reported back in time.",
		"Check the node: its plugin must run and reach the orchestrator.",
	}
	EventRestartNotUndrained = Event{
		"RestartNotUndrained",
		true,
		ObjectNode,
		"The restart is over, and the node still takes no workloads.",
		"Allow them: `kubectl uncordon NODE` or `nomad node eligibility -enable NODE`. Remove the mark of the " +
			"restart as [planned-restarts.md](../how-to/planned-restarts.md#change-the-mode) says. In Kubernetes apply " +
			"the manifests or the chart again afterwards.",
	}
	EventWaitsForRestart = Event{
		"WaitsForRestart", false, ObjectClaim,
		"A pod needs the volume, and the volume waits for a planned restart of the node. Only Kubernetes has this event.",
		"Nothing: the message says what the restart waits for.",
	}
	EventTokenExpires = Event{
		"TokenExpires", true, ObjectController,
		"A token of the rack's user expires within a week. Only Kubernetes has this event.",
		"Replace the token: [rotate-token.md](../how-to/rotate-token.md).",
	}
)

// Report is an event with what happened.
type Report struct {
	Event Event
	// Message is one line for an operator. While nothing changes it stays the same: a repetition is no new event.
	Message string
}

// SelfReporter publishes events about the plugin's own process, for an orchestrator that has such events.
type SelfReporter interface {
	// ReportSelf publishes an event of what the orchestrator runs the plugin in. It does nothing if the process has no
	// credentials for the orchestrator. It is idempotent and safe for concurrent use. It is best effort: an error is for
	// the log.
	ReportSelf(ctx context.Context, report Report) error
}

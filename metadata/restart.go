// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package metadata

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"strconv"
	"time"
)

// A planned restart (docs/explanation/racks-without-hotplug.md) needs messages between the controller, which decides on
// it, and the node plugin of the instance, which shuts its guest down from inside. The two share no network, but both
// can call the orchestrator. This second contract beside [Provider] carries the messages, in two halves.

// RestartState is how far the node plugin of an instance is with a planned restart.
type RestartState string

const (
	// RestartUnanswered means that the node plugin has not answered yet.
	RestartUnanswered RestartState = ""
	// RestartAccepted means that the guest is going down. It cannot be taken back.
	RestartAccepted RestartState = "accepted"
	// RestartRefused means that the guest stays up. Reason says why and what to do.
	RestartRefused RestartState = "refused"
	// RestartBack means that the guest has booted since it accepted, and that its node plugin serves again.
	RestartBack RestartState = "back"
)

// RestartReply is the reply of an instance's node plugin to the request for a planned restart.
type RestartReply struct {
	State RestartState
	// Reason is one line for an operator, with State RestartRefused.
	Reason string
	// Boot is the boot ID of the guest at the time of the reply (/proc/sys/kernel/random/boot_id). A node plugin that
	// reads another boot ID than its own knows that the guest has booted since.
	Boot string
}

// replyText is a reply as an orchestrator stores it.
type replyText struct {
	Restart string       `json:"restart"`
	State   RestartState `json:"state"`
	Reason  string       `json:"reason,omitempty"`
	Boot    string       `json:"boot,omitempty"`
}

// Text is the reply to a restart as one line, for [ParseRestartReply].
func (a RestartReply) Text(restartID string) string {
	text, err := json.Marshal(replyText{Restart: restartID, State: a.State, Reason: a.Reason, Boot: a.Boot})
	if err != nil {
		panic(err) // strings only
	}
	return string(text)
}

// ParseRestartReply returns the reply to a restart that a text holds. The result is the zero reply if the text is about
// another restart, or is no reply.
func ParseRestartReply(text, restartID string) RestartReply {
	var said replyText
	if err := json.Unmarshal([]byte(text), &said); err != nil || said.Restart != restartID {
		return RestartReply{}
	}
	switch said.State {
	case RestartAccepted, RestartRefused, RestartBack:
		return RestartReply{State: said.State, Reason: said.Reason, Boot: said.Boot}
	}
	return RestartReply{}
}

// restartIDBytes is the length of an ID: half is the time in seconds, half is random, both in hexadecimal digits.
const restartIDBytes = 16

// NewRestartID names a restart that is planned now.
func NewRestartID(now time.Time) string {
	return fmt.Sprintf("%08x%08x", uint32(now.Unix()), rand.Uint32())
}

// RestartPlannedAt is when the restart of an ID was planned, by the clock of the controller; false where the ID does
// not tell.
func RestartPlannedAt(restartID string) (time.Time, bool) {
	if len(restartID) != restartIDBytes {
		return time.Time{}, false
	}
	seconds, err := strconv.ParseUint(restartID[:restartIDBytes/2], 16, 32)
	return time.Unix(int64(seconds), 0), err == nil
}

// RestartRequester is the controller's half. The ID of a restart is never used twice, and has only a-z, 0-9 and '-'. A
// reply to another ID MUST be ignored. Every method is idempotent, safe for concurrent use, and ends with ctx. An error
// is one line for an operator, without secrets; after an error it is unknown whether the change was made.
type RestartRequester interface {
	// Request asks the node plugin of an instance to shut its guest down.
	Request(ctx context.Context, instanceID, restartID string) error
	// Reply returns the reply of the node plugin, or the zero reply if there is none yet.
	Reply(ctx context.Context, instanceID, restartID string) (RestartReply, error)
	// Withdraw takes the request with that ID back unless the node plugin has accepted it, and returns the reply. After
	// any reply other than [RestartAccepted] the guest does not go down for that ID any more.
	Withdraw(ctx context.Context, instanceID, restartID string) (RestartReply, error)
	// Forget removes the request and the reply of that ID once the restart is over. Those of another ID stay.
	Forget(ctx context.Context, instanceID, restartID string) error
	// Report publishes what happens to the node, as an event where the orchestrator has events. It is best effort.
	Report(ctx context.Context, instanceID string, report RestartReport) error
}

// RestartReport is what [RestartRequester.Report] publishes.
type RestartReport struct {
	// Problem says that an operator should look at the node.
	Problem bool
	// Reason is one word in CamelCase: "RestartPlanned", "RestartRefused", …
	Reason string
	// Message is one line for an operator.
	Message string
}

// Drainer is a further ability of a [RestartRequester], for an orchestrator that can move its work off a node first.
type Drainer interface {
	// Drain keeps new work away from the node of an instance, asks what works there to go, and says what is still
	// there: empty once all has gone. What belongs to the node itself, or merely waits for a volume there, stays and is
	// not named. It is called again until nothing is left.
	Drain(ctx context.Context, instanceID, restartID string) (left []string, err error)
	// Undrain lets new work come again, if it was this restart's Drain that kept it away.
	Undrain(ctx context.Context, instanceID, restartID string) error
}

// RestartListener is the node's half: the node plugin's own node, and no other. Methods are as those of
// [RestartRequester].
type RestartListener interface {
	// Requested returns the ID of the restart that the controller requests of this node, and the node's reply to it.
	// The ID is empty if none is requested.
	Requested(ctx context.Context) (restartID string, reply RestartReply, err error)
	// Changes returns a channel that receives soon after the call, and when what Requested returns may have changed,
	// until ctx ends. Several changes may be one. An orchestrator that does not tell of changes is a reason to receive
	// every few seconds.
	Changes(ctx context.Context) <-chan struct{}
	// Reply writes the node's reply. It is an error, and nothing is written, if this restart is not requested any more.
	Reply(ctx context.Context, restartID string, reply RestartReply) error
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package orchestrator

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"strconv"
	"time"
)

// For a planned restart (docs/explanation/racks-without-hotplug.md) the controller and the instance's node plugin
// exchange messages. The controller requests the restart; the node plugin shuts its guest down from inside. The two
// share no network, but both can call the orchestrator. The interfaces below carry the messages through it.

// RestartState is the state of a planned restart as the instance's node plugin reports it.
type RestartState string

const (
	// RestartUnanswered means that the node plugin has not answered yet.
	RestartUnanswered RestartState = ""
	// RestartAccepted means that the guest is going down. The request can no longer be withdrawn.
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
	// Boot is the guest's boot ID at the time of the reply (/proc/sys/kernel/random/boot_id). If it differs from the
	// current boot ID, the guest has booted since.
	Boot string
}

// replyText is a reply as an orchestrator stores it.
type replyText struct {
	Restart string       `json:"restart"`
	State   RestartState `json:"state"`
	Reason  string       `json:"reason,omitempty"`
	Boot    string       `json:"boot,omitempty"`
}

// Text returns the reply to a restart as one line, for [ParseRestartReply].
func (r RestartReply) Text(restartID string) string {
	text, err := json.Marshal(replyText{Restart: restartID, State: r.State, Reason: r.Reason, Boot: r.Boot})
	if err != nil {
		panic(err) // strings only
	}
	return string(text)
}

// ParseRestartReply returns the reply to a restart from the result of [RestartReply.Text]. It returns the zero reply if
// the text is the reply to another restart, or is no reply.
func ParseRestartReply(text, restartID string) RestartReply {
	var reply replyText
	if err := json.Unmarshal([]byte(text), &reply); err != nil || reply.Restart != restartID {
		return RestartReply{}
	}
	switch reply.State {
	case RestartAccepted, RestartRefused, RestartBack:
		return RestartReply{State: reply.State, Reason: reply.Reason, Boot: reply.Boot}
	}
	return RestartReply{}
}

// restartIDForm is the form of a restart's ID: the time in seconds and a random number, each as 8 hexadecimal digits in
// lower case. [NewRestartID] and [RestartPlannedAt] are the only code that knows it.
const restartIDForm = "%08x%08x"

// NewRestartID makes the ID of a restart that is planned now.
func NewRestartID(now time.Time) string {
	return fmt.Sprintf(restartIDForm, uint32(now.Unix()), rand.Uint32())
}

// RestartPlannedAt returns the time at which a restart was planned, by the controller's clock and in whole seconds. It
// returns false for every text that [NewRestartID] cannot return.
func RestartPlannedAt(restartID string) (time.Time, bool) {
	number, err := strconv.ParseUint(restartID, 16, 64)
	if err != nil || fmt.Sprintf(restartIDForm, uint32(number>>32), uint32(number)) != restartID {
		return time.Time{}, false
	}
	return time.Unix(int64(number>>32), 0), true
}

// RestartRequester is the controller's half. [NewRestartID] makes a restart's ID, which is never used again. A reply to
// another ID MUST be ignored. Every method is idempotent, safe for concurrent use, and returns when ctx ends. An
// error is one line for an operator, without secrets. After an error it is unknown whether the change was made.
type RestartRequester interface {
	// Request asks the node plugin of an instance to shut its guest down.
	Request(ctx context.Context, instanceID, restartID string) error
	// Reply returns the reply of the node plugin, or the zero reply if there is none yet.
	Reply(ctx context.Context, instanceID, restartID string) (RestartReply, error)
	// Withdraw withdraws the request with that ID unless the node plugin has accepted it, and returns the reply. If the
	// reply is not [RestartAccepted], the guest no longer goes down for that ID.
	Withdraw(ctx context.Context, instanceID, restartID string) (RestartReply, error)
	// Forget removes the request and the reply with that ID once the restart is over. It does not touch other IDs.
	Forget(ctx context.Context, instanceID, restartID string) error
	// Report publishes what happens to the node, as an event if the orchestrator has events. It is best effort.
	Report(ctx context.Context, instanceID string, report Report) error
}

// ClaimReporter is an orchestrator whose users claim volumes.
type ClaimReporter interface {
	// ReportClaim publishes why a volume waits, as an event of its claim. volume is the volume's name as the orchestrator
	// gave it, claim is namespace/name. Like Report it is best effort.
	ReportClaim(ctx context.Context, volume, claim string, report Report) error
}

// Drainer is an orchestrator that can move work off a node.
type Drainer interface {
	// Drain keeps new work away from the node of an instance, and requests that running work leaves. It returns the work
	// that is still there. Work that belongs to the node itself, or that only waits for a volume there, stays and is not
	// returned. The caller repeats Drain until nothing is left.
	Drain(ctx context.Context, instanceID, restartID string) (left []string, err error)
	// Undrain allows new work on the node again, if the Drain of this restart has kept it away.
	Undrain(ctx context.Context, instanceID, restartID string) error
}

// RestartListener is the node's half, for the node plugin's own node. What [RestartRequester] says about its methods
// holds here too.
type RestartListener interface {
	// Requested returns the ID of the restart that the controller requests of this node, and the node's reply to the
	// request. The ID is empty if no restart is requested.
	Requested(ctx context.Context) (restartID string, reply RestartReply, err error)
	// Changes returns a channel that receives soon after the call, and then when the result of Requested may have
	// changed, until ctx ends. Several changes can make one signal. If the orchestrator does not report changes, the
	// channel receives every few seconds.
	Changes(ctx context.Context) <-chan struct{}
	// Reply writes the node's reply. If this restart is no longer requested, it writes nothing and returns an error.
	Reply(ctx context.Context, restartID string, reply RestartReply) error
}

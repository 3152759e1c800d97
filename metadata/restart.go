package metadata

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"strconv"
	"time"
)

// A planned restart (docs/explanation/racks-without-hotplug.md) needs a word between the controller, which decides on it, and the node
// plugin of the instance, which shuts its guest down from inside. They share no network, but an orchestrator, which both may
// ask. What carries the word is a second contract beside [Provider], in two halves.

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

// RestartAnswer is what the node plugin of an instance says to a planned restart.
type RestartAnswer struct {
	State RestartState
	// Reason is one line for an operator, with State RestartRefused.
	Reason string
	// Boot is the boot ID of the guest that speaks (/proc/sys/kernel/random/boot_id): whoever reads of another one than its own
	// has booted since.
	Boot string
}

// saidText is how an answer is written where an orchestrator keeps texts.
type saidText struct {
	Restart string       `json:"restart"`
	State   RestartState `json:"state"`
	Reason  string       `json:"reason,omitempty"`
	Boot    string       `json:"boot,omitempty"`
}

// Text is an answer to a restart as one line, for [ParseRestartAnswer].
func (a RestartAnswer) Text(restartID string) string {
	text, err := json.Marshal(saidText{Restart: restartID, State: a.State, Reason: a.Reason, Boot: a.Boot})
	if err != nil {
		panic(err) // strings only
	}
	return string(text)
}

// ParseRestartAnswer is what a text says about a restart. One about another restart, or none at all, says nothing.
func ParseRestartAnswer(text, restartID string) RestartAnswer {
	var said saidText
	if err := json.Unmarshal([]byte(text), &said); err != nil || said.Restart != restartID {
		return RestartAnswer{}
	}
	switch said.State {
	case RestartAccepted, RestartRefused, RestartBack:
		return RestartAnswer{State: said.State, Reason: said.Reason, Boot: said.Boot}
	}
	return RestartAnswer{}
}

// restartIDBytes is the length of an ID: half is the time in seconds, half is random, both in hexadecimal digits.
const restartIDBytes = 16

// NewRestartID names a restart that is planned now.
func NewRestartID(now time.Time) string {
	return fmt.Sprintf("%08x%08x", uint32(now.Unix()), rand.Uint32())
}

// RestartPlannedAt is when the restart of an ID was planned, by the clock of the controller; false where the ID does not tell.
func RestartPlannedAt(restartID string) (time.Time, bool) {
	if len(restartID) != restartIDBytes {
		return time.Time{}, false
	}
	seconds, err := strconv.ParseUint(restartID[:restartIDBytes/2], 16, 32)
	return time.Unix(int64(seconds), 0), err == nil
}

// RestartAsker is the controller's half. A restart is named by an ID that is never used twice, of a-z, 0-9 and '-'; what was
// said about another ID counts as nothing. Every method is idempotent, safe for concurrent use, and ends with ctx. An error
// is one line for an operator, without secrets; whether anything was done is then unknown.
type RestartAsker interface {
	// Ask asks the node plugin of an instance to shut its guest down.
	Ask(ctx context.Context, instanceID, restartID string) error
	// Answer is what the node plugin has said.
	Answer(ctx context.Context, instanceID, restartID string) (RestartAnswer, error)
	// Withdraw takes the question with that ID back, unless the node plugin has accepted, and returns what it has said. After any
	// other answer than [RestartAccepted] the guest does not go down for that ID any more.
	Withdraw(ctx context.Context, instanceID, restartID string) (RestartAnswer, error)
	// Forget removes question and answer of that ID, once the restart is over; another ID's stay.
	Forget(ctx context.Context, instanceID, restartID string) error
	// Report tells those who watch the node what is going on with it: an event, where the orchestrator has such. It is
	// best effort.
	Report(ctx context.Context, instanceID string, report RestartReport) error
}

// RestartReport is told to those who watch a node.
type RestartReport struct {
	// Problem says that somebody should look at it.
	Problem bool
	// Reason is one word in CamelCase: "RestartPlanned", "RestartRefused", …
	Reason string
	// Message is one line for an operator.
	Message string
}

// Drainer is what a [RestartAsker] can do besides whose orchestrator can take its work off a node first.
type Drainer interface {
	// Drain keeps new work away from the node of an instance, asks what works there to go, and says what is still there: empty
	// once all has gone. What belongs to the node itself, or merely waits for a volume there, stays and is not named. It is
	// called again until nothing is left.
	Drain(ctx context.Context, instanceID, restartID string) (left []string, err error)
	// Undrain lets new work come again, if it was this restart's Drain that kept it away.
	Undrain(ctx context.Context, instanceID, restartID string) error
}

// RestartListener is the node's half: the node plugin's own node, and no other. Methods are as those of [RestartAsker].
type RestartListener interface {
	// Wanted is the ID of the restart that the controller asks of this node, empty if none, and what this node has said to it.
	Wanted(ctx context.Context) (restartID string, said RestartAnswer, err error)
	// Say answers. It is an error, and nothing is said, if another restart or none is asked for by now.
	Say(ctx context.Context, restartID string, answer RestartAnswer) error
}

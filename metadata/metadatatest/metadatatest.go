// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package metadatatest is the conformance suite for [metadata.Provider]: what
// the contract says, as tests that every provider runs.
//
// A provider's test writes a [Harness], which builds the provider and acts for
// the outside world that it asks (a file, an API server, firmware below a root
// path), and calls [Run]:
//
//	func TestConformance(t *testing.T) {
//		metadatatest.Run(t, func(t *testing.T) metadatatest.Harness { … })
//	}
//
// The suite judges every answer and every error that it gets in any case:
// answers are whole and canonical, errors are of one kind, one line, with a next
// step, without a secret. The cases then say which answer it must be.
package metadatatest

import (
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
)

// Harness is one provider and the world around it. Each case gets a new one, in
// which the source works and holds nothing.
type Harness struct {
	// New builds a provider of this source, sometimes while it is broken.
	New func() metadata.Provider
	// Set makes the source hold this from now on, all of it in one step. It,
	// Break and Repair return when what they do has taken effect, and may be
	// called from any goroutine: they report with t.Error, not t.Fatal.
	Set func(Content)
	// Break breaks the source in one way until Repair, which is only called
	// after it. What was Set stays.
	Break  func(Fault)
	Repair func()
	// Secrets are texts that the provider handles or the source holds and that
	// must never show: a token, a password beside the identity.
	Secrets []string
	// Cannot says what this source cannot be made to do, and why. The cases
	// that need it are left out, and say so.
	Cannot map[Ability]string
}

// Content is what the source says about this instance.
type Content struct {
	// ID and Rack are put into the source as they are, right or wrong. Nil
	// stands for a source that does not mention it.
	ID, Rack *string
}

// Text is a pointer to s.
func Text(s string) *string { return &s }

// Fault is a way in which a source fails.
type Fault string

const (
	// Down means that the source is not there (no file, connection refused).
	// Waiting is right: [metadata.ErrNotReady].
	Down Fault = "down"
	// Slow means that the source does not answer until it is repaired.
	Slow Fault = "slow"
	// Denied means that the source rejects our questions: [metadata.ErrInvalid].
	Denied Fault = "denied"
)

// Ability is something that some sources cannot do.
type Ability string

const (
	// CanDown means that the source can fail as in [Down].
	CanDown Ability = "be down"
	// CanSlow means that the source can fail as in [Slow].
	CanSlow Ability = "be slow"
	// CanDeny means that the source can fail as in [Denied].
	CanDeny Ability = "deny access"
	// CanKnowRack means that the source may say which rack this is.
	CanKnowRack Ability = "know the rack"
	// CanHoldAnyText means that the source takes any text for an ID and rack.
	CanHoldAnyText Ability = "hold any text"
	// CanChange means that a provider which has given one answer sees a new one.
	CanChange Ability = "change"
	// CanKnowParts means that the provider is a [metadata.PartialProvider].
	CanKnowParts Ability = "know parts"
	// CanHoldSecrets means that there is a secret which could leak: Harness.Secrets has it.
	CanHoldSecrets Ability = "hold secrets"
)

var abilities = []Ability{
	CanDown,
	CanSlow,
	CanDeny,
	CanKnowRack,
	CanHoldAnyText,
	CanChange,
	CanKnowParts,
	CanHoldSecrets,
}

// answerTimeout is how long a provider may take to notice that its context has
// ended, and how long one that is not slow may take to answer.
const (
	soon          = 2 * time.Second
	answerTimeout = 10 * time.Second
)

// Run runs the suite.
func Run(t *testing.T, newHarness func(t *testing.T) Harness) {
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			h := newHarness(t)
			for _, problem := range c.check(h, soon) {
				t.Error(problem)
			}
			if why := c.leftOut(h); why != "" {
				t.Log("left out: " + why)
			}
		})
	}
}

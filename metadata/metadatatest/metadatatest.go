// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package metadatatest is the conformance suite for [metadata.Provider]. Every provider runs it.
//
// A provider's test writes a [Harness], which builds the provider and simulates its source (a file, an API server,
// firmware below a root path). Then it calls [Run]:
//
//	func TestConformance(t *testing.T) {
//		metadatatest.Run(t, func(t *testing.T) metadatatest.Harness { … })
//	}
//
// The suite checks every answer and every error against the contract: answers are complete and canonical; errors are of
// one kind, on one line, with a next step and without secrets. Each case also checks for the expected answer.
package metadatatest

import (
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
)

// Harness is a provider and its simulated source. Each case gets a new Harness, whose source works and is empty.
type Harness struct {
	// New builds a provider of this source, sometimes while the source is broken.
	New func() metadata.Provider
	// Set replaces the content of the source in one step. Set, Break and Repair return when they have taken effect. They
	// may be called from any goroutine, so they use t.Error, not t.Fatal.
	Set func(Content)
	// Break breaks the source in one way until Repair. The content stays. Repair is called only after Break.
	Break  func(Fault)
	Repair func()
	// Secrets are texts that must appear in no error: a token that the provider uses, a password beside the identity.
	Secrets []string
	// Cannot says what this source cannot be made to do, and why. The cases that need the ability are skipped with that
	// reason in the test's log.
	Cannot map[Ability]string
}

// Content is the content of the source about this instance.
type Content struct {
	// ID and Rack are written into the source as they are, valid or not. Nil means that the source does not mention the
	// value.
	ID, Rack *string
}

// Text is a pointer to s.
func Text(s string) *string { return &s }

// Fault is a way in which a source fails.
type Fault string

const (
	// Down means that the source does not exist (no file, connection refused): [metadata.ErrNotReady].
	Down Fault = "down"
	// Slow means that the source does not answer until it is repaired.
	Slow Fault = "slow"
	// Denied means that the source denies access: [metadata.ErrInvalid].
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
	// CanKnowRack means that the source can name the rack.
	CanKnowRack Ability = "know the rack"
	// CanHoldAnyText means that the source can hold any text as ID and rack.
	CanHoldAnyText Ability = "hold any text"
	// CanChange means that a provider that has answered once sees a change of the source.
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

const (
	// soon is how long a provider may take to return after its context has ended.
	soon = 2 * time.Second
	// answerTimeout is how long a provider may take to answer if its source is not slow.
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

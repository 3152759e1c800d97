// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package orchestratortest tests the adapters of orchestrators: what [orchestrator.RestartRequester] and
// [orchestrator.RestartListener] promise.
package orchestratortest

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata/metadatatest"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
)

// RestartHarness is a simulated orchestrator, and the two halves that exchange messages through it. Each case gets a
// new RestartHarness, whose orchestrator works and holds no request.
type RestartHarness struct {
	// NewRequester and NewListener build the two halves. They are called again to simulate a restart of the plugin.
	NewRequester func() orchestrator.RestartRequester
	NewListener  func() orchestrator.RestartListener
	// Instance is the listener's instance.
	Instance string
	// Other is a second instance with a node plugin. NewOther builds its listener.
	Other    string
	NewOther func() orchestrator.RestartListener
	// Break breaks the orchestrator in one way for both halves until Repair. Repair is called only after Break.
	Break  func(metadatatest.Fault)
	Repair func()
	// Secrets are texts that must appear in no error.
	Secrets []string
	// Cannot is like [metadatatest.Harness.Cannot], for the abilities CanDown, CanSlow, CanDeny, CanHaveTwoNodes and
	// CanReportChanges.
	Cannot map[metadatatest.Ability]string
}

const (
	// CanHaveTwoNodes means that the orchestrator can have a second node.
	CanHaveTwoNodes metadatatest.Ability = "have two nodes"
	// CanReportChanges means that the orchestrator reports changes, so that the listener does not poll.
	CanReportChanges metadatatest.Ability = "report changes"
)

// RunRestart runs the suite for [orchestrator.RestartRequester] and [orchestrator.RestartListener].
func RunRestart(t *testing.T, newHarness func(t *testing.T) RestartHarness) {
	for _, c := range restartCases {
		t.Run(c.name, func(t *testing.T) {
			h := newHarness(t)
			for _, need := range c.needs {
				if why := h.Cannot[need]; why != "" {
					t.Logf("left out: the orchestrator cannot %s: %s", need, why)
					return
				}
			}
			for _, problem := range c.check(h, soon, restartTimeout) {
				t.Error(problem)
			}
		})
	}
}

type restartCase struct {
	name  string
	needs []metadatatest.Ability
	run   func(*restartProbe)
}

// check runs the case. soon is how long a call may go on after its context has ended, and signalTimeout how long a
// signal of a change may take.
func (c restartCase) check(h RestartHarness, soon, signalTimeout time.Duration) []string {
	p := &restartProbe{
		RestartHarness: h, soon: soon, signalTimeout: signalTimeout,
		requester: h.NewRequester(), listener: h.NewListener(),
	}
	c.run(p)
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.problems
}

// The IDs of two restarts, and two boot IDs of the guest.
const (
	restartA, restartB = "7-prod-0001", "7-prod-0002"
	bootA, bootB       = "0f9c5a0e-8c1f-4c6b-9f58-5d2f0b6f2a11", "5a2d7c34-1b7e-4f0a-8d7f-8b1c2d3e4f50"
	// unknown is no instance of the orchestrator.
	unknown = "c0ffee00-1234-4abc-8def-00000000c0de"
)

var (
	accepted = orchestrator.RestartReply{State: orchestrator.RestartAccepted, Boot: bootA}
	back     = orchestrator.RestartReply{State: orchestrator.RestartBack, Boot: bootB}
	refused  = orchestrator.RestartReply{
		State:  orchestrator.RestartRefused,
		Reason: `a "block" inhibitor of dpkg (${x}, <é>, 100%): wait until it has gone`,
		Boot:   bootA,
	}
	nothing = orchestrator.RestartReply{}
)

var restartCases = []restartCase{
	{name: "no request", run: func(p *restartProbe) {
		p.wantRequested("at first", "", nothing)
		p.wantReply("at first", restartA, nothing)
	}},
	{name: "request", run: func(p *restartProbe) {
		p.request(restartA)
		p.wantRequested("asked", restartA, nothing)
		p.wantReply("asked", restartA, nothing)
		p.request(restartA)
		p.wantRequested("asked twice", restartA, nothing)
	}},
	{name: "changes", needs: []metadatatest.Ability{CanReportChanges}, run: func(p *restartProbe) {
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		changes := p.listener.Changes(ctx)
		p.signalled("at first", changes, "")
		p.request(restartA)
		p.signalled("asked", changes, restartA)
		p.withdraw(restartA, nothing)
		p.signalled("withdrawn", changes, "")
	}},
	{name: "accepted, and back", run: func(p *restartProbe) {
		p.request(restartA)
		p.reply(restartA, accepted)
		p.wantReply("accepted", restartA, accepted)
		p.wantRequested("accepted", restartA, accepted)
		p.request(restartA)
		p.wantReply("asked again", restartA, accepted)
		// Both plugins restart. The messages are in the orchestrator.
		p.requester, p.listener = p.NewRequester(), p.NewListener()
		p.wantRequested("after a restart of the plugin", restartA, accepted)
		p.reply(restartA, back)
		p.wantReply("back", restartA, back)
		p.reply(restartA, back)
		p.wantReply("said twice", restartA, back)
		p.withdraw(restartA, back)
		p.wantRequested("withdrawn", "", nothing)
		p.wantReply("withdrawn", restartA, nothing)
	}},
	{name: "withdrawn after it was accepted", run: func(p *restartProbe) {
		p.request(restartA)
		p.reply(restartA, accepted)
		p.withdraw(restartA, accepted)
		p.withdraw(restartA, accepted)
		p.wantRequested("not withdrawn", restartA, accepted)
		p.reply(restartA, back)
		p.wantReply("back", restartA, back)
	}},
	{name: "forgotten", run: func(p *restartProbe) {
		p.forget(restartA)
		p.request(restartA)
		p.reply(restartA, accepted)
		p.forget(restartB)
		p.wantRequested("another one forgotten", restartA, accepted)
		p.forget(restartA)
		p.forget(restartA)
		p.wantRequested("forgotten", "", nothing)
		p.wantReply("forgotten", restartA, nothing)
		p.mustNotReply(restartA, back)
	}},
	{name: "refused", run: func(p *restartProbe) {
		p.request(restartA)
		p.reply(restartA, refused)
		p.wantReply("refused", restartA, refused)
		p.wantRequested("refused", restartA, refused)
	}},
	{name: "another restart", run: func(p *restartProbe) {
		p.request(restartA)
		p.reply(restartA, refused)
		p.request(restartB)
		p.wantRequested("asked for the next", restartB, nothing)
		p.wantReply("of the next", restartB, nothing)
		p.mustNotReply(restartA, refused)
		p.reply(restartB, refused)
		p.wantReply("of the next", restartB, refused)
	}},
	{name: "reply without a request", run: func(p *restartProbe) {
		p.mustNotReply(restartA, accepted)
		p.wantReply("never asked", restartA, nothing)
		p.request(restartB)
		p.mustNotReply(restartA, accepted)
		p.wantRequested("after an answer to another restart", restartB, nothing)
		p.wantReply("after an answer to another restart", restartB, nothing)
	}},
	{name: "withdrawn", run: func(p *restartProbe) {
		p.withdraw(restartA, nothing)
		p.request(restartA)
		p.withdraw(restartB, nothing)
		p.wantRequested("another one withdrawn", restartA, nothing)
		p.withdraw(restartA, nothing)
		p.withdraw(restartA, nothing)
		p.wantRequested("withdrawn", "", nothing)
		p.mustNotReply(restartA, accepted)
		p.wantReply("withdrawn", restartA, nothing)
		p.request(restartB)
		p.reply(restartB, refused)
		p.withdraw(restartA, nothing)
		p.wantReply("another one withdrawn", restartB, refused)
		p.withdraw(restartB, refused)
		p.wantRequested("withdrawn", "", nothing)
	}},
	{name: "withdrawn while it is answered", run: withdrawWhileAnswered},
	{name: "two nodes", needs: []metadatatest.Ability{CanHaveTwoNodes}, run: func(p *restartProbe) {
		first, instance := p.listener, p.Instance
		p.request(restartA)
		p.listener, p.Instance = p.NewOther(), p.Other
		p.wantRequested("on the other node", "", nothing)
		p.mustNotReply(restartA, accepted)
		p.wantReply("of the other node", restartA, nothing)
		p.request(restartB)
		p.reply(restartB, refused)
		p.listener, p.Instance = first, instance
		p.wantRequested("on the first node", restartA, nothing)
		p.wantReply("of the first node", restartA, nothing)
		p.withdraw(restartA, nothing)
		p.Instance = p.Other
		p.wantReply("of the other node", restartB, refused)
	}},
	{name: "unknown instance", run: func(p *restartProbe) {
		p.Instance = unknown
		p.mustFail(
			"unknown instance",
			func(ctx context.Context) error { return p.requester.Request(ctx, unknown, restartA) },
		)
		p.mustFail(
			"unknown instance",
			func(ctx context.Context) error { _, err := p.requester.Reply(ctx, unknown, restartA); return err },
		)
		p.wantRequested("asked of another", "", nothing)
	}},
	{name: "report", run: func(p *restartProbe) {
		for range 2 {
			p.must("report", func(ctx context.Context) error {
				return p.requester.Report(
					ctx,
					p.Instance,
					orchestrator.Report{Event: orchestrator.EventRestartRefused, Message: refused.Reason},
				)
			})
		}
	}},
	{
		name:  "down, then up",
		needs: []metadatatest.Ability{metadatatest.CanDown},
		run:   func(p *restartProbe) { brokenThenRepaired(p, metadatatest.Down) },
	},
	{
		name:  "denied, then granted",
		needs: []metadatatest.Ability{metadatatest.CanDeny},
		run:   func(p *restartProbe) { brokenThenRepaired(p, metadatatest.Denied) },
	},
	{name: "slow", needs: []metadatatest.Ability{metadatatest.CanSlow}, run: func(p *restartProbe) {
		p.request(restartA)
		p.Break(metadatatest.Slow)
		for what, call := range p.calls() {
			ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
			if err := p.checked(ctx, call); err == nil {
				p.failf("%s: answered although its context ended first", what)
			} else if !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, errStuck) {
				p.failf("%s: error %q, want one that wraps the context's", what, err)
			}
			cancel()
		}
		p.Repair()
		// The cancelled calls may still have had an effect.
		p.must("Requested after the repair", p.calls()["Requested"])
	}},
}

// withdrawWhileAnswered checks that both halves agree on which of them was first.
func withdrawWhileAnswered(p *restartProbe) {
	for round := range 10 {
		id := fmt.Sprintf("%s-%d", restartA, round)
		p.request(id)
		said := make(chan error, 1)
		go func() {
			ctx, cancel := context.WithTimeout(context.Background(), restartTimeout)
			defer cancel()
			said <- p.listener.Reply(ctx, id, accepted)
		}()
		var answer orchestrator.RestartReply
		p.must("withdraw "+id, func(ctx context.Context) (err error) {
			answer, err = p.requester.Withdraw(ctx, p.Instance, id)
			return err
		})
		err := <-said
		switch {
		case answer == accepted && err == nil:
			p.wantRequested("not withdrawn in time", id, accepted)
			p.forget(id)
		case answer == nothing && err != nil:
			p.wantRequested("withdrawn in time", "", nothing)
			p.mustNotReply(id, accepted)
			p.wantReply("withdrawn in time", id, nothing)
		default:
			p.failf("Withdraw returned the reply %+v, and the node's Reply returned %v", answer, err)
			p.forget(id)
		}
	}
}

// brokenThenRepaired checks that every call fails while the orchestrator is broken, and that nothing is lost.
func brokenThenRepaired(p *restartProbe, fault metadatatest.Fault) {
	p.request(restartA)
	p.reply(restartA, refused)
	p.Break(fault)
	for what, call := range p.calls() {
		p.mustFail(what+" of an orchestrator that is "+string(fault), call)
	}
	p.Repair()
	p.wantRequested("repaired", restartA, refused)
	p.wantReply("repaired", restartA, refused)
}

// restartProbe uses both halves and collects problems.
type restartProbe struct {
	RestartHarness
	requester orchestrator.RestartRequester
	listener  orchestrator.RestartListener

	soon, signalTimeout time.Duration

	mu       sync.Mutex
	problems []string
}

// restartTimeout is how long a call may take in a working orchestrator. It may need several machines.
const restartTimeout = 30 * time.Second

// soon is how long a call may take to return after its context has ended.
const soon = 2 * time.Second

var errStuck = errors.New("the call did not return")

func (p *restartProbe) failf(format string, args ...any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.problems = append(p.problems, fmt.Sprintf(format, args...))
}

// signalled waits for a signal of changes after which this restart is requested.
func (p *restartProbe) signalled(when string, changes <-chan struct{}, want string) {
	for late := time.After(p.signalTimeout); ; {
		select {
		case <-changes:
		case <-late:
			p.failf("%s: no signal after which %q is requested", when, want)
			return
		}
		got := ""
		p.must("Requested, "+when, func(ctx context.Context) (err error) {
			got, _, err = p.listener.Requested(ctx)
			return err
		})
		if got == want {
			return
		}
	}
}

// calls are all methods of both halves.
func (p *restartProbe) calls() map[string]func(context.Context) error {
	return map[string]func(context.Context) error{
		"Request":  func(ctx context.Context) error { return p.requester.Request(ctx, p.Instance, restartA) },
		"Reply":    func(ctx context.Context) error { _, err := p.requester.Reply(ctx, p.Instance, restartA); return err },
		"Withdraw": func(ctx context.Context) error { _, err := p.requester.Withdraw(ctx, p.Instance, restartA); return err },
		"Forget":   func(ctx context.Context) error { return p.requester.Forget(ctx, p.Instance, restartA) },
		"Report": func(ctx context.Context) error {
			return p.requester.Report(ctx, p.Instance, orchestrator.Report{Event: orchestrator.EventRestartPlanned})
		},
		"Requested":      func(ctx context.Context) error { _, _, err := p.listener.Requested(ctx); return err },
		"Listener.Reply": func(ctx context.Context) error { return p.listener.Reply(ctx, restartA, refused) },
	}
}

// checked calls once and checks the error against the contract. After ctx has ended it waits no longer than soon.
func (p *restartProbe) checked(ctx context.Context, call func(context.Context) error) error {
	done := make(chan error, 1)
	go func() { done <- call(ctx) }()
	var err error
	select {
	case err = <-done:
	case <-ctx.Done():
		late := time.NewTimer(p.soon)
		defer late.Stop()
		select {
		case err = <-done:
		case <-late.C:
			p.failf("still blocked %v after its context ended", p.soon)
			return errStuck
		}
	}
	if err == nil {
		return nil
	}
	text := err.Error()
	for _, secret := range p.Secrets {
		if strings.Contains(text, secret) {
			p.failf("the error shows a secret: %s", strings.ReplaceAll(text, secret, "<SECRET>"))
		}
	}
	if strings.ContainsFunc(text, unicode.IsControl) || strings.TrimSpace(text) == "" {
		p.failf("the error is not one line of text: %q", text)
	}
	return err
}

func (p *restartProbe) must(what string, call func(context.Context) error) {
	ctx, cancel := context.WithTimeout(context.Background(), restartTimeout)
	defer cancel()
	if err := p.checked(ctx, call); err != nil {
		p.failf("%s: %v", what, err)
	}
}

func (p *restartProbe) mustFail(what string, call func(context.Context) error) {
	ctx, cancel := context.WithTimeout(context.Background(), restartTimeout)
	defer cancel()
	if err := p.checked(ctx, call); err == nil {
		p.failf("%s: no error", what)
	} else if errors.Is(err, context.DeadlineExceeded) {
		p.failf("%s: no answer: %v", what, err)
	}
}

func (p *restartProbe) request(id string) {
	p.must("request "+id, func(ctx context.Context) error { return p.requester.Request(ctx, p.Instance, id) })
}

// withdraw withdraws a request, and expects this reply.
func (p *restartProbe) withdraw(id string, said orchestrator.RestartReply) {
	p.must("withdraw "+id, func(ctx context.Context) error {
		got, err := p.requester.Withdraw(ctx, p.Instance, id)
		if err == nil && got != said {
			p.failf("Withdraw of %s returned %+v, want %+v", id, got, said)
		}
		return err
	})
}

func (p *restartProbe) forget(id string) {
	p.must("forget "+id, func(ctx context.Context) error { return p.requester.Forget(ctx, p.Instance, id) })
}

func (p *restartProbe) reply(id string, answer orchestrator.RestartReply) {
	p.must(
		fmt.Sprintf("reply %q to %s", answer.State, id),
		func(ctx context.Context) error { return p.listener.Reply(ctx, id, answer) },
	)
}

func (p *restartProbe) mustNotReply(id string, answer orchestrator.RestartReply) {
	p.mustFail(
		fmt.Sprintf("reply %q to %s, which is not requested", answer.State, id),
		func(ctx context.Context) error { return p.listener.Reply(ctx, id, answer) },
	)
}

// wantRequested expects that the node plugin reads this request, and this reply to it.
func (p *restartProbe) wantRequested(when, id string, said orchestrator.RestartReply) {
	p.must("Requested", func(ctx context.Context) error {
		gotID, got, err := p.listener.Requested(ctx)
		if err == nil && (gotID != id || got != said) {
			p.failf("%s: requested is %q with the reply %+v; want %q, %+v", when, gotID, got, id, said)
		}
		return err
	})
}

// wantReply expects that the controller reads this reply.
func (p *restartProbe) wantReply(when, id string, want orchestrator.RestartReply) {
	p.must("Reply", func(ctx context.Context) error {
		got, err := p.requester.Reply(ctx, p.Instance, id)
		if err == nil && got != want {
			p.failf("%s: the reply to %s is %+v, want %+v", when, id, got, want)
		}
		return err
	})
}

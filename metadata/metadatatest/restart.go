// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package metadatatest

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
)

// RestartHarness is an orchestrator that carries the word of planned restarts, with a node whose plugin listens. Each case gets
// a new one, in which the orchestrator works and nothing is asked for.
type RestartHarness struct {
	// NewRequester and NewListener build the two halves, anew after a restart of the plugin.
	NewRequester func() metadata.RestartRequester
	NewListener  func() metadata.RestartListener
	// Instance is the listener's.
	Instance string
	// Other is an instance with a node plugin too, and NewOther its listener.
	Other    string
	NewOther func() metadata.RestartListener
	// Break breaks the orchestrator in one way for both halves until Repair, which is only called after it.
	Break  func(Fault)
	Repair func()
	// Secrets are texts that must never show.
	Secrets []string
	// Cannot is as in [Harness]; of its abilities CanDown, CanSlow, CanDeny, CanBeTwo and CanTell matter here.
	Cannot map[Ability]string
}

const (
	// CanBeTwo means that there can be a second node.
	CanBeTwo Ability = "be two"
	// CanTell means that the orchestrator tells of changes, so that nothing has to be asked every few seconds.
	CanTell Ability = "tell of changes"
)

// RunRestart runs the suite for [metadata.RestartRequester] and [metadata.RestartListener].
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
			for _, problem := range c.check(h, soon) {
				t.Error(problem)
			}
		})
	}
}

type restartCase struct {
	name  string
	needs []Ability
	run   func(*restartProbe)
}

func (c restartCase) check(h RestartHarness, soon time.Duration) []string {
	p := &restartProbe{RestartHarness: h, soon: soon, requester: h.NewRequester(), listener: h.NewListener()}
	c.run(p)
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.problems
}

// Two restarts, and what a guest says that was booted once, and twice.
const (
	restartA, restartB = "7-prod-0001", "7-prod-0002"
	bootA, bootB       = "0f9c5a0e-8c1f-4c6b-9f58-5d2f0b6f2a11", "5a2d7c34-1b7e-4f0a-8d7f-8b1c2d3e4f50"
	// unknown is no instance of the orchestrator.
	unknown = "c0ffee00-1234-4abc-8def-00000000c0de"
)

var (
	accepted = metadata.RestartReply{State: metadata.RestartAccepted, Boot: bootA}
	back     = metadata.RestartReply{State: metadata.RestartBack, Boot: bootB}
	refused  = metadata.RestartReply{
		State:  metadata.RestartRefused,
		Reason: `a "block" inhibitor of dpkg (${x}, <é>, 100%): wait until it has gone`,
		Boot:   bootA,
	}
	nothing = metadata.RestartReply{}
)

var restartCases = []restartCase{
	{name: "nobody asks", run: func(p *restartProbe) {
		p.wanted("at first", "", nothing)
		p.answer("at first", restartA, nothing)
	}},
	{name: "asked", run: func(p *restartProbe) {
		p.ask(restartA)
		p.wanted("asked", restartA, nothing)
		p.answer("asked", restartA, nothing)
		p.ask(restartA)
		p.wanted("asked twice", restartA, nothing)
	}},
	{name: "changes", needs: []Ability{CanTell}, run: func(p *restartProbe) {
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		changes := p.listener.Changes(ctx)
		p.signalled("at first", changes, "")
		p.ask(restartA)
		p.signalled("asked", changes, restartA)
		p.withdraw(restartA, nothing)
		p.signalled("withdrawn", changes, "")
	}},
	{name: "accepted, and back", run: func(p *restartProbe) {
		p.ask(restartA)
		p.say(restartA, accepted)
		p.answer("accepted", restartA, accepted)
		p.wanted("accepted", restartA, accepted)
		p.ask(restartA)
		p.answer("asked again", restartA, accepted)
		// Both plugins start anew: what was said does not depend on them.
		p.requester, p.listener = p.NewRequester(), p.NewListener()
		p.wanted("after a restart of the plugin", restartA, accepted)
		p.say(restartA, back)
		p.answer("back", restartA, back)
		p.say(restartA, back)
		p.answer("said twice", restartA, back)
		p.withdraw(restartA, back)
		p.wanted("withdrawn", "", nothing)
		p.answer("withdrawn", restartA, nothing)
	}},
	{name: "accepted, and not to be withdrawn", run: func(p *restartProbe) {
		p.ask(restartA)
		p.say(restartA, accepted)
		p.withdraw(restartA, accepted)
		p.withdraw(restartA, accepted)
		p.wanted("not withdrawn", restartA, accepted)
		p.say(restartA, back)
		p.answer("back", restartA, back)
	}},
	{name: "forgotten", run: func(p *restartProbe) {
		p.forget(restartA)
		p.ask(restartA)
		p.say(restartA, accepted)
		p.forget(restartB)
		p.wanted("another one forgotten", restartA, accepted)
		p.forget(restartA)
		p.forget(restartA)
		p.wanted("forgotten", "", nothing)
		p.answer("forgotten", restartA, nothing)
		p.mustNotSay(restartA, back)
	}},
	{name: "refused", run: func(p *restartProbe) {
		p.ask(restartA)
		p.say(restartA, refused)
		p.answer("refused", restartA, refused)
		p.wanted("refused", restartA, refused)
	}},
	{name: "another restart", run: func(p *restartProbe) {
		p.ask(restartA)
		p.say(restartA, refused)
		p.ask(restartB)
		p.wanted("asked for the next", restartB, nothing)
		p.answer("of the next", restartB, nothing)
		p.mustNotSay(restartA, refused)
		p.say(restartB, refused)
		p.answer("of the next", restartB, refused)
	}},
	{name: "answers to nobody", run: func(p *restartProbe) {
		p.mustNotSay(restartA, accepted)
		p.answer("never asked", restartA, nothing)
		p.ask(restartB)
		p.mustNotSay(restartA, accepted)
		p.wanted("after an answer to another restart", restartB, nothing)
		p.answer("after an answer to another restart", restartB, nothing)
	}},
	{name: "withdrawn", run: func(p *restartProbe) {
		p.withdraw(restartA, nothing)
		p.ask(restartA)
		p.withdraw(restartB, nothing)
		p.wanted("another one withdrawn", restartA, nothing)
		p.withdraw(restartA, nothing)
		p.withdraw(restartA, nothing)
		p.wanted("withdrawn", "", nothing)
		p.mustNotSay(restartA, accepted)
		p.answer("withdrawn", restartA, nothing)
		p.ask(restartB)
		p.say(restartB, refused)
		p.withdraw(restartA, nothing)
		p.answer("another one withdrawn", restartB, refused)
		p.withdraw(restartB, refused)
		p.wanted("withdrawn", "", nothing)
	}},
	{name: "withdrawn while it is answered", run: withdrawWhileAnswered},
	{name: "two nodes", needs: []Ability{CanBeTwo}, run: func(p *restartProbe) {
		first, instance := p.listener, p.Instance
		p.ask(restartA)
		p.listener, p.Instance = p.NewOther(), p.Other
		p.wanted("on the other node", "", nothing)
		p.mustNotSay(restartA, accepted)
		p.answer("of the other node", restartA, nothing)
		p.ask(restartB)
		p.say(restartB, refused)
		p.listener, p.Instance = first, instance
		p.wanted("on the first node", restartA, nothing)
		p.answer("of the first node", restartA, nothing)
		p.withdraw(restartA, nothing)
		p.Instance = p.Other
		p.answer("of the other node", restartB, refused)
	}},
	{name: "unknown instance", run: func(p *restartProbe) {
		p.Instance = unknown
		p.mustFail(
			"of an instance that is not there",
			func(ctx context.Context) error { return p.requester.Request(ctx, unknown, restartA) },
		)
		p.mustFail(
			"of an instance that is not there",
			func(ctx context.Context) error { _, err := p.requester.Reply(ctx, unknown, restartA); return err },
		)
		p.wanted("asked of another", "", nothing)
	}},
	{name: "report", run: func(p *restartProbe) {
		for range 2 {
			p.must("report", func(ctx context.Context) error {
				return p.requester.Report(
					ctx,
					p.Instance,
					metadata.RestartReport{Problem: true, Reason: "RestartRefused", Message: refused.Reason},
				)
			})
		}
	}},
	{name: "down, then up", needs: []Ability{CanDown}, run: func(p *restartProbe) { brokenThenRepaired(p, Down) }},
	{
		name:  "denied, then granted",
		needs: []Ability{CanDeny},
		run:   func(p *restartProbe) { brokenThenRepaired(p, Denied) },
	},
	{name: "slow", needs: []Ability{CanSlow}, run: func(p *restartProbe) {
		p.ask(restartA)
		p.Break(Slow)
		for what, call := range p.calls() {
			ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
			if err := p.judged(ctx, call); err == nil {
				p.failf("%s: answered although its context ended first", what)
			} else if !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, errStuck) {
				p.failf("%s: error %q, want one that wraps the context's", what, err)
			}
			cancel()
		}
		p.Repair()
		// What was given up may have been done all the same.
		p.must("what is wanted once it is repaired", p.calls()["Requested"])
	}},
}

// withdrawWhileAnswered: both halves come to the same view of who was first.
func withdrawWhileAnswered(p *restartProbe) {
	for round := range 10 {
		id := fmt.Sprintf("%s-%d", restartA, round)
		p.ask(id)
		said := make(chan error, 1)
		go func() {
			ctx, cancel := context.WithTimeout(context.Background(), restartPatience)
			defer cancel()
			said <- p.listener.Reply(ctx, id, accepted)
		}()
		var answer metadata.RestartReply
		p.must("withdraw "+id, func(ctx context.Context) (err error) {
			answer, err = p.requester.Withdraw(ctx, p.Instance, id)
			return err
		})
		err := <-said
		switch {
		case answer == accepted && err == nil:
			p.wanted("not withdrawn in time", id, accepted)
			p.forget(id)
		case answer == nothing && err != nil:
			p.wanted("withdrawn in time", "", nothing)
			p.mustNotSay(id, accepted)
			p.answer("withdrawn in time", id, nothing)
		default:
			p.failf("the controller has withdrawn a restart to which was said %+v, and the node's answer to it: %v", answer, err)
			p.forget(id)
		}
	}
}

// brokenThenRepaired: nothing is made up while the orchestrator cannot be asked, and nothing is lost.
func brokenThenRepaired(p *restartProbe, fault Fault) {
	p.ask(restartA)
	p.say(restartA, refused)
	p.Break(fault)
	for what, call := range p.calls() {
		p.mustFail(what+" of an orchestrator that is "+string(fault), call)
	}
	p.Repair()
	p.wanted("repaired", restartA, refused)
	p.answer("repaired", restartA, refused)
}

// restartProbe uses both halves and collects what is wrong.
type restartProbe struct {
	RestartHarness
	requester metadata.RestartRequester
	listener  metadata.RestartListener
	soon      time.Duration

	mu       sync.Mutex
	problems []string
}

// restartPatience is how long a call may take that has nothing to wait for: a word may have to reach other machines.
const restartPatience = 30 * time.Second

func (p *restartProbe) failf(format string, args ...any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.problems = append(p.problems, fmt.Sprintf(format, args...))
}

// signalled waits for a signal of changes after which this restart is requested.
func (p *restartProbe) signalled(when string, changes <-chan struct{}, want string) {
	for late := time.After(p.soon); ; {
		select {
		case <-changes:
		case <-late:
			p.failf("%s: no signal after which %q is requested", when, want)
			return
		}
		got := ""
		p.must("what is requested, "+when, func(ctx context.Context) (err error) {
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
			return p.requester.Report(ctx, p.Instance, metadata.RestartReport{Reason: "R"})
		},
		"Requested":      func(ctx context.Context) error { _, _, err := p.listener.Requested(ctx); return err },
		"Listener.Reply": func(ctx context.Context) error { return p.listener.Reply(ctx, restartA, refused) },
	}
}

// judged calls once and holds an error against the contract. It waits no longer than soon after ctx has ended.
func (p *restartProbe) judged(ctx context.Context, call func(context.Context) error) error {
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
	ctx, cancel := context.WithTimeout(context.Background(), restartPatience)
	defer cancel()
	if err := p.judged(ctx, call); err != nil {
		p.failf("%s: %v", what, err)
	}
}

func (p *restartProbe) mustFail(what string, call func(context.Context) error) {
	ctx, cancel := context.WithTimeout(context.Background(), restartPatience)
	defer cancel()
	if err := p.judged(ctx, call); err == nil {
		p.failf("%s: no error", what)
	} else if errors.Is(err, context.DeadlineExceeded) {
		p.failf("%s: no answer: %v", what, err)
	}
}

func (p *restartProbe) ask(id string) {
	p.must("ask for "+id, func(ctx context.Context) error { return p.requester.Request(ctx, p.Instance, id) })
}

// withdraw demands that this was said.
func (p *restartProbe) withdraw(id string, said metadata.RestartReply) {
	p.must("withdraw "+id, func(ctx context.Context) error {
		got, err := p.requester.Withdraw(ctx, p.Instance, id)
		if err == nil && got != said {
			p.failf("withdrawn is %s, to which was said %+v, want %+v", id, got, said)
		}
		return err
	})
}

func (p *restartProbe) forget(id string) {
	p.must("forget "+id, func(ctx context.Context) error { return p.requester.Forget(ctx, p.Instance, id) })
}

func (p *restartProbe) say(id string, answer metadata.RestartReply) {
	p.must(
		fmt.Sprintf("say %q to %s", answer.State, id),
		func(ctx context.Context) error { return p.listener.Reply(ctx, id, answer) },
	)
}

func (p *restartProbe) mustNotSay(id string, answer metadata.RestartReply) {
	p.mustFail(
		fmt.Sprintf("say %q to %s, which is not asked for", answer.State, id),
		func(ctx context.Context) error { return p.listener.Reply(ctx, id, answer) },
	)
}

// wanted demands what the node hears, and what it has said.
func (p *restartProbe) wanted(when, id string, said metadata.RestartReply) {
	p.must("what is wanted", func(ctx context.Context) error {
		gotID, got, err := p.listener.Requested(ctx)
		if err == nil && (gotID != id || got != said) {
			p.failf("%s: wanted is %q, to which was said %+v; want %q, %+v", when, gotID, got, id, said)
		}
		return err
	})
}

// answer demands what the controller hears.
func (p *restartProbe) answer(when, id string, want metadata.RestartReply) {
	p.must("what is answered", func(ctx context.Context) error {
		got, err := p.requester.Reply(ctx, p.Instance, id)
		if err == nil && got != want {
			p.failf("%s: the answer to %s is %+v, want %+v", when, id, got, want)
		}
		return err
	})
}

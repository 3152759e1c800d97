// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package metadatatest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
)

const secret = "oxide-token-canary"

// source is a world in memory.
type source struct {
	mu      sync.Mutex
	world   Content
	fault   Fault
	repairs chan struct{} // closed by the next repair
}

func newSource() *source { return &source{repairs: make(chan struct{})} }

func (s *source) set(w Content) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.world = w
}

func (s *source) breakIt(f Fault) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.fault = f
}

func (s *source) repair() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.fault = ""
	close(s.repairs)
	s.repairs = make(chan struct{})
}

func (s *source) look() (Content, Fault, <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.world, s.fault, s.repairs
}

// bugs are the ways in which provider can be wrong.
type bugs struct {
	plainError, noNext, noWhat, manyLines, bothKinds, noKind, leaks, answerWithError, hidesNext bool
	rawID, emptyIDAllowed, anyIDAllowed, inventsID                                              bool
	dropsRack, dropsBadRack, anyRack, inventsRack                                               bool
	cachesErrors, cachesAnswers, forgets                                                        bool
	downIsInvalid, deniedIsNotReady, malformedIsNotReady, downAnswers                           bool
	ignoresContext, hidesContext, ignoresEndedContext, asksInConstructor, gives500msOnly        bool
	mixes, failsUnderLoad                                                                       bool
	wantsWhole, dropsBadPart                                                                    bool
}

// provider is right but for its bugs.
type provider struct {
	source *source
	bugs   bugs

	mu       sync.Mutex
	calls    int
	inFlight int
	err      error
	answer   metadata.Instance
}

func newProvider(s *source, b bugs) *provider {
	p := &provider{source: s, bugs: b}
	if _, fault, _ := s.look(); b.asksInConstructor && fault == Down {
		p.err = p.fail(metadata.ErrNotReady, "source is down", nil)
	}
	return p
}

func (p *provider) fail(kind error, what string, cause error) error {
	e := &metadata.Error{Kind: kind, What: what, Cause: cause, Next: "look at the source"}
	b := p.bugs
	switch {
	case b.plainError:
		return fmt.Errorf("%s: %w", what, kind)
	case b.hidesNext:
		return terse{e}
	case b.noNext:
		e.Next = ""
	case b.noWhat:
		e.What = ""
	case b.manyLines:
		e.What += "\nHTTP/1.1 503"
	case b.bothKinds:
		e.Cause = errors.Join(metadata.ErrNotReady, metadata.ErrInvalid)
	case b.noKind:
		e.Kind = errors.New("some kind")
	case b.leaks:
		e.What += " with " + secret
	}
	return e
}

// terse wraps an error and drops what it says.
type terse struct{ error }

func (terse) Error() string   { return "no identity" }
func (t terse) Unwrap() error { return t.error }

func (p *provider) Instance(ctx context.Context) (metadata.Instance, error) {
	p.mu.Lock()
	p.inFlight++
	p.mu.Unlock()
	if p.bugs.failsUnderLoad {
		// Long enough for the other callers to come in, or the bug would not show
		// where a call is over before the next goroutine runs.
		<-time.After(20 * time.Millisecond)
	}
	p.mu.Lock()
	p.calls++
	calls, inFlight, err, answer := p.calls, p.inFlight, p.err, p.answer
	p.mu.Unlock()
	defer func() { p.mu.Lock(); p.inFlight--; p.mu.Unlock() }()
	switch {
	case err != nil:
		return metadata.Instance{}, err
	case p.bugs.cachesAnswers && answer.ID != "":
		return answer, nil
	case p.bugs.failsUnderLoad && inFlight > 1:
		return metadata.Instance{}, p.fail(metadata.ErrNotReady, "busy", nil)
	}
	got, err := p.look(ctx)
	if err == nil && got.ID == "" && !p.bugs.emptyIDAllowed {
		got, err = metadata.Instance{}, p.fail(metadata.ErrNotReady, "wait for an ID", nil)
	}
	if p.bugs.forgets && calls == 3 {
		got.Rack = "east-3"
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if err != nil {
		if p.bugs.cachesErrors {
			p.err = err
		}
		if p.bugs.answerWithError {
			return metadata.Instance{ID: idA}, err
		}
		return metadata.Instance{}, err
	}
	p.answer = got
	return got, nil
}

// PartialInstance implements metadata.PartialProvider.
func (p *provider) PartialInstance(ctx context.Context) (metadata.Instance, error) {
	if p.bugs.wantsWhole {
		return p.Instance(ctx)
	}
	got, err := p.look(ctx)
	if err != nil && p.bugs.dropsBadPart && ctx.Err() == nil {
		return metadata.Instance{}, nil
	}
	return got, err
}

// look waits for the source and reads it.
func (p *provider) look(ctx context.Context) (metadata.Instance, error) {
	b := p.bugs
	ended := func() error {
		if b.hidesContext {
			return p.fail(metadata.ErrNotReady, "gave up", nil)
		}
		return p.fail(metadata.ErrNotReady, "wait for the source", ctx.Err())
	}
	if ctx.Err() != nil && !b.ignoresEndedContext {
		return metadata.Instance{}, ended()
	}
	w, fault, repaired := p.source.look()
	switch {
	case fault == Down && b.downAnswers:
		return metadata.Instance{ID: idB, Rack: rackB}, nil
	case fault == Down && b.downIsInvalid:
		return metadata.Instance{}, p.fail(metadata.ErrInvalid, "source is down", nil)
	case fault == Down:
		return metadata.Instance{}, p.fail(metadata.ErrNotReady, "source is down", nil)
	case fault == Denied && b.deniedIsNotReady:
		return metadata.Instance{}, p.fail(metadata.ErrNotReady, "access denied", nil)
	case fault == Denied:
		return metadata.Instance{}, p.fail(metadata.ErrInvalid, "access denied", nil)
	case fault == Slow && b.gives500msOnly:
		return metadata.Instance{}, p.fail(metadata.ErrNotReady, "source is slow", nil)
	case fault == Slow && b.ignoresContext:
		<-repaired
		w, _, _ = p.source.look()
	case fault == Slow:
		select {
		case <-repaired:
			w, _, _ = p.source.look()
		case <-ctx.Done():
			return metadata.Instance{}, ended()
		}
	}
	return p.judge(w)
}

// judge makes an answer of what the source holds.
func (p *provider) judge(w Content) (metadata.Instance, error) {
	b := p.bugs
	var id string
	var err error
	if w.ID != nil {
		id, err = metadata.ParseInstanceID(*w.ID)
	}
	switch {
	case w.ID == nil && b.inventsID:
		id = idA
	case w.ID == nil:
	case b.rawID:
		id, err = *w.ID, nil
	case b.emptyIDAllowed && strings.TrimSpace(*w.ID) == "":
		id, err = "", nil
	case b.anyIDAllowed && err != nil:
		id, err = idB, nil
	}
	if err != nil {
		kind := metadata.ErrInvalid
		if b.malformedIsNotReady {
			kind = metadata.ErrNotReady
		}
		return metadata.Instance{}, p.fail(kind, "source", err)
	}
	got := metadata.Instance{ID: id}
	switch {
	case b.dropsRack:
	case w.Rack == nil && b.inventsRack:
		got.Rack = "default"
	case w.Rack == nil:
	default:
		if err := metadata.CheckRack(*w.Rack); err == nil || b.anyRack {
			got.Rack = *w.Rack
		} else if !b.dropsBadRack {
			return metadata.Instance{}, p.fail(metadata.ErrInvalid, "source", err)
		}
	}
	if b.mixes {
		p.mu.Lock()
		if p.answer.Rack != "" {
			got.Rack = p.answer.Rack
		}
		p.mu.Unlock()
	}
	return got, nil
}

// harness is a world in memory with a provider that has these bugs.
func harness(t *testing.T, b bugs) Harness {
	s := newSource()
	t.Cleanup(s.repair) // Lets go of calls that a bug left behind.
	return Harness{
		New: func() metadata.Provider { return newProvider(s, b) },
		Set: s.set, Break: s.breakIt, Repair: s.repair,
		Secrets: []string{secret},
	}
}

func TestAGoodProviderPasses(t *testing.T) {
	Run(t, func(t *testing.T) Harness { return harness(t, bugs{}) })
}

func TestEveryBugIsFound(t *testing.T) {
	failed := map[string]bool{}
	for _, tt := range []struct {
		name string
		bugs bugs
		in   string // a case that must find it
	}{
		{"error of no known type", bugs{plainError: true}, "source down, then up"},
		{"no next step", bugs{noNext: true}, "source down, then up"},
		{"next step not in the text", bugs{hidesNext: true}, "source down, then up"},
		{"nothing happened", bugs{noWhat: true}, "access denied, then granted"},
		{"several lines", bugs{manyLines: true}, "missing identity"},
		{"both kinds", bugs{bothKinds: true}, "malformed identity"},
		{"no kind", bugs{noKind: true}, "malformed identity"},
		{"secret in an error", bugs{leaks: true}, "empty identity"},
		{"answer beside an error", bugs{answerWithError: true}, "missing identity"},
		{"ID not made canonical", bugs{rawID: true}, "identity in every notation"},
		{"empty ID answered", bugs{emptyIDAllowed: true}, "empty identity"},
		{"malformed ID replaced", bugs{anyIDAllowed: true}, "malformed identity"},
		{"missing ID made up", bugs{inventsID: true}, "missing identity"},
		{"rack left out", bugs{dropsRack: true}, "full answer"},
		{"bad rack left out", bugs{dropsBadRack: true}, "malformed rack"},
		{"bad rack answered", bugs{anyRack: true}, "malformed rack"},
		{"rack made up", bugs{inventsRack: true}, "no rack"},
		{"error remembered", bugs{cachesErrors: true}, "source down, then up"},
		{"error remembered, ID", bugs{cachesErrors: true}, "malformed identity"},
		{"answer remembered", bugs{cachesAnswers: true}, "source changes"},
		{"third answer differs", bugs{forgets: true}, "same answer twice"},
		{"down is invalid", bugs{downIsInvalid: true}, "source goes down after an answer"},
		{"down gives an answer", bugs{downAnswers: true}, "source goes down after an answer"},
		{"denied is not ready", bugs{deniedIsNotReady: true}, "access denied, then granted"},
		{"malformed is not ready", bugs{malformedIsNotReady: true}, "malformed identity"},
		{"cancel ignored", bugs{ignoresContext: true}, "slow source and a cancelled context"},
		{"deadline ignored", bugs{ignoresContext: true}, "slow source and a deadline"},
		{"context's error hidden", bugs{hidesContext: true}, "slow source and a deadline"},
		{"ended context ignored", bugs{ignoresEndedContext: true}, "context that has ended before the call"},
		{"slow source given up", bugs{gives500msOnly: true}, "slow source that answers at last"},
		{"I/O in the constructor", bugs{asksInConstructor: true}, "built while the source is down"},
		{"nothing but the whole", bugs{wantsWhole: true}, "parts of an answer"},
		{"bad part left out", bugs{dropsBadPart: true}, "malformed part"},
		{"one caller at a time", bugs{failsUnderLoad: true}, "concurrent callers"},
		{"rack of another state", bugs{mixes: true}, "concurrent callers of a changing source"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			i := slices.IndexFunc(cases, func(c testCase) bool { return c.name == tt.in })
			if i < 0 {
				t.Fatalf("the suite has no case %q", tt.in)
			}
			failed[tt.in] = true
			if problems := cases[i].check(harness(t, tt.bugs), 100*time.Millisecond); len(problems) == 0 {
				t.Errorf("case %q finds nothing", tt.in)
			}
		})
	}
	for _, c := range cases {
		if !failed[c.name] {
			t.Errorf("no bug here makes case %q fail", c.name)
		}
	}
}

func TestAHarnessMustSayWhy(t *testing.T) {
	for name, change := range map[string]func(*Harness){
		"no reason":                func(h *Harness) { h.Cannot = map[Ability]string{CanSlow: " "} },
		"unknown ability":          func(h *Harness) { h.Cannot = map[Ability]string{"fly": "no wings"} },
		"no secrets and no reason": func(h *Harness) { h.Secrets = nil },
		"secrets and a reason":     func(h *Harness) { h.Cannot = map[Ability]string{CanHoldSecrets: "none"} },
	} {
		t.Run(name, func(t *testing.T) {
			h := harness(t, bugs{})
			change(&h)
			if problems := cases[0].check(h, time.Second); len(problems) == 0 {
				t.Error("accepted")
			}
		})
	}
}

func TestWhatASourceCannotDoIsLeftOut(t *testing.T) {
	h := harness(t, bugs{dropsRack: true, cachesAnswers: true})
	h.Cannot = map[Ability]string{
		CanKnowRack: "firmware knows no rack",
		CanChange:   "firmware does not change while it runs",
	}
	for _, c := range cases {
		if problems := c.check(h, time.Second); len(problems) > 0 && c.leftOut(h) != "" {
			t.Errorf("case %q ran: %v", c.name, problems)
		}
		if strings.Contains(c.name, "chang") && !strings.Contains(c.leftOut(h), "while it runs") {
			t.Errorf("case %q gives the reason %q", c.name, c.leftOut(h))
		}
	}
	if problems := cases[0].check(h, time.Second); len(problems) > 0 {
		t.Errorf("full answer without a rack: %v", problems)
	}
}

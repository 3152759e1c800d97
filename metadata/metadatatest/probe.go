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
	"time"
	"unicode"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
)

// probe asks one provider and collects problems. It does not fail the test itself, so that the suite can be tested.
type probe struct {
	Harness
	provider metadata.Provider
	soon     time.Duration

	mu       sync.Mutex
	problems []string
}

func (p *probe) failf(format string, args ...any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.problems = append(p.problems, fmt.Sprintf(format, args...))
}

// set writes an ID and a rack into the source.
func (p *probe) set(id, rack string) {
	p.Set(Content{ID: Text(id), Rack: Text(rack)})
}

// ask asks once and allows answerTimeout for the answer.
func (p *probe) ask() (metadata.Instance, error) {
	ctx, cancel := context.WithTimeout(context.Background(), answerTimeout)
	defer cancel()
	return p.askUntil(ctx)
}

// askPartial asks once for a partial answer.
func (p *probe) askPartial(ctx context.Context) (metadata.Instance, error) {
	partial, ok := p.provider.(metadata.PartialProvider)
	if !ok {
		p.failf("%T is no metadata.PartialProvider, and the harness gives no reason in Cannot", p.provider)
		return metadata.Instance{}, errStuck
	}
	return p.call(ctx, partial.PartialInstance, true)
}

// errStuck is the result of a call that did not return.
var errStuck = errors.New("the provider did not return")

// askUntil asks once with the given context.
func (p *probe) askUntil(ctx context.Context) (metadata.Instance, error) {
	return p.call(ctx, p.provider.Instance, false)
}

// call calls a method once and checks the answer or the error against the contract. After ctx has ended it waits no
// longer than soon.
func (p *probe) call(
	ctx context.Context,
	method func(context.Context) (metadata.Instance, error),
	partial bool,
) (metadata.Instance, error) {
	type result struct {
		instance metadata.Instance
		err      error
	}
	done := make(chan result, 1)
	go func() {
		instance, err := method(ctx)
		done <- result{instance, err}
	}()
	var r result
	select {
	case r = <-done:
	case <-ctx.Done():
		late := time.NewTimer(p.soon)
		defer late.Stop()
		select {
		case r = <-done:
		case <-late.C:
			p.failf("still blocked %v after its context ended", p.soon)
			return metadata.Instance{}, errStuck
		}
	}
	if r.err != nil {
		p.judgeError(r.instance, r.err)
	} else {
		p.judgeAnswer(r.instance, partial)
	}
	return r.instance, r.err
}

// judgeAnswer checks an answer against the contract. Only a partial answer may lack the ID.
func (p *probe) judgeAnswer(got metadata.Instance, partial bool) {
	if id, err := metadata.ParseInstanceID(got.ID); (err != nil || id != got.ID) && !(partial && got.ID == "") {
		p.failf("answered ID %q, which is no hyphenated lower-case UUID", got.ID)
	}
	if got.Rack != "" {
		if err := metadata.CheckRack(got.Rack); err != nil {
			p.failf("answered an invalid rack: %v", err)
		}
	}
}

// judgeError checks an error against the contract.
func (p *probe) judgeError(got metadata.Instance, err error) {
	text := err.Error()
	for _, secret := range p.Secrets {
		if strings.Contains(text, secret) {
			p.failf("the error shows a secret: %s", strings.ReplaceAll(text, secret, "<SECRET>"))
		}
	}
	if got != (metadata.Instance{}) {
		p.failf("answered %+v together with the error %q", got, text)
	}
	if strings.ContainsFunc(text, unicode.IsControl) {
		p.failf("the error is not one line of text: %q", text)
	}
	var e *metadata.Error
	if !errors.As(err, &e) {
		p.failf("the error is no *metadata.Error: %q", text)
		return
	}
	if strings.TrimSpace(e.What) == "" || strings.TrimSpace(e.Next) == "" {
		p.failf("the error lacks what happened or the operator's next step: %q", text)
	} else if !strings.Contains(text, e.What) || !strings.Contains(text, e.Next) {
		p.failf("the error's text leaves out what happened or the next step: %q", text)
	}
	if errors.Is(err, metadata.ErrNotReady) == errors.Is(err, metadata.ErrInvalid) {
		p.failf("the error is not of exactly one kind: %q", text)
	}
}

// want asks once and expects this answer. If the source cannot know the rack, it expects an empty rack.
func (p *probe) want(when, id, rack string) {
	if _, cannot := p.Cannot[CanKnowRack]; cannot {
		rack = ""
	}
	want := metadata.Instance{ID: id, Rack: rack}
	if got, err := p.ask(); err != nil {
		p.failf("%s: error %q, want %+v", when, err, want)
	} else if got != want {
		p.failf("%s: answered %+v, want %+v", when, got, want)
	}
}

// wantError asks once and expects an error of one of these kinds.
func (p *probe) wantError(when string, kinds ...error) {
	got, err := p.ask()
	if err == nil {
		p.failf("%s: answered %+v, want an error", when, got)
	} else if !slices.ContainsFunc(kinds, func(kind error) bool { return errors.Is(err, kind) }) {
		p.failf("%s: error %q, want one of kind %q", when, err, kinds)
	}
}

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
	"sync/atomic"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
)

// Two contents of a source. They differ in both values, so that a mixture of the two is noticed.
const (
	idA, rackA = "6f3a1c9e-2b7d-4e58-9a41-0d5c8e7f1a23", "east-1"
	idB, rackB = "b81d0f42-77c3-4c0a-8e6f-93a5d2b4c716", "West_2.b"
)

// testCase is one case of the suite.
type testCase struct {
	name  string
	needs []Ability
	run   func(*probe)
	// late means that run builds the provider itself.
	late bool
}

// check runs the case against a harness and returns the problems.
func (c testCase) check(h Harness, soon time.Duration) []string {
	p := &probe{Harness: h, soon: soon}
	for ability, why := range h.Cannot {
		if !slices.Contains(abilities, ability) || strings.TrimSpace(why) == "" {
			p.failf("the harness gives no reason, or names an unknown ability: cannot %s", ability)
		}
	}
	if _, cannot := h.Cannot[CanHoldSecrets]; cannot == (len(h.Secrets) > 0) {
		p.failf("the harness must name secrets, or say why there are none")
	}
	if c.leftOut(h) != "" {
		return p.problems
	}
	if !c.late {
		p.provider = h.New()
	}
	c.run(p)
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.problems
}

// leftOut says why the case does not apply, or "".
func (c testCase) leftOut(h Harness) string {
	for _, ability := range c.needs {
		if why, cannot := h.Cannot[ability]; cannot {
			return fmt.Sprintf("the source cannot %s: %s", ability, why)
		}
	}
	return ""
}

// either is for cases in which both kinds are right, depending on the source.
var either = []error{metadata.ErrNotReady, metadata.ErrInvalid}

var cases = []testCase{
	{name: "full answer", run: func(p *probe) {
		p.set(idA, rackA)
		p.want("first call", idA, rackA)
	}},
	{name: "same answer twice", run: func(p *probe) {
		p.set(idA, rackA)
		for _, when := range []string{"first call", "second call", "third call"} {
			p.want(when, idA, rackA)
		}
	}},
	{name: "no rack", needs: []Ability{CanKnowRack}, run: func(p *probe) {
		p.Set(Content{ID: Text(idA)})
		p.want("source without a rack", idA, "")
	}},
	{name: "identity in every notation", needs: []Ability{CanHoldAnyText}, run: everyNotation},
	{name: "missing identity", run: func(p *probe) {
		p.wantError("source that holds nothing", either...)
		p.Set(Content{Rack: Text(rackA)})
		p.wantError("source that holds only a rack", either...)
		p.set(idA, rackA)
		p.want("once it is there", idA, rackA)
	}},
	{name: "empty identity", needs: []Ability{CanHoldAnyText}, run: func(p *probe) {
		for _, empty := range []string{"", " ", "\t"} {
			p.set(empty, rackA)
			p.wantError(fmt.Sprintf("identity %q", empty), either...)
		}
		p.set(idA, rackA)
		p.want("once it is there", idA, rackA)
	}},
	{name: "malformed identity", needs: []Ability{CanHoldAnyText}, run: malformedIdentity},
	{name: "malformed rack", needs: []Ability{CanHoldAnyText, CanKnowRack}, run: malformedRack},
	{name: "parts of an answer", needs: []Ability{CanKnowParts, CanKnowRack}, run: knownParts},
	{name: "malformed part", needs: []Ability{CanKnowParts, CanKnowRack, CanHoldAnyText}, run: malformedPart},
	{name: "source changes", needs: []Ability{CanChange}, run: func(p *probe) {
		p.set(idA, rackA)
		p.want("before", idA, rackA)
		p.set(idB, rackB)
		p.want("after", idB, rackB)
		p.set(idA, rackA)
		p.want("changed back", idA, rackA)
	}},
	{name: "source down, then up", needs: []Ability{CanDown}, run: func(p *probe) {
		p.set(idA, rackA)
		p.Break(Down)
		p.wantError("source down", metadata.ErrNotReady)
		p.wantError("source still down", metadata.ErrNotReady)
		p.Repair()
		p.want("source up again", idA, rackA)
	}},
	{name: "built while the source is down", needs: []Ability{CanDown}, late: true, run: func(p *probe) {
		p.set(idA, rackA)
		p.Break(Down)
		p.provider = p.New()
		p.Repair()
		p.want("source up", idA, rackA)
	}},
	{name: "source goes down after an answer", needs: []Ability{CanDown}, run: func(p *probe) {
		p.set(idA, rackA)
		p.want("source up", idA, rackA)
		p.Break(Down)
		if _, err := p.ask(); err != nil {
			p.wantError("source down", metadata.ErrNotReady)
		} else {
			p.want("source down, answer remembered", idA, rackA)
		}
		p.Repair()
		p.want("source up again", idA, rackA)
	}},
	{name: "access denied, then granted", needs: []Ability{CanDeny}, run: func(p *probe) {
		p.set(idA, rackA)
		p.Break(Denied)
		p.wantError("access denied", metadata.ErrInvalid)
		p.Repair()
		p.want("access granted", idA, rackA)
	}},
	{name: "slow source and a cancelled context", needs: []Ability{CanSlow}, run: func(p *probe) {
		ctx, cancel := context.WithCancel(context.Background())
		timer := time.AfterFunc(50*time.Millisecond, cancel)
		defer timer.Stop()
		defer cancel()
		askSlow(p, ctx, context.Canceled)
	}},
	{name: "slow source and a deadline", needs: []Ability{CanSlow}, run: func(p *probe) {
		ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
		defer cancel()
		askSlow(p, ctx, context.DeadlineExceeded)
	}},
	{name: "slow source that answers at last", needs: []Ability{CanSlow}, run: func(p *probe) {
		p.set(idA, rackA)
		p.Break(Slow)
		repaired := make(chan struct{})
		timer := time.AfterFunc(50*time.Millisecond, func() { p.Repair(); close(repaired) })
		defer timer.Stop()
		p.want("source repaired during the call", idA, rackA)
		<-repaired
	}},
	{name: "context that has ended before the call", run: func(p *probe) {
		p.set(idA, rackA)
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		wantEnded(p, ctx, context.Canceled)
		p.want("next call", idA, rackA)
	}},
	{name: "concurrent callers", run: func(p *probe) {
		p.set(idA, rackA)
		var calls atomic.Int32
		concurrently(16, func() bool {
			p.want("one of many callers", idA, rackA)
			return calls.Add(1) < 64
		})
	}},
	{name: "concurrent callers of a changing source", needs: []Ability{CanChange}, run: changingUnderCallers},
}

// everyNotation checks that a UUID in any notation gives the same answer.
func everyNotation(p *probe) {
	digits := strings.ReplaceAll(idA, "-", "")
	for _, id := range []string{
		idA, strings.ToUpper(idA), digits, strings.ToUpper(digits), "urn:uuid:" + idA, "{" + strings.ToUpper(idA) + "}",
	} {
		// A new provider, because a provider may cache its first answer.
		p.provider = p.New()
		p.set(id, rackA)
		p.want(fmt.Sprintf("identity %q", id), idA, rackA)
	}
}

func malformedIdentity(p *probe) {
	for _, id := range []string{
		"node-a", "${meta.oxide.instance_id}", "$(INSTANCE_ID)", idA[:35], idA + "0", idA + " " + idB,
		strings.Replace(idA, "6", "g", 1), "{" + idA, "00000000-0000-0000-0000-000000000000",
	} {
		p.set(id, rackA)
		p.wantError(fmt.Sprintf("identity %q", id), metadata.ErrInvalid)
	}
	p.set(idA, rackA)
	p.want("identity repaired", idA, rackA)
}

// malformedRack checks that an invalid rack is an error. An answer without a rack would put the node on the default
// rack, which does not have its volumes.
func malformedRack(p *probe) {
	for _, rack := range []string{"-east", "east/1", "${meta.oxide.rack}", "räck", strings.Repeat("r", 64)} {
		p.set(idA, rack)
		p.wantError(fmt.Sprintf("rack %q", rack), metadata.ErrInvalid)
	}
	p.set(idA, rackA)
	p.want("rack repaired", idA, rackA)
}

// knownParts checks that a partial answer contains exactly the values that the source mentions.
func knownParts(p *probe) {
	for _, part := range []struct {
		when    string
		content Content
		want    metadata.Instance
	}{
		{"the whole", Content{ID: Text(idA), Rack: Text(rackA)}, metadata.Instance{ID: idA, Rack: rackA}},
		{"only a rack", Content{Rack: Text(rackA)}, metadata.Instance{Rack: rackA}},
		{"only an ID", Content{ID: Text(idA)}, metadata.Instance{ID: idA}},
	} {
		// A new provider, because a provider may cache its first answer.
		p.provider = p.New()
		p.Set(part.content)
		if got, err := p.askPartial(context.Background()); err != nil || got != part.want {
			p.failf("%s: %+v, %v; want %+v", part.when, got, err, part.want)
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if got, err := p.askPartial(ctx); !errors.Is(err, context.Canceled) || !errors.Is(err, metadata.ErrNotReady) {
		p.failf("with a context that has ended: %+v, %v", got, err)
	}
}

func malformedPart(p *probe) {
	for when, w := range map[string]Content{
		"rack without an ID": {Rack: Text("-east")},
		"rack":               {ID: Text(idA), Rack: Text("east/1")},
		"ID":                 {ID: Text("node-a"), Rack: Text(rackA)},
	} {
		p.Set(w)
		if got, err := p.askPartial(context.Background()); !errors.Is(err, metadata.ErrInvalid) {
			p.failf("malformed %s: %+v, %v; want an ErrInvalid", when, got, err)
		}
	}
}

// askSlow asks a slow source until ctx ends, then repairs it.
func askSlow(p *probe, ctx context.Context, want error) {
	p.set(idA, rackA)
	p.Break(Slow)
	wantEnded(p, ctx, want)
	p.Repair()
	p.want("source repaired", idA, rackA)
}

// wantEnded asks with a context that ends before there can be an answer.
func wantEnded(p *probe, ctx context.Context, want error) {
	got, err := p.askUntil(ctx)
	switch {
	case errors.Is(err, errStuck): // reported by call
	case err == nil:
		p.failf("answered %+v although its context ended first", got)
	case !errors.Is(err, want) || !errors.Is(err, metadata.ErrNotReady):
		p.failf("error %q, want a metadata.ErrNotReady that wraps %q", err, want)
	}
}

// changingUnderCallers checks that no caller gets the ID of one content with the rack of the other, nor an error: Set
// is one step.
func changingUnderCallers(p *probe) {
	p.set(idA, rackA)
	rackOf := map[string]string{idA: rackA, idB: rackB}
	if _, cannot := p.Cannot[CanKnowRack]; cannot {
		rackOf = map[string]string{idA: "", idB: ""}
	}
	changed := make(chan struct{})
	go func() {
		defer close(changed)
		// Bursts of changes, and pauses in which even a source that waits for changes to end gives an answer. A burst has an
		// odd number of changes, so that each content gets a pause. Real time: the sources are files and servers.
		for i := range 15 {
			pause := 5 * time.Millisecond
			if i%5 == 0 {
				pause = 200 * time.Millisecond
			}
			<-time.After(pause)
			if i%2 == 0 {
				p.set(idB, rackB)
			} else {
				p.set(idA, rackA)
			}
		}
	}()
	concurrently(4, func() (again bool) {
		got, err := p.ask()
		if err != nil {
			p.failf("while the source changes: error %q", err)
		} else if rack, known := rackOf[got.ID]; !known || rack != got.Rack {
			p.failf("while the source changes: answered %+v, which it never held", got)
		} else {
			select {
			case <-changed:
			default:
				return true
			}
		}
		return false // one failure is enough
	})
	<-changed
}

// concurrently calls ask from several goroutines, in each until it returns false.
func concurrently(callers int, ask func() (again bool)) {
	var wg sync.WaitGroup
	for range callers {
		wg.Go(func() {
			for ask() {
			}
		})
	}
	wg.Wait()
}

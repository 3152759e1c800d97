// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package rack

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// server answers reads when it is told to, with what was true when they reached it.
type server struct {
	state   atomic.Int64
	arrived chan *pending
	total   atomic.Int64
}

// pending is a read that has reached the server.
type pending struct {
	answer chan error
}

func newServer() *server { return &server{arrived: make(chan *pending, 100)} }

func (s *server) RoundTrip(req *http.Request) (*http.Response, error) {
	s.total.Add(1)
	state := s.state.Load()
	p := &pending{answer: make(chan error, 1)}
	s.arrived <- p
	select {
	case err := <-p.answer:
		if err != nil {
			return nil, err
		}
	case <-req.Context().Done():
		return nil, req.Context().Err()
	}
	body := io.NopCloser(strings.NewReader(fmt.Sprintf("%s is %d", req.URL.Path, state)))
	return &http.Response{StatusCode: 200, Header: http.Header{"X-Request-Id": {"r"}}, Body: body, Request: req}, nil
}

// asker asks for the same thing as others do.
type asker struct {
	t     *testing.T
	reads *reads
}

// result is what a read was answered.
type result struct {
	text string
	err  error
}

func (a asker) ask(ctx context.Context, path string) <-chan result {
	answered := make(chan result, 1)
	go func() {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://rack"+path, nil)
		if err != nil {
			answered <- result{err: err}
			return
		}
		resp, err := a.reads.RoundTrip(req)
		if err != nil {
			answered <- result{err: err}
			return
		}
		body, err := io.ReadAll(resp.Body)
		if resp.Request != req || resp.Header.Get("X-Request-Id") != "r" {
			a.t.Error("the answer is to another request")
		}
		resp.Header.Set("X-Request-Id", "mine") // nobody else's answer changes
		answered <- result{text: string(body), err: err}
	}()
	return answered
}

// waiting waits until somebody waits for the read under way, and so many others for the same as they do.
func (a asker) waiting(path string, followers int) {
	a.t.Helper()
	eventually(a.t, "others wait", func() bool {
		a.reads.mu.Lock()
		defer a.reads.mu.Unlock()
		sent := a.reads.underWay["http://rack"+path]
		return sent != nil && sent.then != nil && sent.then.followers == followers
	})
}

// nothingLeft checks that idle reads remember nothing.
func (a asker) nothingLeft() {
	a.t.Helper()
	a.reads.mu.Lock()
	defer a.reads.mu.Unlock()
	if len(a.reads.underWay) != 0 {
		a.t.Errorf("left behind: %v", a.reads.underWay)
	}
}

func newAsker(t *testing.T, patience time.Duration) (asker, *server) {
	t.Helper()
	s := newServer()
	a := asker{t: t, reads: newReads(s)}
	a.reads.patience = patience
	t.Cleanup(a.nothingLeft)
	return a, s
}

func wantResult(t *testing.T, got <-chan result, want string) {
	t.Helper()
	if r := <-got; r.err != nil || r.text != want {
		t.Errorf("%q, %v; want %q", r.text, r.err, want)
	}
}

// All that ask for the same thing while it is read share one second read; other things are read beside it.
func TestReadsAreShared(t *testing.T) {
	a, s := newAsker(t, time.Hour)
	first := a.ask(t.Context(), "/a")
	one := <-s.arrived
	var others []<-chan result
	for n := range 20 {
		others = append(others, a.ask(t.Context(), "/a"))
		a.waiting("/a", n)
	}
	beside := a.ask(t.Context(), "/b")
	two := <-s.arrived
	two.answer <- nil
	wantResult(t, beside, "/b is 0")
	one.answer <- nil
	wantResult(t, first, "/a is 0")
	(<-s.arrived).answer <- nil
	for _, other := range others {
		wantResult(t, other, "/a is 0")
	}
	if n := s.total.Load(); n != 3 {
		t.Errorf("%d reads, want 3", n)
	}
}

// Nobody is told what was true before they asked: not before a write of ours, nor of anybody else's.
func TestReadsAreNotOlderThanTheQuestion(t *testing.T) {
	a, s := newAsker(t, time.Hour)
	first := a.ask(t.Context(), "/a")
	one := <-s.arrived
	s.state.Store(1)
	second, third := a.ask(t.Context(), "/a"), a.ask(t.Context(), "/a")
	a.waiting("/a", 1)
	one.answer <- nil
	wantResult(t, first, "/a is 0")
	two := <-s.arrived
	s.state.Store(2)
	fourth := a.ask(t.Context(), "/a") // its read has been sent already
	a.waiting("/a", 0)
	two.answer <- nil
	wantResult(t, second, "/a is 1")
	wantResult(t, third, "/a is 1")
	(<-s.arrived).answer <- nil
	wantResult(t, fourth, "/a is 2")
}

// An error is shared, too, but not that somebody else was in a hurry.
func TestReadsThatFail(t *testing.T) {
	broken := errors.New("connection reset by peer")
	for _, test := range []struct {
		name string
		end  func(two *pending, cancel context.CancelFunc)
		// again is whether the followers have to ask by themselves.
		again bool
		want  error
	}{
		{"connection", func(two *pending, _ context.CancelFunc) { two.answer <- broken }, false, broken},
		{"caller", func(_ *pending, cancel context.CancelFunc) { cancel() }, true, context.Canceled},
	} {
		t.Run(test.name, func(t *testing.T) {
			a, s := newAsker(t, time.Hour)
			first := a.ask(t.Context(), "/a")
			one := <-s.arrived
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			leader := a.ask(ctx, "/a")
			a.waiting("/a", 0)
			followers := []<-chan result{a.ask(t.Context(), "/a"), a.ask(t.Context(), "/a")}
			a.waiting("/a", 2)
			one.answer <- nil
			wantResult(t, first, "/a is 0")
			test.end(<-s.arrived, cancel)
			if r := <-leader; !errors.Is(r.err, test.want) {
				t.Errorf("the leader: %q, %v", r.text, r.err)
			}
			if !test.again {
				for _, follower := range followers {
					if r := <-follower; !errors.Is(r.err, test.want) {
						t.Errorf("a follower: %q, %v", r.text, r.err)
					}
				}
				return
			}
			(<-s.arrived).answer <- nil // of whichever is first
			(<-s.arrived).answer <- nil
			for _, follower := range followers {
				wantResult(t, follower, "/a is 0")
			}
		})
	}
}

// Callers who wait may go away at any time; the others get their answer.
func TestReadsWhoseWaitersGoAway(t *testing.T) {
	a, s := newAsker(t, time.Hour)
	first := a.ask(t.Context(), "/a")
	one := <-s.arrived
	ctx, cancel := context.WithCancel(t.Context())
	leader := a.ask(ctx, "/a")
	a.waiting("/a", 0)
	stays := a.ask(t.Context(), "/a")
	a.waiting("/a", 1)
	goes := a.ask(ctx, "/a")
	a.waiting("/a", 2)
	cancel()
	for _, gone := range []<-chan result{leader, goes} {
		if r := <-gone; !errors.Is(r.err, context.Canceled) {
			t.Errorf("%q, %v", r.text, r.err)
		}
	}
	a.waiting("/a", 0) // the one that stays leads now
	one.answer <- nil
	wantResult(t, first, "/a is 0")
	(<-s.arrived).answer <- nil
	wantResult(t, stays, "/a is 0")
}

// A read that hangs holds up nobody else for long.
func TestReadsBesideOneThatHangs(t *testing.T) {
	a, s := newAsker(t, time.Millisecond)
	hangs := a.ask(t.Context(), "/a")
	one := <-s.arrived
	var others []<-chan result
	for range 5 {
		others = append(others, a.ask(t.Context(), "/a"))
	}
	for range others {
		(<-s.arrived).answer <- nil
	}
	for _, other := range others {
		wantResult(t, other, "/a is 0")
	}
	one.answer <- nil
	wantResult(t, hangs, "/a is 0")
}

// Requests that change something are never shared.
func TestWritesAreNotShared(t *testing.T) {
	a, s := newAsker(t, time.Hour)
	var writes sync.WaitGroup
	for range 5 {
		writes.Go(func() {
			req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://rack/a", strings.NewReader("{}"))
			if err != nil {
				t.Error(err)
				return
			}
			if _, err := a.reads.RoundTrip(req); err != nil {
				t.Error(err)
			}
		})
	}
	var all []*pending
	for range 5 {
		all = append(all, <-s.arrived)
	}
	for _, p := range all {
		p.answer <- nil
	}
	writes.Wait()
}

// Many callers who ask, give up and ask again get each the state of their time or a later one.
func TestReadsUnderLoad(t *testing.T) {
	var state atomic.Int64
	a := asker{t: t, reads: newReads(roundTripper(func(req *http.Request) (*http.Response, error) {
		if state.Load()%7 == 0 && req.Context().Err() != nil {
			return nil, req.Context().Err()
		}
		body := io.NopCloser(strings.NewReader(fmt.Sprint(state.Load())))
		return &http.Response{StatusCode: 200, Header: http.Header{"X-Request-Id": {"r"}}, Body: body, Request: req}, nil
	}))}
	var callers sync.WaitGroup
	for caller := range 16 {
		callers.Go(func() {
			for n := range 200 {
				ctx, cancel := context.WithCancel(t.Context())
				if (caller+n)%5 == 0 {
					cancel()
				}
				asked := state.Add(1)
				r := <-a.ask(ctx, "/a")
				cancel()
				var told int64
				if r.err == nil {
					if _, err := fmt.Sscan(r.text, &told); err != nil || told < asked {
						t.Errorf("asked at %d and told of %q", asked, r.text)
					}
				} else if !errors.Is(r.err, context.Canceled) || (caller+n)%5 != 0 {
					t.Errorf("%v", r.err)
				}
			}
		})
	}
	callers.Wait()
	a.nothingLeft()
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(req *http.Request) (*http.Response, error) { return f(req) }

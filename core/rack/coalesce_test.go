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

	"github.com/oxidecomputer/oxide-csi-plugin/test/await"
)

// server answers each read when the test says so, with the state at the time that the read arrived.
type server struct {
	state   atomic.Int64
	arrived chan *pending
	total   atomic.Int64
}

// pending is a read that has arrived at the server.
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

// caller makes reads through a readCoalescer.
type caller struct {
	t     *testing.T
	reads *readCoalescer
}

// result is the outcome of a read.
type result struct {
	text string
	err  error
}

func (a caller) read(ctx context.Context, path string) <-chan result {
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
		resp.Header.Set("X-Request-Id", "mine") // must not change the answer of other callers
		answered <- result{text: string(body), err: err}
	}()
	return answered
}

// waiting waits until the next read has a leader and this many followers.
func (a caller) waiting(path string, followers int) {
	a.t.Helper()
	await.Eventually(a.t, "others wait", func() bool {
		a.reads.mu.Lock()
		defer a.reads.mu.Unlock()
		sent := a.reads.underWay["http://rack"+path]
		return sent != nil && sent.next != nil && sent.next.followers == followers
	})
}

// checkIdle checks that no read is remembered.
func (a caller) checkIdle() {
	a.t.Helper()
	a.reads.mu.Lock()
	defer a.reads.mu.Unlock()
	if len(a.reads.underWay) != 0 {
		a.t.Errorf("left behind: %v", a.reads.underWay)
	}
}

func newCaller(t *testing.T, maxWait time.Duration) (caller, *server) {
	t.Helper()
	s := newServer()
	a := caller{t: t, reads: newReadCoalescer(s)}
	a.reads.maxWait = maxWait
	t.Cleanup(a.checkIdle)
	return a, s
}

func wantResult(t *testing.T, got <-chan result, want string) {
	t.Helper()
	if r := <-got; r.err != nil || r.text != want {
		t.Errorf("%q, %v; want %q", r.text, r.err, want)
	}
}

// Concurrent reads of one URL share the second request. Reads of another URL are independent.
func TestConcurrentReadsShareARequest(t *testing.T) {
	a, s := newCaller(t, time.Hour)
	first := a.read(t.Context(), "/a")
	one := <-s.arrived
	var others []<-chan result
	for n := range 20 {
		others = append(others, a.read(t.Context(), "/a"))
		a.waiting("/a", n)
	}
	beside := a.read(t.Context(), "/b")
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

// An answer is never older than the question: it includes every change that ended before the caller asked.
func TestSharedReadIsNotOlderThanItsQuestion(t *testing.T) {
	a, s := newCaller(t, time.Hour)
	first := a.read(t.Context(), "/a")
	one := <-s.arrived
	s.state.Store(1)
	second, third := a.read(t.Context(), "/a"), a.read(t.Context(), "/a")
	a.waiting("/a", 1)
	one.answer <- nil
	wantResult(t, first, "/a is 0")
	two := <-s.arrived
	s.state.Store(2)
	fourth := a.read(t.Context(), "/a") // its predecessor has been sent already
	a.waiting("/a", 0)
	two.answer <- nil
	wantResult(t, second, "/a is 1")
	wantResult(t, third, "/a is 1")
	(<-s.arrived).answer <- nil
	wantResult(t, fourth, "/a is 2")
}

// Followers share an error of the request. If only the leader's context ended, they ask again.
func TestSharedReadFails(t *testing.T) {
	broken := errors.New("connection reset by peer")
	for _, test := range []struct {
		name string
		end  func(two *pending, cancel context.CancelFunc)
		// again says whether the followers ask again.
		again bool
		want  error
	}{
		{"connection", func(two *pending, _ context.CancelFunc) { two.answer <- broken }, false, broken},
		{"caller", func(_ *pending, cancel context.CancelFunc) { cancel() }, true, context.Canceled},
	} {
		t.Run(test.name, func(t *testing.T) {
			a, s := newCaller(t, time.Hour)
			first := a.read(t.Context(), "/a")
			one := <-s.arrived
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			leader := a.read(ctx, "/a")
			a.waiting("/a", 0)
			followers := []<-chan result{a.read(t.Context(), "/a"), a.read(t.Context(), "/a")}
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
			(<-s.arrived).answer <- nil // of the first one
			(<-s.arrived).answer <- nil
			for _, follower := range followers {
				wantResult(t, follower, "/a is 0")
			}
		})
	}
}

// A waiting caller may leave at any time. The others still get their answer.
func TestWaitingCallersLeave(t *testing.T) {
	a, s := newCaller(t, time.Hour)
	first := a.read(t.Context(), "/a")
	one := <-s.arrived
	ctx, cancel := context.WithCancel(t.Context())
	leader := a.read(ctx, "/a")
	a.waiting("/a", 0)
	stays := a.read(t.Context(), "/a")
	a.waiting("/a", 1)
	goes := a.read(ctx, "/a")
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

// A read that hangs delays other callers only for maxWait.
func TestHangingReadDelaysOthersBriefly(t *testing.T) {
	a, s := newCaller(t, time.Millisecond)
	hangs := a.read(t.Context(), "/a")
	one := <-s.arrived
	var others []<-chan result
	for range 5 {
		others = append(others, a.read(t.Context(), "/a"))
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
	a, s := newCaller(t, time.Hour)
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

// Under concurrent load, with callers that leave, each caller gets a state at least as new as its question.
func TestSharedReadsUnderLoad(t *testing.T) {
	var state atomic.Int64
	a := caller{t: t, reads: newReadCoalescer(roundTripper(func(req *http.Request) (*http.Response, error) {
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
				r := <-a.read(ctx, "/a")
				cancel()
				var told int64
				if r.err == nil {
					if _, err := fmt.Sscan(r.text, &told); err != nil || told < asked {
						t.Errorf("asked at %d, and the answer is of %q", asked, r.text)
					}
				} else if !errors.Is(r.err, context.Canceled) || (caller+n)%5 != 0 {
					t.Errorf("%v", r.err)
				}
			}
		})
	}
	callers.Wait()
	a.checkIdle()
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(req *http.Request) (*http.Response, error) { return f(req) }

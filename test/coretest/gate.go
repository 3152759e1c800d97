// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package coretest

import (
	"errors"
	"io"
	"net/http"
	"net/http/httptrace"
	"strings"
	"sync"
	"testing"
	"time"
)

// Gate is an HTTP transport that delays chosen requests, or panics instead of sending them.
type Gate struct {
	mu    sync.Mutex
	rules []*Held
}

// Held is a rule for the next request with this method and path prefix.
type Held struct {
	method, prefix string
	// panicValue is the value to panic with, or nil to delay the request.
	panicValue any
	// entered is closed when the request comes, released when it may go on, abandoned when its context has ended before.
	entered, released, abandoned chan struct{}
}

func (g *Gate) add(r *Held) *Held {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.rules = append(g.rules, r)
	return r
}

// Hold delays the next request until it is released or its context ends. A delayed request counts as sent.
func (g *Gate) Hold(method, prefix string) *Held {
	return g.add(&Held{
		method: method, prefix: prefix,
		entered: make(chan struct{}), released: make(chan struct{}), abandoned: make(chan struct{}),
	})
}

// Panic makes the next request panic with a value, as a defect in the rack's client would.
func (g *Gate) Panic(method, prefix string, value any) {
	g.add(&Held{method: method, prefix: prefix, panicValue: value})
}

// Entered waits until the request comes.
func (r *Held) Entered(t *testing.T) {
	t.Helper()
	select {
	case <-r.entered:
	case <-time.After(time.Minute):
		t.Fatalf("no request %s %s came", r.method, r.prefix)
	}
}

// Abandoned waits until the request's context has ended.
func (r *Held) Abandoned(t *testing.T) {
	t.Helper()
	select {
	case <-r.abandoned:
	case <-time.After(time.Minute):
		t.Errorf("the request %s %s goes on without its caller", r.method, r.prefix)
	}
}

// Release lets the request go on.
func (r *Held) Release() { close(r.released) }

func (g *Gate) take(req *http.Request) *Held {
	g.mu.Lock()
	defer g.mu.Unlock()
	for i, r := range g.rules {
		if r.method == req.Method && strings.HasPrefix(req.URL.Path, r.prefix) {
			g.rules = append(g.rules[:i:i], g.rules[i+1:]...)
			return r
		}
	}
	return nil
}

// RoundTrip implements http.RoundTripper.
func (g *Gate) RoundTrip(req *http.Request) (*http.Response, error) {
	switch r := g.take(req); {
	case r == nil:
	case r.panicValue != nil:
		panic(r.panicValue)
	default:
		if trace := httptrace.ContextClientTrace(req.Context()); trace != nil && trace.GotConn != nil {
			trace.GotConn(httptrace.GotConnInfo{})
		}
		close(r.entered)
		select {
		case <-r.released:
		case <-req.Context().Done():
			close(r.abandoned)
			if req.Body == nil {
				return nil, req.Context().Err()
			}
			_, err := io.Copy(io.Discard, req.Body)
			return nil, errors.Join(req.Context().Err(), err, req.Body.Close())
		}
	}
	return http.DefaultTransport.RoundTrip(req)
}

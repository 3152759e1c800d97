// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package coretest

import (
	"errors"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"
)

// Gate holds up HTTP requests, or panics in their place, as a defect in the code below would.
type Gate struct {
	mu    sync.Mutex
	rules []*Held
}

// Held is the next request that matches.
type Held struct {
	method, prefix string
	value          any
	came, free     chan struct{}
}

func (g *Gate) add(r *Held) *Held {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.rules = append(g.rules, r)
	return r
}

// Hold makes the next request wait until it is released or given up.
func (g *Gate) Hold(method, prefix string) *Held {
	return g.add(&Held{method: method, prefix: prefix, came: make(chan struct{}), free: make(chan struct{})})
}

// Panic makes the next request panic with a value.
func (g *Gate) Panic(method, prefix string, value any) {
	g.add(&Held{method: method, prefix: prefix, value: value})
}

// Entered waits until the request has come.
func (r *Held) Entered(t *testing.T) {
	t.Helper()
	select {
	case <-r.came:
	case <-time.After(20 * time.Second):
		t.Fatalf("no request %s %s came", r.method, r.prefix)
	}
}

// Release lets the request go on.
func (r *Held) Release() { close(r.free) }

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
	case r.value != nil:
		panic(r.value)
	default:
		close(r.came)
		select {
		case <-r.free:
		case <-req.Context().Done():
			_, err := io.Copy(io.Discard, req.Body)
			return nil, errors.Join(req.Context().Err(), err, req.Body.Close())
		}
	}
	return http.DefaultTransport.RoundTrip(req)
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package buckettest

import (
	"bytes"
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"sync"
	"time"
)

// Fault is what the proxy does with a request.
type Fault int

const (
	// Pass forwards the request and its answer.
	Pass Fault = iota
	// Refuse answers HTTP 503 and forwards nothing.
	Refuse
	// Lose forwards the request and closes the connection instead of answering.
	Lose
	// Hang neither forwards nor answers, until the client goes away or the function of faults changes.
	Hang
	// Delay forwards after a moment, unless the client went away.
	Delay
	// Late forwards after more than a second, also if the client went away.
	Late
)

// ShortDelay is the time of [Delay].
const (
	ShortDelay = 100 * time.Millisecond
	longDelay  = 1500 * time.Millisecond
)

// Proxy forwards requests to a gateway, with faults.
type Proxy struct {
	// Endpoint is the proxy's URL.
	Endpoint string
	// Forwarded receives after a request with the fault [Late] was carried out. The proxy does not wait for a reader.
	Forwarded chan struct{}

	server *httptest.Server
	mu     sync.Mutex
	fault  func(*http.Request) Fault
	// changed is closed when fault changes.
	changed chan struct{}
}

// NewProxy starts a proxy before a gateway.
func NewProxy(endpoint string) (*Proxy, error) {
	target, err := url.Parse(endpoint)
	if err != nil {
		return nil, err
	}
	p := &Proxy{Forwarded: make(chan struct{}, 1), changed: make(chan struct{})}
	forward := &httputil.ReverseProxy{Rewrite: func(r *httputil.ProxyRequest) {
		r.SetURL(target)
		r.Out.Host = r.In.Host // the signature covers the host
	}}
	p.server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		// The body is read first: it ends with its client. The server notices a client that goes away only when it is read.
		body, err := io.ReadAll(r.Body)
		if err != nil {
			panic(http.ErrAbortHandler)
		}
		r.Body = io.NopCloser(bytes.NewReader(body))
		fault, changed := p.next(r)
		switch fault {
		case Refuse:
			w.WriteHeader(http.StatusServiceUnavailable)
		case Lose:
			forward.ServeHTTP(httptest.NewRecorder(), r)
			panic(http.ErrAbortHandler)
		case Hang:
			select {
			case <-r.Context().Done():
			case <-changed:
				panic(http.ErrAbortHandler)
			}
		case Delay:
			select {
			case <-r.Context().Done():
			case <-time.After(ShortDelay):
				forward.ServeHTTP(w, r)
			}
		case Late:
			time.Sleep(longDelay)
			ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), startTimeout)
			defer cancel()
			forward.ServeHTTP(w, r.WithContext(ctx))
			select {
			case p.Forwarded <- struct{}{}:
			default:
			}
		default:
			forward.ServeHTTP(w, r)
		}
	}))
	p.Endpoint = p.server.URL
	return p, nil
}

// SetFault sets the function that chooses the fault of each request. The proxy calls it for one request at a time.
// Without a function all requests pass.
func (p *Proxy) SetFault(fault func(*http.Request) Fault) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.fault = fault
	close(p.changed)
	p.changed = make(chan struct{})
}

// Close stops the proxy.
func (p *Proxy) Close() {
	p.server.CloseClientConnections()
	p.server.Close()
}

func (p *Proxy) next(r *http.Request) (fault Fault, changed <-chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.fault == nil {
		return Pass, p.changed
	}
	return p.fault(r), p.changed
}

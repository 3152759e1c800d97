// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package buckettest

import (
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"sync"
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
	// Hang neither forwards nor answers, until the client goes away.
	Hang
)

// Proxy forwards requests to a gateway, with faults.
type Proxy struct {
	// Endpoint is the proxy's URL.
	Endpoint string

	server *httptest.Server
	mu     sync.Mutex
	fault  func(*http.Request) Fault
}

// NewProxy starts a proxy before a gateway.
func NewProxy(endpoint string) (*Proxy, error) {
	target, err := url.Parse(endpoint)
	if err != nil {
		return nil, err
	}
	p := &Proxy{}
	forward := &httputil.ReverseProxy{Rewrite: func(r *httputil.ProxyRequest) {
		r.SetURL(target)
		r.Out.Host = r.In.Host // the signature covers the host
	}}
	p.server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch p.next(r) {
		case Refuse:
			w.WriteHeader(http.StatusServiceUnavailable)
		case Lose:
			forward.ServeHTTP(httptest.NewRecorder(), r)
			panic(http.ErrAbortHandler)
		case Hang:
			<-r.Context().Done()
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
}

// Close stops the proxy.
func (p *Proxy) Close() {
	p.server.CloseClientConnections()
	p.server.Close()
}

func (p *Proxy) next(r *http.Request) Fault {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.fault == nil {
		return Pass
	}
	return p.fault(r)
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package rack

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"io"
	"log/slog"
	"net/http"
	"time"
)

// maxIdleConns keeps connections for about a hundred calls at once; Go's default keeps two per host, and every further
// call would open and close its own.
const maxIdleConns = 128

// NewHTTPClient returns the HTTP client for a rack. It has no timeout of its own: every call ends with its context. It
// trusts what roots have signed and nothing else; nil means the roots of the system.
func NewHTTPClient(roots *x509.CertPool) *http.Client {
	transport := http.DefaultTransport.(*http.Transport).Clone()
	transport.MaxIdleConns = maxIdleConns
	transport.MaxIdleConnsPerHost = maxIdleConns
	// Answers are a few hundred bytes, of which compression saves the network little and costs both ends time.
	transport.DisableCompression = true
	// A rack that accepts a connection and then says nothing must not hold a call that has no deadline for ever; a
	// create may take minutes on a loaded rack (docs/reference/rack.md §2).
	transport.ResponseHeaderTimeout = 5 * time.Minute
	if roots != nil {
		transport.TLSClientConfig = &tls.Config{RootCAs: roots}
	}
	return &http.Client{Transport: transport}
}

// layers is what a request passes on its way to the rack, outermost first: it may share the answer to the same question,
// it is put in an API version that the rack serves, it is repeated where that does no harm, each time it carries the token
// as it then is, what changes something is not given up any more once it was sent, and what came of it is observed. The
// second result is the layer of the API version, which [Client.Check] asks too.
func layers(cfg Config, log *slog.Logger) (*http.Client, *versions) {
	client := NewHTTPClient(nil)
	if cfg.HTTPClient != nil {
		*client = *cfg.HTTPClient
	}
	wire := client.Transport
	if wire == nil {
		wire = http.DefaultTransport
	}
	if cfg.Observe != nil {
		wire = &observed{observe: cfg.Observe, next: wire}
	}
	versions := newVersions(
		&retries{next: &credentials{token: cfg.Token, next: &finishing{next: wire}}},
		&retries{next: wire},
		cfg.UserAgent,
		log,
	)
	client.Transport = newReads(versions)
	// A rack answers no call with a redirect, and following another program's would hand the token to whomever it names.
	client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	return client, versions
}

// again is req for another attempt, whose body is whole again. It reports false where there is no second body; the SDK's
// requests all have one.
func again(req *http.Request) (*http.Request, bool) {
	copied := req.Clone(req.Context())
	if req.Body == nil || req.Body == http.NoBody {
		return copied, true
	}
	if req.GetBody == nil {
		return nil, false
	}
	body, err := req.GetBody()
	if err != nil {
		return nil, false
	}
	copied.Body = body
	return copied, true
}

// maxDiscard is how much of an answer that nobody wants is read, in bytes, so that its connection can be used again.
const maxDiscard = 64 << 10

// discard gives up an answer. What goes wrong with it concerns nobody any more.
func discard(resp *http.Response) {
	_, _ = io.CopyN(io.Discard, resp.Body, maxDiscard)
	_ = resp.Body.Close()
}

// sleep waits, or returns the context's error.
func sleep(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return nil
	}
}

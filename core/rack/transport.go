// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package rack

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"time"
)

// maxIdleConns keeps the connections of about a hundred concurrent calls. Go's default keeps two per host, and every
// further call would open a connection of its own.
const maxIdleConns = 128

// A connection over which nothing came for the time silence gets a ping, and is closed if nothing came pingTimeout
// later either. Without pings one silent connection would cut the plugin off, because with HTTP/2 all calls use it. The
// sum and [lostAnswerWait] together are less than 15 s, the deadline of most RPCs, so one RPC survives.
//
// The pings wake an idle process. So a connection that no call has used for the time unused is closed.
const (
	silence     = 4 * time.Second
	pingTimeout = 4 * time.Second
	unused      = 10 * time.Second
)

// NewHTTPClient returns the HTTP client for a rack. It has no timeout of its own: every call ends with its context. It
// trusts only certificates that roots have signed. Nil means the system's root certificates.
func NewHTTPClient(roots *x509.CertPool) *http.Client {
	return &http.Client{Transport: newHTTPTransport(roots)}
}

func newHTTPTransport(roots *x509.CertPool) *http.Transport {
	transport := http.DefaultTransport.(*http.Transport).Clone()
	transport.MaxIdleConns = maxIdleConns
	transport.MaxIdleConnsPerHost = maxIdleConns
	transport.IdleConnTimeout = unused
	// Answers are a few hundred bytes. Compression would save little traffic and cost time on both sides.
	transport.DisableCompression = true
	// This limit is for calls without a deadline on a rack that accepts a connection and never answers. A create may
	// take minutes on a loaded rack (docs/reference/rack.md §2).
	transport.ResponseHeaderTimeout = 5 * time.Minute
	transport.DialContext = discardOnClose(transport.DialContext)
	transport.OnProxyConnectResponse = checkProxy
	// A rack offers HTTP/2 over TLS, and then all calls share one connection.
	transport.HTTP2 = &http.HTTP2Config{SendPingTimeout: silence, PingTimeout: pingTimeout}
	if roots != nil {
		transport.TLSClientConfig = &tls.Config{RootCAs: roots}
	}
	return transport
}

// checkProxy rejects a proxy that does not connect to the rack. Without it the error would be the proxy's status alone.
func checkProxy(_ context.Context, proxy *url.URL, _ *http.Request, resp *http.Response) error {
	if resp.StatusCode == http.StatusOK {
		return nil
	}
	return fmt.Errorf("%w: %s refuses to connect: %s (HTTP %d): correct HTTPS_PROXY or NO_PROXY",
		ErrProxy, proxy.Host, http.StatusText(resp.StatusCode), resp.StatusCode)
}

// dialContext is the type of [http.Transport.DialContext].
type dialContext = func(ctx context.Context, network, address string) (net.Conn, error)

// discardOnClose makes the kernel discard what a connection has not delivered when it is closed. Otherwise the kernel
// goes on trying for minutes, also after the process has ended. After a break in the network the rack would then get an
// attach that was given up long ago, and attach a disk whose volume was unpublished since.
func discardOnClose(dial dialContext) dialContext {
	return func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := dial(ctx, network, address)
		if err != nil {
			return nil, err
		}
		if tcp, is := conn.(*net.TCPConn); is {
			if err := tcp.SetLinger(0); err != nil {
				return nil, errors.Join(err, conn.Close())
			}
		}
		return conn, nil
	}
}

// newTransport returns a client with the layers that a request passes. From the outermost to the innermost, they:
//
//   - share the answer of an equal read
//   - negotiate the API version
//   - repeat what is safe to repeat
//   - add the current token
//   - wait for changes beyond the caller's deadline
//   - wait for a free place
//   - observe the result
//
// The second result is the layer of the API version, which [Client.Check] uses directly, and the third the layer that
// waits for a place.
func newTransport(cfg Config, log *slog.Logger) (*http.Client, *versionNegotiator, *limiter) {
	client := NewHTTPClient(nil)
	if cfg.HTTPClient != nil {
		*client = *cfg.HTTPClient
	}
	wire := client.Transport
	if wire == nil {
		wire = http.DefaultTransport
	}
	if cfg.Observe != nil {
		wire = &observer{observe: cfg.Observe, next: wire}
	}
	limited := newLimiter(boundedAnswers{wire})
	changes := &changeWaiter{next: limited, lostAnswerWait: cmp.Or(cfg.LostAnswerWait, lostAnswerWait)}
	versions := newVersionNegotiator(
		&retrier{next: &credentials{token: cfg.Token, next: changes}},
		&retrier{next: limited},
		cfg.UserAgent,
		log,
	)
	client.Transport = newReadCoalescer(versions)
	// A rack never redirects. Following a redirect would send the token to another server.
	client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	return client, versions, limited
}

// cloneForRetry returns a copy of req with a fresh body. It returns false if the body cannot be read again. The SDK's
// requests always can.
func cloneForRetry(req *http.Request) (*http.Request, bool) {
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

// maxDrain is how many bytes of an unwanted answer are read, so that its connection can be used again.
const maxDrain = 64 << 10

// drain discards an answer. Errors no longer matter.
func drain(resp *http.Response) {
	_, _ = io.CopyN(io.Discard, resp.Body, maxDrain)
	_ = resp.Body.Close()
}

// sleep waits for d. If ctx ends first, it returns the context's error.
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

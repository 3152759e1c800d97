// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package rack

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack"
)

// pipeListener accepts connections that exist in memory only, so that a synctest bubble can have TLS and HTTP/2.
type pipeListener struct {
	accepted chan net.Conn
	closed   chan struct{}
}

func (l pipeListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.accepted:
		return c, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

func (l pipeListener) Close() error   { close(l.closed); return nil }
func (l pipeListener) Addr() net.Addr { return &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)} }

func (l pipeListener) dial(ctx context.Context, _, _ string) (net.Conn, error) {
	ours, theirs := net.Pipe()
	select {
	case l.accepted <- theirs:
		return ours, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// secureRig is a client of a simulated rack over TLS and HTTP/2, in a synctest bubble.
type secureRig struct {
	*Client
	rack      *simrack.Rack
	instances []simrack.InstanceInfo
	// major is the major version of the last request's protocol.
	major atomic.Int64
}

func newSecureRig(t *testing.T) *secureRig {
	t.Helper()
	sim, err := simrack.New(simrack.Options{
		Token: testToken, Project: testProject, Hotplug: true, Instances: []string{"node-a"},
		Log: slog.New(slog.DiscardHandler),
	})
	must(t, err)
	certificate, key, err := simrack.NewCertificate()
	must(t, err)
	pair, err := tls.X509KeyPair(certificate, key)
	must(t, err)
	r := &secureRig{rack: sim, instances: sim.Instances()}
	listener := pipeListener{make(chan net.Conn), make(chan struct{})}
	server := &http.Server{
		Handler: http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			r.major.Store(int64(req.ProtoMajor))
			sim.API().ServeHTTP(w, req)
		}),
		ConnContext: simrack.ConnContext,
		TLSConfig:   &tls.Config{Certificates: []tls.Certificate{pair}},
		ErrorLog:    slog.NewLogLogger(slog.DiscardHandler, 0),
	}
	served := make(chan error, 1)
	go func() { served <- server.ServeTLS(simrack.Listener(listener), "", "") }()
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(certificate)
	client := NewHTTPClient(roots)
	client.Transport.(*http.Transport).DialContext = listener.dial
	r.Client, err = New(Config{
		Name: "east", Host: "https://127.0.0.1", Project: testProject, Token: FixedToken(testToken), HTTPClient: client,
	})
	must(t, err)
	t.Cleanup(func() {
		client.CloseIdleConnections()
		must(t, sim.Close())
		must(t, server.Close())
		if err := <-served; !errors.Is(err, http.ErrServerClosed) {
			t.Error(err)
		}
	})
	return r
}

// inject makes the next call of an operation fail.
func (r *secureRig) inject(t *testing.T, operation, kind string) {
	t.Helper()
	order := httptest.NewRequest(http.MethodPost, "/v0/faults",
		bytes.NewReader(fmt.Appendf(nil, `{"operation":%q,"kind":%q}`, operation, kind)))
	answer := httptest.NewRecorder()
	r.rack.Control().ServeHTTP(answer, order)
	if answer.Code > 299 {
		t.Fatalf("inject: %d %s", answer.Code, answer.Body)
	}
}

// rpcDeadline is the deadline of most RPCs: csi-provisioner, csi-attacher and csi-snapshotter, --timeout.
const rpcDeadline = 15 * time.Second

// With HTTP/2 all calls share one connection. When it goes silent, each call still ends within the deadline of an RPC.
func TestSilentConnection(t *testing.T) {
	for _, operation := range []string{"disk_view", "instance_disk_attach"} {
		t.Run(operation, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newSecureRig(t)
				disk, err := r.CreateDisk(t.Context(), DiskSpec{Name: "d", SizeBytes: gib, BlockSize: 4096})
				must(t, err)
				if r.major.Load() != 2 {
					t.Fatalf("the request came with HTTP/%d, want 2", r.major.Load())
				}
				r.inject(t, operation, "silent")
				results := make(chan error)
				for range 4 {
					go func() {
						ctx, cancel := context.WithTimeout(t.Context(), rpcDeadline)
						defer cancel()
						var err error
						if operation == "disk_view" {
							_, err = r.Disk(ctx, disk.VolumeID)
						} else {
							_, err = r.Attach(ctx, disk.ID, r.instances[0].ID)
						}
						results <- err
					}()
				}
				for range 4 {
					must(t, <-results)
				}
			})
		})
	}
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package kubetest

import (
	"context"
	"net"
	"testing"
	"testing/synctest"
)

// InBubble runs a test in a bubble of testing/synctest, where time passes only while all goroutines wait.
func InBubble(t *testing.T, test func(t *testing.T)) {
	t.Helper()
	t.Parallel()
	synctest.Test(t, test)
}

// pipeListener accepts connections made by its dial method. They are pipes in memory: a pending read from a socket
// would stop a bubble's clock.
type pipeListener struct {
	accepted chan net.Conn
	closed   context.Context
	close    context.CancelFunc
}

func newPipeListener() *pipeListener {
	l := &pipeListener{accepted: make(chan net.Conn)}
	l.closed, l.close = context.WithCancel(context.Background())
	return l
}

func (l *pipeListener) dial(ctx context.Context, _, _ string) (net.Conn, error) {
	near, far := net.Pipe()
	select {
	case l.accepted <- far:
		return near, nil
	case <-l.closed.Done():
		return nil, net.ErrClosed
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// Accept implements net.Listener.
func (l *pipeListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.accepted:
		return c, nil
	case <-l.closed.Done():
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener.
func (l *pipeListener) Close() error {
	l.close()
	return nil
}

// Addr implements net.Listener. The certificate of an httptest.Server is for this address.
func (l *pipeListener) Addr() net.Addr { return &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 443} }

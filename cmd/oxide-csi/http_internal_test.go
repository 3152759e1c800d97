// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main

import (
	"bufio"
	"context"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/core/config"
)

// The HTTP endpoint serves a bounded number of connections. The next one waits until another closes or is idle: clients
// that keep their connections open must not keep the probes out.
func TestHTTPConnectionsAreBounded(t *testing.T) {
	free, err := net.Listen("tcp", "127.0.0.1:0")
	mustWork(t, err)
	mustWork(t, free.Close())
	addr := free.Addr().String()
	busy := make(chan struct{})
	live := func(context.Context) error { <-busy; return nil }
	stop, err := serveHTTP(
		config.Config{HTTPEndpoint: addr},
		live,
		nil,
		nil,
		newLogger(config.Config{}, &strings.Builder{}),
	)
	mustWork(t, err)
	defer stop()
	dial := func() net.Conn {
		conn, err := net.Dial("tcp", addr)
		mustWork(t, err)
		t.Cleanup(func() { _ = conn.Close() }) // some are closed already
		_, err = conn.Write([]byte("GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"))
		mustWork(t, err)
		return conn
	}
	answered := func(conn net.Conn, wait time.Duration) bool {
		mustWork(t, conn.SetReadDeadline(time.Now().Add(wait)))
		resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
		return err == nil && resp.StatusCode == http.StatusOK
	}
	const answerTimeout = 20 * time.Second
	var open []net.Conn
	for range maxHTTPConnections {
		open = append(open, dial())
	}
	next := dial()
	if answered(next, 100*time.Millisecond) {
		t.Errorf("connection %d was served", maxHTTPConnections+1)
	}
	close(busy)
	for n, conn := range append(open, next) {
		if !answered(conn, answerTimeout) {
			t.Fatalf("connection %d got no answer", n+1)
		}
	}
	for n := range 2 * maxHTTPConnections { // all of them stay open and idle
		if !answered(dial(), answerTimeout) {
			t.Fatalf("connection %d got no answer beside idle ones", n+1)
		}
	}
}

func mustWork(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

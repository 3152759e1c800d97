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

// The HTTP endpoint serves a bounded number of connections. A new one, which may be a probe, never waits: the oldest is
// closed, whatever it does.
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
	dial := func(page string) net.Conn {
		conn, err := net.Dial("tcp", addr)
		mustWork(t, err)
		t.Cleanup(func() { _ = conn.Close() }) // some are closed already
		mustWork(t, conn.SetDeadline(time.Now().Add(20*time.Second)))
		_, err = conn.Write([]byte("GET " + page + " HTTP/1.1\r\nHost: x\r\n\r\n"))
		mustWork(t, err)
		return conn
	}
	answered := func(conn net.Conn) bool {
		resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
		return err == nil && resp.StatusCode == http.StatusOK
	}
	var waiting []net.Conn
	for range maxHTTPConnections {
		waiting = append(waiting, dial("/livez"))
	}
	for n := range 3 {
		if !answered(dial("/readyz")) {
			t.Errorf("connection %d got no answer beside those that wait", n+1)
		}
	}
	if answered(waiting[0]) {
		t.Errorf("%d connections were open", maxHTTPConnections+1)
	}
	close(busy)
	for n, conn := range waiting[3:] {
		if !answered(conn) {
			t.Fatalf("connection %d was closed without need", n+4)
		}
	}
}

func mustWork(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

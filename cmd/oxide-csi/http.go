// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"
	"net/netip"
	"sync"
	"syscall"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/core/config"
	"github.com/oxidecomputer/oxide-csi-plugin/core/metrics"
)

// readinessCheck is a part that may prevent the plugin from being ready.
type readinessCheck interface {
	// Ready reports whether the part is ready. If not, reason says what it waits for.
	Ready() (bool, string)
}

// Limits of the HTTP endpoint, which has no authentication.
const (
	maxHTTPConnections = 64
	maxHTTPHeaderBytes = 16 << 10
	// httpTimeout bounds the reading of a request. It also bounds the answer, from the end of the request's header.
	httpTimeout = 10 * time.Second
)

// httpInterval is the time between two attempts to listen on an address that is in use.
const httpInterval = 5 * time.Second

// serveHTTP serves health and metrics, and profiles if they are configured. Without an address it serves nothing. The
// plugin is live if live returns no error. A plugin that waits for its identity or its rack is live too, because
// restarting the plugin would not help.
//
// An address in use is no error: a killed plugin keeps its address while one of its threads waits for a disk, and the
// volumes of the other disks need this plugin. serveHTTP tries again until the address is free.
func serveHTTP(
	cfg config.Config,
	live func(context.Context) error,
	checks []readinessCheck,
	measured *metrics.Metrics,
	log *slog.Logger,
) (stop func(), err error) {
	if cfg.HTTPEndpoint == "" {
		return func() {}, nil
	}
	listener, err := net.Listen("tcp", cfg.HTTPEndpoint)
	if err != nil && !errors.Is(err, syscall.EADDRINUSE) {
		return nil, fmt.Errorf("serve HTTP on %s: %w", cfg.HTTPEndpoint, err)
	}
	if err != nil {
		log.Error("the HTTP endpoint is in use: trying again; the plugin serves CSI without it", "error", err)
	}
	server := &http.Server{
		Handler:        pages(cfg, live, checks, measured),
		ReadTimeout:    httpTimeout,
		WriteTimeout:   httpTimeout,
		MaxHeaderBytes: maxHTTPHeaderBytes,
		ConnState:      (&connections{opened: map[net.Conn]uint64{}}).changed,
	}
	server.SetKeepAlivesEnabled(false) // otherwise a client could send requests without end on one connection
	stopping, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for listener == nil {
			select {
			case <-stopping:
				return
			case <-time.After(httpInterval):
			}
			again, err := net.Listen("tcp", cfg.HTTPEndpoint)
			if err != nil {
				log.Debug("the HTTP endpoint is still not available", "error", err)
				continue
			}
			listener = again
		}
		if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
			log.Error("the HTTP endpoint failed; the plugin continues to serve CSI", "error", err)
		}
	}()
	return func() {
		close(stopping)
		if err := server.Close(); err != nil {
			log.Warn("close the HTTP endpoint", "error", err)
		}
		<-done
	}, nil
}

// pages serves health and metrics, and profiles if they are configured.
func pages(
	cfg config.Config,
	live func(context.Context) error,
	checks []readinessCheck,
	measured *metrics.Metrics,
) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /livez", func(w http.ResponseWriter, r *http.Request) {
		if err := live(r.Context()); err != nil {
			w.WriteHeader(http.StatusServiceUnavailable)
			fmt.Fprintf(w, "not live: %s\n", err)
			return
		}
		fmt.Fprintln(w, "ok")
	})
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		if ready, reason := allReady(checks); !ready {
			w.WriteHeader(http.StatusServiceUnavailable)
			fmt.Fprintf(w, "not ready: %s\n", reason)
			return
		}
		fmt.Fprintln(w, "ok")
	})
	measured.RegisterReady(func() bool { ready, _ := allReady(checks); return ready })
	mux.Handle("GET /metrics", measured)
	if cfg.Pprof {
		mux.HandleFunc("GET /debug/pprof/", pprof.Index)
		mux.HandleFunc("GET /debug/pprof/cmdline", pprof.Cmdline)
		mux.HandleFunc("GET /debug/pprof/profile", slow(pprof.Profile))
		mux.HandleFunc("GET /debug/pprof/trace", slow(pprof.Trace))
	}
	return mux
}

// slow lets a page take longer than [httpTimeout]. The page extends the time for its answer by itself. But the end of
// the time for reading would end its context.
func slow(page http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if err := http.NewResponseController(w).SetReadDeadline(time.Time{}); err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		page(w, r)
	}
}

// allReady reports whether all checks say that the plugin is ready, and the reason of the first that does not.
func allReady(checks []readinessCheck) (ready bool, reason string) {
	for _, check := range checks {
		if ready, reason := check.Ready(); !ready {
			return false, reason
		}
	}
	return true, ""
}

// connections limits the number of open connections. A new connection may be a probe, and a probe that waits gets the
// plugin restarted. So a new connection never waits: over the limit, another one is closed.
type connections struct {
	mu sync.Mutex
	// opened holds the open connections, numbered in the order in which they were opened.
	opened map[net.Conn]uint64
	last   uint64
}

// changed is for [http.Server.ConnState].
func (c *connections) changed(conn net.Conn, state http.ConnState) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch state {
	case http.StateNew:
		c.last++
		c.opened[conn] = c.last
	case http.StateClosed, http.StateHijacked:
		delete(c.opened, conn)
	case http.StateActive, http.StateIdle:
	}
	if len(c.opened) > maxHTTPConnections {
		surplus := c.surplus()
		delete(c.opened, surplus)
		abort(surplus)
	}
}

// surplus returns the connection to close: the oldest of the address with the most connections. So one client cannot
// close the connections of the others.
func (c *connections) surplus() net.Conn {
	count := map[netip.Addr]int{}
	for conn := range c.opened {
		count[remote(conn)]++
	}
	var surplus net.Conn
	for conn, number := range c.opened {
		if surplus == nil || count[remote(conn)] > count[remote(surplus)] ||
			count[remote(conn)] == count[remote(surplus)] && number < c.opened[surplus] {
			surplus = conn
		}
	}
	return surplus
}

// remote returns the address of a client.
func remote(conn net.Conn) netip.Addr { return conn.RemoteAddr().(*net.TCPAddr).AddrPort().Addr() }

// abort closes a connection at once. Otherwise the kernel would keep what its client has not read, for minutes.
func abort(conn net.Conn) {
	_ = conn.(*net.TCPConn).SetLinger(0) // fails only if the connection is closed
	_ = conn.Close()                     // the server sees the end
}

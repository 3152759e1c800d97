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
	"sync"
	"syscall"
	"time"

	"golang.org/x/net/netutil"

	"github.com/oxidecomputer/oxide-csi-plugin/core/config"
	"github.com/oxidecomputer/oxide-csi-plugin/core/metrics"
)

// readinessCheck is a part that may prevent the plugin from being ready.
type readinessCheck interface {
	// Ready reports whether the part is ready. If not, reason says what it waits for.
	Ready() (bool, string)
}

// Limits of the HTTP endpoint, which has no authentication. A connection costs memory, and Prometheus keeps one open
// between its scrapes.
const (
	maxHTTPConnections = 64
	httpIdleTimeout    = 2 * time.Minute
)

// httpInterval is the time between two attempts to listen on an address that is in use.
const httpInterval = 5 * time.Second

// serveHTTP serves health and metrics, and profiles if they are configured. The plugin is live if live returns no
// error. A plugin that waits for its identity or its rack is live too, because restarting the plugin would not help.
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
	listener, err := net.Listen("tcp", cfg.HTTPEndpoint)
	if err != nil && !errors.Is(err, syscall.EADDRINUSE) {
		return nil, fmt.Errorf("serve HTTP on %s: %w", cfg.HTTPEndpoint, err)
	}
	if err != nil {
		log.Error("the HTTP endpoint is in use: trying again; the plugin serves CSI without it", "error", err)
	}
	server := &http.Server{
		Handler:           pages(cfg, live, checks, measured),
		ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout:       httpIdleTimeout,
		ConnState:         newIdleConnections().changed,
	}
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
		if err := server.Serve(netutil.LimitListener(listener, maxHTTPConnections)); !errors.Is(err, http.ErrServerClosed) {
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
		mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
		mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	}
	return mux
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

// idleConnections closes idle connections while the limit is reached. Otherwise clients that keep theirs open would
// keep the probes out, and the orchestrator would restart the plugin.
type idleConnections struct {
	mu   sync.Mutex
	open int
	idle map[net.Conn]bool
}

func newIdleConnections() *idleConnections { return &idleConnections{idle: map[net.Conn]bool{}} }

// changed is for [http.Server.ConnState].
func (i *idleConnections) changed(conn net.Conn, state http.ConnState) {
	i.mu.Lock()
	defer i.mu.Unlock()
	delete(i.idle, conn)
	switch state {
	case http.StateNew:
		i.open++
	case http.StateIdle:
		i.idle[conn] = true
	case http.StateClosed, http.StateHijacked:
		i.open--
	case http.StateActive:
	}
	if i.open >= maxHTTPConnections {
		for conn := range i.idle {
			_ = conn.Close() // the server sees the end, and calls this function again
		}
	}
}

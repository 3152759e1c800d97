// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/core/config"
	"github.com/oxidecomputer/oxide-csi-plugin/core/metrics"
)

// readinessCheck is a part that may prevent the plugin from being ready.
type readinessCheck interface {
	// Ready reports whether the part is ready. If not, reason says what it waits for.
	Ready() (bool, string)
}

// serveHTTP serves health and metrics, and profiles if they are configured. The process is live if it answers. A plugin
// that waits for its identity or its rack is live too, because restarting the plugin would not help.
func serveHTTP(
	cfg config.Config,
	checks []readinessCheck,
	measured *metrics.Metrics,
	log *slog.Logger,
) (stop func(), err error) {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /livez", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprintln(w, "ok")
	})
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		for _, check := range checks {
			if ready, reason := check.Ready(); !ready {
				w.WriteHeader(http.StatusServiceUnavailable)
				fmt.Fprintf(w, "not ready: %s\n", reason)
				return
			}
		}
		fmt.Fprintln(w, "ok")
	})
	mux.Handle("GET /metrics", measured)
	if cfg.Pprof {
		mux.HandleFunc("GET /debug/pprof/", pprof.Index)
		mux.HandleFunc("GET /debug/pprof/cmdline", pprof.Cmdline)
		mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
		mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	}
	listener, err := net.Listen("tcp", cfg.HTTPEndpoint)
	if err != nil {
		return nil, fmt.Errorf("serve HTTP on %s: %w", cfg.HTTPEndpoint, err)
	}
	server := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
			log.Error("the HTTP endpoint failed; the plugin continues to serve CSI", "error", err)
		}
	}()
	return func() {
		if err := server.Close(); err != nil {
			log.Warn("close the HTTP endpoint", "error", err)
		}
		<-done
	}, nil
}

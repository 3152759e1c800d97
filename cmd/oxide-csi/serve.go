// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
	"k8s.io/klog/v2"

	"github.com/oxidecomputer/oxide-csi-plugin/core"
	"github.com/oxidecomputer/oxide-csi-plugin/core/config"
	"github.com/oxidecomputer/oxide-csi-plugin/core/hostexec"
	"github.com/oxidecomputer/oxide-csi-plugin/core/redact"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
	"github.com/oxidecomputer/oxide-csi-plugin/core/socket"
)

// serve builds the plugin and serves until a signal.
func serve(ctx context.Context, cfg config.Config, warnings []string, stderr io.Writer) error {
	log := newLogger(cfg, stderr)
	klog.SetSlogLogger(log)
	for _, warning := range warnings {
		log.Warn(warning)
	}
	if err := hostexec.CheckOpenFiles(); err != nil {
		return err
	}
	// Signals are caught before the socket is created, because the socket must be removed at the end.
	signals, release := catchSignals()
	defer release()
	ctx, cancel := context.WithCancel(ctx)
	background := tasks{log: log}
	defer background.Wait()
	defer cancel()

	listener, err := listen(cfg, log)
	if err != nil {
		return err
	}
	var current atomic.Pointer[socket.Listener]
	current.Store(listener)
	readiness, registration, measured := &core.Readiness{}, newRegistration(cfg, log), newMetrics(cfg)
	built, err := buildServices(ctx, cfg, readiness, registration, measured, &background, log)
	if err != nil {
		return errors.Join(err, listener.Close())
	}
	live := func(ctx context.Context) error { return current.Load().CheckLive(ctx) }
	closeHTTP, err := serveHTTP(cfg, live, built.checks, measured, log)
	if err != nil {
		return errors.Join(err, listener.Close())
	}
	defer closeHTTP()
	server := core.NewServer(built.server)
	served := make(chan error, 1)
	// The server is no background task: after a second signal the process does not wait for it.
	serveOn := func(listener *socket.Listener) {
		if err := server.Serve(listener); listener == current.Load() { // otherwise another has taken its place
			served <- err
		}
	}
	go serveOn(listener)
	lost := make(chan error, 1)
	endChecks := background.runUntil(ctx, "check the socket", func(ctx context.Context) {
		lost <- keepSocket(ctx, cfg.Endpoint, &current, serveOn, log)
	})
	background.run("tell systemd", func() { notifySystemd(ctx, readiness, built.checks, log) })
	log.Info("serving", "version", version, "mode", cfg.Mode, "endpoint", cfg.Endpoint)
	stop := func() {
		notify(daemon.SdNotifyStopping, log)
		endChecks() // a server that stops removes its socket, also while it waits for calls in flight
		stopServing(ctx, server, built)
	}
	if err := serveUntilSignal(served, lost, signals, stop, log); err != nil {
		return fmt.Errorf("serve on %s: %w", cfg.Endpoint, err)
	}
	log.Info("stopped")
	return nil
}

// listen opens the plugin's socket.
func listen(cfg config.Config, log *slog.Logger) (*socket.Listener, error) {
	listener, err := socket.Listen(cfg.Endpoint)
	if err == nil && listener.TookOver {
		log.Warn(
			"another process has the socket and does not respond: look for a plugin with a thread in state D, which waits for a disk",
			"endpoint",
			cfg.Endpoint,
		)
	}
	return listener, err
}

// catchSignals returns the signals that stop the plugin. It also catches SIGPIPE, which nothing reads: otherwise a
// write to a log without a reader would end the process during an RPC. SIGPIPE is caught and not ignored, because mkfs
// and mount would inherit an ignored signal.
func catchSignals() (signals <-chan os.Signal, release func()) {
	stops := make(chan os.Signal, 2)
	signal.Notify(stops, syscall.SIGTERM, os.Interrupt)
	pipes := make(chan os.Signal, 1)
	signal.Notify(pipes, syscall.SIGPIPE)
	return stops, func() {
		signal.Stop(stops)
		signal.Stop(pipes)
	}
}

// lostTimeout is how long the plugin waits for calls in flight after it has lost its socket. A call that waits for a
// disk may never end.
const lostTimeout = 30 * time.Second

// keepSocket makes the socket again when its file was removed, and serves on it. It returns an error when it cannot,
// for example because another process listens there, and nil when ctx ends.
func keepSocket(
	ctx context.Context,
	endpoint string,
	current *atomic.Pointer[socket.Listener],
	serveOn func(*socket.Listener),
	log *slog.Logger,
) error {
	for ctx.Err() == nil {
		lost := current.Load()
		reason := lost.CheckFile()
		if reason == nil {
			lost.WaitForChange(ctx)
			continue
		}
		made, err := socket.Listen(endpoint)
		if err != nil {
			return fmt.Errorf("%w; it cannot be made again: %w", reason, err)
		}
		log.Warn("made the socket again", "reason", reason)
		current.Store(made)
		go serveOn(made)
		if err := lost.Close(); err != nil {
			log.Warn("could not close the lost socket", "error", err)
		}
	}
	return nil
}

// serveUntilSignal calls stop after the first signal, which waits for calls in flight. After a second signal it returns
// an error at once. If the socket is lost, it calls stop and returns an error: the next plugin makes the socket again.
func serveUntilSignal(served, lost <-chan error, signals <-chan os.Signal, stop func(), log *slog.Logger) error {
	var reason error
	var timeout <-chan time.Time
	select {
	case err := <-served:
		return err
	case reason = <-lost:
		log.Error("stopping: no client reaches this plugin", "error", reason)
		timeout = time.After(lostTimeout)
	case s := <-signals:
		log.Info("stopping: waiting for calls in flight; a second signal ends them", "signal", s.String())
	}
	stopped := make(chan struct{})
	go func() {
		stop()
		close(stopped)
	}()
	select {
	case <-stopped:
		return errors.Join(reason, <-served)
	case <-timeout:
		return reason
	case s := <-signals:
		return fmt.Errorf("a second signal (%s) ended calls in flight", s)
	}
}

// retireTimeout bounds handing over the planned restarts in progress. After the timeout another controller takes over
// the remaining restarts when their leases expire.
const retireTimeout = 5 * time.Second

// stopServing hands over the planned restarts in progress, and waits for calls in flight, and then for what goes on
// after its call. Calls that wait for a restart return when the restart is handed over.
func stopServing(ctx context.Context, server *core.Server, built services) {
	var stopping sync.WaitGroup
	stopping.Go(server.Stop)
	if built.retire != nil {
		ctx, cancel := context.WithTimeout(ctx, retireTimeout)
		defer cancel()
		built.retire(ctx)
	}
	stopping.Wait()
	if built.finish != nil {
		built.finish()
	}
}

// tasks runs background tasks. A panic in a task is logged, and the plugin continues to serve.
type tasks struct {
	sync.WaitGroup
	log *slog.Logger
}

// run starts a task. The name is only for the log.
func (t *tasks) run(name string, task func()) {
	t.Go(func() {
		defer func() {
			if reason := recover(); reason != nil {
				rpc.LogPanic(t.log, slog.String("task", name), reason)
			}
		}()
		task()
	})
}

// runUntil is run for a task that the function end ends. It waits for the task's end.
func (t *tasks) runUntil(ctx context.Context, name string, task func(context.Context)) (end func()) {
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan struct{})
	t.run(name, func() {
		defer close(ended)
		task(ctx)
	})
	return func() {
		cancel()
		<-ended
	}
}

func newLogger(cfg config.Config, stderr io.Writer) *slog.Logger {
	opts := &slog.HandlerOptions{Level: cfg.LogLevel, ReplaceAttr: func(groups []string, attr slog.Attr) slog.Attr {
		return redact.Attribute(groups, withRackRequestID(groups, attr))
	}}
	if cfg.LogFormat == config.LogJSON {
		return slog.New(slog.NewJSONHandler(stderr, opts))
	}
	return slog.New(slog.NewTextHandler(stderr, opts))
}

// withRackRequestID adds the rack's request ID to an error that a rack answered. It is for [slog.HandlerOptions].
func withRackRequestID(_ []string, attr slog.Attr) slog.Attr {
	if err, ok := attr.Value.Any().(error); ok {
		if requestID := rpc.RackRequestID(err); requestID != "" {
			attr.Value = slog.StringValue(fmt.Sprintf("%s (the rack's request ID is %s)", err, requestID))
		}
	}
	return attr
}

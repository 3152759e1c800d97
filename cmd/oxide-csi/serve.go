// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"runtime/debug"
	"sync"
	"syscall"
	"time"

	"k8s.io/klog/v2"

	"github.com/oxidecomputer/oxide-csi-plugin/cmd/oxide-csi/kubelet"
	"github.com/oxidecomputer/oxide-csi-plugin/cmd/oxide-csi/nodelifecycle"
	"github.com/oxidecomputer/oxide-csi-plugin/core"
	"github.com/oxidecomputer/oxide-csi-plugin/core/config"
	"github.com/oxidecomputer/oxide-csi-plugin/core/controller"
	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
	"github.com/oxidecomputer/oxide-csi-plugin/core/metrics"
	"github.com/oxidecomputer/oxide-csi-plugin/core/node"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/restart"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata/kubernetes"
)

// serve builds the plugin and serves until a signal.
func serve(ctx context.Context, cfg config.Config, warnings []string, stderr io.Writer) error {
	log := newLogger(cfg, stderr)
	klog.SetSlogLogger(log)
	for _, warning := range warnings {
		log.Warn(warning)
	}
	// From here on a signal stops the process in order. This comes before the socket is made, which must be removed.
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, syscall.SIGTERM, os.Interrupt)
	defer signal.Stop(signals)
	// This channel is never read. Without it, writing to a log that has lost its reader would end the process in the
	// middle of an RPC. The signal is not ignored, because mkfs and mount would inherit that.
	unread := make(chan os.Signal, 1)
	signal.Notify(unread, syscall.SIGPIPE)
	defer signal.Stop(unread)
	ctx, stop := context.WithCancel(ctx)
	background := tasks{log: log}
	defer background.Wait()
	defer stop()

	listener, err := core.Listen(cfg.Endpoint)
	if err != nil {
		return err
	}
	readiness := &core.Readiness{}
	registration := newRegistration(cfg, log)
	var measured *metrics.Metrics // nil without an HTTP endpoint
	if cfg.HTTPEndpoint != "" {
		measured = metrics.New(metrics.Process{Driver: rpc.PluginName, Version: version, Mode: string(cfg.Mode)})
	}
	services, retire, err := build(ctx, cfg, readiness, registration, measured, &background, log)
	if err != nil {
		return errors.Join(err, listener.Close())
	}
	if cfg.HTTPEndpoint != "" {
		closeHTTP, err := serveHTTP(cfg, []waiting{readiness, registration}, measured, log)
		if err != nil {
			return errors.Join(err, listener.Close())
		}
		defer closeHTTP()
	}
	server := core.NewServer(services)
	served := make(chan error, 1)
	// This is no background task: after a second signal the process does not wait for it.
	go func() { served <- server.Serve(listener) }()
	log.Info("serving", "version", version, "mode", cfg.Mode, "endpoint", cfg.Endpoint)
	if err := serveUntilSignal(served, signals, func() { stopServing(ctx, server, retire) }, log); err != nil {
		return fmt.Errorf("serve on %s: %w", cfg.Endpoint, err)
	}
	log.Info("stopped")
	return nil
}

// build makes the configured services and starts their background tasks. It also returns the function that hands planned
// restarts over, which is nil without a controller.
func build(
	ctx context.Context,
	cfg config.Config,
	readiness *core.Readiness,
	registration *kubelet.Registration,
	measured *metrics.Metrics,
	background *tasks,
	log *slog.Logger,
) (opts core.ServerOptions, retire func(context.Context), err error) {
	opts = core.ServerOptions{
		Mode:     string(cfg.Mode),
		Identity: core.NewIdentity(version, cfg.ClusterID, readiness),
		Metrics:  measured,
		Log:      log,
	}
	if cfg.Mode.Controller() {
		service, err := buildController(ctx, cfg, measured, background, log)
		if err != nil {
			return core.ServerOptions{}, nil, err
		}
		opts.Controller, retire = service, service.RetireRestarts
	}
	if cfg.Mode.Node() {
		service := buildNode(ctx, cfg, readiness, registration, background, log)
		measured.RegisterNodeVolumes(service.Volumes)
		opts.Node = service
	}
	return opts, retire, nil
}

// buildController makes the controller service, and starts the background tasks for its racks.
func buildController(
	ctx context.Context,
	cfg config.Config,
	measured *metrics.Metrics,
	background *tasks,
	log *slog.Logger,
) (*controller.Service, error) {
	var racks []*rack.Client
	for _, of := range cfg.RackList() {
		client, err := newRack(of, measured, log)
		if err != nil {
			return nil, err
		}
		racks = append(racks, client)
		background.run("check rack "+client.Name(), func() { checkRack(ctx, client, log) })
	}
	service := controller.New(controller.Options{
		Racks:       racks,
		Cluster:     cfg.ClusterID,
		MaxDisks:    cfg.MaxDisks,
		DetachGrace: cfg.DetachGrace,
		Restarts:    plannedRestarts(ctx, cfg, background, log),
		Metrics:     measured,
		Log:         log,
	})
	service.StartSweeping(ctx)
	for _, client := range racks {
		background.run("planned restarts on rack "+client.Name(), func() {
			if cfg.RestartsPlanned() {
				service.PlanRestarts(ctx, client)
			} else {
				service.CleanUpRestarts(ctx, client, restart.Options{HaltTimeout: cfg.RestartHaltTimeout})
			}
		})
	}
	return service, nil
}

// buildNode makes the node service, and starts its background tasks, such as finding its identity.
func buildNode(
	ctx context.Context,
	cfg config.Config,
	readiness *core.Readiness,
	registration *kubelet.Registration,
	background *tasks,
	log *slog.Logger,
) *node.Service {
	identity := provider(cfg, log)
	readiness.SetWaiting("identity of this node")
	background.run("find out which node this is, and register it", func() {
		readiness.AwaitIdentity(ctx, identity, log)
		registration.Run(ctx)
	})
	if cfg.RestartsPlanned() {
		background.run("answer planned restarts", func() { answerRestarts(ctx, cfg, identity, log) })
	}
	if cfg.StartupTaint != "" {
		background.run("remove the startup taint", func() {
			nodelifecycle.ClearTaint(ctx, kubernetes.NewNode(kubernetesOptions(cfg)), cfg.StartupTaint, identity, log)
		})
	}
	return node.New(node.Options{
		Provider:       identity,
		Rack:           cfg.Rack,
		MaxDisks:       cfg.MaxDisks,
		ReserveDisks:   cfg.ReserveDisks,
		Devices:        device.Roots{Dev: cfg.DevRoot, Sys: cfg.SysRoot},
		StateDir:       cfg.StateDir,
		BlankScanLimit: int64(cfg.BlankScanLimit),
		DeviceTimeout:  cfg.DeviceTimeout,
		Log:            log,
	})
}

// newRegistration returns nil if the plugin does not register with a kubelet.
func newRegistration(cfg config.Config, log *slog.Logger) *kubelet.Registration {
	socket := cfg.KubeletSocket()
	if socket == "" {
		return nil
	}
	return kubelet.New(kubelet.Options{Socket: socket, Endpoint: cfg.Endpoint, Log: log})
}

// tasks are background tasks. A panic in a task is logged, and serving continues.
type tasks struct {
	sync.WaitGroup
	log *slog.Logger
}

func (t *tasks) run(what string, task func()) {
	t.Go(func() {
		defer func() {
			if reason := recover(); reason != nil {
				t.log.Error("panic", "task", what, "type", fmt.Sprintf("%T", reason), "stack", string(debug.Stack()))
			}
		}()
		task()
	})
}

func newLogger(cfg config.Config, stderr io.Writer) *slog.Logger {
	opts := &slog.HandlerOptions{Level: cfg.LogLevel}
	if cfg.LogFormat == config.LogJSON {
		return slog.New(slog.NewJSONHandler(stderr, opts))
	}
	return slog.New(slog.NewTextHandler(stderr, opts))
}

func newRack(cfg config.Rack, measured *metrics.Metrics, log *slog.Logger) (*rack.Client, error) {
	token := rack.FixedToken(cfg.Token.Reveal())
	if cfg.TokenFile != "" {
		token = rack.TokenFile(cfg.TokenFile, log)
	}
	roots, err := config.ReadCAs(cfg.CAFile)
	if err != nil {
		return nil, fmt.Errorf("rack %q: %w", cfg.Name, err)
	}
	return rack.New(rack.Config{
		Name:       cfg.Name,
		Host:       cfg.Host,
		Project:    cfg.Project,
		Token:      token,
		UserAgent:  "oxide-csi/" + version,
		HTTPClient: rack.NewHTTPClient(roots),
		Log:        log,
		Observe:    measured.RackObserver(cfg.Name),
	})
}

// rackCheckTimeout bounds the calls made at start.
const rackCheckTimeout = 30 * time.Second

// checkRack asks the rack for its API version and the project. So the log shows a wrong host, token or project before the
// first volume, and a later 404 of a disk can be trusted. Serving does not depend on it.
func checkRack(ctx context.Context, client *rack.Client, log *slog.Logger) {
	ctx, cancel := context.WithTimeout(ctx, rackCheckTimeout)
	defer cancel()
	id, err := client.Check(ctx)
	switch {
	case err == nil:
		log.Info("the rack answers", "rack", client.Name(), "project", client.ProjectName(), "project_id", id)
	case !errors.Is(err, context.Canceled):
		log.Error("the rack cannot be used as configured: RPCs that need it will fail", "rack", client.Name(), "error", err)
	}
}

// serveUntilSignal stops serving after the first signal and returns when calls in flight have ended. After a second signal
// it returns an error at once.
func serveUntilSignal(served <-chan error, signals <-chan os.Signal, stop func(), log *slog.Logger) error {
	select {
	case err := <-served:
		return err
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
		return <-served
	case s := <-signals:
		return fmt.Errorf("a second signal (%s) ended calls in flight", s)
	}
}

// retireTime is how long handing restarts over may take. Another controller takes over the rest later.
const retireTime = 5 * time.Second

// stopServing waits for calls in flight, and hands over the restarts in progress. Calls that wait for these restarts then
// return.
func stopServing(ctx context.Context, server *core.Server, retire func(context.Context)) {
	var both sync.WaitGroup
	both.Go(server.Stop)
	if retire != nil {
		ctx, cancel := context.WithTimeout(ctx, retireTime)
		defer cancel()
		retire(ctx)
	}
	both.Wait()
}

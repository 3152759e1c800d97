// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/cmd/oxide-csi/kubelet"
	"github.com/oxidecomputer/oxide-csi-plugin/cmd/oxide-csi/nodelifecycle"
	"github.com/oxidecomputer/oxide-csi-plugin/core"
	"github.com/oxidecomputer/oxide-csi-plugin/core/config"
	"github.com/oxidecomputer/oxide-csi-plugin/core/controller"
	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
	"github.com/oxidecomputer/oxide-csi-plugin/core/luks"
	"github.com/oxidecomputer/oxide-csi-plugin/core/metrics"
	"github.com/oxidecomputer/oxide-csi-plugin/core/node"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/restart"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator/choice"
)

// services are what the plugin serves.
type services struct {
	server core.ServerOptions
	// retire hands planned restarts over to another controller. It is nil without a controller.
	retire func(context.Context)
	// finish waits for work that goes on after its call. It is nil without a node.
	finish func()
	checks []readinessCheck
}

// buildServices builds the services of the configured mode and starts their background tasks.
func buildServices(
	ctx context.Context,
	cfg config.Config,
	readiness *core.Readiness,
	registration *kubelet.Registration,
	measured *metrics.Metrics,
	background *tasks,
	log *slog.Logger,
) (services, error) {
	built := services{checks: []readinessCheck{readiness, registration}, server: core.ServerOptions{
		Mode:     string(cfg.Mode),
		Identity: core.NewIdentity(version, cfg.ClusterID, readiness),
		Metrics:  measured,
		Log:      log,
	}}
	if cfg.Mode.Controller() {
		service, checks, err := buildController(ctx, cfg, measured, background, log)
		if err != nil {
			return services{}, err
		}
		built.server.Controller, built.retire, built.checks = service, service.RetireRestarts, append(built.checks, checks...)
	}
	if cfg.Mode.Node() {
		service := buildNode(ctx, cfg, readiness, registration, background, log)
		measured.RegisterNodeVolumes(service.Volumes)
		built.server.Node, built.finish = service, service.Finish
	}
	return built, nil
}

// buildController builds the controller service and starts the background tasks for its racks. There is one check for
// each rack.
func buildController(
	ctx context.Context,
	cfg config.Config,
	measured *metrics.Metrics,
	background *tasks,
	log *slog.Logger,
) (*controller.Service, []readinessCheck, error) {
	var racks []*rack.Client
	var checks []readinessCheck
	for _, rackConfig := range cfg.RackList() {
		client, err := newRack(rackConfig, cfg.MaxDisks, measured, log)
		if err != nil {
			return nil, nil, err
		}
		answers := &core.Readiness{}
		answers.SetWaiting(fmt.Sprintf("the first response of rack %q", client.Name()))
		racks, checks = append(racks, client), append(checks, answers)
		background.run("check rack "+client.Name(), func() { watchRack(ctx, client, answers, log) })
	}
	asked := choice.Of(cfg)
	service := controller.New(controller.Options{
		Racks:        racks,
		Cluster:      cfg.ClusterID,
		MaxDisks:     cfg.MaxDisks,
		DetachGrace:  cfg.DetachGrace,
		Restarts:     plannedRestarts(ctx, cfg, background, log),
		Orchestrator: asked.Claims,
		Self:         asked.Self,
		Metrics:      measured,
		Log:          log,
	})
	service.StartSweeping(ctx)
	for _, client := range racks {
		measured.RegisterRack(client.Name(), client.Calls, func() int { return service.UnfinishedExpansions(client) })
		background.run("expiry of the token of rack "+client.Name(), func() { service.WatchToken(ctx, client) })
		background.run("deferred detaches on rack "+client.Name(), func() { service.DetachLater(ctx, client) })
		background.run("planned restarts on rack "+client.Name(), func() {
			if cfg.RestartsPlanned() {
				service.PlanRestarts(ctx, client)
			} else {
				service.CleanUpRestarts(ctx, client, restart.Options{HaltTimeout: cfg.RestartHaltTimeout})
			}
		})
	}
	return service, checks, nil
}

// buildNode builds the node service and starts its background tasks, such as finding the node's identity.
func buildNode(
	ctx context.Context,
	cfg config.Config,
	readiness *core.Readiness,
	registration *kubelet.Registration,
	background *tasks,
	log *slog.Logger,
) *node.Service {
	// The first process of a PID namespace is the host's or the container's. The plugin is never the host's.
	if os.Getpid() == 1 {
		log.Warn(
			"this plugin sees no processes of the host: it can neither find nor name programs that have a volume's disk open: " +
				"run it with hostPID: true (Kubernetes) or pid_mode = \"host\" (Nomad)",
		)
	}
	if err := luks.DisableCoreDumps(); err != nil {
		log.Warn("a core dump may contain passphrases of encrypted disks", "error", err)
	}
	identity := provider(cfg, log)
	readiness.SetWaiting("identity of this node")
	background.run("find the identity of this node, and register the plugin", func() {
		readiness.AwaitIdentity(ctx, identity, log)
		registration.Run(ctx)
	})
	if cfg.RestartsPlanned() {
		background.run("reply to restart requests", func() { replyToRestarts(ctx, cfg, identity, log) })
	}
	switch taint := choice.Of(cfg).StartupTaint; {
	case cfg.StartupTaint == "":
	case taint == nil:
		log.Error("the startup taint stays: this is not a pod of Kubernetes, and no --kubeconfig is set")
	default:
		background.run("remove the startup taint", func() {
			nodelifecycle.ClearTaint(ctx, taint, cfg.StartupTaint, identity, log)
		})
	}
	return node.New(node.Options{
		Provider:        identity,
		Rack:            cfg.Rack,
		MaxDisks:        cfg.MaxDisks,
		ReserveDisks:    cfg.ReserveDisks,
		Devices:         device.Roots{Dev: cfg.DevRoot, Sys: cfg.SysRoot},
		StateDir:        cfg.StateDir,
		BlankScanLimit:  int64(cfg.BlankScanLimit),
		LUKSMemoryBytes: int64(cfg.LUKSMemory),
		DeviceTimeout:   cfg.DeviceTimeout,
		Log:             log,
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

const (
	// rackCheckTimeout bounds one check of a rack.
	rackCheckTimeout = 30 * time.Second
	// rackCheckInterval is the time from a failed check to the next.
	rackCheckInterval = 5 * time.Second
)

// watchRack checks whether the rack can be used as configured: it negotiates the API version and reads the project. It
// repeats a check that failed, and checks again when the rack denies a call later: a token can expire, and a role can
// be taken away. So a wrong host, token or project is logged and shown on /readyz, at the start before the first volume
// is created. A known project also proves that a later 404 of a disk means that the disk does not exist.
//
// The plugin serves meanwhile, and [core.Identity.Probe] says that it is ready: with several racks the others work, and
// an RPC's error tells its caller more than a plugin that does not answer.
func watchRack(ctx context.Context, client *rack.Client, answers *core.Readiness, log *slog.Logger) {
	for {
		checkCtx, cancel := context.WithTimeout(ctx, rackCheckTimeout)
		id, err := client.Check(checkCtx)
		cancel()
		var denied <-chan struct{}
		switch {
		case ctx.Err() != nil:
			return
		case err == nil:
			if answers.SetWaiting("") {
				log.Info("the rack responds", "rack", client.Name(), "project", client.ProjectName(), "project_id", id)
			}
			denied = client.Denied()
		case answers.SetWaiting("cannot be used as configured: " + err.Error()):
			log.Error("the rack cannot be used as configured: RPCs that need it will fail", "rack", client.Name(), "error", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(rackCheckInterval):
		}
		if denied == nil {
			continue
		}
		select {
		case <-ctx.Done():
			return
		case <-denied:
		}
	}
}

// newMetrics returns nil if no HTTP endpoint serves the metrics.
func newMetrics(cfg config.Config) *metrics.Metrics {
	if cfg.HTTPEndpoint == "" {
		return nil
	}
	return metrics.New(metrics.Process{Driver: rpc.PluginName, Version: version, Mode: string(cfg.Mode)})
}

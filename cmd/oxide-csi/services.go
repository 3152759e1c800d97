// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main

import (
	"context"
	"errors"
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
	"github.com/oxidecomputer/oxide-csi-plugin/core/metrics"
	"github.com/oxidecomputer/oxide-csi-plugin/core/node"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/restart"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata/kubernetes"
)

// buildServices builds the services of the configured mode and starts their background tasks. retire hands planned
// restarts over to another controller; it is nil without a controller.
func buildServices(
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

// buildController builds the controller service and starts the background tasks for its racks.
func buildController(
	ctx context.Context,
	cfg config.Config,
	measured *metrics.Metrics,
	background *tasks,
	log *slog.Logger,
) (*controller.Service, error) {
	var racks []*rack.Client
	for _, rackConfig := range cfg.RackList() {
		client, err := newRack(rackConfig, measured, log)
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
	identity := provider(cfg, log)
	readiness.SetWaiting("identity of this node")
	background.run("find the identity of this node, and register the plugin", func() {
		readiness.AwaitIdentity(ctx, identity, log)
		registration.Run(ctx)
	})
	if cfg.RestartsPlanned() {
		background.run("reply to restart requests", func() { replyToRestarts(ctx, cfg, identity, log) })
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

// newRack builds the client of a rack.
func newRack(cfg config.Rack, measured *metrics.Metrics, log *slog.Logger) (*rack.Client, error) {
	token := rack.FixedToken(cfg.Token.Reveal())
	if cfg.TokenFile != "" {
		token = rack.TokenFile(cfg.TokenFile, log)
	}
	client := rack.NewHTTPClient(nil)
	if cfg.CAFile != "" {
		var err error
		if client, err = rack.NewHTTPClientWithCAs(cfg.CAFile, config.ReadCAs, log.With("rack", cfg.Name)); err != nil {
			return nil, fmt.Errorf("rack %q: %w", cfg.Name, err)
		}
	}
	return rack.New(rack.Config{
		Name:       cfg.Name,
		Host:       cfg.Host,
		Project:    cfg.Project,
		Token:      token,
		UserAgent:  "oxide-csi/" + version,
		HTTPClient: client,
		Log:        log,
		Observe:    measured.RackObserver(cfg.Name),
	})
}

// rackCheckTimeout bounds [checkRack].
const rackCheckTimeout = 30 * time.Second

// checkRack negotiates the API version with the rack and reads the project. It logs a wrong host, token or project
// before the first volume is created. A known project also proves that a later 404 of a disk means that the disk does
// not exist. The plugin serves even if the check fails.
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

// newMetrics returns nil if no HTTP endpoint serves the metrics.
func newMetrics(cfg config.Config) *metrics.Metrics {
	if cfg.HTTPEndpoint == "" {
		return nil
	}
	return metrics.New(metrics.Process{Driver: rpc.PluginName, Version: version, Mode: string(cfg.Mode)})
}

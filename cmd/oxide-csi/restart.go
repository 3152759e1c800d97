// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main

import (
	"context"
	"log/slog"
	"sync/atomic"

	"github.com/oxidecomputer/oxide-csi-plugin/core/config"
	"github.com/oxidecomputer/oxide-csi-plugin/core/controller"
	"github.com/oxidecomputer/oxide-csi-plugin/core/restart"
	"github.com/oxidecomputer/oxide-csi-plugin/core/shutdown"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata/kubernetes"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata/nomad"
)

// plannedRestarts are the options for planning restarts, or nil in attach mode hot. The configuration was validated.
func plannedRestarts(
	ctx context.Context,
	cfg config.Config,
	background *tasks,
	log *slog.Logger,
) *controller.PlannedRestarts {
	if !cfg.RestartsPlanned() {
		return nil
	}
	policy := restart.Allow
	if cfg.AttachMode == config.AttachPlan {
		policy = restart.Plan
	}
	times, _ := cfg.RestartTimes()
	return &controller.PlannedRestarts{
		Wait: cfg.RestartWait,
		Options: restart.Options{
			Policy:      policy,
			Shutdown:    restart.Shutdown(cfg.RestartShutdown),
			Requester:   newRequester(cfg),
			Self:        ownInstance(ctx, cfg, background, log),
			Window:      cfg.RestartWindow,
			MaxDown:     cfg.RestartMaxDown,
			CoolDown:    cfg.RestartCoolDown,
			NextStart:   times.Next,
			HaltTimeout: cfg.RestartHaltTimeout,
		},
	}
}

// ownInstance returns a function that returns the instance that this controller runs on, once it is known.
func ownInstance(ctx context.Context, cfg config.Config, background *tasks, log *slog.Logger) func() (string, bool) {
	if cfg.Metadata == config.MetadataNone {
		return func() (string, bool) { return "", true }
	}
	var found atomic.Pointer[string]
	identity := provider(cfg, log)
	told := false
	background.run("find out on which instance the controller runs", func() {
		self, err := metadata.Await(ctx, identity, func(err error) bool {
			if !told {
				log.Warn(
					"no instance is restarted until this controller knows its own: set --instance-id, or --metadata=none if it runs on no instance of the rack",
					"error",
					err,
				)
			}
			told = true
			return true
		})
		if err == nil {
			found.Store(&self.ID)
		}
	})
	return func() (string, bool) {
		if id := found.Load(); id != nil {
			return *id, true
		}
		return "", false
	}
}

// newRequester makes the controller's half of planned restarts, or nil without an orchestrator.
func newRequester(cfg config.Config) metadata.RestartRequester {
	switch cfg.Orchestrator() {
	case config.MetadataKubernetes:
		return kubernetes.NewRestarts(kubernetesOptions(cfg))
	case config.MetadataNomad:
		return nomad.NewRestarts(nomadOptions(cfg))
	}
	return nil
}

// newListener makes the node's half of planned restarts, or nil without an orchestrator.
func newListener(cfg config.Config, instanceID string) metadata.RestartListener {
	switch cfg.Orchestrator() {
	case config.MetadataKubernetes:
		return kubernetes.NewListener(kubernetesOptions(cfg))
	case config.MetadataNomad:
		return nomad.NewListener(nomadOptions(cfg), instanceID)
	}
	return nil
}

// poweroff is the method of powering off the guest. The configuration was validated.
func poweroff(cfg config.Config) shutdown.PowerOffMethod {
	if signal, _ := cfg.PoweroffSignal(); signal != 0 {
		return shutdown.Signal{Signal: signal}
	}
	return shutdown.Systemd{Bus: shutdown.SystemBus}
}

// answerRestarts replies to requests for planned restarts of this node until ctx ends.
func answerRestarts(ctx context.Context, cfg config.Config, identity metadata.Provider, log *slog.Logger) {
	self, err := metadata.Await(ctx, identity, func(error) bool { return true })
	if err != nil {
		return // ctx has ended.
	}
	listener := newListener(cfg, self.ID)
	if listener == nil {
		log.Warn(
			"neither Kubernetes nor Nomad tells this node of planned restarts: the controller can only stop its instance (--restart-shutdown=hard)",
		)
		return
	}
	agent, err := shutdown.New(listener, poweroff(cfg), cfg.BootIDFile, log)
	if err != nil {
		log.Error("planned restarts are not answered", "error", err)
		return
	}
	log.Info(
		"planned restarts of this node are answered",
		"by_way_of",
		cfg.Orchestrator(),
		"poweroff",
		cfg.RestartPoweroff,
	)
	agent.Run(ctx)
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package main

import (
	"context"
	"fmt"
	"log/slog"
	"sync/atomic"

	"github.com/oxidecomputer/oxide-csi-plugin/core/config"
	"github.com/oxidecomputer/oxide-csi-plugin/core/controller"
	"github.com/oxidecomputer/oxide-csi-plugin/core/restart"
	"github.com/oxidecomputer/oxide-csi-plugin/core/shutdown"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata/guest"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator/choice"
)

// plannedRestarts returns the options for planned restarts, or nil in attach mode hot. The configuration is valid.
func plannedRestarts(
	ctx context.Context,
	cfg config.Config,
	background *tasks,
	log *slog.Logger,
) *controller.PlannedRestarts {
	if !cfg.RestartsPlanned() {
		return nil
	}
	times, _ := cfg.RestartTimes() // the configuration is valid
	adapter := choice.Of(cfg)
	return &controller.PlannedRestarts{
		Wait:   cfg.RestartWait,
		Claims: adapter.ClaimReporter,
		Options: restart.Options{
			Shutdown:    restart.Shutdown(cfg.RestartShutdown),
			Requester:   adapter.Restarts,
			Drainer:     adapter.Drainer,
			Self:        ownInstance(ctx, cfg, background, log),
			Window:      cfg.RestartWindow,
			MaxDown:     cfg.RestartMaxDown,
			CoolDown:    cfg.RestartCoolDown,
			NextStart:   times.Next,
			HaltTimeout: cfg.RestartHaltTimeout,
		},
	}
}

// ownInstance finds the instance that this controller runs on, in the background. The returned function returns its ID,
// or false while it is unknown. The ID is empty if the controller runs on no instance of the rack.
func ownInstance(ctx context.Context, cfg config.Config, background *tasks, log *slog.Logger) func() (string, bool) {
	if cfg.Metadata == config.MetadataNone {
		return func() (string, bool) { return "", true }
	}
	var found atomic.Pointer[string]
	identity := provider(cfg, log)
	warned := false
	background.run("find the instance of this controller", func() {
		self, err := metadata.Await(ctx, identity, func(err error) bool {
			if !warned {
				log.Warn("no restart starts: this controller does not know its own instance: set --instance-id, "+
					"or --metadata=none if it runs on no instance of the rack", "error", err)
			}
			warned = true
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

// powerOffMethod returns the configured method of powering off the guest. The configuration is valid.
func powerOffMethod(cfg config.Config) shutdown.PowerOffMethod {
	if signal, _ := cfg.PoweroffSignal(); signal != 0 {
		return shutdown.Signal{Signal: signal}
	}
	return shutdown.Systemd{Bus: shutdown.SystemBus}
}

// ownGuest is a method of powering off that first checks that firmware and configuration name the same instance. The
// operator's instance ID wins over the firmware's, so a copied one can name another instance: this guest would go down
// in its place, and no controller would start this guest again.
type ownGuest struct {
	shutdown.PowerOffMethod

	instanceID string
	firmware   metadata.Provider
}

// Check implements [shutdown.PowerOffMethod]. A firmware that names no instance of a rack is not compared.
func (g ownGuest) Check(ctx context.Context) error {
	if found, err := g.firmware.Instance(ctx); err == nil && found.ID != g.instanceID {
		return fmt.Errorf("this guest is instance %s by its firmware, and instance %s by its configuration: "+
			"correct --instance-id, the file with the identity, or the label of its Node", found.ID, g.instanceID)
	}
	return g.PowerOffMethod.Check(ctx)
}

// replyToRestarts replies to requests to restart this node until ctx ends.
func replyToRestarts(ctx context.Context, cfg config.Config, identity metadata.Provider, log *slog.Logger) {
	self, err := metadata.Await(ctx, identity, func(error) bool { return true })
	if err != nil {
		return // ctx has ended.
	}
	asked := choice.Of(cfg)
	if asked.Listener == nil {
		log.Warn("this node gets no restart requests: neither Kubernetes nor Nomad is configured; " +
			"the controller can only stop the instance, with --restart-shutdown=hard")
		return
	}
	method := ownGuest{
		PowerOffMethod: powerOffMethod(cfg),
		instanceID:     self.ID,
		firmware:       guest.New(guest.Options{Sys: cfg.SysRoot}),
	}
	agent, err := shutdown.New(asked.Listener(self.ID), method, cfg.BootIDFile, shutdown.Uptime, log)
	if err != nil {
		log.Error("this node does not reply to restart requests", "error", err)
		return
	}
	log.Info("replying to restart requests", "orchestrator", asked.Name, "poweroff", cfg.RestartPoweroff)
	agent.Run(ctx)
}

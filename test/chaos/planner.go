// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package main

import (
	"context"
	"flag"
	"log/slog"
	"os"
	"os/signal"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/core"
	"github.com/oxidecomputer/oxide-csi-plugin/core/config"
	"github.com/oxidecomputer/oxide-csi-plugin/core/controller"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/restart"
	"github.com/oxidecomputer/oxide-csi-plugin/core/socket"
)

// planner is an environment variable that makes this program a controller: in attach mode restart ([forRestarts]),
// under Nomad ([forNomad]), or both ([forNomadRestarts]). The controller has a shorter lease and shorter waits than the
// plugin's program. With the plugin's lease of a minute, the work of a killed controller would wait for most of a run.
const planner = "CHAOS_PLANNER"

// Values of [planner].
const (
	forRestarts      = "restarts"
	forNomad         = "nomad"
	forNomadRestarts = "nomad-restarts"
)

// claimsDir is an environment variable with the folder of [claims], for a controller under Nomad.
const claimsDir = "CHAOS_CLAIMS"

// Options of the planners.
const (
	plannedLease    = 12 * time.Second
	plannedCoolDown = 3 * time.Second
	maxDown         = 2
)

// plannerOptions are the options of a controller in which the kinds differ.
func plannerOptions(kind string) (o controller.Options) {
	o.MaxDisks = maxDisks
	if kind != forRestarts {
		o.MaxDisks, o.DetachGrace, o.Orchestrator = nomadMaxDisks, nomadGrace, claims(os.Getenv(claimsDir))
	}
	if kind != forNomad {
		o.Restarts = &controller.PlannedRestarts{Options: restart.Options{
			Shutdown:    restart.Hard,
			Window:      300 * time.Millisecond,
			MaxDown:     maxDown,
			CoolDown:    plannedCoolDown,
			HaltTimeout: 10 * time.Second,
			Poll:        100 * time.Millisecond,
			Idle:        500 * time.Millisecond,
			Lease:       plannedLease,
		}}
	}
	return o
}

// runPlanner runs a controller until it gets a signal, and then ends like the plugin. It accepts the flags that
// simtest.StartPlugin passes to a controller.
func runPlanner(kind string, args []string) (err error) {
	flags := flag.NewFlagSet("planner", flag.ContinueOnError)
	endpoint, mode := flags.String("endpoint", "", ""), flags.String("mode", "", "")
	host, project := flags.String("oxide-host", "", ""), flags.String("oxide-project", "", "")
	token, cluster := flags.String("oxide-token-file", "", ""), flags.String("cluster-id", "", "")
	ca := flags.String("oxide-ca-file", "", "")
	if err := flags.Parse(args); err != nil {
		return err
	}
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGTERM, os.Interrupt)
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	log := slog.New(slog.NewTextHandler(os.Stderr, nil)).With("pid", os.Getpid())
	web, err := rack.NewHTTPClientWithCAs(*ca, config.ReadCAs, log)
	if err != nil {
		return err
	}
	client, err := rack.New(rack.Config{
		Name: "default", Host: *host, Project: *project, Log: log, HTTPClient: web,
		Token: func() (string, error) {
			text, err := os.ReadFile(*token)
			return strings.TrimSpace(string(text)), err
		},
	})
	if err != nil {
		return err
	}
	options := plannerOptions(kind)
	options.Racks, options.Cluster, options.Log = []*rack.Client{client}, *cluster, log
	controller := controller.New(options)
	server := core.NewServer(
		core.ServerOptions{
			Mode:       *mode,
			Identity:   core.NewIdentity("chaos", *cluster, &core.Readiness{}),
			Controller: controller,
			Log:        log,
		},
	)
	listener, err := socket.Listen(strings.TrimPrefix(*endpoint, "unix://"))
	if err != nil {
		return err
	}
	controller.StartSweeping(ctx)
	var running sync.WaitGroup
	running.Go(func() { controller.PlanRestarts(ctx, client) })
	running.Go(func() { controller.DetachLater(ctx, client) })
	var served error
	running.Go(func() { served = server.Serve(listener) })
	<-signals
	running.Go(server.Stop)
	controller.RetireRestarts(ctx)
	stop()
	running.Wait()
	return served
}

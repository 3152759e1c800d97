// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package shutdown is the node's part of a planned restart (docs/explanation/racks-without-hotplug.md). It reads the
// controller's request from the orchestrator and powers the guest off from inside. So services and containers get a
// signal to end, and filesystems are unmounted. A stop through the rack's API is a power cut.
package shutdown

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
)

const (
	// firstRetry and longestRetry bound the pause after a failed attempt. The pause doubles with each failure.
	firstRetry   = 5 * time.Second
	longestRetry = time.Minute
	// handleTimeout limits one attempt. A reply must be durable in the orchestrator before the guest goes down.
	handleTimeout = time.Minute
	// maxRequestAge is the age above which a request is refused. It is longer than any drain. An older request may be
	// left from a plugin that was removed, and then no controller would start the instance again.
	maxRequestAge = 2 * time.Hour
)

// PowerOffMethod powers the guest off.
type PowerOffMethod interface {
	// Check returns an error if the guest must not be powered off now. The error is one line and names the next step.
	Check(ctx context.Context) error
	// PowerOff starts the power-off. It returns before the guest is down.
	PowerOff(ctx context.Context) error
}

// Agent replies to the planned restarts of its guest.
type Agent struct {
	listener metadata.RestartListener
	method   PowerOffMethod
	// bootID is the boot ID of the guest.
	bootID string
	log    *slog.Logger

	// poweringOff is the restart for which this process has started the power-off.
	poweringOff string
	// lastProblem is the error of the last attempt. It is logged once.
	lastProblem string
}

// New returns an agent. bootIDFile holds the boot ID: on Linux that is /proc/sys/kernel/random/boot_id.
func New(
	listener metadata.RestartListener,
	method PowerOffMethod,
	bootIDFile string,
	log *slog.Logger,
) (*Agent, error) {
	text, err := os.ReadFile(bootIDFile)
	boot := strings.TrimSpace(string(text))
	if err == nil && boot == "" {
		err = fmt.Errorf("%s is empty", bootIDFile)
	}
	if err != nil {
		return nil, fmt.Errorf(
			"the guest's boot ID is unknown, so planned restarts get no reply: %w",
			err,
		)
	}
	return &Agent{listener: listener, method: method, bootID: boot, log: log}, nil
}

// Run handles requests until ctx ends. Call it once the node plugin serves, because its reply ends a restart. It
// handles a request when the orchestrator reports a change, and again after a failed attempt.
func (a *Agent) Run(ctx context.Context) {
	changes, retry := a.listener.Changes(ctx), firstRetry
	timer := time.NewTimer(retry)
	defer timer.Stop()
	timer.Stop()
	for {
		select {
		case <-changes:
		case <-timer.C:
		case <-ctx.Done():
			return
		}
		if timer.Stop(); a.HandleRequest(ctx) {
			retry = firstRetry
			continue
		}
		timer.Reset(retry)
		retry = min(2*retry, longestRetry)
	}
}

// HandleRequest checks once whether a restart is requested, and replies. It reports whether that succeeded.
func (a *Agent) HandleRequest(ctx context.Context) bool {
	handling, cancel := context.WithTimeout(ctx, handleTimeout)
	defer cancel()
	err := a.handleRequest(handling)
	switch {
	case ctx.Err() != nil:
	case err == nil:
		a.lastProblem = ""
	case err.Error() != a.lastProblem:
		a.lastProblem = err.Error()
		a.log.Error("cannot reply to planned restarts, retrying", "error", err)
	}
	return err == nil
}

func (a *Agent) handleRequest(ctx context.Context) error {
	restart, sent, err := a.listener.Requested(ctx)
	if err != nil || restart == "" {
		return err
	}
	switch {
	case sent.State == metadata.RestartUnanswered:
		err := checkAge(restart)
		if err == nil {
			err = a.method.Check(ctx)
		}
		if err != nil {
			a.log.Warn("refused a planned restart", "restart_id", restart, "reason", err)
			return a.reply(ctx, restart, metadata.RestartRefused, strings.Join(strings.Fields(err.Error()), " "))
		}
		return a.powerOff(ctx, restart)
	case sent.State == metadata.RestartAccepted && sent.Boot != a.bootID:
		a.log.Info("back after a planned restart", "restart_id", restart)
		return a.reply(ctx, restart, metadata.RestartBack, "")
	case sent.State == metadata.RestartAccepted:
		// Accepted by an earlier process, or in a call whose answer was lost. An accepted restart is carried out.
		return a.powerOff(ctx, restart)
	}
	return nil
}

// checkAge rejects an old request. It compares the clocks of two machines: if they differ that much, nothing is powered
// off.
func checkAge(restart string) error {
	if planned, known := metadata.RestartPlannedAt(restart); known && time.Since(planned) > maxRequestAge {
		return fmt.Errorf(
			"restart %s was planned at %s, more than %s ago by this guest's clock: if it is recent, synchronise the clocks",
			restart,
			planned.UTC().Format(time.RFC3339),
			maxRequestAge,
		)
	}
	return nil
}

// powerOff accepts the restart, and powers the guest off once the acceptance is durable. The guest may end this process
// at any time after that.
func (a *Agent) powerOff(ctx context.Context, restart string) error {
	if a.poweringOff == restart {
		return nil
	}
	if err := a.reply(ctx, restart, metadata.RestartAccepted, ""); err != nil {
		return err
	}
	a.log.Info("powering the guest off for a planned restart", "restart_id", restart)
	if err := a.method.PowerOff(ctx); err != nil {
		return fmt.Errorf("power the guest off for restart %s: %w", restart, err)
	}
	a.poweringOff = restart
	return nil
}

func (a *Agent) reply(ctx context.Context, restart string, state metadata.RestartState, reason string) error {
	return a.listener.Reply(ctx, restart, metadata.RestartReply{State: state, Reason: reason, Boot: a.bootID})
}

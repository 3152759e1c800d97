// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package shutdown is the node's part of a planned restart (docs/explanation/racks-without-hotplug.md). It reads the
// controller's request from the orchestrator and powers the guest off from inside. So services and containers get a
// signal to end, and filesystems are unmounted. A stop through the rack's API is a power cut.
package shutdown

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
)

const (
	// firstRetry and longestRetry bound the pause after a failed attempt. The pause doubles with each failure.
	firstRetry   = 5 * time.Second
	longestRetry = time.Minute
	// handleTimeout limits one attempt. A reply must be durable in the orchestrator before the guest goes down.
	handleTimeout = time.Minute
	// maxRequestAge is the age above which no request powers the guest off, accepted or not. It is longer than any drain.
	// An older request may be left from a plugin that was removed, and then no controller would start the instance again.
	maxRequestAge = 2 * time.Hour
	// maxClockSkew is how far the controller's clock may be ahead of the guest's. A request from further in the future
	// would stay valid for longer than maxRequestAge.
	maxClockSkew = 2 * time.Minute
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
	listener orchestrator.RestartListener
	method   PowerOffMethod
	// bootID is the boot ID of the guest.
	bootID string
	uptime func() (time.Duration, error)
	log    *slog.Logger

	// poweringOff is the restart for which this process has started the power-off.
	poweringOff string
	// ignored is the last request that was ignored. It is logged once.
	ignored string
	// lastProblem is the error of the last attempt. It is logged once.
	lastProblem string
}

// New returns an agent. bootIDFile holds the boot ID: on Linux that is /proc/sys/kernel/random/boot_id. uptime returns
// how long ago the guest booted, see [Uptime].
func New(
	listener orchestrator.RestartListener,
	method PowerOffMethod,
	bootIDFile string,
	uptime func() (time.Duration, error),
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
	return &Agent{listener: listener, method: method, bootID: boot, uptime: uptime, log: log}, nil
}

// Uptime returns how long ago this guest booted, with the time for which it was suspended.
func Uptime() (time.Duration, error) {
	var since unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &since); err != nil {
		return 0, fmt.Errorf("read how long ago the guest booted: %w", err)
	}
	return time.Duration(since.Nano()), nil
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
	planned, ok := orchestrator.RestartPlannedAt(restart)
	if !ok {
		a.ignore(restart, errors.New("no controller has planned it: it is not the ID of a restart"))
		return nil
	}
	switch {
	case sent.State == orchestrator.RestartUnanswered:
		err := checkAge(planned)
		if err == nil {
			err = a.checkBoot(planned)
		}
		if err == nil {
			err = a.method.Check(ctx)
		}
		if err != nil {
			a.log.Warn("refused a planned restart", "restart_id", restart, "reason", err)
			return a.reply(ctx, restart, orchestrator.RestartRefused, strings.Join(strings.Fields(err.Error()), " "))
		}
		return a.powerOff(ctx, restart)
	case sent.State == orchestrator.RestartAccepted && sent.Boot != a.bootID:
		a.log.Info("back after a planned restart", "restart_id", restart)
		return a.reply(ctx, restart, orchestrator.RestartBack, "")
	case sent.State == orchestrator.RestartAccepted:
		// Accepted by an earlier process, or in a call whose answer was lost. An accepted restart is carried out, but not
		// hours later: the power-off may have failed, or the plugin may have been away.
		if err := checkAge(planned); err != nil {
			a.ignore(restart, err)
			return nil
		}
		return a.powerOff(ctx, restart)
	}
	return nil
}

// ignore logs a request that gets no reply, once.
func (a *Agent) ignore(restart string, reason error) {
	if a.ignored != restart {
		a.ignored = restart
		// Quoted and cut, because it can be any text.
		a.log.Warn("ignored the request for a restart", "restart_id", fmt.Sprintf("%.40q", restart), "reason", reason)
	}
}

// checkAge rejects a request that is hours old, or from the future. It compares the clocks of two machines: if they
// differ by more than [maxClockSkew], nothing is powered off.
func checkAge(planned time.Time) error {
	age := time.Since(planned)
	switch {
	case age > maxRequestAge:
		return fmt.Errorf("it was planned at %s, more than %s ago by this guest's clock: %s",
			planned.UTC().Format(time.RFC3339), maxRequestAge, synchronise)
	case age < -maxClockSkew:
		return fmt.Errorf("it was planned at %s, in the future by this guest's clock: %s",
			planned.UTC().Format(time.RFC3339), synchronise)
	}
	return nil
}

const synchronise = "if the request is recent, synchronise the clocks of guest and controller"

// checkBoot rejects a request that is older than the guest's boot. An earlier boot may have accepted and carried it
// out, and the reply may be lost since. No skew is tolerated: a controller whose clock is behind is refused right after
// the boot, and plans the restart again later.
func (a *Agent) checkBoot(planned time.Time) error {
	uptime, err := a.uptime()
	if err != nil {
		return err
	}
	if booted := time.Now().Add(-uptime); planned.Before(booted) {
		return fmt.Errorf("it was planned at %s, before this guest booted at %s: wait until the controller plans it again",
			planned.UTC().Format(time.RFC3339), booted.UTC().Format(time.RFC3339))
	}
	return nil
}

// powerOff accepts the restart, and powers the guest off once the acceptance is durable. The guest may end this process
// at any time after that.
func (a *Agent) powerOff(ctx context.Context, restart string) error {
	if a.poweringOff == restart {
		return nil
	}
	if err := a.reply(ctx, restart, orchestrator.RestartAccepted, ""); err != nil {
		return err
	}
	a.log.Info("powering the guest off for a planned restart", "restart_id", restart)
	if err := a.method.PowerOff(ctx); err != nil {
		return fmt.Errorf("power the guest off for restart %s: %w", restart, err)
	}
	a.poweringOff = restart
	return nil
}

func (a *Agent) reply(ctx context.Context, restart string, state orchestrator.RestartState, reason string) error {
	return a.listener.Reply(ctx, restart, orchestrator.RestartReply{State: state, Reason: reason, Boot: a.bootID})
}

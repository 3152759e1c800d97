// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package shutdown is the node's half of a planned restart (docs/explanation/racks-without-hotplug.md): it hears by way of the orchestrator
// that the controller wants its instance stopped, and powers the guest off from inside, so that services and containers are
// asked to end and filesystems are unmounted. A stop by the rack's API is a power cut.
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
	// interval lies between two looks. What a restart costs does not begin before the guest goes down.
	pollInterval = 5 * time.Second
	// lookTimeout bounds one look, in which a word may have to reach other machines before the guest goes down.
	pollTimeout = time.Minute
	// longAgo is when nobody waits any more for a restart that was planned then: longer than the longest drain takes. A question
	// can outlive everybody who would start the instance again, when the plugin is removed for instance, and be found years later.
	maxRequestAge = 2 * time.Hour
)

// PowerOffMethod is a way of powering the guest off.
type PowerOffMethod interface {
	// Check says why the guest cannot or must not be powered off now, and what to do: one line for an operator.
	Check(ctx context.Context) error
	// PowerOff begins it. It returns before the guest is down.
	PowerOff(ctx context.Context) error
}

// Agent answers planned restarts of the guest that it runs in.
type Agent struct {
	listener metadata.RestartListener
	method   PowerOffMethod
	// boot is the guest's boot ID.
	bootID string
	log  *slog.Logger

	// going is the restart for which this process has begun to power the guest off.
	poweringOff string
	// problem is the error of the last look.
	lastProblem string
}

// New makes an agent. The file has the boot ID: Linux has it in /proc/sys/kernel/random/boot_id.
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
			"which boot of the guest this is cannot be told, so planned restarts are not answered: %w",
			err,
		)
	}
	return &Agent{listener: listener, method: method, bootID: boot, log: log}, nil
}

// Run answers until ctx ends. It is called once the node plugin serves: until then a restart is not over.
func (a *Agent) Run(ctx context.Context) {
	for {
		a.Poll(ctx)
		timer := time.NewTimer(pollInterval)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return
		}
	}
}

// Look looks once whether a restart is asked for, and answers.
func (a *Agent) Poll(ctx context.Context) {
	looking, cancel := context.WithTimeout(ctx, pollTimeout)
	defer cancel()
	err := a.poll(looking)
	switch {
	case ctx.Err() != nil:
	case err == nil:
		a.lastProblem = ""
	case err.Error() != a.lastProblem:
		a.lastProblem = err.Error()
		a.log.Error("planned restarts are not answered as they should be; it is tried again", "error", err)
	}
}

func (a *Agent) poll(ctx context.Context) error {
	restart, said, err := a.listener.Requested(ctx)
	if err != nil || restart == "" {
		return err
	}
	switch {
	case said.State == metadata.RestartUnanswered:
		err := checkAge(restart)
		if err == nil {
			err = a.method.Check(ctx)
		}
		if err != nil {
			a.log.Warn("a planned restart is refused", "restart", restart, "reason", err)
			return a.reply(ctx, restart, metadata.RestartRefused, strings.Join(strings.Fields(err.Error()), " "))
		}
		return a.powerOff(ctx, restart)
	case said.State == metadata.RestartAccepted && said.Boot != a.bootID:
		a.log.Info("back after a planned restart", "restart", restart)
		return a.reply(ctx, restart, metadata.RestartBack, "")
	case said.State == metadata.RestartAccepted:
		// Accepted by a process before this one, or by a call whose answer was lost: who accepts goes down.
		return a.powerOff(ctx, restart)
	}
	return nil
}

// checkAge refuses what was planned long ago. The clocks of two machines are compared here: where they are that far apart, nothing
// is powered off.
func checkAge(restart string) error {
	if planned, known := metadata.RestartPlannedAt(restart); known && time.Since(planned) > maxRequestAge {
		return fmt.Errorf(
			"restart %s was planned at %s, which is more than %s ago by this guest's clock: if it was planned just now, set the clocks",
			restart,
			planned.UTC().Format(time.RFC3339),
			maxRequestAge,
		)
	}
	return nil
}

// goDown accepts, and powers the guest off once that is sure to be known, whatever becomes of this process.
func (a *Agent) powerOff(ctx context.Context, restart string) error {
	if a.poweringOff == restart {
		return nil
	}
	if err := a.reply(ctx, restart, metadata.RestartAccepted, ""); err != nil {
		return err
	}
	a.log.Info("powering the guest off for a planned restart", "restart", restart)
	if err := a.method.PowerOff(ctx); err != nil {
		return fmt.Errorf("power the guest off for restart %s: %w", restart, err)
	}
	a.poweringOff = restart
	return nil
}

func (a *Agent) reply(ctx context.Context, restart string, state metadata.RestartState, reason string) error {
	return a.listener.Reply(ctx, restart, metadata.RestartReply{State: state, Reason: reason, Boot: a.bootID})
}

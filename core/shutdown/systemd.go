// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package shutdown

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/godbus/dbus/v5"
)

// SystemBus is the socket of the system D-Bus.
const SystemBus = "/run/dbus/system_bus_socket"

// Systemd powers the guest off by starting systemd's poweroff.target, as systemctl poweroff does without logind.
//
// It asks logind only for inhibitors. A power-off through logind would announce the shutdown, and a kubelet with
// graceful node shutdown would then end the node's pods for good. They must come back on the same node. systemd alone
// stops services, and with them containers, like a power button: SIGTERM, a grace period, SIGKILL, unmount.
type Systemd struct {
	// Bus is the path of the system bus socket, as this process sees it.
	Bus string
}

const (
	manager     = "org.freedesktop.systemd1"
	managerPath = "/org/freedesktop/systemd1"
	login       = "org.freedesktop.login1"
	loginPath   = "/org/freedesktop/login1"
)

// Check implements [PowerOffMethod].
func (s Systemd) Check(ctx context.Context) error {
	bus, err := s.connect(ctx)
	if err != nil {
		return err
	}
	defer bus.Close() // nothing is left to flush
	const get = "org.freedesktop.DBus.Properties.Get"
	if err := bus.Object(manager, managerPath).
		CallWithContext(ctx, get, 0, manager+".Manager", "Version").
		Err; err != nil {
		return fmt.Errorf(
			"systemd does not respond on the system bus: %w; check that it is the guest's process 1, or set --restart-poweroff for this guest",
			err,
		)
	}
	var there bool
	if err := bus.BusObject().
		CallWithContext(ctx, "org.freedesktop.DBus.NameHasOwner", 0, login).
		Store(&there); err != nil {
		return fmt.Errorf("ask the system bus for logind: %w", err)
	}
	if !there {
		return nil // without logind there are no inhibitors
	}
	var held []inhibitor
	if err := bus.Object(login, loginPath).
		CallWithContext(ctx, login+".Manager.ListInhibitors", 0).
		Store(&held); err != nil {
		return fmt.Errorf("list logind's inhibitors: %w", err)
	}
	for _, i := range held {
		if err := i.check(); err != nil {
			return err
		}
	}
	return nil
}

// inhibitor is an inhibitor lock as org.freedesktop.login1.Manager.ListInhibitors returns it.
type inhibitor struct {
	What, Who, Why, Mode string
	UID, PID             uint32
}

// check returns an error if the inhibitor forbids a power-off.
func (i inhibitor) check() error {
	switch {
	case !slices.Contains(strings.Split(i.What, ":"), "shutdown"):
		return nil
	case strings.HasPrefix(i.Mode, "block"):
		return fmt.Errorf(
			"%.64q (process %d) inhibits a shutdown of the guest: %.256q; see systemd-inhibit --list",
			i.Who,
			i.PID,
			i.Why,
		)
	case i.Mode == "delay" && i.Who == "kubelet":
		return errors.New(
			"the kubelet has graceful node shutdown on, which ends pods for good: remove shutdownGracePeriod from its configuration",
		)
	}
	return nil
}

// PowerOff implements [PowerOffMethod].
func (s Systemd) PowerOff(ctx context.Context) error {
	bus, err := s.connect(ctx)
	if err != nil {
		return err
	}
	defer bus.Close() // nothing is left to flush
	// replace-irreversibly: a later job must not cancel the power-off.
	call := bus.Object(manager, managerPath).
		CallWithContext(ctx, manager+".Manager.StartUnit", 0, "poweroff.target", "replace-irreversibly")
	if call.Err != nil {
		return fmt.Errorf("ask systemd for poweroff.target: %w", call.Err)
	}
	return nil
}

func (s Systemd) connect(ctx context.Context) (*dbus.Conn, error) {
	bus, err := dbus.Connect("unix:path="+dbus.EscapeBusAddressValue(s.Bus), dbus.WithContext(ctx))
	if err != nil {
		return nil, fmt.Errorf(
			"connect to the system bus: %w; mount %s into the plugin, or set --restart-poweroff for this guest",
			err,
			s.Bus,
		)
	}
	return bus, nil
}

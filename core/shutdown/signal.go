// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package shutdown

import (
	"context"
	"errors"
	"fmt"
	"os"
	"syscall"
)

// Signal powers the guest off by a signal to its first process: SIGUSR2 for the init of busybox, SIGRTMIN+4 for systemd. It is
// for guests without systemd, or without D-Bus.
type Signal struct{ Signal syscall.Signal }

// Check implements [PowerOffMethod].
func (s Signal) Check(context.Context) error {
	if os.Getpid() == 1 {
		return errors.New(
			"the plugin is the first process that it sees, so it is in a container with processes of its own: let it have the guest's (hostPID)",
		)
	}
	if err := syscall.Kill(1, 0); err != nil {
		return fmt.Errorf("signal the guest's first process: %w; the plugin must run as root", err)
	}
	return nil
}

// PowerOff implements [PowerOffMethod].
func (s Signal) PowerOff(context.Context) error {
	if err := syscall.Kill(1, s.Signal); err != nil {
		return fmt.Errorf("send signal %d to the guest's first process: %w", s.Signal, err)
	}
	return nil
}

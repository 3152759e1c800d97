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

// Signal powers the guest off with a signal to its process 1: SIGUSR2 for busybox init, SIGRTMIN+4 for systemd. It is
// for guests without systemd or without D-Bus.
type Signal struct{ Signal syscall.Signal }

// Check implements [PowerOffMethod].
func (s Signal) Check(context.Context) error {
	if os.Getpid() == 1 {
		return errors.New(
			"the plugin is process 1, so it runs in its own PID namespace: run it in the guest's (hostPID: true)",
		)
	}
	if err := syscall.Kill(1, 0); err != nil {
		return fmt.Errorf("signal the guest's process 1: %w; run the plugin as root", err)
	}
	return nil
}

// PowerOff implements [PowerOffMethod].
func (s Signal) PowerOff(context.Context) error {
	if err := syscall.Kill(1, s.Signal); err != nil {
		return fmt.Errorf("send signal %d to the guest's process 1: %w", s.Signal, err)
	}
	return nil
}

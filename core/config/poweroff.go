// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package config

import (
	"fmt"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// Values of RestartPoweroff: PoweroffSystemd, or poweroffSignal and the name of a signal.
const (
	PoweroffSystemd = "systemd"
	poweroffSignal  = "signal:"
)

// Real-time signals as the C library numbers them: it uses the kernel's first two itself.
const sigrtmin, sigrtmax = 34, 64

// PoweroffSignal is the signal that RestartPoweroff names, or 0 for PoweroffSystemd.
func (c Config) PoweroffSignal() (syscall.Signal, error) {
	if c.RestartPoweroff == PoweroffSystemd {
		return 0, nil
	}
	name, ok := strings.CutPrefix(c.RestartPoweroff, poweroffSignal)
	if signal := signalOf(name); ok && signal != 0 {
		return signal, nil
	}
	return 0, fmt.Errorf("%s is neither systemd nor signal:NAME with a signal such as SIGUSR2 or SIGRTMIN+4",
		quote(c.RestartPoweroff))
}

// signalOf is the signal of that name, or 0.
func signalOf(name string) syscall.Signal {
	name = "SIG" + strings.TrimPrefix(strings.ToUpper(name), "SIG")
	if offset, ok := strings.CutPrefix(name, "SIGRTMIN+"); ok {
		if n, err := strconv.ParseUint(offset, 10, 8); err == nil && sigrtmin+n <= sigrtmax {
			return syscall.Signal(sigrtmin + n)
		}
		return 0
	}
	return unix.SignalNum(name)
}

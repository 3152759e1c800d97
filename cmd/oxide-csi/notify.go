// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package main

import (
	"context"
	"log/slog"
	"os"
	"strings"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"

	"github.com/oxidecomputer/oxide-csi-plugin/core"
)

const (
	// notifyInterval is the time between two looks at the readiness until the plugin knows its identity.
	notifyInterval = 100 * time.Millisecond
	// statusInterval is the same time afterwards.
	statusInterval = time.Second
)

// notifySystemd tells systemd when the plugin serves and knows its identity, and until then what it waits for, so that
// units that come after it start when it can mount volumes (Type=notify). Such units do not wait for a rack: a disk
// that is still attached is mounted without one. Afterwards the status shows what /readyz answers. It does nothing
// under another supervisor.
func notifySystemd(ctx context.Context, identity *core.Readiness, checks []readinessCheck, log *slog.Logger) {
	if os.Getenv("NOTIFY_SOCKET") == "" {
		return
	}
	for said := ""; ; {
		state, interval := "", statusInterval
		known, waiting := identity.Ready()
		ready, reason := allReady(checks)
		switch {
		case !known:
			state, interval = status("waiting for "+waiting), notifyInterval
		case !ready:
			state = daemon.SdNotifyReady + "\n" + status("serving, but not ready: "+reason)
		default:
			state = daemon.SdNotifyReady + "\n" + status("serving")
		}
		if state != said {
			said = state
			notify(state, log)
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(interval):
		}
	}
}

func notify(state string, log *slog.Logger) {
	if _, err := daemon.SdNotify(false, state); err != nil {
		log.Warn("cannot tell systemd the state of this plugin", "error", err)
	}
}

// status is a text that systemctl status shows.
func status(text string) string {
	return "STATUS=" + strings.ReplaceAll(text, "\n", " ")
}

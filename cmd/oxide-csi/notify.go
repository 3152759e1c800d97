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

// notifyInterval is the time between two looks at the readiness.
const notifyInterval = 100 * time.Millisecond

// notifyReady tells systemd when the plugin serves and knows its identity, and until then what it waits for, so that
// units that come after it start when it can mount volumes (Type=notify). It does nothing under another supervisor.
func notifyReady(ctx context.Context, readiness *core.Readiness, log *slog.Logger) {
	if os.Getenv("NOTIFY_SOCKET") == "" {
		return
	}
	for said := ""; ; {
		ready, waiting := readiness.Ready()
		state := daemon.SdNotifyReady + "\n" + status("serving")
		if !ready {
			state = status("waiting for " + waiting)
		}
		if state != said {
			said = state
			notify(state, log)
		}
		if ready {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(notifyInterval):
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

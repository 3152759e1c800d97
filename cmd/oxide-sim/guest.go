// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package main

import (
	"fmt"
	"io"
	"log/slog"
	"time"

	"github.com/spf13/cobra"

	"github.com/oxidecomputer/oxide-csi-plugin/core/config"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/guest/pid1"
)

// guestInitCommand is a minimal init for the guests of serve.
func guestInitCommand(stderr io.Writer) *cobra.Command {
	var grace time.Duration
	cmd := &cobra.Command{
		Use:   "guest-init PROGRAM...",
		Short: "Run as the first process of a guest",
		Long: "guest-init is an init for the guests of oxide-sim serve. A script for --guest-boot ends with\n\n" +
			"    exec oxide-sim guest-init PROGRAM...\n\n" +
			"It starts each PROGRAM, an executable file, and waits for a request to power the machine off: SIGRTMIN+4, which\n" +
			"/v0/halt sends and systemd understands too, or SIGTERM. Then it sends SIGTERM to every process, and SIGKILL after\n" +
			"the grace, unmounts everything that was mounted since the start, and powers off. SIGRTMIN+5 resets the machine instead.",
		RunE: func(_ *cobra.Command, programs []string) error {
			if grace < 0 {
				return config.Problems{{Flag: "--grace", What: fmt.Sprintf("%s is not a time: write one such as 10s", grace)}}
			}
			return pid1.Run(pid1.Options{Services: programs, Grace: grace, Log: slog.New(slog.NewTextHandler(stderr, nil))})
		},
	}
	cmd.Flags().DurationVar(&grace, "grace", 10*time.Second, "wait `TIME` between SIGTERM and SIGKILL")
	return cmd
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build !linux || noplugin

package main

import (
	"context"
	"io"
	"log/slog"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/oxidecomputer/oxide-csi-plugin/cmd/oxide-csi/diagnose"
	"github.com/oxidecomputer/oxide-csi-plugin/core/config"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
)

// Elsewhere than on Linux, such as on an operator's macOS, the program has no plugin. It has the commands that need
// none: they ask racks and orchestrators.

// addPlugin adds only commands that say where those of the plugin run: errors and docs name them.
func addPlugin(root *cobra.Command, _ []string, _, _ io.Writer) {
	withoutPlugin(root)
	for _, name := range []string{"volume", "snapshot", "metadata", "await-detach", "ready"} {
		root.AddCommand(&cobra.Command{
			Use: name, Hidden: true, DisableFlagParsing: true,
			RunE: func(cmd *cobra.Command, _ []string) error {
				return usage("%s needs the plugin: run it on a host of the plugin or in its container", cmd.CommandPath())
			},
		})
	}
}

// hideNodeFlags hides the flags that only a node uses. They stay valid, because one file of settings can serve several
// machines.
func hideNodeFlags(flags *pflag.FlagSet) {
	for _, name := range []string{
		"mode", "state-dir", "instance-id", "metadata", "metadata-file", "attach-mode", "max-disks", "node-name",
		"kubelet-registration-dir",
	} {
		flags.Lookup(name).Hidden = true
	}
}

func guestOf(config.Config) diagnose.Guest { return nil }

func examineHost(context.Context, config.Config, []string, *slog.Logger) (node, restarts []func() []orchestrator.Finding) {
	return nil, nil
}

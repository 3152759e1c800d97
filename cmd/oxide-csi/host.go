// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux && !noplugin

package main

import (
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/oxidecomputer/oxide-csi-plugin/admin"
	"github.com/oxidecomputer/oxide-csi-plugin/core/config"
)

// The plugin runs on Linux. This file adds it to the program, with the commands for its host. elsewhere.go is its
// counterpart.

// addPlugin makes root serve, and adds the commands that need the plugin or its host.
func addPlugin(root *cobra.Command, environ []string, stdout, stderr io.Writer) {
	root.Short, root.Long, root.Example = "CSI plugin for Oxide disks", rootHelp, rootExample
	config.Flags(root.Flags())
	root.RunE = func(cmd *cobra.Command, _ []string) error {
		cfg, warnings, err := config.Load(cmd.Flags(), environ)
		if err != nil {
			helpNewcomer(cmd, stderr, err)
			for _, warning := range warnings {
				fmt.Fprintf(stderr, "oxide-csi: warning: %s\n", warning)
			}
			return err
		}
		return serve(cmd.Context(), cfg, warnings, stderr)
	}
	root.AddCommand(metadataCommand(environ, stdout, stderr), awaitDetachCommand(environ, stderr), readyCommand(stdout))
	root.AddCommand(admin.HostCommands(program(environ, stdout, stderr))...)
}

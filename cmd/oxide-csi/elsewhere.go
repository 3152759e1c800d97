// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build !linux || noplugin

package main

import (
	"io"

	"github.com/spf13/cobra"

	"github.com/oxidecomputer/oxide-csi-plugin/admin"
)

// Elsewhere than on Linux, such as on an operator's macOS, the program has no plugin. It has the commands that need
// none: they ask racks and orchestrators.

// addPlugin adds only commands that say where those of the plugin run: errors and docs name them.
func addPlugin(root *cobra.Command, _ []string, _, _ io.Writer) {
	withoutPlugin(root)
	for _, name := range []string{"volume", "snapshot", "metadata", "await-detach", "ready", "verify-guest"} {
		root.AddCommand(&cobra.Command{
			Use: name, Hidden: true, DisableFlagParsing: true,
			RunE: func(cmd *cobra.Command, _ []string) error {
				return admin.Usage("%s needs the plugin: run it on a host of the plugin or in its container", cmd.CommandPath())
			},
		})
	}
}

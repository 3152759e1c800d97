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

	"github.com/oxidecomputer/oxide-csi-plugin/cmd/oxide-csi/diagnose"
	"github.com/oxidecomputer/oxide-csi-plugin/core/config"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
)

// Elsewhere than on Linux, such as on an operator's macOS, the program has no plugin. It has the commands that need
// none: they ask racks and orchestrators.

func addPlugin(root *cobra.Command, _ []string, _, _ io.Writer) { withoutPlugin(root, root.Name()) }

func guestOf(config.Config) diagnose.Guest { return nil }

func examineHost(context.Context, config.Config, []string, *slog.Logger) []func() []metadata.Finding {
	return nil
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build !linux || noplugin

package admin

import (
	"context"
	"log/slog"

	"github.com/spf13/pflag"

	"github.com/oxidecomputer/oxide-csi-plugin/admin/diagnose"
	"github.com/oxidecomputer/oxide-csi-plugin/core/config"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
)

// Elsewhere than on Linux, such as on an operator's macOS, there is no node to look at.

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

func guestOf(context.Context, config.Config, []string) diagnose.Guest { return nil }

func (o *operator) examineHost(
	context.Context,
	config.Config,
	*slog.Logger,
) (node, restarts []func() []orchestrator.Finding) {
	return nil, nil
}

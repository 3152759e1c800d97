// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/oxidecomputer/oxide-csi-plugin/admin"
	"github.com/oxidecomputer/oxide-csi-plugin/cmd/oxide-csi/nodelifecycle"
	"github.com/oxidecomputer/oxide-csi-plugin/core/config"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator/choice"
)

const awaitDetachHelp = `oxide-csi await-detach is for the preStop hook of the node plugin's container in Kubernetes. On a Node that is given up
(cordoned, deleted, removed by an autoscaler, shutting down) it waits until no volume of the plugin is attached. So the
plugin keeps running until it has unmounted them. On any other Node it ends at once, so that an update does not wait.

It calls Kubernetes with the same settings as the plugin; see docs/reference/configuration.md. The pod's
terminationGracePeriodSeconds must be longer than --timeout.

Exit codes: 0, no volume is attached, or the Node is not given up; 1, volumes are still attached, or Kubernetes does not
respond; 2, the configuration is wrong.`

func awaitDetachCommand(environ []string, stderr io.Writer) *cobra.Command {
	var timeout time.Duration
	cmd := &cobra.Command{
		Use:     "await-detach",
		Short:   "Wait until a Kubernetes Node that is given up has no volumes",
		Long:    awaitDetachHelp,
		Example: `  oxide-csi await-detach --node-name=worker-1 --timeout=2m`,
		Args:    admin.NoArgs,
	}
	flags := cmd.Flags()
	config.IdentityFlags(flags)
	flags.DurationVar(&timeout, "timeout", 5*time.Minute, "how long to wait")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		cfg, warnings, err := config.LoadIdentity(flags, environ)
		for _, warning := range warnings {
			fmt.Fprintf(stderr, "oxide-csi: warning: %s\n", warning)
		}
		var problems config.Problems
		switch {
		case err != nil && !errors.As(err, &problems):
			return err
		case err == nil && cfg.NodeName == "":
			problems = config.Problems{
				{Flag: "--node-name", What: "is required; set OXIDE_CSI_NODE_NAME from spec.nodeName by the downward API"},
			}
		}
		if timeout <= 0 {
			problems = append(problems, config.Problem{Flag: "--timeout", What: fmt.Sprintf("%s is not positive", timeout)})
		}
		if len(problems) > 0 {
			return problems
		}
		ctx, cancel := context.WithTimeout(cmd.Context(), timeout)
		defer cancel()
		node := choice.Of(cfg).Departure
		if node == nil {
			return admin.Usage("await-detach needs Kubernetes: run it in the pod of the plugin, or set --kubeconfig")
		}
		return nodelifecycle.AwaitDetached(ctx, node, newLogger(cfg, stderr))
	}
	return cmd
}

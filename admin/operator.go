// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package admin has the commands of an operator: doctor, explain, orphans and support-bundle, which ask racks and
// orchestrators, and volume and snapshot, which call a running plugin. The plugin that serves imports none of it.
//
//   - operator.go: what the commands of an operator share; commandline.go: arguments and exit codes
//   - doctor.go, explain.go, orphans.go, bundle.go, bundle_logs.go: the commands that need no plugin
//   - volume.go: its first lines list the files of the commands for a plugin's host
//   - verify_guest.go: what an instance shows of its disks
//   - host.go: what doctor and explain look at on this host, on Linux; elsewhere.go: its counterpart on macOS
//   - complete.go: what shells complete; output.go: tables, JSON and texts that are safe for a terminal
package admin

import (
	"fmt"
	"io"
	"log/slog"
	"net/http"

	"github.com/spf13/cobra"

	"github.com/oxidecomputer/oxide-csi-plugin/core/config"
	"github.com/oxidecomputer/oxide-csi-plugin/core/metrics"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata/auto"
)

// The commands of an operator use the plugin's own settings, and need no running plugin.

// operatorHelp ends the help of these commands.
const operatorHelp = `In the plugin's container nothing has to be set. Elsewhere give --kubeconfig or NOMAD_ADDR, and the settings of a rack.`

// Program is what the commands need of the program that has them.
type Program struct {
	Version        string
	Environ        []string
	Stdout, Stderr io.Writer
	// NewRack builds the client of a rack whose requests pass through another transport.
	NewRack func(
		config.Rack, *metrics.Metrics, *slog.Logger, func(http.RoundTripper) http.RoundTripper,
	) (*rack.Client, error)
	// Sources are the sources of this node's identity that the configuration names or suggests.
	Sources func(config.Config, *slog.Logger) []auto.Source
}

// Commands returns the commands that need no plugin: they ask racks and orchestrators.
func Commands(p Program) []*cobra.Command {
	return []*cobra.Command{doctorCommand(p), explainCommand(p), orphansCommand(p), bundleCommand(p)}
}

// operator holds what the commands of an operator share.
type operator struct {
	program        Program
	environ        []string
	stdin          io.Reader
	stdout, stderr io.Writer
	json           bool
}

func newOperator(p Program) *operator {
	return &operator{program: p, environ: p.Environ, stdout: p.Stdout, stderr: p.Stderr}
}

// command adds the flags to a command, and makes it run with the loaded settings.
func (o *operator) command(cmd *cobra.Command, run func(*cobra.Command, config.Config, []string) error) *cobra.Command {
	flags := cmd.Flags()
	flags.BoolVar(&o.json, "json", false, "print the result as one JSON value")
	config.OperatorFlags(flags)
	hideNodeFlags(flags)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		cfg, warnings, err := config.LoadOperator(flags, o.environ)
		for _, warning := range warnings {
			fmt.Fprintf(o.stderr, "oxide-csi: warning: %s\n", warning)
		}
		if err != nil {
			return err
		}
		o.stdin = cmd.InOrStdin()
		return run(cmd, cfg, args)
	}
	return cmd
}

// racks makes the clients of the configured racks. There are none in mode node.
func (o *operator) racks(cfg config.Config, log *slog.Logger) ([]*rack.Client, error) {
	var racks []*rack.Client
	if !cfg.Mode.Controller() {
		return nil, nil
	}
	for _, one := range cfg.RackList() {
		client, err := o.program.NewRack(one, nil, log, func(next http.RoundTripper) http.RoundTripper { return next })
		if err != nil {
			return nil, err
		}
		racks = append(racks, client)
	}
	return racks, nil
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main

import (
	"fmt"
	"io"
	"log/slog"
	"net/http"

	"github.com/spf13/cobra"

	"github.com/oxidecomputer/oxide-csi-plugin/core/config"
	"github.com/oxidecomputer/oxide-csi-plugin/core/metrics"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
)

// The commands of an operator use the plugin's own settings, and need no running plugin.

// operatorHelp ends the help of these commands.
const operatorHelp = `The command reads the plugin's own settings: flags, environment or file. In the plugin's container nothing has to be set.
Elsewhere give it --kubeconfig or NOMAD_ADDR, and the settings of a rack.`

// operator holds what the commands of an operator share.
type operator struct {
	environ        []string
	stdin          io.Reader
	stdout, stderr io.Writer
	json           bool
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
		client, err := newRack(one, nil, log)
		if err != nil {
			return nil, err
		}
		racks = append(racks, client)
	}
	return racks, nil
}

// newRack builds the client of a rack.
func newRack(cfg config.Rack, measured *metrics.Metrics, log *slog.Logger) (*rack.Client, error) {
	return newRackThrough(cfg, measured, log, func(next http.RoundTripper) http.RoundTripper { return next })
}

// newRackThrough builds the client of a rack whose requests pass through another transport.
func newRackThrough(
	cfg config.Rack, measured *metrics.Metrics, log *slog.Logger, through func(http.RoundTripper) http.RoundTripper,
) (*rack.Client, error) {
	token := rack.FixedToken(cfg.Token.Reveal())
	if cfg.TokenFile != "" {
		token = rack.TokenFile(cfg.TokenFile, log)
	}
	client := rack.NewHTTPClient(nil)
	if cfg.CAFile != "" {
		var err error
		if client, err = rack.NewHTTPClientWithCAs(cfg.CAFile, config.ReadCAs, log.With("rack", cfg.Name)); err != nil {
			return nil, fmt.Errorf("rack %q: %w", cfg.Name, err)
		}
	}
	client.Transport = through(client.Transport)
	return rack.New(rack.Config{
		Name:       cfg.Name,
		Host:       cfg.Host,
		Project:    cfg.Project,
		Token:      token,
		UserAgent:  "oxide-csi/" + version,
		HTTPClient: client,
		Log:        log,
		Observe:    measured.RackObserver(cfg.Name),
	})
}

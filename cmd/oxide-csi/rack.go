// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main

import (
	"fmt"
	"log/slog"
	"net/http"

	"github.com/oxidecomputer/oxide-csi-plugin/core/config"
	"github.com/oxidecomputer/oxide-csi-plugin/core/metrics"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
)

// newRack builds the client of a rack whose instances take this number of disks.
func newRack(cfg config.Rack, maxDisks int, measured *metrics.Metrics, log *slog.Logger) (*rack.Client, error) {
	settings, err := rackSettings(cfg, measured, log)
	if err != nil {
		return nil, err
	}
	settings.MaxDisks = maxDisks
	return rack.New(settings)
}

// newRackThrough builds the client of a rack whose requests pass through another transport.
func newRackThrough(
	cfg config.Rack, measured *metrics.Metrics, log *slog.Logger, through func(http.RoundTripper) http.RoundTripper,
) (*rack.Client, error) {
	settings, err := rackSettings(cfg, measured, log)
	if err != nil {
		return nil, err
	}
	settings.HTTPClient.Transport = through(settings.HTTPClient.Transport)
	return rack.New(settings)
}

func rackSettings(cfg config.Rack, measured *metrics.Metrics, log *slog.Logger) (rack.Config, error) {
	token := rack.FixedToken(cfg.Token.Reveal())
	if cfg.TokenFile != "" {
		token = rack.TokenFile(cfg.TokenFile, log)
	}
	client := rack.NewHTTPClient(nil)
	if cfg.CAFile != "" {
		var err error
		if client, err = rack.NewHTTPClientWithCAs(cfg.CAFile, config.ReadCAs, log.With("rack", cfg.Name)); err != nil {
			return rack.Config{}, fmt.Errorf("rack %q: %w", cfg.Name, err)
		}
	}
	return rack.Config{
		Name:       cfg.Name,
		Host:       cfg.Host,
		Project:    cfg.Project,
		Token:      token,
		UserAgent:  "oxide-csi/" + version,
		HTTPClient: client,
		Log:        log,
		Observe:    measured.RackObserver(cfg.Name),
	}, nil
}

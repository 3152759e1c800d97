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

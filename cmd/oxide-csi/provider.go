package main

import (
	"log/slog"

	"github.com/oxidecomputer/oxide-csi-plugin/core/config"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata/static"
)

// provider builds the metadata provider that the configuration names. The configuration was validated: a name that is not
// built has been refused.
func provider(cfg config.Config, log *slog.Logger) metadata.Provider {
	opts := static.Options{InstanceID: cfg.InstanceID, File: cfg.MetadataFile, Log: log}
	if cfg.RackGiven {
		opts.Rack = cfg.Rack
	}
	return static.New(opts)
}

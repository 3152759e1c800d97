// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main

import (
	"log/slog"

	"github.com/oxidecomputer/oxide-csi-plugin/core/config"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata/auto"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata/guest"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata/kubernetes"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata/nomad"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata/static"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator/choice"
)

// provider builds the provider of this node's identity: the operator's explicit values, then the sources that the
// configuration names or suggests.
func provider(cfg config.Config, log *slog.Logger) metadata.Provider {
	explicit := static.Options{InstanceID: cfg.InstanceID, File: cfg.MetadataFile, Log: log}
	if cfg.RackGiven {
		explicit.Rack = cfg.Rack
	}
	opts := auto.Options{Explicit: auto.Source{Name: config.MetadataStatic, Provider: static.New(explicit)}, Log: log}
	if cfg.Mode != config.ModeController { // a controller only wants to know which instance it runs on
		for _, rack := range cfg.Racks {
			opts.Racks = append(opts.Racks, rack.Name)
		}
	}
	for _, name := range sources(cfg) {
		opts.Discovered = append(opts.Discovered, auto.Source{Name: name, Provider: source(name, cfg, log)})
	}
	return auto.New(opts)
}

// sources names the sources to ask after the explicit values. The firmware is first: the rack writes it, and every
// instance has it.
func sources(cfg config.Config) []string {
	switch cfg.Metadata {
	case config.MetadataStatic, config.MetadataNone:
		return nil
	case config.MetadataAuto:
		names := []string{config.MetadataGuest}
		if cfg.NodeName != "" {
			names = append(names, config.MetadataKubernetes)
		}
		if cfg.NomadAddress != "" || cfg.NomadSocket != "" {
			names = append(names, config.MetadataNomad)
		}
		return names
	}
	return []string{cfg.Metadata}
}

// identitySources are these sources with their providers.
func identitySources(cfg config.Config, log *slog.Logger) (all []auto.Source) {
	for _, name := range sources(cfg) {
		all = append(all, auto.Source{Name: name, Provider: source(name, cfg, log)})
	}
	return all
}

// source builds the provider with a name. The configuration was validated, so the name is known.
func source(name string, cfg config.Config, log *slog.Logger) metadata.Provider {
	switch name {
	case config.MetadataKubernetes:
		return kubernetes.New(choice.Kubernetes(cfg))
	case config.MetadataNomad:
		return nomad.New(choice.Nomad(cfg))
	}
	opts := guest.Options{Sys: cfg.SysRoot, Log: log}
	if cfg.SysRoot == "/sys" {
		opts.CloudInit = guest.CloudInit // with another /sys, this file may belong to another machine
	}
	return guest.New(opts)
}

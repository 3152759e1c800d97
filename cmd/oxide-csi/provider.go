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
)

// provider builds what tells who this node is: what the operator says explicitly, and after it the sources that the
// configuration names or suggests.
func provider(cfg config.Config, log *slog.Logger) metadata.Provider {
	explicit := static.Options{InstanceID: cfg.InstanceID, File: cfg.MetadataFile, Log: log}
	if cfg.RackGiven {
		explicit.Rack = cfg.Rack
	}
	opts := auto.Options{Explicit: auto.Source{Name: config.MetadataStatic, Provider: static.New(explicit)}, Log: log}
	for _, name := range sources(cfg) {
		opts.Discovered = append(opts.Discovered, auto.Source{Name: name, Provider: source(name, cfg, log)})
	}
	return auto.New(opts)
}

// sources names what is asked after the operator. The firmware comes first: it is the rack's own word and always there.
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

// source builds the provider of one name. The configuration was validated: there is no other.
func source(name string, cfg config.Config, log *slog.Logger) metadata.Provider {
	switch name {
	case config.MetadataKubernetes:
		return kubernetes.New(kubernetesOptions(cfg))
	case config.MetadataNomad:
		return nomad.New(nomadOptions(cfg))
	}
	opts := guest.Options{Sys: cfg.SysRoot, Log: log}
	if cfg.SysRoot == "/sys" {
		opts.CloudInit = guest.CloudInit // which is this machine's only where /sys is
	}
	return guest.New(opts)
}

// kubernetesOptions say which Node this is, and how to ask for it.
func kubernetesOptions(cfg config.Config) kubernetes.Options {
	return kubernetes.Options{
		NodeName: cfg.NodeName, Kubeconfig: cfg.Kubeconfig, Host: cfg.KubernetesHost, Port: cfg.KubernetesPort,
		RackLabel: cfg.RackLabel,
	}
}

// nomadOptions say how to ask the Nomad agent.
func nomadOptions(cfg config.Config) nomad.Options {
	return nomad.Options{
		Socket:        cfg.NomadSocket,
		Address:       cfg.NomadAddress,
		TokenFile:     cfg.NomadTokenFile,
		Token:         cfg.NomadToken.Reveal(),
		CACert:        cfg.NomadCACert,
		ClientCert:    cfg.NomadClientCert,
		ClientKey:     cfg.NomadClientKey,
		TLSServerName: cfg.NomadTLSServerName,
	}
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package choice chooses the orchestrator that the configuration names. No other code does.
package choice

import (
	"github.com/oxidecomputer/oxide-csi-plugin/core/config"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata/kubernetes"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata/nomad"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
	kubernetesadapter "github.com/oxidecomputer/oxide-csi-plugin/orchestrator/kubernetes"
	nomadadapter "github.com/oxidecomputer/oxide-csi-plugin/orchestrator/nomad"
)

// Of returns the adapter of the configured orchestrator. Without one, it returns the zero value.
func Of(cfg config.Config) orchestrator.Adapter {
	switch cfg.Orchestrator() {
	case config.MetadataKubernetes:
		return kubernetesadapter.New(Kubernetes(cfg))
	case config.MetadataNomad:
		return nomadadapter.New(Nomad(cfg), neededPolicies(cfg))
	}
	if cfg.NomadAllocation != "" && cfg.Orchestrator() == "" {
		// This task of Nomad was told no address of an agent. It asks at the default address: without an answer each disk
		// stays attached.
		return orchestrator.Adapter{Claims: nomadadapter.NewOperator(Nomad(cfg))}
	}
	return orchestrator.Adapter{}
}

// Kubernetes are the options for Kubernetes: this Node, and how to reach the API server.
func Kubernetes(cfg config.Config) kubernetes.Options {
	return kubernetes.Options{
		NodeName: cfg.NodeName, Kubeconfig: cfg.Kubeconfig, Host: cfg.KubernetesHost, Port: cfg.KubernetesPort,
		RackLabel: cfg.RackLabel,
	}
}

// Nomad are the options for reaching the Nomad agent.
func Nomad(cfg config.Config) nomad.Options {
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

// neededPolicies are the policies of Nomad that this process needs: in an allocation of the plugin those of its job,
// and elsewhere that of a user of volumes.
func neededPolicies(cfg config.Config) (names []string) {
	if cfg.NomadSocket == "" {
		return []string{nomadadapter.PolicyOperator}
	}
	restarts := cfg.AttachMode == config.AttachRestart
	if cfg.Mode.Node() {
		names = append(names, nomadadapter.PolicyNode)
		if restarts {
			names = append(names, nomadadapter.PolicyRestartNode)
		}
	}
	if cfg.Mode.Controller() {
		names = append(names, nomadadapter.PolicyController)
	}
	if cfg.Mode.Controller() && restarts {
		names = append(names, nomadadapter.PolicyRestartController)
		if cfg.RestartShutdown == config.ShutdownDrain {
			names = append(names, nomadadapter.PolicyRestartDrain)
		}
	}
	return names
}

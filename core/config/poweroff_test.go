// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package config

import (
	"strings"
	"syscall"
	"testing"
)

func TestPoweroffSignal(t *testing.T) {
	for text, want := range map[string]syscall.Signal{
		"systemd": 0, "signal:SIGUSR2": syscall.SIGUSR2, "signal:usr2": syscall.SIGUSR2, "signal:TERM": syscall.SIGTERM,
		"signal:SIGRTMIN+4": 38, "signal:rtmin+0": 34, "signal:SIGRTMIN+30": 64,
	} {
		if got, err := (Config{RestartPoweroff: text}).PoweroffSignal(); err != nil || got != want {
			t.Errorf("%s: %d, %v; want %d", text, got, err, want)
		}
	}
	for _, text := range []string{"", "Systemd", "SIGUSR2", "signal:", "signal:USR3", "signal:SIGSIGUSR2", "signal:12", "signal:RTMIN", "signal:RTMIN+31", "signal:RTMIN+-1"} {
		if got, err := (Config{RestartPoweroff: text}).PoweroffSignal(); err == nil {
			t.Errorf("%s: %d", text, got)
		}
	}
}

func TestOrchestrator(t *testing.T) {
	for want, all := range map[string][]Config{
		"":                 {{}, {Metadata: "guest"}, {NodeName: "worker-3"}},
		MetadataKubernetes: {{Metadata: MetadataKubernetes}, {KubernetesHost: "10.96.0.1", Metadata: "static"}, {Kubeconfig: "/etc/k"}, {KubernetesHost: "10.96.0.1", NomadAddress: "http://x"}},
		MetadataNomad:      {{Metadata: MetadataNomad, KubernetesHost: "10.96.0.1"}, {NomadAddress: "http://x"}, {NomadSocket: "unix:///x"}},
	} {
		for _, c := range all {
			if got := c.Orchestrator(); got != want {
				t.Errorf("%+v: %q, want %q", c, got, want)
			}
		}
	}
}

// In Kubernetes a node plugin needs its Node's name to receive requests for a restart.
func TestRestartNeedsTheNodeName(t *testing.T) {
	args := []string{"--endpoint=/run/x.sock", "--mode=node", "--attach-mode=restart"}
	for name, tt := range map[string]struct {
		environ []string
		says    string
	}{
		"a bare host":       {nil, ""},
		"in Nomad":          {[]string{"NOMAD_ADDR=http://127.0.0.1:4646"}, ""},
		"in Kubernetes":     {[]string{"KUBERNETES_SERVICE_HOST=10.96.0.1", "OXIDE_CSI_NODE_NAME=worker-3"}, ""},
		"no Node name":      {[]string{"KUBERNETES_SERVICE_HOST=10.96.0.1"}, "--node-name: is required with --attach-mode=restart in Kubernetes"},
		"with a kubeconfig": {[]string{"OXIDE_CSI_KUBECONFIG=/etc/k"}, "--node-name: is required with --attach-mode=restart in Kubernetes"},
	} {
		t.Run(name, func(t *testing.T) {
			_, _, err := load(t, args, tt.environ, "")
			if tt.says == "" && err != nil || tt.says != "" && (err == nil || !strings.Contains(err.Error(), tt.says)) {
				t.Errorf("%v, want %q", err, tt.says)
			}
		})
	}
}

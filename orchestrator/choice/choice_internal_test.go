// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package choice

import (
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/core/config"
)

// In an allocation of the plugin the token needs the policies of the plugin's job. Elsewhere it is an operator's token.
func TestNeededPolicies(t *testing.T) {
	const socket = "unix:///secrets/api.sock"
	for want, cfg := range map[string]config.Config{
		"operator":   {Mode: config.ModeController, AttachMode: config.AttachRestart},
		"node":       {Mode: config.ModeNode, NomadSocket: socket, AttachMode: config.AttachHot},
		"controller": {Mode: config.ModeController, NomadSocket: socket, AttachMode: config.AttachHot},
		"node restart-node": {
			Mode: config.ModeNode, NomadSocket: socket, AttachMode: config.AttachRestart, RestartShutdown: config.ShutdownDrain,
		},
		"controller restart-controller": {Mode: config.ModeController, NomadSocket: socket, AttachMode: config.AttachRestart},
		"node restart-node controller restart-controller restart-drain": {
			Mode: config.ModeAll, NomadSocket: socket, AttachMode: config.AttachRestart, RestartShutdown: config.ShutdownDrain,
		},
	} {
		if got := strings.Join(neededPolicies(cfg), " "); got != want {
			t.Errorf("%s, want %s", got, want)
		}
	}
}

// A controller under Nomad asks before it detaches a disk, also if it was not told how.
func TestOnlyNomadIsAsked(t *testing.T) {
	for name, test := range map[string]struct {
		cfg  config.Config
		asks bool
	}{
		"a bare host":                {},
		"Kubernetes":                 {cfg: config.Config{KubernetesHost: "10.0.0.1"}},
		"a task with an identity":    {cfg: config.Config{NomadAllocation: "a", NomadSocket: "unix:///secrets/api.sock"}, asks: true},
		"a task without an identity": {cfg: config.Config{NomadAllocation: "a"}, asks: true},
		"an agent's address":         {cfg: config.Config{NomadAddress: "http://127.0.0.1:4646"}, asks: true},
	} {
		if got := Of(test.cfg).Claims != nil; got != test.asks {
			t.Errorf("%s: asks %t, want %t", name, got, test.asks)
		}
	}
}

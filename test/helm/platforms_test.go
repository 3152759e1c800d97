// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build helm

package helm_test

import (
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/oxidecomputer/oxide-csi-plugin/core/config"
)

// TestPlatforms renders the chart with the values of each platform, and parses the settings of the rendered containers
// with the plugin's own configuration code.
func TestPlatforms(t *testing.T) {
	type platform struct{ KubeletSocket, Poweroff string }
	const registered = "/var/lib/kubelet/plugins_registry/csi.oxide.computer-reg.sock"
	wants := map[string]platform{
		"talos":     {"", "signal:SIGTERM"},
		"k3s-rke2":  {registered, config.PoweroffSystemd},
		"openshift": {registered, config.PoweroffSystemd},
	}
	files, err := filepath.Glob(filepath.Join(chart, "platforms", "*.yaml"))
	must(t, err)
	if len(files) != len(wants) {
		t.Errorf("the chart has values for %v", files)
	}
	for name, expected := range wants {
		for _, mode := range []string{config.AttachHot, config.AttachRestart} {
			t.Run(name+" "+mode, func(t *testing.T) {
				objects := parse(
					t,
					render(t, "--values="+filepath.Join(chart, "platforms", name+".yaml"), "--set=attachMode="+mode),
				)
				load(t, objects, controllerPods, "containers", config.Flags, config.Load)
				node := load(t, objects, nodePods, "containers", config.Flags, config.Load)
				if diff := cmp.Diff(expected, platform{node.KubeletSocket(), node.RestartPoweroff}); diff != "" {
					t.Errorf("want (-), got (+):\n%s", diff)
				}
				if _, err := node.PoweroffSignal(); err != nil {
					t.Error(err)
				}
				pods := at[object](t, objects[nodePods], "spec", "template", "spec")
				if pods["hostPID"] != true {
					t.Error("without hostPID a signal does not reach the guest's process 1")
				}
			})
		}
	}
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build k8s && platform

package k8s_test

import (
	"fmt"
	"os"
	"strings"
	"testing"
)

// TestKubeletFolder installs the chart where kubelet has the folder that k0s gives it: registered by the registrar, and
// then by the plugin itself. A pod has its volume there, and doctor looks at that folder.
func TestKubeletFolder(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: namespaces, mounts, loop devices")
	}
	const folder = "/var/lib/k0s/kubelet"
	c := newControlPlane(t)
	c.sim = c.startRack(t, "rack", rackAddress, "node-a", "--hotplug=async")
	c.a = c.newNode(c.sim, "node-a", nodeA)
	c.a.KubeletDir = folder
	c.join(t, c.a)
	c.createSecret(t, c.sim.Token)
	c.logIfFailed(t)
	c.helm(t, "install", "oxide-csi", "../../deploy/helm/oxide-csi", "--take-ownership", "--values=upgrade.yaml",
		"--set=node.kubeletDir="+folder)
	for _, registration := range []string{"sidecar", "plugin"} {
		t.Run(registration, func(t *testing.T) {
			c.helm(t, "upgrade", "oxide-csi", "../../deploy/helm/oxide-csi", "--reuse-values",
				"--set=node.registration="+registration)
			c.rolledOut(t)
			c.registered(t, c.a, "default")
			c.apply(t, claim{name: registration}.String()+pod{name: registration, claim: registration, on: c.a}.String())
			c.running(t, registration)
			c.sh(t, registration, "echo here >/data/file; sync; test -s /data/file")
			mounts, err := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", c.a.init.Process.Pid))
			must(t, err)
			if !strings.Contains(string(mounts), " "+folder+"/pods/") {
				t.Errorf("nothing is mounted below %s/pods:\n%s", folder, mounts)
			}
			said, err := c.try(
				"-n",
				namespace,
				"exec",
				"daemonset/oxide-csi-node",
				"-c=oxide-plugin",
				"--",
				"/oxide-csi",
				"doctor",
			)
			if !strings.Contains(fmt.Sprint(said, err), folder+" is shared") { // doctor may end with warnings
				t.Errorf("doctor does not look at %s: %v: %s", folder, err, said)
			}
			c.gone(t, "pod/"+registration, "pvc/"+registration)
		})
	}
	c.helm(t, "uninstall", "oxide-csi")
}

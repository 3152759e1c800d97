// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build k8s

package k8s_test

import (
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
	"github.com/oxidecomputer/oxide-csi-plugin/test/await"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// oxide runs the plugin's program as an operator with a kubeconfig and the settings of the rack. It returns what the
// program prints, and then its error: doctor ends with an exit code.
func (c *cluster) oxide(args ...string) string {
	cmd := exec.Command(filepath.Join(c.made, "oxide-csi"), args...)
	cmd.Env = []string{
		"HOME=" + c.dir, "OXIDE_HOST=" + c.sim.Host, "OXIDE_PROJECT=" + c.sim.Project, "OXIDE_TOKEN=" + c.sim.Token,
		"OXIDE_CSI_CLUSTER_ID=" + c.id, "OXIDE_CSI_KUBECONFIG=" + c.path("admin.kubeconfig"),
	}
	said, err := output(cmd)
	if err != nil {
		return said + err.Error()
	}
	return said
}

// explained waits until the first line of oxide-csi explain has the verdict, and prints this line.
func (c *cluster) explained(t *testing.T, subject, reason string) {
	t.Helper()
	said := ""
	defer func() {
		if t.Failed() {
			t.Logf("oxide-csi explain %s:\n%s", subject, said)
		}
	}()
	await.Within(t, waitLimit, "explain "+subject+" begins with "+reason, func() bool {
		said = c.oxide("explain", subject)
		return strings.HasPrefix(said, reason+": ")
	})
	first, _, _ := strings.Cut(said, "\n")
	t.Logf("measured: %s", first)
}

// explains makes the stories that need only objects of Kubernetes, and two more. Other cases read a verdict where they
// make the situation anyway.
func (c *cluster) explains(t *testing.T) {
	t.Run("a class without plugin", c.classWithoutPlugin)
	t.Run("a snapshot that is not ready", c.snapshotNotReady)
	t.Run("a full quota", c.fullQuota)
	t.Run("a wrong passphrase", c.wrongPassphrase)
}

func (c *cluster) classWithoutPlugin(t *testing.T) {
	c.apply(t, claim{name: "no-class", class: "no-such-class"}.String())
	c.explained(t, "default/no-class", "OtherDriver")
	c.gone(t, "pvc/no-class")
}

func (c *cluster) snapshotNotReady(t *testing.T) {
	c.apply(t, `apiVersion: snapshot.storage.k8s.io/v1
kind: VolumeSnapshot
metadata: {name: never}
spec: {volumeSnapshotClassName: oxide-disk, source: {persistentVolumeClaimName: no-such-claim}}
---
`+claim{name: "early", source: "{apiGroup: snapshot.storage.k8s.io, kind: VolumeSnapshot, name: never}"}.String()+
		pod{name: "early", claim: "early"}.String())
	c.explained(t, "default/early", "SnapshotNotReady")
	c.gone(t, "pod/early", "pvc/early", "volumesnapshot/never")
}

func (c *cluster) fullQuota(t *testing.T) {
	c.setting(t, simtest.Settings{QuotaBytes: new(int64(1))}, simtest.Settings{QuotaBytes: new(int64(0))})
	c.apply(t, claim{name: "unpaid"}.String()+pod{name: "unpaid", claim: "unpaid"}.String())
	c.explained(t, "pod/default/unpaid", "QuotaExhausted")
	c.gone(t, "pod/unpaid", "pvc/unpaid")
}

// wrongPassphrase replaces the Secret after the disk was encrypted. On a kernel without dm_crypt the pod never runs,
// but the disk is encrypted all the same. Such a kernel gets to the passphrase only if the Secret also has the one
// before.
func (c *cluster) wrongPassphrase(t *testing.T) {
	secret := func(passphrases string) {
		c.apply(t, "apiVersion: v1\nkind: Secret\nmetadata: {name: locked}\nstringData: "+passphrases+"\n")
	}
	secret("{" + rpc.SecretPassphrase + ": right}")
	c.apply(t, `apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: {name: locked}
provisioner: `+rpc.PluginName+`
volumeBindingMode: WaitForFirstConsumer
parameters:
  `+rpc.KeyEncryption+`: `+rpc.EncryptionLUKS2+`
  csi.storage.k8s.io/node-stage-secret-name: locked
  csi.storage.k8s.io/node-stage-secret-namespace: default
`)
	t.Cleanup(func() { c.gone(t, "secret/locked", "storageclass/locked") })
	c.apply(t, claim{name: "locked", class: "locked"}.String())
	c.uses(t, "locked", c.a)
	await.Within(t, waitLimit, "the disk is encrypted", func() bool {
		events := c.get(t, ".items[*].message", "events", "--field-selector=involvedObject.name=locked,reason=FailedMount")
		return strings.Contains(events, "dm_crypt") || c.get(t, ".status.phase", "pod", "locked") == "Running"
	})
	c.gone(t, "pod", "locked")
	secret("{" + rpc.SecretPassphrase + ": wrong, " + rpc.SecretPreviousPassphrase + ": also-wrong}")
	c.uses(t, "locked", c.a)
	c.explained(t, "pod/default/locked", "WrongPassphrase")
	c.gone(t, "pod/locked", "pvc/locked")
}

// uses creates a claim, unless it exists, and a pod that uses it until the end of the test.
func (c *cluster) uses(t *testing.T, name string, on *node) {
	t.Helper()
	if c.get(t, ".metadata.name", "pvc", name) == "" {
		c.apply(t, claim{name: name}.String())
	}
	c.apply(t, pod{name: name, claim: name, on: on}.String())
	t.Cleanup(func() { c.kubectl(t, "delete", "--wait=false", "--ignore-not-found", "pod/"+name, "pvc/"+name) })
}

// setting changes settings of the rack until the end of the test.
func (c *cluster) setting(t *testing.T, change, back simtest.Settings) {
	t.Helper()
	must(t, c.sim.Set(t.Context(), change))
	t.Cleanup(func() { must(t, c.sim.Set(c.t.Context(), back)) })
}

// rights checks that doctor asks the API server for the rights of the plugin's accounts, and finds one that is missing.
func (c *cluster) rights(t *testing.T) {
	says := func(lines ...string) {
		t.Helper()
		said := ""
		defer func() {
			if t.Failed() {
				t.Logf("oxide-csi doctor:\n%s", said)
			}
		}()
		for _, line := range lines {
			await.Within(t, waitLimit, "doctor says "+line, func() bool {
				said = c.oxide("doctor")
				return strings.Contains(strings.Join(strings.Fields(said), " "), line)
			})
		}
	}
	says(
		"ok kubernetes rights of oxide-csi-controller all that the installed components need",
		"ok kubernetes rights of oxide-csi-node ",
	)
	c.kubectl(t, "patch", "clusterrole", "oxide-csi-controller", "--type=json",
		"-p", `[{"op": "replace", "path": "/rules/0/verbs", "value": ["get", "list", "watch"]}]`)
	says("failure kubernetes rights of oxide-csi-controller missing: " +
		"create persistentvolumes, delete persistentvolumes, patch persistentvolumes")
	c.kubectl(t, "apply", "-k", "overlay")
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package kubernetes_test

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator/kubernetes"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

const podList = "/api/v1/pods"

// The rights that doctor asks for are those of the manifests: docs/reference/kubernetes-rights.md is made from these.
func TestRightsAreThoseOfTheManifests(t *testing.T) {
	page, err := os.ReadFile("../../docs/reference/kubernetes-rights.md")
	if err != nil {
		t.Fatal(err)
	}
	row := regexp.MustCompile("(?m)^(?:## .*service account `(.*)`|\\| (.*) \\| (.*) \\| (`.*`) \\| (.*) \\| .* \\|)$")
	account, want := "", []string{}
	for _, match := range row.FindAllStringSubmatch(string(page), -1) {
		if match[1] != "" {
			account = match[1]
			continue
		}
		if account == "oxide-cosi" {
			continue // the COSI driver's own account
		}
		for _, resource := range strings.Split(match[4], ", ") {
			want = append(want, strings.Join([]string{
				account, strings.Trim(match[2], "`"), match[3], strings.Trim(resource, "`"), match[5],
			}, "; "))
		}
	}
	if diff := cmp.Diff(want, kubernetes.Rights()); diff != "" || len(want) < 20 {
		t.Errorf("%d rights, -page +doctor:\n%s", len(want), diff)
	}
}

// A component counts as installed if the account has a right that only this component adds. A right that two components
// Add does not tell which of them is installed.
func TestMissingRights(t *testing.T) {
	const looked = "rights of oxide-csi-node"
	for name, test := range map[string]struct {
		refused []string
		want    string
	}{
		"startup-taint alone": {[]string{"reply restarts.csi.oxide.computer", "list volumeattachments.storage.k8s.io"}, ""},
		"restart alone": {[]string{
			"get csinodes.storage.k8s.io", "list csinodes.storage.k8s.io", "watch csinodes.storage.k8s.io",
		}, ""},
		"neither, and no right to change Nodes": {[]string{
			"patch nodes", "reply restarts.csi.oxide.computer", "get csinodes.storage.k8s.io", "list csinodes.storage.k8s.io",
			"watch csinodes.storage.k8s.io",
		}, ""},
		"restart, and no right to change Nodes": {[]string{
			"patch nodes", "get csinodes.storage.k8s.io", "list csinodes.storage.k8s.io", "watch csinodes.storage.k8s.io",
		}, "missing: patch nodes"},
		"an identity that needs none": {[]string{
			"get nodes", "list nodes", "watch nodes", "patch nodes", "reply restarts.csi.oxide.computer",
			"get csinodes.storage.k8s.io", "list csinodes.storage.k8s.io", "watch csinodes.storage.k8s.io",
			"list volumeattachments.storage.k8s.io",
		}, ""},
		"too few": {[]string{"get nodes", "list nodes"}, "missing: get nodes, list nodes"},
	} {
		t.Run(name, func(t *testing.T) {
			c := wellCluster()
			c.Refuse(test.refused...)
			all, _ := operatorOf(t, c).Examine(t.Context())
			found := slices.DeleteFunc(all, func(f orchestrator.Finding) bool {
				return f.Looked != looked
			})
			if len(found) != 1 || (test.want == "") != (found[0].Next == "") ||
				test.want != "" && found[0].Found != test.want {
				t.Errorf("%+v, want one that says %q", found, test.want)
			}
		})
	}
}

// The logs of controllers and of pods that are not ready come first. Pods of other programs are left out.
func TestLogs(t *testing.T) {
	c := simtest.NewCluster(token, podList)
	pod := func(name, component, container, ready string) {
		c.Put(podList, "oxide-csi", name, object{
			"metadata": object{"labels": object{"app.kubernetes.io/component": component}},
			"spec":     object{"containers": []object{{"name": "sidecar"}, {"name": container}}},
			"status":   object{"conditions": []object{{"type": "Ready", "status": ready}}},
		})
	}
	pod("a-node", "node", "oxide-plugin", "True")
	pod("b-node", "node", "oxide-plugin", "False")
	pod("controller", "controller", "oxide-plugin", "True")
	pod("other", "controller", "other", "True")
	c.PutLog("oxide-csi", "a-node", "one\ntwo\n")
	c.PutLog("oxide-csi", "controller", strings.Repeat("x", 64<<10)+"\nlast\n")
	logs, err := operatorOf(t, c).Logs(t.Context())
	if err != nil || len(logs) != 3 {
		t.Fatalf("%+v, %v", logs, err)
	}
	if logs[0].Name != "oxide-csi_controller_oxide-plugin" || logs[0].Text != "last\n" {
		t.Errorf("%s: %.20q, %v", logs[0].Name, logs[0].Text, logs[0].Err)
	}
	if logs[1].Name != "oxide-csi_b-node_oxide-plugin" || logs[1].Err == nil ||
		strings.Contains(logs[1].Err.Error(), token) {
		t.Errorf("%+v", logs[1])
	}
	if logs[2].Text != "one\ntwo\n" {
		t.Errorf("%+v", logs[2])
	}
}

// The versions that doctor looks for are those of the manifests.
func TestVersionsAreThoseOfTheManifests(t *testing.T) {
	got := map[string]string{}
	image := regexp.MustCompile(`name: (\S+)\n +image: registry\.k8s\.io/sig-storage/csi-\S+:(v\S+)`)
	files, err := filepath.Glob("../../deploy/k8s/*/*.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, match := range image.FindAllStringSubmatch(string(text), -1) {
			got[match[1]] = match[2]
		}
	}
	if diff := cmp.Diff(got, kubernetes.SidecarVersions()); diff != "" {
		t.Errorf("-manifests +doctor:\n%s", diff)
	}
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main_test

import (
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

const (
	pvList  = "/api/v1/persistentvolumes"
	pvcList = "/api/v1/persistentvolumeclaims"
)

// serveCluster serves a simulated Kubernetes, and returns the flag that names it.
func serveCluster(t *testing.T, c *simtest.Cluster) (kubeconfigFlag string) {
	t.Helper()
	server := httptest.NewTLSServer(c)
	t.Cleanup(server.Close)
	file := filepath.Join(t.TempDir(), "kubeconfig")
	must(t, os.WriteFile(file, []byte(c.Kubeconfig(server)), 0o600))
	return "--kubeconfig=" + file
}

// rackEnv is the environment with the settings of the rack, as in the controller's container.
func (h *host) rackEnv(t *testing.T) []string {
	t.Helper()
	token := filepath.Join(h.folder(t, "operator"), "token")
	must(t, os.WriteFile(token, []byte(h.sim.Token), 0o600))
	return []string{
		"OXIDE_HOST=" + h.sim.Host, "OXIDE_PROJECT=" + h.sim.Project, "OXIDE_TOKEN_FILE=" + token,
		"OXIDE_CSI_CLUSTER_ID=" + simtest.ClusterID,
	}
}

// The command lists what Kubernetes does not know, and deletes nothing that is young.
func TestOrphansCommand(t *testing.T) {
	t.Parallel()
	h := newHost(t, false)
	used, orphan := h.ok(
		t,
		"volume",
		"create",
		"used",
		"--size=1GiB",
	), h.ok(
		t,
		"volume",
		"create",
		"orphan",
		"--size=1GiB",
	)
	c := simtest.NewCluster(canary, pvList, pvcList)
	c.Put(pvList, "", "pv-used", map[string]any{"spec": map[string]any{
		"csi": map[string]any{"driver": "csi.oxide.computer", "volumeHandle": used},
	}})
	kubeconfig, environ := serveCluster(t, c), h.rackEnv(t)
	listed := runPlugin(t, environ, "orphans", kubeconfig)
	if listed.code != 0 || !strings.Contains(listed.stdout, orphan) || strings.Contains(listed.stdout, used) ||
		!strings.Contains(listed.stdout, "1 orphans, which cost 1GiB of the quota") {
		t.Errorf("%+v", listed)
	}
	if got := runPlugin(
		t,
		environ,
		"orphans",
		kubeconfig,
		"--json",
	); got.code != 0 ||
		!strings.Contains(got.stdout, `"keep": "it is younger than a day"`) {
		t.Errorf("%+v", got)
	}
	if got := runPlugin(
		t,
		environ,
		"orphans",
		kubeconfig,
		"--delete",
		"--yes",
		orphan,
	); got.code != 1 ||
		!strings.Contains(got.stderr, "younger than a day") {
		t.Errorf("%+v", got)
	}
	for _, args := range [][]string{{"--yes", orphan}, {"--delete", "--yes"}, {"--delete", orphan}} {
		if got := runPlugin(t, environ, append([]string{"orphans", kubeconfig}, args...)...); got.code != 2 {
			t.Errorf("%v: %+v", args, got)
		}
	}
	if got := runPlugin(t, environ, "orphans"); got.code != 2 || !strings.Contains(got.stderr, "--kubeconfig") {
		t.Errorf("without an orchestrator: %+v", got)
	}
	if got := runPlugin(t, nil, "orphans", kubeconfig); got.code != 2 || !strings.Contains(got.stderr, "--oxide-host") {
		t.Errorf("without a rack: %+v", got)
	}
	c.Deny(pvcList)
	if got := runPlugin(t, environ, "orphans", kubeconfig, "--delete"); got.code != 1 || got.stdout != "" {
		t.Errorf("without a right: %+v", got)
	}
	if left, err := h.sim.Leftovers(t.Context()); err != nil || left.Disks != 2 {
		t.Errorf("%+v, %v", left, err)
	}
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main_test

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// The bundle holds what the command prints, and no secret, wherever one is set. An existing file is not touched.
func TestSupportBundle(t *testing.T) {
	t.Parallel()
	h := newHost(t, false)
	h.ok(t, "volume", "create", "x", "--size=1GiB")
	c := simtest.NewCluster(canary, pvList, pvcList)
	environ := append(h.rackEnv(t), "OXIDE_TOKEN="+canary, "NOMAD_TOKEN="+canary)
	file := filepath.Join(h.dir, "bundle.tar")
	kubeconfig := serveCluster(t, c)
	got := runPlugin(t, environ, "support-bundle", file, kubeconfig)
	if got.code != 0 {
		t.Fatalf("%+v", got)
	}
	content, err := os.ReadFile(file)
	must(t, err)
	// Secrets: the rack's token, and the one of Kubernetes and Nomad.
	for _, secret := range []string{canary, h.sim.Token} {
		if bytes.Contains(content, []byte(secret)) {
			t.Errorf("the bundle contains a secret")
		}
	}
	names := map[string]string{}
	for reader := tar.NewReader(bytes.NewReader(content)); ; {
		header, err := reader.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		must(t, err)
		text, err := io.ReadAll(reader)
		must(t, err)
		names[header.Name] = string(text)
		if !strings.Contains(got.stdout, header.Name+", ") {
			t.Errorf("%s is not printed: %s", header.Name, got.stdout)
		}
	}
	for name, mention := range map[string]string{
		"version.txt": "devel", "settings.txt": h.sim.Project, "doctor.json": "API version", "orphans.json": "csi-",
	} {
		if !strings.Contains(names[name], mention) {
			t.Errorf("%s does not mention %q: %s", name, mention, names[name])
		}
	}
	if !strings.Contains(got.stdout, "metrics.txt is left out: ") {
		t.Errorf("%s", got.stdout)
	}
	if again := runPlugin(t, environ, "support-bundle", file, kubeconfig); again.code != 1 {
		t.Errorf("%+v", again)
	}
}

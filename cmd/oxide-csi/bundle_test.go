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
	for _, name := range []string{"controller-1", "controller-2"} {
		c.Put(podList, "oxide-csi", name, object{"spec": object{"containers": []object{{"name": "oxide-plugin"}}}})
	}
	const webToken = "eyJhbGciOiJub25lIn0.eyJjYW5hcnkiOiIxIn0.c2lnbmF0dXJl"
	c.PutLog("oxide-csi", "controller-1", "msg=started token="+h.sim.Token+"\nAuthorization: Bearer "+webToken+" end\n")
	// The journal of a host, whose lines may come from any program.
	programs := t.TempDir()
	const nomadToken, password = "3f9d1f5e-84c2-4c63-9a0e-d6b1c8a7e502", "b3BlcmF0b3I6Y2FuYXJ5"
	journal := "#!/bin/sh\necho journal of $1 X-Nomad-Token: " + canary + " " + canary + "\ncat <<'END'\n" +
		strings.NewReplacer("TOKEN", nomadToken, "PASSWORD", password).Replace(`
X-Nomad-Token:TOKEN
X-Nomad-Token: TOKEN
map[X-Nomad-Token:[TOKEN]]
{"X-Nomad-Token":["TOKEN"]}
header="{\"X-Nomad-Token\":[\"TOKEN\"]}"
x-nomad-token='TOKEN'
Authorization: Bearer TOKEN
Authorization: Basic PASSWORD
HTTPS_PROXY=http://user:PASSWORD@proxy:3128 HTTP_PROXY=user:PASSWORD@proxy:3128
map[Authorization:[Basic PASSWORD]]
END
`)
	must(t, os.WriteFile(filepath.Join(programs, "journalctl"), []byte(journal), 0o755))
	environ := append(
		h.rackEnv(
			t,
		),
		"NOMAD_ADDR=https://user:"+password+"@nomad:4646",
		"OXIDE_TOKEN="+canary,
		"NOMAD_TOKEN="+canary,
		"PATH="+programs+":"+os.Getenv("PATH"),
	)
	file := filepath.Join(h.dir, "bundle.tar")
	kubeconfig := serveCluster(t, c)
	got := runPlugin(t, environ, "support-bundle", file, kubeconfig)
	if got.code != 0 {
		t.Fatalf("%+v", got)
	}
	content, err := os.ReadFile(file)
	must(t, err)
	// Secrets: the rack's token, the one of Kubernetes and Nomad, and those of other programs.
	for _, secret := range []string{canary, h.sim.Token, webToken, nomadToken, password} {
		if at := bytes.Index(content, []byte(secret)); at >= 0 {
			t.Errorf("the bundle contains a secret after %q", content[max(0, at-40):at])
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
		"logs/oxide-csi_controller-1_oxide-plugin.txt": "msg=started token=(redacted)", "logs/journal.txt": "journal of --unit=",
	} {
		if !strings.Contains(names[name], mention) {
			t.Errorf("%s does not mention %q: %s", name, mention, names[name])
		}
	}
	for _, name := range []string{"metrics.txt", "logs/oxide-csi_controller-2_oxide-plugin.txt"} {
		if !strings.Contains(got.stdout, name+" is left out: ") {
			t.Errorf("%s", got.stdout)
		}
	}
	if again := runPlugin(t, environ, "support-bundle", file, kubeconfig); again.code != 2 ||
		!strings.Contains(again.stderr, file+" exists already: name another FILE") {
		t.Errorf("%+v", again)
	}
}

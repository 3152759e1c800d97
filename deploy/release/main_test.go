// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main

import (
	"bytes"
	"crypto/sha256"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestRecognise(t *testing.T) {
	const (
		mit = "Permission is hereby granted, free of charge, to any person ... notice\nshall be included in\nall copies"
		bsd = "Redistribution and use in source and binary forms, with or without modification"
	)
	for text, want := range map[string][]string{
		mit:                                     {"MIT"},
		bsd:                                     {"BSD-2-Clause"},
		bsd + " to endorse or promote products": {"BSD-3-Clause"},
		mit + " licensed under the Apache License, Version 2.0": {"Apache-2.0", "MIT"},
		"GNU AFFERO GENERAL PUBLIC LICENSE":                     nil,
		"Business Source License 1.1":                           nil,
		"SERVER SIDE PUBLIC LICENSE, Version 1 ":                nil,
	} {
		if diff := cmp.Diff(want, recognise(text)); diff != "" {
			t.Errorf("%q, want (-), got (+):\n%s", text, diff)
		}
	}
}

// A module whose licence is not known, or that has none, does not ship. A licence beside a package counts, too.
func TestLicensed(t *testing.T) {
	known, unknown, empty := t.TempDir(), t.TempDir(), t.TempDir()
	write := func(folder, name, text string) {
		if err := os.WriteFile(filepath.Join(folder, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(known, "LICENSE.txt", "Mozilla Public License Version 2.0")
	write(known, "license.go", "package license")
	write(known, "NOTICE", "made by us")
	write(unknown, "LICENSE", "All rights reserved.")
	c, err := licensed("known", []string{known, empty})
	if err != nil || c.licence != "MPL-2.0" {
		t.Errorf("%q, %v, want MPL-2.0", c.licence, err)
	}
	if diff := cmp.Diff([]string{"Mozilla Public License Version 2.0", "made by us"}, c.texts); diff != "" {
		t.Errorf("texts, want (-), got (+):\n%s", diff)
	}
	for name, folders := range map[string][]string{"unknown": {known, unknown}, "none": {empty}, "no folder": nil} {
		if c, err := licensed(name, folders); err == nil {
			t.Errorf("%s: %q, want an error", name, c.licence)
		}
	}
}

// An archive depends on names and contents only.
func TestArchiveIsReproducible(t *testing.T) {
	var sums [2][sha256.Size]byte
	for i := range sums {
		folder, path := t.TempDir(), filepath.Join(t.TempDir(), "archive.tar.gz")
		for _, name := range [][]string{{"a", "b"}, {"b", "a"}}[i] {
			if err := os.WriteFile(
				filepath.Join(folder, name),
				[]byte("content of "+name),
				[]os.FileMode{0o600, 0o755}[i],
			); err != nil {
				t.Fatal(err)
			}
		}
		f, err := readFolder(folder, "below/")
		if err != nil {
			t.Fatal(err)
		}
		if err := f.writeTarGzip(path); err != nil {
			t.Fatal(err)
		}
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		sums[i] = sha256.Sum256(text)
	}
	if sums[0] != sums[1] {
		t.Error("two archives of equal files differ")
	}
}

// A digest that is not filled in would be found only when a user installs the release.
func TestReplaceCounts(t *testing.T) {
	f := files{"values.yaml": []byte("digest: \"\"\n")}
	if err := f.replace("values.yaml", `digest: ""`, "digest: sha256:1", 1); err != nil {
		t.Error(err)
	}
	if !bytes.Equal(f["values.yaml"], []byte("digest: sha256:1\n")) {
		t.Errorf("got %q", f["values.yaml"])
	}
	if err := f.replace("values.yaml", `digest: ""`, "digest: sha256:2", 1); err == nil {
		t.Error("a text that is not there was replaced")
	}
}

// Chart, manifests and job files have a place for the digest of each image, and no other place.
func TestImagesArePinned(t *testing.T) {
	t.Chdir("../..")
	version, err := os.ReadFile("VERSION")
	if err != nil {
		t.Fatal(err)
	}
	digests := map[string]string{nodeImage: "sha256:node", controllerImage: "sha256:controller", cosiImage: "sha256:cosi"}
	chart, err := pinnedChart(digests)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"\n  digest: sha256:node\n", "\n  controllerDigest: sha256:controller\n",
		"repository: oxidecomputer/oxide-cosi\n    # Pins the image, instead of image.tag: sha256:DIGEST.\n    digest: sha256:cosi\n",
	} {
		if !bytes.Contains(chart["oxide-csi/values.yaml"], []byte(want)) {
			t.Errorf("the chart lacks %q", want)
		}
	}
	manifests, err := pinnedManifests(digests, "v"+strings.TrimSpace(string(version)))
	if err != nil {
		t.Fatal(err)
	}
	for folder, times := range map[string]int{"base": 2, "buckets": 1} {
		if text := manifests[folder+"/kustomization.yaml"]; bytes.Count(text, []byte("    digest: sha256:")) != times {
			t.Errorf("the manifests of %s do not have %d digests:\n%s", folder, times, text)
		}
	}
	if _, err := pinnedJobs(digests); err != nil {
		t.Error(err)
	}
}

// Equal contents have equal lists, and others have another identifier.
func TestListsAreReproducible(t *testing.T) {
	c := contents{
		name:       "oxide-csi",
		version:    "1.2.3",
		components: []component{{name: "a", version: "v1", url: "pkg:golang/a@v1"}},
	}
	if diff := cmp.Diff(c.cycloneDX(), c.cycloneDX()); diff != "" {
		t.Error(diff)
	}
	other := c
	other.components = []component{{name: "a", version: "v2", url: "pkg:golang/a@v2"}}
	if c.cycloneDX()["serialNumber"] == other.cycloneDX()["serialNumber"] {
		t.Error("lists of other contents have the same serial number")
	}
	if c.spdx()["documentNamespace"] == other.spdx()["documentNamespace"] {
		t.Error("lists of other contents have the same namespace")
	}
}

// The provenance names a commit. So a release with changes that are not in the commit is refused. Files that git does
// not track do not count: earlier builds leave some.
func TestChangedSourcesAreRefused(t *testing.T) {
	folder := t.TempDir()
	git := func(args ...string) string {
		t.Helper()
		command := exec.Command("git", args...)
		command.Dir = folder
		command.Env = append(os.Environ(), "GIT_CONFIG_GLOBAL=/dev/null", "GIT_CONFIG_SYSTEM=/dev/null",
			"GIT_AUTHOR_NAME=t", "GIT_AUTHOR_EMAIL=t@t", "GIT_COMMITTER_NAME=t", "GIT_COMMITTER_EMAIL=t@t")
		out, err := command.CombinedOutput()
		if err != nil {
			t.Fatalf("git %q: %v, %s", args, err, out)
		}
		return strings.TrimSpace(string(out))
	}
	write := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(folder, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	git("init", "--quiet")
	write("main.go", "package main")
	git("add", "main.go")
	git("commit", "--quiet", "--message=first")
	write("untracked", "")
	write("main.go", "package main") // with another time, as in a copied folder
	if commit, err := headCommit(folder); err != nil || commit != git("rev-parse", "HEAD") {
		t.Errorf("%q, %v", commit, err)
	}
	write("main.go", "package other")
	for _, when := range []string{"changed", "staged"} {
		if commit, err := headCommit(folder); err == nil || !strings.Contains(err.Error(), "main.go") {
			t.Errorf("%s: %q, %v", when, commit, err)
		}
		git("add", "main.go")
	}
	if commit, err := headCommit(t.TempDir()); err == nil {
		t.Errorf("outside a repository: %q", commit)
	}
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main

import (
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
)

const (
	checksumsFile  = "SHA256SUMS"
	provenanceFile = "provenance.intoto.json"
)

// headCommit returns the commit of the sources in a folder. It fails if tracked files differ from this commit: the
// provenance would name sources that the release was not made from.
func headCommit(folder string) (string, error) {
	commit, err := git(folder, "rev-parse", "HEAD")
	if err != nil {
		return "", err
	}
	changed, err := git(folder, "diff", "--name-only", "HEAD")
	if err != nil {
		return "", err
	}
	if changed != "" {
		file, _, _ := strings.Cut(changed, "\n")
		return "", fmt.Errorf("%s is not as in the last commit, which the provenance names: commit all changes", file)
	}
	return commit, nil
}

func git(folder string, args ...string) (string, error) {
	cmd := exec.Command("git", append([]string{"-C", folder}, args...)...)
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("%s: %w", strings.Join(cmd.Args, " "), err)
	}
	return strings.TrimSpace(string(out)), nil
}

// writeProvenanceAndChecksums writes the provenance of all files, and then the checksums of all files. packages are the
// Debian packages in the images. The provenance itself is not signed: trust in it comes from the key that signs the
// checksums.
func (r release) writeProvenanceAndChecksums(packages []component) error {
	built, err := readFolder(r.folder, "")
	if err != nil {
		return err
	}
	var subjects []object
	for _, name := range slices.Sorted(maps.Keys(built)) {
		subjects = append(subjects, object{"name": name, "digest": object{"sha256": sum(built[name])}})
	}
	sources := []object{
		{"uri": "git+" + source, "digest": object{"gitCommit": r.commit}},
		{"uri": "pkg:golang/go@" + strings.TrimPrefix(runtime.Version(), "go")},
	}
	for _, p := range packages {
		if !slices.ContainsFunc(sources, func(o object) bool { return o["uri"] == p.url }) {
			sources = append(sources, object{"uri": p.url})
		}
	}
	// SLSA provenance, version 1.
	statement := object{
		"_type": "https://in-toto.io/Statement/v1", "subject": subjects, "predicateType": "https://slsa.dev/provenance/v1",
		"predicate": object{
			"buildDefinition": object{
				"buildType":            source + "/blob/main/docs/development/release.md",
				"externalParameters":   object{"version": r.tag, "command": "make release"},
				"resolvedDependencies": sources,
			},
			"runDetails": object{"builder": object{"id": source + "/blob/main/deploy/release"}},
		},
	}
	if err := writeJSON(filepath.Join(r.folder, provenanceFile), statement); err != nil {
		return err
	}
	if built, err = readFolder(r.folder, ""); err != nil {
		return err
	}
	var sums strings.Builder
	for _, name := range slices.Sorted(maps.Keys(built)) {
		fmt.Fprintf(&sums, "%s  %s\n", sum(built[name]), name)
		if err := os.Chmod(filepath.Join(r.folder, name), 0o644); err != nil {
			return err
		}
	}
	path := filepath.Join(r.folder, checksumsFile)
	if err := os.WriteFile(path, []byte(sums.String()), 0o600); err != nil {
		return err
	}
	return os.Chmod(path, 0o644)
}

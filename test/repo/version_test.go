// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package repo

import (
	"flag"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write the version of the file VERSION wherever it is repeated")

// semantic matches a semantic version without build metadata. Images are tagged with versions, and a tag has no plus
// sign.
const semantic = `(?:0|[1-9]\d*)\.(?:0|[1-9]\d*)\.(?:0|[1-9]\d*)(?:-[0-9A-Za-z-]+(?:\.[0-9A-Za-z-]+)*)?`

// versions are the places that repeat the version: the text before it, and how often it is there at least.
var versions = []struct {
	file, before string
	least        int
}{
	{"deploy/helm/oxide-csi/Chart.yaml", `(?m)^version: `, 1},
	{"deploy/helm/oxide-csi/Chart.yaml", `(?m)^appVersion: v`, 1},
	{"deploy/k8s/base/kustomization.yaml", `newTag: v`, 2},
	{"deploy/k8s/buckets/kustomization.yaml", `newTag: v`, 1},
	{"deploy/image/Dockerfile", `org\.opencontainers\.image\.version=v`, 1},
	{"test/helm/testdata/*.golden.yaml", `helm\.sh/chart: "oxide-csi-`, 10},
	{"test/helm/testdata/*.golden.yaml", `app\.kubernetes\.io/version: "v`, 10},
	{"deploy/image/Dockerfile", image, 2},
	{"deploy/k8s/base/*.yaml", image, 3},
	{"deploy/nomad/*.hcl", image, 3},
	{"docs/how-to/*.md", image, 2},
	{"test/helm/testdata/*.golden.yaml", image, 2},
}

const image = `oxidecomputer/oxide-(?:csi-plugin|csi-controller|cosi):v`

// TestVersion compares every repetition of the version with the file VERSION. With -update it writes them.
func TestVersion(t *testing.T) {
	version := strings.TrimSpace(read(t, "VERSION"))
	if !regexp.MustCompile(`^` + semantic + `$`).MatchString(version) {
		t.Fatalf("VERSION has %q, which is not a semantic version without v and build metadata", version)
	}
	for _, place := range versions {
		pattern := regexp.MustCompile(`(` + place.before + `)(` + semantic + `)`)
		files, err := filepath.Glob(filepath.Join(root, place.file))
		if err != nil {
			t.Fatal(err)
		}
		found := 0
		for _, file := range files {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			found += len(pattern.FindAllIndex(text, -1))
			changed := pattern.ReplaceAll(text, []byte("${1}"+version))
			if string(changed) == string(text) {
				continue
			}
			if !*update {
				t.Errorf("%s has another version than VERSION after %s: run make version", file, place.before)
			} else if err := os.WriteFile(file, changed, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		if found < place.least {
			t.Errorf("%s has %d versions after %s, want at least %d", place.file, found, place.before, place.least)
		}
	}
}

// TestEveryImageHasTheVersion finds images of the plugin in files that TestVersion does not know, so that make version
// does not miss any of them.
func TestEveryImageHasTheVersion(t *testing.T) {
	image, known := regexp.MustCompile(image+semantic), 0
	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if entry.IsDir() {
			if name := entry.Name(); name == ".git" || name == "bin" || name == "dist" {
				return fs.SkipDir
			}
			return nil
		}
		text, err := os.ReadFile(path)
		if err != nil || !image.Match(text) {
			return err
		}
		relative, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		for _, place := range versions {
			if ok, _ := filepath.Match(place.file, relative); ok && strings.HasPrefix(place.before, "oxidecomputer/") {
				known++
				return nil
			}
		}
		t.Errorf("%s names an image with its version: add it to the places of this test", relative)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if known < 5 {
		t.Errorf("only %d files with images were found", known)
	}
}

// TestVersionIsRead finds Go files and scripts that contain the version as a string, such as the expectation of a test.
// make version does not change them, so they would be wrong after it. They read the file VERSION instead.
func TestVersionIsRead(t *testing.T) {
	version := regexp.QuoteMeta(strings.TrimSpace(read(t, "VERSION")))
	literal := regexp.MustCompile("[\"'`]v?" + version + "[\"'`]")
	files := 0
	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		if extension := filepath.Ext(path); extension != ".go" && extension != ".sh" {
			return nil
		}
		files++
		text, err := os.ReadFile(path)
		if found := literal.Find(text); found != nil {
			t.Errorf("%s has the version %s: read it from the file VERSION", path, found)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if files < 100 {
		t.Errorf("only %d files were read", files)
	}
}

// TestVersionOfBuild checks that the Makefile builds programs and images with the version.
func TestVersionOfBuild(t *testing.T) {
	version := "v" + strings.TrimSpace(read(t, "VERSION"))
	command := exec.Command("make", "--no-print-directory", "-n", "-C", root, "build", "image", "image-cosi")
	// Settings of a make that runs the tests would count as settings of this one.
	command.Env = append(os.Environ(), "MAKEFLAGS=", "VERSION=")
	out, err := command.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for _, want := range []string{
		"-X main.version=" + version + `"`,
		"-tag oxidecomputer/oxide-csi-plugin:" + version + " ",
		"-tag oxidecomputer/oxide-csi-controller:" + version + " ",
		"-tag oxidecomputer/oxide-cosi:" + version + " ",
		"-label org.opencontainers.image.version=" + version + " ",
	} {
		if !strings.Contains(string(out), want) {
			t.Errorf("make does not call %q:\n%s", want, out)
		}
	}
}

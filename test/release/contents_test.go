// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build release

package release

import (
	"archive/tar"
	"bytes"
	"debug/buildinfo"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// programs are all programs. Archives for other platforms than linux-amd64 have fewer.
var programs = []string{"oxide-csi", "oxide-cosi", "oxide-sim"}

// imagePrograms are the images, each with its program.
var imagePrograms = map[string]string{
	"oxide-csi-plugin": "oxide-csi", "oxide-csi-controller": "oxide-csi", "oxide-cosi": "oxide-cosi",
}

// platforms returns the platforms of the archives of programs. PLATFORMS, if it is set, says which they must be.
func platforms(t *testing.T) (found []string) {
	t.Helper()
	prefix, suffix := path(t, "oxide-csi-VERSION-"), ".tar.gz"
	paths, err := filepath.Glob(prefix + "*64" + suffix) // the archive of manifests has the same beginning
	must(t, err)
	for _, path := range paths {
		found = append(found, strings.TrimSuffix(strings.TrimPrefix(path, prefix), suffix))
	}
	if !slices.Contains(found, "linux-amd64") {
		t.Fatalf("the release has programs for %q", found)
	}
	if wanted := os.Getenv("PLATFORMS"); wanted != "" {
		sorted := slices.Sorted(strings.SplitSeq(strings.ReplaceAll(wanted, "/", "-"), ","))
		if diff := cmp.Diff(sorted, found); diff != "" {
			t.Fatalf("platforms (-PLATFORMS +release):\n%s", diff)
		}
	}
	return found
}

// imageFiles returns the files of an image by name.
func imageFiles(t *testing.T, name string) map[string][]byte {
	t.Helper()
	image, err := tarball.ImageFromPath(path(t, name+"-VERSION.docker.tar"), nil)
	must(t, err)
	stream := mutate.Extract(image)
	defer stream.Close()
	files := map[string][]byte{}
	for archive := tar.NewReader(stream); ; {
		header, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		must(t, err)
		if header.Typeflag == tar.TypeReg {
			files[strings.TrimPrefix(header.Name, "/")], err = io.ReadAll(archive)
			must(t, err)
		}
	}
}

// modules returns the package URLs of what a program names: the standard library and its Go modules.
func modules(t *testing.T, program []byte) []string {
	t.Helper()
	info, err := buildinfo.Read(bytes.NewReader(program))
	must(t, err)
	urls := []string{"pkg:golang/std@" + strings.TrimPrefix(info.GoVersion, "go")}
	for _, module := range info.Deps {
		urls = append(urls, "pkg:golang/"+module.Path+"@"+module.Version)
	}
	if len(urls) < 10 {
		t.Errorf("a program has only the modules %q", urls)
	}
	return urls
}

// packages returns the package URLs of the Debian packages that an image records.
func packages(files map[string][]byte) (urls []string) {
	for name, status := range files {
		if !strings.HasPrefix(name, "var/lib/dpkg/status.d/") {
			continue
		}
		fields := map[string]string{}
		for line := range strings.Lines(string(status)) {
			if key, value, found := strings.Cut(strings.TrimSpace(line), ": "); found && !strings.HasPrefix(line, " ") {
				fields[key] = value
			}
		}
		urls = append(urls,
			fmt.Sprintf("pkg:deb/debian/%s@%s?arch=%s", fields["Package"], fields["Version"], fields["Architecture"]))
	}
	return urls
}

// listed returns the package URLs of a list of contents, without the URL of the artefact itself.
func listed(t *testing.T, name, format string) (urls []string) {
	t.Helper()
	var list struct {
		Packages []struct {
			SPDXID       string
			ExternalRefs []struct{ ReferenceLocator string }
		}
		Components []struct{ PURL string }
	}
	must(t, json.Unmarshal(read(t, name+"-VERSION."+format+".json"), &list))
	for _, p := range list.Packages {
		for _, reference := range p.ExternalRefs {
			if p.SPDXID != "SPDXRef-artefact" {
				urls = append(urls, reference.ReferenceLocator)
			}
		}
	}
	for _, component := range list.Components {
		urls = append(urls, component.PURL)
	}
	for i := range urls {
		var err error
		urls[i], err = url.PathUnescape(urls[i])
		must(t, err)
	}
	return urls
}

// TestListsOfContents compares both lists of each archive and each image with what is in it: the Go modules of its
// programs, and the Debian packages of an image.
func TestListsOfContents(t *testing.T) {
	contents := map[string][]string{}
	for _, platform := range platforms(t) {
		folder, name := programsOf(t, platform), "oxide-csi-"+platform
		for _, program := range programs {
			text, err := os.ReadFile(filepath.Join(folder, program))
			if errors.Is(err, os.ErrNotExist) && platform != "linux-amd64" {
				continue
			}
			must(t, err)
			contents[name] = append(contents[name], modules(t, text)...)
		}
	}
	for image, program := range imagePrograms {
		files := imageFiles(t, image)
		debian := packages(files)
		if least := map[string]int{"oxide-csi-plugin": 10}[image]; len(debian) < max(least, 1) {
			t.Errorf("%s records only the packages %q", image, debian)
		}
		contents[image] = append(modules(t, files[program]), debian...)
	}
	for name, urls := range contents {
		for _, format := range []string{"spdx", "cdx"} {
			want := slices.Compact(slices.Sorted(slices.Values(urls)))
			got := slices.Sorted(slices.Values(listed(t, name, format)))
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("the %s list of %s differs from its contents (-want +got):\n%s", format, name, diff)
			}
		}
	}
	lists, err := filepath.Glob(path(t, "*-VERSION.*.json"))
	must(t, err)
	if len(lists) != 2*len(contents) {
		t.Errorf("the release has the lists %q, want two of each of %d artefacts", lists, len(contents))
	}
}

// TestManuals checks that each archive has the man pages and completions of its programs, and of no other.
func TestManuals(t *testing.T) {
	for _, platform := range platforms(t) {
		folder := programsOf(t, platform)
		for _, program := range programs {
			_, err := os.Stat(filepath.Join(folder, program))
			ships := err == nil
			names := []string{"man/man1/" + program + ".1"}
			for _, shell := range []string{"bash", "fish", "powershell", "zsh"} {
				names = append(names, "completions/"+program+"."+shell)
			}
			for _, name := range names {
				info, err := os.Stat(filepath.Join(folder, name))
				if has := err == nil && info.Size() > 0; has != ships {
					t.Errorf("%s: the archive has %s: %t, its program: %t", platform, name, has, ships)
				}
			}
		}
	}
	const page = "man/man1/oxide-csi-volume-create.1"
	for _, platform := range platforms(t) {
		_, err := os.Stat(filepath.Join(programsOf(t, platform), page))
		if has, want := err == nil, strings.HasPrefix(platform, "linux-"); has != want {
			t.Errorf("%s: the archive has %s: %t", platform, page, has)
		}
	}
}

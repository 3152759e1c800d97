// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build release

// Package release checks the files of a release in the folder OXIDE_RELEASE: make verify-release.
package release

import (
	"archive/tar"
	"compress/gzip"
	"crypto/sha256"
	"debug/buildinfo"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/validate"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func version(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile("../../VERSION")
	must(t, err)
	return strings.TrimSpace(string(text))
}

// path returns the path of a file of the release. VERSION in the name stands for the version.
func path(t *testing.T, name string) string {
	t.Helper()
	folder := os.Getenv("OXIDE_RELEASE")
	if folder == "" {
		t.Fatal("OXIDE_RELEASE must be the folder of a release")
	}
	return filepath.Join(folder, strings.ReplaceAll(name, "VERSION", version(t)))
}

func read(t *testing.T, name string) []byte {
	t.Helper()
	text, err := os.ReadFile(path(t, name))
	must(t, err)
	return text
}

// unpack unpacks an archive, and returns the folder.
func unpack(t *testing.T, name string) string {
	t.Helper()
	file, err := os.Open(path(t, name))
	must(t, err)
	defer file.Close()
	var stream io.Reader = file
	if !strings.HasSuffix(name, ".tar") {
		stream, err = gzip.NewReader(file)
		must(t, err)
	}
	folder := t.TempDir()
	for archive := tar.NewReader(stream); ; {
		header, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return folder
		}
		must(t, err)
		if !filepath.IsLocal(header.Name) || header.Uid != 0 || header.ModTime.Unix() != 0 {
			t.Fatalf("%s has %q of user %d with the time %s", name, header.Name, header.Uid, header.ModTime)
		}
		to := filepath.Join(folder, header.Name)
		must(t, os.MkdirAll(filepath.Dir(to), 0o700))
		text, err := io.ReadAll(archive)
		must(t, err)
		must(t, os.WriteFile(to, text, header.FileInfo().Mode()))
	}
}

// TestChecksums checks every file of the release against the checksums and the provenance.
func TestChecksums(t *testing.T) {
	sums := map[string]string{}
	for line := range strings.Lines(string(read(t, "SHA256SUMS"))) {
		sum, name, _ := strings.Cut(strings.TrimSpace(line), "  ")
		sums[name] = sum
	}
	var statement struct {
		Subject []struct {
			Name   string
			Digest struct{ SHA256 string }
		}
	}
	must(t, json.Unmarshal(read(t, "provenance.intoto.json"), &statement))
	stated := map[string]string{}
	for _, subject := range statement.Subject {
		stated[subject.Name] = subject.Digest.SHA256
	}
	entries, err := os.ReadDir(path(t, "."))
	must(t, err)
	for _, entry := range entries {
		name := entry.Name()
		if strings.HasPrefix(name, "SHA256SUMS") {
			continue
		}
		sum := fmt.Sprintf("%x", sha256.Sum256(read(t, name)))
		if sums[name] != sum {
			t.Errorf("%s has the checksum %s, SHA256SUMS says %q", name, sum, sums[name])
		}
		if name != "provenance.intoto.json" && stated[name] != sum {
			t.Errorf("%s has the checksum %s, the provenance says %q", name, sum, stated[name])
		}
	}
	if len(sums) != len(stated)+1 || len(sums) < 15 {
		t.Errorf("%d checksums and %d subjects", len(sums), len(stated))
	}
}

// digests returns the digests of the images, and checks that archive and layout are the same image.
func digests(t *testing.T) map[string]string {
	t.Helper()
	found := map[string]string{}
	for name, limit := range map[string]int64{
		"oxide-csi-plugin": 40e6, "oxide-csi-controller": 16e6, "oxide-cosi": 16e6,
	} {
		index, err := layout.ImageIndexFromPath(unpack(t, name+"-VERSION.oci.tar"))
		must(t, err)
		must(t, validate.Index(index))
		manifest, err := index.IndexManifest()
		must(t, err)
		image, err := index.Image(manifest.Manifests[0].Digest)
		must(t, err)
		config, err := image.ConfigFile()
		must(t, err)
		if got := config.Config.Labels["org.opencontainers.image.version"]; got != "v"+version(t) {
			t.Errorf("%s has the label %q", name, got)
		}
		archive, err := tarball.ImageFromPath(path(t, name+"-VERSION.docker.tar"), nil)
		must(t, err)
		id, err := archive.ConfigName()
		must(t, err)
		if want, err := image.ConfigName(); err != nil || id != want {
			t.Errorf("%s: the archive has the image %s, the layout %s, %v", name, id, want, err)
		}
		if info, err := os.Stat(path(t, name+"-VERSION.oci.tar")); err != nil || info.Size() > limit {
			t.Errorf("%s: %v, %v, want at most %d bytes", name, info, err, limit)
		}
		found["oxidecomputer/"+name] = manifest.Manifests[0].Digest.String()
	}
	return found
}

var pinned = regexp.MustCompile(`(oxidecomputer/oxide-c[a-z-]+)@(sha256:[0-9a-f]{64})`)

// TestDigests checks that manifests, job files and chart name the images of this release by digest, and nothing else.
func TestDigests(t *testing.T) {
	digests := digests(t)
	nomad := unpack(t, "oxide-csi-VERSION-nomad.tar.gz")
	chart := filepath.Join(unpack(t, "oxide-csi-VERSION.tgz"), "oxide-csi")
	rendered, err := exec.Command(program(t, "helm"), "template", chart, "--kube-version=1.36.0", "--set=clusterID=test",
		"--set=buckets.enabled=true").Output()
	must(t, err)
	manifests := filepath.Join(
		unpack(t, "oxide-csi-VERSION-manifests.tar.gz"),
		filepath.Base(strings.TrimSuffix(path(t, "oxide-csi-VERSION-manifests.tar.gz"), ".tar.gz")),
	)
	built, err := exec.Command(program(t, "kustomize"), "build", manifests).Output()
	must(t, err)
	buckets, err := exec.Command(program(t, "kustomize"), "build", filepath.Join(manifests, "buckets")).Output()
	must(t, err)
	texts := map[string]string{"chart": string(rendered), "archive of manifests": string(built) + string(buckets)}
	images := map[string]int{
		"chart": 3, "archive of manifests": 3, "job files": 2,
		"kubernetes": 2, "kubernetes-snapshots": 2, "kubernetes-buckets": 1,
	}
	for _, kind := range []string{"kubernetes", "kubernetes-snapshots", "kubernetes-buckets"} {
		texts[kind] = string(read(t, "oxide-csi-VERSION-"+kind+".yaml"))
	}
	jobs := ""
	for _, job := range []string{"controller", "node", "monolith"} {
		paths, err := filepath.Glob(filepath.Join(nomad, "*", job+".nomad.hcl"))
		must(t, err)
		text, err := os.ReadFile(paths[0])
		must(t, err)
		jobs += string(text)
	}
	texts["job files"] = jobs
	for name, text := range texts {
		found := map[string]bool{}
		for _, match := range pinned.FindAllStringSubmatch(text, -1) {
			found[match[1]] = true
			if digests[match[1]] != match[2] {
				t.Errorf("%s has %s, the image is %s", name, match[0], digests[match[1]])
			}
		}
		if want := images[name]; len(found) != want {
			t.Errorf("%s pins %v, want %d images", name, found, want)
		}
		if tagged := regexp.MustCompile(`image: "?oxidecomputer/[a-z-]+:.*`).FindString(text); tagged != "" {
			t.Errorf("%s has %q without a digest", name, tagged)
		}
	}
}

// program returns a program that test/programs/build.sh helm has built.
func program(t *testing.T, name string) string {
	t.Helper()
	path := filepath.Join(os.Getenv("OXIDE_CSI_PROGRAMS"), name)
	if _, err := os.Stat(path); err != nil {
		t.Fatalf("%v: set OXIDE_CSI_PROGRAMS, and run test/programs/build.sh helm", err)
	}
	return path
}

// TestLicences checks that each archive of programs has the licence of each module that its programs link.
func TestLicences(t *testing.T) {
	for _, platform := range platforms(t) {
		folder := programsOf(t, platform)
		notices, err := os.ReadFile(filepath.Join(folder, "THIRD-PARTY-LICENSES"))
		must(t, err)
		modules := 0
		for _, name := range programs {
			info, err := buildinfo.ReadFile(filepath.Join(folder, name))
			if errors.Is(err, os.ErrNotExist) {
				continue // not for this platform
			}
			must(t, err)
			for _, module := range info.Deps {
				modules++
				if !strings.Contains(string(notices), "\n"+module.Path+" "+module.Version+": ") {
					t.Errorf("%s: the licence of %s is missing", platform, module.Path)
				}
			}
		}
		if modules < 40 {
			t.Errorf("%s: the programs have only %d modules", platform, modules)
		}
	}
}

// TestPrograms checks version and units of the archive of programs.
func TestPrograms(t *testing.T) {
	folder := filepath.Join(unpack(t, "oxide-csi-VERSION-linux-amd64.tar.gz"), "oxide-csi-"+version(t)+"-linux-amd64")
	for _, name := range programs {
		program := filepath.Join(folder, name)
		out, err := exec.Command(program, "--version").Output()
		must(t, err)
		if !strings.HasSuffix(strings.TrimSpace(string(out)), " v"+version(t)) {
			t.Errorf("%s --version prints %q", name, out)
		}
	}
	for _, name := range []string{"LICENSE", "systemd/oxide-csi-node.service", "systemd/install.sh"} {
		if info, err := os.Stat(filepath.Join(folder, name)); err != nil || info.Size() == 0 {
			t.Errorf("%s: %v", name, err)
		}
	}
	// The units install only the program of their release. The check comes before any change of the host.
	other := filepath.Join(t.TempDir(), "oxide-csi")
	must(t, os.WriteFile(other, []byte("another program"), 0o700))
	out, err := exec.Command(filepath.Join(folder, "systemd/install.sh"), other, "none").CombinedOutput()
	if err == nil || !strings.Contains(string(out), "is not the program of this release") {
		t.Errorf("another program is installed: %v, %s", err, out)
	}
}

// TestImageContents checks that each image has the licences of its modules.
func TestImageContents(t *testing.T) {
	for image := range imagePrograms {
		if text := imageFiles(t, image)["usr/share/doc/oxide-csi/copyright"]; len(text) == 0 {
			t.Errorf("%s has no licences of its modules", image)
		}
	}
}

// TestSignature signs the checksums with a throw-away key. A changed file of checksums is then refused. It needs
// cosign, which takes some four minutes to build: test/programs/build.sh cosign.
func TestSignature(t *testing.T) {
	cosign := filepath.Join(os.Getenv("OXIDE_CSI_PROGRAMS"), "cosign")
	if _, err := os.Stat(cosign); err != nil {
		t.Skip("needs cosign: run test/programs/build.sh cosign")
	}
	folder := t.TempDir()
	run := func(name string, args ...string) error {
		cmd := exec.Command(name, args...)
		cmd.Dir, cmd.Env = folder, append(os.Environ(), "COSIGN_PASSWORD=", "HOME="+folder)
		out, err := cmd.CombinedOutput()
		t.Logf("%s: %v\n%s", strings.Join(cmd.Args, " "), err, out)
		return err
	}
	sums := filepath.Join(folder, "SHA256SUMS")
	must(t, os.WriteFile(sums, read(t, "SHA256SUMS"), 0o600))
	must(t, run(cosign, "generate-key-pair"))
	script, err := filepath.Abs("sign.sh")
	must(t, err)
	must(t, run(script, cosign, filepath.Join(folder, "cosign.key"), folder))
	verify := []string{
		"verify-blob",
		"--key",
		"cosign.pub",
		"--insecure-ignore-tlog=true",
		"--bundle",
		"SHA256SUMS.sigstore.json",
		"SHA256SUMS",
	}
	must(t, run(cosign, verify...))
	must(t, os.WriteFile(sums, append(read(t, "SHA256SUMS"), "0  another\n"...), 0o600))
	if run(cosign, verify...) == nil {
		t.Error("changed checksums are accepted")
	}
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Command release makes all files of a release in a new folder, from the folder of the repository:
//
//	release -o FOLDER -version vVERSION -ldflags FLAGS -image-flags FLAGS -kustomize PROGRAM
//		[-platforms OS/ARCHITECTURE,...] TOOL...
//
// TOOL and the flags of images are those of package deploy/image. Equal sources, an equal Go and equal Debian packages
// make equal files: no file depends on the time, the folder, the user or the order of a folder's entries.
//
// The files, in reading order:
//
//   - main.go: the steps
//   - archive.go: folders in memory, and archives of them
//   - deploy.go: chart, manifests and job files with the digests of the images
//   - modules.go: which modules and packages are in a program or an image, and their licences
//   - sbom.go: lists of them in the formats SPDX and CycloneDX
//   - statement.go: checksums and provenance
package main

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

func main() {
	var r release
	flag.StringVar(&r.folder, "o", "dist", "new directory for the release")
	flag.StringVar(&r.tag, "version", "", "version, beginning with v")
	flag.StringVar(&r.ldflags, "ldflags", "", "flags of Go's linker")
	flag.StringVar(&r.imageFlags, "image-flags", "", "flags of deploy/image")
	flag.StringVar(&r.kustomize, "kustomize", "kustomize", "program kustomize")
	platforms := flag.String("platforms", "linux/amd64", "platforms of programs; images are for that of this machine")
	flag.Parse()
	r.tools = flag.Args()
	r.version = strings.TrimPrefix(r.tag, "v")
	r.platforms = strings.Split(*platforms, ",")
	if err := r.run(); err != nil {
		fmt.Fprintf(os.Stderr, "release: %v\n", err)
		os.Exit(1)
	}
}

type release struct {
	folder, tag, version, commit, ldflags, imageFlags, kustomize string
	tools, platforms                                             []string
	// build is a temporary folder with the programs, below OS-ARCHITECTURE.
	build string
	// folders are those of [moduleFolders].
	folders map[string][]string
}

// The programs of a release.
const (
	pluginProgram = "oxide-csi"
	cosiProgram   = "oxide-cosi"
	simProgram    = "oxide-sim"
)

var programs = []string{pluginProgram, cosiProgram, simProgram}

// programsFor returns the programs for a platform. The host gets all, because its platform is that of nodes and images.
// People run commands and the simulated rack on a Linux of their own. Elsewhere nothing can be mounted: there the
// plugin has only commands, and noPlugin is true.
func programsFor(platform string) (names []string, noPlugin bool) {
	switch {
	case platform == host:
		return programs, false
	case strings.HasPrefix(platform, "linux/"):
		return []string{pluginProgram, simProgram}, false
	}
	return []string{pluginProgram}, true
}

// image is a container image with one program.
type image struct {
	name, program string
	// args are arguments of deploy/image.
	args []string
}

// images returns the images of a release.
func (r release) images() []image {
	return []image{
		{nodeImage, pluginProgram, r.tools},
		{controllerImage, pluginProgram, []string{"-certificates"}},
		{cosiImage, cosiProgram, []string{"-certificates", "-label", "org.opencontainers.image.title=oxide-cosi"}},
	}
}

// host is the platform of the images: racks have no other processors.
const host = "linux/amd64"

func (r release) run() (err error) {
	if r.commit, err = headCommit("."); err != nil {
		return err
	}
	if err := os.Mkdir(r.folder, 0o755); err != nil {
		return err
	}
	if r.build, err = os.MkdirTemp("", "release"); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(r.build)) }()
	if r.folders, err = moduleFolders(r.platforms); err != nil {
		return err
	}
	var built []string
	for _, platform := range r.platforms {
		paths, err := r.compile(platform)
		if err != nil {
			return err
		}
		built = append(built, paths...)
	}
	contents, err := r.modules(built...)
	if err != nil {
		return err
	}
	notices, err := contents.notices()
	if err != nil {
		return err
	}
	// The images get the notices, too.
	copyright := filepath.Join(r.build, "copyright")
	if err := os.WriteFile(copyright, notices, 0o600); err != nil {
		return err
	}
	digests := map[string]string{}
	var packages []component
	for _, image := range r.images() {
		digest, debian, err := r.makeImage(image, copyright)
		if err != nil {
			return err
		}
		digests[image.name] = digest
		packages = append(packages, debian...)
	}
	if err := r.archivePrograms(notices); err != nil {
		return err
	}
	if err := r.deploy(digests); err != nil {
		return err
	}
	return r.writeProvenanceAndChecksums(packages)
}

func (r release) program(platform, name string) string {
	return filepath.Join(r.build, strings.ReplaceAll(platform, "/", "-"), name)
}

// compile builds the programs of a platform, and returns their paths.
func (r release) compile(platform string) (paths []string, err error) {
	system, architecture, _ := strings.Cut(platform, "/")
	names, _ := programsFor(platform)
	for _, name := range names {
		path := r.program(platform, name)
		// Without buildvcs: a build would differ between a clone with tags and one without.
		cmd := exec.Command("go", "build", "-trimpath", "-buildvcs=false", "-ldflags", r.ldflags, "-o", path, "./cmd/"+name)
		cmd.Env = append(os.Environ(), "GOFLAGS=", "CGO_ENABLED=0", "GOAMD64=v1", "GOOS="+system, "GOARCH="+architecture)
		if err := run(cmd); err != nil {
			return nil, err
		}
		paths = append(paths, path)
	}
	return paths, nil
}

// run runs a program whose output goes to that of this one.
func run(cmd *exec.Cmd) error {
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("%s: %w", strings.Join(cmd.Args, " "), err)
	}
	return nil
}

// makeImage makes an image as an archive and as an OCI layout, and its lists of contents.
// It returns the image's digest.
func (r release) makeImage(i image, copyright string) (digest string, debian []component, err error) {
	archive := filepath.Join(r.folder, fmt.Sprintf("%s-%s.docker.tar", i.name, r.version))
	layout := filepath.Join(r.build, "image-"+i.name)
	program := r.program(host, i.program)
	command := append(
		[]string{"run", "./deploy/image", "-o", archive, "-oci", layout, "-tag", repository(i.name) + ":" + r.tag,
			"-program", program, "-notices", copyright},
		strings.Fields(r.imageFlags)...)
	if err := run(exec.Command("go", append(command, i.args...)...)); err != nil {
		return "", nil, err
	}
	files, err := readFolder(layout, "")
	if err != nil {
		return "", nil, err
	}
	if err := files.writeTar(filepath.Join(r.folder, fmt.Sprintf("%s-%s.oci.tar", i.name, r.version))); err != nil {
		return "", nil, err
	}
	made, err := tarball.ImageFromPath(archive, nil)
	if err != nil {
		return "", nil, err
	}
	if digest, err = layoutDigest(layout); err != nil {
		return "", nil, err
	}
	if debian, err = debianPackages(made); err != nil {
		return "", nil, err
	}
	contents, err := r.modules(program)
	if err != nil {
		return "", nil, err
	}
	contents.name, contents.components = i.name, append(contents.components, debian...)
	return digest, debian, r.writeLists(contents)
}

// layoutDigest returns the digest of the only image of an OCI layout. An archive has no digest.
func layoutDigest(layout string) (string, error) {
	text, err := os.ReadFile(filepath.Join(layout, "index.json"))
	if err != nil {
		return "", err
	}
	index, err := v1.ParseIndexManifest(bytes.NewReader(text))
	if err != nil {
		return "", err
	}
	return index.Manifests[0].Digest.String(), nil
}

// documents returns what stands beside the program of a platform: man pages and completions. This machine makes the man
// pages with a program that has the same commands. Completions ask the program for its commands, so those of the host
// serve all.
func (r release) documents(name string, noPlugin bool) (files, error) {
	tags, pages := "man", filepath.Join(r.build, "man", name)
	if noPlugin {
		tags, pages = "man,noplugin", pages+"-noplugin"
	}
	cmd := exec.Command("go", "run", "-tags="+tags, "-ldflags", r.ldflags, "./cmd/"+name, "man", pages)
	if err := run(cmd); err != nil {
		return nil, err
	}
	f, err := readFolder(pages, "man/man1/")
	if err != nil {
		return nil, err
	}
	for _, shell := range []string{"bash", "fish", "powershell", "zsh"} {
		script, err := exec.Command(r.program(host, name), "completion", shell).Output()
		if err != nil {
			return nil, fmt.Errorf("%s completion %s: %w", name, shell, err)
		}
		f["completions/"+name+"."+shell] = script
	}
	return f, nil
}

// archivePrograms writes the archives of the platforms.
func (r release) archivePrograms(notices []byte) error {
	common := files{"THIRD-PARTY-LICENSES": notices}
	if err := common.read("LICENSE", "LICENSE"); err != nil {
		return err
	}
	for _, platform := range r.platforms {
		if err := r.archivePlatform(platform, common); err != nil {
			return err
		}
	}
	return nil
}

// archivePlatform writes the archive of a platform, and the lists of its contents.
func (r release) archivePlatform(platform string, common files) error {
	f := files{}
	f.addAll(common)
	var paths []string
	names, noPlugin := programsFor(platform)
	for _, name := range names {
		path := r.program(platform, name)
		paths = append(paths, path)
		if err := f.read(name, path); err != nil {
			return err
		}
		documents, err := r.documents(name, noPlugin)
		if err != nil {
			return err
		}
		f.addAll(documents)
	}
	if platform == host {
		units, err := readFolder("deploy/systemd", "systemd/")
		if err != nil {
			return err
		}
		f.addAll(units)
		f["systemd/oxide-csi.sha256"] = []byte(sum(f[pluginProgram]) + "\n")
	}
	contents, err := r.modules(paths...)
	if err != nil {
		return err
	}
	contents.name = pluginProgram + "-" + strings.ReplaceAll(platform, "/", "-")
	if err := r.writeLists(contents); err != nil {
		return err
	}
	name := fmt.Sprintf("oxide-csi-%s-%s", r.version, strings.ReplaceAll(platform, "/", "-"))
	return f.below(name + "/").writeTarGzip(filepath.Join(r.folder, name+".tar.gz"))
}

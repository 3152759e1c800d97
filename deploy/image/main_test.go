// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/validate"
	"golang.org/x/sys/unix"
)

// tools returns the tools of the node's image.
func tools(t *testing.T) []string {
	t.Helper()
	out, err := exec.Command("make", "--no-print-directory", "-s", "-C", "../..", "print-image-tools").Output()
	must(t, err)
	return strings.Fields(string(out))
}

// complete fills in the options that every test uses, with a program that does nothing.
func complete(t *testing.T, o options) options {
	t.Helper()
	dir := t.TempDir()
	o.program, o.output = filepath.Join(dir, "oxide-csi"), filepath.Join(dir, "image.tar")
	must(t, os.WriteFile(o.program, []byte("the program"), 0o755))
	o.tag, o.user = "example.com/oxide-csi:v1", "65532:65532"
	o.labels = map[string]string{"org.opencontainers.image.version": "v1"}
	if o.system == "" {
		o.system = "/"
	}
	return o
}

// run makes an image. An ordinary user may lack the packages that it is made of.
func run(t *testing.T, o options) {
	t.Helper()
	err := o.run()
	if os.Geteuid() != 0 && (errors.Is(err, exec.ErrNotFound) || errors.Is(err, fs.ErrNotExist)) {
		t.Skipf("needs the packages of make deps: %v", err)
	}
	must(t, err)
}

// build makes an image, and returns it as it is in the archive.
func build(t *testing.T, o options) v1.Image {
	t.Helper()
	o = complete(t, o)
	run(t, o)
	return load(t, o.output)
}

// load reads an archive, and checks that it is whole.
func load(t *testing.T, archive string) v1.Image {
	t.Helper()
	image, err := tarball.ImageFromPath(archive, nil)
	must(t, err)
	must(t, validate.Image(image))
	return image
}

// contents returns the files of an image without its folders, and each file's content by its name.
func contents(t *testing.T, image v1.Image) map[string][]byte {
	t.Helper()
	stream := mutate.Extract(image)
	defer stream.Close()
	files := map[string][]byte{}
	for r := tar.NewReader(stream); ; {
		header, err := r.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		must(t, err)
		if header.Typeflag == tar.TypeDir {
			continue
		}
		files[header.Name], err = io.ReadAll(r)
		must(t, err)
	}
}

func names(t *testing.T, image v1.Image) []string {
	t.Helper()
	var names []string
	for name := range contents(t, image) {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// systemFiles are in both images.
var systemFiles = []string{"bin", "etc/group", "etc/mtab", "etc/passwd", "lib", "lib64", "oxide-csi", "sbin"}

// The controller calls no programs, so its image has none.
func TestControllerImage(t *testing.T) {
	notices := filepath.Join(t.TempDir(), "notices")
	must(t, os.WriteFile(notices, []byte("licences"), 0o600))
	image := build(t, options{certificates: true, notices: notices})
	want := slices.Concat(systemFiles, []string{
		"etc/ssl/certs/ca-certificates.crt", "usr/share/doc/ca-certificates/copyright", "usr/share/doc/oxide-csi/copyright",
		"var/lib/dpkg/status.d/ca-certificates",
	})
	slices.Sort(want)
	if diff := cmp.Diff(want, names(t, image)); diff != "" {
		t.Errorf("want (-), in the image (+):\n%s", diff)
	}
	config, err := image.ConfigFile()
	must(t, err)
	want = []string{"65532:65532", "/oxide-csi", "v1", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "linux"}
	c := config.Config
	got := []string{c.User, c.Entrypoint[0], c.Labels["org.opencontainers.image.version"], c.Env[0], config.OS}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("configuration, want (-), got (+):\n%s", diff)
	}
}

// The node's image has the tools, their libraries and the licences of both. It has no shell and no certificates: a node
// never talks to a rack.
func TestNodeImage(t *testing.T) {
	image := build(t, options{tools: tools(t)})
	names := names(t, image)
	has := func(name string) bool { return slices.Contains(names, name) }
	for _, name := range append(slices.Clone(systemFiles), "etc/mke2fs.conf") {
		if !has(name) {
			t.Errorf("%s is missing", name)
		}
	}
	for _, tool := range tools(t) {
		if !has("usr/bin/"+tool) && !has("usr/sbin/"+tool) {
			t.Errorf("%s is missing", tool)
		}
	}
	for name, content := range contents(t, image) {
		switch dir, file := path.Split(name); {
		case slices.Contains([]string{"sh", "bash", "dash", "apt", "dpkg", "perl", "python3"}, file):
			t.Errorf("the image has %s, which nothing needs", name)
		case (dir == "usr/bin/" || dir == "usr/sbin/") && !slices.Contains(tools(t), file):
			t.Errorf("the image has %s, which the node does not call", name)
		case dir == "var/lib/dpkg/status.d/" && !has("usr/share/doc/"+file+"/copyright"):
			t.Errorf("the copyright of %s is missing", file)
		case strings.Contains(name, "ca-certificates") || bytes.Contains(content, []byte("BEGIN CERTIFICATE")):
			t.Errorf("the image has certificates: %s", name)
		}
	}
}

// Equal inputs make equal bytes, regardless of the times and modes of the files on the building machine.
func TestReproducible(t *testing.T) {
	var archives, layouts []string
	for _, change := range []func(program string) error{
		func(program string) error { return os.Chtimes(program, time.Time{}, time.Unix(1e9, 0)) },
		func(program string) error { return os.Chmod(program, 0o700) },
	} {
		o := complete(t, options{certificates: true})
		o.layout = filepath.Join(t.TempDir(), "layout")
		must(t, change(o.program))
		run(t, o)
		archives, layouts = append(archives, o.output), append(layouts, o.layout)
	}
	for _, pair := range [][]string{archives, layouts} {
		if out, err := exec.Command("diff", "--recursive", pair[0], pair[1]).CombinedOutput(); err != nil {
			t.Errorf("built twice: %v: %s", err, out)
		}
	}
	layers, err := load(t, archives[0]).Layers()
	must(t, err)
	for _, layer := range layers {
		stream, err := layer.Uncompressed()
		must(t, err)
		var names []string
		for r := tar.NewReader(stream); ; {
			header, err := r.Next()
			if errors.Is(err, io.EOF) {
				break
			}
			must(t, err)
			names = append(names, strings.TrimSuffix(header.Name, "/"))
			if header.ModTime.Unix() != 0 || header.Uid != 0 || header.Gid != 0 || header.Uname != "" {
				t.Errorf("%s has an owner or a time of the building machine: %+v", header.Name, header)
			}
		}
		byFolder := func(a, b string) int { return slices.Compare(strings.Split(a, "/"), strings.Split(b, "/")) }
		if !slices.IsSortedFunc(names, byFolder) {
			t.Errorf("not sorted: %q", names)
		}
	}
}

// The layout holds the same image as the archive.
func TestLayout(t *testing.T) {
	o := complete(t, options{certificates: true})
	o.layout = filepath.Join(t.TempDir(), "layout")
	run(t, o)
	index, err := layout.ImageIndexFromPath(o.layout)
	must(t, err)
	must(t, validate.Index(index))
	manifest, err := index.IndexManifest()
	must(t, err)
	if len(manifest.Manifests) != 1 {
		t.Fatalf("the layout has %d images, want 1", len(manifest.Manifests))
	}
	found := manifest.Manifests[0]
	if tag := found.Annotations["org.opencontainers.image.ref.name"]; tag != "v1" || found.Platform.OS != "linux" {
		t.Errorf("tag %q, platform %v", tag, found.Platform)
	}
	image, err := index.Image(found.Digest)
	must(t, err)
	inLayout, err := image.Manifest()
	must(t, err)
	for _, part := range append(inLayout.Layers, inLayout.Config) {
		if !strings.HasPrefix(string(part.MediaType), "application/vnd.oci.image.") {
			t.Errorf("%s is no media type of OCI", part.MediaType)
		}
	}
	inArchive, err := load(t, o.output).ConfigName()
	must(t, err)
	if inArchive != inLayout.Config.Digest {
		t.Errorf("image %s in the archive, %s in the layout", inArchive, inLayout.Config.Digest)
	}
}

// A folder that is there already can hold files of an earlier run, such as certificates.
func TestFolderMustBeNew(t *testing.T) {
	for name, set := range map[string]func(o *options, folder string){
		"root":   func(o *options, folder string) { o.root = folder },
		"layout": func(o *options, folder string) { o.layout = folder },
	} {
		t.Run(name, func(t *testing.T) {
			o := complete(t, options{})
			set(&o, t.TempDir())
			if err := o.run(); !errors.Is(err, fs.ErrExist) {
				t.Errorf("got %v, want %v", err, fs.ErrExist)
			}
		})
	}
}

// Every tool finds its libraries in the image.
func TestToolsRun(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: chroot")
	}
	o := complete(t, options{tools: tools(t)})
	o.root = filepath.Join(t.TempDir(), "root")
	run(t, o)
	for _, tool := range tools(t) {
		for _, dir := range []string{"/usr/bin/", "/usr/sbin/"} {
			if _, err := os.Stat(o.root + dir + tool); err != nil {
				continue
			}
			// The answers differ. 126 and 127 are the codes of programs that cannot be run or loaded.
			cmd := exec.Command("chroot", o.root, dir+tool, "-V")
			out, err := cmd.CombinedOutput()
			if cmd.ProcessState == nil || slices.Contains([]int{-1, 126, 127}, cmd.ProcessState.ExitCode()) {
				t.Errorf("%s: %v: %s", tool, err, out)
			}
		}
	}
}

// cryptsetup formats a disk in the image. On two processors it derives the key with threads, and libc loads a library
// when a thread ends.
func TestCryptsetupDerivesAKey(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: chroot, device nodes")
	}
	o := complete(t, options{tools: []string{"cryptsetup"}})
	o.root = filepath.Join(t.TempDir(), "root")
	run(t, o)
	must(t, os.MkdirAll(filepath.Join(o.root, "dev"), 0o755))
	for name, minor := range map[string]uint32{"random": 8, "urandom": 9} {
		must(t, unix.Mknod(filepath.Join(o.root, "dev", name), unix.S_IFCHR|0o600, int(unix.Mkdev(1, minor))))
	}
	must(t, os.WriteFile(filepath.Join(o.root, "disk"), make([]byte, 32<<20), 0o600))
	cmd := exec.Command(
		"chroot",
		o.root,
		"cryptsetup",
		"luksFormat",
		"--batch-mode",
		"--disable-locks",
		"--type=luks2",
		"--pbkdf=argon2id",
		"--pbkdf-memory=1024",
		"--pbkdf-force-iterations=4",
		"--pbkdf-parallel=2",
		"--key-file=-",
		"/disk",
	)
	cmd.Stdin = strings.NewReader("passphrase")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
}

// The library that makes images is part of no other program.
func TestLibraryIsLinkedHereOnly(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", "../../cmd/...").Output()
	must(t, err)
	if strings.Contains(string(out), "go-containerregistry") {
		t.Error("a program below cmd imports go-containerregistry")
	}
}

// The Dockerfile and the Makefile make the same images.
func TestDockerfile(t *testing.T) {
	dockerfile, err := os.ReadFile("Dockerfile")
	must(t, err)
	makefile, err := os.ReadFile("../../Makefile")
	must(t, err)
	for _, text := range []string{
		"org.opencontainers.image.title=oxide-csi",
		"org.opencontainers.image.source=https://github.com/oxidecomputer/oxide-csi-plugin",
		"org.opencontainers.image.licenses=MPL-2.0", "65532:65532", "bin/image/node", "bin/image/controller",
	} {
		if !bytes.Contains(dockerfile, []byte(text)) || !bytes.Contains(makefile, []byte(text)) {
			t.Errorf("%s is in one of the two only", text)
		}
	}
	if !bytes.Contains(dockerfile, []byte("USER 65532:65532")) ||
		!bytes.Contains(makefile, []byte("-user 65532:65532")) {
		t.Error("the images run as different users")
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

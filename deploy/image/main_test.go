package main

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// tools are those that the node's image is made with.
func tools(t *testing.T) []string {
	t.Helper()
	out, err := exec.Command("make", "--no-print-directory", "--silent", "-C", "../..", "print-image-tools").Output()
	must(t, err)
	return strings.Fields(string(out))
}

// build makes an image of a program that does nothing, and returns the archive.
func build(t *testing.T, o options) []byte {
	t.Helper()
	dir := t.TempDir()
	o.program, o.output = filepath.Join(dir, "oxide-csi"), filepath.Join(dir, "image.tar")
	must(t, os.WriteFile(o.program, []byte("the program"), 0o755))
	o.tag, o.user, o.labels = "example.com/oxide-csi:v1", "65532:65532", map[string]string{"org.opencontainers.image.version": "v1"}
	if err := o.run(); err != nil {
		if os.Geteuid() != 0 && errors.Is(err, exec.ErrNotFound) {
			t.Skipf("needs the tools of make deps: %v", err)
		}
		t.Fatal(err)
	}
	text, err := os.ReadFile(o.output)
	must(t, err)
	return text
}

func untar(t *testing.T, text []byte) map[string][]byte {
	t.Helper()
	files := map[string][]byte{}
	for r := tar.NewReader(bytes.NewReader(text)); ; {
		header, err := r.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		must(t, err)
		if header.Typeflag == tar.TypeDir {
			continue
		}
		if files[header.Name], err = io.ReadAll(r); err != nil {
			t.Fatal(err)
		}
		if header.Typeflag == tar.TypeSymlink {
			files[header.Name] = []byte("-> " + header.Linkname)
		}
	}
}

// contents are the names of all files of an image.
func contents(t *testing.T, archive []byte) (names []string) {
	t.Helper()
	all := untar(t, archive)
	var manifest []struct{ Layers []string }
	must(t, json.Unmarshal(all["manifest.json"], &manifest))
	for _, layer := range manifest[0].Layers {
		for name := range untar(t, all[layer]) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// system files are in both images.
var systemFiles = []string{
	"bin", "etc/group", "etc/mtab", "etc/passwd", "etc/ssl/certs/ca-certificates.crt", "lib", "lib64", "oxide-csi", "sbin",
	"usr/share/doc/ca-certificates/copyright", "var/lib/dpkg/status.d/ca-certificates",
}

// The controller calls no programs, and so there are none.
func TestControllerImage(t *testing.T) {
	archive := build(t, options{certificates: true})
	if diff := cmp.Diff(systemFiles, contents(t, archive)); diff != "" {
		t.Errorf("want (-), in the image (+):\n%s", diff)
	}
	var config struct {
		Config struct {
			User       string
			Entrypoint []string
			Labels     map[string]string
		}
	}
	must(t, json.Unmarshal(untar(t, archive)["config.json"], &config))
	if c := config.Config; c.User != "65532:65532" || !slices.Equal(c.Entrypoint, []string{"/oxide-csi"}) || c.Labels["org.opencontainers.image.version"] != "v1" {
		t.Errorf("it is configured as %+v", c)
	}
	if !bytes.Equal(archive, build(t, options{certificates: true})) {
		t.Error("made again, it is another one")
	}
}

// The node's image has the tools, what these need, and the terms on which they may be handed on; and no shell.
func TestNodeImage(t *testing.T) {
	names := contents(t, build(t, options{tools: tools(t)}))
	has := func(name string) bool { return slices.Contains(names, name) }
	for _, name := range append(slices.Clone(systemFiles), "etc/mke2fs.conf") {
		if !has(name) {
			t.Errorf("there is no %s", name)
		}
	}
	for _, tool := range tools(t) {
		if !has("usr/bin/"+tool) && !has("usr/sbin/"+tool) {
			t.Errorf("there is no %s", tool)
		}
	}
	for _, name := range names {
		switch dir, file := path.Split(name); {
		case slices.Contains([]string{"sh", "bash", "dash", "apt", "dpkg", "perl", "python3"}, file):
			t.Errorf("there is %s, which nothing needs", name)
		case (dir == "usr/bin/" || dir == "usr/sbin/") && !slices.Contains(tools(t), file):
			t.Errorf("there is %s, which was not asked for", name)
		case dir == "var/lib/dpkg/status.d/" && !has("usr/share/doc/"+file+"/copyright"):
			t.Errorf("there is no copyright of %s", file)
		}
	}
}

// Every tool finds its libraries in the image.
func TestToolsRun(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: chroot")
	}
	root := t.TempDir()
	program := filepath.Join(t.TempDir(), "oxide-csi")
	must(t, os.WriteFile(program, nil, 0o755))
	must(t, options{program: program, root: root, tools: tools(t)}.run())
	for _, tool := range tools(t) {
		for _, dir := range []string{"/usr/bin/", "/usr/sbin/"} {
			if _, err := os.Stat(root + dir + tool); err != nil {
				continue
			}
			// What they answer differs; 126 and 127 are of programs that cannot be run or loaded.
			cmd := exec.Command("chroot", root, dir+tool, "-V")
			out, err := cmd.CombinedOutput()
			if cmd.ProcessState == nil || slices.Contains([]int{-1, 126, 127}, cmd.ProcessState.ExitCode()) {
				t.Errorf("%s: %v: %s", tool, err, out)
			}
		}
	}
}

// The Dockerfile and the Makefile say the same of the images.
func TestDockerfile(t *testing.T) {
	dockerfile, err := os.ReadFile("Dockerfile")
	must(t, err)
	makefile, err := os.ReadFile("../../Makefile")
	must(t, err)
	for _, text := range []string{
		"org.opencontainers.image.title=oxide-csi", "org.opencontainers.image.source=https://github.com/oxidecomputer/oxide-csi-plugin",
		"org.opencontainers.image.licenses=MPL-2.0", "65532:65532", "bin/image/node", "bin/image/controller",
	} {
		if !bytes.Contains(dockerfile, []byte(text)) || !bytes.Contains(makefile, []byte(text)) {
			t.Errorf("%s stands in one of the two alone", text)
		}
	}
	if !bytes.Contains(dockerfile, []byte("USER 65532:65532")) || !bytes.Contains(makefile, []byte("-user 65532:65532")) {
		t.Error("they run as different users")
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build k8s

package k8s_test

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// Folders of the repository that the tests use.
const (
	manifests = "../../deploy/k8s"
	sidecars  = "../programs/sidecars"
)

// Images of the tests that the manifests do not name.
const (
	pauseImage   = "example.com/pause:test"
	busyboxImage = "example.com/busybox:test"
)

// programs returns the folder with the programs of test/programs/build.sh.
func programs() (string, error) {
	if dir := os.Getenv("OXIDE_CSI_PROGRAMS"); dir != "" {
		return dir, nil
	}
	cache, err := os.UserCacheDir()
	return filepath.Join(cache, "oxide-csi-plugin", "programs"), err
}

// prepare builds the plugin, the rack and all images into a folder, and copies the definitions of snapshots.
func prepare(dir string) error {
	built, err := programs()
	if err != nil {
		return err
	}
	if _, err := simtest.Build(dir, false); err != nil {
		return err
	}
	tool := filepath.Join(dir, "image")
	if _, err := command("go", "build", "-o", tool, "../../deploy/image"); err != nil {
		return err
	}
	rendered, err := command(filepath.Join(built, "kubectl"), "kustomize", manifests)
	if err != nil {
		return err
	}
	images := map[string][]string{
		pauseImage:   {"-program=" + filepath.Join(built, "pause")},
		busyboxImage: {"-program=/bin/busybox"},
	}
	for _, match := range regexp.MustCompile(`image: (\S+)`).FindAllStringSubmatch(rendered, -1) {
		if released(match[1]) {
			continue
		}
		if images[match[1]], err = ingredients(dir, built, match[1]); err != nil {
			return err
		}
	}
	if err := os.Mkdir(filepath.Join(dir, "images"), 0o755); err != nil {
		return err
	}
	if files := simtest.ReleaseFiles(); files != "" {
		layouts, err := filepath.Glob(filepath.Join(files, "images/*.oci.tar"))
		if err != nil {
			return err
		}
		if _, err := command("cp", append(layouts, filepath.Join(dir, "images"))...); err != nil {
			return err
		}
	}
	for image, args := range images {
		output := filepath.Join(dir, "images", path.Base(image)+".tar")
		if _, err := command(tool, append([]string{"-o=" + output, "-tag=" + image}, args...)...); err != nil {
			return err
		}
	}
	if err := databaseImage(filepath.Join(dir, "images", "postgres.tar")); err != nil {
		return err
	}
	if alsoPrepare != nil {
		if err := alsoPrepare(dir, built); err != nil {
			return err
		}
	}
	return definitions(filepath.Join(dir, "definitions"))
}

// released reports whether an image is one of a release, whose manifests name images by digest.
func released(image string) bool { return strings.Contains(image, "@") }

// alsoPrepare, if set, makes the images of other tests.
var alsoPrepare func(dir, built string) error

// ingredients returns the files of an image of the manifests. For a built program it checks that its version is the
// one in the manifests.
func ingredients(dir, built, image string) ([]string, error) {
	name, version, _ := strings.Cut(path.Base(image), ":")
	switch name {
	case "oxide-csi-controller":
		return []string{"-program=" + filepath.Join(dir, "oxide-csi"), "-user=65532:65532", "-certificates"}, nil
	case "oxide-csi-plugin":
		tools, err := command("make", "--no-print-directory", "-s", "-C", "../..", "print-image-tools")
		return append(
			[]string{"-program=" + filepath.Join(dir, "oxide-csi"), "-user=65532:65532"},
			strings.Fields(tools)...), err
	case "csi-node-driver-registrar":
		return []string{"-program=" + filepath.Join(built, "registrar")}, nil
	}
	module := "external-" + strings.TrimPrefix(name, "csi-")
	required, err := os.ReadFile(filepath.Join(sidecars, "go.mod"))
	if err != nil {
		return nil, err
	}
	if !regexp.MustCompile(`/` + module + `/v\d+ ` + regexp.QuoteMeta(version) + `\s`).Match(required) {
		return nil, fmt.Errorf("the manifests name %s, but %s/go.mod has another version of %s", image, sidecars, module)
	}
	return []string{"-program=" + filepath.Join(built, name), "-user=65532:65532"}, nil
}

// definitions copies the custom resource definitions of snapshots out of their Go module.
func definitions(to string) error {
	from, err := command(
		"go",
		"-C",
		sidecars,
		"list",
		"-m",
		"-f",
		"{{.Dir}}",
		"github.com/kubernetes-csi/external-snapshotter/client/v8",
	)
	if err != nil {
		return err
	}
	files, err := filepath.Glob(filepath.Join(strings.TrimSpace(from), "config/crd/snapshot.*.yaml"))
	if err != nil || len(files) == 0 {
		return fmt.Errorf("no definitions of snapshots: %v", err)
	}
	if err := os.Mkdir(to, 0o755); err != nil {
		return err
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err == nil {
			err = os.WriteFile(filepath.Join(to, filepath.Base(file)), text, 0o644)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// command runs a program to its end and returns its output.
func command(name string, args ...string) (string, error) { return output(exec.Command(name, args...)) }

func output(cmd *exec.Cmd) (string, error) {
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return stdout.String(), fmt.Errorf("%s: %w: %s", cmd, err, stderr.String())
	}
	return stdout.String(), nil
}

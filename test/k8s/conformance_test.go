// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build k8s && conformance

package k8s_test

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
)

// officialTests selects the tests of Kubernetes that use a driver's own description.
const officialTests = `External.Storage`

// leftOut are the tests that are not run, with the reason. All others run. A test skips itself if the plugin does not
// advertise what it needs.
var leftOut = []struct{ pattern, why string }{
	{`\[Disruptive\]`, "restarts kubelet by systemctl or over SSH, and the nodes have neither"},
	{
		`any volume data source`,
		"tests volume populators, which are not part of the plugin and whose images are not available",
	},
	{`performance`, "needs a machine of its own"},
}

// sample are the tests that run in continuous integration: of each kind that the plugin supports the quick ones.
var sample = []string{
	`Dynamic PV \(default fs\)\] volumes should store data`,
	`Dynamic PV \(block volmode\)\] volumes should store data`,
	`Dynamic PV \(default fs\)\] volumes should allow exec`,
	`Dynamic PV \(filesystem volmode\)\] volumeMode should not mount`,
	`Dynamic PV \(block volmode\)\] volumeMode should not mount`,
	`\(default fs\)\] provisioning should provision storage with mount options`,
	`\(default fs\)\] provisioning should mount multiple PV pointing to the same storage`,
	`\(default fs\)\] provisioning should provision storage with snapshot data source \[`,
	`\(default fs\)\] provisioning should provision storage with pvc data source$`,
	`\(default fs\)\] provisioning should provision correct filesystem size when restoring`,
	`Dynamic Snapshot \(delete policy\)\] snapshottable .*check deletion \(persistent\)`,
	`\(default fs\) \(late-binding\)\] ephemeral should support two pods`,
	`fsgroupchangepolicy \(OnRootMismatch\).*, new pod fsgroup applied`,
	`read-write-once-pod should block`,
	`\(delayed binding\)\] topology should provision`,
	`\(filesystem volmode\)\] volumeLimits should verify`,
	`Dynamic PV \(default fs\)\] subPath should support existing directory$`,
	`Dynamic PV \(default fs\)\] subPath should be able to unmount after`,
	`\(default fs\)\(allowExpansion\)\] volume-expand Verify if offline`,
}

// focus returns the patterns of the tests to run: those of FOCUS, of the sample if it is "sample", or all.
func focus() []string {
	switch chosen := os.Getenv("FOCUS"); chosen {
	case "":
		return []string{""}
	case "sample":
		return sample
	default:
		return []string{chosen}
	}
}

// TestConformance runs Kubernetes' own storage tests. testdriver.yaml describes what the plugin supports.
func TestConformance(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: namespaces, mounts, loop devices")
	}
	c := newCluster(t)
	c.install(t, "overlay-conformance")
	var skip []string
	for _, out := range leftOut {
		skip = append(skip, out.pattern)
	}
	// The tests wait most of the time, so many can run at once.
	args := []string{
		"run",
		"--procs=6",
		"--no-color",
		"--timeout=50m",
		"--focus=" + officialTests + ".*(" + strings.Join(focus(), "|") + ")",
		"--skip=" + strings.Join(skip, "|"),
		"--silence-skips",
		"--output-dir=" + c.dir,
		"--json-report=conformance.json",
		filepath.Join(c.programs, "e2e.test"),
		"--",
		"--kubeconfig=" + c.path(
			"admin.kubeconfig",
		),
		"--kubectl-path=" + filepath.Join(c.programs, "kubectl"),
		"--provider=local",
		"--storage.testdriver=" + absolute(t, "testdriver.yaml"),
		"--dump-logs-on-failure=false",
	}
	began := time.Now()
	cmd := exec.Command(filepath.Join(c.programs, "ginkgo"), args...)
	var said bytes.Buffer
	cmd.Stdout, cmd.Stderr = &said, &said
	failed := cmd.Run()
	t.Logf("measured: Kubernetes' own tests took %s", time.Since(began).Round(time.Second))
	if text, err := os.ReadFile(c.path("conformance.json")); err != nil {
		t.Error(err)
	} else {
		summarise(t, text)
	}
	if failed != nil {
		text := said.String()
		t.Errorf("%v:\n%s", failed, text[max(0, len(text)-100_000):])
	}
	t.Run("nothing is left", c.nothingLeft)
}

func absolute(t *testing.T, name string) string {
	t.Helper()
	path, err := filepath.Abs(name)
	must(t, err)
	return path
}

// summarise logs which tests have run, and which have not and why. Each pattern of leftOut must match a test, and each
// pattern of focus one that has passed: a pattern without a match has no effect.
func summarise(t *testing.T, text []byte) {
	t.Helper()
	var reports []struct {
		SpecReports []struct {
			ContainerHierarchyTexts           []string
			LeafNodeType, LeafNodeText, State string
			Failure                           struct{ Message string }
		}
	}
	must(t, json.Unmarshal(text, &reports))
	states, skipped, names := map[string]int{}, map[string]int{}, map[string][]string{}
	for _, report := range reports {
		for _, spec := range report.SpecReports {
			name := strings.Join(append(spec.ContainerHierarchyTexts, spec.LeafNodeText), " ")
			if spec.LeafNodeType != "It" || !regexp.MustCompile(officialTests).MatchString(name) {
				continue
			}
			states[spec.State]++
			names[spec.State] = append(names[spec.State], name)
			if spec.State == "skipped" {
				skipped[why(name, spec.Failure.Message)]++
			}
			if spec.State != "skipped" && spec.State != "passed" {
				t.Errorf("%s: %s: %s", spec.State, name, spec.Failure.Message)
			}
		}
	}
	t.Logf("measured: Kubernetes' own tests: %v", states)
	var reasons []string
	for reason, count := range skipped {
		reasons = append(reasons, fmt.Sprintf("%4d skipped: %s", count, reason))
	}
	slices.Sort(reasons)
	for _, reason := range slices.Backward(reasons) {
		t.Logf("measured: %s", reason)
	}
	for _, pattern := range focus() {
		if !slices.ContainsFunc(names["passed"], regexp.MustCompile(pattern).MatchString) {
			t.Errorf("no test has passed that matches %s", pattern)
		}
	}
	for _, out := range leftOut {
		if !slices.ContainsFunc(names["skipped"], regexp.MustCompile(out.pattern).MatchString) {
			t.Errorf("no test was left out by %s", out.pattern)
		}
	}
}

// driver matches the driver's name, which would make equal reasons differ.
var driver = regexp.MustCompile(`^Driver "?csi\.oxide\.computer"? |"?csi\.oxide\.computer"? ?`)

// why returns the reason why a test was skipped: its own message, or that it is in leftOut.
func why(name, message string) string {
	if message != "" {
		first, _, _ := strings.Cut(message, "\n")
		return strings.TrimSpace(driver.ReplaceAllString(first, "the driver "))
	}
	for _, out := range leftOut {
		if regexp.MustCompile(out.pattern).MatchString(name) {
			return out.pattern + ": " + out.why
		}
	}
	return "not selected by FOCUS"
}

func init() { alsoPrepare = officialImages }

// officialImages makes the images that Kubernetes' own tests name, from programs of this machine. Where busybox lacks
// a function that the tests need, the image has the full program. sh is bash, because busybox sh runs busybox' own
// programs regardless of PATH.
func officialImages(dir, built string) error {
	for _, image := range []struct {
		tags       []string
		programs   []string
		entrypoint []string
	}{
		{[]string{"registry.k8s.io/e2e-test-images/busybox:1.37.0-2", "registry.k8s.io/e2e-test-images/busybox:1.37.0-1"}, nil, nil},
		{[]string{"registry.k8s.io/e2e-test-images/agnhost:2.66.1", "registry.k8s.io/e2e-test-images/agnhost:2.63.0"}, []string{filepath.Join(built, "agnhost"), "bash", "nsenter"}, []string{"/agnhost"}},
		{[]string{"registry.k8s.io/e2e-test-images/glibc-dns-testing:2.0.0", "registry.k8s.io/e2e-test-images/nginx:1.27.0-2", "registry.k8s.io/e2e-test-images/nginx:1.15-4"},
			[]string{"bash", "dd", "sha256sum", "md5sum", "stat", "cat", "ls", "blkid"}, nil},
	} {
		files, err := busyboxWith(image.programs)
		if err != nil {
			return err
		}
		name := strings.NewReplacer("/", "-", ":", "-").Replace(image.tags[0])
		if err := writeImage(filepath.Join(dir, "images", name+".tar"), files, image.tags, image.entrypoint); err != nil {
			return err
		}
	}
	return nil
}

// file is a file in an image, or a link if to is not empty.
type file struct {
	content []byte
	to      string
	folder  bool
}

// busyboxWith returns a root filesystem with busybox, these programs and their libraries.
func busyboxWith(programs []string) (map[string]file, error) {
	busybox, err := os.ReadFile("/bin/busybox")
	if err != nil {
		return nil, err
	}
	files := map[string]file{
		"bin/busybox": {
			content: busybox,
		},
		"usr/bin/env": {to: "/bin/busybox"},
		"tmp":         {folder: true},
		"root":        {folder: true},
		"mnt":         {folder: true},
		"uploads":     {folder: true},
		"etc/passwd":  {content: []byte("root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n")},
		"etc/group":   {content: []byte("root:x:0:\nnogroup:x:65534:\n")},
	}
	applets, err := command("/bin/busybox", "--list")
	if err != nil {
		return nil, err
	}
	for _, applet := range strings.Fields(applets) {
		if applet != "busybox" {
			files["bin/"+applet] = file{to: "/bin/busybox"}
		}
	}
	for _, program := range programs {
		path, err := exec.LookPath(program)
		if err != nil {
			return nil, err
		}
		name := "bin/" + filepath.Base(path)
		if filepath.Base(path) == "agnhost" {
			name = "agnhost"
			files["agnhost-2"] = file{to: "/agnhost"}
		}
		content, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		files[name] = file{content: content}
		if program == "bash" {
			files["bin/sh"] = file{to: "/bin/bash"}
		}
		libraries, err := exec.Command("ldd", path).Output()
		if err != nil {
			continue // The program is static.
		}
		for _, library := range regexp.MustCompile(`/\S+`).FindAllString(string(libraries), -1) {
			if content, err = os.ReadFile(library); err != nil {
				return nil, err
			}
			files[strings.TrimPrefix(library, "/")] = file{content: content}
		}
	}
	return files, nil
}

// writeImage writes an archive in the format of docker save.
func writeImage(name string, files map[string]file, tags, entrypoint []string) error {
	layer, err := archive(files)
	if err != nil {
		return err
	}
	with := map[string]any{
		"Cmd": []string{"sh"},
		"Env": []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
	}
	if entrypoint != nil {
		with["Entrypoint"], with["Cmd"] = entrypoint, []string{"pause"}
	}
	config, err := json.Marshal(map[string]any{
		"architecture": "amd64",
		"os":           "linux",
		"rootfs": map[string]any{
			"type":     "layers",
			"diff_ids": []string{fmt.Sprintf("sha256:%x", sha256.Sum256(layer))},
		},
		"config": with,
	})
	if err != nil {
		return err
	}
	manifest, err := json.Marshal(
		[]map[string]any{{"Config": "config.json", "RepoTags": tags, "Layers": []string{"layer.tar"}}},
	)
	if err != nil {
		return err
	}
	all, err := archive(
		map[string]file{
			"config.json":   {content: config},
			"manifest.json": {content: manifest},
			"layer.tar":     {content: layer},
		},
	)
	if err != nil {
		return err
	}
	return os.WriteFile(name, all, 0o644)
}

func archive(files map[string]file) ([]byte, error) {
	var text bytes.Buffer
	w := tar.NewWriter(&text)
	for name, f := range files {
		header := &tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o755, Size: int64(len(f.content))}
		switch {
		case f.folder:
			header.Typeflag, header.Mode = tar.TypeDir, 0o1777
		case f.to != "":
			header.Typeflag, header.Linkname = tar.TypeSymlink, f.to
		}
		if err := w.WriteHeader(header); err != nil {
			return nil, err
		}
		if _, err := w.Write(f.content); err != nil {
			return nil, err
		}
	}
	return text.Bytes(), w.Close()
}

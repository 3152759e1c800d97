// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build k8s

package k8s_test

import (
	"archive/tar"
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"github.com/oxidecomputer/oxide-csi-plugin/test/await"
	"github.com/oxidecomputer/oxide-csi-plugin/test/pages"
)

// TestTutorial runs the commands of docs/tutorials/kubernetes.md as they stand, on a rack without hot-plug that boots
// the nodes. A helm that stands before the real one adds only what simulated devices need, and shorter times. The
// cluster cannot pull the image of PostgreSQL: databaseImage stands in for it.
func TestTutorial(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: namespaces, mounts, loop devices")
	}
	blocks := pages.Of(t, "../../docs/tutorials/kubernetes.md")
	if len(blocks) != 7 {
		t.Fatalf("the page has %d blocks", len(blocks))
	}
	c := newBootingCluster(t, "--max-disks=12")
	c.clone(t)
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(c.try("get", "events", "-A", "--sort-by=.lastTimestamp"))
			t.Log(c.try("-n", namespace, "logs", "--prefix", "--tail=30", "--all-containers", "-l", "app=oxide-csi-controller"))
		}
	})
	blocks[0] = pages.Fill(t, blocks[0],
		"https://silo.sys.example.com", c.sim.Host, "project=kubernetes", "project="+c.sim.Project)
	for _, block := range blocks[:3] { // until the StatefulSet is applied
		c.asReader(t, block)
	}
	await.Within(t, waitLimit, "the claim says what its volume waits for", func() bool {
		shown, err := c.try("describe", "pvc", "data-first-0")
		return err == nil && strings.Contains(shown, "WaitsForRestart")
	})
	c.asReader(t, blocks[3])
	c.asReader(t, blocks[4])
	if n := c.started(t); n != 1 {
		t.Errorf("nodes were started %d times, want one restart", n)
	}
	c.asReader(t, blocks[5])
	c.asReader(t, blocks[6])
	if left := c.get(t, ".items[*].metadata.name", "pvc"); left != "" {
		t.Errorf("claims are left: %s", left)
	}
}

// clone makes a folder in which the commands of a page work: with deploy, a token and a helm.
func (c *cluster) clone(t *testing.T) {
	t.Helper()
	deploy, err := filepath.Abs("../../deploy")
	must(t, err)
	values, err := filepath.Abs("tutorial.yaml")
	must(t, err)
	c.write(t, "clone/token", c.sim.Token)
	must(t, os.Symlink(deploy, c.path("clone/deploy")))
	c.write(t, "bin/helm", fmt.Sprintf("#!/bin/sh\nexec %s/helm \"$@\" --values=%s\n", c.programs, values))
	must(t, os.Chmod(c.path("bin/helm"), 0o755))
}

// asReader runs a block of a page as its reader would, and returns what it prints.
func (c *cluster) asReader(t *testing.T, block string) string {
	t.Helper()
	cmd := exec.Command("bash", "-eu", "-o", "pipefail", "-c", block)
	cmd.Dir = c.path("clone")
	cmd.Env = []string{
		"KUBECONFIG=" + c.path("admin.kubeconfig"), "HOME=" + c.dir,
		"PATH=" + c.path("bin") + ":" + c.programs + ":" + os.Getenv("PATH"),
	}
	shown, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s%s", err, block, shown)
	}
	return string(shown)
}

// started counts how often the plugin started an instance.
func (c *cluster) started(t *testing.T) (n int) {
	t.Helper()
	calls, err := c.sim.Calls(t.Context())
	must(t, err)
	for _, call := range calls.Log {
		if call.Operation == "instance_start" {
			n++
		}
	}
	return n
}

// The programs of the stand-in for PostgreSQL: a server that needs some seconds to start and then only runs, and a
// client that writes names of tables to a file on the volume and finds them again.
const (
	postgresProgram = `#!/busybox sh
set -eu
trap exit TERM
/busybox mkdir -p "$PGDATA"
/busybox rm -f "$PGDATA/serves"
/busybox sleep 5 & wait
/busybox touch "$PGDATA/serves"
while :; do /busybox sleep 1 & wait; done
`
	isReadyProgram = `#!/busybox sh
set -eu
[ "$*" = "-U postgres -h 127.0.0.1" ]
[ -e "$PGDATA/serves" ]
`
	psqlProgram = `#!/busybox sh
set -eu
[ "$1 $2 $3" = "-U postgres -c" ]
[ -e "$PGDATA/serves" ]
case $4 in
"create table "*)
    set -- $4
    echo "$3" >>"$PGDATA/tables"
    /busybox sync
    ;;
'\d '*) /busybox grep -qx "${4#???}" "$PGDATA/tables" ;;
*) exit 1 ;;
esac
`
)

// databaseImage writes the stand-in for postgres:18 to an archive.
func databaseImage(archive string) error {
	busybox, err := os.ReadFile("/bin/busybox")
	if err != nil {
		return err
	}
	var files bytes.Buffer
	w := tar.NewWriter(&files)
	for path, content := range map[string][]byte{
		"busybox": busybox, "usr/bin/postgres": []byte(postgresProgram), "usr/bin/psql": []byte(psqlProgram),
		"usr/bin/pg_isready": []byte(isReadyProgram),
	} {
		if err := w.WriteHeader(&tar.Header{Name: path, Mode: 0o755, Size: int64(len(content))}); err != nil {
			return err
		}
		if _, err := w.Write(content); err != nil {
			return err
		}
	}
	if err := w.Close(); err != nil {
		return err
	}
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(files.Bytes())), nil
	})
	if err != nil {
		return err
	}
	image, err := mutate.ConfigFile(empty.Image, &v1.ConfigFile{
		Architecture: runtime.GOARCH,
		OS:           "linux",
		RootFS:       v1.RootFS{Type: "layers"},
		Config:       v1.Config{Entrypoint: []string{"/usr/bin/postgres"}},
	})
	if err != nil {
		return err
	}
	image, err = mutate.AppendLayers(image, layer)
	if err != nil {
		return err
	}
	tag, err := name.NewTag("postgres:18")
	if err != nil {
		return err
	}
	return tarball.WriteToFile(archive, tag, image)
}

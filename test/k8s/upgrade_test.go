// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build k8s && upgrade

package k8s_test

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/test/await"
)

// nextVersion is the version of overlay-next. Its program differs from the manifests' in the version alone.
const nextVersion = "v9.9.9"

func init() { alsoPrepare = prepareNext }

// prepareNext makes the plugin's images of the next version.
func prepareNext(dir, built string) error {
	next := filepath.Join(dir, "next")
	build := exec.Command(
		"go",
		"build",
		"-trimpath",
		"-ldflags=-X main.version="+nextVersion,
		"-o",
		next+"/",
		"../../cmd/oxide-csi",
	)
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if _, err := output(build); err != nil {
		return err
	}
	rendered, err := command(filepath.Join(built, "kubectl"), "kustomize", "overlay-next")
	if err != nil {
		return err
	}
	for _, match := range regexp.MustCompile(`image: (\S+:`+nextVersion+`)`).FindAllStringSubmatch(rendered, -1) {
		args, err := ingredients(next, built, match[1])
		if err != nil {
			return err
		}
		tar := filepath.Join(dir, "images", path.Base(match[1])+".tar")
		args = append([]string{"-o=" + tar, "-tag=" + match[1]}, args...)
		if _, err := command(filepath.Join(dir, "image"), args...); err != nil {
			return err
		}
	}
	return nil
}

// TestUpgrade upgrades the plugin and goes back, with the manifests and then with the chart, while a pod writes. No
// write is lost. A volume that is made meanwhile reaches its pod, and one that was made before moves to another node.
func TestUpgrade(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: namespaces, mounts, loop devices")
	}
	c := newCluster(t)
	c.install(t, "overlay")
	apply := func(overlay string) func(*testing.T) {
		return func(t *testing.T) { c.kubectl(t, "apply", "-k", overlay) }
	}
	t.Run("manifests", func(t *testing.T) {
		c.replaced(t, map[string]func(*testing.T){"upgrade": apply("overlay-next"), "rollback": apply("overlay")})
	})
	c.kubectl(t, "-n", namespace, "delete", "deployment/oxide-csi-controller", "daemonset/oxide-csi-node")
	const chart = "../../deploy/helm/oxide-csi"
	c.helm(t, "install", "oxide-csi", chart, "--take-ownership", "--values=upgrade.yaml")
	c.rolledOut(t)
	t.Run("chart", func(t *testing.T) {
		c.replaced(t, map[string]func(*testing.T){
			"upgrade": func(t *testing.T) {
				c.helm(t, "upgrade", "oxide-csi", chart, "--reset-then-reuse-values", "--set=image.tag="+nextVersion)
			},
			"rollback": func(t *testing.T) { c.helm(t, "rollback", "oxide-csi", "1") },
		})
	})
}

// replaced replaces the plugin in both directions under a pod that writes.
func (c *cluster) replaced(t *testing.T, ways map[string]func(*testing.T)) {
	by := path.Base(t.Name())
	present, err := os.ReadFile("../../VERSION")
	must(t, err)
	versions := map[string]string{"upgrade": nextVersion, "rollback": "v" + strings.TrimSpace(string(present))}
	c.apply(t, claim{name: "writes"}.String()+pod{name: "writes", claim: "writes", on: c.a}.String())
	c.running(t, "writes")
	// Each line is on the disk before the next one is written: its number, and when, in hundredths of a second.
	c.sh(t, "writes", `(i=0; while :; do
	i=$((i+1)); read -r up _ </proc/uptime
	echo "$i $up" | /busybox dd of=/data/log oflag=append conv=notrunc,fsync 2>/dev/null || echo "$i" >>/tmp/failed
done) >/dev/null 2>&1 &`)
	for _, way := range []string{"upgrade", "rollback"} {
		from := c.lastLine(t, "writes")
		began := time.Now()
		ways[way](t)
		c.apply(t, claim{name: way}.String()+pod{name: way, claim: way, on: c.b}.String())
		c.running(t, way)
		c.measured(t, by+"/"+way+"/new volume to running pod", time.Since(began))
		c.rolledOut(t)
		c.measured(t, by+"/"+way+"/all nodes", time.Since(began))
		c.runsVersion(t, versions[way])
		c.measured(t, by+"/"+way+"/longest pause of a writing pod", c.longestPause(t, "writes", from))
		c.gone(t, "pod/"+way, "pvc/"+way)
	}
	last := c.lastLine(t, "writes")
	c.gone(t, "pod", "writes")
	c.apply(t, pod{name: "reads", claim: "writes", on: c.b}.String())
	c.running(t, "reads")
	c.complete(t, "reads", last)
	c.gone(t, "pod/reads", "pvc/writes")
}

// runsVersion checks the image of each container of the plugin that runs.
func (c *cluster) runsVersion(t *testing.T, version string) {
	t.Helper()
	images := c.get(t, `.items[*].spec.containers[?(@.name=="oxide-plugin")].image`, "-n", namespace, "pods")
	for image := range strings.FieldsSeq(images) {
		if !strings.HasSuffix(image, ":"+version) {
			t.Errorf("%s runs, want version %s", image, version)
		}
	}
}

// lastLine returns the number of the last line that a pod has written.
func (c *cluster) lastLine(t *testing.T, pod string) int {
	t.Helper()
	last := 0
	await.Within(t, waitLimit, pod+" has written", func() bool {
		number, _, _ := strings.Cut(c.sh(t, pod, "/busybox tail -n 1 /data/log 2>/dev/null || true"), " ")
		last, _ = strconv.Atoi(number)
		return last > 0
	})
	return last
}

// longestPause returns the longest time between two lines since a line.
func (c *cluster) longestPause(t *testing.T, pod string, from int) (longest time.Duration) {
	t.Helper()
	var before time.Duration
	for line := range strings.Lines(c.sh(t, pod, fmt.Sprintf("/busybox tail -n +%d /data/log", from))) {
		_, text, _ := strings.Cut(strings.TrimSpace(line), " ")
		at, err := time.ParseDuration(text + "s")
		must(t, err)
		if before > 0 {
			longest = max(longest, at-before)
		}
		before = at
	}
	if before == 0 {
		t.Fatal("the pod has written nothing")
	}
	return longest
}

// complete checks that a pod finds each line up to this number once, in order.
func (c *cluster) complete(t *testing.T, pod string, last int) {
	t.Helper()
	script := `/busybox awk '$1 != NR {print "line " NR " is " $0; exit} END {print NR}' /data/log`
	found := c.sh(t, pod, script)
	if count, err := strconv.Atoi(found); err != nil || count < last {
		t.Errorf("the log has %s, want at least %d lines in order", found, last)
	}
}

// measured logs a time. make bench-upgrade names a file, to which it is appended.
func (c *cluster) measured(t *testing.T, what string, took time.Duration) {
	t.Helper()
	t.Logf("measured: %s: %s", what, took.Round(10*time.Millisecond))
	name := os.Getenv("OXIDE_CSI_MEASURED")
	if name == "" {
		return
	}
	file, err := os.OpenFile(name, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	must(t, err)
	must(t, json.NewEncoder(file).Encode(map[string]any{"Name": what, "Seconds": took.Seconds()}))
	must(t, file.Close())
}

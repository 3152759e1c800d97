// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build nomad

package nomad_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/hashicorp/nomad/api"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

const (
	// Images of the node, of the controller, and of jobs that use volumes. The last one has a shell.
	pluginImage     = "oxidecomputer/oxide-csi-plugin:test"
	controllerImage = "oxidecomputer/oxide-csi-controller:test"
	consumerImage   = "consumer:test"

	// Folders of a client: Docker's own folder, and the folder of the plugin's state, which is at the same path in the
	// container. The latter contains the guest, because a container's /dev and /sys are this machine's.
	dockerFolder = "docker"
	dockerSocket = "docker.sock"
	dockerState  = "docker-state"
)

// runtime returns the program that starts containers: runc. For a privileged container Docker requests all
// capabilities that the kernel knows. runc fails if this machine lacks one of them, so then a wrapper removes it from
// the request.
func (c *cluster) runtime() string {
	path := filepath.Join(c.dir, "runc")
	must(c.t, os.WriteFile(path, []byte(`#!/bin/sh
bounds=0x$(sed -n 's/^CapBnd:\t//p' /proc/self/status)
bundle=$(printf %s "$*" | sed -n 's/.* create .*--bundle \([^ ]*\).*/\1/p')
if [ -n "$bundle" ] && [ $((bounds >> 24 & 1)) = 0 ]; then
    sed -i 's/"CAP_SYS_RESOURCE",//g' "$bundle/config.json"
fi
exec runc "$@"
`), 0o755))
	return path
}

// containers runs controller and node plugin in Docker, as in their job files, except for the place of the node's
// guest.
func (c *cluster) containers(t *testing.T) {
	c.images(t)
	c.allowController(t, "oxide-csi-controller") // the policy is the monolith's, if that ran before
	state := filepath.Join(c.host(), dockerState)
	root := c.installer(append(c.values(), "NOMAD_VAR_driver=docker", "NOMAD_VAR_state_dir="+state)...)
	root.run(t, "job", "run", "controller.nomad.hcl")
	root.run(t, "job", "run", c.withGuest(t, filepath.Join(state, "guest")))
	c.healthy(1, 2)
	operator := c.operator(t)
	operator.run(t, "volume", "create", "volumes/create.volume.hcl")
	first := c.example(t, operator, "data", "node-a")
	c.lines(t, operator, first, first)
	// The command of docs/how-to/troubleshooting-nomad.md, with the program's path in the container.
	list := root.run(t, "alloc", "exec", "-job", "oxide-csi-controller", "/oxide-csi", "volume", "list")
	if !strings.Contains(list, "node-a") {
		t.Errorf("volume list: %s", list)
	}
	m := c.clients["node-a"]
	limit := strings.TrimSpace(m.docker(t, "inspect", "--format={{.HostConfig.Memory}}", m.container(t, "oxide-csi-node")))
	if limit != strconv.Itoa(1<<40) {
		t.Errorf("the node's container may use %s bytes of memory, want 1 TiB, which is no limit", limit)
	}
	c.part("container killed", func(t *testing.T) {
		c.startedAgain(m, "node", func() { m.docker(t, "kill", m.container(t, "oxide-csi-node")) })
		c.healthy(1, 2)
		c.running(first)
	})
	c.stop(t, operator, "data")
	second := c.example(t, operator, "data", "node-b")
	c.lines(t, operator, second, first, second)
	c.stop(t, operator, "data")
	operator.run(t, "volume", "delete", "data")
	c.part("raw", func(t *testing.T) { c.raw(t, operator) })
	c.part("buckets", func(t *testing.T) { c.buckets(t, operator) })
	c.nothingLeft(t)
}

// raw uses a raw block volume from one container after the other.
func (c *cluster) raw(t *testing.T, operator cli) {
	operator.run(t, "volume", "create", testdata(t, "raw.volume.hcl"))
	before := strings.Repeat("0", 36) // as long as an allocation ID
	for _, name := range nodes {
		operator.variables = []string{"NOMAD_VAR_client=" + name}
		operator.run(t, "job", "run", "-detach", testdata(t, "raw.nomad.hcl"))
		alloc := c.placed(name)
		c.logged(t, operator, alloc, "found "+before+"\n")
		c.stop(t, operator, "raw")
		before = alloc
	}
	operator.run(t, "volume", "delete", "raw")
}

func testdata(t *testing.T, file string) string {
	t.Helper()
	path, err := filepath.Abs(filepath.Join("testdata", file))
	must(t, err)
	return path
}

// images makes both images of the plugin as make does, and an image for jobs that use volumes. It loads them on the
// clients.
func (c *cluster) images(t *testing.T) {
	t.Helper()
	plugin, controller := c.imagesOfThePlugin(t)
	consumer := filepath.Join(c.dir, "consumer")
	must(t, os.MkdirAll(filepath.Join(consumer, "bin"), 0o755))
	busybox, err := exec.LookPath("busybox")
	must(t, err)
	c.copy(busybox, filepath.Join(consumer, "bin", "busybox"))
	c.output(t, "tar", "--create", "--file="+consumer+".tar", "--directory="+consumer, "bin")
	for _, name := range nodes {
		m := c.clients[name]
		for image, archive := range map[string]string{pluginImage: plugin, controllerImage: controller} {
			loaded := m.docker(t, "load", "--input="+archive)
			_, tag, _ := strings.Cut(strings.TrimSpace(loaded), "Loaded image: ")
			m.docker(t, "tag", tag, image)
		}
		m.docker(t, "import", consumer+".tar", consumerImage)
	}
}

// imagesOfThePlugin returns the archives of the images: those of a release, or new ones.
func (c *cluster) imagesOfThePlugin(t *testing.T) (plugin, controller string) {
	t.Helper()
	if released := simtest.ReleaseFiles(); released != "" {
		return filepath.Join(released, "images/oxide-csi-plugin.docker.tar"),
			filepath.Join(released, "images/oxide-csi-controller.docker.tar")
	}
	tools := strings.Fields(c.output(t, "make", "--no-print-directory", "-s", "-C", "../..", "print-image-tools"))
	plugin, controller = filepath.Join(c.dir, "plugin.tar"), filepath.Join(c.dir, "controller.tar")
	image := []string{"run", "../../deploy/image", "-program=" + programs.Plugin, "-user=65532:65532"}
	c.output(t, "go", slices.Concat(image, []string{"-o=" + plugin, "-tag=" + pluginImage}, tools)...)
	c.output(t, "go", slices.Concat(image, []string{"-o=" + controller, "-tag=" + controllerImage, "-certificates"})...)
	return plugin, controller
}

// withGuest returns the node plugin's job file, changed to find its devices in a guest of the simulated rack.
func (c *cluster) withGuest(t *testing.T, guest string) string {
	t.Helper()
	const line = `OXIDE_CSI_MODE          = "node"`
	return c.filled(t, "node.nomad.hcl", line, line+`
        OXIDE_CSI_DEV_ROOT = "`+guest+`/dev"
        OXIDE_CSI_SYS_ROOT = "`+guest+`/sys"`)
}

func (c *cluster) output(t *testing.T, name string, args ...string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), name, args...)
	output, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v: %s", cmd, err, output)
	}
	return string(output)
}

// docker runs a docker command on a client.
func (m *machine) docker(t *testing.T, args ...string) string {
	t.Helper()
	host := "--host=unix://" + filepath.Join(m.cluster.dir, m.name, dockerFolder, dockerSocket)
	return m.cluster.output(t, m.cluster.docker, append([]string{host}, args...)...)
}

// container returns the ID of a job's container on a client.
func (m *machine) container(t *testing.T, job string) string {
	t.Helper()
	allocs, err := m.cluster.pluginAllocs(job)
	must(t, err)
	for _, alloc := range allocs {
		if alloc.NodeName == m.name && alloc.ClientStatus == api.AllocClientStatusRunning {
			return strings.TrimSpace(m.docker(t, "ps", "--quiet", "--no-trunc", "--filter=name="+alloc.ID))
		}
	}
	t.Fatalf("%s has no allocation of %s", m.name, job)
	return ""
}

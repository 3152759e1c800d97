// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sync/errgroup"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// limited returns a program that starts the plugin with this hard limit of open files.
func limited(t *testing.T, files int) string {
	t.Helper()
	program := filepath.Join(t.TempDir(), "plugin")
	script := fmt.Sprintf(
		"#!/bin/sh\nexec prlimit --nofile=%d:%d %s \"$@\"\n",
		files,
		files,
		simtest.Quote(programs.Plugin),
	)
	must(t, os.WriteFile(program, []byte(script), 0o755))
	return program
}

func TestTooFewOpenFiles(t *testing.T) {
	t.Parallel()
	sim := startSim(t)
	_, err := simtest.StartPlugin(limited(t, 255), simtest.PluginOptions{
		Mode: "node", Dir: shortDir(t), Sim: sim, Instance: sim.Instances[0], Env: baseEnv(),
	})
	if err == nil || !strings.Contains(err.Error(), "the limit of open files is 255, and the plugin needs 256") {
		t.Errorf("with 255 open files: %v", err)
	}
}

// With few open files volumes are mounted, several at the same time.
func TestLimitOfOpenFiles(t *testing.T) {
	t.Parallel()
	h := newHostWithGuest(t, false)
	opts := simtest.PluginOptions{
		Mode: "node", Dir: h.folder(t, "limited"), Sim: h.sim, Instance: h.sim.Instances[0], Env: baseEnv(),
	}
	for _, files := range []int{256, 1000} {
		plugin, err := simtest.StartPlugin(limited(t, files), opts)
		must(t, err)
		h.environ = append(h.environ, "OXIDE_CSI_NODE_ENDPOINT="+plugin.Socket)
		var all errgroup.Group
		for n := range 4 {
			name := fmt.Sprintf("files-%d-%d", files, n)
			target := filepath.Join(h.dir, name)
			all.Go(func() error {
				for _, args := range [][]string{
					{"create", name, "--size=1GiB"},
					{"mount", name, target, "--attach"},
					{"unmount", name, target},
					{"detach", name},
				} {
					if got := h.run(t, append([]string{"volume"}, args...)...); got.code != 0 {
						return fmt.Errorf("%v: %+v", args, got)
					}
				}
				return nil
			})
		}
		if err := all.Wait(); err != nil {
			t.Errorf("with %d open files: %v", files, err)
		}
		must(t, plugin.Stop())
	}
}

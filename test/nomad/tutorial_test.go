// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build nomad

package nomad_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/test/await"
	"github.com/oxidecomputer/oxide-csi-plugin/test/pages"
)

// TestTutorial runs the commands of docs/tutorials/nomad.md as they stand, on a rack without hot-plug whose instances
// boot Nomad's clients. The environment adds only where the program is, because the test does not install it.
func TestTutorial(t *testing.T) {
	blocks := pages.Of(t, "../../docs/tutorials/nomad.md")
	if len(blocks) != 5 {
		t.Fatalf("the page has %d blocks", len(blocks))
	}
	c := newBootingCluster(t)
	c.asReader(t, "../..", c.sim.Token+"\n", pages.Fill(t, blocks[0], "https://silo.sys.example.com", c.sim.Host,
		"project=databases", "project="+c.sim.Project, "/opt/nomad/data", filepath.Join(c.host(), "data")))
	c.healthy(2, 2)
	c.asReader(t, deploy, "", pages.Fill(t, blocks[1], "client=db-1", "client=node-a"))
	await.Within(
		t,
		waitLimit,
		"a controller's log is shown",
		func() bool { // not while the client of that controller is down
			_, err := c.tryAsReader(t, deploy, "", blocks[2])
			return err == nil
		},
	)
	c.runs("group", "node-a", 2)
	await.Within(t, waitLimit, "an allocation has written a line", func() bool {
		shown, err := c.tryAsReader(t, deploy, "", blocks[3])
		return err == nil && strings.HasPrefix(shown, "written by ")
	})
	if shown, err := c.tryAsReader(t, deploy, "", blocks[4]); err == nil || !strings.Contains(shown, "is attached") {
		t.Errorf("the delete of a volume on a running client: %v: %s", err, shown)
	}
}

// asReader runs a block of a page in a folder of the repository as its reader would.
func (c *cluster) asReader(t *testing.T, dir, stdin, block string) {
	t.Helper()
	if shown, err := c.tryAsReader(t, dir, stdin, block); err != nil {
		t.Fatalf("%v\n%s%s", err, block, shown)
	}
}

func (c *cluster) tryAsReader(t *testing.T, dir, stdin, block string) (shown string, err error) {
	cmd := exec.CommandContext(t.Context(), "bash", "-eu", "-o", "pipefail", "-c", block)
	cmd.Dir, cmd.Stdin = dir, strings.NewReader(stdin)
	cmd.Env = []string{
		"PATH=" + filepath.Dir(c.nomad) + ":" + os.Getenv("PATH"), "HOME=" + c.dir,
		"NOMAD_ADDR=" + c.address, "NOMAD_TOKEN=" + c.management, "NOMAD_CLI_NO_COLOR=1",
		"NOMAD_VAR_command=" + programs.Plugin, "NOMAD_VAR_state_dir=" + filepath.Join(c.host(), "state"),
	}
	output, err := cmd.CombinedOutput()
	return string(output), err
}

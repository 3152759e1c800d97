// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main_test

import (
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
	"github.com/oxidecomputer/oxide-csi-plugin/test/await"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// guestInit is the init process of a guest. It starts the node plugin, and powers the guest off at SIGUSR2.
const guestInit = `trap "exit 42" USR2
"$@" &
wait`

// guestNode is the Node of a guest with the node plugin.
type guestNode struct {
	t     *testing.T
	api   *simtest.Node
	dir   string // the plugin's files
	flags []string
	// kubeconfig is a file for the API server, for a controller too.
	kubeconfig string
}

// newGuestNode returns the node of an instance by its configuration. Its firmware may name another one.
func newGuestNode(t *testing.T, instance, firmware string) *guestNode {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: the guest has its own processes")
	}
	dir := shortDir(t)
	g := &guestNode{
		t: t, api: &simtest.Node{Name: "worker", ProviderID: "oxide://" + instance}, dir: dir,
		kubeconfig: filepath.Join(dir, "kubeconfig"),
	}
	s := httptest.NewServer(simtest.Nodes{g.api})
	t.Cleanup(s.Close)
	must(t, os.WriteFile(g.kubeconfig, []byte(g.api.Kubeconfig(s.URL)), 0o600))
	var err error
	g.flags, err = simtest.PluginOptions{
		Mode: "node", Dir: g.dir, Instance: simtest.Instance{ID: instance}, Args: []string{
			"--sys-root=" + instanceSys(t, firmware),
			"--node-name=worker",
			"--kubeconfig=" + g.kubeconfig,
			"--attach-mode=restart",
			"--restart-poweroff=signal:SIGUSR2",
		},
	}.Flags()
	must(t, err)
	return g
}

// boot starts the guest.
func (g *guestNode) boot(id string) (*exec.Cmd, *simtest.Output) {
	return g.start(id, "sh", "-ec", guestInit, "sh")
}

// start starts the guest with an init process. Without one the plugin is its process 1. The guest has its own PID
// namespace. Otherwise this machine would be powered off.
func (g *guestNode) start(id string, init ...string) (*exec.Cmd, *simtest.Output) {
	file := filepath.Join(g.dir, id)
	must(g.t, os.WriteFile(file, []byte(id+"\n"), 0o600))
	cmd := exec.Command("unshare", slices.Concat(
		[]string{"--pid", "--fork", "--kill-child"}, init, []string{programs.Plugin}, g.flags,
		[]string{"--boot-id-file=" + file})...)
	cmd.Env = baseEnv()
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	output := &simtest.Output{}
	cmd.Stderr = output
	must(g.t, cmd.Start())
	g.t.Cleanup(func() {
		_ = cmd.Process.Kill() // which ends the guest too
		_ = cmd.Wait()
		if g.t.Failed() || strings.Contains(output.String(), "DATA RACE") {
			g.t.Errorf("the log of the plugin in boot %s: %s", id, output)
		}
	})
	return cmd, output
}

// On a restart request the node plugin accepts the request and powers its guest off. After the next boot it replies
// that the node is back. The guest has other processes beside the plugin.
func TestPlannedRestart(t *testing.T) {
	t.Parallel()
	g := newGuestNode(t, instanceID, instanceID)
	restart := orchestrator.NewRestartID(time.Now())
	g.api.RequestRestart(restart)
	first, output := g.boot("first")
	_ = first.Wait() // the exit code is checked next
	if code := first.ProcessState.ExitCode(); code != 42 {
		t.Fatalf("the guest has ended with code %d: %s", code, output)
	}
	accepted := orchestrator.RestartReply{State: orchestrator.RestartAccepted, Boot: "first"}
	if got := g.api.RestartReply(restart); got != accepted {
		t.Errorf("the reply is %+v, want %+v", got, accepted)
	}
	g.boot("second")
	want := orchestrator.RestartReply{State: orchestrator.RestartBack, Boot: "second"}
	await.Eventually(
		t,
		"the plugin replies that the node is back",
		func() bool { return g.api.RestartReply(restart) == want },
	)
}

// A node whose configured instance ID is another instance's refuses a restart. Its guest would go down instead of the
// other one, and nothing would start it again: the controller starts the instance that it has stopped.
func TestPlannedRestartOfAnotherInstance(t *testing.T) {
	t.Parallel()
	const firmware = "11111111-2222-4333-8444-555555555555"
	g := newGuestNode(t, instanceID, firmware)
	restart := orchestrator.NewRestartID(time.Now())
	g.api.RequestRestart(restart)
	g.boot("only")
	var reply orchestrator.RestartReply
	await.Eventually(t, "the plugin replies", func() bool {
		reply = g.api.RestartReply(restart)
		return reply.State != orchestrator.RestartUnanswered
	})
	want := "this guest is instance " + firmware + " by its firmware, and instance " + instanceID + " by its configuration"
	if reply.State != orchestrator.RestartRefused || !strings.Contains(reply.Reason, want) {
		t.Errorf("the reply is %+v, want a refusal that says %q", reply, want)
	}
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main_test

import (
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// guest is the init process of a guest. It starts the node plugin, and powers the guest off at SIGUSR2.
const guest = `mount --bind "$BOOT" /proc/sys/kernel/random/boot_id
trap "exit 42" USR2
"$@" &
wait`

// On a restart request the node plugin accepts the request and powers its guest off. After the next boot it replies
// that the node is back. The guest has other processes beside the plugin.
func TestPlannedRestart(t *testing.T) {
	// This test is not parallel, because mounts of other tests would stay mounted in the guest's mount namespace.
	if os.Geteuid() != 0 {
		t.Skip("needs root: the guest has its own processes and its own boot ID")
	}
	api := &simtest.Node{Name: "worker"}
	restart := metadata.NewRestartID(time.Now())
	api.RequestRestart(restart)
	s := httptest.NewServer(api)
	t.Cleanup(s.Close)
	dir := shortDir(t)
	must(t, os.Mkdir(filepath.Join(dir, "block"), 0o755))
	kubeconfig := filepath.Join(dir, "kubeconfig")
	must(t, os.WriteFile(kubeconfig, []byte(api.Kubeconfig(s.URL)), 0o600))
	flags, err := simtest.PluginOptions{Mode: "node", Dir: dir, Instance: simtest.Instance{ID: instanceID}, Args: []string{
		"--sys-root=" + dir,
		"--node-name=worker",
		"--kubeconfig=" + kubeconfig,
		"--attach-mode=restart",
		"--restart-poweroff=signal:SIGUSR2",
	}}.Flags()
	must(t, err)
	boot := func(id string) (*exec.Cmd, *simtest.Output) {
		file := filepath.Join(dir, id)
		must(t, os.WriteFile(file, []byte(id+"\n"), 0o600))
		// The guest has its own PID namespace. Otherwise this machine would be powered off.
		cmd := exec.Command(
			"unshare",
			append(
				[]string{"--pid", "--mount", "--fork", "--kill-child", "sh", "-ec", guest, "sh", programs.Plugin},
				flags...)...)
		cmd.Env = append(baseEnv(), "BOOT="+file)
		cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		output := &simtest.Output{}
		cmd.Stderr = output
		must(t, cmd.Start())
		return cmd, output
	}
	first, output := boot("first")
	_ = first.Wait() // the exit code is checked next
	if code := first.ProcessState.ExitCode(); code != 42 {
		t.Fatalf("the guest has ended with code %d: %s", code, output)
	}
	if got, want := api.RestartReply(
		restart,
	), (metadata.RestartReply{State: metadata.RestartAccepted, Boot: "first"}); got != want {
		t.Errorf("the reply is %+v, want %+v", got, want)
	}
	second, output := boot("second")
	t.Cleanup(func() {
		_ = second.Process.Kill() // which ends the guest too
		_ = second.Wait()
		if t.Failed() || strings.Contains(output.String(), "DATA RACE") {
			t.Errorf("the log of the plugin: %s", output)
		}
	})
	want := metadata.RestartReply{State: metadata.RestartBack, Boot: "second"}
	eventually(t, "the plugin replies that the node is back", func() bool { return api.RestartReply(restart) == want })
}

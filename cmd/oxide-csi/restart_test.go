// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// asking plays the API server for one Node, of which a restart is asked for.
type asking struct {
	mu          sync.Mutex
	annotations map[string]string
}

func (a *asking) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	a.mu.Lock()
	defer a.mu.Unlock()
	node := map[string]any{"kind": "Node", "metadata": map[string]any{"name": "worker", "annotations": a.annotations}}
	switch r.URL.Path {
	case "/api/v1/nodes":
		if answer := list(w, r, node); answer != nil {
			_ = json.NewEncoder(w).Encode(answer) // a client that has gone
		}
		return
	case "/api/v1/nodes/worker":
	default:
		w.WriteHeader(http.StatusTeapot)
		return
	}
	if r.Method == http.MethodPatch {
		var patch struct {
			Metadata struct{ Annotations map[string]string }
		}
		if err := json.NewDecoder(r.Body).Decode(&patch); err != nil {
			w.WriteHeader(http.StatusBadRequest)
			return
		}
		for key, value := range patch.Metadata.Annotations {
			a.annotations[key] = value
		}
	}
	_ = json.NewEncoder(w).Encode(node) // a client that has gone
}

func (a *asking) answer() metadata.RestartReply {
	a.mu.Lock()
	defer a.mu.Unlock()
	return metadata.ParseRestartReply(a.annotations["csi.oxide.computer/restart-reply"], "7-1")
}

// guest is a boot of a guest whose init powers it off at SIGUSR2, with the node plugin as its service.
const guest = `mount --bind "$BOOT" /proc/sys/kernel/random/boot_id
trap "exit 42" USR2
"$@" &
wait`

// The node plugin powers its own guest off, in which it is not alone, and says so before; after the next boot it says
// that it is back.
func TestPlannedRestart(t *testing.T) {
	// Not beside others: what they have mounted would stay mounted in the guest.
	if os.Geteuid() != 0 {
		t.Skip("needs root: a guest with processes and a boot ID of its own")
	}
	api := &asking{annotations: map[string]string{"csi.oxide.computer/restart": "7-1"}}
	s := httptest.NewServer(api)
	t.Cleanup(s.Close)
	dir := shortDir(t)
	must(t, os.Mkdir(filepath.Join(dir, "block"), 0o755))
	kubeconfig := filepath.Join(dir, "kubeconfig")
	must(
		t,
		os.WriteFile(
			kubeconfig,
			fmt.Appendf(nil, `{apiVersion: v1, kind: Config, current-context: c, clusters: [{name: c, cluster: {server: %q}}],
users: [{name: u, user: {token: t}}], contexts: [{name: c, context: {cluster: c, user: u}}]}`, s.URL),
			0o600,
		),
	)
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
		// Its own process IDs, or this machine would be what is powered off.
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
	_ = first.Wait() // the code says it
	if code := first.ProcessState.ExitCode(); code != 42 {
		t.Fatalf("the guest has ended with code %d: %s", code, output)
	}
	if got, want := api.answer(), (metadata.RestartReply{State: metadata.RestartAccepted, Boot: "first"}); got != want {
		t.Errorf("said %+v, want %+v", got, want)
	}
	second, output := boot("second")
	t.Cleanup(func() {
		_ = second.Process.Kill() // and with it the guest
		_ = second.Wait()
		if t.Failed() || strings.Contains(output.String(), "DATA RACE") {
			t.Errorf("the plugin says: %s", output)
		}
	})
	want := metadata.RestartReply{State: metadata.RestartBack, Boot: "second"}
	eventually(t, "it says that it is back", func() bool { return api.answer() == want })
}

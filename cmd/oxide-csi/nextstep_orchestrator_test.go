// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main_test

import (
	"encoding/json"
	"maps"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/core/fault"
	"github.com/oxidecomputer/oxide-csi-plugin/test/await"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// troublesOfOrchestrators are faults that a command meets at a controller beside Nomad or Kubernetes.
func troublesOfOrchestrators() []trouble {
	released := func(_ *testing.T, h *host) { h.release() }
	return []trouble{
		{
			row:   fault.ClaimsUnknown,
			waits: true,
			says:  []string{"remove the reason (the controller's log has it)"},
			meets: func(t *testing.T, h *host) []string {
				answer := h.besideNomad(t, "--detach-grace=1s")
				answer(nomadAnswers{"/v1/acl/policies": []object{}})
				h.release = func() {
					h.controllerLogs(t, "apply deploy/nomad/policies/controller.policy.hcl")
					answer(unclaimed)
				}
				return unpublished(t, h)
			},
			step: released,
		},
		{row: fault.ClaimedThere, waits: true, says: []string{"end that, if it may (the controller's log names it)"},
			meets: func(t *testing.T, h *host) []string {
				answer := h.besideNomad(t, "--detach-grace=20s")
				answer(unclaimed)
				command := unpublished(t, h)
				id := h.ok(t, "volume", "create", "data", "--size=1GiB") // again, for its ID
				h.ok(t, "volume", "attach", "data", "--node=node-a")     // for another allocation
				answer(claimedAt(id, h.sim.Instance("node-a").ID))
				h.unpublish(t, id) // repeats the request for the first one
				h.release = func() {
					h.controllerLogs(t, "allocation 5a7d9b11 (web), volume data in namespace shop")
					h.unpublish(t, id) // Nomad releases the claim afterwards
					answer(unclaimed)
				}
				return command
			},
			step: released},
		{row: fault.RestartRefused, cold: true, waits: true,
			says: []string{"its node plugin refuses", "(hostPID: true)", "when the node's reason is gone", "--wait"},
			meets: func(t *testing.T, h *host) []string {
				node := h.sim.Instance("node-a").ID
				g := newGuestNode(t, node, node)
				h.restartController(t, simtest.PluginOptions{Args: []string{
					"--metadata=none", "--kubeconfig=" + g.kubeconfig, "--attach-mode=restart", "--restart-window=1s",
					"--restart-cool-down=0s",
				}})
				first, _ := g.start("first") // the plugin is process 1
				h.release = func() {
					must(t, first.Process.Kill())
					_ = first.Wait() // it was killed
					second, log := g.boot("second")
					off := make(chan error, 1)
					go func() { off <- second.Wait() }()
					await.Eventually(t, "the guest powers itself off", func() bool { return len(off) > 0 })
					if err := <-off; second.ProcessState.ExitCode() != 42 {
						t.Errorf("the guest has ended: %v: %s", err, log)
					}
					must(t, h.sim.SetRunState(t.Context(), node, "stopped"))
					g.boot("third")
				}
				h.ok(t, "volume", "create", "data", "--size=1GiB")
				command := []string{"volume", "attach", "data", "--node=node-a"}
				await.Eventually(t, "the node refuses", func() bool {
					return strings.Contains(h.run(t, command...).stderr, "[RestartRefused]")
				})
				return command
			},
			step: released},
	}
}

// nomadAnswers are what a Nomad agent answers, by path.
type nomadAnswers map[string]any

func (a nomadAnswers) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	answer, has := a[r.URL.Path]
	if !has {
		w.WriteHeader(http.StatusNotFound)
		return
	}
	w.Header().Set("X-Nomad-Index", "1")
	_ = json.NewEncoder(w).Encode(answer) // an error means that the client has gone
}

// unclaimed is a Nomad without claims, whose controller has the rights of controller.policy.hcl.
var unclaimed = nomadAnswers{
	"/v1/acl/policies": []object{{"Name": "oxide-csi-controller"}},
	"/v1/acl/policy/oxide-csi-controller": object{"RulesJSON": object{"Namespaces": []object{{
		"Name": "*", "Capabilities": []string{"csi-list-volume", "csi-read-volume", "read-job"},
	}}}},
	"/v1/volumes":     []object{},
	"/v1/allocations": []object{},
}

// claimedAt is a Nomad in which an allocation on a node has claimed a volume.
func claimedAt(volumeID, nodeID string) nomadAnswers {
	all := maps.Clone(unclaimed)
	maps.Copy(all, nomadAnswers{
		"/v1/volumes": []object{{
			"ID": "data", "Namespace": "shop", "ExternalID": volumeID, "Provider": "csi.oxide.computer", "CurrentWriters": 1,
		}},
		"/v1/volume/csi/data": object{"ID": "data", "PluginID": "oxide", "Allocations": []object{
			{"ID": "5a7d9b11-0000-4000-8000-000000000001", "Name": "web", "NodeID": "c1", "ClientStatus": "running"},
		}},
		"/v1/plugin/csi/oxide": object{"ID": "oxide", "Nodes": object{"c1": object{"NodeInfo": object{"ID": nodeID}}}},
	})
	return all
}

// besideNomad starts the controller again, beside a Nomad agent. answer says what the agent answers from then on.
func (h *host) besideNomad(t *testing.T, args ...string) (answer func(nomadAnswers)) {
	t.Helper()
	var now atomic.Pointer[nomadAnswers]
	now.Store(&nomadAnswers{})
	agent := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		now.Load().ServeHTTP(w, r)
	}))
	t.Cleanup(agent.Close)
	h.restartController(t, simtest.PluginOptions{Args: args, Env: []string{"NOMAD_ADDR=" + agent.URL}})
	return func(a nomadAnswers) { now.Store(&a) }
}

// controllerLogs expects a text in the controller's log.
func (h *host) controllerLogs(t *testing.T, text string) {
	t.Helper()
	if log := h.controller.Stderr().String(); !strings.Contains(log, text) {
		t.Errorf("the controller's log lacks %q: %s", text, log)
	}
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build identity

package identity_test

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/nomad/api"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata/metadatatest"
	client "github.com/oxidecomputer/oxide-csi-plugin/metadata/nomad"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator/nomad"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator/orchestratortest"
	"github.com/oxidecomputer/oxide-csi-plugin/test/await"
)

const policies = "../../deploy/nomad/policies/"

// rules returns the rules of policies that users of the plugin apply.
func rules(t *testing.T, names ...string) (all string) {
	for _, name := range names {
		text, err := os.ReadFile(policies + name + ".policy.hcl")
		must(t, err)
		all += string(text)
	}
	return all
}

// nomadRestarts is an agent whose client runs the node plugin, as instance idA.
type nomadRestarts struct {
	*agent
	// controller and node are their tokens.
	controller, node string
}

func TestNomadRestarts(t *testing.T) {
	r := &nomadRestarts{agent: newAgent(t, true)}
	r.controller, r.node = r.make("controller", rules(t, "restart-controller")), r.make("node", rules(t, "restart-node"))
	r.runPlugin()
	t.Run("conformance", r.conformance)
	t.Run("rights", r.rights)
	t.Run("drain", r.drain)
}

// make creates a token with a policy of these rules.
func (r *nomadRestarts) make(name, rules string) string {
	r.policy(name, rules, nil)
	made, _, err := r.admin.ACLTokens().Create(&api.ACLToken{Name: name, Type: "client", Policies: []string{name}}, nil)
	must(r.t, err)
	return made.SecretID
}

// runPlugin runs the node plugin as Nomad's job files do.
func (r *nomadRestarts) runPlugin() {
	dir := r.t.TempDir()
	must(r.t, os.Mkdir(filepath.Join(dir, "block"), 0o755)) // a guest without disks
	task := api.NewTask("plugin", "raw_exec")
	task.SetConfig("command", plugin).
		SetConfig("args", []string{"--mode=node", "--instance-id=" + idA, "--sys-root=" + dir, "--state-dir=" + dir})
	task.CSIPluginConfig = &api.TaskCSIPluginConfig{
		ID:            "disks",
		Type:          "node",
		MountDir:      "/csi",
		HealthTimeout: time.Minute,
	}
	task.Resources = &api.Resources{CPU: pointer(50), MemoryMB: pointer(256)}
	spec := api.NewSystemJob("oxide-csi-node", "oxide-csi-node", "global", 90).
		AddDatacenter("*").
		AddTaskGroup(api.NewTaskGroup("node", 1).AddTask(task))
	r.run(spec)
	requester := r.requester()
	r.server.eventually("the node plugin is healthy", func() bool {
		_, err := requester.Reply(context.Background(), idA, "none")
		return err == nil
	})
}

// run runs a job until the end of the test.
func (r *nomadRestarts) run(spec *api.Job) {
	_, _, err := r.admin.Jobs().Register(spec, nil)
	must(r.t, err)
	r.t.Cleanup(func() {
		if _, _, err := r.admin.Jobs().Deregister(*spec.ID, false, nil); err != nil {
			r.t.Error(err)
		}
		// The agent is stopped next, and does not stop running tasks.
		r.server.eventually(*spec.ID+" has ended", func() bool {
			allocs, _, err := r.admin.Jobs().Allocations(*spec.ID, true, nil)
			return err == nil &&
				!slices.ContainsFunc(
					allocs,
					func(a *api.AllocationListStub) bool { return a.ClientStatus == api.AllocClientStatusRunning },
				)
		})
	})
}

func (r *nomadRestarts) requester() *nomad.Restarts {
	return nomad.NewRestarts(client.Options{Address: "http://" + r.gate.address, Token: r.controller})
}

func (r *nomadRestarts) listener() *nomad.Listener {
	return nomad.NewListener(client.Options{Address: "http://" + r.gate.address, Token: r.node}, idA)
}

func (r *nomadRestarts) conformance(t *testing.T) {
	orchestratortest.RunRestart(t, func(t *testing.T) orchestratortest.RestartHarness {
		meta := map[string]*string{"unique.oxide.restart": nil, "unique.oxide.restart_reply": nil}
		_, err := r.admin.Nodes().Meta().Apply(&api.NodeMetaApplyRequest{Meta: meta}, nil)
		must(t, err)
		var fault metadatatest.Fault
		return orchestratortest.RestartHarness{
			NewRequester: func() orchestrator.RestartRequester { return r.requester() },
			NewListener:  func() orchestrator.RestartListener { return r.listener() },
			Instance:     idA,
			Break: func(f metadatatest.Fault) {
				fault = f
				switch f {
				case metadatatest.Down:
					r.gate.shut()
				case metadatatest.Slow:
					r.gate.hold()
				case metadatatest.Denied:
					r.allowAll(`node { policy = "deny" }`, `node { policy = "deny" }`, false)
				}
			},
			Repair: func() {
				switch fault {
				case metadatatest.Down:
					r.gate.open()
				case metadatatest.Slow:
					r.gate.release()
				case metadatatest.Denied:
					r.allowAll(rules(t, "restart-controller"), rules(t, "restart-node"), true)
				}
			},
			Secrets: []string{r.controller, r.node, "canary"},
			Cannot: map[metadatatest.Ability]string{
				orchestratortest.CanHaveTwoNodes:  "the agent has one client",
				orchestratortest.CanReportChanges: "its client's metadata has no blocking query",
			},
		}
	})
}

// allowAll changes the rights of both tokens, and waits until the agent applies them.
func (r *nomadRestarts) allowAll(controller, node string, granted bool) {
	r.policy("controller", controller, nil)
	r.policy("node", node, nil)
	for _, token := range []string{r.controller, r.node} {
		client, err := api.NewClient(&api.Config{Address: r.address, SecretID: token})
		must(r.t, err)
		await.Within(r.t, waitLimit, "the agent applies the policies", func() bool {
			_, err := client.Nodes().Meta().Read("", nil)
			return (err == nil) == granted
		})
	}
}

// rights checks what the policies allow, and what they do not allow.
func (r *nomadRestarts) rights(t *testing.T) {
	reader := r.make("reader", nodeRead)
	l := nomad.NewListener(client.Options{Address: r.address, Token: reader}, idA)
	must(t, r.requester().Request(t.Context(), idA, "1"))
	if got, _, err := l.Requested(t.Context()); err != nil || got != "1" {
		t.Errorf("with the right to read: %q, %v", got, err)
	}
	err := l.Reply(t.Context(), "1", orchestrator.RestartReply{State: orchestrator.RestartAccepted})
	if err == nil ||
		!strings.Contains(
			err.Error(),
			"give the token or the job a policy with the rules of deploy/nomad/policies/restart-controller.policy.hcl or restart-node.policy.hcl",
		) {
		t.Errorf("with the right to read: %v", err)
	}
	for _, token := range []string{r.controller, r.node} {
		client, err := api.NewClient(&api.Config{Address: r.address, SecretID: token})
		must(t, err)
		if jobs, _, err := client.Jobs().List(nil); err == nil && len(jobs) > 0 {
			t.Errorf("sees jobs: %v", jobs)
		}
	}
}

// drain checks that allocations leave by Nomad's own rules.
func (r *nomadRestarts) drain(t *testing.T) {
	r.policy("controller", rules(t, "restart-controller", "restart-drain"), nil)
	sleeper := func(job *api.Job, count int) *api.Job {
		task := api.NewTask("t", "raw_exec")
		task.SetConfig("command", "/bin/sleep").SetConfig("args", []string{"600"})
		task.Resources = &api.Resources{CPU: pointer(20), MemoryMB: pointer(16)}
		return job.AddDatacenter("*").AddTaskGroup(api.NewTaskGroup("g", count).AddTask(task))
	}
	r.run(sleeper(api.NewServiceJob("app", "app", "global", 50), 2))
	r.run(sleeper(api.NewBatchJob("batch", "batch", "global", 50), 1))
	running := func(job string) (n int) {
		allocs, _, err := r.admin.Jobs().Allocations(job, true, nil)
		must(t, err)
		for _, a := range allocs {
			if a.ClientStatus == "running" {
				n++
			}
		}
		return n
	}
	await.Within(t, waitLimit, "the jobs run", func() bool { return running("app") == 2 && running("batch") == 1 })
	requester := r.requester()
	left := func() string {
		all, err := requester.Drain(t.Context(), idA, "1")
		must(t, err)
		return strings.Join(all, "\n")
	}
	first := left()
	if strings.Count(first, "of job app) is ending") != 1 ||
		strings.Count(first, "of job app) waits until another allocation of its group has ended") != 1 ||
		!strings.Contains(first, "of job batch) belongs to a batch job: wait for its end, or stop it") ||
		strings.Contains(first, "oxide-csi-node") {
		t.Errorf("allocations left at first: %s", first)
	}
	if got := r.eligibility(); got != "ineligible" {
		t.Errorf("the node is %s", got)
	}
	await.Within(
		t,
		waitLimit,
		"both allocations have ended",
		func() bool { return !strings.Contains(left(), "job app)") && running("app") == 0 },
	)
	_, _, err := r.admin.Jobs().Deregister("batch", false, nil)
	must(t, err)
	await.Within(t, waitLimit, "no allocation is left", func() bool { return left() == "" })
	must(t, requester.Undrain(t.Context(), idA, "2"))
	if got := r.eligibility(); got != "ineligible" {
		t.Errorf("after another restart's undrain the node is %s", got)
	}
	must(t, requester.Undrain(t.Context(), idA, "1"))
	if got := r.eligibility(); got != "eligible" {
		t.Errorf("in the end the node is %s", got)
	}
	await.Within(t, waitLimit, "the work comes back", func() bool { return running("app") == 2 })
}

func (r *nomadRestarts) eligibility() string {
	nodes, _, err := r.admin.Nodes().List(nil)
	must(r.t, err)
	return nodes[0].SchedulingEligibility
}

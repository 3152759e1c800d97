// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build identity

package identity_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/hashicorp/nomad/api"
	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata/metadatatest"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata/nomad"
	"github.com/oxidecomputer/oxide-csi-plugin/test/await"
)

// agent is a Nomad agent that is server and client.
type agent struct {
	t       *testing.T
	server  *process
	gate    *gate
	admin   *api.Client
	address string
	// token has the right node:read. It is empty if ACLs are off.
	token string
}

// nodeRead is the policy in the plugin's documentation.
const nodeRead = `node { policy = "read" }`

func newAgent(t *testing.T, acl bool) *agent {
	path := program(t, "nomad", "nomad")
	if os.Geteuid() != 0 {
		t.Skip("needs root: a Nomad client that runs tasks")
	}
	// Short, because the path of the task API's socket is below this folder.
	dir, err := os.MkdirTemp("", "n")
	must(t, err)
	t.Cleanup(func() {
		unmountBelow(t, dir) // the tasks' secrets folders
		must(t, os.RemoveAll(dir))
	})
	http, rpc, serf := freePort(t), freePort(t), freePort(t)
	config := filepath.Join(dir, "agent.hcl")
	must(t, os.WriteFile(config, []byte(fmt.Sprintf(`
data_dir = %q
bind_addr = "127.0.0.1"
disable_update_check = true
disable_anonymous_signature = true
leave_on_interrupt = false
advertise {
  http = "127.0.0.1"
  rpc = "127.0.0.1"
  serf = "127.0.0.1"
}
ports {
  http = %d
  rpc = %d
  serf = %d
}
server {
  enabled = true
  bootstrap_expect = 1
}
client {
  enabled = true
  network_interface = "lo"
  options = {
    # which would ask link-local addresses
    "fingerprint.denylist" = "env_aws,env_gce,env_azure,env_digitalocean"
  }
  meta {
    "vault" = "canary-meta"
  }
}
plugin "raw_exec" {
  config {
    enabled = true
  }
}
acl {
  enabled = %t
  # so that a change of a policy is seen soon
  policy_ttl = "50ms"
  token_ttl = "50ms"
}
`, filepath.Join(dir, "data"), http, rpc, serf, acl)), 0o600))
	a := &agent{t: t, address: fmt.Sprintf("http://127.0.0.1:%d", http)}
	// A development agent becomes leader at once. Without a leader a client would wait for half a minute.
	a.server = start(t, path, "agent", "-dev", "-config="+config)
	a.connect("")
	a.server.eventually("Nomad has a leader", func() bool {
		leader, err := a.admin.Status().Leader()
		return err == nil && leader != ""
	})
	if acl {
		var bootstrapped *api.ACLToken
		a.server.eventually("ACLs are bootstrapped", func() (done bool) {
			var err error
			bootstrapped, _, err = a.admin.ACLTokens().Bootstrap(nil)
			return err == nil
		})
		a.connect(bootstrapped.SecretID)
		a.policy("csi-node", nodeRead, nil)
		made, _, err := a.admin.ACLTokens().
			Create(&api.ACLToken{Name: "csi-node", Type: "client", Policies: []string{"csi-node"}}, nil)
		must(t, err)
		a.token = made.SecretID
	}
	a.server.eventually("the client is ready", func() bool {
		nodes, _, err := a.admin.Nodes().List(nil)
		return err == nil && len(nodes) == 1 && nodes[0].Status == "ready"
	})
	a.gate = newGate(t, fmt.Sprintf("127.0.0.1:%d", http))
	return a
}

func (a *agent) connect(token string) {
	var err error
	a.admin, err = api.NewClient(&api.Config{Address: a.address, SecretID: token})
	must(a.t, err)
}

// policy writes a policy, for a job's workload identity if job is not nil.
func (a *agent) policy(name, rules string, job *api.JobACL) {
	if _, err := a.admin.ACLPolicies().Upsert(&api.ACLPolicy{Name: name, Rules: rules, JobACL: job}, nil); err != nil {
		a.t.Error(err)
	}
}

// set changes the client's metadata in one step. Nil removes a key.
func (a *agent) set(id, rack *string) {
	meta := map[string]*string{"oxide.instance_id": id, "oxide.rack": rack}
	if _, err := a.admin.Nodes().Meta().Apply(&api.NodeMetaApplyRequest{Meta: meta}, nil); err != nil {
		a.t.Error(err)
	}
}

func (a *agent) options() nomad.Options {
	return nomad.Options{Address: "http://" + a.gate.address, Token: a.token}
}

// allow changes the rights of the token, and waits until the agent applies them.
func (a *agent) allow(rules string, granted bool) {
	a.policy("csi-node", rules, nil)
	client, err := api.NewClient(&api.Config{Address: a.address, SecretID: a.token})
	must(a.t, err)
	await.Within(a.t, waitLimit, "the agent applies the policy", func() bool {
		_, err := client.Nodes().Meta().Read("", nil)
		return (err == nil) == granted
	})
}

func TestNomad(t *testing.T) {
	a := newAgent(t, true)
	t.Run("conformance", func(t *testing.T) { a.conformance(t, "") })
	t.Run("tokens", a.tokens)
	t.Run("task", a.task)
	t.Run("task without a policy", a.taskWithoutPolicy)
}

func TestNomadWithoutACLs(t *testing.T) {
	a := newAgent(t, false)
	t.Run("conformance", func(t *testing.T) { a.conformance(t, "ACLs are off: there is nothing to be denied") })
	t.Run("task", a.task)
}

func (a *agent) conformance(t *testing.T, cannotDeny string) {
	metadatatest.Run(t, func(t *testing.T) metadatatest.Harness {
		a.set(nil, nil)
		var fault metadatatest.Fault
		h := metadatatest.Harness{
			New: func() metadata.Provider { return nomad.New(a.options()) },
			Set: func(w metadatatest.Content) { a.set(w.ID, w.Rack) },
			Break: func(f metadatatest.Fault) {
				fault = f
				switch f {
				case metadatatest.Down:
					a.gate.shut()
				case metadatatest.Slow:
					a.gate.hold()
				case metadatatest.Denied:
					a.allow(`node { policy = "deny" }`, false)
				}
			},
			Repair: func() {
				switch fault {
				case metadatatest.Down:
					a.gate.open()
				case metadatatest.Slow:
					a.gate.release()
				case metadatatest.Denied:
					a.allow(nodeRead, true)
				}
			},
			Secrets: []string{"canary"},
			Cannot:  map[metadatatest.Ability]string{},
		}
		if a.token != "" {
			h.Secrets = append(h.Secrets, a.token)
		}
		if cannotDeny != "" {
			h.Cannot[metadatatest.CanDeny] = cannotDeny
		}
		return h
	})
}

// tokens checks that a missing and a wrong token are refused with advice for the operator.
func (a *agent) tokens(t *testing.T) {
	id := idA
	a.set(&id, nil)
	for token, says := range map[string]string{
		"":                                     "HTTP 403; give the token or the job a policy",
		"0c5cbd0c-7f0f-4d31-a2e6-000000000000": "HTTP 403; give the token or the job a policy",
		"no-uuid":                              "HTTP ",
	} {
		options := a.options()
		options.Token = token
		got, err := nomad.New(options).Instance(t.Context())
		if err == nil || !strings.Contains(err.Error(), says) || token != "" && strings.Contains(err.Error(), token) {
			t.Errorf("token %q: %+v, %v; want an error with %q in it", token, got, err, says)
		}
	}
}

// runTask runs the command as a task with a workload identity, which reaches the agent only through the task API. It
// returns the written file and the output.
func (a *agent) runTask(t *testing.T, job string) (wrote, said string) {
	t.Helper()
	dir := t.TempDir()
	output := filepath.Join(dir, "metadata.env")
	task := api.NewTask("metadata", "raw_exec")
	task.SetConfig("command", "/bin/sh").SetConfig("args", []string{
		"-c",
		`"$0" metadata --provider=nomad --timeout=10s --output="$1" 2>"$1.log"; echo $? >"$1.code"; exec sleep 600`,
		plugin,
		output,
	})
	task.Identity = &api.WorkloadIdentity{Name: "default", Env: true}
	task.Resources = &api.Resources{CPU: pointer(50), MemoryMB: pointer(64)}
	spec := api.NewServiceJob(job, job, "global", 50).
		AddDatacenter("*").
		AddTaskGroup(api.NewTaskGroup("g", 1).AddTask(task))
	_, _, err := a.admin.Jobs().Register(spec, nil)
	must(t, err)
	t.Cleanup(func() {
		if _, _, err := a.admin.Jobs().Deregister(job, false, nil); err != nil {
			t.Error(err)
		}
		await.Within(t, waitLimit, "the task has ended", func() bool {
			allocs, _, err := a.admin.Jobs().Allocations(job, true, nil)
			return err == nil && !slices.ContainsFunc(allocs, func(alloc *api.AllocationListStub) bool {
				return alloc.ClientStatus == api.AllocClientStatusRunning || alloc.ClientStatus == api.AllocClientStatusPending
			})
		})
	})
	await.Within(t, waitLimit, "the task's command has ended", func() bool {
		text, err := os.ReadFile(output + ".code")
		return err == nil && len(text) > 0
	})
	log, err := os.ReadFile(output + ".log")
	must(t, err)
	text, err := os.ReadFile(output)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	return string(text), string(log)
}

// unmountBelow unmounts the folders that a Nomad client leaves mounted.
func unmountBelow(t *testing.T, dir string) {
	mounts, err := mountinfo.GetMounts(mountinfo.PrefixFilter(dir))
	must(t, err)
	for _, mount := range slices.Backward(mounts) {
		must(t, unix.Unmount(mount.Mountpoint, unix.MNT_DETACH))
	}
}

func pointer(n int) *int { return &n }

func (a *agent) task(t *testing.T) {
	id, rack := idA, "east"
	a.set(&id, &rack)
	if a.token != "" {
		a.policy("job-with-policy", nodeRead, &api.JobACL{Namespace: "default", JobID: "with-policy"})
	}
	wrote, said := a.runTask(t, "with-policy")
	if wrote != "OXIDE_INSTANCE_ID="+idA+"\nOXIDE_RACK=east\n" {
		t.Errorf("wrote %q: %s", wrote, said)
	}
	if strings.Contains(said, "eyJ") {
		t.Errorf("the output contains the identity's token: %s", said)
	}
}

func (a *agent) taskWithoutPolicy(t *testing.T) {
	id := idA
	a.set(&id, nil)
	wrote, said := a.runTask(t, "without-policy")
	if wrote != "" || !strings.Contains(said, "HTTP 403; give the token or the job a policy with node") {
		t.Errorf("wrote %q: %s", wrote, said)
	}
}

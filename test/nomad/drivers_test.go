// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build nomad

package nomad_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/hashicorp/nomad/api"
)

// TestDrivers checks what each job file has each driver run. It needs no Nomad agent.
func TestDrivers(t *testing.T) {
	type config = map[string]any
	const state, dbus, certificates = "/state:/state", "/run/dbus:/run/dbus:ro", "/etc/ssl/certs:/etc/ssl/certs:ro"
	program := config{"command": "/program"}
	node := func(volumes ...any) config {
		return config{
			"image": "plugin:1", "network_mode": "host", "pid_mode": "host", "privileged": true, "readonly_rootfs": true,
			"memory_hard_limit": 1048576.0, "volumes": volumes,
		}
	}
	controller := config{
		"image": "controller:1", "network_mode": "host", "cap_drop": []any{"all"}, "readonly_rootfs": true,
	}
	for _, test := range []struct {
		file, driver, attachMode string
		user                     string
		config                   config
	}{
		{"controller", "raw_exec", "hot", "", program},
		{"controller", "exec", "hot", "", program},
		{"controller", "docker", "hot", "root", controller},
		{"node", "raw_exec", "hot", "root", program},
		{"node", "raw_exec", "restart", "root", program},
		{"node", "docker", "hot", "root", node(state)},
		{"node", "docker", "restart", "root", node(state, dbus)},
		{"monolith", "raw_exec", "hot", "root", program},
		{"monolith", "docker", "hot", "root", node(certificates, state)},
	} {
		t.Run(test.file+" "+test.driver+" "+test.attachMode, func(t *testing.T) {
			output := submitter(t, "NOMAD_VAR_cluster_id=test", "NOMAD_VAR_driver="+test.driver,
				"NOMAD_VAR_attach_mode="+test.attachMode, "NOMAD_VAR_state_dir=/state", "NOMAD_VAR_command=/program",
				"NOMAD_VAR_image=plugin:1", "NOMAD_VAR_controller_image=controller:1").
				run(t, "job", "run", "-output", test.file+".nomad.hcl")
			var made struct{ Job api.Job }
			must(t, json.Unmarshal([]byte(output), &made))
			task := made.Job.TaskGroups[0].Tasks[0]
			if task.Driver != test.driver || task.User != test.user {
				t.Errorf("driver %q and user %q, want %q and %q", task.Driver, task.User, test.driver, test.user)
			}
			if diff := cmp.Diff(test.config, task.Config); diff != "" {
				t.Errorf("config (-want +got):\n%s", diff)
			}
		})
	}
}

// TestMemory checks how much memory the jobs reserve, and their limit. It needs no Nomad agent.
func TestMemory(t *testing.T) {
	for _, test := range []struct {
		name      string
		variables []string
		memory    int
		limit     *int
		files     []string
	}{
		{"default", nil, 256, new(-1), []string{"node", "monolith"}},
		{"more", []string{"NOMAD_VAR_memory=1024"}, 1024, new(-1), []string{"node", "monolith"}},
		{"a limit", []string{"NOMAD_VAR_memory_max=2048"}, 256, new(2048), []string{"node", "monolith"}},
		{"default", nil, 64, nil, []string{"controller"}},
		{"more", []string{"NOMAD_VAR_controller_memory=128"}, 128, nil, []string{"controller"}},
	} {
		for _, file := range test.files {
			t.Run(file+" "+test.name, func(t *testing.T) {
				output := submitter(t, append(test.variables, "NOMAD_VAR_cluster_id=test")...).
					run(t, "job", "run", "-output", file+".nomad.hcl")
				var made struct{ Job api.Job }
				must(t, json.Unmarshal([]byte(output), &made))
				has := made.Job.TaskGroups[0].Tasks[0].Resources
				if diff := cmp.Diff([]*int{&test.memory, test.limit}, []*int{has.MemoryMB, has.MemoryMaxMB}); diff != "" {
					t.Errorf("memory and its limit (-want +got):\n%s", diff)
				}
			})
		}
	}
}

// TestRefused checks what Nomad refuses before a job is submitted.
func TestRefused(t *testing.T) {
	const id, docker = "NOMAD_VAR_cluster_id=test", "NOMAD_VAR_driver=docker"
	for _, test := range []struct {
		name, file string
		variables  []string
		says       string
	}{
		// A controller without a cluster ID could share the ID of another one.
		{"no cluster ID", "controller", nil, `Unset variable "cluster_id"`},
		{"no cluster ID", "monolith", nil, `Unset variable "cluster_id"`},
		{"docker without an image", "node", []string{docker}, `function "coalesce" failed`},
		{"docker without an image", "monolith", []string{docker, id}, `function "coalesce" failed`},
		{"docker with the node's image", "controller", []string{docker, id, "NOMAD_VAR_image=plugin:1"}, `function "coalesce" failed`},
		{"exec", "node", []string{"NOMAD_VAR_driver=exec"}, "The driver must be raw_exec or docker."},
		{"exec", "monolith", []string{"NOMAD_VAR_driver=exec", id}, "The driver must be raw_exec or docker."},
		{"no such driver", "controller", []string{"NOMAD_VAR_driver=raw-exec", id}, "The driver must be raw_exec, exec or docker."},
	} {
		t.Run(test.file+" "+test.name, func(t *testing.T) {
			_, stderr, err := submitter(t, test.variables...).try("job", "run", "-output", test.file+".nomad.hcl")
			if err == nil || !strings.Contains(stderr, test.says) {
				t.Errorf("%v: %s", err, stderr)
			}
		})
	}
}

// submitter returns a user who has Nomad's command, and no agent to talk to.
func submitter(t *testing.T, variables ...string) cli {
	t.Helper()
	c := &cluster{t: t, dir: t.TempDir(), nomad: program(t, "nomad")}
	return c.as("", append(variables, "NOMAD_VAR_oxide_host=https://rack.example.com", "NOMAD_VAR_oxide_project=test")...)
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build nomad

package nomad_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/hashicorp/nomad/api"

	"github.com/oxidecomputer/oxide-csi-plugin/test/await"
)

// red is a namespace of another team.
const red = "red"

// TestTwoNamespaces has a disk with a volume in two namespaces, as docs/explanation/nomad-claims.md says. A job uses
// the disk, and a job of the other namespace is placed on the same client. The node refuses that job. Nothing is taken
// from the job that runs.
func TestTwoNamespaces(t *testing.T) {
	t.Parallel() // it waits most of the time
	c := newCluster(t, impatient)
	c.grace = "5s"
	c.install(t)
	operator, root := c.operator(t), c.as(c.management)
	operator.run(t, "volume", "create", "volumes/create.volume.hcl")
	first := c.example(t, operator, "data", "node-a")
	c.lines(t, operator, first, first)
	volume, _, err := c.admin.CSIVolumes().Info("data", nil)
	must(t, err)

	root.run(t, "namespace", "apply", red)
	inRed := []string{`namespace = "default"`, `namespace = "red"`, `namespace   = "default"`, `namespace   = "red"`}
	c.part("a second ID by volume create", func(t *testing.T) {
		_, stderr, err := root.try("volume", "create", c.filled(t, "volumes/create.volume.hcl", inRed...))
		if err == nil || !strings.Contains(stderr, "under another ID or in another namespace") {
			t.Errorf("%v: %s", err, stderr)
		}
	})
	disk := strings.TrimSpace(operator.run(t, "volume", "status", "-type=csi", "-t", "{{.Context.diskName}}", "data"))
	root.run(t, "volume", "register", c.filled(t, "volumes/register.volume.hcl",
		append(inRed, "existing", "data", "DISK-ID", volume.ExternalID, "DISK-NAME", disk)...))

	c.part("a job of the other namespace is refused", func(t *testing.T) { c.second(t, "node-a") })
	c.part("nothing is taken from the job that runs", func(t *testing.T) {
		await.Within(t, waitLimit, "the controller's log names the claim", func() bool {
			log, _, err := c.installer().try("alloc", "logs", "-stderr", "-job", "oxide-csi-controller")
			return err == nil && strings.Contains(log, "a workload on the instance has claimed the volume") &&
				strings.Contains(log, first[:8])
		})
		await.Within(t, waitLimit, "the request is dropped", func() bool {
			_, open := c.deferred(t)
			return open == 0
		})
		if at := c.holder(t, volume.ExternalID); at != "node-a" {
			t.Fatalf("the disk is attached to %q", at)
		}
		c.running(first)
		must(t, c.writes(first))
	})
	c.part("the volume moves when the job does", func(t *testing.T) {
		c.stopped(t, operator)
		second := c.example(t, operator, "data", "node-b")
		c.lines(t, operator, second, first, "the test", second)
	})
	c.stop(t, operator, "data")
	c.part("a deletion takes nothing from the other namespace", func(t *testing.T) {
		for _, user := range []cli{operator, c.as(c.management, "NOMAD_NAMESPACE="+red)} {
			if _, stderr, err := user.try("volume", "delete", "data"); err == nil || !strings.Contains(stderr, "under 2 IDs") {
				t.Errorf("%v: %s", err, stderr)
			}
		}
		c.as(c.management, "NOMAD_NAMESPACE="+red).run(t, "volume", "deregister", "data")
		operator.run(t, "volume", "delete", "data")
	})
	c.nothingLeft(t)
}

// second runs a job of the namespace red on a client, once. It waits until the node has refused it and Nomad has
// released its claim.
func (c *cluster) second(t *testing.T, client string) {
	t.Helper()
	user := c.as(c.management, "NOMAD_VAR_volume=data", "NOMAD_VAR_client="+client)
	user.run(t, "job", "run", "-detach", c.filled(t, "example.nomad.hcl",
		`job "example" {`, fmt.Sprintf("job \"second\" {\n  namespace = %q", red),
		`group "example" {`, "group \"example\" {\n    reschedule {\n      attempts  = 0\n      unlimited = false\n    }\n"))
	query := &api.QueryOptions{Namespace: red}
	await.Within(t, waitLimit, "the node has refused the second job", func() bool {
		allocs, _, err := c.admin.Jobs().Allocations("second", false, query)
		return err == nil && len(allocs) == 1 && strings.Contains(failure(allocs), "already mounted at")
	})
	await.Within(t, waitLimit, "Nomad has released its claim", func() bool {
		info, _, err := c.admin.CSIVolumes().Info("data", query)
		return err == nil && len(info.ReadAllocs)+len(info.WriteAllocs) == 0
	})
	user.variables = []string{"NOMAD_NAMESPACE=" + red}
	user.run(t, "job", "stop", "-detach", "second")
}

// writes appends a line to the file of the example's volume, and reads it back from the disk.
func (c *cluster) writes(alloc string) error {
	_, stderr, err := c.as(c.management).try("alloc", "exec", alloc, "/bin/sh", "-c",
		"echo written by the test >>/data/lines && sync && cat /data/lines >/dev/null")
	if err != nil {
		return fmt.Errorf("%w: %s", err, stderr)
	}
	return nil
}

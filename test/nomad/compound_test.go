// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build nomad

package nomad_test

import (
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/nomad/api"
	"github.com/oxidecomputer/oxide.go/oxide"
)

// TestCompoundFault has one client lose its power, with a controller, and drains the other one a second later. No
// controller is left. Volumes are in use on both clients. When the first client is back, both volumes must reach it
// without a person. All timings are the defaults of Nomad and of the job files.
func TestCompoundFault(t *testing.T) {
	t.Parallel() // it waits most of the time
	c := newCluster(t, "")
	c.controllerCount = 2
	c.install(t)
	operator := c.operator(t)
	for _, volume := range []string{"drained", "unpowered"} {
		operator.run(t, "volume", "create", c.filled(t, "volumes/create.volume.hcl", `"data"`, `"`+volume+`"`))
	}
	data := c.consumer(t, operator, "drained", "node-b", "")
	other := c.consumer(t, operator, "unpowered", "node-a", "")
	c.lines(t, operator, data[0], data...)
	c.lines(t, operator, other[0], other...)

	c.part("each client has a controller", func(t *testing.T) {
		c.compoundFault(t, "compound fault with two controllers", "node-a", "node-b", false)
		data, other = append(data, c.runs("drained", "node-a", 1)...), append(other, c.runs("unpowered", "node-a", 1)...)
		c.lines(t, operator, data[1], data...)
		c.lines(t, operator, other[1], other...)
	})
	c.part("the only controller is on the client that loses its power", func(t *testing.T) {
		c.controllerCount = 1
		c.installer(c.values()...).run(t, "job", "run", "controller.nomad.hcl")
		c.healthy(1, 2)
		c.moveController(t, "node-b")
		c.compoundFault(t, "compound fault with one controller", "node-b", "node-a", true)
		data, other = append(data, c.runs("drained", "node-b", 1)...), append(other, c.runs("unpowered", "node-b", 1)...)
		c.lines(t, operator, data[2], data...)
		c.lines(t, operator, other[2], other...)
	})
}

// compoundFault takes the power from one client and drains the other one. The former returns, and must then get the
// volumes of the latter in time. At the end both clients are as before. The rack regards the instance without power as
// stopped, or does not notice.
func (c *cluster) compoundFault(t *testing.T, name, unpowered, drained string, noticed bool) {
	t.Helper()
	m, root := c.clients[unpowered], c.as(c.management)
	id, instance := c.node(drained).ID, c.sim.Instance(unpowered).ID
	began := time.Now()
	m.losePower()
	if noticed {
		must(t, c.sim.PowerCut(t.Context(), instance))
	}
	<-time.After(time.Second)
	root.run(t, "node", "drain", "-enable", "-yes", "-detach", id)
	c.server.eventually("the client is down, and the other one is drained", func() bool {
		node, _, err := c.admin.Nodes().Info(id, nil)
		down := c.node(unpowered)
		return err == nil && node.DrainStrategy == nil && down != nil && down.Status != api.NodeStatusReady
	})
	records, _ := c.deferred(t)
	t.Logf("measured: %s: nothing runs after %s; records of detaches on the rack: %d", name, since(began), records)
	if noticed {
		must(t, c.sim.SetRunState(t.Context(), instance, "running"))
	}
	m.boot()
	m.ready()
	returned := time.Now()
	m.eventually("a controller is healthy", func() bool {
		plugin, _, err := c.admin.CSIPlugins().Info("oxide", nil)
		return err == nil && plugin.ControllersHealthy > 0
	})
	controller := time.Now()
	t.Logf("measured: %s: a controller %s after the return", name, since(returned))
	for _, job := range []string{"drained", "unpowered"} {
		c.runs(job, unpowered, 1)
		t.Logf("measured: %s: job %s runs %s after the return", name, job, since(returned))
	}
	c.took(t, name, controller, 0, defaultGrace+time.Minute)
	root.run(t, "node", "eligibility", "-enable", id)
	c.healthy(c.controllerCount, 2)
}

func since(began time.Time) time.Duration { return time.Since(began).Round(100 * time.Millisecond) }

// deferred counts the records of deferred detaches on the rack, and those of them whose detach will come by itself. It
// depends on chance whether Nomad reached a controller in time, and whether it repeated an unpublish.
func (c *cluster) deferred(t *testing.T) (all, open int) {
	t.Helper()
	client, err := c.sim.Client()
	must(t, err)
	list, err := client.AntiAffinityGroupListAllPages(t.Context(),
		oxide.AntiAffinityGroupListParams{Project: oxide.NameOrId(c.sim.Project)})
	must(t, err)
	for _, group := range list {
		if strings.HasPrefix(string(group.Name), "csi-defer-") {
			all++
			if !strings.Contains(group.Description, `"over":true`) && !strings.Contains(group.Description, `"untimed":true`) {
				open++
			}
		}
	}
	return all, open
}

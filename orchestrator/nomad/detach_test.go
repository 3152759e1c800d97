// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package nomad_test

import (
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	client "github.com/oxidecomputer/oxide-csi-plugin/metadata/nomad"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator/nomad"
	"github.com/oxidecomputer/oxide-csi-plugin/test/await"
	"github.com/oxidecomputer/oxide-csi-plugin/test/coretest"
)

// twoNamespaces is a Nomad in which a disk has a volume "data" in the namespaces blue and red. The client nodeA is on
// the rack's instance node-a, and nodeB on node-b.
type twoNamespaces struct {
	options client.Options
	mu      sync.Mutex
	// claimed has the client with a claim on the volume of a namespace.
	claimed map[string]string
	// ending is what Nomad has of allocations that end.
	ending answers
	// lists counts the lists of volumes.
	lists int
	// volumeID and the instances are set before the first question.
	volumeID, instance, other string
}

func newTwoNamespaces(t *testing.T) *twoNamespaces {
	n := &twoNamespaces{claimed: map[string]string{}}
	server := httptest.NewServer(n.handler(t))
	t.Cleanup(server.Close)
	n.options = client.Options{Address: server.URL, Token: token}
	return n
}

// handler answers each request from a simulated Nomad as it is at that moment.
func (n *twoNamespaces) handler(t *testing.T) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		n.mu.Lock()
		if r.URL.Path == "/v1/volumes" {
			n.lists++
		}
		now, namespace := n.answers(), r.URL.Query().Get("namespace")
		n.mu.Unlock()
		if r.URL.Path == "/v1/volume/csi/data" {
			now[r.URL.Path] = now[namespace]
		}
		now.handler(t)(w, r)
	})
}

func (n *twoNamespaces) answers() answers {
	all, volumes := moved(), []object{}
	for _, namespace := range []string{"blue", "red"} {
		claims := []string{}
		if client := n.claimed[namespace]; client != "" {
			claims = append(claims, client)
		}
		volumes = append(volumes, object{
			"ID": "data", "Namespace": namespace, "ExternalID": n.volumeID, "CurrentWriters": len(claims),
		})
		all[namespace] = claimedBy(claims...)
	}
	maps.Copy(all, answers{"/v1/volumes": volumes, "/v1/plugin/csi/oxide": object{
		"ID": "oxide", "Nodes": object{
			nodeA: object{"NodeInfo": object{"ID": n.instance}}, nodeB: object{"NodeInfo": object{"ID": n.other}},
		},
	}})
	maps.Copy(all, n.ending)
	return all
}

// set changes Nomad.
func (n *twoNamespaces) set(change func()) {
	n.mu.Lock()
	defer n.mu.Unlock()
	change()
}

// asked waits until the plugin has asked again.
func (n *twoNamespaces) asked(t *testing.T) {
	t.Helper()
	n.mu.Lock()
	before := n.lists
	n.mu.Unlock()
	await.Eventually(t, "Nomad was asked", func() bool {
		n.mu.Lock()
		defer n.mu.Unlock()
		return n.lists > before
	})
}

// A job of the namespace blue runs. A job of the namespace red with the same disk is placed on the same client. The
// node refuses it, and Nomad unpublishes the volume for it. The real controller asks a simulated Nomad, and takes
// nothing from the job that runs. When that job stops, its disk is detached.
func TestSecondNamespaceTakesNoDisk(t *testing.T) {
	n := newTwoNamespaces(t)
	r := coretest.New(t, func(o *coretest.Options) {
		o.DetachGrace, o.Orchestrator = 200*time.Millisecond, nomad.NewOperator(n.options)
	})
	node, id := r.Node(t, "node-a"), r.Create(t, "data")
	n.set(func() { n.volumeID, n.instance, n.claimed["blue"] = id, node, nodeA })
	coretest.Must(t, r.Publish(t, id, node))

	n.set(func() { n.claimed["red"] = nodeA })
	coretest.Must(t, r.Publish(t, id, node))
	coretest.Must(t, r.Unpublish(t, id, node))
	n.set(func() { n.claimed["red"] = "" })
	n.asked(t)
	await.Eventually(t, "the request of the second job is dropped", func() bool {
		got, err := r.ControllerGetVolume(t.Context(), &csi.ControllerGetVolumeRequest{VolumeId: id})
		coretest.Must(t, err)
		return slices.Equal(got.GetStatus().GetPublishedNodeIds(), []string{node})
	})
	if got := r.Holder(t, id); got != node {
		t.Fatalf("the disk of the job that runs is on %q", got)
	}

	coretest.Must(t, r.Unpublish(t, id, node))
	n.set(func() { n.claimed["blue"] = "" })
	await.Eventually(t, "the disk is detached", func() bool { return r.Holder(t, id) == "" })
}

// A job was stopped, and its task goes on. A person deregisters its volume by force, and a job on another client claims
// it. The real controller asks a simulated Nomad, and that job gets the disk when the task has ended: whether Nomad has
// requested the detach before, or requests none.
func TestTaskThatGoesOnKeepsItsDisk(t *testing.T) {
	for _, requested := range []bool{false, true} {
		n := newTwoNamespaces(t)
		r := coretest.New(t, func(o *coretest.Options) {
			o.DetachGrace, o.Orchestrator = 200*time.Millisecond, nomad.NewOperator(n.options)
		})
		node, other, id := r.Node(t, "node-a"), r.Node(t, "node-b"), r.Create(t, "data")
		n.set(func() { n.volumeID, n.instance, n.other, n.claimed["blue"] = id, node, other, nodeA })
		coretest.Must(t, r.Publish(t, id, node))

		n.set(func() { n.claimed["blue"], n.claimed["red"], n.ending = "", nodeB, ends(nodeA, "data") })
		if requested {
			coretest.Must(t, r.Unpublish(t, id, node))
		}
		for range 10 {
			if err := r.Publish(t, id, other); err == nil {
				t.Fatal("published on the other client")
			}
			time.Sleep(100 * time.Millisecond)
		}
		if got := r.Holder(t, id); got != node {
			t.Fatalf("the disk of the task that goes on is on %q", got)
		}
		n.set(func() { n.ending = nil })
		await.Within(t, time.Minute, "the other client has the disk", func() bool { return r.Publish(t, id, other) == nil })
	}
}

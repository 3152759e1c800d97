// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/oxidecomputer/oxide-csi-plugin/core/controller"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/test/coretest"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack"
)

// mortal is a controller that ends at one of its requests to the rack: before the request is sent, or before its answer
// is received.
type mortal struct {
	http.RoundTripper
	service *controller.Service
	// left is the number of requests until the end.
	left atomic.Int64
	end  context.CancelFunc
}

var errEnded = errors.New("the controller has ended")

func (m *mortal) RoundTrip(req *http.Request) (*http.Response, error) {
	left := m.left.Add(-1)
	if left < 0 {
		m.end()
		return nil, errEnded
	}
	resp, err := m.RoundTripper.RoundTrip(req)
	if left == 0 {
		m.end()
		return nil, errEnded
	}
	return resp, err
}

// waitBudget is the grace period, the time after which a dead controller's detaching record is removed, and an interval
// of Nomad's repetition.
const waitBudget = grace + 150*time.Second + time.Minute

// nomad calls the controllers of a cluster as Nomad does.
type nomad struct {
	*bubbleRig
	random *rand.Rand
	nodes  [2]string

	running sync.WaitGroup
	mu      sync.Mutex
	current *mortal
}

// controller returns the living controller. It starts one if the last has ended.
func (n *nomad) controller(t *testing.T) *controller.Service {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.current != nil && n.current.left.Load() > 0 {
		return n.current.service
	}
	m := &mortal{RoundTripper: handlerTransport{n.rack.API()}}
	m.left.Store(3 + n.random.Int64N(60))
	client, err := rack.New(rack.Config{
		Name: "default", Host: "http://rack", Project: coretest.Project, Token: rack.FixedToken(coretest.Token),
		HTTPClient: &http.Client{Transport: m}, LostAnswerWait: time.Millisecond,
	})
	coretest.Must(t, err)
	m.service = controller.New(controller.Options{
		Racks: []*rack.Client{client}, Cluster: coretest.Cluster, MaxDisks: 8, DetachGrace: grace, Log: coretest.DiscardLog(),
	})
	ctx, cancel := context.WithCancel(t.Context())
	m.end = cancel
	n.running.Go(func() { m.service.DetachLater(ctx, client) })
	n.current = m
	return m.service
}

// publish repeats the call as Nomad does, until it succeeds. It fails after waitBudget without the end of a controller,
// and after a day with many.
func (n *nomad) publish(t *testing.T, id, node string) {
	first := time.Now()
	began, living := first, n.current
	for wait := 2 * time.Second; ; wait = min(2*wait, time.Minute) {
		_, err := n.controller(t).ControllerPublishVolume(
			t.Context(),
			&csi.ControllerPublishVolumeRequest{VolumeId: id, NodeId: node, VolumeCapability: coretest.MountWriter()},
		)
		if err == nil {
			return
		}
		if n.current != living {
			began, living = time.Now(), n.current
		}
		if time.Since(began) > waitBudget || time.Since(first) > 24*time.Hour {
			t.Fatalf("volume %s is stuck: %v", id, err)
		}
		time.Sleep(wait)
	}
}

// unpublish sends the call until it succeeds once, and then not again.
func (n *nomad) unpublish(t *testing.T, id, node string) {
	for {
		_, err := n.controller(t).ControllerUnpublishVolume(
			t.Context(),
			&csi.ControllerUnpublishVolumeRequest{VolumeId: id, NodeId: node},
		)
		if err == nil {
			return
		}
		time.Sleep(time.Second)
	}
}

// Whenever a controller ends, and whatever Nomad repeats late, a published volume stays attached, and an unpublished
// one can be published anywhere.
func TestDeferredDetachesWhenControllersEnd(t *testing.T) {
	seeds := uint64(40)
	if os.Getenv("RACE") != "" {
		seeds = 10 // mostly one call runs at a time, so the race detector costs more than it finds; make orders has all
	}
	for seed := range seeds {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := &nomad{
					bubbleRig: newBubbleRig(t, func(o *simrack.Options) { o.Instances = []string{"node-a", "node-b"} }),
					random:    rand.New(rand.NewPCG(seed, 0)),
				}
				n.nodes = [2]string{n.Node(t, "node-a"), n.Node(t, "node-b")}
				created, err := n.startController(t, controller.Options{}).CreateVolume(t.Context(), coretest.CreateRequest("v"))
				coretest.Must(t, err)
				id := created.GetVolume().GetVolumeId()
				left := map[string]time.Time{} // when the volume was last unpublished, by node
				for range 12 {
					node := n.nodes[n.random.IntN(2)]
					n.publish(t, id, node)
					late := n.random.IntN(6)
					for minute := range n.random.IntN(20) {
						if minute == late && time.Since(left[node]) < 9*time.Minute {
							n.unpublish(t, id, node) // the volume may have been elsewhere since
						}
						time.Sleep(time.Minute)
						if got := n.Holder(t, id); got != node {
							t.Fatalf("the volume is published on %s, and its disk is on %q", node, got)
						}
						n.controller(t) // Nomad starts another one
					}
					n.unpublish(t, id, node)
					left[node] = time.Now()
					time.Sleep(time.Duration(n.random.IntN(120)) * time.Second)
				}
				n.current.end()
				n.running.Wait()
			})
		})
	}
}

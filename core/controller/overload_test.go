// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller_test

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/test/bufconn"

	"github.com/oxidecomputer/oxide-csi-plugin/core"
	"github.com/oxidecomputer/oxide-csi-plugin/core/controller"
	"github.com/oxidecomputer/oxide-csi-plugin/test/coretest"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack"
)

const (
	overloadRPCs   = 500
	callsPerSecond = 20
)

// slowDown makes the rack serve 20 calls per second, one after the other. It returns a function that reports the
// highest number of calls that were under way at once.
func (r *bubbleRig) slowDown() func() int {
	var mu sync.Mutex
	var underWay, highest int
	turn := make(chan struct{}, 1)
	r.before = func(req *http.Request) {
		mu.Lock()
		underWay++
		highest = max(highest, underWay)
		mu.Unlock()
		turn <- struct{}{}
		time.Sleep(time.Second / callsPerSecond)
		<-turn
		mu.Lock()
		underWay--
		mu.Unlock()
	}
	return func() int {
		mu.Lock()
		defer mu.Unlock()
		return highest
	}
}

// dial serves a controller over gRPC, on a connection in memory: a pending read from a socket would stop the bubble's
// clock.
func (r *bubbleRig) dial(t *testing.T, service *controller.Service) csi.ControllerClient {
	t.Helper()
	options := coretest.ServerOptions("controller")
	options.Controller = service
	server, listener := core.NewServer(options), bufconn.Listen(1<<20)
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	conn, err := grpc.NewClient(
		"passthrough:///controller",
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) }),
		grpc.WithTransportCredentials(insecure.NewCredentials()),
	)
	coretest.Must(t, err)
	t.Cleanup(func() {
		coretest.Must(t, conn.Close())
		server.StopNow()
		coretest.Must(t, <-served)
	})
	return csi.NewControllerClient(conn)
}

// Five hundred RPCs at once meet a rack that serves 20 calls per second. Each succeeds, and they end in the order in
// which they came. Each makes one call, which it shares with no other RPC.
func TestOverloadOfRPCsEndsInOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newBubbleRig(t)
		highest := r.slowDown()
		client := r.dial(t, r.startController(t, controller.Options{}))
		_, err := r.client.ProjectID(t.Context()) // negotiates the API version, as the plugin's start does
		coretest.Must(t, err)
		r.requests.Store(0)
		volumes := make([]string, overloadRPCs)
		for n := range volumes {
			volumes[n] = r.UserDisk(t, coretest.Project, fmt.Sprint("disk-", n), "").Id
		}

		start := time.Now()
		ended := make(chan int, overloadRPCs)
		for n := range overloadRPCs {
			go func() {
				if _, err := client.ControllerGetVolume(
					t.Context(), &csi.ControllerGetVolumeRequest{VolumeId: volumes[n]}); err != nil {
					t.Errorf("RPC %d: %v", n, err)
				}
				ended <- n
			}()
			synctest.Wait()
		}
		for want := range overloadRPCs {
			if got := <-ended; got != want {
				t.Fatalf("RPC %d ended when RPC %d was next", got, want)
			}
		}
		took, calls := time.Since(start), r.requests.Load()
		if least := time.Duration(calls) * time.Second / callsPerSecond; took > least+time.Second {
			t.Errorf("%d calls took %s, and the rack alone takes %s", calls, took, least)
		}
		if highest() > 64 {
			t.Errorf("%d calls were under way at once, want at most 64", highest())
		}
	})
}

// Five hundred publishes at once: each needs several calls, and the rack needs longer than the callers wait. Callers
// repeat what failed, as the CSI sidecars do. If every call waited behind all that came before it, all RPCs would reach
// their deadlines half done, again and again, and none would ever end.
func TestOverloadOfRepeatedRPCsEnds(t *testing.T) {
	const perNode = 5
	synctest.Test(t, func(t *testing.T) {
		names := make([]string, overloadRPCs/perNode)
		for n := range names {
			names[n] = fmt.Sprint("node-", n)
		}
		r := newBubbleRig(t, func(o *simrack.Options) { o.Instances = names })
		r.slowDown()
		client := r.dial(t, r.startController(t, controller.Options{}))
		_, err := r.client.ProjectID(t.Context()) // negotiates the API version, as the plugin's start does
		coretest.Must(t, err)
		r.requests.Store(0)
		volumes, nodes := make([]string, overloadRPCs), make([]string, overloadRPCs)
		for n := range volumes {
			volumes[n] = r.UserDisk(t, coretest.Project, fmt.Sprint("disk-", n), "").Id
			nodes[n] = r.Node(t, names[n/perNode])
		}

		storm, stop := context.WithTimeout(t.Context(), 30*time.Minute)
		defer stop()
		publish := func(n int) error {
			ctx, cancel := context.WithTimeout(storm, 15*time.Second) // the default of the external-attacher
			defer cancel()
			_, err := client.ControllerPublishVolume(ctx, &csi.ControllerPublishVolumeRequest{
				VolumeId: volumes[n], NodeId: nodes[n], VolumeCapability: coretest.MountWriter(),
			})
			return err
		}
		var callers sync.WaitGroup
		for n := range volumes {
			callers.Go(func() {
				for pause := time.Second; publish(n) != nil && storm.Err() == nil; pause = min(2*pause, 5*time.Minute) {
					time.Sleep(pause)
				}
			})
		}
		callers.Wait()
		for n, volume := range volumes {
			if holder := r.Holder(t, volume); holder != nodes[n] {
				t.Errorf("volume %d is attached to %q, want %q", n, holder, nodes[n])
			}
		}
		// What was begun ends, so little is done in vain.
		if calls, most := r.requests.Load(), int64(2*5*overloadRPCs); calls > most {
			t.Errorf("the storm took %d calls, want at most %d", calls, most)
		}
	})
}

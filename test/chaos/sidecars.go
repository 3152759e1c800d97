// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package main

import (
	"context"
	"errors"
	"math/rand/v2"
	"path"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
)

// sidecars are the connections to two controllers. As in Kubernetes there is a lease for each kind of RPC: one
// controller gets all RPCs of the kind, until the other one takes over.
type sidecars struct {
	conns  [replicas]*grpc.ClientConn
	leases map[string]*lease
}

// replicas is the number of controllers.
const replicas = 2

// lease says which controller gets the RPCs of one kind.
type lease struct {
	mu     sync.Mutex
	holder int
	// held ends when the holder loses the lease. While it has no holder, held has ended, and taken is closed when a
	// controller takes the lease.
	held   context.Context
	lose   context.CancelFunc
	taken  chan struct{}
	random *rand.Rand
	// lostAt is when a controller last lost the lease, in Unix nanoseconds.
	lostAt atomic.Int64
}

// The kinds of RPCs, named for the sidecars of Kubernetes that send them.
const (
	provisioner = "provisioner"
	attacher    = "attacher"
	snapshotter = "snapshotter"
	resizer     = "resizer"
)

// sidecarOf returns the sidecar that sends an RPC. The method may begin with the name of its service.
func sidecarOf(method string) string {
	switch path.Base(method) {
	case "ControllerPublishVolume", "ControllerUnpublishVolume", "ListVolumes", "ControllerGetVolume":
		return attacher
	case "CreateSnapshot", "DeleteSnapshot", "ListSnapshots":
		return snapshotter
	case "ControllerExpandVolume":
		return resizer
	}
	return provisioner
}

// connectSidecars connects to the sockets of the controllers. Each lease begins with a random one.
func connectSidecars(sockets [replicas]string, seed uint64) (*sidecars, error) {
	s := &sidecars{leases: map[string]*lease{}}
	for i, socket := range sockets {
		conn, err := grpc.NewClient(
			"unix://"+socket,
			grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithConnectParams(
				grpc.ConnectParams{
					Backoff: backoff.Config{
						BaseDelay:  5 * time.Millisecond,
						Multiplier: 1.5,
						MaxDelay:   200 * time.Millisecond,
					},
					MinConnectTimeout: 20 * time.Second, // else five milliseconds
				},
			),
		)
		if err != nil {
			return nil, errors.Join(err, s.close())
		}
		s.conns[i] = conn
	}
	for number, kind := range []string{provisioner, attacher, snapshotter, resizer} {
		l := &lease{random: rand.New(rand.NewPCG(seed, 1<<32+uint64(number))), taken: make(chan struct{})}
		l.take(l.random.IntN(replicas))
		s.leases[kind] = l
	}
	return s, nil
}

func (s *sidecars) close() error {
	var errs []error
	for _, conn := range s.conns {
		if conn != nil {
			errs = append(errs, conn.Close())
		}
	}
	return errors.Join(errs...)
}

// take gives the lease to a controller.
func (l *lease) take(holder int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.holder = holder
	l.held, l.lose = context.WithCancel(context.Background())
	close(l.taken)
	l.taken = make(chan struct{})
}

// current waits until the lease has a holder.
func (l *lease) current(ctx context.Context) (holder int, held context.Context, err error) {
	for {
		l.mu.Lock()
		holder, held, taken := l.holder, l.held, l.taken
		l.mu.Unlock()
		if held.Err() == nil {
			return holder, held, nil
		}
		select {
		case <-taken:
		case <-ctx.Done():
			return 0, nil, ctx.Err()
		}
	}
}

// maxGap is how long a lease has no holder at a hand-over. With the leases of Kubernetes' sidecars it is at least 5 s.
const maxGap = time.Second

// handOver ends a lease, and with it the calls under way, and gives it to the other controller.
func (w *world) handOver(ctx context.Context, kind string) error {
	l := w.leases[kind]
	w.results.count("hand-overs of the " + kind)
	l.lostAt.Store(time.Now().UnixNano()) // a worker may notice before lose returns
	l.lose()
	l.lostAt.Store(time.Now().UnixNano())
	err := pause(ctx, time.Duration(l.random.Int64N(int64(maxGap))))
	l.take(replicas - 1 - l.holder)
	return err
}

// handOverMany hands the lease of one kind over at random until end.
func (w *world) handOverMany(ctx context.Context, kind string, end time.Time) {
	for w.handOvers > 0 {
		wait := time.Duration(w.leases[kind].random.ExpFloat64() * float64(w.handOvers))
		if time.Now().Add(wait).After(end) || pause(ctx, wait) != nil || w.handOver(ctx, kind) != nil {
			return
		}
	}
}

// wrongReplica marks the context of an RPC that goes to the controller that does not hold the lease. Such a call comes
// from a sidecar that has lost its lease and does not know it yet.
type wrongReplica struct{}

// Invoke implements [grpc.ClientConnInterface].
func (s *sidecars) Invoke(ctx context.Context, method string, args, reply any, opts ...grpc.CallOption) error {
	holder, held, err := s.leases[sidecarOf(method)].current(ctx)
	if err != nil {
		return status.FromContextError(err).Err()
	}
	if ctx.Value(wrongReplica{}) != nil {
		return s.conns[replicas-1-holder].Invoke(ctx, method, args, reply, opts...)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(held, cancel)()
	return s.conns[holder].Invoke(ctx, method, args, reply, opts...)
}

// NewStream implements [grpc.ClientConnInterface]. CSI has no streams.
func (s *sidecars) NewStream(
	context.Context,
	*grpc.StreamDesc,
	string,
	...grpc.CallOption,
) (grpc.ClientStream, error) {
	return nil, status.Error(codes.Unimplemented, "CSI has no streams")
}

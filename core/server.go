// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package core

import (
	"errors"
	"log/slog"
	"net"
	"sync/atomic"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"

	"github.com/oxidecomputer/oxide-csi-plugin/core/keylock"
	"github.com/oxidecomputer/oxide-csi-plugin/core/metrics"
)

// Server serves the CSI services over one unix socket.
type Server struct {
	log        *slog.Logger
	metrics    *metrics.Metrics
	mode       string
	controller csi.ControllerServer
	node       csi.NodeServer
	grpc       *grpc.Server
	locks      *keylock.Locks
	// requests counts the RPCs; its values are the request IDs in the log.
	requests atomic.Uint64
}

// ServerOptions configure a [Server]. Mode, Identity and Log are required. Controller and Node may be nil: their RPCs
// then answer UNIMPLEMENTED and name the mode.
type ServerOptions struct {
	Mode       string
	Identity   *Identity
	Controller csi.ControllerServer
	Node       csi.NodeServer
	// Metrics counts the RPCs. It may be nil.
	Metrics *metrics.Metrics
	Log     *slog.Logger
}

// NewServer returns a server that does not listen yet.
func NewServer(opts ServerOptions) *Server {
	s := &Server{
		log:        opts.Log,
		metrics:    opts.Metrics,
		mode:       opts.Mode,
		controller: opts.Controller,
		node:       opts.Node,
		locks:      keylock.New(),
	}
	s.grpc = grpc.NewServer(grpc.ChainUnaryInterceptor(s.interceptors()...), grpc.ConnectionTimeout(handshakeTimeout))
	csi.RegisterIdentityServer(s.grpc, opts.Identity)
	// Both services are registered in every mode: checkMode refuses the RPCs of the one that is not served.
	if s.controller != nil {
		csi.RegisterControllerServer(s.grpc, s.controller)
	} else {
		csi.RegisterControllerServer(s.grpc, csi.UnimplementedControllerServer{})
	}
	if s.node != nil {
		csi.RegisterNodeServer(s.grpc, s.node)
	} else {
		csi.RegisterNodeServer(s.grpc, csi.UnimplementedNodeServer{})
	}
	return s
}

// handshakeTimeout bounds the time from a client's connect to the end of its HTTP/2 handshake. [Server.Stop] waits for
// unfinished handshakes, so it also bounds that wait.
const handshakeTimeout = 5 * time.Second

// Serve answers RPCs until [Server.Stop] or [Server.StopNow] is called, then removes the socket and returns nil. It
// returns at once if one of them was called before.
func (s *Server) Serve(listener net.Listener) error {
	if err := s.grpc.Serve(listener); !errors.Is(err, grpc.ErrServerStopped) {
		return err
	}
	return nil
}

// Stop rejects new RPCs and blocks until the RPCs in flight are answered.
func (s *Server) Stop() { s.grpc.GracefulStop() }

// StopNow cancels the RPCs in flight.
func (s *Server) StopNow() { s.grpc.Stop() }

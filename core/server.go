// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package core

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"syscall"
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
	requests   requestCounter
}

// ServerOptions are what a [Server] serves. Controller and Node may be nil: their RPCs then answer UNIMPLEMENTED, naming
// the mode.
type ServerOptions struct {
	Mode       string
	Identity   *Identity
	Controller csi.ControllerServer
	Node       csi.NodeServer
	// Metrics counts the RPCs. Nil means nobody does.
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
	// Both are registered in every mode, so that what is not served answers why.
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

// handshakeTimeout is how long a client may take from connecting to its first words. Stopping waits for those who have not
// said any, so it also bounds that.
const handshakeTimeout = 5 * time.Second

// Serve answers RPCs until [Server.Stop] or [Server.StopNow], which may have been called already, then removes the socket and
// returns nil.
func (s *Server) Serve(listener net.Listener) error {
	if err := s.grpc.Serve(listener); !errors.Is(err, grpc.ErrServerStopped) {
		return err
	}
	return nil
}

// Stop refuses new RPCs and returns when those in flight are answered.
func (s *Server) Stop() { s.grpc.GracefulStop() }

// StopNow cancels the RPCs in flight.
func (s *Server) StopNow() { s.grpc.Stop() }

// socketMode lets a group of the operator's choice use the plugin, and nobody else.
const socketMode = 0o660

// dialTimeout is how long a process that listens may take to accept a connection to its own unix socket.
const dialTimeout = 2 * time.Second

// Listen opens the unix socket at path. A socket on which nobody listens any more is replaced; one that is in use is an
// error, and so is anything that is no socket. No other file is put beside it: kubelet watches the folder.
func Listen(path string) (*net.UnixListener, error) {
	if err := clearDeadSocket(path); err != nil {
		return nil, err
	}
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w: check that its folder exists and may be written", path, err)
	}
	if err := os.Chmod(path, socketMode); err != nil {
		return nil, errors.Join(fmt.Errorf("set the mode of %s: %w", path, err), listener.Close())
	}
	return listener, nil
}

func clearDeadSocket(path string) error {
	info, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return fmt.Errorf("look at %s: %w", path, err)
	case info.Mode().Type() != fs.ModeSocket:
		return fmt.Errorf("%s exists and is no socket: remove it, or choose another endpoint", path)
	}
	ctx, cancel := context.WithTimeout(context.Background(), dialTimeout)
	defer cancel()
	conn, err := new(net.Dialer).DialContext(ctx, "unix", path)
	if err == nil {
		return errors.Join(
			fmt.Errorf("%s is in use: another plugin listens on it; stop it, or choose another endpoint", path),
			conn.Close(),
		)
	}
	if !errors.Is(err, syscall.ECONNREFUSED) {
		return fmt.Errorf("%s: cannot tell whether another plugin listens on it: %w", path, err)
	}
	if err := os.Remove(path); err != nil {
		return fmt.Errorf("remove the dead socket %s: %w", path, err)
	}
	return nil
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package kubelet registers the plugin with the kubelet of its node. It replaces the sidecar container
// node-driver-registrar.
//
// The kubelet watches a folder for sockets: /var/lib/kubelet/plugins_registry on most systems. It asks each socket, at
// its start and when a socket appears, for the plugin's name and the path of its CSI socket. Then it asks the plugin
// for its node ID, writes the Node's CSINode object, and reports the result to the socket. When the socket is removed,
// the kubelet removes the registration (kubernetes v1.36.3, pkg/kubelet/pluginmanager).
package kubelet

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"google.golang.org/grpc"
	api "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
	"github.com/oxidecomputer/oxide-csi-plugin/core/socket"
)

// csiVersion is the CSI version that the kubelet gets. The kubelet checks only the major version.
const csiVersion = "1.0.0"

// defaultCheckInterval is the default of [Options.CheckInterval].
const defaultCheckInterval = 10 * time.Second

// handshakeTimeout is how long a client may take for the handshake of a connection.
const handshakeTimeout = 5 * time.Second

// Options holds the paths of the sockets.
type Options struct {
	// Socket is the path, for this process, of the socket in the folder that the kubelet watches.
	Socket string
	// Endpoint is the path, for the kubelet, of the socket on which the plugin serves CSI.
	Endpoint string
	// CheckInterval is the time before a retry after a failure, and between two checks that the socket still exists.
	// Zero means 10 s.
	CheckInterval time.Duration
	Log           *slog.Logger
}

// Registration registers the plugin with the kubelet. A nil Registration is ready and does nothing: it is for a plugin
// that does not register.
type Registration struct {
	options Options

	mu      sync.Mutex
	waiting string // empty if the plugin is registered
}

// New returns a registration. Run starts it.
func New(options Options) *Registration {
	if options.CheckInterval == 0 {
		options.CheckInterval = defaultCheckInterval
	}
	return &Registration{
		options: options,
		waiting: "the kubelet: it has not registered this plugin yet; check that it watches the directory of " + options.Socket,
	}
}

// Ready reports whether the kubelet has registered the plugin. If not, it says why.
func (r *Registration) Ready() (bool, string) {
	if r == nil {
		return true, ""
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.waiting == "", r.waiting
}

// Run keeps the plugin registered until ctx ends, and then removes the socket. The plugin must be able to answer
// NodeGetInfo.
//
// Run retries after a failure, and the plugin continues to serve this node's volumes. Some kubelets register a socket
// only once. So Run creates the socket again after the kubelet has rejected the plugin. node-driver-registrar exits
// instead.
func (r *Registration) Run(ctx context.Context) {
	if r == nil {
		return
	}
	for ctx.Err() == nil {
		err := r.serve(ctx)
		if err == nil {
			continue
		}
		r.failed(err)
		select {
		case <-ctx.Done():
		case <-time.After(r.options.CheckInterval):
		}
	}
}

// serve serves the socket until ctx ends, or until the socket must be created again.
func (r *Registration) serve(ctx context.Context) error {
	listener, err := socket.Listen(r.options.Socket)
	if err != nil {
		return err
	}
	service := &service{
		info: &api.PluginInfo{
			Type:              api.CSIPlugin,
			Name:              rpc.PluginName,
			Endpoint:          r.options.Endpoint,
			SupportedVersions: []string{csiVersion},
		},
		outcomes: make(chan *api.RegistrationStatus),
	}
	server := grpc.NewServer(grpc.ConnectionTimeout(handshakeTimeout), grpc.WaitForHandlers(true))
	api.RegisterRegistrationServer(server, service)
	ended := make(chan struct{})
	var failure error
	go func() {
		defer close(ended)
		failure = server.Serve(listener)
	}()
	defer func() {
		server.Stop()
		<-ended
	}()
	r.options.Log.Info("offering the plugin to the kubelet", "socket", r.options.Socket, "endpoint", r.options.Endpoint)

	check := time.NewTicker(r.options.CheckInterval)
	defer check.Stop()
	rejected := false
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ended:
			return fmt.Errorf("serve the kubelet on %s: %w", r.options.Socket, failure)
		case outcome := <-service.outcomes:
			rejected = !outcome.GetPluginRegistered()
			if rejected {
				r.failed(fmt.Errorf("the kubelet rejects this plugin: %s", outcome.GetError()))
			} else {
				r.registered()
			}
		case <-check.C:
			if err := listener.CheckFile(); err != nil {
				r.failed(fmt.Errorf("registration: %w", err))
				return nil
			}
			if rejected {
				return nil
			}
		}
	}
}

// registered records that the kubelet has registered the plugin.
func (r *Registration) registered() {
	r.set("")
	r.options.Log.Info("the kubelet has registered this plugin")
}

// failed records an error, and logs it if it differs from the last one.
func (r *Registration) failed(err error) {
	if r.set("the kubelet: " + err.Error()) {
		r.options.Log.Error("the plugin is not registered with the kubelet", "error", err, "retry_after",
			r.options.CheckInterval)
	}
}

// set sets the reason that Ready returns.
func (r *Registration) set(waiting string) (changed bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	changed = r.waiting != waiting
	r.waiting = waiting
	return changed
}

// service answers the kubelet's calls.
type service struct {
	api.UnimplementedRegistrationServer
	info     *api.PluginInfo
	outcomes chan *api.RegistrationStatus
}

// GetInfo returns the plugin's name and its CSI socket.
func (s *service) GetInfo(context.Context, *api.InfoRequest) (*api.PluginInfo, error) {
	return s.info, nil
}

// NotifyRegistrationStatus receives the result of the registration.
func (s *service) NotifyRegistrationStatus(
	ctx context.Context,
	outcome *api.RegistrationStatus,
) (*api.RegistrationStatusResponse, error) {
	select {
	case s.outcomes <- outcome:
		return &api.RegistrationStatusResponse{}, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

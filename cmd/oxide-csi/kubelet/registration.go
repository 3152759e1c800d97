// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package kubelet makes the plugin known to the kubelet of its node, as the sidecar node-driver-registrar does for plugins that
// cannot do it themselves.
//
// The kubelet watches a folder, which is /var/lib/kubelet/plugins_registry on most systems, for sockets. Of each that appears, and
// of each that is there when the kubelet starts, it asks what plugin that is, and where that plugin serves CSI; then it asks the
// plugin itself for its node ID, writes the Node's CSINode object, and tells how that went. When the socket goes, so does the
// registration (kubernetes v1.36.3, pkg/kubelet/pluginmanager).
package kubelet

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"sync"
	"time"

	"google.golang.org/grpc"
	api "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/oxidecomputer/oxide-csi-plugin/core"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// csiVersion is the version of CSI that the kubelet is told. It looks at the major version alone.
const csiVersion = "1.0.0"

// lookAgain is the default of [Options.LookAgain].
const lookAgain = 10 * time.Second

// handshakeTimeout is how long a client may take from connecting to its first words.
const handshakeTimeout = 5 * time.Second

// Options say where plugin and kubelet find each other.
type Options struct {
	// Socket is the path, for this process, of the socket in the folder that the kubelet watches.
	Socket string
	// Endpoint is the path, for the kubelet, of the socket on which the plugin serves CSI.
	Endpoint string
	// LookAgain is how long the plugin waits before it tries again what has failed, and how often it sees whether its socket is
	// still there. Zero means 10 s.
	LookAgain time.Duration
	Log       *slog.Logger
}

// Registration offers the plugin to the kubelet. A nil one is for a plugin that no kubelet is to know: it is ready, and does
// nothing.
type Registration struct {
	options Options

	mu      sync.Mutex
	waiting string
}

// New returns a registration that has not begun.
func New(options Options) *Registration {
	if options.LookAgain == 0 {
		options.LookAgain = lookAgain
	}
	return &Registration{
		options: options,
		waiting: "the kubelet: it has not registered this plugin yet, for which it must watch the folder of " + options.Socket,
	}
}

// Ready reports whether the kubelet has registered the plugin, and otherwise what is in the way.
func (r *Registration) Ready() (bool, string) {
	if r == nil {
		return true, ""
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.waiting == "", r.waiting
}

// Run offers the plugin until ctx ends, and then takes the offer back. The plugin must be able to answer NodeGetInfo.
//
// A failure does not end it, nor the plugin, whatever it is: the volumes of this node are served on. The registrar ends when the
// kubelet refuses, so that it is started again and makes its socket anew, as some kubelets register a socket once only. The
// socket alone is made anew here.
func (r *Registration) Run(ctx context.Context) {
	if r == nil {
		return
	}
	for ctx.Err() == nil {
		err := r.offer(ctx)
		if err == nil {
			continue
		}
		r.failed(err)
		select {
		case <-ctx.Done():
		case <-time.After(r.options.LookAgain):
		}
	}
}

// offer serves the socket until ctx ends, or until it is to be made anew.
func (r *Registration) offer(ctx context.Context) error {
	socket, err := listen(r.options.Socket)
	if err != nil {
		return err
	}
	answers := &service{
		info: &api.PluginInfo{
			Type:              api.CSIPlugin,
			Name:              rpc.PluginName,
			Endpoint:          r.options.Endpoint,
			SupportedVersions: []string{csiVersion},
		},
		outcomes: make(chan *api.RegistrationStatus),
	}
	server := grpc.NewServer(grpc.ConnectionTimeout(handshakeTimeout), grpc.WaitForHandlers(true))
	api.RegisterRegistrationServer(server, answers)
	ended := make(chan struct{})
	var failure error
	go func() {
		defer close(ended)
		failure = server.Serve(socket.listener)
	}()
	defer func() {
		socket.leaveToOthers()
		server.Stop()
		<-ended
	}()
	r.options.Log.Info("offering the plugin to the kubelet", "socket", r.options.Socket, "endpoint", r.options.Endpoint)

	look := time.NewTicker(r.options.LookAgain)
	defer look.Stop()
	refused := false
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ended:
			return fmt.Errorf("serve the kubelet on %s: %w", r.options.Socket, failure)
		case outcome := <-answers.outcomes:
			refused = !outcome.GetPluginRegistered()
			if refused {
				r.failed(fmt.Errorf("the kubelet refuses this plugin: %s", outcome.GetError()))
			} else {
				r.registered()
			}
		case <-look.C:
			if !socket.isThere() {
				r.failed(
					fmt.Errorf(
						"%s, by which the kubelet knows this plugin, was removed or replaced: see what else writes there",
						r.options.Socket,
					),
				)
				return nil
			}
			if refused {
				return nil
			}
		}
	}
}

func (r *Registration) registered() {
	r.set("")
	r.options.Log.Info("the kubelet has registered this plugin")
}

// failed logs what is in the way when it is another thing than before.
func (r *Registration) failed(err error) {
	if r.set("the kubelet: " + err.Error()) {
		r.options.Log.Error("the kubelet does not know this plugin", "error", err, "again_after", r.options.LookAgain)
	}
}

func (r *Registration) set(waiting string) (changed bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	changed = r.waiting != waiting
	r.waiting = waiting
	return changed
}

// service answers the kubelet.
type service struct {
	api.UnimplementedRegistrationServer
	info     *api.PluginInfo
	outcomes chan *api.RegistrationStatus
}

// GetInfo says what plugin this is.
func (s *service) GetInfo(context.Context, *api.InfoRequest) (*api.PluginInfo, error) {
	return s.info, nil
}

// NotifyRegistrationStatus is told how the registration went.
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

// socket is a listening one and the file that it made.
type socket struct {
	listener *net.UnixListener
	path     string
	file     fs.FileInfo
}

func listen(path string) (*socket, error) {
	listener, err := core.Listen(path)
	if err != nil {
		return nil, err
	}
	file, err := os.Lstat(path)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("look at the socket just made: %w", err), listener.Close())
	}
	return &socket{listener: listener, path: path, file: file}, nil
}

// isThere reports whether the file is the one that was made. The number of a removed file is soon another's, but not its time.
func (s *socket) isThere() bool {
	file, err := os.Lstat(s.path)
	return err == nil && os.SameFile(file, s.file) && file.ModTime().Equal(s.file.ModTime())
}

// leaveToOthers keeps a file that somebody else has put there from being removed with this socket.
func (s *socket) leaveToOthers() {
	s.listener.SetUnlinkOnClose(s.isThere())
}

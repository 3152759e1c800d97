// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package kubelettest is a fake kubelet for tests of plugin registration. It watches a folder for sockets, and
// registers the plugin behind each socket as kubernetes v1.36.3 does (pkg/kubelet/pluginmanager, pkg/volume/csi).
package kubelettest

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials/insecure"
	api "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

const (
	// dialTimeout, infoTimeout and notifyTimeout are the timeouts of the real kubelet.
	dialTimeout   = 10 * time.Second
	infoTimeout   = time.Second
	notifyTimeout = 5 * time.Second
	// reconcileInterval is one second in the real kubelet. It is shorter here, so that tests are fast.
	reconcileInterval = 10 * time.Millisecond
)

// Options select the behaviour of the kubelet.
type Options struct {
	// Accept stands for the kubelet's own steps: asking the plugin for its node ID, and writing the CSINode object. If
	// it returns an error, the kubelet rejects the plugin. Nil accepts every plugin.
	Accept func(ctx context.Context, info *api.PluginInfo) error
	// TryOnce makes the kubelet try each socket once, as older kubelets do. It tries again only if the socket is
	// created again.
	TryOnce bool
	// OmitStatus makes the kubelet report no result to the plugin, as if it died before.
	OmitStatus bool
}

// Kubelet is a fake kubelet. It runs until Stop.
type Kubelet struct {
	dir     string
	options Options
	watch   *os.File
	cancel  context.CancelFunc
	running sync.WaitGroup

	mu sync.Mutex
	// desired maps the path of each socket in the folder to the number of the event that reported it. tried and actual
	// are the same maps for the sockets that were tried and that are registered.
	desired, tried, actual map[string]int
	events                 int
	plugins                map[string]*api.PluginInfo
	failures               []error
}

// Start starts a kubelet that watches dir. It creates dir if needed, and begins with the sockets that exist there.
func Start(dir string, options Options) (*Kubelet, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("inotify: %w", err)
	}
	k := &Kubelet{
		dir: dir, options: options, watch: os.NewFile(uintptr(fd), "inotify"),
		desired: map[string]int{}, tried: map[string]int{}, actual: map[string]int{}, plugins: map[string]*api.PluginInfo{},
	}
	if _, err := unix.InotifyAddWatch(
		fd,
		dir,
		unix.IN_CREATE|unix.IN_MOVED_TO|unix.IN_DELETE|unix.IN_MOVED_FROM,
	); err != nil {
		return nil, errors.Join(fmt.Errorf("watch %s: %w", dir, err), k.watch.Close())
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, errors.Join(err, k.watch.Close())
	}
	for _, entry := range entries {
		k.added(entry.Name())
	}
	ctx, cancel := context.WithCancel(context.Background())
	k.cancel = cancel
	k.running.Go(k.readEvents)
	k.running.Go(func() { k.reconcile(ctx) })
	return k, nil
}

// Stop ends the kubelet as a kill does: it does not notify the plugins.
func (k *Kubelet) Stop() error {
	k.cancel()
	err := k.watch.Close()
	k.running.Wait()
	return err
}

// Plugin returns the registered plugin whose socket has this name, or nil.
func (k *Kubelet) Plugin(name string) *api.PluginInfo {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.plugins[filepath.Join(k.dir, name)]
}

// SocketEvents returns how many times a socket has appeared in the folder.
func (k *Kubelet) SocketEvents() int {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.events
}

// Failures returns the errors of all failed attempts.
func (k *Kubelet) Failures() []error {
	k.mu.Lock()
	defer k.mu.Unlock()
	return append([]error(nil), k.failures...)
}

// readEvents reads the events of the folder until the watch is closed.
func (k *Kubelet) readEvents() {
	buffer := make([]byte, 64*(unix.SizeofInotifyEvent+unix.NAME_MAX+1))
	for {
		n, err := k.watch.Read(buffer)
		if err != nil {
			return
		}
		for rest := buffer[:n]; len(rest) >= unix.SizeofInotifyEvent; {
			mask, length := binary.NativeEndian.Uint32(rest[4:]), binary.NativeEndian.Uint32(rest[12:])
			end := unix.SizeofInotifyEvent + int(length)
			name := strings.TrimRight(string(rest[unix.SizeofInotifyEvent:end]), "\x00")
			rest = rest[end:]
			if mask&(unix.IN_CREATE|unix.IN_MOVED_TO) != 0 {
				k.added(name)
			} else {
				k.removed(name)
			}
		}
	}
}

func (k *Kubelet) added(name string) {
	path := filepath.Join(k.dir, name)
	info, err := os.Lstat(path)
	if err != nil || info.Mode().Type() != os.ModeSocket || strings.HasPrefix(name, ".") {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.events++
	k.desired[path] = k.events
}

func (k *Kubelet) removed(name string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.desired, filepath.Join(k.dir, name))
}

// reconcile removes and adds registrations, so that they match the sockets in the folder.
func (k *Kubelet) reconcile(ctx context.Context) {
	tick := time.NewTicker(reconcileInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		for path, event := range k.removeAndList() {
			err := k.register(ctx, path, event)
			if err != nil && ctx.Err() == nil {
				k.mu.Lock()
				k.failures = append(k.failures, err)
				k.mu.Unlock()
			}
		}
	}
}

// removeAndList removes the registrations of removed sockets, and returns the sockets to register.
func (k *Kubelet) removeAndList() map[string]int {
	k.mu.Lock()
	defer k.mu.Unlock()
	for path, event := range k.actual {
		if k.desired[path] != event {
			delete(k.actual, path)
			delete(k.plugins, path)
		}
	}
	toRegister := map[string]int{}
	for path, event := range k.desired {
		if k.actual[path] != event && (!k.options.TryOnce || k.tried[path] != event) {
			toRegister[path] = event
		}
	}
	return toRegister
}

func (k *Kubelet) register(ctx context.Context, path string, event int) (err error) {
	conn, err := grpc.NewClient("unix:"+path, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	if err := awaitConnected(ctx, conn); err != nil {
		return fmt.Errorf("connect to %s: %w", path, err)
	}
	client := api.NewRegistrationClient(conn)
	infoCtx, cancel := context.WithTimeout(ctx, infoTimeout)
	defer cancel()
	info, err := client.GetInfo(infoCtx, &api.InfoRequest{})
	if err != nil {
		return fmt.Errorf("GetInfo at %s: %w", path, err)
	}
	rejection := k.validate(ctx, info)
	k.mu.Lock()
	k.tried[path] = event
	k.mu.Unlock()
	if k.options.OmitStatus {
		return nil
	}
	status := &api.RegistrationStatus{PluginRegistered: rejection == nil}
	if rejection != nil {
		status.Error = fmt.Sprintf("RegisterPlugin error -- plugin registration failed with err: %v", rejection)
	}
	notifyCtx, cancel := context.WithTimeout(ctx, notifyTimeout)
	defer cancel()
	if _, err := client.NotifyRegistrationStatus(notifyCtx, status); err != nil || rejection != nil {
		return errors.Join(rejection, err)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.actual[path], k.plugins[path] = event, info
	return nil
}

// awaitConnected connects, and tries again after a refusal, as the kubelet does: a socket's file appears a moment
// before its process listens.
func awaitConnected(ctx context.Context, conn *grpc.ClientConn) error {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	conn.Connect()
	for state := conn.GetState(); state != connectivity.Ready; state = conn.GetState() {
		if !conn.WaitForStateChange(ctx, state) {
			return ctx.Err()
		}
	}
	return nil
}

func (k *Kubelet) validate(ctx context.Context, info *api.PluginInfo) error {
	switch {
	case info.GetType() != api.CSIPlugin:
		return fmt.Errorf("no handler registered for plugin type: %s", info.GetType())
	case len(info.GetSupportedVersions()) == 0 || !strings.HasPrefix(info.GetSupportedVersions()[0], "1."):
		return fmt.Errorf("none of the versions %v is supported", info.GetSupportedVersions())
	case k.options.Accept == nil:
		return nil
	}
	return k.options.Accept(ctx, info)
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package kubelettest is a kubelet as far as it registers plugins: it watches a folder for sockets, and asks, judges and tells each
// as kubernetes v1.36.3 does (pkg/kubelet/pluginmanager, pkg/volume/csi).
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
	"google.golang.org/grpc/credentials/insecure"
	api "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

// The kubelet's own time-outs, and how often it compares what is with what is to be; it does that once a second.
const (
	infoTimeout   = time.Second
	notifyTimeout = 5 * time.Second
	period        = 10 * time.Millisecond
)

// Options say what kubelet it is.
type Options struct {
	// Accept is what the kubelet does with a plugin: ask it for its node ID and write the CSINode object. Its error refuses the
	// plugin. Nil accepts every one.
	Accept func(ctx context.Context, info *api.PluginInfo) error
	// Once is an older kubelet, which tries a socket that it has refused no more until there is another one.
	Once bool
	// TellNobody is a kubelet that dies before it can tell how it went.
	TellNobody bool
}

// Kubelet runs until it is stopped.
type Kubelet struct {
	dir     string
	options Options
	watch   *os.File
	cancel  context.CancelFunc
	running sync.WaitGroup

	mu sync.Mutex
	// desired are the sockets in the folder: path to the number of the event that showed it. tried and actual are the same for
	// those that were tried, and those that are registered.
	desired, tried, actual map[string]int
	events                 int
	plugins                map[string]*api.PluginInfo
	failures               []error
}

// Start begins with the sockets that are in dir, which it makes if it is missing.
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
		k.appeared(entry.Name())
	}
	ctx, cancel := context.WithCancel(context.Background())
	k.cancel = cancel
	k.running.Go(k.read)
	k.running.Go(func() { k.reconcile(ctx) })
	return k, nil
}

// Stop ends the kubelet as if it were killed: no plugin learns of it.
func (k *Kubelet) Stop() error {
	k.cancel()
	err := k.watch.Close()
	k.running.Wait()
	return err
}

// Plugin is the registered plugin whose socket has that name, nil if there is none.
func (k *Kubelet) Plugin(name string) *api.PluginInfo {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.plugins[filepath.Join(k.dir, name)]
}

// Appeared is how often a socket appeared in the folder.
func (k *Kubelet) Appeared() int {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.events
}

// Failures are those of all attempts so far.
func (k *Kubelet) Failures() []error {
	k.mu.Lock()
	defer k.mu.Unlock()
	return append([]error(nil), k.failures...)
}

// read follows the folder until the watch is closed.
func (k *Kubelet) read() {
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
				k.appeared(name)
			} else {
				k.vanished(name)
			}
		}
	}
}

func (k *Kubelet) appeared(name string) {
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

func (k *Kubelet) vanished(name string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.desired, filepath.Join(k.dir, name))
}

// reconcile removes what is to go, and then registers what is to be.
func (k *Kubelet) reconcile(ctx context.Context) {
	tick := time.NewTicker(period)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		for path, event := range k.due() {
			err := k.register(ctx, path, event)
			if err != nil && ctx.Err() == nil {
				k.mu.Lock()
				k.failures = append(k.failures, err)
				k.mu.Unlock()
			}
		}
	}
}

func (k *Kubelet) due() map[string]int {
	k.mu.Lock()
	defer k.mu.Unlock()
	for path, event := range k.actual {
		if k.desired[path] != event {
			delete(k.actual, path)
			delete(k.plugins, path)
		}
	}
	due := map[string]int{}
	for path, event := range k.desired {
		if k.actual[path] != event && (!k.options.Once || k.tried[path] != event) {
			due[path] = event
		}
	}
	return due
}

func (k *Kubelet) register(ctx context.Context, path string, event int) (err error) {
	conn, err := grpc.NewClient("unix:"+path, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	client := api.NewRegistrationClient(conn)
	asking, cancel := context.WithTimeout(ctx, infoTimeout)
	defer cancel()
	info, err := client.GetInfo(asking, &api.InfoRequest{})
	if err != nil {
		return fmt.Errorf("GetInfo at %s: %w", path, err)
	}
	refusal := k.judge(ctx, info)
	k.mu.Lock()
	k.tried[path] = event
	k.mu.Unlock()
	if k.options.TellNobody {
		return nil
	}
	status := &api.RegistrationStatus{PluginRegistered: refusal == nil}
	if refusal != nil {
		status.Error = fmt.Sprintf("RegisterPlugin error -- plugin registration failed with err: %v", refusal)
	}
	telling, cancel := context.WithTimeout(ctx, notifyTimeout)
	defer cancel()
	if _, err := client.NotifyRegistrationStatus(telling, status); err != nil || refusal != nil {
		return errors.Join(refusal, err)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.actual[path], k.plugins[path] = event, info
	return nil
}

func (k *Kubelet) judge(ctx context.Context, info *api.PluginInfo) error {
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

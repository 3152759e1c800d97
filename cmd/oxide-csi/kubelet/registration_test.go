// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package kubelet_test

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/testing/protocmp"
	api "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/oxidecomputer/oxide-csi-plugin/cmd/oxide-csi/kubelet"
	"github.com/oxidecomputer/oxide-csi-plugin/cmd/oxide-csi/kubelet/kubelettest"
	"github.com/oxidecomputer/oxide-csi-plugin/test/await"
)

const (
	socketName = "p-reg.sock"
	endpoint   = "/var/lib/kubelet/plugins/csi.oxide.computer/csi.sock"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// shortDir creates a folder with a short path, because the path of a socket has at most 107 bytes.
func shortDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "reg")
	must(t, err)
	t.Cleanup(func() { must(t, os.RemoveAll(dir)) })
	return dir
}

// lockedLog is a log that can be read while it is written.
type lockedLog struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *lockedLog) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *lockedLog) count(line string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Count(l.text.String(), line)
}

// running is a running registration. It ends with the test at the latest.
type running struct {
	*kubelet.Registration
	dir, socket string
	log         *lockedLog
	end         func()
}

// run starts a registration whose socket is in dir.
func run(t *testing.T, dir string, checkInterval time.Duration) *running {
	t.Helper()
	before := runtime.NumGoroutine()
	r := &running{dir: dir, socket: filepath.Join(dir, socketName), log: &lockedLog{}}
	r.Registration = kubelet.New(kubelet.Options{
		Socket: r.socket, Endpoint: endpoint, CheckInterval: checkInterval, Log: slog.New(slog.NewTextHandler(r.log, nil)),
	})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		r.Run(ctx)
	}()
	r.end = sync.OnceFunc(func() {
		cancel()
		<-ended
	})
	t.Cleanup(func() {
		r.end()
		await.Eventually(t, "no goroutine is left", func() bool { return runtime.NumGoroutine() <= before })
	})
	return r
}

func startKubelet(t *testing.T, dir string, options kubelettest.Options) (k *kubelettest.Kubelet, stop func()) {
	t.Helper()
	k, err := kubelettest.Start(dir, options)
	must(t, err)
	stop = sync.OnceFunc(func() { must(t, k.Stop()) })
	t.Cleanup(stop)
	return k, stop
}

// awaitReady waits until the kubelet has registered the plugin and the plugin is ready.
func (r *running) awaitReady(t *testing.T, k *kubelettest.Kubelet) {
	t.Helper()
	await.Eventually(t, "the plugin is registered", func() bool {
		ready, _ := r.Ready()
		return ready && k.Plugin(socketName) != nil
	})
}

// awaitReason waits until the plugin is not ready with a reason that contains the text.
func (r *running) awaitReason(t *testing.T, text string) {
	t.Helper()
	await.Eventually(t, "the plugin is not ready because of "+text, func() bool {
		ready, waiting := r.Ready()
		return !ready && strings.Contains(waiting, text)
	})
}

// deadSocket creates a socket without a listener, as a killed process leaves it.
func deadSocket(t *testing.T, path string) {
	t.Helper()
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	must(t, err)
	listener.SetUnlinkOnClose(false)
	must(t, listener.Close())
}

func TestRegistration(t *testing.T) {
	for name, before := range map[string]func(t *testing.T, dir string){
		"an empty folder": func(*testing.T, string) {},
		"a dead socket":   func(t *testing.T, dir string) { deadSocket(t, filepath.Join(dir, socketName)) },
	} {
		t.Run(name, func(t *testing.T) {
			dir := shortDir(t)
			before(t, dir)
			k, _ := startKubelet(t, dir, kubelettest.Options{})
			r := run(t, dir, 0)
			r.awaitReady(t, k)
			want := &api.PluginInfo{
				Type:              "CSIPlugin",
				Name:              "csi.oxide.computer",
				Endpoint:          endpoint,
				SupportedVersions: []string{"1.0.0"},
			}
			if diff := cmp.Diff(want, k.Plugin(socketName), protocmp.Transform()); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
			if info, err := os.Lstat(r.socket); err != nil || info.Mode() != fs.ModeSocket|0o660 {
				t.Errorf("%v, %v: want a socket with mode 0660", info, err)
			}
			if entries, err := os.ReadDir(dir); err != nil || len(entries) != 1 {
				t.Errorf("%v, %v: want only the socket", entries, err)
			}
			r.end()
			if _, err := os.Lstat(r.socket); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("the socket was not removed: %v", err)
			}
			await.Eventually(t, "the kubelet removes the registration", func() bool { return k.Plugin(socketName) == nil })
		})
	}
}

func TestNotReadyWithoutAKubelet(t *testing.T) {
	dir := shortDir(t)
	r := run(t, dir, time.Millisecond)
	r.awaitReason(t, "has not registered this plugin yet")
	await.Eventually(t, "the socket exists", func() bool { _, err := os.Lstat(r.socket); return err == nil })
	r.awaitReason(t, "watches the directory of "+r.socket)
	k, _ := startKubelet(t, dir, kubelettest.Options{})
	r.awaitReady(t, k)
}

// A restarted kubelet finds the socket of the running plugin, even if the previous kubelet never reported a result.
func TestKubeletRestarts(t *testing.T) {
	dir := shortDir(t)
	_, stop := startKubelet(t, dir, kubelettest.Options{OmitStatus: true})
	r := run(t, dir, 0)
	await.Eventually(t, "the socket exists", func() bool { _, err := os.Lstat(r.socket); return err == nil })
	stop()
	for round := range 3 {
		k, stop := startKubelet(t, dir, kubelettest.Options{})
		r.awaitReady(t, k)
		await.Eventually(
			t,
			"the registration is logged",
			func() bool { return r.log.count("the kubelet has registered this plugin") == round+1 },
		)
		if k.SocketEvents() != 1 {
			t.Errorf("the socket appeared %d times, want once", k.SocketEvents())
		}
		stop()
	}
}

// If the kubelet rejects the plugin, Ready and the log give the reason. The plugin is registered when the kubelet
// accepts it, also by a kubelet that tries each socket only once.
func TestRejection(t *testing.T) {
	for name, once := range map[string]bool{"the kubelet retries": false, "the kubelet tries each socket once": true} {
		t.Run(name, func(t *testing.T) {
			dir := shortDir(t)
			var reason atomic.Value
			reason.Store("CSINode: server is down")
			k, _ := startKubelet(
				t,
				dir,
				kubelettest.Options{TryOnce: once, Accept: func(context.Context, *api.PluginInfo) error {
					if text := reason.Load().(string); text != "" {
						return errors.New(text)
					}
					return nil
				}},
			)
			pause := time.Hour
			if once {
				pause = 50 * time.Millisecond
			}
			r := run(t, dir, pause)
			r.awaitReason(t, "server is down")
			await.Eventually(t, "the kubelet has tried three times", func() bool { return len(k.Failures()) >= 3 })
			if n := r.log.count("server is down"); n != 1 {
				t.Errorf("the log has the reason %d times, want once", n)
			}
			if again := k.SocketEvents() > 1; again != once {
				t.Errorf("the socket appeared %d times", k.SocketEvents())
			}
			reason.Store("node ID differs")
			r.awaitReason(t, "node ID differs")
			reason.Store("")
			r.awaitReady(t, k)
		})
	}
}

// If the socket cannot be created, Ready gives the reason. The registration succeeds when the obstacle is removed.
func TestSocketCannotBeCreated(t *testing.T) {
	for _, test := range []struct {
		name   string
		put    func(t *testing.T, r string) (remove func())
		reason string
	}{
		{"missing folder", func(t *testing.T, socket string) func() {
			must(t, os.Remove(filepath.Dir(socket)))
			return func() {} // the kubelet creates the folder
		}, "check that its directory exists"},
		{"a file that is no socket", func(t *testing.T, socket string) func() {
			must(t, os.WriteFile(socket, []byte("precious"), 0o600))
			return func() {
				if text, err := os.ReadFile(socket); err != nil || string(text) != "precious" {
					t.Errorf("%q, %v", text, err)
				}
				must(t, os.Remove(socket))
			}
		}, "is not a socket"},
		{"another registrar", func(t *testing.T, socket string) func() {
			listener, err := net.Listen("unix", socket)
			must(t, err)
			server := grpc.NewServer()
			go func() { _ = server.Serve(listener) }() // it ends with the test
			return server.Stop
		}, "is in use"},
	} {
		t.Run(test.name, func(t *testing.T) {
			dir := filepath.Join(shortDir(t), "plugins_registry")
			must(t, os.Mkdir(dir, 0o755))
			remove := test.put(t, filepath.Join(dir, socketName))
			r := run(t, dir, 20*time.Millisecond)
			r.awaitReason(t, test.reason)
			remove()
			k, _ := startKubelet(t, dir, kubelettest.Options{})
			r.awaitReady(t, k)
		})
	}
}

func TestRemovedSocketIsCreatedAgain(t *testing.T) {
	dir := shortDir(t)
	k, _ := startKubelet(t, dir, kubelettest.Options{})
	r := run(t, dir, 50*time.Millisecond)
	r.awaitReady(t, k)
	must(t, os.Remove(r.socket))
	await.Eventually(t, "the removal is logged", func() bool { return r.log.count("was removed or replaced") == 1 })
	r.awaitReady(t, k)
}

// A socket that replaces the plugin's socket is not removed when the plugin ends, with or without a check in between.
func TestSocketReplaced(t *testing.T) {
	for name, checked := range map[string]bool{"after a check": true, "before a check": false} {
		t.Run(name, func(t *testing.T) {
			dir := shortDir(t)
			k, stop := startKubelet(t, dir, kubelettest.Options{})
			defer stop() // it would connect to the other socket again and again
			pause := time.Hour
			if checked {
				pause = 20 * time.Millisecond
			}
			r := run(t, dir, pause)
			r.awaitReady(t, k)
			hidden := filepath.Join(dir, ".other")
			other, err := net.ListenUnix("unix", &net.UnixAddr{Name: hidden, Net: "unix"})
			must(t, err)
			other.SetUnlinkOnClose(false)
			must(t, os.Rename(hidden, r.socket))
			server := grpc.NewServer()
			go func() { _ = server.Serve(other) }() // it ends with the test
			defer server.Stop()
			if checked {
				r.awaitReason(t, "is in use")
			}
			r.end()
			if _, err := os.Lstat(r.socket); err != nil {
				t.Errorf("the other socket was removed: %v", err)
			}
		})
	}
}

// A registration whose context has ended leaves no files. A nil registration is ready.
func TestNoRegistration(t *testing.T) {
	dir := shortDir(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	kubelet.New(kubelet.Options{Socket: filepath.Join(dir, socketName), Log: slog.New(slog.DiscardHandler)}).Run(ctx)
	if entries, err := os.ReadDir(dir); err != nil || len(entries) > 0 {
		t.Errorf("%v, %v", entries, err)
	}
	var none *kubelet.Registration
	none.Run(t.Context())
	if ready, waiting := none.Ready(); !ready || waiting != "" {
		t.Errorf("not ready: %q", waiting)
	}
}

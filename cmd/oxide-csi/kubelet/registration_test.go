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
	"google.golang.org/protobuf/testing/protocmp"
	api "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/oxidecomputer/oxide-csi-plugin/cmd/oxide-csi/kubelet"
	"github.com/oxidecomputer/oxide-csi-plugin/cmd/oxide-csi/kubelet/kubelettest"
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

func eventually(t *testing.T, what string, done func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !done(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("in vain: %s", what)
		}
	}
}

// shortDir is a folder whose path leaves room for a socket's name.
func shortDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "reg")
	must(t, err)
	t.Cleanup(func() { must(t, os.RemoveAll(dir)) })
	return dir
}

// logBook is a log that can be read while it is written.
type logBook struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *logBook) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *logBook) count(line string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Count(l.text.String(), line)
}

// rig is a registration that runs, for as long as the test does where that does not end it.
type rig struct {
	*kubelet.Registration
	dir, socket string
	log         *logBook
	end         func()
}

// run runs a registration that looks again so soon, beginning with what is in dir.
func run(t *testing.T, dir string, lookAgain time.Duration) *rig {
	t.Helper()
	before := runtime.NumGoroutine()
	r := &rig{dir: dir, socket: filepath.Join(dir, socketName), log: &logBook{}}
	r.Registration = kubelet.New(kubelet.Options{
		Socket: r.socket, Endpoint: endpoint, CheckInterval: lookAgain, Log: slog.New(slog.NewTextHandler(r.log, nil)),
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
		eventually(t, "no goroutine is left", func() bool { return runtime.NumGoroutine() <= before })
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

// awaitReady waits until a kubelet has the plugin and the plugin knows.
func (r *rig) awaitReady(t *testing.T, k *kubelettest.Kubelet) {
	t.Helper()
	eventually(t, "the plugin is registered", func() bool {
		ready, _ := r.Ready()
		return ready && k.Plugin(socketName) != nil
	})
}

// awaitTrouble waits until the plugin says that it is not ready, and mentions this.
func (r *rig) awaitTrouble(t *testing.T, mention string) {
	t.Helper()
	eventually(t, "the plugin says "+mention, func() bool {
		ready, waiting := r.Ready()
		return !ready && strings.Contains(waiting, mention)
	})
}

// deadSocket leaves a socket as a killed process does.
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
				t.Errorf("%v, %v: want nothing beside the socket", entries, err)
			}
			r.end()
			if _, err := os.Lstat(r.socket); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("the socket is still there: %v", err)
			}
			eventually(t, "the kubelet forgets the plugin", func() bool { return k.Plugin(socketName) == nil })
		})
	}
}

// A plugin that waits for the kubelet says so.
func TestNotReadyWithoutAKubelet(t *testing.T) {
	dir := shortDir(t)
	r := run(t, dir, time.Millisecond)
	r.awaitTrouble(t, "has not registered this plugin yet")
	eventually(t, "the socket is there", func() bool { _, err := os.Lstat(r.socket); return err == nil })
	r.awaitTrouble(t, "watches the folder of "+r.socket)
	k, _ := startKubelet(t, dir, kubelettest.Options{})
	r.awaitReady(t, k)
}

// The next kubelet finds the socket of the plugin that runs on, whether or not the one before has ever told how it
// went.
func TestKubeletRestarts(t *testing.T) {
	dir := shortDir(t)
	_, stop := startKubelet(t, dir, kubelettest.Options{OmitStatus: true})
	r := run(t, dir, 0)
	eventually(t, "the plugin is offered", func() bool { _, err := os.Lstat(r.socket); return err == nil })
	stop()
	for round := range 3 {
		k, stop := startKubelet(t, dir, kubelettest.Options{})
		r.awaitReady(t, k)
		eventually(
			t,
			"each is logged",
			func() bool { return r.log.count("the kubelet has registered this plugin") == round+1 },
		)
		if k.SocketEvents() != 1 {
			t.Errorf("the socket appeared %d times, want once", k.SocketEvents())
		}
		stop()
	}
}

// A refusal is told and does not end the plugin, which is registered as soon as what is in the way has gone: by a
// kubelet that tries again itself, and by one that does so only with another socket.
func TestRefusal(t *testing.T) {
	for name, once := range map[string]bool{"a kubelet that tries again": false, "a kubelet that tries once": true} {
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
			r.awaitTrouble(t, "server is down")
			eventually(t, "it is tried again", func() bool { return len(k.Failures()) >= 3 })
			if n := r.log.count("server is down"); n != 1 {
				t.Errorf("the log says it %d times, want once", n)
			}
			if again := k.SocketEvents() > 1; again != once {
				t.Errorf("the socket appeared %d times", k.SocketEvents())
			}
			reason.Store("node ID differs")
			r.awaitTrouble(t, "node ID differs")
			reason.Store("")
			r.awaitReady(t, k)
		})
	}
}

// What is in the way of the socket is told, and does not stay in the way once it has gone.
func TestWhatIsInTheWay(t *testing.T) {
	for _, test := range []struct {
		name string
		put  func(t *testing.T, r string) (remove func())
		says string
	}{
		{"no folder", func(t *testing.T, socket string) func() {
			must(t, os.Remove(filepath.Dir(socket)))
			return func() {} // the kubelet makes it
		}, "check that its folder exists"},
		{"no socket", func(t *testing.T, socket string) func() {
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
			return func() { must(t, listener.Close()) }
		}, "is in use"},
	} {
		t.Run(test.name, func(t *testing.T) {
			dir := filepath.Join(shortDir(t), "plugins_registry")
			must(t, os.Mkdir(dir, 0o755))
			remove := test.put(t, filepath.Join(dir, socketName))
			r := run(t, dir, 20*time.Millisecond)
			r.awaitTrouble(t, test.says)
			remove()
			k, _ := startKubelet(t, dir, kubelettest.Options{})
			r.awaitReady(t, k)
		})
	}
}

// A socket that somebody removes is made again.
func TestSocketRemoved(t *testing.T) {
	dir := shortDir(t)
	k, _ := startKubelet(t, dir, kubelettest.Options{})
	r := run(t, dir, 50*time.Millisecond)
	r.awaitReady(t, k)
	must(t, os.Remove(r.socket))
	eventually(t, "the loss is logged", func() bool { return r.log.count("was removed or replaced") == 1 })
	r.awaitReady(t, k)
}

// A socket that somebody puts in its place is left alone, whether the plugin has seen it by the time it ends or not.
func TestSocketReplaced(t *testing.T) {
	for name, seen := range map[string]bool{"seen": true, "not seen": false} {
		t.Run(name, func(t *testing.T) {
			dir := shortDir(t)
			k, _ := startKubelet(t, dir, kubelettest.Options{})
			pause := time.Hour
			if seen {
				pause = 20 * time.Millisecond
			}
			r := run(t, dir, pause)
			r.awaitReady(t, k)
			hidden := filepath.Join(dir, ".other")
			other, err := net.ListenUnix("unix", &net.UnixAddr{Name: hidden, Net: "unix"})
			must(t, err)
			defer func() { must(t, other.Close()) }()
			other.SetUnlinkOnClose(false)
			must(t, os.Rename(hidden, r.socket))
			if seen {
				r.awaitTrouble(t, "is in use")
			}
			r.end()
			if _, err := os.Lstat(r.socket); err != nil {
				t.Errorf("the other's socket has gone: %v", err)
			}
		})
	}
}

// What ends before it has begun leaves nothing, and a plugin that no kubelet is to know is ready.
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

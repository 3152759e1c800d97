// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package socket_test

import (
	"context"
	"errors"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/core"
	"github.com/oxidecomputer/oxide-csi-plugin/core/socket"
	"github.com/oxidecomputer/oxide-csi-plugin/test/coretest"
)

// answerDelay is how long a busy plugin of TestListen accepts no connections. Listen tries again meanwhile. This is
// real time, because nothing shows that Listen has tried.
const answerDelay = 100 * time.Millisecond

func TestListen(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name string
		// prepare creates a file at the path.
		prepare func(t *testing.T, path string)
		// rejected is a text in the error.
		rejected string
	}{
		{name: "no file", prepare: func(*testing.T, string) {}},
		{name: "a stale socket", prepare: staleSocket},
		{name: "a socket on which a killed process with a hung thread listens", prepare: func(t *testing.T, path string) {
			silentSocket(t, path)
		}},
		{name: "the same with a full queue", prepare: func(t *testing.T, path string) { fillQueue(t, silentSocket(t, path)) }},
		{name: "a socket of a process that is just ending", prepare: func(t *testing.T, path string) {
			ending, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
			coretest.Must(t, err)
			ending.SetUnlinkOnClose(false)
			go func() {
				conn, err := ending.Accept()
				if err == nil {
					err = errors.Join(ending.Close(), conn.Close())
				}
				if err != nil {
					t.Error(err)
				}
			}()
		}},
		{name: "a busy plugin with a full queue", rejected: "is in use", prepare: func(t *testing.T, path string) {
			other := shortQueue(t, path)
			fillQueue(t, path)
			server := &http.Server{Handler: http.NotFoundHandler()}
			time.AfterFunc(answerDelay, func() { _ = server.Serve(other) }) // it ends with the test
			t.Cleanup(func() { coretest.Must(t, server.Close()) })
		}},
		{name: "a socket of a program that is no CSI plugin", rejected: "is in use", prepare: func(t *testing.T, path string) {
			other, err := net.Listen("unix", path)
			coretest.Must(t, err)
			server := &http.Server{Handler: http.NotFoundHandler()}
			go func() { _ = server.Serve(other) }() // it ends with the test
			t.Cleanup(func() { coretest.Must(t, server.Close()) })
		}},
		{name: "a file", rejected: "is not a socket", prepare: func(t *testing.T, path string) {
			coretest.Must(t, os.WriteFile(path, []byte("precious"), 0o600))
		}},
		{name: "an empty file", rejected: "is not a socket", prepare: func(t *testing.T, path string) {
			coretest.Must(t, os.WriteFile(path, nil, 0o600))
		}},
		{name: "a folder", rejected: "is not a socket", prepare: func(t *testing.T, path string) {
			coretest.Must(t, os.Mkdir(path, 0o700))
		}},
		{name: "a link to a stale socket", rejected: "is not a socket", prepare: func(t *testing.T, path string) {
			staleSocket(t, path+"-elsewhere")
			coretest.Must(t, os.Symlink(path+"-elsewhere", path))
		}},
		{name: "a link to nothing", rejected: "is not a socket", prepare: func(t *testing.T, path string) {
			coretest.Must(t, os.Symlink(path+"-elsewhere", path))
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			dir := coretest.ShortDir(t)
			path := filepath.Join(dir, "csi.sock")
			test.prepare(t, path)
			before := coretest.Listing(t, dir)
			listener, err := socket.Listen(path)
			if test.rejected != "" {
				if err == nil || !strings.Contains(err.Error(), test.rejected) || !strings.Contains(err.Error(), path) {
					t.Errorf("error %v, want one with the path and %q", err, test.rejected)
				}
				if diff := cmp.Diff(before, coretest.Listing(t, dir)); diff != "" {
					t.Errorf("the folder changed (-before +after):\n%s", diff)
				}
				return
			}
			coretest.Must(t, err)
			if info, err := os.Lstat(path); err != nil || info.Mode() != fs.ModeSocket|0o660 {
				t.Errorf("socket %v, %v; want mode 0660", info.Mode(), err)
			}
			if entries := coretest.Listing(t, dir); len(entries) != 1 {
				t.Errorf("files beside the socket: %v", entries)
			}
			accepted := make(chan error, 1)
			go func() {
				conn, err := listener.Accept()
				if err == nil {
					err = conn.Close()
				}
				accepted <- err
			}()
			conn, err := net.Dial("unix", path)
			coretest.Must(t, err)
			coretest.Must(t, errors.Join(conn.Close(), <-accepted, listener.Close()))
			if entries := coretest.Listing(t, dir); len(entries) != 0 {
				t.Errorf("files after the close: %v", entries)
			}
		})
	}
	t.Run("the process that uses the socket is not disturbed", func(t *testing.T) {
		conn, path := coretest.Serve(t, core.NewServer(coretest.ServerOptions("all")))
		if _, err := socket.Listen(path); err == nil {
			t.Fatal("a socket in use was taken")
		}
		if _, err := csi.NewIdentityClient(conn).Probe(t.Context(), &csi.ProbeRequest{}); err != nil {
			t.Error(err)
		}
		fresh, err := grpc.NewClient("unix://"+path, grpc.WithTransportCredentials(insecure.NewCredentials()))
		coretest.Must(t, err)
		defer func() { coretest.Must(t, fresh.Close()) }()
		if _, err := csi.NewIdentityClient(fresh).Probe(t.Context(), &csi.ProbeRequest{}); err != nil {
			t.Error(err)
		}
	})
	t.Run("missing folder", func(t *testing.T) {
		path := filepath.Join(coretest.ShortDir(t), "missing", "csi.sock")
		if _, err := socket.Listen(
			path,
		); err == nil || !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), path) ||
			!strings.Contains(err.Error(), "directory exists") {
			t.Errorf("error %v", err)
		}
	})
}

// silentSocket listens on a socket and accepts no connection. It returns the path.
func silentSocket(t *testing.T, path string) string {
	t.Helper()
	other, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	coretest.Must(t, err)
	other.SetUnlinkOnClose(false) // as the kernel closes it
	t.Cleanup(func() { coretest.Must(t, other.Close()) })
	return path
}

// shortQueue listens on a socket whose queue is full after a few connections, so that a server has soon accepted them.
func shortQueue(t *testing.T, path string) net.Listener {
	t.Helper()
	fd, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	coretest.Must(t, err)
	file := os.NewFile(uintptr(fd), path)
	defer file.Close()
	coretest.Must(t, syscall.Bind(fd, &syscall.SockaddrUnix{Name: path}))
	coretest.Must(t, syscall.Listen(fd, 1))
	listener, err := net.FileListener(file)
	coretest.Must(t, err)
	return listener
}

// fillQueue connects to a socket until its queue is full.
func fillQueue(t *testing.T, path string) {
	t.Helper()
	for {
		conn, err := net.Dial("unix", path)
		if errors.Is(err, syscall.EAGAIN) {
			return
		}
		coretest.Must(t, err)
		t.Cleanup(func() { coretest.Must(t, conn.Close()) })
	}
}

// A socket whose file was removed or replaced reaches this process no longer. Closing it keeps the other's file.
func TestSocketThatLostItsFile(t *testing.T) {
	for name, lose := range map[string]func(t *testing.T, path string){
		"removed": func(t *testing.T, path string) { coretest.Must(t, os.Remove(path)) },
		"replaced": func(t *testing.T, path string) {
			coretest.Must(t, os.Remove(path))
			coretest.Must(t, os.WriteFile(path, []byte("precious"), 0o600))
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := coretest.ShortDir(t)
			path := filepath.Join(dir, "csi.sock")
			listener, err := socket.Listen(path)
			coretest.Must(t, err)
			server := core.NewServer(coretest.ServerOptions("node"))
			served := make(chan error, 1)
			go func() { served <- server.Serve(listener) }()
			if err := listener.CheckLive(t.Context()); err != nil {
				t.Errorf("a good socket: %v", err)
			}
			lose(t, path)
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second) // less than between two looks
			defer cancel()
			if listener.WaitForChange(ctx); ctx.Err() != nil {
				t.Error("the kernel does not tell that the file was removed or replaced")
			}
			before := coretest.Listing(t, dir)
			if err := listener.CheckLive(t.Context()); err == nil || !strings.Contains(err.Error(), path) {
				t.Errorf("%v, want an error with the path", err)
			}
			server.StopNow()
			coretest.Must(t, <-served)
			if diff := cmp.Diff(before, coretest.Listing(t, dir)); diff != "" {
				t.Errorf("the folder changed (-before +after):\n%s", diff)
			}
		})
	}
}

// A server that does not answer is not live.
func TestSocketThatDoesNotAnswer(t *testing.T) {
	t.Parallel()
	listener, err := socket.Listen(filepath.Join(coretest.ShortDir(t), "csi.sock"))
	coretest.Must(t, err)
	defer func() { coretest.Must(t, listener.Close()) }()
	if err := listener.CheckLive(t.Context()); status.Code(errors.Unwrap(err)) != codes.DeadlineExceeded {
		t.Errorf("%v, want that no RPC is answered in time", err)
	}
}

// staleSocket leaves a socket behind, as a killed process does.
func staleSocket(t *testing.T, path string) {
	t.Helper()
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	coretest.Must(t, err)
	listener.SetUnlinkOnClose(false)
	coretest.Must(t, listener.Close())
}

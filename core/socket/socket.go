// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package socket listens on a unix socket as a CSI plugin must: it takes the place of a process that died, and knows
// when its own file is lost.
package socket

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"syscall"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
)

const (
	// mode allows access to the owner and the group only. The operator chooses the group.
	mode = 0o660
	// answerTimeout is how long a plugin may take to answer an RPC on its socket.
	answerTimeout = 2 * time.Second
	// dialInterval is the time between two attempts to connect to a socket with a full queue.
	dialInterval = 50 * time.Millisecond
	// watchedInterval is how often the socket's file is looked at while the kernel watches it, and unwatchedInterval
	// without that.
	watchedInterval, unwatchedInterval = 20 * time.Second, time.Second
)

// Listener is a unix socket on which this process listens.
type Listener struct {
	*net.UnixListener
	// TookOver says that a process had the socket that no longer answers.
	TookOver bool

	path string
	file fs.FileInfo
	// watch is told by the kernel when the file is removed or replaced. It is nil if the kernel watches nothing more.
	watch *os.File
}

// Listen opens the unix socket at path. It replaces a socket on which no process answers: a process whose thread waits
// for a disk keeps its sockets after SIGKILL. A socket in use and a file that is not a socket are errors. Listen
// creates no other file in the folder, because kubelet watches the folder.
func Listen(path string) (*Listener, error) {
	tookOver, err := removeDeadSocket(path)
	if err != nil {
		return nil, err
	}
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w: check that its directory exists and is writable", path, err)
	}
	l := &Listener{UnixListener: listener, TookOver: tookOver, path: path}
	if err := os.Chmod(path, mode); err != nil {
		return nil, errors.Join(fmt.Errorf("set the mode of %s: %w", path, err), listener.Close())
	}
	if l.file, err = os.Lstat(path); err != nil {
		return nil, errors.Join(fmt.Errorf("stat the new socket %s: %w", path, err), listener.Close())
	}
	listener.SetUnlinkOnClose(false) // Close decides
	l.watch = watchFile(path)
	return l, nil
}

// WaitForChange returns when the socket's file may have been removed or replaced, or when ctx ends. It looks from time
// to time, too: the kernel says nothing when a folder above is renamed or covered.
func (l *Listener) WaitForChange(ctx context.Context) {
	if l.watch != nil && l.watch.SetReadDeadline(time.Now().Add(watchedInterval)) == nil {
		defer context.AfterFunc(ctx, func() { _ = l.watch.SetReadDeadline(time.Now()) })()
		// What the event says does not matter.
		if _, err := l.watch.Read(make([]byte, 4096)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
			return
		}
	}
	select {
	case <-ctx.Done():
	case <-time.After(unwatchedInterval):
	}
}

// CheckFile returns an error if the socket's file was removed or replaced, so that no client reaches this process.
func (l *Listener) CheckFile() error {
	// The kernel does not use the number of the inode again while the socket is open.
	if file, err := os.Lstat(l.path); err != nil || !os.SameFile(file, l.file) {
		return fmt.Errorf("the socket %s was removed or replaced: check which other process writes there", l.path)
	}
	return nil
}

// CheckLive returns an error if a client cannot reach this process by the socket's file, or if an RPC is not answered
// within 2 s.
func (l *Listener) CheckLive(ctx context.Context) error {
	if err := l.CheckFile(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	conn, err := new(net.Dialer).DialContext(ctx, "unix", l.path)
	if err == nil {
		err = ask(ctx, conn)
	}
	if err != nil {
		return fmt.Errorf("no RPC gets a response on %s: %w", l.path, err)
	}
	return nil
}

// Close stops listening. It removes the file, unless the file belongs to another process.
func (l *Listener) Close() error {
	var err error
	if l.CheckFile() == nil {
		err = os.Remove(l.path)
	}
	if l.watch != nil {
		_ = l.watch.Close() // nothing was written
	}
	return errors.Join(err, l.UnixListener.Close())
}

// removeDeadSocket removes a socket on which no process answers. tookOver says that a process still has it open.
func removeDeadSocket(path string) (tookOver bool, err error) {
	info, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return false, nil
	case err != nil:
		return false, fmt.Errorf("stat %s: %w", path, err)
	case info.Mode().Type() != fs.ModeSocket:
		return false, fmt.Errorf("%s exists and is not a socket: remove it, or choose another endpoint", path)
	}
	open, answers, err := stateOf(path)
	if err != nil {
		return false, fmt.Errorf("%s: cannot find out whether another plugin listens on it: %w", path, err)
	}
	if answers {
		return false, fmt.Errorf("%s is in use: another plugin listens on it; stop it, or choose another endpoint", path)
	}
	if err := os.Remove(path); err != nil {
		return false, fmt.Errorf("remove the dead socket %s: %w", path, err)
	}
	return open, nil
}

// stateOf reports whether a process has the socket open, and whether this process answers within 2 s. Every answer
// counts, also an error: the process may be no CSI plugin. If the connection ends, the process may be ending, too: then
// stateOf looks again.
func stateOf(path string) (open, answers bool, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), answerTimeout)
	defer cancel()
	for ended := false; ; {
		conn, err := new(net.Dialer).DialContext(ctx, "unix", path)
		switch {
		case err == nil:
			code := status.Code(ask(ctx, conn))
			if code != codes.Unavailable {
				return true, ended || code != codes.DeadlineExceeded, nil
			}
			ended = true
		case errors.Is(err, syscall.ECONNREFUSED):
			return false, false, nil
		// The connection's own timer may be a moment before that of ctx.
		case errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, context.DeadlineExceeded), ctx.Err() != nil:
			return true, ended, nil
		case !errors.Is(err, syscall.EAGAIN): // EAGAIN: the queue is full, because no process accepts connections
			return false, false, err
		}
		select {
		case <-ctx.Done():
		case <-time.After(dialInterval):
		}
	}
}

// ask calls an RPC that every plugin answers at once, and closes the connection.
func ask(ctx context.Context, conn net.Conn) error {
	unused := make(chan net.Conn, 1)
	unused <- conn
	client, err := grpc.NewClient("passthrough:///socket",
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) {
			select {
			case conn := <-unused:
				return conn, nil
			default:
				return nil, net.ErrClosed // one connection is enough for an answer
			}
		}))
	if err != nil {
		return errors.Join(err, conn.Close())
	}
	_, err = csi.NewIdentityClient(client).GetPluginInfo(ctx, &csi.GetPluginInfoRequest{})
	return errors.Join(err, client.Close())
}

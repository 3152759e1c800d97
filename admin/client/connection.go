// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package client

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"path"
	"strings"
	"sync/atomic"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/core/fault"
)

// Options holds the sockets of the plugin and the settings of a [Client].
type Options struct {
	// Controller and Node are the paths of the sockets of the two services. They are equal if one process serves both.
	Controller, Node string
	// StagingDir is the folder that holds a staging path for each volume.
	StagingDir string
	// DevRoot is the path of this host's /dev.
	DevRoot string
	// SysRoot is the path of this host's /sys.
	SysRoot string
	// Progress shows which call takes long.
	Progress Progress
}

// Client calls a plugin.
type Client struct {
	opts       Options
	identity   csi.IdentityClient // the identity service of the controller's socket
	controller csi.ControllerClient
	node       csi.NodeClient
	conns      []*grpc.ClientConn
	typed      map[string]string // names that the caller has given, by ID
	volume     string            // the ID of the last volume that a command was about
	names      map[string]string // names of the instances by ID, once an error named one by its ID
}

// New returns a client. It connects at the first call.
func New(opts Options) (*Client, error) {
	c := &Client{opts: opts, typed: map[string]string{}}
	controller, err := c.connect(opts.Controller, "controller")
	if err != nil {
		return nil, err
	}
	node := controller
	if opts.Node != opts.Controller {
		if node, err = c.connect(opts.Node, "node"); err != nil {
			return nil, errors.Join(err, c.Close())
		}
	}
	c.identity = csi.NewIdentityClient(controller)
	c.controller = csi.NewControllerClient(controller)
	c.node = csi.NewNodeClient(node)
	return c, nil
}

// Close closes the connections.
func (c *Client) Close() error {
	var errs []error
	for _, conn := range c.conns {
		errs = append(errs, conn.Close())
	}
	return errors.Join(errs...)
}

// reconnectDelay is the time between two attempts to connect.
const reconnectDelay = time.Second

// connectTimeout is how long a connection may take: a plugin on a busy host accepts it late. Without it gRPC gives up
// after reconnectDelay.
const connectTimeout = 20 * time.Second

// connect makes a connection. Its interceptor turns failures into an [Error].
func (c *Client) connect(socket, service string) (*grpc.ClientConn, error) {
	var dialError atomic.Pointer[error] // of the last attempt that failed
	dial := func(ctx context.Context, _ string) (net.Conn, error) {
		conn, err := new(net.Dialer).DialContext(ctx, "unix", socket)
		if err != nil {
			dialError.Store(&err)
		} else {
			dialError.Store(nil) // a later error is not that of an earlier attempt
		}
		return conn, err
	}
	intercept := func(
		ctx context.Context, method string, req, reply any, conn *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption,
	) error {
		name := path.Base(method) // without its service
		endProgress := c.opts.Progress.during(name)
		err := invoke(ctx, method, req, reply, conn, opts...)
		endProgress()
		if err == nil {
			return nil
		}
		answer := status.Convert(err)
		if reason := dialError.Load(); reason != nil && answer.Code() == codes.Unavailable {
			return unreachableError(socket, service, *reason)
		}
		return answerError(ctx, name, socket, answer)
	}
	// gRPC's own backoff grows to two minutes. A command with --wait would not see for so long that the plugin has
	// started.
	reconnect := backoff.Config{BaseDelay: reconnectDelay, Multiplier: 1, MaxDelay: reconnectDelay}
	conn, err := grpc.NewClient("passthrough:///plugin", grpc.WithContextDialer(dial), grpc.WithAuthority("localhost"),
		grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithUnaryInterceptor(intercept),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: reconnect, MinConnectTimeout: connectTimeout}))
	if err != nil {
		return nil, err
	}
	c.conns = append(c.conns, conn)
	return conn, nil
}

// serviceOf returns the service that has a method.
func serviceOf(method string) string {
	if strings.HasPrefix(method, "Node") {
		return "node"
	}
	return "controller"
}

// unreachableError is the error of a socket that could not be reached.
func unreachableError(socket, service string, reason error) error {
	next := fmt.Sprintf("start the plugin, or name its socket with --%s-endpoint or --endpoint", service)
	switch {
	case errors.Is(reason, unix.EAGAIN):
		return failed(codes.Unavailable, "the plugin at %s takes no connection now; repeat the command", socket)
	case errors.Is(reason, fs.ErrPermission):
		next = "run this as root, or as a member of the socket's group"
	}
	unreachable := reason
	var op *net.OpError
	if errors.As(reason, &op) {
		reason = op.Err
	}
	return &Error{
		Code:        codes.Unavailable,
		Text:        fmt.Sprintf("no plugin responds at %s: %s: %s", socket, reason, next),
		unreachable: unreachable,
	}
}

// flagOf writes the flags of commands in the place of CSI's names for what they hold.
var flagOf = strings.NewReplacer(
	"capacity_range: ", "--size: ", "node_id: ", "--node: ", "volume_content_source", "source",
	"accessibility_requirements", "--rack", "fs_type", "--fs-type", "topology.csi.oxide.computer/", "",
)

// IsOver reports whether the deadline of ctx has passed. Under load ctx ends later than that.
func IsOver(ctx context.Context) bool {
	deadline, set := ctx.Deadline()
	return set && !time.Now().Before(deadline)
}

// answerError is the error of a call that the plugin answered with an error, or not in time.
func answerError(ctx context.Context, method, socket string, answer *status.Status) error {
	switch {
	case answer.Code() == codes.Unimplemented:
		service := serviceOf(method)
		return failed(answer.Code(), "the plugin at %s is no %s: %s; name the socket of one with --%s-endpoint", socket,
			service, answer.Message(), service)
	case IsOver(ctx) && (answer.Code() == codes.DeadlineExceeded || answer.Code() == codes.Canceled):
		// The plugin may notice the deadline first. Then it ends the stream, and gRPC calls that canceled.
		const code = codes.DeadlineExceeded
		return failed(code, "%s: no response within --timeout%s", method, nextStep(nil, code))
	}
	text, row := fault.Cut(answer.Message())
	next := nextStep(row, answer.Code())
	if text = flagOf.Replace(text) + next; row != nil {
		text += " [" + row.Word + "]"
	}
	return &Error{
		Code:       answer.Code(),
		Text:       text,
		next:       next,
		fault:      row,
		rackFailed: answer.Code() == codes.Internal && serviceOf(method) != "node",
	}
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"strings"
	"sync/atomic"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
)

// Options holds the sockets of the plugin and the settings of a [Client].
type Options struct {
	// Controller and Node are the paths of the sockets of the two services. They are equal if one process serves both.
	Controller, Node string
	// StagingDir is the folder that holds a staging path for each volume.
	StagingDir string
	// SysRoot is the path of this host's /sys.
	SysRoot string
	// DryRun makes the client send no call that could change anything; see [Client.Calls].
	DryRun bool
	// Progress gets a line that is overwritten while a call takes long. Nil means no progress.
	Progress io.Writer
}

// Client calls a plugin.
type Client struct {
	opts       Options
	identity   csi.IdentityClient // of the controller
	controller csi.ControllerClient
	node       csi.NodeClient
	conns      []*grpc.ClientConn
	calls      []Call
}

// New returns a client. It connects at the first call.
func New(opts Options) (*Client, error) {
	c := &Client{opts: opts}
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
	c.identity, c.controller, c.node = csi.NewIdentityClient(
		controller,
	), csi.NewControllerClient(
		controller,
	), csi.NewNodeClient(
		node,
	)
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

// Calls are the calls that a dry run did not make.
func (c *Client) Calls() []Call { return c.calls }

// Call is a call that changes something, with its most important fields.
type Call struct {
	Method           string `json:"call"`
	Name             string `json:"name,omitempty"`
	VolumeID         string `json:"volumeID,omitempty"`
	SnapshotID       string `json:"snapshotID,omitempty"`
	SourceVolumeID   string `json:"sourceVolumeID,omitempty"`
	SourceSnapshotID string `json:"sourceSnapshotID,omitempty"`
	SizeBytes        int64  `json:"sizeBytes,omitempty"`
	NodeID           string `json:"nodeID,omitempty"`
	StagingPath      string `json:"stagingPath,omitempty"`
	TargetPath       string `json:"targetPath,omitempty"`
}

func callOf(fullMethod string, req any) Call {
	call := Call{Method: fullMethod[strings.LastIndexByte(fullMethod, '/')+1:]}
	if r, ok := req.(interface{ GetName() string }); ok {
		call.Name = r.GetName()
	}
	if r, ok := req.(interface{ GetVolumeId() string }); ok {
		call.VolumeID = r.GetVolumeId()
	}
	if r, ok := req.(interface{ GetSnapshotId() string }); ok {
		call.SnapshotID = r.GetSnapshotId()
	}
	if r, ok := req.(interface{ GetSourceVolumeId() string }); ok {
		call.SourceVolumeID = r.GetSourceVolumeId()
	}
	if r, ok := req.(*csi.CreateVolumeRequest); ok {
		call.SizeBytes = r.GetCapacityRange().GetRequiredBytes()
		call.SourceVolumeID = r.GetVolumeContentSource().GetVolume().GetVolumeId()
		call.SourceSnapshotID = r.GetVolumeContentSource().GetSnapshot().GetSnapshotId()
	}
	if r, ok := req.(interface{ GetNodeId() string }); ok {
		call.NodeID = r.GetNodeId()
	}
	if r, ok := req.(interface{ GetStagingTargetPath() string }); ok {
		call.StagingPath = r.GetStagingTargetPath()
	}
	if r, ok := req.(interface{ GetTargetPath() string }); ok {
		call.TargetPath = r.GetTargetPath()
	}
	return call
}

// reads are the calls that change nothing. A dry run sends only these, so a call that is missing here is not sent.
var reads = map[string]bool{
	"ControllerGetVolume": true, "ControllerGetVolumeHealth": true, "ListVolumes": true, "GetCapacity": true,
	"GetPluginInfo": true, "GetSnapshot": true, "ListSnapshots": true, "NodeGetInfo": true,
}

// connect makes a connection. Its interceptor turns failures into an [Error], and lets a dry run only read.
func (c *Client) connect(socket, service string) (*grpc.ClientConn, error) {
	var unreachable atomic.Pointer[error] // why the socket could not be reached the last time
	dial := func(ctx context.Context, _ string) (net.Conn, error) {
		conn, err := new(net.Dialer).DialContext(ctx, "unix", socket)
		if err != nil {
			unreachable.Store(&err)
		}
		return conn, err
	}
	call := func(ctx context.Context, method string, req, reply any, conn *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
		about := callOf(method, req)
		if c.opts.DryRun && !reads[about.Method] {
			c.calls = append(c.calls, about)
			return nil
		}
		done := showProgress(c.opts.Progress, about.Method)
		err := invoke(ctx, method, req, reply, conn, opts...)
		done()
		if err == nil {
			return nil
		}
		said := status.Convert(err)
		if reason := unreachable.Load(); reason != nil && said.Code() == codes.Unavailable {
			return unreachableError(socket, service, *reason)
		}
		return answerError(ctx, about, socket, service, said)
	}
	conn, err := grpc.NewClient("passthrough:///plugin", grpc.WithContextDialer(dial), grpc.WithAuthority("localhost"),
		grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithUnaryInterceptor(call))
	if err != nil {
		return nil, err
	}
	c.conns = append(c.conns, conn)
	return conn, nil
}

func unreachableError(socket, service string, reason error) error {
	next := fmt.Sprintf("start the plugin, or name its socket with --%s-endpoint or --endpoint", service)
	if errors.Is(reason, fs.ErrPermission) {
		next = "run this as root, or as a member of the socket's group"
	}
	var op *net.OpError
	if errors.As(reason, &op) {
		reason = op.Err
	}
	return failed(codes.Unavailable, "no plugin answers at %s: %s: %s", socket, reason, next)
}

func answerError(ctx context.Context, call Call, socket, service string, said *status.Status) error {
	switch {
	case said.Code() == codes.Unimplemented:
		return failed(
			said.Code(),
			"%s: the plugin at %s does not serve it: %s; name the socket of one that does with --%s-endpoint",
			call.Method,
			socket,
			said.Message(),
			service,
		)
	case ctx.Err() != nil && said.Code() == codes.DeadlineExceeded:
		return failed(said.Code(), "%s: no answer in the time of --timeout%s", call.Method, nextStep(call, said.Code()))
	}
	return failed(said.Code(), "%s: %s: %s%s", call.Method, said.Code(), said.Message(), nextStep(call, said.Code()))
}

const (
	// progressAfter is how long a call takes before its progress is shown.
	progressAfter = 2 * time.Second
	progressEvery = time.Second
	clearLine     = "\r\x1b[K"
)

// showProgress shows on a terminal which call is waited for, until the returned function is called, which clears it.
func showProgress(out io.Writer, method string) (done func()) {
	if out == nil {
		return func() {}
	}
	start := time.Now()
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for wait, shown := progressAfter, false; ; wait = progressEvery {
			select {
			case <-time.After(wait):
				shown = true
				// An error of the terminal does not end the call.
				_, _ = fmt.Fprintf(out, "%swaiting for %s, %s", clearLine, method, time.Since(start).Round(time.Second))
			case <-stop:
				if shown {
					_, _ = io.WriteString(out, clearLine)
				}
				return
			}
		}
	}()
	return func() { close(stop); <-stopped }
}

// thisNode is the ID of this node, from its node plugin.
func (c *Client) thisNode(ctx context.Context) (string, error) {
	info, err := c.node.NodeGetInfo(ctx, &csi.NodeGetInfoRequest{})
	return info.GetNodeId(), err
}

// nodeOr is the named node, or this node if none is named.
func (c *Client) nodeOr(ctx context.Context, named string) (string, error) {
	if named != "" {
		return parseID("node", named)
	}
	node, err := c.thisNode(ctx)
	if err != nil {
		err = fmt.Errorf("%w; or name the node with --node", err)
	}
	return node, err
}

// parseID rejects a malformed ID. The plugin could report success for it, because it finds nothing to do.
func parseID(what, text string) (string, error) {
	id, ok := diskname.ParseID(text)
	if !ok {
		return "", failed(codes.InvalidArgument, "%q is no %s ID, which is a UUID", text, what)
	}
	return id, nil
}

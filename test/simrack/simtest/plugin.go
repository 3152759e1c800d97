// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package simtest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
)

// Plugin is a running oxide-csi.
type Plugin struct {
	*Process
	*Client
}

// Client calls the services of a plugin.
type Client struct {
	csi.IdentityClient
	csi.ControllerClient
	csi.NodeClient

	// Socket is the path of its unix socket.
	Socket string
	conn   *grpc.ClientConn
}

// PluginOptions say how to start a plugin.
type PluginOptions struct {
	// Mode is controller, node or all.
	Mode string
	// Dir is an existing folder, not shared with another plugin, for socket, token and state. Its path must be short: the
	// socket's is at most 107 bytes.
	Dir string
	// Sim is the rack. Instance is where the plugin runs, in modes node and all.
	Sim      *Sim
	Instance Instance
	// Args are further flags; they come last and so win.
	Args []string
	// Own says that a node finds out by itself, or by Args, who it is.
	Own bool
	// Env is the whole environment. Nil means PATH alone.
	Env []string
	// Stderr gets what the plugin prints, too.
	Stderr io.Writer
	// Apart keeps a Ctrl-C at the terminal from the plugin; whoever starts it must end it, whatever happens.
	Apart bool
}

// ClusterID is the --cluster-id of every plugin that this package starts.
const ClusterID = "lab"

// Flags are the flags with which the plugin is started. They make the token file.
func (o PluginOptions) Flags() ([]string, error) {
	flags := []string{"--endpoint=unix://" + o.Socket(), "--mode=" + o.Mode}
	if o.Mode != "node" {
		file := filepath.Join(o.Dir, "token")
		if err := os.WriteFile(file, []byte(o.Sim.Token+"\n"), 0o600); err != nil {
			return nil, err
		}
		flags = append(
			flags,
			"--oxide-host="+o.Sim.Host,
			"--oxide-project="+o.Sim.Project,
			"--oxide-token-file="+file,
			"--cluster-id="+ClusterID,
		)
	}
	if o.Mode != "controller" {
		flags = append(flags, "--state-dir="+filepath.Join(o.Dir, "state"))
		switch {
		case o.Own:
		case o.Instance.Guest == "":
			flags = append(flags, "--metadata=static", "--instance-id="+o.Instance.ID)
		default:
			flags = append(flags, "--metadata=static",
				"--metadata-file="+filepath.Join(o.Instance.Guest, "metadata.env"),
				"--dev-root="+filepath.Join(o.Instance.Guest, "dev"),
				"--sys-root="+filepath.Join(o.Instance.Guest, "sys"))
		}
	}
	return append(flags, o.Args...), nil
}

// Socket is the path of the unix socket that the plugin will serve.
func (o PluginOptions) Socket() string { return filepath.Join(o.Dir, "csi.sock") }

// StartPlugin starts a plugin and returns when it says that it is ready.
func StartPlugin(program string, opts PluginOptions) (*Plugin, error) {
	flags, err := opts.Flags()
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(program, flags...)
	cmd.Env = opts.Env
	process, err := start(cmd, opts.Stderr, opts.Apart)
	if err != nil {
		return nil, err
	}
	client, err := connect(opts.Socket(), process.Done())
	if err != nil {
		return nil, errors.Join(fmt.Errorf("%w: %s", err, process.Stderr()), process.Kill())
	}
	return &Plugin{Process: process, Client: client}, nil
}

// Connect waits for a plugin that somebody else has started or will start, in a guest for example, until it says that it is
// ready.
func Connect(socket string) (*Client, error) { return connect(socket, nil) }

func connect(socket string, ended <-chan struct{}) (*Client, error) {
	conn, err := grpc.NewClient(
		"unix://"+socket,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		// The first attempts come before the socket is there.
		grpc.WithConnectParams(
			grpc.ConnectParams{Backoff: backoff.Config{BaseDelay: 2 * time.Millisecond, Multiplier: 1.5, MaxDelay: time.Second}},
		),
	)
	if err != nil {
		return nil, err
	}
	c := &Client{
		IdentityClient: csi.NewIdentityClient(
			conn,
		),
		ControllerClient: csi.NewControllerClient(conn),
		NodeClient:       csi.NewNodeClient(conn),
		Socket:           socket,
		conn:             conn,
	}
	if err := c.await(ended); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return c, nil
}

// Close ends the connection.
func (c *Client) Close() error { return c.conn.Close() }

// await waits until the plugin is ready, or its process has ended.
func (c *Client) await(ended <-chan struct{}) error {
	ctx, cancel := context.WithTimeout(context.Background(), readyTimeout)
	defer cancel()
	for {
		resp, err := c.Probe(ctx, &csi.ProbeRequest{}, grpc.WaitForReady(true))
		if err == nil && resp.GetReady().GetValue() {
			return nil
		}
		select {
		case <-ended:
			return errors.New("oxide-csi ended before it was ready")
		case <-ctx.Done():
			return fmt.Errorf("oxide-csi is not ready after %s: %w", readyTimeout, err)
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// Stop ends the plugin with SIGTERM; see [Process.Stop].
func (p *Plugin) Stop() error { return errors.Join(p.Close(), p.Process.Stop()) }

// Kill ends the plugin with SIGKILL.
func (p *Plugin) Kill() error { return errors.Join(p.Close(), p.Process.Kill()) }

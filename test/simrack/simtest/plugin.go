// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package simtest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
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

// Client is a client of a plugin's services.
type Client struct {
	csi.IdentityClient
	csi.ControllerClient
	csi.NodeClient

	// Socket is the path of the plugin's unix socket.
	Socket string
	conn   *grpc.ClientConn
}

// PluginOptions configure [StartPlugin].
type PluginOptions struct {
	// Mode is controller, node or all.
	Mode string
	// Dir is an existing folder for socket, token and state. Two plugins must not share it. Its path must be short,
	// because the path of a unix socket has at most 107 bytes.
	Dir string
	// Sim is the rack. Instance is the instance on which the plugin runs, in modes node and all.
	Sim      *Sim
	Instance Instance
	// OtherRacks are further racks by their names in the topology. The name of Sim is then [DefaultRack].
	OtherRacks map[string]*Sim
	// Args are further flags. They come last and override the others.
	Args []string
	// OwnIdentity leaves out the flags that give a node its identity. The plugin then finds its identity by itself, or by
	// Args.
	OwnIdentity bool
	// Env is the complete environment. Nil means PATH only.
	Env []string
	// Stderr also receives the plugin's stderr.
	Stderr io.Writer
	// OwnProcessGroup keeps a Ctrl-C at the terminal from the plugin. The caller must then always end the plugin.
	OwnProcessGroup bool
}

// ClusterID is the --cluster-id of every plugin that this package starts.
const ClusterID = "lab"

// DefaultRack is the name of a rack in the topology if no other is configured.
const DefaultRack = "default"

// Flags returns the flags for the plugin. It also writes the files that they name.
func (o PluginOptions) Flags() ([]string, error) {
	flags := []string{"--endpoint=unix://" + o.Socket(), "--mode=" + o.Mode}
	if o.Mode != "node" {
		rackFlags := o.rackFlags
		if len(o.OtherRacks) > 0 {
			rackFlags = o.severalRacks
		}
		more, err := rackFlags()
		if err != nil {
			return nil, err
		}
		flags = append(append(flags, more...), "--cluster-id="+ClusterID)
	}
	if o.Mode != "controller" {
		flags = append(flags, "--state-dir="+filepath.Join(o.Dir, "state"))
		switch {
		case o.OwnIdentity:
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

// rackFlags returns the flags for the rack Sim.
func (o PluginOptions) rackFlags() ([]string, error) {
	file, err := o.writeToken("token", o.Sim)
	flags := []string{
		"--oxide-host=" + o.Sim.Host,
		"--oxide-project=" + o.Sim.Project,
		"--oxide-token-file=" + file,
	}
	if o.Sim.CAFile != "" {
		flags = append(flags, "--oxide-ca-file="+o.Sim.CAFile)
	}
	return flags, err
}

// severalRacks returns the flags for a file with Sim and OtherRacks, and for a node on the rack of Sim.
func (o PluginOptions) severalRacks() ([]string, error) {
	var text strings.Builder
	fmt.Fprintln(&text, "racks:")
	names := append([]string{DefaultRack}, slices.Sorted(maps.Keys(o.OtherRacks))...)
	for _, name := range names {
		sim := cmp.Or(o.OtherRacks[name], o.Sim)
		token, err := o.writeToken("token-"+name, sim)
		if err != nil {
			return nil, err
		}
		fmt.Fprintf(&text, "- name: %s\n  host: %s\n  project: %s\n  tokenFile: %s\n", name, sim.Host, sim.Project, token)
		if sim.CAFile != "" {
			fmt.Fprintf(&text, "  caFile: %s\n", sim.CAFile)
		}
	}
	file := filepath.Join(o.Dir, "racks.yaml")
	return []string{"--config=" + file, "--rack=" + DefaultRack}, os.WriteFile(file, []byte(text.String()), 0o600)
}

func (o PluginOptions) writeToken(name string, sim *Sim) (path string, err error) {
	path = filepath.Join(o.Dir, name)
	return path, os.WriteFile(path, []byte(sim.Token+"\n"), 0o600)
}

// Socket is the path of the unix socket that the plugin will serve.
func (o PluginOptions) Socket() string { return filepath.Join(o.Dir, "csi.sock") }

// StartPlugin starts a plugin and returns when the plugin is ready.
func StartPlugin(program string, opts PluginOptions) (*Plugin, error) {
	flags, err := opts.Flags()
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(program, flags...)
	cmd.Env = opts.Env
	process, err := start(cmd, opts.Stderr, opts.OwnProcessGroup)
	if err != nil {
		return nil, err
	}
	client, err := connect(opts.Socket(), process.Done())
	if err != nil {
		return nil, errors.Join(fmt.Errorf("%w: %s", err, process.Stderr()), process.Kill())
	}
	return &Plugin{Process: process, Client: client}, nil
}

// Connect waits until the plugin at the socket is ready. Another process, for example a guest, has started the plugin
// or will start it.
func Connect(socket string) (*Client, error) { return connect(socket, nil) }

func connect(socket string, ended <-chan struct{}) (*Client, error) {
	conn, err := grpc.NewClient(
		"unix://"+socket,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		// The first attempts come before the socket exists.
		grpc.WithConnectParams(
			grpc.ConnectParams{
				Backoff:           backoff.Config{BaseDelay: 2 * time.Millisecond, Multiplier: 1.5, MaxDelay: time.Second},
				MinConnectTimeout: 3 * time.Second, // else two milliseconds; a killed plugin that hangs takes connections
			},
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

// await waits until the plugin is ready or its process has ended.
func (c *Client) await(ended <-chan struct{}) error {
	ctx, cancel := context.WithTimeout(context.Background(), readyTimeout)
	defer cancel()
	probing, stop := context.WithCancel(ctx)
	defer stop()
	go func() { // a probe of a process that has ended does not return by itself
		select {
		case <-ended:
			stop()
		case <-probing.Done():
		}
	}()
	for {
		resp, err := c.Probe(probing, &csi.ProbeRequest{}, grpc.WaitForReady(true))
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

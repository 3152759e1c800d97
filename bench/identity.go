// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main

import (
	"context"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// source is one way for a node to find its identity.
type source struct {
	name  string
	flags []string
	env   []string
}

// identity measures nodes by the source of their identity: the time from exec to the first NodeGetInfo, with the source
// on the same machine, and the memory of the idle process. The servers for Kubernetes and Nomad answer only the
// requests of the plugin.
func identity(ctx context.Context, b *bench) (_ []row, err error) {
	r, err := b.newRig(b.guests()...)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, r.stop()) }()
	answers := http.NewServeMux()
	answers.HandleFunc("GET /api/v1/nodes/node-a", func(w http.ResponseWriter, _ *http.Request) {
		// The client notices a failed write by itself.
		_, _ = fmt.Fprintf(
			w,
			`{"kind":"Node","apiVersion":"v1","metadata":{"name":"node-a","labels":{"oxide.computer/rack":"r"}},"spec":{"providerID":"oxide://%s"}}`,
			r.node.ID,
		)
	})
	answers.HandleFunc("GET /v1/client/metadata", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = fmt.Fprintf(w, `{"Meta":{"oxide.instance_id":"%s","oxide.rack":"r"}}`, r.node.ID)
	})
	orchestrator := httptest.NewTLSServer(answers)
	defer orchestrator.Close()
	plain := httptest.NewServer(answers)
	defer plain.Close()
	kubeconfig, err := b.kubeconfig(orchestrator)
	if err != nil {
		return nil, err
	}
	sources := []source{
		{name: "static", flags: []string{"--metadata=static", "--instance-id=" + r.node.ID}},
		{name: "kubernetes", flags: []string{"--metadata=kubernetes", "--node-name=node-a", "--kubeconfig=" + kubeconfig}},
		{name: "nomad", flags: []string{"--metadata=nomad"}, env: []string{"NOMAD_ADDR=" + plain.URL}},
	}
	if r.node.Guest != "" {
		guest := source{
			name:  "guest",
			flags: []string{"--metadata=guest", "--rack=r", "--sys-root=" + filepath.Join(r.node.Guest, "sys")},
		}
		sources = append(sources, guest)
	}
	var rows []row
	for _, s := range sources {
		local := s.name == "static" || s.name == "guest"
		ready, memory, err := b.identify(ctx, s, r.node.ID, local)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", s.name, err)
		}
		if local {
			rows = append(rows, median("ready/"+s.name, "ms", ready))
		}
		rows = append(rows, memory.rows("memory/node/"+s.name)...)
	}
	return rows, nil
}

// kubeconfig writes a kubeconfig file for the server.
func (b *bench) kubeconfig(server *httptest.Server) (string, error) {
	ca := filepath.Join(b.dir, "ca.pem")
	if err := os.WriteFile(
		ca,
		pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw}),
		0o600,
	); err != nil {
		return "", err
	}
	file := filepath.Join(b.dir, "kubeconfig")
	text := fmt.Sprintf(
		"apiVersion: v1\nkind: Config\ncurrent-context: c\ncontexts: [{name: c, context: {cluster: k, user: u}}]\n"+
			"clusters: [{name: k, cluster: {server: %q, certificate-authority: %q}}]\nusers: [{name: u, user: {token: t}}]\n",
		server.URL,
		ca,
	)
	return file, os.WriteFile(file, []byte(text), 0o600)
}

// identify starts nodes and times each until it knows its identity. Then it reads the memory of other nodes, which have
// been idle since they knew theirs.
func (b *bench) identify(
	ctx context.Context, s source, instanceID string, timed bool,
) (ready []float64, memory memorySamples, err error) {
	for range startupRounds {
		if !timed {
			break
		}
		n, err := b.startNode(ctx, s, instanceID)
		if err != nil {
			return nil, memory, err
		}
		ready = append(ready, milliseconds(n.took))
		if err := n.stop(); err != nil {
			return nil, memory, err
		}
	}
	var plugins []*simtest.Plugin
	defer func() {
		for _, p := range plugins {
			err = errors.Join(err, p.Stop())
		}
	}()
	for range memoryProcesses {
		dir, err := os.MkdirTemp(b.dir, "")
		if err != nil {
			return nil, memory, err
		}
		p, err := simtest.StartPlugin(
			b.programs.Plugin,
			simtest.PluginOptions{
				Mode:        "node",
				Dir:         dir,
				OwnIdentity: true,
				Args:        append(slices.Clone(s.flags), b.args...),
				Env:         s.env,
			},
		)
		if err != nil {
			return nil, memory, err
		}
		plugins = append(plugins, p)
	}
	memory, err = memoryOfAll(ctx, plugins)
	return ready, memory, err
}

// node is a plugin in mode node that knows its identity.
type node struct {
	cmd  *exec.Cmd
	conn io.Closer
	took time.Duration
}

func (n *node) stop() error {
	return errors.Join(n.conn.Close(), n.cmd.Process.Signal(os.Interrupt), n.cmd.Wait())
}

// startNode starts a node and waits until it reports this instance.
func (b *bench) startNode(ctx context.Context, s source, instanceID string) (*node, error) {
	dir, err := os.MkdirTemp(b.dir, "")
	if err != nil {
		return nil, err
	}
	opts := simtest.PluginOptions{Dir: dir}
	conn, err := grpc.NewClient(
		"passthrough:///"+opts.Socket(),
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(dialUntilServed),
	)
	if err != nil {
		return nil, err
	}
	flags := append(
		[]string{"--endpoint=unix://" + opts.Socket(), "--mode=node", "--state-dir=" + filepath.Join(dir, "state")},
		s.flags...)
	n := &node{cmd: exec.Command(b.programs.Plugin, append(flags, b.args...)...), conn: conn}
	n.cmd.Env = append([]string{}, s.env...)
	start := time.Now()
	if err := n.cmd.Start(); err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	ctx, cancel := context.WithTimeout(ctx, startupLimit)
	defer cancel()
	for {
		info, err := csi.NewNodeClient(conn).NodeGetInfo(ctx, &csi.NodeGetInfoRequest{}, grpc.WaitForReady(true))
		n.took = time.Since(start)
		switch {
		case err == nil && info.GetNodeId() == instanceID:
			return n, nil
		case status.Code(err) != codes.Unavailable:
			return nil, errors.Join(fmt.Errorf("node %q: %w", info.GetNodeId(), err), n.stop())
		}
		time.Sleep(dialRetry)
	}
}

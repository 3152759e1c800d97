// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

const (
	startupRounds = 11
	startupLimit  = 10 * time.Second
	// dialRetry is the pause after a refused connection. It is short compared with the measured time, and long enough to
	// leave the processor to the plugin.
	dialRetry = 200 * time.Microsecond
)

// startup measures the time from exec to the answer to the first RPC over the socket.
func startup(ctx context.Context, b *bench) (_ []row, err error) {
	sim, err := b.startSim("--instances=node-a")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, sim.Stop()) }()
	var rows []row
	for _, mode := range []string{"controller", "node"} {
		var samples []float64
		for range startupRounds {
			opts, err := b.pluginOptions(mode, sim)
			if err != nil {
				return nil, err
			}
			took, err := untilServed(ctx, b.programs.Plugin, opts)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", mode, err)
			}
			samples = append(samples, milliseconds(took))
		}
		rows = append(rows, median("startup/"+mode, "ms", samples))
	}
	return rows, nil
}

// untilServed starts a plugin, waits for the answer to its first RPC, and stops it.
func untilServed(ctx context.Context, program string, opts simtest.PluginOptions) (took time.Duration, err error) {
	ctx, cancel := context.WithTimeout(ctx, startupLimit)
	defer cancel()
	flags, err := opts.Flags()
	if err != nil {
		return 0, err
	}
	conn, err := grpc.NewClient(
		"passthrough:///"+opts.Socket(),
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(dialUntilServed),
	)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	var stderr bytes.Buffer
	cmd := exec.Command(program, flags...)
	cmd.Env = []string{}
	cmd.Stderr = &stderr
	start := time.Now()
	if err := cmd.Start(); err != nil {
		return 0, err
	}
	_, err = csi.NewIdentityClient(conn).GetPluginInfo(ctx, &csi.GetPluginInfoRequest{}, grpc.WaitForReady(true))
	took = time.Since(start)
	if err = errors.Join(err, cmd.Process.Signal(os.Interrupt), cmd.Wait()); err != nil {
		return 0, fmt.Errorf("%w: %s", err, &stderr)
	}
	return took, nil
}

// dialUntilServed connects to a unix socket as soon as a process listens on it.
func dialUntilServed(ctx context.Context, socket string) (net.Conn, error) {
	var dialer net.Dialer
	for {
		conn, err := dialer.DialContext(ctx, "unix", socket)
		if err == nil || ctx.Err() != nil {
			return conn, err
		}
		time.Sleep(dialRetry)
	}
}

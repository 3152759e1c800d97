// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Command oxide-cosi is a COSI driver: it serves buckets of versitygw gateways on a unix socket, by COSI v1alpha1.
// Package core/buckets has its logic, docs/explanation/buckets.md says what it is for.
//
// An invalid configuration ends it with exit code 78, any other failure with exit code 1, and a crash with Go's exit
// code 2.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/oxidecomputer/oxide-csi-plugin/core/buckets"
	"github.com/oxidecomputer/oxide-csi-plugin/core/redact"
	"github.com/oxidecomputer/oxide-csi-plugin/core/socket"
)

// version is set by the linker.
var version = "devel"

// Exit codes.
const (
	exitFailed = 1
	exitConfig = 78 // as of oxide-csi
)

func main() {
	os.Exit(run(os.Args[1:], os.Getenv, os.Stdout, os.Stderr))
}

const help = `oxide-cosi is the COSI driver for S3 gateways whose data is on Oxide disks. It serves COSI v1alpha1 on a unix socket.
The file of stores says which gateways there are.

Exit codes: 0, stopped by a signal; 78, the configuration is wrong; 2, Go's runtime reports a crash; 1, any other failure.`

func run(args []string, getenv func(string) string, stdout, stderr io.Writer) int {
	root := command(getenv, stdout, stderr)
	root.SetArgs(args)
	err := root.ExecuteContext(context.Background())
	if err == nil {
		return 0
	}
	for line := range strings.SplitSeq(err.Error(), "\n") {
		fmt.Fprintf(stderr, "oxide-cosi: %s\n", line)
	}
	var problem configError
	if errors.As(err, &problem) {
		return exitConfig
	}
	return exitFailed
}

func command(getenv func(string) string, stdout, stderr io.Writer) *cobra.Command {
	var opts settings
	root := &cobra.Command{
		Use:     "oxide-cosi",
		Short:   "COSI driver for S3 gateways on Oxide disks",
		Long:    help,
		Version: version,
		Args: func(cmd *cobra.Command, args []string) error {
			if err := cobra.NoArgs(cmd, args); err != nil {
				return configError{err}
			}
			return nil
		},
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return serve(cmd.Context(), opts, stderr)
		},
	}
	root.SetOut(stdout)
	root.SetErr(stderr)
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return configError{err} })
	opts.flags(root.Flags(), getenv)
	return root
}

// serve answers RPCs until a signal.
func serve(ctx context.Context, opts settings, stderr io.Writer) error {
	path, level, stores, err := opts.load()
	if err != nil {
		return configError{err}
	}
	log := slog.New(slog.NewTextHandler(stderr, &slog.HandlerOptions{Level: level, ReplaceAttr: redact.Attribute}))
	driver, err := buckets.New(buckets.Options{ClusterID: opts.clusterID, Stores: stores, Log: log})
	if err != nil {
		return configError{err}
	}
	ctx, stop := signal.NotifyContext(ctx, syscall.SIGTERM, os.Interrupt)
	defer stop()
	_, left := os.Lstat(path) // a driver that ends in order removes its socket
	listener, err := socket.Listen(path)
	if err != nil {
		return err
	}
	settled := time.Now()
	if left == nil {
		settled = settled.Add(opts.settle)
		log.Info("a killed driver may have left requests: changing nothing until they have ended", "wait", opts.settle)
	}
	server := newServer(driver, settled, log)
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	log.Info("serving", "version", version, "endpoint", path, "stores", len(stores))
	select {
	case err := <-served:
		return fmt.Errorf("serve on %s: %w", path, err)
	case <-ctx.Done():
	}
	stop() // a second signal ends the process at once
	log.Info("stopping: waiting for calls in flight; a second signal ends them")
	server.GracefulStop()
	log.Info("stopped")
	return nil
}

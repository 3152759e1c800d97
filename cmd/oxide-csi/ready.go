// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/oxidecomputer/oxide-csi-plugin/admin"
	"github.com/oxidecomputer/oxide-csi-plugin/core/config"
)

const readyHelp = `oxide-csi ready asks the plugin that runs on this machine, or in this container, whether it is ready, and prints why not.

It is for readiness probes in Kubernetes: kubelet puts what a probe prints into an Event of the pod. A probe of /readyz by
HTTP shows only the status code there.

Exit codes: 0, the plugin is ready; 1, it is not ready, or does not respond; 2, the command is wrong.`

// readyTimeout bounds the command. /readyz answers from memory.
const readyTimeout = 10 * time.Second

// maxReadyAnswer is more than /readyz ever answers.
const maxReadyAnswer = 64 << 10

func readyCommand(stdout io.Writer) *cobra.Command {
	var address string
	cmd := &cobra.Command{
		Use:     "ready",
		Short:   "Ask a running plugin whether it is ready, and why not",
		Long:    readyHelp,
		Example: `  oxide-csi ready --http-endpoint=:9808`,
		Args:    admin.NoArgs,
	}
	cmd.Flags().StringVar(&address, "http-endpoint", "", "the plugin's --http-endpoint, such as :9808")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if _, _, err := net.SplitHostPort(address); err != nil {
			return config.Problems{{Flag: "--http-endpoint", What: "is required: the address that the plugin was given"}}
		}
		ctx, cancel := context.WithTimeout(cmd.Context(), readyTimeout)
		defer cancel()
		return printReady(ctx, address, stdout)
	}
	return cmd
}

// printReady prints the answer of /readyz. If the plugin is not ready, it returns the answer as an error.
func printReady(ctx context.Context, address string, stdout io.Writer) error {
	// An address without a host, such as :9808, is dialled on this machine.
	client := http.Client{Transport: &http.Transport{
		DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, network, address)
		},
	}}
	defer client.CloseIdleConnections()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://localhost/readyz", nil)
	if err != nil {
		return err
	}
	answer, err := client.Do(request)
	if err != nil {
		return fmt.Errorf("the plugin does not respond at %s: %w", address, err)
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(io.LimitReader(answer.Body, maxReadyAnswer))
	if err != nil {
		return fmt.Errorf("the plugin's response at %s is cut short: %w", address, err)
	}
	if answer.StatusCode != http.StatusOK {
		return errors.New(strings.TrimSpace(string(text)))
	}
	_, err = stdout.Write(text)
	return err
}

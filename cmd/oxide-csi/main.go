// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Command oxide-csi is the Oxide CSI plugin. Without a subcommand it serves the CSI services of package core on a unix
// socket.
//
// docs/reference/configuration.md describes its configuration. A process with an invalid configuration prints one line
// for each problem and ends with exit code 2. Any other failure ends the process with exit code 1.
//
// The files, in reading order:
//
//   - main.go, help.go: the commands and their help
//   - serve.go: builds the plugin, serves, and stops at a signal
//   - services.go: builds the controller service and the node service
//   - provider.go, restart.go: build their parts for node identity and planned restarts
//   - http.go: health and metrics
//   - metadata.go, await_detach.go, ready.go, volume.go, snapshot.go: the subcommands
//   - operator.go, doctor.go, explain.go, orphans.go, bundle.go: the commands of an operator
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/oxidecomputer/oxide-csi-plugin/core/config"
)

// version is set by the linker.
var version = "devel"

// Exit codes.
const (
	exitFailed = 1
	exitConfig = 2
)

func main() {
	os.Exit(run(os.Args[1:], os.Environ(), os.Stdout, os.Stderr))
}

func run(args, environ []string, stdout, stderr io.Writer) int {
	stdout, stderr = printable{stdout}, printable{stderr}
	root := command(environ, stdout, stderr)
	root.SetArgs(args)
	err := root.ExecuteContext(context.Background())
	if err == nil {
		return 0
	}
	var problems config.Problems
	if errors.As(err, &problems) {
		for _, problem := range problems {
			fmt.Fprintln(stderr, problem)
		}
		return exitConfig
	}
	fmt.Fprintf(stderr, "oxide-csi: %s\n", strings.ReplaceAll(err.Error(), "\n", "; "))
	var exit exitError
	if errors.As(err, &exit) {
		return exit.code
	}
	return exitFailed
}

func command(environ []string, stdout, stderr io.Writer) *cobra.Command {
	root := &cobra.Command{
		Use:           "oxide-csi",
		Short:         "CSI plugin for Oxide disks",
		Long:          rootHelp,
		Example:       rootExample,
		Version:       version,
		Args:          noArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, warnings, err := config.Load(cmd.Flags(), environ)
			if err != nil {
				helpNewcomer(cmd, stderr, err)
				for _, warning := range warnings {
					fmt.Fprintf(stderr, "oxide-csi: warning: %s\n", warning)
				}
				return err
			}
			return serve(cmd.Context(), cfg, warnings, stderr)
		},
	}
	root.SetOut(stdout)
	root.SetErr(stderr)
	root.SetUsageFunc(printUsage)
	config.Flags(root.Flags())
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error {
		return config.Problems{config.FlagProblem(err)}
	})
	root.AddCommand(
		metadataCommand(environ, stdout, stderr),
		awaitDetachCommand(environ, stderr),
		readyCommand(stdout),
		volumeCommand(environ, stdout, stderr),
		snapshotCommand(environ, stdout, stderr),
		doctorCommand(environ, stdout, stderr),
		explainCommand(environ, stdout, stderr),
		orphansCommand(environ, stdout, stderr),
		bundleCommand(environ, stdout, stderr),
		&cobra.Command{
			Use:   "version",
			Short: "Print the version",
			Args:  noArgs,
			Run:   func(*cobra.Command, []string) { fmt.Fprintf(stdout, "oxide-csi version %s\n", version) },
		},
	)
	return root
}

// helpNewcomer prints the help for somebody who started the program to see what it is: neither mode nor endpoint is set
// anywhere. The problems of the configuration follow.
func helpNewcomer(cmd *cobra.Command, stderr io.Writer, err error) {
	var problems config.Problems
	if errors.As(err, &problems) && problems.Missing("--mode") && problems.Missing("--endpoint") {
		cmd.SetOut(stderr)
		_ = cmd.Help() // as for any output, nothing can report that it was not written
		fmt.Fprintln(stderr)
	}
}

// noArgs rejects what is not a subcommand. It suggests a command with a similar name, or one that lists the word in
// SuggestFor.
func noArgs(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	advice := "see " + cmd.CommandPath() + " --help"
	cmd.SuggestionsMinimumDistance = 1 // one letter may differ
	if similar := cmd.SuggestionsFor(args[0]); len(similar) > 0 {
		advice = "did you mean " + cmd.CommandPath() + " " + similar[0] + "?"
	}
	return config.Problems{config.FlagProblem(fmt.Errorf("%q is not a command: %s", args[0], advice))}
}

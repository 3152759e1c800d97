// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

// Command oxide-sim simulates an Oxide rack on one machine. It is for trying and testing the CSI plugin. No
// image and no installation has it.
//
// Its subcommand serve simulates a rack on a loopback address. demo starts such a rack and the plugin, and shows the
// life of two volumes. verify compares a real rack with the simulated one. guest-init is an init for the guests of a
// simulated rack. Invalid flags end the program with exit code 2 and a line for each problem, any other error with exit
// code 1. verify has exit codes of its own.
//
//   - main.go: the program and its commands; man.go: their man pages, for a release
//   - serve.go: the command serve; flags.go: its flags
//   - verify.go: the command verify
//   - guest.go: the command guest-init
//   - demo.go: the command demo, with the list of its other files
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"

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
	os.Exit(run(os.Args[1:], os.Stdout, os.Stderr))
}

func run(args []string, stdout, stderr io.Writer) int {
	root := rootCommand(stdout, stderr)
	root.SetArgs(args)
	err := root.ExecuteContext(context.Background())
	if err == nil {
		return 0
	}
	var problems config.Problems
	if errors.As(err, &problems) {
		fmt.Fprintln(stderr, problems)
		return exitConfig
	}
	var exit exitError
	if errors.As(err, &exit) {
		return exit.code
	}
	fmt.Fprintf(stderr, "oxide-sim: %s\n", strings.ReplaceAll(err.Error(), "\n", "; "))
	return exitFailed
}

func rootCommand(stdout, stderr io.Writer) *cobra.Command {
	root := &cobra.Command{
		Use:           "oxide-sim",
		Short:         "A simulated Oxide rack",
		Version:       version,
		Args:          noArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
		// Without a subcommand: the help.
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.SetOut(stdout)
	root.SetErr(stderr)
	root.SetVersionTemplate("oxide-sim {{.Version}}\n")
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error {
		return config.Problems{config.FlagProblem(err)}
	})
	root.AddCommand(serveCommand(stdout, stderr), demoCommand(), verifyCommand(stdout, stderr), guestInitCommand(stderr))
	return root
}

func noArgs(cmd *cobra.Command, args []string) error {
	if len(args) > 0 {
		what := fmt.Sprintf("%q is not understood: see %s --help", args[0], cmd.CommandPath())
		return config.Problems{{Flag: "command line", What: what}}
	}
	return nil
}

// surviveBrokenPipes keeps the process alive when the reader of its output ends. A write then fails; otherwise it would
// end the process and leave loop devices and mounts behind. Ignoring SIGPIPE would also work, but child processes would
// inherit it.
func surviveBrokenPipes() (stop func()) {
	unread := make(chan os.Signal, 1)
	signal.Notify(unread, syscall.SIGPIPE)
	return func() { signal.Stop(unread) }
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Command oxide-csi is the Oxide CSI plugin. Without a subcommand it serves the CSI services of package core on a unix
// socket.
//
// docs/reference/configuration.md describes its configuration. A process with an invalid configuration prints one line
// for each problem and ends with exit code 2. If it serves, any other failure ends it with exit code 1.
// docs/reference/cli.md has the exit codes of the commands.
//
// The files, in reading order:
//
//   - main.go, help.go: the commands and their help; man.go: their man pages, for a release
//   - serve.go: builds the plugin, serves, and stops at a signal; notify.go: tells systemd of its state
//   - services.go: builds the controller service and the node service
//   - provider.go, restart.go: build their parts for node identity and planned restarts
//   - http.go: health and metrics
//   - metadata.go, await_detach.go, ready.go, volume.go, snapshot.go: the subcommands
//   - complete.go: what shells complete; output.go: makes what is printed safe for a terminal
//   - operator.go, doctor.go, explain.go, orphans.go, bundle.go, bundle_logs.go: the commands of an operator
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
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
	os.Exit(run(os.Args[0], os.Args[1:], os.Environ(), os.Stdout, os.Stderr))
}

// run runs the program. name is the name by which it was started.
func run(name string, args, environ []string, stdout, stderr io.Writer) int {
	stdout, stderr = printable{stdout}, printable{stderr}
	isKubectlPlugin := filepath.Base(name) == kubectlPlugin
	if isKubectlPlugin {
		environ = withKubeconfig(environ)
	}
	root := command(environ, stdout, stderr)
	if isKubectlPlugin {
		asKubectlPlugin(root)
	}
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

// kubectlPlugin is the name of a link to this program with which kubectl runs it as "kubectl oxide".
const kubectlPlugin = "kubectl-oxide"

// asKubectlPlugin makes a plugin of kubectl of the program: help speaks of "kubectl oxide", and nothing is served.
func asKubectlPlugin(root *cobra.Command) {
	root.Annotations = map[string]string{cobra.CommandDisplayNameAnnotation: "kubectl oxide"}
	root.Short, root.Long = "Volumes on Oxide racks", "kubectl oxide shows and repairs volumes on Oxide racks."
	root.Example = "  oxide-csi explain default/data\n  oxide-csi doctor"
	root.RunE = func(cmd *cobra.Command, _ []string) error { return cmd.Help() }
	root.ResetFlags()
}

// withKubeconfig adds the kubeconfig file that kubectl uses, unless the plugin's own variable names one. Of several
// files in KUBECONFIG only the first is used.
func withKubeconfig(environ []string) []string {
	const own = "OXIDE_CSI_KUBECONFIG"
	if getenv(environ, own) != "" {
		return environ
	}
	file := getenv(environ, "HOME") + "/.kube/config"
	if named := filepath.SplitList(getenv(environ, "KUBECONFIG")); len(named) > 0 {
		file = named[0]
	} else if _, err := os.Stat(file); err != nil {
		return environ
	}
	return append(slices.Clone(environ), own+"="+file)
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
			Use:     "version",
			Short:   "Print the version",
			Example: `  oxide-csi version`,
			Args:    noArgs,
			Run:     func(*cobra.Command, []string) { fmt.Fprintf(stdout, "oxide-csi version %s\n", version) },
		},
	)
	return root
}

// helpNewcomer prints the help for a user who started the program to see what it is: neither mode nor endpoint is set
// anywhere. The problems of the configuration follow.
func helpNewcomer(cmd *cobra.Command, stderr io.Writer, err error) {
	var problems config.Problems
	if errors.As(err, &problems) && problems.Missing("--mode") && problems.Missing("--endpoint") {
		cmd.SetOut(stderr)
		_ = cmd.Help() // as for any output, nothing can report that it was not written
		fmt.Fprintln(stderr)
	}
}

// noArgs rejects what is not a subcommand, and suggests one.
func noArgs(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	advice := "see " + cmd.CommandPath() + " --help"
	if similar := similarCommand(cmd, args[0]); similar != "" {
		advice = "did you mean " + cmd.CommandPath() + " " + similar + "?"
	}
	return config.Problems{config.FlagProblem(fmt.Errorf("%q is not a command: %s", args[0], advice))}
}

// similarCommand returns the subcommand that lists a word in SuggestFor, or one with a similar name, or "". The list
// comes first: umount is nearer to mount than to unmount.
func similarCommand(cmd *cobra.Command, word string) string {
	for _, sub := range cmd.Commands() {
		if slices.Contains(sub.SuggestFor, word) {
			return sub.Name()
		}
	}
	cmd.SuggestionsMinimumDistance = 1 // one letter may differ
	if len(word) > 5 {
		cmd.SuggestionsMinimumDistance = 2 // or two are exchanged
	}
	if similar := cmd.SuggestionsFor(word); len(similar) > 0 {
		return similar[0]
	}
	return ""
}

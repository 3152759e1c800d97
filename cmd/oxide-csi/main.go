// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Command oxide-csi is the Oxide CSI plugin. Without a subcommand it serves the CSI services of package core on a unix
// socket.
//
// docs/reference/configuration.md describes its configuration. If that is invalid, the plugin prints one line for each
// problem and ends with exit code 78. Any other failure ends it with exit code 1, and a crash with Go's exit code 2.
// docs/reference/cli.md has the exit codes of the commands.
//
// The files, in reading order:
//
//   - main.go, help.go: the commands and their help; man.go: their man pages, for a release
//   - serve.go: builds the plugin, serves, and stops at a signal; notify.go: tells systemd of its state
//   - services.go: builds the controller service and the node service
//   - provider.go, rack.go, restart.go: build their parts for node identity, racks and planned restarts
//   - http.go: health and metrics
//   - host.go: adds the plugin and its own commands, on Linux; elsewhere.go: its counterpart on macOS
//   - metadata.go, await_detach.go, ready.go: the commands for the plugin's pod
//
// Package admin has the commands of an operator.
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

	"github.com/oxidecomputer/oxide-csi-plugin/admin"
	"github.com/oxidecomputer/oxide-csi-plugin/core/config"
)

// version is set by the linker.
var version = "devel"

func main() {
	os.Exit(run(os.Args[0], os.Args[1:], os.Environ(), os.Stdout, os.Stderr))
}

// run runs the program. name is the name by which it was started.
func run(name string, args, environ []string, stdout, stderr io.Writer) int {
	stdout, stderr = admin.Printable{Writer: stdout}, admin.Printable{Writer: stderr}
	isKubectlPlugin := filepath.Base(name) == kubectlPlugin
	if isKubectlPlugin {
		environ = withKubeconfig(environ)
	}
	root := command(environ, stdout, stderr)
	if isKubectlPlugin {
		root.Annotations = map[string]string{cobra.CommandDisplayNameAnnotation: "kubectl oxide"}
		withoutPlugin(root)
	}
	root.SetArgs(args)
	cmd, err := root.ExecuteContextC(context.Background())
	if err == nil {
		return 0
	}
	var problems config.Problems
	if errors.As(err, &problems) {
		for _, problem := range problems {
			fmt.Fprintln(stderr, problem)
		}
		if cmd == root { // the plugin, or a misspelt command
			return admin.ExitConfig
		}
		return admin.ExitUsage
	}
	fmt.Fprintf(stderr, "oxide-csi: %s\n", strings.ReplaceAll(err.Error(), "\n", "; "))
	var exit admin.ExitError
	if errors.As(err, &exit) {
		return exit.Code
	}
	return admin.ExitFailed
}

// kubectlPlugin is the name of a link to this program with which kubectl runs it as "kubectl oxide".
const kubectlPlugin = "kubectl-oxide"

// withoutPlugin makes root serve nothing: it prints its help.
func withoutPlugin(root *cobra.Command) {
	root.Short = "Volumes on Oxide racks"
	root.Long = root.CommandPath() + " says what is wrong with volumes on Oxide racks, and who has to act."
	root.Example = "  oxide-csi explain default/data\n  oxide-csi doctor"
	root.RunE = func(cmd *cobra.Command, _ []string) error { return cmd.Help() }
	root.ResetFlags()
}

// withKubeconfig adds the kubeconfig file that kubectl uses, unless the plugin's own variable names one. Of several
// files in KUBECONFIG only the first is used.
func withKubeconfig(environ []string) []string {
	const own = "OXIDE_CSI_KUBECONFIG"
	if admin.Getenv(environ, own) != "" {
		return environ
	}
	file := admin.Getenv(environ, "HOME") + "/.kube/config"
	if named := filepath.SplitList(admin.Getenv(environ, "KUBECONFIG")); len(named) > 0 {
		file = named[0]
	} else if _, err := os.Stat(file); err != nil {
		return environ
	}
	return append(slices.Clone(environ), own+"="+file)
}

func command(environ []string, stdout, stderr io.Writer) *cobra.Command {
	root := &cobra.Command{
		Use:           "oxide-csi",
		Version:       version,
		Args:          admin.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.SetOut(stdout)
	root.SetErr(stderr)
	root.SetUsageFunc(printUsage)
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		if cmd.HasSubCommands() && len(cmd.Flags().Args()) > 0 { // the flag may be one of the command that was meant
			return admin.NoArgs(cmd, cmd.Flags().Args())
		}
		return config.Problems{config.FlagProblem(err)}
	})
	addPlugin(root, environ, stdout, stderr)
	root.AddCommand(admin.Commands(program(environ, stdout, stderr))...)
	root.AddCommand(&cobra.Command{
		Use:     "version",
		Short:   "Print the version",
		Example: `  oxide-csi version`,
		Args:    admin.NoArgs,
		Run:     func(*cobra.Command, []string) { fmt.Fprintf(stdout, "oxide-csi version %s\n", version) },
	})
	return root
}

// program is what the commands of an operator need of this program.
func program(environ []string, stdout, stderr io.Writer) admin.Program {
	return admin.Program{
		Version: version, Environ: environ, Stdout: stdout, Stderr: stderr, NewRack: newRackThrough, Sources: identitySources,
	}
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

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package admin

import (
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/oxidecomputer/oxide-csi-plugin/core/config"
)

// Exit codes.
const (
	ExitFailed = 1
	// ExitUsage is for a command of an operator. Go's runtime ends a crashed process with 2, too.
	ExitUsage = 2
	// ExitNotFound is for an object that does not exist, as in the commands that call the plugin.
	ExitNotFound = 4
	// ExitConfig is for the plugin itself. It is EX_CONFIG of sysexits.h. The systemd units start the plugin again after
	// any other code (RestartPreventExitStatus=), so a crash must not end with this one.
	ExitConfig = 78
)

// NoArgs rejects what is not a subcommand, and suggests one.
func NoArgs(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	advice := "see " + cmd.CommandPath() + " --help"
	if similar := similarCommand(cmd, args[0]); similar != "" {
		advice = "did you mean " + similar + "?"
	} else if !cmd.HasSubCommands() {
		return Usage("%s takes no argument such as %q: %s", cmd.CommandPath(), args[0], advice)
	}
	return config.Problems{config.FlagProblem(fmt.Errorf("%q is not a command: %s", args[0], advice))}
}

// similarCommand returns the path of the subcommand that lists a word in SuggestFor, or one with a similar name, or of
// the command of another group with this name, or "". The list comes first: umount is nearer to mount than to unmount.
func similarCommand(cmd *cobra.Command, word string) string {
	for _, sub := range cmd.Commands() {
		if slices.Contains(sub.SuggestFor, word) {
			return sub.CommandPath()
		}
	}
	cmd.SuggestionsMinimumDistance = 1 // one letter may differ
	if len(word) > 5 {
		cmd.SuggestionsMinimumDistance = 2 // or two are exchanged
	}
	if similar := cmd.SuggestionsFor(word); len(similar) > 0 {
		return cmd.CommandPath() + " " + similar[0]
	}
	for _, group := range slices.Backward(cmd.Root().Commands()) { // volume before snapshot
		if group.Name() == word {
			return group.CommandPath()
		}
		for _, sub := range group.Commands() {
			if sub.Name() == word || slices.Contains(sub.SuggestFor, word) {
				return sub.CommandPath()
			}
		}
	}
	return ""
}

// exactly requires these arguments, and rejects empty ones.
func exactly(names ...string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) != len(names) {
			return Usage("%s needs %s; arguments given: %d; see %s --help", cmd.CommandPath(), strings.Join(names, " and "),
				len(args), cmd.CommandPath())
		}
		for i, arg := range args {
			if arg == "" {
				return Usage("%s: %s is empty: see %s --help", cmd.CommandPath(), names[i], cmd.CommandPath())
			}
		}
		return nil
	}
}

// exactlyOr is [exactly] for a command where a word too many is often the value of a flag, unless that is given.
func exactlyOr(flag string, names ...string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) == len(names)+1 && !cmd.Flags().Changed(strings.TrimPrefix(flag, "--")) {
			return Usage("%s needs %s alone: is %q the value of a flag, %s=%s?",
				cmd.CommandPath(), strings.Join(names, " and "), args[len(names)], flag, args[len(names)])
		}
		return exactly(names...)(cmd, args)
	}
}

// Usage returns an error of the command line, which ends a command with [ExitUsage].
func Usage(format string, args ...any) error {
	return config.Problems{config.FlagProblem(fmt.Errorf(format, args...))}
}

// ExitError is an error with its own exit code.
type ExitError struct {
	Code int
	error
}

// Exit returns an error that ends the process with an exit code.
func Exit(code int, err error) error { return ExitError{code, err} }

func (e ExitError) Unwrap() error { return e.error }

// Getenv returns the value of a variable, or "" if it is not set.
func Getenv(environ []string, name string) string {
	for _, entry := range environ {
		if value, ok := strings.CutPrefix(entry, name+"="); ok {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

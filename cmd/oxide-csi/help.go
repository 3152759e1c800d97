// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main

import (
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/oxidecomputer/oxide-csi-plugin/core/config"
)

const rootHelp = `oxide-csi serves the Container Storage Interface for the disks of an Oxide rack.

Every flag below can also be given by the environment variable in brackets, or in a YAML file;
docs/reference/configuration.md lists all settings.`

const rootExample = `  # A controller, which calls the rack and can run anywhere
  oxide-csi --mode=controller --endpoint=unix:///run/oxide-csi/controller/csi.sock --cluster-id=prod-1 \
    --oxide-host=https://silo.sys.example.com --oxide-project=databases --oxide-token-file=/etc/oxide-csi/token

  # A node, which formats and mounts disks on its own instance, and has no token
  oxide-csi --mode=node --endpoint=unix:///run/oxide-csi/node/csi.sock`

// usageWidth is the column at which help texts wrap.
const usageWidth = 120

// printUsage prints cobra's usage text with two differences: examples come first, and settings are grouped.
func printUsage(cmd *cobra.Command) error {
	w := cmd.OutOrStderr()
	if cmd.HasExample() {
		fmt.Fprintf(w, "Examples:\n%s\n\n", examples(cmd))
	}
	fmt.Fprint(w, "Usage:")
	if cmd.Runnable() {
		fmt.Fprintf(w, "\n  %s", cmd.UseLine())
	}
	if cmd.HasAvailableSubCommands() {
		fmt.Fprintf(w, "\n  %s [command]\n\nAvailable Commands:", cmd.CommandPath())
		for _, sub := range cmd.Commands() {
			if sub.IsAvailableCommand() || sub.Name() == "help" {
				fmt.Fprintf(w, "\n  %-*s %s", sub.NamePadding(), sub.Name(), sub.Short)
			}
		}
	}
	groups, others := config.Groups(cmd.LocalFlags())
	for _, group := range groups {
		printFlags(w, group.Name, group.Flags.FlagUsagesWrapped(usageWidth))
		if group.Note != "" {
			printNote(w, group.Note)
		}
	}
	if others.HasAvailableFlags() {
		printFlags(w, "Flags", others.FlagUsages())
	}
	if cmd.HasAvailableInheritedFlags() {
		printFlags(w, "Global Flags", cmd.InheritedFlags().FlagUsages())
	}
	if cmd.HasAvailableSubCommands() {
		fmt.Fprintf(w, "\n\nUse \"%s [command] --help\" for more information about a command.", cmd.CommandPath())
	}
	fmt.Fprintln(w)
	return nil
}

// examples returns a command's examples with the name by which this program was started. A line of kubectl runs the
// program of a container, which keeps its name.
func examples(cmd *cobra.Command) string {
	var text strings.Builder
	for line := range strings.Lines(cmd.Example) {
		if !strings.HasPrefix(line, "  kubectl ") {
			line = strings.ReplaceAll(line, "oxide-csi ", cmd.Root().CommandPath()+" ")
		}
		text.WriteString(line)
	}
	return text.String()
}

// printNote prints a text below flags, wrapped like their help texts.
func printNote(w io.Writer, note string) {
	column := usageWidth
	for _, word := range strings.Fields(note) {
		if column+1+len(word) > usageWidth {
			fmt.Fprint(w, "\n     ")
			column = len("     ")
		}
		fmt.Fprint(w, " ", word)
		column += 1 + len(word)
	}
}

func printFlags(w io.Writer, heading, usages string) {
	fmt.Fprintf(w, "\n\n%s:\n%s", heading, strings.TrimRight(usages, " \n"))
}

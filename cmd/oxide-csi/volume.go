// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/cmd/oxide-csi/client"
	"github.com/oxidecomputer/oxide-csi-plugin/core/config"
)

// The commands volume and snapshot stand in these files:
//
//   - volume.go: what they have in common
//   - volume_rack.go: volumes on the rack: create, list, show, delete
//   - volume_restart.go: what is told of planned restarts
//   - volume_node.go: volumes on nodes: attach, mount, unmount, detach
//   - snapshot.go: snapshots
//   - client: what the plugin is asked

const volumeHelp = `oxide-csi volume makes and uses volumes on a host without an orchestrator. It asks a plugin that runs: a controller (plugin
mode controller or all) to create, attach, detach and delete, and the node plugin of this host (mode node or all) to
mount and unmount. In the words of the specification, attach and detach are ControllerPublishVolume and
ControllerUnpublishVolume, mount is NodeStageVolume and NodePublishVolume, unmount is NodeUnpublishVolume and
NodeUnstageVolume.

Every command may be repeated, after success and after failure; it keeps nothing between runs. Nothing is retried: a
command ends when the plugin has answered or the time of --timeout is up, and its exit code says what to do.

VOLUME is a volume's ID, or the name that it was created with.

Exit codes: 0, what was asked for is so, since now or since before; 2, the command line is wrong, or the plugin does not
take its values; 3, not now: nobody answers, or the rack or the node is not ready: repeat; 4, there is no such volume,
snapshot or node; 5, something stands in the way, and the message says what; 6, no room: the quota, the rack or the
instance is full; 7, the plugin's token does not allow it; 1, anything else.`

// Sockets that are asked where none is named.
const (
	defaultControllerSocket = "/run/oxide-csi/controller/csi.sock"
	defaultNodeSocket       = "/run/oxide-csi/node/csi.sock"
	defaultStagingDir       = "/var/lib/oxide-csi/staging"
)

// byHand is what the commands volume and snapshot have in common.
type byHand struct {
	environ        []string
	stdout, stderr io.Writer

	endpoint, controller, node config.SocketFlag
	stagingDir, sysRoot        string
	timeout                    time.Duration
	json, dryRun               bool
}

func volumeCommand(environ []string, stdout, stderr io.Writer) *cobra.Command {
	b := &byHand{environ: environ, stdout: stdout, stderr: stderr}
	cmd := b.group("volume", "Create, attach and mount volumes without an orchestrator", volumeHelp)
	cmd.PersistentFlags().
		Var(&b.node, "node-endpoint", "socket of this host's node plugin, where it is not that of --endpoint (default unix://"+defaultNodeSocket+") [OXIDE_CSI_NODE_ENDPOINT]")
	cmd.PersistentFlags().
		StringVar(&b.stagingDir, "staging-dir", "", "folder for staging paths, one for each volume that is mounted; the same for mount, unmount and detach (default "+defaultStagingDir+") [OXIDE_CSI_STAGING_DIR]")
	cmd.AddCommand(
		b.createVolume(),
		b.listVolumes(),
		b.showVolume(),
		b.attach(),
		b.mount(),
		b.unmount(),
		b.detach(),
		b.deleteVolume(),
	)
	return cmd
}

// group is a command that only has subcommands.
func (b *byHand) group(name, short, long string) *cobra.Command {
	cmd := &cobra.Command{
		Use:   name,
		Short: short,
		Long:  long,
		Args:  noArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	flags := cmd.PersistentFlags()
	flags.SortFlags = false
	flags.Var(&b.endpoint, "endpoint", "the plugin's socket, unix:///csi/csi.sock or an absolute path [CSI_ENDPOINT]")
	flags.Var(
		&b.controller,
		"controller-endpoint",
		"socket of the controller, where it is not that of --endpoint (default unix://"+defaultControllerSocket+") [OXIDE_CSI_CONTROLLER_ENDPOINT]",
	)
	flags.DurationVar(&b.timeout, "timeout", 5*time.Minute, "how long the command may take; 0 is without end")
	flags.BoolVar(&b.json, "json", false, "print one JSON value")
	return cmd
}

// changes adds the flag of commands that change something.
func (b *byHand) changes(cmd *cobra.Command) *cobra.Command {
	cmd.Flags().
		BoolVar(&b.dryRun, "dry-run", false, "check what can be checked, change nothing, and print the CSI calls that would be made")
	return cmd
}

// exactly asks for these arguments.
func exactly(names ...string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) != len(names) {
			return usage(
				"%s needs %s, not %d arguments: see %s --help",
				cmd.CommandPath(),
				strings.Join(names, " and "),
				len(args),
				cmd.CommandPath(),
			)
		}
		for i, arg := range args {
			if arg == "" {
				return usage("%s: %s is empty: see %s --help", cmd.CommandPath(), names[i], cmd.CommandPath())
			}
		}
		return nil
	}
}

func usage(format string, args ...any) error {
	return config.Problems{config.FlagProblem(fmt.Errorf(format, args...))}
}

// client connects to the plugin as the flags and the environment say.
func (b *byHand) client(progress io.Writer) (*client.Client, error) {
	if b.timeout < 0 {
		return nil, config.Problems{{Flag: "--timeout", What: fmt.Sprintf("%s is negative", b.timeout)}}
	}
	var endpoint, controller, node config.SocketFlag
	for _, known := range []struct {
		socket         *config.SocketFlag
		flag, variable string
	}{
		{&endpoint, "--endpoint", "CSI_ENDPOINT"},
		{&controller, "--controller-endpoint", "OXIDE_CSI_CONTROLLER_ENDPOINT"},
		{&node, "--node-endpoint", "OXIDE_CSI_NODE_ENDPOINT"},
	} {
		if text := variable(b.environ, known.variable); text != "" {
			if err := known.socket.Set(text); err != nil {
				return nil, config.Problems{{Flag: known.flag, What: err.Error() + " (set by " + known.variable + ")"}}
			}
		}
	}
	stagingDir, err := filepath.Abs(cmp.Or(b.stagingDir, variable(b.environ, "OXIDE_CSI_STAGING_DIR"), defaultStagingDir))
	if err != nil {
		return nil, err
	}
	return client.New(client.Options{
		Controller: string(cmp.Or(b.controller, b.endpoint, controller, endpoint, defaultControllerSocket)),
		Node:       string(cmp.Or(b.node, b.endpoint, node, endpoint, defaultNodeSocket)),
		StagingDir: stagingDir,
		SysRoot:    cmp.Or(b.sysRoot, variable(b.environ, "OXIDE_CSI_SYS_ROOT"), "/sys"),
		DryRun:     b.dryRun,
		Progress:   progress,
	})
}

func variable(environ []string, name string) string {
	for _, entry := range environ {
		if value, ok := strings.CutPrefix(entry, name+"="); ok {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

// ask asks the plugin and prints the answer: as JSON, or with the function that say returns for people. A dry run prints the
// calls that it has not made.
func ask[T any](
	b *byHand,
	cmd *cobra.Command,
	question func(context.Context, *client.Client) (T, error),
	say func(io.Writer, T),
) error {
	plugin, err := b.client(terminal(b.stderr))
	if err != nil {
		return err
	}
	ctx := cmd.Context()
	if b.timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, b.timeout)
		defer cancel()
	}
	answer, err := question(ctx, plugin)
	if closeErr := plugin.Close(); err == nil {
		err = closeErr
	}
	switch {
	case err != nil:
		return exitError{client.ExitCode(err), err}
	case b.dryRun && b.json:
		return printJSON(b.stdout, dryRun{true, plugin.Calls()})
	case b.dryRun:
		return printTable(b.stdout, func(w io.Writer) { sayCalls(w, plugin.Calls()) })
	case b.json:
		return printJSON(b.stdout, answer)
	}
	return printTable(b.stdout, func(w io.Writer) { say(w, answer) })
}

// dryRun is what a dry run has found out.
type dryRun struct {
	DryRun bool          `json:"dryRun"`
	Calls  []client.Call `json:"calls"`
}

// terminal is where a line about a long wait can be written over and over; nil where nobody would see it.
func terminal(stderr io.Writer) io.Writer {
	file, ok := stderr.(*os.File)
	if !ok {
		return nil
	}
	if _, err := unix.IoctlGetTermios(int(file.Fd()), unix.TCGETS); err != nil {
		return nil
	}
	return file
}

func printJSON(w io.Writer, value any) error {
	text := json.NewEncoder(w)
	text.SetIndent("", "  ")
	text.SetEscapeHTML(false)
	return text.Encode(value)
}

// printTable aligns columns, which tabs separate.
func printTable(w io.Writer, say func(io.Writer)) error {
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	say(table)
	return table.Flush()
}

// line writes a line of a table. The table keeps what goes wrong until it is flushed.
func line(w io.Writer, columns ...string) {
	_, _ = io.WriteString(w, strings.Join(columns, "\t")+"\n")
}

func sayCalls(w io.Writer, calls []client.Call) {
	line(w, "nothing was changed; without --dry-run these calls would be made:")
	for _, call := range calls {
		text := "  " + call.Method
		for _, part := range []struct{ name, value string }{
			{"name", call.Name}, {"volume", call.VolumeID}, {"snapshot", call.SnapshotID}, {"source volume", call.SourceVolumeID},
			{"source snapshot", call.SourceSnapshotID}, {"size", sizeText(call.SizeBytes)}, {"node", call.NodeID},
			{"staging path", call.StagingPath}, {"target path", call.TargetPath},
		} {
			if part.value != "" {
				text += ", " + part.name + " " + part.value
			}
		}
		line(w, text)
	}
}

func sizeText(bytes int64) string {
	if bytes == 0 {
		return ""
	}
	return config.Size(bytes).String()
}

// completionTimeout is how long somebody at a shell waits for what a key press offers.
const completionTimeout = 2 * time.Second

// complete offers, for the first argument or a flag's value, what the plugin has. Where it does not answer, nothing is offered.
func complete[T any](
	b *byHand,
	list func(context.Context, *client.Client) ([]T, error),
	offer func(T) string,
) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, begun string) ([]string, cobra.ShellCompDirective) {
		plugin, err := b.client(nil)
		if err != nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		ctx, cancel := context.WithTimeout(context.Background(), completionTimeout)
		defer cancel()
		things, err := list(ctx, plugin)
		if plugin.Close() != nil || err != nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		var offers []string
		for _, thing := range things {
			if text := offer(thing); strings.HasPrefix(text, begun) {
				offers = append(offers, text)
			}
		}
		return offers, cobra.ShellCompDirectiveNoFileComp
	}
}

func (b *byHand) completeVolume() cobra.CompletionFunc {
	return complete(b, func(ctx context.Context, plugin *client.Client) ([]client.Volume, error) {
		list, err := plugin.ListVolumes(ctx, false)
		return list.Volumes, err
	},
		func(v client.Volume) string { return v.ID + "\t" + sizeText(v.SizeBytes) + ", " + where(v) })
}

func (b *byHand) completeSnapshot() cobra.CompletionFunc {
	return complete(b, func(ctx context.Context, plugin *client.Client) ([]client.Snapshot, error) {
		return plugin.ListSnapshots(ctx, "")
	},
		func(s client.Snapshot) string { return s.ID + "\tof volume " + s.SourceVolumeID })
}

// first completes the first argument only, and leaves the others to the shell, which knows paths.
func first(complete cobra.CompletionFunc) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, begun string) ([]string, cobra.ShellCompDirective) {
		if len(args) > 0 {
			return nil, cobra.ShellCompDirectiveDefault
		}
		return complete(cmd, args, begun)
	}
}

// completeFlag completes the value of a flag that the command has.
func completeFlag(cmd *cobra.Command, flag string, complete cobra.CompletionFunc) {
	if err := cmd.RegisterFlagCompletionFunc(flag, complete); err != nil {
		panic(err) // there is no such flag, or it has one already
	}
}

// keyValues are the values of a flag of KEY=VALUE, which may be given again and again. A value may hold commas.
func keyValues(flags *pflag.FlagSet, name, help string) *map[string]string {
	values := keyValueFlag{}
	flags.Var(&values, name, help)
	return (*map[string]string)(&values)
}

type keyValueFlag map[string]string

func (f *keyValueFlag) String() string { return "" }
func (f *keyValueFlag) Type() string   { return "key=value" }
func (f *keyValueFlag) Set(text string) error {
	key, value, ok := strings.Cut(text, "=")
	if !ok || key == "" {
		return fmt.Errorf("%q is not of the form key=value", text)
	}
	if _, twice := (*f)[key]; twice {
		return fmt.Errorf("%q is given twice", key)
	}
	(*f)[key] = value
	return nil
}

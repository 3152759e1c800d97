// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package admin

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/oxidecomputer/oxide-csi-plugin/admin/client"
	"github.com/oxidecomputer/oxide-csi-plugin/core/config"
)

// The commands volume and snapshot are in these files:
//
//   - volume.go: the parts that both commands use
//   - volume_rack.go: volumes on the rack: create, expand, list, show, delete
//   - volume_adopt.go: volumes of a cluster that is gone; registrations.go: what an orchestrator needs for them
//   - volume_restart.go: the output about planned restarts
//   - volume_encrypted.go: passphrases and headers of encrypted volumes
//   - volume_node.go: volumes on nodes: attach, mount, unmount, detach
//   - snapshot.go: snapshots
//   - view.go: outputs, tables, sorting and --watch
//   - client: the calls to the plugin

const volumeHelp = `oxide-csi volume creates and uses volumes on a host without an orchestrator. It calls a running plugin. A controller
(mode controller or all) creates, expands, attaches, detaches, adopts and deletes. The node plugin of this host (mode node or all)
mounts and unmounts. The CSI calls are: expand, ControllerExpandVolume; attach, ControllerPublishVolume; detach, ControllerUnpublishVolume; mount,
NodeStageVolume and NodePublishVolume; unmount, NodeUnpublishVolume and NodeUnstageVolume; adopt, ControllerModifyVolume.

Every command can be repeated, after success and after failure. A command stores nothing. It ends when the plugin has
answered or after --timeout. With --wait it repeats itself where its exit code would be 3, and until the plugin listens.
Its exit code says what to do.

VOLUME is a volume's ID, or the name with which it was created. NODE is an instance's ID or its name.

Exit codes: 0, done, now or before; 2, the command line or one of its values is wrong; 3, the plugin, the rack or the node
is not ready: repeat; 4, the volume, snapshot or node does not exist; 5, another condition prevents it, see the message;
6, the quota, the rack or the instance is full; 7, the plugin's token does not allow it; 8, no plugin listens at the
socket, or this user may not use it; 1, any other failure.`

const volumeExample = `  id=$(oxide-csi volume create postgres --size=20GiB)
  oxide-csi volume mount "$id" /srv/postgres --attach
  oxide-csi volume list`

// Defaults of the sockets and of the staging folder.
const (
	defaultControllerSocket = "/run/oxide-csi/controller/csi.sock"
	defaultNodeSocket       = "/run/oxide-csi/node/csi.sock"
	defaultStagingDir       = "/var/lib/oxide-csi/staging"
)

// waitInterval is the time between two attempts of a command with --wait.
const waitInterval = 2 * time.Second

// storageCommands holds the flags that the commands volume and snapshot share.
type storageCommands struct {
	environ        []string
	stdout, stderr io.Writer

	endpoint, controller, node config.SocketFlag
	stagingDir                 string
	devRoot, sysRoot           string
	timeout                    time.Duration
	output                     string
	json, dryRun, wait, watch  bool
}

func volumeCommand(environ []string, stdout, stderr io.Writer) *cobra.Command {
	b := &storageCommands{environ: environ, stdout: stdout, stderr: stderr}
	cmd := b.group("volume", "Create, attach and mount volumes without an orchestrator", volumeHelp, volumeExample)
	cmd.PersistentFlags().
		Var(&b.node, "node-endpoint", "socket of this host's node plugin, if it differs from --endpoint (default unix://"+defaultNodeSocket+") [OXIDE_CSI_NODE_ENDPOINT]")
	cmd.PersistentFlags().
		StringVar(&b.stagingDir, "staging-dir", "", "folder for the staging paths of mounted volumes; the same for mount, unmount and detach (default "+defaultStagingDir+") [OXIDE_CSI_STAGING_DIR]")
	cmd.AddCommand(
		b.createVolume(),
		b.expandVolume(),
		b.listVolumes(),
		b.showVolume(),
		b.attach(),
		b.mount(),
		b.unmount(),
		b.detach(),
		b.deleteVolume(),
		b.headerBackup(),
		b.adopt(),
	)
	return cmd
}

// group is a command that only has subcommands.
func (b *storageCommands) group(name, short, long, example string) *cobra.Command {
	cmd := &cobra.Command{
		Use:     name,
		Short:   short,
		Long:    long,
		Example: example,
		Args:    NoArgs,
		RunE:    func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	flags := cmd.PersistentFlags()
	flags.SortFlags = false
	flags.Var(&b.endpoint, "endpoint", "the plugin's socket, unix:///csi/csi.sock or an absolute path [CSI_ENDPOINT]")
	flags.Var(
		&b.controller,
		"controller-endpoint",
		"socket of the controller, if it differs from --endpoint (default unix://"+defaultControllerSocket+") [OXIDE_CSI_CONTROLLER_ENDPOINT]",
	)
	flags.DurationVar(&b.timeout, "timeout", 5*time.Minute, "how long the command may take; 0 means no limit")
	flags.BoolVar(&b.wait, "wait", false, "repeat until the plugin, the rack and the node are ready, or --timeout is up")
	flags.StringVarP(&b.output, "output", "o", "", "print the result as json or yaml; lists also as wide or name")
	flags.BoolVar(&b.json, "json", false, "the same as --output=json")
	completeFlag(cmd, "output", cobra.FixedCompletions(
		view[int]{names: func(int) []string { return nil }}.outputs(), cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

// withDryRun adds the flag --dry-run to a command that changes something.
func (b *storageCommands) withDryRun(cmd *cobra.Command) *cobra.Command {
	cmd.Flags().
		BoolVar(&b.dryRun, "dry-run", false, "change nothing, but check what can be checked and print the CSI calls")
	return cmd
}

// client makes a client with the sockets of the flags and the environment.
func (b *storageCommands) client(progress client.Progress) (*client.Client, error) {
	if b.timeout < 0 {
		return nil, config.Problems{{Flag: "--timeout", What: fmt.Sprintf("%s is negative", b.timeout)}}
	}
	var endpoint, controller, node config.SocketFlag
	for _, setting := range []struct {
		socket         *config.SocketFlag
		flag, variable string
	}{
		{&endpoint, "--endpoint", "CSI_ENDPOINT"},
		{&controller, "--controller-endpoint", "OXIDE_CSI_CONTROLLER_ENDPOINT"},
		{&node, "--node-endpoint", "OXIDE_CSI_NODE_ENDPOINT"},
	} {
		if text := Getenv(b.environ, setting.variable); text != "" {
			if err := setting.socket.Set(text); err != nil {
				return nil, config.Problems{{Flag: setting.flag, What: err.Error() + " (set by " + setting.variable + ")"}}
			}
		}
	}
	stagingDir, err := filepath.Abs(cmp.Or(b.stagingDir, Getenv(b.environ, "OXIDE_CSI_STAGING_DIR"), defaultStagingDir))
	if err != nil {
		return nil, err
	}
	return client.New(client.Options{
		Controller: string(cmp.Or(b.controller, b.endpoint, controller, endpoint, defaultControllerSocket)),
		Node:       string(cmp.Or(b.node, b.endpoint, node, endpoint, defaultNodeSocket)),
		StagingDir: stagingDir,
		DevRoot:    cmp.Or(b.devRoot, Getenv(b.environ, "OXIDE_CSI_DEV_ROOT"), "/dev"),
		SysRoot:    cmp.Or(b.sysRoot, Getenv(b.environ, "OXIDE_CSI_SYS_ROOT"), "/sys"),
		DryRun:     b.dryRun,
		Progress:   progress,
	})
}

// callPlugin calls the plugin and returns the result, and the calls that a dry run did not make. An error has the exit
// code of the command.
func callPlugin[T any](
	b *storageCommands,
	cmd *cobra.Command,
	call func(context.Context, *client.Client) (T, error),
) (result T, calls []client.Call, err error) {
	progress := client.NewProgress(unfiltered(b.stderr))
	plugin, err := b.client(progress)
	if err != nil {
		return result, nil, err
	}
	ctx := cmd.Context()
	if b.timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, b.timeout)
		defer cancel()
	}
	reported := ""
	for waitsFor := error(nil); ; waitsFor = err {
		result, err = call(ctx, plugin)
		if waitsFor != nil && err != nil && ctx.Err() != nil {
			err = waitsFor // the time was up during this attempt, which says nothing
		}
		if err == nil || !b.wait || ctx.Err() != nil || !client.IsWorthWaiting(err) {
			break
		}
		if progress.Terminal != nil || reported != err.Error() {
			progress.Show("waiting: " + err.Error())
		}
		if reported != err.Error() {
			reported = err.Error()
			_, _ = daemon.SdNotify(false, "STATUS="+strings.ReplaceAll(reported, "\n", " ")) // of no use but under systemd
		}
		select {
		case <-ctx.Done():
		case <-time.After(waitInterval):
		}
	}
	if reported != "" {
		progress.Clear()
	}
	if closeErr := plugin.Close(); err == nil {
		err = closeErr
	}
	if err != nil {
		err = ExitError{client.ExitCode(err), err}
	}
	return result, plugin.Calls(), err
}

// runAndPrint calls the plugin and prints the result, as JSON or with the function show. A dry run prints the calls
// that it would make.
func runAndPrint[T any](
	b *storageCommands,
	cmd *cobra.Command,
	call func(context.Context, *client.Client) (T, error),
	show func(io.Writer, T),
) error {
	return runAndView(b, cmd, call, view[T]{table: show})
}

// runAndView is runAndPrint for a result with a view.
func runAndView[T any](
	b *storageCommands, cmd *cobra.Command, call func(context.Context, *client.Client) (T, error), v view[T],
) error {
	if b.json {
		b.output = cmp.Or(b.output, outputJSON)
	}
	if known := v.outputs(); b.output != "" && !slices.Contains(known, b.output) {
		return config.Problems{
			{Flag: "--output", What: fmt.Sprintf("%q is not one of %s", b.output, strings.Join(known, ", "))},
		}
	}
	if b.watch {
		return watch(b, cmd, call, v)
	}
	result, calls, err := callPlugin(b, cmd, call)
	switch {
	case err != nil:
		return err
	case b.dryRun:
		plan := view[dryRun]{table: func(w io.Writer, d dryRun) { printCalls(w, d.Calls) }}
		return plan.print(b.stdout, b.output, dryRun{true, calls})
	}
	return v.print(b.stdout, b.output, result)
}

// dryRun is the JSON output of a dry run.
type dryRun struct {
	DryRun bool          `json:"dryRun"`
	Calls  []client.Call `json:"calls"`
}

// unfiltered returns the file behind an output that lets only printable text pass. Progress on a terminal needs it: it
// escapes its text itself.
func unfiltered(out io.Writer) io.Writer {
	if filtered, is := out.(Printable); is {
		return filtered.Writer
	}
	return out
}

// printCalls prints the calls of a dry run.
func printCalls(w io.Writer, calls []client.Call) {
	line(w, "nothing was changed; without --dry-run the command makes these calls:")
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

// nameText returns the name of a volume or snapshot for a table. What is in parentheses is no name for commands.
func nameText(name, cluster, rackName string) string {
	switch {
	case name == "":
		return "(" + rackName + ")"
	case cluster != "":
		return "(" + name + " of cluster " + cluster + ")"
	}
	return name
}

// note prints a text that is neither the result nor an error.
func (b *storageCommands) note(text string) { fmt.Fprintln(b.stderr, "oxide-csi: "+text) }

// complete completes an argument or a flag's value with objects of the plugin: with names, and with IDs for the
// beginning of an ID and for an object without a name. There are no suggestions if the plugin does not answer.
func (b *storageCommands) complete(
	list func(context.Context, *client.Client) ([]suggestion, error),
) cobra.CompletionFunc {
	return func(_ *cobra.Command, _ []string, prefix string) ([]string, cobra.ShellCompDirective) {
		plugin, err := b.client(client.Progress{})
		if err != nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		ctx, cancel := context.WithTimeout(context.Background(), completionTimeout)
		defer cancel()
		objects, err := list(ctx, plugin)
		if plugin.Close() != nil || err != nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return matching(objects, prefix), cobra.ShellCompDirectiveNoFileComp
	}
}

func (b *storageCommands) completeVolume() cobra.CompletionFunc {
	return b.complete(func(ctx context.Context, plugin *client.Client) (suggestions []suggestion, err error) {
		list, err := plugin.ListVolumes(ctx, false)
		for _, v := range list.Volumes {
			suggestions = append(suggestions, suggestion{v.ID, v.UsableName(), sizeText(v.SizeBytes) + ", " + attachmentText(v)})
		}
		return suggestions, err
	})
}

func (b *storageCommands) completeSnapshot() cobra.CompletionFunc {
	return b.complete(func(ctx context.Context, plugin *client.Client) (suggestions []suggestion, err error) {
		snapshots, err := plugin.ListSnapshots(ctx, "")
		for _, s := range snapshots {
			suggestions = append(suggestions, suggestion{s.ID, s.UsableName(), "of volume " + s.SourceVolumeID})
		}
		return suggestions, err
	})
}

func (b *storageCommands) completeNode() cobra.CompletionFunc {
	return b.complete(func(ctx context.Context, plugin *client.Client) (suggestions []suggestion, err error) {
		list, err := plugin.ListVolumes(ctx, false)
		for id, name := range list.NodeNames {
			suggestions = append(suggestions, suggestion{id, name, id})
		}
		return suggestions, err
	})
}

// completeFlag completes the value of a flag that the command has.
func completeFlag(cmd *cobra.Command, flag string, complete cobra.CompletionFunc) {
	if err := cmd.RegisterFlagCompletionFunc(flag, complete); err != nil {
		panic(err) // the flag does not exist, or its completion is already registered
	}
}

// keyValues adds a flag KEY=VALUE that can be repeated. A value may contain commas.
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

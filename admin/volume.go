// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package admin

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
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
//   - client: the calls to the plugin

var volumeHelp = `oxide-csi volume creates and uses volumes on a host without an orchestrator. It calls a running plugin. The node
plugin of this host (mode node or all) mounts and unmounts; a controller (mode controller or all) does the rest.

Every command can be repeated, after success and after failure. It ends with the plugin's response, or after --timeout.
With --wait it repeats itself while its exit code would be 3, and until somebody has ended what is in the way, such as a
running instance.

VOLUME is a volume's ID, or the name with which it was created. NODE is an instance's ID or its name.

` + exitCodesHelp()

// exitCodesHelp has the exit codes of the commands that call a plugin.
func exitCodesHelp() string {
	text := "Exit codes:"
	for _, exit := range client.ExitMeanings {
		text += fmt.Sprintf("\n  %-4d %s", exit.Code, exit.Means)
	}
	return text
}

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
	timeout                    time.Duration
	json, wait                 bool
}

func volumeCommand(environ []string, stdout, stderr io.Writer) *cobra.Command {
	b := &storageCommands{environ: environ, stdout: stdout, stderr: stderr}
	cmd := b.group("volume", "Create, attach and mount volumes without an orchestrator", volumeHelp, volumeExample)
	cmd.PersistentFlags().
		Var(&b.node, "node-endpoint", "socket of this host's node plugin, if it differs from --endpoint (default unix://"+defaultNodeSocket+") [OXIDE_CSI_NODE_ENDPOINT]")
	cmd.PersistentFlags().
		StringVar(&b.stagingDir, "staging-dir", "", "directory for the staging paths of mounted volumes; the same for mount, unmount and detach (default "+defaultStagingDir+") [OXIDE_CSI_STAGING_DIR]")
	cmd.AddCommand(b.createVolume(), b.expandVolume(), b.listVolumes(), b.showVolume(), b.attach(), b.mount(), b.unmount(),
		b.detach(), b.deleteVolume(), b.headerBackup(), b.adopt())
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
	flags.DurationVar(
		&b.timeout,
		"timeout",
		5*time.Minute,
		"how long the command may take, 15m with --wait; 0 means no limit",
	)
	flags.BoolVar(&b.wait, "wait", false, "repeat until the plugin, the rack and the node are ready, or --timeout is up")
	flags.BoolVar(&b.json, "json", false, "print the result as one JSON value")
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
		DevRoot:    cmp.Or(Getenv(b.environ, "OXIDE_CSI_DEV_ROOT"), "/dev"),
		SysRoot:    cmp.Or(Getenv(b.environ, "OXIDE_CSI_SYS_ROOT"), "/sys"),
		Progress:   progress,
	})
}

// waitTimeout is --timeout's default with --wait. A planned restart may wait for the controller's --restart-cool-down,
// which is 5 minutes unless it was set.
const waitTimeout = 15 * time.Minute

// limited returns a context that ends after --timeout.
func (b *storageCommands) limited(ctx context.Context, cmd *cobra.Command) (context.Context, context.CancelFunc) {
	timeout := b.timeout
	if b.wait && !cmd.Flags().Changed("timeout") {
		timeout = waitTimeout
	}
	if timeout == 0 {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, timeout)
}

// callPlugin calls the plugin. An error has the exit code of the command.
func callPlugin[T any](
	b *storageCommands,
	cmd *cobra.Command,
	call func(context.Context, *client.Client) (T, error),
) (result T, err error) {
	progress := client.NewProgress(unfiltered(b.stderr))
	plugin, err := b.client(progress)
	if err != nil {
		return result, err
	}
	interrupted, stop := untilInterrupted(cmd.Context())
	defer stop()
	ctx, cancel := b.limited(interrupted, cmd)
	defer cancel()
	var waitsFor error
	between := false // whether the context ended between two attempts
	wait := waiting{progress: progress, begun: time.Now()}
	for !between {
		result, err = call(ctx, plugin)
		over := ctx.Err() != nil || client.IsOver(ctx)
		if waitsFor != nil && err != nil && over {
			err = waitsFor // the time was up during this attempt, which says nothing
		}
		if err == nil || !b.wait || over || !client.IsWorthWaiting(err) {
			break
		}
		waitsFor = err
		between = !wait.again(ctx, plugin.InWords(client.WaitsFor(err)))
	}
	if wait.reported != "" {
		progress.Clear()
	}
	if err == nil {
		return result, plugin.Close()
	}
	code := client.ExitCode(err)
	if interrupted.Err() != nil {
		code, err = client.ExitInterrupted, interruption(err, waitsFor, between)
	}
	text := plugin.InWords(err.Error())
	_ = plugin.Close() // the command has failed
	return result, ExitError{code, inWords{text, err}}
}

// untilInterrupted returns a context that ends with a signal to end. The process goes on, and takes back what it has
// begun on this host, such as the stage of a mount. A second signal ends the process.
func untilInterrupted(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop)
	return ctx, stop
}

// interruption is the error of an interrupted command that ended with err. waitsFor is nil if it waited for an answer
// only. If the command was interrupted between two attempts, no call was under way.
func interruption(err, waitsFor error, between bool) error {
	const text = "interrupted: the plugin may still carry out what was asked, and a repeated command finds it"
	var left *client.NotUndoneError
	switch {
	case between:
		return fmt.Errorf("interrupted between two attempts: what the plugin has begun goes on, "+
			"and a repeated command finds it; it waited: %w", waitsFor)
	case errors.As(err, &left):
		return errors.New(text + "; " + left.Reason())
	case waitsFor == nil:
		return errors.New(text)
	}
	return fmt.Errorf("%s; it waited: %w", text, waitsFor)
}

// inWords is an error in the words of [client.Client.InWords].
type inWords struct {
	text string
	error
}

func (e inWords) Error() string { return e.text }
func (e inWords) Unwrap() error { return e.error }

// waiting shows what a command with --wait waits for.
type waiting struct {
	progress client.Progress
	begun    time.Time
	reported string
}

// again waits until the next attempt, and returns false if ctx ends first. On a terminal it counts the seconds.
// Elsewhere it shows each reason once.
func (w *waiting) again(ctx context.Context, reason string) bool {
	if w.reported != reason {
		w.reported = reason
		_, _ = daemon.SdNotify(false, "STATUS="+strings.ReplaceAll(reason, "\n", " ")) // of no use but under systemd
		if w.progress.Terminal == nil {
			w.progress.Show("waiting: " + reason)
		}
	}
	for left := waitInterval; left > 0 && ctx.Err() == nil; left -= time.Second {
		if w.progress.Terminal != nil {
			w.progress.Show(fmt.Sprintf("waiting %s, next try in %s: %s", time.Since(w.begun).Round(time.Second), left, reason))
		}
		select {
		case <-ctx.Done():
		case <-time.After(time.Second):
		}
	}
	return ctx.Err() == nil
}

// runAndPrint calls the plugin and prints the result, as JSON or as the table that the function show writes.
func runAndPrint[T any](
	b *storageCommands,
	cmd *cobra.Command,
	call func(context.Context, *client.Client) (T, error),
	show func(io.Writer, T),
) error {
	result, err := callPlugin(b, cmd, call)
	switch {
	case err != nil:
		return err
	case b.json:
		return printJSON(b.stdout, result)
	}
	return printTable(b.stdout, func(w io.Writer) { show(w, result) })
}

// unfiltered returns the file behind an output that lets only printable text pass. Progress on a terminal needs it: it
// escapes its text itself.
func unfiltered(out io.Writer) io.Writer {
	if filtered, is := out.(Printable); is {
		return filtered.Writer
	}
	return out
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

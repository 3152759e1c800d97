// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main

import (
	"context"
	"io"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/oxidecomputer/oxide-csi-plugin/cmd/oxide-csi/client"
	"github.com/oxidecomputer/oxide-csi-plugin/core/config"
)

const snapshotHelp = `oxide-csi snapshot creates and lists snapshots of volumes without an orchestrator. It calls a running controller. To create
a volume from a snapshot, use "oxide-csi volume create NAME --from-snapshot=SNAPSHOT".

SNAPSHOT is a snapshot's ID. For everything else, such as exit codes, see oxide-csi volume --help.`

func snapshotCommand(environ []string, stdout, stderr io.Writer) *cobra.Command {
	b := &storageCommands{environ: environ, stdout: stdout, stderr: stderr}
	cmd := b.group("snapshot", "Create and list snapshots without an orchestrator", snapshotHelp)
	cmd.AddCommand(b.createSnapshot(), b.listSnapshots(), b.showSnapshot(), b.deleteSnapshot())
	return cmd
}

func (b *storageCommands) createSnapshot() *cobra.Command {
	var volume string
	cmd := &cobra.Command{
		Use:   "create NAME",
		Short: "Create a snapshot of a volume, or find the snapshot of this name",
		Long: `create creates a snapshot and prints its ID. The snapshot holds the same data as the volume would after a power cut; to
have all data in it, unmount the volume first. Repeated with the same name and volume, create prints the same ID.`,
		Example:           `  snapshot=$(oxide-csi snapshot create postgres-monday --volume="$id")`,
		Args:              exactly("NAME"),
		ValidArgsFunction: cobra.NoFileCompletions,
	}
	cmd.Flags().StringVar(&volume, "volume", "", "VOLUME to create a snapshot of; required")
	completeFlag(cmd, "volume", b.completeVolume())
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if volume == "" {
			return config.Problems{{Flag: "--volume", What: "is required: the volume to create a snapshot of"}}
		}
		return runAndPrint(b, cmd, func(ctx context.Context, plugin *client.Client) (client.Snapshot, error) {
			return plugin.CreateSnapshot(ctx, args[0], volume)
		}, func(w io.Writer, s client.Snapshot) { line(w, s.ID) })
	}
	return b.withDryRun(cmd)
}

func (b *storageCommands) listSnapshots() *cobra.Command {
	var volume string
	cmd := &cobra.Command{
		Use:               "list",
		SuggestFor:        []string{"ls"},
		Short:             "List the snapshots of the project",
		Args:              noArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
	}
	cmd.Flags().StringVar(&volume, "volume", "", "only list snapshots of this VOLUME")
	completeFlag(cmd, "volume", b.completeVolume())
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		return runAndPrint(b, cmd, func(ctx context.Context, plugin *client.Client) ([]client.Snapshot, error) {
			return plugin.ListSnapshots(ctx, volume)
		}, func(w io.Writer, snapshots []client.Snapshot) {
			line(w, "SNAPSHOT ID", "SIZE", "CREATED", "READY", "RACK", "OF VOLUME")
			for _, s := range snapshots {
				line(
					w,
					s.ID,
					sizeText(s.SizeBytes),
					s.Created.Format(time.RFC3339),
					strconv.FormatBool(s.Ready),
					s.Rack,
					s.SourceVolumeID,
				)
			}
		})
	}
	return cmd
}

func (b *storageCommands) showSnapshot() *cobra.Command {
	cmd := &cobra.Command{
		Use:               "show SNAPSHOT",
		SuggestFor:        []string{"get", "describe"},
		Short:             "Show a snapshot",
		Args:              exactly("SNAPSHOT"),
		ValidArgsFunction: firstArgument(b.completeSnapshot()),
	}
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		return runAndPrint(b, cmd, func(ctx context.Context, plugin *client.Client) (client.Snapshot, error) {
			return plugin.ShowSnapshot(ctx, args[0])
		},
			func(w io.Writer, s client.Snapshot) {
				line(w, "snapshot:", s.ID)
				line(w, "of volume:", s.SourceVolumeID)
				line(w, "size:", sizeText(s.SizeBytes))
				line(w, "created:", s.Created.Format(time.RFC3339))
				line(w, "ready:", strconv.FormatBool(s.Ready))
				line(w, "rack:", s.Rack)
			})
	}
	return cmd
}

func (b *storageCommands) deleteSnapshot() *cobra.Command {
	cmd := &cobra.Command{
		Use:               "delete SNAPSHOT",
		SuggestFor:        []string{"rm", "remove"},
		Short:             "Delete a snapshot",
		Long:              "delete deletes a snapshot that the plugin created. Volumes created from it stay. If the snapshot does not exist, delete succeeds.",
		Args:              exactly("SNAPSHOT"),
		ValidArgsFunction: firstArgument(b.completeSnapshot()),
	}
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		return runAndPrint(b, cmd, func(ctx context.Context, plugin *client.Client) (deletedSnapshot, error) {
			id, err := plugin.DeleteSnapshot(ctx, args[0])
			return deletedSnapshot{id}, err
		}, func(w io.Writer, s deletedSnapshot) { line(w, "snapshot "+s.ID+" is deleted") })
	}
	return b.withDryRun(cmd)
}

type deletedSnapshot struct {
	ID string `json:"snapshotID"`
}

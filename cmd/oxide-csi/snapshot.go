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

const snapshotHelp = `oxide-csi snapshot takes and lists snapshots of volumes without an orchestrator. It asks a controller that runs. A volume is made
from a snapshot with "oxide-csi volume create NAME --from-snapshot=SNAPSHOT".

SNAPSHOT is a snapshot's ID. For all else, exit codes included, see oxide-csi volume --help.`

func snapshotCommand(environ []string, stdout, stderr io.Writer) *cobra.Command {
	b := &byHand{environ: environ, stdout: stdout, stderr: stderr}
	cmd := b.group("snapshot", "Create and list snapshots without an orchestrator", snapshotHelp)
	cmd.AddCommand(b.createSnapshot(), b.listSnapshots(), b.showSnapshot(), b.deleteSnapshot())
	return cmd
}

func (b *byHand) createSnapshot() *cobra.Command {
	var volume string
	cmd := &cobra.Command{
		Use:   "create NAME",
		Short: "Take a snapshot of a volume, or find the one taken by this name",
		Long: `create takes a snapshot and prints its ID. It holds what the volume would hold after a power cut; where that is too little, unmount
the volume first. Repeated with the same name and volume, it finds the snapshot and prints the same ID.`,
		Example:           `  snapshot=$(oxide-csi snapshot create postgres-monday --volume="$id")`,
		Args:              exactly("NAME"),
		ValidArgsFunction: cobra.NoFileCompletions,
	}
	cmd.Flags().StringVar(&volume, "volume", "", "VOLUME to take it of; required")
	completeFlag(cmd, "volume", b.completeVolume())
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if volume == "" {
			return config.Problems{{Flag: "--volume", What: "is required: it names the volume to take a snapshot of"}}
		}
		return ask(b, cmd, func(ctx context.Context, plugin *client.Client) (client.Snapshot, error) {
			return plugin.CreateSnapshot(ctx, args[0], volume)
		}, func(w io.Writer, s client.Snapshot) { line(w, s.ID) })
	}
	return b.changes(cmd)
}

func (b *byHand) listSnapshots() *cobra.Command {
	var volume string
	cmd := &cobra.Command{
		Use:               "list",
		Short:             "List the snapshots of the project",
		Args:              noArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
	}
	cmd.Flags().StringVar(&volume, "volume", "", "only those of this VOLUME")
	completeFlag(cmd, "volume", b.completeVolume())
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		return ask(b, cmd, func(ctx context.Context, plugin *client.Client) ([]client.Snapshot, error) {
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

func (b *byHand) showSnapshot() *cobra.Command {
	cmd := &cobra.Command{
		Use:               "show SNAPSHOT",
		Short:             "Show a snapshot",
		Args:              exactly("SNAPSHOT"),
		ValidArgsFunction: first(b.completeSnapshot()),
	}
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		return ask(b, cmd, func(ctx context.Context, plugin *client.Client) (client.Snapshot, error) {
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

func (b *byHand) deleteSnapshot() *cobra.Command {
	cmd := &cobra.Command{
		Use:               "delete SNAPSHOT",
		Short:             "Delete a snapshot",
		Long:              "delete deletes a snapshot that the plugin made; volumes made from it stay. One that is not there is as good as deleted.",
		Args:              exactly("SNAPSHOT"),
		ValidArgsFunction: first(b.completeSnapshot()),
	}
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		return ask(b, cmd, func(ctx context.Context, plugin *client.Client) (deletedSnapshot, error) {
			id, err := plugin.DeleteSnapshot(ctx, args[0])
			return deletedSnapshot{id}, err
		}, func(w io.Writer, s deletedSnapshot) { line(w, "snapshot "+s.ID+" is deleted") })
	}
	return b.changes(cmd)
}

type deletedSnapshot struct {
	ID string `json:"snapshotID"`
}

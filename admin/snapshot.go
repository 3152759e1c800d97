// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package admin

import (
	"cmp"
	"context"
	"io"
	"slices"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/oxidecomputer/oxide-csi-plugin/admin/client"
	"github.com/oxidecomputer/oxide-csi-plugin/core/config"
)

const snapshotHelp = `oxide-csi snapshot creates and lists snapshots of volumes without an orchestrator. It calls a running controller. To create
a volume from a snapshot, use "oxide-csi volume create NAME --from-snapshot=SNAPSHOT".

SNAPSHOT is a snapshot's ID, or the name with which it was created. For everything else, such as exit codes, see
oxide-csi volume --help.`

const snapshotExample = `  oxide-csi snapshot create postgres-monday --volume=postgres
  oxide-csi volume create postgres-test --from-snapshot=postgres-monday`

func snapshotCommand(environ []string, stdout, stderr io.Writer) *cobra.Command {
	b := &storageCommands{environ: environ, stdout: stdout, stderr: stderr}
	cmd := b.group("snapshot", "Create and list snapshots without an orchestrator", snapshotHelp, snapshotExample)
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
		Args:              exactlyOr("--volume", "NAME"),
		ValidArgsFunction: cobra.NoFileCompletions,
	}
	cmd.Flags().StringVar(&volume, "volume", "", "VOLUME to create a snapshot of; required")
	completeFlag(cmd, "volume", b.completeVolume())
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if volume == "" {
			return config.Problems{{Flag: "--volume", What: "is required: the volume to create a snapshot of"}}
		}
		if err := checkName("snapshot", args[0]); err != nil {
			return err
		}
		return runAndPrint(b, cmd, func(ctx context.Context, plugin *client.Client) (client.Snapshot, error) {
			return plugin.CreateSnapshot(ctx, args[0], volume)
		}, func(w io.Writer, s client.Snapshot) { line(w, s.ID) })
	}
	return cmd
}

func (b *storageCommands) listSnapshots() *cobra.Command {
	var volume string
	cmd := &cobra.Command{
		Use:               "list",
		SuggestFor:        []string{"ls"},
		Short:             "List the snapshots of the project",
		Example:           `  oxide-csi snapshot list --volume=postgres`,
		Args:              NoArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
	}
	cmd.Flags().StringVar(&volume, "volume", "", "only list snapshots of this VOLUME")
	completeFlag(cmd, "volume", b.completeVolume())
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		return runAndPrint(b, cmd, func(ctx context.Context, plugin *client.Client) ([]client.Snapshot, error) {
			snapshots, err := plugin.ListSnapshots(ctx, volume)
			if err == nil {
				err = plugin.SetSourceVolumes(ctx, snapshots)
			}
			slices.SortStableFunc(snapshots, func(x, y client.Snapshot) int {
				return cmp.Compare(snapshotName(x), snapshotName(y))
			})
			return snapshots, err
		}, printSnapshots)
	}
	return cmd
}

func snapshotName(s client.Snapshot) string { return nameText(s.Name, s.Cluster, s.RackName) }

func printSnapshots(w io.Writer, snapshots []client.Snapshot) {
	line(w, "NAME", "SIZE", "AGE", "OF VOLUME", "READY", "RACK", "ID")
	for _, s := range snapshots {
		source, ready := cmp.Or(s.SourceVolume, s.SourceVolumeID), strconv.FormatBool(s.Ready)
		line(w, snapshotName(s), sizeText(s.SizeBytes), ageText(s.Created), source, ready, s.Rack, s.ID)
	}
}

func (b *storageCommands) showSnapshot() *cobra.Command {
	cmd := &cobra.Command{
		Use:               "show SNAPSHOT",
		SuggestFor:        []string{"get", "describe"},
		Short:             "Show a snapshot",
		Example:           `  oxide-csi snapshot show postgres-monday`,
		Args:              exactly("SNAPSHOT"),
		ValidArgsFunction: firstArgument(b.completeSnapshot()),
	}
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		return runAndPrint(b, cmd, func(ctx context.Context, plugin *client.Client) (client.Snapshot, error) {
			snapshot, err := plugin.ShowSnapshot(ctx, args[0])
			shown := []client.Snapshot{snapshot}
			if err == nil {
				err = plugin.SetSourceVolumes(ctx, shown)
			}
			return shown[0], err
		}, printSnapshot)
	}
	return cmd
}

func printSnapshot(w io.Writer, s client.Snapshot) {
	line(w, "snapshot:", s.ID)
	line(w, "name:", nameText(s.Name, s.Cluster, s.RackName))
	source := s.SourceVolumeID
	if s.SourceVolume != "" {
		source = s.SourceVolume + " (" + source + ")"
	}
	line(w, "of volume:", source)
	line(w, "size:", sizeText(s.SizeBytes))
	line(w, "created:", s.Created.Format(time.RFC3339))
	line(w, "ready:", strconv.FormatBool(s.Ready))
	line(w, "rack:", s.Rack)
}

func (b *storageCommands) deleteSnapshot() *cobra.Command {
	cmd := &cobra.Command{
		Use:        "delete SNAPSHOT",
		SuggestFor: []string{"rm", "remove"},
		Short:      "Delete a snapshot",
		Long: `delete deletes a snapshot that the plugin created. Volumes created from it stay.

If no snapshot has this ID or this name, delete succeeds, as it does when it is repeated, and says so on stderr.`,
		Example:           `  oxide-csi snapshot delete postgres-monday`,
		Args:              exactly("SNAPSHOT"),
		ValidArgsFunction: firstArgument(b.completeSnapshot()),
	}
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		return runAndPrint(b, cmd, func(ctx context.Context, plugin *client.Client) (deletedSnapshot, error) {
			deleted, err := plugin.DeleteSnapshot(ctx, args[0])
			if deleted.Missing != "" {
				b.note(deleted.Missing + ": nothing to delete")
			}
			return deletedSnapshot{deleted.ID}, err
		}, func(w io.Writer, s deletedSnapshot) {
			if s.ID != "" {
				line(w, "snapshot "+args[0]+" is deleted")
			}
		})
	}
	return cmd
}

// deletedSnapshot has no ID if no snapshot had the name.
type deletedSnapshot struct {
	ID string `json:"snapshotID,omitempty"`
}

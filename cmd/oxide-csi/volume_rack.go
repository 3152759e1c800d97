// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main

import (
	"cmp"
	"context"
	"io"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/oxidecomputer/oxide-csi-plugin/cmd/oxide-csi/client"
	"github.com/oxidecomputer/oxide-csi-plugin/core/config"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// mountParameters are the parameters for making a filesystem, which only the node needs. The rack does not store them.
var mountParameters = []string{rpc.KeyMkfsOptions, rpc.KeyRootUID, rpc.KeyRootGID, rpc.KeyRootMode}

func (b *storageCommands) createVolume() *cobra.Command {
	var opts client.CreateVolumeOptions
	var size config.SizeFlag
	cmd := &cobra.Command{
		Use:   "create NAME",
		Short: "Create a volume, or find the volume of this name",
		Long: `create creates a volume and prints its ID. Repeated with the same name, it prints the ID of the existing volume, so a script
need not store the ID. If the existing volume differs from the flags, create fails and says how.

Names are unique within the plugin's cluster ID: another create with the same name finds this volume.`,
		Example: `  id=$(oxide-csi volume create postgres --size=20GiB)`,
		Args:    exactly("NAME"),
	}
	flags := cmd.Flags()
	flags.Var(
		&size,
		"size",
		"size with a unit, such as 20GiB or 20G; rounded up to whole GiB. Required for an empty volume",
	)
	flags.StringVar(&opts.FromSnapshot, "from-snapshot", "", "create the volume from the snapshot with this ID")
	flags.StringVar(&opts.FromVolume, "from-volume", "", "create the volume as a copy of this VOLUME")
	flags.StringVar(&opts.Rack, "rack", "", "name of the rack to create the volume on, if the plugin serves several")
	flags.BoolVar(
		&opts.Block,
		"block",
		false,
		"the volume will be used as raw block (mount --block): a later mount with a filesystem reads the whole disk before it formats it",
	)
	parameters := keyValues(
		flags,
		"parameter",
		"blockSize=512, 2048 or 4096 (default); diskType=distributed (default) or local; readOnly=true with --from-snapshot; may be repeated",
	)
	cmd.ValidArgsFunction = cobra.NoFileCompletions
	completeFlag(cmd, "from-snapshot", b.completeSnapshot())
	completeFlag(cmd, "from-volume", b.completeVolume())
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		opts.Name, opts.SizeBytes, opts.Parameters = args[0], int64(size), *parameters
		if _, isID := diskname.ParseID(opts.Name); isID {
			return usage(
				"name %q has the form of a volume ID, so no command could find the volume by its name: choose another name",
				opts.Name,
			)
		}
		hasSource := opts.FromSnapshot != "" || opts.FromVolume != ""
		switch {
		case opts.FromSnapshot != "" && opts.FromVolume != "":
			return usage("--from-snapshot and --from-volume cannot be combined")
		case size == 0 && !hasSource:
			return config.Problems{
				{Flag: "--size", What: "is required, unless the volume is created from a snapshot or another volume"},
			}
		}
		for _, key := range mountParameters {
			if _, given := opts.Parameters[key]; given {
				return config.Problems{
					{
						Flag: "--parameter",
						What: key + " is used when the volume is mounted: set it there with --volume-context=" + key + "=…",
					},
				}
			}
		}
		return runAndPrint(b, cmd, func(ctx context.Context, plugin *client.Client) (client.Volume, error) {
			return plugin.CreateVolume(ctx, opts)
		},
			func(w io.Writer, v client.Volume) { line(w, v.ID) })
	}
	return b.withDryRun(cmd)
}

func (b *storageCommands) listVolumes() *cobra.Command {
	var all bool
	cmd := &cobra.Command{
		Use:        "list",
		SuggestFor: []string{"ls"},
		Short:      "List volumes",
		Long: `list lists the volumes that the plugin created for its cluster, with the node that each is attached to. The rack does not
know the names of volumes. So list shows the name of the disk, which is made from the volume's name. Volumes that were
adopted from another cluster are listed while they are attached.

If the controller plans restarts (attach mode restart), list also shows the nodes with a planned or current restart, what
the restart attaches and detaches, and why it has not begun. Other replicas of the controller may know of more.`,
		Args:              noArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
	}
	cmd.Flags().
		BoolVar(&all, "all", false, "also list the other attached disks of the project, boot disks included")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		return runAndPrint(b, cmd, func(ctx context.Context, plugin *client.Client) (client.VolumeList, error) {
			return plugin.ListVolumes(ctx, all)
		},
			func(w io.Writer, list client.VolumeList) {
				line(w, "VOLUME ID", "SIZE", "DISK", "RACK", "NODE")
				for _, v := range list.Volumes {
					line(w, v.ID, sizeText(v.SizeBytes), v.DiskName, v.Rack, cmp.Or(v.NodeID, "-"))
				}
				if list.Restarts != nil {
					printRestarts(w, list.Restarts)
				}
			})
	}
	return cmd
}

func (b *storageCommands) showVolume() *cobra.Command {
	cmd := &cobra.Command{
		Use:        "show VOLUME",
		SuggestFor: []string{"get", "describe"},
		Short:      "Show a volume and its problems",
		Long: `show shows where a volume is attached, and its problems. If the controller plans restarts (attach mode restart), it also
shows the node whose restart the volume waits for, since when, and why the restart has not begun. It shows a node that
still has the disk although the volume was detached.`,
		Args:              exactly("VOLUME"),
		ValidArgsFunction: firstArgument(b.completeVolume()),
	}
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		return runAndPrint(b, cmd, func(ctx context.Context, plugin *client.Client) (client.Volume, error) {
			return plugin.ShowVolume(ctx, args[0])
		},
			func(w io.Writer, v client.Volume) {
				line(w, "volume:", v.ID)
				line(w, "disk:", v.DiskName)
				line(w, "size:", sizeText(v.SizeBytes)+", in blocks of "+strconv.FormatInt(v.BlockSize, 10)+" bytes")
				line(w, "rack:", v.Rack)
				switch {
				case v.SourceSnapshotID != "":
					line(w, "source:", "snapshot "+v.SourceSnapshotID)
				case v.SourceVolumeID != "":
					line(w, "source:", "volume "+v.SourceVolumeID)
				}
				line(w, "state:", attachmentText(v))
				if v.Planned() {
					printVolumeRestart(w, v)
				}
				for _, problem := range v.Health {
					line(w, "health:", problem.Status+": "+problem.Message)
				}
			})
	}
	return cmd
}

// attachmentText says where a volume is attached.
func attachmentText(v client.Volume) string {
	if v.NodeID == "" {
		return "not attached"
	}
	return "attached to node " + v.NodeID
}

func (b *storageCommands) deleteVolume() *cobra.Command {
	cmd := &cobra.Command{
		Use:        "delete VOLUME",
		SuggestFor: []string{"rm", "remove"},
		Short:      "Delete a volume and its data",
		Long: `delete deletes a volume that the plugin created and that is not attached. It does not ask for confirmation, and the data
cannot be restored. The volume's snapshots stay.

If no volume has this ID, delete succeeds. If no volume has this name, it ends with exit code 4, because the name may be
wrong.`,
		Args:              exactly("VOLUME"),
		ValidArgsFunction: firstArgument(b.completeVolume()),
	}
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		return runAndPrint(b, cmd, func(ctx context.Context, plugin *client.Client) (deletedVolume, error) {
			id, err := plugin.DeleteVolume(ctx, args[0])
			return deletedVolume{id}, err
		}, func(w io.Writer, v deletedVolume) { line(w, "volume "+v.ID+" is deleted") })
	}
	return b.withDryRun(cmd)
}

type deletedVolume struct {
	ID string `json:"volumeID"`
}

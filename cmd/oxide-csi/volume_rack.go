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

// forMount are the parameters that only the node needs, when it makes a filesystem. The rack does not store them.
var forMount = []string{rpc.KeyMkfsOptions, rpc.KeyRootUID, rpc.KeyRootGID, rpc.KeyRootMode}

func (b *byHand) createVolume() *cobra.Command {
	var want client.NewVolume
	var size config.SizeFlag
	cmd := &cobra.Command{
		Use:   "create NAME",
		Short: "Create a volume, or find the one created by this name",
		Long: `create makes a volume and prints its ID. Repeated with the same name, it finds the volume and prints the same ID; if that one
differs from what is asked for, it says how and changes nothing. So a script need not keep the ID.

The name holds within the cluster ID that the plugin was given: whoever creates a volume of the same name gets this one.`,
		Example: `  id=$(oxide-csi volume create postgres --size=20GiB)`,
		Args:    exactly("NAME"),
	}
	flags := cmd.Flags()
	flags.Var(
		&size,
		"size",
		"size such as 20GiB, in bytes where it has no unit; rounded up to whole GiB. Needed unless the volume is made from something",
	)
	flags.StringVar(&want.FromSnapshot, "from-snapshot", "", "make it from the snapshot of this ID")
	flags.StringVar(&want.FromVolume, "from-volume", "", "make it as a copy of this VOLUME")
	flags.StringVar(&want.Rack, "rack", "", "make it on the rack of this name, where the plugin serves several")
	parameters := keyValues(
		flags,
		"parameter",
		"blockSize=512, 2048 or 4096 (default); diskType=distributed (default) or local; readOnly=true, of a snapshot; may be repeated",
	)
	cmd.ValidArgsFunction = cobra.NoFileCompletions
	completeFlag(cmd, "from-snapshot", b.completeSnapshot())
	completeFlag(cmd, "from-volume", b.completeVolume())
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		want.Name, want.SizeBytes, want.Parameters = args[0], int64(size), *parameters
		if _, like := diskname.ParseID(want.Name); like {
			return usage(
				"%q is a name that is written like an ID, and the volume would not be found by it: choose another",
				want.Name,
			)
		}
		made := want.FromSnapshot != "" || want.FromVolume != ""
		switch {
		case want.FromSnapshot != "" && want.FromVolume != "":
			return usage("--from-snapshot and --from-volume exclude each other")
		case size == 0 && !made:
			return config.Problems{
				{Flag: "--size", What: "is required, unless the volume is made from a snapshot or from another volume"},
			}
		}
		for _, key := range forMount {
			if _, given := want.Parameters[key]; given {
				return config.Problems{
					{
						Flag: "--parameter",
						What: key + " belongs to the filesystem, which is made when the volume is mounted: give it to mount, as --volume-context=" + key + "=…",
					},
				}
			}
		}
		return ask(b, cmd, func(ctx context.Context, plugin *client.Client) (client.Volume, error) {
			return plugin.CreateVolume(ctx, want)
		},
			func(w io.Writer, v client.Volume) { line(w, v.ID) })
	}
	return b.changes(cmd)
}

func (b *byHand) listVolumes() *cobra.Command {
	var all bool
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List volumes",
		Long: `list lists the volumes that the plugin made for its cluster, with the node that each is attached to. A rack has no names of
volumes: the ID is the disk's, and the name shown is that of the disk on the rack, which follows from the volume's.

Where the controller plans restarts (attach mode restart), the nodes follow that would have to be restarted for volumes or are being
restarted, with what their restart attaches and detaches, and why it has not begun. That is what this one controller knows.`,
		Args:              noArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
	}
	cmd.Flags().
		BoolVar(&all, "all", false, "list also the other disks of the project that are attached to an instance, boot disks included")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		return ask(b, cmd, func(ctx context.Context, plugin *client.Client) (client.VolumeList, error) {
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

func (b *byHand) showVolume() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "show VOLUME",
		Short: "Show a volume and what is wrong with it",
		Long: `show tells where a volume is and what is wrong with it. Where the controller plans restarts (attach mode restart), also: which
node's restart it waits for, since when, and why that has not begun; and which node still has its disk although it is published
there no more.`,
		Args:              exactly("VOLUME"),
		ValidArgsFunction: first(b.completeVolume()),
	}
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		return ask(b, cmd, func(ctx context.Context, plugin *client.Client) (client.Volume, error) {
			return plugin.ShowVolume(ctx, args[0])
		},
			func(w io.Writer, v client.Volume) {
				line(w, "volume:", v.ID)
				line(w, "disk:", v.DiskName)
				line(w, "size:", sizeText(v.SizeBytes)+", in blocks of "+strconv.FormatInt(v.BlockSize, 10)+" bytes")
				line(w, "rack:", v.Rack)
				switch {
				case v.SourceSnapshotID != "":
					line(w, "made from:", "snapshot "+v.SourceSnapshotID)
				case v.SourceVolumeID != "":
					line(w, "made from:", "volume "+v.SourceVolumeID)
				}
				line(w, "state:", where(v))
				if v.Planned() {
					printVolumeRestart(w, v)
				}
				for _, wrong := range v.Health {
					line(w, "health:", wrong.Status+": "+wrong.Message)
				}
			})
	}
	return cmd
}

func where(v client.Volume) string {
	if v.NodeID == "" {
		return "not attached"
	}
	return "attached to node " + v.NodeID
}

func (b *byHand) deleteVolume() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "delete VOLUME",
		Short: "Delete a volume and all that is on it",
		Long: `delete deletes a volume that the plugin made and that is attached nowhere. Nobody is asked again, and nothing brings its
data back; its snapshots stay.

A volume of that ID that is not there is as good as deleted. A name for which there is no volume ends with exit code 4: it
may have been deleted, and the name may just as well be wrong.`,
		Args:              exactly("VOLUME"),
		ValidArgsFunction: first(b.completeVolume()),
	}
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		return ask(b, cmd, func(ctx context.Context, plugin *client.Client) (deletedVolume, error) {
			id, err := plugin.DeleteVolume(ctx, args[0])
			return deletedVolume{id}, err
		}, func(w io.Writer, v deletedVolume) { line(w, "volume "+v.ID+" is deleted") })
	}
	return b.changes(cmd)
}

type deletedVolume struct {
	ID string `json:"volumeID"`
}

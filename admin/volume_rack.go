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
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/oxidecomputer/oxide-csi-plugin/admin/client"
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
		Use:        "create NAME",
		SuggestFor: []string{"clone", "copy", "restore"},
		Short:      "Create a volume, or find the volume of this name",
		Long: `create creates a volume and prints its ID. Repeated with the same name, it prints the ID of the existing volume, so a script
need not store the ID. If the existing volume differs from the flags, create fails and says how.

Names are unique within the plugin's cluster ID: another create with the same name finds this volume.`,
		Example: `  id=$(oxide-csi volume create postgres --size=20GiB)`,
		Args:    exactlyOr("--size", "NAME"),
	}
	flags := cmd.Flags()
	flags.Var(&size, "size",
		"size with a unit, such as 20GiB or 20G; rounded up to whole GiB. Required for an empty volume")
	flags.StringVar(&opts.FromSnapshot, "from-snapshot", "", "create the volume from this SNAPSHOT, an ID or a name")
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
		"blockSize=512, 2048 or 4096 (default); diskType=distributed (default) or local; readOnly=true with --from-snapshot; encryption=luks2; may be repeated",
	)
	cmd.ValidArgsFunction = cobra.NoFileCompletions
	completeFlag(cmd, "from-snapshot", b.completeSnapshot())
	completeFlag(cmd, "from-volume", b.completeVolume())
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		opts.Name, opts.SizeBytes, opts.Parameters = args[0], int64(size), *parameters
		if err := checkCreateFlags(opts); err != nil {
			return err
		}
		return runAndPrint(b, cmd, func(ctx context.Context, plugin *client.Client) (client.Volume, error) {
			return plugin.CreateVolume(ctx, opts)
		},
			func(w io.Writer, v client.Volume) { line(w, v.ID) })
	}
	return cmd
}

func (b *storageCommands) expandVolume() *cobra.Command {
	var size config.SizeFlag
	cmd := &cobra.Command{
		Use:     "expand VOLUME",
		Aliases: []string{"resize", "grow", "extend"},
		Short:   "Make a volume larger that is not attached",
		Long: `expand makes a volume larger and prints its size. The volume keeps its ID, and its filesystem grows when it is mounted the
next time. A volume that is as large already stays as it is, and no volume becomes smaller.

expand makes a snapshot, deletes the disk, and makes a larger one of the snapshot. So detach the volume first, and have
quota for the larger disk and the snapshot. If expand is interrupted, repeat it, or attach the volume: the data are on
the snapshot, which must not be deleted.`,
		Example:           `  oxide-csi volume expand postgres --size=40GiB`,
		Args:              exactlyOr("--size", "VOLUME"),
		ValidArgsFunction: firstArgument(b.completeVolume()),
	}
	cmd.Flags().Var(&size, "size", "the new size with a unit, such as 40GiB or 40G; rounded up to whole GiB. Required")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if size == 0 {
			return config.Problems{{Flag: "--size", What: "is required"}}
		}
		return runAndPrint(b, cmd, func(ctx context.Context, plugin *client.Client) (client.Expanded, error) {
			return plugin.ExpandVolume(ctx, args[0], int64(size))
		},
			func(w io.Writer, v client.Expanded) {
				text := "volume " + args[0] + " has " + sizeText(v.SizeBytes)
				if v.Larger {
					text += ", which is more: no volume becomes smaller"
				}
				line(w, text)
			})
	}
	return cmd
}

// checkCreateFlags rejects what the plugin would reject too, with the names of flags.
func checkCreateFlags(opts client.CreateVolumeOptions) error {
	if err := checkName("volume", opts.Name); err != nil {
		return err
	}
	hasSource := opts.FromSnapshot != "" || opts.FromVolume != ""
	switch {
	case opts.FromSnapshot != "" && opts.FromVolume != "":
		return Usage("--from-snapshot and --from-volume cannot be combined")
	case opts.SizeBytes == 0 && !hasSource:
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
	return nil
}

// checkName rejects a name by which no command could find the volume or snapshot.
func checkName(kind, name string) error {
	if _, isID := diskname.ParseID(name); isID {
		return Usage("name %q has the form of a %s ID, so no command could find the %s by its name: choose another name",
			name, kind, kind)
	}
	return nil
}

func (b *storageCommands) listVolumes() *cobra.Command {
	var all bool
	cmd := &cobra.Command{
		Use:        "list",
		SuggestFor: []string{"ls"},
		Short:      "List volumes",
		Long: `list lists the volumes that the plugin created for its cluster, with the node that each is attached to, and where it is
mounted on this host. Volumes that were adopted from another cluster are listed while they are attached. Commands find
them by their IDs: a name in parentheses is that of another cluster or of a disk.

On a rack without hot-plug list also shows the nodes with a planned or current restart, or in attach mode hot those that
must be stopped manually, and what that attaches and detaches. Other replicas of the controller may know of more.`,
		Example: `  oxide-csi volume list
  oxide-csi volume list --json | jq -r 'sort_by(.sizeBytes)[].volumeID'`,
		Args:              NoArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
	}
	cmd.Flags().
		BoolVar(&all, "all", false, "also list the other attached disks of the project, boot disks included")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		return runAndPrint(b, cmd, func(ctx context.Context, plugin *client.Client) (client.VolumeList, error) {
			list, err := plugin.ListVolumes(ctx, all)
			if err == nil {
				err = plugin.SetMounts(ctx, list.Volumes)
			}
			slices.SortStableFunc(list.Volumes, func(x, y client.Volume) int {
				return cmp.Compare(volumeName(x), volumeName(y))
			})
			return list, err
		}, printVolumes)
	}
	return cmd
}

func volumeName(v client.Volume) string { return nameText(v.Name, v.Cluster, v.DiskName) }

func printVolumes(w io.Writer, list client.VolumeList) {
	line(w, "NAME", "SIZE", "AGE", "NODE", "MOUNT", "RACK", "ID", "CLAIM")
	for _, v := range list.Volumes {
		node, mounts := cmp.Or(v.NodeName, v.NodeID, "-"), cmp.Or(strings.Join(v.Mounts, ","), "-")
		line(w, volumeName(v), sizeText(v.SizeBytes), ageText(v.Created), node, mounts, v.Rack, v.ID, cmp.Or(v.Claim, "-"))
	}
	if list.Restarts != nil {
		printRestarts(w, list)
	}
}

func (b *storageCommands) showVolume() *cobra.Command {
	cmd := &cobra.Command{
		Use:        "show VOLUME",
		SuggestFor: []string{"get", "describe"},
		Short:      "Show a volume and its problems",
		Long: `show shows where a volume is attached, and its problems. On a rack without hot-plug it also
shows the node whose restart or stop the volume waits for, since when, and why the restart has not begun. It shows a node
that still has the disk although the volume was detached.`,
		Example:           `  oxide-csi volume show postgres`,
		Args:              exactly("VOLUME"),
		ValidArgsFunction: firstArgument(b.completeVolume()),
	}
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		return runAndPrint(b, cmd, func(ctx context.Context, plugin *client.Client) (client.Volume, error) {
			volume, err := plugin.ShowVolume(ctx, args[0])
			shown := []client.Volume{volume}
			if err == nil {
				err = plugin.SetMounts(ctx, shown)
			}
			return shown[0], err
		}, printVolume)
	}
	return cmd
}

func printVolume(w io.Writer, v client.Volume) {
	line(w, "volume:", v.ID)
	line(w, "name:", nameText(v.Name, v.Cluster, v.DiskName))
	if v.Claim != "" {
		line(w, "claim:", v.Claim)
	}
	line(w, "disk:", v.DiskName)
	line(w, "size:", sizeText(v.SizeBytes)+", in blocks of "+strconv.FormatInt(v.BlockSize, 10)+" bytes")
	line(w, "created:", v.Created.Format(time.RFC3339))
	line(w, "rack:", v.Rack)
	switch {
	case v.SourceSnapshotID != "":
		line(w, "source:", "snapshot "+v.SourceSnapshotID)
	case v.SourceVolumeID != "":
		line(w, "source:", "volume "+v.SourceVolumeID)
	}
	line(w, "state:", attachmentText(v))
	for _, path := range v.Mounts {
		line(w, "mounted at:", path)
	}
	if v.Planned() {
		printVolumeRestart(w, v)
	}
	for _, problem := range v.Health {
		line(w, "health:", problem.Status+": "+problem.Message)
	}
}

// attachmentText says where a volume is attached.
func attachmentText(v client.Volume) string {
	switch {
	case v.NodeID == "" && v.StillOn != nil && !v.Planned():
		return "unpublished; its detach from " + client.NodeText(v.StillOn.NodeName, v.StillOn.NodeID) + " is deferred"
	case v.NodeID == "":
		return "not attached"
	}
	return "attached to " + client.NodeText(v.NodeName, v.NodeID)
}

func (b *storageCommands) deleteVolume() *cobra.Command {
	cmd := &cobra.Command{
		Use:        "delete VOLUME",
		SuggestFor: []string{"rm", "remove"},
		Short:      "Delete a volume and its data",
		Long: `delete deletes a volume that the plugin created and that is not attached. It does not ask for confirmation, and the data
cannot be restored. The volume's snapshots stay.

If no volume has this ID or this name, delete succeeds, as it does when it is repeated, and says so on stderr.`,
		Example:           `  oxide-csi volume delete postgres`,
		Args:              exactly("VOLUME"),
		ValidArgsFunction: firstArgument(b.completeVolume()),
	}
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		return runAndPrint(b, cmd, func(ctx context.Context, plugin *client.Client) (deletedVolume, error) {
			deleted, err := plugin.DeleteVolume(ctx, args[0])
			if deleted.Missing != "" {
				b.note(deleted.Missing + ": nothing to delete")
			}
			return deletedVolume{deleted.ID}, err
		}, func(w io.Writer, v deletedVolume) {
			if v.ID != "" {
				line(w, "volume "+args[0]+" is deleted")
			}
		})
	}
	return cmd
}

// deletedVolume has no ID if no volume had the name.
type deletedVolume struct {
	ID string `json:"volumeID,omitempty"`
}

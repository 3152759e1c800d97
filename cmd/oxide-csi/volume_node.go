// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/spf13/cobra"

	"github.com/oxidecomputer/oxide-csi-plugin/cmd/oxide-csi/client"
	"github.com/oxidecomputer/oxide-csi-plugin/core/config"
	"github.com/oxidecomputer/oxide-csi-plugin/core/filesystem"
)

func (b *byHand) attach() *cobra.Command {
	var node string
	cmd := &cobra.Command{
		Use:   "attach VOLUME",
		Short: "Attach a volume to a node",
		Long: `attach attaches a volume's disk to this instance, or to the one that --node names. Racks that have no hot-plug do so only while
the instance is stopped; the message says so then.

Where no controller can be asked on the node itself, the answer with --json is what mount takes as --attachment there.`,
		Example: `  oxide-csi volume attach "$id"
  ssh controller oxide-csi volume attach "$id" --node="$node" --json | oxide-csi volume mount "$id" /srv/data --attachment=-`,
		Args:              exactly("VOLUME"),
		ValidArgsFunction: first(b.completeVolume()),
	}
	cmd.Flags().StringVar(&node, "node", "", "ID of the node, which is its instance's (default this one)")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		return ask(b, cmd, func(ctx context.Context, plugin *client.Client) (client.Attachment, error) {
			return plugin.Attach(ctx, args[0], node)
		},
			func(w io.Writer, a client.Attachment) { line(w, "volume "+a.VolumeID+" is attached to node "+a.NodeID) })
	}
	return b.changes(cmd)
}

func (b *byHand) detach() *cobra.Command {
	var node string
	var unmounted bool
	cmd := &cobra.Command{
		Use:   "detach VOLUME",
		Short: "Detach a volume from a node",
		Long: `detach detaches a volume's disk from this instance, or from the one that --node names; it is done where the disk is not attached
to it. It refuses while the volume is mounted here. What is mounted on another node cannot be seen from here, and a disk that
is taken from under a filesystem loses what was written last: say with --unmounted that it is not.

Where the controller plans restarts (attach mode restart), a node that runs keeps the disk until its next restart, for nobody; show
says so.`,
		Args:              exactly("VOLUME"),
		ValidArgsFunction: first(b.completeVolume()),
	}
	cmd.Flags().StringVar(&node, "node", "", "ID of the node, which is its instance's (default this one)")
	cmd.Flags().
		StringVar(&b.sysRoot, "sys-root", "", "where this host's /sys is seen, to look for mounts of the disk (default /sys) [OXIDE_CSI_SYS_ROOT]")
	cmd.Flags().Lookup("sys-root").Hidden = true // for tests
	cmd.Flags().
		BoolVar(&unmounted, "unmounted", false, "with --node: the volume is mounted nowhere on that node, or the node is gone")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if unmounted && node == "" {
			return usage("--unmounted needs --node: on this node the plugin looks for itself")
		}
		return ask(b, cmd, func(ctx context.Context, plugin *client.Client) (detachedVolume, error) {
			from, err := plugin.Detach(ctx, args[0], node, unmounted)
			return detachedVolume{from.VolumeID, from.NodeID}, err
		}, func(w io.Writer, v detachedVolume) { line(w, "volume "+v.ID+" is detached from node "+v.NodeID) })
	}
	return b.changes(cmd)
}

type detachedVolume struct {
	ID     string `json:"volumeID"`
	NodeID string `json:"nodeID"`
}

// mountFlags are the flags of mount as they were written.
type mountFlags struct {
	fsType, accessMode, attachment string
	options                        []string
	block, readOnly                bool
	context                        *map[string]string
}

func (b *byHand) mount() *cobra.Command {
	var f mountFlags
	cmd := &cobra.Command{
		Use:   "mount VOLUME TARGET",
		Short: "Mount an attached volume",
		Long: `mount mounts a volume that is attached to this instance at TARGET, a folder that is made if it is not there; unmount removes it. A
disk that is provably blank gets a filesystem first; on any other, what is there is mounted, or it is an error. With --block,
TARGET becomes a file that is the disk itself.`,
		Example: `  oxide-csi volume mount "$id" /srv/data
  oxide-csi volume mount "$id" /srv/data --fs-type=xfs --volume-context=rootUid=999 --volume-context=rootMode=0750`,
		Args:              exactly("VOLUME", "TARGET"),
		ValidArgsFunction: first(b.completeVolume()),
	}
	flags := cmd.Flags()
	flags.StringVar(
		&f.fsType,
		"fs-type",
		"",
		"filesystem: "+strings.Join(
			filesystem.Types(),
			", ",
		)+" (default what is on the disk, else "+filesystem.Types()[0]+")",
	)
	flags.BoolVar(&f.block, "block", false, "the raw disk, no filesystem")
	flags.BoolVar(&f.readOnly, "read-only", false, "mount it read-only at TARGET")
	flags.StringArrayVar(&f.options, "option", nil, "mount option such as noatime; may be repeated")
	flags.StringVar(
		&f.accessMode,
		"access-mode",
		"SINGLE_NODE_WRITER",
		"access mode of the specification; SINGLE_NODE_MULTI_WRITER allows several targets",
	)
	f.context = keyValues(
		flags,
		"volume-context",
		"mkfsOptions, rootUid, rootGid, rootMode of a new filesystem; verifyFilesystem=false; diskName of a disk made by hand; may be repeated",
	)
	flags.StringVar(
		&f.attachment,
		"attachment",
		"",
		"file with the answer of attach --json, - for stdin: then no controller is asked",
	)
	completeFlag(cmd, "fs-type", cobra.FixedCompletions(filesystem.Types(), cobra.ShellCompDirectiveNoFileComp))
	completeFlag(cmd, "access-mode", cobra.FixedCompletions(accessModes, cobra.ShellCompDirectiveNoFileComp))
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		opts, err := f.parse(cmd.InOrStdin())
		if err != nil {
			return err
		}
		if opts.Target, err = filepath.Abs(args[1]); err != nil {
			return err
		}
		return ask(b, cmd, func(ctx context.Context, plugin *client.Client) (client.Mounted, error) {
			return plugin.Mount(ctx, args[0], opts)
		},
			func(w io.Writer, m client.Mounted) { line(w, "volume "+m.VolumeID+" is mounted at "+m.TargetPath) })
	}
	return b.changes(cmd)
}

// accessModes are those that a disk on one instance at a time can have.
var accessModes = []string{
	"SINGLE_NODE_WRITER",
	"SINGLE_NODE_SINGLE_WRITER",
	"SINGLE_NODE_MULTI_WRITER",
	"SINGLE_NODE_READER_ONLY",
}

func (f mountFlags) parse(stdin io.Reader) (client.MountOptions, error) {
	opts := client.MountOptions{ReadOnly: f.readOnly, Context: *f.context, Capability: &csi.VolumeCapability{}}
	mode, known := csi.VolumeCapability_AccessMode_Mode_value[f.accessMode]
	switch {
	case !known:
		return opts, config.Problems{
			{Flag: "--access-mode", What: fmt.Sprintf("%q is not one of %s", f.accessMode, strings.Join(accessModes, ", "))},
		}
	case f.block && (f.fsType != "" || len(f.options) > 0):
		return opts, usage("--block goes without --fs-type and --option: a raw disk has no filesystem")
	}
	opts.Capability.AccessMode = &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_Mode(mode)}
	if f.block {
		opts.Capability.AccessType = &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}
	} else {
		opts.Capability.AccessType = &csi.VolumeCapability_Mount{
			Mount: &csi.VolumeCapability_MountVolume{FsType: f.fsType, MountFlags: f.options},
		}
	}
	var err error
	opts.Attachment, err = readAttachment(f.attachment, stdin)
	return opts, err
}

// readAttachment reads what attach has printed; nil where no file is named.
func readAttachment(name string, stdin io.Reader) (*client.Attachment, error) {
	if name == "" {
		return nil, nil
	}
	if name != "-" {
		file, err := os.Open(name)
		if err != nil {
			return nil, config.Problems{{Flag: "--attachment", What: err.Error()}}
		}
		defer func() { _ = file.Close() }() // it was only read
		stdin = file
	}
	var attachment client.Attachment
	if err := json.NewDecoder(stdin).
		Decode(&attachment); err != nil || attachment.VolumeID == "" ||
		len(attachment.PublishContext) == 0 {
		return nil, config.Problems{{Flag: "--attachment", What: "this is not the answer of attach --json"}}
	}
	return &attachment, nil
}

func (b *byHand) unmount() *cobra.Command {
	var keepStaged bool
	cmd := &cobra.Command{
		Use:   "unmount VOLUME TARGET",
		Short: "Unmount a volume",
		Long: `unmount takes a volume away from TARGET and removes the folder or file there. It returns when all is written to the disk and
nothing on this node holds it; detach may follow then. Anything at TARGET that is not the volume stays as it is.`,
		Args:              exactly("VOLUME", "TARGET"),
		ValidArgsFunction: first(b.completeVolume()),
	}
	cmd.Flags().
		BoolVar(&keepStaged, "keep-staged", false, "only take it from TARGET, since it is mounted at other targets too")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		target, err := filepath.Abs(args[1])
		if err != nil {
			return err
		}
		return ask(b, cmd, func(ctx context.Context, plugin *client.Client) (client.Mounted, error) {
			return plugin.Unmount(ctx, args[0], target, keepStaged)
		}, func(w io.Writer, m client.Mounted) { line(w, "volume "+m.VolumeID+" is unmounted from "+m.TargetPath) })
	}
	return b.changes(cmd)
}

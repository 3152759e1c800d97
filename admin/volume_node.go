// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package admin

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/spf13/cobra"

	"github.com/oxidecomputer/oxide-csi-plugin/admin/client"
	"github.com/oxidecomputer/oxide-csi-plugin/core/config"
	"github.com/oxidecomputer/oxide-csi-plugin/core/filesystem"
)

func (b *storageCommands) attach() *cobra.Command {
	var node string
	cmd := &cobra.Command{
		Use:        "attach VOLUME",
		SuggestFor: []string{"publish"},
		Short:      "Attach a volume to a node",
		Long: `attach attaches a volume's disk to this instance, or to the instance that --node names. A rack without hot-plug does this
only while the instance is stopped. With --node and --wait, the command waits until it is stopped, or until the planned
restart has attached the disk.

If the node itself cannot reach a controller, pass the output of attach --json to mount --attachment there.`,
		Example: `  oxide-csi volume attach "$id"
  ssh controller oxide-csi volume attach "$id" --node="$node" --json | oxide-csi volume mount "$id" /srv/data --attachment=-`,
		Args:              exactlyOr("--node", "VOLUME"),
		ValidArgsFunction: firstArgument(b.completeVolume()),
	}
	cmd.Flags().StringVar(&node, "node", "", "NODE, the ID or name of an instance (default this instance)")
	completeFlag(cmd, "node", b.completeNode())
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		return runAndPrint(b, cmd, func(ctx context.Context, plugin *client.Client) (client.Attachment, error) {
			return plugin.Attach(ctx, args[0], node)
		},
			func(w io.Writer, a client.Attachment) {
				line(w, "volume "+args[0]+" is attached to node "+cmp.Or(node, a.NodeID))
			})
	}
	return cmd
}

func (b *storageCommands) detach() *cobra.Command {
	var node string
	var unmounted bool
	cmd := &cobra.Command{
		Use:        "detach VOLUME",
		SuggestFor: []string{"unpublish"},
		Short:      "Detach a volume from a node",
		Long: `detach detaches a volume's disk from this instance, or from the instance that --node names. It succeeds if the disk is
attached nowhere. It fails while the volume is mounted here, or attached to another node. It cannot see mounts on another
node: confirm by --unmounted that the volume is not mounted there. Detaching a mounted disk loses the last writes.

If the controller plans restarts (attach mode restart), the disk stays attached to a running node until the node's next
restart. Then detach succeeds too, and says so; with --json it prints untilRestart.`,
		Example: `  oxide-csi volume detach "$id"
  oxide-csi volume detach "$id" --node=worker-1 --unmounted`,
		Args:              exactlyOr("--node", "VOLUME"),
		ValidArgsFunction: firstArgument(b.completeVolume()),
	}
	cmd.Flags().StringVar(&node, "node", "", "NODE, the ID or name of an instance (default this instance)")
	completeFlag(cmd, "node", b.completeNode())
	cmd.Flags().
		BoolVar(&unmounted, "unmounted", false, "confirm that the volume is not mounted on the node of --node, or that the node is gone")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if unmounted && node == "" {
			return Usage("--unmounted needs --node: on this node the command checks for mounts itself")
		}
		return runAndPrint(b, cmd, func(ctx context.Context, plugin *client.Client) (client.Detachment, error) {
			return plugin.Detach(ctx, args[0], node, unmounted)
		}, func(w io.Writer, d client.Detachment) {
			if d.UntilRestart {
				line(w, "node "+cmp.Or(node, d.NodeID)+" gives volume "+args[0]+
					" up; its disk stays attached until that instance stops or restarts")
				return
			}
			line(w, "volume "+args[0]+" is detached from node "+cmp.Or(node, d.NodeID))
		})
	}
	return cmd
}

// controllerGrace is how long mount --wait waits for a controller before it does without one. At a boot the controller
// of this host starts beside the command.
const controllerGrace = 5 * time.Second

// mountFlags are the flags of mount.
type mountFlags struct {
	fsType, accessMode, attachment string
	options                        []string
	block, readOnly, attach        bool
	context                        *map[string]string
	passphrases                    passphraseFlags
}

func (b *storageCommands) mount() *cobra.Command {
	var f mountFlags
	cmd := &cobra.Command{
		Use:   "mount VOLUME TARGET",
		Short: "Mount an attached volume",
		Long: `mount mounts a volume that is attached to this instance at the directory TARGET. It creates TARGET if needed;
unmount then removes it. A disk that is proved blank is formatted first. On any other disk the existing filesystem is
mounted, or mount fails.

If controller or rack do not respond, or the rack denies the call, a volume is mounted that was mounted here before and
whose disk is still attached: only if the plugin made its filesystem on this very disk, which is then neither formatted
nor grown. detach and delete end this.

With --block, TARGET becomes a device file of the disk. Create such a volume with create --block.`,
		Example: `  oxide-csi volume mount "$id" /srv/data
  oxide-csi volume mount "$id" /srv/data --fs-type=xfs --volume-context=rootUid=999 --volume-context=rootMode=0750`,
		Args:              exactly("VOLUME", "TARGET"),
		ValidArgsFunction: firstArgument(b.completeVolume()),
	}
	f.add(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		opts, err := f.parse(cmd.InOrStdin())
		if err != nil {
			return err
		}
		if opts.Target, err = filepath.Abs(args[1]); err != nil {
			return err
		}
		if b.wait {
			opts.NeedsControllerUntil = time.Now().Add(controllerGrace)
		}
		return runAndPrint(b, cmd, func(ctx context.Context, plugin *client.Client) (client.Mounted, error) {
			return plugin.Mount(ctx, args[0], opts)
		},
			func(w io.Writer, m client.Mounted) {
				line(w, "volume "+args[0]+" is mounted at "+m.TargetPath)
				if m.NoController != "" {
					line(w, "the disk was still attached, so the controller was not needed, which did not respond: "+m.NoController)
				}
			})
	}
	return cmd
}

// add adds the flags to the command.
func (f *mountFlags) add(cmd *cobra.Command) {
	flags := cmd.Flags()
	flags.StringVar(
		&f.fsType,
		"fs-type",
		"",
		"filesystem: "+strings.Join(filesystem.Types(),
			", ")+" (default: the filesystem on the disk, or "+filesystem.Types()[0]+" for a blank disk)",
	)
	flags.BoolVar(&f.block, "block", false, "use the raw disk without a filesystem")
	flags.BoolVar(&f.readOnly, "read-only", false, "mount the volume read-only at TARGET")
	flags.StringArrayVar(&f.options, "option", nil, "mount option such as noatime; may be repeated")
	flags.StringVar(&f.accessMode, "access-mode", "SINGLE_NODE_WRITER",
		"CSI access mode; SINGLE_NODE_MULTI_WRITER allows several targets")
	f.context = keyValues(
		flags,
		"volume-context",
		"for a new filesystem mkfsOptions, rootUid, rootGid, rootMode; verifyFilesystem=false; diskName of a disk created manually; may be repeated",
	)
	flags.BoolVar(&f.attach, "attach", false, "attach the volume to this instance first")
	flags.StringVar(&f.attachment, "attachment", "", attachmentHelp)
	f.passphrases.add(flags)
	completeFlag(cmd, "fs-type", cobra.FixedCompletions(filesystem.Types(), cobra.ShellCompDirectiveNoFileComp))
	completeFlag(cmd, "access-mode", cobra.FixedCompletions(accessModes, cobra.ShellCompDirectiveNoFileComp))
}

// accessModes are the access modes of a disk, which is attached to one instance at a time.
var accessModes = []string{
	"SINGLE_NODE_WRITER", "SINGLE_NODE_SINGLE_WRITER", "SINGLE_NODE_MULTI_WRITER", "SINGLE_NODE_READER_ONLY",
}

func (f mountFlags) parse(stdin io.Reader) (client.MountOptions, error) {
	opts := client.MountOptions{
		ReadOnly: f.readOnly, Attach: f.attach, Context: *f.context, Capability: &csi.VolumeCapability{},
	}
	mode, known := csi.VolumeCapability_AccessMode_Mode_value[f.accessMode]
	switch {
	case !known:
		return opts, config.Problems{
			{Flag: "--access-mode", What: fmt.Sprintf("%q is not one of %s", f.accessMode, strings.Join(accessModes, ", "))},
		}
	case f.attach && f.attachment != "":
		return opts, Usage(
			"--attach and --attachment exclude each other: --attachment is of a volume that is attached already",
		)
	case f.attachment == "-" && (f.passphrases.now == "-" || f.passphrases.previous == "-"):
		return opts, Usage("--attachment and a passphrase cannot both come from stdin: write one of them to a file")
	case f.block && (f.fsType != "" || len(f.options) > 0):
		return opts, Usage("--block cannot be combined with --fs-type or --option: a raw disk has no filesystem")
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
	if opts.Secrets, err = f.passphrases.read(stdin); err != nil {
		return opts, err
	}
	opts.Attachment, err = readAttachment(f.attachment, stdin)
	return opts, err
}

const attachmentHelp = "file with the output of attach --json, - for stdin; the command then needs no controller"

// readAttachment reads the output of attach --json. It returns nil if no file is named.
func readAttachment(name string, stdin io.Reader) (*client.Attachment, error) {
	if name == "" {
		return nil, nil
	}
	if name != "-" {
		file, err := os.Open(name)
		if err != nil {
			return nil, config.Problems{{Flag: "--attachment", What: err.Error()}}
		}
		defer func() { _ = file.Close() }() // an error loses nothing: the file was only read
		stdin = file
	}
	var attachment client.Attachment
	err := json.NewDecoder(stdin).Decode(&attachment)
	if err != nil || attachment.VolumeID == "" || len(attachment.PublishContext) == 0 {
		return nil, config.Problems{{Flag: "--attachment", What: "the file is not the output of attach --json"}}
	}
	return &attachment, nil
}

func (b *storageCommands) unmount() *cobra.Command {
	var keepStaged bool
	cmd := &cobra.Command{
		Use:        "unmount VOLUME TARGET",
		SuggestFor: []string{"umount"},
		Short:      "Unmount a volume",
		Long: `unmount unmounts a volume from TARGET, and removes the directory or file there that mount has created. It returns when all
data is on the disk and no process on this node uses the disk. Then the volume can be detached. If TARGET is not this
volume, it is not touched.`,
		Example:           `  oxide-csi volume unmount "$id" /srv/data`,
		Args:              exactly("VOLUME", "TARGET"),
		ValidArgsFunction: firstArgument(b.completeVolume()),
	}
	cmd.Flags().
		BoolVar(&keepStaged, "keep-staged", false, "only unmount TARGET, because the volume is mounted at other targets too")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		target, err := filepath.Abs(args[1])
		if err != nil {
			return err
		}
		return runAndPrint(b, cmd, func(ctx context.Context, plugin *client.Client) (client.Mounted, error) {
			return plugin.Unmount(ctx, args[0], target, keepStaged)
		}, func(w io.Writer, m client.Mounted) { line(w, "volume "+args[0]+" is unmounted from "+m.TargetPath) })
	}
	return cmd
}

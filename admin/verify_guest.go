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
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
	"github.com/oxidecomputer/oxide-csi-plugin/core/hostexec"
)

const verifyGuestHelp = `oxide-csi verify-guest prints, as JSON, what this instance shows of itself: its firmware, its NVMe disks with serials, sizes
and sequence numbers, its kernel, and the versions of the programs that the plugin calls. It changes nothing. Run it as
root. oxide-sim verify --guest-command runs it (docs/how-to/verify-a-rack.md).`

func verifyGuestCommand(stdout io.Writer) *cobra.Command {
	var sys, dev string
	cmd := &cobra.Command{
		Use:     "verify-guest",
		Short:   "Print what this instance shows of its firmware and disks",
		Long:    verifyGuestHelp,
		Example: `  oxide-csi verify-guest`,
		Args:    NoArgs,
	}
	cmd.Flags().StringVar(&sys, "sys-root", "/sys", "path of the host's /sys")
	cmd.Flags().StringVar(&dev, "dev-root", "/dev", "path of the host's /dev")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		disks, err := device.Roots{Dev: dev, Sys: sys}.Disks()
		if err != nil {
			return err
		}
		guest := guestView{DMI: map[string]string{}, Disks: []guestDisk{}, Tools: map[string]string{}}
		for _, name := range []string{"sys_vendor", "product_name", "product_uuid", "product_serial"} {
			guest.DMI[name] = attribute(sys, "class/dmi/id", name)
		}
		for _, disk := range disks {
			guest.Disks = append(guest.Disks, viewDisk(sys, device.Device{Disk: disk, Path: filepath.Join(dev, disk.Name)}))
		}
		for name, flag := range guestTools {
			guest.Tools[name] = toolVersion(cmd.Context(), name, flag)
		}
		if guest.Kernel, err = kernelRelease(); err != nil {
			return err
		}
		return printJSON(stdout, guest)
	}
	return cmd
}

// guestView is what the command prints. Package test/verify reads it.
type guestView struct {
	Kernel string            `json:"kernel"`
	DMI    map[string]string `json:"dmi"`
	Disks  []guestDisk       `json:"disks"`
	Tools  map[string]string `json:"tools"`
}

type guestDisk struct {
	Name       string `json:"name"`
	Serial     string `json:"serial"`
	SizeBytes  int64  `json:"size"`
	BlockSize  int    `json:"block_size"` // 0 if it cannot be read
	Sequence   uint64 `json:"sequence"`
	PCI        string `json:"pci"`
	Model      string `json:"model"`
	Controller string `json:"controller"`
	// Error says why the disk has no sequence number.
	Error string `json:"error,omitempty"`
}

func viewDisk(sys string, d device.Device) guestDisk {
	folder := "block/" + d.Name
	view := guestDisk{
		Name:       d.Name,
		Serial:     d.Serial,
		SizeBytes:  d.SizeBytes,
		PCI:        attribute(sys, folder, "device/address"),
		Model:      attribute(sys, folder, "device/model"),
		Controller: attribute(sys, folder, "device/state"),
	}
	view.BlockSize, _ = strconv.Atoi(attribute(sys, folder, "queue/logical_block_size"))
	var err error
	if view.Sequence, err = d.Sequence(); err != nil {
		view.Error = err.Error()
	}
	return view
}

// attribute is the content of a file of sysfs, or why it cannot be read.
func attribute(sys, folder, name string) string {
	text, err := os.ReadFile(filepath.Join(sys, folder, name))
	if err != nil {
		return "error: " + err.Error()
	}
	return strings.Trim(string(text), "\x00 \n")
}

// guestTools are programs that the plugin calls, with the flag that prints the version.
var guestTools = map[string]string{
	"blkid": "-V", "btrfs": "--version", "cryptsetup": "--version", "mkfs.btrfs": "-V", "mkfs.ext4": "-V",
	"mkfs.xfs": "-V", "mount": "-V",
}

func toolVersion(ctx context.Context, name, flag string) string {
	result, err := hostexec.Run(ctx, name, flag)
	if err != nil {
		return "error: " + err.Error()
	}
	version, _, _ := strings.Cut(cmp.Or(strings.TrimSpace(result.Stdout), strings.TrimSpace(result.Stderr)), "\n")
	return version
}

func kernelRelease() (string, error) {
	var name unix.Utsname
	if err := unix.Uname(&name); err != nil {
		return "", fmt.Errorf("read the kernel's release: %w", err)
	}
	return unix.ByteSliceToString(name.Release[:]), nil
}

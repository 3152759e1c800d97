// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package guest

import (
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack"
)

// entry is one entry of a tree that looks like sysfs: a link when it has a target, else a file.
type entry struct {
	path   string
	text   string
	target string
	mode   fs.FileMode
}

func file(path, text string) entry { return entry{path: path, text: text + "\n", mode: 0o444} }

func link(path, target string) entry { return entry{path: path, target: target} }

// secret is a file that only root reads.
func secret(path, text string) entry { return entry{path: path, text: text + "\n", mode: 0o400} }

// write makes the entries below dir, and the folders they are in.
func write(dir string, entries []entry) error {
	for _, e := range entries {
		path := filepath.Join(dir, e.path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		if e.target != "" {
			if err := os.Symlink(e.target, path); err != nil {
				return err
			}
			continue
		}
		if err := os.WriteFile(path, []byte(e.text), e.mode); err != nil {
			return err
		}
		// The umask has no say in what sysfs shows.
		if err := os.Chmod(path, e.mode); err != nil {
			return err
		}
	}
	return nil
}

// device is a disk as the guest's kernel sees it.
type device struct {
	disk simrack.GuestDisk
	// refused says that the kernel turned the controller away, because another one has the same serial: only the PCI
	// function shows (docs/reference/rack.md, NVMe disks in the guest).
	refused bool
	// The controller is nvme<controller>. The block device is nvme<subsystem>n<namespace>: its number is the
	// subsystem's, which is not the controller's when the subsystem was there before, see machine.number.
	controller, subsystem, namespace int
	loop                             loop
	// number is the loop device's block device number.
	number uint64
	// file is the disk's store as it was bound.
	file fileID
}

func (d *device) bound() boundLoop {
	return boundLoop{loop: d.loop, diskID: d.disk.ID, file: d.file}
}

// serial is what NVMe's identify data has room for of the disk's name: its first 20 bytes.
func serial(disk simrack.GuestDisk) string { return disk.Name[:min(len(disk.Name), 20)] }

// pciAddress is the address of the PCI function in a slot of the virtual machine (docs/reference/rack.md §9).
func pciAddress(slot int) string {
	number := 0x10 + slot
	if slot >= 8 {
		number = 0x1a + slot - 8
	}
	return fmt.Sprintf("0000:00:%02x.0", number)
}

func (d *device) address() string { return pciAddress(d.disk.Slot) }

func (d *device) controllerName() string { return fmt.Sprintf("nvme%d", d.controller) }

func (d *device) subsystemName() string { return fmt.Sprintf("nvme-subsys%d", d.subsystem) }

// name is the block device's, in /dev and in /sys/block.
func (d *device) name() string { return fmt.Sprintf("nvme%dn%d", d.subsystem, d.namespace) }

// majorMinor is the block device's number as sysfs writes it.
func (d *device) majorMinor() string {
	return fmt.Sprintf("%d:%d", unix.Major(d.number), unix.Minor(d.number))
}

// function is the PCI function's folder, relative to sys.
func (d *device) function() string { return "devices/pci0000:00/" + d.address() }

// folder is the block device's folder, relative to sys.
func (d *device) folder() string {
	return d.function() + "/nvme/" + d.controllerName() + "/" + d.name()
}

// tree is what stands in the PCI function's folder.
func (d *device) tree() []entry {
	tree := []entry{
		file("class", "0x010802"),
		file("vendor", "0x01de"),
		file("device", "0x0000"),
	}
	if d.refused {
		return tree
	}
	controller := "nvme/" + d.controllerName() + "/"
	block := controller + d.name() + "/"
	return append(tree,
		link("driver", "../../../bus/pci/drivers/nvme"),

		file(controller+"serial", serial(d.disk)),
		file(controller+"model", ""),
		file(controller+"firmware_rev", ""),
		file(controller+"state", "live"),
		file(controller+"transport", "pcie"),
		file(controller+"address", d.address()),
		file(controller+"cntlid", "0"),
		file(controller+"subsysnqn", d.qualifiedName()),

		link(block+"device", "../../"+d.controllerName()),
		file(block+"dev", d.majorMinor()),
		// In sectors of 512 bytes, whatever the block size.
		file(block+"size", fmt.Sprint(d.disk.SizeBytes/512)),
		file(block+"ro", map[bool]string{false: "0", true: "1"}[d.disk.ReadOnly]),
		file(block+"hidden", "0"),
		file(block+"nsid", "1"),
		file(block+"wwid", fmt.Sprintf("nvme.01de-%s--00000001", hex.EncodeToString([]byte(serial(d.disk))))),
		file(block+"queue/logical_block_size", fmt.Sprint(d.disk.BlockSize)),
	)
}

// qualifiedName is what Linux makes up for a controller that has no subsystem name of its own.
func (d *device) qualifiedName() string {
	return "nqn.2014.08.org.nvmexpress:01de01de" + serial(d.disk)
}

// links are the other places of sys where the device shows, in the order in which they come. The link in block is last:
// whoever finds a disk there finds all of it.
func (d *device) links() []entry {
	function := link("bus/pci/devices/"+d.address(), "../../../"+d.function())
	if d.refused {
		return []entry{function}
	}
	return []entry{
		function,
		// What the filesystem on the disk tells of itself: the machine's own, which knows the disk by its loop device. It
		// leads nowhere while no filesystem of this kind is mounted.
		link("fs/ext4/"+d.name(), "/sys/fs/ext4/"+d.loop.String()),
		link("class/nvme-subsystem/"+d.subsystemName(), "../../devices/virtual/nvme-subsystem/"+d.subsystemName()),
		link("class/nvme/"+d.controllerName(), "../../"+d.function()+"/nvme/"+d.controllerName()),
		link("dev/block/"+d.majorMinor(), "../../"+d.folder()),
		link("block/"+d.name(), "../"+d.folder()),
	}
}

// show makes the device appear in the guest's folder. Its files are complete before any of them can be seen.
func (d *device) show(dir string) error {
	sys, aside := filepath.Join(dir, "sys"), filepath.Join(dir, ".appearing")
	if err := write(aside, d.tree()); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Join(sys, "devices/pci0000:00"), 0o755); err != nil {
		return err
	}
	if err := os.Rename(aside, filepath.Join(sys, d.function())); err != nil {
		return err
	}
	if !d.refused {
		subsystem := "devices/virtual/nvme-subsystem/" + d.subsystemName() + "/subsysnqn"
		if err := write(sys, []entry{file(subsystem, d.qualifiedName())}); err != nil {
			return err
		}
		if err := makeNode(filepath.Join(dir, "dev", d.name()), d.number); err != nil {
			return err
		}
	}
	return write(sys, d.links())
}

// hide takes away what show made, or as much of it as is there.
func (d *device) hide(dir string) error {
	sys := filepath.Join(dir, "sys")
	links := d.links()
	var errs []error
	for i := len(links) - 1; i >= 0; i-- {
		errs = append(errs, remove(filepath.Join(sys, links[i].path)))
	}
	if !d.refused {
		errs = append(errs, remove(filepath.Join(dir, "dev", d.name())))
		errs = append(errs, removeTree(filepath.Join(sys, "devices/virtual/nvme-subsystem", d.subsystemName())))
	}
	errs = append(errs, removeTree(filepath.Join(sys, d.function())), removeTree(filepath.Join(dir, ".appearing")))
	return errors.Join(errs...)
}

// makeNode makes a block device node as udev leaves it.
func makeNode(path string, number uint64) error {
	if err := unix.Mknod(path, unix.S_IFBLK|0o660, int(number)); err != nil {
		return &fs.PathError{Op: "mknod", Path: path, Err: err}
	}
	return os.Chmod(path, 0o660)
}

// firmware is what the machine's firmware tables show (docs/reference/rack.md §9).
func firmware(instanceID string) []entry {
	const dmi = "class/dmi/id/"
	return []entry{
		file(dmi+"sys_vendor", "Oxide"),
		file(dmi+"product_name", "OxVM"),
		secret(dmi+"product_serial", instanceID),
		secret(dmi+"product_uuid", instanceID),
		file(dmi+"bios_vendor", "Oxide"),
	}
}

// remove removes a file that may be gone already.
func remove(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// removeEmpty removes a folder, which stays when there is something in it that is not ours.
func removeEmpty(dir string) error {
	if err := remove(dir); err != nil && !errors.Is(err, unix.ENOTEMPTY) {
		return err
	}
	return nil
}

// removeTree removes a folder of ours with all that is in it, unless something is mounted there.
func removeTree(dir string) error {
	if err := refuseMounts(dir); err != nil {
		return err
	}
	return os.RemoveAll(dir)
}

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

// entry is one entry of a simulated sysfs: a link if target is set, else a file.
type entry struct {
	path   string
	text   string
	target string
	mode   fs.FileMode
}

func file(path, text string) entry { return entry{path: path, text: text + "\n", mode: 0o444} }

func link(path, target string) entry { return entry{path: path, target: target} }

// secret is a file that only root can read.
func secret(path, text string) entry { return entry{path: path, text: text + "\n", mode: 0o400} }

// write creates the entries below dir, and their folders.
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
		// so that the umask does not change the mode
		if err := os.Chmod(path, e.mode); err != nil {
			return err
		}
	}
	return nil
}

// device is a disk as the guest's kernel sees it.
type device struct {
	disk simrack.GuestDisk
	// rejected means that the kernel rejected the controller because another one has the same serial. Then only the PCI
	// function appears (docs/reference/rack.md, NVMe disks in the guest).
	rejected bool
	// The controller is nvme<controller>. The block device is nvme<subsystem>n<namespace>. The subsystem's number differs
	// from the controller's if the subsystem existed before, see machine.number.
	controller, subsystem, namespace int
	loop                             loop
	// number is the device number of the loop device.
	number uint64
	// file identifies the disk's store at the time of binding.
	file fileID
}

func (d *device) bound() boundLoop {
	return boundLoop{loop: d.loop, diskID: d.disk.ID, file: d.file}
}

// serial is the first 20 bytes of the disk's name, which is the size of the serial in NVMe's identify data.
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

// name is the name of the block device in /dev and in /sys/block.
func (d *device) name() string { return fmt.Sprintf("nvme%dn%d", d.subsystem, d.namespace) }

// majorMinor is the device number as sysfs writes it.
func (d *device) majorMinor() string {
	return fmt.Sprintf("%d:%d", unix.Major(d.number), unix.Minor(d.number))
}

// function is the PCI function's folder, relative to sys.
func (d *device) function() string { return "devices/pci0000:00/" + d.address() }

// folder is the block device's folder, relative to sys.
func (d *device) folder() string {
	return d.function() + "/nvme/" + d.controllerName() + "/" + d.name()
}

// tree lists the entries in the PCI function's folder.
func (d *device) tree() []entry {
	tree := []entry{
		file("class", "0x010802"),
		file("vendor", "0x01de"),
		file("device", "0x0000"),
	}
	if d.rejected {
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
		// in sectors of 512 bytes, independently of the block size
		file(block+"size", fmt.Sprint(d.disk.SizeBytes/512)),
		file(block+"ro", map[bool]string{false: "0", true: "1"}[d.disk.ReadOnly]),
		file(block+"hidden", "0"),
		file(block+"nsid", "1"),
		file(block+"wwid", fmt.Sprintf("nvme.01de-%s--00000001", hex.EncodeToString([]byte(serial(d.disk))))),
		file(block+"queue/logical_block_size", fmt.Sprint(d.disk.BlockSize)),
	)
}

// qualifiedName is the name that Linux generates for a controller without a subsystem name.
func (d *device) qualifiedName() string {
	return "nqn.2014.08.org.nvmexpress:01de01de" + serial(d.disk)
}

// links are the other entries of the device in sys, in the order of their creation. The link in block comes last, so
// that a reader who finds a disk there finds the complete disk.
func (d *device) links() []entry {
	function := link("bus/pci/devices/"+d.address(), "../../../"+d.function())
	if d.rejected {
		return []entry{function}
	}
	return []entry{
		function,
		// ext4's own statistics of the filesystem on the disk, a link to the host's sysfs, which names the disk by its loop
		// device. The link dangles while no ext4 filesystem is mounted from it.
		link("fs/ext4/"+d.name(), "/sys/fs/ext4/"+d.loop.String()),
		link("class/nvme-subsystem/"+d.subsystemName(), "../../devices/virtual/nvme-subsystem/"+d.subsystemName()),
		link("class/nvme/"+d.controllerName(), "../../"+d.function()+"/nvme/"+d.controllerName()),
		link("dev/block/"+d.majorMinor(), "../../"+d.folder()),
		link("block/"+d.name(), "../"+d.folder()),
	}
}

// show adds the device to the guest's folder. All its files are complete before any of them is visible.
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
	if !d.rejected {
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

// hide reverts show, also after a partial one.
func (d *device) hide(dir string) error {
	sys := filepath.Join(dir, "sys")
	links := d.links()
	var errs []error
	for i := len(links) - 1; i >= 0; i-- {
		errs = append(errs, remove(filepath.Join(sys, links[i].path)))
	}
	if !d.rejected {
		errs = append(errs, remove(filepath.Join(dir, "dev", d.name())))
		errs = append(errs, removeTree(filepath.Join(sys, "devices/virtual/nvme-subsystem", d.subsystemName())))
	}
	errs = append(errs, removeTree(filepath.Join(sys, d.function())), removeTree(filepath.Join(dir, ".appearing")))
	return errors.Join(errs...)
}

// makeNode creates a block device node with the mode that udev sets.
func makeNode(path string, number uint64) error {
	if err := unix.Mknod(path, unix.S_IFBLK|0o660, int(number)); err != nil {
		return &fs.PathError{Op: "mknod", Path: path, Err: err}
	}
	return os.Chmod(path, 0o660)
}

// firmware is the machine's entries of the firmware tables (docs/reference/rack.md §9).
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

// remove removes a file. A missing file is not an error.
func remove(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// removeEmpty removes a folder if it is empty.
func removeEmpty(dir string) error {
	if err := remove(dir); err != nil && !errors.Is(err, unix.ENOTEMPTY) {
		return err
	}
	return nil
}

// removeTree removes a folder with its content, unless a filesystem is mounted in it.
func removeTree(dir string) error {
	if err := rejectMounts(dir); err != nil {
		return err
	}
	return os.RemoveAll(dir)
}

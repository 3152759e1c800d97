// Package guest shows the disks of a simulated rack to processes that act as the rack's virtual machines, with loop
// devices on Linux. It needs root and is the only part of the simulator that does.
//
// A guest is a folder. Its dev holds the block device nodes, its sys the part of sysfs that docs/rack.md describes for
// NVMe disks and firmware tables, made of ordinary directories, files and relative links; what ext4 shows of a mounted
// filesystem is a link to the machine's own sysfs. A plugin that is pointed at the
// two folders sees one virtual machine; several folders are several machines on one kernel.
//
// # How a disk dies
//
// A loop device outlives its detachment for as long as a mount or an open file holds it, and goes on reading and writing
// the backing file meanwhile. A virtual machine that loses its power, or a disk, does not. So a disk is cut off like
// this, and only then detached:
//
//  1. The filesystems on it are shut down (FS_IOC_SHUTDOWN, log not flushed). Their mounts stay in mountinfo and answer
//     EIO, as when a disk vanishes.
//  2. The backing file is made immutable for a moment where that stops writes through open descriptors (ext4). This is the
//     instant of the cut: no write of the loop device reaches the file from here on, its page cache included.
//  3. The loop device's capacity is set to zero, which is what the NVMe driver does to a disk that has vanished: whoever
//     still has the device open reads end of file and cannot write. Setting it makes the kernel write the device's dirty
//     pages, which step 2 turns into nothing. Where step 2 does not work, on other filesystems below the state directory,
//     these pages reach the file: as if the guest's kernel had written them just before the cut.
//  4. The loop device is detached; it lets go of the file when its last holder does.
//
// What the disk's next holder reads is therefore what had reached the backing file, and nothing that is written or
// acknowledged later can be missing from it. When the next holder comes while the old loop device is still held, the disk
// moves to a fresh file, a copy of the old one, so that no file is ever behind two loop devices.
package guest

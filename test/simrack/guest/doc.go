// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package guest shows the disks of a simulated rack to processes that act as the rack's virtual machines, with loop
// devices on Linux. It needs root and is the only part of the simulator that does.
//
// A guest is a folder. Its dev holds the block device nodes, its sys the part of sysfs that docs/reference/rack.md describes for
// NVMe disks and firmware tables, made of ordinary directories, files and relative links; what ext4 shows of a mounted
// filesystem is a link to the machine's own sysfs. A plugin that is pointed at the
// two folders sees one virtual machine; several folders are several machines on one kernel.
//
// # What runs in a guest
//
// Nothing does, unless [Options] names a program to boot: then whoever likes acts as the machine from outside. A guest that
// boots runs the program as the first process of a PID namespace and a mount namespace of its own. These, unlike network,
// names and users, are what a machine takes with it when it loses its power: with the first process the kernel ends all the
// others, and with them what they have mounted. The program finds its folder, and whose it is, in the environment variables
// OXIDE_SIM_GUEST, OXIDE_SIM_INSTANCE and OXIDE_SIM_INSTANCE_ID, beside those of the simulator; what it prints goes to
// the file console in that folder. As long as it keeps its /proc, the boot ID there is that of this boot, as it is in the
// file boot_id in that folder. Its namespaces see what is mounted on the host, and the host nothing of theirs; among
// the namespaces that it makes mounts are shared. It can go on to a root, a network or a name of its own.
//
// When the first process ends, or calls reboot(2), the guest has powered itself off or reset itself. The mount namespace is
// held until the disks are cut off, for at its end the kernel would unmount in order what was left mounted. When the
// simulator itself is killed, its guests die with it, and there the kernel does.
//
// A guest is asked to halt with the signal SIGRTMIN+4, which has systemd power a machine off. The kernel keeps from the
// first process of a PID namespace all signals that it does not handle, so a guest may well go on.
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
//  4. The processes of the guest are killed, if it is the guest that loses its power.
//  5. The loop device is detached; it lets go of the file when its last holder does.
//
// What the disk's next holder reads is therefore what had reached the backing file, and nothing that is written or
// acknowledged later can be missing from it. When the next holder comes while the old loop device is still held, the disk
// moves to a fresh file, a copy of the old one, so that no file is ever behind two loop devices.
package guest

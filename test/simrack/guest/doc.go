// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package guest simulates the virtual machines of a simulated rack. It shows the rack's disks as loop devices on Linux.
// It is the only part of the simulator that needs root.
//
// A guest is a folder. Its dev holds block device nodes. Its sys holds the part of sysfs that docs/reference/rack.md
// describes for NVMe disks and firmware tables, made of ordinary directories, files and relative links. The ext4
// statistics of a mounted filesystem are a link to the host's sysfs. For a plugin with these folders as --dev-root and
// --sys-root, the guest is a virtual machine. Several folders are several machines on one kernel.
//
// # Processes of a guest
//
// Without the option Boot a guest has no processes; a test acts as the machine from outside. With it, a guest that
// boots runs the program as the first process of its own PID namespace and mount namespace. These two, unlike network,
// host name and users, disappear when a machine loses its power: when the first process ends, the kernel kills all
// others and removes their mounts.
//
// The program gets the simulator's environment, and OXIDE_SIM_GUEST (the guest's folder), OXIDE_SIM_INSTANCE and
// OXIDE_SIM_INSTANCE_ID. Its output goes to the file console in the guest's folder. The boot ID in its /proc is the
// same as in the file boot_id in the guest's folder, and changes with each boot. A guest sees the mounts of the host;
// the host does not see the mounts of a guest. Mount namespaces that a guest creates share its mounts. A guest may
// create further namespaces, for example for a root directory, a network or a host name of its own.
//
// When the first process ends or calls reboot(2), the guest has powered itself off or reset itself. The simulator keeps
// the mount namespace until the disks are cut off: at the end of the namespace the kernel would unmount its filesystems
// in order. When the simulator itself is killed, its guests are killed too, and the kernel does unmount them.
//
// The signal SIGRTMIN+4 asks a guest to halt, as it asks systemd to power a machine off. The kernel withholds signals
// without a handler from the first process of a PID namespace. So a guest may ignore the request.
//
// # How a disk is cut off
//
// A loop device that was detached remains as long as a mount or an open file holds it, and continues to read and write
// the backing file. The disk of a virtual machine that loses its power does not. So the simulator cuts a disk off in
// these steps before it detaches the loop device:
//
//  1. Shut down the filesystems on it (FS_IOC_SHUTDOWN, log not flushed). Their mounts stay in mountinfo and answer
//     EIO, as when a disk vanishes.
//  2. Make the backing file immutable for a moment, on filesystems where this stops writes through open descriptors
//     (ext4). This is the instant of the cut: from here on no write of the loop device reaches the file, nor does its
//     page cache.
//  3. Set the loop device's capacity to zero, as the NVMe driver does with a disk that has vanished: a process with the
//     device open reads end of file and cannot write. Setting it makes the kernel write the device's dirty pages, which
//     step 2 prevents. Where step 2 does not work, on other filesystems below the state directory, these pages reach
//     the file, as if the guest's kernel had written them just before the cut. A test that needs the loss on any
//     filesystem uses package test/writecache.
//  4. Kill the processes of the guest, if the guest loses its power.
//  5. Detach the loop device. The kernel releases the file when the last holder closes the device.
//
// So the next guest with the disk reads exactly what had reached the backing file before the cut. No write that was
// acknowledged before the cut is missing from it. One thing differs from a real disk: if a program writes to the raw
// device in the moment of step 3, the kernel drops the page, which is now beyond the end of the device, and the
// program's flush succeeds. An NVMe disk that has vanished fails the flush. So a flush of a raw device counts only if
// the device has its capacity afterwards. If the old loop device is still held when the next guest gets the disk,
// the disk moves to a copy of its file, so that no file is ever bound to two loop devices.
package guest

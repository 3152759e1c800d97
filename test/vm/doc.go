// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package vm tests the node half of the plugin on a real kernel: a small Linux guest in QEMU. Its NVMe disks carry the
// same serials as the disks of a rack's virtual machines. Disks are attached and detached while the guest runs. The
// guest loses power at bad moments, or powers itself off for a planned restart. The built plugin runs inside, and the
// test calls it over its socket as an orchestrator would.
//
// The tests have the build tag vm and run with
//
//	make test-vm
//
// which installs QEMU, and fails if QEMU cannot be installed. The processor is emulated, so the tests need only
// Debian's packages, and nothing leaves the machine. guest.sh builds the guest. init starts it, and down shuts it
// down: busybox' init calls down as inittab says. agent runs commands in the guest for the test.
//
// VM_KERNEL=FOLDER runs them with another kernel than Debian 12's, and VM_TOOLS=FOLDER with other tools than this
// machine's: test/matrix/debian.sh makes such folders. With the tag matrix TestMatrix moves volumes between them.
//
// # Differences from a rack
//
// QEMU pads serials with spaces, a rack with zero bytes. QEMU's disks have a model; the plugin trims the serial and
// reads no model. A power cut is the end of the QEMU process: data that the guest's kernel has not written yet is
// lost, but written data is kept even if it was not flushed.
package vm

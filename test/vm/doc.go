// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package vm tests the node half of the plugin on a real kernel: a small Linux guest in QEMU, with NVMe disks that carry
// our serials, as a rack's virtual machines have them. Disks come and go while the guest runs, and the guest loses its
// power at bad moments, or powers itself off for a planned restart. The built plugin runs inside; the test speaks to its
// socket as an orchestrator would.
//
// The tests have the build tag vm and run with
//
//	make test-vm
//
// which installs QEMU and fails where it cannot be had. The processor is emulated, so nothing but Debian's packages is
// needed, and nothing leaves the machine. guest.sh builds the guest; init starts it, and
// down ends it, which busybox' init calls as inittab says; agent is its ear.
//
// # How it differs from a rack
//
// QEMU pads serials with spaces, where a rack pads with zero bytes, and its disks have a model; the plugin trims both and
// reads no model. A power cut is the end of the QEMU process: what the guest's kernel has not written yet is lost, but
// what it has written is kept even where it was not flushed.
package vm

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package luks encrypts disks with LUKS2. It runs cryptsetup, which keeps the header on the disk, and the kernel's
// dm-crypt, which shows the disk's clear data as another device: its mapping. Package node decides when.
//
// # The header
//
// The first 16 MiB of an encrypted disk hold its header. The header's UUID follows from the disk's, as the UUID of a
// filesystem does. So a header shows its owner without a passphrase. The header has one key slot for each
// passphrase. A slot holds the volume key, encrypted with a key that argon2id derives from the passphrase.
//
// A fresh mapping shows noise. So reading the mapping cannot prove that it is blank. Two other things prove it
// together:
//
//   - luksFormat sets the label "unformatted" ([device.LabelUnformatted]) in the header. The label is removed after the
//     filesystem was verified, or before a workload gets the mapping as raw block. It is never set again.
//   - The disk below is still zero where data would be ([device.CheckNeverWritten]). An old header may have been
//     restored, with the label. What is written into a mapping shows as noise below.
//
// mkfs runs inside only with both, or to repeat an mkfs that was interrupted.
//
// Before luksFormat, the proof that the disk is blank also reads the 16 MiB of the header and, behind them, all places
// where the filesystem inside would keep superblocks. A disk that was created for raw block is read as a whole up to
// --blank-scan-limit. A larger one is not: reading it takes longer than an orchestrator waits, so it could never be
// encrypted. What a workload wrote is behind a header. So such a disk looks blank only if a user overwrote the header
// and all these places with zeros.
//
// The states of an encrypted disk, and what a process that was killed leaves:
//
//	blank            device.ProveBlank, then luksFormat with the format marker on the disk
//	   |             killed: marker, and perhaps a header with the label; luksFormat runs again
//	unformatted      header with the label, no marker; the mapping is open or not
//	   |             killed: mkfs runs again
//	formatted        header without the label; the filesystem inside was verified, or the workload owns the bytes
//
// cryptsetup writes each change of the header twice, with checksums. After a power cut it finds the old or the new one.
// It would go on with one good copy in silence. [Tool.Mend] makes both good again, each time a writable disk is opened.
//
// # Mappings
//
// The end of a request does not end cryptsetup open: killed between its steps it would leave a mapping without a table.
// One that a killed container leaves is removed before the next open. A mapping's name has the volume's ID and the
// disk's attachment, so a disk can come back while a copy of a mount keeps the mapping of its former attachment. A
// mapping that a killed plugin left is opened anew, so that the options of the new request count. A stage keeps its
// mapping open: the kernel cannot give its number to another.
//
// Sysfs tells the disk of a mapping. Package mount translates the mapping's device number to that of the disk when it
// reads the mount table, as it does for btrfs. So what a node decides by the disk's number holds for encrypted volumes.
//
// # The passphrase
//
// cryptsetup reads it from its stdin, which is a file in memory. It is in no argument, environment or file, and no
// error of this package contains it. [DisableCoreDumps] keeps it out of core files.
//
// One derivation at a time runs on a node: argon2id takes the memory that the header says ([Tool.MemoryBytes] when it
// was written), and a node may stage many volumes at once.
package luks

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main

// planted are the bugs. Their order is that of the page.
var planted = []bug{
	{
		name:     "device: mkfs starts while another program holds the disk",
		file:     "core/device/blank.go",
		original: "if b.exclusive, err = b.dev.Open(unix.O_RDONLY | unix.O_EXCL); err != nil {",
		planted:  "if b.exclusive, err = b.dev.Open(unix.O_RDONLY); err != nil {",
		pkg:      "core/device",
		test:     "TestProveBlankRejects",
	},
	{
		name: "device: the disk is not compared again after mkfs",
		file: "core/device/blank.go",
		original: "\tif err := mkfs(b.dev.Path); err != nil {\n" +
			"\t\treturn err\n" +
			"\t}\n" +
			"\treturn b.verifyUnchanged()\n",
		planted: "\treturn mkfs(b.dev.Path)\n",
		pkg:     "core/device",
		test:    "TestFormatChecksAgain",
	},
	{
		name: "device: the disk is not compared again before mkfs",
		file: "core/device/blank.go",
		original: "\tif err := b.verifyUnchanged(); err != nil {\n" +
			"\t\treturn err\n" +
			"\t}\n" +
			"\tif err := b.markAndWipe()",
		planted: "\tif err := b.markAndWipe()",
		pkg:     "core/device",
		test:    "TestProveBlankOfMovingDevice",
	},
	{
		name:     "device: the sequence number of the disk is not compared",
		file:     "core/device/blank.go",
		original: "if err == nil && sequence != b.sequence {",
		planted:  "if err == nil && sequence != b.sequence && false {",
		pkg:      "core/device",
		test:     "TestProveBlankOfMovingDevice",
	},
	{
		name:     "device: the last MiB is not read",
		file:     "core/device/signatures.go",
		original: `return []region{{"first MiB", 0, length}, {"last MiB", sizeBytes - length, length}}`,
		planted:  `return []region{{"first MiB", 0, length}}`,
		pkg:      "core/device",
		test:     "TestProveBlankRejects",
	},
	{
		name:     "device: the copy of a btrfs superblock is not read",
		file:     "core/device/signatures.go",
		original: "\t\t{\"copy of a btrfs superblock\", 64 * mib, 2 * page},\n",
		planted:  "",
		pkg:      "core/node",
		test:     "TestNodeNeverFormats/a_byte_where_btrfs",
	},
	{
		name:     "device: copies of ext superblocks are read in group 1 only",
		file:     "core/device/signatures.go",
		original: "group*128*mib < sizeBytes; group *= base {",
		planted:  "group*128*mib < sizeBytes && group == 1; group *= base {",
		pkg:      "core/device",
		test:     "TestSignaturesHaveAllCopiesOfExt",
	},
	{
		name:     "device: a disk made from a snapshot is not read as a whole",
		file:     "core/device/blank.go",
		original: "return o.Origin != OriginBlank || o.RawBlock }",
		planted:  "return o.RawBlock }",
		pkg:      "core/node",
		test:     "TestNodeNeverFormats/a_byte_in_the_middle_of_a_restored_disk",
	},
	{
		name:     "device: a disk used as raw block is not read as a whole",
		file:     "core/device/blank.go",
		original: "return o.Origin != OriginBlank || o.RawBlock }",
		planted:  "return o.Origin != OriginBlank }",
		pkg:      "core/node",
		test:     "TestNodeRawBlockThenFilesystem",
	},
	{
		name:     "device: the limit of the scan is not applied",
		file:     "core/device/blank.go",
		original: "if options.wholeDisk() && dev.SizeBytes > options.ScanLimit {",
		planted:  "if options.wholeDisk() && dev.SizeBytes > options.ScanLimit && false {",
		pkg:      "core/node",
		test:     "TestNodeRawBlockUnused",
	},
	{
		name:     "device: a short read counts as zeros",
		file:     "core/device/blank.go",
		original: "\t\t\tif n < len(chunk) {",
		planted:  "\t\t\tif n < 0 {",
		pkg:      "core/device",
		test:     "TestProveBlankRejects",
	},
	{
		name: "device: what blkid finds is ignored",
		file: "core/device/blank.go",
		original: "\tif !content.Empty() {\n" +
			"\t\treturn fmt.Errorf(\"%w %s: it holds",
		planted: "\tif !content.Empty() && false {\n" +
			"\t\treturn fmt.Errorf(\"%w %s: it holds",
		pkg:  "core/device",
		test: "TestProveBlankRejects",
	},
	{
		name:     "device: udev is not locked out",
		file:     "core/device/blank.go",
		original: "if err := lockDisk(ctx, b.locked); err != nil {",
		planted:  "if err := ctx.Err(); err != nil {",
		pkg:      "core/device",
		test:     "TestProveBlankWaitsForTheLock",
	},
	{
		name:     "device: the remains of any format count as this disk's",
		file:     "core/device/blank.go",
		original: `if i.UUID == "" || content.UUID != i.UUID || content.PartitionTable != "" {`,
		planted:  `if i.UUID == "" || content.PartitionTable != "" {`,
		pkg:      "core/device",
		test:     "TestProveBlankAfterInterruption",
	},
	{
		name:     "device: data without a signature counts as remains of a format",
		file:     "core/device/blank.go",
		original: "\t\treturn i.Untouched, nil\n",
		planted:  "\t\treturn true, nil\n",
		pkg:      "core/device",
		test:     "TestProveBlankAfterInterruption",
	},
	{
		name: "device: a mounted ext counts as never mounted",
		file: "core/device/superblock.go",
		original: "\treturn binary.LittleEndian.Uint32(super[0x2c:]) == 0 && super[0x275] == 0 &&\n" +
			"\t\tbinary.LittleEndian.Uint16(super[0x34:]) == 0, nil",
		planted: "\treturn len(super) > 0, nil",
		pkg:     "core/mount",
		test:    "TestMarkerBesideMountedFilesystem",
	},
	{
		name:     "device: a mounted xfs counts as never mounted",
		file:     "core/device/superblock.go",
		original: "\treturn found == \"\", err",
		planted:  "\treturn found == found, err",
		pkg:      "core/mount",
		test:     "TestMarkerBesideMountedFilesystem",
	},
	{
		name: "device: removing a marker overwrites what is there instead",
		file: "core/device/marker.go",
		original: "\t\tif bytes.Equal(found, m.content) {\n" +
			"\t\t\tplaces",
		planted: "\t\tif len(found) > 0 {\n" +
			"\t\t\tplaces",
		pkg:  "core/device",
		test: "TestRemoveFormatMarkerSparesData",
	},
	{
		name:     "device: the marker of another disk counts",
		file:     "core/device/marker.go",
		original: "copy(m.content, fmt.Sprintf(text, diskID))",
		planted:  "copy(m.content, fmt.Sprintf(text, uuid.UUID{}))",
		pkg:      "core/mount",
		test:     "TestFormatAfterPowerCut",
	},
	{
		name:     "device: the device number of the node is not compared",
		file:     "core/device/open.go",
		original: "if number := numberOf(stat.Rdev); number != d.Number {",
		planted:  "if number := numberOf(stat.Rdev); number != d.Number && false {",
		pkg:      "core/device",
		test:     "TestWaitForDiskRejects",
	},
	{
		name:     "device: the size of the disk is not compared",
		file:     "core/device/find.go",
		original: "if want.SizeBytes != 0 && dev.SizeBytes != want.SizeBytes {",
		planted:  "if want.SizeBytes != 0 && dev.SizeBytes == 1 {",
		pkg:      "core/node",
		test:     "TestNodeNeverFormats/another_size",
	},
	{
		name:     "device: the first of two disks with the serial is taken",
		file:     "core/device/find.go",
		original: "switch len(matches) {",
		planted:  "switch min(1, len(matches)) {",
		pkg:      "core/device",
		test:     "TestWaitForDiskRejects",
	},
	{
		name:     "device: a mounted partition does not protect its disk",
		file:     "core/device/find.go",
		original: "\t\t\tif number == partition {",
		planted:  "\t\t\tif number == partition && false {",
		pkg:      "core/device",
		test:     "TestCheckNotSystem",
	},
	{
		name: "device: an NVMe function that the kernel rejected is ignored",
		file: "core/device/find.go",
		original: "\t\t\tif unsettled == \"\" {\n" +
			"\t\t\t\treturn dev",
		planted: "\t\t\tif unsettled == \"\" || true {\n" +
			"\t\t\t\treturn dev",
		pkg:  "core/device",
		test: "TestWaitForDiskRejects",
	},
	{
		name:     "device: the same btrfs on a second disk is not seen",
		file:     "core/device/superblock.go",
		original: "if id == content.UUID {",
		planted:  `if id == content.UUID && name == "" {`,
		pkg:      "core/node",
		test:     "TestNodeStagesVolumeAndItsCopy",
	},
	{
		name:     "mount: mkfs is believed without a look at the disk",
		file:     "core/mount/format.go",
		original: "if err := verifyFormat(dev, want.Type, fsUUID); err != nil {",
		planted:  "if err := ctx.Err(); err != nil {",
		pkg:      "core/mount",
		test:     "TestFormatLooksAtTheDisk",
	},
	{
		name:     "mount: the marker and the record of a format stay",
		file:     "core/mount/format.go",
		original: "\treturn took, f.RemoveMarkerAndRecord(want.DiskID, dev)",
		planted:  "\treturn took, nil",
		pkg:      "core/mount",
		test:     "TestFormatMountUnmount",
	},
	{
		name:     "mount: no record is kept while mkfs runs",
		file:     "core/mount/format.go",
		original: "if err := f.writeRecord(want, dev, fsUUID, blank.Sequence()); err != nil {",
		planted:  "if err := ctx.Err(); err != nil {",
		pkg:      "core/mount",
		test:     "TestFormatLooksAtTheDisk",
	},
	{
		name:     "mount: a record of an earlier boot counts",
		file:     "core/mount/format.go",
		original: "interrupted.Untouched = r.BootID == boot && r.Sequence == sequence",
		planted:  `interrupted.Untouched = boot != "" && r.Sequence == sequence`,
		pkg:      "core/mount",
		test:     "TestFormatAgainAfterKill",
	},
	{
		name:     "mount: another disk's mount is unmounted too",
		file:     "core/mount/unmount.go",
		original: "if number, ok := mounts[0].Device(); !ok || number != n {",
		planted:  "if number, ok := mounts[0].Device(); !ok && number != n {",
		pkg:      "core/mount",
		test:     "TestUnmountOfSomethingElse",
	},
	{
		name:     "mount: a journal is replayed on a read-only disk",
		file:     "core/mount/mount.go",
		original: "\t\t\toptions = append(options, \"noload\")",
		planted:  "\t\t\toptions = append(options, \"ro\")",
		pkg:      "core/node",
		test:     "TestNodeReadOnlyDiskOfDirtySnapshot",
	},
	{
		name:     "mount: a read-only bind is writable",
		file:     "core/mount/mount.go",
		original: "\t\tattr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY}",
		planted:  "\t\tattr := unix.MountAttr{}",
		pkg:      "core/mount",
		test:     "TestBindBothWays",
	},
	{
		name: "mount: a folder with content is mounted over",
		file: "core/mount/mount.go",
		original: "\tif len(entries) > 0 {\n" +
			"\t\treturn fmt.Errorf(\"%w: folder %s is not empty, and",
		planted: "\tif len(entries) > 9 {\n" +
			"\t\treturn fmt.Errorf(\"%w: folder %s is not empty, and",
		pkg:  "core/mount",
		test: "TestMakeAndRemove",
	},
	{
		name: "mount: a file with content is removed",
		file: "core/mount/mount.go",
		original: "\tif !info.IsDir() && (!info.Mode().IsRegular() || info.Size() > 0) {\n" +
			"\t\treturn fmt.Errorf(\n",
		planted: "\tif !info.IsDir() && !info.Mode().IsRegular() {\n" +
			"\t\treturn fmt.Errorf(\n",
		pkg:  "core/mount",
		test: "TestMakeAndRemove",
	},
	{
		name:     "mount: xfs is mounted without nouuid",
		file:     "core/mount/mount.go",
		original: "\t\toptions = append(options, \"nouuid\")",
		planted:  "\t\toptions = append(options, \"noatime\")",
		pkg:      "core/node",
		test:     "TestNodeStagesVolumeAndItsCopy",
	},
	{
		name:     "device: the format marker is not written",
		file:     "core/device/blank.go",
		original: "if err := formatMarker(b.dev, b.diskID).write(file); err != nil || !b.remains {",
		planted:  "if !b.remains {",
		pkg:      "core/mount",
		test:     "TestMarkerSurvivesMkfs",
	},
	{
		name: "device: a marker is not flushed to the disk",
		file: "core/device/marker.go",
		original: "\treturn file.Sync()\n" +
			"}\n" +
			"\n" +
			"func (m marker) findCopies",
		planted: "\treturn nil\n" +
			"}\n" +
			"\n" +
			"func (m marker) findCopies",
		pkg:  "core/mount",
		test: "TestFormatMarkerIsDurable",
	},
	{
		name: "device: the removal of a marker is not flushed",
		file: "core/device/marker.go",
		original: "\treturn file.Sync()\n" +
			"}\n" +
			"\n" +
			"// write",
		planted: "\treturn nil\n" +
			"}\n" +
			"\n" +
			"// write",
		pkg:  "core/mount",
		test: "TestFormatMarkerIsDurable",
	},
	{
		name:     "mount: mkfs is not flushed before the marker goes",
		file:     "core/mount/format.go",
		original: "\tif err := errors.Join(file.Sync(), file.Close()); err != nil {",
		planted:  "\tif err := file.Close(); err != nil {",
		pkg:      "core/mount",
		test:     "TestVerifyFormatFlushes",
	},
	{
		name:     "mount: no growth marker is written",
		file:     "core/mount/grow.go",
		original: "\t\tif err := device.WriteWorkMarker(dev, diskID, device.Growing); err != nil {",
		planted:  "\t\tif err := ctx.Err(); err != nil {",
		pkg:      "core/node",
		test:     "TestNodeGrowthSparesABootLoader",
	},
	{
		name:     "mount: a growth marker is ignored",
		file:     "core/mount/grow.go",
		original: "\tif err != nil || interrupted == device.NoWork {",
		planted:  "\tif err != nil || interrupted != device.Checking {",
		pkg:      "core/node",
		test:     "TestNodeGrowthInterruptedInTheSuperblock",
	},
	{
		name:     "mount: a check marker is ignored",
		file:     "core/mount/grow.go",
		original: "\tif err != nil || interrupted == device.NoWork {",
		planted:  "\tif err != nil || interrupted != device.Growing {",
		pkg:      "core/node",
		test:     "TestNodeCheckInterruptedInTheSuperblock",
	},
	{
		name:     "mount: no check marker is written",
		file:     "core/mount/check.go",
		original: "\tif err == nil && whole {",
		planted:  "\tif err == nil && whole && ctx == nil {",
		pkg:      "core/mount",
		test:     "TestCheckMarkerStaysAfterAKill",
	},
	{
		name:     "mount: a check marker is written although the superblock has a wrong checksum",
		file:     "core/mount/check.go",
		original: "\tif err == nil && whole {",
		planted:  "\tif err == nil && (whole || dev.Path != \"\") {",
		pkg:      "core/mount",
		test:     "TestCheckMarkerStaysAfterAKill",
	},
	{
		name:     "mount: the check marker goes although e2fsck was killed",
		file:     "core/mount/check.go",
		original: "\tif errors.Is(err, errKilled) || ctx.Err() != nil {",
		planted:  "\tif ctx.Err() != nil {",
		pkg:      "core/mount",
		test:     "TestCheckMarkerStaysAfterAKill",
	},
	{
		name:     "node: the record of a deleted volume counts for a new volume of the same name",
		file:     "core/node/identify.go",
		original: "\tif own >= 0 && !gone {",
		planted:  "\tif own >= 0 && !gone && dev.Path == \"\" {",
		pkg:      "core/node",
		test:     "TestNodeDiskNameOfADeletedVolume",
	},
	{
		name:     "node: any disk is formatted without a publish context",
		file:     "core/node/content.go",
		original: "\tcase !volume.attached || volume.sizeBytes == 0:",
		planted:  "\tcase false:",
		pkg:      "core/node",
		test:     "TestNodeNeverFormats/without_a_publish_context",
	},
	{
		name:     "node: another filesystem than the requested one is mounted",
		file:     "core/node/content.go",
		original: "\tif wanted != \"\" && wanted != content.Type {",
		planted:  "\tif wanted != \"\" && content.Type == \"\" {",
		pkg:      "core/node",
		test:     "TestNodeNeverFormats/another_filesystem",
	},
	{
		name:     "node: the filesystem of another volume is mounted",
		file:     "core/node/content.go",
		original: "if err == nil && found.Version() == 5 && volume.origin == rpc.OriginBlank {",
		planted:  "if err == nil && found.Version() == 15 && volume.origin == rpc.OriginBlank {",
		pkg:      "core/node",
		test:     "TestNodeFilesystemIdentity",
	},
	{
		name:     "node: a second target is published whatever the access mode",
		file:     "core/node/publish.go",
		original: "if !published && !p.multipleTargets && len(others) > 0 {",
		planted:  "if !published && !p.multipleTargets && len(others) > 9 {",
		pkg:      "core/node",
		test:     "TestNodePublishTargets",
	},
	{
		name: "node: a raw block disk published read-only takes writes",
		file: "core/node/publish.go",
		original: "\tif err := setReadOnly(p.dev, p.readOnly); err != nil || published {\n" +
			"\t\treturn err\n" +
			"\t}\n",
		planted: "\tif published {\n" +
			"\t\treturn nil\n" +
			"\t}\n",
		pkg:  "core/node",
		test: "TestNodeRawBlockReadOnlyEverywhere",
	},
	{
		name:     "node: the owner of a root folder in use is changed",
		file:     "core/node/volume.go",
		original: "\t\tif entry.Name() != \"lost+found\" {",
		planted:  "\t\tif entry.Name() == \"\" {",
		pkg:      "core/node",
		test:     "TestNodeRootFolderInUse",
	},
	{
		name:     "node: a target inside the staging path is published",
		file:     "core/node/validate.go",
		original: "if strings.HasPrefix(target, staging) || strings.HasPrefix(staging, target) {",
		planted:  "if strings.HasPrefix(staging, target) {",
		pkg:      "core",
		test:     "TestBadInput/NodePublishVolume",
	},
	{
		name:     "node: a disk name that no rack accepts is waited for",
		file:     "core/node/volume.go",
		original: "\tif !diskname.Valid(v.diskName) {",
		planted:  "\tif v.diskName == \"\" {",
		pkg:      "core",
		test:     "TestBadInput/NodeStageVolume",
	},
	{
		name:     "shutdown: a request of any age powers the guest off",
		file:     "core/shutdown/agent.go",
		original: "\tcase age > maxRequestAge:",
		planted:  "\tcase age > 10000*maxRequestAge:",
		pkg:      "core/shutdown",
		test:     "TestRequestsThatPowerNothingOff",
	},
	{
		name:     "shutdown: a request from the future powers the guest off",
		file:     "core/shutdown/agent.go",
		original: "\tcase age < -maxClockSkew:",
		planted:  "\tcase age < -100000*time.Hour:",
		pkg:      "core/shutdown",
		test:     "TestRequestsThatPowerNothingOff",
	},
	{
		name:     "shutdown: a request from before the boot powers the guest off",
		file:     "core/shutdown/agent.go",
		original: "planned.Before(booted) {",
		planted:  "booted.IsZero() {",
		pkg:      "core/shutdown",
		test:     "TestRequestsThatPowerNothingOff",
	},
	{
		name: "shutdown: an old acceptance powers the guest off",
		file: "core/shutdown/agent.go",
		original: "\t\tif err := checkAge(planned); err != nil {\n" +
			"\t\t\ta.ignore(restart, err)\n" +
			"\t\t\treturn nil\n" +
			"\t\t}\n",
		planted: "",
		pkg:     "core/shutdown",
		test:    "TestRequestsThatPowerNothingOff",
	},
	{
		name: "shutdown: the guest goes down before its reply is durable",
		file: "core/shutdown/agent.go",
		original: "\tif err := a.reply(ctx, restart, metadata.RestartAccepted, \"\"); err != nil {\n" +
			"\t\treturn err\n" +
			"\t}\n",
		planted: "\t_ = a.reply(ctx, restart, metadata.RestartAccepted, \"\")\n",
		pkg:     "core/shutdown",
		test:    "TestAcceptanceInterrupted",
	},
	{
		name:     "shutdown: an acceptance of an earlier boot powers the guest off",
		file:     "core/shutdown/agent.go",
		original: "\tcase sent.State == metadata.RestartAccepted && sent.Boot != a.bootID:",
		planted:  "\tcase sent.State == metadata.RestartAccepted && sent.Boot == \"\":",
		pkg:      "core/shutdown",
		test:     "TestAcceptedAndBack",
	},
	{
		name:     "shutdown: a program that inhibits a shutdown is ignored",
		file:     "core/shutdown/systemd.go",
		original: "\tcase strings.HasPrefix(i.Mode, \"block\"):",
		planted:  "\tcase strings.HasPrefix(i.Mode, \"blocked\"):",
		pkg:      "core/shutdown",
		test:     "TestSystemdCheck",
	},
	{
		name:     "metadata: any text of 16 characters is the ID of a restart",
		file:     "metadata/restart.go",
		original: "\tif err != nil || fmt.Sprintf(restartIDForm, uint32(number>>32), uint32(number)) != restartID {",
		planted:  "\tif err != nil && len(restartID) != 16 {",
		pkg:      "metadata",
		test:     "TestRestartID",
	},
	{
		name:     "controller: an instance gets one disk too many",
		file:     "core/controller/publish.go",
		original: "\tif len(disks) >= c.maxDisks {",
		planted:  "\tif len(disks) > c.maxDisks {",
		pkg:      "core/controller",
		test:     "TestPublishToAFullInstance",
	},
	{
		name:     "controller: two disks with the same serial on one instance",
		file:     "core/controller/publish.go",
		original: "if other.ID != disk.ID && diskname.Serial(other.Name) == diskname.Serial(disk.Name) {",
		planted:  "if other.ID != disk.ID && other.Name == disk.Name {",
		pkg:      "core/controller",
		test:     "TestPublishRejectsWithoutAChange",
	},
	{
		name:     "controller: a boot disk is published",
		file:     "core/controller/publish.go",
		original: "\tif instance.BootDiskID == disk.ID {",
		planted:  "\tif instance.BootDiskID == \"\" {",
		pkg:      "core/controller",
		test:     "TestPublishRejectsWithoutAChange",
	},
	{
		name: "controller: a lost answer of a create is final",
		file: "core/controller/create.go",
		original: "\tmayExist := errors.Is(createErr, rack.ErrAlreadyExists) || errors.Is(createErr, rack.ErrCapacity) ||\n" +
			"\t\track.OutcomeUnknown(createErr)",
		planted: "\tmayExist := errors.Is(createErr, rack.ErrAlreadyExists) || errors.Is(createErr, rack.ErrCapacity)",
		pkg:     "core/controller",
		test:    "TestCreateVolumeThroughFaults",
	},
	{
		name: "controller: a full quota hides a volume that exists",
		file: "core/controller/create.go",
		original: "\tmayExist := errors.Is(createErr, rack.ErrAlreadyExists) || errors.Is(createErr, rack.ErrCapacity) ||\n" +
			"\t\track",
		planted: "\tmayExist := errors.Is(createErr, rack.ErrAlreadyExists) ||\n" +
			"\t\track",
		pkg:  "core/controller",
		test: "TestRepeatedCreateVolumeOnFullQuota",
	},
	{
		name:     "controller: an unknown outcome drops the volume",
		file:     "core/controller/outcome.go",
		original: "\treturn rpc.Unavailable(\"%w\", err)",
		planted:  "\treturn rpc.Internal(\"%w\", err)",
		pkg:      "core/controller",
		test:     "TestCreateVolumeThroughFaults",
	},
	{
		name:     "controller: an existing disk of another size is taken",
		file:     "core/controller/create.go",
		original: "\tcase !sizeInRange(disk.SizeBytes, want.capacity):",
		planted:  "\tcase disk.SizeBytes == 0:",
		pkg:      "core/controller",
		test:     "TestCreateVolumeConflicts",
	},
	{
		name:     "controller: sizes are rounded down",
		file:     "core/controller/size.go",
		original: "\tsize := (requiredBytes + gib - 1) / gib * gib",
		planted:  "\tsize := requiredBytes / gib * gib",
		pkg:      "core/controller",
		test:     "TestChooseSize",
	},
	{
		name:     "controller: the disk of another cluster is deleted",
		file:     "core/controller/delete.go",
		original: "\tcase owner.Cluster != c.cluster:",
		planted:  "\tcase owner.Cluster == \"\":",
		pkg:      "core/controller",
		test:     "TestDeleteRejectsDisksOfOthers",
	},
	{
		name:     "controller: a late unpublish detaches the disk from its new node",
		file:     "core/controller/publish.go",
		original: "\tif disk.InstanceID == \"\" || (nodeOK && disk.InstanceID != nodeID) {",
		planted:  "\tif disk.InstanceID == \"\" {",
		pkg:      "core/controller",
		test:     "TestUnpublishForTheWrongNodeDetachesNothing",
	},
	{
		name:     "controller: a disk is detached within the grace period",
		file:     "core/controller/publish.go",
		original: "\tif remaining <= 0 {",
		planted:  "\tif remaining <= time.Hour {",
		pkg:      "core/controller",
		test:     "TestDetachGrace",
	},
	{
		name: "controller: the temporary snapshot of a clone stays",
		file: "core/controller/clone.go",
		original: "\tc.deleteTemporarySnapshot(ctx, snapshot)\n" +
			"\treturn disk, err",
		planted: "\treturn disk, err",
		pkg:     "core/controller",
		test:    "TestClone",
	},
	{
		name:     "controller: a restored volume does not know its ancestors",
		file:     "core/controller/create.go",
		original: "\twant.description.Lineage = lineageOf(snapshot)\n",
		planted:  "",
		pkg:      "core/controller",
		test:     "TestLineageOfRestores",
	},
	{
		name: "controller: a 404 is believed although the token lost its role",
		file: "core/controller/racks.go",
		original: "\t\tif unconfirmed := r.confirmNotFound(ctx); unconfirmed != nil {\n" +
			"\t\t\terr = unconfirmed\n" +
			"\t\t}\n",
		planted: "",
		pkg:     "core/controller",
		test:    "TestTokenWithoutRoleIsUnavailable",
	},
	{
		name:     "controller: a raw block volume is forgotten",
		file:     "core/controller/volume.go",
		original: "\tif params.rawBlock || rawBlock(disk) {",
		planted:  "\tif params.rawBlock {",
		pkg:      "core/controller",
		test:     "TestRawBlockVolumeSaysSo",
	},
	{
		name:     "controller: attach mode plan restarts instances",
		file:     "core/restart/plan.go",
		original: "\tif e.opts.Policy == Plan {",
		planted:  "\tif e.opts.Policy == \"\" {",
		pkg:      "core/controller",
		test:     "TestPlannedModePlanRestartsNothing",
	},
	{
		name:     "rack: a lost create is sent again",
		file:     "core/rack/retry.go",
		original: "\t\treturn strings.HasSuffix(req.URL.Path, \"/disks/attach\") || strings.HasSuffix(req.URL.Path, \"/disks/detach\")",
		planted:  "\t\treturn strings.HasPrefix(req.URL.Path, \"/\")",
		pkg:      "core/rack",
		test:     "TestRetries",
	},
	{
		name: "rack: a lost delete is sent again",
		file: "core/rack/retry.go",
		original: "\treturn false\n" +
			"}\n" +
			"\n" +
			"// temporary",
		planted: "\treturn true\n" +
			"}\n" +
			"\n" +
			"// temporary",
		pkg:  "core/rack",
		test: "TestRetries",
	},
	{
		name:     `rack: HTTP 500 counts as "nothing was changed"`,
		file:     "core/rack/errors.go",
		original: "\t\treturn ErrInternal\n",
		planted:  "\t\treturn ErrRefused\n",
		pkg:      "core/rack",
		test:     "TestRetries",
	},
	{
		name:     `rack: a 404 of any server counts as "not found"`,
		file:     "core/rack/errors.go",
		original: "case code == \"ObjectNotFound\" && strings.HasPrefix(message, \"not found: \"):",
		planted:  "case code != \"x\":",
		pkg:      "core/controller",
		test:     "TestRackErrorsToCodes",
	},
	{
		name: "rack: the project is confirmed without a question",
		file: "core/rack/rack.go",
		original: "\tif _, err := c.lookUpProject(ctx); err != nil {\n" +
			"\t\treturn fmt.Errorf(\n" +
			"\t\t\t\"the answer",
		planted: "\tif err := ctx.Err(); err != nil {\n" +
			"\t\treturn fmt.Errorf(\n" +
			"\t\t\t\"the answer",
		pkg:  "core/controller",
		test: "TestTokenWithoutRoleIsUnavailable",
	},
	{
		name:     "rack: a redirect gets the token",
		file:     "core/rack/transport.go",
		original: "\tclient.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }\n",
		planted:  "",
		pkg:      "core/rack",
		test:     "TestHeadersAndRedirects",
	},
	{
		name:     "rack: disks of two clusters have the same name",
		file:     "core/rack/diskname/diskname.go",
		original: "\treturn sha256.Sum256([]byte(string(kind) + \"\\x00\" + cluster + \"\\x00\" + name))",
		planted:  "\treturn sha256.Sum256([]byte(string(kind) + cluster + name))",
		pkg:      "core/rack/diskname",
		test:     "TestDiskNameIsTheSerial",
	},
	{
		name:     "volumelock: a program does not inherit the lock",
		file:     "core/volumelock/volumelock.go",
		original: "\treturn hostexec.WithInherited(ctx, file), release, nil",
		planted:  "\treturn hostexec.WithInherited(ctx, os.Stdin), release, nil",
		pkg:      "core/volumelock",
		test:     "TestLockOutlivesItsProcess",
	},
	{
		name:     "restart: a panic ends the engine",
		file:     "core/restart/engine.go",
		original: "\t\tif reason := recover(); reason != nil {",
		planted:  "\t\tif reason := any(nil); reason != nil {",
		pkg:      "core/restart",
		test:     "TestPanicDoesNotEndTheEngine",
	},
	{
		name:     "restart: an attach request lasts for ever",
		file:     "core/restart/engine.go",
		original: "\t\tif e.clock.Passed(timerRequest, disk, repeated[disk], requestLifetime) {",
		planted:  "\t\tif e.clock.Passed(timerRequest, disk, repeated[disk], 9*requestLifetime) {",
		pkg:      "core/restart",
		test:     "TestUnrepeatedAttachRequestExpires",
	},
	{
		name:     "restart: a refused instance is restarted again at once",
		file:     "core/restart/plan.go",
		original: "\t\tcase wasRefused:",
		planted:  "\t\tcase wasRefused && refused.reason == \"\":",
		pkg:      "core/restart",
		test:     "TestStoppedInstanceIsEligibleDespiteRefusal",
	},
	{
		name: "restart: a restart whose node is gone never ends",
		file: "core/restart/step.go",
		original: "\t\t\tif !e.stageLasted(timerBack, h, backTimeout) {\n" +
			"\t\t\t\treturn err\n" +
			"\t\t\t}\n" +
			"\t\t\te.opts.Log.Warn(",
		planted: "\t\t\tif h != nil {\n" +
			"\t\t\t\treturn err\n" +
			"\t\t\t}\n" +
			"\t\t\te.opts.Log.Warn(",
		pkg:  "core/restart",
		test: "TestDeletedNodeDoesNotBlockOtherRestarts",
	},
	{
		name:     "restart: another process's restart is polled slowly",
		file:     "core/restart/engine.go",
		original: "\tif busy || len(e.held) > 0 || len(e.lastSeen) > 0 {",
		planted:  "\tif busy || len(e.held) > 0 {",
		pkg:      "core/restart",
		test:     "TestOrphanedInstanceIsBackWithinAMinuteOfTheLease",
	},
	{
		name: "restart: a volume that comes back keeps its deferred detach",
		file: "core/restart/publish.go",
		original: "\tif l, deferred := records.deferred[disk.ID]; deferred {\n" +
			"\t\tif err := e.deleteRecord",
		planted: "\tif l, deferred := records.deferred[disk.ID]; deferred && l.Disk == \"\" {\n" +
			"\t\tif err := e.deleteRecord",
		pkg:  "core/restart",
		test: "TestModel/of/a_volume_that_comes_back$/any_order",
		flag: "-model=1m",
	},
	{
		name: "restart: a published disk is trusted while its instance restarts",
		file: "core/restart/publish.go",
		original: "\tif r, restarting := records.restartOf(disk.InstanceID, \"\"); restarting {\n" +
			"\t\treturn rack.Disk{}, e.requestAfterRestart(disk, r)\n" +
			"\t}\n" +
			"\tif l, deferred",
		planted: "\tif l, deferred",
		pkg:     "core/restart",
		test:    "TestModel/of/a_restart_that_ends_while_its_volume_comes_back$/any_order",
		flag:    "-model=1m",
	},
	{
		name: "restart: the instance of a restart is not started again",
		file: "core/restart/step.go",
		original: "\tcase rack.Stopped, rack.Failed:\n" +
			"\tdefault:\n" +
			"\t\treturn nil\n" +
			"\t}\n" +
			"\tif err := e.rack.Start",
		planted: "\tdefault:\n" +
			"\t\treturn nil\n" +
			"\t}\n" +
			"\tif err := e.rack.Start",
		pkg:  "core/restart",
		test: "TestModel/of/one_volume$/any_order",
		flag: "-model=1m",
	},
	{
		name:     "restart: an instance that its owner stopped is started",
		file:     "core/restart/step.go",
		original: "\tcase instance.RunState != rack.Running && !h.requestSent:",
		planted:  "\tcase instance.RunState != rack.Running && h.record.ID == \"\":",
		pkg:      "core/restart",
		test:     "TestModel/of/one_volume$/an_owner_who_stops_an_instance_at_any_moment",
		flag:     "-model=1m",
	},
	{
		name:     "restart: a process that takes over stops the instance again",
		file:     "core/restart/step.go",
		original: "\t\th.takenFrom, h.recovering = \"\", h.record.MayStop\n",
		planted:  "\t\th.takenFrom = \"\"\n",
		pkg:      "core/restart",
		test:     "TestModel/of/a_volume_that_moves$/a_crash",
		flag:     "-model=1m",
	},
	{
		name: "restart: a disk attached by a restart is not detached again",
		file: "core/restart/step.go",
		original: "\t\tif err := e.deferDetach(ctx, diskID, instance); err != nil {\n" +
			"\t\t\treturn err\n" +
			"\t\t}\n" +
			"\t\tdisk, err = e.rack",
		planted: "\t\tdisk, err = e.rack",
		pkg:     "core/restart",
		test:    "TestModel/of/two_controllers_and_a_volume_that_is_given_up$/any_order",
		flag:    "-model=1m",
	},
	{
		name: "restart: a guest may be stopped before the record says so",
		file: "core/restart/step.go",
		original: "\th.record.MayStop = true\n" +
			"\theld, err := e.renewRecord(ctx, h)\n" +
			"\tif err != nil || !held {\n" +
			"\t\treturn err\n" +
			"\t}\n" +
			"\th.deferredAtStart",
		planted: "\th.deferredAtStart",
		pkg:     "core/restart",
		test:    "TestModel/of/two_controllers$/a_crash",
		flag:    "-model=1m",
	},
	{
		name:     "restart: a takeover does not wait for late calls",
		file:     "core/restart/step.go",
		original: "case !records.superseded[i].Handover && !e.clock.Passed(",
		planted:  "case i < 0 && !e.clock.Passed(",
		pkg:      "core/restart",
		test:     "TestTakeoverWaitsForLateCalls",
	},
	{
		name:     "restart: a takeover trusts the record at once",
		file:     "core/restart/step.go",
		original: "case !records.superseded[i].Handover && !e.clock.Passed(",
		planted:  "case i < 0 && !e.clock.Passed(",
		pkg:      "core/restart",
		test:     "TestModelTraces/takeover-without-wait",
	},
	{
		name: "restart: a record is deleted before the instance is started",
		file: "core/restart/step.go",
		original: "\t\tif done {\n" +
			"\t\t\te.enterStage(h, stageStarting)\n",
		planted: "\t\tif done {\n" +
			"\t\t\te.enterStage(h, stageStarting)\n" +
			"\t\t\t_ = e.deleteRecord(ctx, h.record.recordID)\n",
		pkg:  "core/restart",
		test: "TestModel/of/one_volume$/any_order",
		flag: "-model=1m",
	},
	{
		name: "restart: a disk is detached while the instance is stopping",
		file: "core/restart/step.go",
		original: "\tcase rack.Stopped:\n" +
			"\t\t// Its owner may have stopped it before",
		planted: "\tcase rack.Stopped, \"stopping\":\n" +
			"\t\t// Its owner may have stopped it before",
		pkg:  "core/restart",
		test: "TestModel/of/a_volume_that_moves$/any_order",
		flag: "-model=1m",
	},
	{
		name:     "restart: an instance is restarted for a volume that was given up",
		file:     "core/restart/step.go",
		original: "\tif i < 0 && !records.stillFrees(h.record) {",
		planted:  "\tif i < 0 && h.record.ID == \"\" {",
		pkg:      "core/restart",
		test:     "TestModel/of/a_volume_that_is_given_up$/any_order",
		flag:     "-model=1m",
	},
	{
		name: "restart: a refused restart keeps its slot",
		file: "core/restart/step.go",
		original: "\te.recordRefusal(ctx, h, h.cancelReason)\n" +
			"\treturn e.finish(ctx, h)\n",
		planted: "\te.recordRefusal(ctx, h, h.cancelReason)\n" +
			"\treturn nil\n",
		pkg:  "core/restart",
		test: "TestModel/of/one_volume$/a_guest_that_fails",
		flag: "-model=1m",
	},
	{
		name:     "restart: the change to mode hot leaves deferred detaches",
		file:     "core/restart/cleanup.go",
		original: "\tfor _, disk := range sortedKeys(records.deferred) {",
		planted:  "\tfor _, disk := range []string{} {",
		pkg:      "core/restart",
		test:     "TestModel/of/the_mode_becomes_hot_and_restart_again$/any_order",
		flag:     "-model=1m",
	},
	{
		name:     "restart: the change to mode hot leaves an instance stopped",
		file:     "core/restart/cleanup.go",
		original: "\tif len(records.restarts) > 0 {",
		planted:  "\tif len(records.restarts) > 1 {",
		pkg:      "core/restart",
		test:     "TestModel/of/the_mode_becomes_hot$/a_lost_node",
		flag:     "-model=1m",
	},
	{
		name:     "restart: a node stays drained after its owner stopped it",
		file:     "core/restart/step.go",
		original: "\t\treturn e.finish(ctx, h) // its owner",
		planted:  "\t\treturn e.endRestart(ctx, h) // its owner",
		pkg:      "core/restart",
		test:     "TestModel/of/a_node_is_drained$/an_owner",
		flag:     "-model=1m",
	},
	{
		name:     "restart: the record of a deleted disk stays",
		file:     "core/restart/engine.go",
		original: "\t\tif errors.Is(err, rack.ErrNotFound) {\n\t\t\tif err = e.rack.Confirm",
		planted:  "\t\tif errors.Is(err, rack.ErrNotFound) {\n\t\t\terr = nil\n\t\t} else if err != nil {\n\t\t\tif err = e.rack.Confirm",
		pkg:      "core/restart",
		test:     "TestModel/of/a_volume_is_deleted$/two_crashes",
		flag:     "-model=1m",
	},
	{
		name:     "restart: a volume is given up while the project is hidden",
		file:     "core/restart/step.go",
		original: "\t\terr := e.confirmNotFound(ctx, e.attachRequested(ctx, request.disk, id))",
		planted:  "\t\terr := e.attachRequested(ctx, request.disk, id)",
		pkg:      "core/restart",
		test:     "TestModel/of/one_volume$/an_outage_at_any_moment",
		flag:     "-model=1m",
	},
	{
		name:     "restart: a lost node keeps its slot",
		file:     "core/restart/step.go",
		original: "\th.record.Stuck = true\n",
		planted:  "",
		pkg:      "core/controller",
		test:     "TestPlannedLostNodeFreesItsSlot",
	},
	{
		name:     "restart: each waiting disk is looked up",
		file:     "core/restart/plan.go",
		original: "const maxLookups = 10",
		planted:  "const maxLookups = 1000000",
		pkg:      "core/restart",
		test:     "TestFirstTickPlansWithManyWaitingVolumes",
	},
	{
		name:     "node: an unstage does not wait until nobody can write",
		file:     "core/node/unstage.go",
		original: "copies, err := mount.WaitFree(ctx, dev, held.Sequence, held.Kind == volumerecord.Block)",
		planted:  "copies, err := []mount.Copy(nil), error(nil)",
		pkg:      "core/node",
		test:     "TestUnstageWhileAProgramHasTheDiskOpen",
	},
	{
		name:     "node: an unstage does not make the filesystem read-only first",
		file:     "core/node/unstage.go",
		original: "if len(l.table.PrivateCopies(entry)) == 0 {",
		planted:  "if len(l.table.PrivateCopies(entry)) >= 0 {",
		pkg:      "core/node",
		test:     "TestUnstageWhileACopyOfTheMountHasAWriter",
	},
	{
		name:     "node: a record of another boot counts",
		file:     "core/volumerecord/volumerecord.go",
		original: "if err != nil || r.BootID != boot {",
		planted:  "if err != nil || boot == \"\" {",
		pkg:      "core/node",
		test:     "TestUnstageWithARecordOfThePast",
	},
	{
		name:     "node: a disk that somebody else uses is staged",
		file:     "core/node/records.go",
		original: "if err := dev.CheckUnused(); !errors.Is(err, device.ErrInUse) {",
		planted:  "if err := dev.CheckUnused(); err == nil || n != nil {",
		pkg:      "core/node",
		test:     "TestStageOfADiskInForeignUse",
	},
	{
		name:     "mount: openers of the device do not count",
		file:     "core/mount/free.go",
		original: "if openersOf(dev.Number, block) != \"\" {",
		planted:  "if openersOf(dev.Number, block) == \"x\" {",
		pkg:      "core/node",
		test:     "TestUnstageWhileAProgramHasTheDiskOpen",
	},
	{
		name:     "mount: an unclean filesystem is mounted unchecked",
		file:     "core/mount/check.go",
		original: "\tif state.Unclean != \"\" {",
		planted:  "\tif state.Unclean == \"x\" {",
		pkg:      "core/node",
		test:     "TestNodeChecksUnclean",
	},
	{
		name:     "mount: a superblock may take the node down",
		file:     "core/mount/check.go",
		original: "options.neverPanic = state.PanicsOnError",
		planted:  "options.neverPanic = state.PanicsOnError && false",
		pkg:      "core/node",
		test:     "TestNodeNeverPanics",
	},
	{
		name:     "rack: an answer about another disk counts",
		file:     "core/rack/answer.go",
		original: "case asked.id != \"\" && got.id != asked.id:",
		planted:  "case asked.id == \"x\" && got.id != asked.id:",
		pkg:      "core/rack",
		test:     "TestAnswersAboutSomethingElse",
	},
	{
		name:     "rack: any number of calls is under way",
		file:     "core/rack/limit.go",
		original: "make(chan struct{}, maxCalls)",
		planted:  "make(chan struct{}, 10*maxCalls)",
		pkg:      "core/rack",
		test:     "TestOverloadEndsInOrder",
	},
	{
		name:     "controller: attaches to one instance overtake each other",
		file:     "core/controller/publish.go",
		original: "\tdefer release()\n\tif err := c.checkInstanceDisks(",
		planted:  "\trelease()\n\tif err := c.checkInstanceDisks(",
		pkg:      "core/controller",
		test:     "TestPublishAtOnceKeepsTheLimit",
	},
}

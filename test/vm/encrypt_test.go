// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build vm

package vm

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
)

// lowMemory keeps the derivations of keys short on an emulated processor.
const lowMemory = "--luks-memory=1MiB"

const vmPassphrase = "passphrase-canary-Tq8vYw3ZkR6pXn"

// encrypted makes the volume an encrypted one.
func encrypted(v *volume) *volume {
	v.passphrase = vmPassphrase
	return v
}

// TestEncrypted runs all cases of encrypted volumes in one guest.
func TestEncrypted(t *testing.T) {
	t.Parallel()
	m := boot(t, slots{0: newSystemDisk(t)})
	m.mountSystemDisk(t)
	m.sh(t, "mkdir -p /run")
	p := startPlugin(t, m, lowMemory)
	m.sh(t, "grep -E '^Max core file size +1 +1 ' /proc/$(pidof oxide-csi)/limits") // cryptsetup inherits the limits

	for _, kind := range kinds() {
		t.Run("life/"+string(kind), func(t *testing.T) { testEncryptedLife(t, p, kind) })
	}
	t.Run("read-only /run", func(t *testing.T) { testReadOnlyRun(t, p) })
	t.Run("wrong passphrase", func(t *testing.T) { testWrongPassphrase(t, p) })
	t.Run("new passphrase", func(t *testing.T) { testNewPassphrase(t, p) })
	t.Run("never in clear", func(t *testing.T) { testNeverInClear(t, p) })
	t.Run("in use", func(t *testing.T) { testMappingInUse(t, p) })
	t.Run("copy in another namespace", func(t *testing.T) { testMappingCopied(t, p) })
	for _, kind := range kinds() {
		if kind != rawBlock {
			t.Run("frozen/"+string(kind), func(t *testing.T) { testFrozen(t, p, kind) })
		}
	}
	t.Run("growth", func(t *testing.T) { testEncryptedGrowth(t, p) })
	t.Run("copy of the disk", func(t *testing.T) { testEncryptedCopy(t, p) })
	t.Run("read-only", func(t *testing.T) { testEncryptedReadOnly(t, p) })
	t.Run("discard", func(t *testing.T) { testEncryptedDiscard(t, p) })
	for _, kind := range []kind{rawBlock, "ext4"} {
		t.Run("surprise removal/"+string(kind), func(t *testing.T) { testEncryptedRemoval(t, p, kind) })
	}
	t.Run("raw block, then a filesystem", func(t *testing.T) { testEncryptedRawThenFilesystem(t, p) })
	t.Run("unfinished mapping", func(t *testing.T) { testUnfinishedMapping(t, p) })
	t.Run("copy of a removed disk", func(t *testing.T) { testMappingOfRemovedDisk(t, p) })
	t.Run("torn header", func(t *testing.T) { testTornHeader(t, p) })
	t.Run("restored header", func(t *testing.T) { testRestoredHeader(t, p) })
	t.Run("opener of the disk below", func(t *testing.T) { testOpenerBelow(t, p) })
	t.Run("killed plugin", func(t *testing.T) { testMappingOfKilledPlugin(t, p) })
	if log := m.text(
		t,
		m.pluginLog,
	); strings.Contains(log, vmPassphrase) ||
		strings.Contains(log, "second-"+vmPassphrase) {
		t.Error("the plugin's log contains a passphrase")
	}
}

// mapping is the kernel's name of the volume's mapping, or empty.
func (m *machine) mapping(t *testing.T, v *volume) string {
	t.Helper()
	return strings.TrimSpace(m.sh(t,
		"for d in /sys/block/dm-*; do [ -e $d ] && case $(cat $d/dm/name) in %s*) basename $d;; esac; done; true",
		device.MappingPrefix(uuid.MustParse(v.id))))
}

// checkClosed checks that no mapping of the volume is open and that nothing holds its disk.
func (p *plugin) checkClosed(t *testing.T, v *volume) {
	t.Helper()
	if name := p.machine.mapping(t, v); name != "" {
		t.Errorf("the mapping is open as %s", name)
	}
	if held := p.machine.sh(t, "ls %s/holders 2>/dev/null; true", p.machine.sysfs(t, v)); held != "" {
		t.Errorf("the disk is held by %s", held)
	}
}

// sysfs is the folder of the volume's disk in the guest's /sys/block.
func (m *machine) sysfs(t *testing.T, v *volume) string {
	t.Helper()
	return strings.TrimSpace(m.sh(t,
		"for d in /sys/block/nvme*; do [ \"$(cat $d/device/serial | tr -d ' ')\" = %s ] && echo $d; done; true", v.name))
}

func (p *plugin) leave(t *testing.T, v *volume) {
	t.Helper()
	p.unpublishAndUnstage(t, v)
	p.checkClosed(t, v)
}

func (p *plugin) plugEncrypted(t *testing.T, kind kind) *volume {
	t.Helper()
	v := encrypted(kind.volume(newVolumeDisk(t, "disk")))
	p.machine.plug(t, firstFree, v.disk)
	return v
}

func testEncryptedLife(t *testing.T, p *plugin, kind kind) {
	v := p.plugEncrypted(t, kind)
	p.stageAndPublish(t, v)
	if name := p.machine.mapping(t, v); name == "" {
		t.Fatal("there is no mapping")
	}
	succeed(t, p.stage(t, v)) // repeated
	succeed(t, p.publish(t, v))
	data := p.write(t, v)
	p.machine.sh(t, "sync")
	_, label, err := v.header(t)
	if err != nil || label != "" {
		t.Errorf("the header has the label %q (%v)", label, err)
	}
	if v.onDisk(t, data) || v.onDisk(t, "lost+found") {
		t.Error("the data is on the disk in clear")
	}
	p.leave(t, v)
	p.stageAndPublish(t, v)
	p.check(t, v, data)
	p.leave(t, v)
	p.machine.unplug(t, firstFree)
	p.machine.plug(t, firstFree, v.disk)
	p.stageAndPublish(t, v)
	p.check(t, v, data)
	p.leave(t, v)
}

// header reads UUID and label from the disk's file.
func (d *disk) header(t *testing.T) (headerUUID, label string, err error) {
	t.Helper()
	file, err := os.Open(d.file)
	if err != nil {
		return "", "", err
	}
	defer file.Close()
	content := make([]byte, page)
	if _, err := file.ReadAt(content, 0); err != nil {
		return "", "", err
	}
	text := func(at, length int) string { return strings.TrimRight(string(content[at:at+length]), "\x00") }
	return text(168, 40), text(24, 48), nil
}

// testReadOnlyRun: cryptsetup keeps its locks in /run unless it is told not to.
func testReadOnlyRun(t *testing.T, p *plugin) {
	m := p.machine
	v := p.plugEncrypted(t, "ext4")
	m.sh(t, "mount -o remount,ro /run; ! touch /run/file")
	defer m.sh(t, "mount -o remount,rw /run")
	p.stageAndPublish(t, v)
	data := p.write(t, v)
	p.leave(t, v)
	v.previous, v.passphrase = v.passphrase, "second-"+v.passphrase
	p.stageAndPublish(t, v)
	p.check(t, v, data)
	p.leave(t, v)
}

func testWrongPassphrase(t *testing.T, p *plugin) {
	v := p.plugEncrypted(t, "ext4")
	p.stageAndPublish(t, v)
	data := p.write(t, v)
	p.leave(t, v)
	before := v.sum(t)
	v.passphrase = "wrong"
	err := p.stage(t, v)
	fail(t, err, codes.FailedPrecondition)
	if !strings.Contains(err.Error(), "wrong passphrase") {
		t.Errorf("the error does not say it: %v", err)
	}
	p.checkClosed(t, v)
	if v.sum(t) != before {
		t.Error("the disk was changed")
	}
	v.passphrase = vmPassphrase
	p.stageAndPublish(t, v)
	p.check(t, v, data)
	p.leave(t, v)
}

func testNewPassphrase(t *testing.T, p *plugin) {
	v := p.plugEncrypted(t, "ext4")
	p.stageAndPublish(t, v)
	data := p.write(t, v)
	p.leave(t, v)
	v.passphrase, v.previous = "second-"+vmPassphrase, vmPassphrase
	for range 2 {
		p.stageAndPublish(t, v)
		p.check(t, v, data)
		p.leave(t, v)
	}
	v.passphrase, v.previous = vmPassphrase, ""
	fail(t, p.stage(t, v), codes.FailedPrecondition)
	// Also while the volume is in use.
	v.passphrase = "second-" + vmPassphrase
	p.stageAndPublish(t, v)
	v.passphrase, v.previous = vmPassphrase, "second-"+vmPassphrase
	succeed(t, p.stage(t, v))
	p.leave(t, v)
	v.previous = ""
	p.stageAndPublish(t, v)
	p.check(t, v, data)
	p.leave(t, v)
}

// testNeverInClear: contexts that do not say that the disk is encrypted do not make it a plain one.
func testNeverInClear(t *testing.T, p *plugin) {
	v := p.plugEncrypted(t, rawBlock)
	p.stageAndPublish(t, v)
	data := p.write(t, v)
	p.leave(t, v)
	before := v.sum(t)
	for _, plain := range []*volume{block(v.disk), filesystemVolume(v.disk, "ext4")} {
		err := p.stage(t, plain)
		fail(t, err, codes.FailedPrecondition)
		if !strings.Contains(err.Error(), "is encrypted, and the contexts do not say so") {
			t.Errorf("got %v", err)
		}
	}
	if v.sum(t) != before {
		t.Error("the disk was changed")
	}
	p.stageAndPublish(t, encrypted(v))
	p.check(t, v, data)
	p.leave(t, v)
}

// testMappingInUse: the disk is held as long as a program has the mapping open.
func testMappingInUse(t *testing.T, p *plugin) {
	v := p.plugEncrypted(t, rawBlock)
	p.stageAndPublish(t, v)
	m := p.machine
	name := m.mapping(t, v)
	m.sh(
		t,
		"(exec 3<>/dev/%s; echo $$ >/run/holder; exec sleep 600) >/dev/null 2>&1 & while ! [ -s /run/holder ]; do :; done",
		name,
	)
	succeed(t, p.unpublish(t, v))
	done := make(chan error, 1)
	go func() { done <- p.unstage(t, v) }()
	err := <-done
	fail(t, err, codes.FailedPrecondition)
	if !strings.Contains(err.Error(), "sleep") {
		t.Errorf("the error does not name the holder: %v", err)
	}
	m.sh(t, "kill $(pidof sleep) ; rm /run/holder; while pidof sleep; do :; done")
	succeed(t, p.unstage(t, v))
	p.checkClosed(t, v)
}

// keepCopies starts an agent that keeps copies of all mounts in a namespace of its own. The returned function ends it.
func (m *machine) keepCopies(t *testing.T) (end func()) {
	t.Helper()
	m.sh(
		t,
		"unshare -m sh -c 'mount --make-rprivate / 2>/dev/null; echo $$ >/run/agent; exec sleep 600' >/dev/null 2>&1 & "+
			"while ! [ -s /run/agent ]; do :; done",
	)
	return func() { m.sh(t, "kill $(cat /run/agent); rm /run/agent") }
}

// testMappingCopied: an agent keeps a copy of the mount in a namespace of its own. The volume is unstaged when no
// program can write any more, and the mapping goes with the copy.
func testMappingCopied(t *testing.T, p *plugin) {
	m := p.machine
	v := p.plugEncrypted(t, "ext4")
	p.stageAndPublish(t, v)
	data := p.write(t, v)
	end := m.keepCopies(t)
	succeed(t, p.unpublish(t, v))
	succeed(t, p.unstage(t, v))
	p.stageAndPublish(t, v)
	p.check(t, v, data)
	data = p.write(t, v)
	succeed(t, p.unpublish(t, v))
	succeed(t, p.unstage(t, v))
	end()
	m.await(t, time.Minute, "the mapping to close", func() bool { return m.mapping(t, v) == "" })
	p.stageAndPublish(t, v)
	p.check(t, v, data)
	p.leave(t, v)
}

// testFrozen: a backup tool leaves the filesystem in the mapping frozen, mounted or not.
func testFrozen(t *testing.T, p *plugin, kind kind) {
	v := p.plugEncrypted(t, kind)
	p.stageAndPublish(t, v)
	data := p.write(t, v)
	succeed(t, p.unpublish(t, v))
	p.machine.sh(t, "fsfreeze --freeze %s", v.staging)
	for _, script := range []string{"true", "umount " + v.staging} {
		p.machine.sh(t, "%s", script)
		err := p.unstage(t, v)
		fail(t, err, codes.FailedPrecondition)
		if !strings.Contains(err.Error(), "fsfreeze --unfreeze "+v.staging) {
			t.Errorf("after %q the answer does not say how to thaw it: %v", script, err)
		}
	}
	p.machine.sh(t, "fsfreeze --unfreeze %s", v.staging)
	p.stageAndPublish(t, v)
	p.check(t, v, data)
	p.leave(t, v)
	p.machine.unplug(t, firstFree)
}

// testEncryptedGrowth: after the disk has grown, the mapping has the whole disk, and the filesystem the whole mapping.
func testEncryptedGrowth(t *testing.T, p *plugin) {
	m := p.machine
	for _, kind := range []kind{rawBlock, "ext4"} {
		v := p.plugEncrypted(t, kind)
		p.stageAndPublish(t, v)
		data := p.write(t, v)
		p.leave(t, v)
		m.unplug(t, firstFree)
		v.sizeBytes += gib
		if err := os.Truncate(v.file, v.sizeBytes); err != nil {
			t.Fatal(err)
		}
		m.plug(t, firstFree, v.disk)
		p.stageAndPublish(t, v)
		p.check(t, v, data)
		const headerBytes = 16 * mib
		size := strings.TrimSpace(m.sh(t, "cat /sys/block/%s/size", m.mapping(t, v)))
		if want := fmt.Sprint((v.sizeBytes - headerBytes) / 512); size != want {
			t.Errorf("the mapping has %s sectors, want %s", size, want)
		}
		if !v.isBlock() {
			total, err := strconv.ParseInt(
				strings.TrimSpace(m.sh(t, "df -kP %s | tail -1 | awk '{print $2}'", v.target)),
				10,
				64,
			)
			if err != nil || total<<10 < (v.sizeBytes-headerBytes)/10*9 {
				t.Errorf("the filesystem has %d KiB of %d bytes (%v)", total, v.sizeBytes, err)
			}
		}
		p.leave(t, v)
		m.unplug(t, firstFree)
	}
}

// testEncryptedCopy: a disk from a snapshot opens with the passphrase of its source, beside its source.
func testEncryptedCopy(t *testing.T, p *plugin) {
	m := p.machine
	v := p.plugEncrypted(t, "ext4")
	p.stageAndPublish(t, v)
	data := p.write(t, v)
	p.leave(t, v)
	copied := encrypted(filesystemVolume(v.copy(t), "ext4"))
	copied.disk.id, copied.disk.name = uuid.NewString(), newVolumeDisk(t, "copy").name
	copied = encrypted(filesystemVolume(copied.disk, "ext4"))
	m.plug(t, firstFree+1, copied.disk)
	fail(t, p.stage(t, copied), codes.FailedPrecondition) // it has no lineage: another volume's header
	copied.source = v.id
	p.stageAndPublish(t, v)
	p.stageAndPublish(t, copied)
	p.check(t, copied, data)
	p.check(t, v, data)
	p.leave(t, copied)
	p.leave(t, v)
}

func testEncryptedReadOnly(t *testing.T, p *plugin) {
	m := p.machine
	v := p.plugEncrypted(t, rawBlock)
	p.stageAndPublish(t, v)
	data := p.write(t, v)
	succeed(t, p.unpublish(t, v))
	succeed(t, p.publishReadOnly(t, v))
	p.check(t, v, data)
	m.sh(t, "! dd if=/dev/zero of=%s bs=4k count=1 conv=fsync 2>/dev/null", v.target)
	p.leave(t, v)
	p.stageAndPublish(t, v)
	p.check(t, v, p.write(t, v))
	p.leave(t, v)
}

// testEncryptedDiscard lets discards reach the disk only if a mount flag asks for that.
func testEncryptedDiscard(t *testing.T, p *plugin) {
	v := p.plugEncrypted(t, "ext4")
	for _, flags := range [][]string{nil, {"discard"}} {
		v.capability.GetMount().MountFlags = flags
		p.stageAndPublish(t, v)
		table := p.machine.sh(t, "dmsetup table")
		if strings.Contains(table, "allow_discards") != (flags != nil) {
			t.Errorf("with the mount flags %q: %s", flags, table)
		}
		p.leave(t, v)
	}
}

// testEncryptedRemoval detaches a disk that is in use, and attaches it again.
func testEncryptedRemoval(t *testing.T, p *plugin, kind kind) {
	m := p.machine
	v := p.plugEncrypted(t, kind)
	p.stageAndPublish(t, v)
	data := p.write(t, v)
	m.sh(t, "sync")
	m.unplug(t, firstFree)
	fail(t, p.stats(t, v), codes.NotFound)
	fail(t, p.unstage(t, v), codes.FailedPrecondition) // it is still published
	p.leave(t, v)
	m.plug(t, firstFree+1, v.disk)
	p.stageAndPublish(t, v)
	p.check(t, v, data)
	p.leave(t, v)
}

// testEncryptedRawThenFilesystem: what a workload wrote into the mapping is never formatted.
func testEncryptedRawThenFilesystem(t *testing.T, p *plugin) {
	v := p.plugEncrypted(t, rawBlock)
	p.stageAndPublish(t, v)
	p.leave(t, v)
	before := v.sum(t)
	fail(t, p.stage(t, encrypted(filesystemVolume(v.disk, "ext4"))), codes.FailedPrecondition)
	p.checkClosed(t, v)
	if v.sum(t) != before {
		t.Error("the disk was changed")
	}
}

// testMappingOfKilledPlugin: a new process of the plugin finds the mapping that a killed one left, and closes it when
// the volume is unstaged, also if nothing else says that the volume was ever here.
func testMappingOfKilledPlugin(t *testing.T, p *plugin) {
	m := p.machine
	v := p.plugEncrypted(t, "ext4")
	p.stageAndPublish(t, v)
	data := p.write(t, v)
	restart := func() {
		m.sh(t, "kill -9 $(pidof oxide-csi); while pidof oxide-csi >/dev/null; do :; done")
		p = startPlugin(t, m, lowMemory)
	}
	restart()
	p.check(t, v, data)
	succeed(t, p.stage(t, v))
	// As if it had been killed after opening the disk.
	m.sh(t, "umount %s && umount %s", v.target, v.staging)
	restart()
	v.passphrase = "wrong"
	fail(t, p.stage(t, v), codes.FailedPrecondition)
	v.passphrase = vmPassphrase
	p.stageAndPublish(t, v)
	p.check(t, v, data)
	m.sh(t, "umount %s && umount %s && rm -r /var/lib/oxide-csi/volumes", v.target, v.staging)
	restart()
	succeed(t, p.unstage(t, v))
	p.checkClosed(t, v)
	p.stageAndPublish(t, v)
	p.check(t, v, data)
	p.leave(t, v)
}

// testUnfinishedMapping: a cryptsetup that was killed while it opened the disk has left a mapping, without a table or
// with one that is not active yet.
func testUnfinishedMapping(t *testing.T, p *plugin) {
	m := p.machine
	v := p.plugEncrypted(t, "ext4")
	p.stageAndPublish(t, v)
	data := p.write(t, v)
	p.leave(t, v)
	folder := m.sysfs(t, v)
	attachment := m.sh(t, "cat %[1]s/diskseq 2>/dev/null || stat -L -c %%i %[1]s", folder) // as [device.Roots.Attachment]
	name := device.MappingName(uuid.MustParse(v.id), strings.TrimSpace(attachment))
	create := func() { m.sh(t, "DM_DISABLE_UDEV=1 dmsetup create --notable --uuid CRYPT-LUKS2-x %s", name) }
	load := func() {
		m.sh(t, "DM_DISABLE_UDEV=1 dmsetup load %s --table '0 8 linear /dev/%s 40000'", name, path.Base(folder))
	}
	create()
	p.stageAndPublish(t, v)
	p.check(t, v, data)
	p.leave(t, v)
	create()
	load()
	p.stageAndPublish(t, v)
	p.check(t, v, data)
	p.leave(t, v)
	create()
	load()
	succeed(t, p.unstage(t, v))
	p.checkClosed(t, v)
}

// testMappingOfRemovedDisk: the disk comes back while an agent still has a copy of the mount of its former attachment.
func testMappingOfRemovedDisk(t *testing.T, p *plugin) {
	m := p.machine
	v := p.plugEncrypted(t, "ext4")
	p.stageAndPublish(t, v)
	data := p.write(t, v)
	end := m.keepCopies(t)
	succeed(t, p.unpublish(t, v))
	succeed(t, p.unstage(t, v))
	m.unplug(t, firstFree)
	m.plug(t, firstFree, v.disk)
	p.stageAndPublish(t, v)
	p.check(t, v, data)
	p.unpublishAndUnstage(t, v)
	end()
	m.await(t, time.Minute, "the old mapping to close", func() bool {
		return strings.TrimSpace(m.sh(t, "ls -d /sys/block/dm-* 2>/dev/null; true")) == ""
	})
}

// testTornHeader: a damaged copy of the header is mended from the other one when the disk is opened.
func testTornHeader(t *testing.T, p *plugin) {
	m := p.machine
	v := p.plugEncrypted(t, "ext4")
	p.stageAndPublish(t, v)
	data := p.write(t, v)
	p.leave(t, v)
	node := "/dev/" + path.Base(m.sysfs(t, v))
	text := func(block int) string { // of a copy that begins at this block of 4 KiB
		return m.sh(t, "dd if=%s iflag=direct bs=4096 skip=%d count=3 status=none | sha256sum", node, block+1)
	}
	for _, block := range []int{0, 4} {
		m.sh(t, "dd if=/dev/zero of=%s oflag=direct bs=4096 seek=%d count=1 status=none", node, block+1)
		p.stageAndPublish(t, v)
		p.check(t, v, data)
		p.leave(t, v)
		if text(0) != text(4) {
			t.Errorf("the copies of the header differ after the one at block %d was torn", block)
		}
	}
	if log := m.text(t, m.pluginLog); strings.Count(log, "mended the header") != 2 {
		t.Error("the log does not say twice that the header was mended")
	}
}

// testRestoredHeader: a header from before the first use says that nothing was ever written. The data shows otherwise,
// also where it has no signature.
func testRestoredHeader(t *testing.T, p *plugin) {
	m := p.machine
	for _, kind := range []kind{"ext4", rawBlock} {
		v := p.plugEncrypted(t, kind)
		p.stageAndPublish(t, v)
		data := p.write(t, v)
		p.leave(t, v)
		node := "/dev/" + path.Base(m.sysfs(t, v))
		m.sh(t, "cryptsetup config --disable-locks --label=%s %s", device.LabelUnformatted, node)
		before := v.sum(t)
		err := p.stage(t, encrypted(filesystemVolume(v.disk, "ext4")))
		fail(t, err, codes.FailedPrecondition)
		if !strings.Contains(err.Error(), "but holds data") {
			t.Errorf("got %v", err)
		}
		p.checkClosed(t, v)
		if v.sum(t) != before {
			t.Error("the disk was changed")
		}
		m.sh(t, "cryptsetup config --disable-locks --label= %s", node)
		p.stageAndPublish(t, v)
		p.check(t, v, data)
		p.leave(t, v)
		m.unplug(t, firstFree)
	}
}

// testOpenerBelow: while copies of the mount remain, a program that can write to the disk below keeps the volume
// staged.
func testOpenerBelow(t *testing.T, p *plugin) {
	m := p.machine
	v := p.plugEncrypted(t, "ext4")
	p.stageAndPublish(t, v)
	end := m.keepCopies(t)
	m.sh(
		t,
		"(exec 3<>/dev/%s; echo $$ >/run/holder; exec sleep 601) >/dev/null 2>&1 & while ! [ -s /run/holder ]; do :; done",
		path.Base(m.sysfs(t, v)),
	)
	succeed(t, p.unpublish(t, v))
	err := p.unstage(t, v)
	fail(t, err, codes.FailedPrecondition)
	if !strings.Contains(err.Error(), "sleep") {
		t.Errorf("the error does not name the holder: %v", err)
	}
	m.sh(
		t,
		"for p in /proc/[0-9]*; do [ \"$(tr '\\0' ' ' <$p/cmdline 2>/dev/null)\" = 'sleep 601 ' ] && kill ${p#/proc/}; done; "+
			"rm /run/holder",
	)
	succeed(t, p.unstage(t, v))
	end()
	m.await(t, time.Minute, "the mapping to close", func() bool { return m.mapping(t, v) == "" })
}

// TestPowerCutInEncryption cuts the power between any two writes of the first stage of encrypted volumes: in
// luksFormat, before and in mkfs, and while the label is removed. The next stage must make the volume usable without an
// operator. The last cut is after a workload has written, and loses nothing of that.
func TestPowerCutInEncryption(t *testing.T) {
	t.Parallel()
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	system := newSystemDisk(t)
	first := slots{0: system}
	of := map[int]*volume{}
	for slot, kind := range map[int]kind{1: "ext4", 2: "xfs", 3: rawBlock} {
		v := encrypted(kind.volume(newVolumeDisk(t, string(kind))))
		v.log = filepath.Join(t.TempDir(), "log")
		if err := os.WriteFile(v.log, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		of[slot], first[slot] = v, v.disk
	}
	m := boot(t, first)
	m.mountSystemDisk(t)
	p := startPlugin(t, m, lowMemory)
	logs, used, written := map[int][]write{}, map[int][]write{}, map[int]string{}
	for slot, v := range of {
		succeed(t, p.stage(t, v))
		logs[slot] = readLog(t, v.log)
		succeed(t, p.publish(t, v))
		written[slot] = p.write(t, v)
		used[slot] = readLog(t, v.log)
	}
	m.cutPower(t)

	const cuts = 11 // as many as a machine has slots
	for slot, v := range of {
		attached, found := slots{0: newSystemDisk(t)}, map[int]*volume{}
		for i := range cuts {
			cut := moment{"cut after the workload's write", used[slot]}
			if i < cuts-1 {
				cut = cutAt(logs[slot], float64(i)/(cuts-1))
			}
			if i%2 == 1 {
				cut = cut.losing(random)
			}
			d := v.at(t, cut)
			// Every copy is attached at once, so each has a name of its own. Its UUID, from which that of the header
			// follows, stays.
			d.name = newVolumeDisk(t, fmt.Sprint(slot, i)).name
			t.Logf("slot %d: %s: %s", i+1, cut.name, d.describe(t))
			attached[i+1] = d
			copied := *v
			copied.disk = d
			found[i+1] = &copied
		}
		name := v.capability.GetMount().GetFsType()
		if v.isBlock() {
			name = string(rawBlock)
		}
		t.Run(name, func(t *testing.T) {
			m := boot(t, attached)
			m.mountSystemDisk(t)
			p := startPlugin(t, m, lowMemory)
			for i := range cuts {
				v := found[i+1]
				p.stageAndPublish(t, v)
				if i == cuts-1 {
					p.check(t, v, written[slot])
				}
				p.check(t, v, p.write(t, v))
				p.leave(t, v)
				if _, label, err := v.header(t); err != nil || label != "" {
					t.Errorf("slot %d: the header has the label %q (%v)", i+1, label, err)
				}
			}
		})
	}
}

// TestPowerCutInPassphraseChange cuts the power at writes to the header while a passphrase is replaced. With both
// passphrases each state can be staged, and has its data. After that only the new passphrase opens it.
func TestPowerCutInPassphraseChange(t *testing.T) {
	t.Parallel()
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	v := encrypted(kind("ext4").volume(newVolumeDisk(t, "changed")))
	v.log = filepath.Join(t.TempDir(), "log")
	if err := os.WriteFile(v.log, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	m := boot(t, slots{0: newSystemDisk(t), 1: v.disk})
	m.mountSystemDisk(t)
	p := startPlugin(t, m, lowMemory)
	p.stageAndPublish(t, v)
	data := p.write(t, v)
	p.leave(t, v)
	begun := len(readLog(t, v.log))
	v.passphrase, v.previous = "second-"+vmPassphrase, vmPassphrase
	succeed(t, p.stage(t, v))
	log := readLog(t, v.log)
	m.cutPower(t)

	var changes []int // writes of the change
	for i, w := range log[begun:] {
		if w.offset < luksHeaderBytes && len(w.data) > 0 {
			changes = append(changes, begun+i)
		}
	}
	if len(changes) < 4 {
		t.Fatalf("the change made %d writes", len(changes))
	}
	const cuts = 11 // as many as a machine has slots
	attached, found := slots{0: newSystemDisk(t)}, map[int]*volume{}
	for i := range cuts {
		n := i * len(changes) / cuts
		cut := moment{fmt.Sprintf("cut before write %d of %d", n+1, len(changes)), log[:changes[n]]}
		if i%2 == 1 {
			cut = cut.losing(random)
		}
		copied := *v
		copied.disk = v.at(t, cut)
		copied.disk.name = newVolumeDisk(t, fmt.Sprint("change", i)).name // the UUID, and so the header's, stays
		attached[i+1], found[i+1] = copied.disk, &copied
		t.Logf("slot %d: %s", i+1, cut.name)
	}
	m = boot(t, attached)
	m.mountSystemDisk(t)
	p = startPlugin(t, m, lowMemory)
	for i := range cuts {
		v := found[i+1]
		p.stageAndPublish(t, v)
		p.check(t, v, data)
		p.leave(t, v)
		v.passphrase, v.previous = vmPassphrase, ""
		fail(t, p.stage(t, v), codes.FailedPrecondition)
		v.passphrase = "second-" + vmPassphrase
		p.stageAndPublish(t, v)
		p.check(t, v, data)
		p.leave(t, v)
	}
}

// luksHeaderBytes is the size of a LUKS2 header with its key slots, the default of cryptsetup.
const luksHeaderBytes = 16 << 20

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build vm

package vm

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/core/filesystem"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
)

const (
	mib = 1 << 20
	gib = 1 << 30
)

// coldDisks is how many volumes are attached at boot. The slots from firstFree on are free.
const (
	coldDisks = 8
	firstFree = coldDisks + 1
)

// TestGuest runs all cases in one guest, one after another, because booting takes longer than the cases.
func TestGuest(t *testing.T) {
	t.Parallel()
	attached := slots{0: newSystemDisk(t)}
	for slot := 1; slot <= coldDisks; slot++ {
		d := newVolumeDisk(t, fmt.Sprint("cold ", slot))
		if slot == coldDisks {
			d.name = "users-own" // shorter than a serial, so that QEMU pads it
		}
		d.overwrite(t, 0, []byte(d.name))
		attached[slot] = d
	}
	m := boot(t, attached)
	m.mountSystemDisk(t)
	p := startPlugin(t, m)

	t.Run("firmware", func(t *testing.T) { testFirmware(t, m) })
	t.Run("identity", func(t *testing.T) { testIdentity(t, m) })
	t.Run("sysfs", func(t *testing.T) { testSysfs(t, m) })
	t.Run("node info", func(t *testing.T) { testNodeInfo(t, p) })
	t.Run("disk over a network", func(t *testing.T) { testNetworkDisk(t, p) })
	t.Run("discovery", func(t *testing.T) { testDiscovery(t, p) })
	t.Run("system disk is no volume", func(t *testing.T) { testSystemDisk(t, p) })
	for _, kind := range kinds() {
		t.Run("hot add/"+string(kind), func(t *testing.T) { testHotAdd(t, p, kind) })
		t.Run("surprise removal/"+string(kind), func(t *testing.T) { testSurpriseRemoval(t, p, kind) })
		t.Run("return to a dead mount/"+string(kind), func(t *testing.T) { testReturn(t, p, kind) })
	}
	t.Run("quotas", func(t *testing.T) { testQuotas(t, p) })
	t.Run("kernel too old", func(t *testing.T) { testKernelTooOld(t, p) })
	t.Run("raw block of a reused device number", func(t *testing.T) { testReusedNumber(t, p) })
	t.Run("same serial hot", func(t *testing.T) { testHotTwin(t, p) })
	t.Run("same serial both shown", func(t *testing.T) { testShownTwin(t, p) })
}

// kind is a kind of volume: raw block, or a filesystem type.
type kind string

const rawBlock kind = "block"

// kinds returns all kinds that the plugin offers except ext3, which the ext4 driver handles too.
func kinds() []kind {
	kinds := []kind{rawBlock}
	for _, fsType := range filesystem.Types() {
		if fsType != "ext3" {
			kinds = append(kinds, kind(fsType))
		}
	}
	return kinds
}

// volume returns the disk as a volume of this kind.
func (k kind) volume(d *disk) *volume {
	if k == rawBlock {
		return block(d)
	}
	return filesystemVolume(d, string(k))
}

// newVolumeDisk creates a disk with the name that the controller gives to this volume.
func newVolumeDisk(t *testing.T, volumeName string) *disk {
	t.Helper()
	return newDisk(t, diskname.ForVolume("vm", t.Name()+volumeName), gib)
}

// overwrite writes to the disk's file directly, unseen by the guest.
func (d *disk) overwrite(t *testing.T, offset int64, data []byte) {
	t.Helper()
	file, err := os.OpenFile(d.file, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	_, err = file.WriteAt(data, offset)
	if err := errors.Join(err, file.Close()); err != nil {
		t.Fatal(err)
	}
}

// newSystemDisk creates a disk for data that must survive a power cut. It is not a volume. It has one partition with
// an ext4, which the guest mounts at /var/lib.
func newSystemDisk(t *testing.T) *disk {
	t.Helper()
	const sector, start, size = 512, 1 * mib, 63 * mib
	d := newDisk(t, "system", start+size)
	table := make([]byte, sector)
	entry := table[446:] // the first of four
	entry[4] = 0x83      // Linux
	binary.LittleEndian.PutUint32(entry[8:], start/sector)
	binary.LittleEndian.PutUint32(entry[12:], size/sector)
	copy(table[510:], "\x55\xaa")
	if _, err := command(
		"mkfs.ext4",
		"-q",
		"-E",
		fmt.Sprintf("offset=%d", start),
		d.file,
		fmt.Sprintf("%dk", size>>10),
	); err != nil {
		t.Fatal(err)
	}
	d.overwrite(t, 0, table)
	return d
}

func (m *machine) mountSystemDisk(t *testing.T) {
	t.Helper()
	m.sh(t, "mount -t ext4 /dev/%sp1 /var/lib", m.awaitName(t, 0))
}

// testFirmware checks that the guest's firmware gives the instance ID in the same form as the rack's API.
func testFirmware(t *testing.T, m *machine) {
	for _, c := range []struct{ file, mode, content string }{
		{"sys_vendor", "444", "Oxide\n"},
		{"product_name", "444", "OxVM\n"},
		{"product_serial", "400", m.instance + "\n"},
		{"product_uuid", "400", m.instance + "\n"},
	} {
		file := path.Join("/sys/class/dmi/id", c.file)
		m.checkFile(t, file, c.content)
		if mode := strings.TrimSpace(m.sh(t, "stat -c %%a %s", file)); mode != c.mode {
			t.Errorf("%s has mode %s, not %s", file, mode, c.mode)
		}
	}
}

// testIdentity checks that oxide-csi metadata finds the instance without configuration, and compares the firmware with
// cloud-init.
func testIdentity(t *testing.T, m *machine) {
	identity := "OXIDE_INSTANCE_ID=" + m.instance + "\n"
	if got := m.sh(t, "oxide-csi metadata --timeout=0 2>/dev/null"); got != identity {
		t.Errorf("oxide-csi metadata prints %q, want %q", got, identity)
	}
	const data = "/run/cloud-init/instance-data.json"
	for id, want := range map[string]string{m.instance: identity + "0\n", "00000000-0000-4000-8000-000000000001": "1\n"} {
		m.sh(t, `mkdir -p /run/cloud-init && echo '{"v1": {"instance_id": "%s"}}' >%s`, id, data)
		if got := m.sh(t, "oxide-csi metadata --timeout=0 2>/dev/null; echo $?"); got != want {
			t.Errorf("with instance %s in %s oxide-csi metadata prints %q, want %q", id, data, got, want)
		}
	}
	m.sh(t, "rm %s", data)
}

func (m *machine) checkFile(t *testing.T, file, want string) {
	t.Helper()
	if got := m.sh(t, "cat %s", file); got != want {
		t.Errorf("%s holds %q, not %q", file, got, want)
	}
}

func (m *machine) checkLink(t *testing.T, link, want string) {
	t.Helper()
	if got := strings.TrimSpace(m.sh(t, "readlink %s", link)); got != want {
		t.Errorf("%s leads to %q, not %q", link, got, want)
	}
}

// testSysfs checks the files that package device relies on and that the simulated guests imitate.
func testSysfs(t *testing.T, m *machine) {
	for slot, d := range m.slots {
		t.Run(d.name, func(t *testing.T) {
			name := m.awaitName(t, slot)
			if !regexp.MustCompile(`^nvme[0-9]+n1$`).MatchString(name) {
				t.Fatalf("the disk in slot %d has the name %q", slot, name)
			}
			address := "0000:00:" + address(slot) + ".0"
			function := "/sys/bus/pci/devices/" + address
			controller := strings.TrimSpace(m.sh(t, "ls %s/nvme", function))
			entry := "/sys/block/" + name

			m.checkLink(t, entry, "../devices/pci0000:00/"+address+"/nvme/"+controller+"/"+name)
			m.checkLink(t, entry+"/device", "../../"+controller)
			m.checkLink(t, "/sys/class/nvme/"+controller, "../../devices/pci0000:00/"+address+"/nvme/"+controller)
			serial := fmt.Sprintf("%-20s\n", d.serial()) // QEMU pads with spaces
			m.checkFile(t, entry+"/device/serial", serial)
			m.checkFile(t, entry+"/device/transport", "pcie\n")
			m.checkFile(t, entry+"/size", fmt.Sprintf("%d\n", d.sizeBytes/512))
			m.checkFile(t, entry+"/hidden", "0\n")
			m.checkFile(t, entry+"/ro", "0\n")

			number := strings.TrimSpace(m.sh(t, "cat %s/dev", entry))
			m.checkLink(t, "/sys/dev/block/"+number, "../../devices/pci0000:00/"+address+"/nvme/"+controller+"/"+name)
			if node := strings.TrimSpace(
				m.sh(t, "stat -c '%%F %%t:%%T' /dev/%s", name),
			); node != "block special file "+hex(
				t,
				number,
			) {
				t.Errorf("/dev/%s is a %s, not block device %s", name, node, number)
			}

			m.checkLink(t, function, "../../../devices/pci0000:00/"+address)
			m.checkFile(t, function+"/class", "0x010802\n")
			m.checkLink(t, function+"/driver", "../../../bus/pci/drivers/nvme")
			m.checkFile(t, function+"/nvme/"+controller+"/serial", serial)
			if d.name == "system" {
				m.checkFile(t, entry+"/"+name+"p1/size", fmt.Sprintf("%d\n", (d.sizeBytes-mib)/512))
				m.sh(t, "test -e %s/%sp1/dev", entry, name)
			}
		})
	}
}

// hex returns a device number in the format of stat.
func hex(t *testing.T, number string) string {
	t.Helper()
	var major, minor int
	if _, err := fmt.Sscanf(number, "%d:%d", &major, &minor); err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("%x:%x", major, minor)
}

func testNodeInfo(t *testing.T, p *plugin) {
	info, err := p.NodeGetInfo(within(t, callTime), &csi.NodeGetInfoRequest{})
	succeed(t, err)
	if info.GetNodeId() != p.machine.instance {
		t.Errorf("node ID %s, not the instance's %s", info.GetNodeId(), p.machine.instance)
	}
	// Of the 8 disks that an instance takes by default, one is the system disk and one belongs to a user.
	if info.GetMaxVolumesPerNode() != 6 {
		t.Errorf("max_volumes_per_node is %d, not 6", info.GetMaxVolumesPerNode())
	}
}

// testNetworkDisk adds an NVMe disk that is reached over TCP. It takes no slot, and is never taken for a volume,
// although its serial may be that of one.
func testNetworkDisk(t *testing.T, p *plugin) {
	m := p.machine
	v := block(newVolumeDisk(t, "disk"))
	m.sh(t, `modprobe nvmet-tcp && modprobe nvme-tcp
mount -t configfs configfs /sys/kernel/config
cd /sys/kernel/config/nvmet
mkdir subsystems/test subsystems/test/namespaces/1 ports/1
echo 1 >subsystems/test/attr_allow_any_host
echo %s >subsystems/test/attr_serial
dd if=/dev/zero of=/tmp/disk bs=1M count=8 2>/dev/null
echo /tmp/disk >subsystems/test/namespaces/1/device_path
echo 1 >subsystems/test/namespaces/1/buffered_io
echo 1 >subsystems/test/namespaces/1/enable
echo tcp >ports/1/addr_trtype
echo ipv4 >ports/1/addr_adrfam
echo 127.0.0.1 >ports/1/addr_traddr
echo 4420 >ports/1/addr_trsvcid
ln -s /sys/kernel/config/nvmet/subsystems/test ports/1/subsystems/test
echo transport=tcp,traddr=127.0.0.1,trsvcid=4420,nqn=test >/dev/nvme-fabrics`, v.serial())
	disk := func() string {
		return strings.TrimSpace(m.sh(t, `cd /sys/block && for d in nvme*n*; do
case $(cat $d/device/serial) in %s*) [ $(cat $d/hidden) = 1 ] || echo $d;; esac
done`, v.serial()))
	}
	defer func() {
		m.sh(
			t,
			"for c in /sys/class/nvme/nvme*; do [ $(cat $c/transport) = tcp ] && echo 1 >$c/delete_controller; done; true",
		)
		m.await(t, plugTime, "the disk to leave", func() bool { return disk() == "" })
	}()
	m.await(t, plugTime, "the disk over TCP", func() bool { return disk() != "" })
	t.Logf(
		"%s: %s",
		disk(),
		m.sh(t, "readlink /sys/block/%[1]s /sys/block/%[1]s/device; ls /sys/block/%[1]s/device/", disk()),
	)
	testNodeInfo(t, p)
	fail(t, p.stage(t, v), codes.Unavailable)
	m.plug(t, firstFree, v.disk)
	p.stageAndPublish(t, v)
	data := p.write(t, v)
	p.unpublishAndUnstage(t, v)
	m.unplug(t, firstFree)
	if !v.onDisk(t, data) {
		t.Error("the data is not on the rack's disk")
	}
}

// testDiscovery stages each disk as raw block and reads the data that identifies it.
func testDiscovery(t *testing.T, p *plugin) {
	for slot := 1; slot <= coldDisks; slot++ {
		v := block(p.machine.slots[slot])
		p.stageAndPublish(t, v)
		p.check(t, v, v.name)
		p.unpublishAndUnstage(t, v)
	}
}

// testSystemDisk checks that the plugin refuses to stage the guest's system disk.
func testSystemDisk(t *testing.T, p *plugin) {
	for _, kind := range kinds() {
		t.Run(string(kind), func(t *testing.T) {
			fail(t, p.stage(t, kind.volume(p.machine.slots[0])), codes.FailedPrecondition)
		})
	}
}

// testHotAdd attaches a disk while NodeStageVolume waits for it, and later detaches it cleanly.
func testHotAdd(t *testing.T, p *plugin, kind kind) {
	m := p.machine
	v := kind.volume(newVolumeDisk(t, "disk"))
	staged := p.beginStage(t, v)
	m.await(
		t,
		time.Minute,
		"the plugin to be asked",
		func() bool { return strings.Contains(m.text(t, m.pluginLog), v.id) },
	)
	m.plug(t, firstFree, v.disk)
	succeed(t, <-staged)

	shown := m.born(t, "/dev/"+m.name(t, firstFree))
	var calls []entry
	m.await(t, time.Minute, "the plugin's log", func() bool {
		calls = p.entries(t, "responded", v.id)
		return len(calls) == 1
	})
	if asked := calls[0].Time.Add(-calls[0].Duration); asked.After(shown) {
		t.Errorf("the disk was there at %s, before the plugin was asked for it at %s", shown, asked)
	}
	found := p.entries(t, "found the disk", v.id)
	if len(found) != 1 {
		t.Fatalf("the disk was found %d times", len(found))
	}
	t.Logf(
		"after the device node was there: found after %s, staged after %s",
		found[0].Time.Sub(shown).Round(time.Millisecond),
		calls[0].Time.Sub(shown).Round(time.Millisecond),
	)

	succeed(t, p.publish(t, v))
	data := p.write(t, v)
	p.check(t, v, data)
	p.unpublishAndUnstage(t, v)
	m.unplug(t, firstFree)
	if name := m.name(t, firstFree); name != "" {
		t.Errorf("the guest still shows the disk, as %s", name)
	}
	if !v.onDisk(t, data) {
		t.Error("the written data is not on the disk")
	}
}

// born returns when a file of the guest was created, by the guest's clock.
func (m *machine) born(t *testing.T, file string) time.Time {
	t.Helper()
	text := strings.TrimSpace(m.sh(t, "/usr/sbin/stat -c %%w %s", file))
	at, err := time.Parse("2006-01-02 15:04:05.999999999 -0700", text)
	if err != nil {
		t.Fatal(err)
	}
	return at
}

// testSurpriseRemoval detaches a disk that is in use. The plugin must report it, clean up, and find the disk when it
// returns under another name.
func testSurpriseRemoval(t *testing.T, p *plugin, kind kind) {
	m := p.machine
	v := kind.volume(newVolumeDisk(t, "disk"))
	m.plug(t, firstFree, v.disk)
	p.stageAndPublish(t, v)
	data, name := p.write(t, v), m.name(t, firstFree)

	m.unplug(t, firstFree)
	fail(t, p.stats(t, v), codes.NotFound)
	fail(t, p.unstage(t, v), codes.FailedPrecondition) // it is still published
	p.unpublishAndUnstage(t, v)

	// Another disk takes the freed name.
	m.plug(t, firstFree, newVolumeDisk(t, "other"))
	m.awaitName(t, firstFree)
	m.plug(t, firstFree+1, v.disk)
	p.stageAndPublish(t, v)
	if now := m.name(t, firstFree+1); now == name {
		t.Errorf("the disk is %s again, so the test proves nothing", now)
	}
	p.check(t, v, data)
	p.unpublishAndUnstage(t, v)
}

// testReturn detaches a disk that is in use, and attaches it again while the old mounts still exist.
func testReturn(t *testing.T, p *plugin, kind kind) {
	m := p.machine
	v := kind.volume(newVolumeDisk(t, "disk"))
	m.plug(t, firstFree, v.disk)
	p.stageAndPublish(t, v)
	data := p.write(t, v)
	m.unplug(t, firstFree)
	m.plug(t, firstFree+1, v.disk)
	t.Logf("the disk is back as %s", m.awaitName(t, firstFree+1))

	// The workload still has the dead mount.
	fail(t, p.stats(t, v), codes.NotFound)
	fail(t, p.stage(t, v), codes.FailedPrecondition)
	succeed(t, p.unpublish(t, v))
	p.stageAndPublish(t, v)
	p.check(t, v, data)
	p.unpublishAndUnstage(t, v)
}

// testQuotas mounts filesystems with quotas.
func testQuotas(t *testing.T, p *plugin) {
	m := p.machine
	mounted := func(t *testing.T, v *volume, flag string) {
		t.Helper()
		v.capability.GetMount().MountFlags = []string{flag}
		for range 2 {
			succeed(t, p.stage(t, v))
		}
		p.stageAndPublish(t, v)
		if shown := m.sh(t, "grep %s /proc/self/mountinfo", v.target); !strings.Contains(shown, flag) {
			t.Errorf("mounted without %s: %s", flag, shown)
		}
		data := p.write(t, v)
		p.check(t, v, data)
		p.unpublishAndUnstage(t, v)
	}
	v := filesystemVolume(newVolumeDisk(t, "ext4"), "ext4")
	m.plug(t, firstFree, v.disk)
	mounted(t, v, "usrquota")
	m.unplug(t, firstFree)

	v = filesystemVolume(newVolumeDisk(t, "xfs"), "xfs")
	m.plug(t, firstFree, v.disk)
	for _, flag := range []string{"prjquota", "usrquota", "noquota"} {
		mounted(t, v, flag)
	}
	m.unplug(t, firstFree)
}

// testKernelTooOld: a feature that the kernel lacks is named, before mkfs and at the mount. With a newer kernel the
// volume works.
func testKernelTooOld(t *testing.T, p *plugin) {
	m := p.machine
	asked := filesystemVolume(newVolumeDisk(t, "asked"), "xfs")
	asked.mkfsOptions = "-i nrext64=1"
	found := filesystemVolume(newVolumeDisk(t, "found"), "xfs")
	if _, err := command("mkfs.xfs", "-q", "-i", "nrext64=1", found.disk.file); err != nil {
		t.Fatal(err)
	}
	var major, minor int
	if _, err := fmt.Sscanf(m.sh(t, "uname -r"), "%d.%d", &major, &minor); err != nil {
		t.Fatal(err)
	}
	for _, v := range []*volume{asked, found} {
		m.plug(t, firstFree, v.disk)
		before := v.sum(t)
		err := p.stage(t, v)
		if major > 5 || minor >= 19 {
			succeed(t, err)
			succeed(t, p.unstage(t, v))
		} else {
			fail(t, err, codes.FailedPrecondition)
			if !strings.Contains(err.Error(), "nrext64 needs Linux 5.19") || v.sum(t) != before {
				t.Errorf("%v, or the disk was changed", err)
			}
		}
		m.unplug(t, firstFree)
	}
}

// testReusedNumber: the kernel gives the number of a detached disk to the next disk, even if a device node with that
// number still exists. A workload that still has the node then has the wrong disk. So the plugin must not publish the
// new disk before the node is removed.
func testReusedNumber(t *testing.T, p *plugin) {
	m := p.machine
	v, other := block(newVolumeDisk(t, "disk")), block(newVolumeDisk(t, "other"))
	other.overwrite(t, 0, []byte("other"))
	m.plug(t, firstFree, v.disk)
	p.stageAndPublish(t, v)
	m.unplug(t, firstFree)
	m.plug(t, firstFree, other.disk)
	m.awaitName(t, firstFree)
	p.check(t, v, "other") // this is the kernel's doing; otherwise the test would prove nothing

	fail(t, p.stats(t, v), codes.NotFound)
	fail(t, p.stage(t, other), codes.FailedPrecondition)
	p.unpublishAndUnstage(t, v)
	p.stageAndPublish(t, other)
	p.check(t, other, "other")
	p.unpublishAndUnstage(t, other)
}

// testHotTwin attaches a disk whose name begins with the same 20 bytes as another disk's. The kernel rejects one of
// them, and nothing shows which one it kept.
func testHotTwin(t *testing.T, p *plugin) {
	m := p.machine
	v, twin := filesystemVolume(newVolumeDisk(t, "disk"), "ext4"), filesystemVolume(newVolumeDisk(t, "disk"), "ext4")
	twin.name += "-twin"
	m.plug(t, firstFree, v.disk)
	p.stageAndPublish(t, v)
	data := p.write(t, v)
	p.unpublishAndUnstage(t, v)

	m.plug(t, firstFree+1, twin.disk)
	m.await(
		t,
		plugTime,
		"the kernel to refuse the twin",
		func() bool { return strings.Contains(m.sh(t, "dmesg"), "Duplicate cntlid") },
	)
	fail(t, p.stage(t, v), codes.FailedPrecondition)
	fail(t, p.stage(t, twin), codes.FailedPrecondition)
	p.checkGone(t, v)
	p.checkGone(t, twin)

	m.unplug(t, firstFree+1)
	p.stageAndPublish(t, v)
	p.check(t, v, data)
	p.unpublishAndUnstage(t, v)
	twin.checkBlank(t)
}

// testShownTwin: if a kernel ever shows both disks, the plugin uses neither.
func testShownTwin(t *testing.T, p *plugin) {
	m := p.machine
	v, twin := filesystemVolume(newVolumeDisk(t, "disk"), "ext4"), filesystemVolume(newVolumeDisk(t, "disk"), "ext4")
	twin.ownSubsystem = true
	m.plug(t, firstFree, v.disk)
	m.plug(t, firstFree+1, twin.disk)
	m.awaitName(t, firstFree)
	m.awaitName(t, firstFree+1)
	fail(t, p.stage(t, v), codes.FailedPrecondition)
	fail(t, p.stage(t, twin), codes.FailedPrecondition)
	v.checkBlank(t)
	twin.checkBlank(t)
	m.unplug(t, firstFree+1)
	p.stageAndPublish(t, v)
	p.unpublishAndUnstage(t, v)
}

// checkBlank checks that the disk was never written.
func (d *disk) checkBlank(t *testing.T) {
	t.Helper()
	info, err := os.Stat(d.file)
	if err != nil {
		t.Fatal(err)
	}
	if blocks := info.Sys().(*syscall.Stat_t).Blocks; blocks != 0 {
		t.Errorf("%d blocks of the disk %s were written to", blocks, d.name)
	}
}

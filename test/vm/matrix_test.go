// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build vm && matrix

package vm

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/core/filesystem"
)

// cell is a guest with the kernel of one release of Debian and the tools of another one.
type cell struct {
	system
	name string
	made []madeVolume
}

// madeVolume is a volume that was in use in its cell when the power was cut, with data that was synced.
type madeVolume struct {
	*volume
	kind kind
	data string
}

// encryptedKind is an ext4 inside of LUKS.
const encryptedKind kind = "luks"

// TestMatrix makes volumes in each cell, cuts the power there, and takes a copy of each volume to each cell, with a
// larger disk. There it must be usable, with its data, and grown, and without damage when it is unstaged.
// test/matrix/guests.sh sets the variables.
func TestMatrix(t *testing.T) {
	var cells []*cell
	for _, kernel := range strings.Fields(os.Getenv("MATRIX_KERNELS")) {
		for _, tools := range strings.Fields(os.Getenv("MATRIX_TOOLS")) {
			assembled, err := assemble("VM_KERNEL="+kernel, "VM_TOOLS="+tools)
			if err != nil {
				t.Fatal(err)
			}
			name := "kernel of " + filepath.Base(kernel) + ", tools of " + filepath.Base(tools)
			cells = append(cells, &cell{system: assembled, name: name})
		}
	}
	if len(cells) == 0 {
		t.Fatal("no kernels or no tools: run make test-matrix-guests")
	}
	disks := t // the disks outlive the subtest
	t.Run("made", func(t *testing.T) {
		for _, c := range cells {
			t.Run(c.name, func(t *testing.T) {
				t.Parallel()
				c.make(t, disks)
			})
		}
	})
	t.Run("taken", func(t *testing.T) {
		for _, c := range cells {
			t.Run("to "+c.name, func(t *testing.T) {
				t.Parallel()
				m, p := c.start(t, slots{})
				for _, origin := range cells {
					for _, made := range origin.made {
						t.Run(string(made.kind)+" from "+origin.name, func(t *testing.T) { p.take(t, made) })
					}
				}
				kernel := m.sh(t, "dmesg")
				for _, said := range replays {
					if !strings.Contains(kernel, said) {
						t.Errorf("the kernel did not log %q, so no journal was replayed", said)
					}
				}
			})
		}
	})
}

// start boots the cell's guest and starts the plugin in it.
func (c *cell) start(t *testing.T, attached slots) (*machine, *plugin) {
	attached[0] = newSystemDisk(t)
	m := c.boot(t, uuid.NewString(), "", attached)
	m.mountSystemDisk(t)
	t.Logf("%s: %s", c.name,
		m.sh(t, "uname -r; /usr/sbin/mke2fs -V 2>&1; mkfs.xfs -V; mkfs.btrfs --version; cryptsetup --version"))
	return m, startPlugin(t, m, lowMemory)
}

func (c *cell) make(t, disks *testing.T) {
	attached := slots{}
	var volumes []madeVolume
	for _, fsType := range append(filesystem.Types(), string(encryptedKind)) {
		k, slot := kind(fsType), len(attached)+1
		d := newVolumeDisk(disks, c.name+fsType)
		v := filesystemVolume(d, fsType)
		if k == encryptedKind {
			v = encrypted(filesystemVolume(d, "ext4"))
		}
		attached[slot] = d
		volumes = append(volumes, madeVolume{volume: v, kind: k})
	}
	m, p := c.start(t, attached)
	for _, v := range volumes {
		p.stageAndPublish(t, v.volume)
		m.sh(t, "for i in $(seq 200); do echo $i >%s/$i; done; rm %[1]s/1*", v.target)
		v.data = p.write(t, v.volume)
		c.made = append(c.made, v)
	}
	m.cutPower(t)
}

// take uses a copy of the volume as after its move: on another node, with a larger disk.
func (p *plugin) take(t *testing.T, made madeVolume) {
	m, v := p.machine, *made.volume
	v.disk = v.copy(t)
	v.sizeBytes += gib / 2
	if err := os.Truncate(v.file, v.sizeBytes); err != nil {
		t.Fatal(err)
	}
	m.plug(t, firstFree, v.disk)
	p.stageAndPublish(t, &v)
	p.check(t, &v, made.data)
	total, err := strconv.ParseInt(strings.TrimSpace(m.sh(t, "df -kP %s | tail -1 | awk '{print $2}'", v.target)), 10, 64)
	if err != nil || total<<10 < v.sizeBytes/10*9 {
		t.Errorf("the filesystem has %d KiB of %d bytes (%v)", total, v.sizeBytes, err)
	}
	data := p.write(t, &v)
	p.leave(t, &v)
	if check := map[kind]string{
		"ext3": "/usr/sbin/e2fsck -fn", "ext4": "/usr/sbin/e2fsck -fn", "xfs": "/usr/sbin/xfs_repair -n", "btrfs": "btrfs check --readonly",
	}[made.kind]; check != "" {
		m.sh(t, "%s /dev/%s 2>&1", check, m.name(t, firstFree))
	} else if made.kind != encryptedKind {
		t.Errorf("no check of %s is known", made.kind)
	}
	p.stageAndPublish(t, &v)
	p.check(t, &v, data)
	p.leave(t, &v)
	m.unplug(t, firstFree)
}

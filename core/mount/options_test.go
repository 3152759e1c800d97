// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package mount_test

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device/devicetest"
	"github.com/oxidecomputer/oxide-csi-plugin/core/filesystem"
	"github.com/oxidecomputer/oxide-csi-plugin/core/filesystem/filesystemtest"
	"github.com/oxidecomputer/oxide-csi-plugin/core/hostexec"
	"github.com/oxidecomputer/oxide-csi-plugin/core/mount"
)

const gib = 1 << 30

// blockSizes are the sizes of a block that disks of the rack have.
var blockSizes = []int64{512, 2048, 4096}

// What is not refused at create is made and mounted by the node, and what is refused at create, mkfs refuses: on disks
// with each size of a block, of the smallest and the largest size.
func TestOptionsFitTheDisk(t *testing.T) {
	t.Parallel()
	for _, fsType := range filesystem.Types() {
		for _, options := range filesystemtest.Choices(fsType) {
			if !kernelMayLack[options] {
				tryOptions(t, fsType, options, 1)
			}
		}
	}
	for _, tc := range []struct {
		fsType, options string
		gib             int64
	}{
		{"", "-b 1024", 1}, {"ext4", "-b 4096 -i 65536 -I 512 -m 2 -L data -T largefile", 1},
		{"ext4", "-b 4096 -g 16384 -G 8 -N 4096 -J size=8", 1}, {"ext4", "-O bigalloc,^metadata_csum -C 65536", 1},
		{"ext4", "-E stride=4,stripe-width=16,lazy_itable_init=0,lazy_journal_init=0,packed_meta_blocks=1,resize=2g,nodiscard", 1},
		{"ext4", "-O has_journal,extent,^metadata_csum,^64bit,^flex_bg,^huge_file,^dir_nlink,^extra_isize,^resize_inode", 1},
		{"ext3", "-b 1024 -i 8192 -O has_journal,^dir_index,meta_bg,^resize_inode", 1},
		{"xfs", "-b size=4096 -d agcount=2 -K", 1},
		{"xfs", "-i size=1024,maxpct=10,sparse=0 -n size=8192 -s size=4096 -L data", 1},
		{"xfs", "-m crc=1,finobt=1,rmapbt=0,reflink=0,inobtcount=0,bigtime=0 -l size=64m,lazy-count=1", 1},
		// Inodes.
		{"ext4", "-b 1024 -I 1024", 1}, {"ext4", "-b 1024 -I 2048", 1}, {"ext4", "-T small -I 2048", 1}, {"ext4", "-T news -I 4096", 1},
		{"ext4", "-I 128 -O inline_data", 1}, {"ext4", "-I 512 -i 1024", 1}, {"ext4", "-I 1024 -i 1024", 1}, {"ext4", "-i 67108865", 1},
		{"ext4", "-N 1000000", 1}, {"ext4", "-N 3000000", 1}, {"ext4", "-N 3000000", 1023}, {"ext4", "-N 4294967296", 1023},
		{"xfs", "-b size=1024 -i size=1024", 1},
		// Clusters.
		{"ext4", "-C 65536", 1}, {"ext4", "-O bigalloc -C 2048", 1}, {"ext4", "-O bigalloc -C 16m", 1}, {"ext4", "-O bigalloc -C 256m", 1},
		{"ext4", "-O bigalloc -C 16m -N 100000", 1}, {"ext4", "-O bigalloc -i 65536", 1}, {"ext4", "-O bigalloc -C 1m -i 4096", 1},
		// Groups.
		{"ext4", "-g 1024", 1}, {"ext4", "-g 1025", 1}, {"ext4", "-g 32768", 1023}, {"ext4", "-g 32776", 1},
		{"ext4", "-b 1024 -g 8200", 1}, {"ext4", "-G 1", 1}, {"ext4", "-G 3", 1}, {"ext4", "-G 16 -O ^flex_bg", 1},
		{"xfs", "-d agcount=1", 1}, {"xfs", "-d agcount=2", 1023}, {"xfs", "-d agcount=14", 1}, {"xfs", "-d agcount=64", 1},
		{"xfs", "-d agcount=64", 1023}, {"xfs", "-d agcount=65", 1}, {"xfs", "-d agsize=72m", 1}, {"xfs", "-d agsize=16m", 1},
		{"xfs", "-d agsize=1g", 1}, {"xfs", "-d agsize=1g", 1023}, {"xfs", "-d agsize=100000001", 1}, {"xfs", "-d agcount=4,agsize=256m", 1},
		// Journals and logs.
		{"ext4", "-J size=0", 1}, {"ext4", "-J size=1", 1}, {"ext4", "-J size=4", 1}, {"ext4", "-b 1024 -J size=1", 1},
		{"ext4", "-J size=400", 1}, {"ext4", "-J size=600", 1}, {"ext4", "-J size=600", 1023}, {"ext4", "-J size=100000", 1023},
		{"xfs", "-l size=16m", 1}, {"xfs", "-l size=64m", 1}, {"xfs", "-l size=192m", 1}, {"xfs", "-l size=500m", 1},
		{"xfs", "-l size=500m", 1023}, {"xfs", "-l size=2047m", 1023}, {"xfs", "-b size=1024 -l size=600m", 1023},
		{"xfs", "-d agcount=8 -l size=96m", 1}, {"xfs", "-d agcount=8 -l size=200m", 1},
		// Sectors and blocks.
		{"xfs", "-b size=2048 -s size=4096", 1}, {"xfs", "-b size=2048 -s size=2048", 1}, {"xfs", "-b size=1024 -n size=65536", 1},
		// Features.
		{"ext4", "-O meta_bg,^resize_inode", 1}, {"ext4", "-O ^sparse_super,^resize_inode", 1}, {"ext4", "-O meta_bg,^resize_inode -E resize=2000g", 1},
		{"ext4", "-O metadata_csum_seed,^metadata_csum", 1}, {"ext4", "-O meta_bg -O ^resize_inode", 1}, {"ext4", "-E resize=1g", 1},
		{"ext4", "-E resize=2g", 1}, {"ext4", "-E resize=2g", 1023},
		{"xfs", "-m finobt=0,inobtcount=1", 1}, {"btrfs", "-M", 1}, {"btrfs", "-M -n 16k", 1}, {"btrfs", "-O mixed-bg -n 4096", 1},
		{"btrfs", "-M -d dup", 1}, {"btrfs", "-M -d dup -m dup", 1}, {"btrfs", "-d single -m dup", 1},
	} {
		tryOptions(t, tc.fsType, tc.options, tc.gib)
	}
}

// kernelMayLack are features that some kernels do not have: TestFsyncedFilesOutliveAPowerCut has them.
var kernelMayLack = map[string]bool{"-O verity": true}

// newerToolsTake are options that the plugin refuses for the sake of Debian 12's mkfs. That of Debian 13 takes them.
const newerToolsTake = "-O metadata_csum_seed,^metadata_csum"

// olderToolsTake reports whether mkfs takes options of xfs that the plugin refuses. Before 5.19 it makes logs and
// allocation groups that later versions refuse as too small.
func olderToolsTake(t *testing.T, fsType, options string) bool {
	t.Helper()
	small := []string{"-l size=16m", "-d agcount=1", "-d agcount=64", "-d agsize=16m", "-d agsize=1g"}
	return fsType == "xfs" && slices.Contains(small, options) && devicetest.OlderThan(t, "mkfs.xfs", "5.19")
}

// tryOptions compares [filesystem.CheckFit] with mkfs and the kernel.
func tryOptions(t *testing.T, fsType, options string, gibs int64) {
	t.Helper()
	for _, blockSize := range blockSizes {
		t.Run(fmt.Sprintf("%s %s, %d GiB with blocks of %d", fsType, options, gibs, blockSize), func(t *testing.T) {
			t.Parallel()
			args, err := filesystem.ParseMkfsOptions(fsType, options)
			if err != nil && !errors.Is(err, filesystem.ErrOption) {
				t.Fatal(err)
			}
			if err != nil {
				args = strings.Fields(options)
			}
			r := newRigOf(t, gibs*gib, uint32(blockSize))
			name := cmp.Or(fsType, "ext4")
			if err == nil {
				err = filesystem.CheckFit(fsType, args, filesystem.Disk{BlockSize: blockSize, Size: gibs * gib})
			}
			if err == nil && toolLacks(t, name, options) {
				r.wantTooNew(t, name, args...)
				return
			}
			if err == nil {
				if err := r.format(t, name, args...); err != nil {
					t.Fatal(err)
				}
				target := t.TempDir()
				if err := mount.Filesystem(t.Context(), r.dev, target, name, mount.Options{}); err != nil {
					t.Fatal(err)
				}
				r.unmount(t, target)
				return
			}
			t.Log(err)
			if err := r.format(t, name, args...); !errors.Is(err, filesystem.ErrOption) {
				t.Errorf("the node: %v; want ErrOption", err)
			}
			result, err := hostexec.Run(t.Context(), "mkfs."+name, slices.Concat([]string{"-q"}, args, []string{r.dev.Path})...)
			if err != nil || result.ExitCode == 0 && options != newerToolsTake && !olderToolsTake(t, fsType, options) {
				t.Errorf("mkfs takes the options: %v", err)
			}
		})
	}
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package filesystem_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/oxidecomputer/oxide-csi-plugin/core/filesystem"
)

func TestParseMkfsOptions(t *testing.T) {
	for _, tc := range []struct {
		fsType, options string
		want            []string
	}{
		{"", "", nil},
		{"ext4", "  ", nil},
		{"ext4", "-i 65536", []string{"-i", "65536"}},
		{"ext4", "-i65536 -m1", []string{"-i", "65536", "-m", "1"}},
		{"", "-E stride=4,stripe_width=16,lazy_itable_init=0", []string{"-E", "stride=4,stripe_width=16,lazy_itable_init=0"}},
		{"ext3", "-b 4096 -I 256", []string{"-b", "4096", "-I", "256"}},
		{"ext4", "-O ^metadata_csum,64bit -T largefile", []string{"-O", "^metadata_csum,64bit", "-T", "largefile"}},
		{"ext4", "-J size=16 -L data", []string{"-J", "size=16", "-L", "data"}},
		{"xfs", "-d agcount=8 -i size=1024 -K", []string{"-d", "agcount=8", "-i", "size=1024", "-K"}},
		{"xfs", "-m reflink=1,bigtime=0 -l size=64m", []string{"-m", "reflink=1,bigtime=0", "-l", "size=64m"}},
	} {
		t.Run(tc.fsType+" "+tc.options, func(t *testing.T) {
			got, err := filesystem.ParseMkfsOptions(tc.fsType, tc.options)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("options (-want +got):\n%s", diff)
			}
		})
	}
}

func TestParseMkfsOptionsRefuses(t *testing.T) {
	for _, tc := range []struct{ fsType, options string }{
		// Other devices and files.
		{"ext4", "-J device=/dev/nvme0n1"}, {"ext4", "-O journal_dev"}, {"ext4", "-O 64bit,journal_dev"}, {"ext4", "-l /etc/passwd"},
		{"ext4", "-d /root"}, {"ext4", "-z /tmp/undo"}, {"ext4", "/dev/nvme0n1"}, {"ext4", "-b 4096 /dev/nvme0n1"}, {"ext4", "-b 4096 8192"},
		{"ext4", "-E offset=4096"}, {"ext4", "-E test_fs,orphan_file_size=1"}, {"ext4", "-T /etc"}, {"ext4", "-M /mnt"}, {"ext4", "-L /dev/x"},
		{"xfs", "-l logdev=/dev/nvme0n1"}, {"xfs", "-r rtdev=/dev/nvme0n1"}, {"xfs", "-d name=/dev/nvme0n1"}, {"xfs", "-d file=1"},
		{"btrfs", "-r /root"}, {"btrfs", "--rootdir=/root"}, {"btrfs", "--rootdir /root"}, {"btrfs", "/dev/nvme0n1"}, {"btrfs", "-d single /dev/x"},
		{"xfs", "-p /etc/proto"}, {"xfs", "-c options=/etc/x"}, {"xfs", "-l size=64m,logdev=/dev/x"}, {"xfs", "--config=/x"},
		// Options that the plugin sets itself.
		{"ext4", "-F"}, {"ext4", "-FF"}, {"ext4", "-U random"}, {"ext4", "-n"}, {"ext4", "-S"}, {"ext4", "-c"}, {"ext4", "-E root_owner=0:0"}, {"ext4", "-E discard"},
		{"btrfs", "-f"}, {"btrfs", "-U random"}, {"btrfs", "-b 1g"}, {"btrfs", "--shrink"}, {"btrfs", "-d raid0"}, {"btrfs", "--csum=md5"}, {"btrfs", "--force"},
		{"xfs", "-f"}, {"xfs", "-N"}, {"xfs", "-m uuid=12345678-1234-5234-8234-123456789abc"},
		// A filesystem that a power cut destroys, or that counts as another type afterwards.
		{"ext4", "-O ^has_journal"}, {"ext4", "-O 64bit,^has_journal"}, {"ext3", "-O ^has_journal"}, {"ext4", "-O ^extent"}, {"ext4", "-O ^extents"},
		// Synced files are lost in a power cut.
		{"ext4", "-O fast_commit"}, {"ext4", "-O ^fast_commit"}, {"ext4", "-O 64bit,fast_commit"}, {"ext4", "-J size=16,fast_commit_size=4"},
		{"ext3", "-O extent"}, {"ext3", "-O 64bit"}, {"ext3", "-O has_journal,metadata_csum"}, {"ext4", "-J size=8,device=/dev/x"},
		// Words that are no options.
		{"ext4", "-b"}, {"ext4", "-b x"}, {"ext4", "-E"}, {"ext4", "-E stride"}, {"ext4", "-E nodiscard=1"}, {"ext4", "-E ,"}, {"ext4", "-O ,"},
		{"ext4", "-"}, {"ext4", "--"}, {"ext4", "$(reboot)"}, {"ext4", "-m 100"}, {"xfs", "-K1"}, {"xfs", "-m crc=2"}, {"xfs", "-i 1024"},
		// Values that mkfs always refuses, or that no kernel of a guest mounts.
		{"ext4", "-b 512"}, {"ext4", "-b 8192"}, {"ext4", "-b 65536"}, {"ext4", "-b 3000"}, {"ext4", "-I 64"}, {"ext4", "-I 300"},
		{"ext4", "-I 8192"}, {"ext4", "-i 512"}, {"ext4", "-m 51"}, {"ext4", "-N 0"}, {"ext4", "-C 0"}, {"ext4", "-g 0"},
		{"ext3", "-G 16"}, {"ext3", "-C 65536"}, {"xfs", "-b size=512"}, {"xfs", "-b size=8k"}, {"xfs", "-b size=3000"},
		{"xfs", "-s size=8192"}, {"xfs", "-i size=256"}, {"xfs", "-i size=4096"}, {"xfs", "-i perblock=2"}, {"xfs", "-d su=64k,sw=4"},
		{"xfs", "-i attr=1"}, {"xfs", "-i align=0"}, {"xfs", "-i projid32bit=0"}, {"xfs", "-l lazy-count=0"}, {"xfs", "-l version=1"},
		{"xfs", "-m crc=0"}, {"xfs", "-n ftype=0"}, {"xfs", "-n version=ci"}, {"xfs", "-n size=512"}, {"xfs", "-n size=128k"},
		{"xfs", "-d agcount=0"}, {"btrfs", "-s 512"}, {"btrfs", "-s 8192"}, {"btrfs", "-n 2048"}, {"btrfs", "-n 12288"},
		{"btrfs", "-O block-group-tree"}, {"btrfs", "-O free-space-tree"}, {"btrfs", "-O quota"},
		// Features that not every kernel has.
		{"ext4", "-O quota"}, {"ext4", "-O project"}, {"ext4", "-O 64bit,^project"},
		// Options of another filesystem.
		{"xfs", "-O 64bit"}, {"ext4", "-K"},
	} {
		t.Run(tc.fsType+" "+tc.options, func(t *testing.T) {
			got, err := filesystem.ParseMkfsOptions(tc.fsType, tc.options)
			if !errors.Is(err, filesystem.ErrOption) {
				t.Errorf("%q, %v; want ErrOption", got, err)
			}
		})
	}
	if got, err := filesystem.ParseMkfsOptions("ntfs", ""); !errors.Is(err, filesystem.ErrUnsupported) {
		t.Errorf("ntfs: %q, %v; want ErrUnsupported", got, err)
	}
}

// No word that passes holds what a path or a shell needs.
func FuzzParseMkfsOptions(f *testing.F) {
	for _, seed := range []string{"-i 65536", "-E stride=4,nodiscard", "-d agcount=8,agsize=1g", "-J device=/dev/x", "-l logdev=/x"} {
		f.Add("ext4", seed)
		f.Add("xfs", seed)
	}
	f.Fuzz(func(t *testing.T, fsType, options string) {
		words, err := filesystem.ParseMkfsOptions(fsType, options)
		if err != nil {
			return
		}
		for _, word := range words {
			if strings.ContainsAny(word, "/ \t\n\x00;|&$`'\"\\*?") {
				t.Errorf("%q passes as %q", options, words)
			}
		}
	})
}
func TestKeepsItsSize(t *testing.T) {
	for options, want := range map[string]bool{
		"": false, "-O bigalloc": true, "-b 4096 -O 64bit,bigalloc,verity": true, "-O 64bit -O bigalloc": true,
		"-O ^bigalloc": false, "-O 64bit": false, "-L bigalloc": false,
	} {
		parsed, err := filesystem.ParseMkfsOptions("ext4", options)
		if err != nil {
			t.Fatal(err)
		}
		if got := filesystem.KeepsItsSize(parsed); got != want {
			t.Errorf("%q: %t, want %t", options, got, want)
		}
	}
}

// Without flex_bg, a filesystem with sparse_super2 loses a block of its own when it grows.
func TestSparseSuper2NeedsFlexBg(t *testing.T) {
	for options, fits := range map[string]bool{
		"-O sparse_super2": true, "-O sparse_super2,^flex_bg": false, "-O ^flex_bg -O sparse_super2": false, "-O ^flex_bg": true,
	} {
		parsed, err := filesystem.ParseMkfsOptions("ext4", options)
		if err != nil {
			t.Fatal(err)
		}
		if err := filesystem.CheckFit("ext4", parsed, filesystem.Disk{BlockSize: 4096, Size: 1 << 30}); (err == nil) != fits {
			t.Errorf("%q: %v", options, err)
		}
	}
	if _, err := filesystem.ParseMkfsOptions("ext3", "-O sparse_super2"); err == nil {
		t.Error("ext3, which has no flex_bg, takes it")
	}
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package device_test

import (
	"context"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
	"github.com/oxidecomputer/oxide-csi-plugin/core/device/devicetest"
)

const (
	kib = int64(1) << 10
	mib = int64(1) << 20
)

func TestMain(m *testing.M) { devicetest.Main(m) }

// prove finds the disk in the guest and calls ProveBlank.
func prove(t *testing.T, g *devicetest.Guest, d *devicetest.Disk, options device.BlankOptions) (*device.Blank, error) {
	t.Helper()
	dev, err := g.Roots().ByNumber(d.Number)
	if err != nil {
		t.Fatal(err)
	}
	blank, err := device.ProveBlank(context.Background(), dev, options)
	t.Cleanup(func() {
		if err := blank.Close(); err != nil {
			t.Error(err)
		}
	})
	if err != nil && blank != nil {
		t.Error("ProveBlank returned both a proof and an error")
	}
	return blank, err
}

var blankOrigin = device.BlankOptions{Origin: device.OriginBlank}

// poke writes bytes to the disk.
func poke(t *testing.T, d *devicetest.Disk, offset int64, bytes string) {
	t.Helper()
	file, err := os.OpenFile(d.Loop, os.O_WRONLY|unix.O_SYNC, 0)
	if err != nil {
		t.Fatal(err)
	}
	_, err = file.WriteAt([]byte(bytes), offset)
	if err := errors.Join(err, file.Close()); err != nil {
		t.Fatal(err)
	}
}

// pokePartitionTable writes one Linux partition from sector 2048, 4096 sectors long, and the signature of a boot
// sector.
func pokePartitionTable(t *testing.T, d *devicetest.Disk) {
	t.Helper()
	poke(t, d, 446, "\x00\x00\x00\x00\x83\x00\x00\x00\x00\x08\x00\x00\x00\x10\x00\x00")
	poke(t, d, 510, "\x55\xaa")
}

func TestProveBlank(t *testing.T) {
	t.Parallel()
	for _, size := range []int64{1 * mib, 320 * mib, 3*1024*mib + 512*kib, 1023 * 1024 * mib} {
		g := devicetest.New(t)
		if _, err := prove(t, g, g.Add(diskName, size), blankOrigin); err != nil {
			t.Errorf("a blank disk of %d bytes: %v", size, err)
		}
	}
	t.Run("made from a snapshot", func(t *testing.T) {
		t.Parallel()
		g := devicetest.New(t)
		d := g.Add(diskName, 96*mib)
		whole := device.BlankOptions{Origin: "snapshot", ScanLimit: 96 * mib}
		if _, err := prove(t, g, d, whole); err != nil {
			t.Errorf("all zero: %v", err)
		}
	})
}

// One byte where a known format has a superblock is enough to reject the disk.
func TestProveBlankFindsBytes(t *testing.T) {
	t.Parallel()
	const gib, size = 1 << 30, 3 << 30
	for _, tc := range []struct {
		what   string
		offset int64
	}{
		{"first byte", 0},
		{"swap, page of 4 KiB", 4086},
		{"LVM label", 512},
		{"jfs", 32 * kib},
		{"btrfs, reiserfs, gfs2", 64 * kib},
		{"zfs, second label", 256*kib + 16*kib},
		{"last byte of the first MiB", mib - 1},
		{"LUKS2, second header at 1 MiB", 1 * mib},
		{"VMFS", 2 * mib},
		{"LUKS2, second header at 4 MiB", 4 * mib},
		{"VMFS, at 16 MiB", 16 * mib},
		{"VMFS, at 1 GiB", gib + 2*mib},
		{"ext, copy with 1 KiB blocks", 8*mib + kib + 0x38},
		{"ext, copy with 2 KiB blocks", 32*mib + 2*kib + 0x38},
		{"btrfs, first copy", 64*mib + 0x40},
		{"ext, copy in group 1", 128*mib + 0x38},
		{"ext, copy in group 5", 5*128*mib + 0x38},
		{"ext, copy in group 7", 7*128*mib + 0x38},
		{"ext, copy in group 9", 9*128*mib + 0x38},
		{"xfs, second allocation group", size / 4},
		{"xfs, second allocation group, rounded down to stripes", size/4 - 32*kib},
		{"xfs, second allocation group, rounded up to stripes", size/4 + 32*kib - 1},
		{"xfs, third allocation group", size / 2},
		{"xfs, last allocation group", size / 4 * 3},
		{"Promise RAID", size - 3087*512},
		{"first byte of the last MiB", size - mib},
		{"zfs, third label", size - 512*kib + 16*kib},
		{"md 0.90", size - 64*kib},
		{"md 1.0", size - 8*kib},
		{"GPT, second header", size - 512},
		{"last byte", size - 1},
		{"btrfs, second copy", 256*gib + 0x40},
	} {
		t.Run(tc.what, func(t *testing.T) {
			t.Parallel()
			g := devicetest.New(t)
			d := g.Add(diskName, max(size, tc.offset/gib*gib+gib))
			poke(t, d, tc.offset, "x")
			_, err := prove(t, g, d, blankOrigin)
			if !errors.Is(err, device.ErrNotBlank) {
				t.Fatalf("%v, want ErrNotBlank", err)
			}
			poke(t, d, tc.offset, "\x00")
			if _, err := prove(t, g, d, blankOrigin); err != nil {
				t.Errorf("zeroed again: %v", err)
			}
		})
	}
}

func TestProveBlankRejects(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name    string
		prepare func(t *testing.T, g *devicetest.Guest, d *devicetest.Disk)
		options device.BlankOptions
		want    error
		says    string
	}{
		{"ext4", func(t *testing.T, _ *devicetest.Guest, d *devicetest.Disk) {
			devicetest.Run(t, "mkfs.ext4", "-q", d.Loop)
		}, blankOrigin, device.ErrNotBlank, "it holds ext4, UUID "},
		{"ext4 whose first MiB was wiped", func(t *testing.T, _ *devicetest.Guest, d *devicetest.Disk) {
			devicetest.Run(t, "mkfs.ext4", "-q", "-b", "4096", d.Loop)
			poke(t, d, 0, strings.Repeat("\x00", int(mib)))
		}, blankOrigin, device.ErrNotBlank, "copy of an ext superblock"},
		{"xfs whose first MiB was wiped", func(t *testing.T, _ *devicetest.Guest, d *devicetest.Disk) {
			devicetest.Run(t, "mkfs.xfs", "-q", d.Loop)
			poke(t, d, 0, strings.Repeat("\x00", int(mib)))
		}, blankOrigin, device.ErrNotBlank, "copy of an xfs superblock"},
		{"swap", func(t *testing.T, _ *devicetest.Guest, d *devicetest.Disk) {
			devicetest.Run(t, "mkswap", d.Loop)
		}, blankOrigin, device.ErrNotBlank, "it holds swap"},
		{"partition table", func(t *testing.T, _ *devicetest.Guest, d *devicetest.Disk) {
			pokePartitionTable(t, d)
		}, blankOrigin, device.ErrNotBlank, "partition table (dos)"},
		{"LUKS header", func(t *testing.T, _ *devicetest.Guest, d *devicetest.Disk) {
			poke(t, d, 0, "LUKS\xba\xbe\x00\x01")
		}, blankOrigin, device.ErrNotBlank, "refusing to format"},
		{"random data without a signature", func(t *testing.T, _ *devicetest.Guest, d *devicetest.Disk) {
			poke(t, d, 512*kib, "not a signature")
		}, blankOrigin, device.ErrNotBlank, "first at byte 524288 (first MiB)"},
		{"made from a snapshot, a byte in the middle", func(t *testing.T, _ *devicetest.Guest, d *devicetest.Disk) {
			poke(t, d, 100*mib+1, "x")
		}, device.BlankOptions{Origin: "snapshot", ScanLimit: 320 * mib}, device.ErrNotBlank, "first at byte 104857601"},
		{"of unknown origin, a byte in the middle", func(t *testing.T, _ *devicetest.Guest, d *devicetest.Disk) {
			poke(t, d, 100*mib+1, "x")
		}, device.BlankOptions{ScanLimit: 320 * mib}, device.ErrNotBlank, "first at byte 104857601"},
		{"made from an image, above the limit", func(*testing.T, *devicetest.Guest, *devicetest.Disk) {
		}, device.BlankOptions{Origin: "image", ScanLimit: 320*mib - 1}, device.ErrNotBlank, "--blank-scan-limit"},
		{"head unreadable", func(t *testing.T, _ *devicetest.Guest, d *devicetest.Disk) {
			truncate(t, d, 4*kib)
		}, blankOrigin, device.ErrNotBlank, "read of"},
		{"tail unreadable", func(t *testing.T, _ *devicetest.Guest, d *devicetest.Disk) {
			truncate(t, d, 320*mib-4*kib)
		}, blankOrigin, device.ErrNotBlank, "read of"},
		{"made from a snapshot, middle unreadable", func(t *testing.T, _ *devicetest.Guest, d *devicetest.Disk) {
			// Only the end of the disk is unreadable. The tail is read before the middle, so it shows the error.
			truncate(t, d, 200*mib)
		}, device.BlankOptions{Origin: "snapshot", ScanLimit: 320 * mib}, device.ErrNotBlank, "read of"},
		{"held by another program", func(t *testing.T, _ *devicetest.Guest, d *devicetest.Disk) {
			holder, err := os.OpenFile(d.Loop, os.O_RDONLY|unix.O_EXCL, 0)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				if err := holder.Close(); err != nil {
					t.Error(err)
				}
			})
		}, blankOrigin, device.ErrInUse, "held by another program"},
		{"mounted", func(t *testing.T, _ *devicetest.Guest, d *devicetest.Disk) {
			devicetest.Run(t, "mkfs.ext4", "-q", d.Loop)
			target := t.TempDir()
			devicetest.Run(t, "mount", d.Loop, target)
			t.Cleanup(func() { devicetest.Unmount(t, target) })
		}, blankOrigin, device.ErrInUse, "mounted"},
		{"another size", func(t *testing.T, _ *devicetest.Guest, d *devicetest.Disk) {
			resize(t, d, 160*mib)
		}, blankOrigin, device.ErrMismatch, "when opened"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			g := devicetest.New(t)
			d := g.Add(diskName, 320*mib)
			tc.prepare(t, g, d)
			_, err := prove(t, g, d, tc.options)
			if !errors.Is(err, tc.want) {
				t.Fatalf("%v, want %v", err, tc.want)
			}
			if strings.Contains(tc.name, "wiped") && strings.Contains(err.Error(), "blkdiscard") {
				t.Errorf("the error offers to discard the disk: %v", err)
			}
			if !strings.Contains(err.Error(), tc.says) || strings.ContainsRune(err.Error(), '\n') {
				t.Errorf("the error does not say %q in one line: %v", tc.says, err)
			}
		})
	}
}

// The signature of every known format is found. Each case has the bytes and the offsets of a signature. A negative
// offset counts from the end of the disk.
func TestProveBlankKnowsHeaders(t *testing.T) {
	t.Parallel()
	const size = 320 * mib
	known := regexp.MustCompile("LUKS|GPT|btrfs") // whose copies this plugin knows
	for name, writes := range map[string][]write{
		"LUKS1":                 {{0, []byte("LUKS\xba\xbe\x00\x01")}},
		"LUKS2":                 {{0, []byte("LUKS\xba\xbe\x00\x02")}, {16 * kib, []byte("SKUL\xba\xbe\x00\x02")}},
		"LUKS2, second only":    {{4 * mib, []byte("SKUL\xba\xbe\x00\x02")}},
		"LVM":                   {{512, []byte("LABELONE\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x20\x00\x00\x00LVM2 001")}},
		"LVM1":                  {{0, []byte("HM\x01\x00")}},
		"MBR":                   {{510, []byte{0x55, 0xaa}}},
		"GPT":                   {{512, []byte("EFI PART\x00\x00\x01\x00")}},
		"GPT, second only":      {{-512, []byte("EFI PART\x00\x00\x01\x00")}},
		"GPT of 4 KiB blocks":   {{4096, []byte("EFI PART\x00\x00\x01\x00")}},
		"ZFS, first label":      {{128 * kib, []byte("\x0c\xb1\xba\x00\x00\x00\x00\x00")}},
		"ZFS, second label":     {{256*kib + 128*kib, []byte("\x00\xba\xb1\x0c")}},
		"ZFS, third label":      {{-512*kib + 128*kib, []byte("\x00\xba\xb1\x0c")}},
		"ZFS, last label":       {{-256*kib + 128*kib, []byte("\x0c\xb1\xba\x00\x00\x00\x00\x00")}},
		"Ceph bluestore":        {{0, []byte("bluestore block device\n12345678-1234-4234-8234-123456789abc\n")}},
		"bcache":                {{4096 + 24, []byte("\xc6\x85\x73\xf6\x4e\x1a\x45\xca\x82\x65\xf5\x7f\x48\xba\x6d\x81")}},
		"md 0.90":               {{-64 * kib, []byte("\xfc\x4e\x2b\xa9\x00\x00\x00\x00\x5a")}},
		"md 1.0":                {{-8 * kib, []byte("\xfc\x4e\x2b\xa9\x01")}},
		"md 1.1":                {{0, []byte("\xfc\x4e\x2b\xa9\x01")}},
		"md 1.2":                {{4096, []byte("\xfc\x4e\x2b\xa9\x01")}},
		"DRBD":                  {{-4096 + 60, []byte("\x83\x74\x02\x6b")}},
		"swap":                  {{4086, []byte("SWAPSPACE2")}},
		"hibernated swap":       {{4086, []byte("S1SUSPEND")}},
		"iso9660":               {{32*kib + 1, []byte("CD001\x01")}},
		"udf":                   {{32*kib + 1, []byte("BEA01\x01")}, {34*kib + 1, []byte("NSR03\x01")}},
		"vfat":                  {{3, []byte("mkfs.fat")}, {82, []byte("FAT32   ")}},
		"exfat":                 {{3, []byte("EXFAT   ")}},
		"ntfs":                  {{3, []byte("NTFS    ")}},
		"f2fs":                  {{1024, []byte("\x10\x20\xf5\xf2")}},
		"btrfs":                 {{64*kib + 64, []byte("_BHRfS_M")}},
		"btrfs, copy only":      {{64*mib + 64, []byte("_BHRfS_M")}},
		"bcachefs":              {{4096 + 24, []byte("\xc6\x85\x73\xf6\x66\xce\x90\xa9\xd9\x6a\x60\xcf\x80\x3d\xf7\xef")}},
		"reiserfs":              {{64*kib + 52, []byte("ReIsEr2Fs")}},
		"jfs":                   {{32 * kib, []byte("JFS1")}},
		"gfs2":                  {{64 * kib, []byte("\x01\x16\x19\x70")}},
		"ocfs2":                 {{2048, []byte("OCFSV2")}},
		"squashfs":              {{0, []byte("hsqs")}},
		"VMFS":                  {{2 * mib, []byte("\x5e\xf1\xab\x2f")}},
		"Intel firmware RAID":   {{-1024, []byte("Intel Raid ISM Cfg Sig. ")}},
		"Promise firmware RAID": {{-3087 * 512, []byte("Promise Technology, Inc.")}},
		"stratis":               {{512 + 4, []byte("!Stra0tis\x86\xff\x02^\x41rh")}},
		"vdo":                   {{0, []byte("dmvdo001")}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			g := devicetest.New(t)
			d := g.Add(diskName, size)
			for _, w := range writes {
				if w.offset < 0 {
					w.offset += size
				}
				poke(t, d, w.offset, string(w.bytes))
			}
			before := devicetest.Digest(t, d.Loop, d.Backing)
			for _, origin := range []string{device.OriginBlank, "snapshot"} {
				_, err := prove(t, g, d, device.BlankOptions{Origin: origin, ScanLimit: size})
				if !errors.Is(err, device.ErrNotBlank) {
					t.Fatalf("origin %s: %v, want ErrNotBlank", origin, err)
				}
				if known.MatchString(name) && strings.Contains(err.Error(), "blkdiscard") {
					t.Errorf("the error offers to discard the disk: %v", err)
				}
			}
			if devicetest.Digest(t, d.Loop, d.Backing) != before {
				t.Error("the disk was written to")
			}
		})
	}
}

// An encrypted disk into which something was written is found where mkfs and workloads write first. A disk for raw
// block is read as a whole, if it is not too large.
func TestCheckNeverWritten(t *testing.T) {
	t.Parallel()
	const size, dataOffset, anywhere = 320 * mib, 16 * mib, 123456789
	for _, tc := range []struct {
		name      string
		offset    int64
		rawBlock  bool
		scanLimit int64
		written   bool
	}{
		{"header", dataOffset - 1, true, size, false},
		{"superblock of btrfs", dataOffset + 64*kib, false, 0, true},
		{"last byte", size - 1, false, 0, true},
		{"anywhere, filesystem", anywhere, false, size, false},
		{"anywhere, raw block", anywhere, true, size, true},
		{"anywhere, raw block, too large", anywhere, true, size - 1, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			g := devicetest.New(t)
			d := g.Add(diskName, size)
			dev, err := g.Roots().ByNumber(d.Number)
			if err != nil {
				t.Fatal(err)
			}
			poke(t, d, tc.offset, "x")
			err = device.CheckNeverWritten(t.Context(), dev, dataOffset, device.BlankOptions{
				RawBlock: tc.rawBlock, ScanLimit: tc.scanLimit,
			})
			if written := errors.Is(err, device.ErrNotBlank); written != tc.written || !written && err != nil {
				t.Errorf("%v, want written %t", err, tc.written)
			}
		})
	}
}

// The superblock of ext says in several ways that the filesystem needs a check.
func TestExtStateUnclean(t *testing.T) {
	t.Parallel()
	const state, incompatible = 0x3a, 0x60
	for _, tc := range []struct {
		name    string
		options string
		offset  int64
		set     byte
		want    string
	}{
		{"clean", "^metadata_csum", state, 0x1, ""},
		{"in use", "^metadata_csum", state, 0, "it was not unmounted"},
		{"files to delete", "^metadata_csum", state, 0x1 | 0x4, "it was not unmounted"},
		{"errors", "^metadata_csum", state, 0x1 | 0x2, "it has errors"},
		{"a journal", "none,has_journal", incompatible, 0x4, "it has a journal to replay"},
		{"no journal", "none", state, 0x1, "it has no journal"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			g := devicetest.New(t)
			d := g.Add(diskName, 64*mib)
			devicetest.Run(t, "mkfs.ext4", "-q", "-O", tc.options, d.Loop)
			poke(t, d, 1024+tc.offset, string([]byte{tc.set}))
			dev, err := g.Roots().ByNumber(d.Number)
			if err != nil {
				t.Fatal(err)
			}
			if got, err := device.ReadExtState(dev); err != nil || got.Unclean != tc.want {
				t.Errorf("%q, %v; want %q", got.Unclean, err, tc.want)
			}
		})
	}
}

// loopChangeFD is LOOP_CHANGE_FD of linux/loop.h.
const loopChangeFD = 0x4c06

// If the device changes during the proof, mkfs does not run.
func TestProveBlankOfMovingDevice(t *testing.T) {
	t.Parallel()
	const size = 512 * mib
	for name, change := range map[string]func(t *testing.T, g *devicetest.Guest, d *devicetest.Disk){
		"shrinks": func(t *testing.T, _ *devicetest.Guest, d *devicetest.Disk) { resize(t, d, size/2) },
		"is exchanged": func(_ *testing.T, g *devicetest.Guest, d *devicetest.Disk) {
			g.Node(d.Kernel, g.Add("other", size).Number)
		},
		"is removed":      func(_ *testing.T, g *devicetest.Guest, d *devicetest.Disk) { g.Unplug(d) },
		"has read errors": func(t *testing.T, _ *devicetest.Guest, d *devicetest.Disk) { truncate(t, d, size/2) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			g := devicetest.New(t)
			d := g.Add(diskName, size)
			dev, err := g.Roots().ByNumber(d.Number)
			if err != nil {
				t.Fatal(err)
			}
			type answer struct {
				blank *device.Blank
				err   error
			}
			answers := make(chan answer, 1)
			go func() {
				blank, err := device.ProveBlank(context.Background(), dev, device.BlankOptions{Origin: "snapshot", ScanLimit: size})
				answers <- answer{blank, err}
			}()
			change(t, g, d)
			a := <-answers
			called := 0
			if a.err == nil && name != "has read errors" { // the device may fail after it was read
				a.err = a.blank.Format(func(string) error { called++; return nil })
				if !errors.Is(a.err, device.ErrNotBlank) {
					t.Errorf("%v, want ErrNotBlank", a.err)
				}
			}
			if err := a.blank.Close(); err != nil {
				t.Error(err)
			}
			if called > 0 {
				t.Errorf("mkfs was called, %v", a.err)
			}
		})
	}
	t.Run("another disk under the same number", func(t *testing.T) {
		t.Parallel()
		g := devicetest.New(t)
		d, exchange := exchangeable(t, g)
		blank, err := prove(t, g, d, blankOrigin)
		if err != nil {
			t.Fatal(err)
		}
		exchange()
		called := 0
		if err := blank.Format(
			func(string) error { called++; return nil },
		); !errors.Is(err, device.ErrNotBlank) || called > 0 ||
			!strings.Contains(err.Error(), "took its place") {
			t.Errorf("%v after %d calls of mkfs, want ErrNotBlank and none", err, called)
		}
	})
}

// A disk that takes the place of the one that was found is another disk, also with the same serial, number and size.
func TestFoundDiskIsExchanged(t *testing.T) {
	t.Parallel()
	g := devicetest.New(t)
	_, exchange := exchangeable(t, g)
	dev, err := g.Roots().WaitForDisk(
		t.Context(), device.ExpectedDisk{Serial: devicetest.Serial(diskName)}, 5*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	exchange()
	if err := dev.CheckUnused(); !errors.Is(err, device.ErrMismatch) {
		t.Errorf("%v, want ErrMismatch", err)
	}
}

// exchangeable is a disk that another one can replace under the same device number. The kernel allows to exchange the
// file of a loop device only if the loop device is read-only.
func exchangeable(t *testing.T, g *devicetest.Guest) (d *devicetest.Disk, exchange func()) {
	t.Helper()
	var files []string
	for _, name := range []string{"first", "second"} {
		files = append(files, filepath.Join(t.TempDir(), name))
		if err := errors.Join(
			os.WriteFile(files[len(files)-1], nil, 0o600),
			os.Truncate(files[len(files)-1], sizeBytes),
		); err != nil {
			t.Fatal(err)
		}
	}
	shown := devicetest.Run(t, "losetup", "--read-only", "--find", "--show", files[0])
	d = &devicetest.Disk{Kernel: "nvme0n1", Loop: strings.TrimSpace(shown)}
	t.Cleanup(func() { devicetest.Run(t, "losetup", "--detach", d.Loop) })
	d.Number, _ = device.NodeNumber(d.Loop)
	g.Node(d.Kernel, d.Number)
	g.Sysfs(d.Kernel, devicetest.Serial(diskName)+"\n", d.Number, sizeBytes)
	return d, func() {
		t.Helper()
		file, err := os.Open(files[1])
		if err != nil {
			t.Fatal(err)
		}
		loop, err := os.Open(d.Loop)
		if err != nil {
			t.Fatal(err)
		}
		if err := unix.IoctlSetInt(int(loop.Fd()), loopChangeFD, int(file.Fd())); err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(loop.Close(), file.Close()); err != nil {
			t.Fatal(err)
		}
	}
}

// truncate shortens the loop device's file. Reads of the loop device behind the new end fail.
func truncate(t *testing.T, d *devicetest.Disk, size int64) {
	t.Helper()
	if err := os.Truncate(d.Backing, size); err != nil {
		t.Fatal(err)
	}
	devicetest.Run(t, "blockdev", "--flushbufs", d.Loop)
}

// resize makes the loop device smaller.
func resize(t *testing.T, d *devicetest.Disk, size int64) {
	t.Helper()
	truncate(t, d, size)
	devicetest.Run(t, "losetup", "--set-capacity", d.Loop)
}

func TestProveBlankWaitsForTheLock(t *testing.T) {
	t.Parallel()
	g := devicetest.New(t)
	d := g.Add(diskName, sizeBytes)
	dev, err := g.Roots().ByNumber(d.Number)
	if err != nil {
		t.Fatal(err)
	}
	// A lock belongs to the device node, not to the device.
	holder, err := os.Open(dev.Path)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Flock(int(holder.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	// Real time: the lock is in the kernel. A busy machine does not change the result.
	ctx, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
	defer cancel()
	if _, err := device.ProveBlank(ctx, dev, blankOrigin); !errors.Is(err, device.ErrInUse) {
		t.Errorf("while another program has the lock: %v, want ErrInUse", err)
	}
	proved := make(chan error, 1)
	go func() {
		blank, err := device.ProveBlank(context.Background(), dev, blankOrigin)
		proved <- errors.Join(err, blank.Close())
	}()
	if err := holder.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-proved; err != nil {
		t.Errorf("after the lock was free: %v", err)
	}
}

func TestProveBlankEndsWithItsContext(t *testing.T) {
	t.Parallel()
	g := devicetest.New(t)
	dev, err := g.Roots().ByNumber(g.Add(diskName, sizeBytes).Number)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := device.ProveBlank(ctx, dev, blankOrigin); !errors.Is(err, context.Canceled) {
		t.Errorf("%v, want the context's error", err)
	}
}

func TestFormatChecksAgain(t *testing.T) {
	t.Parallel()
	mkfs := func(called *int) func(string) error {
		return func(string) error { *called++; return nil }
	}
	t.Run("nothing changed", func(t *testing.T) {
		t.Parallel()
		g := devicetest.New(t)
		d := g.Add(diskName, sizeBytes)
		blank, err := prove(t, g, d, blankOrigin)
		if err != nil {
			t.Fatal(err)
		}
		if file, err := os.OpenFile(d.Loop, os.O_RDONLY|unix.O_EXCL, 0); err == nil {
			t.Errorf("another program can open the disk exclusively: %v", file.Close())
		}
		err = blank.Format(func(path string) error {
			if want := filepath.Join(g.Dir, "dev", d.Kernel); path != want {
				t.Errorf("mkfs is called with %s, want %s", path, want)
			}
			file, err := os.OpenFile(path, os.O_RDWR|unix.O_EXCL, 0)
			if err != nil {
				return err // mkfs would fail in the same way
			}
			return file.Close()
		})
		if err != nil {
			t.Error(err)
		}
		called := 0
		if err := blank.Format(mkfs(&called)); !errors.Is(err, device.ErrNotBlank) || called != 0 {
			t.Errorf("a second time: %v after %d calls of mkfs, want ErrNotBlank and none", err, called)
		}
	})
	t.Run("no proof", func(t *testing.T) {
		called := 0
		for _, blank := range []*device.Blank{nil, {}} {
			if err := blank.Format(mkfs(&called)); !errors.Is(err, device.ErrNotBlank) || called != 0 {
				t.Errorf("%v after %d calls of mkfs, want ErrNotBlank and none", err, called)
			}
		}
	})
	for name, change := range map[string]func(g *devicetest.Guest, d *devicetest.Disk){
		"another device took the path": func(g *devicetest.Guest, d *devicetest.Disk) {
			g.Node(d.Kernel, g.Add("other", sizeBytes).Number)
		},
		"the disk shrank": func(_ *devicetest.Guest, d *devicetest.Disk) { resize(t, d, sizeBytes/2) },
		"the disk went":   func(g *devicetest.Guest, d *devicetest.Disk) { g.Unplug(d) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			g := devicetest.New(t)
			d := g.Add(diskName, sizeBytes)
			blank, err := prove(t, g, d, blankOrigin)
			if err != nil {
				t.Fatal(err)
			}
			change(g, d)
			called := 0
			if err := blank.Format(mkfs(&called)); !errors.Is(err, device.ErrNotBlank) || called != 0 {
				t.Errorf("%v after %d calls of mkfs, want ErrNotBlank and none", err, called)
			}
		})
		t.Run(name+" during mkfs", func(t *testing.T) {
			t.Parallel()
			g := devicetest.New(t)
			d := g.Add(diskName, sizeBytes)
			blank, err := prove(t, g, d, blankOrigin)
			if err != nil {
				t.Fatal(err)
			}
			if err := blank.Format(func(string) error { change(g, d); return nil }); !errors.Is(err, device.ErrNotBlank) {
				t.Errorf("%v, want ErrNotBlank", err)
			}
		})
	}
}

// mountOnce mounts the disk's filesystem, makes a folder in it, and unmounts it. Without a change, a mount may leave a
// btrfs as it was.
func mountOnce(t *testing.T, d *devicetest.Disk) {
	t.Helper()
	target := t.TempDir()
	devicetest.Run(t, "mount", d.Loop, target)
	devicetest.Run(t, "mkdir", "-p", filepath.Join(target, "folder", uuid.NewString()))
	devicetest.Unmount(t, target)
}

// pokeBtrfs sets a number in the superblock of a btrfs and updates the superblock's checksum, a CRC-32C of the bytes
// after the checksum.
func pokeBtrfs(t *testing.T, d *devicetest.Disk, offset int, number uint64) {
	t.Helper()
	file, err := os.OpenFile(d.Loop, os.O_RDWR|unix.O_SYNC, 0)
	if err != nil {
		t.Fatal(err)
	}
	super := make([]byte, 4*kib)
	if _, err := file.ReadAt(super, 64*kib); err != nil {
		t.Fatal(err)
	}
	binary.LittleEndian.PutUint64(super[offset:], number)
	binary.LittleEndian.PutUint32(super, crc32.Checksum(super[32:], crc32.MakeTable(crc32.Castagnoli)))
	if _, err := file.WriteAt(super, 64*kib); err != nil {
		t.Fatal(err)
	}
	if err := file.Close(); err != nil {
		t.Fatal(err)
	}
}

// The plugin overwrites only the remains of its own interrupted mkfs.
func TestProveBlankAfterInterruption(t *testing.T) {
	t.Parallel()
	own, foreign := uuid.NewString(), uuid.NewString()
	ext4 := func(uuid string) func(t *testing.T, d *devicetest.Disk) {
		return func(t *testing.T, d *devicetest.Disk) { devicetest.Run(t, "mkfs.ext4", "-q", "-U", uuid, d.Loop) }
	}
	// ext4With sets one byte of the superblock, which has no checksum here.
	ext4With := func(offset int64) func(t *testing.T, d *devicetest.Disk) {
		return func(t *testing.T, d *devicetest.Disk) {
			devicetest.Run(t, "mkfs.ext4", "-q", "-O", "^metadata_csum", "-U", own, d.Loop)
			poke(t, d, 1024+offset, "\x01")
		}
	}
	for _, tc := range []struct {
		name          string
		prepare       func(t *testing.T, d *devicetest.Disk)
		untouched     bool
		proved, again bool
	}{
		{"nothing was written yet", func(*testing.T, *devicetest.Disk) {}, false, true, false},
		{"no signature, untouched since", func(t *testing.T, d *devicetest.Disk) { poke(t, d, 300*kib, "half") }, true, true, true},
		{"no signature, perhaps touched since", func(t *testing.T, d *devicetest.Disk) { poke(t, d, 300*kib, "half") }, false, false, false},
		{"own ext4, never mounted", ext4(own), false, true, true},
		{"own ext4, mounted since", func(t *testing.T, d *devicetest.Disk) {
			ext4(own)(t, d)
			mountOnce(t, d)
		}, true, false, false},
		{"own ext4, with a time of its last mount", ext4With(0x2c), true, false, false},
		{"own ext4, with such a time after 2106", ext4With(0x275), true, false, false},
		{"own ext4, with a number of mounts", ext4With(0x34), true, false, false},
		{"own ext4, with a partition table", func(t *testing.T, d *devicetest.Disk) {
			ext4(own)(t, d)
			pokePartitionTable(t, d)
		}, true, false, false},
		{"another volume's ext4", ext4(foreign), true, false, false},
		{"own xfs, in progress", func(t *testing.T, d *devicetest.Disk) {
			devicetest.Run(t, "mkfs.xfs", "-q", "-m", "crc=0,finobt=0,reflink=0,uuid="+own, d.Loop)
			poke(t, d, 126, "\x01")
		}, true, true, true},
		{"own xfs, finished, never mounted", func(t *testing.T, d *devicetest.Disk) {
			devicetest.Run(t, "mkfs.xfs", "-q", "-m", "uuid="+own, d.Loop)
		}, true, true, true},
		{"own xfs, mounted since", func(t *testing.T, d *devicetest.Disk) {
			devicetest.Run(t, "mkfs.xfs", "-q", "-m", "uuid="+own, d.Loop)
			mountOnce(t, d)
		}, true, false, false},
		{"own btrfs, never mounted", func(t *testing.T, d *devicetest.Disk) {
			devicetest.Run(t, "mkfs.btrfs", "-q", "-U", own, d.Loop)
		}, true, true, true},
		{"own btrfs with one copy of its metadata, never mounted", func(t *testing.T, d *devicetest.Disk) {
			devicetest.Run(t, "mkfs.btrfs", "-q", "-m", "single", "-U", own, d.Loop)
		}, true, true, true},
		{"own btrfs with mixed block groups, never mounted", func(t *testing.T, d *devicetest.Disk) {
			devicetest.Run(t, "mkfs.btrfs", "-q", "-M", "-U", own, d.Loop)
		}, true, true, true},
		{"own btrfs with one copy of its metadata, mounted since, before its UUID tree was checked",
			func(t *testing.T, d *devicetest.Disk) {
				devicetest.Run(t, "mkfs.btrfs", "-q", "-m", "single", "-U", own, d.Loop)
				mountOnce(t, d)
				pokeBtrfs(t, d, 0x233, 0)
			}, true, false, false},
		{"own btrfs, mounted since, with a file and a new chunk, before its UUID tree was checked",
			func(t *testing.T, d *devicetest.Disk) {
				devicetest.Run(t, "mkfs.btrfs", "-q", "-m", "single", "-U", own, d.Loop)
				mountOnce(t, d)
				mountOnce(t, d)
				pokeBtrfs(t, d, 0x233, 0)
				pokeBtrfs(t, d, 0xa4, 1<<20) // chunk_root_generation
			}, true, false, false},
		{"own btrfs, whose log was replayed without its tree of files", func(t *testing.T, d *devicetest.Disk) {
			devicetest.Run(t, "mkfs.btrfs", "-q", "-m", "single", "-U", own, d.Loop)
			pokeBtrfs(t, d, 0xb2b+48, 0) // fs_root of super_roots
		}, true, false, false},
		{"own btrfs, mounted since", func(t *testing.T, d *devicetest.Disk) {
			devicetest.Run(t, "mkfs.btrfs", "-q", "-U", own, d.Loop)
			mountOnce(t, d)
		}, true, false, false},
		{"own btrfs, mounted since, before its UUID tree was checked", func(t *testing.T, d *devicetest.Disk) {
			devicetest.Run(t, "mkfs.btrfs", "-q", "-U", own, d.Loop)
			mountOnce(t, d)
			pokeBtrfs(t, d, 0x233, 0)
		}, true, false, false},
		{"own btrfs, whose UUID tree was checked", func(t *testing.T, d *devicetest.Disk) {
			devicetest.Run(t, "mkfs.btrfs", "-q", "-U", own, d.Loop)
			pokeBtrfs(t, d, 0x233, 1)
		}, true, false, false},
		{"own btrfs, with a log", func(t *testing.T, d *devicetest.Disk) {
			devicetest.Run(t, "mkfs.btrfs", "-q", "-U", own, d.Loop)
			pokeBtrfs(t, d, 0x60, 30<<20)
		}, true, false, false},
		{"swap", func(t *testing.T, d *devicetest.Disk) { devicetest.Run(t, "mkswap", "-U", own, d.Loop) }, true, false, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if !strings.Contains(tc.name, "btrfs") { // the kernel treats two btrfs of the same UUID as one
				t.Parallel()
			}
			g := devicetest.New(t)
			d := g.Add(diskName, 320*mib)
			tc.prepare(t, d)
			options := blankOrigin
			options.Interrupted = &device.InterruptedFormat{UUID: own, Untouched: tc.untouched}
			blank, err := prove(t, g, d, options)
			if !tc.proved {
				if !errors.Is(err, device.ErrNotBlank) {
					t.Errorf("%v, want ErrNotBlank", err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if blank.HasRemains() != tc.again {
				t.Errorf("HasRemains is %t, want %t", blank.HasRemains(), tc.again)
			}
		})
	}
}

func TestProbe(t *testing.T) {
	t.Parallel()
	g := devicetest.New(t)
	d := g.Add(diskName, 320*mib)
	dev, err := g.Roots().ByNumber(d.Number)
	if err != nil {
		t.Fatal(err)
	}
	content, err := device.Probe(context.Background(), dev)
	if err != nil || !content.Empty() {
		t.Errorf("a blank disk holds %v, %v", content, err)
	}
	const uuid = "12345678-1234-5234-8234-123456789abc"
	devicetest.Run(t, "mkfs.ext4", "-q", "-U", uuid, d.Loop)
	content, err = device.Probe(context.Background(), dev)
	if want := (device.Content{Type: "ext4", UUID: uuid}); err != nil || content != want {
		t.Errorf("the disk holds %v, %v; want %v", content, err, want)
	}
	t.Run("two filesystems at once", func(t *testing.T) {
		devicetest.Run(t, "mkfs.xfs", "-q", "-f", d.Loop)
		super := make([]byte, 512)
		file, err := os.Open(d.Loop)
		if err != nil {
			t.Fatal(err)
		}
		_, err = file.ReadAt(super, 0)
		if err := errors.Join(err, file.Close()); err != nil {
			t.Fatal(err)
		}
		devicetest.Run(t, "mkswap", d.Loop)
		poke(t, d, 0, string(super))
		if content, err := device.Probe(context.Background(), dev); !errors.Is(err, device.ErrUnreadable) {
			t.Errorf("the disk holds %v, %v; want ErrUnreadable", content, err)
		}
	})
	t.Run("unreadable", func(t *testing.T) {
		truncate(t, d, 4*kib)
		if content, err := device.Probe(context.Background(), dev); !errors.Is(err, device.ErrUnreadable) {
			t.Errorf("the disk holds %v, %v; want ErrUnreadable", content, err)
		}
	})
}

// blkid of util-linux 2.41 says nothing about several formats and about a superblock with a wrong checksum. The disk
// still counts as what it is, and no error offers to discard it.
func TestProbeWithSilentBlkid(t *testing.T) {
	const inside = "WITH_A_SILENT_BLKID"
	if os.Getenv(inside) == "" {
		silent := filepath.Join(t.TempDir(), "blkid")
		if err := os.WriteFile(silent, []byte("#!/bin/sh\nexit 2\n"), 0o755); err != nil {
			t.Fatal(err)
		}
		out, err := exec.Command("unshare", "--mount", "--propagation=private", "/bin/sh", "-c",
			"mount --bind "+silent+" /usr/sbin/blkid && "+inside+"=1 exec "+os.Args[0]+" -test.run=^"+t.Name()+"$").
			CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		return
	}
	const id = "12345678-1234-5234-8234-123456789abc"
	makes := func(program string, args ...string) func(*testing.T, *devicetest.Disk) {
		return func(t *testing.T, d *devicetest.Disk) { devicetest.Run(t, program, append(args, d.Loop)...) }
	}
	then := func(first func(*testing.T, *devicetest.Disk), offset int64, bytes string) func(*testing.T, *devicetest.Disk) {
		return func(t *testing.T, d *devicetest.Disk) { first(t, d); poke(t, d, offset, bytes) }
	}
	ext4 := makes("mkfs.ext4", "-q", "-U", id)
	xfs := makes("mkfs.xfs", "-q", "-f", "-m", "uuid="+id)
	btrfs := makes("mkfs.btrfs", "-q", "-f", "-U", id)
	key := filepath.Join(t.TempDir(), "key")
	if err := os.WriteFile(key, []byte("secret"), 0o600); err != nil {
		t.Fatal(err)
	}
	luks := makes("cryptsetup", "luksFormat", "-q", "--disable-locks", "--pbkdf-memory=1024", "--pbkdf-force-iterations=4",
		"--uuid="+id, "--key-file="+key)
	for _, tc := range []struct {
		name    string
		prepare func(*testing.T, *devicetest.Disk)
		want    string
	}{
		{"ext4", ext4, "ext4"},
		{"ext4 with a wrong checksum", then(ext4, 1024+0x3fc, "\x11"), "ext4"},
		{"xfs with a wrong checksum", then(xfs, 224, "\x11"), "xfs"},
		{"btrfs with a wrong checksum", then(btrfs, 64*kib, "\x11"), "btrfs"},
		{"LUKS2 without its first header", then(luks, 0, strings.Repeat("\x00", 4096)), device.TypeLUKS},
		{"ext4 and btrfs", func(t *testing.T, d *devicetest.Disk) {
			btrfs(t, d)
			super := make([]byte, 4096)
			file, err := os.Open(d.Loop)
			if err != nil {
				t.Fatal(err)
			}
			_, err = file.ReadAt(super, 64*kib)
			if err := errors.Join(err, file.Close()); err != nil {
				t.Fatal(err)
			}
			then(ext4, 64*kib, string(super))(t, d)
		}, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			g := devicetest.New(t)
			d := g.Add(diskName, 320*mib)
			tc.prepare(t, d)
			dev, err := g.Roots().ByNumber(d.Number)
			if err != nil {
				t.Fatal(err)
			}
			content, err := device.Probe(t.Context(), dev)
			if want := (device.Content{Type: tc.want, UUID: id}); tc.want != "" && (err != nil || content != want) {
				t.Errorf("the disk holds %v, %v; want %v", content, err, want)
			}
			if tc.want == "" && !errors.Is(err, device.ErrUnreadable) {
				t.Errorf("the disk holds %v, %v; want ErrUnreadable", content, err)
			}
			_, err = prove(t, g, d, blankOrigin)
			if !errors.Is(err, device.ErrNotBlank) || strings.Contains(err.Error(), "blkdiscard") {
				t.Errorf("%v, want ErrNotBlank, without an offer to discard the disk", err)
			}
		})
	}
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package mount

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
	"github.com/oxidecomputer/oxide-csi-plugin/core/device/devicetest"
	"github.com/oxidecomputer/oxide-csi-plugin/core/filesystem"
	"github.com/oxidecomputer/oxide-csi-plugin/core/hostexec"
)

// markerLine begins every copy of a disk's format marker. It is permanent.
func markerLine(volumeID uuid.UUID) []byte {
	return fmt.Appendf(nil, "csi.oxide.computer format marker 1\ndisk %s\n", volumeID)
}

// newDisk returns the only disk of a guest.
func newDisk(t *testing.T, sizeBytes int64) (device.Device, *devicetest.Disk) {
	t.Helper()
	g := devicetest.New(t)
	disk := g.Add("csi-abcdefghijklmnop", sizeBytes)
	dev, err := g.Roots().ByNumber(disk.Number)
	if err != nil {
		t.Fatal(err)
	}
	return dev, disk
}

// runMkfs does the same as Format up to the end of mkfs. The marker stays.
func runMkfs(t *testing.T, dev device.Device, want NewFilesystem) {
	t.Helper()
	blank, err := device.ProveBlank(
		t.Context(),
		dev,
		device.BlankOptions{VolumeID: want.VolumeID, Origin: device.OriginBlank},
	)
	if err != nil {
		t.Fatal(err)
	}
	err = blank.Format(func(path string) error {
		name, args, err := mkfs(want, FilesystemUUID(want.VolumeID).String())
		if err != nil {
			return err
		}
		result, err := hostexec.Run(t.Context(), name, append(args, path)...)
		if err == nil && result.ExitCode != 0 {
			err = errors.New(result.Message())
		}
		return err
	})
	if err := errors.Join(err, blank.Close()); err != nil {
		t.Fatal(err)
	}
}

// stage does the same as NodeStageVolume on a node without a record of the disk.
func stage(t *testing.T, dev device.Device, volumeID uuid.UUID, fsType string) (err error) {
	t.Helper()
	f := Formatter{StateDir: filepath.Join(t.TempDir(), "state")}
	content, err := device.Probe(t.Context(), dev)
	if err != nil {
		return err
	}
	interrupted, err := f.InterruptedFormat(volumeID, FilesystemUUID(volumeID), dev, content)
	if err != nil || !content.Empty() && interrupted == nil {
		return err
	}
	blank, err := device.ProveBlank(t.Context(), dev, device.BlankOptions{
		VolumeID: volumeID, Origin: "snapshot", ScanLimit: dev.SizeBytes, Interrupted: interrupted,
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, blank.Close()) }()
	_, err = f.Format(t.Context(), blank, NewFilesystem{VolumeID: volumeID, Type: fsType})
	return err
}

// blocks returns the disk's blocks of 4 KiB that are not zero, by offset.
func blocks(t *testing.T, disk *devicetest.Disk) map[int64][]byte {
	t.Helper()
	devicetest.Run(t, "blockdev", "--flushbufs", disk.Loop)
	file, err := os.Open(disk.Backing)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = file.Close() }() // read only
	const blockBytes = 4096
	found := map[int64][]byte{}
	for offset := int64(0); ; {
		data, err := unix.Seek(int(file.Fd()), offset, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return found
		}
		if err != nil {
			t.Fatal(err)
		}
		offset = data / blockBytes * blockBytes
		block := make([]byte, blockBytes)
		if _, err := file.ReadAt(block, offset); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(block, make([]byte, blockBytes)) {
			found[offset] = block
		}
		offset += blockBytes
	}
}

func markers(found map[int64][]byte, volumeID uuid.UUID) (count int) {
	for _, block := range found {
		if bytes.HasPrefix(block, markerLine(volumeID)) {
			count++
		}
	}
	return count
}

// poke writes to the disk, by offset.
func poke(t *testing.T, disk *devicetest.Disk, contents map[int64][]byte) {
	t.Helper()
	file, err := os.OpenFile(disk.Loop, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	for offset, content := range contents {
		if _, err := file.WriteAt(content, offset); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(file.Sync(), file.Close()); err != nil {
		t.Fatal(err)
	}
}

// mkfs does not know the marker. After mkfs enough copies of the marker are left, and removing them does not damage the
// filesystem.
func TestMarkerSurvivesMkfs(t *testing.T) {
	t.Parallel()
	const mib, gib = 1 << 20, 1 << 30
	checks := map[string][]string{
		"ext3":  {"e2fsck", "-fn"},
		"ext4":  {"e2fsck", "-fn"},
		"xfs":   {"xfs_repair", "-n"},
		"btrfs": {"btrfs", "check"},
	}
	for _, tc := range []struct {
		fsType  string
		options []string
	}{
		{"ext4", []string{"", "-i 16384", "-b 1024", "-g 8192", "-E lazy_itable_init=0 -N 100000"}},
		{"ext3", []string{""}},
		{"xfs", []string{"", "-d agcount=2", "-l size=64m", "-i size=1024"}},
		{"btrfs", []string{""}},
	} {
		if !filesystem.Supported(tc.fsType) {
			continue
		}
		for _, options := range tc.options {
			for _, size := range []int64{320 * mib, 1 * gib, 1023 * gib} {
				if size > gib &&
					(tc.fsType == "ext3" || strings.Contains(options, "-b 1024") || strings.Contains(options, "-g 8192")) {
					continue // takes too long, or too much of the machine's own disk
				}
				t.Run(fmt.Sprintf("%s %s %d MiB", tc.fsType, options, size/mib), func(t *testing.T) {
					parsed, err := filesystem.ParseMkfsOptions(tc.fsType, options)
					if err != nil {
						t.Fatal(err)
					}
					t.Parallel()
					dev, disk := newDisk(t, size)
					volumeID := uuid.New()
					runMkfs(t, dev, NewFilesystem{VolumeID: volumeID, Type: tc.fsType, MkfsOptions: parsed})
					if left := markers(blocks(t, disk), volumeID); left < 2 {
						t.Errorf("%d copies of the marker have outlived mkfs, want 2 at least", left)
					}
					if err := (Formatter{StateDir: t.TempDir()}).RemoveMarkerAndRecord(volumeID, dev); err != nil {
						t.Fatal(err)
					}
					if left := markers(blocks(t, disk), volumeID); left != 0 {
						t.Errorf("%d copies of the marker are still there", left)
					}
					if size <= gib {
						check := checks[tc.fsType]
						devicetest.Run(t, check[0], append(check[1:], disk.Loop)...)
					}
				})
			}
		}
	}
}

// After a power cut during mkfs, any of its writes may be on the disk, and any may be missing.
func TestFormatAfterPowerCut(t *testing.T) {
	t.Parallel()
	const size = 320 << 20
	for _, fsType := range filesystem.Types() {
		t.Run(fsType, func(t *testing.T) {
			t.Parallel()
			volumeID := uuid.New()
			reference, disk := newDisk(t, size)
			runMkfs(t, reference, NewFilesystem{VolumeID: volumeID, Type: fsType})
			written := blocks(t, disk)
			devicetest.Run(t, "wipefs", "-qa", disk.Loop) // mkfs.btrfs wants its UUID to be the only one
			// cut makes a disk with the marker, and with each of mkfs' blocks with this probability.
			cut := func(t *testing.T, seed uint64, chance float64) (device.Device, *devicetest.Disk) {
				t.Helper()
				dev, disk := newDisk(t, size)
				random, survived := rand.New(rand.NewPCG(seed, 0)), map[int64][]byte{}
				for _, offset := range slices.Sorted(maps.Keys(written)) {
					block := written[offset]
					if bytes.HasPrefix(block, markerLine(volumeID)) || random.Float64() < chance {
						survived[offset] = block
					}
				}
				poke(t, disk, survived)
				return dev, disk
			}
			for seed, chance := range []float64{0, 0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99, 1} {
				t.Run(fmt.Sprintf("%.0f %% written", chance*100), func(t *testing.T) {
					if fsType != "btrfs" { // the kernel takes two btrfs of the same UUID for one
						t.Parallel()
					}
					dev, disk := cut(t, uint64(seed), chance)
					if err := stage(t, dev, volumeID, fsType); err != nil {
						t.Fatal(err)
					}
					if left := markers(blocks(t, disk), volumeID); left != 0 {
						t.Errorf("%d copies of the marker are still there", left)
					}
					target := t.TempDir()
					if err := Filesystem(t.Context(), dev, target, fsType, Options{}); err != nil {
						t.Fatal(err)
					}
					file := filepath.Join(target, "file")
					if err := os.WriteFile(file, []byte("data"), 0o600); err != nil {
						t.Error(err)
					}
					if err := Unmount(context.Background(), target, dev.Number); err != nil {
						t.Fatal(err)
					}
					if _, err := WaitFree(context.Background(), dev, 0, false, true); err != nil {
						t.Fatal(err)
					}
					before := devicetest.Digest(t, disk.Loop, disk.Backing)
					// Staging again does not format the disk.
					if err := stage(t, dev, volumeID, fsType); err != nil {
						t.Error(err)
					}
					if devicetest.Digest(t, disk.Loop, disk.Backing) != before {
						t.Error("a filesystem that was mounted has been written to")
					}
				})
			}
			for name, use := range map[string]func(t *testing.T, disk *devicetest.Disk){
				"LUKS": func(t *testing.T, disk *devicetest.Disk) {
					poke(t, disk, map[int64][]byte{0: []byte("LUKS\xba\xbe\x00\x01")})
				},
				"swap": func(t *testing.T, disk *devicetest.Disk) { devicetest.Run(t, "mkswap", "-f", disk.Loop) },
				"partition table": func(t *testing.T, disk *devicetest.Disk) {
					poke(t, disk, map[int64][]byte{
						446: []byte("\x00\x00\x00\x00\x83\x00\x00\x00\x00\x08\x00\x00\x00\x10\x00\x00"),
						510: []byte("\x55\xaa"),
					})
				},
			} {
				t.Run("then "+name, func(t *testing.T) {
					dev, disk := cut(t, 1, 0.3)
					use(t, disk)
					found, err := device.Probe(t.Context(), dev)
					if err == nil && found.Empty() {
						t.Fatal("blkid does not know this header")
					}
					before := devicetest.Digest(t, disk.Loop, disk.Backing)
					stageErr := stage(t, dev, volumeID, fsType) // that it does not stage is another test's
					if devicetest.Digest(t, disk.Loop, disk.Backing) != before {
						t.Errorf("a disk that holds %s (%v) has been written to, and staging answered %v", found, err, stageErr)
					}
				})
			}
			t.Run("another disk's marker", func(t *testing.T) {
				dev, disk := cut(t, 2, 0)
				contents := map[int64][]byte{200 << 20: []byte("half a filesystem")}
				for offset, block := range written {
					if bytes.HasPrefix(block, markerLine(volumeID)) {
						contents[offset] = bytes.Replace(block, []byte(volumeID.String()), []byte(uuid.NewString()), 1)
					}
				}
				poke(t, disk, contents)
				if err := stage(t, dev, volumeID, fsType); !errors.Is(err, device.ErrNotBlank) {
					t.Errorf("%v, want ErrNotBlank", err)
				}
			})
		})
	}
}

// A marker has no effect after the filesystem was mounted.
func TestMarkerBesideMountedFilesystem(t *testing.T) {
	t.Parallel()
	for _, fsType := range filesystem.Types() {
		t.Run(fsType, func(t *testing.T) {
			t.Parallel()
			volumeID := uuid.New()
			dev, disk := newDisk(t, 320<<20)
			runMkfs(t, dev, NewFilesystem{VolumeID: volumeID, Type: fsType})
			target := t.TempDir()
			devicetest.Run(t, "mount", disk.Loop, target)
			if err := os.WriteFile(filepath.Join(target, "file"), []byte("data"), 0o600); err != nil {
				t.Error(err)
			}
			devicetest.Unmount(t, target)
			if _, err := WaitFree(t.Context(), dev, 0, false, true); err != nil {
				t.Fatal(err)
			}
			if marked, err := device.HasFormatMarker(dev, volumeID); err != nil || !marked {
				t.Fatalf("the marker was removed: %t, %v", marked, err)
			}
			before := devicetest.Digest(t, disk.Loop, disk.Backing)
			if err := stage(t, dev, volumeID, fsType); err != nil {
				t.Error(err)
			}
			if devicetest.Digest(t, disk.Loop, disk.Backing) != before {
				t.Error("the filesystem was written to")
			}
		})
	}
}

// While anything holds the disk, the marker stays.
func TestRemoveMarkerOfHeldDisk(t *testing.T) {
	t.Parallel()
	volumeID := uuid.New()
	dev, disk := newDisk(t, 320<<20)
	runMkfs(t, dev, NewFilesystem{VolumeID: volumeID, Type: "ext4"})
	holder, err := os.OpenFile(disk.Loop, os.O_RDONLY|unix.O_EXCL, 0)
	if err != nil {
		t.Fatal(err)
	}
	f := Formatter{StateDir: t.TempDir()}
	if err := f.RemoveMarkerAndRecord(volumeID, dev); !errors.Is(err, device.ErrInUse) {
		t.Errorf("%v, want ErrInUse", err)
	}
	if err := holder.Close(); err != nil {
		t.Fatal(err)
	}
	if markers(blocks(t, disk), volumeID) == 0 {
		t.Error("the marker was removed")
	}
	start := time.Now()
	if err := f.RemoveMarkerAndRecord(volumeID, dev); err != nil || time.Since(start) > time.Minute {
		t.Error(err)
	}
}

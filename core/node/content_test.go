// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package node_test

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
	"github.com/oxidecomputer/oxide-csi-plugin/core/filesystem"
	"github.com/oxidecomputer/oxide-csi-plugin/core/mount"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
	"github.com/oxidecomputer/oxide-csi-plugin/test/coretest"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack"
)

// restore makes a disk of this size with the present bytes of another disk, and attaches it. A rack does this with a
// snapshot.
func (r *nodeRig) restore(source *volume, disk string, sizeBytes int64) *volume {
	r.t.Helper()
	r.digest(source) // flushes the loop device, so that its file has all bytes that the guest has written
	return r.afterPowerCut(source, disk, sizeBytes)
}

// afterPowerCut is restore without the flush: the new disk lacks what the guest's kernel has not sent to the disk yet.
func (r *nodeRig) afterPowerCut(source *volume, disk string, sizeBytes int64) *volume {
	r.t.Helper()
	id := uuid.NewString()
	coretest.Must(r.t, r.guests.CreateDisk(id, sizeBytes))
	copied := r.path("disks/" + id + ".disk")
	r.run("cp", "--sparse=always", r.path("disks/"+source.id+".disk"), copied)
	coretest.Must(r.t, os.Truncate(copied, sizeBytes))
	v := &volume{
		id: id, disk: disk, staging: r.path("staging-" + disk),
		publish: map[string]string{
			rpc.KeyDiskName: disk, rpc.KeyDiskID: id, rpc.KeySizeBytes: fmt.Sprint(sizeBytes), rpc.KeyBlockSize: "512",
			rpc.KeyOrigin: rpc.OriginSnapshot, rpc.KeyReadOnly: "false", rpc.KeyFSLineage: source.id,
		},
		volume: map[string]string{rpc.KeyDiskName: disk},
	}
	coretest.Must(r.t, os.Mkdir(v.staging, 0o755))
	coretest.Must(
		r.t,
		r.guests.Plug(guestID, simrack.GuestDisk{ID: id, Name: disk, Slot: 3, SizeBytes: sizeBytes, BlockSize: 512}),
	)
	return v
}

// A filesystem that certainly belongs to another volume is not mounted. A filesystem of unknown origin is mounted with
// a warning.
func TestNodeFilesystemIdentity(t *testing.T) {
	t.Parallel()
	const stranger = "0b0c7b5e-8f0a-4d0e-9b7e-1f2d3c4b5a69"
	other := mount.FilesystemUUID(uuid.MustParse(volumeB)).String()
	for _, tc := range []struct {
		name    string
		fsUUID  string
		prepare func(v *volume)
		code    codes.Code
		warns   bool
	}{
		{"the volume's own", mount.FilesystemUUID(uuid.MustParse(volumeA)).String(), func(*volume) {}, codes.OK, false},
		{"another volume's, on a disk made blank", other, func(*volume) {}, codes.FailedPrecondition, false},
		{"another volume's, on a disk restored from it", other, func(v *volume) {
			v.publish[rpc.KeyOrigin], v.publish[rpc.KeyFSLineage] = rpc.OriginSnapshot, volumeB
		}, codes.OK, false},
		{"an ancestor's, one of several", other, func(v *volume) {
			v.publish[rpc.KeyOrigin], v.publish[rpc.KeyFSLineage] = rpc.OriginSnapshot, stranger+","+strings.ToUpper(volumeB)
		}, codes.OK, false},
		{"another volume's, on a disk restored from elsewhere", other, func(v *volume) {
			v.publish[rpc.KeyOrigin], v.publish[rpc.KeyFSLineage] = rpc.OriginSnapshot, stranger
		}, codes.OK, true},
		{"another volume's, verification switched off", other, func(v *volume) { v.volume[rpc.KeyVerifyFilesystem] = "false" }, codes.OK, false},
		{"another volume's, verification switched on", other, func(v *volume) { v.volume[rpc.KeyVerifyFilesystem] = "true" }, codes.FailedPrecondition, false},
		{"another volume's, without a publish context", other, func(v *volume) { v.publish = nil }, codes.OK, true},
		{"made by a user", stranger, func(*volume) {}, codes.OK, true},
		{"an invalid switch", other, func(v *volume) { v.volume[rpc.KeyVerifyFilesystem] = "no" }, codes.InvalidArgument, false},
		{"an invalid lineage", other, func(v *volume) { v.publish[rpc.KeyFSLineage] = volumeB + ";" + stranger }, codes.InvalidArgument, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			r := newNodeRig(t)
			v := r.newVolumeWithID(volumeA, diskA)
			r.run("mkfs.ext4", "-q", "-U", tc.fsUUID, r.node(v))
			tc.prepare(v)
			before := r.digest(v)
			err := r.stage(v, filesystemVolume("", writer))
			coretest.WantCode(t, err, tc.code)
			if tc.code == codes.FailedPrecondition {
				coretest.WantCode(t, err, tc.code, `set verifyFilesystem: "false" in the volume's context`)
			}
			if tc.code != codes.OK {
				r.wantMounts()
				if r.digest(v) != before {
					t.Error("the disk was written to")
				}
				return
			}
			if warned := strings.Contains(r.log.String(), "did not make for this disk"); warned != tc.warns {
				t.Errorf("warned: %t, want %t", warned, tc.warns)
			}
			coretest.Must(t, r.unstage(v))
		})
	}
	t.Run("raw block", func(t *testing.T) {
		t.Parallel()
		r := newNodeRig(t)
		v := r.newVolumeWithID(volumeA, diskA)
		r.run("mkfs.ext4", "-q", "-U", other, r.node(v))
		coretest.Must(t, r.stage(v, rawBlock(writer)))
		coretest.Must(t, r.unstage(v))
	})
}

// A stage for which no controller answered mounts only what this plugin made for this very disk, as it is.
func TestNodeStagesItsOwnFilesystemOnly(t *testing.T) {
	t.Parallel()
	own := mount.FilesystemUUID(uuid.MustParse(volumeA)).String()
	ancestor := mount.FilesystemUUID(uuid.MustParse(volumeB)).String()
	for _, tc := range []struct {
		name       string
		mkfs       []string
		capability *csi.VolumeCapability
		code       codes.Code
	}{
		{"its own", []string{"mkfs.ext4", "-q", "-U", own}, filesystemVolume("", writer), codes.OK},
		{"its own, with the wrong type", []string{"mkfs.ext4", "-q", "-U", own}, filesystemVolume("xfs", writer), codes.FailedPrecondition},
		{"an ancestor's", []string{"mkfs.ext4", "-q", "-U", ancestor}, filesystemVolume("", writer), codes.FailedPrecondition},
		{"a user's", []string{"mkfs.ext4", "-q"}, filesystemVolume("", writer), codes.FailedPrecondition},
		{"none", nil, filesystemVolume("", writer), codes.FailedPrecondition},
		{"raw block", nil, rawBlock(writer), codes.FailedPrecondition},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			r := newNodeRig(t)
			v := r.newVolumeWithID(volumeA, diskA)
			v.publish[rpc.KeyFSLineage] = volumeB
			if tc.mkfs != nil {
				r.run(tc.mkfs[0], append(tc.mkfs[1:], r.node(v), fmt.Sprintf("%dk", volumeBytes>>11))...) // half of the disk
			}
			before := r.digest(v)
			coretest.WantCode(t, r.stageWithoutController(v, tc.capability), tc.code)
			if tc.code != codes.OK {
				r.wantMounts()
				if r.digest(v) != before {
					t.Error("the disk was written to")
				}
				return
			}
			coretest.Must(t, r.stageWithoutController(v, tc.capability))
			if strings.Contains(r.log.String(), "grew the filesystem") {
				t.Error("the filesystem was grown")
			}
			coretest.Must(t, r.stage(v, tc.capability))
			if !strings.Contains(r.log.String(), "grew the filesystem") {
				t.Error("with a controller the filesystem was not grown")
			}
			coretest.Must(t, r.unstage(v))
		})
	}
}

// A volume and its restored copy on one node have the same filesystem UUID.
func TestNodeStagesVolumeAndItsCopy(t *testing.T) {
	t.Parallel()
	for _, fsType := range filesystem.Types() {
		for _, copyFirst := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, copy first %t", fsType, copyFirst), func(t *testing.T) {
				t.Parallel()
				r := newNodeRig(t)
				original := r.newVolume(diskA)
				capability := filesystemVolume(fsType, writer)
				coretest.Must(t, r.stage(original, capability))
				coretest.Must(t, os.WriteFile(filepath.Join(original.staging, "file"), []byte("data"), 0o600))
				coretest.Must(t, r.unstage(original))
				clone := r.restore(original, diskB, volumeBytes)
				first, second := original, clone
				if copyFirst {
					first, second = clone, original
				}
				if fsType == "btrfs" {
					coretest.WantCode(t, r.stage(first, capability), codes.FailedPrecondition, "nvme")
					r.wantMounts()
					coretest.Must(t, r.guests.Unplug(guestID, second.id))
					coretest.Must(t, r.stage(first, capability))
					coretest.Must(
						t,
						r.guests.Plug(
							guestID,
							simrack.GuestDisk{ID: second.id, Name: second.disk, Slot: 4, SizeBytes: volumeBytes, BlockSize: 512},
						),
					)
					coretest.WantCode(t, r.stage(second, capability), codes.FailedPrecondition, "mix")
					coretest.Must(t, r.unstage(first))
					return
				}
				coretest.Must(t, r.stage(first, capability))
				coretest.Must(t, r.stage(second, capability))
				coretest.Must(t, os.WriteFile(filepath.Join(first.staging, "file"), []byte("first"), 0o600))
				coretest.Must(t, os.WriteFile(filepath.Join(second.staging, "file"), []byte("second"), 0o600))
				coretest.Must(t, r.unstage(first))
				coretest.Must(t, r.unstage(second))
				coretest.Must(t, r.stage(second, capability))
				coretest.Must(t, r.stage(first, capability))
				wantContent(t, filepath.Join(first.staging, "file"), "first")
				wantContent(t, filepath.Join(second.staging, "file"), "second")
				coretest.Must(t, r.unstage(second))
				coretest.Must(t, r.unstage(first))
			})
		}
	}
}

// The filesystem of a volume that was made from a smaller volume's snapshot grows once, to the size of the volume.
func TestNodeGrowsFilesystem(t *testing.T) {
	t.Parallel()
	for _, fsType := range filesystem.Types() {
		t.Run(fsType, func(t *testing.T) {
			t.Parallel()
			r := newNodeRig(t)
			source := r.newVolume(diskA)
			capability := filesystemVolume(fsType, writer)
			coretest.Must(t, r.stage(source, capability))
			coretest.Must(t, os.WriteFile(filepath.Join(source.staging, "file"), []byte("data"), 0o600))
			r.run("sync", "-f", source.staging)
			// Like a snapshot of a mounted filesystem: the journal is not replayed.
			v := r.restore(source, diskB, 3*volumeBytes)
			coretest.Must(t, r.unstage(source))
			coretest.Must(t, r.guests.Unplug(guestID, source.id))

			total := func() int64 {
				t.Helper()
				stats, err := r.stats(v.id, v.staging, "")
				coretest.Must(t, err)
				return stats.GetUsage()[0].GetTotal()
			}
			readOnly := filesystemVolume(fsType, writer, "ro")
			coretest.Must(t, r.stage(v, readOnly))
			if size := total(); size > volumeBytes {
				t.Errorf("mounted read-only, the filesystem was grown to %d bytes", size)
			}
			coretest.Must(t, r.unstage(v))

			coretest.Must(t, r.stage(v, capability))
			if size := total(); size < 3*volumeBytes*8/10 {
				t.Errorf("total %d bytes, want most of %d", size, 3*volumeBytes)
			}
			wantContent(t, filepath.Join(v.staging, "file"), "data")
			coretest.Must(t, r.stage(v, capability))
			coretest.Must(t, r.unstage(v))
			coretest.Must(t, r.stage(v, capability))
			wantContent(t, filepath.Join(v.staging, "file"), "data")
			if times := strings.Count(r.log.String(), "grew the filesystem"); times != 1 {
				t.Errorf("grown %d times, want once", times)
			}
			coretest.Must(t, r.unstage(v))
		})
		t.Run(fsType+", mounted and not grown yet", func(t *testing.T) {
			t.Parallel()
			r := newNodeRig(t)
			source := r.newVolume(diskA)
			capability := filesystemVolume(fsType, writer)
			coretest.Must(t, r.stage(source, capability))
			coretest.Must(t, r.unstage(source))
			v := r.restore(source, diskB, 2*volumeBytes)
			coretest.Must(t, r.guests.Unplug(guestID, source.id))
			r.run("mount", "-t", fsType, r.node(v), v.staging)
			coretest.Must(t, r.stage(v, capability))
			if times := strings.Count(r.log.String(), "grew the filesystem"); times != 1 {
				t.Errorf("grown %d times, want once", times)
			}
			coretest.Must(t, r.unstage(v))
		})
		t.Run(fsType+", larger than its disk", func(t *testing.T) {
			t.Parallel()
			r := newNodeRig(t)
			source := r.newVolume(diskA)
			capability := filesystemVolume(fsType, writer)
			coretest.Must(t, r.stage(source, capability))
			coretest.Must(t, r.unstage(source))
			v := r.restore(source, diskB, volumeBytes-32<<20)
			coretest.Must(t, r.guests.Unplug(guestID, source.id))
			before := r.digest(v)
			coretest.WantCode(t, r.stage(v, capability), codes.FailedPrecondition)
			r.wantMounts()
			if r.digest(v) != before {
				t.Error("the disk was written to")
			}
		})
	}
}

// The plugin checks a clean filesystem only if the kernel refuses to mount it.
func TestNodeChecksWhatTheKernelRefuses(t *testing.T) {
	t.Parallel()
	made := func(t *testing.T, fsType string) (*nodeRig, *volume) {
		t.Helper()
		r := newNodeRig(t)
		v := r.newVolume(diskA)
		coretest.Must(t, r.stage(v, filesystemVolume(fsType, writer)))
		coretest.Must(t, os.WriteFile(filepath.Join(v.staging, "file"), []byte("data"), 0o600))
		coretest.Must(t, r.unstage(v))
		return r, v
	}
	capability := filesystemVolume("", writer)
	t.Run("ext4 with errors that e2fsck -p repairs", func(t *testing.T) {
		t.Parallel()
		r, v := made(t, "ext4")
		// The root folder's inode gets a wrong checksum.
		r.run("debugfs", "-w", "-n", "-R", "set_inode_field <2> checksum 0x1234", r.node(v))
		coretest.WantCode(t, r.stage(v, filesystemVolume("", writer, "ro")), codes.FailedPrecondition)
		if strings.Contains(r.log.String(), "checking a filesystem") {
			t.Error("repaired for a read-only mount")
		}
		coretest.Must(t, r.stage(v, capability))
		wantContent(t, filepath.Join(v.staging, "file"), "data")
		coretest.Must(t, r.unstage(v))
	})
	t.Run("ext4 with errors that e2fsck -p does not repair", func(t *testing.T) {
		t.Parallel()
		r, v := made(t, "ext4")
		r.run("debugfs", "-w", "-n", "-R", "clri <2>", r.node(v))
		coretest.WantCode(t, r.stage(v, capability), codes.FailedPrecondition, "e2fsck")
		r.wantMounts()
	})
	t.Run("xfs", func(t *testing.T) {
		t.Parallel()
		r, v := made(t, "xfs")
		r.run("xfs_db", "-x", "-c", "sb 0", "-c", "addr rootino", "-c", "fuzz -d core.magic zeroes", r.node(v))
		coretest.WantCode(t, r.stage(v, capability), codes.FailedPrecondition, "xfs_repair")
		r.wantMounts()
	})
	for _, fsType := range filesystem.Types() {
		t.Run("a journal to replay, "+fsType, func(t *testing.T) {
			t.Parallel()
			r := newNodeRig(t)
			source := r.newVolume(diskA)
			coretest.Must(t, r.stage(source, filesystemVolume(fsType, writer)))
			coretest.Must(t, os.WriteFile(filepath.Join(source.staging, "file"), []byte("data"), 0o600))
			r.run("sync", "-f", source.staging)
			v := r.restore(source, diskB, volumeBytes)
			coretest.Must(t, r.unstage(source))
			coretest.Must(t, r.guests.Unplug(guestID, source.id))
			coretest.Must(t, r.stage(v, capability))
			wantContent(t, filepath.Join(v.staging, "file"), "data")
			coretest.Must(t, r.unstage(v))
		})
	}
}

// A snapshot of a disk in use has a journal to replay. On a read-only disk, nothing changes it.
func TestNodeReadOnlyDiskOfDirtySnapshot(t *testing.T) {
	t.Parallel()
	for _, fsType := range filesystem.Types() {
		t.Run(fsType, func(t *testing.T) {
			t.Parallel()
			r := newNodeRig(t)
			source := r.newVolume(diskA)
			coretest.Must(t, r.stage(source, filesystemVolume(fsType, writer)))
			coretest.Must(t, os.WriteFile(filepath.Join(source.staging, "file"), []byte("data"), 0o600))
			r.run("sync", "-f", source.staging)
			if fsType != "btrfs" {
				// Only the journal contains this file.
				coretest.Must(t, os.WriteFile(filepath.Join(source.staging, "later"), []byte("data"), 0o600))
			}
			v := r.restore(source, diskB, volumeBytes)
			v.publish[rpc.KeyReadOnly] = "true"
			coretest.Must(t, r.unstage(source))
			coretest.Must(t, r.guests.Unplug(guestID, source.id))
			before := r.digest(v)
			capability := filesystemVolume("", readerOnly)
			coretest.Must(t, r.stage(v, capability))
			coretest.Must(t, r.publish(v, "target", capability, true))
			if fsType == "btrfs" {
				wantContent(t, r.path("target/file"), "data")
			} else if _, err := os.ReadDir(r.path("target")); err != nil {
				t.Error(err)
			}
			if err := os.WriteFile(r.path("target/new"), nil, 0o600); err == nil {
				t.Error("a file was written to a read-only disk")
			}
			if file, err := os.OpenFile(r.node(v), os.O_WRONLY, 0); err == nil {
				_, err = file.WriteAt([]byte("x"), 0)
				if err := errors.Join(err, file.Close()); err == nil {
					t.Error("a write to a read-only disk succeeded")
				}
			}
			coretest.Must(t, r.unpublish(v, "target"))
			coretest.Must(t, r.unstage(v))
			if r.digest(v) != before {
				t.Error("the disk was written to")
			}
		})
	}
}

// extSuperBytes is the place and the length of the superblock of ext.
const extSuperBytes = 1024

// super returns the superblock of an ext.
func (r *nodeRig) super(v *volume) []byte {
	r.t.Helper()
	file, err := os.Open(r.node(v))
	coretest.Must(r.t, err)
	defer file.Close()
	block := make([]byte, extSuperBytes)
	_, err = file.ReadAt(block, extSuperBytes)
	coretest.Must(r.t, err)
	return block
}

// device returns the disk of diskA.
func (r *nodeRig) device() device.Device {
	r.t.Helper()
	dev, err := r.roots().
		WaitForDisk(r.t.Context(), device.ExpectedDisk{Serial: diskA, SizeBytes: volumeBytes}, time.Second)
	coretest.Must(r.t, err)
	return dev
}

// partlyWritten returns a superblock whose first pieces only were written by a program that was killed: the program
// writes each range of changed words by itself. It returns the number of all pieces, too.
func partlyWritten(old, final []byte, written int) (mixed []byte, pieces int) {
	mixed = slices.Clone(old)
	for i := 0; i < len(old); i += 2 {
		if old[i] == final[i] && old[i+1] == final[i+1] {
			continue
		}
		end := i
		for end < len(old) && (old[end] != final[end] || old[end+1] != final[end+1]) {
			end += 2
		}
		if pieces++; pieces <= written {
			copy(mixed[i:end], final[i:end])
		}
		i = end - 2
	}
	return mixed, pieces
}

// eachPiece calls interrupt for each number of written pieces.
func eachPiece(t *testing.T, atLeast int, interrupt func(t *testing.T, written int) (pieces int)) {
	t.Helper()
	pieces := interrupt(t, 0)
	for written := 1; written < pieces; written++ {
		t.Run(fmt.Sprintf("after %d pieces", written), func(t *testing.T) {
			t.Parallel()
			interrupt(t, written)
		})
	}
	if pieces < atLeast {
		t.Errorf("the superblock is written in %d pieces, too few for this test", pieces)
	}
}

// wantNoWork checks that the disk of diskA has no marker of work.
func (r *nodeRig) wantNoWork(v *volume) {
	r.t.Helper()
	if work, err := device.InterruptedWork(r.device()); err != nil || work != device.NoWork {
		r.t.Errorf("the disk has a marker of %q, %v", work, err)
	}
}

// resize2fs writes the superblock last, in small pieces. If it is killed between two pieces, the superblock shows
// neither the size of the filesystem nor that it is clean. The data is still there.
func TestNodeGrowthInterruptedInTheSuperblock(t *testing.T) {
	t.Parallel()
	const mkfsBytes = 64 << 20
	eachPiece(t, 5, func(t *testing.T, written int) int {
		r := newNodeRig(t)
		v := r.newVolume(diskA)
		r.run(
			"mkfs.ext4",
			"-q",
			"-U",
			mount.FilesystemUUID(uuid.MustParse(v.id)).String(),
			r.node(v),
			fmt.Sprint(mkfsBytes>>10),
		)
		r.run("mount", r.node(v), v.staging)
		coretest.Must(t, os.WriteFile(filepath.Join(v.staging, "file"), []byte("data"), 0o600))
		r.umountAndWait(v, v.staging)
		old := r.super(v)
		coretest.Must(t, device.WriteWorkMarker(r.device(), uuid.MustParse(v.id), device.Growing))
		r.run("e2fsck", "-f", "-p", r.node(v))
		r.run("resize2fs", r.node(v))
		mixed, pieces := partlyWritten(old, r.super(v), written)
		r.poke(v, extSuperBytes, string(mixed))

		coretest.Must(t, r.stage(v, filesystemVolume("ext4", writer)))
		wantContent(t, filepath.Join(v.staging, "file"), "data")
		stats, err := r.stats(v.id, v.staging, "")
		coretest.Must(t, err)
		if size := stats.GetUsage()[0].GetTotal(); size < volumeBytes*8/10 {
			t.Errorf("after %d of %d pieces: total %d bytes, want most of %d", written, pieces, size, volumeBytes)
		}
		coretest.Must(t, r.unstage(v))
		r.wantNoWork(v)
		r.run("e2fsck", "-f", "-n", r.node(v))
		return pieces
	})
}

// e2fsck writes the superblock last, in small pieces, its checksum at the end. If it is killed between two pieces, a
// later e2fsck -p refuses the superblock. The plugin corrects the checksum if it knows that a check was interrupted.
func TestNodeCheckInterruptedInTheSuperblock(t *testing.T) {
	t.Parallel()
	capability := filesystemVolume("", writer)
	eachPiece(t, 3, func(t *testing.T, written int) int {
		r := newNodeRig(t)
		source := r.newVolume(diskB)
		coretest.Must(t, r.stage(source, capability))
		coretest.Must(t, os.WriteFile(filepath.Join(source.staging, "file"), []byte("data"), 0o600))
		r.run("sync", "-f", source.staging)
		v := r.afterPowerCut(source, diskA, volumeBytes)
		old := r.super(v)
		r.run("e2fsck", "-p", r.node(v))
		mixed, pieces := partlyWritten(old, r.super(v), written)
		r.poke(v, extSuperBytes, string(mixed))

		// Without the marker, the plugin does not know why the checksum is wrong. It does not start to know it either.
		for range 2 {
			if written > 0 && written < pieces {
				r.refused(func() error { return r.stage(v, capability) }, codes.Internal, "e2fsck")
			}
		}
		coretest.Must(t, device.WriteWorkMarker(r.device(), uuid.MustParse(v.id), device.Checking))
		coretest.Must(t, r.stage(v, capability))
		wantContent(t, filepath.Join(v.staging, "file"), "data")
		coretest.Must(t, r.unstage(v))
		r.wantNoWork(v)
		r.run("e2fsck", "-f", "-n", r.node(v))
		return pieces
	})
}

// interrupted makes an ext4 smaller than its disk, as resize2fs or e2fsck leaves it when it is killed: with its marker,
// and a superblock with a wrong checksum.
func (r *nodeRig) interrupted(v *volume, work device.Work) {
	r.t.Helper()
	r.run("mkfs.ext4", "-q", "-U", mount.FilesystemUUID(uuid.MustParse(v.id)).String(), r.node(v), "65536")
	r.run("mount", r.node(v), v.staging)
	coretest.Must(r.t, os.WriteFile(filepath.Join(v.staging, "file"), []byte("data"), 0o600))
	r.umountAndWait(v, v.staging)
	coretest.Must(r.t, device.WriteWorkMarker(r.device(), uuid.MustParse(v.id), work))
	r.poke(v, extSuperBytes+0x30, "time") // s_wtime
}

func eachWork(t *testing.T, test func(r *nodeRig, v *volume)) {
	t.Helper()
	for _, work := range []device.Work{device.Growing, device.Checking} {
		t.Run(string(work), func(t *testing.T) {
			t.Parallel()
			r := newNodeRig(t)
			v := r.newVolume(diskA)
			r.interrupted(v, work)
			test(r, v)
		})
	}
}

// A snapshot was taken after a growth or a check was interrupted. The disk that is made from it has the marker too,
// with the UUID of the first disk.
func TestNodeCopyOfAnInterruptedDisk(t *testing.T) {
	t.Parallel()
	eachWork(t, func(r *nodeRig, source *volume) {
		v := r.restore(source, diskB, volumeBytes)
		r.unplug(source)
		coretest.Must(r.t, r.stage(v, filesystemVolume("", writer)))
		wantContent(r.t, filepath.Join(v.staging, "file"), "data")
		coretest.Must(r.t, r.unstage(v))
		r.run("e2fsck", "-f", "-n", r.node(v))
		head := make([]byte, extSuperBytes)
		file, err := os.Open(r.node(v))
		coretest.Must(r.t, err)
		defer file.Close()
		_, err = file.ReadAt(head, 0)
		coretest.Must(r.t, err)
		if !bytes.Equal(head, make([]byte, extSuperBytes)) {
			r.t.Errorf("the first KiB holds %q", head)
		}
	})
}

// A half-grown filesystem is not mounted read-only as it is.
func TestNodeInterruptedWorkReadOnly(t *testing.T) {
	t.Parallel()
	eachWork(t, func(r *nodeRig, v *volume) {
		v.publish[rpc.KeyReadOnly] = "true"
		before := r.digest(v)
		r.refused(
			func() error { return r.stage(v, filesystemVolume("", writer)) },
			codes.FailedPrecondition,
			"publish the volume writable once",
		)
		if r.digest(v) != before {
			r.t.Error("the disk was written to")
		}
		v.publish[rpc.KeyReadOnly] = "false"
		coretest.Must(r.t, r.stage(v, filesystemVolume("", writer, "ro")))
		wantContent(r.t, filepath.Join(v.staging, "file"), "data")
		coretest.Must(r.t, r.unstage(v))
		r.wantNoWork(v)
	})
}

// The superblock of an interrupted filesystem can say anything. Since util-linux 2.39, blkid does not recognise one
// with a wrong checksum; this one it takes for a journal. So the filesystem is repaired before blkid is asked.
func TestNodeRepairsBeforeItAsksBlkid(t *testing.T) {
	t.Parallel()
	r := newNodeRig(t)
	v := r.newVolume(diskA)
	r.interrupted(v, device.Growing)
	r.poke(v, extSuperBytes+0x60, "\x08") // INCOMPAT_JOURNAL_DEV
	coretest.Must(t, r.stage(v, filesystemVolume("", writer)))
	wantContent(t, filepath.Join(v.staging, "file"), "data")
}

// A marker before something that is no ext says nothing.
func TestNodeMarkerOfAnOverwrittenFilesystem(t *testing.T) {
	t.Parallel()
	r := newNodeRig(t)
	v := r.newVolume(diskA)
	r.interrupted(v, device.Growing)
	r.poke(v, extSuperBytes, strings.Repeat("\x00", extSuperBytes))
	r.poke(v, 4086, "SWAPSPACE2")
	before := r.digest(v)
	r.refused(func() error { return r.stage(v, filesystemVolume("", writer)) }, codes.FailedPrecondition)
	if r.digest(v) != before {
		t.Error("the disk was written to")
	}
}

// A volume that was used as raw block may hold anything, also a filesystem that a user has repaired.
func TestNodeRawBlockEndsInterruptedWork(t *testing.T) {
	t.Parallel()
	eachWork(t, func(r *nodeRig, v *volume) {
		coretest.Must(r.t, r.stage(v, rawBlock(writer)))
		r.wantNoWork(v)
		coretest.Must(r.t, r.unstage(v))
	})
}

// mayGrowMounted reports whether this process has CAP_SYS_RESOURCE, which the kernel demands to grow a mounted ext.
func mayGrowMounted(t *testing.T) bool {
	t.Helper()
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	coretest.Must(t, unix.Capget(&header, &data[0]))
	return data[0].Effective&(1<<unix.CAP_SYS_RESOURCE) != 0
}

// Some ext4 do not grow while they are mounted. The plugin grows it unmounted, and mounts it again.
func TestNodeGrowsUnmountedWhereTheKernelRefuses(t *testing.T) {
	t.Parallel()
	const unmounted = "growing the filesystem unmounted"
	total := func(r *nodeRig, v *volume) int64 {
		t.Helper()
		stats, err := r.stats(v.id, v.staging, "")
		coretest.Must(t, err)
		return stats.GetUsage()[0].GetTotal()
	}
	for _, tc := range []struct {
		name    string
		options []string
		refused bool
	}{
		{"the kernel's defaults", nil, false},
		{"sparse_super2", []string{"-O", "sparse_super2"}, true},
		{"no journal", []string{"-O", "^has_journal"}, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			r := newNodeRig(t)
			v := r.newVolume(diskA)
			r.run("mkfs.ext4", append(append([]string{"-q"}, tc.options...), r.node(v), "65536")...)
			r.run("mount", r.node(v), v.staging)
			coretest.Must(t, os.WriteFile(filepath.Join(v.staging, "file"), []byte("data"), 0o600))
			r.umountAndWait(v, v.staging)
			coretest.Must(t, r.stage(v, filesystemVolume("", writer, "noatime")))
			if got := total(r, v); got < volumeBytes*8/10 {
				t.Errorf("total %d bytes, want most of %d", got, volumeBytes)
			}
			wantContent(t, filepath.Join(v.staging, "file"), "data")
			refused := tc.refused || !mayGrowMounted(t)
			if got := strings.Contains(r.log.String(), unmounted); got != refused {
				t.Errorf("grown unmounted: %t, want %t:\n%s", got, refused, r.log.String())
			}
			table, err := mount.ReadTable()
			coretest.Must(t, err)
			if entry, ok := table.At(v.staging); !ok || entry.CountMissing([]string{"noatime"}) > 0 {
				t.Errorf("mounted again without its flags: %v, %t", entry, ok)
			}
			coretest.Must(t, r.unstage(v))
			r.run("e2fsck", "-f", "-n", r.node(v))
		})
	}
	t.Run("not while it is published", func(t *testing.T) {
		t.Parallel()
		r := newNodeRig(t)
		v := r.newVolume(diskA)
		r.run("mkfs.ext4", "-q", "-O", "sparse_super2", r.node(v), "65536")
		r.run("mount", r.node(v), v.staging)
		capability := filesystemVolume("", writer)
		coretest.Must(t, r.publish(v, "target", capability, false))
		coretest.Must(t, r.stage(v, capability))
		r.wantMounts("staging-"+diskA, "target")
		coretest.Must(t, r.unpublish(v, "target"))
		coretest.Must(t, r.stage(v, capability))
		if got := total(r, v); got < volumeBytes*8/10 {
			t.Errorf("total %d bytes, want most of %d", got, volumeBytes)
		}
	})
}

// wantSmall checks whether the node reports a staged volume whose filesystem has not grown to its disk: in the log, as
// a metric, and in the volume's health, also from another process.
func (r *nodeRig) wantSmall(v *volume, small bool, because ...string) {
	r.t.Helper()
	var want []string
	count := 0
	if small {
		want, count = []string{"DEGRADED FilesystemSmall"}, 1
	}
	for _, text := range because {
		if !strings.Contains(r.log.String(), text) {
			r.t.Errorf("the log does not say %q:\n%s", text, r.log.String())
		}
	}
	for range 2 {
		if diff := cmp.Diff(want, r.health(&csi.NodeGetVolumeHealthRequest{VolumeId: v.id})); diff != "" {
			r.t.Errorf("health (-want +got):\n%s", diff)
		}
		if counts, err := r.service.Volumes(); err != nil || counts.Small != count {
			r.t.Errorf("%d small volumes, %v; want %d", counts.Small, err, count)
		}
		r.start()
	}
}

// An ext4 that cannot grow is staged with its old size, and grows when it can. If resize2fs must move blocks, the
// plugin does not run it. Killed at the wrong moment, it has moved a part of them: e2fsck -y then makes an ext4 that
// lacks most of the files. An ext4 with bigalloc grows only while it is mounted, and one with sparse_super2 only while
// it is not.
func TestNodeStagesWhatCannotGrow(t *testing.T) {
	t.Parallel()
	const warning = "smaller than its disk"
	byHand := func(r *nodeRig, v *volume) {
		r.run("e2fsck", "-f", "-p", r.node(v))
		r.run("resize2fs", r.node(v))
	}
	for name, tc := range map[string]struct {
		options string
		because string
		repair  func(*nodeRig, *volume)
	}{
		"without a journal":     {"^has_journal,^resize_inode", "could lose data", byHand},
		"refused by the kernel": {"sparse_super2,^resize_inode", "could lose data", byHand},
		"bigalloc":              {"sparse_super2,bigalloc", "bigalloc", nil}, // resize2fs -f leaves wrong counts
		"no flex_bg":            {"sparse_super2,^flex_bg", "marked as free", nil},
		"a boot loader": {"sparse_super2", "manually", func(r *nodeRig, v *volume) {
			r.poke(v, 100, strings.Repeat("\x00", len("boot loader")))
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newNodeRig(t)
			v := r.newVolume(diskA)
			capability := filesystemVolume("ext4", writer)
			// With blocks of 1 KiB, the descriptors of 64 MiB fill one block, and those of the whole disk need three.
			r.run("mkfs.ext4", "-q", "-b", "1024", "-O", tc.options, r.node(v), "65536")
			if name == "a boot loader" {
				r.poke(v, 100, "boot loader")
			}
			for range 2 {
				coretest.Must(t, r.stage(v, capability))
				r.wantMounts("staging-" + diskA)
				coretest.Must(t, os.WriteFile(filepath.Join(v.staging, "file"), []byte("data"), 0o600))
				r.wantSmall(v, true, warning, tc.because)
				coretest.Must(t, r.stage(v, capability))
				r.wantSmall(v, true)
				if size, err := device.FilesystemBytes(r.device(), "ext4"); err != nil || size != 64<<20 {
					t.Errorf("the filesystem has %d bytes, %v; want those from before", size, err)
				}
				coretest.Must(t, r.unstage(v))
				r.wantSmall(v, false)
			}
			r.wantNoWork(v)
			if tc.repair != nil {
				tc.repair(r, v)
			}
			coretest.Must(t, r.stage(v, capability))
			wantContent(t, filepath.Join(v.staging, "file"), "data")
			r.wantSmall(v, tc.repair == nil)
			coretest.Must(t, r.unstage(v))
			r.run("e2fsck", "-f", "-n", r.node(v))
		})
	}
}

// The plugin does not overwrite data before the filesystem, such as a boot loader.
func TestNodeGrowthSparesABootLoader(t *testing.T) {
	t.Parallel()
	r := newNodeRig(t)
	v := r.newVolume(diskA)
	r.run("mkfs.ext4", "-q", "-O", "sparse_super2", r.node(v), "65536")
	r.poke(v, 100, "boot loader")
	coretest.Must(t, r.stage(v, filesystemVolume("ext4", writer)))
	coretest.Must(t, r.unstage(v))
	file, err := os.Open(r.node(v))
	coretest.Must(t, err)
	defer file.Close()
	head := make([]byte, 11)
	_, err = file.ReadAt(head, 100)
	coretest.Must(t, err)
	if string(head) != "boot loader" {
		t.Errorf("the first KiB holds %q", head)
	}
}

// What an interrupted format left is found after the volume has grown: the filesystem is made again. A workload that
// gets the disk as raw block ends that.
func TestNodeFormatInterruptedBeforeGrowth(t *testing.T) {
	for _, raw := range []bool{false, true} {
		t.Run(fmt.Sprintf("raw block first %t", raw), func(t *testing.T) {
			r := newNodeRig(t)
			v := r.newVolume(diskA)
			r.writeFormatMarker(v)
			r.poke(v, 4096, "half a filesystem")
			r.unplug(v)
			grown := int64(volumeBytes + 1<<30)
			coretest.Must(t, os.Truncate(r.path("disks/"+v.id+".disk"), grown))
			coretest.Must(t, r.guests.Plug(
				guestID, simrack.GuestDisk{ID: v.id, Name: v.disk, Slot: 1, SizeBytes: grown, BlockSize: 512}))
			v.publish[rpc.KeySizeBytes], v.publish[rpc.KeyFirstBytes] = fmt.Sprint(grown), fmt.Sprint(volumeBytes)
			delete(v.volume, rpc.KeySizeBytes)
			if raw {
				coretest.Must(t, r.stage(v, rawBlock(writer)))
				coretest.Must(t, r.unstage(v))
				coretest.WantCode(t, r.stage(v, filesystemVolume("ext4", writer)), codes.FailedPrecondition, "it holds data")
				return
			}
			coretest.Must(t, r.stage(v, filesystemVolume("ext4", writer)))
			coretest.Must(t, r.unstage(v))
		})
	}
}

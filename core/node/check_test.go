// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package node_test

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device/devicetest"
	"github.com/oxidecomputer/oxide-csi-plugin/core/hostexec"
	"github.com/oxidecomputer/oxide-csi-plugin/test/coretest"
)

// newExt attaches a disk with an ext4 that a user made by hand with these options of mkfs.
func (r *nodeRig) newExt(disk string, options ...string) *volume {
	r.t.Helper()
	v := r.newVolume(disk)
	r.run("mkfs.ext4", append(append([]string{"-q"}, options...), r.node(v))...)
	return v
}

// superblock returns what dumpe2fs says about the disk's superblock.
func (r *nodeRig) superblock(v *volume) string {
	r.t.Helper()
	result, err := hostexec.Run(r.t.Context(), "dumpe2fs", "-h", r.node(v))
	coretest.Must(r.t, err)
	return result.Stdout
}

// After a power cut, an ext4 without journal has files that its bitmaps do not know. Mounted as it is, new files take
// the blocks of the old ones.
func TestNodePowerCutWithoutJournal(t *testing.T) {
	t.Parallel()
	const files = 40
	content := func(kind string, i int) []byte {
		return bytes.Repeat(fmt.Appendf(nil, "%s %02d ", kind, i), 8<<10)
	}
	write := func(v *volume, kind string) {
		t.Helper()
		folder, err := os.Open(v.staging)
		coretest.Must(t, err)
		defer folder.Close()
		for i := range files {
			file, err := os.Create(filepath.Join(v.staging, fmt.Sprint(kind, i)))
			coretest.Must(t, err)
			_, err = file.Write(content(kind, i))
			coretest.Must(t, err)
			coretest.Must(t, file.Sync())
			coretest.Must(t, file.Close())
			coretest.Must(t, folder.Sync())
		}
	}
	r := newNodeRig(t)
	source := r.newExt(diskA, "-O", "^has_journal")
	capability := filesystemVolume("", writer)
	coretest.Must(t, r.stage(source, capability))
	write(source, "old")
	v := r.afterPowerCut(source, diskB, volumeBytes)
	coretest.Must(t, r.unstage(source))
	err := r.stage(v, capability)
	if devicetest.StopsWithoutJournal(t) {
		if status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "run e2fsck -f ") {
			t.Errorf("%v, want FAILED_PRECONDITION with advice", err)
		}
		devicetest.RepairByHand(t, r.node(v))
		err = r.stage(v, capability)
	}
	coretest.Must(t, err)
	write(v, "new")
	coretest.Must(t, r.unstage(v))
	coretest.Must(t, r.stage(v, capability))
	lost := 0
	for _, kind := range []string{"old", "new"} {
		for i := range files {
			got, err := os.ReadFile(filepath.Join(v.staging, fmt.Sprint(kind, i)))
			if err != nil || !bytes.Equal(got, content(kind, i)) {
				lost++
			}
		}
	}
	if lost > 0 {
		t.Errorf("%d of %d fsynced files are lost", lost, 2*files)
	}
	coretest.Must(t, r.unstage(v))
	r.run("e2fsck", "-f", "-n", r.node(v))
}

// An ext4 is checked before a writable mount unless its superblock says that it is clean.
func TestNodeChecksUnclean(t *testing.T) {
	t.Parallel()
	const checked = "checking a filesystem"
	capability := filesystemVolume("", writer)
	for _, tc := range []struct {
		name    string
		options []string
		spoil   []string
		reason  string
	}{
		{"clean", nil, nil, ""},
		{"error flag", nil, []string{"set_super_value state 3"}, "errors"},
		{"not unmounted", nil, []string{"set_super_value state 0"}, "not unmounted"},
		{"journal to replay", nil, []string{"feature +needs_recovery"}, "journal to replay"},
		{"no journal", []string{"-O", "^has_journal"}, nil, "no journal"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			r := newNodeRig(t)
			v := r.newExt(diskA, tc.options...)
			for _, command := range tc.spoil {
				r.run("debugfs", "-w", "-R", command, r.node(v))
			}
			coretest.Must(t, r.stage(v, filesystemVolume("", writer, "ro")))
			coretest.Must(t, r.unstage(v))
			if strings.Contains(r.log.String(), checked) {
				t.Error("checked before a read-only mount")
			}
			for _, command := range tc.spoil { // the kernel has replayed the journal
				r.run("debugfs", "-w", "-R", command, r.node(v))
			}
			coretest.Must(t, r.stage(v, capability))
			log := r.log.String()
			if strings.Contains(log, checked) != (tc.reason != "") || !strings.Contains(log, tc.reason) {
				t.Errorf("want a check because of %q:\n%s", tc.reason, log)
			}
			coretest.Must(t, r.unstage(v))
			if super := r.superblock(v); !strings.Contains(super, "Filesystem state:         clean\n") {
				t.Error("the superblock is not clean")
			}
		})
	}
}

// What e2fsck -p does not repair is not mounted. The answer names the command to run, also when the call is repeated.
func TestNodeRefusesDamagedExt(t *testing.T) {
	t.Parallel()
	r := newNodeRig(t)
	v := r.newExt(diskA)
	r.run("debugfs", "-w", "-R", "set_super_value state 3", r.node(v))
	r.run("debugfs", "-w", "-n", "-R", "clri <2>", r.node(v))
	for range 2 {
		err := r.stage(v, filesystemVolume("", writer))
		coretest.WantCode(t, err, codes.FailedPrecondition, "e2fsck -f "+r.node(v))
		if len(err.Error()) > 300 { // 250 and gRPC's own words
			t.Errorf("%d bytes: %v", len(err.Error()), err)
		}
		r.wantMounts()
	}
}

// A superblock with errors=panic would let an error of one volume end the whole node.
func TestNodeNeverPanics(t *testing.T) {
	t.Parallel()
	r := newNodeRig(t)
	v := r.newExt(diskA, "-e", "panic")
	for _, flags := range [][]string{nil, {"noatime"}, {"ro"}} {
		coretest.Must(t, r.stage(v, filesystemVolume("", writer, flags...)))
		table, err := os.ReadFile("/proc/self/mounts")
		coretest.Must(t, err)
		for line := range strings.Lines(string(table)) {
			if strings.Contains(line, " "+v.staging+" ") && !strings.Contains(line, "errors=remount-ro") {
				t.Errorf("flags %q: the superblock decides: %s", flags, line)
			}
		}
		coretest.Must(t, r.unstage(v))
	}
	coretest.WantCode(
		t, r.stage(v, filesystemVolume("", writer, "errors=panic")), codes.InvalidArgument, "errors")
}

// A check outlives its RPC, and the repetition of the RPC gets its result. e2fsck of a filesystem with multi-mount
// protection waits 11 s to see whether another host uses it, so the test needs that time.
func TestNodeCheckOutlivesItsRPC(t *testing.T) {
	t.Parallel()
	brief := func(call func(context.Context) error) func() error {
		return func() error {
			ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
			defer cancel()
			return call(ctx)
		}
	}
	r := newNodeRig(t)
	v := r.newExt(diskA, "-O", "mmp")
	r.run("debugfs", "-w", "-R", "set_super_value state 0", r.node(v))
	// Another host has used the filesystem, and stopped without an unmount.
	r.run("debugfs", "-w", "-R", "set_mmp_value seq 4711", r.node(v))
	capability := filesystemVolume("", writer)
	stage := func(ctx context.Context) error {
		_, err := r.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{
			VolumeId: v.id, StagingTargetPath: v.staging, VolumeCapability: capability,
			PublishContext: v.publish, VolumeContext: v.volume,
		})
		return err
	}
	unstage := func(ctx context.Context) error {
		_, err := r.NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{VolumeId: v.id, StagingTargetPath: v.staging})
		return err
	}
	r.refused(brief(stage), codes.Aborted, "being checked", diskA)
	r.refused(brief(unstage), codes.Aborted, "being checked")
	// Another process of the plugin knows nothing of the check, and waits for the volume's lock.
	first := r.NodeClient
	r.start()
	r.refused(brief(stage), codes.Aborted, "still running")
	r.NodeClient = first
	coretest.Must(t, stage(t.Context()))
	coretest.Must(t, unstage(t.Context()))
	if checks := strings.Count(r.log.String(), "checking a filesystem"); checks != 1 {
		t.Errorf("%d checks, want 1:\n%s", checks, r.log.String())
	}
}

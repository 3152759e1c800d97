// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package node_test

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device/devicetest"
	"github.com/oxidecomputer/oxide-csi-plugin/core/node"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
	"github.com/oxidecomputer/oxide-csi-plugin/test/coretest"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack"
)

// health calls NodeGetVolumeHealth, and returns the statuses and reasons.
func (r *nodeRig) health(req *csi.NodeGetVolumeHealthRequest) (conditions []string) {
	r.t.Helper()
	resp, err := r.NodeGetVolumeHealth(r.t.Context(), req)
	coretest.Must(r.t, err)
	if got := resp.GetVolumeHealth().GetVolumeId(); got != req.GetVolumeId() {
		r.t.Errorf("the answer is about %q, not %q", got, req.GetVolumeId())
	}
	for _, condition := range resp.GetVolumeHealth().GetHealthStatuses() {
		conditions = append(conditions, condition.GetStatus().String()+" "+condition.GetReason())
		if message := condition.GetMessage(); message == "" || strings.Contains(message, "\n") {
			r.t.Errorf("%s: message %q", condition.GetReason(), message)
		}
	}
	return conditions
}

// wantHealth checks a volume's health with each combination of paths in the request. It asks the process that staged
// the volume, and another process.
func (r *nodeRig) wantHealth(v *volume, target string, want ...string) {
	r.t.Helper()
	for _, who := range []string{"the process that staged it", "another process"} {
		if who == "another process" {
			r.start()
		}
		for name, req := range map[string]*csi.NodeGetVolumeHealthRequest{
			"ID":           {VolumeId: v.id},
			"target":       {VolumeId: v.id, VolumePublishPath: r.path(target)},
			"staging path": {VolumeId: v.id, StagingTargetPath: v.staging},
			"both":         {VolumeId: v.id, VolumePublishPath: r.path(target), StagingTargetPath: v.staging},
		} {
			if name == "ID" && who == "another process" && strings.Contains(strings.Join(want, " "), "DiskGone") {
				continue // a removed disk shows neither its serial nor its filesystem's UUID
			}
			if diff := cmp.Diff(want, r.health(req)); diff != "" {
				r.t.Errorf("request with %s to %s (-want +got):\n%s", name, who, diff)
			}
		}
	}
}

func TestNodeGetVolumeHealth(t *testing.T) {
	for _, tc := range []struct {
		name       string
		capability *csi.VolumeCapability
		harm       func(r *nodeRig, v *volume)
		want       []string
	}{
		{"healthy ext4", filesystemVolume("ext4", writer), nil, nil},
		{"healthy xfs", filesystemVolume("xfs", writer), nil, nil},
		{"healthy btrfs", filesystemVolume("btrfs", writer), nil, nil},
		{"healthy raw block", rawBlock(writer), nil, nil},
		{"ext4, disk gone", filesystemVolume("ext4", writer), (*nodeRig).unplug, []string{"INACCESSIBLE DiskGone"}},
		{"xfs, disk gone", filesystemVolume("xfs", writer), (*nodeRig).unplug, []string{"INACCESSIBLE DiskGone"}},
		{"raw block, disk gone", rawBlock(writer), (*nodeRig).unplug, []string{"INACCESSIBLE DiskGone"}},
		{"disk gone and attached again", filesystemVolume("ext4", writer), func(r *nodeRig, v *volume) { r.unplug(v); r.plug(v) }, []string{"INACCESSIBLE DiskGone"}},
		{"xfs that shut itself down", filesystemVolume("xfs", writer), func(r *nodeRig, v *volume) {
			r.run("xfs_io", "-x", "-c", "shutdown", v.staging)
		}, []string{"INACCESSIBLE FilesystemShutdown"}},
		{"xfs with a damaged root folder", filesystemVolume("xfs", writer), (*nodeRig).damageRoot, []string{"DATA_LOSS FilesystemCorrupted"}},
		{"controller not live", filesystemVolume("ext4", writer), func(r *nodeRig, v *volume) {
			r.setState(v, "resetting")
		}, []string{"INACCESSIBLE ControllerNotLive"}},
		// An ext4 initialises itself in the background for a while. If that meets a read error,
		// the filesystem reports it too.
		{"read errors", filesystemVolume("xfs", writer), func(r *nodeRig, v *volume) {
			coretest.Must(r.t, os.Truncate(r.path("disks/"+v.id+".disk"), 0))
		}, []string{"INACCESSIBLE DiskNotReadable"}},
		{"ext4 with damage, still writable", filesystemVolume("ext4", writer), (*nodeRig).breakFilesystem, []string{"DATA_LOSS FilesystemCorrupted"}},
		{"ext4 with damage, read-only because of it", filesystemVolume("ext4", writer, "errors=remount-ro"), (*nodeRig).breakFilesystem,
			[]string{"DATA_LOSS FilesystemCorrupted", "DEGRADED FilesystemReadOnly"}},
		{"read-only on purpose", filesystemVolume("ext4", writer), func(r *nodeRig, v *volume) {
			coretest.Must(r.t, r.unpublish(v, "target"))
			coretest.Must(r.t, r.unstage(v))
			coretest.Must(r.t, r.stage(v, filesystemVolume("ext4", writer, "ro")))
			coretest.Must(r.t, r.publish(v, "target", filesystemVolume("ext4", writer, "ro"), false))
		}, nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r := newNodeRig(t)
			v := r.newVolume(diskA)
			coretest.Must(t, r.stage(v, tc.capability))
			coretest.Must(t, r.publish(v, "target", tc.capability, false))
			if tc.harm != nil {
				tc.harm(r, v)
			}
			r.wantHealth(v, "target", tc.want...)
			if strings.HasPrefix(tc.name, "read errors") {
				coretest.Must(t, os.Truncate(r.path("disks/"+v.id+".disk"), volumeBytes)) // so that the filesystem can be unmounted
			}
		})
	}
}

// damageRoot damages the root folder of a published xfs on the disk.
func (r *nodeRig) damageRoot(v *volume) {
	r.t.Helper()
	capability := filesystemVolume("xfs", writer)
	for i := range 200 { // too many for the folder's inode
		coretest.Must(r.t, os.WriteFile(filepath.Join(v.staging, fmt.Sprint("file-", i)), nil, 0o600))
	}
	coretest.Must(r.t, r.unpublish(v, "target"))
	coretest.Must(r.t, r.unstage(v))
	out := devicetest.Run(
		r.t, "xfs_db", "-r", "-c", "sb 0", "-c", "addr rootino", "-c", "dblock 0", "-c", "daddr", r.node(v))
	var sector int64
	_, place, _ := strings.Cut(out, "daddr is ") // "current daddr is 120", or "datadev daddr is 120"
	if _, err := fmt.Sscan(place, &sector); err != nil {
		r.t.Fatalf("%v: %s", err, out)
	}
	r.poke(v, sector*512, "damage")
	coretest.Must(r.t, r.stage(v, capability))
	coretest.Must(r.t, r.publish(v, "target", capability, false))
}

// setState sets the state that sysfs shows for the disk's controller.
func (r *nodeRig) setState(v *volume, state string) {
	r.t.Helper()
	file, err := filepath.EvalSymlinks(filepath.Join(r.roots().Sys, "block", filepath.Base(r.node(v)), "device"))
	coretest.Must(r.t, err)
	coretest.Must(r.t, os.WriteFile(filepath.Join(file, "state"), []byte(state+"\n"), 0o444))
}

// An error in the filesystem is reported until e2fsck has repaired it before a writable mount, on every node.
func TestNodeGetVolumeHealthUntilRepaired(t *testing.T) {
	t.Parallel()
	r := newNodeRig(t)
	v := r.newVolume(diskA)
	capability := filesystemVolume("ext4", writer)
	coretest.Must(t, r.stage(v, capability))
	r.breakFilesystem(v)
	coretest.Must(t, r.unstage(v))
	coretest.Must(t, r.stage(v, filesystemVolume("ext4", writer, "ro")))
	if diff := cmp.Diff(
		[]string{"DATA_LOSS FilesystemCorrupted"},
		r.health(&csi.NodeGetVolumeHealthRequest{VolumeId: v.id}),
	); diff != "" {
		t.Errorf("mounted again (-want +got):\n%s", diff)
	}
	coretest.Must(t, r.unstage(v))
	coretest.Must(t, r.stage(v, capability))
	if got := r.health(&csi.NodeGetVolumeHealthRequest{VolumeId: v.id}); got != nil {
		t.Errorf("repaired: %v", got)
	}
}

// The reason why a volume could not be staged is reported until it is staged or unstaged.
func TestNodeGetVolumeHealthNotStaged(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name    string
		prepare func(r *nodeRig, v *volume)
		want    []string
	}{
		{"the disk is not attached", (*nodeRig).unplug, []string{"INACCESSIBLE DiskNotFound"}},
		{"another size", func(_ *nodeRig, v *volume) { v.publish[rpc.KeySizeBytes] = fmt.Sprint(coretest.GiB) }, []string{"INACCESSIBLE DiskMismatch"}},
		{"a disk with the same serial", func(r *nodeRig, v *volume) { r.plugDuplicate() }, []string{"INACCESSIBLE DiskNotUnique"}},
		{"not readable", func(r *nodeRig, v *volume) {
			coretest.Must(r.t, os.Truncate(r.path("disks/"+v.id+".disk"), 0))
		}, []string{"INACCESSIBLE DiskNotReadable"}},
		{"an invalid request", func(_ *nodeRig, v *volume) { v.staging += "/no/such/folder" }, nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			r := newNodeRig(t, func(opts *node.Options) {
				if tc.name == "a disk with the same serial" {
					opts.DeviceTimeout = time.Minute
				}
			})
			v := r.newVolume(diskA)
			good := *v
			good.publish = maps.Clone(v.publish)
			tc.prepare(r, v)
			if err := r.stage(v, filesystemVolume("ext4", writer)); err == nil {
				t.Fatal("the volume was staged")
			}
			req := &csi.NodeGetVolumeHealthRequest{
				VolumeId:          v.id,
				VolumePublishPath: r.path("target"),
				StagingTargetPath: v.staging,
			}
			if diff := cmp.Diff(tc.want, r.health(req)); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			if got := r.health(&csi.NodeGetVolumeHealthRequest{VolumeId: volumeB}); got != nil {
				t.Errorf("another volume: %v", got)
			}
			if tc.name == "another size" {
				coretest.Must(t, r.stage(&good, filesystemVolume("ext4", writer)))
			} else {
				coretest.Must(t, r.unstage(v))
			}
			if got := r.health(req); got != nil {
				t.Errorf("afterwards: %v", got)
			}
		})
	}
}

// plugDuplicate attaches another disk with the same serial as diskA.
func (r *nodeRig) plugDuplicate() {
	r.t.Helper()
	r.makeDisk("twin")
	coretest.Must(
		r.t,
		r.guests.Plug(
			guestID,
			simrack.GuestDisk{ID: "twin", Name: diskA + "-twin", Slot: 5, SizeBytes: volumeBytes, BlockSize: 512},
		),
	)
}

func TestNodeGetVolumeHealthOfUnknown(t *testing.T) {
	t.Parallel()
	r := newNodeRig(t)
	v, w := r.newVolume(diskA), r.newVolume(diskB)
	_, err := r.NodeGetVolumeHealth(t.Context(), &csi.NodeGetVolumeHealthRequest{VolumeId: "no-uuid"})
	coretest.WantCode(t, err, codes.NotFound, "no-uuid")
	if got := r.health(
		&csi.NodeGetVolumeHealthRequest{
			VolumeId:          v.id,
			VolumePublishPath: r.path("no/such"),
			StagingTargetPath: r.path("path"),
		},
	); got != nil {
		t.Errorf("an unknown volume: %v", got)
	}
	// A problem of one volume is not reported for another volume, even if the request has the path of the first.
	coretest.Must(t, r.stage(v, filesystemVolume("ext4", writer)))
	coretest.Must(t, r.stage(w, filesystemVolume("ext4", writer)))
	r.breakFilesystem(w)
	for _, who := range []string{"the process that staged it", "another process"} {
		if got := r.health(&csi.NodeGetVolumeHealthRequest{VolumeId: v.id, StagingTargetPath: w.staging}); got != nil {
			t.Errorf("%s: %v", who, got)
		}
		r.start()
	}
}

func TestNodeGetStorageHealth(t *testing.T) {
	t.Parallel()
	r := newNodeRig(t)
	v, w := r.newVolume(diskA), r.newVolume(diskB)
	want := func(want ...string) []string {
		t.Helper()
		resp, err := r.NodeGetStorageHealth(t.Context(), &csi.NodeGetStorageHealthRequest{})
		coretest.Must(t, err)
		var got, messages []string
		for _, backend := range resp.GetBackendHealth() {
			got = append(got, backend.GetStatus().String()+" "+backend.GetReason())
			messages = append(messages, backend.GetMessage())
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
		return messages
	}
	want()
	r.setState(v, "dead")
	r.setState(w, "connecting")
	// One status has both disks, because the pair of status and reason must not repeat.
	messages := want("STORAGE_DEGRADED ControllerNotLive")
	for _, text := range []string{diskA, "dead", diskB, "connecting"} {
		if !strings.Contains(strings.Join(messages, " "), text) {
			t.Errorf("%q does not mention %q", messages, text)
		}
	}
	r.setState(v, "live")
	r.setState(w, "live")
	r.plugDuplicate()
	if counts, err := r.service.Volumes(); err != nil || counts.FunctionsNotReady != 1 {
		t.Errorf("the metrics have %+v, error %v: want a function that is not ready", counts, err)
	}
	messages = want("STORAGE_DEGRADED FunctionNotUp")
	if !strings.Contains(strings.Join(messages, " "), "0000:00:15.0") {
		t.Errorf("%q does not name the PCI function", messages)
	}
}

// A request for the statistics of a filesystem that a user made succeeds without a staging path.
func TestNodeGetVolumeStatsWithoutStagingPath(t *testing.T) {
	t.Parallel()
	r := newNodeRig(t)
	v, w := r.newVolume(diskA), r.newVolume(diskB)
	for _, volume := range []*volume{v, w} {
		r.run("mkfs.ext4", "-q", r.node(volume))
		coretest.Must(t, r.stage(volume, filesystemVolume("ext4", writer)))
	}
	_, err := r.stats(v.id, w.staging, "")
	coretest.WantCode(t, err, codes.NotFound, "another volume")
	r.start()
	if _, err := r.stats(v.id, v.staging, ""); err != nil {
		t.Error(err)
	}
}

// On a full volume, no number is negative, and blocks that only root can write are not available.
func TestNodeGetVolumeStatsOfFullVolume(t *testing.T) {
	t.Parallel()
	for _, fsType := range []string{"ext4", "xfs"} {
		t.Run(fsType, func(t *testing.T) {
			t.Parallel()
			r := newNodeRig(t)
			v := r.newVolume(diskA)
			coretest.Must(t, r.stage(v, filesystemVolume(fsType, writer)))
			file, err := os.Create(filepath.Join(v.staging, "file"))
			coretest.Must(t, err)
			at := int64(0)
			for size := int64(volumeBytes); size >= 4096; size /= 2 {
				for err = nil; err == nil; {
					if err = unix.Fallocate(int(file.Fd()), 0, at, size); err == nil {
						at += size
					}
				}
			}
			if !errors.Is(err, unix.ENOSPC) {
				t.Errorf("%v, want ENOSPC", err)
			}
			coretest.Must(t, file.Close())
			stats, err := r.stats(v.id, v.staging, "")
			coretest.Must(t, err)
			for _, usage := range stats.GetUsage() {
				if usage.GetTotal() <= 0 || usage.GetUsed() < 0 || usage.GetAvailable() < 0 || usage.GetUsed() > usage.GetTotal() {
					t.Errorf("%v", usage)
				}
			}
			if bytes := stats.GetUsage()[0]; bytes.GetAvailable() > 1<<20 || bytes.GetUsed() < bytes.GetTotal()*9/10 {
				t.Errorf("a full volume: %v", bytes)
			}
		})
	}
}

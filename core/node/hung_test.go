// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package node_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/core/node"
	"github.com/oxidecomputer/oxide-csi-plugin/test/await"
	"github.com/oxidecomputer/oxide-csi-plugin/test/coretest"
	"github.com/oxidecomputer/oxide-csi-plugin/test/iohang"
)

// hang makes a volume's disk hang for this process and the programs that it starts.
func (r *nodeRig) hang(v *volume) (release func()) {
	r.t.Helper()
	number := r.number(v)
	return iohang.Start(r.t, os.Getpid(), unix.Major(number), unix.Minor(number))
}

// waiting counts the programs that have the disk in their command line.
func (r *nodeRig) waiting(v *volume) (programs int) {
	r.t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	coretest.Must(r.t, err)
	for _, file := range files {
		if line, err := os.ReadFile(file); err == nil && strings.Contains(string(line), r.node(v)+"\x00") {
			programs++
		}
	}
	return programs
}

// answerTimeout is the service's limit for a disk in tests. It is real time, because programs read the disks. On a busy
// machine dd needs a while until it reads, and before that it can be killed.
const answerTimeout = 3 * time.Second

// withoutWaiting fails the test if do waits until the disk that hangs answers by itself: after 40 s, see [iohang].
func withoutWaiting(t *testing.T, what string, do func()) {
	t.Helper()
	start := time.Now()
	do()
	if took := time.Since(start); took > 30*time.Second {
		t.Errorf("%s took %s: it waits for the disk that hangs", what, took.Round(time.Millisecond))
	}
}

// While one disk hangs, its volume is rejected within a bound, with an error that names the disk. All other volumes of
// the node work. The volume is staged when its disk answers again.
func TestNodeWithADiskThatDoesNotAnswer(t *testing.T) {
	r := newNodeRig(t, func(opts *node.Options) { opts.AnswerTimeout = answerTimeout })
	capability := filesystemVolume("ext4", writer)
	hung, other := r.newVolume(diskA), r.newVolume(diskB)
	coretest.Must(t, r.stage(hung, capability)) // so the next stage finds a filesystem, and reads the disk
	coretest.Must(t, r.unstage(hung))
	release := r.hang(hung)

	withoutWaiting(t, "the first stage of the disk that hangs", func() {
		coretest.WantCode(
			t,
			r.stage(hung, capability),
			codes.Unavailable,
			"does not respond",
			r.node(hung),
			hung.disk,
			hung.id,
		)
	})
	for range 4 { // answered at once: no other program reads the disk
		coretest.WantCode(
			t,
			r.stage(hung, capability),
			codes.Unavailable,
			"does not respond",
			"an earlier read still waits",
			r.node(hung),
		)
	}
	if programs := r.waiting(hung); programs != 1 {
		t.Errorf("%d programs wait for the disk, want 1", programs)
	}
	if diff := cmp.Diff(
		[]string{"INACCESSIBLE NotResponding"},
		r.health(&csi.NodeGetVolumeHealthRequest{VolumeId: hung.id}),
	); diff != "" {
		t.Errorf("health of the volume that was not staged (-want +got):\n%s", diff)
	}
	storage, err := r.NodeGetStorageHealth(t.Context(), &csi.NodeGetStorageHealthRequest{})
	coretest.Must(t, err)
	if backends := storage.GetBackendHealth(); len(backends) != 1 || backends[0].GetReason() != "NotResponding" ||
		!strings.Contains(backends[0].GetMessage(), hung.disk) {
		t.Errorf("health of the node's disks: %v", backends)
	}

	withoutWaiting(t, "the whole life of the other volume", func() {
		coretest.Must(t, r.stage(other, capability))
		coretest.Must(t, r.publish(other, "target", capability, false))
		if _, err := r.stats(other.id, r.path("target"), other.staging); err != nil {
			t.Error(err)
		}
		if got := r.health(&csi.NodeGetVolumeHealthRequest{VolumeId: other.id}); got != nil {
			t.Errorf("health of the other volume: %v", got)
		}
		_, err := r.NodeGetInfo(t.Context(), &csi.NodeGetInfoRequest{})
		coretest.Must(t, err)
		if _, err := r.service.Volumes(); err != nil {
			t.Error(err)
		}
		coretest.Must(t, r.unpublish(other, "target"))
		coretest.Must(t, r.unstage(other))
	})

	release()
	await.Eventually(
		t,
		"the volume is staged when its disk answers",
		func() bool { return r.stage(hung, capability) == nil },
	)
	coretest.Must(t, r.unstage(hung))
	r.wantMounts()
}

// A btrfs is staged although another disk hangs, so that the UUID of its filesystem cannot be read.
func TestNodeStageBtrfsWithADiskThatDoesNotAnswer(t *testing.T) {
	r := newNodeRig(t, func(opts *node.Options) { opts.AnswerTimeout = answerTimeout })
	capability := filesystemVolume("btrfs", writer)
	hung, other := r.newVolume(diskA), r.newVolume(diskB)
	coretest.Must(t, r.stage(other, capability))
	coretest.Must(t, r.unstage(other))
	r.hang(hung)
	withoutWaiting(t, "the stage", func() { coretest.Must(t, r.stage(other, capability)) })
	if log := r.log.String(); !strings.Contains(log, "a disk does not respond") || !strings.Contains(log, hung.disk) {
		t.Errorf("the log does not name the disk that was skipped:\n%s", log)
	}
	coretest.Must(t, r.unstage(other))
}

// The health of a mounted volume whose disk hangs is known within a bound, also when it is asked again, and no thread
// of the plugin waits for the disk.
func TestNodeGetVolumeHealthOfAHungDisk(t *testing.T) {
	r := newNodeRig(t)
	v := r.newVolume(diskA)
	capability := filesystemVolume("ext4", writer)
	coretest.Must(t, r.stage(v, capability))
	release := r.hang(v)
	req := &csi.NodeGetVolumeHealthRequest{VolumeId: v.id}
	for range 3 {
		withoutWaiting(t, "the answer", func() {
			if diff := cmp.Diff([]string{"INACCESSIBLE NotResponding"}, r.health(req)); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
	if programs := r.waiting(v); programs != 1 {
		t.Errorf("%d programs wait for the disk, want 1", programs)
	}
	if threads := hungThreads(t); threads > 0 {
		t.Errorf("%d threads of the plugin wait for the disk", threads)
	}
	withoutWaiting(t, "publish and unpublish, which do not ask the disk", func() {
		coretest.Must(t, r.publish(v, "target", capability, false))
		coretest.Must(t, r.unpublish(v, "target"))
	})
	release()
	await.Eventually(t, "the volume is healthy when its disk answers", func() bool { return r.health(req) == nil })
	coretest.Must(t, r.unstage(v))
}

// hungThreads counts the threads of this process in state D.
func hungThreads(t *testing.T) (count int) {
	t.Helper()
	files, err := filepath.Glob("/proc/self/task/[0-9]*/stat")
	coretest.Must(t, err)
	for _, file := range files {
		if stat, err := os.ReadFile(file); err == nil && strings.Contains(string(stat), ") D ") {
			count++
		}
	}
	return count
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package node_test

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device/devicetest"
	"github.com/oxidecomputer/oxide-csi-plugin/core/mount"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
	"github.com/oxidecomputer/oxide-csi-plugin/test/await"
	"github.com/oxidecomputer/oxide-csi-plugin/test/coretest"
)

// In these tests a backup tool has frozen a volume's filesystem, and has not thawed it.

// The requests that freeze a filesystem and thaw it: FIFREEZE and FITHAW.
const (
	fiFreeze = 0xc0045877
	fiThaw   = 0xc0045878
)

// setFrozen freezes the filesystem at path, or thaws it.
func setFrozen(path string, frozen bool) error {
	root, err := os.Open(path)
	if err != nil {
		return err
	}
	request := uint(fiThaw)
	if frozen {
		request = fiFreeze
	}
	return errors.Join(unix.IoctlSetInt(int(root.Fd()), request, 0), root.Close())
}

// freeze freezes the volume's filesystem. If the test fails, the filesystem is thawed at its end.
func (r *nodeRig) freeze(v *volume, fsType string) {
	r.t.Helper()
	coretest.Must(r.t, setFrozen(v.staging, true))
	r.t.Cleanup(func() {
		aside := r.t.TempDir()
		for _, flags := range []uintptr{unix.MS_RDONLY, 0} {
			if r.t.Failed() && unix.Mount(r.node(v), aside, fsType, flags, "") == nil {
				_ = setFrozen(aside, false)
				devicetest.Unmount(r.t, aside)
				return
			}
		}
	})
}

// stageSoon stages the volume. A process that another test starts just now has a copy of the mounts until it has made
// its own namespace, and unmounted the copies.
func (r *nodeRig) stageSoon(v *volume, capability *csi.VolumeCapability) {
	r.t.Helper()
	await.Eventually(r.t, "the volume is staged", func() bool { return r.stage(v, capability) == nil })
}

// wantAtOnce checks that a call that waits for 30 s while a volume is in use has not waited.
func wantAtOnce(t *testing.T, call func() error) func() error {
	t.Helper()
	return func() error {
		start := time.Now()
		err := call()
		if took := time.Since(start); took > 25*time.Second {
			t.Errorf("the answer took %s", took)
		}
		return err
	}
}

// The answer to an unstage names the path at which the filesystem can be thawed, also if another program has unmounted
// it.
func TestUnstageOfAFrozenFilesystem(t *testing.T) {
	t.Parallel()
	for name, freeze := range map[string]func(r *nodeRig, v *volume) (end func()){
		"mounted": func(*nodeRig, *volume) func() { return func() {} },
		"mounted, with a copy": func(r *nodeRig, _ *volume) func() {
			return devicetest.HoldMountNamespace(r.t, r.dir, "").End
		},
		"unmounted": func(r *nodeRig, v *volume) func() { r.umount("staging-" + v.disk); return func() {} },
		"unmounted, with a copy": func(r *nodeRig, v *volume) func() {
			agent := devicetest.HoldMountNamespace(r.t, r.dir, "")
			r.umount("staging-" + v.disk)
			return agent.End
		},
		"unmounted lazily": func(r *nodeRig, v *volume) func() {
			coretest.Must(r.t, unix.Unmount(v.staging, unix.MNT_DETACH))
			return func() {}
		},
		"unmounted, and its folder removed": func(r *nodeRig, v *volume) func() {
			r.umount("staging-" + v.disk)
			coretest.Must(r.t, os.Remove(v.staging))
			return func() {}
		},
	} {
		for _, fsType := range []string{"ext4", "xfs", "btrfs"} {
			for access, readOnly := range map[string]string{"writable": "false", "read-only": "true"} {
				t.Run(name+"/"+fsType+"/"+access, func(t *testing.T) {
					t.Parallel()
					r := newNodeRig(t)
					capability := filesystemVolume(fsType, writer, "noexec")
					v := r.staged(capability)
					coretest.Must(t, os.WriteFile(filepath.Join(v.staging, "file"), []byte("data"), 0o600))
					if readOnly == "true" {
						coretest.Must(t, r.unstage(v))
						v.publish[rpc.KeyReadOnly] = readOnly
						r.stageSoon(v, capability)
					}
					r.freeze(v, fsType)
					end := freeze(r, v)
					r.impatient()
					for _, when := range []string{"once", "again", "after a restart of the plugin"} {
						if when == "after a restart of the plugin" {
							r.start()
						}
						coretest.WantCode(t, r.unstage(v), codes.FailedPrecondition, "frozen", "fsfreeze --unfreeze "+v.staging)
						r.wantMounts("staging-" + v.disk)
						coretest.WantCode(t, r.stage(v, capability), codes.FailedPrecondition, "fsfreeze --unfreeze "+v.staging)
					}
					end()
					r.patient()
					coretest.Must(t, setFrozen(v.staging, false))
					// A mount that was only for the thaw has no flags of the volume.
					r.stageSoon(v, capability)
					wantContent(t, filepath.Join(v.staging, "file"), "data")
					r.wantFlags(v, "noexec", readOnly == "true")
					coretest.Must(t, r.unstage(v))
					r.wantUnstaged(v)
				})
			}
		}
	}
}

// wantFlags checks that the staged volume has the mount flag, and is read-only or not.
func (r *nodeRig) wantFlags(v *volume, flag string, readOnly bool) {
	r.t.Helper()
	table, err := mount.ReadTable()
	coretest.Must(r.t, err)
	entry, ok := table.At(v.staging)
	if !ok || entry.CountMissing([]string{flag}) != 0 || entry.ReadOnly != readOnly {
		r.t.Errorf("staged with %+v, want %s and read-only %t", entry, flag, readOnly)
	}
}

func TestUnstageOfAFrozenFilesystemThatCannotBeMountedAgain(t *testing.T) {
	t.Parallel()
	r := newNodeRig(t)
	v := r.staged(filesystemVolume("ext4", writer))
	staging := "staging-" + v.disk
	r.freeze(v, "ext4")
	r.umount(staging)
	r.foreign(staging)
	for range 2 {
		r.refused(wantAtOnce(t, func() error { return r.unstage(v) }), codes.FailedPrecondition,
			"frozen", "mounted nowhere", filepath.Base(r.node(v)))
	}
	r.umount(staging)
	coretest.WantCode(t, r.unstage(v), codes.FailedPrecondition, "fsfreeze --unfreeze "+v.staging)
	coretest.Must(t, setFrozen(v.staging, false))
	coretest.Must(t, r.unstage(v))
	r.wantUnstaged(v)
}

// A freeze prevents only what writes. Without its mount at the staging path, a target is the only way to thaw it.
func TestNodeCallsWhileTheFilesystemIsFrozen(t *testing.T) {
	t.Parallel()
	for _, fsType := range []string{"ext4", "xfs", "btrfs"} {
		t.Run(fsType, func(t *testing.T) {
			t.Parallel()
			r := newNodeRig(t)
			capability := filesystemVolume(fsType, multiWriter)
			v := r.staged(capability)
			coretest.Must(t, r.publish(v, "target", capability, false))
			r.freeze(v, fsType)
			coretest.Must(t, r.publish(v, "second", capability, false))
			if _, err := r.stats(v.id, r.path("target"), v.staging); err != nil {
				t.Errorf("stats: %v", err)
			}
			if got := r.health(&csi.NodeGetVolumeHealthRequest{VolumeId: v.id}); got != nil {
				t.Errorf("health %v", got)
			}
			coretest.Must(t, r.unpublish(v, "second"))
			r.refused(func() error { return r.unstage(v) }, codes.FailedPrecondition, "still mounted at")
			r.umount("staging-" + v.disk)
			for range 2 {
				r.refused(wantAtOnce(t, func() error { return r.unpublish(v, "target") }),
					codes.FailedPrecondition, "fsfreeze --unfreeze "+r.path("target"))
			}
			coretest.Must(t, setFrozen(r.path("target"), false))
			coretest.Must(t, r.unpublish(v, "target"))
			coretest.Must(t, r.unstage(v))
			r.wantUnstaged(v)
			r.stageSoon(v, capability)
			coretest.Must(t, setFrozen(v.staging, true))
			r.refused(
				wantAtOnce(t, func() error { return r.unstage(v) }),
				codes.FailedPrecondition,
				"fsfreeze --unfreeze "+v.staging,
			)
			coretest.Must(t, setFrozen(v.staging, false))
			coretest.Must(t, r.unstage(v))
		})
	}
}

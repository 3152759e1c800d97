// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package node_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
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

	"github.com/oxidecomputer/oxide-csi-plugin/core/device/devicetest"
	"github.com/oxidecomputer/oxide-csi-plugin/core/mount"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
	"github.com/oxidecomputer/oxide-csi-plugin/core/volumelock"
	"github.com/oxidecomputer/oxide-csi-plugin/core/volumerecord"
	"github.com/oxidecomputer/oxide-csi-plugin/test/coretest"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack"
)

// In these tests, the staging and target paths hold files and mounts that users, crashes and other programs left.

// accesses contains a volume capability for each access type.
var accesses = map[string]*csi.VolumeCapability{
	"filesystem": filesystemVolume("ext4", writer),
	"raw block":  rawBlock(writer),
}

// eachAccess runs a test for both access types, with a volume that is not staged.
func eachAccess(t *testing.T, test func(r *nodeRig, v *volume, capability *csi.VolumeCapability)) {
	t.Helper()
	for name, capability := range accesses {
		t.Run(name, func(t *testing.T) {
			r := newNodeRig(t)
			test(r, r.newVolume(diskA), capability)
		})
	}
}

// files lists the files below the test's folder, without the guest, the disks, the plugin's state and mounted
// filesystems.
func (r *nodeRig) files() []string {
	r.t.Helper()
	var files []string
	mounts := r.mounts()
	coretest.Must(r.t, filepath.WalkDir(r.dir, func(path string, entry fs.DirEntry, err error) error {
		name, _ := filepath.Rel(r.dir, path)
		if slices.Contains([]string{"guests", "disks", "state"}, name) {
			return fs.SkipDir
		}
		if slices.Contains(mounts, name) {
			files = append(files, name+" mounted")
			if entry.IsDir() {
				return fs.SkipDir
			}
			return nil
		}
		if err != nil {
			return err
		}
		text := name + " " + entry.Type().String()
		if entry.Type().IsRegular() {
			content, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			text += fmt.Sprintf(" %q", content)
		}
		files = append(files, text)
		return nil
	}))
	return files
}

// refused checks that a call fails and changes neither mounts nor files.
func (r *nodeRig) refused(call func() error, code codes.Code, mentions ...string) {
	r.t.Helper()
	mounts, files := r.mounts(), r.files()
	coretest.WantCode(r.t, call(), code, mentions...)
	if diff := cmp.Diff(mounts, r.mounts()); diff != "" {
		r.t.Errorf("mounts (-before +after):\n%s", diff)
	}
	if diff := cmp.Diff(files, r.files()); diff != "" {
		r.t.Errorf("files (-before +after):\n%s", diff)
	}
}

func (r *nodeRig) mkdir(name string) {
	r.t.Helper()
	coretest.Must(r.t, os.MkdirAll(r.path(name), 0o755))
}

func (r *nodeRig) write(name, content string) {
	r.t.Helper()
	coretest.Must(r.t, os.WriteFile(r.path(name), []byte(content), 0o600))
}

// foreign mounts a filesystem that is not a volume.
func (r *nodeRig) foreign(name string) {
	r.t.Helper()
	coretest.Must(r.t, unix.Mount("foreign", r.path(name), "tmpfs", 0, "size=64k"))
}

func (r *nodeRig) bind(source, target string) {
	r.t.Helper()
	coretest.Must(r.t, mount.Bind(r.path(source), r.path(target), false))
}

func (r *nodeRig) umount(name string) {
	r.t.Helper()
	devicetest.Unmount(r.t, r.path(name))
}

// breakFilesystem makes the kernel record an error in an ext4, as if it had found an invalid structure.
func (r *nodeRig) breakFilesystem(v *volume) {
	r.t.Helper()
	dir := filepath.Join(r.roots().Sys, "fs/ext4", filepath.Base(r.node(v)))
	coretest.Must(r.t, os.WriteFile(filepath.Join(dir, "trigger_fs_error"), []byte("a test"), 0))
	// Real time: the kernel records the error later.
	for end := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		count, err := os.ReadFile(filepath.Join(dir, "errors_count"))
		coretest.Must(r.t, err)
		if strings.TrimSpace(string(count)) != "0" {
			return
		}
		if time.Now().After(end) {
			r.t.Fatal("the filesystem has recorded no error")
		}
	}
}

// reboot powers the guest off and on.
func (r *nodeRig) reboot(volumes ...*volume) {
	r.t.Helper()
	coretest.Must(r.t, r.guests.PowerOff(guestID, false))
	disks := []simrack.GuestDisk{{ID: "boot", Name: "node-a-boot", SizeBytes: volumeBytes, BlockSize: 512, Boot: true}}
	for i, v := range volumes {
		disks = append(
			disks,
			simrack.GuestDisk{ID: v.id, Name: v.disk, Slot: len(volumes) - i, SizeBytes: volumeBytes, BlockSize: 512},
		)
	}
	coretest.Must(r.t, r.guests.PowerOn(guestID, disks, nil))
	r.start()
}

// stagedAt returns the path of a staged volume's mount, below the test's folder.
func stagedAt(v *volume, capability *csi.VolumeCapability) string {
	staging := "staging-" + v.disk
	if capability.GetBlock() != nil {
		return staging + "/" + v.id
	}
	return staging
}

// A folder or file that was at the target before stays, with its owner and mode. What the plugin made goes.
func TestUnpublishKeepsWhatWasThereBefore(t *testing.T) {
	t.Parallel()
	for access, capability := range accesses {
		for _, before := range []string{"something was there", "nothing was there"} {
			t.Run(access+"/"+before, func(t *testing.T) {
				t.Parallel()
				r := newNodeRig(t)
				v := r.staged(capability)
				if before == "something was there" && capability.GetBlock() != nil {
					r.write("target", "")
				} else if before == "something was there" {
					r.mkdir("target")
				}
				for range 2 {
					files := r.files()
					for range 2 {
						coretest.Must(t, r.publish(v, "target", capability, false))
					}
					r.start()
					for range 2 {
						coretest.Must(t, r.unpublish(v, "target"))
					}
					if diff := cmp.Diff(files, r.files()); diff != "" {
						t.Errorf("files (-before +after):\n%s", diff)
					}
				}
				coretest.Must(t, r.unstage(v))
			})
		}
	}
}

func TestNodeStageAtAnOccupiedPath(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name     string
		prepare  func(r *nodeRig, staging string)
		mentions string
	}{
		{"a file", func(r *nodeRig, staging string) { r.write(staging, "") }, "not a directory"},
		{"a folder with content", func(r *nodeRig, staging string) { r.mkdir(staging); r.write(staging+"/precious", "data") }, "staging"},
		{"a symbolic link", func(r *nodeRig, staging string) {
			r.mkdir("real")
			coretest.Must(r.t, os.Symlink("real", r.path(staging)))
		}, "symbolic link"},
		{"a foreign mount", func(r *nodeRig, staging string) { r.mkdir(staging); r.foreign(staging) }, "a mount that is not"},
		{"another volume's filesystem", func(r *nodeRig, staging string) {
			w := r.newVolume(diskB)
			w.staging = r.path(staging)
			r.mkdir(staging)
			coretest.Must(r.t, r.stage(w, filesystemVolume("ext4", writer)))
		}, "staging"},
		{"another raw block volume", func(r *nodeRig, staging string) {
			w := r.newVolume(diskB)
			w.staging = r.path(staging)
			coretest.Must(r.t, r.stage(w, rawBlock(writer)))
		}, "staging"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			eachAccess(t, func(r *nodeRig, v *volume, capability *csi.VolumeCapability) {
				v.staging = r.path("staging")
				tc.prepare(r, "staging")
				r.refused(func() error { return r.stage(v, capability) }, codes.FailedPrecondition, tc.mentions)
			})
		})
	}
}

func TestNodePublishAtAnOccupiedPath(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name    string
		prepare func(r *nodeRig)
		// refused are the access types for which publishing fails.
		refused  string
		mentions string
	}{
		{"nothing", func(*nodeRig) {}, "", ""},
		{"no parent folder", func(r *nodeRig) { coretest.Must(r.t, os.Remove(r.path("targets"))) }, "filesystem, raw block", "targets does not exist"},
		{"a parent that is a file", func(r *nodeRig) { coretest.Must(r.t, os.Remove(r.path("targets"))); r.write("targets", "data") }, "filesystem, raw block", "targets"},
		{"a parent that is a symbolic link", func(r *nodeRig) {
			coretest.Must(r.t, os.Rename(r.path("targets"), r.path("real")))
			coretest.Must(r.t, os.Symlink("real", r.path("targets")))
		}, "", ""},
		{"an empty file, as before a reboot", func(r *nodeRig) { r.write("targets/one", "") }, "filesystem", "not a directory"},
		{"an empty folder, as before a reboot", func(r *nodeRig) { r.mkdir("targets/one") }, "raw block", "not an empty file"},
		{"a file with content", func(r *nodeRig) { r.write("targets/one", "data") }, "filesystem, raw block", "targets/one"},
		{"a folder with content", func(r *nodeRig) { r.mkdir("targets/one"); r.write("targets/one/file", "data") }, "filesystem, raw block", "targets/one"},
		{"a symbolic link to a folder", func(r *nodeRig) { r.mkdir("real"); coretest.Must(r.t, os.Symlink("../real", r.path("targets/one"))) }, "filesystem, raw block", "symbolic link"},
		{"a symbolic link to nowhere", func(r *nodeRig) { coretest.Must(r.t, os.Symlink("nowhere", r.path("targets/one"))) }, "filesystem, raw block", "symbolic link"},
		{"a foreign mount", func(r *nodeRig) { r.mkdir("targets/one"); r.foreign("targets/one") }, "filesystem, raw block", "a mount that is not"},
		{"another volume's filesystem", func(r *nodeRig) {
			w := r.newVolume(diskB)
			coretest.Must(r.t, r.stage(w, filesystemVolume("ext4", writer)))
			coretest.Must(r.t, r.publish(w, "targets/one", filesystemVolume("ext4", writer), false))
		}, "filesystem, raw block", "another disk"},
		{"another raw block volume", func(r *nodeRig) {
			w := r.newVolume(diskB)
			coretest.Must(r.t, r.stage(w, rawBlock(writer)))
			coretest.Must(r.t, r.publish(w, "targets/one", rawBlock(writer), false))
		}, "filesystem, raw block", "another disk"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			eachAccess(t, func(r *nodeRig, v *volume, capability *csi.VolumeCapability) {
				access := filepath.Base(r.t.Name())
				r.mkdir("targets")
				coretest.Must(r.t, r.stage(v, capability))
				tc.prepare(r)
				publish := func() error { return r.publish(v, "targets/one", capability, false) }
				if strings.Contains(strings.ReplaceAll(tc.refused, " ", "_"), access) {
					r.refused(publish, codes.FailedPrecondition, tc.mentions)
					return
				}
				_, before := os.Lstat(r.path("targets/one"))
				coretest.Must(r.t, publish())
				coretest.Must(r.t, publish())
				coretest.Must(r.t, r.unpublish(v, "targets/one"))
				_, after := os.Lstat(r.path("targets/one"))
				if errors.Is(before, fs.ErrNotExist) != errors.Is(after, fs.ErrNotExist) {
					r.t.Errorf("the target was: %v; it is: %v", before, after)
				}
				coretest.Must(r.t, r.unstage(v))
			})
		})
	}
}

// After a reboot nothing is mounted, the folders exist, and the disk has another name.
func TestNodeAfterReboot(t *testing.T) {
	t.Run("set up again", func(t *testing.T) {
		eachAccess(t, func(r *nodeRig, v *volume, capability *csi.VolumeCapability) {
			w := r.newVolume(diskB)
			coretest.Must(r.t, r.stage(v, capability))
			coretest.Must(r.t, r.publish(v, "target", capability, false))
			before := r.node(v)
			r.reboot(v, w)
			r.wantMounts()
			if r.node(v) == before {
				r.t.Error("the disk has its old name, so the test proves nothing")
			}
			coretest.WantCode(r.t, r.publish(v, "target", capability, false), codes.FailedPrecondition, "not staged")
			coretest.Must(r.t, r.stage(v, capability))
			coretest.Must(r.t, r.publish(v, "target", capability, false))
			r.wantMounts(stagedAt(v, capability), "target")
			coretest.Must(r.t, r.unpublish(v, "target"))
			coretest.Must(r.t, r.unstage(v))
			r.wantMounts()
		})
	})
	t.Run("taken down", func(t *testing.T) {
		eachAccess(t, func(r *nodeRig, v *volume, capability *csi.VolumeCapability) {
			coretest.Must(r.t, r.stage(v, capability))
			coretest.Must(r.t, r.publish(v, "target", capability, false))
			r.reboot()
			coretest.Must(r.t, r.unpublish(v, "target"))
			coretest.Must(r.t, r.unstage(v))
			if diff := cmp.Diff([]string{". d---------", "staging-" + diskA + " d---------"}, r.files()); diff != "" {
				r.t.Errorf("files (-want +got):\n%s", diff)
			}
		})
	})
}

// The disk is detached while it is mounted, and attached again with another name.
func TestNodeMountsOfRemovedDisks(t *testing.T) {
	capabilities := map[string]*csi.VolumeCapability{
		"ext4":      filesystemVolume("ext4", writer),
		"xfs":       filesystemVolume("xfs", writer),
		"raw block": rawBlock(writer),
	}
	replug := func(r *nodeRig, v *volume, capability *csi.VolumeCapability) {
		before := r.node(v)
		r.unplug(v)
		r.plug(v)
		// A bind mount of the device node does not keep the disk's name in use. The disk gets the same name again.
		if (r.node(v) == before) != (capability.GetBlock() != nil) {
			r.t.Errorf("the disk was %s and is %s", before, r.node(v))
		}
	}
	// replugSame attaches the disk again with its old number, which is the number of its loop device. The kernel returns
	// the lowest free loop device, so replugSame occupies all lower ones. It reports false if another process has taken
	// the old number.
	replugSame := func(r *nodeRig, v *volume) bool {
		before := r.number(v)
		for slot := 2; slot < 12; slot++ {
			r.unplug(v)
			r.plug(v)
			if r.number(v) == before {
				return true
			}
			r.unplug(v)
			id := fmt.Sprint("in-the-way-", slot)
			r.makeDisk(id)
			coretest.Must(
				r.t,
				r.guests.Plug(guestID, simrack.GuestDisk{ID: id, Name: id, Slot: slot, SizeBytes: volumeBytes, BlockSize: 512}),
			)
			r.plug(v)
		}
		return false
	}
	for _, tc := range []struct {
		name string
		// raw is true if the case is possible with raw block.
		raw  bool
		test func(r *nodeRig, v *volume, capability *csi.VolumeCapability)
	}{
		{"at the staging path", true, func(r *nodeRig, v *volume, capability *csi.VolumeCapability) {
			replug(r, v, capability)
			coretest.Must(r.t, r.stage(v, capability))
			coretest.Must(r.t, r.publish(v, "target", capability, false))
			r.wantMounts(stagedAt(v, capability), "target")
		}},
		{"at the staging path, twice", false, func(r *nodeRig, v *volume, capability *csi.VolumeCapability) {
			r.bind(stagedAt(v, capability), stagedAt(v, capability))
			replug(r, v, capability)
			coretest.Must(r.t, r.stage(v, capability))
			coretest.Must(r.t, r.publish(v, "target", capability, false))
			r.wantMounts(stagedAt(v, capability), "target")
		}},
		{"at the staging path, and still published", true, func(r *nodeRig, v *volume, capability *csi.VolumeCapability) {
			coretest.Must(r.t, r.publish(v, "target", capability, false))
			replug(r, v, capability)
			r.refused(func() error { return r.stage(v, capability) }, codes.FailedPrecondition, "left this guest", r.path("target"))
			r.refused(func() error { return r.unstage(v) }, codes.FailedPrecondition, r.path("target"))
			r.refused(func() error { return r.publish(v, "target-2", capability, false) }, codes.FailedPrecondition, "not staged")
			coretest.Must(r.t, r.unpublish(v, "target"))
			coretest.Must(r.t, r.stage(v, capability))
			coretest.Must(r.t, r.publish(v, "target", capability, false))
			r.wantMounts(stagedAt(v, capability), "target")
		}},
		{"at the target", false, func(r *nodeRig, v *volume, capability *csi.VolumeCapability) {
			coretest.Must(r.t, r.publish(v, "target", capability, false))
			replug(r, v, capability)
			coretest.Must(r.t, unix.Unmount(r.path(stagedAt(v, capability)), unix.MNT_DETACH))
			coretest.Must(r.t, r.stage(v, capability))
			coretest.Must(r.t, r.publish(v, "target", capability, false))
			r.wantMounts(stagedAt(v, capability), "target")
		}},
		{"at the target, unpublished after the volume was staged again", false, func(r *nodeRig, v *volume, capability *csi.VolumeCapability) {
			coretest.Must(r.t, r.publish(v, "old", capability, false))
			replug(r, v, capability)
			coretest.Must(r.t, unix.Unmount(r.path(stagedAt(v, capability)), unix.MNT_DETACH))
			coretest.Must(r.t, r.stage(v, capability))
			coretest.Must(r.t, r.publish(v, "target", capability, false))
			coretest.Must(r.t, r.unpublish(v, "old"))
			r.wantMounts(stagedAt(v, capability), "target")
		}},
		{"below a live one at the staging path", false, func(r *nodeRig, v *volume, capability *csi.VolumeCapability) {
			replug(r, v, capability)
			r.run("mount", r.node(v), v.staging)
			coretest.Must(r.t, r.stage(v, capability))
			coretest.Must(r.t, r.publish(v, "target", capability, false))
			r.wantMounts(stagedAt(v, capability), stagedAt(v, capability), "target")
		}},
	} {
		for access, capability := range capabilities {
			if capability.GetBlock() != nil && !tc.raw {
				continue
			}
			t.Run(tc.name+"/"+access, func(t *testing.T) {
				r := newNodeRig(t)
				v := r.newVolume(diskA)
				coretest.Must(t, r.stage(v, capability))
				tc.test(r, v, capability)
				r.start()
				coretest.Must(t, r.unpublish(v, "target"))
				coretest.Must(t, r.unstage(v))
				r.wantMounts()
			})
		}
	}
	// The old device node leads to the disk that has its number now, perhaps another one. So stage fails until the
	// volume is unpublished from the target.
	t.Run("at the target/raw block", func(t *testing.T) {
		var (
			r *nodeRig
			v *volume
		)
		capability := capabilities["raw block"]
		for tries := 0; ; tries++ {
			r = newNodeRig(t)
			v = r.newVolume(diskA)
			coretest.Must(t, r.stage(v, capability))
			coretest.Must(t, r.publish(v, "target", capability, false))
			if replugSame(r, v) {
				break
			}
			if tries == 20 {
				t.Fatal("each time another process took the number of the disk")
			}
		}
		r.umount(stagedAt(v, capability))
		r.refused(func() error { return r.stage(v, capability) }, codes.FailedPrecondition, r.path("target"))
		coretest.Must(t, r.unpublish(v, "target"))
		coretest.Must(t, r.stage(v, capability))
	})
}

func TestNodeStackedMounts(t *testing.T) {
	t.Parallel()
	for _, where := range []string{"target", "staging path"} {
		t.Run(where, func(t *testing.T) {
			t.Parallel()
			// prepare stages the volume, and publishes it if where is the target. It returns the tested call and the
			// path.
			prepare := func(r *nodeRig, v *volume, capability *csi.VolumeCapability) (call func() error, path string) {
				coretest.Must(r.t, r.stage(v, capability))
				if where == "staging path" {
					return func() error { return r.unstage(v) }, stagedAt(v, capability)
				}
				coretest.Must(r.t, r.publish(v, "target", capability, false))
				return func() error { return r.unpublish(v, "target") }, "target"
			}
			t.Run("the volume three times", func(t *testing.T) {
				t.Parallel()
				eachAccess(t, func(r *nodeRig, v *volume, capability *csi.VolumeCapability) {
					call, path := prepare(r, v, capability)
					r.bind(path, path)
					r.bind(path, path)
					coretest.Must(r.t, call())
					if slices.Contains(r.mounts(), path) {
						r.t.Errorf("still mounted: %v", r.mounts())
					}
					coretest.Must(r.t, call())
				})
			})
			t.Run("another mount above", func(t *testing.T) {
				t.Parallel()
				eachAccess(t, func(r *nodeRig, v *volume, capability *csi.VolumeCapability) {
					call, path := prepare(r, v, capability)
					if capability.GetBlock() == nil {
						r.foreign(path)
					} else {
						r.write("file", "data")
						r.bind("file", path)
					}
					r.refused(call, codes.FailedPrecondition, r.path(path))
					r.umount(path)
					coretest.Must(r.t, call())
				})
			})
			t.Run("another mount below", func(t *testing.T) {
				t.Parallel()
				r := newNodeRig(t)
				v := r.newVolume(diskA)
				call, path := prepare(r, v, filesystemVolume("ext4", writer))
				r.mkdir("aside")
				r.bind(path, "aside")
				r.umount(path)
				r.foreign(path)
				r.bind("aside", path)
				r.umount("aside")
				err := call()
				if where == "target" {
					// The call must fail, because the folder cannot be removed.
					coretest.WantCode(t, err, codes.FailedPrecondition, "stays")
					coretest.Must(t, r.unstage(v))
				} else {
					coretest.Must(t, err)
				}
				r.wantMounts(path)
				if got := stagedType(t, r.path(path)); got != "tmpfs" {
					t.Errorf("%s is mounted, want the mount that was below", got)
				}
			})
			for _, known := range []string{"which is known", "which is known after a restart", "which cannot be known"} {
				t.Run("another volume's above, "+known, func(t *testing.T) {
					t.Parallel()
					r := newNodeRig(t)
					v, w := r.newVolume(diskA), r.newVolume(diskB)
					if known == "which cannot be known" {
						for _, volume := range []*volume{v, w} { // filesystems made by users
							r.run("mkfs.ext4", "-q", r.node(volume))
						}
					}
					call, path := prepare(r, v, filesystemVolume("ext4", writer))
					coretest.Must(t, r.stage(w, filesystemVolume("ext4", writer)))
					r.bind("staging-"+diskB, path)
					if known != "which is known" {
						r.start()
					}
					mentions := "over it"
					if known == "which cannot be known" { // staged by a version of the plugin that wrote no records
						coretest.Must(t, os.RemoveAll(r.path("state/volumes")))
						mentions = "cannot be told"
					}
					r.refused(call, codes.FailedPrecondition, mentions)
					r.umount(path)
					coretest.Must(t, call())
				})
			}
		})
	}
}

// A mount over a folder above hides a volume. What is at the volume's path then is not the volume.
func TestNodeMountOverTheFolderAbove(t *testing.T) {
	t.Parallel()
	for _, where := range []string{"target", "target through a link", "staging path"} {
		t.Run(where, func(t *testing.T) {
			t.Parallel()
			eachAccess(t, func(r *nodeRig, v *volume, capability *csi.VolumeCapability) {
				r.mkdir("above/folder")
				coretest.Must(r.t, os.Symlink(r.path("above"), r.path("link")))
				path, asked := "above/folder/data", "above/folder/data"
				if where == "target through a link" {
					asked = "link/folder/data"
				}
				call := func() error { return r.unpublish(v, asked) }
				if where == "staging path" {
					r.mkdir("above/staging")
					v.staging = r.path("above/staging")
					call, path = func() error { return r.unstage(v) }, "above/staging"
					if capability.GetBlock() != nil {
						path = "above/staging/" + v.id
					}
				}
				coretest.Must(r.t, r.stage(v, capability))
				if where != "staging path" {
					coretest.Must(r.t, r.publish(v, asked, capability, false))
				}
				r.foreign("above")
				covers := r.path("above") + " covers it"
				for range 2 {
					r.refused(call, codes.FailedPrecondition, covers)
				}
				// Now another mount is at the volume's path.
				if capability.GetBlock() != nil {
					coretest.Must(r.t, os.MkdirAll(filepath.Dir(r.path(path)), 0o755))
					r.write(path, "")
					r.write("file", "data")
					r.bind("file", path)
				} else {
					coretest.Must(r.t, os.MkdirAll(r.path(path), 0o755))
					r.foreign(path)
				}
				before := r.mounts()
				for range 2 {
					r.refused(call, codes.FailedPrecondition, "covers it")
				}
				if after := r.mounts(); !slices.Equal(before, after) {
					r.t.Errorf("the mounts were %v, and are %v", before, after)
				}
				r.umount(path)
				again := func() error { return r.publish(v, asked, capability, false) }
				if where == "staging path" {
					again = func() error { return r.stage(v, capability) }
				}
				r.refused(again, codes.FailedPrecondition, covers)
				r.umount("above")
				coretest.Must(r.t, call())
				coretest.Must(r.t, r.unstage(v))
				r.wantMounts()
			})
		})
	}
}

// A folder that is bound to itself and shared, as some systems do with kubelet's: each mount in it is there twice, at
// one path.
func TestNodeFolderBoundToItself(t *testing.T) {
	t.Parallel()
	eachAccess(t, func(r *nodeRig, v *volume, capability *csi.VolumeCapability) {
		r.mkdir("disk")
		r.foreign("disk")
		coretest.Must(r.t, unix.Mount("", r.path("disk"), "", unix.MS_SHARED, ""))
		r.mkdir("disk/kubelet")
		r.bind("disk/kubelet", "disk/kubelet")
		r.mkdir("disk/kubelet/staging")
		v.staging = r.path("disk/kubelet/staging")
		for range 2 {
			coretest.Must(r.t, r.stage(v, capability))
			coretest.Must(r.t, r.publish(v, "disk/kubelet/target", capability, false))
		}
		if got := len(r.mounts()); got != 6 {
			r.t.Errorf("%d mounts, want each twice: %v", got, r.mounts())
		}
		for range 2 {
			coretest.Must(r.t, r.unpublish(v, "disk/kubelet/target"))
		}
		for range 2 {
			coretest.Must(r.t, r.unstage(v))
		}
		r.wantMounts("disk", "disk/kubelet")
	})
}

// A bind of a folder of the volume is not the volume.
func TestNodeFolderOfTheVolumeAtTheTarget(t *testing.T) {
	t.Parallel()
	r := newNodeRig(t)
	v := r.newVolume(diskA)
	capability := filesystemVolume("ext4", writer)
	coretest.Must(t, r.stage(v, capability))
	r.mkdir("target")
	r.mkdir("staging-" + diskA + "/sub")
	r.bind("staging-"+diskA+"/sub", "target")
	publish := func() error { return r.publish(v, "target", capability, false) }
	r.refused(publish, codes.FailedPrecondition, "the directory /sub of volume")
	r.umount("target")
	coretest.Must(t, publish())
}

// If the folder of the staging and target paths is mounted at two places, each mount in it is in the mount table twice.
func TestNodeMirroredMounts(t *testing.T) {
	t.Parallel()
	eachAccess(t, func(r *nodeRig, v *volume, capability *csi.VolumeCapability) {
		r.mkdir("kubelet")
		r.mkdir("mirror")
		r.foreign("kubelet")
		coretest.Must(r.t, unix.Mount("", r.path("kubelet"), "", unix.MS_SHARED, ""))
		r.bind("kubelet", "mirror")
		coretest.Must(r.t, os.Mkdir(r.path("kubelet/staging"), 0o755))
		v.staging = r.path("kubelet/staging")
		for range 2 {
			coretest.Must(r.t, r.stage(v, capability))
		}
		for range 2 {
			coretest.Must(r.t, r.publish(v, "kubelet/target", capability, false))
		}
		if got := len(r.mounts()); got != 6 {
			r.t.Errorf("%d mounts, want each twice: %v", got, r.mounts())
		}
		r.refused(
			func() error { return r.publish(v, "kubelet/target-2", capability, false) },
			codes.FailedPrecondition,
			"already mounted at",
		)
		r.refused(func() error { return r.unstage(v) }, codes.FailedPrecondition, "still mounted at")
		coretest.Must(r.t, r.unpublish(v, "kubelet/target"))
		coretest.Must(r.t, r.unstage(v))
		r.wantMounts("kubelet", "mirror")
	})
}

func TestNodeFilesystemStoppedAfterError(t *testing.T) {
	t.Parallel()
	t.Run("read-only", func(t *testing.T) {
		t.Parallel()
		r := newNodeRig(t)
		v := r.newVolume(diskA)
		capability := filesystemVolume("ext4", multiWriter, "errors=remount-ro")
		coretest.Must(t, r.stage(v, capability))
		coretest.Must(t, r.publish(v, "target", capability, false))
		// The file is written with O_SYNC, because data that is not on the disk yet is lost.
		file, err := os.OpenFile(r.path("target/file"), os.O_CREATE|os.O_WRONLY|unix.O_SYNC, 0o600)
		coretest.Must(t, err)
		_, err = file.WriteString("data")
		coretest.Must(t, errors.Join(err, file.Close()))
		r.breakFilesystem(v)
		r.refused(func() error { return r.stage(v, capability) }, codes.FailedPrecondition, "read-only after an error")
		r.refused(
			func() error { return r.publish(v, "target", capability, false) },
			codes.FailedPrecondition,
			"read-only after an error",
		)
		r.refused(
			func() error { return r.publish(v, "target-2", capability, false) },
			codes.FailedPrecondition,
			"read-only after an error",
		)
		// A read-only publish succeeds.
		coretest.Must(t, r.publish(v, "reader", capability, true))
		wantContent(t, r.path("reader/file"), "data")
		coretest.Must(t, r.unpublish(v, "reader"))
		coretest.Must(t, r.unpublish(v, "target"))
		coretest.Must(t, r.unstage(v))
		r.wantMounts()
		coretest.Must(t, r.stage(v, capability))
		coretest.Must(t, r.publish(v, "target", capability, false))
		wantContent(t, r.path("target/file"), "data")
	})
	t.Run("shut down", func(t *testing.T) {
		t.Parallel()
		for _, fsType := range []string{"ext4", "xfs"} {
			r := newNodeRig(t)
			v := r.newVolume(diskA)
			capability := filesystemVolume(fsType, writer)
			coretest.Must(t, r.stage(v, capability))
			coretest.Must(t, r.publish(v, "target", capability, false))
			r.run("xfs_io", "-x", "-c", "shutdown", v.staging)
			coretest.Must(t, r.unpublish(v, "target"))
			coretest.Must(t, r.unstage(v))
			coretest.Must(t, r.stage(v, capability))
			coretest.Must(t, r.publish(v, "target", capability, false))
		}
	})
}

// A request with other mount flags than those of the mounted filesystem succeeds, and the log reports the difference.
// The kernel adds some flags and does not show others, so a difference is no reason to fail.
func TestNodeStageWithOtherFlags(t *testing.T) {
	t.Parallel()
	const line = "does not show some of the mount flags"
	r := newNodeRig(t)
	v := r.newVolume(diskA)
	coretest.Must(t, r.stage(v, filesystemVolume("ext4", writer, "noatime", "commit=7")))
	coretest.Must(t, r.stage(v, filesystemVolume("ext4", writer, "noatime,commit=7")))
	if strings.Contains(r.log.String(), line) {
		t.Error("the log reports a difference between the same flags")
	}
	coretest.Must(t, r.stage(v, filesystemVolume("ext4", writer, "noatime", "commit=8754", "stripe=97")))
	log := r.log.String()
	if !strings.Contains(log, line) || !strings.Contains(log, "mount_flags=2") {
		t.Errorf("the log does not report the other flags:\n%s", log)
	}
	if strings.Contains(log, "8754") || strings.Contains(log, "stripe") {
		t.Errorf("the log shows mount flags:\n%s", log)
	}
	r.wantMounts("staging-" + diskA)
}

// A volume is deleted while this node still has its record, for example because its stage failed and nothing unstaged
// it. A new volume of the same name has the same disk name, and so the same serial.
// The old record does not keep it here.
func TestNodeDiskNameOfADeletedVolume(t *testing.T) {
	t.Parallel()
	const first = "00000000-0000-4000-8000-000000000000" // so the old record is the first one
	eachAccess(t, func(r *nodeRig, _ *volume, capability *csi.VolumeCapability) {
		deleted := r.newVolumeWithID(first, diskB)
		coretest.Must(r.t, r.stage(deleted, capability))
		r.umount(stagedAt(deleted, capability))
		r.unplug(deleted)
		coretest.Must(r.t, os.RemoveAll(deleted.staging))
		again := r.newVolume(diskB)
		coretest.Must(r.t, r.stage(again, capability))
		coretest.Must(r.t, r.publish(again, "target-again", capability, false))
		coretest.Must(r.t, r.unpublish(again, "target-again"))
		coretest.Must(r.t, r.unstage(again))
		r.wantMounts()
	})
}

// The record of a deleted volume has the serial or the device number of this volume's disk. It keeps neither the volume
// here after its disk has left the guest, nor lets an unstage succeed that has not looked for the volume. The test runs
// alone: the mount of a removed disk has a device number that the disk of another test can get.
func TestNodeOldRecordOfAnotherVolume(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(r *nodeRig, v *volume, old *volumerecord.Record)
		leave  func(r *nodeRig, v *volume)
	}{
		"the number of a disk that has left the guest": {
			func(_ *nodeRig, _ *volume, old *volumerecord.Record) { old.Serial = "csi-long-gone" },
			(*nodeRig).unplug,
		},
		"the serial, and this volume has no record": {
			func(r *nodeRig, v *volume, _ *volumerecord.Record) { coretest.Must(r.t, os.Remove(r.recordOf(v))) },
			func(r *nodeRig, v *volume) {
				coretest.WantCode(r.t, r.unstage(v), codes.FailedPrecondition, "still mounted at")
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			eachAccess(t, func(r *nodeRig, v *volume, capability *csi.VolumeCapability) {
				coretest.Must(r.t, r.stage(v, capability))
				coretest.Must(r.t, r.publish(v, "target", capability, false))
				store := volumerecord.Store{StateDir: r.path("state")}
				old, err := store.Read(uuid.MustParse(v.id))
				coretest.Must(r.t, err)
				old.Volume = uuid.UUID{} // so the old record is the first one
				old.Sequence--
				tc.change(r, v, old)
				coretest.Must(r.t, store.Write(*old))
				tc.leave(r, v)
				coretest.Must(r.t, r.unpublish(v, "target"))
				coretest.Must(r.t, r.unstage(v))
				r.wantMounts()
			})
		})
	}
}

// A request with the wrong volume ID does not touch another volume.
func TestNodeWrongVolumeID(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name string
		// prepare changes how the plugin knows the volumes.
		prepare func(r *nodeRig)
	}{
		{"staged by this process", func(*nodeRig) {}},
		{"staged before the plugin started again", (*nodeRig).start},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			eachAccess(t, func(r *nodeRig, v *volume, capability *csi.VolumeCapability) {
				w := r.newVolume(diskB)
				for _, volume := range []*volume{v, w} {
					coretest.Must(r.t, r.stage(volume, capability))
					coretest.Must(r.t, r.publish(volume, "target-"+volume.disk, capability, false))
				}
				tc.prepare(r)
				r.refused(func() error { return r.unpublish(v, "target-"+diskB) }, codes.FailedPrecondition, "not this volume's")
				r.refused(
					func() error { return r.unpublish(&volume{id: "no-uuid"}, "target-"+diskB) },
					codes.FailedPrecondition,
					"not this volume's",
				)
				_, err := r.stats(v.id, r.path("target-"+diskB), "")
				coretest.WantCode(r.t, err, codes.NotFound, "another volume")
				for _, path := range []string{"target-" + diskA, stagedAt(v, capability)} {
					if _, err := r.stats(v.id, r.path(path), ""); err != nil {
						r.t.Error(err)
					}
				}
				// A request with the other volume's staging path.
				coretest.Must(r.t, r.unpublish(w, "target-"+diskB))
				mounts := r.mounts()
				err = r.unstage(&volume{id: v.id, staging: w.staging})
				if len(mounts) != len(r.mounts()) {
					r.t.Errorf("mounts %v, before %v; %v", r.mounts(), mounts, err)
				}
				// If another process has staged the volume, the filesystem's UUID shows that it is this volume. It does
				// not show that it is not a third volume, which may be a clone.
				if tc.name == "staged by this process" || capability.GetBlock() != nil {
					coretest.Must(r.t, r.unstage(&volume{id: "c0ffee00-0000-4000-8000-000000000000", staging: w.staging}))
					coretest.WantCode(r.t, err, codes.FailedPrecondition, v.staging)
				}
				r.wantMounts(mounts...)
				coretest.Must(r.t, r.unstage(w))
				coretest.Must(r.t, r.unpublish(v, "target-"+diskA))
				coretest.Must(r.t, r.unstage(v))
				r.wantMounts()
			})
		})
	}
}

// A user has unmounted the staging path. While the volume is published, unstage must fail, because a detach may follow.
func TestNodeUnstageWhilePublished(t *testing.T) {
	t.Parallel()
	eachAccess(t, func(r *nodeRig, v *volume, capability *csi.VolumeCapability) {
		coretest.Must(r.t, r.stage(v, capability))
		coretest.Must(r.t, r.publish(v, "target", capability, false))
		r.umount(stagedAt(v, capability))
		r.refused(func() error { return r.stage(v, capability) }, codes.FailedPrecondition, r.path("target"))
		coretest.WantCode(r.t, r.unstage(v), codes.FailedPrecondition, r.path("target"))
		r.wantMounts("target")
		coretest.Must(r.t, r.unpublish(v, "target"))
		coretest.Must(r.t, r.unstage(v))
		coretest.Must(r.t, r.stage(v, capability))
	})
}

func TestNodePublishReadOnlyOfWritable(t *testing.T) {
	t.Parallel()
	r := newNodeRig(t)
	v := r.newVolume(diskA)
	coretest.Must(t, r.stage(v, filesystemVolume("ext4", writer)))
	coretest.Must(t, r.publish(v, "target", filesystemVolume("ext4", writer), true))
	if err := os.WriteFile(r.path("target/file"), nil, 0o600); !errors.Is(err, unix.EROFS) {
		t.Errorf("writing: %v, want EROFS", err)
	}
	coretest.Must(t, os.WriteFile(filepath.Join(v.staging, "file"), []byte("data"), 0o600))
	coretest.Must(t, r.unpublish(v, "target"))
	coretest.Must(t, r.unstage(v))

	// A volume that was staged with the mount flag ro is read-only at the target too. A publish without read-only is no
	// error, because its capability has the flag as well.
	coretest.Must(t, r.stage(v, filesystemVolume("ext4", writer, "ro")))
	coretest.Must(t, r.publish(v, "target", filesystemVolume("ext4", writer, "ro"), false))
	if err := os.WriteFile(r.path("target/file"), nil, 0o600); !errors.Is(err, unix.EROFS) {
		t.Errorf("writing: %v, want EROFS", err)
	}
	coretest.WantCode(t, r.stage(v, filesystemVolume("ext4", writer)), codes.AlreadyExists, "read-only")
}

func TestNodeRawBlockOfAnotherSize(t *testing.T) {
	t.Parallel()
	r := newNodeRig(t)
	v := r.newVolume(diskA)
	capability := rawBlock(writer)
	coretest.Must(t, r.stage(v, capability))
	v.publish[rpc.KeySizeBytes] = fmt.Sprint(coretest.GiB)
	r.refused(
		func() error { return r.publish(v, "target", capability, false) },
		codes.FailedPrecondition,
		fmt.Sprint(coretest.GiB),
		fmt.Sprint(volumeBytes),
	)
	r.refused(func() error { return r.stage(v, capability) }, codes.FailedPrecondition, fmt.Sprint(coretest.GiB))
}

// A read-only raw block volume rejects writes through every device node.
func TestNodeRawBlockReadOnlyEverywhere(t *testing.T) {
	t.Parallel()
	r := newNodeRig(t)
	v := r.newVolume(diskA)
	capability := rawBlock(multiWriter)
	coretest.Must(t, r.stage(v, capability))
	coretest.Must(t, r.publish(v, "target", capability, true))
	before := r.digest(v)
	for _, path := range []string{r.path("target"), r.path(stagedAt(v, capability)), r.node(v)} {
		file, err := os.OpenFile(path, os.O_RDWR|unix.O_SYNC, 0)
		if err != nil {
			continue
		}
		_, err = file.WriteAt([]byte("x"), 0)
		if err := errors.Join(err, file.Close()); err == nil {
			t.Errorf("a write to %s succeeded", path)
		}
	}
	if r.digest(v) != before {
		t.Error("the disk was written to")
	}
	// Another process of the plugin answers the same requests in the same way.
	r.start()
	coretest.Must(t, r.publish(v, "target", capability, true))
	coretest.WantCode(t, r.publish(v, "target", capability, false), codes.AlreadyExists, "read-only")
	coretest.Must(t, r.unpublish(v, "target"))
	coretest.Must(t, r.unstage(v))
	// After that, a filesystem on the disk is writable, also if there is no publish context.
	coretest.Must(t, r.stage(v, filesystemVolume("ext4", writer)))
	coretest.Must(t, os.WriteFile(filepath.Join(v.staging, "file"), nil, 0o600))
	coretest.Must(t, r.unstage(v))
	coretest.Must(t, r.stage(v, capability))
	coretest.Must(t, r.publish(v, "target", capability, true))
	coretest.Must(t, r.unpublish(v, "target"))
	coretest.Must(t, r.unstage(v))
	v.publish = nil
	coretest.Must(t, r.stage(v, filesystemVolume("ext4", writer)))
	coretest.Must(t, os.WriteFile(filepath.Join(v.staging, "file"), nil, 0o600))
}

// In Kubernetes the target path of a raw block volume ends in the UID of a pod, which looks like a volume ID.
func TestNodeRawBlockTargetNamedLikeAVolume(t *testing.T) {
	t.Parallel()
	const pod = "c0ffee00-0000-4000-8000-000000000000"
	for _, what := range []string{"staged", "staging path unmounted by hand"} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			r := newNodeRig(t)
			v, capability := r.newVolume(diskA), rawBlock(writer)
			coretest.Must(t, r.stage(v, capability))
			coretest.Must(t, r.publish(v, pod, capability, false))
			if what != "staged" {
				r.umount(stagedAt(v, capability))
			}
			r.start()
			if _, err := r.stats(v.id, r.path(pod), ""); err != nil {
				t.Error(err)
			}
			coretest.Must(t, r.unpublish(v, pod))
			coretest.Must(t, r.unstage(v))
			r.wantMounts()
		})
	}
}

// A program of a killed plugin may mount the volume at any moment. All calls fail and change nothing until the program
// has ended. The test needs real time: the lock of that program is in the kernel.
func TestProgramsOfAKilledPlugin(t *testing.T) {
	t.Parallel()
	eachAccess(t, func(r *nodeRig, v *volume, capability *csi.VolumeCapability) {
		_, end, err := volumelock.Acquire(t.Context(), r.path("state"), uuid.MustParse(v.id), 0)
		coretest.Must(t, err)
		brief := func(call func(context.Context) error) func() error {
			return func() error {
				ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
				defer cancel()
				return call(ctx)
			}
		}
		stage := func(ctx context.Context) error {
			_, err := r.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{
				VolumeId:          v.id,
				StagingTargetPath: v.staging,
				VolumeCapability:  capability,
				PublishContext:    v.publish,
				VolumeContext:     v.volume,
			})
			return err
		}
		unstage := func(ctx context.Context) error {
			_, err := r.NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{VolumeId: v.id, StagingTargetPath: v.staging})
			return err
		}
		r.refused(brief(stage), codes.Aborted, v.id, "still running")
		r.wantMounts()
		r.refused(brief(unstage), codes.Aborted, v.id, "still running")
		r.refused(brief(func(ctx context.Context) error {
			_, err := r.NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{
				VolumeId: v.id, StagingTargetPath: v.staging, TargetPath: r.path("target"), VolumeCapability: capability,
				PublishContext: v.publish,
			})
			return err
		}), codes.Aborted, v.id, "still running")
		r.refused(brief(func(ctx context.Context) error {
			_, err := r.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: v.id, TargetPath: r.path("target")})
			return err
		}), codes.Aborted, v.id, "still running")
		end()
		coretest.Must(t, stage(t.Context()))
		coretest.Must(t, unstage(t.Context()))
		r.wantMounts()
	})
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package node_test

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/uuid"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device/devicetest"
	"github.com/oxidecomputer/oxide-csi-plugin/core/hostexec"
	"github.com/oxidecomputer/oxide-csi-plugin/core/node"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
	"github.com/oxidecomputer/oxide-csi-plugin/test/await"
	"github.com/oxidecomputer/oxide-csi-plugin/test/coretest"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack"
)

// In these tests a program keeps a volume's disk in use while the volume is unstaged. An orchestrator repeats an RPC
// that failed, so each refused call is made again, and once more to another process of the plugin.

// impatient returns a rig whose Node service does not wait for holders.
func impatient(t *testing.T) *nodeRig {
	t.Helper()
	return newNodeRig(t, waitBriefly)
}

func waitBriefly(opts *node.Options) { opts.UnstageWait = 50 * time.Millisecond }

// impatient starts the Node service anew so that it does not wait for holders.
func (r *nodeRig) impatient() {
	r.change = waitBriefly
	r.start()
}

// refusedUntil checks that each unstage fails until release has ended the use of the disk.
func (r *nodeRig) refusedUntil(v *volume, release func(), mentions ...string) {
	r.t.Helper()
	for _, when := range []string{"once", "again", "after a restart of the plugin"} {
		if when == "after a restart of the plugin" {
			r.start()
		}
		err := r.unstage(v)
		coretest.WantCode(r.t, err, codes.FailedPrecondition, mentions...)
		if err != nil && len(err.Error()) > 500 { // the test's own paths are long
			r.t.Errorf("an answer of %d bytes: %v", len(err.Error()), err)
		}
	}
	if _, err := os.Stat(r.recordOf(v)); err != nil {
		r.t.Errorf("the record of the volume: %v", err)
	}
	release()
	r.patient()
	// A process that another test starts just now has a copy of the mounts until it has made its own namespace.
	await.Eventually(r.t, "the volume is unstaged", func() bool { return r.unstage(v) == nil })
	r.wantUnstaged(v)
}

// patient starts the Node service anew with its default wait for holders. On a busy machine the simulator or a program
// that another test starts may hold a disk for longer than a test wants to wait for a refusal.
func (r *nodeRig) patient() {
	r.change = func(*node.Options) {}
	r.start()
}

func (r *nodeRig) recordOf(v *volume) string { return r.path("state/volumes/" + v.id) }

// wantUnstaged checks that the volume has neither a mount nor a record.
func (r *nodeRig) wantUnstaged(v *volume) {
	r.t.Helper()
	r.wantMounts()
	if _, err := os.Stat(r.recordOf(v)); !errors.Is(err, os.ErrNotExist) {
		r.t.Errorf("the record of the volume: %v", err)
	}
}

// staged returns a staged volume.
func (r *nodeRig) staged(capability *csi.VolumeCapability) *volume {
	r.t.Helper()
	v := r.newVolume(diskA)
	coretest.Must(r.t, r.stage(v, capability))
	return v
}

func TestUnstageWhileAProgramHasTheDiskOpen(t *testing.T) {
	t.Parallel()
	eachAccess(t, func(r *nodeRig, v *volume, capability *csi.VolumeCapability) {
		r.impatient()
		coretest.Must(r.t, r.stage(v, capability))
		holder := devicetest.Hold(r.t, "exec 3<>"+r.node(v))
		r.refusedUntil(v, holder.End, "(cat)")
		// A reader of the disk does not prevent the unstage of a filesystem.
		coretest.Must(r.t, r.stage(v, capability))
		holder = devicetest.Hold(r.t, "exec 3<"+r.node(v))
		if capability.GetBlock() != nil {
			r.impatient()
			r.refusedUntil(v, holder.End, "(cat)")
		}
		coretest.Must(r.t, r.unstage(v))
	})
}

// A program can write to a disk although no process has it open: the memory of a process, or a file on its way to one.
func TestUnstageWhileNoProcessHasTheDiskOpen(t *testing.T) {
	t.Parallel()
	t.Run("mapping", func(t *testing.T) {
		t.Parallel()
		eachAccess(t, func(r *nodeRig, v *volume, capability *csi.VolumeCapability) {
			r.impatient()
			coretest.Must(r.t, r.stage(v, capability))
			r.refusedUntil(v, devicetest.HoldMapping(r.t, r.node(v)).End, "process ")
		})
	})
	t.Run("another namespace", func(t *testing.T) {
		t.Parallel()
		r := impatient(t)
		v := r.staged(filesystemVolume("ext4", writer))
		r.refusedUntil(v, devicetest.HoldMountNamespace(t, "/nowhere", "exec 3<>"+r.node(v)).End, "(cat)")
	})
	t.Run("socket", func(t *testing.T) {
		t.Parallel()
		r := impatient(t)
		v := r.staged(filesystemVolume("ext4", writer))
		pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		coretest.Must(t, err)
		file, err := os.OpenFile(r.node(v), os.O_RDWR, 0)
		coretest.Must(t, err)
		coretest.Must(t, unix.Sendmsg(pair[0], []byte{0}, unix.UnixRights(int(file.Fd())), nil, 0))
		coretest.Must(t, file.Close())
		end := func() { coretest.Must(t, errors.Join(unix.Close(pair[0]), unix.Close(pair[1]))) }
		r.refusedUntil(v, end, "unknown holder")
	})
}

// While an unstage waits for one program, it does not look at the others. It does so before it succeeds.
func TestUnstageWhileTwoProgramsHaveTheDiskOpen(t *testing.T) {
	t.Parallel()
	eachAccess(t, func(r *nodeRig, v *volume, capability *csi.VolumeCapability) {
		r.change = func(opts *node.Options) { opts.UnstageWait = 2 * time.Second }
		r.start()
		coretest.Must(r.t, r.stage(v, capability))
		open := "exec 3<>" + r.node(v)
		holders := []*devicetest.Holder{devicetest.Hold(r.t, open), devicetest.Hold(r.t, open)}
		slices.SortFunc(holders, func(a, b *devicetest.Holder) int { // in the order in which a look finds them
			return strings.Compare(fmt.Sprint(a.PID()), fmt.Sprint(b.PID()))
		})
		time.AfterFunc(500*time.Millisecond, holders[0].End)
		coretest.WantCode(r.t, r.unstage(v), codes.FailedPrecondition, fmt.Sprintf("%d (cat)", holders[1].PID()))
		holders[1].End()
		coretest.Must(r.t, r.unstage(v))
	})
}

// The main thread of a program can end while another thread goes on with the open files.
func TestUnstageWhileAThreadHasTheDiskOpen(t *testing.T) {
	t.Parallel()
	r := newNodeRig(t)
	v := r.newVolume(diskA)
	r.impatient()
	coretest.Must(t, r.stage(v, rawBlock(writer)))
	r.refusedUntil(v, devicetest.HoldWithoutMainThread(t, r.node(v)).End, "process ")
}

// A user has made partitions on a raw block volume. An exclusive open of the disk succeeds while a program writes to
// one.
func TestUnstageWhileAProgramHasAPartitionOpen(t *testing.T) {
	t.Parallel()
	for name, prepare := range map[string]func(r *nodeRig, v *volume){
		"staged": func(*nodeRig, *volume) {},
		"its record cannot be read, and it is not staged any more": func(r *nodeRig, v *volume) {
			coretest.Must(r.t, os.WriteFile(r.recordOf(v), nil, 0o600))
			r.umount(stagedAt(v, rawBlock(writer)))
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			// Long enough for the simulator, which opens disks for a moment.
			r := newNodeRig(t, func(opts *node.Options) { opts.UnstageWait = 500 * time.Millisecond })
			v := r.staged(rawBlock(writer))
			// Another disk, which the guest does not show, stands for a partition.
			partition := r.newVolume(diskB)
			number, path := r.number(partition), r.path("partition")
			coretest.Must(t, unix.Mknod(path, unix.S_IFBLK|0o600, int(number)))
			disk := filepath.Base(r.node(v))
			folder := filepath.Join(r.roots().Sys, "block", disk, disk+"p1")
			coretest.Must(t, os.Mkdir(folder, 0o755))
			t.Cleanup(func() { coretest.Must(t, os.RemoveAll(folder)) })
			coretest.Must(t, os.WriteFile(
				filepath.Join(folder, "dev"), fmt.Appendf(nil, "%d:%d\n", unix.Major(number), unix.Minor(number)), 0o600,
			))
			shown := filepath.Join(r.roots().Sys, "block", filepath.Base(r.node(partition)))
			coretest.Must(t, os.Rename(shown, shown+"-hidden"))
			t.Cleanup(func() { coretest.Must(t, os.Rename(shown+"-hidden", shown)) })
			prepare(r, v)
			holder := devicetest.Hold(t, "exec 3<>"+path)
			r.refusedUntil(v, holder.End, "in use")
		})
	}
}

// The loop driver has the disk open, which neither an exclusive open nor a process shows.
func TestUnstageWhileALoopDeviceIsInUse(t *testing.T) {
	t.Parallel()
	for name, use := range map[string]func(r *nodeRig, loop string) (end func()){
		"by a program": func(r *nodeRig, loop string) (end func()) {
			return devicetest.Hold(r.t, "exec 3<>"+loop).End
		},
		"by a mounted partition": func(r *nodeRig, loop string) (end func()) {
			devicetest.AddPartition(r.t, loop, 1<<20, 20<<20)
			number, err := os.ReadFile("/sys/class/block/" + filepath.Base(loop) + "p1/dev")
			coretest.Must(r.t, err)
			major, minor, _ := strings.Cut(strings.TrimSpace(string(number)), ":")
			r.run("mknod", r.path("partition"), "b", major, minor)
			r.run("mkfs.ext4", "-q", r.path("partition"))
			r.mkdir("mounted")
			r.run("mount", r.path("partition"), r.path("mounted"))
			return func() { r.umount("mounted") }
		},
		"by another loop device": func(r *nodeRig, loop string) (end func()) {
			return devicetest.Hold(r.t, "exec 3<>"+bindLoop(r.t, loop)).End
		},
		"or may be, because it cannot be opened": func(r *nodeRig, loop string) (end func()) {
			r.write("not-a-device", "")
			// Another one, of a file: it does not matter.
			r.write("image", strings.Repeat("0", 1<<20))
			other := bindLoop(r.t, r.path("image"))
			for _, node := range []string{loop, other} {
				coretest.Must(r.t, unix.Mount(r.path("not-a-device"), node, "", unix.MS_BIND, ""))
			}
			r.t.Cleanup(func() { coretest.Must(r.t, unix.Unmount(other, 0)) })
			return func() { coretest.Must(r.t, unix.Unmount(loop, 0)) }
		},
	} {
		for when, prepare := range map[string]func(r *nodeRig, v *volume){
			"staged": func(*nodeRig, *volume) {},
			"its record cannot be read, and it is not staged any more": func(r *nodeRig, v *volume) {
				coretest.Must(r.t, os.WriteFile(r.recordOf(v), nil, 0o600))
				r.umount(stagedAt(v, rawBlock(writer)))
			},
		} {
			t.Run(name+", "+when, func(t *testing.T) {
				t.Parallel()
				r := newNodeRig(t, func(opts *node.Options) { opts.UnstageWait = 500 * time.Millisecond })
				v := r.staged(rawBlock(writer))
				loop := bindLoop(t, r.node(v))
				end := use(r, loop)
				prepare(r, v)
				mentions := filepath.Base(loop)
				if when != "staged" {
					mentions = "in use"
				}
				// When its user has ended, the loop device alone keeps nothing.
				r.refusedUntil(v, end, mentions)
			})
		}
	}
}

// bindLoop binds a loop device to a file or disk until the end of the test.
func bindLoop(t *testing.T, path string) (loop string) {
	t.Helper()
	loop = strings.TrimSpace(devicetest.Run(t, "losetup", "--find", "--show", "--partscan", path))
	t.Cleanup(func() { devicetest.Run(t, "losetup", "--detach", loop) })
	return loop
}

func TestUnstageWhileACopyOfTheMountHasAWriter(t *testing.T) {
	t.Parallel()
	for _, fsType := range []string{"ext4", "xfs"} {
		t.Run(fsType, func(t *testing.T) {
			t.Parallel()
			r := impatient(t)
			v := r.staged(filesystemVolume(fsType, writer))
			holder := devicetest.HoldMountNamespace(t, r.dir, "exec 3>"+v.staging+"/file")
			coretest.WantCode(t, r.unstage(v), codes.FailedPrecondition, "(cat)")
			// The writer goes on, and the volume can be staged again, but not read-only.
			inCopy := fmt.Sprintf("/proc/%d/root%s/file", holder.PID(), v.staging)
			coretest.Must(t, os.WriteFile(inCopy, []byte("data"), 0o600))
			r.start()
			coretest.WantCode(t, r.stage(v, filesystemVolume(fsType, writer, "ro")), codes.FailedPrecondition, "(cat)")
			coretest.Must(t, r.stage(v, filesystemVolume(fsType, writer)))
			wantContent(t, filepath.Join(v.staging, "file"), "data")
			coretest.Must(t, os.WriteFile(filepath.Join(v.staging, "other"), []byte("data"), 0o600))
			r.refusedUntil(v, holder.End, "(cat)")
		})
	}
}

// The answer names what prevents the unmount, for each kind of filesystem.
func TestUnstageNamesTheHolder(t *testing.T) {
	t.Parallel()
	for _, fsType := range []string{"ext4", "xfs", "btrfs"} {
		t.Run(fsType, func(t *testing.T) {
			t.Parallel()
			r := impatient(t)
			v := r.staged(filesystemVolume(fsType, writer))
			for _, script := range []string{"cd " + v.staging, "exec 3>" + v.staging + "/file"} {
				holder := devicetest.Hold(t, script)
				coretest.WantCode(t, r.unstage(v), codes.FailedPrecondition, fmt.Sprintf("%d (cat)", holder.PID()))
				holder.End()
			}
			image := filepath.Join(v.staging, "image")
			coretest.Must(t, os.WriteFile(image, make([]byte, 1<<20), 0o600))
			loop := strings.TrimSpace(devicetest.Run(t, "losetup", "--find", "--show", image))
			coretest.WantCode(t, r.unstage(v), codes.FailedPrecondition, "loop device "+filepath.Base(loop))
			devicetest.Run(t, "losetup", "--detach", loop)
			r.patient()
			coretest.Must(t, r.unstage(v))
			r.wantUnstaged(v)
		})
	}
}

// A container with bidirectional propagation has mounted something in a folder of the volume. The mount stays on the
// host when the container has ended.
func TestUnmountWithAMountInside(t *testing.T) {
	t.Parallel()
	for name, mountAt := range map[string]func(r *nodeRig, folder string){
		"another filesystem": (*nodeRig).foreign,
		"a folder of the volume": func(r *nodeRig, folder string) {
			r.mkdir(folder + "-source")
			r.bind(folder+"-source", folder)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			capability := filesystemVolume("ext4", writer)
			t.Run("unstage", func(t *testing.T) {
				r := impatient(t)
				v := r.staged(capability)
				inside := "staging-" + v.disk + "/inside"
				r.mkdir(inside)
				mountAt(r, inside)
				agent := devicetest.HoldMountNamespace(t, r.dir, "") // for its copy the filesystem would become read-only
				for range 2 {
					r.refused(func() error { return r.unstage(v) }, codes.FailedPrecondition, "inside", r.path(inside))
				}
				r.write("staging-"+v.disk+"/file", "a workload still writes")
				agent.End()
				r.umount(inside)
				r.patient()
				coretest.Must(t, r.unstage(v))
				r.wantUnstaged(v)
			})
			t.Run("unpublish", func(t *testing.T) {
				r := newNodeRig(t)
				v := r.staged(capability)
				coretest.Must(t, r.publish(v, "target", capability, false))
				r.mkdir("target/inside")
				mountAt(r, "target/inside")
				for range 2 {
					r.refused(wantAtOnce(t, func() error { return r.unpublish(v, "target") }),
						codes.FailedPrecondition, "inside", r.path("target/inside"))
				}
				r.umount("target/inside")
				coretest.Must(t, r.unpublish(v, "target"))
			})
		})
	}
}

// A container has mounted something over its copy of the mount. The path leads to that, and not to the copy, in which a
// program still is.
func TestUnstageWithACoveredCopy(t *testing.T) {
	t.Parallel()
	r := newNodeRig(t)
	v := r.staged(filesystemVolume("ext4", writer))
	holder := devicetest.HoldMountNamespace(t, r.dir, "exec 3<"+v.staging+"\nmount -t tmpfs -o size=64k cover "+v.staging)
	coretest.Must(t, r.unstage(v))
	for path, want := range map[string]error{"fd/3": unix.EROFS, "root" + v.staging: nil} {
		path = fmt.Sprintf("/proc/%d/%s/file", holder.PID(), path)
		if err := os.WriteFile(path, []byte("data"), 0o600); !errors.Is(err, want) {
			t.Errorf("writing to %s: %v, want %v", path, err, want)
		}
	}
	holder.End()
	coretest.Must(t, r.unstage(v))
	r.wantUnstaged(v)
}

// An agent that has copied the host's mounts never unmounts them. It does not keep the volume, if it cannot write.
func TestUnstageWithReadOnlyCopies(t *testing.T) {
	t.Parallel()
	for _, fsType := range []string{"ext4", "xfs", "btrfs"} {
		t.Run(fsType, func(t *testing.T) {
			t.Parallel()
			r := newNodeRig(t)
			capability := filesystemVolume(fsType, writer)
			v := r.staged(capability)
			coretest.Must(t, os.WriteFile(filepath.Join(v.staging, "file"), []byte("before"), 0o600))
			holder := devicetest.HoldMountNamespace(t, r.dir, "cd "+v.staging)
			inCopy := fmt.Sprintf("/proc/%d/root%s/file", holder.PID(), v.staging)
			coretest.Must(t, r.unstage(v))
			r.wantMounts()
			if err := os.WriteFile(inCopy, nil, 0o600); !errors.Is(err, unix.EROFS) {
				t.Errorf("writing through the copy: %v, want EROFS", err)
			}
			if !strings.Contains(r.log.String(), "still have it mounted read-only") {
				t.Error("the log has no warning")
			}
			lingering := func() int {
				t.Helper()
				counts, err := r.service.Volumes()
				coretest.Must(t, err)
				return counts.Lingering
			}
			if lingering() != 1 {
				t.Errorf("%d volumes linger, want 1", lingering())
			}
			// The volume is staged again over its own filesystem, also by another process.
			r.start()
			coretest.WantCode(t, r.stage(v, rawBlock(writer)), codes.FailedPrecondition, "(cat)")
			coretest.Must(t, r.stage(v, capability))
			coretest.Must(t, r.stage(v, capability))
			wantContent(t, filepath.Join(v.staging, "file"), "before")
			coretest.Must(t, os.WriteFile(filepath.Join(v.staging, "file"), []byte("after"), 0o600))
			if lingering() != 0 {
				t.Errorf("%d volumes linger while it is staged", lingering())
			}
			coretest.Must(t, r.unstage(v))
			holder.End()
			// A process that starts just now has a copy of the mounts until it has made its own namespace.
			await.Eventually(t, "the last copy has ended, and no volume lingers", func() bool { return lingering() == 0 })
			r.wantUnstaged(v)
			coretest.Must(t, r.stage(v, capability))
			wantContent(t, filepath.Join(v.staging, "file"), "after")
			coretest.Must(t, r.unstage(v))
		})
	}
}

// The copies are those of a mount from a read-only disk. The volume is writable again when they have ended.
func TestStageWritableOverCopiesFromAReadOnlyDisk(t *testing.T) {
	t.Parallel()
	r := newNodeRig(t)
	capability := filesystemVolume("ext4", writer)
	v := r.staged(capability)
	coretest.Must(t, r.unstage(v))
	v.publish[rpc.KeyReadOnly] = "true"
	coretest.Must(t, r.stage(v, capability))
	holder := devicetest.HoldMountNamespace(t, r.dir, "cd "+v.staging)
	coretest.Must(t, r.unstage(v))
	coretest.Must(t, r.stage(v, capability))
	coretest.Must(t, r.unstage(v))
	v.publish[rpc.KeyReadOnly] = "false"
	r.refused(func() error { return r.stage(v, capability) }, codes.FailedPrecondition, "(cat)")
	holder.End()
	coretest.Must(t, r.stage(v, capability))
	coretest.Must(t, os.WriteFile(filepath.Join(v.staging, "file"), nil, 0o600))
}

func TestUnstageOfALazilyUnmountedFilesystem(t *testing.T) {
	t.Parallel()
	r := impatient(t)
	v := r.staged(filesystemVolume("ext4", writer))
	holder := devicetest.Hold(t, "exec 3>"+v.staging+"/file")
	coretest.Must(t, unix.Unmount(v.staging, unix.MNT_DETACH))
	r.refusedUntil(v, holder.End, "(cat)")
}

// Another namespace has a private copy of the mount. Nothing changes for the reader, nor for the copy.
func TestUnstageWhileAReaderPreventsTheUnmount(t *testing.T) {
	t.Parallel()
	r := impatient(t)
	v := r.staged(filesystemVolume("ext4", multiWriter))
	holder := devicetest.Hold(t, "cd "+v.staging)
	devicetest.HoldMountNamespace(t, r.dir, "")
	r.refused(func() error { return r.unstage(v) }, codes.FailedPrecondition, "(cat)")
	coretest.Must(t, os.WriteFile(filepath.Join(v.staging, "file"), []byte("data"), 0o600))
	holder.End()
	r.patient()
	coretest.Must(t, r.unstage(v))
}

func TestUnstageByAnotherPathAfterARestart(t *testing.T) {
	t.Parallel()
	eachAccess(t, func(r *nodeRig, v *volume, capability *csi.VolumeCapability) {
		coretest.Must(r.t, r.stage(v, capability))
		r.start()
		for _, path := range []string{r.path("elsewhere"), r.path("no/parent/elsewhere")} {
			for range 2 {
				r.refused(
					func() error { return r.unstage(&volume{id: v.id, staging: path}) },
					codes.FailedPrecondition,
					r.path(stagedAt(v, capability)),
				)
			}
		}
		coretest.Must(r.t, r.unstage(v))
		r.wantUnstaged(v)
	})
}

func TestStageOfADiskInForeignUse(t *testing.T) {
	t.Parallel()
	mounted := func(r *nodeRig, v *volume) func() {
		r.mkdir("elsewhere")
		script := fmt.Sprintf("mount %s %s", r.node(v), r.path("elsewhere"))
		return devicetest.HoldMountNamespace(r.t, r.dir, script).End
	}
	for _, tc := range []struct {
		name     string
		use      func(r *nodeRig, v *volume) (end func())
		mentions string
	}{
		{"mounted in another namespace", mounted, "(cat)"},
		{"held by the device mapper", (*nodeRig).holdAsMapper, "dm-7"},
		{"held by another program", func(r *nodeRig, v *volume) func() {
			file, err := os.OpenFile(r.node(v), os.O_RDONLY|unix.O_EXCL, 0)
			coretest.Must(r.t, err)
			return func() { coretest.Must(r.t, hostexec.CloseUninherited(file)) }
		}, "another program"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			eachAccess(t, func(r *nodeRig, v *volume, capability *csi.VolumeCapability) {
				r.run("mkfs.ext4", "-q", r.node(v))
				end := tc.use(r, v)
				for range 2 {
					r.refused(func() error { return r.stage(v, capability) }, codes.FailedPrecondition, tc.mentions)
				}
				end()
				coretest.Must(r.t, r.stage(v, capability))
				coretest.Must(r.t, r.unstage(v))
			})
		})
	}
}

// Two volumes name the same disk. The second must not take over what this node still holds for the first.
func TestStageOfADiskThatIsHeldForAnotherVolume(t *testing.T) {
	t.Parallel()
	eachAccess(t, func(r *nodeRig, v *volume, capability *csi.VolumeCapability) {
		r.impatient()
		coretest.Must(r.t, r.stage(v, capability))
		w := &volume{id: volumeB, disk: diskA, staging: r.path("other"), publish: publishContext(volumeB, diskA)}
		r.mkdir("other")
		r.refused(func() error { return r.stage(w, capability) }, codes.FailedPrecondition, v.id)
		holder := devicetest.Hold(r.t, "exec 3<>"+r.node(v))
		coretest.WantCode(r.t, r.unstage(v), codes.FailedPrecondition, "(cat)")
		r.refused(func() error { return r.stage(w, capability) }, codes.FailedPrecondition, v.id)
		r.refusedUntil(v, holder.End, "(cat)")
		if capability.GetBlock() != nil { // the filesystem belongs to the first volume
			coretest.Must(r.t, r.stage(w, capability))
			coretest.Must(r.t, r.unstage(w))
		}
	})
}

// holdAsMapper holds the disk as the device mapper does for LVM. The machine's kernel may lack the device mapper, so an
// exclusive open and an entry in the simulated sysfs stand for it.
func (r *nodeRig) holdAsMapper(v *volume) (end func()) {
	r.t.Helper()
	holders := filepath.Join(r.roots().Sys, "block", filepath.Base(r.node(v)), "holders")
	coretest.Must(r.t, os.MkdirAll(filepath.Join(holders, "dm-7"), 0o755))
	file, err := os.OpenFile(r.node(v), os.O_RDONLY|unix.O_EXCL, 0)
	coretest.Must(r.t, err)
	return func() { coretest.Must(r.t, errors.Join(os.RemoveAll(holders), hostexec.CloseUninherited(file))) }
}

// LVM activates a volume group that it finds on a raw block volume. Unmounting would not help, so nothing is unmounted.
func TestUnstageWhileTheDeviceMapperHoldsTheDisk(t *testing.T) {
	t.Parallel()
	r := impatient(t)
	v := r.staged(rawBlock(writer))
	end := r.holdAsMapper(v)
	for range 2 {
		r.refused(func() error { return r.unstage(v) }, codes.FailedPrecondition, "dm-7")
	}
	r.umount(stagedAt(v, rawBlock(writer)))
	r.refusedUntil(v, end, "dm-7")
}

func TestUnstageWithoutAUsableStateFolder(t *testing.T) {
	t.Parallel()
	for name, spoil := range map[string]func(r *nodeRig){
		"full": func(r *nodeRig) {
			coretest.Must(r.t, os.WriteFile(r.path("state/rest"), make([]byte, 4096), 0o600))
			for i := range 100 {
				if os.WriteFile(r.path(fmt.Sprint("state/", i)), make([]byte, 4096), 0o600) != nil {
					return
				}
			}
			r.t.Fatal("the state folder is not full")
		},
		"read-only": func(r *nodeRig) {
			coretest.Must(r.t, unix.Mount("", r.path("state"), "", unix.MS_REMOUNT|unix.MS_RDONLY, ""))
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			eachAccess(t, func(r *nodeRig, v *volume, capability *csi.VolumeCapability) {
				r.mkdir("state")
				coretest.Must(r.t, unix.Mount("state", r.path("state"), "tmpfs", 0, "size=64k"))
				w := r.newVolume(diskB)
				r.run("mkfs.ext4", "-q", r.node(w))
				coretest.Must(r.t, r.stage(v, capability))
				coretest.Must(r.t, r.publish(v, "target", capability, false))
				spoil(r)
				for range 2 {
					coretest.WantCode(r.t, r.stage(w, capability), codes.FailedPrecondition, "state directory")
				}
				r.wantMounts("state", stagedAt(v, capability), "target")
				coretest.Must(r.t, r.unpublish(v, "target"))
				for range 2 {
					coretest.Must(r.t, r.unstage(v))
				}
				r.wantMounts("state")
			})
		})
	}
	// Nothing can be locked or recorded if something else is at the folder's place.
	t.Run("a file", func(t *testing.T) {
		t.Parallel()
		r := newNodeRig(t)
		v := r.staged(filesystemVolume("ext4", writer))
		coretest.Must(t, os.RemoveAll(r.path("state")))
		r.write("state", "")
		coretest.Must(t, r.unstage(v))
		r.wantMounts()
	})
}

func TestUnstageWithAnUnreadableRecord(t *testing.T) {
	t.Parallel()
	for name, content := range map[string]string{"empty": "", "torn": `{"volume":"`, "of another volume": `{"volume":"` + volumeB + `"}`} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			eachAccess(t, func(r *nodeRig, v *volume, capability *csi.VolumeCapability) {
				// Long enough for the simulator, which opens disks for a moment.
				r.change = func(opts *node.Options) { opts.UnstageWait = 500 * time.Millisecond }
				r.start()
				// The record of another volume excuses that volume's disk only.
				other := r.newVolume(diskB)
				coretest.Must(r.t, r.stage(other, capability))
				r.umount(stagedAt(other, capability))
				coretest.Must(r.t, r.stage(v, capability))
				coretest.Must(r.t, os.WriteFile(r.recordOf(v), []byte(content), 0o600))
				r.umount(stagedAt(v, capability))
				holder := devicetest.Hold(r.t, "exec 3<>"+r.node(v))
				r.refusedUntil(v, holder.End, "cannot be read", filepath.Base(r.node(v)))
				// What is mounted at the path is evidence enough.
				coretest.Must(r.t, r.stage(v, capability))
				coretest.Must(r.t, os.WriteFile(r.recordOf(v), []byte(content), 0o600))
				coretest.Must(r.t, r.unstage(v))
				r.wantUnstaged(v)
			})
		})
	}
}

// A version of the plugin that wrote no records has staged the volume.
func TestUnstageWithoutARecord(t *testing.T) {
	t.Parallel()
	eachAccess(t, func(r *nodeRig, v *volume, capability *csi.VolumeCapability) {
		r.impatient()
		coretest.Must(r.t, r.stage(v, capability))
		coretest.Must(r.t, os.Remove(r.recordOf(v)))
		holder := devicetest.Hold(r.t, "exec 3<>"+r.node(v))
		r.refusedUntil(v, holder.End, "(cat)")
	})
}

// After a reboot, and after the disk was replaced, nothing of the record is mounted or open.
func TestUnstageWithARecordOfThePast(t *testing.T) {
	t.Parallel()
	for name, pass := range map[string]func(r *nodeRig, v *volume){
		"another boot": func(r *nodeRig, v *volume) {
			content, err := os.ReadFile(r.recordOf(v))
			coretest.Must(r.t, err)
			boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
			coretest.Must(r.t, err)
			past := strings.ReplaceAll(string(content), strings.TrimSpace(string(boot)), uuid.NewString())
			coretest.Must(r.t, os.WriteFile(r.recordOf(v), []byte(past), 0o600))
		},
		"a replaced disk": func(r *nodeRig, v *volume) { r.unplug(v); r.plug(v) },
		"a disk that is gone, and another with its number": func(r *nodeRig, v *volume) {
			r.unplug(v)
			coretest.Must(r.t, r.guests.Plug(guestID, simrack.GuestDisk{
				ID: v.id, Name: diskB, Slot: 2, SizeBytes: volumeBytes, BlockSize: 512,
			}))
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			eachAccess(t, func(r *nodeRig, v *volume, capability *csi.VolumeCapability) {
				r.impatient()
				coretest.Must(r.t, r.stage(v, capability))
				r.umount(stagedAt(v, capability))
				pass(r, v)
				devicetest.Hold(r.t, "exec 3<>"+r.node(v)) // the use of another program
				coretest.Must(r.t, r.unstageUnchecked(v))
				r.wantUnstaged(v)
			})
		})
	}
}

func TestUnpublishOfWhatIsNotAVolume(t *testing.T) {
	t.Parallel()
	r := newNodeRig(t)
	r.mkdir("folder")
	r.write("file", "")
	for _, target := range []string{"folder", "file"} {
		coretest.Must(t, r.unpublish(&volume{id: "no-uuid"}, target))
		if _, err := os.Stat(r.path(target)); err != nil {
			t.Errorf("an unpublish of no volume has removed %s: %v", target, err)
		}
	}
	v := &volume{id: uuid.NewString(), staging: r.path("file/staging")}
	coretest.Must(t, r.unpublish(v, "file/target"))
	coretest.Must(t, r.unstage(v))
}

// In Kubernetes the targets of a raw block volume end in the UIDs of pods. The staging path was unmounted by hand.
func TestUnpublishOfARawBlockVolumeWithoutItsPin(t *testing.T) {
	t.Parallel()
	for _, record := range []string{"with a record", "without a record"} {
		t.Run(record, func(t *testing.T) {
			t.Parallel()
			r := newNodeRig(t)
			capability := rawBlock(multiWriter)
			v := r.staged(capability)
			pods := []string{uuid.NewString(), uuid.NewString()}
			for _, pod := range pods {
				coretest.Must(t, r.publish(v, pod, capability, false))
			}
			r.umount(stagedAt(v, capability))
			if record == "without a record" {
				coretest.Must(t, os.Remove(r.recordOf(v)))
			}
			r.start()
			for _, pod := range pods {
				coretest.Must(t, r.unpublish(v, pod))
			}
			coretest.Must(t, r.unstage(v))
			r.wantUnstaged(v)
		})
	}
}

var stages = flag.Int("stages", 40, "the number of first stages in TestParallelFirstStages")

// Programs that start for one volume must not hold another volume's disk: mkfs and mount of that would fail.
func TestParallelFirstStages(t *testing.T) {
	r := newNodeRig(t)
	next := make(chan int)
	var workers sync.WaitGroup
	for slot := 1; slot <= 16; slot++ {
		workers.Go(func() {
			for n := range next {
				if err := r.firstStage(fmt.Sprintf("csi-%016x", n), slot); err != nil {
					t.Errorf("stage %d: %v", n, err)
				}
			}
		})
	}
	for n := range *stages {
		next <- n
	}
	close(next)
	workers.Wait()
}

// firstStage stages a volume with a blank disk, and unstages it.
func (r *nodeRig) firstStage(disk string, slot int) error {
	id := uuid.NewString()
	v := &volume{id: id, disk: disk, staging: r.path("staging-" + disk), publish: publishContext(id, disk)}
	plugged := simrack.GuestDisk{ID: id, Name: disk, Slot: slot, SizeBytes: volumeBytes, BlockSize: 512}
	if err := errors.Join(
		r.guests.CreateDisk(id, volumeBytes), os.Mkdir(v.staging, 0o755), r.guests.Plug(guestID, plugged),
	); err != nil {
		return err
	}
	if err := r.stage(v, filesystemVolume("ext4", writer)); err != nil {
		return err
	}
	if err := r.unstage(v); err != nil {
		return err
	}
	return r.guests.Unplug(guestID, id)
}

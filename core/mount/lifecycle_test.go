// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package mount_test

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
	"github.com/oxidecomputer/oxide-csi-plugin/core/device/devicetest"
	"github.com/oxidecomputer/oxide-csi-plugin/core/filesystem"
	"github.com/oxidecomputer/oxide-csi-plugin/core/hostexec"
	"github.com/oxidecomputer/oxide-csi-plugin/core/mount"
	"github.com/oxidecomputer/oxide-csi-plugin/core/statefile"
	"github.com/oxidecomputer/oxide-csi-plugin/test/await"
	"github.com/oxidecomputer/oxide-csi-plugin/test/writecache"
)

const (
	diskName  = "csi-abcdefghijklmnop"
	sizeBytes = 320 << 20
)

func TestMain(m *testing.M) {
	writecache.Main()
	devicetest.Main(m)
}

// rig is a guest with one disk.
type rig struct {
	*devicetest.Guest
	// volumeID differs from test to test: the UUID of the filesystem follows from it, and the kernel of this machine
	// mixes two btrfs of the same UUID, also between tests and processes that run at the same time.
	volumeID uuid.UUID
	disk     *devicetest.Disk
	dev      device.Device
	f        mount.Formatter
	state    string
}

func newRig(t *testing.T) *rig {
	t.Helper()
	return newRigOf(t, sizeBytes, 0)
}

// newRigOf makes a rig whose disk has this size and blocks of this size, in bytes.
func newRigOf(t *testing.T, sizeBytes int64, blockSize uint32) *rig {
	t.Helper()
	g := devicetest.New(t)
	g.BlockSize = blockSize
	r := &rig{Guest: g, volumeID: uuid.New(), disk: g.Add(diskName, sizeBytes), state: filepath.Join(t.TempDir(), "state")}
	r.f = mount.Formatter{StateDir: r.state}
	dev, err := g.Roots().
		WaitForDisk(t.Context(), device.ExpectedDisk{Serial: devicetest.Serial(diskName), SizeBytes: sizeBytes}, time.Second)
	if err != nil {
		t.Fatal(err)
	}
	r.dev = dev
	return r
}

func (r *rig) format(t *testing.T, fsType string, options ...string) (err error) {
	t.Helper()
	content, err := device.Probe(t.Context(), r.dev)
	if err != nil {
		return err
	}
	interrupted, err := r.f.InterruptedFormat(r.volumeID, mount.FilesystemUUID(r.volumeID), r.dev, content)
	if err != nil {
		return err
	}
	blank, err := device.ProveBlank(
		t.Context(),
		r.dev,
		device.BlankOptions{VolumeID: r.volumeID, Origin: device.OriginBlank, Interrupted: interrupted},
	)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, blank.Close()) }()
	_, err = r.f.Format(t.Context(), blank, mount.NewFilesystem{VolumeID: r.volumeID, Type: fsType, MkfsOptions: options})
	return err
}

// mounted formats the disk and mounts it.
func (r *rig) mounted(t *testing.T, fsType string, options mount.Options) (target string) {
	t.Helper()
	if err := r.format(t, fsType); err != nil {
		t.Fatal(err)
	}
	target = t.TempDir()
	if err := mount.Filesystem(t.Context(), r.dev, target, fsType, options); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.unmount(t, target) })
	return target
}

func (r *rig) unmount(t *testing.T, target string) {
	t.Helper()
	if err := mount.Unmount(context.Background(), target, r.dev.Number); err != nil {
		t.Error(err)
	}
}

// unmountAndWait unmounts the only mount of the disk and waits until the kernel has let the disk go. A process that has
// just copied the mount namespace, such as a container that starts, keeps the filesystem alive beyond the unmount: the
// kernel writes to the disk when that process lets go of the copy.
func (r *rig) unmountAndWait(t *testing.T, target string) {
	t.Helper()
	r.unmount(t, target)
	if _, err := mount.WaitFree(context.Background(), r.dev, 0, false, true); err != nil {
		t.Error(err)
	}
}

// at returns the mount at path.
func at(t *testing.T, path string) (mount.Entry, bool) {
	t.Helper()
	table, err := mount.ReadTable()
	if err != nil {
		t.Fatal(err)
	}
	return table.At(path)
}

// digest is a fingerprint of the disk's bytes.
func (r *rig) digest(t *testing.T) string {
	t.Helper()
	return devicetest.Digest(t, r.disk.Loop, r.disk.Backing)
}

// The UUIDs of the filesystems of these disks are permanent.
func TestFilesystemUUID(t *testing.T) {
	for disk, want := range map[string]string{
		"6f1b2c3d-4e5f-4a6b-8c7d-9e0f1a2b3c4d": "3a665843-27d8-5bbd-8831-948d3d093faa",
		"00000000-0000-0000-0000-000000000000": "6cd5cd26-5be4-56ed-a5d1-80e9ff8b1b09",
	} {
		if got := mount.FilesystemUUID(uuid.MustParse(disk)).String(); got != want {
			t.Errorf("disk %s: %s, want %s", disk, got, want)
		}
	}
}

func TestFormatMountUnmount(t *testing.T) {
	t.Parallel()
	for _, fsType := range filesystem.Types() {
		t.Run(fsType, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			target := r.mounted(t, fsType, mount.Options{Flags: []string{"noatime"}})
			content, err := device.Probe(t.Context(), r.dev)
			if want := (device.Content{Type: fsType, UUID: mount.FilesystemUUID(r.volumeID).String()}); err != nil ||
				content != want {
				t.Errorf("the disk holds %v, %v; want %v", content, err, want)
			}
			if entry, ok := at(t, target); !ok || entry.Number != r.disk.Number || entry.FSType != fsType || entry.ReadOnly {
				t.Errorf("mounted is %v, %t", entry, ok)
			}
			if err := os.WriteFile(filepath.Join(target, "file"), []byte("data"), 0o600); err != nil {
				t.Error(err)
			}
			usage, err := mount.Stats(target)
			if err != nil || usage.TotalBytes <= 0 || usage.TotalBytes > sizeBytes ||
				usage.UsedBytes+usage.AvailableBytes > usage.TotalBytes ||
				(usage.TotalInodes <= 0 || usage.UsedInodes <= 0) && fsType != "btrfs" ||
				usage.UsedInodes+usage.AvailableInodes != usage.TotalInodes {
				t.Errorf("usage %+v, %v", usage, err)
			}
			if records, err := filepath.Glob(filepath.Join(r.state, "format", "*")); err != nil || len(records) > 0 {
				t.Errorf("left in the state folder: %v, %v", records, err)
			}
			r.unmount(t, target)
			r.unmount(t, target) // nothing to do is success
			if _, err := mount.WaitFree(t.Context(), r.dev, 0, true, false); err != nil {
				t.Error(err)
			}
			before := r.digest(t)
			if err := r.format(t, fsType); !errors.Is(err, device.ErrNotBlank) {
				t.Errorf("formatting it again: %v, want ErrNotBlank", err)
			}
			if r.digest(t) != before {
				t.Error("the refused format has changed the disk")
			}
		})
	}
}

func TestFormatFails(t *testing.T) {
	t.Parallel()
	t.Run("options that mkfs refuses", func(t *testing.T) {
		t.Parallel()
		r := newRig(t)
		if err := r.format(t, "ext4", "-O", "nonsense"); !errors.Is(err, mount.ErrFormat) {
			t.Fatalf("%v, want ErrFormat", err)
		}
		if err := r.format(t, "ext4"); err != nil {
			t.Errorf("with others afterwards: %v", err)
		}
	})
	t.Run("no state folder", func(t *testing.T) {
		t.Parallel()
		r := newRig(t)
		r.Write(r.state, "a file")
		before := r.digest(t)
		blank, err := device.ProveBlank(t.Context(), r.dev, device.BlankOptions{Origin: device.OriginBlank})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := r.f.Format(
			t.Context(),
			blank,
			mount.NewFilesystem{VolumeID: r.volumeID, Type: "ext4"},
		); !errors.Is(
			err,
			statefile.ErrFolder,
		) {
			t.Errorf("%v, want ErrFolder", err)
		}
		if err := blank.Close(); err != nil {
			t.Error(err)
		}
		if r.digest(t) != before {
			t.Error("the disk was written to without a record")
		}
	})
	t.Run("another device took the path", func(t *testing.T) {
		t.Parallel()
		r := newRig(t)
		blank, err := device.ProveBlank(t.Context(), r.dev, device.BlankOptions{Origin: device.OriginBlank})
		if err != nil {
			t.Fatal(err)
		}
		r.Node(r.disk.Kernel, r.Add("other", sizeBytes).Number)
		if _, err := r.f.Format(
			t.Context(),
			blank,
			mount.NewFilesystem{VolumeID: r.volumeID, Type: "ext4"},
		); !errors.Is(
			err,
			device.ErrNotBlank,
		) {
			t.Errorf("%v, want ErrNotBlank", err)
		}
		if err := blank.Close(); err != nil {
			t.Error(err)
		}
		r.Node(r.disk.Kernel, r.disk.Number)
		if interrupted, err := r.f.InterruptedFormat(
			r.volumeID,
			mount.FilesystemUUID(r.volumeID),
			r.dev,
			device.Content{},
		); err != nil ||
			interrupted != nil {
			t.Errorf("a format that never began left the record %v, %v", interrupted, err)
		}
	})
}

// A record that mkfs started lets it run again, but only over a filesystem that was never mounted.
func TestFormatAgain(t *testing.T) {
	t.Parallel()
	for _, fsType := range filesystem.Types() {
		t.Run(fsType, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			record := filepath.Join(r.state, "format", r.volumeID.String())
			begin := func() {
				t.Helper()
				if err := os.MkdirAll(filepath.Dir(record), 0o700); err != nil {
					t.Fatal(err)
				}
				r.Write(record, `{"serial":"`+diskName+`","fsType":"`+fsType+`","bootID":"another","diskSequence":1}`)
			}
			if err := r.format(t, fsType); err != nil {
				t.Fatal(err)
			}
			begin()
			if err := r.format(t, fsType); err != nil {
				t.Fatalf("before the first mount: %v", err)
			}
			if _, err := os.Stat(record); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("the record is still there: %v", err)
			}

			target := t.TempDir()
			if err := mount.Filesystem(t.Context(), r.dev, target, fsType, mount.Options{}); err != nil {
				t.Fatal(err)
			}
			// A mount alone may end before btrfs has written anything: the filesystem is as mkfs left it then.
			if err := os.WriteFile(filepath.Join(target, "file"), []byte("data"), 0o600); err != nil {
				t.Fatal(err)
			}
			r.unmountAndWait(t, target)
			begin()
			before := r.digest(t)
			if err := r.format(t, fsType); !errors.Is(err, device.ErrNotBlank) {
				t.Errorf("after it was mounted: %v, want ErrNotBlank", err)
			}
			if r.digest(t) != before {
				t.Error("the refused format has changed the disk")
			}
		})
	}
	t.Run("empty record", func(t *testing.T) {
		t.Parallel()
		for _, content := range []string{"", "\n"} {
			r := newRig(t)
			if err := os.MkdirAll(filepath.Join(r.state, "format"), 0o700); err != nil {
				t.Fatal(err)
			}
			r.Write(filepath.Join(r.state, "format", r.volumeID.String()), content)
			if err := r.format(t, "ext4"); err != nil {
				t.Errorf("%q on a blank disk: %v", content, err)
			}
		}
	})
	t.Run("broken record", func(t *testing.T) {
		t.Parallel()
		r := newRig(t)
		if err := os.MkdirAll(filepath.Join(r.state, "format"), 0o700); err != nil {
			t.Fatal(err)
		}
		r.Write(filepath.Join(r.state, "format", r.volumeID.String()), "{")
		if err := r.format(t, "ext4"); !errors.Is(err, statefile.ErrFolder) {
			t.Errorf("%v, want ErrFolder", err)
		}
	})
}

// After mkfs was killed, for example with the plugin's container, it can run again in the same guest.
func TestFormatAgainAfterKill(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	blank, err := device.ProveBlank(t.Context(), r.dev, device.BlankOptions{Origin: device.OriginBlank})
	if err != nil {
		t.Fatal(err)
	}
	sequence := blank.Sequence()
	if err := blank.Close(); err != nil {
		t.Fatal(err)
	}
	bootID, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		t.Fatal(err)
	}
	// A killed mkfs leaves some of its bytes, no superblock, and the record.
	file, err := os.OpenFile(r.disk.Loop, os.O_WRONLY|unix.O_SYNC, 0)
	if err != nil {
		t.Fatal(err)
	}
	_, err = file.WriteAt([]byte("half a filesystem"), 128<<20)
	if err := errors.Join(err, file.Close()); err != nil {
		t.Fatal(err)
	}
	if err := r.format(t, "ext4"); !errors.Is(err, device.ErrNotBlank) {
		t.Fatalf("without a record: %v, want ErrNotBlank", err)
	}
	if sequence == 0 {
		t.Fatal("this kernel does not count disks: the rest of the test needs Linux 5.15")
	}
	folder := filepath.Join(r.state, "format")
	if err := os.MkdirAll(folder, 0o700); err != nil {
		t.Fatal(err)
	}
	record := func(boot string, sequence uint64) {
		t.Helper()
		r.Write(
			filepath.Join(folder, r.volumeID.String()),
			`{"bootID":"`+boot+`","diskSequence":`+strconv.FormatUint(sequence, 10)+`}`,
		)
	}
	thisBoot := strings.TrimSpace(string(bootID))
	for what, write := range map[string]func(){
		"an earlier boot":    func() { record("another", sequence) },
		"another attachment": func() { record(thisBoot, sequence-1) },
	} {
		write()
		if err := r.format(t, "ext4"); !errors.Is(err, device.ErrNotBlank) {
			t.Fatalf("with a record of %s: %v, want ErrNotBlank", what, err)
		}
	}
	record(thisBoot, sequence)
	if err := r.format(t, "ext4"); err != nil {
		t.Errorf("with a record of this very attachment: %v", err)
	}
}

func TestMountRefuses(t *testing.T) {
	t.Parallel()
	const secret = "24691357" // without swidth
	t.Run("a flag the kernel refuses stays secret", func(t *testing.T) {
		t.Parallel()
		r := newRig(t)
		if err := r.format(t, "xfs"); err != nil {
			t.Fatal(err)
		}
		target := t.TempDir()
		err := mount.Filesystem(t.Context(), r.dev, target, "xfs", mount.Options{Flags: []string{"sunit=" + secret}})
		if !errors.Is(err, mount.ErrMount) {
			t.Fatalf("%v, want ErrMount", err)
		}
		if strings.Contains(err.Error(), secret) {
			t.Errorf("the error shows the flag's value: %v", err)
		}
		if !strings.Contains(err.Error(), "bad option") {
			t.Errorf("the error does not have mount's own words: %v", err)
		}
		if entry, ok := at(t, target); ok {
			t.Errorf("mounted is %v", entry)
		}
	})
	t.Run("a forbidden flag", func(t *testing.T) {
		t.Parallel()
		r := newRig(t)
		err := mount.Filesystem(t.Context(), r.dev, t.TempDir(), "ext4", mount.Options{Flags: []string{"loop=" + secret}})
		if !errors.Is(err, filesystem.ErrOption) || strings.Contains(err.Error(), secret) {
			t.Errorf("%v, want ErrOption without the value", err)
		}
	})
	t.Run("nothing on the disk", func(t *testing.T) {
		t.Parallel()
		r := newRig(t)
		if err := mount.Filesystem(
			t.Context(),
			r.dev,
			t.TempDir(),
			"ext4",
			mount.Options{},
		); !errors.Is(
			err,
			mount.ErrMount,
		) {
			t.Errorf("%v, want ErrMount", err)
		}
	})
	t.Run("a write-protected disk is not mounted read-only instead", func(t *testing.T) {
		t.Parallel()
		r := newRig(t)
		if err := r.format(t, "ext4"); err != nil {
			t.Fatal(err)
		}
		if err := r.dev.SetReadOnly(true); err != nil {
			t.Fatal(err)
		}
		target := t.TempDir()
		if err := mount.Filesystem(t.Context(), r.dev, target, "ext4", mount.Options{}); !errors.Is(err, mount.ErrMount) {
			t.Errorf("%v, want ErrMount", err)
		}
		if entry, ok := at(t, target); ok {
			t.Errorf("mounted is %v", entry)
		}
	})
}

// A snapshot of a filesystem in use has a journal to replay, which is impossible on a read-only disk.
func TestMountReadOnlyDisk(t *testing.T) {
	t.Parallel()
	for _, fsType := range filesystem.Types() {
		t.Run(fsType, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			target := r.mounted(t, fsType, mount.Options{})
			if err := os.WriteFile(filepath.Join(target, "file"), []byte("data"), 0o600); err != nil {
				t.Fatal(err)
			}
			devicetest.Run(t, "sync", "-f", target)
			snapshot := filepath.Join(t.TempDir(), "snapshot")
			devicetest.Run(t, "cp", "--sparse=always", r.disk.Backing, snapshot)
			r.Plug("csi-snapshotofthedisk", snapshot)
			dev, err := r.Roots().
				WaitForDisk(t.Context(), device.ExpectedDisk{Serial: devicetest.Serial("csi-snapshotofthedisk")}, time.Second)
			if err != nil {
				t.Fatal(err)
			}
			if err := dev.SetReadOnly(true); err != nil {
				t.Fatal(err)
			}
			second := t.TempDir()
			if err := mount.Filesystem(t.Context(), dev, second, fsType, mount.Options{ReadOnlyDisk: true}); err != nil {
				t.Fatal(err)
			}
			if entry, ok := at(t, second); !ok || !entry.ReadOnly || entry.Number != dev.Number {
				t.Errorf("mounted is %v, %t", entry, ok)
			}
			if err := mount.Unmount(t.Context(), second, dev.Number); err != nil {
				t.Error(err)
			}
		})
	}
}

// Unmount of a filesystem in use returns ErrBusy before its context ends. It succeeds after the last user has ended.
// The test needs real time: the kernel decides whether the filesystem is in use.
func TestUnmountBusy(t *testing.T) {
	r := newRig(t)
	target := r.mounted(t, "ext4", mount.Options{})
	holder := exec.Command("sleep", "600")
	holder.Dir = target
	if err := hostexec.Start(holder); err != nil {
		t.Fatal(err)
	}
	// busy calls do until its error comes in time and names the mount and who uses it: a busy machine may need longer.
	busy := func(names string, do func(ctx context.Context) error) {
		t.Helper()
		await.Eventually(t, "the error comes in time and names "+names, func() bool {
			ctx, cancel := context.WithTimeout(t.Context(), 1500*time.Millisecond)
			defer cancel()
			err := do(ctx)
			if !errors.Is(err, mount.ErrBusy) {
				t.Fatalf("%v, want ErrBusy", err)
			}
			return ctx.Err() == nil && strings.Contains(err.Error(), names) && strings.Contains(err.Error(), target)
		})
	}
	busy("(sleep)", func(ctx context.Context) error { return mount.Unmount(ctx, target, r.dev.Number) })
	if _, ok := at(t, target); !ok {
		t.Error("the mount was unmounted although it is in use")
	}
	busy(target, func(ctx context.Context) error {
		_, err := mount.WaitFree(ctx, r.dev, 0, false, true)
		return err
	})

	done := make(chan error, 1)
	go func() { done <- mount.Unmount(context.Background(), target, r.dev.Number) }()
	if err := holder.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = holder.Wait() // it was killed
	if err := <-done; err != nil {
		t.Errorf("after the holder ended: %v", err)
	}
}

func TestUnmountOfSomethingElse(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	target := r.mounted(t, "ext4", mount.Options{})
	if err := mount.Unmount(t.Context(), target, device.Number{Major: 4095, Minor: 1}); !errors.Is(err, mount.ErrForeign) {
		t.Errorf("%v, want ErrForeign", err)
	}
	if _, ok := at(t, target); !ok {
		t.Error("the mount of another device was unmounted")
	}
}

func TestUnmountTakesTheWholeStack(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	target := r.mounted(t, "ext4", mount.Options{})
	if err := mount.Bind(target, target, false); err != nil {
		t.Fatal(err)
	}
	r.unmount(t, target)
	if entry, ok := at(t, target); ok {
		t.Errorf("still mounted: %v", entry)
	}
}

// A copy of the mount that went while the disk was waited for is not reported.
//
// This test takes real time, because the holder is a process.
func TestWaitFreeForgetsACopyThatWent(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	target := r.mounted(t, "ext4", mount.Options{})
	holder := devicetest.HoldMountNamespace(t, filepath.Dir(target), "")
	r.unmount(t, target)
	var ended sync.WaitGroup
	ended.Go(func() {
		time.Sleep(time.Second)
		holder.End()
	})
	defer ended.Wait()
	if copies, err := mount.WaitFree(t.Context(), r.dev, 0, false, true); err != nil || len(copies) > 0 {
		t.Errorf("%v, %v", copies, err)
	}
}

// Where the kernel does not show whether a disk is closed, here because the disk has no whole page, the open files of
// the node decide.
func TestWaitFreeWithoutTheKernelsProof(t *testing.T) {
	t.Parallel()
	r := newRigOf(t, 2048, 0)
	if _, err := r.dev.IsClosed(0); !errors.Is(err, device.ErrNoProof) {
		t.Fatalf("the kernel proves something: %v", err)
	}
	holder := devicetest.Hold(t, "exec 3>"+r.disk.Loop)
	ctx, cancel := context.WithTimeout(t.Context(), 1200*time.Millisecond) // real time: the holder is a process
	defer cancel()
	if _, err := mount.WaitFree(ctx, r.dev, 0, false, true); !errors.Is(err, mount.ErrBusy) {
		t.Errorf("open for writing: %v, want ErrBusy", err)
	}
	holder.End()
	if _, err := mount.WaitFree(t.Context(), r.dev, 0, false, true); err != nil {
		t.Errorf("closed: %v", err)
	}
}

func TestReleaseWaitsForPrograms(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	holder := exec.Command("sleep", "600")
	open, err := os.Open(r.dev.Path)
	if err != nil {
		t.Fatal(err)
	}
	holder.ExtraFiles = []*os.File{open}
	if err := hostexec.Start(holder); err != nil {
		t.Fatal(err)
	}
	if err := open.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := mount.WaitFree(t.Context(), r.dev, 0, false, true); err != nil {
		t.Errorf("of a filesystem: %v", err)
	}
	// Real time, because the holder is a process. The last second is kept for the answer, so this waits 0.2 s.
	ctx, cancel := context.WithTimeout(t.Context(), 1200*time.Millisecond)
	defer cancel()
	if _, err := mount.WaitFree(ctx, r.dev, 0, true, false); !errors.Is(err, mount.ErrBusy) ||
		!strings.Contains(err.Error(), "(sleep)") {
		t.Errorf("of a raw block volume: %v, want ErrBusy naming sleep", err)
	}
	if err := holder.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = holder.Wait() // it was killed
	if _, err := mount.WaitFree(t.Context(), r.dev, 0, true, false); err != nil {
		t.Error(err)
	}
	r.Unplug(r.disk)
	if _, err := mount.WaitFree(t.Context(), r.dev, 0, true, false); !device.HasLeft(err) {
		t.Errorf("of a disk that has left: %v", err)
	}
}

func TestBindDeviceNode(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	target := filepath.Join(t.TempDir(), "device")
	if err := mount.MakeFile(target); err != nil {
		t.Fatal(err)
	}
	if err := mount.Bind(r.dev.Path, target, false); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.unmount(t, target) })
	entry, ok := at(t, target)
	if !ok || !entry.Block() || entry.NodeRemoved() {
		t.Fatalf("mounted is %v, %t; want a bound device node", entry, ok)
	}
	if number, ok := entry.Device(); !ok || number != r.disk.Number {
		t.Errorf("its device is %v, %t; want %v", number, ok, r.disk.Number)
	}
	table, err := mount.ReadTable()
	if err != nil {
		t.Fatal(err)
	}
	if uses := table.OfDevice(r.disk.Number); len(uses) != 1 || uses[0].Path != target {
		t.Errorf("uses of the device: %v", uses)
	}
	r.Unplug(r.disk)
	if entry, ok := at(t, target); !ok || !entry.NodeRemoved() {
		t.Errorf("after the disk has left: %v, %t; want it to show", entry, ok)
	}
}

func TestResolve(t *testing.T) {
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	for _, folder := range []string{"real/inner"} {
		if err := os.MkdirAll(filepath.Join(dir, folder), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("real", filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{
		"real/inner": "real/inner", "link/inner": "real/inner", "link/inner/": "real/inner", "link/missing": "real/missing", "real/../link/inner": "real/inner",
	} {
		if got, err := mount.Resolve(filepath.Join(dir) + "/" + path); err != nil || got != filepath.Join(dir, want) {
			t.Errorf("%s: %s, %v; want %s", path, got, err, want)
		}
	}
	if got, err := mount.Resolve(filepath.Join(dir, "link")); !errors.Is(err, mount.ErrForeign) {
		t.Errorf("a link as target: %s, %v; want ErrForeign", got, err)
	}
	if got, err := mount.Resolve(filepath.Join(dir, "missing/inner")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a missing parent: %s, %v; want fs.ErrNotExist", got, err)
	}
}

func TestMakeAndRemove(t *testing.T) {
	dir := t.TempDir()
	path := func(name string) string { return filepath.Join(dir, name) }
	// The sticky bit has an effect on a folder that others can write to.
	for name, mode := range map[string]fs.FileMode{"full": 0o755, "empty": 0o755, "shared": fs.ModeSticky | 0o770} {
		if err := errors.Join(os.Mkdir(path(name), 0o755), os.Chmod(path(name), mode)); err != nil {
			t.Fatal(err)
		}
	}
	for name, content := range map[string]string{"full/file": "data", "file": "data", "nothing": ""} {
		if err := os.WriteFile(path(name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("empty", path("link")); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		what string
		do   func(string) error
		name string
		want error
	}{
		{"make folder", mount.MakeFolder, "new", nil},
		{"make folder again", mount.MakeFolder, "new", nil},
		{"make folder", mount.MakeFolder, "full", mount.ErrForeign},
		{"make folder", mount.MakeFolder, "file", mount.ErrForeign},
		{"make folder", mount.MakeFolder, "no/parent", fs.ErrNotExist},
		{"make file", mount.MakeFile, "newfile", nil},
		{"make file again", mount.MakeFile, "newfile", nil},
		{"make file", mount.MakeFile, "file", mount.ErrForeign},
		{"make file", mount.MakeFile, "empty", mount.ErrForeign},
		{"make file", mount.MakeFile, "link", mount.ErrForeign},
		{"remove", mount.Remove, "full", mount.ErrForeign},
		{"remove", mount.Remove, "file", mount.ErrForeign},
		{"remove", mount.Remove, "link", mount.ErrForeign},
		{"remove", mount.Remove, "empty", nil},
		{"remove", mount.Remove, "nothing", nil},
		{"remove", mount.Remove, "shared", nil},
		{"remove", mount.Remove, "new", nil},
		{"remove", mount.Remove, "newfile", nil},
		{"remove again", mount.Remove, "newfile", nil},
	} {
		if err := tc.do(path(tc.name)); !errors.Is(err, tc.want) {
			t.Errorf("%s %s: %v, want %v", tc.what, tc.name, err, tc.want)
		}
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var left []string
	for _, entry := range entries {
		left = append(left, entry.Name())
	}
	// What was there before stays.
	if diff := cmp.Diff([]string{"empty", "file", "full", "link", "nothing", "shared"}, left); diff != "" {
		t.Errorf("left (-want +got):\n%s", diff)
	}
	if content, err := os.ReadFile(path("full/file")); err != nil || !bytes.Equal(content, []byte("data")) {
		t.Errorf("the file in the full folder: %q, %v", content, err)
	}
}

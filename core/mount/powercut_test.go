// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package mount

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/google/uuid"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
	"github.com/oxidecomputer/oxide-csi-plugin/core/device/devicetest"
	"github.com/oxidecomputer/oxide-csi-plugin/core/filesystem"
	"github.com/oxidecomputer/oxide-csi-plugin/core/filesystem/filesystemtest"
	"github.com/oxidecomputer/oxide-csi-plugin/core/hostexec"
	"github.com/oxidecomputer/oxide-csi-plugin/test/writecache"
)

// Fsynced files outlive a power cut of a disk with a write cache, also those that are written afterwards beside them.
// What was not flushed is lost as a whole, or in part. This is so with each choice that the allow-list of mkfs offers,
// on a disk that has grown meanwhile, and with what users make by hand.
func TestFsyncedFilesOutliveAPowerCut(t *testing.T) {
	t.Parallel()
	rows := map[string][]string{
		"ext4": {"mkfs.ext4", "-q"}, "ext4 without journal": {"mkfs.ext4", "-q", "-O", "^has_journal"},
		"ext3": {"mkfs.ext3", "-q"}, "xfs": {"mkfs.xfs", "-q"}, "btrfs": {"mkfs.btrfs", "-q"},
		// No option that is allowed, but a user's own filesystem may have it.
		"ext4 with fast commits":             {"mkfs.ext4", "-q", "-O", "fast_commit"},
		"ext4 with fast commits in bigalloc": {"mkfs.ext4", "-q", "-O", "fast_commit,bigalloc"},
		"ext4 with many features": {
			"mkfs.ext4", "-q", "-I", "256", "-O",
			"bigalloc,inline_data,ea_inode,large_dir,orphan_file,metadata_csum_seed,^resize_inode",
		},
	}
	tooOldFor := func(name string) bool {
		return strings.Contains(name, "orphan_file") && devicetest.OlderThan(t, "mkfs.ext4", "1.47") ||
			strings.Contains(name, "nrext64") && devicetest.OlderThan(t, "mkfs.xfs", "5.19")
	}
	if many := rows["ext4 with many features"]; tooOldFor(many[5]) {
		many[5] = strings.Replace(many[5], "orphan_file,", "", 1)
	}
	exits := &exitCodes{}
	t.Cleanup(func() { exits.check(t) })
	for name, mkfs := range rows {
		for _, seed := range []uint64{0, 1, 2} {
			t.Run(fmt.Sprintf("%s, seed %d", name, seed), func(t *testing.T) {
				t.Parallel()
				powerCut{mkfs: mkfs, seed: seed, exits: exits}.test(t)
			})
		}
	}
	for _, fsType := range filesystem.Types() {
		for i, options := range filesystemtest.Choices(fsType) {
			name := fsType + " " + options
			options = cmp.Or(companions[name], options)
			if tooOldFor(name) {
				continue // TestOptionsFitTheDisk has the refusal
			}
			// e2fsck 1.46.2 takes a path with "=" for a tag like LABEL=.
			t.Run(strings.ReplaceAll(name, "=", " "), func(t *testing.T) {
				t.Parallel()
				_, args, err := mkfs(NewFilesystem{Type: fsType, MkfsOptions: strings.Fields(options)}, uuid.NewString())
				if err != nil {
					t.Fatal(err)
				}
				mkfs := append([]string{"mkfs." + fsType}, args...)
				powerCut{
					mkfs: mkfs, seed: uint64(i % 3), missing: notEverywhere[name], exits: exits,
					grown: true, growsMounted: growsMounted[name],
				}.test(t)
			})
		}
	}
}

// Nothing that was done to the disk between the power cut and the writable mount loses an fsynced file.
func TestFsyncedFilesOutliveWhatFollowsAPowerCut(t *testing.T) {
	t.Parallel()
	mountOnce := func(options Options) func(*testing.T, *Repairs, device.Device, uuid.UUID, string) {
		return func(t *testing.T, r *Repairs, dev device.Device, volumeID uuid.UUID, fsType string) {
			t.Helper()
			target := t.TempDir()
			if err := dev.SetReadOnly(options.ReadOnlyDisk); err != nil {
				t.Fatal(err)
			}
			if err := r.Mount(t.Context(), dev, volumeID, target, fsType, options); err != nil {
				t.Fatal(err)
			}
			unmountIdle(t, target, dev)
			if err := dev.SetReadOnly(false); err != nil {
				t.Fatal(err)
			}
		}
	}
	interrupt := func(work device.Work) func(*testing.T, *Repairs, device.Device, uuid.UUID, string) {
		return func(t *testing.T, r *Repairs, dev device.Device, volumeID uuid.UUID, _ string) {
			t.Helper()
			if err := device.WriteWorkMarker(dev, volumeID, work); err != nil {
				t.Fatal(err)
			}
			if err := r.FinishInterrupted(t.Context(), dev, volumeID, Options{}); err != nil {
				t.Fatal(err)
			}
		}
	}
	// exits runs a program by hand, and wants this exit code.
	exits := func(want int, name string, args ...string) func(*testing.T, *Repairs, device.Device, uuid.UUID, string) {
		return func(t *testing.T, _ *Repairs, dev device.Device, _ uuid.UUID, _ string) {
			t.Helper()
			command := exec.Command(name, append(args, dev.Path)...)
			if out, err := command.CombinedOutput(); command.ProcessState.ExitCode() != want {
				t.Fatalf("%s: %v, want exit code %d\n%s", name, err, want, out)
			}
		}
	}
	ext4 := [][]string{{"mkfs.ext4", "-q"}, {"mkfs.ext4", "-q", "-O", "fast_commit"}}
	xfs, btrfs := [][]string{{"mkfs.xfs", "-q"}}, [][]string{{"mkfs.btrfs", "-q"}}
	all := slices.Concat(ext4, xfs, btrfs)
	for name, tc := range map[string]struct {
		mkfs [][]string
		powerCut
	}{
		"read-only disk":      {all, powerCut{between: mountOnce(Options{ReadOnlyDisk: true})}},
		"read-only mount":     {all, powerCut{between: mountOnce(Options{Flags: []string{"ro"}})}},
		"larger disk":         {all, powerCut{grown: true}},
		"larger and unable":   {ext4, powerCut{grown: true, incapable: true}},
		"an error in the ext": {ext4, powerCut{between: exits(0, "debugfs", "-w", "-R", "set_super_value state 3")}},
		"a check killed":      {ext4, powerCut{between: interrupt(device.Checking)}},
		"a growth killed":     {ext4, powerCut{between: interrupt(device.Growing)}},
		"a folder":            {ext4, powerCut{last: makeFolder}},
		"a deleted file":      {ext4, powerCut{last: deleteFile}},
		// What errors of ours, and the pages, advise to run. Before the kernel's replay, xfs_repair refuses with 2.
		"xfs_repair refused": {xfs, powerCut{between: exits(2, "xfs_repair")}},
		"xfs_repair": {xfs, powerCut{between: func(t *testing.T, r *Repairs, d device.Device, v uuid.UUID, fsType string) {
			mountOnce(Options{})(t, r, d, v, fsType)
			exits(0, "xfs_repair")(t, r, d, v, fsType)
		}}},
		"btrfs check": {btrfs, powerCut{between: exits(0, "btrfs", "check")}},
	} {
		for _, mkfs := range tc.mkfs {
			t.Run(name+", "+strings.Join(mkfs, " "), func(t *testing.T) {
				t.Parallel()
				p := tc.powerCut
				p.mkfs, p.exits = mkfs, &exitCodes{}
				p.test(t)
			})
		}
	}
}

// makeFolder and deleteFile leave something in the fast commits: an fsync of a folder would make a full commit of it.
func makeFolder(t *testing.T, target string) {
	t.Helper()
	folder, other := filepath.Join(target, "folder"), filepath.Join(target, "other folder")
	if err := errors.Join(os.Mkdir(folder, 0o700), os.Mkdir(other, 0o700), os.Remove(other)); err != nil {
		t.Fatal(err)
	}
	writeSynced(t, filepath.Join(folder, "file"))
}

func deleteFile(t *testing.T, target string) {
	t.Helper()
	devicetest.Run(t, "sync", "-f", target)
	if err := os.Remove(filepath.Join(target, "old")); err != nil {
		t.Fatal(err)
	}
	writeSynced(t, filepath.Join(target, "file"))
}

func writeSynced(t *testing.T, path string) {
	t.Helper()
	file, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	_, err = file.Write(fsyncedContent("file", 0))
	if err := errors.Join(err, file.Sync(), file.Close()); err != nil {
		t.Fatal(err)
	}
}

// companions are the options with which mkfs takes an option that it refuses alone.
var companions = map[string]string{
	"ext3 -I 2048": "-I 2048 -b 4096", "ext4 -I 2048": "-I 2048 -b 4096",
	"ext3 -I 4096": "-I 4096 -b 4096 -i 65536", "ext4 -I 4096": "-I 4096 -b 4096 -i 65536",
	"ext3 -O meta_bg":       "-O meta_bg,^resize_inode",
	"ext3 -O ^sparse_super": "-O ^sparse_super,^resize_inode",
	"ext4 -O meta_bg":       "-O meta_bg,^resize_inode",
	"ext4 -O ^sparse_super": "-O ^sparse_super,^resize_inode",
	"btrfs -O mixed-bg":     "-O mixed-bg -n 4096",
}

// notEverywhere are the choices that some kernels cannot mount, with the option of the kernel that is missing.
var notEverywhere = map[string]string{
	"ext4 -O verity": "CONFIG_FS_VERITY",
}

// growsMounted are the choices with which a filesystem grows only while it is mounted.
var growsMounted = map[string]bool{
	"ext3 -O ^resize_inode": true, "ext3 -O ^sparse_super": true,
	"ext4 -O ^resize_inode": true, "ext4 -O ^sparse_super": true, "ext4 -O bigalloc": true,
}

// exitCodes are the exit codes of e2fsck after which fsynced files were still there.
type exitCodes struct {
	mu   sync.Mutex
	seen []int
}

func (e *exitCodes) add(code int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.seen = append(e.seen, code)
}

// check fails unless each exit code that counts as good was seen, and no other.
func (e *exitCodes) check(t *testing.T) {
	slices.Sort(e.seen)
	var want []int
	for code := range e2fsckFixed + 1 {
		want = append(want, code)
	}
	if devicetest.StopsWithoutJournal(t) { // what other versions repair, it leaves to an operator
		want[e2fsckFixed] = e2fsckErrorsLeft
	}
	if diff := gocmp.Diff(want, slices.Compact(e.seen)); diff != "" && !t.Failed() {
		t.Errorf("exit codes of e2fsck (-want +got):\n%s", diff)
	}
}

// powerCut is a filesystem whose disk loses its power.
type powerCut struct {
	// mkfs makes it, and missing is what this machine's kernel may lack to mount it at all.
	mkfs    []string
	missing string
	seed    uint64
	// last happens after the files were written, and between happens after the cut.
	last    func(t *testing.T, target string)
	between func(t *testing.T, r *Repairs, dev device.Device, volumeID uuid.UUID, fsType string)
	// grown makes the disk larger after the cut. incapable takes CAP_SYS_RESOURCE away.
	grown, incapable bool
	// growsMounted says that the filesystem grows only while it is mounted. Where the kernel does not allow that, it keeps
	// its size.
	growsMounted bool
	exits        *exitCodes
}

// blocksOf returns the size of a mounted filesystem.
func blocksOf(t *testing.T, target string) uint64 {
	t.Helper()
	var stat unix.Statfs_t
	if err := unix.Statfs(target, &stat); err != nil {
		t.Fatal(err)
	}
	return stat.Blocks
}

func (p powerCut) test(t *testing.T) {
	guest := devicetest.New(t)
	backing := filepath.Join(t.TempDir(), "disk")
	if err := errors.Join(os.WriteFile(backing, nil, 0o600), os.Truncate(backing, 320<<20)); err != nil {
		t.Fatal(err)
	}
	devicetest.Run(t, p.mkfs[0], append(p.mkfs[1:], backing)...)
	fsType := p.mkfs[0][len("mkfs."):]
	plug := func(name, path string) device.Device {
		t.Helper()
		dev, err := guest.Roots().ByNumber(guest.Plug(name, path).Number)
		if err != nil {
			t.Fatal(err)
		}
		return dev
	}
	r, volumeID := NewRepairs(slog.New(slog.DiscardHandler)), uuid.New()
	r.growsMounted = !p.incapable
	r.run = func(ctx context.Context, name string, args ...string) (hostexec.Result, error) {
		result, err := hostexec.Run(ctx, name, args...)
		if name == "e2fsck" {
			p.exits.add(result.ExitCode)
		}
		return result, err
	}
	cache := writecache.New(t, backing)
	before := plug("csi-beforethecut", cache.Path)
	target := t.TempDir()
	if err := r.Mount(t.Context(), before, volumeID, target, fsType, Options{}); err != nil {
		if p.missing != "" {
			t.Logf("the kernel of this machine has no %s", p.missing)
			return
		}
		t.Fatal(err)
	}
	first := blocksOf(t, target)
	writeFsynced(t, target, "old")
	if p.last != nil {
		p.last(t, target)
	}
	cache.Cut(p.seed)
	unmountIdle(t, target, before)

	if p.grown {
		if err := os.Truncate(backing, 640<<20); err != nil {
			t.Fatal(err)
		}
	}
	after := plug("csi-afterthecut", backing)
	if p.between != nil {
		p.between(t, r, after, volumeID, fsType)
	}
	err := r.Mount(t.Context(), after, volumeID, target, fsType, Options{})
	if slices.Contains(p.mkfs, "^has_journal") && devicetest.StopsWithoutJournal(t) {
		if !errors.Is(err, ErrDamaged) || !strings.Contains(err.Error(), "run e2fsck -f ") {
			t.Errorf("%v, want ErrDamaged with advice", err)
		}
		devicetest.RepairByHand(t, after.Path)
		err = r.Mount(t.Context(), after, volumeID, target, fsType, Options{})
	}
	if err != nil {
		t.Fatal(err)
	}
	err = r.Grow(t.Context(), after, volumeID, target, fsType, Options{})
	if err != nil && (!p.growsMounted || mayGrowMounted() || !errors.Is(err, ErrGrow)) {
		t.Fatal(err)
	}
	if size := blocksOf(t, target); (size > first*3/2) != (p.grown && err == nil) {
		t.Errorf("the filesystem had %d blocks and has %d; larger disk: %t, growth: %v", first, size, p.grown, err)
	}
	writeFsynced(t, target, "new")
	wantFiles(t, target, "old", "new")
	unmountIdle(t, target, after)
	if isExt(fsType) {
		devicetest.Run(t, "e2fsck", "-f", "-n", after.Path)
	}
}

func unmountIdle(t *testing.T, target string, dev device.Device) {
	t.Helper()
	if err := errors.Join(Unmount(context.Background(), target, dev.Number), WaitIdle(t.Context(), dev)); err != nil {
		t.Fatal(err)
	}
}

const fsyncedFiles = 20

func fsyncedContent(kind string, i int) []byte {
	return bytes.Repeat(fmt.Appendf(nil, "%s %02d ", kind, i), 4<<10)
}

func writeFsynced(t *testing.T, target, kind string) {
	t.Helper()
	folder, err := os.Open(target)
	if err != nil {
		t.Fatal(err)
	}
	for i := range fsyncedFiles {
		file, err := os.Create(filepath.Join(target, fmt.Sprint(kind, i)))
		if err != nil {
			t.Fatal(err)
		}
		_, err = file.Write(fsyncedContent(kind, i))
		if err := errors.Join(err, file.Sync(), file.Close(), folder.Sync()); err != nil {
			t.Fatal(err)
		}
	}
	// The kernel sends this to the disk some time, or not.
	if err := errors.Join(os.WriteFile(filepath.Join(target, kind), []byte("lost"), 0o600), folder.Close()); err != nil {
		t.Fatal(err)
	}
}

func wantFiles(t *testing.T, target string, kinds ...string) {
	t.Helper()
	lost := 0
	for _, kind := range kinds {
		for i := range fsyncedFiles {
			got, err := os.ReadFile(filepath.Join(target, fmt.Sprint(kind, i)))
			if err != nil || !bytes.Equal(got, fsyncedContent(kind, i)) {
				lost++
			}
		}
	}
	if lost > 0 {
		t.Errorf("%d of %d fsynced files are lost", lost, len(kinds)*fsyncedFiles)
	}
}

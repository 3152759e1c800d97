// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package node_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/oxidecomputer/oxide-csi-plugin/core"
	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
	"github.com/oxidecomputer/oxide-csi-plugin/core/device/devicetest"
	"github.com/oxidecomputer/oxide-csi-plugin/core/filesystem"
	"github.com/oxidecomputer/oxide-csi-plugin/core/hostexec"
	"github.com/oxidecomputer/oxide-csi-plugin/core/mount"
	"github.com/oxidecomputer/oxide-csi-plugin/core/node"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata/static"
	"github.com/oxidecomputer/oxide-csi-plugin/test/coretest"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/guest"
	"github.com/oxidecomputer/oxide-csi-plugin/test/writers"
)

const (
	guestID = "11111111-2222-4333-8444-555555555555"
	// volumeA and volumeB are IDs for tests that need a volume's ID before the volume exists.
	volumeA      = "aaaaaaaa-0000-4000-8000-000000000001"
	volumeB      = "bbbbbbbb-0000-4000-8000-000000000002"
	diskA, diskB = "csi-aaaaaaaaaaaaaaaa", "csi-bbbbbbbbbbbbbbbb"
	// volumeBytes is about the smallest size that mkfs.xfs accepts.
	volumeBytes = 320 << 20
)

func TestMain(m *testing.M) { devicetest.Main(m) }

// nodeRig is a Node service on a real socket, in a guest of the simulated rack, and a client that makes an
// orchestrator's calls.
type nodeRig struct {
	t      *testing.T
	guests *guest.Guests
	csi.NodeClient
	// service is the Node service that NodeClient calls.
	service *node.Service
	log     bytes.Buffer
	dir     string
	// change changes the options of each Node service before its start.
	change func(*node.Options)
}

func newNodeRig(t *testing.T, change ...func(*node.Options)) *nodeRig {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: loop devices, device nodes and mounts")
	}
	dir, err := filepath.EvalSymlinks(t.TempDir())
	coretest.Must(t, err)
	r := &nodeRig{t: t, dir: dir, change: func(opts *node.Options) {
		for _, c := range change {
			c(opts)
		}
	}}
	r.guests, err = guest.New(
		guest.Options{Root: filepath.Join(dir, "guests"), StateDir: filepath.Join(dir, "disks"), Log: coretest.DiscardLog()},
	)
	coretest.Must(t, err)
	t.Cleanup(func() { coretest.Must(t, r.guests.Close()) })
	t.Cleanup(r.unmountAll)
	coretest.Must(t, r.guests.CreateInstance(guestID, "node-a"))
	r.makeDisk("boot")
	coretest.Must(
		t,
		r.guests.PowerOn(
			guestID,
			[]simrack.GuestDisk{{ID: "boot", Name: "node-a-boot", SizeBytes: volumeBytes, BlockSize: 512, Boot: true}},
			nil,
		),
	)
	r.start()
	return r
}

// start starts a Node service as a new process of the plugin, which has no memory of an earlier one.
func (r *nodeRig) start() {
	r.t.Helper()
	log := slog.New(slog.NewTextHandler(&r.log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	opts := node.Options{
		Provider:       static.New(static.Options{InstanceID: guestID}),
		Rack:           "rack-1",
		MaxDisks:       8,
		Devices:        r.roots(),
		StateDir:       r.path("state"),
		BlankScanLimit: coretest.GiB,
		DeviceTimeout:  100 * time.Millisecond,
		Log:            log,
	}
	r.change(&opts)
	r.service = node.New(opts)
	conn, _ := coretest.Serve(r.t, core.NewServer(core.ServerOptions{
		Mode: "node", Identity: core.NewIdentity("test", "", &core.Readiness{}), Node: r.service, Log: log,
	}))
	r.NodeClient = csi.NewNodeClient(conn)
}

func (r *nodeRig) path(name string) string { return filepath.Join(r.dir, name) }

func (r *nodeRig) roots() device.Roots {
	return device.Roots{Dev: filepath.Join(r.guests.Dir(guestID), "dev"), Sys: filepath.Join(r.guests.Dir(guestID), "sys")}
}

func (r *nodeRig) makeDisk(id string) { coretest.Must(r.t, r.guests.CreateDisk(id, volumeBytes)) }

// volume is a volume and its disk.
type volume struct {
	id, disk        string
	publish, volume map[string]string
	// secrets are those of NodeStageVolume.
	secrets map[string]string
	staging string
}

// newVolume makes a blank disk and attaches it. Each volume has its own ID: the UUID of its filesystem follows from the
// ID, and the kernel of this machine mixes two btrfs of the same UUID, also between tests that run at the same time.
func (r *nodeRig) newVolume(disk string) *volume {
	r.t.Helper()
	return r.newVolumeWithID(uuid.NewString(), disk)
}

// newVolumeWithID is newVolume with a given ID. A test that uses it must not make a btrfs.
func (r *nodeRig) newVolumeWithID(id, disk string) *volume {
	r.t.Helper()
	r.makeDisk(id)
	v := &volume{
		id: id, disk: disk, staging: r.path("staging-" + disk),
		publish: publishContext(id, disk),
		volume:  map[string]string{rpc.KeyDiskName: disk, rpc.KeySizeBytes: fmt.Sprint(volumeBytes), rpc.KeyBlockSize: "512"},
	}
	coretest.Must(r.t, os.Mkdir(v.staging, 0o755))
	r.plug(v)
	return v
}

// publishContext returns what the controller says about a blank disk.
func publishContext(id, disk string) map[string]string {
	return map[string]string{
		rpc.KeyDiskName: disk, rpc.KeyDiskID: id, rpc.KeySizeBytes: fmt.Sprint(volumeBytes), rpc.KeyBlockSize: "512",
		rpc.KeyOrigin: rpc.OriginBlank, rpc.KeyReadOnly: "false",
	}
}

func (r *nodeRig) plug(v *volume) {
	r.t.Helper()
	slot := 1
	if v.disk != diskA {
		slot = 2
	}
	coretest.Must(
		r.t,
		r.guests.Plug(guestID, simrack.GuestDisk{ID: v.id, Name: v.disk, Slot: slot, SizeBytes: volumeBytes, BlockSize: 512}),
	)
}

func (r *nodeRig) unplug(v *volume) {
	r.t.Helper()
	coretest.Must(r.t, r.guests.Unplug(guestID, v.id))
}

// node returns the path of the disk's device node.
func (r *nodeRig) node(v *volume) string {
	r.t.Helper()
	name := r.guests.Device(guestID, v.id)
	if name == "" {
		r.t.Fatalf("the guest shows no device for %s", v.disk)
	}
	return filepath.Join(r.guests.Dir(guestID), "dev", name)
}

// number returns the disk's device number.
func (r *nodeRig) number(v *volume) uint64 {
	r.t.Helper()
	var stat unix.Stat_t
	coretest.Must(r.t, unix.Stat(r.node(v), &stat))
	return stat.Rdev
}

// poke writes to the disk.
func (r *nodeRig) poke(v *volume, offset int64, content string) {
	r.t.Helper()
	file, err := os.OpenFile(r.node(v), os.O_WRONLY|unix.O_SYNC, 0)
	coretest.Must(r.t, err)
	_, err = file.WriteAt([]byte(content), offset)
	coretest.Must(r.t, errors.Join(err, file.Close()))
}

// writeFormatMarker writes the marker that package device writes before a format, at one of its offsets.
func (r *nodeRig) writeFormatMarker(v *volume) {
	r.t.Helper()
	marker := make([]byte, 4096)
	copy(marker, "csi.oxide.computer format marker 1\ndisk "+v.id+"\n"+
		"This disk was blank, and a filesystem is being made on it. Where this still stands beside no filesystem, or beside one that\n"+
		"was never mounted, making it was interrupted: NodeStageVolume makes it again and then removes this text.\n")
	r.poke(v, volumeBytes/19*7/4096*4096, string(marker))
}

// digest returns a fingerprint of the disk's bytes.
func (r *nodeRig) digest(v *volume) string {
	r.t.Helper()
	return devicetest.Digest(r.t, r.node(v), r.path("disks/"+v.id+".disk"))
}

func (r *nodeRig) run(name string, args ...string) {
	r.t.Helper()
	devicetest.Run(r.t, name, args...)
}

// umountAndWait unmounts the only mount of the volume's disk, and waits until the disk is not in use. A process that
// has just copied the mount namespace, such as a starting container, keeps the filesystem mounted for a moment.
func (r *nodeRig) umountAndWait(v *volume, path string) {
	r.t.Helper()
	devicetest.Unmount(r.t, path)
	number := r.number(v)
	dev, err := r.roots().ByNumber(device.Number{Major: unix.Major(number), Minor: unix.Minor(number)})
	coretest.Must(r.t, err)
	_, err = mount.WaitFree(r.t.Context(), dev, 0, false, true)
	coretest.Must(r.t, err)
}

// unmountAll unmounts the mounts that a failed test left. It makes the loop devices writable for later tests.
func (r *nodeRig) unmountAll() {
	disks, err := r.roots().Disks()
	coretest.Must(r.t, err)
	for _, disk := range disks {
		dev, err := r.roots().ByNumber(disk.Number)
		coretest.Must(r.t, err)
		coretest.Must(r.t, dev.SetReadOnly(false))
	}
	table, err := mount.ReadTable()
	coretest.Must(r.t, err)
	for i := len(table) - 1; i >= 0; i-- {
		if strings.HasPrefix(table[i].Path, r.dir+"/") {
			if err := unix.Unmount(table[i].Path, unix.MNT_DETACH); err != nil {
				r.t.Errorf("clean up %s: %v", table[i].Path, err)
			}
		}
	}
}

// mounts lists the paths below the test's folder that have mounts, in order.
func (r *nodeRig) mounts() []string {
	r.t.Helper()
	table, err := mount.ReadTable()
	coretest.Must(r.t, err)
	var paths []string
	for _, entry := range table {
		if path, below := strings.CutPrefix(entry.Path, r.dir+"/"); below {
			paths = append(paths, path)
		}
	}
	return paths
}

func (r *nodeRig) wantMounts(want ...string) {
	r.t.Helper()
	if diff := cmp.Diff(want, r.mounts()); diff != "" {
		r.t.Errorf("mounts (-want +got):\n%s", diff)
	}
}

const (
	writer       = csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER
	singleWriter = csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER
	multiWriter  = csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER
	readerOnly   = csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY
)

func filesystemVolume(fsType string, mode csi.VolumeCapability_AccessMode_Mode, flags ...string) *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{FsType: fsType, MountFlags: flags}},
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: mode},
	}
}

func rawBlock(mode csi.VolumeCapability_AccessMode_Mode) *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessType: &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}},
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: mode},
	}
}

func (r *nodeRig) stage(v *volume, capability *csi.VolumeCapability) error {
	return r.stageIn(r.t.Context(), v, capability)
}

// stageWithoutController stages like the command oxide-csi volume mount while no controller answers.
func (r *nodeRig) stageWithoutController(v *volume, capability *csi.VolumeCapability) error {
	return r.stageIn(metadata.AppendToOutgoingContext(r.t.Context(), rpc.MetadataOwnFilesystem, "yes"), v, capability)
}

func (r *nodeRig) stageIn(ctx context.Context, v *volume, capability *csi.VolumeCapability) error {
	_, err := r.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{
		VolumeId:          v.id,
		StagingTargetPath: v.staging,
		VolumeCapability:  capability,
		PublishContext:    v.publish,
		VolumeContext:     v.volume,
		Secrets:           v.secrets,
	})
	return err
}

// unstage unstages the volume. After an OK no program may be able to write to the disk.
func (r *nodeRig) unstage(v *volume) error {
	err := r.unstageUnchecked(v)
	if name := r.guests.Device(guestID, v.id); err == nil && name != "" {
		return writers.Check(filepath.Join(r.guests.Dir(guestID), "dev", name))
	}
	return err
}

func (r *nodeRig) unstageUnchecked(v *volume) error {
	_, err := r.NodeUnstageVolume(
		r.t.Context(),
		&csi.NodeUnstageVolumeRequest{VolumeId: v.id, StagingTargetPath: v.staging},
	)
	return err
}

func (r *nodeRig) publish(v *volume, target string, capability *csi.VolumeCapability, readOnly bool) error {
	_, err := r.NodePublishVolume(r.t.Context(), &csi.NodePublishVolumeRequest{
		VolumeId:          v.id,
		StagingTargetPath: v.staging,
		TargetPath:        r.path(target),
		VolumeCapability:  capability,
		Readonly:          readOnly,
		PublishContext:    v.publish,
		VolumeContext:     v.volume,
	})
	return err
}

func (r *nodeRig) unpublish(v *volume, target string) error {
	_, err := r.NodeUnpublishVolume(
		r.t.Context(),
		&csi.NodeUnpublishVolumeRequest{VolumeId: v.id, TargetPath: r.path(target)},
	)
	return err
}

func (r *nodeRig) stats(id, path, staging string) (*csi.NodeGetVolumeStatsResponse, error) {
	return r.NodeGetVolumeStats(
		r.t.Context(),
		&csi.NodeGetVolumeStatsRequest{VolumeId: id, VolumePath: path, StagingTargetPath: staging},
	)
}

// wantContent checks the content of a file. A missing file counts as an empty file.
func wantContent(t *testing.T, path, want string) {
	t.Helper()
	content, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) || string(content) != want {
		t.Errorf("%s holds %q, %v; want %q", path, content, err, want)
	}
}

// Each call is made twice, and once more to another process of the plugin.
func TestNodeFilesystemLife(t *testing.T) {
	t.Parallel()
	for _, fsType := range []string{"", "ext3", "ext4", "xfs"} {
		t.Run("fs_type "+fsType, func(t *testing.T) {
			t.Parallel()
			r := newNodeRig(t)
			v := r.newVolume(diskA)
			capability := filesystemVolume(fsType, writer, "noatime")
			repeat := func(what string, do func() error) {
				t.Helper()
				for _, who := range []string{"once", "again", "by another process"} {
					if who == "by another process" {
						r.start()
					}
					if err := do(); err != nil {
						t.Fatalf("%s %s: %v", what, who, err)
					}
				}
			}
			repeat("stage", func() error { return r.stage(v, capability) })
			r.wantMounts("staging-" + diskA)
			repeat("publish", func() error { return r.publish(v, "target", capability, false) })
			r.wantMounts("staging-"+diskA, "target")
			coretest.Must(t, os.WriteFile(r.path("target/file"), []byte("data"), 0o600))

			for _, path := range []string{"target", "staging-" + diskA} {
				stats, err := r.stats(v.id, r.path(path), v.staging)
				coretest.Must(t, err)
				usage := stats.GetUsage()
				if len(usage) != 2 ||
					usage[0].GetUnit() != csi.VolumeUsage_BYTES || usage[1].GetUnit() != csi.VolumeUsage_INODES {
					t.Fatalf("stats at %s: %v, want bytes and inodes", path, stats)
				}
				if usage[0].GetTotal() < volumeBytes/2 || usage[0].GetTotal() > volumeBytes ||
					usage[0].GetUsed() <= 0 || usage[0].GetAvailable() <= 0 ||
					usage[1].GetUsed() <= 0 || usage[1].GetAvailable() <= 0 {
					t.Errorf("stats at %s: %v", path, stats)
				}
			}

			coretest.WantCode(t, r.unstage(v), codes.FailedPrecondition, r.path("target"))
			repeat("unpublish", func() error { return r.unpublish(v, "target") })
			r.wantMounts("staging-" + diskA)
			if _, err := os.Lstat(r.path("target")); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("the target still exists: %v", err)
			}
			repeat("unstage", func() error { return r.unstage(v) })
			r.wantMounts()

			r.unplug(v)
			coretest.WantCode(t, r.stage(v, capability), codes.Unavailable, diskA, "after ")
			r.plug(v)
			coretest.Must(t, r.stage(v, filesystemVolume("", writer)))
			wantContent(t, filepath.Join(v.staging, "file"), "data")
			want := fsType
			if want == "" {
				want = "ext4"
			}
			if got := stagedType(t, v.staging); got != want {
				t.Errorf("%s is staged, want %s", got, want)
			}
			coretest.Must(t, r.unstage(v))
			if left, err := os.ReadDir(r.path("state/format")); err != nil || len(left) > 0 {
				t.Errorf("left in the state folder: %v, %v", left, err)
			}
		})
	}
}

func stagedType(t *testing.T, path string) string {
	t.Helper()
	table, err := mount.ReadTable()
	coretest.Must(t, err)
	entry, _ := table.At(path)
	return entry.FSType
}

func TestNodeRawBlockLife(t *testing.T) {
	t.Parallel()
	r := newNodeRig(t)
	v := r.newVolume(diskA)
	capability := rawBlock(multiWriter)
	stagingFile := "staging-" + diskA + "/" + v.id
	repeat := func(what string, do func() error) {
		t.Helper()
		for _, who := range []string{"once", "again", "by another process"} {
			if who == "by another process" {
				r.start()
			}
			if err := do(); err != nil {
				t.Fatalf("%s %s: %v", what, who, err)
			}
		}
	}
	before := r.digest(v)
	repeat("stage", func() error { return r.stage(v, capability) })
	r.wantMounts(stagingFile)
	repeat("publish", func() error { return r.publish(v, "target", capability, false) })
	repeat("publish", func() error { return r.publish(v, "target-2", capability, false) })
	r.wantMounts(stagingFile, "target", "target-2")
	if r.digest(v) != before {
		t.Error("staging or publishing has changed the disk")
	}
	file, err := os.OpenFile(r.path("target"), os.O_RDWR|unix.O_SYNC, 0)
	coretest.Must(t, err)
	_, err = file.WriteAt([]byte("data"), 12345)
	coretest.Must(t, errors.Join(err, file.Close()))

	for _, path := range []string{"target", "staging-" + diskA, stagingFile} {
		stats, err := r.stats(v.id, r.path(path), "")
		coretest.Must(t, err)
		want := &csi.NodeGetVolumeStatsResponse{Usage: []*csi.VolumeUsage{{Unit: csi.VolumeUsage_BYTES, Total: volumeBytes}}}
		if diff := cmp.Diff(want, stats, protocmp.Transform()); diff != "" {
			t.Errorf("stats at %s (-want +got):\n%s", path, diff)
		}
	}

	coretest.WantCode(t, r.unstage(v), codes.FailedPrecondition, r.path("target"))
	repeat("unpublish", func() error { return r.unpublish(v, "target") })
	repeat("unpublish", func() error { return r.unpublish(v, "target-2") })
	repeat("unstage", func() error { return r.unstage(v) })
	r.wantMounts()
	for _, path := range []string{"target", "target-2", stagingFile} {
		if _, err := os.Lstat(r.path(path)); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s still exists: %v", path, err)
		}
	}
	content := make([]byte, 4)
	disk, err := os.Open(r.node(v))
	coretest.Must(t, err)
	_, err = disk.ReadAt(content, 12345)
	coretest.Must(t, errors.Join(err, disk.Close()))
	if string(content) != "data" {
		t.Errorf("the disk holds %q, want the data that was written to the target", content)
	}
	// The disk holds data now, so it is not formatted.
	coretest.WantCode(t, r.stage(v, filesystemVolume("ext4", writer)), codes.FailedPrecondition, "refusing to format")
}

func TestNodeNeverFormats(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name     string
		prepare  func(r *nodeRig, v *volume)
		code     codes.Code
		mentions string
	}{
		{"without a publish context", func(_ *nodeRig, v *volume) { v.publish = nil }, codes.FailedPrecondition, "publish context"},
		{"a disk that is read-only on the rack", func(_ *nodeRig, v *volume) { v.publish[rpc.KeyReadOnly] = "true" }, codes.FailedPrecondition, "publish the volume writable once"},
		{"a publish context without the disk's size", func(_ *nodeRig, v *volume) {
			delete(v.publish, rpc.KeySizeBytes)
			delete(v.volume, rpc.KeySizeBytes)
		}, codes.FailedPrecondition, "publish context"},
		{"another size", func(_ *nodeRig, v *volume) { v.publish[rpc.KeySizeBytes] = fmt.Sprint(coretest.GiB) }, codes.FailedPrecondition, fmt.Sprint(coretest.GiB)},
		{"another filesystem", func(r *nodeRig, v *volume) { r.run("mkfs.xfs", "-q", r.node(v)) }, codes.FailedPrecondition, "xfs"},
		{"an unsupported filesystem", func(r *nodeRig, v *volume) { r.run("mkfs.ext2", "-q", r.node(v)) }, codes.FailedPrecondition, "ext2"},
		{"swap", func(r *nodeRig, v *volume) { r.run("mkswap", r.node(v)) }, codes.FailedPrecondition, "swap"},
		{"a partition table", func(r *nodeRig, v *volume) {
			r.poke(v, 446, "\x00\x00\x00\x00\x83\x00\x00\x00\x00\x08\x00\x00\x00\x10\x00\x00")
			r.poke(v, 510, "\x55\xaa")
		}, codes.FailedPrecondition, "partition table"},
		{"a filesystem of this volume, and a partition table", func(r *nodeRig, v *volume) {
			r.run("mkfs.ext4", "-q", "-U", mount.FilesystemUUID(uuid.MustParse(v.id)).String(), r.node(v))
			r.poke(v, 446, "\x00\x00\x00\x00\x83\x00\x00\x00\x00\x08\x00\x00\x00\x10\x00\x00")
			r.poke(v, 510, "\x55\xaa")
		}, codes.FailedPrecondition, "partition table"},
		{"a byte in the first MiB", func(r *nodeRig, v *volume) { r.poke(v, 777777, "x") }, codes.FailedPrecondition, "byte 777777"},
		{"a byte in the last MiB", func(r *nodeRig, v *volume) { r.poke(v, volumeBytes-5, "x") }, codes.FailedPrecondition, "last MiB"},
		{"a byte where btrfs has a copy", func(r *nodeRig, v *volume) { r.poke(v, 64<<20, "x") }, codes.FailedPrecondition, "btrfs"},
		{"a byte in the middle of a restored disk", func(r *nodeRig, v *volume) {
			v.publish[rpc.KeyOrigin] = rpc.OriginSnapshot
			r.poke(v, 123456789, "x")
		}, codes.FailedPrecondition, "byte 123456789"},
		{"a byte in the middle of a disk of unknown origin", func(r *nodeRig, v *volume) {
			delete(v.publish, rpc.KeyOrigin)
			r.poke(v, 123456789, "x")
		}, codes.FailedPrecondition, "byte 123456789"},
		{"a disk that another program holds", func(r *nodeRig, v *volume) {
			holder, err := os.OpenFile(r.node(v), os.O_RDONLY|unix.O_EXCL, 0)
			coretest.Must(r.t, err)
			r.t.Cleanup(func() { coretest.Must(r.t, holder.Close()) })
		}, codes.FailedPrecondition, "held"},
		{"a disk that is mounted elsewhere", func(r *nodeRig, v *volume) {
			r.run("mkfs.ext4", "-q", r.node(v))
			coretest.Must(r.t, os.Mkdir(r.path("elsewhere"), 0o755))
			r.run("mount", "-o", "ro,noload", r.node(v), r.path("elsewhere"))
		}, codes.FailedPrecondition, "elsewhere"},
		{"another disk whose name begins alike", func(r *nodeRig, v *volume) {
			r.makeDisk("twin")
			coretest.Must(r.t, r.guests.Plug(guestID, simrack.GuestDisk{ID: "twin", Name: diskA + "-twin", Slot: 5, SizeBytes: volumeBytes, BlockSize: 512}))
		}, codes.FailedPrecondition, "Duplicate cntlid"},
		{"mkfs options that are not allowed", func(_ *nodeRig, v *volume) { v.volume[rpc.KeyMkfsOptions] = "-J device=/dev/x" }, codes.InvalidArgument, "-J"},
		{"the disk ID of another volume", func(_ *nodeRig, v *volume) { v.publish[rpc.KeyDiskID] = volumeB }, codes.InvalidArgument, rpc.KeyDiskID},
		{"a staging folder with content", func(_ *nodeRig, v *volume) {
			coretest.Must(t, os.WriteFile(filepath.Join(v.staging, "file"), nil, 0o600))
		}, codes.FailedPrecondition, "not empty"},
		{"a staging path whose folder does not exist", func(r *nodeRig, v *volume) { v.staging = r.path("no/such/folder") }, codes.FailedPrecondition, "no/such"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			r := newNodeRig(t, func(opts *node.Options) { opts.DeviceTimeout = time.Minute })
			v := r.newVolume(diskA)
			tc.prepare(r, v)
			before, mounts := r.digest(v), r.mounts()
			coretest.WantCode(t, r.stage(v, filesystemVolume("ext4", writer)), tc.code, tc.mentions)
			if r.digest(v) != before {
				t.Error("the disk was written to")
			}
			r.wantMounts(mounts...)
		})
	}
}

func TestNodeFormatsRestoredBlankDisk(t *testing.T) {
	t.Parallel()
	r := newNodeRig(t)
	v := r.newVolume(diskA)
	v.publish[rpc.KeyOrigin] = rpc.OriginImage
	coretest.Must(t, r.stage(v, filesystemVolume("ext4", writer)))
	coretest.Must(t, r.unstage(v))

	r = newNodeRig(t, func(opts *node.Options) { opts.BlankScanLimit = volumeBytes - 1 })
	v = r.newVolume(diskA)
	v.publish[rpc.KeyOrigin] = rpc.OriginImage
	coretest.WantCode(t, r.stage(v, filesystemVolume("ext4", writer)), codes.FailedPrecondition, "--blank-scan-limit")
}

// A crash during mkfs leaves a record, and mkfs runs again. It does not run over a filesystem that was mounted, which
// another node may have used.
func TestNodeStageAfterInterruptedFormat(t *testing.T) {
	t.Parallel()
	own := mount.FilesystemUUID(uuid.MustParse(volumeA)).String()
	record := func(r *nodeRig) {
		coretest.Must(r.t, os.MkdirAll(r.path("state/format"), 0o700))
		coretest.Must(
			r.t,
			os.WriteFile(
				r.path("state/format/"+volumeA),
				[]byte(`{"serial":"`+diskA+`","bootID":"before the crash","diskSequence":1}`),
				0o600,
			),
		)
	}
	for _, tc := range []struct {
		name    string
		prepare func(r *nodeRig, v *volume)
		code    codes.Code
		// keeps is true if the content of the disk must stay.
		keeps bool
	}{
		{"before mkfs wrote anything", func(*nodeRig, *volume) {}, codes.OK, false},
		{"after mkfs, before the first mount", func(r *nodeRig, v *volume) { r.run("mkfs.ext4", "-q", "-U", own, r.node(v)) }, codes.OK, false},
		{"mounted since", func(r *nodeRig, v *volume) {
			r.run("mkfs.ext4", "-q", "-U", own, r.node(v))
			coretest.Must(r.t, os.Mkdir(r.path("elsewhere"), 0o755))
			r.run("mount", r.node(v), r.path("elsewhere"))
			coretest.Must(r.t, os.WriteFile(r.path("elsewhere/file"), []byte("data"), 0o600))
			r.umountAndWait(v, r.path("elsewhere"))
		}, codes.OK, true},
		{"another disk's filesystem, never mounted", func(r *nodeRig, v *volume) {
			r.run("mkfs.ext4", "-q", "-L", "foreign", r.node(v))
		}, codes.OK, true},
		{"data without a signature", func(r *nodeRig, v *volume) { r.poke(v, 4096, "data") }, codes.FailedPrecondition, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			r := newNodeRig(t)
			v := r.newVolumeWithID(volumeA, diskA)
			tc.prepare(r, v)
			record(r)
			formatted := strings.Count(r.log.String(), "making a filesystem")
			coretest.WantCode(t, r.stage(v, filesystemVolume("ext4", writer)), tc.code)
			formatted = strings.Count(r.log.String(), "making a filesystem") - formatted
			if (formatted == 0) != tc.keeps {
				t.Errorf("mkfs ran %d times; the content must stay: %t", formatted, tc.keeps)
			}
			if tc.code != codes.OK {
				return
			}
			if _, err := os.Stat(r.path("state/format/" + volumeA)); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("the record still exists: %v", err)
			}
			if tc.name == "mounted since" {
				wantContent(t, filepath.Join(v.staging, "file"), "data")
			}
			coretest.Must(t, r.unstage(v))
		})
	}
	t.Run("another filesystem made by hand since, then damaged", func(t *testing.T) {
		t.Parallel()
		r := newNodeRig(t)
		v := r.newVolumeWithID(volumeA, diskA)
		r.run("mkfs.ext4", "-q", "-E", "nodiscard", r.node(v))
		r.writeFormatMarker(v)
		coretest.Must(t, r.stage(v, filesystemVolume("ext4", writer)))
		coretest.Must(t, r.unstage(v))
		r.poke(v, 0, string(make([]byte, 64<<10)))
		coretest.WantCode(t, r.stage(v, filesystemVolume("ext4", writer)), codes.FailedPrecondition, "refusing to format")
	})
	t.Run("used as raw block since", func(t *testing.T) {
		t.Parallel()
		r := newNodeRig(t)
		v := r.newVolumeWithID(volumeA, diskA)
		record(r)
		coretest.Must(t, r.stage(v, rawBlock(writer)))
		if _, err := os.Stat(r.path("state/format/" + volumeA)); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("the record still exists: %v", err)
		}
		coretest.Must(t, r.unstage(v))
	})
}

// What an unknown key of the publish context says may forbid what this version would do: a version that did not know
// the key encryption would have formatted the disk in clear.
func TestNodeRefusesNewerPublishContext(t *testing.T) {
	t.Parallel()
	eachAccess(t, func(r *nodeRig, v *volume, capability *csi.VolumeCapability) {
		const key = "written by a newer controller"
		before := r.digest(v)
		v.publish[key] = ""
		coretest.WantCode(r.t, r.stage(v, capability), codes.FailedPrecondition, v.id, key, "upgrade this node's plugin")
		if r.digest(v) != before {
			r.t.Error("the disk was written to")
		}
		r.wantMounts()
		delete(v.publish, key)
		coretest.Must(r.t, r.stage(v, capability))
		v.publish[key] = ""
		coretest.WantCode(r.t, r.publish(v, "target", capability, false), codes.FailedPrecondition, key)
		coretest.Must(r.t, r.unstage(v))
	})
}

// Nomad can lose the publish context. The filesystem on the disk is mounted without it.
func TestNodeMountsFromVolumeContext(t *testing.T) {
	t.Parallel()
	r := newNodeRig(t)
	v := r.newVolume(diskA)
	coretest.Must(t, r.stage(v, filesystemVolume("xfs", writer)))
	coretest.Must(t, r.unstage(v))
	v.publish = nil
	coretest.Must(t, r.stage(v, filesystemVolume("xfs", writer)))
	coretest.Must(t, r.publish(v, "target", filesystemVolume("xfs", writer), false))
	coretest.Must(t, os.WriteFile(r.path("target/file"), []byte("data"), 0o600))
	coretest.Must(t, r.unpublish(v, "target"))
	coretest.Must(t, r.unstage(v))

	v.volume = nil
	coretest.WantCode(t, r.stage(v, filesystemVolume("xfs", writer)), codes.FailedPrecondition, rpc.KeyDiskName)
	coretest.WantCode(
		t,
		r.publish(v, "target", filesystemVolume("xfs", writer), false),
		codes.FailedPrecondition,
		rpc.KeyDiskName,
	)
}

func TestNodeMkfsOptionsAndRootFolder(t *testing.T) {
	t.Parallel()
	for _, fsType := range filesystem.Types() {
		t.Run(fsType, func(t *testing.T) {
			t.Parallel()
			r := newNodeRig(t)
			v := r.newVolume(diskA)
			maps.Copy(v.volume, map[string]string{rpc.KeyRootUID: "1234", rpc.KeyRootGID: "5678", rpc.KeyRootMode: "2770"})
			ext := strings.HasPrefix(fsType, "ext")
			if ext {
				v.volume[rpc.KeyMkfsOptions] = "-N 4096"
			}
			capability := filesystemVolume(fsType, writer)
			root := func() string {
				t.Helper()
				info, err := os.Stat(v.staging)
				coretest.Must(t, err)
				stat := info.Sys().(*syscall.Stat_t)
				return fmt.Sprintf("%d:%d %o", stat.Uid, stat.Gid, stat.Mode&0o7777)
			}
			coretest.Must(t, r.stage(v, capability))
			if got := root(); got != "1234:5678 2770" {
				t.Errorf("the root folder is %s, want 1234:5678 2770", got)
			}
			if ext {
				stats, err := r.stats(v.id, v.staging, "")
				coretest.Must(t, err)
				if inodes := stats.GetUsage()[1].GetTotal(); inodes < 4096 || inodes > 5000 {
					t.Errorf("%d inodes, want the 4096 of -N, rounded up", inodes)
				}
			}
			// A change that the workload makes stays.
			coretest.Must(t, os.Chmod(v.staging, 0o711))
			coretest.Must(t, r.unstage(v))
			coretest.Must(t, r.stage(v, capability))
			if got := root(); got != "1234:5678 711" {
				t.Errorf("the root folder is %s after staging again, want it as the workload left it", got)
			}
			coretest.Must(t, r.unstage(v))
		})
	}
}

func TestNodeStageAgainWithAnotherCapability(t *testing.T) {
	t.Parallel()
	r := newNodeRig(t)
	v := r.newVolume(diskA)
	coretest.Must(t, r.stage(v, filesystemVolume("ext4", writer)))
	for name, capability := range map[string]*csi.VolumeCapability{
		"another filesystem": filesystemVolume("xfs", writer),
		"read-only":          filesystemVolume("ext4", writer, "ro"),
		"raw block":          rawBlock(writer),
		"SELinux context":    filesystemVolume("ext4", writer, "context=system_u:object_r:x:s0"),
	} {
		t.Run(name, func(t *testing.T) { coretest.WantCode(t, r.stage(v, capability), codes.AlreadyExists) })
	}
	coretest.Must(t, r.stage(v, filesystemVolume("", multiWriter, "noatime")))
	elsewhere := *v
	elsewhere.staging = r.path("staging-2")
	coretest.Must(t, os.Mkdir(elsewhere.staging, 0o755))
	coretest.WantCode(t, r.stage(&elsewhere, filesystemVolume("ext4", writer)), codes.FailedPrecondition, v.staging)
	r.wantMounts("staging-" + diskA)
	coretest.Must(t, r.unstage(v))

	w := r.newVolume(diskB)
	coretest.Must(t, r.stage(w, rawBlock(writer)))
	coretest.WantCode(t, r.stage(w, filesystemVolume("ext4", writer)), codes.AlreadyExists, "raw block")
	coretest.Must(t, r.unstage(w))
}

func TestNodePublishTargets(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		capability *csi.VolumeCapability
		second     codes.Code
	}{
		{filesystemVolume("ext4", writer), codes.FailedPrecondition},
		{filesystemVolume("ext4", singleWriter), codes.FailedPrecondition},
		{filesystemVolume("ext4", readerOnly), codes.FailedPrecondition},
		{filesystemVolume("ext4", multiWriter), codes.OK},
		{rawBlock(writer), codes.FailedPrecondition},
		{rawBlock(singleWriter), codes.FailedPrecondition},
		{rawBlock(multiWriter), codes.OK},
	} {
		access := "filesystem"
		if tc.capability.GetBlock() != nil {
			access = "raw block"
		}
		t.Run(access+" "+tc.capability.GetAccessMode().GetMode().String(), func(t *testing.T) {
			t.Parallel()
			r := newNodeRig(t)
			v := r.newVolume(diskA)
			coretest.WantCode(t, r.publish(v, "target", tc.capability, false), codes.FailedPrecondition, "not staged")
			coretest.Must(t, r.stage(v, tc.capability))
			coretest.Must(t, r.publish(v, "target", tc.capability, false))
			readOnly := tc.capability.GetAccessMode().GetMode() == readerOnly
			if !readOnly {
				coretest.WantCode(t, r.publish(v, "target", tc.capability, true), codes.AlreadyExists, "read-only")
			}
			err := r.publish(v, "second", tc.capability, false)
			coretest.WantCode(t, err, tc.second)
			if err != nil {
				coretest.WantCode(t, err, tc.second, r.path("target"))
				if _, err := os.Lstat(r.path("second")); !errors.Is(err, fs.ErrNotExist) {
					t.Errorf("the second target is there: %v", err)
				}
				coretest.Must(t, r.unpublish(v, "target"))
				coretest.Must(t, r.publish(v, "second", tc.capability, false))
			}
		})
	}
}

func TestNodePublishReadOnly(t *testing.T) {
	t.Parallel()
	t.Run("filesystem", func(t *testing.T) {
		t.Parallel()
		r := newNodeRig(t)
		v := r.newVolume(diskA)
		capability := filesystemVolume("ext4", multiWriter)
		coretest.Must(t, r.stage(v, capability))
		coretest.Must(t, r.publish(v, "read", capability, true))
		coretest.Must(t, r.publish(v, "read", capability, true))
		coretest.Must(t, r.publish(v, "write", capability, false))
		coretest.Must(t, os.WriteFile(r.path("write/file"), []byte("data"), 0o600))
		wantContent(t, r.path("read/file"), "data")
		if err := os.WriteFile(r.path("read/file"), nil, 0o600); !errors.Is(err, unix.EROFS) {
			t.Errorf("writing at a read-only target: %v, want EROFS", err)
		}
		coretest.WantCode(t, r.publish(v, "read", capability, false), codes.AlreadyExists)
	})
	t.Run("reader only", func(t *testing.T) {
		t.Parallel()
		r := newNodeRig(t)
		v := r.newVolume(diskA)
		capability := filesystemVolume("ext4", readerOnly)
		coretest.Must(t, r.stage(v, capability))
		coretest.Must(t, r.publish(v, "target", capability, false))
		if err := os.WriteFile(r.path("target/file"), nil, 0o600); !errors.Is(err, unix.EROFS) {
			t.Errorf("writing: %v, want EROFS", err)
		}
	})
	t.Run("raw block", func(t *testing.T) {
		t.Parallel()
		r := newNodeRig(t)
		v := r.newVolume(diskA)
		capability := rawBlock(multiWriter)
		coretest.Must(t, r.stage(v, capability))
		coretest.Must(t, r.publish(v, "target", capability, false))
		coretest.WantCode(t, r.publish(v, "read", capability, true), codes.FailedPrecondition, r.path("target"))
		coretest.Must(t, r.unpublish(v, "target"))
		coretest.Must(t, r.publish(v, "read", capability, true))
		if file, err := os.OpenFile(r.path("read"), os.O_RDWR, 0); err == nil {
			_, err = file.WriteAt([]byte("x"), 0)
			if err := errors.Join(err, file.Close()); err == nil {
				t.Error("a write to a read-only target succeeded")
			}
		}
		coretest.Must(t, r.publish(v, "read-2", capability, true))
		coretest.WantCode(t, r.publish(v, "target", capability, false), codes.FailedPrecondition)
		coretest.Must(t, r.unpublish(v, "read"))
		coretest.Must(t, r.unpublish(v, "read-2"))
		coretest.Must(t, r.publish(v, "target", capability, false))
		file, err := os.OpenFile(r.path("target"), os.O_RDWR, 0)
		coretest.Must(t, err)
		_, err = file.WriteAt([]byte("x"), 0)
		coretest.Must(t, errors.Join(err, file.Close()))
	})
	for _, fsType := range filesystem.Types() {
		t.Run("a disk that is read-only on the rack, "+fsType, func(t *testing.T) {
			t.Parallel()
			r := newNodeRig(t)
			v := r.newVolume(diskA)
			capability := filesystemVolume(fsType, writer)
			coretest.Must(t, r.stage(v, capability))
			coretest.Must(t, os.WriteFile(filepath.Join(v.staging, "file"), []byte("data"), 0o600))
			coretest.Must(t, r.unstage(v))
			v.publish[rpc.KeyReadOnly] = "true"
			before := r.digest(v)
			coretest.Must(t, r.stage(v, capability))
			coretest.Must(t, r.publish(v, "target", capability, false))
			coretest.Must(t, r.publish(v, "target", capability, true))
			wantContent(t, r.path("target/file"), "data")
			if err := os.WriteFile(r.path("target/file"), nil, 0o600); !errors.Is(err, unix.EROFS) {
				t.Errorf("writing: %v, want EROFS", err)
			}
			coretest.Must(t, r.unpublish(v, "target"))
			coretest.Must(t, r.unstage(v))
			if r.digest(v) != before {
				t.Errorf("the disk was written to")
			}
		})
	}
}

func TestNodeUnpublishLeavesOtherMountsAndFiles(t *testing.T) {
	t.Parallel()
	r := newNodeRig(t)
	v := r.newVolume(diskA)
	for _, folder := range []string{"full", "foreign"} {
		coretest.Must(t, os.Mkdir(r.path(folder), 0o755))
	}
	coretest.Must(t, os.WriteFile(r.path("full/file"), []byte("data"), 0o600))
	coretest.Must(t, os.WriteFile(r.path("file"), []byte("data"), 0o600))
	coretest.Must(t, unix.Mount("tmpfs", r.path("foreign"), "tmpfs", 0, "size=64k"))
	for _, target := range []string{"full", "file", "foreign"} {
		coretest.WantCode(t, r.unpublish(v, target), codes.FailedPrecondition, r.path(target))
	}
	wantContent(t, r.path("full/file"), "data")
	wantContent(t, r.path("file"), "data")
	r.wantMounts("foreign")
	coretest.Must(t, r.unpublish(v, "never"))
	coretest.Must(t, r.unpublish(v, "no/parent"))

	// A target without its mount that the plugin did not make stays.
	coretest.Must(t, os.Mkdir(r.path("empty"), 0o755))
	coretest.Must(t, os.WriteFile(r.path("empty-file"), nil, 0o600))
	for _, target := range []string{"empty", "empty-file"} {
		coretest.Must(t, r.unpublish(v, target))
		if _, err := os.Lstat(r.path(target)); err != nil {
			t.Error(err)
		}
	}

	capability := filesystemVolume("ext4", writer)
	coretest.Must(t, r.stage(v, capability))
	coretest.WantCode(t, r.publish(v, "full", capability, false), codes.FailedPrecondition, "not empty")
	coretest.WantCode(t, r.publish(v, "foreign", capability, false), codes.FailedPrecondition, "a mount that is not")
	coretest.WantCode(t, r.publish(v, "no/parent", capability, false), codes.FailedPrecondition, "no")
	r.wantMounts("foreign", "staging-"+diskA)

	v.staging = r.path("foreign")
	coretest.WantCode(t, r.unstage(v), codes.FailedPrecondition, "staging-"+diskA) // its disk must not be detached yet
	coretest.Must(
		t,
		r.unstage(&volume{id: volumeB, staging: v.staging}),
	) // the volume is not staged at this path
	coretest.WantCode(t, r.stage(v, capability), codes.FailedPrecondition, "a mount that is not")
	r.wantMounts("foreign", "staging-"+diskA)
}

// The disk is detached while it is mounted. The volume can be unpublished and unstaged, and staged again when the disk
// is back.
func TestNodeDiskRemovedWhileMounted(t *testing.T) {
	for name, capability := range map[string]*csi.VolumeCapability{
		"ext4": filesystemVolume("ext4", writer), "xfs": filesystemVolume("xfs", writer), "raw block": rawBlock(writer),
	} {
		t.Run(name, func(t *testing.T) {
			r := newNodeRig(t)
			v := r.newVolume(diskA)
			coretest.Must(t, r.stage(v, capability))
			coretest.Must(t, r.publish(v, "target", capability, false))
			r.unplug(v)
			_, err := r.stats(v.id, r.path("target"), v.staging)
			coretest.WantCode(t, err, codes.NotFound, "left this guest")
			coretest.WantCode(t, r.unstage(v), codes.FailedPrecondition, r.path("target"))
			coretest.Must(t, r.unpublish(v, "target"))
			coretest.Must(t, r.unstage(v))
			r.wantMounts()

			r.plug(v)
			coretest.Must(t, r.stage(v, capability))
			coretest.Must(t, r.publish(v, "target", capability, false))
			r.unplug(v)
			r.plug(v)
			// The orchestrator does not know about the removal and makes the same requests again.
			coretest.WantCode(t, r.stage(v, capability), codes.FailedPrecondition, r.path("target"))
			coretest.Must(t, r.unpublish(v, "target"))
			coretest.Must(t, r.stage(v, capability))
			coretest.Must(t, r.publish(v, "target", capability, false))
			coretest.Must(t, r.unpublish(v, "target"))
			coretest.Must(t, r.unstage(v))
			r.wantMounts()
		})
	}
}

// The test needs real time: the kernel decides whether the filesystem is in use.
func TestNodeUnstageWaitsForTheHolder(t *testing.T) {
	t.Parallel()
	r := impatient(t)
	v := r.newVolume(diskA)
	coretest.Must(t, r.stage(v, filesystemVolume("ext4", writer)))
	holder := exec.Command("sleep", "600")
	holder.Dir = v.staging
	coretest.Must(t, hostexec.Start(holder))
	coretest.WantCode(t, r.unstage(v), codes.FailedPrecondition, "(sleep)", v.staging)
	r.wantMounts("staging-" + diskA)
	r.patient()

	unstaged := make(chan error, 1)
	go func() { unstaged <- r.unstage(v) }()
	coretest.Must(t, holder.Process.Kill())
	_ = holder.Wait() // it was killed
	coretest.Must(t, <-unstaged)
	r.wantMounts()
}

func TestNodeGetVolumeStatsNotFound(t *testing.T) {
	t.Parallel()
	r := newNodeRig(t)
	v, w := r.newVolume(diskA), r.newVolume(diskB)
	for _, volume := range []*volume{v, w} {
		coretest.Must(t, r.stage(volume, filesystemVolume("ext4", writer)))
	}
	coretest.Must(t, os.Mkdir(r.path("folder"), 0o755))
	coretest.Must(t, os.Mkdir(r.path("foreign"), 0o755))
	coretest.Must(t, unix.Mount("tmpfs", r.path("foreign"), "tmpfs", 0, "size=64k"))
	for _, tc := range []struct{ name, id, path, staging string }{
		{"a relative path", v.id, "some/path", ""},
		{"a path that does not exist", v.id, r.path("nothing"), ""},
		{"no parent folder", v.id, r.path("no/parent"), ""},
		{"a folder without a mount", v.id, r.path("folder"), ""},
		{"below the mount", v.id, filepath.Join(v.staging, "lost+found"), ""},
		{"another filesystem", v.id, r.path("foreign"), ""},
		{"another volume", v.id, w.staging, v.staging},
		{"not staged there", v.id, v.staging, r.path("folder")},
		{"an invalid volume ID", "csi-vol", v.staging, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := r.stats(tc.id, tc.path, tc.staging)
			coretest.WantCode(t, err, codes.NotFound)
		})
	}
}

func TestNodeGetInfo(t *testing.T) {
	t.Parallel()
	r := newNodeRig(t)
	info := func() *csi.NodeGetInfoResponse {
		t.Helper()
		resp, err := r.NodeGetInfo(t.Context(), &csi.NodeGetInfoRequest{})
		coretest.Must(t, err)
		return resp
	}
	want := &csi.NodeGetInfoResponse{
		NodeId: guestID, MaxVolumesPerNode: 7, // all but the boot disk
		AccessibleTopology: &csi.Topology{Segments: map[string]string{rpc.TopologySegmentRack: "rack-1"}},
	}
	coretest.WantSame(t, info(), want)
	r.newVolume(diskA)
	coretest.WantSame(t, info(), want)
	v := r.newVolume("a-disk-of-the-users")
	want.MaxVolumesPerNode = 6
	coretest.WantSame(t, info(), want)
	coretest.Must(t, r.stage(v, filesystemVolume("ext4", writer)))
	want.MaxVolumesPerNode = 7
	coretest.WantSame(t, info(), want)

	full := newNodeRig(t, func(opts *node.Options) {
		opts.MaxDisks = 1
		opts.Provider = static.New(static.Options{InstanceID: guestID, Rack: "rack-2"})
	})
	resp, err := full.NodeGetInfo(t.Context(), &csi.NodeGetInfoRequest{})
	coretest.Must(t, err)
	if resp.GetMaxVolumesPerNode() != 1 ||
		resp.GetAccessibleTopology().GetSegments()[rpc.TopologySegmentRack] != "rack-2" {
		t.Errorf("a full guest: %v, want at most 1 volume, on the rack that the provider knows", resp)
	}

	unknown := newNodeRig(t, func(opts *node.Options) {
		opts.Provider = static.New(static.Options{File: filepath.Join(opts.StateDir, "no-such-file")})
	})
	_, err = unknown.NodeGetInfo(t.Context(), &csi.NodeGetInfoRequest{})
	coretest.WantCode(t, err, codes.Unavailable)
}

func TestNodeGetCapabilities(t *testing.T) {
	t.Parallel()
	r := newNodeRig(t)
	resp, err := r.NodeGetCapabilities(t.Context(), &csi.NodeGetCapabilitiesRequest{})
	coretest.Must(t, err)
	var got []string
	for _, capability := range resp.GetCapabilities() {
		got = append(got, capability.GetRpc().GetType().String())
	}
	if diff := cmp.Diff(
		[]string{
			"STAGE_UNSTAGE_VOLUME",
			"GET_VOLUME_STATS",
			"SINGLE_NODE_MULTI_WRITER",
			"GET_VOLUME_HEALTH",
			"GET_STORAGE_HEALTH",
		},
		got,
	); diff != "" {
		t.Errorf("capabilities (-want +got):\n%s", diff)
	}
}

func TestNodeUnknownVolumes(t *testing.T) {
	t.Parallel()
	r := newNodeRig(t)
	v := r.newVolume(diskA)
	v.id = "some-volume"
	coretest.WantCode(t, r.stage(v, filesystemVolume("ext4", writer)), codes.NotFound, "some-volume")
	coretest.WantCode(t, r.publish(v, "target", filesystemVolume("ext4", writer), false), codes.NotFound, "some-volume")
	coretest.Must(t, r.unpublish(v, "target"))
	coretest.Must(t, r.unstage(v))
	v.id = "../../" + volumeA
	coretest.Must(t, r.unstage(v))
}

// Mount flags may be secret. No answer and no log contains them, whether the plugin or the kernel rejects them.
func TestNodeMountFlagsStaySecret(t *testing.T) {
	t.Parallel()
	const secret = "24691357"
	r := newNodeRig(t)
	v := r.newVolume(diskA)
	for _, tc := range []struct {
		flag string
		code codes.Code
	}{
		{"loop=" + secret, codes.InvalidArgument}, {"password=" + secret, codes.InvalidArgument},
		// Allowed, and refused by the kernel: without swidth.
		{"sunit=" + secret, codes.Internal},
	} {
		err := r.stage(v, filesystemVolume("xfs", writer, tc.flag))
		coretest.WantCode(t, err, tc.code)
		if strings.Contains(err.Error(), secret) {
			t.Errorf("the answer shows the flag: %v", err)
		}
	}
	if strings.Contains(r.log.String(), secret) {
		t.Errorf("the log shows the flag:\n%s", r.log.String())
	}
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package blackbox

import (
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// mounted is a volume that is staged and published on one node.
type mounted struct {
	client     *client
	plugin     *simtest.Plugin
	volume     *csi.Volume
	capability *csi.VolumeCapability
	// staging and target are the paths that the orchestrator passes.
	staging, target string
}

// stageAndPublish stages a volume and publishes it at target, below dir.
func stageAndPublish(
	t *testing.T,
	c *client,
	plugin *simtest.Plugin,
	dir string,
	volume *csi.Volume,
	capability *csi.VolumeCapability,
	publishContext map[string]string,
) *mounted {
	t.Helper()
	m := &mounted{
		client: c, plugin: plugin, volume: volume, capability: capability,
		staging: filepath.Join(dir, "staging"),
		target:  filepath.Join(dir, "target"),
	}
	if err := os.MkdirAll(m.staging, 0o750); err != nil {
		t.Fatal(err)
	}
	twice(t, c, plugin.NodeStageVolume, &csi.NodeStageVolumeRequest{
		VolumeId:          volume.GetVolumeId(),
		PublishContext:    publishContext,
		StagingTargetPath: m.staging,
		VolumeCapability:  capability,
		VolumeContext:     volume.GetVolumeContext(),
	})
	twice(t, c, plugin.NodePublishVolume, &csi.NodePublishVolumeRequest{
		VolumeId:          volume.GetVolumeId(),
		PublishContext:    publishContext,
		StagingTargetPath: m.staging,
		TargetPath:        m.target,
		VolumeCapability:  capability,
		VolumeContext:     volume.GetVolumeContext(),
	})
	return m
}

// unpublishAndUnstage reverts stageAndPublish.
func (m *mounted) unpublishAndUnstage(t *testing.T) {
	t.Helper()
	twice(
		t,
		m.client,
		m.plugin.NodeUnpublishVolume,
		&csi.NodeUnpublishVolumeRequest{VolumeId: m.volume.GetVolumeId(), TargetPath: m.target},
	)
	if _, err := os.Lstat(m.target); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%s still exists after NodeUnpublishVolume: %v", m.target, err)
	}
	twice(
		t,
		m.client,
		m.plugin.NodeUnstageVolume,
		&csi.NodeUnstageVolumeRequest{VolumeId: m.volume.GetVolumeId(), StagingTargetPath: m.staging},
	)
	if mounts := mountsBelow(t, filepath.Dir(m.target)); len(mounts) > 0 {
		t.Errorf("mounted after NodeUnstageVolume: %v", mounts)
	}
}

// dataBytes is how much a test writes. It exceeds the cache of any disk.
const dataBytes = 32 << 20

// data is the path of the workload's data: a file, or the device itself.
func (m *mounted) data() string {
	if m.capability.GetBlock() != nil {
		return m.target
	}
	return filepath.Join(m.target, "data")
}

// write writes random data with fsync, and returns its checksum.
func (m *mounted) write(t *testing.T) string {
	t.Helper()
	flags := os.O_WRONLY
	if m.capability.GetBlock() == nil {
		flags |= os.O_CREATE | os.O_EXCL
	}
	file, err := os.OpenFile(m.data(), flags, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	sum := sha256.New()
	_, err = io.CopyN(io.MultiWriter(file, sum), rand.Reader, dataBytes)
	if err := errors.Join(err, file.Sync(), file.Close()); err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("%x", sum.Sum(nil))
}

// checksum reads the data back.
func (m *mounted) checksum(t *testing.T) string {
	t.Helper()
	file, err := os.Open(m.data())
	if err != nil {
		t.Fatal(err)
	}
	sum := sha256.New()
	_, err = io.CopyN(sum, file, dataBytes)
	if err := errors.Join(err, file.Close()); err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("%x", sum.Sum(nil))
}

// checkKind checks that the target is a block device, or a filesystem of the requested type.
func (m *mounted) checkKind(t *testing.T) {
	t.Helper()
	var stat unix.Stat_t
	if err := unix.Stat(m.target, &stat); err != nil {
		t.Fatal(err)
	}
	if m.capability.GetBlock() != nil {
		if stat.Mode&unix.S_IFMT != unix.S_IFBLK {
			t.Errorf("%s has the mode %o, want a block device", m.target, stat.Mode)
		}
		return
	}
	var fs unix.Statfs_t
	if err := unix.Statfs(m.target, &fs); err != nil {
		t.Fatal(err)
	}
	want := map[string]int64{"": unix.EXT4_SUPER_MAGIC, "ext4": unix.EXT4_SUPER_MAGIC, "xfs": unix.XFS_SUPER_MAGIC}[m.capability.GetMount().GetFsType()]
	if int64(fs.Type) != want {
		t.Errorf("%s has a filesystem of type %#x, want %#x", m.target, fs.Type, want)
	}
}

// check compares data and size of a mounted volume.
func check(t *testing.T, what string, m *mounted, written string, leastBytes int64) {
	t.Helper()
	if read := m.checksum(t); read != written {
		t.Errorf("%s has data with the checksum %s, want %s", what, read, written)
	}
	if got := sizeOf(t, m); got < leastBytes {
		t.Errorf("%s has %d bytes, want %d", what, got, leastBytes)
	}
}

// sizeOf is the size in bytes of a block volume, or of the filesystem without its own data.
func sizeOf(t *testing.T, m *mounted) int64 {
	t.Helper()
	if m.capability.GetBlock() == nil {
		var fs unix.Statfs_t
		if err := unix.Statfs(m.target, &fs); err != nil {
			t.Fatal(err)
		}
		return int64(fs.Blocks) * fs.Bsize
	}
	device, err := os.Open(m.target)
	if err != nil {
		t.Fatal(err)
	}
	defer device.Close()
	size, err := device.Seek(0, io.SeekEnd)
	if err != nil {
		t.Fatal(err)
	}
	return size
}

// grownBytes is the least size of a volume that has grown to 2 GiB: a filesystem needs some of it.
func grownBytes(capability *csi.VolumeCapability) int64 {
	if capability.GetBlock() != nil {
		return 2 * gib
	}
	return 2*gib - gib/8
}

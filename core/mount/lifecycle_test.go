package mount_test

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
	"github.com/oxidecomputer/oxide-csi-plugin/core/device/devicetest"
	"github.com/oxidecomputer/oxide-csi-plugin/core/mount"
)

const (
	diskName  = "csi-abcdefghijklmnop"
	sizeBytes = 320 << 20
)

var diskID = uuid.MustParse("6f1b2c3d-4e5f-4a6b-8c7d-9e0f1a2b3c4d")

func find(t *testing.T, g *devicetest.Guest) device.Device {
	t.Helper()
	dev, err := g.Roots().Find(context.Background(), device.Want{DiskName: diskName, SizeBytes: sizeBytes}, time.Second)
	if err != nil {
		t.Fatal(err)
	}
	return dev
}

func format(t *testing.T, f mount.Formatter, dev device.Device, fsType string) error {
	t.Helper()
	interrupted, err := f.Interrupted(diskID, dev)
	if err != nil {
		return err
	}
	blank, err := device.ProveBlank(context.Background(), dev, device.BlankOptions{Origin: device.OriginBlank, Interrupted: interrupted})
	if err != nil {
		return err
	}
	defer func() {
		if err := blank.Close(); err != nil {
			t.Error(err)
		}
	}()
	return f.Format(context.Background(), blank, mount.NewFilesystem{DiskID: diskID, Type: fsType})
}

func TestFormatMountUnmount(t *testing.T) {
	for _, fsType := range mount.Filesystems() {
		t.Run(fsType, func(t *testing.T) {
			g := devicetest.New(t)
			g.Add(diskName, sizeBytes)
			dev := find(t, g)
			f := mount.Formatter{StateDir: filepath.Join(t.TempDir(), "state")}
			if err := format(t, f, dev, fsType); err != nil {
				t.Fatal(err)
			}
			content, err := device.Probe(context.Background(), dev)
			if err != nil {
				t.Fatal(err)
			}
			if want := (device.Content{Type: fsType, UUID: mount.FilesystemUUID(diskID).String()}); content != want {
				t.Errorf("the disk holds %v, want %v", content, want)
			}
			target := t.TempDir()
			if err := mount.Filesystem(context.Background(), dev, target, fsType, mount.Options{}); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(target, "file"), []byte("data"), 0o600); err != nil {
				t.Error(err)
			}
			if err := mount.Unmount(context.Background(), target, dev.Number); err != nil {
				t.Fatal(err)
			}
			if err := mount.Release(context.Background(), dev, true); err != nil {
				t.Fatal(err)
			}
		})
	}
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package device_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
	"github.com/oxidecomputer/oxide-csi-plugin/core/device/devicetest"
)

func TestControllerState(t *testing.T) {
	t.Parallel()
	g := devicetest.NewBare(t)
	g.Sysfs("nvme1n1", "csi-x", device.Number{Major: 259, Minor: 1}, 1<<30)
	if state := g.Roots().ControllerState("nvme1n1"); state != "" {
		t.Errorf("state %q, want none: sysfs does not show the state", state)
	}
	for _, want := range []string{device.ControllerLive, "resetting", "dead"} {
		g.Write(filepath.Join(g.Dir, "sys/block/nvme1n1/device/state"), want+"\n")
		if state := g.Roots().ControllerState("nvme1n1"); state != want {
			t.Errorf("%q, want %q", state, want)
		}
	}
}

func TestFunctionsNotReady(t *testing.T) {
	t.Parallel()
	unsettled := func(t *testing.T, ctx context.Context, g *devicetest.Guest) []string {
		t.Helper()
		addresses, err := g.Roots().FunctionsNotReady(ctx)
		if err != nil {
			t.Fatal(err)
		}
		return addresses
	}
	t.Run("none", func(t *testing.T) {
		t.Parallel()
		g := devicetest.NewBare(t)
		g.Sysfs("nvme1n1", "csi-x", device.Number{Major: 259, Minor: 1}, 1<<30)
		g.Function("0000:00:12.0", "vfio-pci")
		if got := unsettled(t, t.Context(), g); got != nil {
			t.Errorf("%v, want none", got)
		}
	})
	t.Run("two", func(t *testing.T) {
		t.Parallel()
		g := devicetest.NewBare(t)
		g.Sysfs("nvme1n1", "csi-x", device.Number{Major: 259, Minor: 1}, 1<<30)
		g.Function("0000:00:12.0", "")
		g.Function("0000:00:13.0", "nvme")
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if diff := cmp.Diff([]string{"0000:00:12.0", "0000:00:13.0"}, unsettled(t, ctx, g)); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
	})
	t.Run("not ready yet", func(t *testing.T) {
		t.Parallel()
		g := devicetest.NewBare(t)
		folder := g.Function("0000:00:12.0", "")
		got := make(chan []string)
		go func() { got <- unsettled(t, t.Context(), g) }()
		if err := os.Symlink("../../../../bus/pci/drivers/vfio-pci", filepath.Join(folder, "driver")); err != nil {
			t.Error(err)
		}
		if addresses := <-got; addresses != nil {
			t.Errorf("%v, want none", addresses)
		}
	})
}

func TestExt4Errors(t *testing.T) {
	t.Parallel()
	first, last := time.Unix(1700000000, 0).UTC(), time.Unix(1800000000, 0).UTC()
	for _, tc := range []struct {
		name  string
		files map[string]string
		want  device.Ext4Errors
	}{
		{"not shown", nil, device.Ext4Errors{First: time.Unix(0, 0).UTC(), Last: time.Unix(0, 0).UTC()}},
		{"damage", map[string]string{"errors_count": "3", "first_error_errcode": "5", "last_error_errcode": "2"}, device.Ext4Errors{3, first, last, true}},
		{"a wrong checksum", map[string]string{"errors_count": "2", "first_error_errcode": "2", "last_error_errcode": "4"}, device.Ext4Errors{2, first, last, true}},
		{"only a disk that did not answer", map[string]string{"errors_count": "1", "first_error_errcode": "2", "last_error_errcode": "2"}, device.Ext4Errors{1, first, last, false}},
		{"an old kernel", map[string]string{"errors_count": "1"}, device.Ext4Errors{1, first, last, true}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			g := devicetest.NewBare(t)
			folder := filepath.Join(g.Dir, "sys/fs/ext4/nvme1n1")
			if err := os.MkdirAll(folder, 0o755); err != nil {
				t.Fatal(err)
			}
			if tc.files != nil {
				tc.files["first_error_time"], tc.files["last_error_time"] = "1700000000", "1800000000"
			}
			for name, content := range tc.files {
				g.Write(filepath.Join(folder, name), content+"\n")
			}
			got, err := g.Roots().Ext4Errors("nvme1n1")
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestBtrfsCorruption(t *testing.T) {
	t.Parallel()
	const id = "3a665843-27d8-5bbd-8831-948d3d093faa"
	g := devicetest.NewBare(t)
	want := func(want int64) {
		t.Helper()
		if got, err := g.Roots().BtrfsCorruption(id); err != nil || got != want {
			t.Errorf("%d, %v; want %d", got, err, want)
		}
	}
	want(0)
	folder := filepath.Join(g.Dir, "sys/fs/btrfs", id, "devinfo/1")
	if err := os.MkdirAll(folder, 0o755); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(folder, "error_stats")
	g.Write(file, "write_errs 7\nread_errs 8\nflush_errs 9\ncorruption_errs 0\ngeneration_errs 0\n")
	want(0)
	g.Write(file, "write_errs 7\nread_errs 8\nflush_errs 9\ncorruption_errs 2\ngeneration_errs 1\n")
	want(3)
}

func TestFilesystemUUID(t *testing.T) {
	t.Parallel()
	g := devicetest.New(t)
	for _, mkfs := range [][]string{nil, {"mkfs.ext4", "-q"}, {"mkfs.ext3", "-q"}, {"mkfs.xfs", "-q"}, {"mkfs.btrfs", "-q"}, {"mkswap"}} {
		name := "blank"
		if mkfs != nil {
			name = mkfs[0]
		}
		t.Run(name, func(t *testing.T) {
			diskName := "csi-" + name
			disk := g.Add(diskName, 320<<20)
			dev, err := g.Roots().WaitForDisk(t.Context(), device.ExpectedDisk{Serial: devicetest.Serial(diskName)}, time.Second)
			if err != nil {
				t.Fatal(err)
			}
			if mkfs != nil {
				devicetest.Run(t, mkfs[0], append(mkfs[1:], disk.Loop)...)
			}
			content, err := device.Probe(t.Context(), dev)
			if err != nil {
				t.Fatal(err)
			}
			want := content.UUID
			if name == "mkswap" {
				want = ""
			}
			if got, err := dev.FilesystemUUID(); err != nil || got != want {
				t.Errorf("%q, %v; blkid says %q", got, err, want)
			}
		})
	}
}

func TestCheckResponds(t *testing.T) {
	t.Parallel()
	g := devicetest.New(t)
	disk := g.Add("csi-answers", 1<<20)
	dev, err := g.Roots().WaitForDisk(t.Context(), device.ExpectedDisk{Serial: "csi-answers"}, time.Second)
	if err != nil {
		t.Fatal(err)
	}
	reader := &device.ChildReader{}
	if err := reader.CheckResponds(t.Context(), dev); err != nil {
		t.Error(err)
	}
	// The check must read from the disk, not from the kernel's cache.
	if _, err := os.ReadFile(dev.Path); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(disk.Backing, 0); err != nil {
		t.Fatal(err)
	}
	if err := reader.CheckResponds(t.Context(), dev); !errors.Is(err, device.ErrUnreadable) || !errors.Is(err, unix.EIO) {
		t.Errorf("%v, want ErrUnreadable with EIO", err)
	}
}

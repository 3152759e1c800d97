// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package device_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
	"github.com/oxidecomputer/oxide-csi-plugin/core/device/devicetest"
)

const (
	diskName  = "csi-abcdefghijklmnop"
	sizeBytes = 8 << 20
)

// milliseconds are in a text that differs each time.
var milliseconds = regexp.MustCompile(`after [0-9.]+(ms|µs)|after [0-9m]*[0-9]+\.`)

func find(g *devicetest.Guest, timeout time.Duration) (device.Device, error) {
	return g.Roots().
		WaitForDisk(context.Background(), device.ExpectedDisk{Serial: devicetest.Serial(diskName), SizeBytes: sizeBytes}, timeout)
}

func TestWaitForDiskBySerial(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct{ name, diskName, serial string }{
		{"as a rack shows it", "vol-b", "vol-b\n"},
		{"20 bytes", diskName, diskName + "\n"},
		{"25 bytes are cut to 20", diskName + "-tail", diskName + "\n"},
		{"padded with blanks", "vol-b", "vol-b               \n"},
		{"padded with zero bytes", "vol-b", "vol-b\x00\x00\x00\n"},
		{"with blanks before it", "vol-b", "   vol-b\n"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			g := devicetest.New(t)
			g.Add("boot-disk", sizeBytes)
			want := g.Add(tc.diskName, sizeBytes)
			g.Write(filepath.Join(g.Dir, "sys/block", want.Kernel, "device/serial"), tc.serial)
			dev, err := g.Roots().
				WaitForDisk(context.Background(), device.ExpectedDisk{Serial: devicetest.Serial(tc.diskName)}, time.Second)
			if err != nil {
				t.Fatal(err)
			}
			if dev.Name != want.Kernel || dev.Number != want.Number || dev.SizeBytes != sizeBytes {
				t.Errorf("found %v, want %s, %v, %d bytes", dev, want.Kernel, want.Number, sizeBytes)
			}
		})
	}
}

// While a mapping is being closed, the kernel answers EINVAL for its attributes. A file that cannot be read stands for
// one.
func TestMappingThatIsJustClosed(t *testing.T) {
	t.Parallel()
	g := devicetest.New(t)
	folder := filepath.Join(g.Dir, "sys/block/dm-0/dm")
	if err := errors.Join(os.MkdirAll(folder, 0o755), os.Symlink("/proc/self/clear_refs", folder+"/name")); err != nil {
		t.Fatal(err)
	}
	if _, err := os.ReadFile(folder + "/name"); !errors.Is(err, unix.EINVAL) {
		t.Fatalf("the file can be read: %v", err)
	}
	if found, err := g.Roots().MappingsOf(uuid.New()); err != nil || len(found) > 0 {
		t.Errorf("%v, %v", found, err)
	}
}

// A disk that is reached over a network can have any serial. It is no disk of the rack, and has no slot. But one that
// is mounted has not left the guest.
func TestDisksOverANetwork(t *testing.T) {
	t.Parallel()
	g := devicetest.New(t)
	disk := g.Add(diskName, sizeBytes)
	numbers := []device.Number{{Major: 259, Minor: 8}, {Major: 259, Minor: 9}}
	g.Network("nvme8n1", diskName+"\n", numbers[0], sizeBytes)
	g.Multipath("nvme9n1", diskName+"\n", numbers[1], sizeBytes, "tcp", "fc")
	if dev, err := find(g, time.Second); err != nil || dev.Number != disk.Number {
		t.Errorf("found %v, %v; want %s", dev, err, disk.Kernel)
	}
	for _, number := range numbers {
		if dev, err := g.Roots().BySerial(diskName, number); err != nil || dev.Number != disk.Number {
			t.Errorf("by serial and number %s: %v, %v; want %s", number, dev, err, disk.Kernel)
		}
		if _, err := g.Roots().ByNumber(number); err != nil {
			t.Errorf("by number: %v", err)
		}
	}
	disks, err := g.Roots().Disks()
	if err != nil || len(disks) != 1 || disks[0].Number != disk.Number {
		t.Errorf("disks %v, %v; want %s", disks, err, disk.Kernel)
	}
	g.Unplug(disk)
	if _, err := g.Roots().BySerial(diskName, numbers[0]); !errors.Is(err, device.ErrNotFound) {
		t.Errorf("by serial, after the disk has left: %v", err)
	}
}

func TestWaitForDiskRejects(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name string
		// guest changes what a guest with this disk shows.
		guest func(g *devicetest.Guest, d *devicetest.Disk)
		want  error
		says  string
	}{
		{"another serial that begins alike", func(g *devicetest.Guest, d *devicetest.Disk) {
			g.Write(filepath.Join(g.Dir, "sys/block", d.Kernel, "device/serial"), diskName[:19]+"\n")
		}, device.ErrNotFound, diskName},
		{"a hidden path of a multipath disk", func(g *devicetest.Guest, d *devicetest.Disk) {
			g.Write(filepath.Join(g.Dir, "sys/block", d.Kernel, "hidden"), "1\n")
		}, device.ErrNotFound, "none of the 0 NVMe disks"},
		{"a disk that is reached over a network", func(g *devicetest.Guest, d *devicetest.Disk) {
			g.Write(filepath.Join(g.Dir, "sys/block", d.Kernel, "device/transport"), "tcp\n")
		}, device.ErrNotFound, "none of the 1 NVMe disks"},
		{"no size yet", func(g *devicetest.Guest, d *devicetest.Disk) {
			g.Write(filepath.Join(g.Dir, "sys/block", d.Kernel, "size"), "0\n")
		}, device.ErrNotFound, "no size yet"},
		{"a controller that is being removed", func(g *devicetest.Guest, d *devicetest.Disk) {
			g.Write(filepath.Join(g.Dir, "sys/block", d.Kernel, "device/state"), "deleting\n")
		}, device.ErrNotFound, "its controller is deleting"},
		{"no device number yet", func(g *devicetest.Guest, d *devicetest.Disk) {
			_ = os.Remove(filepath.Join(g.Dir, "sys/block", d.Kernel, "dev")) // its absence is what the case needs
		}, device.ErrNotFound, "none of the 0 NVMe disks"},
		{"an empty serial", func(g *devicetest.Guest, d *devicetest.Disk) {
			g.Write(filepath.Join(g.Dir, "sys/block", d.Kernel, "device/serial"), "\x00\x00                  \n")
		}, device.ErrNotFound, "none of the 1 NVMe disks"},
		{"a serial with a zero byte inside", func(g *devicetest.Guest, d *devicetest.Disk) {
			g.Write(filepath.Join(g.Dir, "sys/block", d.Kernel, "device/serial"), diskName[:9]+"\x00"+diskName[9:19]+"\n")
		}, device.ErrNotFound, "none of the 1 NVMe disks"},
		{"the beginning of a serial", func(g *devicetest.Guest, d *devicetest.Disk) {
			g.Write(filepath.Join(g.Dir, "sys/block", d.Kernel, "device/serial"), diskName+"y\n")
		}, device.ErrNotFound, "none of the 1 NVMe disks"},
		{"two disks, one of them without size yet", func(g *devicetest.Guest, _ *devicetest.Disk) {
			other := g.Add(diskName+"x", sizeBytes)
			g.Write(filepath.Join(g.Dir, "sys/block", other.Kernel, "size"), "0\n")
		}, device.ErrAmbiguous, "nvme0n1 and nvme1n1"},
		{"no device node", func(g *devicetest.Guest, d *devicetest.Disk) {
			_ = os.Remove(filepath.Join(g.Dir, "dev", d.Kernel)) // its absence is what the case needs
		}, device.ErrNotFound, "the host's /dev"},
		{"two disks", func(g *devicetest.Guest, _ *devicetest.Disk) {
			g.Add(diskName+"x", sizeBytes)
		}, device.ErrAmbiguous, "nvme0n1 and nvme1n1"},
		{"a function that the kernel rejected", func(g *devicetest.Guest, _ *devicetest.Disk) {
			g.Function("0000:00:17.0", "")
		}, device.ErrAmbiguous, "0000:00:17.0"},
		{"another size on the rack", func(g *devicetest.Guest, d *devicetest.Disk) {
			g.Write(filepath.Join(g.Dir, "sys/block", d.Kernel, "size"), "32768\n")
		}, device.ErrMismatch, "16777216"},
		{"another size when opened", func(g *devicetest.Guest, d *devicetest.Disk) {
			smaller := g.Add("other", sizeBytes/2)
			g.Node(d.Kernel, smaller.Number)
			g.Write(filepath.Join(g.Dir, "sys/block", d.Kernel, "dev"), smaller.Number.String()+"\n")
		}, device.ErrMismatch, "when opened"},
		{"a size that is not a number", func(g *devicetest.Guest, d *devicetest.Disk) {
			g.Write(filepath.Join(g.Dir, "sys/block", d.Kernel, "size"), "many\n")
		}, device.ErrMismatch, "many"},
		{"a node of another device", func(g *devicetest.Guest, d *devicetest.Disk) {
			g.Node(d.Kernel, g.Add("other", sizeBytes).Number)
		}, device.ErrMismatch, "device number"},
		{"a node that is a file", func(g *devicetest.Guest, d *devicetest.Disk) {
			_ = os.Remove(filepath.Join(g.Dir, "dev", d.Kernel)) // the write below fails if this did
			g.Write(filepath.Join(g.Dir, "dev", d.Kernel), "")
		}, device.ErrMismatch, "not a block device"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			g := devicetest.New(t)
			tc.guest(g, g.Add(diskName, sizeBytes))
			timeout := 10 * time.Millisecond
			if errors.Is(tc.want, device.ErrAmbiguous) {
				timeout = time.Minute // the error must come at once
			}
			dev, err := find(g, timeout)
			if err != nil && milliseconds.MatchString(err.Error()) {
				t.Errorf("each repetition would be a new event in Kubernetes: %v", err)
			}
			if !errors.Is(err, tc.want) {
				t.Fatalf("found %v, %v; want %v", dev, err, tc.want)
			}
			if !strings.Contains(err.Error(), tc.says) || strings.ContainsRune(err.Error(), '\n') {
				t.Errorf("the error does not say %q in one line: %v", tc.says, err)
			}
		})
	}
}

func TestWaitForDiskWaits(t *testing.T) {
	t.Parallel()
	g := devicetest.New(t)
	found := make(chan error, 1)
	go func() {
		_, err := find(g, time.Minute)
		found <- err
	}()
	d := g.Add(diskName, sizeBytes)
	if err := <-found; err != nil {
		t.Fatal(err)
	}

	// A controller that does not show its serial yet may have the same serial. So WaitForDisk waits until its context
	// ends. Real time: the guest is a folder with files and loop devices, which have no clock. A busy machine does not
	// change the result, because WaitForDisk looks at the disks at least once.
	other := g.Function("0000:00:17.0", "nvme")
	serial := filepath.Join(other, "nvme/nvme7/serial")
	if err := os.MkdirAll(filepath.Dir(serial), 0o755); err != nil {
		t.Fatal(err)
	}
	g.Write(serial, "(efault)\n")
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	short, stop := context.WithTimeout(ctx, 700*time.Millisecond)
	defer stop()
	if _, err := g.Roots().
		WaitForDisk(short, device.ExpectedDisk{Serial: diskName}, time.Minute); !errors.Is(err, device.ErrNotFound) ||
		!strings.Contains(err.Error(), "not ready yet") {
		t.Errorf("with a controller without serial: %v, want it to wait", err)
	}
	g.Write(serial, "something else\n")
	if _, err := g.Roots().WaitForDisk(ctx, device.ExpectedDisk{Serial: diskName}, time.Minute); err != nil {
		t.Errorf("with a controller of another serial: %v", err)
	}
	g.Unplug(d)
	cancel()
	if _, err := g.Roots().
		WaitForDisk(ctx, device.ExpectedDisk{Serial: diskName}, time.Minute); !errors.Is(err, context.Canceled) ||
		!errors.Is(err, device.ErrNotFound) {
		t.Errorf("with a cancelled context: %v", err)
	}
}

// A PCI function of another driver has no disk in the guest. For example, vfio-pci passes a function to a nested
// virtual machine.
func TestWaitForDiskIgnoresOtherDrivers(t *testing.T) {
	t.Parallel()
	g := devicetest.New(t)
	g.Add(diskName, sizeBytes)
	g.Function("0000:00:17.0", "vfio-pci")
	if _, err := find(g, time.Second); err != nil {
		t.Error(err)
	}
}

func TestDisks(t *testing.T) {
	t.Parallel()
	g := devicetest.NewBare(t)
	g.Sysfs("nvme0n1", "boot\n", device.Number{Major: 259, Minor: 0}, 1<<30)
	g.Sysfs("nvme1n1", diskName+"\n", device.Number{Major: 259, Minor: 3}, 2<<30)
	for path, content := range map[string]string{
		"nvme0n1/nvme0n1p1/dev": "259:1\n",
		"nvme0c0n1/dev":         "259:9\n",
		"sda/dev":               "8:0\n",
		"nvme2n1/size":          "0\n", // an incomplete entry
	} {
		path = filepath.Join(g.Dir, "sys/block", path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		g.Write(path, content)
	}
	disks, err := g.Roots().Disks()
	if err != nil {
		t.Fatal(err)
	}
	want := []device.Disk{
		{Name: "nvme0n1", Serial: "boot", Number: device.Number{Major: 259, Minor: 0}, SizeBytes: 1 << 30,
			Partitions: map[string]device.Number{"nvme0n1p1": {Major: 259, Minor: 1}}},
		{
			Name:       "nvme1n1",
			Serial:     diskName,
			Number:     device.Number{Major: 259, Minor: 3},
			SizeBytes:  2 << 30,
			Partitions: map[string]device.Number{},
		},
	}
	if diff := cmp.Diff(want, disks); diff != "" {
		t.Errorf("disks (-want +got):\n%s", diff)
	}
	dev, err := g.Roots().ByNumber(device.Number{Major: 259, Minor: 3})
	if err != nil || dev.Name != "nvme1n1" {
		t.Errorf("number 259:3 is %v, %v", dev, err)
	}
	if dev, err := g.Roots().ByNumber(device.Number{Major: 259, Minor: 1}); !errors.Is(err, device.ErrNotFound) {
		t.Errorf("the number of a partition is %v, %v; want ErrNotFound", dev, err)
	}
}

// SetReadOnly stops programs that have the device open, but no filesystem that is mounted writable.
func TestReadOnly(t *testing.T) {
	t.Parallel()
	g := devicetest.New(t)
	d := g.Add(diskName, sizeBytes)
	dev, err := find(g, time.Second)
	if err != nil {
		t.Fatal(err)
	}
	devicetest.Run(t, "mkfs.ext4", "-q", d.Loop)
	before, err := dev.Open(unix.O_RDWR)
	if err != nil {
		t.Fatal(err)
	}
	folder := t.TempDir()
	devicetest.Run(t, "mount", d.Loop, folder)
	for _, readOnly := range []bool{true, true, false} {
		if err := dev.SetReadOnly(readOnly); err != nil {
			t.Fatal(err)
		}
		if now, err := dev.ReadOnly(); err != nil || now != readOnly {
			t.Errorf("read-only is %t, %v after it was set to %t", now, err, readOnly)
		}
		if _, err := before.WriteAt([]byte{0}, 0); errors.Is(err, unix.EPERM) != readOnly {
			t.Errorf("a write: %v, read-only %t", err, readOnly)
		}
		content := devicetest.Digest(t, d.Loop, d.Backing)
		if err := os.WriteFile(filepath.Join(folder, "file"), []byte{byte(len(content))}, 0o600); err != nil {
			t.Fatal(err)
		}
		devicetest.Run(t, "sync", "-f", folder)
		if devicetest.Digest(t, d.Loop, d.Backing) == content {
			t.Errorf("read-only %t: the mounted filesystem wrote nothing: correct the comment of SetReadOnly", readOnly)
		}
	}
	if err := before.Close(); err != nil {
		t.Error(err)
	}
	devicetest.Unmount(t, folder)
}

// BenchmarkWaitForDisk measures a search among the most disks that an instance can have.
func BenchmarkWaitForDisk(b *testing.B) {
	g := devicetest.New(b)
	for i := range 11 {
		g.Add(fmt.Sprintf("csi-%016d", i), sizeBytes)
	}
	g.Add(diskName, sizeBytes)
	for b.Loop() {
		if _, err := find(g, time.Second); err != nil {
			b.Fatal(err)
		}
	}
}

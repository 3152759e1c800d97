// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package device

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

const (
	// pollInterval is how often sysfs is looked at. A look at 12 disks takes less than 1 ms (BenchmarkFind), and a workload waits
	// for the disk. Kernel events would need the host's network namespace.
	pollInterval = 10 * time.Millisecond
	// readyTimeout is how long a controller may take to say its serial before it counts as refused. Under load the kernel
	// was seen to take 1.2 s.
	readyTimeout = 2 * time.Second
	// answerReserve is left of the caller's time for telling it what was missing.
	answerReserve = 500 * time.Millisecond
)

// ExpectedDisk says which disk is looked for.
type ExpectedDisk struct {
	// Serial is the NVMe serial under which a guest sees the disk: its name, as far as it fits (docs/reference/rack.md §9).
	Serial string
	// SizeBytes is the disk's size on the rack, 0 when it is not known.
	SizeBytes int64
}

// Find waits until the guest shows the disk, at most for timeout and a little less than ctx allows, and verifies it: its
// serial, that it is the only one, its size, its device node, that the guest's system does not live on it. See the
// package's description for what each error means; every one names the serial.
func (r Roots) WaitForDisk(ctx context.Context, want ExpectedDisk, timeout time.Duration) (Device, error) {
	start := time.Now()
	end := start.Add(timeout)
	if deadline, ok := ctx.Deadline(); ok && deadline.Add(-answerReserve).Before(end) {
		end = deadline.Add(-answerReserve)
	}
	ticker := time.NewTicker(pollInterval)
	defer ticker.Stop()
	var matched time.Time
	for {
		dev, missing, err := r.findOnce(want)
		if err != nil {
			return Device{}, err
		}
		if missing == "" {
			if matched.IsZero() {
				matched = time.Now()
			}
			unsettled, err := r.functionNotReady()
			if err != nil {
				return Device{}, err
			}
			if unsettled == "" {
				return dev, r.verify(dev)
			}
			if time.Since(matched) > readyTimeout {
				return Device{}, fmt.Errorf(
					"%w: serial %q is %s, but the NVMe function %s did not come up and may be a disk with the same serial: "+
						"look for \"Duplicate cntlid\" in the kernel's log, and see that no two disks of the instance share the first %d bytes of their names",
					ErrAmbiguous,
					dev.Serial,
					dev.Name,
					unsettled,
					len(dev.Serial),
				)
			}
			missing = "NVMe function " + unsettled + " is still coming up"
		} else {
			matched = time.Time{}
		}
		if !time.Now().Before(end) {
			return Device{}, fmt.Errorf(
				"%w: serial %q, after %s: %s",
				ErrNotFound,
				want.Serial,
				time.Since(start).Round(time.Millisecond),
				missing,
			)
		}
		select {
		case <-ctx.Done():
			return Device{}, fmt.Errorf(
				"%w: serial %q, after %s: %s: %w",
				ErrNotFound,
				want.Serial,
				time.Since(start).Round(time.Millisecond),
				missing,
				ctx.Err(),
			)
		case <-ticker.C:
		}
	}
}

// findOnce looks once. It returns what is still missing, or an error where waiting would not help.
func (r Roots) findOnce(want ExpectedDisk) (dev Device, missing string, err error) {
	disks, err := r.Disks()
	if err != nil {
		return Device{}, "", err
	}
	matches := slices.DeleteFunc(slices.Clone(disks), func(d Disk) bool { return d.Serial != want.Serial })
	switch len(matches) {
	case 0:
		return Device{}, fmt.Sprintf(
			"none of the %d NVMe disks has it: check that the rack shows the disk attached to this instance",
			len(disks),
		), nil
	case 1:
		dev = Device{Disk: matches[0], Path: r.dev(matches[0].Name)}
	default:
		return Device{}, "", fmt.Errorf(
			"%w: %s and %s both have serial %q",
			ErrAmbiguous,
			matches[0].Name,
			matches[1].Name,
			want.Serial,
		)
	}
	if dev.SizeBytes == 0 {
		return Device{}, dev.Name + " has it and no size yet", nil
	}
	if state := r.ControllerState(dev.Name); state != "" && state != ControllerLive {
		return Device{}, fmt.Sprintf("%s has it, but its controller is %s", dev.Name, state), nil
	}
	if want.SizeBytes != 0 && dev.SizeBytes != want.SizeBytes {
		return Device{}, "", fmt.Errorf(
			"%w: %s has %d bytes, the rack's disk has %d",
			ErrMismatch,
			dev,
			dev.SizeBytes,
			want.SizeBytes,
		)
	}
	if _, err := os.Stat(dev.Path); errors.Is(err, fs.ErrNotExist) {
		return Device{}, fmt.Sprintf(
			"%s has it, but there is no %s: check that the host's /dev is mounted where the plugin runs",
			dev.Name,
			dev.Path,
		), nil
	}
	return dev, "", nil
}

// verify checks what looking at sysfs alone does not show.
func (r Roots) verify(dev Device) error {
	file, err := dev.Open(unix.O_RDONLY)
	if err != nil {
		return err
	}
	if err := file.Close(); err != nil {
		return err
	}
	mounts, err := mountinfo.GetMounts(nil)
	if err != nil {
		return fmt.Errorf("read the mount table: %w", err)
	}
	return checkNotSystem(dev, append(mounts, hostMounts()...))
}

// hostMounts are the mounts of the first process: the host's, unless we are in a process namespace of our own, where
// they are our own once more. Where they cannot be read, our own have to do.
func hostMounts() []*mountinfo.Info {
	file, err := os.Open("/proc/1/mountinfo")
	if err != nil {
		return nil
	}
	mounts, err := mountinfo.GetMountsFromReader(file, nil)
	if err := errors.Join(err, file.Close()); err != nil {
		return nil
	}
	return mounts
}

// systemPaths are mount points that no volume has. Partitions count wherever they are mounted: a volume has none.
var systemPaths = []string{
	"/",
	"/boot",
	"/boot/efi",
	"/efi",
	"/home",
	"/opt",
	"/root",
	"/srv",
	"/usr",
	"/var",
	"/var/lib",
	"/var/log",
}

// checkNotSystem refuses a disk that the guest's own system uses. In a container the host's mounts mostly do not show,
// but folders of the host's that are mounted there do, under the number of the partition they lie on.
func checkNotSystem(dev Device, mounts []*mountinfo.Info) error {
	for _, m := range mounts {
		number := Number{uint32(m.Major), uint32(m.Minor)}
		if number == dev.Number && slices.Contains(systemPaths, m.Mountpoint) {
			return fmt.Errorf("%w: %s is mounted at %s: it belongs to the guest's own system", ErrInUse, dev, m.Mountpoint)
		}
		for name, partition := range dev.Partitions {
			if number == partition {
				return fmt.Errorf("%w: %s has a partition %s that is mounted at %s", ErrInUse, dev, name, m.Mountpoint)
			}
		}
	}
	return nil
}

// nvmeClass is the PCI class of NVMe controllers.
const nvmeClass = "0x010802"

// functionNotReady returns the address of a PCI NVMe function whose serial the kernel has not accepted: it is still coming up,
// or it was refused because another one has the same serial. The kernel then takes the driver away from it, and which of
// the two it keeps is chance, so that the one match in /sys/block proves nothing.
func (r Roots) functionNotReady() (address string, err error) {
	addresses, err := r.functionsNotReady()
	if err != nil || len(addresses) == 0 {
		return "", err
	}
	return addresses[0], nil
}

// functionsNotReady are all such functions. A guest whose sysfs shows no PCI bus has none.
func (r Roots) functionsNotReady() (addresses []string, err error) {
	functions, err := os.ReadDir(r.sys("bus", "pci", "devices"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list PCI devices: %w", err)
	}
	for _, function := range functions {
		folder := r.sys("bus", "pci", "devices", function.Name())
		class, err := os.ReadFile(filepath.Join(folder, "class"))
		if err != nil || strings.TrimSpace(string(class)) != nvmeClass {
			continue // gone meanwhile, or something else
		}
		if !functionReady(folder) {
			addresses = append(addresses, function.Name())
		}
	}
	return addresses, nil
}

// functionReady reports whether a PCI function has its driver and the driver a controller with a serial. Before the kernel
// has compared a controller with the others its serial reads "(efault)". A function that somebody gave to another driver
// (vfio) shows no disk to this guest.
func functionReady(function string) bool {
	driver, err := os.Readlink(filepath.Join(function, "driver"))
	if err != nil {
		return false
	}
	if filepath.Base(driver) != "nvme" {
		return true
	}
	controllers, err := os.ReadDir(filepath.Join(function, "nvme"))
	if err != nil || len(controllers) == 0 {
		return false
	}
	for _, controller := range controllers {
		serial, err := os.ReadFile(filepath.Join(function, "nvme", controller.Name(), "serial"))
		if err != nil || strings.TrimSpace(string(serial)) == "(efault)" {
			return false
		}
	}
	return true
}

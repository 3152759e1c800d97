// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package device

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

const (
	// pollInterval is the time between two readings of sysfs. Reading it for 12 disks takes less than 1 ms
	// (BenchmarkWaitForDisk), and a workload waits for the disk. Kernel events would need the host's network namespace.
	pollInterval = 10 * time.Millisecond
	// readyTimeout is how long a controller may be without a serial before it counts as rejected by the kernel. Under
	// load the kernel was seen to take 1.2 s.
	readyTimeout = 2 * time.Second
	// answerReserve is kept of the caller's time for the answer that says what was missing.
	answerReserve = 500 * time.Millisecond
)

// ExpectedDisk describes the disk to find.
type ExpectedDisk struct {
	// Serial is the disk's NVMe serial in a guest: the first 20 bytes of the disk's name (docs/reference/rack.md §9).
	Serial string
	// SizeBytes is the disk's least size, or 0 if it is unknown. An orchestrator may keep the size from before the volume
	// was expanded.
	SizeBytes int64
	// FirstBytes is the size of the volume's first disk, or 0 if it is unknown.
	FirstBytes int64
	// Held says that this node holds the disk for the volume already. Then it may be mounted at a path such as /srv.
	Held bool
}

// WaitForDisk waits until the guest shows the disk, for at most timeout and a little less than ctx allows. It verifies
// that no other disk has the serial, the size, the device node, and that the guest's own system is not on the disk.
// Every error names the serial.
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
			if missing, err = r.unsettled(dev, matched); err != nil {
				return Device{}, err
			}
			if missing == "" {
				if dev.sequence, err = dev.Sequence(); err != nil {
					return Device{}, err
				}
				return dev, r.verify(dev, want.Held)
			}
		} else {
			matched = time.Time{}
		}
		if !time.Now().Before(end) {
			return Device{}, fmt.Errorf("%w: serial %q, after %s: %s", ErrNotFound, want.Serial,
				time.Since(start).Round(time.Second), missing)
		}
		select {
		case <-ctx.Done():
			return Device{}, fmt.Errorf("%w: serial %q, after %s: %s: %w", ErrNotFound, want.Serial,
				time.Since(start).Round(time.Second), missing, ctx.Err())
		case <-ticker.C:
		}
	}
}

// unsettled returns why a disk that was found may not be the only one with its serial yet, or "". It is an error when
// that has lasted for readyTimeout since the disk was found.
func (r Roots) unsettled(dev Device, found time.Time) (reason string, err error) {
	function, err := r.functionNotReady()
	if err != nil || function == "" {
		return "", err
	}
	if time.Since(found) > readyTimeout {
		return "", fmt.Errorf(
			"%w: serial %q is %s, but NVMe function %s is not ready and may have it too: "+
				"look for \"Duplicate cntlid\" in the kernel's log, and detach one of the two disks",
			ErrAmbiguous,
			dev.Serial,
			dev.Name,
			function,
		)
	}
	return "NVMe function " + function + " is not ready yet", nil
}

// findOnce looks for the disk once. It returns what is still missing, or an error if waiting does not help.
func (r Roots) findOnce(want ExpectedDisk) (dev Device, missing string, err error) {
	disks, err := r.allDisks()
	if err != nil {
		return Device{}, "", err
	}
	matches := slices.DeleteFunc(slices.Clone(disks), func(d Disk) bool { return d.Serial != want.Serial || !r.onPCI(d) })
	switch len(matches) {
	case 0:
		return Device{}, fmt.Sprintf(
			"none of the %d NVMe disks has it: check that the disk is attached to this instance on the rack", len(disks)), nil
	case 1:
		dev = Device{Disk: matches[0], Path: r.dev(matches[0].Name)}
	default:
		return Device{}, "", fmt.Errorf("%w: %s and %s both have serial %q", ErrAmbiguous, matches[0].Name, matches[1].Name,
			want.Serial)
	}
	if dev.SizeBytes == 0 {
		return Device{}, dev.Name + " has the serial but no size yet", nil
	}
	if state := r.ControllerState(dev.Name); state != "" && state != ControllerLive {
		return Device{}, fmt.Sprintf("%s has the serial, but its controller is %s", dev.Name, state), nil
	}
	if dev.SizeBytes < want.SizeBytes {
		return Device{}, "", fmt.Errorf("%w: %s has %d bytes, the rack's disk has at least %d", ErrMismatch, dev,
			dev.SizeBytes, want.SizeBytes)
	}
	if want.FirstBytes < dev.SizeBytes {
		dev.FirstBytes = want.FirstBytes
	}
	if _, err := os.Stat(dev.Path); errors.Is(err, fs.ErrNotExist) {
		return Device{}, fmt.Sprintf(
			"%s has the serial, but %s does not exist: check that the plugin's container mounts the host's /dev", dev.Name,
			dev.Path), nil
	}
	return dev, "", nil
}

// verify checks what sysfs does not show: the device node, and that the guest's system does not use the disk.
func (r Roots) verify(dev Device, held bool) error {
	file, err := dev.Open(unix.O_RDONLY)
	if err != nil {
		return err
	}
	if err := file.Close(); err != nil {
		return err
	}
	mounts, err := Mounts()
	if err != nil {
		return err
	}
	return checkNotSystem(dev, held, append(mounts, hostMounts()...))
}

// Mounts are the mounts of this mount namespace.
func Mounts() ([]*mountinfo.Info, error) {
	runtime.LockOSThread() // a thread that ends takes its file in /proc along
	defer runtime.UnlockOSThread()
	content, err := ReadKernelFile("/proc/thread-self/mountinfo")
	if err != nil {
		return nil, fmt.Errorf("read the mount table: %w", err)
	}
	mounts, err := mountinfo.GetMountsFromReader(bytes.NewReader(content), nil)
	if err != nil {
		return nil, fmt.Errorf("read the mount table: %w", err)
	}
	return mounts, nil
}

// hostMounts are the mounts of process 1: the host's, or the plugin's own if the plugin has a separate PID namespace.
// It returns nil if they cannot be read.
func hostMounts() []*mountinfo.Info {
	content, err := ReadKernelFile("/proc/1/mountinfo")
	if err != nil {
		return nil
	}
	mounts, err := mountinfo.GetMountsFromReader(bytes.NewReader(content), nil)
	if err != nil {
		return nil
	}
	return mounts
}

// systemPaths are mount points of a guest's own system. If a disk is mounted there that this node does not hold, it is
// no volume. A mounted partition counts at every path: volumes have no partitions.
var systemPaths = []string{
	"/", "/boot", "/boot/efi", "/efi", "/home", "/opt", "/root", "/srv", "/usr", "/var", "/var/lib", "/var/log",
}

// checkNotSystem rejects a disk that the guest's own system uses. A container mostly does not see the host's mounts.
// But it sees host folders that are mounted into it, with the device number of their partition.
func checkNotSystem(dev Device, held bool, mounts []*mountinfo.Info) error {
	for _, m := range mounts {
		number := Number{uint32(m.Major), uint32(m.Minor)}
		if number == dev.Number && !held && slices.Contains(systemPaths, m.Mountpoint) {
			return fmt.Errorf("%w: %s is mounted at %s and belongs to the guest's own system", ErrInUse, dev, m.Mountpoint)
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

// functionNotReady returns the address of a PCI NVMe function whose serial the kernel has not accepted, or "". Such a
// function is still starting, or the kernel rejected it because another function has the same serial. The kernel then
// unbinds the driver from either of the two, so a single match in /sys/block proves nothing.
func (r Roots) functionNotReady() (address string, err error) {
	addresses, err := r.FunctionsNotReadyNow()
	if err != nil || len(addresses) == 0 {
		return "", err
	}
	return addresses[0], nil
}

// FunctionsNotReadyNow is [Roots.FunctionsNotReady] without the wait: functions that are still starting are not ready.
// There are none if sysfs shows no PCI bus.
func (r Roots) FunctionsNotReadyNow() (addresses []string, err error) {
	functions, err := os.ReadDir(r.sys("bus", "pci", "devices"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list PCI devices: %w", err)
	}
	for _, function := range functions {
		folder := r.sys("bus", "pci", "devices", function.Name())
		class, err := readAttribute(filepath.Join(folder, "class"))
		if err != nil || strings.TrimSpace(string(class)) != nvmeClass {
			continue // the function has left the guest, or is no NVMe controller
		}
		if !functionReady(folder) {
			addresses = append(addresses, function.Name())
		}
	}
	return addresses, nil
}

// functionReady reports whether a PCI function has its driver, and a controller with a serial. The serial reads
// "(efault)" until the kernel has compared the controller with the others. A function with another driver (vfio) is
// ready: it shows no disk to this guest.
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
		serial, err := readAttribute(filepath.Join(function, "nvme", controller.Name(), "serial"))
		if err != nil || strings.TrimSpace(string(serial)) == "(efault)" {
			return false
		}
	}
	return true
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package diagnose

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
	"github.com/oxidecomputer/oxide-csi-plugin/core/mount"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
)

// probeTimeout limits how long the content of a device is looked for. The disk may not answer.
const probeTimeout = 5 * time.Second

// Host is the [Guest] that this machine is. It reads the devices below the roots, and the mounts, and asks the
// controller at the socket, unless that is empty.
type Host struct {
	Devices    device.Roots
	Controller string
	// Instance is the instance that this machine is, or "" if that is not known.
	Instance string
}

// Steps looks for the disk by its serial.
func (h Host) Steps(ctx context.Context, diskName, instanceID string) []orchestrator.TraceStep {
	guest := h.Devices
	disks, _ := guest.Disks() // this machine may have no NVMe disks at all
	here := slices.IndexFunc(disks, func(d device.Disk) bool { return d.Serial == diskname.Serial(diskName) })
	if here < 0 && h.Instance == instanceID {
		return []orchestrator.TraceStep{{Link: "device", Object: "device in this guest", State: noDevice}}
	}
	if here < 0 {
		return nil
	}
	disk := disks[here]
	state := "ready"
	if controller := guest.ControllerState(disk.Name); controller != "" && controller != device.ControllerLive {
		state = controller
	}
	steps := []orchestrator.TraceStep{{
		Link: "device", Object: fmt.Sprintf("device %s, serial %s", disk.Name, disk.Serial), State: state,
	}}
	table, err := mount.ReadTable()
	if err != nil {
		return append(steps, orchestrator.TraceStep{Link: "mount", Object: "mounts", State: err.Error()})
	}
	mounts := table.OfDevice(disk.Number)
	steps = append(steps, filesystemStep(ctx, guest, disk, mounts))
	for _, m := range mounts {
		state := "writable"
		if m.ReadOnly {
			state = "read-only"
		}
		steps = append(steps, orchestrator.TraceStep{Link: "mount", Object: "mount " + m.Path, State: state})
	}
	if len(mounts) == 0 {
		steps = append(steps, orchestrator.TraceStep{Link: "mount", Object: "mounts", State: noMounts})
	}
	return steps
}

// filesystemStep returns what the device holds. Of a mounted filesystem the mount table tells it, so that a disk that
// does not answer is not read.
func filesystemStep(
	ctx context.Context, guest device.Roots, disk device.Disk, mounts []mount.Entry,
) orchestrator.TraceStep {
	step := orchestrator.TraceStep{Link: "filesystem", Object: "content of " + disk.Name}
	if len(mounts) > 0 {
		switch m := mounts[0]; {
		case m.Block():
			step.State = "raw block, published"
		case m.ShutDown, m.TurnedReadOnly:
			step.State = m.FSType + ", stopped after an error"
		default:
			step.State = m.FSType + ", mounted"
		}
		return step
	}
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	dev, err := guest.ByNumber(disk.Number)
	if err == nil {
		var content device.Content
		if content, err = device.Probe(ctx, dev); err == nil {
			step.State = content.String()
		}
	}
	if err != nil {
		step.State = err.Error()
	}
	return step
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package guest

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack"
)

// machine is one guest.
type machine struct {
	id, dir string
	// madeDir means that the simulator created the folder.
	madeDir bool

	mu      sync.Mutex
	running bool
	// system is the running system of the machine; nil if none runs.
	system  *system
	devices map[string]*device // by disk ID
	// vanished are block devices without a disk that a process may still hold. Until it closes them, the kernel does not
	// reuse their numbers.
	vanished []*device
}

// powerOn boots a machine with the disks in its slots. After an error the machine is off again.
func (g *Guests) powerOn(m *machine, disks []simrack.GuestDisk, ended func(reset bool)) error {
	if m.running {
		return errors.New("it is running")
	}
	if err := m.removeStaleMounts(); err != nil {
		return err
	}
	m.running = true
	err := m.boot(g, disks)
	if err == nil && g.boot != "" {
		m.system, err = g.start(m, ended)
	}
	if err != nil {
		err = errors.Join(err, g.powerOff(m, false))
	}
	return err
}

func (m *machine) boot(g *Guests, disks []simrack.GuestDisk) error {
	sys := filepath.Join(m.dir, "sys")
	for _, dir := range []string{"block", "bus/pci/devices", "bus/pci/drivers/nvme", "class/nvme", "dev/block"} {
		if err := os.MkdirAll(filepath.Join(sys, dir), 0o755); err != nil {
			return err
		}
	}
	if err := write(sys, firmware(m.id)); err != nil {
		return err
	}
	// The kernel probes the slots in ascending order.
	inSlots := slices.SortedFunc(slices.Values(disks), func(a, b simrack.GuestDisk) int { return a.Slot - b.Slot })
	for _, disk := range inSlots {
		if err := g.plug(m, disk); err != nil {
			return err
		}
	}
	return nil
}

// removeStaleMounts unmounts what is left of the machine's previous run: a machine has no mounts when it boots. Mounts
// in other mount namespaces remain, because only processes in these can remove them.
func (m *machine) removeStaleMounts() error {
	mounts, err := ownMounts()
	if err != nil {
		return err
	}
	dev := filepath.Join(m.dir, "dev")
	isNode, err := nodeMounts(mounts, dev)
	if err != nil {
		return err
	}
	former := withChildren(mounts, func(mount mount) bool {
		return isNode(mount) || below(mount.Source, dev)
	})
	for _, mount := range former {
		if err := mount.unmount(unix.MNT_DETACH); err != nil {
			return fmt.Errorf("remove the mounts of the machine's previous run: %w", err)
		}
	}
	return nil
}

// plug adds a disk to a running machine.
func (g *Guests) plug(m *machine, disk simrack.GuestDisk) error {
	if _, ok := m.devices[disk.ID]; ok {
		return fmt.Errorf("disk %s is already plugged in", disk.ID)
	}
	d := &device{disk: disk}
	if err := m.number(g, d); err != nil {
		return err
	}
	if !d.rejected {
		if err := g.attach(d); err != nil {
			return err
		}
	}
	m.devices[disk.ID] = d
	if err := d.show(m.dir); err != nil {
		return errors.Join(err, g.unplug(m, d))
	}
	return nil
}

// number gives the device the numbers that Linux would assign. A controller and its subsystem take the lowest free
// number. While a process holds a block device without a disk, its subsystem stays. Another disk then takes the next
// number. The same disk returns as the next namespace of the subsystem, with a new controller number.
func (m *machine) number(g *Guests, d *device) error {
	bound, err := g.boundLoops()
	if err != nil {
		return err
	}
	m.vanished = slices.DeleteFunc(m.vanished, func(gone *device) bool {
		return !slices.ContainsFunc(bound, func(b boundLoop) bool { return b.file == gone.file })
	})

	taken := map[int]bool{}
	d.namespace = 1
	rejoined := false
	for _, other := range m.devices {
		if serial(other.disk) == serial(d.disk) && !other.rejected {
			d.rejected = true
			return nil
		}
		if !other.rejected {
			taken[other.controller], taken[other.subsystem] = true, true
		}
	}
	for _, gone := range m.vanished {
		taken[gone.subsystem] = true
		if serial(gone.disk) == serial(d.disk) && (!rejoined || gone.namespace >= d.namespace) {
			rejoined = true
			d.subsystem, d.namespace = gone.subsystem, gone.namespace+1
		}
	}
	for taken[d.controller] {
		d.controller++
	}
	if !rejoined {
		d.subsystem = d.controller
	}
	return nil
}

// unplug removes a disk from a running machine without warning.
func (g *Guests) unplug(m *machine, d *device) error {
	delete(m.devices, d.disk.ID)
	if d.rejected {
		return d.hide(m.dir)
	}
	m.vanished = append(m.vanished, d)
	return errors.Join(g.cut(m, d), g.detach(d), d.hide(m.dir))
}

// powerOff stops a machine. A stopped machine stays stopped.
func (g *Guests) powerOff(m *machine, orderly bool) error {
	if !m.running {
		return nil
	}
	var errs []error
	devices := slices.Collect(maps.Values(m.devices))
	switch {
	case orderly && m.system == nil:
		errs = append(errs, g.halt(m, devices))
	case orderly:
		if m.system.haltBy.IsZero() { // a second request could make the guest start its shutdown again
			errs = append(errs, m.system.halt(g.haltTime))
		}
		if !m.system.halted() {
			g.log.Warn("a guest does not halt and loses its power", "guest", m.dir)
		}
	}
	errs = append(errs, g.cut(m, devices...))
	if m.system != nil {
		errs = append(errs, m.system.kill(), m.system.close())
	}
	errs = append(errs, g.detach(devices...))
	for _, d := range devices {
		errs = append(errs, d.hide(m.dir))
	}
	clear(m.devices)
	m.vanished, m.running, m.system = nil, false, nil
	entries, err := os.ReadDir(filepath.Join(m.dir, "sys"))
	errs = append(errs, err)
	for _, entry := range entries {
		errs = append(errs, removeTree(filepath.Join(m.dir, "sys", entry.Name())))
	}
	return errors.Join(errs...)
}

// halt does what an operating system does before it powers off: it writes everything and unmounts. A busy filesystem is
// written too; the cut that follows shuts it down. A filesystem that cannot be written because it failed earlier does
// not stop the halt.
func (g *Guests) halt(m *machine, devices []*device) error {
	mounts, err := ownMounts()
	if err != nil {
		return err
	}
	isNode, err := nodeMounts(mounts, filepath.Join(m.dir, "dev"))
	if err != nil {
		return err
	}
	onDevice := func(mount mount) bool {
		return slices.ContainsFunc(devices, func(d *device) bool { return !d.rejected && d.number == mount.device() })
	}
	warn := func(err error) {
		if err != nil {
			g.log.Warn(
				"a guest halts, but not everything could be written or unmounted",
				slog.String("guest", m.dir),
				slog.Any("error", err),
			)
		}
	}
	for _, mount := range withChildren(mounts, func(mount mount) bool { return isNode(mount) || onDevice(mount) }) {
		if onDevice(mount) {
			warn(mount.sync())
		}
		warn(mount.unmount(0))
	}
	// Mounts in other namespaces, and processes with the block device open.
	all, err := allMounts()
	if err != nil {
		return err
	}
	for _, mount := range all {
		if onDevice(mount) && !mount.own() {
			warn(mount.sync())
		}
	}
	var errs []error
	for _, d := range devices {
		if !d.rejected {
			errs = append(errs, g.flush(d.loop))
		}
	}
	return errors.Join(errs...)
}

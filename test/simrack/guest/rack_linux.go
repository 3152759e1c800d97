// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package guest

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack"
)

// CreateDisk implements [simrack.Guests]. It fails if the disk already has a backing store.
func (g *Guests) CreateDisk(diskID string, sizeBytes int64) error {
	if err := checkName(diskID); err != nil {
		return err
	}
	return g.store(diskID).create(sizeBytes)
}

// DeleteDisk implements [simrack.Guests]. It succeeds if the backing store does not exist.
func (g *Guests) DeleteDisk(diskID string) error {
	return remove(g.store(diskID).path)
}

// RestoreDisk implements [simrack.Guests].
func (g *Guests) RestoreDisk(diskID string, sizeBytes int64, snapshotID string) error {
	if err := errors.Join(checkName(diskID), checkName(snapshotID)); err != nil {
		return err
	}
	path := g.store(diskID).path
	if _, err := os.Lstat(path); err == nil {
		return fmt.Errorf("disk %s already has a backing store", diskID)
	}
	return g.snapshot(snapshotID).copyTo(path, sizeBytes)
}

// snapshotTries is how many copies of a disk in use are attempted before the disk counts as busy.
const snapshotTries = 20

// CreateSnapshot implements [simrack.Guests]. A disk on a running guest is copied until no write happens during a copy.
// Only such a copy shows the disk at one moment.
func (g *Guests) CreateSnapshot(snapshotID, diskID string) error {
	if err := errors.Join(checkName(diskID), checkName(snapshotID)); err != nil {
		return err
	}
	m, d := g.holder(diskID)
	if d == nil {
		return g.store(diskID).copyTo(g.snapshot(snapshotID).path, 0)
	}
	defer m.mu.Unlock()
	for range snapshotTries {
		before, err := d.loop.writes()
		if err != nil {
			return err
		}
		if err := g.store(diskID).copyTo(g.snapshot(snapshotID).path, 0); err != nil {
			return err
		}
		after, err := d.loop.writes()
		if err != nil {
			return err
		}
		if before.inFlight == 0 && before == after {
			return nil
		}
		time.Sleep(time.Millisecond)
	}
	return errors.Join(simrack.ErrDiskBusy, g.DeleteSnapshot(snapshotID))
}

// holder finds the guest with the disk plugged in, and locks it. It returns nil if there is none.
func (g *Guests) holder(diskID string) (*machine, *device) {
	g.mu.Lock()
	machines := slices.Collect(maps.Values(g.machines))
	g.mu.Unlock()
	for _, m := range machines {
		m.mu.Lock()
		if d, ok := m.devices[diskID]; ok && !d.rejected {
			return m, d
		}
		m.mu.Unlock()
	}
	return nil, nil
}

// DeleteSnapshot implements [simrack.Guests]. It succeeds if the snapshot does not exist.
func (g *Guests) DeleteSnapshot(snapshotID string) error {
	return remove(g.snapshot(snapshotID).path)
}

func (g *Guests) snapshot(snapshotID string) store {
	return store{filepath.Join(g.stateDir, snapshotID+snapshotSuffix)}
}

// CreateInstance implements [simrack.Guests]. The instance's name is the name of the guest's folder.
func (g *Guests) CreateInstance(instanceID, name string) error {
	if err := checkName(name); err != nil {
		return err
	}
	if err := checkName(instanceID); err != nil {
		return err
	}
	m := &machine{id: instanceID, dir: filepath.Join(g.root, name), devices: map[string]*device{}}
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, other := range g.machines {
		if other.id == instanceID || other.dir == m.dir {
			return fmt.Errorf("guest %s of instance %s already exists", other.dir, other.id)
		}
	}
	if err := m.create(g.record(instanceID)); err != nil {
		return errors.Join(err, g.clearGuest(g.record(instanceID)))
	}
	g.machines[instanceID] = m
	return nil
}

// create creates the machine's folder. It writes the record first, so that after a crash every folder has a record.
func (m *machine) create(record string) (err error) {
	if err := os.WriteFile(record, []byte(m.dir), 0o600); err != nil {
		return err
	}
	if _, m.madeDir, err = makeDir(m.dir, 0o755); err != nil {
		return err
	}
	for _, sub := range []string{"dev", "sys"} {
		if _, _, err := makeDir(filepath.Join(m.dir, sub), 0o755); err != nil {
			return err
		}
	}
	env := fmt.Sprintf("OXIDE_INSTANCE_ID=%s\nOXIDE_RACK=default\n", m.id)
	return os.WriteFile(filepath.Join(m.dir, "metadata.env"), []byte(env), 0o644)
}

func (g *Guests) record(instanceID string) string {
	return filepath.Join(g.stateDir, instanceID+recordSuffix)
}

// DeleteInstance implements [simrack.Guests]. It removes the folder itself only if this simulator created it and it
// contains no other files. It succeeds if the instance has no guest.
func (g *Guests) DeleteInstance(instanceID string) error {
	m := g.find(instanceID)
	if m == nil {
		return nil
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.running {
		return fmt.Errorf("delete guest %s: it is running", m.dir)
	}
	if err := clearDir(m.dir); err != nil {
		return fmt.Errorf("delete guest %s: %w", m.dir, err)
	}
	if m.madeDir {
		if err := removeEmpty(m.dir); err != nil {
			return err
		}
	}
	if err := os.Remove(g.record(instanceID)); err != nil {
		return err
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.machines, instanceID)
	return nil
}

// PowerOn implements [simrack.Guests].
func (g *Guests) PowerOn(instanceID string, disks []simrack.GuestDisk, ended func(reset bool)) error {
	return g.withMachine(instanceID, "power on", func(m *machine) error {
		return g.powerOn(m, disks, ended)
	})
}

// Halt implements [simrack.Guests].
func (g *Guests) Halt(instanceID string) (asked bool, err error) {
	err = g.withMachine(instanceID, "halt", func(m *machine) error {
		if asked = m.system != nil; !asked {
			return nil
		}
		return m.system.halt(g.haltTime)
	})
	return asked, err
}

// PowerOff implements [simrack.Guests]. Processes that do not end in order within HaltTime are killed. In a guest
// without processes, a busy mount does not prevent the power-off: its filesystem is shut down. If the guest halts in
// order, all data is written first.
func (g *Guests) PowerOff(instanceID string, orderly bool) error {
	return g.withMachine(instanceID, "power off", func(m *machine) error { return g.powerOff(m, orderly) })
}

// Plug implements [simrack.Guests].
func (g *Guests) Plug(instanceID string, disk simrack.GuestDisk) error {
	return g.withMachine(instanceID, "plug a disk into", func(m *machine) error {
		if !m.running {
			return errors.New("it is not running")
		}
		return g.plug(m, disk)
	})
}

// Unplug implements [simrack.Guests].
func (g *Guests) Unplug(instanceID, diskID string) error {
	return g.withMachine(instanceID, "unplug a disk from", func(m *machine) error {
		d, ok := m.devices[diskID]
		if !ok {
			return fmt.Errorf("disk %s is not plugged in", diskID)
		}
		return g.unplug(m, d)
	})
}

// Dir implements [simrack.Guests]. It is empty for an unknown instance.
func (g *Guests) Dir(instanceID string) string {
	m := g.find(instanceID)
	if m == nil {
		return ""
	}
	return m.dir
}

// Device implements [simrack.Guests].
func (g *Guests) Device(instanceID, diskID string) string {
	m := g.find(instanceID)
	if m == nil {
		return ""
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	d, ok := m.devices[diskID]
	if !ok || d.rejected {
		return ""
	}
	return d.name()
}

// Leftovers implements [simrack.Guests]. Disks on running guests count like all others. The loop device of a boot disk
// counts only after the disk was cut off, because a process then still holds it.
func (g *Guests) Leftovers(bootDisks map[string]bool) (simrack.GuestLeftovers, error) {
	var left simrack.GuestLeftovers
	diskIDs, err := g.stores()
	if err != nil {
		return left, err
	}
	left.Files = len(slices.DeleteFunc(diskIDs, func(id string) bool { return bootDisks[id] }))
	bound, err := g.boundLoops()
	if err != nil {
		return left, err
	}
	numbers := map[uint64]bool{}
	for _, b := range bound {
		if bootDisks[b.diskID] && !b.severed {
			continue
		}
		number, err := b.loop.device()
		if err != nil {
			return left, err
		}
		left.Loops++
		numbers[number] = true
	}
	left.Mounts, err = g.countMounts(numbers)
	return left, err
}

// countMounts counts the mounts of these block devices, of guests' device nodes, and below guests' folders.
func (g *Guests) countMounts(numbers map[uint64]bool) (int, error) {
	mounts, err := ownMounts()
	if err != nil {
		return 0, err
	}
	counts := []func(mount) bool{func(m mount) bool { return numbers[m.device()] }}
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, machine := range g.machines {
		isNode, err := nodeMounts(mounts, filepath.Join(machine.dir, "dev"))
		if err != nil {
			return 0, err
		}
		counts = append(counts, isNode, func(m mount) bool { return below(m.Mountpoint, machine.dir) })
	}
	n := 0
	for _, m := range mounts {
		if slices.ContainsFunc(counts, func(count func(mount) bool) bool { return count(m) }) {
			n++
		}
	}
	return n, nil
}

// find returns nil for an instance without a guest.
func (g *Guests) find(instanceID string) *machine {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.machines[instanceID]
}

// withMachine calls do with a locked machine. An error names what was done and the instance.
func (g *Guests) withMachine(instanceID, what string, do func(*machine) error) error {
	m := g.find(instanceID)
	if m == nil {
		return fmt.Errorf("%s instance %s: it has no guest", what, instanceID)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := do(m); err != nil {
		return fmt.Errorf("%s guest %s: %w", what, m.dir, err)
	}
	return nil
}

// checkName rejects a name that would denote a file outside of its folder.
func checkName(name string) error {
	if name != filepath.Base(name) || !filepath.IsLocal(name) || name == "." {
		return fmt.Errorf("%q cannot name a file", name)
	}
	return nil
}

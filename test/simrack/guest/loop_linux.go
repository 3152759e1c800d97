// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package guest

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// loop is the number of a loop device: 3 is /dev/loop3.
type loop int

// severedLimit is the size limit, in bytes, of a loop device that has been cut off. It is less than a sector, so the
// device has no capacity. No other loop device has this limit.
const severedLimit = 1

// boundLoop is a loop device with a store of this simulator as backing file.
type boundLoop struct {
	loop    loop
	diskID  string
	file    fileID
	severed bool
}

func (l loop) String() string { return "loop" + strconv.Itoa(int(l)) }

// sysfs is the path of an entry of the loop device in the host's sysfs.
func (l loop) sysfs(entry string) string { return "/sys/block/" + l.String() + "/" + entry }

// device returns the loop device's number as a block device.
func (l loop) device() (uint64, error) {
	text, err := os.ReadFile(l.sysfs("dev"))
	if err != nil {
		return 0, err
	}
	var major, minor uint32
	if _, err := fmt.Sscanf(string(text), "%d:%d", &major, &minor); err != nil {
		return 0, fmt.Errorf("read %s: %w", l.sysfs("dev"), err)
	}
	return unix.Mkdev(major, minor), nil
}

// openLoop opens a loop device through a temporary node: in a container, for example, /dev may lack the node.
func (g *Guests) openLoop(l loop, flags int) (*os.File, error) {
	device, err := l.device()
	if err != nil {
		return nil, err
	}
	node := filepath.Join(g.root, fmt.Sprintf(".%s.%d.%d", l, os.Getpid(), g.nodes.Add(1)))
	if err := unix.Mknod(node, unix.S_IFBLK|0o600, int(device)); err != nil {
		return nil, &fs.PathError{Op: "mknod", Path: node, Err: err}
	}
	f, err := os.OpenFile(node, flags, 0)
	return f, errors.Join(err, os.Remove(node))
}

// bind binds a file to a free loop device. All programs of the machine share the loop devices. So the device that the
// kernel reports as free may be taken, or about to be removed, when bind uses it; bind then tries again.
func (g *Guests) bind(s store, blockSize int, readOnly bool) (loop, error) {
	flags, config := os.O_RDWR, unix.LoopConfig{Size: uint32(blockSize)}
	if readOnly {
		flags, config.Info.Flags = os.O_RDONLY, unix.LO_FLAGS_READ_ONLY
	}
	file, err := os.OpenFile(s.path, flags, 0)
	if err != nil {
		return 0, err
	}
	defer file.Close() // The loop device has its own reference.
	config.Fd = uint32(file.Fd())
	// mkfs.btrfs takes loop devices with the same file name for the same device. The end of a long path is more
	// distinctive than its beginning.
	name := s.path
	copy(config.Info.File_name[:len(config.Info.File_name)-1], name[max(0, len(name)-len(config.Info.File_name)+1):])

	for deadline := time.Now().Add(5 * time.Second); ; {
		l, err := g.bindFree(&config)
		if err == nil {
			return l, nil
		}
		if !errors.Is(err, unix.EBUSY) && !errors.Is(err, unix.ENXIO) && !errors.Is(err, fs.ErrNotExist) ||
			time.Now().After(deadline) {
			return 0, fmt.Errorf("bind %s to a loop device: %w", s.path, err)
		}
	}
}

// bindFree binds the loop device that the kernel reports as free. Two processes may be told the same device. The loser
// would hold the device for a moment, and an exclusive open by mkfs in that moment would fail. So processes that use
// this function take turns with a lock.
func (g *Guests) bindFree(config *unix.LoopConfig) (loop, error) {
	if err := unix.Flock(int(g.control.Fd()), unix.LOCK_EX); err != nil {
		return 0, fmt.Errorf("lock the loop devices: %w", err)
	}
	defer func() { _ = unix.Flock(int(g.control.Fd()), unix.LOCK_UN) }() // closing the descriptor would also unlock it
	number, err := unix.IoctlRetInt(int(g.control.Fd()), unix.LOOP_CTL_GET_FREE)
	if err != nil {
		return 0, fmt.Errorf("find a free loop device: %w", err)
	}
	l := loop(number)
	device, err := g.openLoop(l, os.O_RDWR)
	if err != nil {
		return 0, err
	}
	defer device.Close() // nothing was written through it
	if err := unix.IoctlLoopConfigure(int(device.Fd()), config); err != nil {
		return 0, fmt.Errorf("configure %s: %w", l, err)
	}
	// The kernel keeps the read-only setting of an earlier user of the device (BLKROSET), separately from the read-only
	// flag of the loop.
	if err := unix.IoctlSetPointerInt(int(device.Fd()), unix.BLKROSET, 0); err != nil {
		err = fmt.Errorf("make %s writable: %w", l, err)
		return 0, errors.Join(err, unix.IoctlSetInt(int(device.Fd()), unix.LOOP_CLR_FD, 0))
	}
	return l, nil
}

// removeCapacity cuts a loop device off from its store; package guest's comment describes the steps. A holder of the
// device keeps it, but the device has no capacity.
func (g *Guests) removeCapacity(b boundLoop) error {
	return g.withBound(b, func(device *os.File, info *unix.LoopInfo64) (err error) {
		s := g.store(b.diskID)
		if current, _, err := s.stat(); err == nil && current == b.file {
			if err := s.setImmutable(true); err != nil {
				return err
			}
			defer func() { err = errors.Join(err, s.setImmutable(false)) }()
		}
		info.Sizelimit = severedLimit
		// The second call only waits, as the first did, for requests in flight: those that passed the capacity check before
		// the first call lowered the capacity.
		for range 2 {
			if err := unix.IoctlLoopSetStatus64(int(device.Fd()), info); err != nil {
				return fmt.Errorf("take the capacity from %s: %w", b.loop, err)
			}
		}
		return nil
	})
}

// unbind detaches a loop device from its store. The kernel releases the store when the last holder closes the device.
func (g *Guests) unbind(b boundLoop) error {
	return g.withBound(b, func(device *os.File, _ *unix.LoopInfo64) error {
		if _, err := unix.IoctlRetInt(int(device.Fd()), unix.LOOP_CLR_FD); err != nil && !errors.Is(err, unix.ENXIO) {
			return fmt.Errorf("detach %s: %w", b.loop, err)
		}
		return nil
	})
}

// withBound calls do with an open loop device. If the device no longer has the store as backing file, perhaps because
// it has another user, withBound does nothing.
func (g *Guests) withBound(b boundLoop, do func(*os.File, *unix.LoopInfo64) error) (err error) {
	g.loops.Lock()
	defer g.loops.Unlock()
	device, err := g.openLoop(b.loop, os.O_RDONLY)
	if errors.Is(err, unix.ENXIO) || errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	// The last close of a loop device that is being detached completes the detachment.
	defer func() { err = errors.Join(err, device.Close()) }()

	info, err := unix.IoctlLoopGetStatus64(int(device.Fd()))
	if errors.Is(err, unix.ENXIO) || err == nil && b.file != (fileID{info.Device, info.Inode}) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read the state of %s: %w", b.loop, err)
	}
	return do(device, info)
}

// writeCount shows whether a loop device was written to between two reads of it.
type writeCount struct{ writes, discards, inFlight uint64 }

// writes reads the counters of the block layer: completed requests, and requests in flight, which include reads.
func (l loop) writes() (count writeCount, err error) {
	text, err := os.ReadFile(l.sysfs("stat"))
	if err != nil {
		return count, err
	}
	fields := strings.Fields(string(text))
	for place, into := range map[int]*uint64{4: &count.writes, 8: &count.inFlight, 11: &count.discards} {
		if place >= len(fields) {
			return count, fmt.Errorf("read %s: %d fields", l.sysfs("stat"), len(fields))
		}
		if *into, err = strconv.ParseUint(fields[place], 10, 64); err != nil {
			return count, fmt.Errorf("read %s: %w", l.sysfs("stat"), err)
		}
	}
	return count, nil
}

// flush writes the cached data of a loop device to its store.
func (g *Guests) flush(l loop) error {
	device, err := g.openLoop(l, os.O_RDONLY)
	if err != nil {
		return err
	}
	return errors.Join(device.Sync(), device.Close())
}

// boundLoops finds the loop devices with a backing file that is a store of this state directory, including deleted
// stores. It opens only loop devices whose backing file has a fitting name, and then compares inodes. It leaves other
// loop devices of the machine alone.
func (g *Guests) boundLoops() ([]boundLoop, error) {
	g.loops.Lock()
	defer g.loops.Unlock()
	paths, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		return nil, err
	}
	var found []boundLoop
	for _, path := range paths {
		text, err := os.ReadFile(path)
		if err != nil {
			continue // Detached meanwhile: the entry is gone, or reading it fails.
		}
		name := strings.TrimSuffix(strings.TrimSuffix(string(text), "\n"), " (deleted)")
		diskID, isStore := strings.CutSuffix(filepath.Base(name), storeSuffix)
		current, _, statErr := g.store(diskID).stat()
		here := filepath.Dir(name) == g.stateDir
		if !isStore || !here && statErr != nil {
			continue
		}
		number, err := strconv.Atoi(strings.TrimPrefix(strings.Split(path, "/")[3], "loop"))
		if err != nil {
			return nil, fmt.Errorf("read the number in %s: %w", path, err)
		}
		b := boundLoop{loop: loop(number), diskID: diskID}
		ok, err := g.inspect(&b)
		if err != nil {
			return nil, err
		}
		// In a container the folder may have another path. Then only the inode identifies the file.
		if ok && (here || b.file == current) {
			found = append(found, b)
		}
	}
	return found, nil
}

// inspect reads the backing file of the loop device. It reports false if there is none.
func (g *Guests) inspect(b *boundLoop) (bool, error) {
	device, err := g.openLoop(b.loop, os.O_RDONLY)
	if errors.Is(err, unix.ENXIO) || errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer device.Close() // nothing was written through it
	info, err := unix.IoctlLoopGetStatus64(int(device.Fd()))
	if errors.Is(err, unix.ENXIO) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("read the state of %s: %w", b.loop, err)
	}
	b.file = fileID{info.Device, info.Inode}
	b.severed = info.Sizelimit == severedLimit
	return true, nil
}

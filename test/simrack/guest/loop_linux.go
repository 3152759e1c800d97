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

// loop is a loop device by its number: 3 is /dev/loop3.
type loop int

// severedLimit is the size limit, in bytes, of a loop device that has been cut off. It is less than a sector, so the
// device's capacity is zero; no other loop device has such a limit.
const severedLimit = 1

// boundLoop is a loop device with one of our stores behind it.
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

// openLoop opens a loop device through a node of our own: /dev may lack its node, in a container for example.
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

// bind puts a file behind a free loop device. Loop devices are shared with everybody on the machine, so the one that the
// kernel calls free may be taken, or be going away, by the time it is bound.
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
	// mkfs.btrfs takes loop devices with the same name for one. Of a long path the end tells more.
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

// bindFree tries the loop device that the kernel calls free at this moment. Another process that was told the same one would
// claim it for a moment while it fails to have it, and a mkfs that wants it exclusively in that moment would fail: so all
// that take loop devices this way lock out each other.
func (g *Guests) bindFree(config *unix.LoopConfig) (loop, error) {
	if err := unix.Flock(int(g.control.Fd()), unix.LOCK_EX); err != nil {
		return 0, fmt.Errorf("lock the loop devices: %w", err)
	}
	defer func() { _ = unix.Flock(int(g.control.Fd()), unix.LOCK_UN) }() // closing the descriptor would unlock it, too
	number, err := unix.IoctlRetInt(int(g.control.Fd()), unix.LOOP_CTL_GET_FREE)
	if err != nil {
		return 0, fmt.Errorf("find a free loop device: %w", err)
	}
	l := loop(number)
	device, err := g.openLoop(l, os.O_RDWR)
	if err != nil {
		return 0, err
	}
	defer device.Close() // Nothing was written through it.
	if err := unix.IoctlLoopConfigure(int(device.Fd()), config); err != nil {
		return 0, fmt.Errorf("configure %s: %w", l, err)
	}
	// What a former user of the device has set with BLKROSET is kept by the kernel, beside the loop's own read-only flag.
	if err := unix.IoctlSetPointerInt(int(device.Fd()), unix.BLKROSET, 0); err != nil {
		err = fmt.Errorf("make %s writable: %w", l, err)
		return 0, errors.Join(err, unix.IoctlSetInt(int(device.Fd()), unix.LOOP_CLR_FD, 0))
	}
	return l, nil
}

// starve cuts a loop device off its store; package guest's comment says how. Whoever holds the device keeps it, with no
// capacity and no way to the store.
func (g *Guests) starve(b boundLoop) error {
	return g.withBound(b, func(device *os.File, info *unix.LoopInfo64) (err error) {
		s := g.store(b.diskID)
		if current, _, err := s.stat(); err == nil && current == b.file {
			if err := s.setImmutable(true); err != nil {
				return err
			}
			defer func() { err = errors.Join(err, s.setImmutable(false)) }()
		}
		info.Sizelimit = severedLimit
		// The second call changes nothing but waits, as the first did, for the requests that the device had let in: those
		// that passed the check against its capacity before the first call lowered it.
		for range 2 {
			if err := unix.IoctlLoopSetStatus64(int(device.Fd()), info); err != nil {
				return fmt.Errorf("take the capacity from %s: %w", b.loop, err)
			}
		}
		return nil
	})
}

// unbind detaches a loop device from its store, which it lets go of when its last holder does.
func (g *Guests) unbind(b boundLoop) error {
	return g.withBound(b, func(device *os.File, _ *unix.LoopInfo64) error {
		if _, err := unix.IoctlRetInt(int(device.Fd()), unix.LOOP_CLR_FD); err != nil && !errors.Is(err, unix.ENXIO) {
			return fmt.Errorf("detach %s: %w", b.loop, err)
		}
		return nil
	})
}

// withBound does something to a loop device. The loop device may have let go of the store by itself and have another user by
// now: then there is nothing to do.
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
	// The last close of a loop device that is being detached is what detaches it.
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

// writeCount tells whether anything was written to a loop device between two looks.
type writeCount struct{ writes, discards, inFlight uint64 }

// writes reads the counters of the block layer: requests that have ended, and those under way, reads among them.
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

// flush writes what is cached of a loop device to its store.
func (g *Guests) flush(l loop) error {
	device, err := g.openLoop(l, os.O_RDONLY)
	if err != nil {
		return err
	}
	return errors.Join(device.Sync(), device.Close())
}

// boundLoops finds the loop devices whose backing file is a store of this state directory, deleted ones included. Names
// only say which loop devices are worth opening (others on the machine are left alone); what is behind them is told
// apart by inode.
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
			continue // Detached since, which takes the entry away or makes reading it fail.
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
		// A container may know our folder by another name; then it is the file that tells.
		if ok && (here || b.file == current) {
			found = append(found, b)
		}
	}
	return found, nil
}

// inspect asks the loop device what is behind it. It reports false when nothing is.
func (g *Guests) inspect(b *boundLoop) (bool, error) {
	device, err := g.openLoop(b.loop, os.O_RDONLY)
	if errors.Is(err, unix.ENXIO) || errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer device.Close() // Nothing was written through it.
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

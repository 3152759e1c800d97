// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package guest

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack"
)

// recordSuffix ends the name of a file in the state directory that records a guest's folder; the name begins with the
// instance's ID. rootRecord records the guest root if the simulator created it. [New] reads both after a crash.
const (
	recordSuffix = ".guest"
	rootRecord   = "root"
)

// Options configure [Guests].
type Options struct {
	// Root is the folder of the guests' folders. It is created if missing.
	Root string
	// StateDir is the folder of the disks' backing stores, which remain when the simulator ends. It is created if missing.
	// Two simulators must not share it.
	StateDir string
	// Boot is an executable file that runs as the first process of each guest while the guest is powered on. Empty means
	// that guests have no processes; a test then acts as the machine from outside.
	Boot string
	// HaltTime is how long [Guests.PowerOff] waits for the processes of a guest to end in order; 0 means 5 s.
	HaltTime time.Duration
	// Log receives failures that no method can return; nil is [slog.Default].
	Log *slog.Logger
}

// Guests implements [simrack.Guests] with loop devices. All methods are safe for concurrent use, except for two calls
// on the same instance or the same disk.
type Guests struct {
	root, stateDir string
	madeRoot       bool
	boot           string // empty: guests have no processes
	haltTime       time.Duration
	log            *slog.Logger
	control        *os.File // /dev/loop-control
	stateLock      *os.File // the state directory, locked with flock

	nodes atomic.Int64 // makes the names of temporary nodes unique
	// loops is held while a loop device is open to inspect or detach it. Without this lock, one inspection could keep the
	// loop device of another operation from being released.
	loops sync.Mutex

	mu       sync.Mutex
	machines map[string]*machine // by instance ID
}

var _ simrack.Guests = (*Guests)(nil)

// New prepares root and state directory. It also removes what a killed simulator with the same state directory left:
// its guests are powered off and their folders removed. The disks stay.
//
// New needs root, Linux 5.18, loop devices, and a Root on which device nodes can be opened. It fails if another
// simulator uses the state directory.
func New(options Options) (_ *Guests, err error) {
	if os.Geteuid() != 0 {
		return nil, errors.New("guests need root, for loop devices and device nodes: run as root, or without guests")
	}
	g := &Guests{haltTime: cmp.Or(options.HaltTime, 5*time.Second), log: options.Log, machines: map[string]*machine{}}
	if g.log == nil {
		g.log = slog.Default()
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, g.release())
		}
	}()
	if err := checkKernel(); err != nil {
		return nil, err
	}
	if options.Boot != "" {
		if g.boot, err = checkBoot(options.Boot); err != nil {
			return nil, fmt.Errorf("boot guests: %w", err)
		}
	}
	if g.stateDir, _, err = makeDir(options.StateDir, 0o700); err != nil {
		return nil, fmt.Errorf("make the state directory: %w", err)
	}
	if err := g.claimStateDir(); err != nil {
		return nil, err
	}
	if err := g.makeRoot(options.Root); err != nil {
		return nil, fmt.Errorf("make the guest root: %w", err)
	}
	if g.control, err = os.OpenFile("/dev/loop-control", os.O_RDWR, 0); err != nil {
		return nil, fmt.Errorf("guests need loop devices (modprobe loop; in a container, /dev of the host): %w", err)
	}
	if err := g.checkNodes(); err != nil {
		return nil, err
	}
	if err := g.clearStale(); err != nil {
		return nil, fmt.Errorf("clear what an earlier simulator left in %s: %w", g.stateDir, err)
	}
	return g, nil
}

// makeDir creates a folder if it is missing. It returns the path without symbolic links, as the kernel reports it.
func makeDir(path string, mode fs.FileMode) (clean string, made bool, err error) {
	if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
		made = true
	}
	if err := os.MkdirAll(path, mode); err != nil {
		return "", false, err
	}
	absolute, err := filepath.Abs(path)
	if err != nil {
		return "", false, err
	}
	clean, err = filepath.EvalSymlinks(absolute)
	return clean, made, err
}

// makeRoot creates the guest root, and records whether it did.
func (g *Guests) makeRoot(path string) (err error) {
	if g.root, g.madeRoot, err = makeDir(path, 0o755); err != nil {
		return err
	}
	record := filepath.Join(g.stateDir, rootRecord)
	if g.madeRoot {
		return os.WriteFile(record, []byte(g.root), 0o600)
	}
	made, err := os.ReadFile(record)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	g.madeRoot = string(made) == g.root
	return err
}

func (g *Guests) claimStateDir() (err error) {
	if g.stateLock, err = os.Open(g.stateDir); err != nil {
		return err
	}
	err = unix.Flock(int(g.stateLock.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return fmt.Errorf("another simulator uses the state directory %s: end it or choose another directory", g.stateDir)
	}
	return err
}

// checkKernel rejects Linux before 5.18, which cannot reduce the capacity of a mounted loop device.
func checkKernel() error {
	var name unix.Utsname
	if err := unix.Uname(&name); err != nil {
		return fmt.Errorf("ask for the version of Linux: %w", err)
	}
	release := unix.ByteSliceToString(name.Release[:])
	var major, minor int
	if _, err := fmt.Sscanf(release, "%d.%d", &major, &minor); err != nil {
		return fmt.Errorf("read the version of Linux from %q: %w", release, err)
	}
	if major < 5 || major == 5 && minor < 18 {
		return fmt.Errorf("guests need Linux 5.18 or newer, and this is %s: run on a newer one, or without guests", release)
	}
	return nil
}

// checkNodes finds out whether device nodes in the guest root can be opened.
func (g *Guests) checkNodes() error {
	var stat unix.Statfs_t
	if err := unix.Statfs(g.root, &stat); err != nil {
		return &fs.PathError{Op: "statfs", Path: g.root, Err: err}
	}
	if stat.Flags&unix.ST_NODEV != 0 {
		return fmt.Errorf("guest root %s is on a mount with the option nodev, where device nodes cannot be opened: "+
			"choose a folder on another mount", g.root)
	}
	number, err := unix.IoctlRetInt(int(g.control.Fd()), unix.LOOP_CTL_GET_FREE)
	if err != nil {
		return fmt.Errorf("find a free loop device: %w", err)
	}
	device, err := g.openLoop(loop(number), os.O_RDONLY)
	if errors.Is(err, unix.ENXIO) || errors.Is(err, fs.ErrNotExist) {
		return nil // Another process took or removed the device meanwhile. Opening the node has worked.
	}
	if err != nil {
		return fmt.Errorf(
			"guest root %s cannot hold loop device nodes (a container must be privileged): %w",
			g.root,
			err,
		)
	}
	return device.Close()
}

// clearStale removes the guests of a killed simulator.
func (g *Guests) clearStale() error {
	bound, err := g.boundLoops()
	if err != nil {
		return err
	}
	mounts, err := allMounts()
	if err != nil {
		return err
	}
	for _, b := range bound {
		if err := g.shutDown(mounts, b.loop); err != nil {
			return err
		}
		if err := errors.Join(g.removeCapacity(b), g.unbind(b)); err != nil {
			return err
		}
	}
	entries, err := os.ReadDir(g.stateDir)
	if err != nil {
		return err
	}
	for _, entry := range entries {
		path := filepath.Join(g.stateDir, entry.Name())
		switch filepath.Ext(entry.Name()) {
		case freshSuffix:
			err = os.Remove(path)
		case storeSuffix:
			err = store{path}.setImmutable(false)
		case recordSuffix:
			err = g.clearGuest(path)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// clearGuest removes the folder that a record names, and the record.
func (g *Guests) clearGuest(record string) error {
	dir, err := os.ReadFile(record)
	if err != nil {
		return err
	}
	if !filepath.IsAbs(string(dir)) {
		return os.Remove(record) // The crash came during the write of the record, before the folder was created.
	}
	if err := clearDir(string(dir)); err != nil {
		return err
	}
	if err := removeEmpty(string(dir)); err != nil {
		return err
	}
	return os.Remove(record)
}

// clearDir removes what the simulator created in a guest's folder.
func clearDir(dir string) error {
	nodes, err := filepath.Glob(filepath.Join(dir, "dev", "nvme*"))
	if err != nil {
		return err
	}
	for _, node := range nodes {
		if err := remove(node); err != nil {
			return err
		}
	}
	for _, tree := range []string{"sys", ".appearing"} {
		if err := removeTree(filepath.Join(dir, tree)); err != nil {
			return err
		}
	}
	return errors.Join(removeEmpty(filepath.Join(dir, "dev")), remove(filepath.Join(dir, "metadata.env")),
		remove(filepath.Join(dir, consoleName)), remove(filepath.Join(dir, bootIDName)))
}

// Close halts all running guests in order and removes their folders. It fails if a loop device is still held
// afterwards, and names the holder: a busy mount, or a mount that was left after a power cut.
func (g *Guests) Close() error {
	g.mu.Lock()
	machines := make([]*machine, 0, len(g.machines))
	for _, m := range g.machines {
		machines = append(machines, m)
	}
	g.mu.Unlock()

	var errs []error
	for _, m := range machines { // all at the same time: halting takes long
		_, err := g.Halt(m.id)
		errs = append(errs, err)
	}
	for _, m := range machines {
		errs = append(errs, g.PowerOff(m.id, true), g.DeleteInstance(m.id))
	}
	errs = append(errs, g.stillHeld(), g.release())
	return errors.Join(errs...)
}

// release undoes New.
func (g *Guests) release() error {
	var errs []error
	if g.madeRoot {
		errs = append(errs, removeEmpty(g.root))
		if _, err := os.Stat(g.root); errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, remove(filepath.Join(g.stateDir, rootRecord)))
		}
	}
	for _, f := range []*os.File{g.control, g.stateLock} {
		if f != nil {
			errs = append(errs, f.Close())
		}
	}
	return errors.Join(errs...)
}

// stillHeld names the holders of loop devices that should be gone. It waits a little, because programs such as udev
// open every new block device for a moment.
func (g *Guests) stillHeld() error {
	for deadline := time.Now().Add(2 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		bound, err := g.boundLoops()
		if err != nil || len(bound) == 0 {
			return err
		}
		if time.Now().Before(deadline) {
			continue
		}
		mounts, err := allMounts()
		if err != nil {
			return err
		}
		var errs []error
		for _, b := range bound {
			errs = append(errs, g.heldError(mounts, b))
		}
		return errors.Join(errs...)
	}
}

func (g *Guests) heldError(mounts []mount, b boundLoop) error {
	number, err := b.loop.device()
	if err != nil {
		return err
	}
	var places []string
	for _, m := range mounts {
		if m.device() == number {
			places = append(places, m.path())
		}
	}
	who := "a process that cannot be seen from here has it open or mounted: end the process"
	if len(places) > 0 {
		who = "it is mounted at " + strings.Join(places, ", ") + ": unmount it"
	}
	return fmt.Errorf("%s is still held although disk %s has no guest: %s", b.loop, b.diskID, who)
}

// cut takes disks away from a machine; package guest's comment describes the steps. A disk that is still held is not an
// error, because it is cut off like the others.
func (g *Guests) cut(m *machine, devices ...*device) error {
	mounts, err := allMounts()
	if err != nil {
		return err
	}
	release := func() error { return nil }
	if m.system != nil {
		var inside []mount
		if inside, release, err = m.system.namespaceMounts(); err != nil {
			return err
		}
		mounts = append(mounts, inside...)
	}
	var errs []error
	for _, d := range devices {
		if !d.rejected {
			errs = append(errs, g.shutDown(mounts, d.loop))
		}
	}
	for _, d := range devices {
		if !d.rejected {
			errs = append(errs, g.removeCapacity(d.bound()))
		}
	}
	return errors.Join(append(errs, release())...)
}

// detach detaches the loop devices of disks that were cut off.
func (g *Guests) detach(devices ...*device) error {
	var errs []error
	for _, d := range devices {
		if !d.rejected {
			errs = append(errs, g.unbind(d.bound()))
		}
	}
	return errors.Join(errs...)
}

// shutDown shuts down the filesystem on the loop device, if any. Two kinds of filesystem cannot be shut down: one whose
// mounts are all covered by other mounts, and one without that operation. They fail when their device is cut off.
func (g *Guests) shutDown(mounts []mount, l loop) error {
	number, err := l.device()
	if err != nil {
		return err
	}
	for _, m := range mounts {
		if m.device() != number {
			continue
		}
		if err = m.shutDown(); err == nil {
			return nil // the other mounts show the same filesystem
		}
		g.log.Debug("filesystem not shut down before its disk", slog.Any("error", err))
	}
	return nil
}

// attach binds the store of the device's disk to a loop device.
func (g *Guests) attach(d *device) error {
	s := g.store(d.disk.ID)
	file, sizeBytes, err := s.stat()
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("disk %s has no backing store in %s: it was made while guests were off, so begin with an empty "+
			"state directory", d.disk.ID, g.stateDir)
	}
	if err != nil {
		return err
	}
	if sizeBytes != d.disk.SizeBytes {
		return fmt.Errorf("disk %s has %d bytes but its backing store has %d", d.disk.ID, d.disk.SizeBytes, sizeBytes)
	}
	bound, err := g.boundLoops()
	if err != nil {
		return err
	}
	if i := slices.IndexFunc(bound, func(b boundLoop) bool { return b.file == file }); i >= 0 {
		if !bound[i].severed {
			return fmt.Errorf("the backing store of disk %s is already bound to %s", d.disk.ID, bound[i].loop)
		}
		if err := s.renew(); err != nil {
			return err
		}
		if file, _, err = s.stat(); err != nil {
			return err
		}
	}
	if d.disk.Boot && !d.disk.ReadOnly {
		if err := s.makeBootable(sizeBytes); err != nil {
			return err
		}
	}
	d.file = file
	if d.loop, err = g.bind(s, d.disk.BlockSize, d.disk.ReadOnly); err != nil {
		return err
	}
	d.number, err = d.loop.device()
	return err
}

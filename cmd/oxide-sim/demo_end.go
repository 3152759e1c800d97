// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// endTimeout bounds the requests at the end. Package simtest bounds how long a process may take to end.
const endTimeout = 10 * time.Second

// end removes everything that the demo has created. After a complete story nothing should be mounted or left over: then
// any mount or loop device in the demo's folder is an error. After an incomplete story end unmounts and detaches what
// is left.
//
// The plugins end first, so that they mount nothing while end unmounts. The rack ends last, so that no disk disappears
// below a filesystem.
func (d *demo) end(told bool) error {
	// A new context: a signal may have cancelled the story's context.
	ctx, cancel := context.WithTimeout(context.Background(), endTimeout)
	defer cancel()
	var errs []error
	if told {
		errs = append(errs, d.checkRack(ctx))
	}
	plugins := d.processes.running()
	for _, plugin := range plugins {
		errs = append(errs, plugin.Stop())
	}
	processes := len(plugins)
	undone, err := d.unmountAll()
	errs = append(errs, err)
	if told && len(undone) > 0 {
		errs = append(errs, fmt.Errorf("these were still mounted: %s", strings.Join(undone, ", ")))
	}
	if d.processes.sim != nil {
		processes++
		errs = append(errs, d.processes.sim.Stop())
	}
	loops, err := d.detachAll()
	errs = append(errs, err)
	if told && len(loops) > 0 {
		errs = append(errs, fmt.Errorf("these loop devices were still there: %s", strings.Join(loops, ", ")))
	}
	if told {
		errs = append(errs, d.checkFolder())
	}
	errs = append(errs, d.removeFolder(), d.checkTraces())
	d.out.blank()
	if err := errors.Join(errs...); err != nil {
		d.out.line("Not everything could be taken away in order.")
		return fmt.Errorf("demo: left behind: %w", err)
	}
	if !told {
		d.out.line("The story ends here. What was started and mounted for it has been taken away.")
		return nil
	}
	d.reportNothingLeft(processes)
	return d.out.err
}

func (d *demo) reportNothingLeft(processes int) {
	d.out.paragraph("Nothing is left behind. Seen from outside, compared with before:")
	d.out.entry("rack", "the disks %s, as before", strings.Join(d.disksBefore, " and "))
	d.out.entry("mounts", "none of the demo in /proc/self/mountinfo")
	d.out.entry("loop devices", "none of the demo in /sys/block/loop*/loop/backing_file")
	d.out.entry("processes", "all %d have ended with exit code 0", processes)
	folder := "is empty again"
	if d.madeDir {
		folder = "is gone"
	}
	d.out.entry("files", "the demo's folder %s", folder)
	d.out.line("Done in %.1f s.", time.Since(d.begun).Seconds())
}

// checkRack compares the rack's disks with those at its start, and asks it for leftovers.
func (d *demo) checkRack(ctx context.Context) error {
	disks, err := d.rackDisks(ctx)
	if err != nil {
		return err
	}
	if !slices.Equal(disks, d.disksBefore) {
		return fmt.Errorf(
			"the rack has the disks %s; at the start it had %s",
			strings.Join(disks, ", "),
			strings.Join(d.disksBefore, ", "),
		)
	}
	left, err := d.processes.sim.Leftovers(ctx)
	if err != nil {
		return err
	}
	if left.Disks+left.Snapshots+left.Loops+left.Mounts+left.Files > 0 {
		return fmt.Errorf("the rack reports leftovers: %+v", left)
	}
	return nil
}

// unmountAll unmounts everything in the demo's folder and returns what it has unmounted. A busy mount is detached: it
// disappears at once, and ends with its last user.
func (d *demo) unmountAll() (undone []string, err error) {
	mounts, err := mountsBelow(d.dir)
	if err != nil {
		return nil, err
	}
	// The latest mount goes first.
	for _, m := range slices.Backward(mounts) {
		undone = append(undone, m.Mountpoint)
		err := unix.Unmount(m.Mountpoint, 0)
		if errors.Is(err, unix.EBUSY) {
			err = unix.Unmount(m.Mountpoint, unix.MNT_DETACH)
		}
		if err != nil {
			return undone, fmt.Errorf("unmount %s: %w: unmount it by hand", m.Mountpoint, err)
		}
	}
	return undone, nil
}

// detachAll detaches the loop devices that a killed rack has left, and returns their names.
func (d *demo) detachAll() (detached []string, err error) {
	files, err := loopFiles()
	if err != nil {
		return nil, err
	}
	for name, file := range files {
		if !below(file, d.dir) {
			continue
		}
		detached = append(detached, name)
		device, err := os.Open("/dev/" + name)
		if err != nil {
			return detached, err
		}
		_, err = unix.IoctlRetInt(int(device.Fd()), unix.LOOP_CLR_FD)
		if err := errors.Join(err, device.Close()); err != nil {
			return detached, fmt.Errorf("detach %s: %w: detach it with losetup -d", name, err)
		}
	}
	return detached, nil
}

// checkFolder finds files that the rack or a plugin should have removed. It expects the records and boot disks of the
// rack, and the files and folders that the demo itself has created.
func (d *demo) checkFolder() error {
	var left []string
	err := filepath.WalkDir(d.dir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		inRack := below(path, filepath.Join(d.dir, rackFolder))
		ofVolume := slices.ContainsFunc(d.volumes, func(id string) bool { return strings.Contains(entry.Name(), id) })
		token := path == filepath.Join(d.dir, controllerFolder, "token")
		locks := entry.Name() == "locks" // a node's lock files, which are empty
		shell := slices.ContainsFunc(d.processes.nodes, func(m *machine) bool { return path == m.shell.env })
		unexpected := !entry.IsDir() && !inRack && !token && !locks && !shell
		if ofVolume || unexpected || entry.IsDir() && (entry.Name() == targetFolder || entry.Name() == guestsFolder) {
			left = append(left, path)
		}
		return nil
	})
	if err != nil {
		return err
	}
	if len(left) > 0 {
		return fmt.Errorf("the rack or a plugin left %s", strings.Join(left, ", "))
	}
	return nil
}

// removeFolder removes the contents of the demo's folder, and the folder if the demo created it. If anything is mounted
// in it, it removes nothing: the files could be a user's data.
func (d *demo) removeFolder() error {
	mounts, err := mountsBelow(d.dir)
	if err != nil {
		return err
	}
	if len(mounts) > 0 {
		return fmt.Errorf("%s is kept because %s is mounted in it", d.dir, mounts[0].Mountpoint)
	}
	if d.madeDir {
		return os.RemoveAll(d.dir)
	}
	entries, err := os.ReadDir(d.dir)
	if err != nil {
		return err
	}
	var errs []error
	for _, entry := range entries {
		errs = append(errs, os.RemoveAll(filepath.Join(d.dir, entry.Name())))
	}
	return errors.Join(errs...)
}

// traces are the mounts, loop devices and processes of this machine that belong to a folder.
type traces []string

// findTraces finds mounts in a folder or of devices in it, loop devices with a backing file in it, and processes with
// its path in their command line.
func findTraces(dir string) (traces, error) {
	var found traces
	mounts, err := mountinfo.GetMounts(nil)
	if err != nil {
		return nil, err
	}
	for _, m := range mounts {
		if below(m.Mountpoint, dir) || below(m.Source, dir) {
			found = append(found, "the mount at "+m.Mountpoint)
		}
	}
	loops, err := loopFiles()
	if err != nil {
		return nil, err
	}
	for name, file := range loops {
		if below(file, dir) {
			found = append(found, "the loop device "+name+" with "+file)
		}
	}
	commands, err := readEach("/proc/[0-9]*/cmdline")
	if err != nil {
		return nil, err
	}
	for path, command := range commands {
		pid := strings.Split(path, "/")[2]
		if pid != strconv.Itoa(os.Getpid()) && strings.Contains(command, dir+"/") {
			found = append(found, "the process "+pid+", "+strings.ReplaceAll(command, "\x00", " "))
		}
	}
	slices.Sort(found)
	return found, nil
}

// loopFiles maps the machine's loop devices to their backing files.
func loopFiles() (map[string]string, error) {
	texts, err := readEach("/sys/block/loop*/loop/backing_file")
	files := map[string]string{}
	for path, text := range texts {
		files[strings.Split(path, "/")[3]] = strings.TrimSuffix(text, "\n")
	}
	return files, err
}

// readEach reads the files that match a pattern. It leaves out files that vanish meanwhile.
func readEach(pattern string) (map[string]string, error) {
	paths, err := filepath.Glob(pattern)
	if err != nil {
		return nil, err
	}
	texts := map[string]string{}
	for _, path := range paths {
		if text, err := os.ReadFile(path); err == nil {
			texts[path] = string(text)
		}
	}
	return texts, nil
}

// checkTraces compares the traces with those before the demo.
func (d *demo) checkTraces() error {
	now, err := findTraces(d.dir)
	if err != nil {
		return err
	}
	now = slices.DeleteFunc(now, func(trace string) bool { return slices.Contains(d.before, trace) })
	if len(now) > 0 {
		return errors.New(strings.Join(now, ", "))
	}
	return nil
}

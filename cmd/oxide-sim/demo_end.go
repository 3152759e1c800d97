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

// endTimeout bounds the requests at the end, and how long the kernel may take to remove the guests of a killed rack.
// Package simtest bounds how long a process may take to end.
const endTimeout = 10 * time.Second

// end removes everything that the demo has created. After a complete story the rack must be as it was at the start, and
// neither rack nor plugin may have left a file of a volume.
//
// The controller ends first, so that it restarts nothing meanwhile. The rack then shuts its guests down in order, with
// the node plugins and the mounts in them.
func (d *demo) end(told bool) error {
	// A new context: a signal may have cancelled the story's context.
	ctx, cancel := context.WithTimeout(context.Background(), endTimeout)
	defer cancel()
	var errs []error
	if told {
		errs = append(errs, d.checkRack(ctx))
	}
	if d.controller != nil {
		errs = append(errs, d.controller.Stop())
	}
	if d.sim != nil {
		errs = append(errs, d.sim.Stop())
	}
	if d.api != nil {
		errs = append(errs, d.api.Close())
	}
	loops, err := d.detachAll()
	errs = append(errs, err)
	if told && len(loops) > 0 {
		errs = append(errs, fmt.Errorf("these loop devices were still there: %s", strings.Join(loops, ", ")))
	}
	if told {
		errs = append(errs, d.checkFolder())
	}
	errs = append(errs, d.checkTraces(), d.removeFolder())
	d.out.line("")
	if err := errors.Join(errs...); err != nil {
		d.out.line("Not everything could be taken away in order.")
		return fmt.Errorf("demo: left behind: %w", err)
	}
	if !told {
		d.out.line("The story ends here. What was started and mounted for it has been taken away.")
		return nil
	}
	folder := "empty again"
	if d.madeDir {
		folder = "gone"
	}
	d.out.line("Done in %.1f s. Nothing is left behind:", time.Since(d.begun).Seconds())
	d.out.line("   rack: disks %s, as before; no snapshots", strings.Join(d.disksBefore, ", "))
	d.out.line("   here: no mounts, devices or processes; %s is %s", d.dir, folder)
	return d.out.err
}

// checkRack compares the rack's own listings with those at its start, and asks the simulator for leftovers.
func (d *demo) checkRack(ctx context.Context) error {
	disks, err := d.disks(ctx)
	if err != nil {
		return err
	}
	if !slices.Equal(disks, d.disksBefore) {
		return fmt.Errorf("the rack has the disks %s; at the start it had %s", disks, d.disksBefore)
	}
	for _, kind := range []string{"snapshots", "anti-affinity-groups"} { // groups are the plugin's records
		switch left, err := d.list(ctx, kind); {
		case err != nil:
			return err
		case len(left) > 0:
			return fmt.Errorf("the rack has the %s %+v; at the start it had none", kind, left)
		}
	}
	left, err := d.sim.Leftovers(ctx)
	if err != nil {
		return err
	}
	if left.Disks+left.Snapshots+left.Mounts > 0 || len(left.GuestErrors) > 0 {
		return fmt.Errorf("the rack reports leftovers: %+v", left)
	}
	return nil
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

// checkFolder finds files of volumes that a plugin should have removed in the folders of the nodes. Lock files are
// empty and stay. A JSON file is a note of oxide-csi volume mount, which only a detach on the same node removes.
func (d *demo) checkFolder() error {
	var left []string
	for _, m := range d.nodes {
		err := filepath.WalkDir(m.dir, func(path string, entry fs.DirEntry, err error) error {
			stays := entry == nil || entry.Name() == "locks" || filepath.Ext(path) == ".json"
			if !stays && (!entry.IsDir() || entry.Name() == mountFolder) {
				left = append(left, path)
			}
			return err
		})
		if err != nil {
			return err
		}
	}
	if len(left) > 0 {
		return fmt.Errorf("a node plugin left %s", strings.Join(left, ", "))
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

// checkTraces compares the traces with those before the demo. It waits for the kernel.
func (d *demo) checkTraces() error {
	for deadline := time.Now().Add(endTimeout); ; time.Sleep(20 * time.Millisecond) {
		now, err := findTraces(d.dir)
		if err != nil {
			return err
		}
		now = slices.DeleteFunc(now, func(trace string) bool { return slices.Contains(d.before, trace) })
		if len(now) == 0 {
			return nil
		}
		if time.Now().After(deadline) {
			return errors.New(strings.Join(now, ", "))
		}
	}
}

// mountsBelow lists the mounts in a folder, in the order of mounting.
func mountsBelow(dir string) ([]*mountinfo.Info, error) {
	return mountinfo.GetMounts(func(m *mountinfo.Info) (skip, stop bool) { return !below(m.Mountpoint, dir), false })
}

// below reports whether path is dir or is in it.
func below(path, dir string) bool {
	return path == dir || strings.HasPrefix(path, strings.TrimSuffix(dir, "/")+"/")
}

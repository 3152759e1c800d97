// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/moby/sys/mountinfo"
	"github.com/spf13/cobra"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// The demo consists of these files:
//
//   - demo.go: the command, and one run of it
//   - demo_story.go: the steps of the story
//   - demo_nodes.go: the rack, the plugins and the instances, and what happens on them
//   - demo_rack.go: looking at the rack from outside
//   - demo_end.go: removing everything, and checking that nothing is left
//   - demo_print.go: printing the story

// demoOptions are the flags of the demo.
type demoOptions struct {
	folder         string
	hotplug        bool
	step           bool
	controllerOnly bool
	logs           bool
}

const demoLong = `demo starts a simulated rack with two instances, and the plugin: a controller, and a node plugin in each instance. It
takes two volumes through their life with the commands of oxide-csi: create, attach, mount, snapshot, expand, move,
delete. After each step it shows what the rack itself lists, and fails if that is not what it should be.

The rack attaches and detaches disks only while an instance is stopped, as all racks do today. So the controller plans
a restart (--attach-mode=restart). With --hotplug the rack attaches and detaches at any time.

It needs oxide-csi in the same directory. As root it uses real loop devices and mounts, and removes them at the end.
As an ordinary user it leaves the nodes out and shows what the controller does. Controller and node plugins find each
other through a part of a Kubernetes API server, which is simulated too.`

func demoCommand() *cobra.Command {
	var opts demoOptions
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Show the life of two volumes on a simulated rack",
		Long:  demoLong,
		Args:  noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return runDemo(cmd.Context(), opts, cmd.InOrStdin(), cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	flags := cmd.Flags()
	flags.StringVar(
		&opts.folder,
		"state",
		"",
		"new or empty directory for disks, sockets and mounts; its contents are removed at the end (default a new temporary directory)",
	)
	flags.BoolVar(&opts.hotplug, "hotplug", false, "let the rack attach and detach while an instance runs")
	flags.BoolVar(&opts.step, "step", false, "wait for Enter after each step")
	flags.BoolVar(&opts.controllerOnly, "controller-only", false, "leave the nodes out, as for an ordinary user")
	flags.BoolVar(&opts.logs, "logs", false, "show the logs of rack and controller on stderr")
	return cmd
}

// demo is one run of the demo.
type demo struct {
	demoOptions
	programs simtest.Programs
	out      *narrator
	// logTo receives the logs of the rack and the controller; nil discards them.
	logTo io.Writer
	begun time.Time

	// dir is the folder of the demo, without symbolic links, as the kernel reports it. madeDir means that the demo created
	// it.
	dir     string
	madeDir bool
	// nodesOff is the reason for leaving out the nodes; empty with nodes.
	nodesOff string

	sim        *simtest.Sim
	controller *simtest.Plugin
	nodes      []*machine
	// api is the listener of the simulated Kubernetes API server.
	api net.Listener
	// before are the traces of dir before the demo started anything. disksBefore are the rack's disks at its start.
	before      traces
	disksBefore []string
	// written is the size and the checksum of the file that was written to the volume.
	written string
}

// runDemo tells the story and then removes everything, even if the story failed or was interrupted by a signal. The
// error is the first failure, joined with what could not be removed.
func runDemo(ctx context.Context, opts demoOptions, in io.Reader, out, logs io.Writer) error {
	// No signal may end the process before everything is removed.
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	defer surviveBrokenPipes()()
	programs, err := programsBesideThis()
	if err != nil {
		return fmt.Errorf("demo: %w", err)
	}
	d := &demo{demoOptions: opts, programs: programs, out: newNarrator(out, in, opts.step), begun: time.Now()}
	if opts.logs {
		d.logTo = logs
	}
	d.nodesOff = d.whyNoNodes()
	if err := d.makeFolder(); err != nil {
		return fmt.Errorf("demo: %w", err)
	}
	told := d.tell(ctx)
	if ctx.Err() != nil {
		told = fmt.Errorf("interrupted: %w", context.Cause(ctx))
	}
	if told != nil {
		told = fmt.Errorf("demo: %w", told)
	}
	return errors.Join(told, d.end(told == nil))
}

// programsBesideThis are this program and the plugin in the same folder.
func programsBesideThis() (simtest.Programs, error) {
	self, err := os.Executable()
	if err != nil {
		return simtest.Programs{}, fmt.Errorf("find the directory of this binary: %w", err)
	}
	programs := simtest.Programs{Sim: self, Plugin: filepath.Join(filepath.Dir(self), "oxide-csi")}
	if _, err := os.Stat(programs.Plugin); err != nil {
		return simtest.Programs{}, fmt.Errorf(
			"the plugin is missing: %s should be beside this binary: \"make demo\" builds both",
			programs.Plugin,
		)
	}
	return programs, nil
}

func (d *demo) whyNoNodes() string {
	switch {
	case d.controllerOnly:
		return "--controller-only"
	case os.Geteuid() != 0:
		return "you are not root"
	}
	return ""
}

// makeFolder creates the demo's folder, or takes the folder of --state if it is empty.
func (d *demo) makeFolder() (err error) {
	if d.folder == "" {
		d.madeDir = true
		d.dir, err = d.makeTemporary()
	} else {
		d.dir, d.madeDir, err = takeFolder(d.folder)
	}
	if err != nil {
		return err
	}
	if d.dir, err = filepath.EvalSymlinks(d.dir); err != nil {
		return err
	}
	d.before, err = findTraces(d.dir)
	return err
}

func takeFolder(path string) (dir string, made bool, err error) {
	if dir, err = filepath.Abs(path); err != nil {
		return "", false, err
	}
	entries, err := os.ReadDir(dir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return dir, true, os.Mkdir(dir, 0o755)
	case err != nil:
		return "", false, err
	case len(entries) > 0:
		return "", false, fmt.Errorf("--state: %s is not empty: name a new or an empty directory", dir)
	}
	return dir, false, nil
}

// makeTemporary creates a folder. With nodes it must be one where device nodes work: many systems mount /tmp with
// nodev.
func (d *demo) makeTemporary() (string, error) {
	for _, parent := range []string{os.TempDir(), "/var/tmp", "/var/lib"} {
		nodev, err := onNodev(parent)
		if err != nil {
			return "", err
		}
		if d.nodesOff == "" && nodev {
			continue
		}
		return os.MkdirTemp(parent, "oxide-demo-")
	}
	return "", errors.New(
		"no temporary directory supports device nodes, because all are mounted with the option nodev: name another directory with --state",
	)
}

// onNodev reports whether device nodes in the folder cannot be opened.
func onNodev(dir string) (bool, error) {
	dir, err := filepath.EvalSymlinks(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return true, nil
	}
	if err != nil {
		return false, err
	}
	mounts, err := mountinfo.GetMounts(nil)
	if err != nil {
		return false, err
	}
	var nearest *mountinfo.Info
	for _, m := range mounts {
		// Of two mounts at the same folder the later one is visible.
		if below(dir, m.Mountpoint) && (nearest == nil || len(m.Mountpoint) >= len(nearest.Mountpoint)) {
			nearest = m
		}
	}
	return nearest != nil && strings.Contains(","+nearest.Options+",", ",nodev,"), nil
}

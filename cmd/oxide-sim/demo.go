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
//   - demo_processes.go: the rack and the plugins that it starts
//   - demo_story.go: the steps of a volume's life
//   - demo_shell.go: the shells in which the commands of the story are run
//   - demo_look.go: reading the state from rack, guest and kernel
//   - demo_end.go: removing everything, and checking that nothing is left
//   - demo_print.go: printing the story

// demoOptions are the flags of the demo.
type demoOptions struct {
	folder         string
	step           bool
	controllerOnly bool
	logs           bool
}

const demoLong = `demo starts a simulated rack with two instances, and the plugin: one controller process, and one node process for
each instance. It takes one volume through its whole life with the commands of oxide-csi: create, attach, format,
mount, write, snapshot, move to the other instance, read back, delete, restore from the snapshot. After each command
it shows where the volume is, as seen from outside. With --step you can type the same commands in another shell: the
demo names a file to read there.

It needs oxide-csi in the same folder. As root it uses real loop devices and mounts, and removes them at the end.
As an ordinary user it leaves the nodes out and shows what the controller does.`

func demoCommand() *cobra.Command {
	var opts demoOptions
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Show the whole life of a volume on a simulated rack",
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
		"new or empty folder for disks, sockets and mounts; its contents are removed at the end (default a new temporary folder)",
	)
	flags.BoolVar(&opts.step, "step", false, "wait for Enter after each step")
	flags.BoolVar(&opts.controllerOnly, "controller-only", false, "leave the nodes out, as for an ordinary user")
	flags.BoolVar(&opts.logs, "logs", false, "show the logs of rack and plugins on stderr")
	return cmd
}

// demo is one run of the demo.
type demo struct {
	demoOptions
	programs simtest.Programs
	out      *narrator
	// logTo receives the logs of the programs; nil discards them.
	logTo io.Writer
	begun time.Time

	// dir is the folder of the demo, without symbolic links, as the kernel reports it. madeDir means that the demo created
	// it.
	dir     string
	madeDir bool
	// nodesOff is the reason for leaving out the nodes; empty with nodes.
	nodesOff string

	processes processes
	// before are the traces of dir before the demo started anything. disksBefore are the rack's disks at its start.
	before      traces
	disksBefore []string
	// volumes are the IDs of all created volumes.
	volumes []string
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
		return simtest.Programs{}, fmt.Errorf("find the folder of this program: %w", err)
	}
	programs := simtest.Programs{Sim: self, Plugin: filepath.Join(filepath.Dir(self), "oxide-csi")}
	if _, err := os.Stat(programs.Plugin); err != nil {
		return simtest.Programs{}, fmt.Errorf(
			"the plugin is missing: %s should be beside this program: \"make demo\" builds both",
			programs.Plugin,
		)
	}
	return programs, nil
}

func (d *demo) whyNoNodes() string {
	switch {
	case d.controllerOnly:
		return "--controller-only was given"
	case os.Geteuid() != 0:
		return "you are not root, and loop devices and mounts need root"
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
		return "", false, fmt.Errorf("--state: %s is not empty: name a new or an empty folder", dir)
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
		"no temporary folder supports device nodes, because all are mounted with the option nodev: name another folder with --state",
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

// tell starts everything and tells the story.
func (d *demo) tell(ctx context.Context) error {
	if err := d.start(); err != nil {
		return err
	}
	if err := d.introduce(ctx); err != nil {
		return err
	}
	ledger := &volume{}
	if err := d.play(ctx, ledger, d.life()); err != nil {
		return err
	}
	if err := d.play(ctx, &volume{written: ledger.written}, d.afterlife(ledger.snapshot)); err != nil {
		return err
	}
	d.out.blank()
	if err := d.withoutHotplug(ctx); err != nil {
		return err
	}
	return d.play(ctx, &volume{}, d.refusal())
}

const (
	introduction = "One volume's whole life, by commands that anybody can type. They ask the plugin what Kubernetes or Nomad " +
		"would ask it, through CSI, the Container Storage Interface: the calls that change something stand at the right. " +
		"Below each command are what it prints and where the volume is then: what the rack's API, the guest's kernel and " +
		"the table of mounts show. The rack is simulated; plugin, sockets, block devices and filesystem are real."
	introductionWithoutNodes = "One volume's life, as far as the rack sees it, by commands that anybody can type. They ask the plugin what " +
		"Kubernetes or Nomad would ask it, through CSI, the Container Storage Interface: the calls that change something " +
		"stand at the right. Below each command are what it prints and what the rack's API shows then. The rack is " +
		"simulated; plugin and socket are real."
	limit = "Today's racks attach and detach a disk only while the instance is stopped. This one does it while the " +
		"instance runs (hot-plug); what the plugin says on one that does not is shown further down."
	limitShown = "And on a rack as they are today, without hot-plug:"
)

// introduce prints the participants.
func (d *demo) introduce(ctx context.Context) error {
	hotplug, err := d.hotplug(ctx)
	if err != nil {
		return err
	}
	if d.disksBefore, err = d.rackDisks(ctx); err != nil {
		return err
	}
	if d.nodesOff == "" {
		d.out.paragraph(introduction)
	} else {
		d.out.paragraph(introductionWithoutNodes)
		d.out.blank()
		d.out.paragraph("The nodes are left out: " + d.nodesOff + ". So nothing is formatted, mounted or written.")
	}
	d.out.blank()
	d.out.entry("rack", "%s, project %q, hot-plug %s", d.processes.sim.Host, d.processes.sim.Project, hotplug)
	for _, m := range d.processes.nodes {
		if err := d.introduceNode(ctx, m); err != nil {
			return err
		}
	}
	d.out.entry("plugin", "%s", d.processes.plugins())
	d.out.entry("folder", "%s", d.dir)
	d.out.entry("your shell", "run this with --step, and elsewhere: . %s", quoted(d.processes.nodes[0].shell.env))
	d.out.blank()
	d.out.paragraph(limit)
	return d.out.err
}

func (d *demo) introduceNode(ctx context.Context, m *machine) error {
	state, err := d.runState(ctx, m.instance.ID)
	if err != nil {
		return err
	}
	if m.plugin == nil {
		d.out.entry(m.instance.Name, "instance %s, %s", m.instance.ID, state)
		return nil
	}
	room, err := m.register(ctx)
	if err != nil {
		return err
	}
	d.out.entry(m.instance.Name, "instance %s, %s, room for %d volumes", m.id, state, room)
	return nil
}

// withoutHotplug makes the rack behave as racks do today.
func (d *demo) withoutHotplug(ctx context.Context) error {
	off := false
	if err := d.processes.sim.Set(ctx, simtest.Settings{Hotplug: &off}); err != nil {
		return err
	}
	hotplug, err := d.hotplug(ctx)
	if err != nil {
		return err
	}
	d.out.paragraph(limitShown)
	d.out.entry("rack", "hot-plug %s", hotplug)
	return nil
}

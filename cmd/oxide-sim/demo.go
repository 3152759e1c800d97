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

// The demo stands in these files:
//
//   - demo.go: the command, and what one run of it does
//   - demo_processes.go: the rack and the plugins that it starts
//   - demo_story.go: the steps of a volume's life
//   - demo_shell.go: the commands that it consists of, where they are typed
//   - demo_look.go: asking rack, guest and kernel what is there
//   - demo_end.go: taking everything away again, and proof of it
//   - demo_print.go: how it is told

// demoOptions are the flags of the demo.
type demoOptions struct {
	folder         string
	step           bool
	controllerOnly bool
	logs           bool
}

const demoLong = `demo starts a simulated rack with two instances and the plugin, one controller and one node process on each
instance, and takes one volume through its whole life by the commands of oxide-csi: made, attached, formatted,
mounted, written to, kept in a snapshot, moved to the other instance, read back, deleted, made again of the
snapshot. After each command it shows where the volume is, as seen from outside. With --step, the same commands
can be typed meanwhile, in a shell that has read the file which the demo names.

It needs oxide-csi beside itself. As root it uses real loop devices and mounts, which it takes away at the end;
as an ordinary user it shows what the controller does and leaves the nodes out.`

func demoCommand() *cobra.Command {
	var opts demoOptions
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Tell one volume's whole life on a simulated rack",
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
		"new or empty folder for disks, sockets and mounts; what is made there is removed at the end (default a new folder among the temporary ones)",
	)
	flags.BoolVar(&opts.step, "step", false, "wait for Enter after each step, to look around meanwhile")
	flags.BoolVar(&opts.controllerOnly, "controller-only", false, "leave the nodes out, as for an ordinary user")
	flags.BoolVar(&opts.logs, "logs", false, "show the logs of rack and plugins on stderr")
	return cmd
}

// demo is one run of the demo.
type demo struct {
	demoOptions
	programs simtest.Programs
	out      *narrator
	// logTo takes the logs of the programs; nil for nowhere.
	logTo io.Writer
	begun time.Time

	// dir is where everything is kept, without symbolic links, as the kernel reports it. madeDir says that the demo made it.
	dir     string
	madeDir bool
	// nodesOff says why the nodes are left out; empty when they are not.
	nodesOff string

	processes processes
	// before is what there was before anything was started, as far as it has to do with dir. disksBefore are the disks
	// that the rack was started with.
	before      traces
	disksBefore []string
	// volumes are the IDs of all volumes made.
	volumes []string
}

// runDemo tells the story and takes everything away again, whether the story came to its end, failed, or was interrupted by a
// signal. The error is the first thing that went wrong, and what could not be taken away.
func runDemo(ctx context.Context, opts demoOptions, in io.Reader, out, logs io.Writer) error {
	// No signal ends the process before everything was taken away.
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

// programsBesideThis finds the plugin in the folder of this program.
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

// makeFolder makes the folder of the demo, or takes the one that was given if nothing is in it.
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

// makeTemporary makes a folder where device nodes work, if nodes take part: many systems mount /tmp with the option nodev.
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
		"no temporary folder takes device nodes, since all are mounted with the option nodev: name a folder elsewhere with --state",
	)
}

// onNodev reports whether device nodes in this folder cannot be opened.
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
		// Of two mounts on one folder the later one is seen.
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

// introduce says who takes part.
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

// withoutHotplug turns the rack into one as they are today.
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

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// cpuRounds is how many lives are measured together: the kernel counts in steps of 10 ms.
const cpuRounds = 25

// lifeCost measures what the life of a used volume costs on this node as it is, and on a node full of work: system
// calls, processes, and CPU time, those of the plugin's programs included. It needs root.
func lifeCost(ctx context.Context, b *bench) (_ []row, err error) {
	if os.Geteuid() != 0 {
		fmt.Println("life: left out, needs root: loop devices, device nodes and mounts")
		return nil, nil
	}
	s, err := b.newStagingRig()
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, s.stop()) }()
	v, err := s.newVolume(ctx, "life", "ext4", 1)
	if err != nil {
		return nil, err
	}
	// The first two lives: one makes the filesystem, one warms the plugin up.
	if err := errors.Join(s.attachVolume(ctx, v), s.life(ctx, v), s.life(ctx, v)); err != nil {
		return nil, err
	}
	calls, processes, err := s.countedLife(ctx, v)
	if err != nil {
		return nil, err
	}
	rows := []row{
		median("life/used-ext4/system-calls", "calls", []float64{calls}),
		median("life/used-ext4/processes", "processes", []float64{processes}),
	}
	idle, err := s.cpuOfLife(ctx, v)
	if err != nil {
		return nil, err
	}
	rows = append(rows, median("life/used-ext4/cpu", "ms", []float64{idle}))
	for _, busy := range []struct {
		name string
		make func() (undo func() error, err error)
	}{{"50000-files", s.openFiles}, {"200-namespaces", s.makeNamespaces}} {
		undo, err := busy.make()
		if err != nil {
			return nil, err
		}
		cpu, err := s.cpuOfLife(ctx, v)
		if err := errors.Join(err, undo()); err != nil {
			return nil, err
		}
		ratio := cpu / idle
		rows = append(rows,
			median("life/used-ext4/cpu-"+busy.name, "ms", []float64{cpu}),
			median("life/used-ext4/cpu-"+busy.name+"/ratio", "×", []float64{ratio}))
	}
	return rows, s.remove(ctx, v)
}

// cpuOfLife returns the CPU time of one life in milliseconds, the mean of several.
func (s *stagingRig) cpuOfLife(ctx context.Context, v *stagedVolume) (float64, error) {
	before, err := cpuTime(s.guest.PID())
	if err != nil {
		return 0, err
	}
	for range cpuRounds {
		if err := s.life(ctx, v); err != nil {
			return 0, err
		}
	}
	after, err := cpuTime(s.guest.PID())
	return (after - before) / cpuRounds, err
}

// cpuTime returns the CPU time in milliseconds of a process and of its children that have ended: utime, stime, cutime
// and cstime of proc(5).
func cpuTime(pid int) (total float64, err error) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	fields := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:])) // from the third field on
	for _, field := range fields[11:15] {
		ticks, err := strconv.ParseFloat(field, 64)
		if err != nil {
			return 0, err
		}
		total += ticks * 10 // a tick is 10 ms on every architecture of Linux
	}
	return total, nil
}

// countedLife counts the system calls and the processes of one life. perf does not slow them down: under strace, the Go
// runtime would make hundreds more.
func (s *stagingRig) countedLife(ctx context.Context, v *stagedVolume) (calls, processes float64, err error) {
	report := filepath.Join(s.dir, "perf")
	perf := exec.Command("perf", "stat", "-x", ",", "-o", report, "-e", "raw_syscalls:sys_enter,sched:sched_process_exec",
		"-p", strconv.Itoa(s.guest.PID()))
	if err := perf.Start(); err != nil {
		return 0, 0, err
	}
	time.Sleep(time.Second) // until it counts
	life := s.life(ctx, v)
	if err := errors.Join(life, perf.Process.Signal(os.Interrupt)); err != nil {
		return 0, 0, err
	}
	_ = perf.Wait() // it ends with the signal
	text, err := os.ReadFile(report)
	if err != nil {
		return 0, 0, err
	}
	for line := range strings.Lines(string(text)) {
		switch count, event, _ := strings.Cut(line, ",,"); {
		case strings.HasPrefix(event, "raw_syscalls"):
			calls, err = strconv.ParseFloat(count, 64)
		case strings.HasPrefix(event, "sched"):
			processes, err = strconv.ParseFloat(count, 64)
		}
		if err != nil {
			return 0, 0, fmt.Errorf("perf: %q: %w", line, err)
		}
	}
	return calls, processes, nil
}

// openFiles has programs with 50,000 open files run on this node, until undo is called. Half of them are regular files,
// and half /dev/null.
func (s *stagingRig) openFiles() (undo func() error, err error) {
	const programs, each = 10, 5_000
	null, err := os.Open(os.DevNull)
	if err != nil {
		return nil, err
	}
	regular, err := os.Create(filepath.Join(s.dir, "open"))
	if err != nil {
		return nil, err
	}
	var started []*exec.Cmd
	for range programs {
		program := exec.Command("sleep", "infinity")
		program.ExtraFiles = slices.Repeat([]*os.File{null, regular}, each/2)
		if err := program.Start(); err != nil {
			return nil, err
		}
		started = append(started, program)
	}
	return func() error {
		errs := []error{null.Close(), regular.Close()}
		for _, program := range started {
			errs = append(errs, program.Process.Kill())
			_ = program.Wait() // it was killed
		}
		return errors.Join(errs...)
	}, nil
}

// makeNamespaces makes 200 mount namespaces with 50 private mounts each, as containers have them, until undo is called.
func (s *stagingRig) makeNamespaces() (undo func() error, err error) {
	const script = `
		mount -t tmpfs none "$1"
		mkdir "$1/x"
		for i in $(seq 50); do mkdir "$1/m$i" && mount --bind "$1/x" "$1/m$i"; done
		for i in $(seq 200); do
			unshare --mount --propagation=private sh -c '>"$1" && exec sleep infinity' sh "$1/made$i" &
		done
		until [ "$(ls "$1" | grep -c made)" = 200 ]; do sleep 0.1; done
		echo made
		read -r _ || kill $(jobs -p)`
	folder := filepath.Join(s.dir, "namespaces")
	if err := os.Mkdir(folder, 0o700); err != nil {
		return nil, err
	}
	shell := exec.Command("unshare", "--mount", "--propagation=private", "bash", "-ec", script, "bash", folder)
	shell.Stderr = os.Stderr
	input, err1 := shell.StdinPipe()
	output, err2 := shell.StdoutPipe()
	if err := errors.Join(err1, err2, shell.Start()); err != nil {
		return nil, err
	}
	if !bufio.NewScanner(output).Scan() {
		return nil, errors.Join(errors.New("the shell has made no namespaces"), shell.Wait())
	}
	return func() error { return errors.Join(input.Close(), shell.Wait()) }, nil
}

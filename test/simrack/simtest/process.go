// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package simtest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"time"
)

// Process is a running program.
type Process struct {
	cmd    *exec.Cmd
	stdout *Output
	output *Output
	done   chan struct{}
	err    error
}

// Output collects the output of a program. It can be read while the program runs.
type Output struct {
	mu   sync.Mutex
	text bytes.Buffer
	also io.Writer
}

// Write implements io.Writer.
func (o *Output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.text.Write(p) // a bytes.Buffer takes everything
	if o.also != nil {
		return o.also.Write(p)
	}
	return len(p), nil
}

// String is the output so far.
func (o *Output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.String()
}

// start runs a program and collects its stderr, which also receives a copy if set. It collects stdout unless the caller
// has made a pipe for it. Without cmd.Env the environment is PATH only.
func start(cmd *exec.Cmd, also io.Writer, ownProcessGroup bool) (*Process, error) {
	p := &Process{cmd: cmd, stdout: &Output{}, output: &Output{also: also}, done: make(chan struct{})}
	cmd.Stderr = p.output
	if cmd.Stdout == nil {
		cmd.Stdout = p.stdout
	}
	if cmd.Env == nil {
		cmd.Env = []string{"PATH=" + os.Getenv("PATH")}
	}
	if RaceDetector() {
		// A program with the race detector otherwise sleeps for a second before it exits.
		cmd.Env = append(cmd.Env, "GORACE=atexit_sleep_ms=0")
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: ownProcessGroup}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", cmd.Path, err)
	}
	go func() {
		defer close(p.done)
		p.err = cmd.Wait()
	}()
	return p, nil
}

// PID is the process ID.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// Stdout is the stdout of a plugin, which should be empty. The stdout of a rack is consumed by [StartSim].
func (p *Process) Stdout() *Output { return p.stdout }

// Stderr is the stderr of the process.
func (p *Process) Stderr() *Output { return p.output }

// Signal sends a signal.
func (p *Process) Signal(s os.Signal) error { return p.cmd.Process.Signal(s) }

// Done is closed when the process has ended.
func (p *Process) Done() <-chan struct{} { return p.done }

// ExitCode waits for the end of the process or of the context. The exit code of a process that was killed by a signal
// is -1.
func (p *Process) ExitCode(ctx context.Context) (int, error) {
	select {
	case <-p.done:
		return p.cmd.ProcessState.ExitCode(), nil
	case <-ctx.Done():
		return 0, fmt.Errorf("process %d (%s) has not ended: %w", p.PID(), p.cmd.Path, ctx.Err())
	}
}

// stopTimeout is the time that a process may take to end after SIGTERM.
const stopTimeout = 30 * time.Second

// Stop sends SIGTERM and waits. A process that does not exit with code 0 in time is an error.
func (p *Process) Stop() error {
	select {
	case <-p.done:
		return p.exited()
	default:
	}
	if err := p.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	select {
	case <-p.done:
		return p.exited()
	case <-time.After(stopTimeout):
		return errors.Join(
			fmt.Errorf("process %d (%s) did not end within %s after SIGTERM: %s", p.PID(), p.cmd.Path, stopTimeout, p.output),
			p.Kill(),
		)
	}
}

func (p *Process) exited() error {
	if p.err != nil {
		return fmt.Errorf("%s: %w: %s", p.cmd.Path, p.err, p.output)
	}
	return nil
}

// Kill sends SIGKILL and waits for the end of the process.
func (p *Process) Kill() error {
	if err := p.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	<-p.done
	return nil
}

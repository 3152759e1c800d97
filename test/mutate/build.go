// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// builder compiles and runs tests.
type builder struct {
	// root is the folder of the module, dir a folder for results of the compiler.
	root, dir string
	// works has the outcome of each test without a planted bug. unchanged are the test programs of packages without one.
	works     map[string]error
	unchanged map[string]string
	built     int
}

// testTimeout ends a test that hangs because of a planted bug. Such a test does not count as failed: a row should fail
// fast.
const testTimeout = "60s"

// endTimeout is how long the end of a test program is waited for. It is longer than testTimeout. A program with a
// thread that waits for a disk does not end.
const endTimeout = 90 * time.Second

// errPassed means that a test passed.
var errPassed = errors.New("the test passes with the bug: the bug survives")

// plant compiles the package's tests with the bug and runs the bug's test. It returns nil if the test fails. Without
// the bug the test must pass.
func (b *builder) plant(ctx context.Context, bug bug) error {
	key := bug.pkg + " " + bug.test
	works, known := b.works[key]
	if !known {
		works = b.passes(ctx, bug)
		b.works[key] = works
	}
	if works != nil {
		return works
	}
	overlay, err := b.overlay(bug)
	if err != nil {
		return err
	}
	program, err := b.compile(ctx, bug.pkg, "planted", "-overlay="+overlay)
	if err != nil {
		return fmt.Errorf("the planted bug does not compile: %w", err)
	}
	// Tests that build a program themselves build it with the bug.
	return b.fails(ctx, bug, program, "GOFLAGS=-overlay="+overlay)
}

// passes returns an error if the bug's test does not pass without the bug.
func (b *builder) passes(ctx context.Context, bug bug) error {
	program, compiled := b.unchanged[bug.pkg]
	if !compiled {
		var err error
		if program, err = b.compile(ctx, bug.pkg, "unchanged"); err != nil {
			return err
		}
		b.unchanged[bug.pkg] = program
	}
	switch err := b.fails(ctx, bug, program); {
	case errors.Is(err, errPassed):
		return nil
	case err != nil:
		return fmt.Errorf("without the bug: %w", err)
	}
	return fmt.Errorf("%s fails without the bug", bug.test)
}

// overlay writes the file with the bug, and the overlay that puts it in place of the original.
func (b *builder) overlay(bug bug) (string, error) {
	original := filepath.Join(b.root, bug.file)
	content, err := bug.apply(b.root)
	if err != nil {
		return "", err
	}
	b.built++
	changed := filepath.Join(b.dir, fmt.Sprintf("%d.go", b.built))
	overlay := filepath.Join(b.dir, fmt.Sprintf("%d.json", b.built))
	text, err := json.Marshal(map[string]map[string]string{"Replace": {original: changed}})
	if err != nil {
		return "", err
	}
	return overlay, errors.Join(os.WriteFile(changed, []byte(content), 0o600), os.WriteFile(overlay, text, 0o600))
}

// compile builds the test program of a package. It replaces the previous one of this kind.
func (b *builder) compile(ctx context.Context, pkg, kind string, flags ...string) (string, error) {
	program := filepath.Join(b.dir, strings.ReplaceAll(pkg, "/", "-")+"."+kind)
	args := append([]string{"test", "-c", "-o", program}, flags...)
	cmd := exec.CommandContext(ctx, "go", append(args, "./"+pkg)...)
	cmd.Dir = b.root
	if output, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("%w: %s", err, lastLines(output))
	}
	return program, nil
}

// fails runs the bug's test, with more environment variables, and returns nil if it fails,
// and [errPassed] if it passes.
func (b *builder) fails(ctx context.Context, bug bug, program string, environ ...string) error {
	name, subtest, _ := strings.Cut(bug.test, "/")
	pattern := "^" + name + "$"
	if subtest != "" {
		pattern += "/" + subtest
	}
	args := []string{
		"--mount",
		"--propagation=private",
		program,
		"-test.run=" + pattern,
		"-test.v",
		"-test.timeout=" + testTimeout,
	}
	if bug.flag != "" {
		args = append(args, bug.flag)
	}
	cmd := exec.CommandContext(ctx, "unshare", args...)
	cmd.Dir = filepath.Join(b.root, bug.pkg)
	cmd.Env = append(os.Environ(), environ...)
	output, err := combinedOutput(cmd)
	text := string(output)
	switch {
	case errors.Is(err, errStays):
		return fmt.Errorf("%s: %w", bug.test, err)
	case !strings.Contains(text, "=== RUN   "+name):
		return fmt.Errorf("%s did not run: %s", bug.test, lastLines(output))
	case strings.Contains(text, "--- SKIP: "):
		return fmt.Errorf("%s was skipped: %s", bug.test, lastLines(output))
	case err == nil:
		return errPassed
	case !strings.Contains(text, "--- FAIL: "):
		return fmt.Errorf("%s did not end: %w: %s", bug.test, err, lastLines(output))
	}
	return nil
}

// errStays means that a program does not end.
var errStays = errors.New("it does not end: perhaps it waits for a disk")

// outputDelay is how long the programs that a test has left may keep its output open.
const outputDelay = 5 * time.Second

// combinedOutput is [exec.Cmd.CombinedOutput]. It ends the programs that a test has left running, as one does that is
// ended by force. It leaves a program behind that does not end, and returns errStays.
func combinedOutput(cmd *exec.Cmd) ([]byte, error) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.WaitDelay = outputDelay
	type result struct {
		output []byte
		err    error
	}
	ended := make(chan result, 1)
	go func() {
		output, err := cmd.CombinedOutput()
		if cmd.Process != nil {
			_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) // mostly there is none
		}
		ended <- result{output, err}
	}()
	select {
	case r := <-ended:
		return r.output, r.err
	case <-time.After(endTimeout):
		return nil, errStays
	}
}

// lastLines returns the end of a program's output.
func lastLines(output []byte) string {
	const most = 1000
	return strings.TrimSpace(string(output[max(0, len(output)-most):]))
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package hostexec runs the host's programs that the node plugin needs beside the kernel: blkid, mkfs, mount, and the
// programs that check and grow filesystems.
//
// It looks for a program in fixed folders, not along PATH, which depends on who started the plugin. A program gets no
// shell, no input and none of the plugin's environment, and it prints English whatever the machine's locale is.
package hostexec

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// ErrMissing says that a program is not installed; the error around it names the Debian package that has it.
var ErrMissing = errors.New("program is not installed")

// folders are where Debian and its kin keep system programs.
var folders = []string{"/usr/sbin", "/usr/bin", "/sbin", "/bin"}

// packages names the Debian package of each program this module calls.
var packages = map[string]string{
	"blkid":      "util-linux",
	"btrfs":      "btrfs-progs",
	"e2fsck":     "e2fsprogs",
	"mkfs.btrfs": "btrfs-progs",
	"mkfs.ext3":  "e2fsprogs",
	"mkfs.ext4":  "e2fsprogs",
	"mkfs.xfs":   "xfsprogs",
	"mount":      "mount",
	"resize2fs":  "e2fsprogs",
	"xfs_growfs": "xfsprogs",
}

// Result is what a program that ran to its end left behind.
type Result struct {
	// ExitCode is the program's own; it is -1 when a signal ended it.
	ExitCode int
	// Stdout and Stderr are the whole of what it wrote.
	Stdout, Stderr string
}

// Message is all that the program wrote as one line, for error messages.
func (r Result) Message() string {
	if message := strings.Join(strings.Fields(r.Stderr+" "+r.Stdout), " "); message != "" {
		return message
	}
	return "no message"
}

// Run runs a program to its end and returns its output, whatever its exit code is. It kills the program when ctx ends and
// then returns an error. A program that cannot be started is an error too: [ErrMissing] if it is not installed. The error
// names the program and none of its arguments. The program inherits the file given to [WithInherited].
func Run(ctx context.Context, name string, args ...string) (Result, error) {
	path, err := find(name)
	if err != nil {
		return Result{}, err
	}
	var stdout, stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Args[0] = name
	// Without the cache of libblkid: what it says of a disk may be minutes old, and another disk's.
	cmd.Env = []string{"PATH=" + strings.Join(folders, ":"), "LC_ALL=C", "BLKID_FILE=/dev/null"}
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if file, ok := ctx.Value(inheritedKey{}).(*os.File); ok {
		cmd.ExtraFiles = []*os.File{file}
	}
	cmd.WaitDelay = time.Second // a child of the program may keep the pipes open after it was killed
	err = cmd.Run()
	if ctx.Err() != nil {
		return Result{}, fmt.Errorf("%s was stopped: %w", name, ctx.Err())
	}
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		return Result{}, fmt.Errorf("run %s: %w", name, err)
	}
	return Result{ExitCode: cmd.ProcessState.ExitCode(), Stdout: stdout.String(), Stderr: stderr.String()}, nil
}

type inheritedKey struct{}

// WithInherited returns a context whose programs inherit an open file, for a lock that must last as long as they run.
func WithInherited(ctx context.Context, file *os.File) context.Context {
	return context.WithValue(ctx, inheritedKey{}, file)
}

func find(name string) (string, error) {
	for _, folder := range folders {
		path := filepath.Join(folder, name)
		info, err := os.Stat(path)
		if err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0 {
			return path, nil
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return "", fmt.Errorf("look for %s: %w", name, err)
		}
	}
	return "", fmt.Errorf("%w: %s, looked for in %s: install the Debian package %s where the plugin runs",
		ErrMissing, name, strings.Join(folders, ", "), packages[name])
}

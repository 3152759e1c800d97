// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

// Package hostexec runs the host's programs that the node plugin needs: blkid, mkfs, mount, cryptsetup, and the
// programs that check and grow filesystems.
//
// It looks for a program in fixed folders. It does not use PATH, which depends on how the plugin was started. A program
// runs without a shell and without the plugin's environment, and without input unless it needs a secret. It prints
// English in every locale.
package hostexec

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// folders are the folders for system programs in Debian and similar distributions.
var folders = []string{"/usr/sbin", "/usr/bin", "/sbin", "/bin"}

// packages has the Debian package of each program that this module runs.
var packages = map[string]string{
	"blkid":      "util-linux",
	"btrfs":      "btrfs-progs",
	"cryptsetup": "cryptsetup-bin",
	"dd":         "coreutils",
	"dmsetup":    "dmsetup",
	"e2fsck":     "e2fsprogs",
	"mkfs.btrfs": "btrfs-progs",
	"mkfs.ext3":  "e2fsprogs",
	"mkfs.ext4":  "e2fsprogs",
	"mkfs.xfs":   "xfsprogs",
	"mount":      "mount",
	"resize2fs":  "e2fsprogs",
	"wipefs":     "util-linux",
	"xfs_growfs": "xfsprogs",
}

// Result is the result of a program that has ended.
type Result struct {
	// ExitCode is the program's exit code, or -1 if a signal ended it.
	ExitCode int
	// Stdout and Stderr are the program's whole output.
	Stdout, Stderr string
}

// Message returns the program's output as one line, for error messages. A list of options at its end is left out.
func (r Result) Message() string {
	said, _, _ := strings.Cut(r.Stderr+" "+r.Stdout, "\nUsage:")
	if message := strings.Join(strings.Fields(said), " "); message != "" {
		return message
	}
	return "no message"
}

// killTimeout is how long [Run] waits for a program that it has killed.
const killTimeout = time.Second

// LeftBehindError means that a killed program has not ended: it waits in the kernel, mostly for a disk that does not
// answer. Such a program ends when the disk answers, or fails.
type LeftBehindError struct {
	// Ended is closed when the program has ended.
	Ended <-chan struct{}

	name  string
	pid   int
	cause error
}

func (e *LeftBehindError) Error() string {
	return fmt.Sprintf("%s was killed, but does not end (process %d): %v", e.name, e.pid, e.cause)
}

func (e *LeftBehindError) Unwrap() error { return e.cause }

// Run runs a program and returns its result. An exit code other than 0 is no error. If ctx ends, Run kills the program
// and returns an error. It is a [*LeftBehindError] if the program has not ended 1 s later. Run returns [ErrMissing] if
// the program is not installed. An error names the program, but not its arguments. The program inherits the file that
// was given to [WithInherited].
func Run(ctx context.Context, name string, args ...string) (Result, error) {
	return run(ctx, nil, name, args)
}

// RunWithSecret is [Run] for a program that reads a secret from its stdin. Arguments and environment of a process are
// visible to other users, so a secret is in neither. It is in a file in memory,
// which no other process can open by a name.
func RunWithSecret(ctx context.Context, secret []byte, name string, args ...string) (Result, error) {
	input, err := newMemoryFile("stdin")
	if err != nil {
		return Result{}, err
	}
	defer input.close()
	if _, err := input.file.WriteAt(secret, 0); err != nil {
		return Result{}, fmt.Errorf("write the input of %s: %w", name, err)
	}
	return run(ctx, input.file, name, args)
}

func run(ctx context.Context, stdin *os.File, name string, args []string) (Result, error) {
	path, err := find(name)
	if err != nil {
		return Result{}, err
	}
	stdout, err := newMemoryFile("stdout")
	if err != nil {
		return Result{}, err
	}
	defer stdout.close()
	stderr, err := newMemoryFile("stderr")
	if err != nil {
		return Result{}, err
	}
	defer stderr.close()
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Args[0] = name
	// libblkid's cache is off: an entry may be minutes old, and about another disk. libdevmapper must not wait for udev: a
	// container cannot hear its answer, and the plugin uses none of udev's links.
	cmd.Env = []string{"PATH=" + strings.Join(folders, ":"), "LC_ALL=C", "BLKID_FILE=/dev/null", "DM_DISABLE_UDEV=1"}
	if stdin != nil {
		cmd.Stdin = stdin
	}
	cmd.Stdout, cmd.Stderr = stdout.file, stderr.file
	if file, ok := ctx.Value(inheritedKey{}).(*os.File); ok && file != nil {
		cmd.ExtraFiles = []*os.File{file}
	}
	if err = Start(cmd); err == nil {
		err = wait(ctx, cmd)
	}
	var left *LeftBehindError
	if errors.As(err, &left) {
		return Result{}, err
	}
	if ctx.Err() != nil {
		return Result{}, fmt.Errorf("%s was stopped: %w", name, ctx.Err())
	}
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		return Result{}, fmt.Errorf("run %s: %w", name, err)
	}
	printed, err := stdout.text()
	complained, err2 := stderr.text()
	if err := errors.Join(err, err2); err != nil {
		return Result{}, fmt.Errorf("read the output of %s: %w", name, err)
	}
	return Result{ExitCode: cmd.ProcessState.ExitCode(), Stdout: printed, Stderr: complained}, nil
}

// memoryFile is a file in memory to which a program writes, or from which it reads. A pipe would end only when every
// process that inherited it has closed it, such as a program that starts at the same time.
type memoryFile struct{ file *os.File }

func newMemoryFile(name string) (memoryFile, error) {
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_NOEXEC_SEAL)
	if errors.Is(err, unix.EINVAL) { // before Linux 6.3
		fd, err = unix.MemfdCreate(name, unix.MFD_CLOEXEC)
	}
	if err != nil {
		return memoryFile{}, fmt.Errorf("make a file in memory for a program: %w", err)
	}
	return memoryFile{os.NewFile(uintptr(fd), name)}, nil
}

// text is what was written until now.
func (o memoryFile) text() (string, error) {
	info, err := o.file.Stat()
	if err != nil {
		return "", err
	}
	text := make([]byte, info.Size())
	n, err := o.file.ReadAt(text, 0)
	return string(text[:n]), err
}

// close frees the memory, unless a process still has the file.
func (o memoryFile) close() { _ = o.file.Close() } // what was written has been read

// wait waits until a program has ended. If the program has not ended [killTimeout] after the end of ctx, wait returns
// [*LeftBehindError].
func wait(ctx context.Context, cmd *exec.Cmd) error {
	ended := make(chan struct{})
	var result error
	go func() {
		defer close(ended)
		result = cmd.Wait()
	}()
	select {
	case <-ended:
		return result
	case <-ctx.Done():
	}
	timer := time.NewTimer(killTimeout)
	defer timer.Stop()
	select {
	case <-ended:
		return result
	case <-timer.C:
		return &LeftBehindError{Ended: ended, name: cmd.Args[0], pid: cmd.Process.Pid, cause: ctx.Err()}
	}
}

// starting is held for reading while a program starts, and for writing while a file is closed.
var starting sync.RWMutex

// MinOpenFiles is the least limit of open files (RLIMIT_NOFILE) of this process with which programs are started. The
// plugin itself has some 30 files open, and some more for each call and connection.
const MinOpenFiles = 256

// CheckOpenFiles returns an error if the limit of open files is below [MinOpenFiles].
func CheckOpenFiles() error {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return fmt.Errorf("read the limit of open files: %w", err)
	}
	if limit.Cur < MinOpenFiles {
		return fmt.Errorf(
			"the limit of open files is %d, and the plugin needs %d: raise it (ulimit -n, LimitNOFILE= of systemd, the container's nofile)",
			limit.Cur,
			MinOpenFiles,
		)
	}
	return nil
}

const (
	// lastNumber is above the numbers of all other open files of this process. With a higher number, each start costs
	// more.
	lastNumber = 1000
	// lastNumbers is how many numbers are kept from there on, for programs that start at the same time.
	lastNumbers = 64
)

// openLast makes a copy of an open file, with a number above those of all other files.
func openLast(file *os.File) (number int, err error) {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return 0, err
	}
	least := min(lastNumber, max(limit.Cur, lastNumbers)-lastNumbers)
	return unix.FcntlInt(file.Fd(), unix.F_DUPFD_CLOEXEC, int(least))
}

// Start starts a program, and returns when the program executes. Until then the program has copies of all files that
// this process has open; see [CloseUninherited].
//
// [exec.Cmd.Start] returns too early: the kernel closes the copies in the order of their numbers, and it waits only for
// the copy of one pipe. Start waits for a pipe with a number above all others.
func Start(cmd *exec.Cmd) error {
	starting.RLock()
	defer starting.RUnlock()
	closed, pipe, err := os.Pipe()
	if err != nil {
		return fmt.Errorf("make a pipe: %w", err)
	}
	defer func() { _ = closed.Close() }() // nothing was written to it
	last, err := openLast(pipe)
	if err = errors.Join(err, pipe.Close()); err != nil {
		return fmt.Errorf("make a pipe: %w", err)
	}
	err = cmd.Start()
	_ = unix.Close(last) // nothing was written to it
	if err != nil {
		return err
	}
	_, _ = closed.Read(make([]byte, 1)) // returns when the last copy is closed
	return nil
}

// CloseUninherited closes a file while no program starts, so that no program has a copy of the open file afterwards.
func CloseUninherited(file *os.File) error {
	starting.Lock()
	defer starting.Unlock()
	return file.Close()
}

type inheritedKey struct{}

// WithInherited returns a context in which [Run] passes an open file to programs, for a lock that must last until they
// end. If file is nil, programs inherit no file.
func WithInherited(ctx context.Context, file *os.File) context.Context {
	return context.WithValue(ctx, inheritedKey{}, file)
}

// Outlive returns a context that does not end with ctx, for programs that go on when the caller has left. It passes its
// own copy of the inherited file to them, until release is called.
func Outlive(ctx context.Context) (outliving context.Context, release func(), err error) {
	outliving = context.WithoutCancel(ctx)
	file, ok := ctx.Value(inheritedKey{}).(*os.File)
	if !ok {
		return outliving, func() {}, nil
	}
	fd, err := unix.FcntlInt(file.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("copy %s: %w", file.Name(), err)
	}
	copied := os.NewFile(uintptr(fd), file.Name())
	// A file that carries a lock has no content that an error of Close could lose.
	return WithInherited(outliving, copied), func() { _ = copied.Close() }, nil
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
	return "", fmt.Errorf("%w: %s is not in %s: install the Debian package %s where the plugin runs",
		ErrMissing, name, strings.Join(folders, ", "), packages[name])
}

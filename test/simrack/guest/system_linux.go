// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package guest

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"syscall"
	"time"

	"github.com/google/uuid"
	"golang.org/x/sys/unix"
)

const (
	// haltRequest is the signal of the power button: SIGRTMIN+4, on which systemd powers a machine off.
	haltRequest = syscall.Signal(34 + 4)
	// killTime is how long the processes of a guest may take to die. Only a process in an uninterruptible wait takes long.
	killTime = 10 * time.Second
	// consoleName is the file in a guest's folder with the output of its first process, over all its boots.
	consoleName = "console"
	// bootIDName is the file in a guest's folder with the ID of the boot.
	bootIDName = "boot_id"
)

// Environment variables of a guest's first process.
const (
	envDir  = "OXIDE_SIM_GUEST"       // the guest's folder
	envName = "OXIDE_SIM_INSTANCE"    // the instance's name
	envID   = "OXIDE_SIM_INSTANCE_ID" // the instance's UUID
)

// setUp prepares the new namespaces of a guest, and then executes the boot program as the first process. It waits for a
// line on standard input, which means that the simulator holds the namespaces.
//
// Mounts of the host, such as a guest folder, appear in the guest, but no mount of the guest appears on the host. The
// mounts of a guest are shared among the namespaces of its services. Disks of other guests that are mounted on the host
// are unmounted here, because the new namespace would keep them busy. An umount that fails is for a mount below one
// that is already gone. Every boot has its own ID.
const setUp = `read -r _ && mount --make-rslave / && mount --make-rshared / && mount -t proc proc /proc &&
while read -r _ _ device _ place rest; do
    case "$device $rest" in "7:"*" - "*"/dev/nvme"*) umount -l "$place" || : ;; esac
done </proc/self/mountinfo &&
mount --bind "$` + envDir + `/` + bootIDName + `" /proc/sys/kernel/random/boot_id &&
echo up >&3 && exec "$0" </dev/null 3>&-`

// system is the running system of a guest: a first process in its own PID and mount namespace, and its descendants.
type system struct {
	process *os.Process
	// mounts is the mount namespace. The open file keeps it alive after the end of its processes, so that the filesystems
	// in it can be cut off. Otherwise the kernel would unmount them in order at the end of the namespace.
	mounts *os.File
	// done is closed when no process is left.
	done chan struct{}
	// haltBy is the deadline of a guest that was told to halt.
	haltBy time.Time
}

// start runs the boot program as the first process of a guest. After its end, ended is called; its argument says
// whether the guest reset itself.
func (g *Guests) start(m *machine, ended func(reset bool)) (*system, error) {
	if err := os.WriteFile(filepath.Join(m.dir, bootIDName), []byte(uuid.NewString()+"\n"), 0o444); err != nil {
		return nil, err
	}
	console, err := os.OpenFile(filepath.Join(m.dir, consoleName), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o644)
	if err != nil {
		return nil, err
	}
	defer console.Close() // the guest has its own descriptor
	goOn, release, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer goOn.Close()
	defer release.Close()
	up, report, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer up.Close()

	cmd := exec.Command("sh", "-c", setUp, g.boot)
	cmd.Dir = "/"
	cmd.Env = append(os.Environ(), envDir+"="+m.dir, envName+"="+filepath.Base(m.dir), envID+"="+m.id)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = goOn, console, console
	cmd.ExtraFiles = []*os.File{report}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWPID,
		Pdeathsig:  syscall.SIGKILL,
		Setsid:     true, // so that a Ctrl-C at the terminal reaches only the simulator
	}
	s := &system{done: make(chan struct{})}
	started := make(chan error)
	go s.supervise(cmd, started, g.log.With("guest", m.dir), ended)
	err = <-started
	if closeErr := report.Close(); err == nil {
		err = closeErr
	}
	if err == nil {
		err = s.await(up, release)
	}
	if err != nil && s.process != nil {
		err = errors.Join(err, s.kill(), s.close())
	}
	if err != nil {
		return nil, fmt.Errorf("start %s: %w: see %s", g.boot, err, console.Name())
	}
	return s, nil
}

// supervise starts the first process and sends the result to started. Then it waits until all processes have ended, and
// calls ended.
func (s *system) supervise(cmd *exec.Cmd, started chan<- error, log *slog.Logger, ended func(reset bool)) {
	// Pdeathsig is sent when the thread that started the process ends. This goroutine keeps its thread until the process
	// has ended.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	err := cmd.Start()
	if err == nil {
		s.process = cmd.Process
		s.mounts, err = os.Open(fmt.Sprintf("/proc/%d/ns/mnt", cmd.Process.Pid))
	}
	started <- err
	if cmd.Process == nil {
		return
	}
	// The first process of a PID namespace ends after all others.
	_ = cmd.Wait() // its state says how it ended
	log.Info("a guest's processes have ended", "first", cmd.ProcessState.String())
	close(s.done)
	status, _ := cmd.ProcessState.Sys().(syscall.WaitStatus)
	ended(status.Signaled() && status.Signal() == syscall.SIGHUP) // the effect of reboot(2) in a PID namespace
}

// await lets the set-up continue, and waits until it has executed the first process.
func (s *system) await(up, release *os.File) error {
	if _, err := release.WriteString("\n"); err != nil {
		return err
	}
	said, err := io.ReadAll(up)
	if err == nil && string(said) != "up\n" {
		err = errors.New("its namespaces could not be prepared")
	}
	return err
}

// halt asks the guest to power itself off within timeout.
func (s *system) halt(timeout time.Duration) error {
	if s.haltBy.IsZero() {
		s.haltBy = time.Now().Add(timeout)
	}
	if err := s.process.Signal(haltRequest); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("tell process %d to halt: %w", s.process.Pid, err)
	}
	return nil
}

// halted waits until a guest that was told to halt has ended. It reports false when the deadline has passed.
func (s *system) halted() bool {
	timer := time.NewTimer(time.Until(s.haltBy))
	defer timer.Stop()
	select {
	case <-s.done:
		return true
	case <-timer.C:
		return false
	}
}

// kill kills all processes.
func (s *system) kill() error {
	if err := s.process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("kill process %d: %w", s.process.Pid, err)
	}
	select {
	case <-s.done:
		return nil
	case <-time.After(killTime):
		return fmt.Errorf("processes of the guest whose first process is %d have not died within %s", s.process.Pid, killTime)
	}
}

// close releases the mount namespace. If no process is left, the mounts of the namespace are gone when close returns.
func (s *system) close() error {
	if s.mounts == nil {
		return nil
	}
	return s.mounts.Close()
}

// namespaceMounts lists the mounts of the system's mount namespace, which may have no process any more. The mounts can
// be used until release is called.
func (s *system) namespaceMounts() (mounts []mount, release func() error, err error) {
	var info, root *os.File
	onOwnThread(func() { info, root, err = enter(s.mounts) })
	if err != nil {
		return nil, nil, fmt.Errorf("read the mounts of the namespace of process %d: %w", s.process.Pid, err)
	}
	release = func() error { return errors.Join(info.Close(), root.Close()) }
	mounts, err = readMounts(info, fmt.Sprintf("/proc/self/fd/%d", root.Fd()))
	if err != nil {
		return nil, nil, errors.Join(err, release())
	}
	return mounts, release, nil
}

// onOwnThread calls a function on a thread that ends afterwards, so the function may change the state of the thread. It
// never uses the main thread, which would not end, and whose state /proc/self shows.
func onOwnThread(do func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			defer runtime.UnlockOSThread()
			onOwnThread(do) // on another thread, because this goroutine keeps the main thread
			return
		}
		do() // The goroutine ends with its thread locked, which ends the thread.
	}()
	<-done
}

// enter moves this thread to a mount namespace, and opens the mountinfo and the root of the namespace. Any thread can
// use both.
func enter(namespace *os.File) (info, root *os.File, err error) {
	// Not /proc/self: in the namespace it belongs to another PID namespace.
	thread, err := unix.Open(
		fmt.Sprintf("/proc/self/task/%d", unix.Gettid()),
		unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC,
		0,
	)
	if err != nil {
		return nil, nil, err
	}
	defer unix.Close(thread) // only a path descriptor
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return nil, nil, err
	}
	if err := unix.Setns(int(namespace.Fd()), unix.CLONE_NEWNS); err != nil {
		return nil, nil, err
	}
	infoFD, err := unix.Openat(thread, "mountinfo", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, nil, err
	}
	rootFD, err := unix.Open("/", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, nil, errors.Join(err, unix.Close(infoFD))
	}
	return os.NewFile(uintptr(infoFD), "mountinfo"), os.NewFile(uintptr(rootFD), "root"), nil
}

// checkBoot rejects a file that cannot be executed. It returns the absolute path.
func checkBoot(path string) (string, error) {
	absolute, err := filepath.Abs(path)
	if err != nil {
		return "", err
	}
	info, err := os.Stat(absolute)
	if err != nil {
		return "", err
	}
	if !info.Mode().IsRegular() || info.Mode()&0o111 == 0 {
		return "", &fs.PathError{Op: "run", Path: absolute, Err: errors.New("it is not an executable file")}
	}
	return absolute, nil
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package guest

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
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
	// haltRequest is what the power button does: the real-time signal SIGRTMIN+4, which has systemd power a machine off.
	haltRequest = syscall.Signal(34 + 4)
	// killTime is how long the processes of a guest may take to die. Only one that the kernel cannot wake takes long.
	killTime = 10 * time.Second
	// consoleName is the file in a guest's folder that takes what its first process prints, over all its boots.
	consoleName = "console"
	// bootIDName is the file there that holds the ID of the boot.
	bootIDName = "boot_id"
)

// Environment variables of a guest's first process.
const (
	envDir  = "OXIDE_SIM_GUEST"       // The guest's folder.
	envName = "OXIDE_SIM_INSTANCE"    // The instance's name.
	envID   = "OXIDE_SIM_INSTANCE_ID" // The instance's UUID.
)

// setUp makes the new namespaces a machine's, once standard input says that the simulator holds them, and becomes the first
// process. What is mounted on the host, such as a guest folder, appears in there, but nothing the other way round; and a
// machine's mounts are shared among the namespaces that its services make. Disks of guests that somebody has mounted on the host
// are no business of this one, which would hold them for as long as it runs; one that cannot be unmounted was below another.
// Every boot has an ID of its own.
const setUp = `read -r _ && mount --make-rslave / && mount --make-rshared / && mount -t proc proc /proc &&
while read -r _ _ device _ place rest; do
    case "$device $rest" in "7:"*" - "*"/dev/nvme"*) umount -l "$place" || : ;; esac
done </proc/self/mountinfo &&
mount --bind "$` + envDir + `/` + bootIDName + `" /proc/sys/kernel/random/boot_id &&
echo up >&3 && exec "$0" </dev/null 3>&-`

// system is what runs in a guest: a first process in a PID and a mount namespace of its own, and all that it starts.
type system struct {
	process *os.Process
	// mounts is the mount namespace. Held open it outlives the processes, so that the filesystems that they leave mounted can
	// be cut off: at the end of the namespace the kernel would unmount them in order.
	mounts *os.File
	// done is closed when there is no process any more.
	done chan struct{}
	// haltBy is when the patience with a guest that was told to halt ends.
	haltBy time.Time
}

// start makes the boot program the first process of a guest. Once that has ended, ended is called with whether it reset the
// machine.
func (g *Guests) start(m *machine, ended func(reset bool)) (*system, error) {
	if err := os.WriteFile(filepath.Join(m.dir, bootIDName), []byte(uuid.NewString()+"\n"), 0o444); err != nil {
		return nil, err
	}
	console, err := os.OpenFile(filepath.Join(m.dir, consoleName), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o644)
	if err != nil {
		return nil, err
	}
	defer console.Close() // The guest has its own.
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
		Setsid:     true, // A Ctrl-C at the terminal is for the simulator.
	}
	s := &system{done: make(chan struct{})}
	started := make(chan error)
	go func() {
		// Pdeathsig comes when the thread ends that has started the process: this one does with it.
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
		// The first process of a PID namespace has ended when all the others have.
		_ = cmd.Wait() // How it ended is in its state.
		g.log.Info("a guest's processes have ended", "guest", m.dir, "first", cmd.ProcessState.String())
		close(s.done)
		status, _ := cmd.ProcessState.Sys().(syscall.WaitStatus)
		ended(status.Signaled() && status.Signal() == syscall.SIGHUP) // What reboot(2) makes of it in a PID namespace.
	}()
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

// await lets the set-up go on and waits until it has become the first process.
func (s *system) await(up, release *os.File) error {
	if _, err := release.WriteString("\n"); err != nil {
		return err
	}
	said, err := io.ReadAll(up)
	if err == nil && string(said) != "up\n" {
		err = errors.New("its namespaces could not be set up")
	}
	return err
}

// halt asks the guest to power itself off.
func (s *system) halt(patience time.Duration) error {
	if s.haltBy.IsZero() {
		s.haltBy = time.Now().Add(patience)
	}
	if err := s.process.Signal(haltRequest); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("tell process %d to halt: %w", s.process.Pid, err)
	}
	return nil
}

// halted waits for the end of a guest that was told to halt, until the patience with it ends.
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

// kill ends all processes at once.
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

// close lets go of the mount namespace. Once there is no process, its mounts have ended when close returns.
func (s *system) close() error {
	if s.mounts == nil {
		return nil
	}
	return s.mounts.Close()
}

// look lists the mounts of the system's mount namespace, where a process need not live any more. They can be used until release
// is called.
func (s *system) look() (mounts []mount, release func() error, err error) {
	var info, root *os.File
	onOwnThread(func() { info, root, err = enter(s.mounts) })
	if err != nil {
		return nil, nil, fmt.Errorf("look into the mount namespace of process %d: %w", s.process.Pid, err)
	}
	release = func() error { return errors.Join(info.Close(), root.Close()) }
	mounts, err = readMounts(info, fmt.Sprintf("/proc/self/fd/%d", root.Fd()))
	if err != nil {
		return nil, nil, errors.Join(err, release())
	}
	return mounts, release, nil
}

// onOwnThread calls a function on a thread that ends afterwards, whatever the function makes of it. The first thread of the process
// is never one: it would not end, and /proc/self would show what has become of it.
func onOwnThread(do func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			defer runtime.UnlockOSThread()
			onOwnThread(do) // On another one, as long as this goroutine has the first.
			return
		}
		do() // And not unlocked, which ends the thread.
	}()
	<-done
}

// enter moves this thread to a mount namespace, and opens its mountinfo and its root. Both can be used from anywhere.
func enter(namespace *os.File) (info, root *os.File, err error) {
	// Not /proc/self in there, which is about another PID namespace.
	thread, err := unix.Open(
		fmt.Sprintf("/proc/self/task/%d", unix.Gettid()),
		unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC,
		0,
	)
	if err != nil {
		return nil, nil, err
	}
	defer unix.Close(thread) // Only a name.
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

// checkBoot refuses what cannot be run, and returns its absolute path.
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

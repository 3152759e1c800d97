// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build k8s

package k8s_test

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
)

// inside is the environment variable with the folder of the run. It is set only in the process in the namespaces.
const inside = "OXIDE_CSI_TEST_K8S"

// Addresses on the loopback device of the namespace. Pods reach them through their bridge, which is the gateway to
// 10.96.0.0/24.
const (
	apiAddress  = "10.96.0.1" // the first of the service range, where pods expect the API server
	rackAddress = "10.96.0.2"
	westAddress = "10.96.0.3"
	nodeA       = "10.96.0.4"
	nodeB       = "10.96.0.5"
	nodeC       = "10.96.0.6"
	// gatewayAddress is the address of the Service of the gateway of buckets.
	gatewayAddress = "10.96.0.7"
)

var addresses = []string{apiAddress, rackAddress, westAddress, nodeA, nodeB, nodeC, gatewayAddress}

func TestMain(m *testing.M) {
	if os.Geteuid() != 0 {
		os.Exit(m.Run()) // all tests skip
	}
	if file := os.Getenv(asNode); file != "" {
		n, err := readNode(file)
		if err == nil {
			err = n.boot()
		}
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	if dir := os.Getenv(inside); dir != "" {
		if err := furnish(dir); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(m.Run())
	}
	code, err := outside()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

// outside prepares everything that needs the network or the machine itself, and then runs the tests in new namespaces.
func outside() (code int, err error) {
	dir, err := os.MkdirTemp("", "k8s")
	if err != nil {
		return 1, err
	}
	restore, err := remember(sysctls)
	if err != nil {
		return 1, err
	}
	defer func() { err = errors.Join(err, restore(), leave(dir)) }()
	if err := prepare(dir); err != nil {
		return 1, err
	}
	if err := eachHierarchy(cgroups(dir), func(group, parent string) error {
		return errors.Join(os.Mkdir(group, 0o755), inherit(group, parent))
	}); err != nil {
		return 1, err
	}
	runtime.LockOSThread() // Pdeathsig is sent when this thread ends.
	cmd := exec.Command(os.Args[0], os.Args[1:]...)
	cmd.Env = append(os.Environ(), inside+"="+dir)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWNET,
		Pdeathsig:  syscall.SIGKILL,
	}
	var exit *exec.ExitError
	if err := cmd.Run(); err != nil && !errors.As(err, &exit) {
		return 1, err
	}
	return cmd.ProcessState.ExitCode(), nil
}

// sysctls are the settings that kubelet changes for the whole machine.
var sysctls = []string{
	"kernel/panic",
	"kernel/panic_on_oops",
	"kernel/keys/root_maxbytes",
	"kernel/keys/root_maxkeys",
	"vm/overcommit_memory",
	"vm/panic_on_oom",
}

func remember(names []string) (restore func() error, err error) {
	values := map[string][]byte{}
	for _, name := range names {
		if values[name], err = os.ReadFile(filepath.Join("/proc/sys", name)); err != nil {
			return nil, err
		}
	}
	return func() error {
		var errs []error
		for name, value := range values {
			errs = append(errs, os.WriteFile(filepath.Join("/proc/sys", name), value, 0o644))
		}
		return errors.Join(errs...)
	}, nil
}

// cgroups returns the name of the control groups of kubelet's pods.
func cgroups(dir string) string { return "oxide-csi-" + filepath.Base(dir) }

// eachHierarchy calls a function with the control group of this name in each cgroup hierarchy of the machine.
func eachHierarchy(name string, do func(group, parent string) error) error {
	parents, err := filepath.Glob("/sys/fs/cgroup/*/cgroup.procs")
	if err != nil {
		return err
	}
	if len(parents) == 0 {
		parents = []string{"/sys/fs/cgroup/cgroup.procs"}
	}
	for _, procs := range parents {
		parent := filepath.Dir(procs)
		if err := do(filepath.Join(parent, name), parent); err != nil {
			return err
		}
	}
	return nil
}

// inherit copies the parent's processors and memory nodes to a group. Groups of cgroup version 1 begin without any.
func inherit(group, parent string) error {
	for _, name := range []string{"cpuset.cpus", "cpuset.mems"} {
		value, err := os.ReadFile(filepath.Join(parent, name))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err := errors.Join(err, os.WriteFile(filepath.Join(group, name), value, 0o644)); err != nil {
			return err
		}
	}
	return nil
}

// removeGroups removes control groups without processes, including those below them.
func removeGroups(name string) error {
	return eachHierarchy(name, func(group, _ string) error {
		var groups []string
		err := filepath.WalkDir(group, func(path string, d fs.DirEntry, err error) error {
			if err == nil && d.IsDir() {
				groups = append(groups, path)
			}
			return err
		})
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		for _, group := range slices.Backward(groups) {
			err = errors.Join(err, syscall.Rmdir(group))
		}
		return err
	})
}

// leave removes what survives the namespaces: control groups, loop devices of a killed rack, and the folder.
func leave(dir string) error {
	errs := []error{removeGroups(cgroups(dir))}
	loops, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	errs = append(errs, err)
	for _, loop := range loops {
		if file, err := os.ReadFile(loop); err == nil && strings.HasPrefix(string(file), dir+"/") {
			device := "/dev/" + strings.Split(loop, "/")[3]
			errs = append(errs, fmt.Errorf("%s was left behind", device), exec.Command("losetup", "-d", device).Run())
		}
	}
	return errors.Join(append(errs, os.RemoveAll(dir))...)
}

// furnish prepares the namespaces: mounts become private, and the addresses of the servers are added.
func furnish(dir string) error {
	if err := errors.Join(
		mount("", "/", "", syscall.MS_REC|syscall.MS_PRIVATE),
		mount("proc", "/proc", "proc", 0),
		mount("tmpfs", filepath.Join(dir, "guests"), "tmpfs", 0), // tmpfs, so that device nodes work
	); err != nil {
		return err
	}
	commands := [][]string{{"link", "set", "lo", "up"}}
	for _, address := range addresses {
		commands = append(commands, []string{"address", "add", address + "/32", "dev", "lo"})
	}
	for _, args := range commands {
		if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
			return fmt.Errorf("ip %s: %w: %s", strings.Join(args, " "), err, out)
		}
	}
	return nil
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build vm

package vm

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// system is what a machine boots.
type system struct{ kernel, initramfs string }

// guest is the system that every machine boots, unless a test assembles its own from this folder.
var (
	guest  system
	folder string
)

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	dir, err := os.MkdirTemp("", "guest")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	folder = dir
	code := 1
	if err = build(dir); err == nil {
		code = m.Run()
		err = checkMemory()
	}
	if err := errors.Join(err, os.RemoveAll(dir)); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return code
}

// mostMemory is how many KiB this process may take, with the race detector. Machines and other tests run beside it.
const mostMemory = 3 << 20

// checkMemory returns an error if this process has taken more. Disks have 1 GiB each, and several tests run at once.
func checkMemory() error {
	var usage unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &usage); err != nil {
		return err
	}
	if usage.Maxrss > mostMemory {
		return fmt.Errorf("the tests have taken %d KiB of memory: do not read whole disks", usage.Maxrss)
	}
	return nil
}

// build builds the programs of this source tree for the guest, and assembles it.
func build(dir string) error {
	programs := filepath.Join(dir, "root", "usr", "sbin")
	if err := os.MkdirAll(programs, 0o755); err != nil {
		return err
	}
	built, err := simtest.Build(dir, false)
	if err != nil {
		return err
	}
	if err := os.Rename(built.Plugin, filepath.Join(programs, "oxide-csi")); err != nil {
		return err
	}
	if _, err := command(
		"env",
		"CGO_ENABLED=0",
		"go",
		"build",
		"-trimpath",
		"-ldflags=-s -w",
		"-o",
		filepath.Join(programs, "agent"),
		"./agent",
	); err != nil {
		return err
	}
	guest, err = assemble()
	return err
}

// assemble returns a guest of guest.sh's output, which depends on variables of the environment, and of the programs.
// The kernel unpacks the two archives one after the other.
func assemble(variables ...string) (system, error) {
	base, err := command("env", append(variables, "./guest.sh")...)
	if err != nil {
		return system{}, err
	}
	base = strings.TrimSpace(base)
	assembled := system{
		kernel:    filepath.Join(base, "vmlinuz"),
		initramfs: filepath.Join(folder, "initramfs-"+filepath.Base(base)),
	}
	_, err = command(
		"sh",
		"-euc",
		`cp "$1/root.cpio" "$2"; cd "$3/root"; find . | cpio -o -H newc --quiet --owner 0:0 >>"$2"`,
		"sh",
		base,
		assembled.initramfs,
		folder,
	)
	return assembled, err
}

// command runs a program of the host and returns its stdout. Its stderr is passed on.
func command(name string, args ...string) (string, error) {
	cmd := exec.Command(name, args...)
	cmd.Stderr = os.Stderr
	output, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("%s: %w", name, err)
	}
	return string(output), nil
}

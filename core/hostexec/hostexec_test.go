// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package hostexec

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// program makes a shell script the only program that Run can find.
func program(t *testing.T, name, script string) {
	t.Helper()
	folder := t.TempDir()
	if err := os.WriteFile(filepath.Join(folder, name), []byte("#!/bin/sh\n"+script+"\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	before := folders
	folders = []string{"/no/such/folder", folder}
	t.Cleanup(func() { folders = before })
}

func TestRun(t *testing.T) {
	t.Setenv("SECRET", "of the plugin")
	t.Setenv("LC_ALL", "de_DE.UTF-8")
	program(t, "blkid", `echo "$1|$SECRET|$LC_ALL"; echo "on two" >&2; echo lines >&2; exit 2`)
	result, err := Run(t.Context(), "blkid", "an argument; with a semicolon")
	if err != nil {
		t.Fatal(err)
	}
	if want := (Result{ExitCode: 2, Stdout: "an argument; with a semicolon||C\n", Stderr: "on two\nlines\n"}); result != want {
		t.Errorf("%+v, want %+v", result, want)
	}
	if message := result.Message(); message != "on two lines an argument; with a semicolon||C" {
		t.Errorf("message %q", message)
	}
	usage := Result{Stderr: "agsize too small\nUsage: mkfs.xfs\n[-b size=num]\n"}
	if message := usage.Message(); message != "agsize too small" {
		t.Errorf("with a list of options: %q", message)
	}
	if message := (Result{}).Message(); message == "" {
		t.Error("a silent program leaves an error without words")
	}
}

// A program has ended when its process has ended. On a busy machine other programs that start at the same time keep
// what they inherited open for a while.
func TestRunDoesNotWaitForInheritedOutput(t *testing.T) {
	program(t, "mkfs.ext4", "/bin/sleep 60 & echo $!")
	result, err := Run(t.Context(), "mkfs.ext4")
	child, notNumber := strconv.Atoi(strings.TrimSpace(result.Stdout))
	if err != nil || notNumber != nil || result.ExitCode != 0 || result.Stderr != "" {
		t.Fatalf("%+v, %v; want success, and the process ID of the program's child", result, err)
	}
	if err := unix.Kill(child, unix.SIGKILL); err != nil {
		t.Errorf("Run waits for the program's child: end it: %v", err)
	}
}

// The output of a program may be longer than a pipe holds.
func TestRunReturnsTheWholeOutput(t *testing.T) {
	program(t, "blkid", "/usr/bin/seq 200000; /usr/bin/seq 5 >&2")
	result, err := Run(t.Context(), "blkid")
	if err != nil || !strings.HasPrefix(result.Stdout, "1\n2\n") || !strings.HasSuffix(result.Stdout, "\n200000\n") ||
		result.Stderr != "1\n2\n3\n4\n5\n" {
		t.Errorf("%d bytes of output, %q, %v", len(result.Stdout), result.Stderr, err)
	}
}

func TestRunMissing(t *testing.T) {
	program(t, "blkid", "")
	_, err := Run(t.Context(), "mkfs.xfs", "secret")
	if !errors.Is(err, ErrMissing) || !strings.Contains(err.Error(), "xfsprogs") ||
		strings.Contains(err.Error(), "secret") {
		t.Errorf("%v, want ErrMissing naming the package and no argument", err)
	}
}

func TestRunIsKilledWithItsContext(t *testing.T) {
	program(t, "mount", "exec /bin/sleep 600")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Run(ctx, "mount"); !errors.Is(err, context.Canceled) {
		t.Errorf("%v, want the context's error", err)
	}
}

func TestRunKilledBySignal(t *testing.T) {
	program(t, "mount", "kill -9 $$")
	if result, err := Run(t.Context(), "mount"); err != nil || result.ExitCode != -1 {
		t.Errorf("%+v, %v; want exit code -1", result, err)
	}
}

// Every program that the plugin runs has its Debian package in the list.
func TestEveryProgramHasItsPackage(t *testing.T) {
	for name, deb := range packages {
		if deb == "" ||
			!slices.Contains(
				[]string{"util-linux", "coreutils", "mount", "e2fsprogs", "xfsprogs", "btrfs-progs", "cryptsetup-bin", "dmsetup"},
				deb,
			) {
			t.Errorf("%s is in package %q, which CONTRIBUTING and the image do not install", name, deb)
		}
	}
}

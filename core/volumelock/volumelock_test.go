// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package volumelock_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/core/hostexec"
	"github.com/oxidecomputer/oxide-csi-plugin/core/statefile"
	"github.com/oxidecomputer/oxide-csi-plugin/core/volumelock"
)

func TestLockOutlivesItsProcess(t *testing.T) {
	dir, volume := filepath.Join(t.TempDir(), "state"), uuid.New()
	ctx, release, err := volumelock.Acquire(t.Context(), dir, volume, 0)
	if err != nil {
		t.Fatal(err)
	}
	result, err := hostexec.Run(ctx, "sh", "-c", "/bin/sleep 600 >/dev/null 2>&1 & echo $!")
	if err != nil {
		t.Fatal(err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(result.Stdout))
	if err != nil {
		t.Fatal(err)
	}
	end := func() {
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			t.Error(err)
		}
	}
	release()
	if _, _, err := volumelock.Acquire(t.Context(), dir, volume, 0); !errors.Is(err, volumelock.ErrHeld) {
		end()
		t.Fatalf("%v while a program runs, want ErrHeld", err)
	}
	_, releaseOther, err := volumelock.Acquire(t.Context(), dir, uuid.New(), 0)
	if err != nil {
		t.Errorf("another volume: %v", err)
	} else {
		releaseOther()
	}
	end()
	_, release, err = volumelock.Acquire(t.Context(), dir, volume, time.Minute)
	if err != nil {
		t.Fatalf("after its end: %v", err)
	}
	release()
}

func TestAcquireEndsWithItsContext(t *testing.T) {
	dir, volume := t.TempDir(), uuid.New()
	_, release, err := volumelock.Acquire(t.Context(), dir, volume, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer release()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, _, err := volumelock.Acquire(ctx, dir, volume, time.Hour); !errors.Is(err, context.Canceled) {
		t.Errorf("%v, want the context's error", err)
	}
}

func TestAcquireWithoutStateFolder(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, _, err := volumelock.Acquire(t.Context(), file, uuid.New(), 0); !errors.Is(err, statefile.ErrFolder) {
		t.Errorf("%v, want ErrFolder", err)
	}
}

// A state folder that has become read-only still protects from programs that were started before.
func TestAcquireInAReadOnlyStateFolder(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: mounts")
	}
	// The read-only folder shows the same file as the writable one.
	writable, readOnly, volume := t.TempDir(), t.TempDir(), uuid.New()
	if err := unix.Mount(writable, readOnly, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(readOnly, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	if err := unix.Mount("", readOnly, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY, ""); err != nil {
		t.Fatal(err)
	}
	_, releaseBefore, err := volumelock.Acquire(t.Context(), writable, volume, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := volumelock.Acquire(t.Context(), readOnly, volume, 0); !errors.Is(err, volumelock.ErrHeld) {
		t.Errorf("%v while a program runs, want ErrHeld", err)
	}
	releaseBefore()
	_, release, err := volumelock.Acquire(t.Context(), readOnly, volume, 0)
	if err != nil {
		t.Fatal(err)
	}
	release()
}

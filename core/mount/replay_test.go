// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package mount

import (
	"context"
	"encoding/binary"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
	"github.com/oxidecomputer/oxide-csi-plugin/core/device/devicetest"
	"github.com/oxidecomputer/oxide-csi-plugin/core/hostexec"
	"github.com/oxidecomputer/oxide-csi-plugin/test/writecache"
)

// afterPowerCut returns an ext4 that lost its power while something was in its journal. last happens before the cut,
// and what it returns happens after it.
func afterPowerCut(t *testing.T, last func(target string) (end func()), options ...string) (
	device.Device, *devicetest.Disk,
) {
	t.Helper()
	guest := devicetest.New(t)
	backing := filepath.Join(t.TempDir(), "disk")
	if err := errors.Join(os.WriteFile(backing, nil, 0o600), os.Truncate(backing, 320<<20)); err != nil {
		t.Fatal(err)
	}
	devicetest.Run(t, "mkfs.ext4", append(append([]string{"-q"}, options...), backing)...)
	cache, target := writecache.New(t, backing), t.TempDir()
	before, err := guest.Roots().ByNumber(guest.Plug("csi-beforethecut", cache.Path).Number)
	if err != nil {
		t.Fatal(err)
	}
	if err := Filesystem(t.Context(), before, target, "ext4", Options{}); err != nil {
		t.Fatal(err)
	}
	writeFsynced(t, target, "old")
	end := last(target)
	cache.Cut(0)
	end()
	unmountIdle(t, target, before)
	disk := guest.Plug("csi-afterthecut", backing)
	after, err := guest.Roots().ByNumber(disk.Number)
	if err != nil {
		t.Fatal(err)
	}
	return after, disk
}

func nothing(string) func() { return func() {} }

// A journal that the kernel cannot replay is kept, with the synced files that only the journal has: e2fsck, which would
// drop it, does not run, also when the call is repeated.
func TestJournalThatTheKernelRefusesIsKept(t *testing.T) {
	t.Parallel()
	refused := func(t *testing.T, dev device.Device, prepare func()) {
		t.Helper()
		prepare()
		r, target := NewRepairs(slog.New(slog.DiscardHandler)), t.TempDir()
		r.run = func(_ context.Context, name string, args ...string) (hostexec.Result, error) {
			t.Errorf("%s %q ran", name, args)
			return hostexec.Result{}, nil
		}
		for range 2 {
			err := r.Mount(t.Context(), dev, uuid.New(), target, "ext4", Options{})
			if err == nil {
				unmountIdle(t, target, dev)
			}
			if !errors.Is(err, ErrDamaged) || !strings.Contains(err.Error(), "restore a snapshot") {
				t.Errorf("%v, want ErrDamaged with the next step", err)
			}
		}
		if state, err := device.ReadExtState(dev); err != nil || !state.Replay {
			t.Errorf("the journal is gone: %+v, %v", state, err)
		}
	}
	t.Run("fast commits with a deleted file that is open", func(t *testing.T) {
		t.Parallel()
		dev, _ := afterPowerCut(t, func(target string) func() {
			open, err := os.Create(filepath.Join(target, "open"))
			if err != nil {
				t.Fatal(err)
			}
			write := func() error {
				_, err := open.Write(fsyncedContent("open", 0))
				return errors.Join(err, open.Sync())
			}
			if err := errors.Join(write(), os.Remove(open.Name()), write()); err != nil {
				t.Fatal(err)
			}
			writeSynced(t, filepath.Join(target, "other"))
			return func() { _ = open.Close() } // its disk is gone
		}, "-O", "fast_commit")
		refused(t, dev, func() {})
	})
	t.Run("a damaged block", func(t *testing.T) {
		t.Parallel()
		dev, disk := afterPowerCut(t, nothing)
		refused(t, dev, func() {
			poke(t, disk, map[int64][]byte{firstLogged(t, disk): []byte("damage")})
		})
	})
}

// firstLogged returns the place of the first block in the journal that belongs to a transaction.
func firstLogged(t *testing.T, disk *devicetest.Disk) int64 {
	t.Helper()
	const blockBytes, magic, descriptor = 1024, 0xc03b3998, 1 // of JBD2
	content, err := os.ReadFile(disk.Backing)
	if err != nil {
		t.Fatal(err)
	}
	for at := 0; at < len(content); at += blockBytes {
		if binary.BigEndian.Uint32(content[at:]) == magic && binary.BigEndian.Uint32(content[at+4:]) == descriptor {
			return int64(at + blockBytes)
		}
	}
	t.Fatal("no transaction is in the journal")
	return 0
}

// The kernel mounts a filesystem with a feature that it does not know only read-only. It replays the journal all the
// same, so that e2fsck, which may know the feature, does not have to.
func TestReplayWithAnUnknownFeature(t *testing.T) {
	t.Parallel()
	dev, disk := afterPowerCut(t, nothing)
	devicetest.Run(t, "debugfs", "-w", "-R", "feature +shared_blocks", disk.Loop)
	if err := replayJournal(t.Context(), dev); err != nil {
		t.Fatal(err)
	}
	if state, err := device.ReadExtState(dev); err != nil || state.Replay {
		t.Errorf("not replayed: %+v, %v", state, err)
	}
	target := t.TempDir()
	if err := Filesystem(t.Context(), dev, target, "ext4", Options{Flags: []string{"ro"}}); err != nil {
		t.Fatal(err)
	}
	wantFiles(t, target, "old")
	unmountIdle(t, target, dev)
}

// An e2fsck that has dropped the journal has not repaired the filesystem, whatever its exit code.
func TestDroppedJournalIsDamage(t *testing.T) {
	t.Parallel()
	for output, want := range map[string]error{
		"e2fsck: Invalid argument while recovering journal of /dev/x": ErrDamaged,
		"Journal checksum error found in /dev/x":                      ErrDamaged,
		"JBD2: corrupted journal superblock Journal corrupted in x":   ErrDamaged,
		"/dev/x: recovering journal":                                  nil,
	} {
		for code := range e2fsckFixed + 1 {
			r := NewRepairs(slog.New(slog.DiscardHandler))
			r.run = func(context.Context, string, ...string) (hostexec.Result, error) {
				return hostexec.Result{ExitCode: code, Stderr: output}, nil
			}
			if err := r.e2fsck(t.Context(), device.Device{}, "-p"); !errors.Is(err, want) {
				t.Errorf("exit code %d and %q: %v, want %v", code, output, err, want)
			}
		}
	}
	for _, code := range []int{2, 3} { // e2fsck has changed a filesystem that is mounted
		r := NewRepairs(slog.New(slog.DiscardHandler))
		r.run = func(context.Context, string, ...string) (hostexec.Result, error) {
			return hostexec.Result{ExitCode: code}, nil
		}
		if err := r.e2fsck(t.Context(), device.Device{}, "-p"); !errors.Is(err, ErrMount) {
			t.Errorf("exit code %d: %v, want ErrMount", code, err)
		}
	}
}

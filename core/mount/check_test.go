// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package mount

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
	"github.com/oxidecomputer/oxide-csi-plugin/core/device/devicetest"
	"github.com/oxidecomputer/oxide-csi-plugin/core/filesystem"
	"github.com/oxidecomputer/oxide-csi-plugin/core/hostexec"
)

// hangingRepairs returns Repairs whose programs end only when end is closed, with this exit code.
func hangingRepairs(exitCode int) (r *Repairs, end chan struct{}) {
	r, end = NewRepairs(slog.New(slog.DiscardHandler)), make(chan struct{})
	r.run = func(context.Context, string, ...string) (hostexec.Result, error) {
		<-end
		return hostexec.Result{ExitCode: exitCode}, nil
	}
	return r, end
}

// checkFor runs e2fsck on a disk for at most limit.
func checkFor(t *testing.T, r *Repairs, volumeID uuid.UUID, limit time.Duration) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	dev := device.Device{Path: "/dev/nvme1n1"}
	return r.do(ctx, dev, volumeID, func(ctx context.Context) error { return r.e2fsck(ctx, dev, "-p") })
}

// The marker of a check stays on the disk only if e2fsck was killed or has not written the whole superblock, and if the
// superblock was whole before.
func TestCheckMarkerStaysAfterAKill(t *testing.T) {
	t.Parallel()
	const ( // no exit codes
		tears = 1 << 10 // e2fsck leaves a superblock with a wrong checksum
		late  = 1 << 11 // e2fsck is killed at the end of its time
	)
	for _, tc := range []struct {
		name     string
		whole    bool
		exitCode int
		want     device.Work
	}{
		{"killed", true, -1, device.Checking},
		{"a failed write of the superblock", true, 8 | tears, device.Checking},
		{"a failed write of the superblock that e2fsck ignored", true, 1 | tears, device.Checking},
		{"ended by SIGTERM", true, e2fsckCancelled, device.Checking},
		{"killed at the end of its time", true, late, device.Checking},
		{"repaired", true, 1, device.NoWork},
		{"damaged", true, e2fsckErrorsLeft, device.NoWork},
		{"failed", true, 8, device.NoWork},
		{"wrong checksum, killed", false, -1, device.NoWork},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			dev, disk := newDisk(t, 64<<20)
			devicetest.Run(t, "mkfs.ext4", "-q", disk.Loop)
			if !tc.whole {
				poke(t, disk, map[int64][]byte{1024 + 0x30: []byte("time")}) // s_wtime
			}
			id := uuid.New()
			r := NewRepairs(slog.New(slog.DiscardHandler))
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			r.run = func(context.Context, string, ...string) (hostexec.Result, error) {
				if tc.exitCode == late {
					cancel()
					return hostexec.Result{}, ctx.Err()
				}
				if tc.exitCode > 0 && tc.exitCode&tears != 0 {
					poke(t, disk, map[int64][]byte{1024 + 0x30: []byte("time")})
				}
				return hostexec.Result{ExitCode: tc.exitCode &^ tears}, nil
			}
			err := r.preen(ctx, dev, id)
			if found, look := device.InterruptedWork(dev); found != tc.want || look != nil {
				t.Errorf("marker of %q, %v; want %q; the check: %v", found, look, tc.want, err)
			}
		})
	}
}

// A boot loader in the first KiB leaves no room for the marker. The filesystem is checked without it.
func TestCheckSparesABootLoader(t *testing.T) {
	t.Parallel()
	dev, disk := newDisk(t, 64<<20)
	devicetest.Run(t, "mkfs.ext4", "-q", disk.Loop)
	poke(t, disk, map[int64][]byte{0: []byte("boot loader")})
	before := blocks(t, disk)[0][:1024]
	if err := NewRepairs(slog.New(slog.DiscardHandler)).check(t.Context(), dev, uuid.New(), "a test"); err != nil {
		t.Error(err)
	}
	if !bytes.Equal(blocks(t, disk)[0][:1024], before) {
		t.Error("the boot loader was overwritten")
	}
}

// Four disks are checked at a time. A disk that hangs does not count for ever.
func TestHungChecksDoNotBlockOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, end := hangingRepairs(0)
		for range maxRepairs {
			if err := checkFor(t, r, uuid.New(), time.Minute); !errors.Is(err, ErrChecking) {
				t.Fatalf("a disk that hangs: %v, want ErrChecking", err)
			}
		}
		err := checkFor(t, r, uuid.New(), time.Minute)
		if !errors.Is(err, ErrChecking) || !strings.Contains(err.Error(), "4 other disks") {
			t.Errorf("the fifth disk: %v, want ErrChecking with the reason", err)
		}
		time.Sleep(hungAfter)
		synctest.Wait()
		r.run = func(context.Context, string, ...string) (hostexec.Result, error) { return hostexec.Result{}, nil }
		if err := checkFor(t, r, uuid.New(), time.Minute); err != nil {
			t.Errorf("after the others have hung for %s: %v", hungAfter, err)
		}
		close(end)
	})
}

// One check runs for a disk. A repetition waits for it, gets its failure once, and starts the next one.
func TestRepetitionJoinsTheCheck(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, end := hangingRepairs(e2fsckErrorsLeft)
		started := 0
		program := r.run
		r.run = func(ctx context.Context, name string, args ...string) (hostexec.Result, error) {
			started++
			return program(ctx, name, args...)
		}
		disk := uuid.New()
		for i := range 3 {
			err := checkFor(t, r, disk, time.Minute)
			if want := fmt.Sprint(time.Duration(i+1) * (time.Minute - answerReserve)); !errors.Is(err, ErrChecking) ||
				!strings.Contains(err.Error(), want) {
				t.Errorf("call %d: %v, want ErrChecking after %s", i, err, want)
			}
		}
		if err := r.Wait(t.Context(), uuid.New()); err != nil {
			t.Errorf("another disk waits: %v", err)
		}
		close(end)
		if err := r.Wait(t.Context(), disk); err != nil {
			t.Errorf("the check has ended: %v", err)
		}
		if err := checkFor(t, r, disk, time.Minute); !errors.Is(err, ErrDamaged) || started != 1 {
			t.Errorf("the repetition: %v after %d checks, want ErrDamaged after 1", err, started)
		}
		if err := checkFor(t, r, disk, time.Minute); !errors.Is(err, ErrDamaged) || started != 2 {
			t.Errorf("the next call: %v after %d checks, want ErrDamaged after 2", err, started)
		}
	})
}

// The end of the process waits for a check, and not for one that hangs.
func TestFinishWaitsForChecks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, end := hangingRepairs(0)
		if err := checkFor(t, r, uuid.New(), time.Minute); !errors.Is(err, ErrChecking) {
			t.Fatalf("%v, want ErrChecking", err)
		}
		finished := make(chan struct{})
		go func() {
			defer close(finished)
			r.Finish()
		}()
		time.Sleep(time.Minute)
		select {
		case <-finished:
			t.Fatal("the check still runs")
		default:
		}
		close(end)
		<-finished

		r, end = hangingRepairs(0)
		if err := checkFor(t, r, uuid.New(), time.Minute); !errors.Is(err, ErrChecking) {
			t.Fatalf("%v, want ErrChecking", err)
		}
		began := time.Now()
		r.Finish()
		if waited := time.Since(began); waited > hungAfter {
			t.Errorf("waited %s for a check that hangs", waited)
		}
		close(end)
	})
}

// A failure without a later call is forgotten, because the disk may have been repaired meanwhile.
func TestOldFailureIsForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, end := hangingRepairs(e2fsckErrorsLeft)
		disk := uuid.New()
		if err := checkFor(t, r, disk, time.Minute); !errors.Is(err, ErrChecking) {
			t.Fatal(err)
		}
		close(end)
		time.Sleep(failureLife + time.Second)
		synctest.Wait()
		r.run = func(context.Context, string, ...string) (hostexec.Result, error) { return hostexec.Result{}, nil }
		if err := checkFor(t, r, disk, time.Minute); err != nil {
			t.Errorf("after %s: %v", failureLife, err)
		}
	})
}

// The panic of a check ends the RPC, not the process.
func TestPanicOfACheck(t *testing.T) {
	r := NewRepairs(slog.New(slog.DiscardHandler))
	r.run = func(context.Context, string, ...string) (hostexec.Result, error) { panic("a bug") }
	defer func() {
		if recover() == nil {
			t.Error("the panic did not reach the caller")
		}
	}()
	_ = checkFor(t, r, uuid.New(), time.Minute) // it panics
}

// A mounted ext4 is grown by one resize2fs. Only if that is refused, the filesystem is unmounted, checked, grown and
// mounted again. If the refusal is certain, it grows before it is mounted.
func TestGrowsMountedFirst(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name             string
		capable, refused bool
		want             []string
	}{
		{"the kernel agrees", true, false, []string{"resize2fs mounted"}},
		{"the kernel refuses", true, true, []string{"resize2fs mounted", "e2fsck -f -p", "resize2fs"}},
		{"the capability is missing", false, false, []string{"e2fsck -f -p", "resize2fs"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			dev, disk := newDisk(t, 320<<20)
			devicetest.Run(t, "mkfs.ext4", "-q", disk.Loop, "65536")
			target := t.TempDir()
			r, volumeID, ran := NewRepairs(slog.New(slog.DiscardHandler)), uuid.New(), []string(nil)
			r.growsMounted = tc.capable
			mounted := func() bool {
				table, err := ReadTable()
				if err != nil {
					t.Error(err)
				}
				entry, ok := table.At(target)
				return ok && entry.Number == dev.Number
			}
			r.run = func(ctx context.Context, name string, args ...string) (hostexec.Result, error) {
				line := strings.TrimSpace(strings.Join(append([]string{name}, args[:len(args)-1]...), " "))
				if !mounted() {
					ran = append(ran, line)
					return hostexec.Run(ctx, name, args...)
				}
				ran = append(ran, line+" mounted")
				if tc.refused {
					return hostexec.Result{ExitCode: 1, Stderr: "Permission denied to resize filesystem"}, nil
				}
				return hostexec.Result{}, nil
			}
			if err := r.Mount(t.Context(), dev, volumeID, target, "ext4", Options{}); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				if err := Unmount(context.Background(), target, dev.Number); err != nil {
					t.Error(err)
				}
			})
			if err := r.Grow(t.Context(), dev, volumeID, target, "ext4", Options{}); err != nil {
				t.Error(err)
			}
			if diff := cmp.Diff(tc.want, ran); diff != "" {
				t.Errorf("programs (-want +got):\n%s", diff)
			}
			if !mounted() {
				t.Error("the filesystem is not mounted")
			}
		})
	}
}

// A filesystem that cannot grow is mounted with its old size, whole and without a marker.
func TestKeepsTheSizeOfWhatCannotGrow(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name, fsType, options string
		// fails is the program that fails, and want are those that run.
		fails string
		want  []string
	}{
		{"bigalloc without the capability", "ext4", "bigalloc", "", nil},
		{"resize2fs fails", "ext4", "^metadata_csum", "resize2fs", []string{
			"e2fsck -f -p", "resize2fs", "e2fsck -f -y",
		}},
		{"xfs_growfs fails", "xfs", "", "xfs_growfs", []string{"xfs_growfs -d"}},
		{"btrfs fails", "btrfs", "", "btrfs", []string{"btrfs filesystem resize max"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			dev, disk := newDisk(t, 640<<20)
			switch tc.fsType {
			case "ext4":
				devicetest.Run(t, "mkfs.ext4", "-q", "-b", "4096", "-O", tc.options, disk.Loop, "81920")
			case "xfs":
				devicetest.Run(t, "mkfs.xfs", "-q", "-d", "size=320m", disk.Loop)
			case "btrfs":
				devicetest.Run(t, "mkfs.btrfs", "-q", "-b", "320m", disk.Loop)
			}
			r, volumeID, target, ran := NewRepairs(slog.New(slog.DiscardHandler)), uuid.New(), t.TempDir(), []string(nil)
			r.growsMounted = false
			r.run = func(ctx context.Context, name string, args ...string) (hostexec.Result, error) {
				ran = append(ran, strings.TrimSpace(strings.Join(append([]string{name}, args[:len(args)-1]...), " ")))
				if name == tc.fails {
					return hostexec.Result{ExitCode: 1, Stderr: "no room"}, nil
				}
				return hostexec.Run(ctx, name, args...)
			}
			if err := r.Mount(t.Context(), dev, volumeID, target, tc.fsType, Options{}); err != nil {
				t.Fatal(err)
			}
			err := r.Grow(t.Context(), dev, volumeID, target, tc.fsType, Options{})
			if !errors.Is(err, ErrGrow) {
				t.Errorf("%v, want ErrGrow", err)
			}
			if diff := cmp.Diff(tc.want, ran); diff != "" {
				t.Errorf("programs (-want +got):\n%s", diff)
			}
			writeFsynced(t, target, "file")
			unmountIdle(t, target, dev)
			if work, err := device.InterruptedWork(dev); err != nil || work != device.NoWork {
				t.Errorf("marker of %q, %v", work, err)
			}
		})
	}
}

// The usual mount of a clean ext4 with a journal starts no program but mount.
func TestCleanExtIsNotChecked(t *testing.T) {
	t.Parallel()
	dev, disk := newDisk(t, 320<<20)
	devicetest.Run(t, "mkfs.ext4", "-q", disk.Loop)
	r := NewRepairs(slog.New(slog.DiscardHandler))
	r.run = func(_ context.Context, name string, args ...string) (hostexec.Result, error) {
		t.Errorf("%s %q ran", name, args)
		return hostexec.Result{}, nil
	}
	target, volumeID := t.TempDir(), uuid.New()
	for range 2 { // blank, and used
		if err := r.Mount(t.Context(), dev, volumeID, target, "ext4", Options{}); err != nil {
			t.Fatal(err)
		}
		if err := r.Grow(t.Context(), dev, volumeID, target, "ext4", Options{}); err != nil {
			t.Error(err)
		}
		if err := errors.Join(
			Unmount(t.Context(), target, dev.Number), WaitIdle(t.Context(), dev)); err != nil {
			t.Fatal(err)
		}
	}
}

// The kernel takes the flags of the allow-list. One value stands for each pattern. The quotas of xfs are left out,
// which some kernels lack.
func TestKernelTakesAllowedFlags(t *testing.T) {
	t.Parallel()
	generic := "defaults,atime,noatime,norelatime,strictatime,nostrictatime,relatime,diratime,nodiratime,lazytime,nolazytime," +
		"suid,nosuid,dev,nodev,exec,noexec,async,sync,dirsync,iversion,noiversion,silent,loud,_netdev,rw"
	ext := "discard,nodiscard,acl,user_xattr,barrier,auto_da_alloc,block_validity,noblock_validity,init_itable," +
		"noinit_itable,grpid,bsdgroups,nogrpid,sysvgroups,bsddf,minixdf,commit=60,data=ordered,data=journal,errors=remount-ro," +
		"inode_readahead_blks=0,inode_readahead_blks=4096,journal_ioprio=3,max_batch_time=1000,min_batch_time=10," +
		"max_dir_size_kb=100000,stripe=16,stripe=7999,usrquota,grpquota,noquota"
	for fsType, flags := range map[string]string{
		"ext4": ext + ",delalloc,nodelalloc,dioread_lock,dioread_nolock,journal_checksum",
		"ext3": ext,
		"xfs": "discard,nodiscard,filestreams,ikeep,noikeep,inode32,inode64,largeio,nolargeio,noalign,wsync," +
			"grpid,nogrpid,allocsize=4k,allocsize=1m,allocsize=1g,logbufs=8,logbsize=16k,logbsize=256k",
		"btrfs": "acl,noacl,autodefrag,noautodefrag,barrier,datacow,datasum,flushoncommit,noflushoncommit,ssd,nossd," +
			"ssd_spread,nossd_spread,treelog,notreelog,user_subvol_rm_allowed,commit=60,compress,compress=zstd:3," +
			"compress-force=lzo,discard,discard=async,discard=sync,nodiscard,max_inline=3999,max_inline=4k,metadata_ratio=4,space_cache=v2,thread_pool=4",
	} {
		t.Run(fsType, func(t *testing.T) {
			t.Parallel()
			dev, disk := newDisk(t, 320<<20)
			devicetest.Run(t, "mkfs."+fsType, "-q", disk.Loop)
			target := t.TempDir()
			for _, flag := range filesystem.SplitMountFlags([]string{generic, flags}) {
				if err := Filesystem(t.Context(), dev, target, fsType, Options{Flags: []string{flag}}); err != nil {
					t.Errorf("%s: %v", flag, err)
					continue
				}
				if err := errors.Join(
					Unmount(t.Context(), target, dev.Number), WaitIdle(t.Context(), dev)); err != nil {
					t.Fatal(err)
				}
			}
		})
	}
}

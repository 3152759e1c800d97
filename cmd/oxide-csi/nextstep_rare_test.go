// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/oxidecomputer/oxide.go/oxide"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/core/fault"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
	"github.com/oxidecomputer/oxide-csi-plugin/core/volumelock"
	"github.com/oxidecomputer/oxide-csi-plugin/core/volumerecord"
	"github.com/oxidecomputer/oxide-csi-plugin/test/iohang"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// troublesOfExpansions are faults of an expansion that does not go straight on.
func troublesOfExpansions() []trouble {
	quota := func(t *testing.T, h *host, gib int64) {
		bytes := gib << 30
		must(t, h.sim.Set(t.Context(), simtest.Settings{QuotaBytes: &bytes}))
	}
	moreQuota := func(t *testing.T, h *host) { quota(t, h, 9) }
	// interrupted leaves an expansion to 2GiB undone: the rack fails in a call.
	interrupted := func(t *testing.T, h *host, operation string) (id string) {
		t.Helper()
		id = h.ok(t, "volume", "create", "data", "--size=1GiB")
		_, err := h.sim.Inject(t.Context(), simtest.Fault{
			Operation: operation, Kind: simtest.FaultStatus, Status: 503, ErrorCode: "ServiceNotAvailable", Message: "x",
			Count: new(0),
		})
		must(t, err)
		h.fails(t, 3, "volume", "expand", "data", "--size=2GiB")
		must(t, h.sim.ClearFaults(t.Context()))
		return id
	}
	attachToA := func(id string) []string { return []string{"volume", "attach", id, "--node=node-a"} }
	return []trouble{
		{row: fault.ExpansionNeedsRoom, says: []string{"more quota"}, step: moreQuota,
			meets: func(t *testing.T, h *host) []string {
				h.ok(t, "volume", "create", "data", "--size=1GiB")
				quota(t, h, 1)
				return []string{"volume", "expand", "data", "--size=2GiB"}
			}},
		{row: fault.OnlySnapshot, says: []string{"for quota"}, step: moreQuota,
			meets: func(t *testing.T, h *host) []string {
				id := interrupted(t, h, "disk_create")
				quota(t, h, 1)
				return attachToA(id)
			}},
		{row: fault.VolumeBeingReplaced, says: []string{"volume expand again, or attach"},
			meets: func(t *testing.T, h *host) []string {
				return []string{"volume", "show", interrupted(t, h, "disk_create")}
			},
			step: func(t *testing.T, h *host) { h.ok(t, "volume", "expand", "data", "--size=2GiB") }},
		{row: fault.ExpansionUnderWay, says: []string{"repeat the command"},
			meets: func(t *testing.T, h *host) []string {
				interrupted(t, h, "snapshot_create")
				return []string{"volume", "expand", "data", "--size=3GiB"}
			}},
		{row: fault.NameTaken, says: []string{"delete that disk"},
			meets: func(t *testing.T, h *host) []string {
				id := interrupted(t, h, "disk_create")
				rack, err := h.sim.Client()
				must(t, err)
				disk, err := rack.DiskCreate(t.Context(), oxide.DiskCreateParams{
					Project: oxide.NameOrId(h.sim.Project), Body: &oxide.DiskCreate{
						Name: oxide.Name(diskname.ForVolume(simtest.ClusterID, "data")), Size: 1 << 30,
						DiskBackend: oxide.DiskBackend{Value: oxide.DiskBackendDistributed{
							DiskSource: oxide.DiskSource{Value: oxide.DiskSourceBlank{BlockSize: 4096}},
						}},
					},
				})
				must(t, err)
				h.release = func() {
					must(t, rack.DiskDelete(t.Context(), oxide.DiskDeleteParams{Disk: oxide.NameOrId(disk.Id)}))
				}
				return attachToA(id)
			},
			step: func(_ *testing.T, h *host) { h.release() }},
		{row: fault.VolumeDeleted, says: []string{"was deleted"}, instead: []string{"volume", "list"},
			meets: func(t *testing.T, h *host) []string {
				id := h.ok(t, "volume", "create", "data", "--size=1GiB")
				rack, err := h.sim.Client()
				must(t, err)
				go func() {
					for calls := (simtest.Calls{}); calls.Counts["anti_affinity_group_create"] == 0 && t.Context().Err() == nil; {
						time.Sleep(10 * time.Millisecond)
						calls, _ = h.sim.Calls(t.Context()) // the expansion then waits for others before it looks at the disk
					}
					_ = rack.DiskDelete(t.Context(), oxide.DiskDeleteParams{Disk: oxide.NameOrId(id)}) // else the test fails
				}()
				return []string{"volume", "expand", "data", "--size=2GiB"}
			}},
		{row: fault.DiskBusy, says: []string{"repeat the command"},
			meets: func(t *testing.T, h *host) []string {
				id := h.ok(t, "volume", "create", "data", "--size=1GiB")
				must(t, h.sim.Show(t.Context(), id, map[string]any{"state": map[string]any{"state": "creating"}}))
				h.release = func() { must(t, h.sim.Show(t.Context(), id, map[string]any{})) }
				return append(attachToA(id), "--timeout=4s")
			},
			step: func(_ *testing.T, h *host) { h.release() }},
	}
}

// troublesOfHosts are faults of a node's host: of its programs, its kernel, its folders and its disks.
func troublesOfHosts() []trouble {
	released := func(_ *testing.T, h *host) { h.release() }
	target := func(h *host) string { return filepath.Join(h.dir, "data") }
	state := func(h *host) string { return filepath.Join(h.dir, "node", "state") }
	// script replaces a program of the host, while the file "mended" is missing.
	script := func(t *testing.T, h *host, path, broken string) {
		t.Helper()
		own := filepath.Join(h.dir, filepath.Base(path)+".real")
		runHost(t, "cp", path, own)
		mended := filepath.Join(h.dir, "mended")
		h.replaceProgram(t, path, fmt.Sprintf("if ! [ -e %s ]; then %s; fi\nexec %s \"$@\"", mended, broken, own))
		h.release = func() { must(t, os.WriteFile(mended, nil, 0o600)) }
	}
	mountEncrypted := func(t *testing.T, h *host) []string {
		return append(encrypted()(t, h), "--passphrase-file="+filepath.Join(h.dir, "key"))
	}
	diskOf := func(t *testing.T, h *host) string {
		return h.device(t, h.ok(t, "volume", "create", "data", "--size=1GiB")) // again, for its ID
	}
	// usedBefore returns the command that mounts a volume that was mounted before.
	usedBefore := func(t *testing.T, h *host) []string {
		t.Helper()
		command := mounting()(t, h)
		h.ok(t, command...)
		h.ok(t, "volume", "unmount", "data", target(h))
		return command
	}
	// locked locks a volume as an earlier process of the plugin does.
	locked := func(t *testing.T, h *host, volume string) context.Context {
		t.Helper()
		ctx, release, err := volumelock.Acquire(t.Context(), state(h), uuid.MustParse(volume), 0)
		must(t, err)
		h.release = release
		return ctx
	}
	return []trouble{
		{row: fault.ProgramMissing, root: true, says: []string{"install the Debian package xfsprogs"},
			meets: func(t *testing.T, h *host) []string {
				script(t, h, "/usr/sbin/mkfs.xfs", "true")
				program := filepath.Join(h.dir, "mkfs.xfs")
				must(t, os.Chmod(program, 0o600))
				h.release = func() { must(t, os.Chmod(program, 0o700)) } //nolint:gosec // a program can be executed
				return mounting("--fs-type=xfs")(t, h)
			},
			step: released},
		{row: fault.StateFolderUnusable, root: true, says: []string{"/state/volumes"},
			meets: func(t *testing.T, h *host) []string {
				volumes := filepath.Join(h.folder(t, "node/state"), "volumes")
				must(t, os.RemoveAll(volumes))
				must(t, os.WriteFile(volumes, nil, 0o600))
				h.release = func() { must(t, os.Remove(volumes)) }
				return mounting()(t, h)
			},
			step: released},
		{row: fault.KernelTooOld, root: true, says: []string{"bigtime", "Linux 5.10"},
			meets: func(t *testing.T, h *host) []string {
				old := filepath.Join(h.dir, "oxide-csi")
				must(t, os.WriteFile(old, []byte("#!/bin/sh\nexec setarch --uname-2.6 "+programs.Plugin+" \"$@\"\n"), 0o700))
				h.restartNode(t, old)
				return mounting("--fs-type=xfs", "--volume-context=mkfsOptions=-m bigtime=1")(t, h)
			},
			step: func(t *testing.T, h *host) { h.restartNode(t, programs.Plugin) }},
		{row: fault.EncryptionUnavailable, root: true, beyond: true, says: []string{"load the kernel modules dm_mod and"},
			meets: func(t *testing.T, h *host) []string {
				script(
					t,
					h,
					"/usr/sbin/cryptsetup",
					`case "$*" in "open "*) echo "Cannot initialize device-mapper. Is dm_mod kernel module loaded?" >&2; exit 1;; esac`,
				)
				return mountEncrypted(t, h)
			},
			step: func(t *testing.T, h *host) { // this kernel may have no device-mapper either
				must(t, os.WriteFile(filepath.Join(h.dir, "cryptsetup"), []byte("#!/bin/sh\nexit 0\n"), 0o600))
			}},
		{row: fault.CryptsetupFailed, root: true, beyond: true, says: []string{"Device is full of holes"},
			meets: func(t *testing.T, h *host) []string {
				script(t, h, "/usr/sbin/cryptsetup",
					`case "$*" in "luksFormat "*) echo "Device is full of holes." >&2; exit 1;; esac`)
				return mountEncrypted(t, h)
			},
			step: func(t *testing.T, h *host) { // and what this kernel cannot do is another fault
				own := filepath.Join(h.dir, "cryptsetup.real")
				must(t, os.WriteFile(filepath.Join(h.dir, "cryptsetup"), []byte("#!/bin/sh\n"+
					`case "$*" in "open "*) echo "Cannot initialize device-mapper" >&2; exit 1;; esac`+
					"\nexec "+own+" \"$@\"\n"), 0o600))
			}},
		{row: fault.KeyDerivationBusy, root: true, beyond: true, says: []string{"repeat the command"}, step: released,
			meets: func(t *testing.T, h *host) []string {
				command := append(mountEncrypted(t, h), "--timeout=5s")
				h.run(t, command...) // makes the header: that waits longer than the command
				_, err := volumelock.AcquireNode(locked(t, h, uuid.NewString()), 0)
				must(t, err)
				return command
			}},
		{row: fault.ProgramRunning, root: true, says: []string{"repeat the command"}, step: released,
			meets: func(t *testing.T, h *host) []string {
				command := append(mounting()(t, h), "--timeout=4s")
				locked(t, h, h.ok(t, "volume", "create", "data", "--size=1GiB"))
				return command
			}},
		{row: fault.FilesystemChecked, root: true, says: []string{"try again"}, step: released,
			meets: func(t *testing.T, h *host) []string {
				script(t, h, "/usr/sbin/e2fsck", "while ! [ -e "+filepath.Join(h.dir, "mended")+" ]; do sleep 0.1; done")
				command := append(usedBefore(t, h), "--timeout=5s")
				runHost(t, "debugfs", "-w", "-R", "set_super_value state 2", diskOf(t, h)) // it has errors
				return command
			}},
		{row: fault.FilesystemUnclean, root: true, says: []string{"run e2fsck -f "},
			meets: func(t *testing.T, h *host) []string {
				command := usedBefore(t, h)
				runHost(t, "debugfs", "-w", "-R", "clri <2>", diskOf(t, h))
				return command
			},
			step: func(t *testing.T, h *host) {
				if exit := (&exec.ExitError{}); !errors.As(exec.Command("e2fsck", "-f", "-y", diskOf(t, h)).Run(), &exit) ||
					exit.ExitCode() != 1 { // errors were corrected
					t.Errorf("e2fsck: %v", exit)
				}
			}},
		{
			row:  fault.RecordUnreadable,
			root: true,
			says: []string{"/state/volumes/", "which is in use: end that use"},
			step: released,
			meets: func(t *testing.T, h *host) []string {
				h.ok(t, mounting()(t, h)...)
				id := h.ok(t, "volume", "create", "data", "--size=1GiB")
				must(t, unix.Unmount(target(h), 0))
				must(t, unix.Unmount(filepath.Join(h.dir, "staging", id), 0))
				must(t, os.WriteFile(volumerecord.Store{StateDir: state(h)}.Path(uuid.MustParse(id)), []byte("{"), 0o600))
				used, err := os.OpenFile(h.device(t, id), os.O_RDONLY|os.O_EXCL, 0)
				must(t, err)
				h.release = func() { must(t, used.Close()) }
				return []string{"volume", "unmount", "data", target(h)}
			},
		},
		{row: fault.DeviceUnreadable, root: true, says: []string{"input/output error"}, step: released,
			meets: func(t *testing.T, h *host) []string {
				command := mounting()(t, h)
				below := filepath.Join(h.dir, "state", "disks", h.ok(t, "volume", "create", "data", "--size=1GiB")+".disk")
				info, err := os.Stat(below)
				must(t, err)
				must(t, os.Truncate(below, 0))
				h.release = func() { must(t, os.Truncate(below, info.Size())) }
				return command
			}},
		{row: fault.DiskNotResponding, root: true, waits: true, says: []string{"read the kernel's log"}, step: released,
			meets: func(t *testing.T, h *host) []string {
				command := mounting()(t, h)
				var stat unix.Stat_t
				must(t, unix.Stat(diskOf(t, h), &stat))
				h.release = iohang.Start(t, h.node.PID(), unix.Major(stat.Rdev), unix.Minor(stat.Rdev))
				return command
			}},
	}
}

// restartNode starts the node again, by another program.
func (h *host) restartNode(t *testing.T, program string) {
	t.Helper()
	select {
	case <-h.node.Done():
	default:
		must(t, h.node.Stop())
	}
	node, err := simtest.StartPlugin(program, simtest.PluginOptions{
		Mode: "node", Dir: h.folder(t, "node"), Sim: h.sim, Instance: h.sim.Instances[0],
	})
	must(t, err)
	h.node = node
	t.Cleanup(func() {
		if h.node == node {
			must(t, node.Stop())
		}
	})
}

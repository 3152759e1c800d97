// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main_test

import (
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/uuid"
	"github.com/oxidecomputer/oxide.go/oxide"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/admin/client"
	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
	"github.com/oxidecomputer/oxide-csi-plugin/core/fault"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
	"github.com/oxidecomputer/oxide-csi-plugin/core/record"
	"github.com/oxidecomputer/oxide-csi-plugin/test/await"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// exitTable is the table of exit codes in docs/reference/cli.md. An error without a word has the exit code of its gRPC
// code.
func exitTable() string {
	words, plain := map[int][]string{}, map[int][]string{}
	for _, row := range fault.Table {
		if row.Code != codes.OK {
			code := client.ExitOfRow(row)
			words[code] = append(words[code], "`"+row.Word+"`")
		}
	}
	for code := codes.Canceled; code <= codes.Unauthenticated; code++ {
		exit := client.ExitCode(&client.Error{Code: code})
		plain[exit] = append(plain[exit], "`"+code.String()+"`")
	}
	table := "| code | it means | words | CSI's codes, without a word |\n|---|---|---|---|\n"
	for _, exit := range client.ExitMeanings {
		slices.Sort(words[exit.Code])
		table += fmt.Sprintf("| %d | %s | %s | %s |\n", exit.Code, exit.Means,
			strings.Join(words[exit.Code], ", "), strings.Join(plain[exit.Code], ", "))
	}
	return table
}

// Each exit code, except 1 to 8, which are in TestVolumeExitCodes.
func TestExitCodesOfWaiting(t *testing.T) {
	t.Parallel()
	h := newHost(t, false)
	if got := h.run(t, "volume", "list"); got.code != 0 {
		t.Errorf("%+v", got)
	}
	for _, signal := range []os.Signal{os.Interrupt, os.Kill} {
		cmd, stderr := h.begin(t, "volume", "attach", "data", "--node=node-a", "--wait",
			"--endpoint="+h.dir+"/none", "--controller-endpoint="+h.dir+"/none")
		await.Eventually(t, "the command waits", func() bool { return strings.Contains(stderr.String(), "waiting: ") })
		must(t, cmd.Process.Signal(signal))
		_ = cmd.Wait() // the exit code tells
		code, says := 130, "interrupted between two attempts: what the plugin has begun goes on"
		if signal == os.Kill {
			code, says = -1, ""
		}
		if cmd.ProcessState.ExitCode() != code || !strings.Contains(stderr.String(), says) {
			t.Errorf("%s: exit code %d: %s", signal, cmd.ProcessState.ExitCode(), stderr)
		}
	}
	var known []int
	for _, exit := range client.ExitMeanings {
		known = append(known, exit.Code)
	}
	if want := []int{0, 1, 2, 3, 4, 5, 6, 7, 8, 130}; !slices.Equal(known, want) {
		t.Errorf("the exit codes are %v, and %v are tested", known, want)
	}
}

// Ctrl-C while the node makes a filesystem: mkfs goes on, so the command waits for its end, and leaves nothing mounted.
// If mkfs takes long, the command says so. A second Ctrl-C ends the command at once. Each time a repeated command
// mounts the volume.
func TestInterruptedMount(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		code        int
		says        string
		twice, long bool
	}{
		"once": {code: 130, says: "a repeated command finds it\n"}, "twice": {code: -1, twice: true},
		"long": {code: 130, says: "a repeated command finds it; the volume may stay staged: ", long: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := newHostWithGuest(t, false)
			mkfs, begun, ends := filepath.Join(h.dir, "mke2fs.real"), filepath.Join(h.dir, "begun"), filepath.Join(h.dir, "ends")
			runHost(t, "cp", "/usr/sbin/mkfs.ext4", mkfs)
			h.replaceProgram(t, "/usr/sbin/mkfs.ext4", fmt.Sprintf(
				`touch %s; while ! [ -e %s ]; do sleep 0.1; done; exec %s -t ext4 "$@"`, begun, ends, mkfs))
			end := func() { must(t, os.WriteFile(ends, nil, 0o600)) }
			t.Cleanup(end)
			table := fmt.Sprintf("/proc/%d/mountinfo", h.node.PID())
			mounted := func() bool {
				text, err := os.ReadFile(table)
				must(t, err)
				return strings.Contains(string(text), h.dir+"/data ") || strings.Contains(string(text), h.dir+"/staging/")
			}
			mount := mounting()(t, h)
			cmd, stderr := h.begin(t, mount...)
			await.Eventually(t, "mkfs has begun", func() bool { return exists(t, begun) })
			must(t, cmd.Process.Signal(os.Interrupt))
			ended := make(chan struct{})
			go func() { defer close(ended); _ = cmd.Wait() }() // the exit code tells
			select {
			case <-ended:
				t.Errorf("the command has ended while mkfs goes on: %s", stderr)
			case <-time.After(time.Second):
			}
			if test.twice {
				must(t, cmd.Process.Signal(os.Interrupt))
			}
			if test.twice || test.long {
				<-ended
			}
			end()
			<-ended
			if code := cmd.ProcessState.ExitCode(); code != test.code || !strings.Contains(stderr.String(), test.says) {
				t.Errorf("exit code %d, want %d: %s", code, test.code, stderr)
			}
			if name == "once" && mounted() {
				t.Error("the command has left a mount")
			}
			h.ok(t, mount...)
			if !mounted() {
				t.Error("the repeated command has mounted nothing")
			}
			h.ok(t, "volume", "unmount", "data", filepath.Join(h.dir, "data"))
			h.ok(t, "volume", "detach", "data")
		})
	}
}

// recordOfData is the name of the record of an expansion of the volume "data".
var recordOfData = record.Intents.Named("", diskname.ForWork(diskname.ForVolume(simtest.ClusterID, "data")))

// stepsNotFollowed are the faults that no command meets.
var stepsNotFollowed = map[*fault.Row]string{
	fault.GrowFailed: "only NodeExpandVolume answers it, which no command calls: a mount succeeds with the old size",
}

// trouble makes the state of a fault on a host.
type trouble struct {
	row *fault.Row
	// args are the flags of the controller; root needs a guest; cold is a rack without hot-plug.
	args       []string
	root, cold bool
	// meets makes the state, and returns the command that meets the fault. step is the next step, in the words of the
	// message, after which the command succeeds. It runs while the command waits if waits.
	meets func(t *testing.T, h *host) []string
	says  []string
	step  func(t *testing.T, h *host)
	waits bool
	// beyond says that the simulated guest lets the command go only beyond the fault: it shows no mapping of a disk.
	beyond bool
	// instead is the command that succeeds afterwards, if it is not the same.
	instead []string
}

// troubles are the faults that a person can end at the command line of a plain host.
func troubles() []trouble {
	created := func(t *testing.T, h *host) { h.ok(t, "volume", "create", "data", "--size=1GiB") }
	attachToA := []string{"volume", "attach", "data", "--node=node-a"}
	token := func(h *host) string { return filepath.Join(h.dir, "controller", "token") }
	stop := func(t *testing.T, h *host) {
		must(t, h.sim.SetRunState(t.Context(), h.sim.Instance("node-a").ID, "stopped"))
	}
	failing := func(status int) func(*testing.T, *host) []string {
		return func(t *testing.T, h *host) []string {
			t.Helper()
			created(t, h)
			_, err := h.sim.Inject(t.Context(), simtest.Fault{
				Operation: "disk_list",
				Kind:      simtest.FaultStatus,
				Status:    status,
				ErrorCode: "Internal",
				Message:   "x",
				Count:     new(0),
			})
			must(t, err)
			return []string{"volume", "list"}
		}
	}
	repaired := func(t *testing.T, h *host) { must(t, h.sim.ClearFaults(t.Context())) }
	writes := func(role string) func(*testing.T, *host) {
		return func(t *testing.T, h *host) {
			t.Helper()
			made, err := h.sim.NewToken(t.Context(), role)
			must(t, err)
			must(t, os.WriteFile(token(h), []byte(made), 0o600))
		}
	}
	return []trouble{
		{row: fault.TokenRejected, says: []string{"OXIDE_TOKEN_FILE"}, step: writes("limited-collaborator"),
			meets: func(t *testing.T, h *host) []string {
				must(t, h.sim.RevokeToken(t.Context(), h.sim.Token))
				return []string{"volume", "create", "data", "--size=1GiB"}
			}},
		{
			row:  fault.RoleTooLow,
			says: []string{"OXIDE_TOKEN_FILE", "limited-collaborator"},
			step: writes("limited-collaborator"),
			meets: func(t *testing.T, h *host) []string {
				writes("viewer")(t, h)
				return []string{"volume", "create", "data", "--size=1GiB"}
			},
		},
		{row: fault.ProjectUnusable, says: []string{"OXIDE_PROJECT"}, args: []string{"--oxide-project=nope"},
			meets: func(*testing.T, *host) []string { return []string{"volume", "create", "data", "--size=1GiB"} },
			step:  func(t *testing.T, h *host) { h.restartController(t, simtest.PluginOptions{}) }},
		{
			row:  fault.VolumeDiffers,
			says: []string{"was made with 1GiB, not 2GiB", "ask for what it was made with", "volume expand"},
			meets: func(t *testing.T, h *host) []string {
				created(t, h)
				return []string{"volume", "create", "data", "--size=2GiB"}
			},
			instead: []string{"volume", "expand", "data", "--size=2GiB"},
		},
		{row: fault.QuotaExhausted, says: []string{"more quota"},
			meets: func(t *testing.T, h *host) []string {
				quota := int64(2 << 30)
				must(t, h.sim.Set(t.Context(), simtest.Settings{QuotaBytes: &quota}))
				return []string{"volume", "create", "data", "--size=2GiB"}
			},
			step: func(t *testing.T, h *host) {
				quota := int64(9 << 30)
				must(t, h.sim.Set(t.Context(), simtest.Settings{QuotaBytes: &quota}))
			}},
		{row: fault.SizeUnsupported, says: []string{"docs/reference/limits.md"},
			meets:   func(*testing.T, *host) []string { return []string{"volume", "create", "data", "--size=2TiB"} },
			instead: []string{"volume", "create", "data", "--size=1GiB"}},
		{row: fault.NotFound, says: []string{"volume list --all"},
			meets:   func(*testing.T, *host) []string { return []string{"volume", "show", instanceID} },
			instead: []string{"volume", "list", "--all"}},
		{row: fault.RackUnknown, says: []string{"serves rack=default", "choose one of the racks"},
			meets: func(*testing.T, *host) []string {
				return []string{"volume", "create", "data", "--size=1GiB", "--rack=west"}
			}, instead: []string{"volume", "create", "data", "--size=1GiB", "--rack=default"}},
		{row: fault.RackUnavailable, says: []string{"doctor"}, meets: failing(503), step: repaired, waits: true},
		{row: fault.RackFailed, says: []string{"doctor"}, meets: failing(500), step: repaired, waits: true},
		{row: fault.RackHasNoHotplug, says: []string{"--wait", "--node"}, cold: true, step: stop, waits: true,
			meets: func(t *testing.T, h *host) []string { created(t, h); return attachToA }},
		{row: fault.RestartPlanned, says: []string{"--wait", "every 10 minutes"}, cold: true, waits: true,
			args:  []string{"--attach-mode=restart", "--restart-shutdown=hard", "--metadata=none", "--restart-cool-down=0s"},
			meets: func(t *testing.T, h *host) []string { created(t, h); return attachToA }},
		{row: fault.InstanceFull, says: []string{"another instance", "volume list", "racks from release 18 on take 12"},
			args: []string{"--max-disks=2"},
			meets: func(t *testing.T, h *host) []string {
				h.ok(t, "volume", "create", "first", "--size=1GiB")
				h.ok(t, "volume", "attach", "first", "--node=node-a")
				created(t, h)
				return attachToA
			},
			step: func(t *testing.T, h *host) { h.ok(t, "volume", "detach", "first", "--node=node-a", "--unmounted") }},
		{row: fault.AttachedElsewhere, says: []string{"volume show", "volume detach"}, waits: true,
			meets: func(t *testing.T, h *host) []string {
				created(t, h)
				h.ok(t, "volume", "attach", "data", "--node=node-b")
				return attachToA
			},
			step: func(t *testing.T, h *host) { h.ok(t, "volume", "detach", "data", "--node=node-b", "--unmounted") }},
		{row: fault.ExpansionWaits, says: []string{"detach the volume"}, waits: true,
			meets: func(t *testing.T, h *host) []string {
				created(t, h)
				h.ok(t, attachToA...)
				return []string{"volume", "expand", "data", "--size=2GiB"}
			},
			step: func(t *testing.T, h *host) { h.ok(t, "volume", "detach", "data", "--node=node-a", "--unmounted") }},
		{row: fault.NoRecord, says: []string{"is no record of this plugin: delete it", record.Intents.Named("", "")},
			meets: func(t *testing.T, h *host) []string {
				h.ok(t, "volume", "create", "data", "--size=1GiB")
				rack, err := h.sim.Client()
				must(t, err)
				_, err = rack.AntiAffinityGroupCreate(t.Context(), oxide.AntiAffinityGroupCreateParams{
					Project: oxide.NameOrId(h.sim.Project),
					Body: &oxide.AntiAffinityGroupCreate{
						Name:          oxide.Name(recordOfData),
						Description:   "made by hand",
						Policy:        oxide.AffinityPolicyAllow,
						FailureDomain: oxide.FailureDomainSled,
					},
				})
				must(t, err)
				return []string{"volume", "expand", "data", "--size=2GiB"}
			},
			step: func(t *testing.T, h *host) {
				rack, err := h.sim.Client()
				must(t, err)
				must(t, rack.AntiAffinityGroupDelete(t.Context(), oxide.AntiAffinityGroupDeleteParams{
					Project:           oxide.NameOrId(h.sim.Project),
					AntiAffinityGroup: oxide.NameOrId(recordOfData),
				}))
			}},
		{row: fault.DetachDeferred, says: []string{"--detach-grace"}, args: []string{"--detach-grace=20s"}, waits: true,
			meets: unpublished},
		{row: fault.DetachUntimed, says: []string{"volume detach", "stop that instance"}, cold: true, step: stop, waits: true,
			args: []string{"--attach-mode=restart", "--restart-shutdown=hard", "--metadata=none"},
			meets: func(t *testing.T, h *host) []string {
				created(t, h)
				stop(t, h)
				h.ok(t, attachToA...)
				must(t, h.sim.SetRunState(t.Context(), h.sim.Instance("node-a").ID, "running"))
				h.ok(t, "volume", "detach", "data", "--node=node-a", "--unmounted")
				return []string{"volume", "delete", "data"}
			}},
		{row: fault.FilesystemUnsupported, root: true,
			meets:   mounting("--fs-type=zfs"),
			says:    []string{"ext4"},
			instead: []string{"volume", "mount", "data", "DIR/data", "--fs-type=ext4"}},
		{row: fault.AccessModeUnsupported, root: true, says: []string{"SINGLE_NODE_"},
			meets:   mounting("--access-mode=MULTI_NODE_MULTI_WRITER"),
			instead: []string{"volume", "mount", "data", "DIR/data"}},
		{row: fault.OptionNotAllowed, root: true, says: []string{"docs/reference/mount-flags.md"},
			meets:   mounting("--option=norecovery"),
			instead: []string{"volume", "mount", "data", "DIR/data", "--option=noatime"}},
		{row: fault.PathOccupied, root: true, says: []string{"move its content away"},
			meets: func(t *testing.T, h *host) []string {
				command := mounting()(t, h)
				must(t, os.WriteFile(filepath.Join(h.folder(t, "data"), "file"), nil, 0o600))
				return command
			},
			step: func(t *testing.T, h *host) { must(t, os.Remove(filepath.Join(h.dir, "data", "file"))) }},
		{row: fault.DiskNotBlank, root: true, says: []string{"ask the owner"},
			meets: func(t *testing.T, h *host) []string {
				h.ok(t, append(mounting()(t, h), "--block")...)
				must(t, os.WriteFile(filepath.Join(h.dir, "data"), []byte(strings.Repeat("mine", 2048)), 0))
				h.ok(t, "volume", "unmount", "data", filepath.Join(h.dir, "data"))
				return []string{"volume", "mount", "data", filepath.Join(h.dir, "data")}
			},
			step: func(t *testing.T, h *host) { // the owner needs nothing of it
				h.ok(t, "volume", "detach", "data")
				h.ok(t, "volume", "delete", "data")
				mounting()(t, h)
			}},
		{row: fault.MountInUse, root: true, says: []string{"end the process"},
			meets: func(t *testing.T, h *host) []string {
				h.ok(t, mounting()(t, h)...)
				held, err := os.Open(filepath.Join(h.dir, "data"))
				must(t, err)
				h.release = func() { must(t, held.Close()) }
				return []string{"volume", "unmount", "data", filepath.Join(h.dir, "data")}
			},
			step: func(_ *testing.T, h *host) { h.release() }},
		{row: fault.SerialCollision, says: []string{"to another instance", "detach nothing that is mounted"},
			meets: func(t *testing.T, h *host) []string {
				id := h.ok(t, "volume", "create", "data", "--size=1GiB")
				rack, err := h.sim.Client()
				must(t, err)
				disk, err := rack.DiskView(t.Context(), oxide.DiskViewParams{Disk: oxide.NameOrId(id)})
				must(t, err)
				twin, err := rack.DiskCreate(t.Context(), oxide.DiskCreateParams{
					Project: oxide.NameOrId(h.sim.Project), Body: &oxide.DiskCreate{
						Name: disk.Name + "-twin", Size: 1 << 30,
						DiskBackend: oxide.DiskBackend{Value: oxide.DiskBackendDistributed{
							DiskSource: oxide.DiskSource{Value: oxide.DiskSourceBlank{BlockSize: 4096}},
						}},
					},
				})
				must(t, err)
				_, err = rack.InstanceDiskAttach(t.Context(), oxide.InstanceDiskAttachParams{
					Instance: oxide.NameOrId(h.sim.Instance("node-a").ID), Body: &oxide.DiskPath{Disk: oxide.NameOrId(twin.Id)},
				})
				must(t, err)
				return attachToA
			}, instead: []string{"volume", "attach", "data", "--node=node-b"}},
		{row: fault.IdentityInvalid, says: []string{"this is no Oxide instance", "choose another source by --metadata"},
			meets: func(t *testing.T, h *host) []string {
				sys := instanceSys(t, h.sim.Instance("node-a").ID)
				vendor := filepath.Join(sys, "class/dmi/id/sys_vendor")
				must(t, os.Chmod(vendor, 0o600))
				must(t, os.WriteFile(vendor, []byte("QEMU\n"), 0o600))
				h.findsItself(t, sys, "", func() { must(t, os.WriteFile(vendor, []byte("Oxide\n"), 0o600)) })
				created(t, h)
				return []string{"volume", "attach", "data"}
			},
			step: func(_ *testing.T, h *host) { h.release() }},
		{row: fault.IdentityConflict, says: []string{"sources contradict each other", "find out which is right"},
			meets: func(t *testing.T, h *host) []string {
				var says atomic.Value
				says.Store(h.sim.Instance("node-b").ID)
				agent := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
					fmt.Fprintf(w, `{"Meta": {"oxide.instance_id": %q, "oxide.rack": "default"}}`, says.Load())
				}))
				t.Cleanup(agent.Close)
				node := h.sim.Instance("node-a").ID
				h.findsItself(t, instanceSys(t, node), agent.URL, func() { says.Store(node) })
				created(t, h)
				return []string{"volume", "attach", "data"}
			},
			step: func(_ *testing.T, h *host) { h.release() }},
		{row: fault.MountFailed, root: true, says: []string{"correct the mount flags"},
			meets:   mounting("--fs-type=xfs", "--option=sunit=16", "--option=swidth=24"),
			instead: []string{"volume", "mount", "data", "DIR/data", "--fs-type=xfs", "--option=logbsize=64k"}},
		{row: fault.FormatFailed, root: true, says: []string{"Invalid filesystem option set: orphan_file", "choose others"},
			meets: func(t *testing.T, h *host) []string {
				mkfs := filepath.Join(h.dir, "mke2fs.real")
				runHost(t, "cp", "/usr/sbin/mkfs.ext4", mkfs)
				h.replaceProgram(t, "/usr/sbin/mkfs.ext4", `case "$*" in *orphan_file*) # mke2fs 1.46 does not know it
					echo "Invalid filesystem option set: orphan_file" >&2; exit 1;; esac
				exec `+mkfs+` -t ext4 "$@"`)
				return mounting("--volume-context=mkfsOptions=-O orphan_file")(t, h)
			},
			instead: []string{"volume", "mount", "data", "DIR/data", "--volume-context=mkfsOptions=-O dir_index"}},
		{row: fault.MappingInUse, root: true, waits: true, says: []string{"is in use by process", "end the process"},
			meets: mapped,
			step:  func(_ *testing.T, h *host) { h.release() }},
		{row: fault.DeviceNotFound, root: true, says: []string{"shut the guest down and start its instance"},
			meets: func(t *testing.T, h *host) []string {
				must(t, h.node.Stop())
				h.node = startPlugin(t, simtest.PluginOptions{
					Mode: "node", Dir: h.folder(t, "node"), Sim: h.sim, Instance: h.sim.Instances[0],
					Args: []string{"--device-timeout=1s"},
				})
				must(t, h.sim.Set(t.Context(), simtest.Settings{Hotplug: "attach-first", PlugFails: new(1)}))
				return mounting()(t, h)
			},
			step: func(t *testing.T, h *host) {
				node, guest := h.sim.Instance("node-a").ID, h.sim.Instances[0].Guest
				got := runPlugin(t, append(append(h.rackEnv(t), h.environ...),
					"OXIDE_INSTANCE_ID="+node, "OXIDE_CSI_METADATA=static",
					"OXIDE_CSI_DEV_ROOT="+guest+"/dev", "OXIDE_CSI_SYS_ROOT="+guest+"/sys"), "explain", "data")
				if !strings.HasPrefix(got.stdout, "DeviceNotFound: ") ||
					!strings.Contains(got.stdout, fault.DeviceNotFound.OnHosts) {
					t.Errorf("explain: %+v", got)
				}
				must(t, h.sim.Halt(t.Context(), node))
				must(t, h.sim.SetRunState(t.Context(), node, "running"))
			}},
		{row: fault.DeviceMismatch, root: true, says: []string{"detach the volume and attach it again"},
			meets: func(t *testing.T, h *host) []string {
				command := mounting()(t, h)
				device := h.device(t, h.ok(t, "volume", "create", "data", "--size=1GiB")) // again, for its ID
				must(t, os.Remove(device))
				must(t, os.WriteFile(device, nil, 0o600))
				return command
			},
			step: func(t *testing.T, h *host) {
				h.ok(t, "volume", "detach", "data")
				h.ok(t, "volume", "attach", "data")
			}},
		{row: fault.DiskInUse, root: true, waits: true, says: []string{"unmount it"},
			meets: func(t *testing.T, h *host) []string {
				command := mounting()(t, h)
				h.ok(t, command...)
				h.ok(t, "volume", "unmount", "data", filepath.Join(h.dir, "data"))
				other := h.folder(t, "other")
				runHost(t, "mount", h.device(t, h.ok(t, "volume", "create", "data", "--size=1GiB")), other)
				return command
			},
			step: func(t *testing.T, h *host) { must(t, unix.Unmount(filepath.Join(h.dir, "other"), 0)) }},
		{row: fault.PassphraseMissing, root: true, beyond: true, says: []string{"--passphrase-file names its file"},
			meets:   encrypted(),
			instead: []string{"volume", "mount", "data", "DIR/data", "--passphrase-file=DIR/key"}},
		{row: fault.WrongPassphrase, root: true, beyond: true, says: []string{"the first passphrase of this volume"},
			meets: func(t *testing.T, h *host) []string {
				command, key := encrypted()(t, h), filepath.Join(h.dir, "key")
				h.run(t, append(command, "--passphrase-file="+key)...)
				must(t, os.WriteFile(key+".other", []byte("another"), 0o600))
				must(t, os.WriteFile(key+".third", []byte("a third"), 0o600))
				return append(command, "--passphrase-file="+key+".other", "--previous-passphrase-file="+key+".third")
			},
			instead: []string{"volume", "mount", "data", "DIR/data", "--passphrase-file=DIR/key"}},
		{row: fault.HeaderDamaged, root: true, beyond: true, says: []string{"restore the copy of the header"},
			meets: func(t *testing.T, h *host) []string {
				command, device := usedHeader(t, h)
				if got := h.run(t, "volume", "header-backup", "data", filepath.Join(h.dir, "header")); got.code != 0 {
					t.Fatalf("header-backup: %+v", got)
				}
				for _, at := range []int64{5000, 16<<10 + 5000} { // in each of the two copies
					disk, err := os.OpenFile(device, os.O_WRONLY, 0)
					must(t, err)
					_, err = disk.WriteAt([]byte(strings.Repeat("x", 512)), at)
					must(t, err)
					must(t, disk.Close())
				}
				return command
			},
			step: func(t *testing.T, h *host) {
				device := h.device(t, h.ok(t, "volume", "create", "data", "--size=1GiB", "--parameter=encryption=luks2"))
				runHost(t, "cryptsetup", "luksHeaderRestore", "--batch-mode", "--disable-locks", device,
					"--header-backup-file="+filepath.Join(h.dir, "header"))
			}},
	}
}

// troublesOfOthers are faults that end when others act, such as the rack's operator: the next step says who. Those that
// end by themselves end with --wait.
func troublesOfOthers() []trouble {
	attach := []string{"volume", "attach", "data", "--node=node-a"}
	shown := func(fields map[string]any) func(*testing.T, *host) []string {
		return func(t *testing.T, h *host) []string {
			t.Helper()
			id := h.ok(t, "volume", "create", "data", "--size=1GiB")
			must(t, h.sim.Show(t.Context(), id, fields))
			h.release = func() { must(t, h.sim.Show(t.Context(), id, map[string]any{})) }
			return []string{"volume", "attach", id, "--node=node-a"}
		}
	}
	released := func(_ *testing.T, h *host) { h.release() }
	refused := func(status int, code string) func(*testing.T, *host) []string {
		return func(t *testing.T, h *host) []string {
			t.Helper()
			h.ok(t, "volume", "create", "data", "--size=1GiB")
			must(t, h.sim.SetRunState(t.Context(), h.sim.Instance("node-a").ID, "stopped"))
			_, err := h.sim.Inject(t.Context(), simtest.Fault{
				Operation: "instance_disk_attach", Kind: simtest.FaultStatus, Status: status, ErrorCode: code,
				Message: "not today", Count: new(0),
			})
			must(t, err)
			h.release = func() { must(t, h.sim.ClearFaults(t.Context())) }
			return attach
		}
	}
	return []trouble{
		{row: fault.DiskFaulted, says: []string{"operator of the rack"}, step: released,
			meets: func(t *testing.T, h *host) []string {
				id := h.ok(t, "volume", "create", "data", "--size=1GiB")
				must(t, h.sim.SetDiskState(t.Context(), id, "faulted"))
				h.release = func() { must(t, h.sim.SetDiskState(t.Context(), id, "detached")) }
				return attach
			}},
		{row: fault.StateUnknown, says: []string{"hibernating", "upgrade it"}, step: released,
			meets: shown(map[string]any{"state": map[string]any{"state": "hibernating"}})},
		{row: fault.FormatNewer, says: []string{"upgrade"}, step: released,
			meets: shown(map[string]any{"description": `{"v":99,"cluster":"` + simtest.ClusterID + `"}`})},
		{row: fault.RackRefused, says: []string{"not today", "operator of the rack"}, step: released,
			meets: refused(400, "InvalidRequest")},
		{row: fault.ChangedMeanwhile, says: []string{"repeat"}, step: released, waits: true, meets: refused(409, "Conflict")},
		{row: fault.ProxyAnswered, says: []string{"proxies", "OXIDE_HOST"},
			meets: func(t *testing.T, h *host) []string {
				proxy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(502) }))
				t.Cleanup(proxy.Close)
				h.ok(t, "volume", "create", "data", "--size=1GiB")
				h.restartController(t, simtest.PluginOptions{Args: []string{"--oxide-host=" + proxy.URL}})
				return attach
			},
			step: func(t *testing.T, h *host) { h.restartController(t, simtest.PluginOptions{}) }},
		{row: fault.IdentityNotReady, says: []string{"metadata.env"}, waits: true, step: released,
			meets: func(t *testing.T, h *host) []string {
				file := filepath.Join(h.dir, "metadata.env")
				h.findsItself(t, instanceSys(t, h.sim.Instance("node-a").ID), "", func() {
					must(t, os.WriteFile(file, []byte("OXIDE_INSTANCE_ID="+h.sim.Instance("node-a").ID+"\n"), 0o600))
				}, "--metadata=static", "--metadata-file="+file)
				h.ok(t, "volume", "create", "data", "--size=1GiB")
				return []string{"volume", "attach", "data"}
			}},
		{row: fault.ForeignFilesystem, root: true, says: []string{"ext4", "correct --fs-type"},
			meets: func(t *testing.T, h *host) []string {
				command := mounting()(t, h)
				h.ok(t, command...)
				h.ok(t, "volume", "unmount", "data", filepath.Join(h.dir, "data"))
				return append(command, "--fs-type=xfs")
			}, instead: []string{"volume", "mount", "data", "DIR/data", "--fs-type=ext4"}},
	}
}

// unpublish makes an orchestrator's request to detach a volume from the first instance.
func (h *host) unpublish(t *testing.T, volumeID string) {
	t.Helper()
	_, err := h.controller.ControllerUnpublishVolume(t.Context(), &csi.ControllerUnpublishVolumeRequest{
		VolumeId: volumeID, NodeId: h.sim.Instance("node-a").ID,
	})
	must(t, err)
}

// unpublished returns the command that attaches a volume to another instance than the one that has just given it up.
func unpublished(t *testing.T, h *host) []string {
	t.Helper()
	id := h.ok(t, "volume", "create", "data", "--size=1GiB")
	h.ok(t, "volume", "attach", "data", "--node=node-a")
	h.unpublish(t, id)
	return []string{"volume", "attach", "data", "--node=node-b"}
}

// restartController starts the controller again, with other flags and another environment.
func (h *host) restartController(t *testing.T, opts simtest.PluginOptions) {
	t.Helper()
	must(t, h.controller.Stop())
	opts.Mode, opts.Dir, opts.Sim = "controller", h.folder(t, "controller"), h.sim
	h.controller = startPlugin(t, opts)
}

// begin starts a command. The returned output is what it has written to stderr so far.
func (h *host) begin(t *testing.T, args ...string) (*exec.Cmd, *simtest.Output) {
	t.Helper()
	stderr := &simtest.Output{}
	cmd := exec.CommandContext(within(t, 2*time.Minute), programs.Plugin, args...)
	cmd.Env, cmd.Stderr = append(baseEnv(), h.environ...), stderr
	must(t, cmd.Start())
	return cmd, stderr
}

// findsItself starts the node again, which finds its identity in a /sys, and at a Nomad agent unless its address is
// empty. The host's release mends what is wrong with that, and waits until the node knows it.
func (h *host) findsItself(t *testing.T, sys, nomad string, mend func(), args ...string) {
	t.Helper()
	must(t, h.node.Stop())
	opts := simtest.PluginOptions{
		Mode: "node", Dir: h.folder(t, "node"), OwnIdentity: true, Args: append(args, "--sys-root="+sys, "--rack=default"),
		Env: baseEnv(),
	}
	if nomad != "" {
		opts.Env = append(opts.Env, "NOMAD_ADDR="+nomad)
	}
	type started struct {
		plugin *simtest.Plugin
		err    error
	}
	ready := make(chan started, 1)
	go func() {
		plugin, err := simtest.StartPlugin(programs.Plugin, opts)
		ready <- started{plugin, err}
	}()
	await.Eventually(t, "the node serves", func() bool {
		conn, err := net.Dial("unix", opts.Socket())
		return err == nil && conn.Close() == nil
	})
	h.release = func() {
		mend()
		s := <-ready
		must(t, s.err)
		h.node = s.plugin
		t.Cleanup(func() { must(t, s.plugin.Stop()) })
	}
}

// replaceProgram starts the node again, in a mount namespace of its own where a shell script has replaced a program of
// the host.
func (h *host) replaceProgram(t *testing.T, path, script string) {
	t.Helper()
	standIn, plugin := filepath.Join(h.dir, filepath.Base(path)), filepath.Join(h.dir, "oxide-csi")
	must(t, os.WriteFile(standIn, []byte("#!/bin/sh\n"+script+"\n"), 0o700))
	must(t, os.WriteFile(plugin, []byte("#!/bin/sh\nexec unshare --mount sh -c "+
		`'mount --bind "$0" "$1" && shift && exec "$@"' `+strings.Join([]string{standIn, path, programs.Plugin}, " ")+
		` "$@"`+"\n"), 0o700))
	h.restartNode(t, plugin)
}

// mapped returns the command that unmounts an encrypted volume. A killed node has left its mapping, which this process
// reads. The mapping is a loop device, and it shows in the guest's /sys until cryptsetup has closed it.
func mapped(t *testing.T, h *host) []string {
	t.Helper()
	id := h.ok(t, "volume", "create", "data", "--size=1GiB", "--parameter=encryption=luks2")
	h.ok(t, "volume", "attach", "data")
	disk := h.device(t, id)
	guest := h.sim.Instances[0].Guest
	sys, below := filepath.Join(guest, "sys/block/dm-0"), filepath.Join(guest, "sys/block", filepath.Base(disk))
	attachment, err := device.Roots{Sys: filepath.Join(guest, "sys")}.Attachment(filepath.Base(disk))
	must(t, err)
	inside, err := os.Create(filepath.Join(h.dir, "inside"))
	must(t, err)
	must(t, inside.Truncate(1<<20))
	must(t, inside.Close())
	loop := strings.TrimSpace(runHost(t, "losetup", "--find", "--show", inside.Name()))
	t.Cleanup(func() { runHost(t, "losetup", "--detach", loop) })
	var stat unix.Stat_t
	must(t, unix.Stat(loop, &stat))
	must(t, unix.Mknod(filepath.Join(guest, "dev/dm-0"), unix.S_IFBLK|0o600, int(stat.Rdev)))
	name := device.MappingName(uuid.MustParse(id), attachment)
	for file, text := range map[string]string{
		"dm/name": name, "dm/uuid": "CRYPT-LUKS2-x-" + name, "size": "2048",
		"dev": fmt.Sprintf("%d:%d", unix.Major(stat.Rdev), unix.Minor(stat.Rdev)),
	} {
		must(t, os.MkdirAll(filepath.Dir(filepath.Join(sys, file)), 0o755))
		must(t, os.WriteFile(filepath.Join(sys, file), []byte(text+"\n"), 0o600))
	}
	must(t, os.Mkdir(filepath.Join(sys, "slaves"), 0o755))
	must(t, os.Symlink(below, filepath.Join(sys, "slaves", filepath.Base(disk))))
	reader, err := os.Open(loop)
	must(t, err)
	h.release = func() { must(t, reader.Close()) }
	h.replaceProgram(t, "/usr/sbin/cryptsetup", fmt.Sprintf(`case "$*" in "close "*%s) ;; *) exit 1;; esac
		if readlink /proc/%d/fd/* | grep -qx %s; then echo "Device %s is still in use." >&2; exit 5; fi
		rm -r %s`, name, os.Getpid(), loop, name, sys))
	return []string{"volume", "unmount", "data", filepath.Join(h.dir, "data")}
}

// encrypted returns the command that mounts a new encrypted volume, which is attached. It has no passphrase: that is in
// the file key.
func encrypted() func(*testing.T, *host) []string {
	return func(t *testing.T, h *host) []string {
		t.Helper()
		must(t, os.WriteFile(filepath.Join(h.dir, "key"), []byte("a passphrase"), 0o600))
		h.ok(t, "volume", "create", "data", "--size=1GiB", "--parameter=encryption=luks2")
		h.ok(t, "volume", "attach", "data")
		return []string{"volume", "mount", "data", filepath.Join(h.dir, "data")}
	}
}

// mounting returns the command that mounts a new volume, which is attached.
func mounting(flags ...string) func(*testing.T, *host) []string {
	return func(t *testing.T, h *host) []string {
		t.Helper()
		h.ok(t, "volume", "create", "data", "--size=1GiB")
		h.ok(t, "volume", "attach", "data")
		return append([]string{"volume", "mount", "data", filepath.Join(h.dir, "data")}, flags...)
	}
}

// Next steps work: a command meets each fault, says the next step, and succeeds once that is done. With --wait a
// command that can wait succeeds by itself.
func TestNextSteps(t *testing.T) {
	t.Parallel()
	followed := map[*fault.Row]bool{}
	for _, test := range slices.Concat(troubles(), troublesOfOthers(), troublesOfExpansions(),
		troublesOfHosts(), troublesOfOrchestrators()) {
		followed[test.row] = true
		t.Run(test.row.Word, func(t *testing.T) {
			t.Parallel()
			h := &host{dir: shortDir(t), noHotplug: test.cold, args: test.args}
			if test.root {
				h = newHostWithGuest(t, false)
			} else {
				h.start(t, false, "--instances=node-a,node-b")
			}
			command := test.meets(t, h)
			message := h.fails(t, client.ExitOfRow(test.row), command...)
			for _, text := range append(test.says, "["+test.row.Word+"]") {
				if !strings.Contains(message, text) {
					t.Errorf("the message lacks %q: %s", text, message)
				}
			}
			for _, text := range []string{"unpublish", "ControllerPublish", "FailedPrecondition", ": not found: not found"} {
				if strings.Contains(message, text) {
					t.Errorf("the message has %q: %s", text, message)
				}
			}
			if test.waits {
				cmd, stderr := h.begin(t, append(slices.Clone(command), "--wait", "--timeout=1m")...)
				ended := make(chan error, 1)
				go func() { ended <- cmd.Wait() }()
				await.Eventually(t, "the command waits", func() bool {
					return strings.Contains(stderr.String(), "waiting: ") || len(ended) > 0
				})
				if test.step != nil {
					test.step(t, h)
				}
				if err := <-ended; err != nil {
					t.Errorf("with --wait: %v: %s", err, stderr)
				}
			} else if test.step != nil {
				test.step(t, h)
			}
			for _, word := range test.instead {
				if word == "volume" {
					command = nil
				}
				command = append(command, strings.Replace(word, "DIR", h.dir, 1))
			}
			got := h.run(t, command...)
			gone := !strings.Contains(got.stderr, "["+test.row.Word+"]")
			if got.code != 0 && !test.beyond || test.beyond && !gone {
				t.Errorf("after the next step: %+v", got)
			}
			if test.root && command[1] == "mount" {
				h.run(t, "volume", "unmount", "data", filepath.Join(h.dir, "data"))
			}
		})
	}
	for _, row := range fault.Table {
		if row.Code != codes.OK && followed[row] == (stepsNotFollowed[row] != "") {
			t.Errorf("%s: followed %t, and why not: %q", row.Word, followed[row], stepsNotFollowed[row])
		}
	}
}

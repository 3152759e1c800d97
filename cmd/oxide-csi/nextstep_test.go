// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/admin/client"
	"github.com/oxidecomputer/oxide-csi-plugin/core/fault"
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
		cmd := exec.CommandContext(
			within(t, 2*time.Minute),
			programs.Plugin,
			"volume",
			"attach",
			"data",
			"--node=node-a",
			"--wait",
			"--endpoint="+h.dir+"/none",
			"--controller-endpoint="+h.dir+"/none",
		)
		stderr := &simtest.Output{}
		cmd.Env, cmd.Stderr = baseEnv(), stderr
		must(t, cmd.Start())
		await.Eventually(t, "the command waits", func() bool { return strings.Contains(stderr.String(), "waiting: ") })
		must(t, cmd.Process.Signal(signal))
		_ = cmd.Wait() // the exit code tells
		code, says := 130, "a repeated command finds it; it waited: "
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

// Why a next step is not followed here.
const (
	repeats      = "it ends by itself: the command is repeated, as after RackUnavailable"
	rackOperator = "the rack's operator acts"
	ofTheHost    = "a program, a kernel module, memory or a folder of the host is mended"
	dataOwner    = "the owner of the data decides"
	orchestrated = "a plain host does not meet it"
	upgraded     = "the plugin is upgraded"
	notMade      = "the message has what is to be mended; no test makes it at the command line"
)

// stepsNotFollowed are the faults that this test does not make, or whose next step another person takes.
var stepsNotFollowed = map[*fault.Row]string{
	fault.DiskFaulted:           rackOperator,
	fault.RackRefused:           rackOperator,
	fault.DiskNotResponding:     rackOperator,
	fault.DeviceUnreadable:      rackOperator,
	fault.ExpansionNeedsRoom:    rackOperator,
	fault.ProxyAnswered:         rackOperator,
	fault.StateUnknown:          upgraded,
	fault.FormatNewer:           upgraded,
	fault.RestartRefused:        orchestrated,
	fault.ClaimsUnknown:         orchestrated,
	fault.ClaimedThere:          orchestrated,
	fault.VolumeBeingReplaced:   repeats,
	fault.ExpansionUnderWay:     repeats,
	fault.DiskBusy:              repeats,
	fault.ChangedMeanwhile:      repeats,
	fault.KeyDerivationBusy:     repeats,
	fault.ProgramRunning:        repeats,
	fault.FilesystemChecked:     repeats,
	fault.DeviceNotFound:        repeats,
	fault.IdentityNotReady:      repeats,
	fault.OnlySnapshot:          repeats,
	fault.GrowFailed:            repeats,
	fault.VolumeDeleted:         "nothing is to be done",
	fault.EncryptionUnavailable: ofTheHost,
	fault.ProgramMissing:        ofTheHost,
	fault.StateFolderUnusable:   ofTheHost,
	fault.CryptsetupFailed:      ofTheHost,
	fault.KernelTooOld:          ofTheHost,
	fault.NameTaken:             dataOwner,
	fault.ForeignFilesystem:     dataOwner,
	fault.FilesystemUnclean:     dataOwner,
	fault.DiskInUse:             dataOwner,
	fault.RecordUnreadable:      dataOwner,
	fault.PassphraseMissing:     notMade,
	fault.WrongPassphrase:       notMade,
	fault.SerialCollision:       notMade,
	fault.HeaderDamaged:         notMade,
	fault.MappingInUse:          notMade,
	fault.FormatFailed:          notMade,
	fault.MountFailed:           notMade,
	fault.DeviceMismatch:        notMade,
	fault.IdentityConflict:      notMade,
	fault.IdentityInvalid:       notMade,
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
	unpublished := func(t *testing.T, h *host) []string {
		t.Helper()
		id := h.ok(t, "volume", "create", "data", "--size=1GiB")
		h.ok(t, attachToA...)
		_, err := h.controller.ControllerUnpublishVolume(t.Context(), &csi.ControllerUnpublishVolumeRequest{
			VolumeId: id, NodeId: h.sim.Instance("node-a").ID,
		})
		must(t, err)
		return []string{"volume", "attach", "data", "--node=node-b"}
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
		{row: fault.TokenRejected, says: []string{"controller's token file"}, step: writes("limited-collaborator"),
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
			step: func(t *testing.T, h *host) {
				must(t, h.controller.Stop())
				h.controller = startPlugin(t, simtest.PluginOptions{Mode: "controller", Dir: h.folder(t, "controller"), Sim: h.sim})
			}},
		{row: fault.VolumeDiffers, says: []string{"was made with 1GiB, not 2GiB", "ask for what it is", "volume expand"},
			meets: func(t *testing.T, h *host) []string {
				created(t, h)
				return []string{"volume", "create", "data", "--size=2GiB"}
			}, instead: []string{"volume", "expand", "data", "--size=2GiB"}},
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
		{row: fault.RackUnavailable, says: []string{"doctor"}, meets: failing(503), step: repaired, waits: true},
		{row: fault.RackFailed, says: []string{"doctor"}, meets: failing(500), step: repaired, waits: true},
		{row: fault.RackHasNoHotplug, says: []string{"--wait", "--node"}, cold: true, step: stop, waits: true,
			meets: func(t *testing.T, h *host) []string { created(t, h); return attachToA }},
		{row: fault.RestartNeeded, says: []string{"--wait", "--node"}, cold: true, step: stop, waits: true,
			args:  []string{"--attach-mode=plan", "--restart-shutdown=hard", "--metadata=none"},
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
		{row: fault.AttachedElsewhere, says: []string{"volume show", "volume detach"},
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
				id := h.ok(t, "volume", "create", "data", "--size=1GiB")
				rack, err := h.sim.Client()
				must(t, err)
				_, err = rack.AntiAffinityGroupCreate(t.Context(), oxide.AntiAffinityGroupCreateParams{
					Project: oxide.NameOrId(h.sim.Project),
					Body: &oxide.AntiAffinityGroupCreate{
						Name:          oxide.Name(record.Intents.Named("", id)),
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
				id := h.ok(t, "volume", "create", "data", "--size=1GiB") // again, for its ID
				must(t, rack.AntiAffinityGroupDelete(t.Context(), oxide.AntiAffinityGroupDeleteParams{
					Project:           oxide.NameOrId(h.sim.Project),
					AntiAffinityGroup: oxide.NameOrId(record.Intents.Named("", id)),
				}))
			}},
		{row: fault.DetachDeferred, says: []string{"--detach-grace"}, args: []string{"--detach-grace=20s"}, waits: true,
			meets: unpublished},
		{row: fault.DetachUntimed, says: []string{"volume detach", "stop that instance"}, cold: true, step: stop, waits: true,
			args: []string{"--attach-mode=plan", "--restart-shutdown=hard", "--metadata=none"},
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
		{row: fault.PathOccupied, root: true, says: []string{"empty it"},
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
	for _, test := range troubles() {
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
				ended := make(chan result, 1)
				go func() { ended <- h.run(t, append(slices.Clone(command), "--wait", "--timeout=1m")...) }()
				time.Sleep(3 * time.Second) // so that it waits
				if test.step != nil {
					test.step(t, h)
				}
				if got := <-ended; got.code != 0 || !strings.Contains(got.stderr, "waiting: ") {
					t.Errorf("with --wait: %+v", got)
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
			if got := h.run(t, command...); got.code != 0 {
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

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package diagnose_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/go-cmp/cmp"

	"github.com/oxidecomputer/oxide-csi-plugin/admin/diagnose"
	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
	"github.com/oxidecomputer/oxide-csi-plugin/core/record"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata/auto"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
	"github.com/oxidecomputer/oxide-csi-plugin/test/coretest"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// notOK are the lines that are not ok, by what was looked at.
func notOK(findings []orchestrator.Finding) map[string]orchestrator.Status {
	lines := map[string]orchestrator.Status{}
	for _, f := range findings {
		if f.Status != orchestrator.StatusOK {
			lines[f.Looked] = f.Status
		}
	}
	return lines
}

// checkComplete checks that each line is complete, and that one that is not ok has a next step.
func checkComplete(t *testing.T, findings []orchestrator.Finding) {
	t.Helper()
	for _, f := range findings {
		if f.Area == "" || f.Looked == "" || f.Found == "" || (f.Next == "") != (f.Status == orchestrator.StatusOK) {
			t.Errorf("incomplete: %+v", f)
		}
	}
}

// Each problem of a rack is one line, and the others stay ok. The examination only reads.
// nameTaken makes a disk whose name is that of another volume's disk, which an expansion has replaced.
func nameTaken(committed bool) func(t *testing.T, r *coretest.Rig, client *rack.Client) {
	return func(t *testing.T, r *coretest.Rig, client *rack.Client) {
		disk, err := client.DiskByID(t.Context(), rack.DiskID(r.Create(t, "x")))
		coretest.Must(t, err)
		const volume, attempt = coretest.NoVolumeID, "11111111-0000-4000-8000-000000000000"
		_, err = record.Intents.Create(t.Context(), client, record.Intent{
			Cluster: coretest.Cluster, Volume: volume, Disk: volume, DiskName: disk.Name, Attempt: attempt, SizeBytes: 1 << 31,
		})
		coretest.Must(t, err)
		_, err = record.Replacements.Create(t.Context(), client, record.Replacement{
			Cluster: coretest.Cluster, Volume: volume, Disk: volume, DiskName: disk.Name, Attempt: attempt, SizeBytes: 1 << 31,
			Committed: committed,
		})
		coretest.Must(t, err)
	}
}

func TestExamineRack(t *testing.T) {
	const warning, failure = orchestrator.StatusWarning, orchestrator.StatusFailure
	for name, test := range map[string]struct {
		arrange func(t *testing.T, r *coretest.Rig, client *rack.Client)
		config  func(*rack.Config)
		after   time.Duration
		want    map[string]orchestrator.Status
	}{
		"all is well": {want: map[string]orchestrator.Status{}},
		"token": {
			config: func(c *rack.Config) { c.Token = rack.FixedToken("oxide-token-canary") },
			want:   map[string]orchestrator.Status{"API, certificate, token and project": failure},
		},
		"project": {
			config: func(c *rack.Config) { c.Project = "another" },
			want:   map[string]orchestrator.Status{"API, certificate, token and project": failure},
		},
		"host": {
			config: func(c *rack.Config) { c.Host = "http://127.0.0.1:1" },
			want:   map[string]orchestrator.Status{"API, certificate, token and project": failure},
		},
		"quota full": {
			arrange: func(t *testing.T, r *coretest.Rig, _ *rack.Client) {
				coretest.Must(t, r.Sim.Set(t.Context(), simtest.Settings{QuotaBytes: new(int64(1))}))
			},
			want: map[string]orchestrator.Status{"quota": failure},
		},
		"disk faulted": {
			arrange: func(t *testing.T, r *coretest.Rig, _ *rack.Client) {
				coretest.Must(t, r.Sim.SetDiskState(t.Context(), r.Create(t, "x"), "faulted"))
			},
			want: map[string]orchestrator.Status{"faulted disks": failure},
		},
		"restart that does not end, and a record of a disk that is gone": {
			arrange: func(t *testing.T, r *coretest.Rig, client *rack.Client) {
				_, err := client.CreateRecord(t.Context(), "csi-restart-"+diskname.ForCluster(coretest.Cluster)+"-0-0",
					fmt.Sprintf(`{"v":1,"cluster":%q,"id":"1","instance":%q}`, coretest.Cluster, r.Node(t, "node-a")))
				coretest.Must(t, err)
				_, err = client.CreateRecord(t.Context(), record.Deferrals.Named(coretest.Cluster, coretest.NoVolumeID),
					fmt.Sprintf(`{"v":1,"cluster":%q,"disk":%q,"instance":"x"}`, coretest.Cluster, coretest.NoVolumeID))
				coretest.Must(t, err)
			},
			after: 2 * time.Hour,
			want:  map[string]orchestrator.Status{"planned restarts": warning, "records": warning},
		},
		"a disk took a volume's name": {arrange: nameTaken(true), want: map[string]orchestrator.Status{"names of disks": failure}},
		"a volume has the name of one whose expansion was taken back": {
			arrange: nameTaken(false), want: map[string]orchestrator.Status{},
		},
		"viewer": {
			arrange: func(t *testing.T, r *coretest.Rig, _ *rack.Client) {
				token, err := r.Sim.NewToken(t.Context(), "viewer")
				coretest.Must(t, err)
				r.Token.Store(token)
			},
			config: func(c *rack.Config) { c.Token = nil },
			want:   map[string]orchestrator.Status{"role on the project": failure},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := coretest.New(t, func(o *coretest.Options) { o.Unplanned = true })
			if test.arrange != nil {
				test.arrange(t, r, newRack(t, r))
			}
			config := rack.Config{
				Name:    "default",
				Host:    r.Sim.Host,
				Project: coretest.Project,
				Token:   rack.FixedToken(coretest.Token),
			}
			if test.config != nil {
				test.config(&config)
			}
			if config.Token == nil {
				config.Token = rack.FixedToken(r.Token.Load().(string))
			}
			client, err := rack.New(config)
			coretest.Must(t, err)
			r.ClearCalls(t)
			found, _ := diagnose.ExamineRack(
				t.Context(),
				client,
				nil,
				coretest.Cluster,
				orchestrator.None,
				time.Now().Add(test.after),
			)
			checkComplete(t, found)
			if diff := cmp.Diff(test.want, notOK(found)); diff != "" {
				t.Errorf("-want +got:\n%s\n%+v", diff, found)
			}
			want := 0
			for _, status := range test.want {
				want = max(want, map[orchestrator.Status]int{warning: 1, failure: 2}[status])
			}
			if code := diagnose.ExitCode(found); code != want {
				t.Errorf("exit code %d, want %d", code, want)
			}
			calls, err := r.Sim.Calls(t.Context())
			coretest.Must(t, err)
			for _, call := range calls.Log {
				if call.Method != "GET" {
					t.Errorf("it sent %s %s", call.Method, call.Path)
				}
			}
			if strings.Contains(fmt.Sprint(found), "canary") {
				t.Errorf("it shows the token: %v", found)
			}
		})
	}
}

// found is what the examination has found in a line.
func found(findings []orchestrator.Finding, looked string) (texts string) {
	for _, f := range findings {
		if f.Looked == looked {
			texts += f.Found + "\n"
		}
	}
	return texts
}

// The operator of the rack gets the IDs and names that the rack knows, also for a volume that grew. The old disk of a
// grown volume, which the rack failed to delete, is told apart: the volume is well.
func TestFaultedDisksAreNamedAsTheRackDoes(t *testing.T) {
	t.Parallel()
	r := coretest.New(t)
	_, broken := grow(t, r, r.Create(t, "broken"))
	coretest.Must(t, r.Sim.SetDiskState(t.Context(), broken.Id, "faulted"))
	old, _ := grow(t, r, r.Create(t, "well"))
	client := newRack(t, withHalfDeleted(t, r, old))
	findings, _ := diagnose.ExamineRack(t.Context(), client, nil, coretest.Cluster, orchestrator.None, time.Now())
	checkComplete(t, findings)
	if want := fmt.Sprintf("%q (%s)\n", broken.Name, broken.Id); found(findings, "faulted disks") != want {
		t.Errorf("the faulted disks are %s, want %s", found(findings, "faulted disks"), want)
	}
	if want := fmt.Sprintf("%q (%s)\n", "deleted-"+old.Id, old.Id); found(findings, "half-deleted disks") != want {
		t.Errorf("the half-deleted disks are %s, want %s", found(findings, "half-deleted disks"), want)
	}
	if text := found(findings, "disks"); !strings.HasPrefix(text, "2 of this cluster") {
		t.Errorf("the disks are %s", text)
	}
}

// One disk or snapshot in a state that this version does not know is named, and nothing else is hidden by it.
func TestUnknownStatesAreNamed(t *testing.T) {
	t.Parallel()
	r := coretest.New(t)
	used, unknown := r.Create(t, "used"), r.Create(t, "unknown")
	made, err := r.CreateSnapshot(t.Context(), &csi.CreateSnapshotRequest{SourceVolumeId: used, Name: "s"})
	coretest.Must(t, err)
	state := map[string]any{"state": map[string]any{"state": "hibernating"}}
	coretest.Must(t, r.Sim.Show(t.Context(), unknown, state))
	snapshot := made.GetSnapshot().GetSnapshotId()
	coretest.Must(t, r.Sim.Show(t.Context(), snapshot, map[string]any{"state": "thawing"}))
	findings, _ := diagnose.ExamineRack(t.Context(), newRack(t, r), nil, coretest.Cluster, orchestrator.None, time.Now())
	text := found(findings, "unknown states")
	for _, want := range []string{unknown, `state "hibernating"`, snapshot, `state "thawing"`} {
		if !strings.Contains(text, want) {
			t.Errorf("the unknown states are %q, without %s", text, want)
		}
	}
	if text := found(findings, "disks"); !strings.HasPrefix(text, "2 of this cluster") {
		t.Errorf("the disks are %s", text)
	}
	if got := notOK(findings); len(got) != 1 {
		t.Errorf("not well: %v", got)
	}
}

// A disk that is younger than the start of its instance proves that the rack hot-plugs. An older one proves nothing.
func TestHotplugIsProvedByADisk(t *testing.T) {
	t.Parallel()
	r := coretest.New(t)
	client := newRack(t, r)
	look := func() string {
		findings, _ := diagnose.ExamineRack(t.Context(), client, nil, coretest.Cluster, orchestrator.None, time.Now())
		return found(findings, "hot-plug")
	}
	if text := look(); !strings.HasPrefix(text, "not known") {
		t.Errorf("without disks: %s", text)
	}
	volume := r.Create(t, "x")
	_, disk := grow(t, r, volume)
	coretest.Must(t, r.Publish(t, volume, r.Node(t, "node-a")))
	if text := look(); !strings.HasPrefix(text, "yes: disk "+disk.Id) {
		t.Errorf("attached while the instance ran: %s", text)
	}
	coretest.Must(t, r.Sim.SetRunState(t.Context(), "node-a", "stopped"))
	coretest.Must(t, r.Sim.SetRunState(t.Context(), "node-a", "running"))
	if text := look(); !strings.HasPrefix(text, "not known") {
		t.Errorf("after a restart: %s", text)
	}
}

// A record that no controller renews is told from one that is renewed, however long the restart takes.
func TestRecordsThatNobodyKeeps(t *testing.T) {
	t.Parallel()
	r := coretest.New(t, func(o *coretest.Options) { o.Unplanned = true })
	client := newRack(t, r)
	_, err := client.CreateRecord(t.Context(), "csi-restart-"+diskname.ForCluster(coretest.Cluster)+"-0-0",
		fmt.Sprintf(`{"v":1,"cluster":%q,"id":"1","instance":%q}`, coretest.Cluster, r.Node(t, "node-a")))
	coretest.Must(t, err)
	for after, want := range map[time.Duration]string{
		time.Minute: "1 under way", time.Hour: "no controller carries out the restart of instance " + r.Node(t, "node-a"),
	} {
		findings, _ := diagnose.ExamineRack(
			t.Context(),
			client,
			nil,
			coretest.Cluster,
			orchestrator.None,
			time.Now().Add(after),
		)
		if text := found(findings, "planned restarts"); !strings.HasPrefix(text, want) {
			t.Errorf("after %s: %s", after, text)
		}
	}
}

// doctor names the groups that look like records and are none, and the records of a newer format, of this cluster.
func TestDoctorNamesWhatIsNoRecord(t *testing.T) {
	t.Parallel()
	r := coretest.New(t, func(o *coretest.Options) { o.Unplanned = true })
	client := newRack(t, r)
	for name, text := range map[string]string{
		"csi-nodes-spread": `{"v":2,"cluster":"staging"}`,
		record.Deferrals.Named("staging", coretest.NoVolumeID):        "theirs",
		record.Adoptions.Named("", coretest.NoVolumeID):               "text",
		record.Deferrals.Named(coretest.Cluster, coretest.NoVolumeID): "text",
		record.Intents.Named("", diskname.ForWork("d")): `{"v":2,"cluster":"` + coretest.Cluster + `","vol":"` +
			coretest.NoVolumeID + `","name":"d"}`,
	} {
		_, err := client.CreateRecord(t.Context(), name, text)
		coretest.Must(t, err)
	}
	findings, _ := diagnose.ExamineRack(t.Context(), client, nil, coretest.Cluster, orchestrator.None, time.Now())
	text := found(findings, "records")
	if strings.Count(text, "\n") != 3 || strings.Count(text, "is no record of this plugin") != 2 ||
		strings.Count(text, "format 2, not 1") != 1 || strings.Contains(text, "spread") {
		t.Errorf("findings:\n%s", text)
	}
}

// page is what a rack returns of a list at once.
const page = 2000

// listCalls runs a command and counts the calls of the lists, and of all else. It checks that no call is about a single
// volume.
func listCalls(t *testing.T, r *coretest.Rig, command func(client *rack.Client)) (lists, others int) {
	t.Helper()
	client := newRack(t, r)
	r.ClearCalls(t)
	command(client)
	for operation, count := range r.Calls(t) {
		switch operation {
		case "disk_list", "snapshot_list", "anti_affinity_group_list", "instance_list":
			lists += count
		case "disk_view", "snapshot_view", "instance_view", "instance_disk_list":
			t.Errorf("%s was called %d times", operation, count)
		default:
			others += count
		}
	}
	return lists, others
}

// doctor and orphans cost one pass over the lists: with one page more of disks there is one call more, and nothing else
// grows. So 10,000 volumes cost 20 calls more than none. The bench measures the time ("doctor and orphans").
func TestCommandsNeedOnePass(t *testing.T) {
	r := coretest.New(t)
	var known orchestrator.Inventory
	commands := map[string]func(client *rack.Client){
		"doctor": func(client *rack.Client) {
			diagnose.ExamineRack(t.Context(), client, nil, coretest.Cluster, orchestrator.None, time.Now())
		},
		"orphans": func(client *rack.Client) {
			racks := []*rack.Client{client}
			found, err := diagnose.FindOrphans(t.Context(), racks, coretest.Cluster, inventory(known), time.Now())
			coretest.Must(t, err)
			if len(found.Orphans) != len(known.Volumes) { // half of all
				t.Errorf("%d orphans beside %d volumes", len(found.Orphans), len(known.Volumes))
			}
		},
	}
	type calls struct{ lists, others int }
	count := func() map[string]calls {
		all := map[string]calls{}
		for name, command := range commands {
			lists, others := listCalls(t, r, command)
			all[name] = calls{lists, others}
		}
		return all
	}
	before := count()
	const pages = 1
	for i := range pages * page {
		disk := r.UserDisk(t, coretest.Project, fmt.Sprintf("disk-%d", i),
			rack.NewDescription(coretest.Cluster, fmt.Sprint(i), "").Encode())
		if i%2 == 0 {
			known.Volumes = append(known.Volumes, orchestrator.KnownObject{ID: disk.Id, Object: "PersistentVolume"})
		}
	}
	for name, after := range count() {
		want := calls{before[name].lists + pages, before[name].others}
		if after != want {
			t.Errorf("%s: %+v calls with %d disks, and %+v without, want %+v", name, after, pages*page, before[name], want)
		}
	}
}

// inventory is an orchestrator that knows this.
type inventory orchestrator.Inventory

func (i inventory) Inventory(context.Context) (orchestrator.Inventory, error) {
	return orchestrator.Inventory(i), nil
}

// source is a source of identity.
type source struct {
	id  string
	err error
}

func (s source) Instance(context.Context) (metadata.Instance, error) {
	return metadata.Instance{ID: s.id}, s.err
}

// Each problem of a node is one line.
func TestExamineNode(t *testing.T) {
	const warning, failure = orchestrator.StatusWarning, orchestrator.StatusFailure
	for name, test := range map[string]struct {
		change func(t *testing.T, n *diagnose.Node, dir string)
		want   map[string]orchestrator.Status
	}{
		"all is well": {func(*testing.T, *diagnose.Node, string) {}, map[string]orchestrator.Status{}},
		"sources disagree": {func(_ *testing.T, n *diagnose.Node, _ string) {
			n.Sources = append(n.Sources, auto.Source{Name: "nomad", Provider: source{id: "b"}})
		}, map[string]orchestrator.Status{"identity": failure}},
		"one source of two is down": {func(_ *testing.T, n *diagnose.Node, _ string) {
			n.Sources = append(n.Sources, auto.Source{Name: "nomad", Provider: source{err: metadata.ErrNotReady}})
		}, map[string]orchestrator.Status{}},
		"no source": {func(_ *testing.T, n *diagnose.Node, _ string) {
			n.Sources[0].Provider = source{err: metadata.ErrNotReady}
		}, map[string]orchestrator.Status{"identity": failure}},
		"not shared": {func(t *testing.T, n *diagnose.Node, dir string) {
			coretest.Must(t, os.WriteFile(filepath.Join(n.Proc, "self/mountinfo"), []byte(mountTable(dir, "")), 0o600))
		}, map[string]orchestrator.Status{"mount propagation": failure}},
		"Nomad's folder is not shared": {func(t *testing.T, n *diagnose.Node, dir string) {
			nomad := filepath.Join(dir, "nomad/client/csi/node/oxide")
			coretest.Must(t, os.MkdirAll(nomad, 0o755))
			table := mountTable(dir, " shared:7") + fmt.Sprintf("3 1 8:1 / %s rw - ext4 /dev/sda rw\n", nomad)
			coretest.Must(t, os.WriteFile(filepath.Join(n.Proc, "self/mountinfo"), []byte(table), 0o600))
		}, map[string]orchestrator.Status{"mount propagation": failure}},
		"a kubelet's folder at another place is not shared": {func(t *testing.T, n *diagnose.Node, dir string) {
			kubelet := filepath.Join(dir, "k0s/kubelet")
			coretest.Must(t, os.MkdirAll(kubelet, 0o755))
			table := mountTable(dir, " shared:7") + fmt.Sprintf("3 1 8:1 / %s rw - ext4 /dev/sda rw\n", kubelet)
			coretest.Must(t, os.WriteFile(filepath.Join(n.Proc, "self/mountinfo"), []byte(table), 0o600))
		}, map[string]orchestrator.Status{"mount propagation": failure}},
		"no driver": {func(t *testing.T, n *diagnose.Node, _ string) {
			coretest.Must(t, os.RemoveAll(filepath.Join(n.Devices.Sys, "module/nvme")))
		}, map[string]orchestrator.Status{"NVMe driver": failure}},
		"no device node": {func(t *testing.T, n *diagnose.Node, _ string) {
			coretest.Must(t, os.Remove(filepath.Join(n.Devices.Dev, "nvme0n1")))
		}, map[string]orchestrator.Status{"/dev": failure}},
		"full": {func(_ *testing.T, n *diagnose.Node, _ string) { n.MaxDisks = 1 },
			map[string]orchestrator.Status{"places for disks": warning}},
		"no state folder": {func(_ *testing.T, n *diagnose.Node, _ string) { n.StateDir += "-none" },
			map[string]orchestrator.Status{"state directory": warning}},
		"no socket": {func(_ *testing.T, n *diagnose.Node, _ string) { n.Sockets[0] += "-none" },
			map[string]orchestrator.Status{"socket": failure}},
		"a socket that was left": {func(t *testing.T, n *diagnose.Node, _ string) {
			n.Sockets[0] += "-left"
			listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: n.Sockets[0], Net: "unix"})
			coretest.Must(t, err)
			listener.SetUnlinkOnClose(false)
			coretest.Must(t, listener.Close())
		}, map[string]orchestrator.Status{"socket": failure}},
		"the kernel refused an NVMe function": {func(t *testing.T, n *diagnose.Node, _ string) {
			function := filepath.Join(n.Devices.Sys, "bus/pci/devices/0000:00:12.0")
			coretest.Must(t, os.MkdirAll(function, 0o755))
			coretest.Must(t, os.WriteFile(filepath.Join(function, "class"), []byte("0x010802\n"), 0o600))
		}, map[string]orchestrator.Status{"NVMe functions": failure}},
		"a controller that does not start": {func(t *testing.T, n *diagnose.Node, _ string) {
			state := filepath.Join(n.Devices.Sys, "block/nvme0n1/device/state")
			coretest.Must(t, os.WriteFile(state, []byte("dead\n"), 0o600))
		}, map[string]orchestrator.Status{"NVMe disks": failure}},
		"no disks": {func(t *testing.T, n *diagnose.Node, _ string) {
			coretest.Must(t, os.RemoveAll(filepath.Join(n.Devices.Sys, "block/nvme0n1")))
		}, map[string]orchestrator.Status{"NVMe disks": warning}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := coretest.ShortDir(t)
			n := newNode(t, dir)
			test.change(t, &n, dir)
			found := diagnose.ExamineNode(t.Context(), n)
			checkComplete(t, found)
			got := notOK(found)
			delete(got, "tools") // depends on this machine
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("-want +got:\n%s\n%+v", diff, found)
			}
		})
	}
}

// The node's image has the programs that doctor looks for, and no others.
func TestToolsAreThoseOfTheImage(t *testing.T) {
	makefile, err := os.ReadFile("../../Makefile")
	coretest.Must(t, err)
	_, rest, _ := strings.Cut(string(makefile), "\nIMAGE_TOOLS      := ")
	names, _, _ := strings.Cut(rest, "\n")
	if diff := cmp.Diff(strings.Fields(names), diagnose.Tools()); diff != "" {
		t.Errorf("IMAGE_TOOLS (-) and doctor (+):\n%s", diff)
	}
}

// mountTable has one mount of a folder, which is shared if optional says so.
func mountTable(dir, optional string) string {
	return fmt.Sprintf("1 0 8:1 / / rw - ext4 /dev/sda rw\n2 1 8:1 / %s/kubelet rw%s - ext4 /dev/sda rw\n", dir, optional)
}

// newNode makes a node with one disk, below a folder.
func newNode(t *testing.T, dir string) diagnose.Node {
	t.Helper()
	write := func(path, text string) {
		coretest.Must(t, os.MkdirAll(filepath.Dir(filepath.Join(dir, path)), 0o755))
		coretest.Must(t, os.WriteFile(filepath.Join(dir, path), []byte(text), 0o600))
	}
	write("proc/sys/kernel/osrelease", "6.18.0\n")
	write("proc/self/mountinfo", mountTable(dir, " shared:7"))
	write("sys/block/nvme0n1/device/serial", "node-a-boot\n")
	write("sys/block/nvme0n1/dev", "259:0\n")
	write("sys/block/nvme0n1/size", "2048\n")
	write("sys/module/nvme/version", "1.0\n")
	write("dev/nvme0n1", "")
	write("state/volumes/.keep", "")
	coretest.Must(t, os.MkdirAll(filepath.Join(dir, "kubelet"), 0o755))
	listener, err := net.Listen("unix", filepath.Join(dir, "csi.sock"))
	coretest.Must(t, err)
	t.Cleanup(func() { coretest.Must(t, listener.Close()) })
	return diagnose.Node{
		Sources:  []auto.Source{{Name: "guest", Provider: source{id: "a"}}},
		Devices:  device.Roots{Dev: filepath.Join(dir, "dev"), Sys: filepath.Join(dir, "sys")},
		MaxDisks: 8, StateDir: filepath.Join(dir, "state"), MountDirs: []string{filepath.Join(dir, "kubelet")},
		Sockets: []string{filepath.Join(dir, "csi.sock")}, Proc: filepath.Join(dir, "proc"),
	}
}

// classes is an orchestrator with storage classes.
type classes struct {
	all []orchestrator.StorageClass
	err error
}

func (c classes) StorageClasses(context.Context) ([]orchestrator.StorageClass, error) {
	return c.all, c.err
}

// A storage class that CreateVolume would refuse is a failure: without it the first claim shows the mistake.
func TestExamineClasses(t *testing.T) {
	class := func(change func(*orchestrator.StorageClass)) classes {
		c := orchestrator.StorageClass{Name: "oxide", Parameters: map[string]string{"diskType": "distributed"}}
		change(&c)
		return classes{all: []orchestrator.StorageClass{c}}
	}
	for name, test := range map[string]struct {
		classes classes
		want    orchestrator.Status
		found   string
	}{
		"good":      {class(func(*orchestrator.StorageClass) {}), orchestrator.StatusOK, "oxide"},
		"none":      {classes{}, orchestrator.StatusWarning, "none names this plugin"},
		"forbidden": {classes{err: errors.New("may not")}, orchestrator.StatusWarning, "may not"},
		"a typing mistake": {class(func(c *orchestrator.StorageClass) { c.Parameters["disktype"] = "local" }),
			orchestrator.StatusFailure, `"disktype" is not known`},
		"a wrong filesystem": {class(func(c *orchestrator.StorageClass) { c.FSType = "zfs" }), orchestrator.StatusFailure, `"zfs"`},
		"a wrong mount flag": {class(func(c *orchestrator.StorageClass) { c.MountFlags = []string{"loop"} }),
			orchestrator.StatusFailure, "option is not allowed"},
	} {
		t.Run(name, func(t *testing.T) {
			found := diagnose.ExamineClasses(t.Context(), test.classes, "kubernetes")
			checkComplete(t, found)
			if len(found) != 1 || found[0].Status != test.want || !strings.Contains(found[0].Found, test.found) {
				t.Errorf("got %+v, want %s with %s", found, test.want, test.found)
			}
		})
	}
}

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

	"github.com/google/go-cmp/cmp"

	"github.com/oxidecomputer/oxide-csi-plugin/cmd/oxide-csi/diagnose"
	"github.com/oxidecomputer/oxide-csi-plugin/core/coretest"
	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// notOK are the lines that are not ok, by what was looked at.
func notOK(findings []metadata.Finding) map[string]metadata.Status {
	lines := map[string]metadata.Status{}
	for _, f := range findings {
		if f.Status != metadata.StatusOK {
			lines[f.Looked] = f.Status
		}
	}
	return lines
}

// checkComplete checks that each line is complete, and that one that is not ok has a next step.
func checkComplete(t *testing.T, findings []metadata.Finding) {
	t.Helper()
	for _, f := range findings {
		if f.Area == "" || f.Looked == "" || f.Found == "" || (f.Next == "") != (f.Status == metadata.StatusOK) {
			t.Errorf("incomplete: %+v", f)
		}
	}
}

// Each problem of a rack is one line, and the others stay ok. The examination only reads.
func TestExamineRack(t *testing.T) {
	const warning, failure = metadata.StatusWarning, metadata.StatusFailure
	for name, test := range map[string]struct {
		arrange func(t *testing.T, r *coretest.Rig, client *rack.Client)
		config  func(*rack.Config)
		after   time.Duration
		want    map[string]metadata.Status
	}{
		"all is well": {want: map[string]metadata.Status{}},
		"token": {
			config: func(c *rack.Config) { c.Token = rack.FixedToken("oxide-token-canary") },
			want:   map[string]metadata.Status{"API, certificate, token and project": failure},
		},
		"project": {
			config: func(c *rack.Config) { c.Project = "another" },
			want:   map[string]metadata.Status{"API, certificate, token and project": failure},
		},
		"host": {
			config: func(c *rack.Config) { c.Host = "http://127.0.0.1:1" },
			want:   map[string]metadata.Status{"API, certificate, token and project": failure},
		},
		"quota full": {
			arrange: func(t *testing.T, r *coretest.Rig, _ *rack.Client) {
				coretest.Must(t, r.Sim.Set(t.Context(), simtest.Settings{QuotaBytes: new(int64(1))}))
			},
			want: map[string]metadata.Status{"quota": failure},
		},
		"disk faulted": {
			arrange: func(t *testing.T, r *coretest.Rig, _ *rack.Client) {
				coretest.Must(t, r.Sim.SetDiskState(t.Context(), r.Create(t, "x"), "faulted"))
			},
			want: map[string]metadata.Status{"faulted disks": failure},
		},
		"restart that does not end, and a record of a disk that is gone": {
			arrange: func(t *testing.T, r *coretest.Rig, client *rack.Client) {
				_, err := client.CreateRecord(t.Context(), "csi-restart-"+diskname.ForCluster(coretest.Cluster)+"-0-0",
					fmt.Sprintf(`{"v":1,"cluster":%q,"id":"1","instance":%q}`, coretest.Cluster, r.Node(t, "node-a")))
				coretest.Must(t, err)
				_, err = client.CreateRecord(t.Context(), "csi-detach-"+coretest.NoVolumeID,
					fmt.Sprintf(`{"v":1,"cluster":%q,"disk":%q,"instance":"x"}`, coretest.Cluster, coretest.NoVolumeID))
				coretest.Must(t, err)
			},
			after: 2 * time.Hour,
			want:  map[string]metadata.Status{"planned restarts": warning, "records": warning},
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
			client, err := rack.New(config)
			coretest.Must(t, err)
			r.ClearCalls(t)
			found := diagnose.ExamineRack(t.Context(), client, nil, coretest.Cluster, time.Now().Add(test.after))
			checkComplete(t, found)
			if diff := cmp.Diff(test.want, notOK(found)); diff != "" {
				t.Errorf("-want +got:\n%s\n%+v", diff, found)
			}
			want := 0
			for _, status := range test.want {
				want = max(want, map[metadata.Status]int{warning: 1, failure: 2}[status])
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

// The number of calls does not grow with the number of volumes, but with the pages of the list: 10,000 disks are 21.
func TestRackIsExaminedInOnePass(t *testing.T) {
	r := coretest.New(t)
	calls := func() int {
		client := newRack(t, r)
		r.ClearCalls(t)
		diagnose.ExamineRack(t.Context(), client, nil, coretest.Cluster, time.Now())
		total := 0
		for _, count := range r.Calls(t) {
			total += count
		}
		return total
	}
	before := calls()
	const count = 1100
	for i := range count {
		r.UserDisk(
			t,
			coretest.Project,
			fmt.Sprintf("disk-%d", i),
			rack.NewDescription(coretest.Cluster, fmt.Sprint(i), "").Encode(),
		)
	}
	if after := calls(); after-before > 3 {
		t.Errorf("%d calls, and %d with %d disks", before, after, count)
	}
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
	const warning, failure = metadata.StatusWarning, metadata.StatusFailure
	for name, test := range map[string]struct {
		change func(t *testing.T, n *diagnose.Node, dir string)
		want   map[string]metadata.Status
	}{
		"all is well": {func(*testing.T, *diagnose.Node, string) {}, map[string]metadata.Status{}},
		"sources disagree": {func(_ *testing.T, n *diagnose.Node, _ string) {
			n.Sources = append(n.Sources, diagnose.IdentitySource{Name: "nomad", Provider: source{id: "b"}})
		}, map[string]metadata.Status{"identity": failure}},
		"one source of two is down": {func(_ *testing.T, n *diagnose.Node, _ string) {
			n.Sources = append(n.Sources, diagnose.IdentitySource{Name: "nomad", Provider: source{err: metadata.ErrNotReady}})
		}, map[string]metadata.Status{}},
		"no source": {func(_ *testing.T, n *diagnose.Node, _ string) {
			n.Sources[0].Provider = source{err: metadata.ErrNotReady}
		}, map[string]metadata.Status{"identity": failure}},
		"not shared": {func(t *testing.T, n *diagnose.Node, dir string) {
			coretest.Must(t, os.WriteFile(filepath.Join(n.Proc, "self/mountinfo"), []byte(mountTable(dir, "")), 0o600))
		}, map[string]metadata.Status{"mount propagation": failure}},
		"Nomad's folder is not shared": {func(t *testing.T, n *diagnose.Node, dir string) {
			nomad := filepath.Join(dir, "nomad/client/csi/node/oxide")
			coretest.Must(t, os.MkdirAll(nomad, 0o755))
			table := mountTable(dir, " shared:7") + fmt.Sprintf("3 1 8:1 / %s rw - ext4 /dev/sda rw\n", nomad)
			coretest.Must(t, os.WriteFile(filepath.Join(n.Proc, "self/mountinfo"), []byte(table), 0o600))
		}, map[string]metadata.Status{"mount propagation": failure}},
		"no driver": {func(t *testing.T, n *diagnose.Node, _ string) {
			coretest.Must(t, os.RemoveAll(filepath.Join(n.Devices.Sys, "module/nvme")))
		}, map[string]metadata.Status{"NVMe driver": failure}},
		"no device node": {func(t *testing.T, n *diagnose.Node, _ string) {
			coretest.Must(t, os.Remove(filepath.Join(n.Devices.Dev, "nvme0n1")))
		}, map[string]metadata.Status{"/dev": failure}},
		"full": {func(_ *testing.T, n *diagnose.Node, _ string) { n.MaxDisks = 1 },
			map[string]metadata.Status{"places for disks": warning}},
		"no state folder": {func(_ *testing.T, n *diagnose.Node, _ string) { n.StateDir += "-none" },
			map[string]metadata.Status{"state folder": warning}},
		"no socket": {func(_ *testing.T, n *diagnose.Node, _ string) { n.Sockets[0] += "-none" },
			map[string]metadata.Status{"socket": failure}},
		"no disks": {func(t *testing.T, n *diagnose.Node, _ string) {
			coretest.Must(t, os.RemoveAll(filepath.Join(n.Devices.Sys, "block/nvme0n1")))
		}, map[string]metadata.Status{"NVMe disks": warning}},
	} {
		t.Run(name, func(t *testing.T) {
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
		Sources:  []diagnose.IdentitySource{{Name: "guest", Provider: source{id: "a"}}},
		Devices:  device.Roots{Dev: filepath.Join(dir, "dev"), Sys: filepath.Join(dir, "sys")},
		MaxDisks: 8, StateDir: filepath.Join(dir, "state"), MountDirs: []string{filepath.Join(dir, "kubelet")},
		Sockets: []string{filepath.Join(dir, "csi.sock")}, Proc: filepath.Join(dir, "proc"),
	}
}

// classes is an orchestrator with storage classes.
type classes struct {
	all []metadata.StorageClass
	err error
}

func (c classes) StorageClasses(context.Context) ([]metadata.StorageClass, error) {
	return c.all, c.err
}

// A storage class that CreateVolume would refuse is a failure: without it the first claim shows the mistake.
func TestExamineClasses(t *testing.T) {
	class := func(change func(*metadata.StorageClass)) classes {
		c := metadata.StorageClass{Name: "oxide", Parameters: map[string]string{"diskType": "distributed"}}
		change(&c)
		return classes{all: []metadata.StorageClass{c}}
	}
	for name, test := range map[string]struct {
		classes classes
		want    metadata.Status
		found   string
	}{
		"good":      {class(func(*metadata.StorageClass) {}), metadata.StatusOK, "oxide"},
		"none":      {classes{}, metadata.StatusWarning, "none names this plugin"},
		"forbidden": {classes{err: errors.New("may not")}, metadata.StatusWarning, "may not"},
		"a typing mistake": {class(func(c *metadata.StorageClass) { c.Parameters["disktype"] = "local" }),
			metadata.StatusFailure, `"disktype" is not known`},
		"a wrong filesystem": {class(func(c *metadata.StorageClass) { c.FSType = "zfs" }), metadata.StatusFailure, `"zfs"`},
		"a wrong mount flag": {class(func(c *metadata.StorageClass) { c.MountFlags = []string{"loop"} }),
			metadata.StatusFailure, "option is not allowed"},
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

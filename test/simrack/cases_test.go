// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package simrack_test

import (
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack"
)

// scene is the common setup for the cases of docs/reference/rack.md §11: project proj; a caller with the role
// limited-collaborator; d, a detached disk of 1 GiB with 512-byte blocks; i, a stopped instance without disks.
type scene struct {
	*world
	d, i string // IDs
}

func newScene(t *testing.T, o simrack.Options) scene {
	t.Helper()
	return newWorld(t, o).scene()
}

func (w *world) scene() scene {
	w.token = w.newToken("limited-collaborator")
	return scene{world: w, d: w.disk("d"), i: w.instance("i")}
}

const storageQuota = "Insufficient capacity: Storage Limit Exceeded: Not enough storage to complete request. Either remove " +
	"unneeded disks and snapshots to free up resources or contact the rack operator to request a capacity increase."

// oneRequest is a case of one request in a scene, after some preparation.
type oneRequest struct {
	id           string
	options      simrack.Options
	prepare      func(s scene)
	token        string // "none at all" for no header, else a role; empty for limited-collaborator
	method, path string // {d} and {i} stand for IDs
	body         string
	want         wants
	then         func(t *testing.T, s scene, r reply)
}

// cases are the cases of docs/reference/rack.md §11 that consist of one request after some preparation.
var cases = []oneRequest{
	{id: "T1", token: "none at all", method: "GET", path: "/disks?project=proj",
		want: wants{401, "Unauthorized", "credentials missing or invalid"}},
	{id: "T2", method: "GET", path: "/nonexistent", want: wants{404, "", "Not Found"}},
	{id: "T3", method: "PUT", path: "/projects", want: wants{405, "", "Method Not Allowed"},
		then: func(t *testing.T, _ scene, r reply) {
			if got := r.header.Get("Allow"); got != "GET, POST" {
				t.Errorf("allow is %q", got)
			}
		}},
	{id: "T4", token: "none at all", method: "GET", path: "/ping", want: wants{status: 200},
		then: func(t *testing.T, _ scene, r reply) {
			if r.raw != `{"status":"ok"}` {
				t.Errorf("got %s", r.raw)
			}
		}},
	{id: "T5", token: "viewer", method: "POST", path: "/disks?project=proj", body: body("e"),
		want: wants{403, "Forbidden", "Forbidden"}},
	{id: "T6", method: "POST", path: "/instances?project=proj", body: "{",
		want: wants{400, "", "unable to parse JSON body: EOF while parsing an object…"}},
	{id: "T7", token: "none at all", method: "POST", path: "/disks?project=proj", body: "{",
		want: wants{400, "", "unable to parse JSON body:…"}},

	{id: "S1", method: "GET", path: "/disks/{d}?project=proj",
		want: wants{400, "InvalidRequest", "when providing disk as an ID project should not be specified"}},
	{id: "S2", method: "GET", path: "/disks",
		want: wants{400, "", "unable to parse query string: missing field `project`"}},
	{id: "S3", method: "GET", path: "/instances/my_instance?project=proj",
		want: wants{400, "", "bad parameter in URL path: data did not match any variant of untagged enum NameOrId"}},
	{id: "S4", method: "GET", path: "/instances?project=nonexistent",
		want: wants{404, "ObjectNotFound", `not found: project with name "nonexistent"`}},
	{id: "S6", prepare: func(s scene) { s.disk("a"); s.disk("b"); s.disk("c") },
		method: "GET", path: "/disks?project=proj&sort_by=name_descending", want: wants{status: 200},
		then: func(t *testing.T, _ scene, r reply) {
			if diff := cmp.Diff([]string{"d", "c", "b", "a"}, r.names()); diff != "" {
				t.Error(diff)
			}
		}},
	{id: "S7", method: "GET", path: "/instances/i",
		want: wants{400, "InvalidRequest", "instance should either be UUID or project should be specified"}},

	{id: "D1", method: "POST", path: "/disks?project=proj", body: body("e"), want: wants{status: 201},
		then: func(t *testing.T, s scene, r reply) {
			if r.state() != "creating" || r.SnapshotID != nil || r.ImageID != nil {
				t.Errorf("got %s", r.raw)
			}
			if !strings.Contains(r.raw, `"snapshot_id":null`) || !strings.Contains(r.raw, `"image_id":null`) {
				t.Errorf("sources are not null in %s", r.raw)
			}
			if got := s.must("GET", "/disks/"+r.ID, ""); got.state() != "detached" {
				t.Errorf("then %s", got.raw)
			}
		}},
	{id: "D2", method: "POST", path: "/disks?project=proj", body: body("d"),
		want: wants{400, "ObjectAlreadyExists", `already exists: disk "d"`},
		then: func(t *testing.T, s scene, _ reply) {
			if got := s.must("GET", "/disks?project=proj", ""); len(got.Items) != 1 {
				t.Errorf("%d disks", len(got.Items))
			}
		}},
	{id: "D3", method: "POST", path: "/disks?project=proj", body: body("e", "size", "536870912"),
		want: wants{400, "InvalidValue", `unsupported value for "size": total size must be at least 1 GiB`}},
	{id: "D4", method: "POST", path: "/disks?project=proj", body: body("e", "size", "1073742336"),
		want: wants{400, "InvalidValue", `unsupported value for "size": total size must be a multiple of 1 GiB`}},
	{id: "D5", method: "POST", path: "/disks?project=proj", body: body("e", "size", fmt.Sprint(1024*gib)),
		want: wants{400, "InvalidValue", `unsupported value for "size": total size must be less than 1023 GiB`}},
	{id: "D6", method: "POST", path: "/disks?project=proj",
		body: diskBody("e", "distributed", `{"type":"blank","block_size":1024}`),
		want: wants{400, "", "unable to parse JSON body:…"}},
	{id: "D7", method: "POST", path: "/disks?project=proj", body: body(strings.Repeat("a", 64)),
		want: wants{400, "", "…name may contain at most 63 characters"}},
	{id: "D8", method: "POST", path: "/disks?project=proj", body: body("a123456789abcdef0123456789abcdef"),
		want: wants{400, "", "…name cannot be a UUID to avoid ambiguity with IDs"}},
	{id: "D9", prepare: func(s scene) { s.must("DELETE", "/disks/d?project=proj", "") },
		method: "POST", path: "/disks?project=proj", body: body("d"), want: wants{status: 201},
		then: func(t *testing.T, s scene, r reply) {
			if r.ID == s.d {
				t.Error("the new disk has the old ID")
			}
		}},
	{id: "D10", options: simrack.Options{SpaceBytes: 17 * gib, QuotaBytes: 1000 * gib},
		method: "POST", path: "/disks?project=proj", body: body("e", "size", fmt.Sprint(300*gib)),
		want: wants{507, "InsufficientCapacity", "Insufficient capacity: Not enough storage"}},

	{id: "X1", method: "DELETE", path: "/disks/{d}", want: wants{status: 204},
		then: func(t *testing.T, s scene, _ reply) {
			s.do("GET", "/disks/d?project=proj", "").check(t,
				wants{404, "ObjectNotFound", `not found: disk with name "d"`})
		}},
	{id: "X2", prepare: func(s scene) { s.must("DELETE", "/disks/d?project=proj", "") },
		method: "DELETE", path: "/disks/d?project=proj",
		want: wants{404, "ObjectNotFound", `not found: disk with name "d"`}},
	{id: "X3", prepare: func(s scene) { s.attach(s.i, s.d) }, method: "DELETE", path: "/disks/{d}",
		want: wants{400, "InvalidRequest", `disk cannot be deleted in state "attached"`}},

	{id: "X4", prepare: func(s scene) { s.snapshot("s", s.d); s.must("DELETE", "/disks/"+s.d, "") },
		method: "GET", path: "/snapshots/s?project=proj", want: wants{status: 200},
		then: func(t *testing.T, s scene, r reply) {
			if r.state() != "ready" || r.DiskID != s.d {
				t.Errorf("got %s", r.raw)
			}
		}},

	{id: "A1", method: "POST", path: "/instances/{i}/disks/attach", body: `{"disk":"d"}`, want: wants{status: 202},
		then: isOn},
	{id: "A2", prepare: func(s scene) { s.attach(s.i, s.d) },
		method: "POST", path: "/instances/{i}/disks/attach", body: `{"disk":"d"}`, want: wants{status: 202}, then: isOn},
	{id: "A3", prepare: func(s scene) { s.attach(s.instance("i2"), s.d) },
		method: "POST", path: "/instances/{i}/disks/attach", body: `{"disk":"d"}`,
		want: wants{400, "InvalidRequest", `cannot attach disk "d": disk is attached to another instance`}},
	{id: "A4", prepare: func(s scene) { s.setRun(s.i, "running") },
		method: "POST", path: "/instances/{i}/disks/attach", body: `{"disk":"d"}`,
		want: wants{400, "InvalidRequest", "cannot attach disk: instance is not fully stopped"}},
	{id: "A5", prepare: func(s scene) { s.fill(s.i, 12) },
		method: "POST", path: "/instances/{i}/disks/attach", body: `{"disk":"d"}`,
		want: wants{400, "InvalidRequest", "cannot attach more than 12 disks to instance"}},
	{id: "A6", prepare: func(s scene) { s.operate("POST", "/instances", `{"name":"o","project":"other"}`, 201, nil) },
		method: "POST", path: "/instances/{i}/disks/attach", body: `{"disk":"{o-boot}"}`,
		want: wants{400, "InvalidRequest", "disk must be in the same project as the instance"}},
	{id: "A7", method: "POST", path: "/instances/{i}/disks/attach", body: `{"disk":"nope"}`,
		want: wants{404, "ObjectNotFound", `not found: disk with name "nope"`}},
	{id: "A8", prepare: func(s scene) { s.setRun(s.i, "failed") },
		method: "POST", path: "/instances/{i}/disks/attach", body: `{"disk":"d"}`,
		want: wants{400, "InvalidRequest", "cannot attach disk to instance in failed state"}},
	{id: "A9", options: simrack.Options{StateTime: time.Hour},
		prepare: func(s scene) { s.setRun(s.i, "running"); s.must("POST", "/instances/"+s.i+"/stop", "") },
		method:  "POST", path: "/instances/{i}/disks/attach", body: `{"disk":"d"}`,
		want: wants{400, "InvalidRequest", "cannot attach disk: instance is not fully stopped"}},

	{id: "B1", prepare: func(s scene) { s.attach(s.i, s.d) },
		method: "POST", path: "/instances/{i}/disks/detach", body: `{"disk":"d"}`, want: wants{status: 202}, then: isOff},
	{id: "B2", method: "POST", path: "/instances/{i}/disks/detach", body: `{"disk":"d"}`,
		want: wants{status: 202}, then: isOff},
	{id: "B3", prepare: func(s scene) { s.attach(s.i, s.d); s.setRun(s.i, "running") },
		method: "POST", path: "/instances/{i}/disks/detach", body: `{"disk":"d"}`,
		want: wants{400, "InvalidRequest", "cannot detach disk: instance is not fully stopped"}},
	{
		id:      "B4",
		options: simrack.Options{Instances: []string{"booted"}},
		prepare: func(s scene) { s.setRun("booted", "stopped") },
		method:  "POST",
		path:    "/instances/booted/disks/detach?project=proj",
		body:    `{"disk":"booted-boot"}`,
		want:    wants{409, "Conflict", "boot disk cannot be detached"},
	},
	{id: "B5", prepare: func(s scene) { s.attach(s.i, s.d); s.setRun(s.i, "failed") },
		method: "POST", path: "/instances/{i}/disks/detach", body: `{"disk":"d"}`, want: wants{status: 202}, then: isOff},

	{id: "I2", method: "POST", path: "/instances/{i}/stop", want: wants{status: 202},
		then: func(t *testing.T, s scene, r reply) {
			again := s.must("POST", "/instances/"+s.i+"/stop", "")
			if r.RunState != "stopped" || !again.Updated.Equal(r.Updated) {
				t.Errorf("got %s, then %s", r.raw, again.raw)
			}
		}},
	{id: "I3", options: simrack.Options{StateTime: time.Hour},
		prepare: func(s scene) { s.setRun(s.i, "running"); s.must("POST", "/instances/"+s.i+"/stop", "") },
		method:  "POST", path: "/instances/{i}/start",
		want: wants{409, "Conflict", "instance must finish stopping before it can be started"}},
	{id: "I4", method: "POST", path: "/instances/{i}/reboot",
		want: wants{400, "InvalidRequest", "cannot reboot an instance in state stopped with no VMM"}},
	{id: "I5", prepare: func(s scene) { s.setRun(s.i, "running") }, method: "DELETE", path: "/instances/{i}",
		want: wants{400, "InvalidRequest", "cannot delete instance: instance is running or has not yet fully stopped"}},
	{id: "I7", prepare: func(s scene) { s.must("DELETE", "/instances/"+s.i, "") },
		method: "POST", path: "/instances/{i}/start", want: wants{404, "ObjectNotFound", `not found: instance with id…`}},

	{id: "N1", method: "POST", path: "/snapshots?project=proj", body: snapshotBody("s", "d"), want: wants{status: 201},
		then: func(t *testing.T, s scene, r reply) {
			if r.state() != "ready" || r.Size != gib || r.DiskID != s.d || strings.Contains(r.raw, "block_size") {
				t.Errorf("got %s", r.raw)
			}
			if got := s.must("GET", "/disks/"+s.d, ""); got.state() != "detached" {
				t.Errorf("the disk is %s", got.raw)
			}
		}},
	{id: "N2", prepare: func(s scene) { s.attach(s.i, s.d); s.setRun(s.i, "running") },
		method: "POST", path: "/snapshots?project=proj", body: snapshotBody("s", "{d}"), want: wants{status: 201},
		then: func(t *testing.T, s scene, r reply) {
			if got := s.must("GET", "/disks/"+s.d, ""); got.state() != "attached" || r.DiskID != s.d {
				t.Errorf("snapshot %s of %s", r.raw, got.raw)
			}
		}},
	{id: "N3", prepare: func(s scene) {
		s.must("POST", "/disks?project=proj", restoreBody("r", s.snapshot("s", s.d), true))
	},
		method: "POST", path: "/snapshots?project=proj", body: snapshotBody("s2", "r"),
		want: wants{400, "InvalidRequest", "can't create a snapshot of a read-only disk"}},
	{id: "N4", prepare: func(s scene) { s.snapshot("s", s.d) },
		method: "POST", path: "/snapshots?project=proj", body: snapshotBody("s", "{d}"),
		want: wants{400, "ObjectAlreadyExists", `already exists: snapshot "s"`}},
	{id: "N5", prepare: func(s scene) {
		s.must("POST", "/disks?project=proj", body("large", "size", fmt.Sprint(2*gib)))
		s.snapshot("s", "large")
	},
		method: "POST", path: "/disks?project=proj", body: restoreBody("r", "{s}", false),
		want: wants{400, "InvalidRequest", "disk size 1073741824 must be greater than or equal to snapshot size 2147483648"}},
	{id: "N6", prepare: otherSnapshot, method: "POST", path: "/disks?project=proj", body: restoreBody("r", "{s}", false),
		want: wants{400, "InvalidRequest", "snapshot does not belong to this project"}},
	{id: "N7", prepare: func(s scene) {
		s.must("POST", "/disks?project=proj", restoreBody("child", s.snapshot("s", s.d), false))
	},
		method: "DELETE", path: "/snapshots/{s}", want: wants{status: 204},
		then: func(t *testing.T, s scene, _ reply) {
			if got := s.must("GET", "/disks/child?project=proj", ""); got.state() != "detached" || got.SnapshotID == nil {
				t.Errorf("the child is %s", got.raw)
			}
			s.do("GET", "/snapshots/s?project=proj", "").
				check(t, wants{404, "ObjectNotFound", `not found: snapshot with name "s"`})
		}},
	{id: "N8", prepare: func(s scene) { s.snapshot("s", s.d) },
		method: "POST", path: "/disks?project=proj", body: restoreBody("r", "{s}", true), want: wants{status: 201},
		then: func(t *testing.T, s scene, r reply) {
			if r.state() != "detached" || !r.ReadOnly || r.SnapshotID != s.snapshotOf("s") || r.BlockSize != 512 {
				t.Errorf("got %s", r.raw)
			}
		}},
	{id: "N9", prepare: func(s scene) { s.operate("POST", "/instances", `{"name":"o","project":"other"}`, 201, nil) },
		method: "POST", path: "/snapshots?project=proj", body: snapshotBody("s", "{o-boot}"),
		want: wants{400, "InvalidRequest", "can't create a snapshot of a disk in a different project"}},

	{
		id:      "Q1",
		options: simrack.Options{QuotaBytes: 2 * gib},
		prepare: func(s scene) { s.must("DELETE", "/disks/"+s.d, "") },
		method:  "POST",
		path:    "/disks?project=proj",
		body:    body("e", "size", fmt.Sprint(3*gib)),
		want:    wants{507, "InsufficientCapacity", storageQuota},
	},
	{
		id:      "Q2",
		options: simrack.Options{QuotaBytes: 2 * gib},
		prepare: func(s scene) { s.must("DELETE", "/disks/"+s.d, "") },
		method:  "POST",
		path:    "/disks?project=proj",
		body:    body("e", "size", fmt.Sprint(2*gib)),
		want:    wants{status: 201},
	},
	// A quota of 0 means no quota here. So the quota is one processor, and another instance uses it.
	{id: "Q4", options: simrack.Options{CPUQuota: 1, Instances: []string{"other"}},
		method: "POST", path: "/instances/{i}/start",
		want: wants{507, "InsufficientCapacity", "Insufficient capacity: vCPU Limit Exceeded…"},
		then: func(t *testing.T, s scene, _ reply) {
			if got := s.must("GET", "/instances/"+s.i, ""); got.RunState != "stopped" {
				t.Errorf("i is %s", got.RunState)
			}
		}},

	{id: "G1", method: "POST", path: "/anti-affinity-groups?project=proj", body: groupBody("g"), want: wants{status: 201},
		then: func(t *testing.T, s scene, r reply) {
			project := s.must("GET", "/projects/proj", "").ID
			if r.ID == "" || r.Name != "g" || r.Description != "why" || r.Policy != "allow" || r.FailureDomain != "sled" ||
				r.ProjectID != project || r.Created.IsZero() || !r.Modified.Equal(r.Created) {
				t.Errorf("got %s", r.raw)
			}
			if again := s.must("GET", "/anti-affinity-groups/"+r.ID, ""); again.raw != r.raw {
				t.Errorf("then %s", again.raw)
			}
		}},
	{id: "G2", prepare: func(s scene) { s.group("g") },
		method: "POST", path: "/anti-affinity-groups?project=proj", body: groupBody("g", "description", `"another"`),
		want: wants{400, "ObjectAlreadyExists", `already exists: anti-affinity-group "g"`},
		then: func(t *testing.T, s scene, _ reply) {
			if got := s.must(
				"GET",
				"/anti-affinity-groups?project=proj",
				"",
			); len(got.Items) != 1 ||
				got.Items[0].Description != "why" {
				t.Errorf("got %s", got.raw)
			}
		}},
	{id: "G3", token: "viewer", method: "POST", path: "/anti-affinity-groups?project=proj", body: groupBody("g"),
		want: wants{403, "Forbidden", "Forbidden"}},
	{
		id:      "G4",
		prepare: func(s scene) { s.group("g") },
		method:  "PUT",
		path:    "/anti-affinity-groups/g?project=proj",
		body:    `{"description":"because"}`,
		want:    wants{status: 200},
		then: func(t *testing.T, s scene, r reply) {
			if r.Name != "g" || r.Description != "because" || r.Policy != "allow" || !r.Modified.After(r.Created) {
				t.Errorf("got %s", r.raw)
			}
			if again := s.must("GET", "/anti-affinity-groups/"+r.ID, ""); again.raw != r.raw {
				t.Errorf("then %s", again.raw)
			}
		},
	},
	{id: "G5", prepare: func(s scene) { s.group("g") }, method: "DELETE", path: "/anti-affinity-groups/g?project=proj",
		want: wants{status: 204},
		then: func(t *testing.T, s scene, _ reply) {
			s.do("POST", "/anti-affinity-groups?project=proj", groupBody("g")).check(t, wants{status: 201})
			if got := s.must("GET", "/anti-affinity-groups?project=proj", ""); len(got.Items) != 1 {
				t.Errorf("got %s", got.raw)
			}
		}},
	{id: "G6", method: "GET", path: "/anti-affinity-groups/g?project=proj",
		want: wants{404, "ObjectNotFound", `not found: anti-affinity-group with name "g"`}},

	{id: "Y3", method: "GET", path: "/instances/{i}/external-ips", want: wants{status: 200},
		then: func(t *testing.T, _ scene, r reply) {
			if r.Items == nil || len(r.Items) != 0 || r.NextPage != nil {
				t.Errorf("got %s", r.raw)
			}
		}},
	{id: "Y4", method: "GET", path: "/network-interfaces",
		want: wants{400, "", "unable to parse query string: missing field `instance`"}},
	{id: "Y5", token: "none", method: "GET", path: "/network-interfaces?instance={i}",
		want: wants{404, "ObjectNotFound", "…not found: instance with id"}},

	{id: "R1", method: "GET", path: "/system/hardware/racks", want: wants{403, "Forbidden", "Forbidden"}},
	{id: "R2", token: "fleet-viewer", method: "GET", path: "/system/hardware/racks", want: wants{status: 200},
		then: func(t *testing.T, _ scene, r reply) {
			if len(r.Items) != 1 || r.Items[0].ID == "" {
				t.Errorf("got %s", r.raw)
			}
		}},
}

// otherCases have a test function of their own, named by the ID.
var otherCases = []string{"S5", "B6", "I1", "I6", "I8", "Q3", "U1", "U2", "Y1", "Y2"}

// TestEveryCaseInTheDocsHasATest compares the list of docs/reference/rack.md §11 with the tests here.
func TestEveryCaseInTheDocsHasATest(t *testing.T) {
	page, err := os.ReadFile("../../docs/reference/rack.md")
	if err != nil {
		t.Fatal(err)
	}
	var want []string
	for _, row := range regexp.MustCompile("`([A-Z][0-9]+)`\\s").FindAllStringSubmatch(string(page), -1) {
		want = append(want, row[1])
	}
	got := slices.Clone(otherCases)
	for _, c := range cases {
		got = append(got, c.id)
	}
	slices.Sort(want)
	slices.Sort(got)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("cases of the page (-) and of the tests (+): %s", diff)
	}
}

func TestCases(t *testing.T) {
	for _, test := range cases {
		t.Run(test.id, func(t *testing.T) {
			t.Parallel()
			s := newScene(t, test.options)
			if test.prepare != nil {
				test.prepare(s)
			}
			as := s.world
			switch test.token {
			case "":
			case "none at all":
				as = s.as("")
			default:
				as = s.as(s.newToken(test.token))
			}
			fill := strings.NewReplacer("{d}", s.d, "{i}", s.i, "{o-boot}", s.diskOf("o"), "{s}", s.snapshotOf("s"))
			r := as.do(test.method, fill.Replace(test.path), fill.Replace(test.body))
			r.check(t, test.want)
			if test.then != nil {
				test.then(t, s, r)
			}
		})
	}
}

func isOn(t *testing.T, s scene, r reply) {
	if r.state() != "attached" || r.State.Instance != s.i || r.ID != s.d {
		t.Errorf("got %s", r.raw)
	}
}

func isOff(t *testing.T, s scene, r reply) {
	if r.state() != "detached" || r.State.Instance != "" || r.ID != s.d {
		t.Errorf("got %s", r.raw)
	}
}

// fill attaches new disks until the instance has n.
func (w *world) fill(instance string, n int) {
	w.t.Helper()
	have := len(w.must("GET", "/instances/"+instance+"/disks", "").Items)
	for ; have < n; have++ {
		name := fmt.Sprintf("fill-%d", have)
		if r := w.attach(instance, w.disk(name)); r.status != 202 {
			w.t.Fatalf("attach %s: %s", name, r.raw)
		}
	}
}

// otherSnapshot creates the snapshot s in another project.
func otherSnapshot(s scene) {
	s.operate("POST", "/instances", `{"name":"o","project":"other"}`, 201, nil)
	s.must("POST", "/snapshots?project=other", snapshotBody("s", s.diskOf("o")))
}

// snapshotOf is the ID of the snapshot with the name in any project; empty if there is none.
func (w *world) snapshotOf(name string) string {
	for _, project := range []string{"proj", "other"} {
		if r := w.do("GET", "/snapshots/"+name+"?project="+project, ""); r.status == 200 {
			return r.ID
		}
	}
	return ""
}

// diskOf is the ID of the first disk of an instance; empty if there is none.
func (w *world) diskOf(instance string) string {
	for _, d := range w.machines()[instance].Disks {
		return d.ID
	}
	return ""
}

func TestTheLargestDisk(t *testing.T) {
	w := newWorld(t, simrack.Options{})
	w.do("POST", "/disks?project=proj", body("d", "size", fmt.Sprint(1023*gib))).check(t, wants{status: 201})
	w.do("POST", "/disks?project=proj", diskBody("l", "local", "", "size", fmt.Sprint(1024*gib))).
		check(t, wants{status: 201})
}

func TestS5PagesFollowTheirTokens(t *testing.T) {
	s := newScene(t, simrack.Options{})
	s.disk("e")
	s.disk("f")
	path, sizes := "/disks?project=proj&limit=2", []int{}
	for {
		r := s.must("GET", path, "")
		sizes = append(sizes, len(r.Items))
		if r.NextPage == nil {
			break
		}
		path = "/disks?limit=2&page_token=" + *r.NextPage
	}
	if diff := cmp.Diff([]int{2, 1, 0}, sizes); diff != "" {
		t.Error(diff)
	}
}

func TestB6SlotsAreTheLowestFree(t *testing.T) {
	s := newScene(t, simrack.Options{})
	for _, name := range []string{"a", "b", "c"} {
		s.disk(name)
	}
	for _, name := range []string{"a", "b", "c", "d"} {
		s.attach(s.i, name).check(t, wants{status: 202})
	}
	s.detach(s.i, "b").check(t, wants{status: 202})
	s.detach(s.i, "c").check(t, wants{status: 202})
	s.attach(s.i, "c").check(t, wants{status: 202})
	s.attach(s.i, "b").check(t, wants{status: 202})
	if diff := cmp.Diff(map[string]int{"a": 0, "c": 1, "b": 2, "d": 3}, s.slots("i")); diff != "" {
		t.Error(diff)
	}
}

func TestI1StopShowsStoppingThenStopped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newTimedWorld(t, simrack.Options{StateTime: 20 * time.Millisecond}).scene()
		s.setRun("i", "running")
		if r := s.must("POST", "/instances/i/stop?project=proj", ""); r.RunState != "stopping" || r.status != 202 {
			t.Errorf("got %d %s", r.status, r.raw)
		}
		s.waitRun(s.i, "stopped")
		s.attach(s.i, s.d).check(t, wants{status: 202})
	})
}

func TestI6DeletingAnInstanceDetachesAndKeepsItsDisks(t *testing.T) {
	s := newScene(t, simrack.Options{Instances: []string{"booted"}})
	id := s.machines()["booted"].ID
	s.setRun(id, "stopped")
	s.fill(id, 8)
	if got := len(s.must("GET", "/instances/"+id+"/disks", "").Items); got != 8 {
		t.Fatalf("%d disks on the instance", got)
	}
	s.do("DELETE", "/instances/"+id, "").check(t, wants{status: 204})
	s.do("GET", "/instances/"+id, "").check(t, wants{404, "ObjectNotFound", `not found: instance with id "` + id + `"`})
	s.must("DELETE", "/disks/"+s.d, "")
	disks := s.must("GET", "/disks?project=proj", "").Items
	if len(disks) != 8 || slices.ContainsFunc(disks, func(d reply) bool { return d.state() != "detached" }) {
		t.Errorf("got %v", disks)
	}
}

func TestI8StartKeepsDisksAndSlots(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newTimedWorld(t, simrack.Options{StateTime: 10 * time.Millisecond}).scene()
		s.fill(s.i, 3)
		s.attach(s.i, "d").check(t, wants{status: 202})
		s.detach(s.i, "fill-1").check(t, wants{status: 202})
		before := s.slots("i")
		if r := s.must("POST", "/instances/"+s.i+"/start", ""); r.RunState != "starting" || r.status != 202 {
			t.Errorf("got %d %s", r.status, r.raw)
		}
		s.waitRun(s.i, "running")
		if diff := cmp.Diff(before, s.slots("i")); diff != "" {
			t.Error(diff)
		}
		if r := s.must("GET", "/disks/"+s.d, ""); r.state() != "attached" {
			t.Errorf("d is %s", r.state())
		}
	})
}

func TestQ3UtilizationFollowsDisksAndSnapshots(t *testing.T) {
	w := newWorld(t, simrack.Options{QuotaBytes: 10 * gib, CPUQuota: 7})
	used := func() int64 { return w.must("GET", "/utilization", "").Provisioned.Storage }
	w.must("POST", "/disks?project=proj", body("e", "size", fmt.Sprint(2*gib)))
	if got := used(); got != 2*gib {
		t.Errorf("with a disk of 2 GiB: %d", got)
	}
	w.snapshot("s", "e")
	if got := used(); got != 4*gib {
		t.Errorf("with its snapshot: %d", got)
	}
	w.must("DELETE", "/disks/e?project=proj", "")
	if got := used(); got != 2*gib {
		t.Errorf("with the snapshot alone: %d", got)
	}
	w.must("POST", "/disks?project=proj", restoreBody("e", w.snapshotOf("s"), false, "size", fmt.Sprint(4*gib)))
	if got := used(); got != 6*gib {
		t.Errorf("with a larger disk made from it: %d", got)
	}
	w.must("DELETE", "/disks/e?project=proj", "")
	w.must("DELETE", "/snapshots/s?project=proj", "")
	w.must("POST", "/disks?project=proj", body("e", "size", fmt.Sprint(2*gib)))
	w.must("POST", "/disks?project=proj", diskBody("l", "local", "", "size", fmt.Sprint(3*gib)))
	if got := used(); got != 5*gib {
		t.Errorf("with a local disk of 3 GiB as well: %d", got)
	}
	w.must("DELETE", "/disks/e?project=proj", "")
	w.must("DELETE", "/disks/l?project=proj", "")
	if got := used(); got != 0 {
		t.Errorf("with none: %d", got)
	}
	if r := w.must("GET", "/utilization", ""); r.Capacity.Storage != 10*gib || r.Capacity.CPUs != 7 {
		t.Errorf("got %s", r.raw)
	}
	w.operate("POST", "/instances", `{"name":"n","run_state":"running"}`, 201, nil)
	if r := w.must("GET", "/utilization", ""); r.Provisioned.CPUs != 1 || r.Provisioned.Memory != gib || used() != gib {
		t.Errorf("with an instance: %s", r.raw)
	}
	w.setRun("n", "stopped")
	if r := w.must("GET", "/utilization", ""); r.Provisioned.CPUs != 0 || r.Provisioned.Memory != 0 {
		t.Errorf("with a stopped one: %s", r.raw)
	}
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package simrack_test

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack"
)

// TestSnapshotErrors has the rows of docs/reference/rack.md §1, §2 and §6 that are not cases of §11.
func TestSnapshotErrors(t *testing.T) {
	for _, test := range []struct {
		name         string
		options      simrack.Options
		prepare      func(s scene)
		method, path string
		body         string
		want         wants
	}{
		{name: "by ID with project", prepare: func(s scene) { s.snapshot("s", s.d) }, method: "GET", path: "/snapshots/{s}?project=proj",
			want: wants{400, "InvalidRequest", "when providing snapshot as an ID, project should not be specified"}},
		{name: "by name without project", method: "DELETE", path: "/snapshots/s",
			want: wants{400, "InvalidRequest", "snapshot should either be an ID or project should be specified"}},
		{name: "list without project", method: "GET", path: "/snapshots", want: wants{400, "", "unable to parse query string: missing field `project`"}},
		{name: "missing", method: "DELETE", path: "/snapshots/s?project=proj", want: wants{404, "ObjectNotFound", `not found: snapshot with name "s"`}},
		{name: "of a missing disk", method: "POST", path: "/snapshots?project=proj", body: snapshotBody("s", "nope"),
			want: wants{404, "ObjectNotFound", `not found: disk with name "nope"`}},
		{name: "of a local disk", prepare: func(s scene) { s.must("POST", "/disks?project=proj", diskBody("l", "local", "")) },
			method: "POST", path: "/snapshots?project=proj", body: snapshotBody("s", "l"),
			want: wants{400, "InvalidRequest", "can't create a snapshot of a local storage disk"}},
		{name: "without space", options: simrack.Options{SpaceBytes: gib}, method: "POST", path: "/snapshots?project=proj", body: snapshotBody("s", "d"),
			want: wants{507, "InsufficientCapacity", "Insufficient capacity: Not enough storage"}},
		{name: "on a full quota", options: simrack.Options{QuotaBytes: gib}, method: "POST", path: "/snapshots?project=proj", body: snapshotBody("s", "d"),
			want: wants{507, "InsufficientCapacity", storageQuota}},
		{name: "the name before the quota", options: simrack.Options{QuotaBytes: 2 * gib}, prepare: func(s scene) { s.snapshot("s", s.d) },
			method: "POST", path: "/snapshots?project=proj", body: snapshotBody("s", "d"),
			want: wants{400, "ObjectAlreadyExists", `already exists: snapshot "s"`}},
		{name: "of a faulted disk", prepare: func(s scene) { s.setDisk(s.d, "faulted") }, method: "POST", path: "/snapshots?project=proj", body: snapshotBody("s", "d"),
			want: wants{503, "ServiceNotAvailable", "Service Unavailable"}},
		{name: "of a disk in maintenance", prepare: func(s scene) { s.setDisk(s.d, "maintenance") }, method: "POST", path: "/snapshots?project=proj", body: snapshotBody("s", "d"),
			want: wants{503, "ServiceNotAvailable", "Service Unavailable"}},
		{name: "by a viewer", prepare: func(s scene) { s.token = s.newToken("viewer") }, method: "POST", path: "/snapshots?project=proj", body: snapshotBody("s", "d"),
			want: wants{403, "Forbidden", "Forbidden"}},
		{name: "a disk from a missing snapshot", method: "POST", path: "/disks?project=proj", body: restoreBody("r", missingID, false),
			want: wants{404, "ObjectNotFound", `not found: snapshot with id "` + missingID + `"`}},
		{name: "a read-only disk of another size", prepare: func(s scene) { s.snapshot("s", s.d) },
			method: "POST", path: "/disks?project=proj", body: restoreBody("r", "{s}", true, "size", fmt.Sprint(2*gib)),
			want: wants{400, "InvalidRequest", "read-only disk size 2147483648 must be equal to source snapshot size 1073741824"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			s := newScene(t, test.options)
			if test.prepare != nil {
				test.prepare(s)
			}
			fill := strings.NewReplacer("{d}", s.d, "{s}", s.snapshotOf("s"))
			s.do(test.method, fill.Replace(test.path), fill.Replace(test.body)).check(t, test.want)
		})
	}
}

const missingID = "00000000-0000-4000-8000-000000000000"

func TestSnapshotsAreListedByPages(t *testing.T) {
	s := newScene(t, simrack.Options{})
	for _, name := range []string{"c", "a", "b"} {
		s.snapshot(name, s.d)
	}
	otherSnapshot(s)
	first := s.must("GET", "/snapshots?project=proj&limit=2", "")
	second := s.must("GET", "/snapshots?limit=2&page_token="+*first.NextPage, "")
	if diff := cmp.Diff([]string{"a", "b", "c"}, append(first.names(), second.names()...)); diff != "" {
		t.Error(diff)
	}
}

func TestSDKSeesSnapshots(t *testing.T) {
	w := newWorld(t, simrack.Options{})
	c, ctx := w.sdk(), t.Context()
	d := w.disk("d")
	made, err := c.SnapshotCreate(
		ctx,
		oxide.SnapshotCreateParams{
			Project: "proj",
			Body:    &oxide.SnapshotCreate{Name: "s", Description: "", Disk: oxide.NameOrId(d)},
		},
	)
	if err != nil {
		t.Fatal(err)
	}
	seen, err := c.SnapshotView(ctx, oxide.SnapshotViewParams{Snapshot: oxide.NameOrId(made.Id)})
	if err != nil {
		t.Fatal(err)
	}
	if seen.State != oxide.SnapshotStateReady || seen.DiskId != d || seen.Size != oxide.ByteCount(gib) ||
		seen.TimeCreated == nil {
		t.Errorf("got %+v", seen)
	}
	readOnly := true
	r, err := c.DiskCreate(ctx, oxide.DiskCreateParams{Project: "proj", Body: &oxide.DiskCreate{
		Name: "r", Size: oxide.ByteCount(gib),
		DiskBackend: oxide.DiskBackend{Value: &oxide.DiskBackendDistributed{
			DiskSource: oxide.DiskSource{Value: &oxide.DiskSourceSnapshot{SnapshotId: made.Id, ReadOnly: &readOnly}},
		}},
	}})
	if err != nil {
		t.Fatal(err)
	}
	if r.SnapshotId != made.Id || !*r.ReadOnly || r.State.State() != oxide.DiskStateStateDetached {
		t.Errorf("got %+v", r)
	}
	if err := c.SnapshotDelete(ctx, oxide.SnapshotDeleteParams{Snapshot: oxide.NameOrId(made.Id)}); err != nil {
		t.Error(err)
	}
	wantError(
		t,
		c.SnapshotDelete(ctx, oxide.SnapshotDeleteParams{Snapshot: oxide.NameOrId(made.Id)}),
		oxide.ErrObjectNotFound,
	)
}

// TestSnapshotInProgress reads the states of disk and snapshot while the snapshot is created, and attempts a second
// snapshot.
func TestSnapshotInProgress(t *testing.T) {
	w, g := newGuestWorld(t, simrack.Options{Instances: []string{"n"}})
	d := w.disk("d")
	g.creating = make(chan chan struct{})
	made := make(chan reply)
	go func() { made <- w.do("POST", "/snapshots?project=proj", snapshotBody("s", "d")) }()
	goOn := <-g.creating
	if got := w.must("GET", "/disks/"+d, ""); got.state() != "maintenance" {
		t.Errorf("the disk is %s", got.raw)
	}
	if got := w.must("GET", "/snapshots/s?project=proj", ""); got.state() != "creating" {
		t.Errorf("the snapshot is %s", got.raw)
	}
	w.do("POST", "/snapshots?project=proj", snapshotBody("s2", "d")).check(t, wants{409, "Conflict", "volume repair lock"})
	w.do("DELETE", "/snapshots/s?project=proj", "").
		check(t, wants{400, "InvalidRequest", "snapshot cannot be deleted in state Creating"})
	// What changes the disk is refused, and does not wait.
	n := w.machines()["n"].ID
	w.attach(n, d).check(t, wants{400, "InvalidRequest", `cannot attach disk "d": invalid state maintenance`})
	w.do("POST", "/instances/"+n+"/disks/detach", `{"disk":"`+d+`"}`).
		check(t, wants{400, "InvalidRequest", `cannot detach disk "d": invalid state maintenance`})
	w.do("DELETE", "/disks/"+d, "").check(t, wants{400, "InvalidRequest", `disk cannot be deleted in state "maintenance"`})
	close(goOn)
	if r := <-made; r.status != 201 || r.state() != "ready" {
		t.Errorf("got %d %s", r.status, r.raw)
	}
	if got := w.must("GET", "/disks/"+d, ""); got.state() != "detached" {
		t.Errorf("the disk is %s", got.raw)
	}
}

// TestSnapshotsHoldData restores disks from a snapshot: each holds the contents of the first disk at that time, then
// zeros. Later writes to one of the disks do not reach the others.
func TestSnapshotsHoldData(t *testing.T) {
	w, g := newGuestWorld(t, simrack.Options{Instances: []string{"n"}, Hotplug: true})
	n := w.machines()["n"]
	d := w.disk("d")
	w.attach(n.ID, d).check(t, wants{status: 202})
	write := func(id, text string) {
		t.Helper()
		f, err := os.OpenFile(filepath.Join(n.Guest, "dev", g.Device(n.ID, id)), os.O_WRONLY|os.O_SYNC, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if _, err := f.WriteAt([]byte(text), gib-512); err != nil {
			t.Fatal(err)
		}
	}
	read := func(id string) string {
		t.Helper()
		raw := make([]byte, 6)
		f, err := os.Open(filepath.Join(n.Guest, "dev", g.Device(n.ID, id)))
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if _, err := f.ReadAt(raw, gib-512); err != nil {
			t.Fatal(err)
		}
		return string(bytes.TrimRight(raw, "\x00"))
	}
	write(d, "first")
	s := w.snapshot("s", d)
	write(d, "second")
	r := w.must("POST", "/disks?project=proj", restoreBody("r", s, false, "size", fmt.Sprint(2*gib))).ID
	w.attach(n.ID, r).check(t, wants{status: 202})
	if got := read(r); got != "first" {
		t.Errorf("the restored disk has %q", got)
	}
	write(r, "third")
	if got := read(d); got != "second" {
		t.Errorf("the disk has %q", got)
	}
	again := w.must("POST", "/disks?project=proj", restoreBody("r2", s, false)).ID
	w.attach(n.ID, again).check(t, wants{status: 202})
	if got := read(again); got != "first" {
		t.Errorf("the second restored disk has %q", got)
	}
	for _, id := range []string{d, r, again} {
		w.setRun(n.ID, "stopped")
		w.detach(n.ID, id).check(t, wants{status: 202})
		w.must("DELETE", "/disks/"+id, "")
	}
	if got := w.leftovers(); got != `{"disks":0,"snapshots":1,"loops":0,"mounts":0,"files":1}` {
		t.Errorf("leftovers: %s", got)
	}
	w.must("DELETE", "/snapshots/"+s, "")
	if got := w.leftovers(); got != `{"disks":0,"snapshots":0,"loops":0,"mounts":0,"files":0}` {
		t.Errorf("leftovers: %s", got)
	}
}

func TestFailingSnapshots(t *testing.T) {
	internal := wants{500, "Internal", "Internal Server Error"}
	w, g := newGuestWorld(t, simrack.Options{})
	d := w.disk("d")
	s := w.snapshot("s", d)
	for call, try := range map[string]func(){
		"create snapshot": func() {
			w.do("POST", "/snapshots?project=proj", snapshotBody("s2", d)).check(t, internal)
			w.do("GET", "/snapshots/s2?project=proj", "").check(t, wants{404, "ObjectNotFound", `not found: snapshot with name "s2"`})
			if got := w.must("GET", "/disks/"+d, ""); got.state() != "detached" {
				t.Errorf("the disk is %s", got.raw)
			}
		},
		"restore disk": func() {
			w.do("POST", "/disks?project=proj", restoreBody("r", s, false)).check(t, internal)
			w.do("GET", "/disks/r?project=proj", "").check(t, wants{404, "ObjectNotFound", `not found: disk with name "r"`})
		},
		"delete snapshot": func() {
			w.do("DELETE", "/snapshots/"+s, "").check(t, internal)
			w.do("GET", "/snapshots/"+s, "").check(t, wants{status: 200})
		},
	} {
		g.fail = call
		try()
	}
	g.fail = ""
}

func TestSnapshotsOutliveTheProcess(t *testing.T) {
	dir := t.TempDir()
	w, kill := startProcess(t, dir)
	d := w.disk("d")
	s := w.must("POST", "/snapshots?project=proj", snapshotBody("s", d))
	r := w.must("POST", "/disks?project=proj", restoreBody("r", s.ID, true))
	kill()
	w, _ = startProcess(t, dir)
	if got := w.must("GET", "/snapshots/s?project=proj", ""); got.raw != s.raw {
		t.Errorf("the snapshot is %s, was %s", got.raw, s.raw)
	}
	if got := w.must("GET", "/disks/r?project=proj", ""); got.raw != r.raw {
		t.Errorf("the disk is %s, was %s", got.raw, r.raw)
	}
	if got := w.must("GET", "/utilization", "").Provisioned.Storage; got != 4*gib {
		t.Errorf("%d bytes count, want 4 GiB with the instance's boot disk", got)
	}
}

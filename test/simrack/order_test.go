// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package simrack_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack"
)

// Each test here sends requests that violate two rows of a table in docs/reference/rack.md at the same time: the
// earlier row must answer. Rows are named by their condition. If two neighbouring rows cannot be violated at the same
// time, why gives the reason.

const missingUUID = "00000000-1111-4222-8333-444444444444"

func fromSnapshot(name string, changes ...string) string {
	return diskBody(name, "distributed", fmt.Sprintf(`{"type":"snapshot","snapshot_id":%q}`, missingUUID), changes...)
}

func TestCreateChecksComeInOrder(t *testing.T) {
	tests := []struct {
		first, second string
		why           string
		options       simrack.Options
		role          string
		project       string // empty means "proj"
		body          string
		want          wants
	}{
		{first: "parsing", second: "no token", role: "no token", body: body("e", "size", "-1"),
			want: wants{400, "", "unable to parse JSON body: size: invalid value: integer `-1`, expected u64"}},
		{first: "no token", second: "project missing", role: "no token", project: "nope", body: body("e"),
			want: wants{401, "Unauthorized", "credentials missing or invalid"}},
		{first: "project missing", second: "source missing", project: "nope", body: fromSnapshot("e"),
			want: wants{404, "ObjectNotFound", `not found: project with name "nope"`}},
		{first: "no role on the project", second: "source missing", role: "none", body: fromSnapshot("e"),
			want: wants{404, "ObjectNotFound", `not found: project with name "proj"`}},
		{first: "no permission", second: "source missing", role: "viewer", body: fromSnapshot("e"),
			want: wants{403, "Forbidden", "Forbidden"}},
		{first: "source missing", second: "snapshot of another project", why: "a snapshot that is missing has no project"},
		{first: "snapshot of another project", second: "read-only size", why: "there are no snapshots yet"},
		{first: "read-only size", second: "size below the snapshot's", why: "there are no snapshots yet"},
		{first: "size below the snapshot's", second: "block size", why: "there are no snapshots yet"},
		{first: "source missing", second: "block size", body: fromSnapshot("e", "size", "1"),
			want: wants{404, "ObjectNotFound", `not found: snapshot with id "` + missingUUID + `"`}},
		{first: "image missing", second: "name taken",
			body: diskBody("d", "distributed", fmt.Sprintf(`{"type":"image","image_id":%q}`, missingUUID)),
			want: wants{404, "ObjectNotFound", `not found: image with id "` + missingUUID + `"`}},
		{
			first:  "block size",
			second: "below 1 GiB",
			body:   body("e", "size", "536870913"),
			want: wants{
				400,
				"InvalidValue",
				`unsupported value for "size and block_size": total size must be a multiple of block size 512`,
			},
		},
		{
			first:  "block size of a local disk",
			second: "not a multiple of 1 GiB",
			body:   diskBody("e", "local", "", "size", "1073742336"),
			want: wants{
				400,
				"InvalidValue",
				`unsupported value for "size and block_size": total size must be a multiple of block size 4096`,
			},
		},
		{first: "below 1 GiB", second: "not a multiple of 1 GiB", body: body("e", "size", "536870912"),
			want: wants{400, "InvalidValue", `unsupported value for "size": total size must be at least 1 GiB`}},
		{first: "not a multiple of 1 GiB", second: "above 1023 GiB", body: body("e", "size", fmt.Sprint(1024*gib+512)),
			want: wants{400, "InvalidValue", `unsupported value for "size": total size must be a multiple of 1 GiB`}},
		{first: "above 1023 GiB", second: "quota", options: simrack.Options{QuotaBytes: 2 * gib},
			body: body("e", "size", fmt.Sprint(1024*gib)),
			want: wants{400, "InvalidValue", `unsupported value for "size": total size must be less than 1023 GiB`}},
		{first: "quota", second: "name taken", options: simrack.Options{QuotaBytes: gib}, body: body("d"),
			want: wants{507, "InsufficientCapacity", storageQuota}},
		{first: "name taken", second: "space", options: simrack.Options{SpaceBytes: gib}, body: body("d"),
			want: wants{400, "ObjectAlreadyExists", `already exists: disk "d"`}},
	}
	for _, test := range tests {
		t.Run(test.first+" before "+test.second, func(t *testing.T) {
			if test.why != "" {
				t.Log(test.why)
				return
			}
			t.Parallel()
			w := newWorld(t, test.options)
			w.disk("d")
			project := test.project
			if project == "" {
				project = "proj"
			}
			w.withRole(test.role).do("POST", "/disks?project="+project, test.body).check(t, test.want)
		})
	}
}

// withRole is the world with a token of that role; empty means the rack's first token.
func (w *world) withRole(role string) *world {
	switch role {
	case "":
		return w
	case "no token":
		return w.as("")
	}
	return w.as(w.newToken(role))
}

func TestAttachChecksComeInOrder(t *testing.T) {
	tests := []struct {
		first, second string
		why           string
		prepare       func(s scene)
		instance      string // empty means i
		disk          string // empty means d
		want          wants
	}{
		{first: "instance missing", second: "disk missing", instance: missingUUID, disk: "nope",
			want: wants{404, "ObjectNotFound", `not found: instance with id "` + missingUUID + `"`}},
		{first: "disk missing", second: "different projects", why: "a disk that is missing has no project"},
		{first: "different projects", second: "already attached here",
			why: "a disk that is attached here is of this project"},
		{first: "different projects", second: "attached elsewhere", disk: "{o-boot}",
			prepare: func(s scene) { s.operate("POST", "/instances", `{"name":"o","project":"other"}`, 201, nil) },
			want:    wants{400, "InvalidRequest", "disk must be in the same project as the instance"}},
		{first: "already attached here", second: "attached elsewhere", why: "a disk is on one instance at most"},
		{first: "already attached here", second: "instance has a VMM",
			prepare: func(s scene) { s.attach(s.i, s.d); s.setRun(s.i, "running") }, want: wants{status: 202}},
		{first: "already attached here", second: "instance failed",
			prepare: func(s scene) { s.attach(s.i, s.d); s.setRun(s.i, "failed") }, want: wants{status: 202}},
		{first: "already attached here", second: "already 12 disks",
			prepare: func(s scene) { s.attach(s.i, s.d); s.fill(s.i, 12) }, want: wants{status: 202}},
		{
			first:  "attached elsewhere",
			second: "another unsuitable state",
			why:    "attached is one state, the others are others",
		},
		{first: "attached elsewhere", second: "instance has a VMM",
			prepare: func(s scene) { s.attach(s.instance("i2"), s.d); s.setRun(s.i, "running") },
			want:    wants{400, "InvalidRequest", `cannot attach disk "d": disk is attached to another instance`}},
		{first: "another unsuitable state", second: "instance has a VMM",
			prepare: func(s scene) { s.setDisk(s.d, "maintenance"); s.setRun(s.i, "running") },
			want:    wants{400, "InvalidRequest", `cannot attach disk "d": invalid state maintenance`}},
		{first: "another unsuitable state", second: "instance failed",
			prepare: func(s scene) { s.setDisk(s.d, "faulted"); s.setRun(s.i, "failed") },
			want:    wants{400, "InvalidRequest", `cannot attach disk "d": invalid state faulted`}},
		{first: "instance has a VMM", second: "instance failed", why: "a failed instance has no VMM"},
		{first: "instance has a VMM", second: "already 12 disks",
			prepare: func(s scene) { s.fill(s.i, 12); s.setRun(s.i, "migrating") },
			want:    wants{400, "InvalidRequest", "cannot attach disk: instance is not fully stopped"}},
		{first: "instance failed", second: "already 12 disks",
			prepare: func(s scene) { s.fill(s.i, 12); s.setRun(s.i, "failed") },
			want:    wants{400, "InvalidRequest", "cannot attach disk to instance in failed state"}},
		{first: "already 12 disks", second: "local disk on an instance being placed",
			why: "an instance that is being placed shows starting here, which an earlier row rejects"},
	}
	for _, test := range tests {
		t.Run(test.first+" before "+test.second, func(t *testing.T) {
			runMove(t, "attach", test.why, test.prepare, test.instance, test.disk, test.want)
		})
	}
}

func TestDetachChecksComeInOrder(t *testing.T) {
	tests := []struct {
		first, second string
		why           string
		prepare       func(s scene)
		instance      string
		disk          string
		want          wants
	}{
		{first: "instance missing", second: "disk missing", instance: missingUUID, disk: "nope",
			want: wants{404, "ObjectNotFound", `not found: instance with id "` + missingUUID + `"`}},
		{first: "disk missing", second: "disk detached", why: "a disk that is missing has no state"},
		{first: "disk missing", second: "instance has a VMM", disk: "nope",
			prepare: func(s scene) { s.setRun(s.i, "running") },
			want:    wants{404, "ObjectNotFound", `not found: disk with name "nope"`}},
		{first: "disk detached", second: "attached elsewhere", why: "a disk has one state"},
		{first: "disk detached", second: "instance has a VMM",
			prepare: func(s scene) { s.setRun(s.i, "running") }, want: wants{status: 202}},
		{first: "disk detached", second: "instance failed",
			prepare: func(s scene) { s.setRun(s.i, "failed") }, want: wants{status: 202}},
		{first: "attached elsewhere", second: "another state", why: "a disk has one state"},
		{first: "attached elsewhere", second: "instance has a VMM",
			prepare: func(s scene) { s.attach(s.instance("i2"), s.d); s.setRun(s.i, "running") },
			want:    wants{400, "InvalidRequest", `cannot detach disk "d": disk is attached to another instance`}},
		{first: "another state", second: "instance has a VMM",
			prepare: func(s scene) { s.setDisk(s.d, "maintenance"); s.setRun(s.i, "running") },
			want:    wants{400, "InvalidRequest", `cannot detach disk "d": invalid state maintenance`}},
		{first: "instance has a VMM", second: "boot disk", prepare: func(s scene) { s.machine("booted", "running") },
			instance: "{booted}", disk: "booted-boot",
			want: wants{400, "InvalidRequest", "cannot detach disk: instance is not fully stopped"}},
		{first: "boot disk of a stopped instance", second: "boot disk of a failed instance",
			why: "an instance has one state; the second row is the next test"},
		{first: "boot disk of a failed instance", second: "nothing", prepare: func(s scene) { s.machine("booted", "failed") },
			instance: "{booted}", disk: "booted-boot",
			want: wants{400, "InvalidRequest", "cannot detach disk from instance in failed state"}},
	}
	for _, test := range tests {
		t.Run(test.first+" before "+test.second, func(t *testing.T) {
			runMove(t, "detach", test.why, test.prepare, test.instance, test.disk, test.want)
		})
	}
}

// machine creates an instance with a boot disk and brings it to a state.
func (w *world) machine(name, state string) {
	w.t.Helper()
	w.operate("POST", "/instances", fmt.Sprintf(`{"name":%q,"run_state":"stopped"}`, name), 201, nil)
	w.setRun(name, state)
}

// runMove attaches or detaches in its own scene.
func runMove(t *testing.T, what, why string, prepare func(scene), instance, disk string, want wants) {
	t.Helper()
	if why != "" {
		t.Log(why)
		return
	}
	t.Parallel()
	s := newScene(t, simrack.Options{})
	if prepare != nil {
		prepare(s)
	}
	if instance == "" {
		instance = s.i
	}
	if disk == "" {
		disk = s.d
	}
	machines := s.machines()
	fill := strings.NewReplacer("{o-boot}", s.diskOf("o"), "{booted}", machines["booted"].ID)
	before := s.do("GET", "/disks/"+s.d, "").raw
	r := s.do("POST", "/instances/"+fill.Replace(instance)+"/disks/"+what, fmt.Sprintf(`{"disk":%q}`, fill.Replace(disk)))
	r.check(t, want)
	if after := s.do("GET", "/disks/"+s.d, "").raw; after != before {
		t.Errorf("the disk has changed from %s to %s", before, after)
	}
}

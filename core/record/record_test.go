// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package record

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
	"github.com/oxidecomputer/oxide-csi-plugin/test/pages"
)

const (
	volume   = "0f9c5a0e-8c1f-4c6b-9f58-5d2f0b6f2a11"
	instance = "5a2d7c34-1b7e-4f0a-8d7f-8b1c2d3e4f50"
	attempt  = instance
	disk     = "csi-vavmkwdnq2g7hyu5"
)

// golden are the names and texts of all kinds of records of the cluster "prod". They are permanent since 0.1.0: other
// versions of the plugin read them, later and at the same time.
var golden = map[string]string{
	"csi-restart-jmwawjur3yrpdbh3-2-3": `{"v":1,"cluster":"prod","id":"0123456789abcdef","instance":"` + instance + `",` +
		`"by":"fedcba9876543210","beat":7,"mayStop":true,"disks":["D5xaDowfTGufWF0vC28qEQ"]}`,
	"csi-defer-jmwawjur3yrpdbh3-" + volume: `{"v":1,"cluster":"prod","disk":"` + volume + `","instance":"` + instance + `",` +
		`"untimed":true,"n":2}`,
	"csi-hold-jmwawjur3yrpdbh3-" + volume: `{"v":1,"cluster":"prod","disk":"` + volume + `","by":"fedcba9876543210"}`,
	"csi-expand-wry3agt2iornr2lat5nmvljr7dksoh5q": `{"v":1,"cluster":"prod","vol":"` + volume + `","disk":"` + volume + `",` +
		`"name":"csi-vavmkwdnq2g7hyu5","try":"` + attempt + `","bytes":21474836480}`,
	"csi-grown-" + volume: `{"v":1,"cluster":"prod","vol":"` + volume + `","disk":"` + volume + `",` +
		`"name":"csi-vavmkwdnq2g7hyu5","try":"` + attempt + `","bytes":21474836480,"commit":true}`,
	"csi-adopt-" + volume: `{"v":1,"cluster":"prod","from":"old","disk":"` + volume + `"}`,
}

// project is a rack with groups.
type project []Record

func (p *project) CreateRecord(_ context.Context, name, text string) (Record, error) {
	made := Record{ID: name, Name: name, Text: text}
	*p = append(*p, made)
	return made, nil
}

func (p *project) UpdateRecord(_ context.Context, id, text string) (found bool, err error) {
	for i := range *p {
		if (*p)[i].ID == id {
			(*p)[i].Text, found = text, true
		}
	}
	return found, nil
}

func (p *project) RecordNamed(_ context.Context, name string) (r Record, found bool, err error) {
	for _, r := range *p {
		if r.Name == name {
			return r, true, nil
		}
	}
	return r, false, nil
}

// ops is what a test does with one kind of record.
type ops struct {
	create func(p *project) error
	// again reads the record by its name, and returns an error if its fields are not those that were created.
	again func(p *project) (found bool, err error)
	list  func(p project, cluster string) (found int, newer []error)
}

func opsOf[F any, P fields[F]](k Kind[F, P], f F, key string) ops {
	return ops{
		create: func(p *project) error {
			made, err := k.Create(context.Background(), p, f)
			f = made
			return err
		},
		again: func(p *project) (bool, error) {
			got, found, err := k.Get(context.Background(), p, "prod", key)
			if err == nil && found && !reflect.DeepEqual(got, f) {
				err = fmt.Errorf("read %+v, wrote %+v", got, f)
			}
			return found, err
		},
		list: func(p project, cluster string) (int, []error) {
			found, newer := k.In(p, cluster)
			var errs []error
			for _, n := range newer {
				errs = append(errs, n.Err)
			}
			return len(found), errs
		},
	}
}

// kinds are all kinds, each with a record as in golden.
func kinds() map[string]ops {
	return map[string]ops{
		"restart": opsOf(Restarts, Restart{
			Cluster: "prod", ID: "0123456789abcdef", Instance: instance, Holder: "fedcba9876543210", Heartbeat: 7,
			MayStop: true, Volumes: ShortIDs([]string{volume}), Slot: 2, Epoch: 3,
		}, "2-3"),
		"deferral": opsOf(
			Deferrals, Deferral{Cluster: "prod", VolumeID: volume, Instance: instance, Untimed: true, Changes: 2}, volume),
		"hold": opsOf(Holds, Hold{Cluster: "prod", VolumeID: volume, Holder: "fedcba9876543210"}, volume),
		"intent": opsOf(Intents, Intent{
			Cluster: "prod", Volume: volume, Disk: volume, DiskName: disk, Attempt: attempt, SizeBytes: 20 << 30,
		}, diskname.ForWork(disk)),
		"replacement": opsOf(Replacements, Replacement{
			Cluster: "prod", Volume: volume, Disk: volume, DiskName: disk, Attempt: attempt,
			SizeBytes: 20 << 30, Committed: true,
		}, volume),
		"adoption": opsOf(Adoptions, Adoption{Cluster: "prod", From: "old", VolumeID: volume}, volume),
	}
}

// Names and texts are those that they always were, are read back as they were written, and are on the page of formats.
func TestFormatsArePermanent(t *testing.T) {
	for name, k := range kinds() {
		var p project
		if err := k.create(&p); err != nil {
			t.Fatal(err)
		}
		want, known := golden[p[0].Name]
		if !known || p[0].Text != want {
			t.Errorf("%s: %s\n%s, want\n%s", name, p[0].Name, p[0].Text, want)
		}
		pages.Shows(t, "../../docs/reference/formats.md", want)
		if found, err := k.again(&p); !found || err != nil {
			t.Errorf("%s: read by name: %t, %v", name, found, err)
		}
		if found, newer := k.list(p, "prod"); found != 1 || len(newer) > 0 {
			t.Errorf("%s: %d in the list, %v", name, found, newer)
		}
		if unread := Unread(p, "prod"); len(unread) > 0 {
			t.Errorf("%s: %v", name, unread)
		}
	}
}

// A group that only looks like a record is ignored. Only a call that needs its name is refused.
func TestGroupsThatOnlyLookLikeRecords(t *testing.T) {
	other := "c" + volume[1:]
	for name, k := range kinds() {
		var p project
		if err := k.create(&p); err != nil {
			t.Fatal(err)
		}
		real := p[0]
		for what, text := range map[string]string{
			"none":            "",
			"a word":          "spread the nodes",
			"an array":        "[1]",
			"null":            "null",
			"no version":      strings.Replace(real.Text, `"v":1,`, "", 1),
			"version 0":       strings.Replace(real.Text, `"v":1`, `"v":0`, 1),
			"no cluster":      strings.Replace(real.Text, `"cluster":"prod",`, "", 1),
			"a cut text":      real.Text[:len(real.Text)-1],
			"a wrong type":    strings.Replace(real.Text, `"v":1`, `"v":1,"instance":1,"bytes":"1","from":1,"by":1`, 1),
			"another subject": strings.NewReplacer(volume, other, instance, "", disk, "other").Replace(real.Text),
		} {
			p[0] = Record{ID: "g", Name: real.Name, Text: text}
			if what == "a wrong type" { // the last value of a repeated field counts
				p[0].Text = strings.TrimSuffix(real.Text, "}") + `,"instance":1,"bytes":"1","from":1,"by":1}`
			}
			if found, newer := k.list(p, "prod"); found != 0 || len(newer) > 0 {
				t.Errorf("%s, %s: %d in the list, %v", name, what, found, newer)
			}
			if found, err := k.again(&p); found || !errors.Is(err, ErrNoRecord) || !strings.Contains(err.Error(), real.Name) {
				t.Errorf("%s, %s: read by name: %t, %v", name, what, found, err)
			}
			if unread := Unread(p, "prod"); len(unread) != 1 || !errors.Is(unread[0], ErrNoRecord) {
				t.Errorf("%s, %s: %v", name, what, unread)
			}
		}
	}
	for _, name := range []string{
		"csi-nodes-spread", "csi-restart-" + strings.Repeat("a", 16) + "-0-1", "csi-restart-x",
		"csi-defer-" + strings.Repeat("a", 16) + "-" + volume, "spread",
	} {
		p := project{{Name: name, Text: `{"v":2,"cluster":"staging"}`}}
		if unread := Unread(p, "prod"); len(unread) > 0 {
			t.Errorf("%s: %v", name, unread)
		}
	}
	for _, name := range []string{"0-1-x", "0", "-1-1", "0-01", "x-1", "0--1"} {
		p := project{{Name: Restarts.Named("prod", name), Text: golden[Restarts.Named("prod", "2-3")]}}
		if found, newer := Restarts.In(p, "prod"); len(found)+len(newer) > 0 {
			t.Errorf("%s: %v, %v", name, found, newer)
		}
	}
}

// A record with fields that this version does not know is read, and one of a newer format is told with its name. It is
// not one of another cluster's.
func TestNewerRecords(t *testing.T) {
	for name, k := range kinds() {
		var p project
		if err := k.create(&p); err != nil {
			t.Fatal(err)
		}
		text := p[0].Text
		p[0].Text = strings.Replace(text, `"v":1`, `"v":1,"new":[{}]`, 1)
		if found, newer := k.list(p, "prod"); found != 1 || len(newer) > 0 {
			t.Errorf("%s: %d with a new field, %v", name, found, newer)
		}
		for _, changed := range []string{`"v":2`, `"v":2,"try":{},"bytes":[],"beat":"x","from":7,"untimed":1`} {
			p[0].Text = strings.Replace(text, `"v":1`, changed, 1)
			found, newer := k.list(p, "prod")
			if found != 0 || len(newer) != 1 || !errors.Is(newer[0], ErrFormat) ||
				!strings.Contains(newer[0].Error(), p[0].Name) {
				t.Errorf("%s: %d, %v", name, found, newer)
			}
			if found, err := k.again(&p); found || !errors.Is(err, ErrFormat) {
				t.Errorf("%s: read by name: %t, %v", name, found, err)
			}
			if unread := Unread(p, "prod"); len(unread) != 1 || !errors.Is(unread[0], ErrFormat) {
				t.Errorf("%s: %v", name, unread)
			}
			if unread := Unread(p, "staging"); len(unread) > 0 {
				t.Errorf("%s: in another cluster: %v", name, unread)
			}
		}
		if found, newer := k.list(p, "staging"); strings.Contains(p[0].Name, "jmwawjur3yrpdbh3") && found+len(newer) > 0 {
			t.Errorf("%s: another cluster reads it: %d, %v", name, found, newer)
		}
	}
}

// The longest names and texts fit into a group (docs/reference/rack.md §2 and §8).
func TestRecordsFit(t *testing.T) {
	const nameLimit, textLimit = 63, 512
	long, id := strings.Repeat("c", 63), uuid.NewString()
	var volumes, earlier []string
	for range 22 {
		volumes = append(volumes, uuid.NewString())
	}
	d := Deferral{
		Cluster: long, VolumeID: id, Instance: uuid.NewString(), Untimed: true, Changes: 999,
		NoDevice: time.Date(2026, 11, 30, 11, 0, 0, 123456789, time.UTC),
	}
	for range 2 * maxEarlier {
		next := d
		next.Instance, next.Earlier = uuid.NewString(), nil
		d = d.ReplacedBy(next)
		earlier = d.Earlier
	}
	if len(earlier) != maxEarlier {
		t.Errorf("%d earlier instances", len(earlier))
	}
	planned := Restart{
		Cluster: long, ID: "0123456789abcdef", Instance: id, Holder: "fedcba9876543210", Heartbeat: 999_999, MayStop: true,
		Volumes: ShortIDs(volumes), Slot: 15, Epoch: 999_999,
	}
	handedOver := planned
	handedOver.HandOver(volumes[0])
	for name, text := range map[string]string{
		Restarts.Name(planned):                        Restarts.Text(planned),
		Restarts.Name(handedOver) + "2":               Restarts.Text(handedOver),
		Deferrals.Name(d):                             Deferrals.Text(d),
		Holds.Name(Hold{Cluster: long, VolumeID: id}): Holds.Text(Hold{Cluster: long, VolumeID: id, Holder: id}),
		Intents.Named("", diskname.ForWork(long)): Intents.Text(Intent{
			Cluster: long, Volume: id, Disk: volume, DiskName: long, Attempt: id, SizeBytes: 1 << 62,
		}),
		Adoptions.Named("", id): Adoptions.Text(Adoption{Cluster: long, From: long, VolumeID: id}),
		Replacements.Named("", id): Replacements.Text(Replacement{
			Cluster: long, Volume: id, Disk: volume, DiskName: long, Attempt: id, SizeBytes: 1 << 62,
		}),
	} {
		if len(name) > nameLimit || len(text) > textLimit {
			t.Errorf("%d and %d bytes: %s %s", len(name), len(text), name, text)
		}
	}
	if handedOver.FreedVolume() != volumes[0] || len(handedOver.Volumes) != maxShortIDs-2 {
		t.Errorf("handed over: %+v", handedOver)
	}
	if got := LongIDs(planned.Volumes); len(got) != maxShortIDs || got[0] != volumes[0] {
		t.Errorf("volumes %v", got)
	}
}

// A record is replaced by its ID, and the stored text is known afterwards.
func TestReplace(t *testing.T) {
	var p project
	d, err := Deferrals.Create(t.Context(), &p, Deferral{Cluster: "prod", VolumeID: volume, Instance: instance})
	if err != nil {
		t.Fatal(err)
	}
	before := d
	d.Over = true
	d, found, err := Deferrals.Replace(t.Context(), &p, d)
	if !found || err != nil || d.Stored.Text != p[0].Text || d.Unchanged(before) ||
		!strings.Contains(p[0].Text, `"over":true`) {
		t.Errorf("%+v, %t, %v, %v", d, found, err, p)
	}
	d.Stored.ID = "gone"
	if _, found, err := Deferrals.Replace(t.Context(), &p, d); found || err != nil {
		t.Errorf("%t, %v", found, err)
	}
}

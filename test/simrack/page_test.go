// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package simrack_test

import (
	"encoding/base64"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack"
)

func TestListParametersAreCheckedInTheRacksWords(t *testing.T) {
	// The rack accepts some of these requests although they violate the schema, so the schema is not checked.
	w := newRawWorld(t, simrack.Options{})
	for _, name := range []string{"a", "b", "c"} {
		w.disk(name)
	}
	const bad = "unable to parse query string: "
	tests := []struct {
		query string
		want  wants
		names []string
	}{
		{query: "project=proj&limit=0", want: wants{400, "", bad + "expected a non-zero value"}},
		{query: "project=proj&limit=-1", want: wants{400, "", bad + "invalid digit found in string"}},
		{query: "project=proj&limit=many", want: wants{400, "", bad + "invalid digit found in string"}},
		{query: "project=proj&limit=99999999999", want: wants{400, "", bad + "number too large to fit in target type"}},
		{query: "project=proj&limit=20000", want: wants{status: 200}, names: []string{"a", "b", "c"}},
		{query: "project=proj&limit=1", want: wants{status: 200}, names: []string{"a"}},
		{query: "project=proj&sort_by=size", want: wants{400, "", bad + "unknown variant `size`, expected one of " +
			"`name_ascending`, `name_descending`, `id_ascending`"}},
		{query: "project=proj&project=proj", want: wants{400, "", bad + "duplicate field `project`"}},
		{query: "project=No-Name", want: wants{400, "", bad + "data did not match any variant of untagged enum NameOrId"}},
		{query: "project=", want: wants{400, "", bad + "data did not match any variant of untagged enum NameOrId"}},
		{query: "project=proj&colour=red", want: wants{status: 200}, names: []string{"a", "b", "c"}},
		{query: "page_token=!", want: wants{400, "", bad + "failed to parse pagination token: …"}},
		{
			query: "page_token=" + strings.Repeat("a", 513),
			want:  wants{400, "", bad + "failed to parse pagination token: too large"},
		},
		{query: "page_token=" + token("{}"), want: wants{400, "", bad + "failed to parse pagination token: corrupted token"}},
		{query: "page_token=" + token(`{"v":"v1","page_start":{"sort_by":"name_ascending","last_seen":"a"}}`),
			want: wants{400, "", bad + "failed to parse pagination token: corrupted token"}},
		{
			query: "page_token=" + token(
				`{"v":"v2","page_start":{"sort_by":"name_ascending","project":"proj","last_seen":"a"}}`,
			),
			want: wants{400, "", bad + "failed to parse pagination token: unsupported version"},
		},
	}
	for _, test := range tests {
		t.Run(test.query, func(t *testing.T) {
			r := w.do("GET", "/disks?"+test.query, "")
			r.check(t, test.want)
			if diff := cmp.Diff(test.names, r.names()); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func token(text string) string {
	return url.QueryEscape(base64.URLEncoding.EncodeToString([]byte(text)))
}

func TestTokenHoldsProjectAndOrder(t *testing.T) {
	w := newWorld(t, simrack.Options{})
	for _, name := range []string{"a", "b", "c"} {
		w.disk(name)
	}
	first := w.must("GET", "/disks?project=proj&sort_by=name_descending&limit=1", "")
	rest := w.must("GET", "/disks?project=nonexistent&sort_by=id_ascending&page_token="+*first.NextPage, "")
	if diff := cmp.Diff([]string{"b", "a"}, rest.names()); diff != "" {
		t.Error(diff)
	}
}

func TestTheLongestTokenIsShortEnough(t *testing.T) {
	long := strings.Repeat("p", 63)
	w := newWorld(t, simrack.Options{Project: long})
	w.must("POST", "/disks?project="+long, body(strings.Repeat("d", 63)))
	r := w.must("GET", "/disks?sort_by=name_descending&project="+long, "")
	if got := len(*r.NextPage); got > 512 {
		t.Errorf("%d characters", got)
	}
}

// TestPagesDoNotShift lists disks while other disks before and behind the current page come and go. A disk that exists
// all the time is listed exactly once.
func TestPagesDoNotShift(t *testing.T) {
	for _, order := range []string{"name_ascending", "name_descending", "id_ascending"} {
		t.Run(order, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, simrack.Options{})
			var stay []string
			for n := range 20 {
				name := fmt.Sprintf("stay-%02d", n)
				stay = append(stay, w.disk(name))
				w.disk(fmt.Sprintf("go-%02d", n))
			}
			seen := map[string]int{}
			path, n := "/disks?limit=3&project=proj&sort_by="+order, 0
			for {
				r := w.must("GET", path, "")
				for _, d := range r.Items {
					seen[d.ID]++
				}
				if r.NextPage == nil {
					break
				}
				if n < 20 {
					w.must("DELETE", fmt.Sprintf("/disks/go-%02d?project=proj", n), "")
					w.disk(fmt.Sprintf("a-new-%02d", n))
					w.disk(fmt.Sprintf("z-new-%02d", n))
				}
				path, n = "/disks?limit=3&page_token="+*r.NextPage, n+1
			}
			for _, id := range stay {
				if seen[id] != 1 {
					t.Errorf("disk %s was seen %d times", id, seen[id])
				}
			}
			for id, times := range seen {
				if times > 1 {
					t.Errorf("disk %s was seen %d times", id, times)
				}
			}
		})
	}
}

func TestListsByIDAreInOrderOfIDs(t *testing.T) {
	w := newWorld(t, simrack.Options{})
	var ids []string
	for n := range 10 {
		ids = append(ids, w.disk(fmt.Sprintf("d-%d", n)))
	}
	slices.Sort(ids)
	var got []string
	for _, d := range w.must("GET", "/disks?project=proj&sort_by=id_ascending", "").Items {
		got = append(got, d.ID)
	}
	if diff := cmp.Diff(ids, got); diff != "" {
		t.Error(diff)
	}
}

func TestDisksOfAnInstanceAreListedByNameWithTheBootDisk(t *testing.T) {
	w := newWorld(t, simrack.Options{Instances: []string{"n"}})
	w.setRun("n", "stopped")
	id := w.machines()["n"].ID
	for _, name := range []string{"z", "a"} {
		w.disk(name)
		w.attach(id, name).check(t, wants{status: 202})
	}
	first := w.must("GET", "/instances/n/disks?project=proj&limit=2", "")
	rest := w.must("GET", "/instances/n/disks?page_token="+*first.NextPage, "")
	if diff := cmp.Diff([]string{"a", "n-boot", "z"}, append(first.names(), rest.names()...)); diff != "" {
		t.Error(diff)
	}
}

// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package simrack_test

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack"
)

// groupBody is the request for an anti-affinity group. changes are pairs of field and JSON value; an empty value
// removes the field.
func groupBody(name string, changes ...string) string {
	f := map[string]json.RawMessage{
		"name": quote(name), "description": quote("why"), "policy": quote("allow"), "failure_domain": quote("sled"),
	}
	for n := 0; n < len(changes); n += 2 {
		if changes[n+1] == "" {
			delete(f, changes[n])
			continue
		}
		f[changes[n]] = json.RawMessage(changes[n+1])
	}
	raw, err := json.Marshal(f)
	if err != nil {
		panic(err)
	}
	return string(raw)
}

// group creates an anti-affinity group and returns its ID.
func (w *world) group(name string) string {
	w.t.Helper()
	return w.must("POST", "/anti-affinity-groups?project=proj", groupBody(name)).ID
}

// TestGroupErrors has the rows of docs/reference/rack.md §1 and §8 that are not cases of §11. The group g exists in
// each of them.
func TestGroupErrors(t *testing.T) {
	long := string(quote(strings.Repeat("ü", 513)))
	internal := wants{500, "Internal", "Internal Server Error"}
	for _, test := range []struct {
		name, role   string
		prepare      func(w *world)
		method, path string // {g} stands for g's ID
		body         string
		want         wants
	}{
		{name: "by ID with project", method: "GET", path: "/{g}?project=proj",
			want: wants{400, "InvalidRequest", "when providing anti_affinity_group as an ID, project should not be specified"}},
		{name: "by name without project", method: "DELETE", path: "/g",
			want: wants{400, "InvalidRequest", "anti_affinity_group should either be UUID or project should be specified"}},
		{name: "list without project", method: "GET", want: wants{400, "", "unable to parse query string: missing field `project`"}},
		{name: "create without project", method: "POST", body: groupBody("h"),
			want: wants{400, "", "unable to parse query string: missing field `project`"}},
		{name: "of a missing project", method: "POST", path: "?project=nope", body: groupBody("h"),
			want: wants{404, "ObjectNotFound", `not found: project with name "nope"`}},
		{name: "missing, by ID", method: "PUT", path: "/" + missingUUID, body: `{}`,
			want: wants{404, "ObjectNotFound", `not found: anti-affinity-group with id "` + missingUUID + `"`}},
		{name: "missing, to be deleted", method: "DELETE", path: "/h?project=proj",
			want: wants{404, "ObjectNotFound", `not found: anti-affinity-group with name "h"`}},
		{name: "an invalid name or ID", method: "GET", path: "/my_group?project=proj",
			want: wants{400, "", "bad parameter in URL path: data did not match any variant of untagged enum NameOrId"}},
		{name: "another policy", method: "POST", path: "?project=proj", body: groupBody("h", "policy", `"maybe"`),
			want: wants{400, "", "unable to parse JSON body: policy: unknown variant `maybe`, expected `allow` or `fail`"}},
		{name: "another failure domain", method: "POST", path: "?project=proj", body: groupBody("h", "failure_domain", `"rack"`),
			want: wants{400, "", "unable to parse JSON body: failure_domain: unknown variant `rack`, expected `sled`"}},
		{name: "without description", method: "POST", path: "?project=proj", body: groupBody("h", "description", ""),
			want: wants{400, "", "unable to parse JSON body: missing field `description`"}},
		{name: "a description that is too long", method: "POST", path: "?project=proj", body: groupBody("g", "description", long), want: internal},
		{name: "an overlong new description", method: "PUT", path: "/{g}", body: `{"description":` + long + `}`, want: internal},
		{name: "an invalid new name", method: "PUT", path: "/{g}", body: `{"name":"G"}`,
			want: wants{400, "", "unable to parse JSON body: name: name must begin with an ASCII lowercase character"}},
		{name: "a new name that is taken", prepare: func(w *world) { w.group("h") }, method: "PUT", path: "/{g}", body: `{"name":"h"}`,
			want: internal},
		{name: "changed by a viewer", role: "viewer", method: "PUT", path: "/{g}", body: `{}`, want: wants{403, "Forbidden", "Forbidden"}},
		{name: "deleted by a viewer", role: "viewer", method: "DELETE", path: "/{g}", want: wants{403, "Forbidden", "Forbidden"}},
		{name: "read without a role", role: "none", method: "GET", path: "/g?project=proj",
			want: wants{404, "ObjectNotFound", `not found: anti-affinity-group with name "g"`}},
		{name: "listed without a role", role: "none", method: "GET", path: "?project=proj",
			want: wants{404, "ObjectNotFound", `not found: project with name "proj"`}},
		{name: "without a token", role: "no token", method: "GET", path: "/{g}",
			want: wants{401, "Unauthorized", "credentials missing or invalid"}},
		{name: "its members", method: "GET", path: "/{g}/members", want: wants{404, "", "Not Found"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, simrack.Options{})
			id := w.group("g")
			if test.prepare != nil {
				test.prepare(w)
			}
			before := w.must("GET", "/anti-affinity-groups?project=proj", "").raw
			path := "/anti-affinity-groups" + strings.ReplaceAll(test.path, "{g}", id)
			w.withRole(test.role).do(test.method, path, test.body).check(t, test.want)
			if after := w.must("GET", "/anti-affinity-groups?project=proj", "").raw; after != before {
				t.Errorf("the groups have changed from %s to %s", before, after)
			}
		})
	}
}

func TestRolesForGroups(t *testing.T) {
	w := newWorld(t, simrack.Options{})
	w.as(w.newToken("limited-collaborator")).group("g")
	viewer := w.as(w.newToken("viewer"))
	viewer.do("GET", "/anti-affinity-groups/g?project=proj", "").check(t, wants{status: 200})
	viewer.do("GET", "/anti-affinity-groups?project=proj", "").check(t, wants{status: 200})
	w.as(w.newToken("limited-collaborator")).must("DELETE", "/anti-affinity-groups/g?project=proj", "")
}

func TestGroupsHaveTheLongestNamesAndDescriptions(t *testing.T) {
	w := newWorld(t, simrack.Options{})
	name, description := strings.Repeat("g", 63), strings.Repeat("ü", 512)
	r := w.must("POST", "/anti-affinity-groups?project=proj", groupBody(name, "description", string(quote(description))))
	if r.Name != name || r.Description != description {
		t.Errorf("got %s", r.raw)
	}
}

func TestPutReplacesTheGivenFields(t *testing.T) {
	for _, test := range []struct{ name, body, wantName, wantDescription string }{
		{"nothing", `{}`, "g", "why"},
		{"nulls", `{"name":null,"description":null}`, "g", "why"},
		{"the name", `{"name":"h"}`, "h", "why"},
		{"the same name", `{"name":"g"}`, "g", "why"},
		{"both", `{"name":"h","description":""}`, "h", ""},
		{"what cannot be changed", `{"policy":"fail"}`, "g", "why"},
	} {
		t.Run(test.name, func(t *testing.T) {
			w := newWorld(t, simrack.Options{})
			id := w.group("g")
			r := w.must("PUT", "/anti-affinity-groups/"+id, test.body)
			if r.Name != test.wantName || r.Description != test.wantDescription || r.Policy != "allow" ||
				!r.Modified.After(r.Created) {
				t.Errorf("got %s", r.raw)
			}
			if got := w.must("GET", "/anti-affinity-groups/"+test.wantName+"?project=proj", ""); got.ID != id {
				t.Errorf("by its name: %s", got.raw)
			}
			// The old name is free if the group has another name now.
			status := w.do("POST", "/anti-affinity-groups?project=proj", groupBody("g")).status
			if free := status == 201; free != (test.wantName != "g") {
				t.Errorf("creating g again answered %d", status)
			}
		})
	}
}

func TestGroupsAreListedLikeDisks(t *testing.T) {
	w := newWorld(t, simrack.Options{})
	w.operate("POST", "/instances", `{"name":"o","project":"other"}`, 201, nil)
	w.must("POST", "/anti-affinity-groups?project=other", groupBody("elsewhere"))
	ids := map[string]string{}
	for _, name := range []string{"b", "c", "a"} {
		ids[w.group(name)] = name
	}
	first := w.must("GET", "/anti-affinity-groups?project=proj&sort_by=name_descending&limit=2", "")
	rest := w.must("GET", "/anti-affinity-groups?page_token="+*first.NextPage, "")
	if diff := cmp.Diff([]string{"c", "b", "a"}, append(first.names(), rest.names()...)); diff != "" {
		t.Error(diff)
	}
	var byID []string
	for _, g := range w.must("GET", "/anti-affinity-groups?project=proj&sort_by=id_ascending", "").Items {
		byID = append(byID, g.ID)
	}
	if len(byID) != 3 || !slices.IsSorted(byID) || ids[byID[0]] == "" {
		t.Errorf("by ID: %v of %v", byID, ids)
	}
}

// TestConcurrentCreatesMakeOneGroup checks that a group can serve as a lock.
func TestConcurrentCreatesMakeOneGroup(t *testing.T) {
	w := newWorld(t, simrack.Options{})
	var workers sync.WaitGroup
	answers := make([]reply, 16)
	for n := range answers {
		workers.Go(func() {
			answers[n] = w.do(
				"POST",
				"/anti-affinity-groups?project=proj",
				groupBody("g", "description", fmt.Sprintf(`"%d"`, n)),
			)
		})
	}
	workers.Wait()
	made := slices.DeleteFunc(slices.Clone(answers), func(r reply) bool { return r.code() == "ObjectAlreadyExists" })
	if len(made) != 1 || made[0].status != 201 {
		t.Fatalf("%d of %d succeeded: %+v", len(made), len(answers), made)
	}
	if got := w.must("GET", "/anti-affinity-groups/g?project=proj", ""); got.raw != made[0].raw {
		t.Errorf("created %s, but there is %s", made[0].raw, got.raw)
	}
}

func TestGroupsHaveFaultsAndAreLogged(t *testing.T) {
	w := newWorld(t, simrack.Options{})
	w.fault(`{"operation":"anti_affinity_group_create","kind":"lost"}`)
	if _, _, err := w.request("POST", "/v1/anti-affinity-groups?project=proj", groupBody("g")); err == nil {
		t.Error("the answer was not lost")
	}
	if got, want := w.last(), `anti_affinity_group_create POST /v1/anti-affinity-groups 0 "lost"`; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	w.must("GET", "/anti-affinity-groups/g?project=proj", "")
	for _, operation := range []string{"list", "view", "update", "delete"} {
		w.fault(fmt.Sprintf(`{"operation":"anti_affinity_group_%s","kind":"status"}`, operation))
	}
	for _, request := range [][3]string{
		{"GET", "?project=proj", ""}, {"GET", "/g?project=proj", ""}, {"PUT", "/g?project=proj", "{}"}, {"DELETE", "/g?project=proj", ""},
	} {
		r := w.do(request[0], "/anti-affinity-groups"+request[1], request[2])
		r.check(t, wants{503, "ServiceNotAvailable", "Service Unavailable"})
	}
	w.must("GET", "/anti-affinity-groups/g?project=proj", "")
}

func TestGroupsOutliveTheProcess(t *testing.T) {
	dir := t.TempDir()
	w, kill := startProcess(t, dir)
	kept := w.group("kept")
	w.must("PUT", "/anti-affinity-groups/"+kept, `{"name":"renamed"}`)
	w.must("DELETE", "/anti-affinity-groups/"+w.group("gone"), "")
	before := w.must("GET", "/anti-affinity-groups?project=proj", "").Items
	kill()
	w, _ = startProcess(t, dir)
	after := w.must("GET", "/anti-affinity-groups?project=proj", "").Items
	if len(after) != 1 || after[0].ID != kept || after[0].Name != "renamed" ||
		!after[0].Modified.Equal(before[0].Modified) {
		t.Errorf("before %+v, after %+v", before, after)
	}
}

// TestSDKUsesGroups takes a group through its life with the Go SDK's client.
func TestSDKUsesGroups(t *testing.T) {
	w := newWorld(t, simrack.Options{})
	c, ctx := w.sdk(), t.Context()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	create := oxide.AntiAffinityGroupCreateParams{Project: "proj", Body: &oxide.AntiAffinityGroupCreate{
		Name: "g", Description: `{"epoch":1}`, Policy: oxide.AffinityPolicyAllow, FailureDomain: oxide.FailureDomainSled,
	}}
	made, err := c.AntiAffinityGroupCreate(ctx, create)
	must(err)
	if made.Name != "g" || made.Policy != oxide.AffinityPolicyAllow || made.FailureDomain != oxide.FailureDomainSled ||
		made.ProjectId == "" {
		t.Errorf("made %+v", made)
	}
	_, err = c.AntiAffinityGroupCreate(ctx, create)
	wantError(t, err, oxide.ErrObjectAlreadyExists)
	byID := oxide.NameOrId(made.Id)
	changed, err := c.AntiAffinityGroupUpdate(ctx, oxide.AntiAffinityGroupUpdateParams{
		AntiAffinityGroup: byID, Body: &oxide.AntiAffinityGroupUpdate{Name: "g", Description: `{"epoch":2}`},
	})
	must(err)
	if changed.Description != `{"epoch":2}` || changed.Id != made.Id {
		t.Errorf("changed to %+v", changed)
	}
	seen, err := c.AntiAffinityGroupView(ctx, oxide.AntiAffinityGroupViewParams{AntiAffinityGroup: "g", Project: "proj"})
	must(err)
	if diff := cmp.Diff(changed, seen); diff != "" {
		t.Error(diff)
	}
	all, err := c.AntiAffinityGroupListAllPages(ctx, oxide.AntiAffinityGroupListParams{Project: "proj"})
	must(err)
	if len(all) != 1 || all[0].Id != made.Id {
		t.Errorf("listed %+v", all)
	}
	must(c.AntiAffinityGroupDelete(ctx, oxide.AntiAffinityGroupDeleteParams{AntiAffinityGroup: byID}))
	wantError(
		t,
		c.AntiAffinityGroupDelete(ctx, oxide.AntiAffinityGroupDeleteParams{AntiAffinityGroup: byID}),
		oxide.ErrObjectNotFound,
	)
}

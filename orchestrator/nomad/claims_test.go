// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package nomad_test

import (
	"fmt"
	"maps"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator/nomad"
)

// namespaceRule is a rule of a policy.
func namespaceRule(name string, capabilities ...string) object {
	return object{"Name": name, "Capabilities": capabilities}
}

// identityWith is a Nomad with ACLs. The token is the identity of a job that has a policy with these rules for
// namespaces, beside the policy controller.policy.hcl without its own.
func identityWith(rules ...object) answers {
	return answers{
		"/v1/acl/token/self": refusal(404),
		"/v1/acl/policies":   []object{{"Name": "oxide-csi-controller"}},
		"/v1/acl/policy/oxide-csi-controller": object{"RulesJSON": object{
			"Node": object{"Policy": "read"}, "Plugin": object{"Policy": "read"}, "Namespaces": rules,
		}},
	}
}

// lostClient is a client whose node plugin the plugin's entry no longer lists.
func lostClient(instance string) answers {
	return answers{"/v1/plugin/csi/oxide": onlyB(), "/v1/node/" + nodeA: clientWith(nodeA, instance)}
}

// TestClaimed looks whether a claim from a node is found, under whatever ID the disk has in Nomad. Every answer that
// may lack a claim is an error.
func TestClaimed(t *testing.T) {
	const here, text = "instance-b", "allocation 5a7d9b11 (web), volume %s in namespace shop"
	all := []string{"csi-list-volume", "csi-read-volume", "read-job"}
	data := claimedBy()
	data["ExternalID"] = idA
	unclaimed := answers{"/v1/volumes": []object{volumeOf("data", 0)}, "/v1/volume/csi/data": data}
	both := []string{idB, idA}
	for name, test := range map[string]struct {
		change answers
		node   string
		want   string
		lost   []string
		err    bool
	}{
		"claimed here":                       {want: "data"},
		"claimed on another node":            {node: "instance-a"},
		"the node's ID is written otherwise": {node: "INSTANCE-B", want: "data"},
		"the volume's ID is written otherwise": {change: answers{"/v1/volumes": []object{{
			"ID": "data", "Namespace": "shop", "ExternalID": strings.ToUpper(idA), "CurrentWriters": 1,
		}}}, want: "data"},
		"claimed by nobody": {change: answers{
			"/v1/volumes": []object{volumeOf("data", 0)}, "/v1/volume/csi/data": claimedBy(),
		}},
		"unknown to Nomad": {change: answers{"/v1/volumes": []object{}}},
		"registered twice, claimed under the second ID": {change: answers{
			"/v1/volumes":         []object{volumeOf("data", 0), volumeOf("same", 1)},
			"/v1/volume/csi/same": claimedBy(nodeB),
		}, want: "same"},
		"registered twice, the first is claimed elsewhere": {change: answers{
			"/v1/volumes":         []object{volumeOf("data", 1), volumeOf("same", 1)},
			"/v1/volume/csi/data": claimedBy(nodeA),
			"/v1/volume/csi/same": claimedBy(nodeB),
		}, want: "same"},
		"the client is not known":               {change: answers{"/v1/volume/csi/data": claimedBy("gone")}, want: "data"},
		"the client is lost":                    {change: answers{"/v1/volume/csi/data": claimedBy(nodeA)}.and(lostClient(here)), want: "data"},
		"a lost client is another node":         {change: answers{"/v1/volume/csi/data": claimedBy(nodeA)}.and(lostClient("instance-c"))},
		"the plugin is gone":                    {change: answers{"/v1/plugin/csi/oxide": nil}, want: "data"},
		"an allocation has ended":               {change: answers{"/v1/volume/csi/data": object{"ID": "data", "PluginID": "oxide", "Allocations": []object{{"ID": allocWaits, "Name": "web", "NodeID": nodeB, "ClientStatus": "lost"}}}}, want: "data"},
		"the volume fails":                      {change: answers{"/v1/volume/csi/data": refusal(403)}, err: true},
		"the volume is gone after the list":     {change: answers{"/v1/volume/csi/data": nil}, err: true},
		"the list fails":                        {change: answers{"/v1/volumes": refusal(500)}, err: true},
		"the list is no list of Nomad's":        {change: answers{"/v1/volumes": "<html>"}, err: true},
		"the plugin fails":                      {change: answers{"/v1/plugin/csi/oxide": refusal(403)}, err: true},
		"the client fails":                      {change: answers{"/v1/volume/csi/data": claimedBy(nodeA), "/v1/plugin/csi/oxide": onlyB(), "/v1/node/" + nodeA: refusal(500)}, err: true},
		"management token":                      {change: answers{"/v1/acl/token/self": object{"Type": "management"}}, want: "data"},
		"identity of the job":                   {change: identityWith(namespaceRule("*", all...)), want: "data"},
		"identity with more rights":             {change: identityWith(namespaceRule("*", all...), object{"Name": "shop", "Policy": "write"}), want: "data"},
		"identity without a policy":             {change: identityWith(), err: true},
		"identity that may only list":           {change: identityWith(namespaceRule("*", "csi-list-volume")), err: true},
		"identity of one namespace":             {change: identityWith(namespaceRule("shop", all...)), err: true},
		"identity that may not read jobs":       {change: identityWith(namespaceRule("*", all[:2]...)), err: true},
		"identity that another rule takes from": {change: identityWith(namespaceRule("*", all...), namespaceRule("secret", "deny")), err: true},
		"identity whose closest rule has less":  {change: identityWith(namespaceRule("*", all...), namespaceRule("team-*", "submit-job")), err: true},
		"identity whose policies are not known": {change: identityWith(namespaceRule("*", all...)).and(answers{"/v1/acl/policies": refusal(500)}), err: true},

		// Nomad does not know idB.
		"one that ends here has no claim":              {change: unclaimed.and(ends(nodeB, "data")), lost: both},
		"one that ends on another node has no claim":   {change: unclaimed.and(ends(nodeA, "data"))},
		"one that ends on an unknown client":           {change: unclaimed.and(ends("gone", "data")), lost: both},
		"one that ends on a lost client":               {change: unclaimed.and(ends(nodeA, "data")).and(lostClient(here)), lost: both},
		"one that ends on a lost client elsewhere":     {change: unclaimed.and(ends(nodeA, "data")).and(lostClient("instance-c"))},
		"one that ends without a plugin":               {change: unclaimed.and(ends(nodeB, "data")).and(answers{"/v1/plugins": []object{}}), lost: both},
		"one that ends has a claim":                    {change: ends(nodeB, "data").and(answers{"/v1/volume/csi/data": claimOf(allocEnds)}), want: "data"},
		"one that ends has lost one of its claims":     {change: unclaimed.and(ends(nodeB, "data", "more")).and(answers{"/v1/volume/csi/more": claimOf(allocEnds)}), lost: both},
		"one that ends has lost that of another disk":  {change: unclaimed.and(ends(nodeB, "more")).and(answers{"/v1/volume/csi/more": object{"ID": "more", "ExternalID": "other"}}), lost: both[:1]},
		"the volume of one that ends is unknown":       {change: unclaimed.and(ends(nodeB, "gone")), lost: both},
		"one that ends has no CSI volume":              {change: unclaimed.and(ends(nodeB))},
		"one that ends never started":                  {change: unclaimed.and(ends(nodeB, "data").with("ClientStatus", "pending"))},
		"one that ends has a task that delays its end": {change: unclaimed.and(ends(nodeB, "data").with("ClientStatus", "pending").with("TaskStates", object{"web": object{"StartedAt": time.Now()}})), lost: both},
		"one that ends has ended since":                {change: unclaimed.and(ends(nodeB, "data")).and(answers{"/v1/allocation/" + allocEnds: object{"ID": allocEnds, "DesiredStatus": "stop", "ClientStatus": "complete"}})},
		"one that ends is gone since":                  {change: unclaimed.and(ends(nodeB, "data")).and(answers{"/v1/allocation/" + allocEnds: nil})},
		"one that ends fails":                          {change: unclaimed.and(ends(nodeB, "data")).and(answers{"/v1/allocation/" + allocEnds: refusal(500)}), err: true},
		"its volume fails":                             {change: unclaimed.and(ends(nodeB, "data")).and(answers{"/v1/volume/csi/data": refusal(500)}), err: true},
		"its client fails":                             {change: unclaimed.and(ends(nodeA, "data")).and(answers{"/v1/plugin/csi/oxide": onlyB(), "/v1/node/" + nodeA: refusal(500)}), err: true},
		"the plugins fail while one ends":              {change: unclaimed.and(ends(nodeB, "data")).and(answers{"/v1/plugins": refusal(500)}), err: true},
		"the allocations that end are not listed":      {change: answers{"/v1/allocations": refusal(403)}, err: true},
		"they are no list of Nomad's":                  {change: answers{"/v1/allocations": nil}, err: true},
	} {
		t.Run(name, func(t *testing.T) {
			all := moved().and(test.change)
			maps.DeleteFunc(all, func(_ string, answer any) bool { return answer == nil })
			options, _ := serveNomad(t, all)
			node := test.node
			if node == "" {
				node = here
			}
			want := map[string]string{}
			if test.want != "" {
				want[idA] = fmt.Sprintf(text, test.want)
			}
			for _, id := range test.lost {
				want[id] = "allocation 5a7d9b11 (web), which was stopped and has not ended"
			}
			got, err := nomad.NewOperator(options).Claimed(t.Context(), node, []string{idB, idA})
			if test.err {
				if err == nil {
					t.Errorf("got %v without an error", got)
				}
				return
			}
			for id, by := range got {
				if said, _, lost := strings.Cut(by, ", and has lost its claim on volume "); lost {
					got[id] = said
				}
			}
			if diff := cmp.Diff(want, got); diff != "" || err != nil {
				t.Errorf("(-want +got): %s%v", diff, err)
			}
		})
	}
}

// and adds answers.
func (a answers) and(more answers) answers {
	all := maps.Clone(a)
	maps.Copy(all, more)
	return all
}

const allocEnds = "5a7d9b11-0000-4000-8000-00000000e4d5"

// ends has an allocation that was stopped and still runs on a client, and whose group uses these volumes.
func ends(client string, sources ...string) answers {
	volumes := object{}
	for _, source := range sources {
		volumes[source] = object{"Type": "csi", "Source": source}
	}
	it := object{
		"ID": allocEnds, "Name": "web", "Namespace": "shop", "NodeID": client, "TaskGroup": "web", "ClientStatus": "running",
		"DesiredStatus": "stop", "Job": object{"TaskGroups": []object{{"Name": "web", "Volumes": volumes}}},
	}
	return answers{"/v1/allocations": []object{it}, "/v1/allocation/" + allocEnds: it}
}

// with changes the allocation that ends.
func (a answers) with(key string, value any) answers {
	a.at("/v1/allocation/" + allocEnds)[key] = value
	return a
}

// claimOf is a volume with a claim of an allocation on the client nodeB.
func claimOf(allocation string) object {
	v := claimedBy(nodeB)
	v["Allocations"].([]object)[0]["ID"] = allocation
	return v
}

// An allocation that Nomad has deleted still counts in the list, and its client is not known.
func TestClaimOfADeletedAllocation(t *testing.T) {
	all := moved()
	all["/v1/volumes"] = []object{volumeOf("data", 2)}
	options, _ := serveNomad(t, all)
	got, err := nomad.NewOperator(options).Claimed(t.Context(), "instance-c", []string{idA})
	if err != nil || !strings.HasPrefix(got[idA], "an allocation that Nomad has deleted") {
		t.Errorf("got %v, %v", got, err)
	}
}

// One question is about all volumes of a node: it takes one list, and a request for each volume with a claim.
func TestOneQuestionForAllVolumes(t *testing.T) {
	all := moved()
	volumes, ids := []object{}, []string{}
	for i := range 10 {
		id := fmt.Sprintf("0e5b9f34-7c1d-4a02-8f6e-1b2c3d4e5f%02d", i)
		name, claims := fmt.Sprint("v", i), i%2
		volumes = append(volumes, object{"ID": name, "Namespace": "shop", "ExternalID": id, "CurrentWriters": claims})
		all["/v1/volume/csi/"+name] = claimedBy(nodeB)
		ids = append(ids, id)
	}
	all["/v1/volumes"] = volumes
	options, calls := serveNomad(t, all)
	got, err := nomad.NewOperator(options).Claimed(t.Context(), "instance-b", ids)
	if err != nil || len(got) != 5 {
		t.Errorf("got %v, %v", got, err)
	}
	if len(*calls) != 1+1+5+1+1 { // the token, the list, the volumes with claims, their plugin, allocations that end
		t.Errorf("calls %v", *calls)
	}
}

// A disk can have several volumes in Nomad.
func TestRegistered(t *testing.T) {
	all := moved()
	all["/v1/volumes"] = []object{volumeOf("data", 0), volumeOf("same", 1), {
		"ID": "other", "Namespace": "shop", "ExternalID": idB,
	}, {"ID": "data", "Namespace": "blue", "ExternalID": strings.ToUpper(idA)}}
	options, _ := serveNomad(t, all)
	got, err := nomad.NewOperator(options).Registered(t.Context(), idA)
	if diff := cmp.Diff([]string{"shop/data", "shop/same", "blue/data"}, got); diff != "" || err != nil {
		t.Errorf("(-want +got): %s%v", diff, err)
	}
	all["/v1/volumes"] = refusal(403)
	if got, err := nomad.NewOperator(options).Registered(t.Context(), idA); err == nil {
		t.Errorf("got %v without an error", got)
	}
}

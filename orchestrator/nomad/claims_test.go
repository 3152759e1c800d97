// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package nomad_test

import (
	"fmt"
	"maps"
	"strings"
	"testing"

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
	both := []string{"csi-list-volume", "csi-read-volume"}
	for name, test := range map[string]struct {
		change answers
		node   string
		want   string
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
		"identity of the job":                   {change: identityWith(namespaceRule("*", both...)), want: "data"},
		"identity with more rights":             {change: identityWith(namespaceRule("*", both...), object{"Name": "shop", "Policy": "write"}), want: "data"},
		"identity without a policy":             {change: identityWith(), err: true},
		"identity that may only list":           {change: identityWith(namespaceRule("*", "csi-list-volume")), err: true},
		"identity of one namespace":             {change: identityWith(namespaceRule("shop", both...)), err: true},
		"identity that another rule takes from": {change: identityWith(namespaceRule("*", both...), namespaceRule("secret", "deny")), err: true},
		"identity whose closest rule has less":  {change: identityWith(namespaceRule("*", both...), namespaceRule("team-*", "submit-job")), err: true},
		"identity whose policies are not known": {change: identityWith(namespaceRule("*", both...)).and(answers{"/v1/acl/policies": refusal(500)}), err: true},
	} {
		t.Run(name, func(t *testing.T) {
			all := moved()
			maps.Copy(all, test.change)
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
			got, err := nomad.NewOperator(options).Claimed(t.Context(), node, []string{idB, idA})
			if test.err {
				if err == nil {
					t.Errorf("got %v without an error", got)
				}
				return
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
	if len(*calls) != 1+1+5+1 { // the token, the list, the volumes with claims, their plugin
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

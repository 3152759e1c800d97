// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package nomad_test

import (
	"maps"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator/nomad"
)

// moved is a Nomad with a volume of another namespace, claimed from the client nodeB. The plugin runs there and on
// nodeA.
func moved() answers {
	return answers{
		"/v1/acl/token/self":  refusal(400), // ACLs are off
		"/v1/volumes":         []object{volumeOf("data", 1)},
		"/v1/volume/csi/data": claimedBy(nodeB),
		"/v1/plugin/csi/oxide": object{"ID": "oxide", "Nodes": object{
			nodeA: object{"NodeInfo": object{"ID": "instance-a"}}, nodeB: object{"NodeInfo": object{"ID": "instance-b"}},
		}},
		"/v1/nodes":       []object{{"ID": nodeA}, {"ID": nodeB}},
		"/v1/plugins":     []object{{"ID": "oxide", "Provider": "csi.oxide.computer"}},
		"/v1/allocations": []object{},
	}
}

// volumeOf is a volume in a list, with claims to write it.
func volumeOf(name string, claims int) object {
	return object{
		"ID": name, "Namespace": "shop", "ExternalID": idA, "Provider": "csi.oxide.computer", "CurrentWriters": claims,
	}
}

// claimedBy is a volume with a claim of an allocation on each client.
func claimedBy(clients ...string) object {
	claims := []object{}
	for _, client := range clients {
		claims = append(claims, object{"ID": allocWaits, "Name": "web", "NodeID": client, "ClientStatus": "running"})
	}
	return object{"ID": "data", "PluginID": "oxide", "Allocations": claims}
}

// onlyB is the plugin after the other client was lost.
func onlyB() object {
	return object{"ID": "oxide", "Nodes": object{nodeB: object{"NodeInfo": object{"ID": "instance-b"}}}}
}

// clientWith is a client that says what node ID its plugin has.
func clientWith(id, instance string) object {
	return object{"ID": id, "CSINodePlugins": object{"oxide": object{"NodeInfo": object{"ID": instance}}}}
}

func TestMoved(t *testing.T) {
	for name, test := range map[string]struct {
		change     answers
		moved, err bool
	}{
		"claimed by the asking node": {moved: true},
		"the ID is written otherwise": {change: answers{"/v1/volumes": []object{{
			"ID": "data", "Namespace": "shop", "ExternalID": strings.ToUpper(idA), "CurrentWriters": 1,
		}}}, moved: true},
		"claimed by nobody": {change: answers{
			"/v1/volumes": []object{volumeOf("data", 0)}, "/v1/volume/csi/data": claimedBy(),
		}},
		"claimed by another node":     {change: answers{"/v1/volume/csi/data": claimedBy(nodeA)}},
		"claimed by both":             {change: answers{"/v1/volume/csi/data": claimedBy(nodeB, nodeA)}},
		"claimed by an unknown node":  {change: answers{"/v1/volume/csi/data": claimedBy("gone")}},
		"an allocation was deleted":   {change: answers{"/v1/volumes": []object{volumeOf("data", 2)}}},
		"unknown to Nomad":            {change: answers{"/v1/volumes": []object{}}},
		"deleted since it was listed": {change: answers{"/v1/volume/csi/data": nil}, err: true},
		"registered twice": {change: answers{
			"/v1/volumes":         []object{volumeOf("data", 1), volumeOf("same", 1)},
			"/v1/volume/csi/same": claimedBy(nodeA),
		}},
		"the holder is lost": {change: answers{
			"/v1/plugin/csi/oxide": onlyB(), "/v1/node/" + nodeA: clientWith(nodeA, "instance-a"),
		}, moved: true},
		"the holder is another machine": {change: answers{
			"/v1/plugin/csi/oxide": onlyB(), "/v1/node/" + nodeA: clientWith(nodeA, "instance-c"),
		}},
		"the token may not see all": {change: identityWith(namespaceRule("default", "csi-list-volume", "csi-read-volume")),
			err: true},
		"an allocation there has lost its claim":  {change: ends(nodeA, "gone"), err: true},
		"an allocation here has lost its claim":   {change: ends(nodeB, "gone"), moved: true},
		"the allocations that end are not listed": {change: answers{"/v1/allocations": refusal(403)}, err: true},
		"the list fails":                          {change: answers{"/v1/volumes": refusal(500)}, err: true},
		"the volume fails":                        {change: answers{"/v1/volume/csi/data": refusal(403)}, err: true},
		"the plugin fails":                        {change: answers{"/v1/plugin/csi/oxide": refusal(403)}, err: true},
		"the clients fail":                        {change: answers{"/v1/plugin/csi/oxide": onlyB(), "/v1/nodes": refusal(403)}, err: true},
		"the client fails": {change: answers{
			"/v1/plugin/csi/oxide": onlyB(), "/v1/node/" + nodeA: refusal(500),
		}, err: true},
	} {
		t.Run(name, func(t *testing.T) {
			all := moved()
			maps.Copy(all, test.change)
			maps.DeleteFunc(all, func(_ string, answer any) bool { return answer == nil })
			options, _ := serveNomad(t, all)
			got, err := nomad.NewOperator(options).Moved(t.Context(), idA, "instance-a", "instance-b")
			if got != test.moved || (err != nil) != test.err {
				t.Errorf("moved %t, %v; want %t, an error: %t", got, err, test.moved, test.err)
			}
		})
	}
}
